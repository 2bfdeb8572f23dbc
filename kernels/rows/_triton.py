"""Rows on the GPU: table-driven copies of bytes, all keys in one launch.

The grid of every kernel is one-dimensional: first ``row_programs`` programs that deal with what there is once
per row (index, generation, faults), then programs that copy, each a span of ``SPAN`` bytes of one key's batch. They
find their key by a search in the running sum of the keys' spans, so that the keys' sizes never reach the host.

A span is copied in elements of ``unit`` bytes, the widest of 16, 8, 4, 2 and 1 that divides all addresses involved.
"""

import triton
import triton.language as tl

from gpubuf.kernels.philox._triton import advance_when_last, philox_uniform_f64

# Arithmetic: these helpers neither load nor store.


@triton.jit
def find_key(row_bytes, lanes, n, program, SPAN: tl.constexpr, ALIGNMENT: tl.constexpr):
    """(key, first byte of its span, offset of the key in the arena) of copying program ``program``.

    row_bytes: int64 [KEYS], zero beyond the last key. Programs beyond the last span get a key beyond the last key.
    """
    size = row_bytes * n
    ends = tl.cumsum((size + SPAN - 1) // SPAN, 0)
    before = ends <= program
    key = tl.sum(before.to(tl.int32), 0)
    first_program = tl.max(tl.where(before, ends, 0), 0)
    rounded = (size + ALIGNMENT - 1) // ALIGNMENT * ALIGNMENT
    offset = tl.sum(tl.where(lanes < key, rounded, 0), 0)
    return key, (program - first_program) * SPAN, offset


@triton.jit
def element_unit(alignment):
    """The widest of 16, 8, 4, 2, 1 that divides ``alignment`` (an or of addresses and strides, int64 scalar)."""
    return tl.minimum((alignment | 16) & -(alignment | 16), 16)


@triton.jit
def split_span(first_byte, row_bytes, n, unit, SPAN: tl.constexpr):
    """(elements per row, row and column of the span's first element, number of its elements)."""
    words = row_bytes // unit
    first = first_byte // unit
    row = first // words
    count = tl.minimum(words * n - first, SPAN // unit)
    return words.to(tl.int32), row, (first - row * words).to(tl.int32), count.to(tl.int32)


@triton.jit
def normalise(index, capacity):
    """(position, whether it is in range): negative indices count from the end."""
    position = tl.where(index < 0, index + capacity, index)
    return position, (position >= 0) & (position < capacity)


@triton.jit
def draw_position(seed, counter, size):
    """min(floor(uniform * size), size - 1); -1 if the ring is empty."""
    return tl.minimum((philox_uniform_f64(seed, counter) * size.to(tl.float64)).to(tl.int64), size - 1)


@triton.jit
def row_address(position, near, split, far, stride):
    """Addresses of rows: the first ``split`` of a key lie in one memory, the others in another."""
    return tl.where(position < split, near, far) + position * stride


@triton.jit
def generation_of(position, valid, written, capacity):
    """(written - position + capacity - 1) // capacity, with scalar divisions only; -1 where invalid."""
    laps = written // capacity
    cursor = written - laps * capacity
    return tl.where(valid, laps + (position < cursor).to(tl.int64), -1)


@triton.jit
def select(key, values):
    """values[key] of a tuple of integers, as int64."""
    chosen = key.to(tl.int64) * 0
    for k in tl.static_range(len(values)):
        chosen = tl.where(key == k, values[k].to(tl.int64), chosen)
    return chosen


# Memory


@triton.jit
def load_span(table_ptr, n_keys, n, program, KEYS: tl.constexpr, SPAN: tl.constexpr, ALIGNMENT: tl.constexpr):
    """What copying program ``program`` works on: (key, its entry in the table, first byte of the span, offset)."""
    lanes = tl.arange(0, KEYS)
    sizes = tl.load(table_ptr + 5 * lanes + 1, mask=lanes < n_keys, other=0)
    key, first_byte, offset = find_key(sizes, lanes, n, program, SPAN, ALIGNMENT)
    # The search has brought the whole table into the cache.
    entry_ptr = table_ptr + 5 * tl.minimum(key, n_keys - 1)
    near = tl.load(entry_ptr)
    row_bytes = tl.load(entry_ptr + 1)
    split = tl.load(entry_ptr + 2)
    far = tl.load(entry_ptr + 3)
    stride = tl.load(entry_ptr + 4)
    return key, near, row_bytes, split, far, stride, first_byte, offset


@triton.jit
def copy_as(source, target, read, write, DTYPE: tl.constexpr):
    value = tl.load(source.to(tl.pointer_type(DTYPE)), mask=read, other=0)
    tl.store(target.to(tl.pointer_type(DTYPE)), value, mask=write)


@triton.jit
def copy_elements(source, target, unit, read, write):
    """Copy elements of ``unit`` bytes between int64 addresses [TILE]; what is written but not read is zero."""
    if unit == 16:
        # Two words a thread, side by side, for one 16-byte access.
        half = tl.arange(0, 2)[None, :]
        read2 = read[:, None] & (half >= 0)
        write2 = write[:, None] & (half >= 0)
        source_ptr = tl.multiple_of(source.to(tl.pointer_type(tl.int64)), 16)
        target_ptr = tl.multiple_of(target.to(tl.pointer_type(tl.int64)), 16)
        value = tl.load(source_ptr[:, None] + half, mask=read2, other=0)
        tl.store(target_ptr[:, None] + half, value, mask=write2)
    elif unit == 8:
        copy_as(source, target, read, write, tl.int64)
    elif unit == 4:
        copy_as(source, target, read, write, tl.int32)
    elif unit == 2:
        copy_as(source, target, read, write, tl.int16)
    else:
        copy_as(source, target, read, write, tl.int8)


@triton.jit
def count_faults(ring_ptr, fault):
    """Add the number of true elements of ``fault`` to ring[FAULTS]."""
    n_faults = tl.sum(fault.to(tl.int64), 0)
    if n_faults > 0:
        tl.atomic_add(ring_ptr + 3, n_faults)


@triton.jit
def advance_ring_when_last(ring_ptr, n, capacity):
    """Count ``n`` rows as written, once per launch, in the program that gets here last.

    Every program calls this once, after it has read the ring for the last time.
    """
    # The ticket (acquire and release) orders the reads of all programs before the stores below.
    tl.debug_barrier()
    ticket = tl.atomic_add(ring_ptr + 2, 1)
    if ticket == tl.num_programs(0) - 1:
        written = tl.load(ring_ptr)
        size = tl.load(ring_ptr + 1)
        tl.store(ring_ptr, written + n)
        tl.store(ring_ptr + 1, tl.minimum(size + n, capacity))
        tl.store(ring_ptr + 2, 0)


# Kernels


@triton.jit(do_not_specialize=["n_keys", "n", "capacity", "row_programs"])
def rows_gather_kernel(
    table_ptr,  # int64 [n_keys, 5]: (near, row bytes, split, far, row stride), see gpubuf.kernels.rows
    ring_ptr,  # int64 [4]: (written, size, ticket, faults)
    index_ptr,  # int64 [n]
    arena_ptr,  # uint8 [arena_bytes], 64-byte aligned
    generation_ptr,  # int64 [n]
    n_keys,
    n,
    capacity,
    row_programs,
    KEYS: tl.constexpr,
    SPAN: tl.constexpr,
    TILE: tl.constexpr,
    ALIGNMENT: tl.constexpr,
):
    """arena[k, i] = storage[k, index[i]]; generation[i] = times that row was written.

    Grid: (row_programs + at most n_keys + arena_bytes // SPAN,), where row_programs = cdiv(n, TILE).
    """
    program = tl.program_id(0).to(tl.int64)
    n = n.to(tl.int64)
    capacity = capacity.to(tl.int64)
    if program < row_programs:
        row = program * TILE + tl.arange(0, TILE)
        position, valid = normalise(tl.load(index_ptr + row, mask=row < n, other=0), capacity)
        generation = generation_of(position, valid, tl.load(ring_ptr), capacity)
        tl.store(generation_ptr + row, generation, mask=row < n)
        count_faults(ring_ptr, (row < n) & ~valid)
    else:
        key, near, row_bytes, split, far, stride, first_byte, offset = load_span(
            table_ptr, n_keys, n, program - row_programs, KEYS, SPAN, ALIGNMENT
        )
        if key < n_keys:
            unit = element_unit(near | far | row_bytes | stride)
            words, first_row, first_column, count = split_span(first_byte, row_bytes, n, unit, SPAN)
            target = arena_ptr.to(tl.int64) + offset + first_byte
            for start in range(0, count, TILE):
                element = start + tl.arange(0, TILE)
                mask = element < count
                row = first_row + (first_column + element) // words
                column = (first_column + element) % words
                position, valid = normalise(tl.load(index_ptr + row, mask=mask, other=0), capacity)
                source = row_address(position, near, split, far, stride) + column.to(tl.int64) * unit
                copy_elements(source, target + element.to(tl.int64) * unit, unit, mask & valid, mask)


@triton.jit(do_not_specialize=["n_keys", "n", "capacity", "row_programs"])
def rows_sample_kernel(
    table_ptr,  # int64 [n_keys, 5]: (near, row bytes, split, far, row stride), see gpubuf.kernels.rows
    ring_ptr,  # int64 [4]: (written, size, ticket, faults)
    rng_ptr,  # int64 [3]: (seed, offset, ticket), advanced by n
    arena_ptr,  # uint8 [arena_bytes], 64-byte aligned
    index_ptr,  # int64 [n], output
    generation_ptr,  # int64 [n]
    n_keys,
    n,
    capacity,
    row_programs,
    KEYS: tl.constexpr,
    SPAN: tl.constexpr,
    TILE: tl.constexpr,
    ALIGNMENT: tl.constexpr,
):
    """index[i] = min(floor(uniform(seed, offset + i) * size), size - 1), then as rows_gather_kernel.

    Every program draws for itself the rows that it copies: the generator is counter-based. Grid: as there.
    """
    program = tl.program_id(0).to(tl.int64)
    n = n.to(tl.int64)
    capacity = capacity.to(tl.int64)
    size = tl.load(ring_ptr + 1)
    seed = tl.load(rng_ptr)
    rng_offset = tl.load(rng_ptr + 1)
    if program < row_programs:
        row = program * TILE + tl.arange(0, TILE)
        position = draw_position(seed, rng_offset + row, size)
        generation = generation_of(position, position >= 0, tl.load(ring_ptr), capacity)
        tl.store(index_ptr + row, position, mask=row < n)
        tl.store(generation_ptr + row, generation, mask=row < n)
        count_faults(ring_ptr, (row < n) & (position < 0))
    else:
        key, near, row_bytes, split, far, stride, first_byte, offset = load_span(
            table_ptr, n_keys, n, program - row_programs, KEYS, SPAN, ALIGNMENT
        )
        if key < n_keys:
            unit = element_unit(near | far | row_bytes | stride)
            words, first_row, first_column, count = split_span(first_byte, row_bytes, n, unit, SPAN)
            target = arena_ptr.to(tl.int64) + offset + first_byte
            for start in range(0, count, TILE):
                element = start + tl.arange(0, TILE)
                mask = element < count
                row = first_row + (first_column + element) // words
                column = (first_column + element) % words
                position = draw_position(seed, rng_offset + row, size)
                source = row_address(position, near, split, far, stride) + column.to(tl.int64) * unit
                copy_elements(source, target + element.to(tl.int64) * unit, unit, mask & (position >= 0), mask)
    advance_when_last(rng_ptr, n)


@triton.jit(do_not_specialize=["n_keys", "n", "skipped", "capacity", "advance", "row_programs"])
def rows_extend_kernel(
    table_ptr,  # int64 [n_keys, 5]: (near, row bytes, split, far, row stride), see gpubuf.kernels.rows
    source_addresses,  # tuple of at least n_keys integers: 2 * address + 3
    source_strides,  # as many integers: 2 * (bytes from row to row) + 3
    ring_ptr,  # int64 [4]: (written, size, ticket, faults); written and size are advanced
    index_ptr,  # int64 [n], output
    n_keys,
    n,
    skipped,
    capacity,
    advance,
    row_programs,
    KEYS: tl.constexpr,
    SPAN: tl.constexpr,
    TILE: tl.constexpr,
    ALIGNMENT: tl.constexpr,
):
    """storage[k, (written + i) % capacity] = source[k, i] for i from ``skipped`` = max(n - capacity, 0) on.

    index[i] = (written + i) % capacity for all i. The counters move by ``advance``, n rows in the last launch of a
    write. Addresses and strides are odd numbers: Triton would compile a variant for every combination of those
    that are 1 or divisible by 16.

    Grid: (row_programs + at most n_keys + (bytes to copy) // SPAN,), row_programs = cdiv(n, TILE) or 0; at least 1.
    """
    program = tl.program_id(0).to(tl.int64)
    n = n.to(tl.int64)
    capacity = capacity.to(tl.int64)
    written = tl.load(ring_ptr)
    if program < row_programs:
        row = program * TILE + tl.arange(0, TILE)
        tl.store(index_ptr + row, (written % capacity + row) % capacity, mask=row < n)
    else:
        kept = n - skipped
        key, near, row_bytes, split, far, stride, first_byte, _ = load_span(
            table_ptr, n_keys, kept, program - row_programs, KEYS, SPAN, ALIGNMENT
        )
        if key < n_keys:
            source_stride = (select(key, source_strides) - 3) >> 1
            source_address = ((select(key, source_addresses) - 3) >> 1) + skipped * source_stride
            unit = element_unit(near | far | row_bytes | stride | source_address | source_stride)
            words, first_row, first_column, count = split_span(first_byte, row_bytes, kept, unit, SPAN)
            cursor = (written + skipped) % capacity
            for start in range(0, count, TILE):
                element = start + tl.arange(0, TILE)
                mask = element < count
                row = first_row + (first_column + element) // words
                column = ((first_column + element) % words).to(tl.int64) * unit
                position = cursor + row
                position = tl.where(position < capacity, position, position - capacity)
                source = source_address + row * source_stride + column
                target = row_address(position, near, split, far, stride) + column
                copy_elements(source, target, unit, mask, mask)
    advance_ring_when_last(ring_ptr, advance, capacity)


@triton.jit(do_not_specialize=["n_keys", "n", "capacity", "row_programs"])
def rows_write_kernel(
    table_ptr,  # int64 [n_keys, 5]: (near, row bytes, split, far, row stride), see gpubuf.kernels.rows
    source_addresses,  # tuple of at least n_keys integers: 2 * address + 3
    source_strides,  # as many integers: 2 * (bytes from row to row) + 3
    ring_ptr,  # int64 [4]: (written, size, ticket, faults)
    index_ptr,  # int64 [n]
    winner_ptr,  # bool [n]: false where a later entry names the same row
    n_keys,
    n,
    capacity,
    row_programs,
    KEYS: tl.constexpr,
    SPAN: tl.constexpr,
    TILE: tl.constexpr,
    ALIGNMENT: tl.constexpr,
):
    """storage[k, index[i]] = source[k, i] where winner[i]; indices out of range count as faults.

    Addresses, strides and grid as in rows_extend_kernel.
    """
    program = tl.program_id(0).to(tl.int64)
    n = n.to(tl.int64)
    capacity = capacity.to(tl.int64)
    if program < row_programs:
        row = program * TILE + tl.arange(0, TILE)
        position, valid = normalise(tl.load(index_ptr + row, mask=row < n, other=0), capacity)
        count_faults(ring_ptr, (row < n) & ~valid)
    else:
        key, near, row_bytes, split, far, stride, first_byte, _ = load_span(
            table_ptr, n_keys, n, program - row_programs, KEYS, SPAN, ALIGNMENT
        )
        if key < n_keys:
            source_address = (select(key, source_addresses) - 3) >> 1
            source_stride = (select(key, source_strides) - 3) >> 1
            unit = element_unit(near | far | row_bytes | stride | source_address | source_stride)
            words, first_row, first_column, count = split_span(first_byte, row_bytes, n, unit, SPAN)
            for start in range(0, count, TILE):
                element = start + tl.arange(0, TILE)
                mask = element < count
                row = first_row + (first_column + element) // words
                column = ((first_column + element) % words).to(tl.int64) * unit
                position, valid = normalise(tl.load(index_ptr + row, mask=mask, other=0), capacity)
                winner = tl.load(winner_ptr + row, mask=mask, other=0).to(tl.int1)
                source = source_address + row * source_stride + column
                chosen = mask & valid & winner
                target = row_address(position, near, split, far, stride) + column
                copy_elements(source, target, unit, chosen, chosen)
