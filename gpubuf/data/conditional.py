"""Writing rows back in TorchRL's terms: which entries were applied, and which lost to a newer version."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gpubuf.data.storage.codecs import as_numbers, stored_as
from gpubuf.data.storage.layout import as_key, as_written
from gpubuf.data.storage.tensor_storage import TensorStorage


@dataclass(frozen=True)
class ConditionalUpdateResult:
    """The fate of each entry of a conditional update.

    Attributes:
        updated: bool ``[n]``: the row was still there, and was written.
        version_rejected: bool ``[n]``: the row was still there, but has a version that is not older, or another entry
            of the update has a higher one. None if no versions were given.
    """

    updated: Tensor
    version_rejected: Tensor | None = None

    @property
    def batch_size(self) -> torch.Size:
        """``[n]``."""
        return self.updated.shape

    @property
    def updated_count(self) -> int:
        """Number of entries that were written. Synchronises."""
        return int(self.updated.sum())

    @property
    def version_rejected_count(self) -> int:
        """Number of entries that lost to a version. Synchronises."""
        return 0 if self.version_rejected is None else int(self.version_rejected.sum())

    @property
    def stale_count(self) -> int:
        """Number of entries whose row had been overwritten. Synchronises."""
        return self.updated.numel() - self.updated_count - self.version_rejected_count


class UnknownKeyError(KeyError, ValueError):
    """A key that is not stored. A KeyError too, as TorchRL raises it."""

    # That of KeyError is the repr of its argument.
    __str__ = ValueError.__str__


def judged(
    storage: TensorStorage,
    positions: Tensor,
    generation: Tensor,
    version_key: Any,
    incoming: Tensor | None,
    newer: bool,
) -> ConditionalUpdateResult:
    """Which entries are to be written. No host sync.

    Args:
        storage: where the rows lie.
        positions: of the entries' rows, int64 ``[n]``.
        generation: that their rows had, int64 ``[n]``.
        version_key: a stored key of one number a row.
        incoming: the entries' versions, ``[n, ...]`` as their key has them; None: no versions.
        newer: whether an entry of the same version as the row loses.
    """
    # Where no row is stored there is no generation to compare.
    live = (storage.generations(positions) == generation) & (generation >= 0)
    if incoming is None:
        return ConditionalUpdateResult(live)
    number = storage.batch_layout.position(as_key(version_key))
    assert number is not None
    incoming, stored = _comparable(incoming), _comparable(storage.gather_key(number, torch.where(live, positions, 0)))
    accepted = live & ((incoming > stored) if newer else (incoming >= stored))
    # Of several entries for a row the one of the highest version wins, and of these the last. Others are alone.
    n = positions.numel()
    own = torch.where(accepted, positions, -1 - torch.arange(n, device=positions.device))
    order = incoming.argsort(stable=True)
    order = order.gather(0, own.gather(0, order).argsort(stable=True))
    groups = own.gather(0, order)
    last = torch.cat((groups[1:] != groups[:-1], groups.new_ones(min(n, 1), dtype=torch.bool)))
    wins = torch.zeros_like(accepted).scatter(0, order, last)
    return ConditionalUpdateResult(accepted & wins, live & ~(accepted & wins))


def versions(storage: TensorStorage, version_key: Any, version: Any, n: int, like: Tensor) -> Tensor:
    """Incoming versions as their key has them, ``[n, ...]`` for ``n`` entries, on the device of ``like``.

    Raises:
        ValueError: there are not as many, or the key is not stored, has several numbers a row, or can't hold one.
    """
    tensor = as_numbers(version)
    if tensor.numel() not in (1, n):
        raise ValueError(f"version must be one number or {n} of them, got the shape {tuple(tensor.shape)}")
    key = as_key(version_key)
    number = storage.written_layout.position(key)
    if number is None:
        hint = ". Dotted-string keys are not nested ones: write a tuple" if "." in key[0] else ""
        raise UnknownKeyError(f"version_key {as_written(key)!r} is not stored{hint}")
    leaf = storage.written_layout.leaves[number]
    if leaf.n_elements != 1:
        raise ValueError(f"version_key {as_written(key)!r} has {leaf.n_elements} numbers a row, not one")
    # Rounded, an older version could pass for a newer one.
    held = stored_as(tensor, leaf.dtype, leaf.name, storage.ring, exact=True)
    return held.reshape(-1).to(like.device).expand(n).reshape(n, *leaf.shape)


def _comparable(version: Tensor) -> Tensor:
    """Numbers ``[n]`` in the same order, of a dtype that can be compared and sorted."""
    numbers = version.reshape(-1)
    if numbers.is_floating_point():
        return numbers
    wide = numbers.to(torch.int64)
    return wide ^ -(2**63) if numbers.dtype is torch.uint64 else wide
