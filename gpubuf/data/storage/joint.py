"""Two storages as one table of rows, so that one launch gathers a batch from both."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from gpubuf.data.recording import current_recording, refuse_in_capture
from gpubuf.data.storage.tensor_storage import TensorStorage
from gpubuf.kernels import rows
from gpubuf.kernels._registry import lazy, past_dispatcher, without_dispatch

_gather = without_dispatch(rows.gather, trusted=True)
_gather_into = lazy("gpubuf.kernels.rows._cpu:gather_into")


class JointRows:
    """The rows of two storages: position p of the first, and ``first.max_size + p`` for position p of the second.

    Args:
        first, second: the storages.
    """

    def __init__(self, first: TensorStorage, second: TensorStorage) -> None:
        self.first, self.second = first, second
        self.table: Tensor | None = None
        self._made_of: tuple[Any, ...] = ()

    def usable(self) -> bool:
        """Whether both lie so that one table can describe them; the table is then up to date.

        Their rows have the same keys in the same order, the same bytes from row to row, and the same device works on
        them. Neither is in two places.
        """
        now = self._places()
        if len(now) != len(self._made_of) or not all(a is b for a, b in zip(now, self._made_of, strict=True)):
            entries = self._entries()
            if entries is None:
                self.table = None
            else:
                refuse_in_capture("the first draw from two buffers finds their rows: sample once before")
                table = torch.tensor(entries, dtype=torch.int64).reshape(-1, rows.ENTRY)
                if self.table is not None and self.table.shape == table.shape:
                    # In place: a captured graph reads the addresses from here.
                    self.table.copy_(table, non_blocking=True)
                else:
                    self.table = table.to(self.first.device, non_blocking=True)
            self._made_of = now
        recording = current_recording()
        if self.table is not None and recording is not None:
            recording.before(self, self._follow)
            recording.holds(self, "table")
        return self.table is not None

    def _follow(self) -> None:
        """Before a replay: the storages may have moved."""
        self.usable()

    def _places(self) -> tuple[Any, ...]:
        storages = self.first, self.second
        return tuple(part for storage in storages for part in (storage._layout, storage._placement, storage._ring))

    def _entries(self) -> list[list[int]] | None:
        first, second = self.first, self.second
        if not first.initialized or not second.initialized or first.device != second.device:
            return None
        if first.layout.leaves != second.layout.leaves or first.layout.root != second.layout.root:
            return None
        found: list[list[int]] = []
        for leaf, *columns in zip(first.layout.leaves, first.columns, second.columns, strict=True):
            if any(len(column.parts) > 1 for column in columns):
                return None
            one, other = (
                column.entry(leaf.row_bytes, math.prod(storage.shape[1:]))
                for column, storage in zip(columns, (first, second), strict=True)
            )
            stride = one[rows.ROW_STRIDE]
            if stride != other[rows.ROW_STRIDE]:
                return None
            found.append(
                rows.table_entry(
                    one[rows.DEVICE_ROWS], leaf.row_bytes, first.max_size, other[rows.DEVICE_ROWS], stride=stride
                )
            )
        return found

    def gather(self, index: Tensor) -> list[Tensor]:
        """Copies of rows: one tensor ``[n, ...]`` per key. One launch, no host sync.

        Args:
            index: int64 ``[n]``, contiguous, positions in both. A GPU counts those out of range as the first's faults.
        """
        table, layout, n = self.table, self.first.layout, index.numel()
        assert table is not None
        capacity = self.first.max_size + self.second.max_size
        if past_dispatcher(table):
            tensors = layout.allocate(n)
            _gather_into(table, self.first.ring, index, capacity, tensors)
            return tensors
        arena, _ = _gather(table, self.first.ring, index, capacity, layout.arena(n).n_bytes)
        return layout.cut(arena, n)


def generations(storage: TensorStorage, positions: Tensor) -> Tensor:
    """Write generations of rows, int64 ``[n]``. No host sync."""
    return storage.counters.with_rewrites(positions, storage.counters.laps(positions))
