"""Augmentation and clipping of batches: Clip, Mirror, RandomShift."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal, get_args

import numpy as np
import torch
from torch import Tensor

from gpubuf.data.processing.base import Process, as_keys, check_bounds, require_numbers
from gpubuf.data.storage.layout import Key, Leaf, address, as_key, as_written
from gpubuf.kernels.rows import BY_CHANCE, DOUBLED, MAX_PAD


class Clip(Process):
    """Cuts the numbers of a batch to an interval, in the launch that copies the rows. The stored rows stay as they are.

    It comes last: normalised keys are cut after they have been normalised. A sum of rewards (n-step) is cut as a sum.
    Several bounds on one key all hold. NaN stays NaN.

    Args:
        keys: a key, or a list of keys. A root key stands for its twin under "next" too. Integers are compared as
            float32, exact to 2**24.
        low, high: the bounds; infinite ones are none.

    Raises:
        ValueError: ``low`` is above ``high``, or one is NaN.
    """

    def __init__(self, keys: Any, low: float = -math.inf, high: float = math.inf) -> None:
        self.keys = as_keys(keys)
        self.low, self.high = check_bounds(low, high)

    def check_leaf(self, leaf: Leaf, origin: Key) -> None:
        """Raise unless the batch has numbers there."""
        require_numbers("Clip", leaf)

    def options_of(self, leaf: Leaf, origin: Key) -> dict[str, Any]:
        """The bounds."""
        return {"low": self.low, "high": self.high}

    def __repr__(self) -> str:
        return f"Clip({list(self.keys)}, low={self.low}, high={self.high})"


Mode = Literal["random", "double"]


class Mirror(Process):
    """Mirrors rows of a batch, in the launch that copies them: all keys of a row, or none.

    Element i of a mirrored row is ``sign[i] * row[permutation[i]]``, with the elements of a row counted as they lie in
    memory. Keys that are not named (rewards, flags) are the same in the mirror. Mirroring comes before normalisation.

    Args:
        images: for each key ``(permutation, sign)``: a permutation of the elements of a row, as integers, and a number
            for each element, or one for all. A root key stands for its twin under "next" too. Integers are computed in
            float32, exact to 2**24.
        mode: ``"random"`` mirrors each row of a batch with probability one half. ``"double"`` makes a batch of 2n rows
            of n drawn ones: as they are, and then all of them mirrored, in the same order. Index, generation and
            weight come twice then.

    Raises:
        ValueError: a permutation is none, the sign has another length, or the mode is unknown.

    As in FastTD3 (Seo et al. 2025) and in "Symmetry Considerations for Learning Task Symmetric Robot Policies"
    (Mittal et al. 2024).
    """

    slot = "mirrors"

    def __init__(self, images: Mapping[Any, tuple[Any, Any]], mode: Mode = "random") -> None:
        if mode not in get_args(Mode):
            raise ValueError(f"mode must be one of {get_args(Mode)}, got {mode!r}")
        self.mode: Mode = mode
        self._images = {as_key(key): _checked(as_key(key), *image) for key, image in images.items()}
        self.keys = tuple(self._images)
        if not self.keys:
            raise ValueError("Mirror needs a key to mirror")

    @property
    def mirror(self) -> int:
        """The mirroring of a batch, for the kernels."""
        return DOUBLED if self.mode == "double" else BY_CHANCE

    def check_leaf(self, leaf: Leaf, origin: Key) -> None:
        """Raise unless the batch has numbers there, as many per row as the permutation."""
        require_numbers("Mirror", leaf)
        permutation, _ = self._images[origin]
        if permutation.numel() != leaf.n_elements:
            raise ValueError(
                f"Mirror has a permutation of {permutation.numel()} elements for {as_written(origin)!r}, whose rows "
                f"have {leaf.n_elements}"
            )

    def bind(self, leaves: Sequence[Leaf], envs: int, device: torch.device) -> None:
        """Have permutations and signs on the device."""
        self._images = {key: (p.to(device), s.to(device)) for key, (p, s) in self._images.items()}

    def options_of(self, leaf: Leaf, origin: Key) -> dict[str, Any]:
        """The permutation and the signs."""
        permutation, sign = self._images[origin]
        return {"permutation": address(permutation), "sign": address(sign)}

    def tensors(self) -> list[Tensor]:
        """Permutations and signs."""
        return [tensor for image in self._images.values() for tensor in image]

    def __repr__(self) -> str:
        return f"Mirror({list(self.keys)}, mode={self.mode!r})"


def _checked(key: Key, permutation: Any, sign: Any) -> tuple[Tensor, Tensor]:
    """``(int32 [elements], float32 [elements])``, in memory of their own."""
    numbers, signs = (np.asarray(value.cpu() if isinstance(value, Tensor) else value) for value in (permutation, sign))
    numbers, signs = numbers.reshape(-1), signs.reshape(-1)
    if numbers.dtype.kind not in "iu" or sorted(numbers) != list(range(len(numbers))):
        raise ValueError(f"{as_written(key)!r}: {permutation!r} is not a permutation of 0 .. {len(numbers) - 1}")
    if len(signs) not in (1, len(numbers)) or not np.isfinite(signs).all():
        raise ValueError(f"{as_written(key)!r}: expected one sign, or {len(numbers)}, finite, got {sign!r}")
    return torch.tensor(numbers.tolist(), dtype=torch.int32, device="cpu"), torch.tensor(
        np.broadcast_to(signs, numbers.shape).tolist(), dtype=torch.float32, device="cpu"
    )


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

    slot = "shifts"

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
