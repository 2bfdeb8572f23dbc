"""The memory of a buffer, and moving it while it is in use: rows key by key, in chunks, then the sampler's data."""

from __future__ import annotations

import math

import torch

from gpubuf.data.samplers.base import Sampler
from gpubuf.data.storage import host_memory
from gpubuf.data.storage.column import Column, new_columns, records
from gpubuf.data.storage.placement import AUTO, DISK, SPLIT, IndexBytes, MemoryReport, Placement, place, readable
from gpubuf.data.storage.share_next import Sharing
from gpubuf.data.storage.storage import TensorStorage
from gpubuf.terminal import BINARY_BYTES, Advance, progress_bar, show_nothing

CHUNK_BYTES = 1 << 28
"""Bytes that are copied at a time."""

LARGE_BYTES = 1 << 30
"""From this size on a move shows a progress bar, on a terminal."""


def move(storage: TensorStorage, sampler: Sampler, requested: torch.device | str, progress: bool | None = None) -> None:
    """Move a storage and what ``sampler`` keeps about it. See :meth:`gpubuf.ReplayBuffer.to`.

    Raises:
        ValueError: ``requested`` is ``"auto"``.
        NotImplementedError: the storage has a place of its own.
        RuntimeError: there is no such device, or not enough memory there; all is then where it was.
    """
    if requested == AUTO:
        raise ValueError("a buffer moves to 'cpu', 'cuda', 'pinned', 'split' or a torch.device; 'auto' is for new ones")
    if not storage.relocatable:
        raise NotImplementedError(f"the rows of a {type(storage).__name__} stay where they are")
    before, shape = storage.placement, tuple(storage.shape)
    # An index that is on the GPU already needs no more room there. A split may use the room of the rows there.
    on_gpu = before is not None and before.device.type == "cuda"
    index = IndexBytes()
    if not on_gpu:
        index = sampler.index_beside(requested, shape) + storage.derived_bytes(requested, shape)
    aside, sides = 0, list[torch.Tensor]()
    if storage.sharing is not None:
        aside, sides = storage.sharing.entry_bytes, storage.sharing.sides
    held = sum(part.nbytes for part in [*storage.row_tensors, *sides] if part.is_cuda)
    target = place(requested, storage.nbytes - aside, index, shape, torch.device("cpu"), held, aside)
    if before is not None and not before.same_place(target):
        _move(storage, sampler, before, target, progress)
    storage.requested_device = requested


def _move(
    storage: TensorStorage, sampler: Sampler, before: Placement, target: Placement, progress: bool | None
) -> None:
    storage.refresh()
    for device in {before.device, target.device}:
        if device.type == "cuda":
            # The host is about to copy, too: nothing that was launched may still write rows.
            host_memory.synchronize(device)
    rows = _Rows(storage, before)
    try:
        moving = f"moving {readable(rows.n_bytes)} to {target.kind}"
        with progress_bar(moving, rows.n_bytes, progress, columns=BINARY_BYTES, least=LARGE_BYTES) as advance:
            rows.to(target, advance)
        storage.relocated(target)
        sampler.move()
    except BaseException:
        rows.to(before, show_nothing)
        storage.relocated(before)
        sampler.move()
        raise


class _Rows:
    """The rows of a storage, record by record, and where each record is."""

    def __init__(self, storage: TensorStorage, placement: Placement) -> None:
        self._columns, self._leaves, self._shape = storage.columns, storage.layout.leaves, tuple(storage.shape)
        self._records = records(self._leaves)
        self._steps = len(storage) // math.prod(storage.shape[1:])
        self._places = [placement] * len(self._records)
        self._sharing = storage.sharing
        self._side_places = [placement] * (0 if self._sharing is None else len(self._sharing.sides))
        self.n_bytes = len(storage) * storage.layout.row_bytes

    def to(self, target: Placement, advance: Advance) -> None:
        """Move every record that is not there yet, and release its memory before the next is allocated."""
        for number, record in enumerate(self._records):
            if self._places[number] is target:
                continue
            copies = new_columns([self._leaves[key] for key in record], self._shape, target)
            for key, copy in zip(record, copies, strict=True):
                self._copy(self._columns[key], copy, advance)
            # All at once: a record that was copied in part is still where it was.
            for key, copy in zip(record, copies, strict=True):
                self._columns[key] = copy
            self._places[number] = target
            del copies, copy
        if self._sharing is not None:
            self._move_sides(self._sharing, target)

    def _move_sides(self, sharing: Sharing, target: Placement) -> None:
        for number, leaf in enumerate(sharing.leaves.values()):
            if self._side_places[number] is not target:
                side = sharing.new_side(leaf, target)
                side.copy_(sharing.sides[number])
                sharing.sides[number], self._side_places[number] = side, target

    def _copy(self, column: Column, copy: Column, advance: Advance) -> None:
        step_bytes = column.nbytes // len(column)
        steps = max(CHUNK_BYTES // max(step_bytes, 1), 1)
        for start in range(0, self._steps, steps):
            stop = min(start + steps, self._steps)
            copy.write(start, column[start:stop])
            advance((stop - start) * step_bytes)


def report(storage: TensorStorage, sampler: Sampler, processing: int) -> MemoryReport:
    """The memory of a storage, its sampler and ``processing`` bytes for that of batches, and where it lies."""
    placement = storage.placement
    if placement is None:
        return MemoryReport(None, None, 0, 0, 0, 0)
    taken = sampler.memory()
    counters = storage.ring.nbytes + storage.table_bytes + sampler.random_bytes + processing
    kind = placement.kind if storage.relocatable else DISK
    on_host = sum(column.parts[1].nbytes for column in storage.columns) if placement.kind == SPLIT else 0
    index = taken.index + (0 if storage.end_bits is None else storage.end_bits.nbytes)
    index += 0 if storage.breaks is None else storage.breaks.nbytes
    index += 0 if storage.sharing is None else storage.sharing.link_bytes
    return MemoryReport(kind, str(placement.device), storage.nbytes, taken.tree, index, counters, on_host)
