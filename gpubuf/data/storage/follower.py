"""What follows the rows of a storage, and what asks something of them."""

from __future__ import annotations

from typing import Any, Protocol

from torch import Tensor

from gpubuf.data.storage.plan import Recipe
from gpubuf.data.storage.schema import Schema


class Follower(Protocol):
    """What a storage keeps about its rows: marks, ends, entries that are not tensors, next observations stored once."""

    @property
    def nbytes(self) -> int:
        """Bytes that are taken beside the rows on the device that does the work."""

    def on_write(self, index: Tensor) -> None:
        """Rows were written at ``index``, int64 ``[n]``, flat. Can be done again. No host sync."""

    def rebuild(self) -> None:
        """Rows were changed in place: compute anew what is derived from them. O(capacity). No host sync."""

    def clear(self) -> None:
        """All rows are forgotten. No host sync."""

    def state(self, size: int) -> dict[str, Any]:
        """Entries of the storage's state, for its first ``size`` rows: views. May synchronise."""

    def load(self, state: dict[str, Any], order: Tensor | None) -> None:
        """Restore :meth:`state`, after the rows. ``order``: as :meth:`TensorStorage.load_state_dict` returns it."""


class Reader(Protocol):
    """Reads rows in a way of its own, and needs to know something of them, such as where trajectories end."""

    recipe: Recipe

    @property
    def needs_ends(self) -> bool:
        """Whether it has to know where trajectories end."""

    def check_rows(self, schema: Schema) -> None:
        """Raise if rows of ``schema`` lack what it needs."""
