"""The memory of a buffer, and moving it while it is in use: rows key by key, in chunks, then the sampler's data."""

from __future__ import annotations

from typing import TypeVar

import torch

from gpubuf.data.operation import operation
from gpubuf.data.parts import Assembled
from gpubuf.data.storage import host_memory
from gpubuf.data.storage.allocation import check_batches
from gpubuf.data.storage.placement import AUTO, DISK, SPLIT, IndexBytes, MemoryReport, Placement, place
from gpubuf.data.storage.share_next import Sharing
from gpubuf.data.storage.storage import TensorStorage
from gpubuf.terminal import Advance, progress_bar, show_nothing

CHUNK_BYTES = 1 << 28
"""Bytes that are copied at a time."""

LARGE_BYTES = 1 << 30
"""From this size on a move shows a progress bar, on a terminal."""


_Buffer = TypeVar("_Buffer", bound=Assembled)


@operation
def to(buffer: _Buffer, device: torch.device | str, *, progress: bool | None = None) -> _Buffer:
    """Move rows, index, counters and random state, while the buffer is in use. Batches go on as if it had not.

    One key after the other (small ones, which share a record, together), in chunks: no more is there twice at a
    time. Other threads wait until it is done.

    Args:
        buffer: the buffer.
        device: ``"cpu"``, ``"cuda"``, ``"pinned"``, ``"split"`` or a ``torch.device``.
        progress: whether to show a bar; default: for a GiB and more, on a terminal.

    Returns:
        The buffer itself. Synchronises.

    Raises:
        ValueError: ``device`` is ``"auto"``.
        NotImplementedError: the storage has a place of its own.
        RuntimeError: there is no such device, or no room there: the buffer is then where it was.
    """
    parts = buffer.parts
    parts.batches.discard()
    try:
        _move_to(parts.storage, device, progress)
        buffer.operation.ended()
    finally:
        parts.assemble()
    return buffer


def _move_to(storage: TensorStorage, requested: torch.device | str, progress: bool | None) -> None:
    if requested == AUTO:
        raise ValueError("a buffer moves to 'cpu', 'cuda', 'pinned', 'split' or a torch.device; 'auto' is for new ones")
    if not storage.allocation.relocatable:
        raise NotImplementedError(f"the rows of a {type(storage).__name__} stay where they are")
    if storage.initialized:
        check_batches(requested, storage.schema)
    rows, shape = storage.rows, tuple(storage.shape)
    aside = sum(side.nbytes for side in rows.sides)
    # An index that is on the GPU already needs no more room there. A split may use the room of the rows there.
    index = IndexBytes() if storage.ring.counters.is_cuda else storage.readers.derived_bytes(requested, shape)
    held = sum(part.nbytes for part in [*rows.columns.parts, *rows.sides] if part.is_cuda)
    target = place(requested, rows.columns.nbytes, index, shape, torch.device("cpu"), held, aside)
    if storage.initialized and not rows.placement.same_place(target):
        _move(storage, rows.placement, target, progress)
    storage.allocation.device = requested


def _move(storage: TensorStorage, before: Placement, target: Placement, progress: bool | None) -> None:
    storage.refresh()
    for device in {before.device, target.device}:
        if device.type == "cuda":
            # The host is about to copy, too: nothing that was launched may still write rows.
            host_memory.synchronize(device)
    rows = _Rows(storage, before)
    try:
        words = f"moving to {target.kind}"
        with progress_bar(words, rows.n_bytes, progress, binary=True, least=LARGE_BYTES) as advance:
            rows.to(target, advance)
        storage.relocated(target)
    except BaseException:
        rows.to(before, show_nothing)
        storage.relocated(before)
        raise


class _Rows:
    """The rows of a storage, and where each record is."""

    def __init__(self, storage: TensorStorage, placement: Placement) -> None:
        self._storage = storage
        self._places = [placement] * len(storage.columns.records)
        self._side_places = [placement] * len(storage.rows.sides)
        self.n_bytes = len(storage) * storage.layout.row_bytes

    def to(self, target: Placement, advance: Advance) -> None:
        """Move every record that is not there yet, and release its memory before the next is allocated."""
        for number, at in enumerate(self._places):
            if at is not target:
                self._move(number, target, advance)
        if self._storage.sharing is not None:
            self._move_sides(self._storage.sharing, target)

    def _move(self, number: int, target: Placement, advance: Advance) -> None:
        storage = self._storage
        memory = storage.columns.records[number].memory
        copy = storage.columns.allocate(number, tuple(storage.shape), target)
        step_bytes = memory.nbytes // len(memory)
        steps = max(CHUNK_BYTES // max(step_bytes, 1), 1)
        for start in range(0, storage.steps_stored, steps):
            stop = min(start + steps, storage.steps_stored)
            copy.write(start, memory[start:stop])
            advance((stop - start) * step_bytes)
        storage.rows.columns = storage.columns.replace(number, copy)
        self._places[number] = target

    def _move_sides(self, sharing: Sharing, target: Placement) -> None:
        for number, leaf in enumerate(sharing.leaves.values()):
            if self._side_places[number] is not target:
                side = sharing.new_side(leaf, target)
                side.copy_(sharing.sides[number])
                sharing.sides[number], self._side_places[number] = side, target


@operation
def memory(buffer: Assembled) -> MemoryReport:
    """The bytes of each part of the buffer, and where they lie. No host sync."""
    parts, storage = buffer.parts, buffer.parts.storage
    if not storage.initialized:
        return MemoryReport(None, None, 0, 0, 0, 0)
    taken = parts.sampler.memory()
    tables = storage.plans.nbytes + (0 if storage.sharing is None else storage.sharing.table_bytes)
    counters = storage.ring.counters.nbytes + tables + parts.sampler.random_bytes + parts.pipeline.nbytes
    placement = storage.rows.placement
    kind = placement.kind if storage.allocation.relocatable else DISK
    on_host = sum(column.parts[1].nbytes for column in storage.columns) if placement.kind == SPLIT else 0
    index = taken.index + storage.followers.nbytes
    batches, device = parts.batches.kept_bytes(), str(placement.device)
    return MemoryReport(kind, device, storage.nbytes, taken.tree, index, counters, on_host, batches)
