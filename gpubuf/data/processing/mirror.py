"""Mirror augmentation: a robot that is symmetric may learn from each step and from its mirror image."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, get_args

import numpy as np
import torch
from torch import Tensor

from gpubuf.data.processing.base import Process, require_numbers
from gpubuf.data.storage.layout import Key, Leaf, address, as_key, as_written
from gpubuf.kernels.transitions import BY_CHANCE, DOUBLED

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
        self._served = self.serves()

    @property
    def mirror(self) -> int:
        """The mirroring of a batch, for the kernels."""
        return DOUBLED if self.mode == "double" else BY_CHANCE

    def check(self, leaves: Sequence[Leaf]) -> None:
        """Raise unless the batch has these keys, as numbers, with as many elements a row."""
        for leaf, origin in self.served_leaves(leaves):
            require_numbers("Mirror", leaf)
            permutation, _ = self._images[origin.key]
            if permutation.numel() != leaf.n_elements:
                raise ValueError(
                    f"Mirror has a permutation of {permutation.numel()} elements for {origin.name}, whose rows have "
                    f"{leaf.n_elements}"
                )

    def bind(self, leaves: Sequence[Leaf], envs: int, device: torch.device) -> None:
        """Have permutations and signs on the device."""
        self._images = {key: (p.to(device), s.to(device)) for key, (p, s) in self._images.items()}

    def options(self, key: Key) -> dict[str, Any]:
        """The permutation and the signs."""
        if key not in self._served:
            return {}
        permutation, sign = self._images[self._served[key]]
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
    return torch.tensor(numbers.tolist(), dtype=torch.int32), torch.tensor(
        np.broadcast_to(signs, numbers.shape).tolist(), dtype=torch.float32
    )
