"""Rows on the CPU.

Kernels work on addresses: :mod:`gpubuf.kernels.rows._numba_read` makes batches, and
:mod:`gpubuf.kernels.rows._numba_write` writes rows and keeps the next observations that lie aside. Columns have kernels
of their own, which copy and take few arguments.
"""

from __future__ import annotations

from array import array
from typing import Any

import torch
from torch import Tensor

from gpubuf.kernels._jit import named
from gpubuf.kernels._operations import vector
from gpubuf.kernels._registry import length_of
from gpubuf.kernels._threads import call_in_parts
from gpubuf.kernels.philox import OFFSET, check_state
from gpubuf.kernels.rows import (
    BATCH_BYTES,
    ENTRY,
    ROW_BYTES,
    STORED,
    WRITES,
    WRITTEN_AS_STORED,
    Reading,
    arena_offsets,
)
from gpubuf.kernels.rows._check import (
    check_count,
    check_generation,
    check_reading,
    check_sharing,
    check_source_count,
    check_storage,
    describe_sources,
    lost,
    misfit,
    no_room,
    not_stored,
    out_of_range,
    unfit,
    unlinked,
    unreadable,
)

_copy_batch = named("rows._numba_read.copy_batch")
_read_batch = named("rows._numba_read.read_batch")
_extend_rows = named("rows._numba_write.extend_rows")
_write_rows = named("rows._numba_write.write_rows")
_relink_rows = named("rows._numba_write.relink_rows")
_stage = named("rows._numba_write.stage")

# Results of kernels that read. Others count from 0: rows, then rows whose next observation is lost, then fields.
DONE, EMPTY = -1, -2

# The fields that an operation takes from its sources.
EVERY, NOT_NEXT, NEXT_ALONE = range(3)

# Results of kernels that write, but for DONE: `problem` of _numba_write.py adds which field or row.
MISFIT, UNFIT, UNLINKED, NO_ROOM, INVALID, NEEDS_STAGING = range(6)


def _address(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


def _addresses(tensors: list[Tensor]) -> array[int]:
    """The addresses of tensors, in the form that a kernel reads."""
    return array("q", list(map(Tensor.data_ptr, tensors)))


# Reading


def _pieces(
    table: Tensor, ring: Tensor, capacity: int, reading: tuple[Any, ...], n: int, arena_bytes: int
) -> tuple[Tensor, array[int]]:
    """An arena for a batch of ``n`` rows, and the address of each key's piece of it. Arguments are checked."""
    check_storage(table, ring, capacity)
    plain = table.shape[1] == ENTRY
    if not plain:
        check_reading(Reading(*reading), capacity)
    widths = table[:, ROW_BYTES if plain else BATCH_BYTES].tolist()
    offsets, size = arena_offsets(widths, n)
    if size != arena_bytes:
        raise ValueError(f"an arena of {arena_bytes} bytes does not fit {n} rows of {widths} bytes")
    arena = torch.empty(arena_bytes, dtype=torch.uint8, device="cpu")
    first = arena.data_ptr()
    return arena, array("q", [first + offset for offset in offsets])


def gather(
    table: Tensor, ring: Tensor, index: Tensor, capacity: int, arena_bytes: int, *reading: Any
) -> tuple[Tensor, Tensor]:
    """See :data:`gpubuf.kernels.rows.gather`."""
    n = length_of("index", index)
    arena, pieces = _pieces(table, ring, capacity, reading, n, arena_bytes)
    return arena, _read(table, ring, None, index, n, capacity, pieces, reading)[1]


def gather_into(
    table: Tensor, ring: Tensor, index: Tensor, capacity: int, tensors: list[Tensor], *reading: Any
) -> Tensor:
    """:func:`gather` into one tensor per key, ``[n, ...]``, contiguous; returns the generations.

    For storages, which vouch for dtypes, shapes and strides: they are not looked at.
    """
    return _read(table, ring, None, index, index.numel(), capacity, _addresses(tensors), reading)[1]


def sample(
    table: Tensor, ring: Tensor, rng: Tensor, n: int, capacity: int, arena_bytes: int, *reading: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """See :data:`gpubuf.kernels.rows.sample`."""
    check_count(n)
    check_state(rng)
    arena, pieces = _pieces(table, ring, capacity, reading, n, arena_bytes)
    return arena, *_read(table, ring, rng, None, n, capacity, pieces, reading)


def sample_into(
    table: Tensor, ring: Tensor, rng: Tensor, n: int, capacity: int, tensors: list[Tensor], *reading: Any
) -> tuple[Tensor, Tensor]:
    """:func:`sample` into one tensor per key, as :func:`gather_into`; returns index and generations."""
    return _read(table, ring, rng, None, n, capacity, _addresses(tensors), reading)


def _read(
    table: Tensor, ring: Tensor, rng: Tensor | None, given: Tensor | None, n: int, capacity: int, targets: array[int],
    reading: tuple[Any, ...],
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Copy or compute a batch of ``given`` rows, or of ``n`` rows that ``rng`` draws; returns index and generations."""
    how = None if table.shape[1] == ENTRY else Reading(*reading)
    generation = torch.empty_like(vector(n, torch.int64))
    index = torch.empty_like(generation) if given is None else given
    if n == 0:
        return index, generation
    before: tuple[Any, ...] = (table.data_ptr(), len(targets), ring.data_ptr(), _address(rng), index.data_ptr())
    after: tuple[Any, ...] = (n, capacity, targets.buffer_info()[0], generation.data_ptr())
    if how is None:
        results = call_in_parts(_copy_batch, before, n, after)
    else:
        ends, links, noise, *numbers = how
        before, after = (_address(ends), _address(links), _address(noise), *before), (*after, *numbers)
        results = call_in_parts(_read_batch, before, n, after)
    for result in results:
        if result != DONE:
            raise _refused_batch(table, given, result, n, capacity)
    if len(results) > 1:
        if rng is not None:
            rng[OFFSET] += n
        if how is not None and how.noise is not None:
            how.noise[OFFSET] += n * how.draws
    return index, generation


def _refused_batch(fields: Tensor, index: Tensor | None, result: int, n: int, capacity: int) -> Exception:
    """What a kernel's result says of a batch of ``n`` rows."""
    if result == EMPTY:
        return RuntimeError("can't sample from an empty storage")
    if result >= 2 * n:
        return unreadable(fields, result - 2 * n)
    if result >= n:
        return lost(index, result - n)
    assert index is not None
    return out_of_range(index, result, capacity)


# Writing


def _write_with(
    kernel: Any, which: int, table: Tensor, sources: list[Tensor], n: int, skipped: int, others: tuple[int, ...]
) -> int:
    """The result of a kernel that writes rows from ``skipped`` of ``n`` on; they are converted first if need be."""
    described, _alive = describe_sources(sources, n)
    given = (table.data_ptr(), len(sources), table.shape[1], described.buffer_info()[0])
    result: int = kernel(*given, 0, *others)
    if result == DONE or result & 7 != NEEDS_STAGING:
        return result
    staged, scratch = array("q", bytes(16 * len(sources))), torch.empty(result >> 3, dtype=torch.uint8, device="cpu")
    place = staged.buffer_info()[0]
    result = _stage(*given, place, which, n, skipped, scratch.data_ptr())
    return kernel(*given, place, *others) if result == DONE else result


def _refused_write(
    table: Tensor, sources: list[Tensor], result: int, n: int, index: Tensor | None, capacity: int
) -> Exception:
    """What a kernel's result says of a write."""
    kind, place = result & 7, result >> 3
    if kind == MISFIT:
        return misfit(table, sources[place], place, n)
    if kind == UNFIT:
        return unfit(place, int(table[place, STORED]))
    if kind == NO_ROOM:
        return no_room(place, n)
    if kind == INVALID:
        assert index is not None
        return not_stored(index, place, capacity)
    return unlinked(place)


def extend(
    table: Tensor, sources: list[Tensor], ring: Tensor, n: int, capacity: int, envs: int = 1,
    links: Tensor | None = None, owners: Tensor | None = None, *, trusted: bool = False,
) -> Tensor:  # fmt: skip
    """See :data:`gpubuf.kernels.rows.extend`. ``trusted``: the caller vouches for all but sizes and numbers."""
    if not trusted:
        n_keys = check_storage(table, ring, capacity)
        check_count(n)
        check_source_count(sources, n_keys)
        check_sharing(links, owners, n, capacity, envs)
    index = ring.new_empty(n)
    if n == 0:
        return index
    shared = (0, 0, -1)
    if links is not None and owners is not None:
        shared = (links.data_ptr(), owners.data_ptr(), owners.numel() - 1)
    others = (ring.data_ptr(), *shared, n, capacity, envs, index.data_ptr())
    result = _write_with(_extend_rows, EVERY, table, sources, n, n - capacity if n > capacity else 0, others)
    if result != DONE:
        raise _refused_write(table, sources, result, n, None, capacity)
    return index


class PreparedExtend:
    """:func:`extend` with ``n >= 1`` rows of contiguous sources at known addresses. Arguments are checked here.

    Attributes:
        described: address, ``CONTIGUOUS`` and bytes of each source, one after the other. An address may be changed
            before a call to that of other memory of this size; whoever does so keeps it alive.
    """

    def __init__(
        self, table: Tensor, sources: list[Tensor], ring: Tensor, n: int, capacity: int, keeps_index: bool,
        envs: int = 1, links: Tensor | None = None, owners: Tensor | None = None,
    ) -> None:  # fmt: skip
        n_keys = check_storage(table, ring, capacity)
        check_count(n)
        check_source_count(sources, n_keys)
        slots = check_sharing(links, owners, n, capacity, envs)
        self.described, alive = describe_sources(sources, n)
        self._index, self._keeps_index = ring.new_empty(n), keeps_index
        skipped = max(n - capacity, 0)
        scratch = torch.empty((n - skipped) * _converted_bytes(table), dtype=torch.uint8, device="cpu")
        staged, converts = array("q", bytes(16 * n_keys)), scratch.numel() > 0
        given = (table.data_ptr(), n_keys, table.shape[1], self.described.buffer_info()[0])
        place = staged.buffer_info()[0] if converts else 0
        self._stage = (*given, place, EVERY, n, skipped, scratch.data_ptr()) if converts else ()
        shared = (ring.data_ptr(), _address(links), _address(owners), slots, n, capacity, envs)
        self._arguments = (*given, place, *shared)
        # The kernels know addresses alone.
        self._alive = (table, sources, ring, links, owners, alive, staged, scratch)

    def __call__(self) -> Tensor | None:
        """Write what is in the memory now. Returns the index: without ``keeps_index`` the same tensor at each call.

        None: the rows were refused, and nothing is written. The operation itself says why.
        """
        if self._stage and _stage(*self._stage) != DONE:
            return None
        index = torch.empty_like(self._index) if self._keeps_index else self._index
        return index if _extend_rows(*self._arguments, index.data_ptr()) == DONE else None


def _converted_bytes(table: Tensor) -> int:
    """Bytes of those fields of a row that are stored in another form than they are written in."""
    found: list[list[int]] = [] if table.shape[1] == ENTRY else table.tolist()
    return sum(field[ROW_BYTES] for field in found if field[WRITES] and not field[WRITTEN_AS_STORED])


def write(
    table: Tensor, sources: list[Tensor], ring: Tensor, index: Tensor, capacity: int, generation: Tensor | None = None
) -> None:
    """See :data:`gpubuf.kernels.rows.write`."""
    n_keys, n = check_storage(table, ring, capacity), length_of("index", index)
    check_generation(generation, n)
    check_source_count(sources, n_keys)
    if n == 0:
        return
    others = (index.data_ptr(), n, capacity, ring.data_ptr(), _address(generation))
    result = _write_with(_write_rows, NOT_NEXT, table, sources, n, 0, others)
    if result != DONE:
        raise _refused_write(table, sources, result, n, index, capacity)


def relink(
    table: Tensor, sources: list[Tensor], ring: Tensor, index: Tensor, capacity: int, envs: int, links: Tensor,
    owners: Tensor,
) -> None:  # fmt: skip
    """See :data:`gpubuf.kernels.rows.relink`."""
    n_keys, n = check_storage(table, ring, capacity), length_of("index", index)
    check_source_count(sources, n_keys)
    slots = check_sharing(links, owners, 0, capacity, envs)
    if n == 0:
        return
    others = (ring.data_ptr(), links.data_ptr(), owners.data_ptr(), slots, index.data_ptr(), n, capacity, envs)
    result = _write_with(_relink_rows, NEXT_ALONE, table, sources, n, 0, others)
    if result != DONE:
        raise _refused_write(table, sources, result, n, index, capacity)
