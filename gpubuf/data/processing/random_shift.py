"""Random shift of images."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from gpubuf.data.processing.base import Process, as_keys
from gpubuf.data.storage.layout import Key, Leaf
from gpubuf.kernels.transitions import MAX_PAD


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
        self._sizes: dict[Key, tuple[int, int]] = {}

    def check(self, leaves: Sequence[Leaf]) -> None:
        """Raise unless the batch has these keys, with rows of two dimensions or more, of elements of up to 8 bytes."""
        for leaf, _ in self.served_leaves(leaves):
            if len(leaf.shape) < 2:
                raise ValueError(f"RandomShift needs images [..., H, W], but rows of {leaf.name} are of {leaf.shape}")
            if leaf.dtype.itemsize > 8:
                raise ValueError(
                    f"RandomShift moves elements of up to 8 bytes, but those of {leaf.name} are {leaf.dtype}"
                )

    def bind(self, leaves: Sequence[Leaf], envs: int, device: torch.device) -> None:
        """Note the sizes of the images."""
        self._sizes = {leaf.key: (leaf.shape[-2], leaf.shape[-1]) for leaf, _ in self.served_leaves(leaves)}

    def options(self, key: Key) -> dict[str, Any]:
        """The largest shift and the size of an image."""
        if key not in self._sizes:
            return {}
        height, width = self._sizes[key]
        return {"pad": self.pad, "height": height, "width": width}

    def __repr__(self) -> str:
        return f"RandomShift({list(self.keys)}, pad={self.pad})"
