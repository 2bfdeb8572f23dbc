"""Rows on the GPU: table-driven copies of bytes, all keys in one launch.

The grid of every kernel is one-dimensional: first ``row_programs`` programs that deal with what there is once
per row (index, generation, faults), then programs that copy. These copy *tiles*: ``TILE`` elements of one key's batch,
an element being the widest of 16, 8, 4, 2 and 1 bytes that the key's addresses and strides are multiples of. A thread
moves a few elements whatever their width, so that a tile takes the same time for a key of one byte as for a wide one.

How many tiles there are is in the table, on the device, and the host only guesses: program ``p`` of ``P`` copies the
tiles ``p``, ``p + P``, ... It finds a tile's key by a search in the running sum of the keys' tiles.
"""

import triton
import triton.language as tl

from gpubuf.kernels.philox._triton import advance_state, is_last, philox_uniform_f64, take_ticket

# Arithmetic: these helpers neither load nor store.


@triton.jit
def unit_shift(alignment):
    """Binary logarithm of the widest of 16, 8, 4, 2, 1 that divides ``alignment`` (an or of addresses and strides)."""
    alignment = alignment | 16
    unit = tl.minimum(alignment & -alignment, 16).to(tl.int32)
    return (unit > 1).to(tl.int32) + (unit > 2).to(tl.int32) + (unit > 4).to(tl.int32) + (unit > 8).to(tl.int32)


@triton.jit
def quotient(a, b):
    """``a // b`` of int64 scalars, at least 0 and at least 1: a 64-bit division takes a hundred instructions."""
    return (a.to(tl.uint32) // b.to(tl.uint32)).to(tl.int64) if (a | b) < (1 << 31) else a // b


@triton.jit
def find_tile(tiles, sizes, lanes, tile, ALIGNMENT: tl.constexpr):
    """(key of a tile, its number in the key, offset of the key in the arena).

    tiles, sizes: int64 [KEYS], tiles and bytes of every key's batch, zero beyond the last key.
    """
    ends = tl.cumsum(tiles, 0)
    before = ends <= tile
    key = tl.sum(before.to(tl.int32), 0)
    first = tl.max(tl.where(before, ends, 0), 0)
    rounded = (sizes + (ALIGNMENT - 1)) & -ALIGNMENT
    return key, tile - first, tl.sum(tl.where(lanes < key, rounded, 0), 0)


@triton.jit
def rows_and_columns(element, first_column, words, SPAN):
    """(row, column) int32 of elements below ``SPAN`` after ``first_column`` of row 0, in rows of ``words`` elements."""
    place = first_column + element
    if words >= SPAN:
        row = (place >= words).to(tl.int32)
    else:
        # place * ceil(2**31 / words) >> 31 is place // words as long as place * words < 2**31.
        reciprocal = (2147483647 // words + 1).to(tl.uint32)
        row = tl.umulhi(place.to(tl.uint32) << 1, reciprocal).to(tl.int32)
    return row, place - row * words


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
def draw_tile(seed, counter, size, row, words, TILE: tl.constexpr):
    """Positions drawn for the rows ``row`` [TILE] of a tile, of which row 0 is draw ``counter``.

    Rows of many elements are drawn once each, and handed to the threads that copy them: a draw takes about as many
    instructions as the rest of the copy of an element.
    """
    if words >= 8:
        drawn = draw_position(seed, counter + tl.arange(0, TILE // 4), size)
        position = tl.gather(drawn, row, 0)
    else:
        position = draw_position(seed, counter + row, size)
    return position


@triton.jit
def row_address(position, near, split, far, stride):
    """Addresses of rows: the first ``split`` of a key lie in one memory, the others in another."""
    return tl.where(position < split, near, far) + position * stride


@triton.jit
def generation_of(position, valid, written, capacity):
    """(written - position + capacity - 1) // capacity, with scalar divisions only; -1 where invalid."""
    laps = quotient(written, capacity)
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
def load_tiles(table_ptr, n_keys, n, KEYS: tl.constexpr, TILE: tl.constexpr):
    """(tiles, bytes, lanes): what a batch of ``n`` rows is of every key, int64 [KEYS]."""
    lanes = tl.arange(0, KEYS)
    entry_ptr = table_ptr + 5 * lanes
    some = lanes < n_keys
    near = tl.load(entry_ptr, mask=some, other=0)
    row_bytes = tl.load(entry_ptr + 1, mask=some, other=0)
    far = tl.load(entry_ptr + 3, mask=some, other=0)
    stride = tl.load(entry_ptr + 4, mask=some, other=0)
    elements = (row_bytes >> unit_shift(near | far | row_bytes | stride)) * n
    return (elements + (TILE - 1)) // TILE, row_bytes * n, lanes


@triton.jit
def load_key(table_ptr, key, n, number, TILE: tl.constexpr):
    """(near, split, far, stride, all that must be aligned, bytes of a row, row and byte where a tile begins)."""
    # The search has brought the whole table into the cache.
    entry_ptr = table_ptr + 5 * key
    near = tl.load(entry_ptr)
    row_bytes = tl.load(entry_ptr + 1)
    split = tl.load(entry_ptr + 2)
    far = tl.load(entry_ptr + 3)
    stride = tl.load(entry_ptr + 4)
    alignment = near | far | row_bytes | stride
    shift = unit_shift(alignment)
    words = row_bytes >> shift
    first = number * TILE
    row = quotient(first, words)
    return near, split, far, stride, alignment, row_bytes, row, (first - row * words) << shift


@triton.jit
def copy_as(source, target, read, write, DTYPE: tl.constexpr):
    value = tl.load(source.to(tl.pointer_type(DTYPE)), mask=read, other=0)
    tl.store(target.to(tl.pointer_type(DTYPE)), value, mask=write)


@triton.jit
def copy_elements(source, target, shift, read, write):
    """Copy elements of ``1 << shift`` bytes between int64 addresses [TILE]; what is written but not read is zero."""
    if shift == 4:
        # Two words a thread, side by side, for one 16-byte access.
        half = tl.arange(0, 2)[None, :]
        read2 = read[:, None] & (half >= 0)
        write2 = write[:, None] & (half >= 0)
        source_ptr = tl.multiple_of(source.to(tl.pointer_type(tl.int64)), 16)
        target_ptr = tl.multiple_of(target.to(tl.pointer_type(tl.int64)), 16)
        value = tl.load(source_ptr[:, None] + half, mask=read2, other=0)
        tl.store(target_ptr[:, None] + half, value, mask=write2)
    elif shift == 3:
        copy_as(source, target, read, write, tl.int64)
    elif shift == 2:
        copy_as(source, target, read, write, tl.int32)
    elif shift == 1:
        copy_as(source, target, read, write, tl.int16)
    else:
        copy_as(source, target, read, write, tl.int8)


@triton.jit
def count_faults(ring_ptr, fault):
    """Add the number of true elements of ``fault`` to ring[FAULTS]: an atomic each, since there are none as a rule."""
    zero = fault.to(tl.int64) * 0
    tl.atomic_add(ring_ptr + 3 + zero, zero + 1, mask=fault, sem="relaxed")


@triton.jit
def advance_ring(ring_ptr, ticket, written, size, n, capacity):
    """Count ``n`` rows as written, once per launch, in the program of the last ticket (of ``ring_ptr + 2``)."""
    last = is_last(ring_ptr + 2, ticket)
    lane = tl.arange(0, 128).to(tl.int64) * 0
    tl.store(ring_ptr + lane, lane + (written + n), mask=last)
    tl.store(ring_ptr + 1 + lane, lane + tl.minimum(size + n, capacity), mask=last)


# Kernels


@triton.jit(
    do_not_specialize=["n_keys", "n", "capacity", "row_programs"],
    # Two words of an aligned index fit one access: the compiler would lay out all copies for that.
    do_not_specialize_on_alignment=["index_ptr", "generation_ptr"],
)
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
    TILE: tl.constexpr,
    ALIGNMENT: tl.constexpr,
):
    """arena[k, i] = storage[k, index[i]]; generation[i] = times that row was written.

    Grid: (row_programs + any number of copying programs,), where row_programs = cdiv(n, TILE).
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
        tiles, sizes, lanes = load_tiles(table_ptr, n_keys, n, KEYS, TILE)
        for tile in range(program - row_programs, tl.sum(tiles, 0), tl.num_programs(0) - row_programs):
            key, number, offset = find_tile(tiles, sizes, lanes, tile, ALIGNMENT)
            near, split, far, stride, alignment, row_bytes, first_row, first_byte = load_key(
                table_ptr, key, n, number, TILE
            )
            shift = unit_shift(alignment)
            element = tl.arange(0, TILE)
            row, column = rows_and_columns(
                element, (first_byte >> shift).to(tl.int32), (row_bytes >> shift).to(tl.int32), TILE
            )
            mask = row < n - first_row
            position, valid = normalise(tl.load(index_ptr + (first_row + row), mask=mask, other=0), capacity)
            source = row_address(position, near, split, far, stride) + (column.to(tl.int64) << shift)
            target = arena_ptr.to(tl.int64) + offset + first_row * row_bytes + first_byte
            copy_elements(source, target + (element << shift), shift, mask & valid, mask)


@triton.jit(
    do_not_specialize=["n_keys", "n", "capacity", "row_programs"],
    do_not_specialize_on_alignment=["index_ptr", "generation_ptr"],
)
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
    rng_offset = tl.load(rng_ptr + 1)
    ticket = take_ticket(rng_ptr + 2)
    if program < row_programs:
        row = program * TILE + tl.arange(0, TILE)
        position = draw_position(tl.load(rng_ptr), rng_offset + row, size)
        generation = generation_of(position, position >= 0, tl.load(ring_ptr), capacity)
        tl.store(index_ptr + row, position, mask=row < n)
        tl.store(generation_ptr + row, generation, mask=row < n)
        count_faults(ring_ptr, (row < n) & (position < 0))
    else:
        tiles, sizes, lanes = load_tiles(table_ptr, n_keys, n, KEYS, TILE)
        for tile in range(program - row_programs, tl.sum(tiles, 0), tl.num_programs(0) - row_programs):
            key, number, offset = find_tile(tiles, sizes, lanes, tile, ALIGNMENT)
            near, split, far, stride, alignment, row_bytes, first_row, first_byte = load_key(
                table_ptr, key, n, number, TILE
            )
            shift = unit_shift(alignment)
            words = (row_bytes >> shift).to(tl.int32)
            element = tl.arange(0, TILE)
            row, column = rows_and_columns(element, (first_byte >> shift).to(tl.int32), words, TILE)
            mask = row < n - first_row
            # The seed is loaded anew: its round keys, known before the loop, would take twenty registers through it.
            position = draw_tile(tl.load(rng_ptr), rng_offset + first_row, size, row, words, TILE)
            source = row_address(position, near, split, far, stride) + (column.to(tl.int64) << shift)
            target = arena_ptr.to(tl.int64) + offset + first_row * row_bytes + first_byte
            copy_elements(source, target + (element << shift), shift, mask & (position >= 0), mask)
    advance_state(rng_ptr, ticket, rng_offset + n)


@triton.jit(
    do_not_specialize=["n_keys", "n", "skipped", "capacity", "advance", "row_programs"],
    do_not_specialize_on_alignment=["index_ptr"],
)
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
    TILE: tl.constexpr,
    ALIGNMENT: tl.constexpr,
):
    """storage[k, (written + i) % capacity] = source[k, i] for i from ``skipped`` = max(n - capacity, 0) on.

    index[i] = (written + i) % capacity for all i. The counters move by ``advance``, n rows in the last launch of a
    write. Addresses and strides are odd numbers: Triton would compile a variant for every combination of those
    that are 1 or divisible by 16.

    Grid: (row_programs + any number of copying programs,), row_programs = cdiv(n, TILE) or 0; at least 1.
    """
    program = tl.program_id(0).to(tl.int64)
    n = n.to(tl.int64)
    capacity = capacity.to(tl.int64)
    written = tl.load(ring_ptr)
    size = tl.load(ring_ptr + 1)
    ticket = take_ticket(ring_ptr + 2)
    if program < row_programs:
        row = program * TILE + tl.arange(0, TILE)
        cursor = written - quotient(written, capacity) * capacity
        tl.store(index_ptr + row, (cursor + row) % capacity, mask=row < n)
    else:
        kept = n - skipped
        first = written + skipped
        cursor = first - quotient(first, capacity) * capacity
        tiles, sizes, lanes = load_tiles(table_ptr, n_keys, kept, KEYS, TILE)
        for tile in range(program - row_programs, tl.sum(tiles, 0), tl.num_programs(0) - row_programs):
            key, number, _ = find_tile(tiles, sizes, lanes, tile, ALIGNMENT)
            near, split, far, stride, alignment, row_bytes, first_row, first_byte = load_key(
                table_ptr, key, kept, number, TILE
            )
            source_stride = (select(key, source_strides) - 3) >> 1
            source_address = ((select(key, source_addresses) - 3) >> 1) + skipped * source_stride
            # A source that is aligned worse is copied in narrower elements, and takes more than one pass.
            shift = unit_shift(alignment | source_address | source_stride)
            words = (row_bytes >> shift).to(tl.int32)
            passes = 1 << (unit_shift(alignment) - shift)
            for part in range(0, passes):
                element = part * TILE + tl.arange(0, TILE)
                row, column = rows_and_columns(element, (first_byte >> shift).to(tl.int32), words, passes * TILE)
                row = first_row + row
                byte = column.to(tl.int64) << shift
                position = cursor + row
                position = tl.where(position < capacity, position, position - capacity)
                source = source_address + row * source_stride + byte
                target = row_address(position, near, split, far, stride) + byte
                copy_elements(source, target, shift, row < kept, row < kept)
    advance_ring(ring_ptr, ticket, written, size, advance, capacity)


@triton.jit(
    do_not_specialize=["n_keys", "n", "capacity", "row_programs"],
    do_not_specialize_on_alignment=["index_ptr", "winner_ptr"],
)
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
        _, valid = normalise(tl.load(index_ptr + row, mask=row < n, other=0), capacity)
        count_faults(ring_ptr, (row < n) & ~valid)
    else:
        tiles, sizes, lanes = load_tiles(table_ptr, n_keys, n, KEYS, TILE)
        for tile in range(program - row_programs, tl.sum(tiles, 0), tl.num_programs(0) - row_programs):
            key, number, _ = find_tile(tiles, sizes, lanes, tile, ALIGNMENT)
            near, split, far, stride, alignment, row_bytes, first_row, first_byte = load_key(
                table_ptr, key, n, number, TILE
            )
            source_address = (select(key, source_addresses) - 3) >> 1
            source_stride = (select(key, source_strides) - 3) >> 1
            # As in rows_extend_kernel.
            shift = unit_shift(alignment | source_address | source_stride)
            words = (row_bytes >> shift).to(tl.int32)
            passes = 1 << (unit_shift(alignment) - shift)
            for part in range(0, passes):
                element = part * TILE + tl.arange(0, TILE)
                row, column = rows_and_columns(element, (first_byte >> shift).to(tl.int32), words, passes * TILE)
                row = first_row + row
                byte = column.to(tl.int64) << shift
                mask = row < n
                position, valid = normalise(tl.load(index_ptr + row, mask=mask, other=0), capacity)
                winner = tl.load(winner_ptr + row, mask=mask, other=0).to(tl.int1)
                chosen = mask & valid & winner
                source = source_address + row * source_stride + byte
                target = row_address(position, near, split, far, stride) + byte
                copy_elements(source, target, shift, chosen, chosen)
