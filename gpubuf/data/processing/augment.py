"""Augmentation and clipping of batches: RandomShift in the launch that copies the rows, Mirror and Clip after it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from tensordict import TensorDictBase
from torch import Tensor

from gpubuf.data.processing.base import Process, as_keys, check_bounds, replaced, tensor_at, with_twins
from gpubuf.data.storage.layout import Key, Leaf, as_key, as_written
from gpubuf.kernels.rows import MAX_PAD


class Clip:
    """Cuts numbers to an interval: a transform of batches, in plain PyTorch.

    ``transform=Clip(("next", "reward"), -1.0, 1.0)`` cuts what a batch has, of n-step rewards the sum. To clip each
    reward before the sum, clip what is written: ``buffer.append_transform(clip, invert=True)``. NaN stays NaN.

    Args:
        keys: a key, or a list of keys. A root key stands for its twin under "next" too.
        low, high: the bounds; infinite ones are none. Integers are compared as float32, exact to 2**24.

    Raises:
        ValueError: ``low`` is above ``high``, or one is NaN.
    """

    def __init__(self, keys: Any, low: float = -math.inf, high: float = math.inf) -> None:
        self.keys = as_keys(keys)
        self.low, self.high = check_bounds(low, high)

    def __call__(self, data: TensorDictBase) -> TensorDictBase:
        """A shallow copy of a batch, on any device, with these keys cut. No host sync.

        Raises:
            KeyError: a key is not there.
        """
        return replaced(data, with_twins(self.keys), lambda x, _: x.clamp(self.low, self.high).to(x.dtype), self.keys)

    def __repr__(self) -> str:
        return f"Clip({list(self.keys)}, low={self.low}, high={self.high})"


class Mirror:
    """Mirrors rows of a batch with probability one half: a transform, in plain PyTorch.

    All keys of a row are mirrored, or none: element i of a mirrored row is ``sign[i] * row[permutation[i]]``, with the
    elements of a row counted as they lie in memory. Keys that are not named (rewards, flags) are the same in the
    mirror. A row is what the first dimension of a batch counts: a window of steps is mirrored as a whole.

    ``process=`` comes before transforms. To normalise rows after they are mirrored give both as transforms:
    ``transform=Compose(mirror, Normalize(...))``.

    The random numbers are those of torch's global generator on the device of the batch.

    Args:
        images: for each key ``(permutation, sign)``: a permutation of the elements of a row, as integers, and a number
            for each element, or one for all. A root key stands for its twin under "next" too. Integers are computed in
            float32, exact to 2**24.
        mode: ``"random"``.

    Raises:
        ValueError: a permutation is none, the sign has another length, or the mode is another.

    As in FastTD3 (Seo et al. 2025) and in "Symmetry Considerations for Learning Task Symmetric Robot Policies"
    (Mittal et al. 2024).
    """

    def __init__(self, images: Mapping[Any, tuple[Any, Any]], mode: str = "random") -> None:
        if mode != "random":
            raise ValueError(
                f"mode must be 'random', got {mode!r}: torch.cat([batch, mirror.mirrored(batch)]) doubles a batch"
            )
        self._images = {as_key(key): _checked(as_key(key), *image) for key, image in images.items()}
        self.keys = tuple(self._images)
        if not self.keys:
            raise ValueError("Mirror needs a key to mirror")

    def __call__(self, data: TensorDictBase) -> TensorDictBase:
        """A shallow copy of a batch, on any device, with some rows mirrored. No host sync after the first call.

        Raises:
            KeyError: a key is not there.
            ValueError: its rows have another number of elements than the permutation.
        """
        chosen = torch.rand(len(data), device=tensor_at(data, self.keys[0]).device) < 0.5
        return self._mirrored(data, chosen)

    def mirrored(self, data: TensorDictBase) -> TensorDictBase:
        """As a call, with all rows mirrored."""
        return self._mirrored(data, None)

    def _mirrored(self, data: TensorDictBase, chosen: Tensor | None) -> TensorDictBase:
        lead = data.batch_size

        def change(value: Tensor, key: Key) -> Tensor:
            permutation, sign = self._images[key]
            if permutation.device != value.device:
                permutation, sign = self._images[key] = (permutation.to(value.device), sign.to(value.device))
            if permutation.numel() != value.shape[len(lead) :].numel():
                raise ValueError(
                    f"Mirror has a permutation of {permutation.numel()} elements for {as_written(key)!r}, whose rows "
                    f"have {value.shape[len(lead) :].numel()}"
                )
            image = value.reshape(*lead, -1).index_select(-1, permutation) * sign
            image = image.view(value.shape).to(value.dtype)
            return image if chosen is None else torch.where(chosen.view(-1, *[1] * (value.dim() - 1)), image, value)

        return replaced(data, with_twins(self.keys), change, self.keys)

    def __repr__(self) -> str:
        return f"Mirror({list(self.keys)})"


def _checked(key: Key, permutation: Any, sign: Any) -> tuple[Tensor, Tensor]:
    """``(int64 [elements], float32 [elements])``, in memory of their own."""
    numbers, signs = (np.asarray(value.cpu() if isinstance(value, Tensor) else value) for value in (permutation, sign))
    numbers, signs = numbers.reshape(-1), signs.reshape(-1)
    if numbers.dtype.kind not in "iu" or sorted(numbers) != list(range(len(numbers))):
        raise ValueError(f"{as_written(key)!r}: {permutation!r} is not a permutation of 0 .. {len(numbers) - 1}")
    if len(signs) not in (1, len(numbers)) or not np.isfinite(signs).all():
        raise ValueError(f"{as_written(key)!r}: expected one sign, or {len(numbers)}, finite, got {sign!r}")
    order = torch.tensor(numbers.tolist(), dtype=torch.int64, device="cpu")
    return order, torch.tensor(signs.tolist(), dtype=torch.float32, device="cpu").expand(len(order)).clone()


class RandomShift(Process):
    """Shifts images by up to ``pad`` pixels in both directions, in the launch that copies the rows.

    Each row has a shift of its own, uniform over ``-pad .. pad`` down and to the right, and all images of a row's key
    have the same one, as the frames of a stack must. Observation and next observation have different shifts. Pixels
    from beyond the border are those of the border: that is padding by repetition and a random crop.

    Args:
        keys: a key, or a list of keys, of images ``[..., H, W]`` of any dtype of up to 8 bytes. A root key stands for
            its twin under "next" too.
        pad: the largest shift, in pixels; up to 16383.

    Raises:
        ValueError: ``pad`` is out of range.

    As in DrQ (Kostrikov, Yarats, Fergus, "Image Augmentation Is All You Need", 2021), with whole pixels.
    """

    def __init__(self, keys: Any, pad: int = 4) -> None:
        self.keys = as_keys(keys)
        if not 1 <= pad <= MAX_PAD or pad != int(pad):
            raise ValueError(f"pad must be a whole number of 1 to {MAX_PAD}, got {pad}")
        self.pad = int(pad)

    def check_leaf(self, leaf: Leaf, origin: Key) -> None:
        """Raise unless the rows have two dimensions or more, of elements of up to 8 bytes."""
        if len(leaf.shape) < 2:
            raise ValueError(f"RandomShift needs images [..., H, W], but rows of {leaf.name} are of {leaf.shape}")
        if leaf.dtype.itemsize > 8:
            raise ValueError(f"RandomShift moves elements of up to 8 bytes, but those of {leaf.name} are {leaf.dtype}")

    def options_of(self, leaf: Leaf, origin: Key) -> dict[str, Any]:
        """The largest shift and the size of an image."""
        return {"pad": self.pad, "height": leaf.shape[-2], "width": leaf.shape[-1]}

    def __repr__(self) -> str:
        return f"RandomShift({list(self.keys)}, pad={self.pad})"
