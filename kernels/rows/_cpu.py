"""Rows on the CPU.

A batch of random rows is bound by cache misses: six small keys of 256 rows touch some 2000 cache lines. The kernels
ask for rows well ahead of the copy, into the second-level cache, which can wait for more lines at a time
than the first (measured on Zen 4, 1 M rows: 17 µs without and with prefetches into the first level, 9 µs like this).
"""

# Numba needs the real signatures: no `from __future__ import annotations`.

from array import array

import torch
from numba import carray
from torch import Tensor

from gpubuf.kernels._jit import OPTIONS, jit
from gpubuf.kernels._pointers import as_i64
from gpubuf.kernels._threads import call_in_parts
from gpubuf.kernels.philox import OFFSET, SEED, check_state
from gpubuf.kernels.philox._cpu import philox_uniform_f64
from gpubuf.kernels.rows import (
    DEVICE_ROWS,
    ENTRY,
    JOURNAL_CHECK,
    JOURNAL_KEYS,
    JOURNAL_ROWS,
    JOURNAL_SIZE,
    JOURNAL_WORDS,
    JOURNAL_WRITTEN,
    ROW_BYTES,
    ROW_STRIDE,
    SIZE,
    SPLIT,
    WRITTEN,
    arena_offsets,
)
from gpubuf.kernels.rows._check import (
    check_count,
    check_generation,
    check_index,
    check_source_count,
    check_storage,
)
from gpubuf.kernels.rows._cpu_copy import (
    AHEAD,
    copy_rows,
    describe_sources,
    first_invalid,
    prefetch_row,
    source_stride,
    write_generations,
    write_run,
)
from gpubuf.kernels.rows._cpu_table import copy_row, row_address

# Results of the kernels that are not the position of an offending element.
_DONE = -1
_EMPTY = -2


@jit(forceinline=True)
def _gather_key(target, entry, row_bytes, position, n, following):  # type: ignore[no-untyped-def]
    address, stride = entry[DEVICE_ROWS], entry[ROW_STRIDE]
    next_address, next_stride, next_bytes = following[DEVICE_ROWS], following[ROW_STRIDE], following[ROW_BYTES]
    ahead = min(AHEAD, n)
    for i in range(n - ahead):
        prefetch_row(address + position[i + ahead] * stride, row_bytes)
        copy_row(target + i * row_bytes, address + position[i] * stride, row_bytes)
    for i in range(n - ahead, n):
        prefetch_row(next_address + position[i - n + ahead] * next_stride, next_bytes)
        copy_row(target + i * row_bytes, address + position[i] * stride, row_bytes)


@jit(forceinline=True)
def _gather_split_key(target, entry, position, n):  # type: ignore[no-untyped-def]
    """As :func:`_gather_key`, for a key whose rows lie in two memories."""
    row_bytes = entry[ROW_BYTES]
    for i in range(n):
        copy_row(target + i * row_bytes, row_address(entry, position[i]), row_bytes)


@jit("void(int64, int64, int64, int64, int64, int64, int64)", **OPTIONS)
def _gather_keys(table_address, n_keys, position_address, first, n, capacity, targets_address):  # type: ignore[no-untyped-def]
    """Copy ``n`` rows of all keys to where row ``first`` of a batch and those behind it go.

    Prefetches run on from the end of one key into the next.
    """
    table = carray(as_i64(table_address), (n_keys, ENTRY))
    targets = carray(as_i64(targets_address), n_keys)
    position = carray(as_i64(position_address), n)
    if n_keys == 0:
        return
    for i in range(min(AHEAD, n)):
        prefetch_row(table[0, DEVICE_ROWS] + position[i] * table[0, ROW_STRIDE], table[0, ROW_BYTES])
    for k in range(n_keys):
        row_bytes = table[k, ROW_BYTES]
        target = targets[k] + first * row_bytes
        following = table[min(k + 1, n_keys - 1)]
        # The commonest widths get loops of their own, in which the width is a constant.
        if table[k, SPLIT] < capacity:
            _gather_split_key(target, table[k], position, n)
        elif row_bytes == 4:
            _gather_key(target, table[k], 4, position, n, following)
        elif row_bytes == 1:
            _gather_key(target, table[k], 1, position, n, following)
        else:
            _gather_key(target, table[k], row_bytes, position, n, following)


@jit("int64(int64, int64, int64, int64, int64, int64, int64, int64, int64)", **OPTIONS)
def _gather(  # type: ignore[no-untyped-def]
    table_address, n_keys, ring_address, index_address, first, n, capacity, targets_address, generation_address
):
    """Rows ``first .. first + n - 1`` of a batch, whose addresses are given."""
    index = carray(as_i64(index_address + 8 * first), n)
    generation_address += 8 * first
    generation = carray(as_i64(generation_address), n)
    invalid = first_invalid(index, n, capacity)
    if invalid >= 0:
        return first + invalid
    # The memory of the generations holds the positions until the rows are copied.
    for i in range(n):
        generation[i] = index[i] + capacity if index[i] < 0 else index[i]
    _gather_keys(table_address, n_keys, generation_address, first, n, capacity, targets_address)
    write_generations(carray(as_i64(ring_address), 4)[WRITTEN], capacity, generation, n, generation)
    return _DONE


@jit("int64(int64, int64, int64, int64, int64, int64, int64, int64, int64, int64, int64)", **OPTIONS)
def _sample(  # type: ignore[no-untyped-def]
    table_address,
    n_keys,
    ring_address,
    rng_address,
    first,
    n,
    of,
    capacity,
    targets_address,
    index_address,
    generation_address,
):
    """As :func:`_gather`, of random rows; the batch has ``of``. Only who makes a whole batch counts random numbers."""
    ring = carray(as_i64(ring_address), 4)
    rng = carray(as_i64(rng_address), 3)
    index_address, generation_address = index_address + 8 * first, generation_address + 8 * first
    index = carray(as_i64(index_address), n)
    size = ring[SIZE]
    if size == 0:
        return _EMPTY
    seed, offset = rng[SEED], rng[OFFSET] + first
    for i in range(n):
        index[i] = min(int(philox_uniform_f64(seed, offset + i) * size), size - 1)
    if n == of:
        rng[OFFSET] = offset + n
    _gather_keys(table_address, n_keys, index_address, first, n, capacity, targets_address)
    write_generations(ring[WRITTEN], capacity, index, n, carray(as_i64(generation_address), n))
    return _DONE


@jit(forceinline=True)
def _first_misfit(table, n_keys, sources, n):  # type: ignore[no-untyped-def]
    """The first key whose source has rows of another size than the storage, or -1."""
    for k in range(n_keys):
        if sources[3 * k + 2] != n * table[k, ROW_BYTES]:
            return k
    return -1


@jit("int64(int64, int64, int64, int64, int64, int64, int64)", **OPTIONS)
def _extend(table_address, n_keys, sources_address, ring_address, n, capacity, index_address):  # type: ignore[no-untyped-def]
    table = carray(as_i64(table_address), (n_keys, ENTRY))
    sources = carray(as_i64(sources_address), 3 * n_keys)
    ring = carray(as_i64(ring_address), 4)
    index = carray(as_i64(index_address), n)
    misfit = _first_misfit(table, n_keys, sources, n)
    if misfit >= 0:
        return misfit
    written = ring[WRITTEN]
    position = written % capacity
    for i in range(n):
        index[i] = position
        position = position + 1 if position + 1 < capacity else 0
    kept = min(n, capacity)
    first = (written + n - kept) % capacity
    before_seam = min(kept, capacity - first)
    for k in range(n_keys):
        stride = source_stride(sources, k, table[k, ROW_BYTES])
        source = sources[3 * k] + (n - kept) * stride
        write_run(table[k], first, source, stride, before_seam)
        write_run(table[k], 0, source + before_seam * stride, stride, kept - before_seam)
    ring[WRITTEN] = written + n
    ring[SIZE] = min(ring[SIZE] + n, capacity)
    return _DONE


@jit("int64(int64, int64, int64, int64, int64, int64, int64, int64)", **OPTIONS)
def _write(  # type: ignore[no-untyped-def]
    table_address, n_keys, sources_address, index_address, n, capacity, ring_address, generation_address
):
    """``generation_address`` is 0 where there are no generations."""
    table = carray(as_i64(table_address), (n_keys, ENTRY))
    sources = carray(as_i64(sources_address), 3 * n_keys)
    index = carray(as_i64(index_address), n)
    # Offending keys and indices share the result: keys come first.
    misfit = _first_misfit(table, n_keys, sources, n)
    if misfit >= 0:
        return misfit
    invalid = first_invalid(index, n, capacity)
    if invalid >= 0:
        return n_keys + invalid
    written = carray(as_i64(ring_address), 4)[WRITTEN]
    laps, cursor = written // capacity, written % capacity
    generation, has_generation = carray(as_i64(generation_address), n), generation_address != 0
    ahead = min(AHEAD, n)
    for k in range(n_keys):
        entry, row_bytes = table[k], table[k, ROW_BYTES]
        source, stride = sources[3 * k], source_stride(sources, k, row_bytes)
        for i in range(n):
            coming = index[min(i + ahead, n - 1)]
            prefetch_row(row_address(entry, coming + capacity if coming < 0 else coming), row_bytes)
            position = index[i] + capacity if index[i] < 0 else index[i]
            if has_generation and generation[i] != laps + (position < cursor):
                continue
            copy_row(row_address(entry, position), source + i * stride, row_bytes)
    return _DONE


@jit("int64(int64, int64, int64, int64, int64, int64, int64, int64)", **OPTIONS)
def _keep(table_address, keys_address, n_keys, ring_address, index_address, n, capacity, journal_address):  # type: ignore[no-untyped-def]
    """``index_address`` is 0 for the rows from the cursor on."""
    keys, ring = carray(as_i64(keys_address), n_keys), carray(as_i64(ring_address), 4)
    words = carray(as_i64(journal_address), JOURNAL_WORDS + n_keys + n)
    position = words[JOURNAL_WORDS + n_keys :]
    given, has_index = carray(as_i64(index_address), n), index_address != 0
    if has_index:
        invalid = first_invalid(given, n, capacity)
        if invalid >= 0:
            return invalid
    words[JOURNAL_WRITTEN], words[JOURNAL_SIZE] = ring[WRITTEN], ring[SIZE]
    words[JOURNAL_ROWS], words[JOURNAL_KEYS] = n, n_keys
    for k in range(n_keys):
        words[JOURNAL_WORDS + k] = keys[k]
    first = ring[WRITTEN] % capacity
    for i in range(n):
        at = given[i] if has_index else first + i - (capacity if first + i >= capacity else 0)
        position[i] = at + capacity if at < 0 else at
    before_seam = min(n, capacity - first)
    target = journal_address + 8 * (JOURNAL_WORDS + n_keys + n)
    for k in range(n_keys):
        entry = carray(as_i64(table_address + 8 * ENTRY * keys[k]), ENTRY)
        row_bytes, stride = entry[ROW_BYTES], entry[ROW_STRIDE]
        if has_index:
            for i in range(n):
                copy_row(target + i * row_bytes, row_address(entry, position[i]), row_bytes)
        else:
            copy_rows(target, row_bytes, row_address(entry, first), stride, row_bytes, before_seam)
            behind = target + before_seam * row_bytes
            copy_rows(behind, row_bytes, row_address(entry, 0), stride, row_bytes, n - before_seam)
        target += (n * row_bytes + 7) // 8 * 8
    total = 0
    kept = carray(as_i64(journal_address), (target - journal_address) // 8)
    for i in range(JOURNAL_CHECK + 1, len(kept)):
        total += kept[i]
    words[JOURNAL_CHECK] = total
    return _DONE


def keep(place: tuple[int, int, int, int], index: "Tensor | None", n: int, capacity: int, journal: int) -> None:
    """Copy the rows that a write is about to replace to an address, in the form of a journal; its state is left alone.

    For storages in one memory, which vouch for the addresses in ``place``: of the table, of the numbers of the keys,
    how many they are, and of the ring. ``index`` is int64 ``[n]``, contiguous; None: the rows from the cursor on.

    Raises:
        IndexError: an index is out of range.
    """
    result = _keep(*place, 0 if index is None else index.data_ptr(), n, capacity, journal)
    if result != _DONE:
        assert index is not None
        raise _out_of_range(index, result, capacity)


def _out_of_range(index: Tensor, place: int, capacity: int) -> IndexError:
    return IndexError(f"index[{place}] is {int(index[place])}, outside [-{capacity}, {capacity})")


def addresses(tensors: list[Tensor]) -> "array[int]":
    """The addresses of tensors, in the form that a kernel reads."""
    return array("q", list(map(Tensor.data_ptr, tensors)))


def _pieces(table: Tensor, n: int, arena_bytes: int) -> "tuple[Tensor, array[int]]":
    """An arena for ``n`` rows, and the address of each key's piece of it."""
    offsets, size = arena_offsets(table[:, ROW_BYTES].tolist(), n)
    if size != arena_bytes:
        raise ValueError(
            f"an arena of {arena_bytes} bytes does not fit {n} rows of {table[:, ROW_BYTES].tolist()} bytes"
        )
    arena = torch.empty(arena_bytes, dtype=torch.uint8)
    first = arena.data_ptr()
    return arena, array("q", [first + offset for offset in offsets])


def gather(table: Tensor, ring: Tensor, index: Tensor, capacity: int, arena_bytes: int) -> tuple[Tensor, Tensor]:
    """See :data:`gpubuf.kernels.rows.gather`."""
    check_storage(table, ring, capacity)
    arena, pieces = _pieces(table, check_index(index), arena_bytes)
    return arena, _gather_to(table, ring, index, capacity, pieces)


def gather_into(table: Tensor, ring: Tensor, index: Tensor, capacity: int, tensors: list[Tensor]) -> Tensor:
    """:func:`gather` into one tensor a key, ``[n, ...]`` and contiguous; returns the generations.

    For storages, which vouch for dtypes, shapes and strides: they are not looked at.
    """
    return _gather_to(table, ring, index, capacity, addresses(tensors))


def _gather_to(table: Tensor, ring: Tensor, index: Tensor, capacity: int, targets: "array[int]") -> Tensor:
    generation = torch.empty_like(index)
    before = (table.data_ptr(), len(targets), ring.data_ptr(), index.data_ptr())
    behind = (capacity, targets.buffer_info()[0], generation.data_ptr())
    n = index.numel()
    for result in call_in_parts(_gather, before, n, behind):
        if result != _DONE:
            raise _out_of_range(index, result, capacity)
    return generation


def sample(
    table: Tensor, ring: Tensor, rng: Tensor, n: int, capacity: int, arena_bytes: int
) -> tuple[Tensor, Tensor, Tensor]:
    """See :data:`gpubuf.kernels.rows.sample`."""
    check_storage(table, ring, capacity)
    check_count(n)
    check_state(rng)
    arena, pieces = _pieces(table, n, arena_bytes)
    return arena, *_sample_to(table, ring, rng, n, capacity, pieces)


def sample_into(
    table: Tensor, ring: Tensor, rng: Tensor, n: int, capacity: int, tensors: list[Tensor]
) -> tuple[Tensor, Tensor]:
    """:func:`sample` into one tensor a key, as :func:`gather_into`; returns index and generations."""
    return _sample_to(table, ring, rng, n, capacity, addresses(tensors))


def _sample_to(
    table: Tensor, ring: Tensor, rng: Tensor, n: int, capacity: int, targets: "array[int]"
) -> tuple[Tensor, Tensor]:
    index = torch.empty(n, dtype=torch.int64)
    generation = torch.empty_like(index)
    if n == 0:
        return index, generation
    before = (table.data_ptr(), len(targets), ring.data_ptr(), rng.data_ptr())
    behind = (n, capacity, targets.buffer_info()[0], index.data_ptr(), generation.data_ptr())
    results = call_in_parts(_sample, before, n, behind)
    if _EMPTY in results:
        raise RuntimeError("can't sample from an empty storage")
    if len(results) > 1:
        rng[OFFSET] += n
    return index, generation


def _source_misfit(table: Tensor, source: Tensor, key: int, n: int) -> ValueError:
    return ValueError(
        f"key {key}: expected {n} rows of {int(table[key, ROW_BYTES])} bytes, "
        f"the source has shape {list(source.shape)} and {source.nbytes} bytes"
    )


def extend(table: Tensor, sources: list[Tensor], ring: Tensor, n: int, capacity: int) -> Tensor:
    """See :data:`gpubuf.kernels.rows.extend`."""
    n_keys = check_storage(table, ring, capacity)
    check_count(n)
    check_source_count(sources, n_keys)
    index = torch.empty(n, dtype=torch.int64)
    if n == 0:
        return index
    described, _alive = describe_sources(sources, n)
    result = _extend(
        table.data_ptr(), n_keys, described.buffer_info()[0], ring.data_ptr(), n, capacity, index.data_ptr()
    )
    if result == _DONE:
        return index
    raise _source_misfit(table, sources[result], result, n)


class PreparedExtend:
    """:func:`extend` with ``n >= 1`` rows of contiguous sources at addresses that are known, which are checked here.

    Attributes:
        described: address, ``CONTIGUOUS`` and bytes of each source, one after the other. An address may be changed
            before a call to that of other memory of this size; whoever does so keeps it alive.
    """

    def __init__(
        self, table: Tensor, sources: list[Tensor], ring: Tensor, n: int, capacity: int, keeps_index: bool
    ) -> None:
        n_keys = check_storage(table, ring, capacity)
        check_source_count(sources, n_keys)
        self.described, alive = describe_sources(sources, n)
        for key, row_bytes in enumerate(table[:, ROW_BYTES].tolist()):
            if self.described[3 * key + 2] != n * row_bytes:
                raise _source_misfit(table, sources[key], key, n)
        self._arguments = (table.data_ptr(), n_keys, self.described.buffer_info()[0], ring.data_ptr(), n, capacity)
        self._index = torch.empty(n, dtype=torch.int64)
        self._keeps_index = keeps_index
        # The kernel knows addresses alone.
        self._alive = (table, sources, ring, alive)

    def __call__(self) -> Tensor:
        """Write what is in the memory now. Returns the index: without ``keeps_index`` the same tensor at each call."""
        index = torch.empty_like(self._index) if self._keeps_index else self._index
        _extend(*self._arguments, index.data_ptr())
        return index


def write(
    table: Tensor,
    sources: list[Tensor],
    ring: Tensor,
    index: Tensor,
    capacity: int,
    generation: Tensor | None = None,
) -> None:
    """See :data:`gpubuf.kernels.rows.write`."""
    n_keys, n = check_storage(table, ring, capacity), check_index(index)
    check_source_count(sources, n_keys)
    check_generation(generation, n)
    if n == 0:
        return
    described, _alive = describe_sources(sources, n)
    result = _write(
        table.data_ptr(),
        n_keys,
        described.buffer_info()[0],
        index.data_ptr(),
        n,
        capacity,
        ring.data_ptr(),
        0 if generation is None else generation.data_ptr(),
    )
    if result == _DONE:
        return
    if result < n_keys:
        raise _source_misfit(table, sources[result], result, n)
    raise _out_of_range(index, result - n_keys, capacity)
