"""Buffers on their way from TorchRL: the folders that its ``dumps`` writes, and what its ``state_dict`` returns.

Rows, cursor and priorities travel; random streams, transforms and prefetched batches, which TorchRL pickles, do not.
Nothing is unpickled. Written against TorchRL 0.14.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from tensordict import TensorDict
from torch import Tensor

from gpubuf.data.checkpoints import restore
from gpubuf.data.checkpoints.files import MANIFEST
from gpubuf.data.checkpoints.save import Checkpointed
from gpubuf.data.parts import Parts
from gpubuf.data.storage import memmap_files as files
from gpubuf.data.storage.containers import Data
from gpubuf.data.storage.layout import RowLayout
from gpubuf.data.storage.state import rows_state
from gpubuf.integrations.torchrl.samplers import Priorities, PrioritizedSampler, priorities_of, read_priorities

WRITER_FILE = "metadata.json"
BUFFER_FILE = "buffer_metadata.json"


class Dump(NamedTuple):
    """What a dump holds: rows, the place of the ring's cursor in them, and settings.

    A step is one index of the first dimension.
    """

    data: Data
    shape: tuple[int, ...]
    size: int
    written: int
    priorities: Priorities | None
    batch_size: int | None


# Reading


def is_dump(folder: Path) -> bool:
    """Whether TorchRL's ``dumps`` has written the folder, rather than gpubuf's."""
    return (folder / BUFFER_FILE).is_file() and not (folder / MANIFEST).exists()


def load_dump(buffer: Checkpointed, folder: Path, end_trajectories: bool) -> None:
    """Load what TorchRL's ``dumps`` has written into a buffer, in place of all that it holds.

    Rows, counters and batch size come from the dump, and the priorities of a prioritized sampler. Transforms, the
    random stream and an epoch of the dump do not: a sampler without priorities meets all rows as new ones.
    Synchronises.

    Raises:
        ValueError: the dump is damaged, holds what can't be stored here, or does not fit the buffer, which is as it
            was.
    """
    found = read(folder, buffer.parts.storage.ndim, stacklevel=6)
    buffer.operation.run(take, buffer.parts, found, found.batch_size, end_trajectories)


restore.readers.append((is_dump, load_dump))


def take(buffer: Parts, found: Dump, batch_size: int | None, end_trajectories: bool) -> None:
    """Replace all that a buffer holds, within an operation."""
    storage, sampler, per_step = buffer.storage, buffer.sampler, math.prod(found.shape[1:])
    room = -(-storage.max_size // per_step) * per_step
    if found.size > room:
        raise ValueError(f"the dump holds {found.size} rows, the storage has room for {room}")
    if storage.initialized:
        storage.written_layout.collect(found.data, storage.ndim)
        if tuple(storage.shape[1:]) != found.shape[1:]:
            raise ValueError(f"the dump's rows have shape {found.shape}, the storage's {tuple(storage.shape)}")
    else:
        layout = RowLayout(found.data, storage.ndim, storage.allocation.ignored_keys)
        restore.expect_rows(storage, storage.allocation.schema_like(layout), "dump")
    with restore.replacing(buffer):
        storage.empty()
        state = rows_state(found.data, len(found.shape), found.size, found.written)
        order = storage.load_state_dict({**state, "as_written": True})
        if found.priorities is not None and isinstance(sampler, PrioritizedSampler):
            state = found.priorities.state(storage.max_size, found.size, order)
            sampler.load_state_dict({**sampler.state_dict(), **state})
        buffer.batch_size = batch_size
        buffer.assemble()
        if end_trajectories:
            storage.end_if_asked()


def read(folder: Path, ndim: int | None, *, stacklevel: int) -> Dump:
    """A dump, whose rows are views of the mapped files.

    Args:
        folder: the dump.
        ndim: number of dimensions of the storage; None: guessed.
        stacklevel: of the warning about transforms.

    Raises:
        ValueError: the folder is no such dump, or is damaged.
    """
    data, size = files.read_rows(folder / "storage", writable=False, root=folder)
    path = folder / "writer" / WRITER_FILE
    writer = files.read_json(path, folder)
    cursor = files.read_count(writer, "cursor", path)
    count = writer.get("write_count")
    dims = tuple(data.shape)
    if ndim is None:
        ndim = 1 if isinstance(data, Tensor) else _guess_ndim(dims, size, count)
    shape = dims[:ndim]
    written = _rows_written(str(folder), dims, ndim, size, cursor, count)
    priorities = read_priorities(folder / "sampler", folder)
    settings = files.read_json(folder / BUFFER_FILE)
    batch_size = None
    if settings.get("batch_size") is not None:
        batch_size = files.read_count(settings, "batch_size", folder / BUFFER_FILE)
    if (path := folder / "transform.t").exists():
        warnings.warn(f"{path} is a pickle: the state of the transforms is not read", stacklevel=stacklevel)
    return Dump(data, shape, size, written, priorities, batch_size)


def _rows_written(where: str, dims: tuple[int, ...], ndim: int, size: int, cursor: int, count: Any) -> int:
    """How many rows the ring of a buffer of TorchRL has taken in.

    Raises:
        ValueError: its numbers contradict each other.
    """
    shape = dims[:ndim]
    steps, per_step = dims[0] if dims else 0, math.prod(shape[1:])
    if len(shape) < ndim or steps * per_step == 0:
        raise ValueError(f"{where}: rows of shape {dims} are no storage of {ndim} dimension(s)")
    if size > steps * per_step or size % per_step or cursor >= steps:
        raise ValueError(
            f"{where}: {size} rows and a cursor at step {cursor} are impossible in a storage of shape {shape}"
        )
    filled = size // per_step
    if filled == steps:
        # TorchRL's count overflows after 2^31 steps, and older versions have none.
        known = isinstance(count, int) and count >= steps and count % steps == cursor
        return int(count if known else steps + cursor) * per_step
    if filled in (0, cursor):
        return filled * per_step
    raise ValueError(f"{where}: the rows are not those of a ring: {filled} steps are filled, the cursor is at {cursor}")


# A state


def is_state(state: Any) -> bool:
    """Whether TorchRL's ``state_dict`` has made a state of a buffer of tensors, rather than gpubuf's."""
    stored = state.get("_storage") if isinstance(state, Mapping) else None
    return isinstance(stored, Mapping) and "_len" in stored and not isinstance(stored.get("_storage"), list)


def load_state(buffer: Checkpointed, state: Mapping[str, Any], end_trajectories: bool) -> None:
    """Load what TorchRL's ``state_dict`` has returned into a buffer, as :func:`load_dump`. Raises as it."""
    ndim = buffer.parts.storage.ndim
    rows, sampler, writer = state["_storage"]["_storage"], state["_sampler"], state["_writer"]
    if not isinstance(rows, Tensor):
        flat = {tuple(key.split(".")): value for key, value in rows.items() if isinstance(value, Tensor)}
        flat.pop(("index",), None)
        if not flat:
            raise ValueError("the state of TorchRL's buffer has no rows")
        rows = TensorDict(flat, next(iter(flat.values())).shape[:ndim])
    dims = tuple(rows.shape[:ndim])
    size, cursor, count = state["_storage"]["_len"], writer["_cursor"], writer.get("_write_count")
    written = _rows_written("the state", dims, ndim, int(size), int(cursor), count)
    priorities = priorities_of(sampler, within_buffer=False) if "_sum_tree" in sampler else None
    found = Dump(rows, dims, int(size), written, priorities, state.get("_batch_size"))
    buffer.operation.run(take, buffer.parts, found, found.batch_size, end_trajectories)


def _guess_ndim(dims: tuple[int, ...], size: int, count: Any) -> int:
    """How many dimensions of a TensorDict index rows, which a dump doesn't say: all, unless that can't be."""
    if isinstance(count, int) and len(dims) > 1 and size == min(count, dims[0]) > 0:
        return 1
    return len(dims)
