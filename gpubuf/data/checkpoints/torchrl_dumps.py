"""The folders of TorchRL's ``dumps``: rows, counters and priorities are read, and nothing is unpickled."""

from __future__ import annotations

import functools
import math
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gpubuf.data.checkpoints.manifest import MANIFEST
from gpubuf.data.checkpoints.parts import Parts
from gpubuf.data.checkpoints.restore import Replacement, together
from gpubuf.data.lock import BufferLock
from gpubuf.data.samplers import torchrl_state
from gpubuf.data.storage import memmap_files as files
from gpubuf.data.storage.layout import Data, RowLayout
from gpubuf.data.storage.saved_rows import rows_state
from gpubuf.data.storage.tensor_storage import TensorStorage

WRITER_FILE = "metadata.json"
BUFFER_FILE = "buffer_metadata.json"
_COPY_BYTES = 1 << 26


class DumpedRows(NamedTuple):
    """The rows of a dump, and the place of the ring's cursor in them; a step is one index of the first dimension."""

    data: Data
    shape: tuple[int, ...]
    size: int
    written: int


def is_dump(folder: Path) -> bool:
    """Whether TorchRL's ``dumps`` has written the folder, rather than gpubuf's."""
    return (folder / BUFFER_FILE).is_file() and not (folder / MANIFEST).exists()


def load_dump(lock: BufferLock, parts_now: Callable[[], Parts], folder: Path) -> None:
    """Load what TorchRL's ``dumps`` has written into a buffer, in place of all that it holds.

    Rows, counters and batch size come from the dump, and the priorities of a prioritized sampler. Transforms, the
    random stream and an epoch of the dump do not: a sampler without priorities meets all rows as new ones.
    Synchronises.

    Args:
        lock: of the buffer.
        parts_now: gives the buffer's parts; called while the lock is held.
        folder: the dump.

    Raises:
        ValueError: the dump is damaged, holds what can't be stored here, or does not fit the buffer, which is as it
            was.
    """
    with lock:
        parts = parts_now()
        storage, sampler = parts.storage, parts.sampler
        custom = storage.custom_rows
        rows = None if custom is None else custom.load(folder / "storage")
        found = read_rows(folder, storage.ndim, rows)
        priorities = torchrl_state.read_priorities(folder / "sampler", folder)
        settings = files.read_json(folder / BUFFER_FILE)
        size = None
        if settings.get("batch_size") is not None:
            size = files.read_count(settings, "batch_size", folder / BUFFER_FILE)
        if (folder / "transform.t").exists():
            warnings.warn(
                f"{folder / 'transform.t'} is a pickle: the state of the transforms is not read", stacklevel=4
            )
        _check(parts, found)
        parts.prefetcher.discard()
        with together() as whole:
            replacement = whole.stack.enter_context(Replacement(parts, whole))
            replacement.begin()
            storage.empty()
            sampler.empty()
            order = take_rows(storage, found)
            if found.size:
                sampler.on_write(torch.arange(found.size, device=storage.device), None)
            if priorities is not None and sampler.torchrl_form == "priorities":
                state = priorities.state(storage.max_size, found.size, order)
                sampler.load_state_dict({**sampler.state_dict(), **state})
            storage.rebuild()
            sampler.mend()
            whole.last.append(functools.partial(replacement.take, [], size))


def _check(parts: Parts, found: DumpedRows) -> None:
    """Raise a ValueError unless a buffer of these parts can take the rows."""
    storage, per_step = parts.storage, math.prod(found.shape[1:])
    room = -(-storage.max_size // per_step) * per_step
    if found.size > room:
        raise ValueError(f"the dump holds {found.size} rows, the storage has room for {room}")
    if storage.initialized:
        storage.written_layout.collect(found.data, storage.ndim)
        if tuple(storage.shape[1:]) != found.shape[1:]:
            raise ValueError(f"the dump's rows have shape {found.shape}, the storage's {tuple(storage.shape)}")
    else:
        layout = RowLayout(found.data, storage.ndim, storage.ignored_keys)
        form = storage.form_like(layout)
        try:
            parts.sampler.check_rows(form.written, storage.ndim)
            storage.check_rows(form)
        except (LookupError, RuntimeError, TypeError) as error:
            raise ValueError(f"the buffer can't serve the rows of the dump: {error}") from error
        storage.beside = parts.sampler.index_beside(storage.requested_device, storage.full_shape(found.shape))


def take_rows(storage: TensorStorage, found: DumpedRows) -> Tensor | None:
    """Copy the rows of a dump into an empty storage.

    Args:
        storage: the storage.
        found: the rows.

    Returns:
        The old position of every row, int64 ``[size]``, in the order in which they lie now; None: their own.
    """
    if storage.converts:
        return _append(storage, found)
    return storage.load_state_dict(rows_state(found.data, len(found.shape), found.size, found.written))


def _append(storage: TensorStorage, found: DumpedRows) -> Tensor:
    """Write the rows, oldest first, to a storage that converts them. The old position of each."""
    if found.size > storage.max_size:
        raise ValueError(f"the dump holds {found.size} rows, the storage has room for {storage.max_size}")
    capacity, per_step = math.prod(found.shape), math.prod(found.shape[1:])
    first = found.written % capacity if found.size == capacity else 0
    steps, oldest = found.size // per_step, first // per_step
    row_bytes = RowLayout(found.data, len(found.shape), storage.ignored_keys).row_bytes
    at_once = max(1, _COPY_BYTES // max(1, row_bytes * per_step))
    for start, stop in ((oldest, steps), (0, oldest)):
        for step in range(start, stop, at_once):
            storage.append(found.data[step : min(step + at_once, stop)])
    # The sampler has not looked at the storage yet.
    storage.end(None)
    return (torch.arange(found.size) + first) % capacity


def read_rows(folder: Path, ndim: int | None, rows: tuple[Data, int] | None = None) -> DumpedRows:
    """The rows of a dump: views of the mapped files.

    Args:
        folder: the dump.
        ndim: number of dimensions of the storage; None: guessed.
        rows: the rows and their number, if a checkpointer has read them; None: those of the files.

    Raises:
        ValueError: the folder is no such dump, or is damaged.
    """
    data, size = files.read_rows(folder / "storage", writable=False, root=folder) if rows is None else rows
    path = folder / "writer" / WRITER_FILE
    writer = files.read_json(path, folder)
    cursor = files.read_count(writer, "cursor", path)
    count = writer.get("write_count")
    dims = tuple(data.shape)
    if ndim is None:
        ndim = 1 if isinstance(data, Tensor) else _guess_ndim(dims, size, count)
    shape = dims[:ndim]
    steps, per_step = dims[0] if dims else 0, math.prod(shape[1:])
    if len(shape) < ndim or steps * per_step == 0:
        raise ValueError(f"{folder}: rows of shape {dims} are no storage of {ndim} dimension(s)")
    if size > steps * per_step or size % per_step or cursor >= steps:
        raise ValueError(
            f"{folder}: {size} rows and a cursor at step {cursor} are impossible in a storage of shape {shape}"
        )
    filled = size // per_step
    if filled == steps:
        # TorchRL's count overflows after 2^31 steps, and older versions have none.
        known = isinstance(count, int) and count >= steps and count % steps == cursor
        written = count if known else steps + cursor
    elif filled == cursor or filled == 0:
        written = filled
    else:
        raise ValueError(
            f"{folder}: the rows are not those of a ring: {filled} steps are filled, the cursor is at {cursor}"
        )
    return DumpedRows(data, shape, size, written * per_step)


def _guess_ndim(dims: tuple[int, ...], size: int, count: Any) -> int:
    """How many dimensions of a TensorDict index rows, which a dump doesn't say: all, unless that can't be."""
    if isinstance(count, int) and len(dims) > 1 and size == min(count, dims[0]) > 0:
        return 1
    return len(dims)
