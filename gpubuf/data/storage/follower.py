"""What follows the rows of a storage, and what asks something of them."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, Protocol

from torch import Tensor

from gpubuf.data.storage.layout import RowLayout
from gpubuf.data.storage.placement import IndexBytes
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


class Companion(Protocol):
    """What a buffer keeps about the rows, a sampler: it refers to the storage, which tells it of all that happens."""

    @property
    def hears(self) -> bool:
        """Whether :meth:`on_write` does anything."""

    def on_write(self, positions: Tensor, priority: Tensor | None) -> None:
        """As :meth:`Follower.on_write`, once for every write. ``priority``: float32 ``[n]``, if rows came with some."""

    def rebuild(self) -> None:
        """As :meth:`Follower.rebuild`."""

    def depends_on(self, keys: Collection[int]) -> bool:
        """Whether :meth:`rebuild` reads any of these stored keys (positions in the layout)."""

    def mark_update(self, index: Any) -> None:
        """Rows at ``index`` were written by others: they are new. It has to :meth:`rebuild`, too."""

    def on_end(self) -> None:
        """The newest rows were marked as ends of their trajectories."""

    def mend(self) -> None:
        """An operation was interrupted: compute anew what is derived from rows or priorities."""

    def empty(self) -> None:
        """All rows are forgotten, or replaced by others."""

    def free(self) -> None:
        """All rows are forgotten, and memory is released."""

    def move(self) -> None:
        """The rows are on another device: follow them. May synchronise."""

    def check_rows(self, layout: RowLayout, ndim: int) -> None:
        """Raise if the first rows, which are about to be written, lack what it needs."""

    def index_bytes(self, shape: tuple[int, ...], device_type: str) -> IndexBytes:
        """Bytes that it needs for a storage of ``shape`` to come."""


class Reader(Protocol):
    """Reads rows in a way of its own, and needs to know something of them, such as where trajectories end."""

    recipe: Recipe

    @property
    def needs_ends(self) -> bool:
        """Whether it has to know where trajectories end."""

    def check_rows(self, schema: Schema) -> None:
        """Raise if rows of ``schema`` lack what it needs."""
