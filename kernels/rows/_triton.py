"""Rows on the GPU: table-driven copies of bytes, all keys in one launch.

The grid of every kernel is one-dimensional. The first ``row_programs`` programs write what each row has once: index,
generation, faults. The others copy *tiles*: ``TILE`` elements of one key's batch. An element has 16, 8, 4, 2 or 1
bytes, the widest that divides all of the key's addresses and strides. A thread moves a few elements whatever their
width, so that a tile of a one-byte key takes as long as a tile of a wide one.

The number of tiles follows from the table, which is on the device; the host only guesses it. Copying program ``p`` of
``P`` therefore copies the tiles ``p``, ``p + P``, ... It finds a tile's key by a search in the running sum of the keys'
tiles.
"""

import triton
import triton.language as tl

from gpubuf.kernels.philox._triton import OFFSET, SEED, TICKET, advance_state, take_ticket
from gpubuf.kernels.rows._triton_tiles import (
    RING_TICKET,
    SIZE,
    WRITTEN,
    advance_ring,
    copy_elements,
    count_faults,
    decoded,
    draw_position,
    draw_tile,
    find_tile,
    generation_of,
    load_key,
    load_tiles,
    normalise,
    quotient,
    row_address,
    rows_and_columns,
    select,
    unit_shift,
)


@triton.jit(
    do_not_specialize=["n_keys", "n", "capacity", "row_programs"],
    # Two words of an aligned index fit one access, and the compiler would lay out all copies for that.
    do_not_specialize_on_alignment=["index_ptr", "generation_ptr"],
)
def rows_gather_kernel(
    table_ptr,  # int64 [n_keys, 5]: (device rows, row bytes, split, host rows, row stride), see gpubuf.kernels.rows
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
        generation = generation_of(position, valid, tl.load(ring_ptr + WRITTEN), capacity)
        tl.store(generation_ptr + row, generation, mask=row < n)
        count_faults(ring_ptr, (row < n) & ~valid)
    else:
        tiles, sizes, lanes = load_tiles(table_ptr, n_keys, n, KEYS, TILE)
        for tile in range(program - row_programs, tl.sum(tiles, 0), tl.num_programs(0) - row_programs):
            key, number, offset = find_tile(tiles, sizes, lanes, tile, ALIGNMENT)
            device_rows, split, host_rows, stride, alignment, row_bytes, first_row, first_byte = load_key(
                table_ptr, key, n, number, TILE
            )
            shift = unit_shift(alignment)
            element = tl.arange(0, TILE)
            row, column = rows_and_columns(
                element, (first_byte >> shift).to(tl.int32), (row_bytes >> shift).to(tl.int32), TILE
            )
            mask = row < n - first_row
            position, valid = normalise(tl.load(index_ptr + (first_row + row), mask=mask, other=0), capacity)
            source = row_address(position, device_rows, split, host_rows, stride) + (column.to(tl.int64) << shift)
            target = arena_ptr.to(tl.int64) + offset + first_row * row_bytes + first_byte
            copy_elements(source, target + (element << shift), shift, mask & valid, mask)


@triton.jit(
    do_not_specialize=["n_keys", "n", "capacity", "row_programs"],
    do_not_specialize_on_alignment=["index_ptr", "generation_ptr"],
)
def rows_sample_kernel(
    table_ptr,  # int64 [n_keys, 5]: (device rows, row bytes, split, host rows, row stride), see gpubuf.kernels.rows
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
    size = tl.load(ring_ptr + SIZE)
    rng_offset = tl.load(rng_ptr + OFFSET)
    # Before the ticket, which waits for the loads before it and holds up those after it.
    tiles, sizes, lanes = load_tiles(table_ptr, n_keys, n, KEYS, TILE)
    ticket = take_ticket(rng_ptr + TICKET)
    if program < row_programs:
        row = program * TILE + tl.arange(0, TILE)
        position = draw_position(tl.load(rng_ptr + SEED), rng_offset + row, size)
        generation = generation_of(position, position >= 0, tl.load(ring_ptr + WRITTEN), capacity)
        tl.store(index_ptr + row, position, mask=row < n)
        tl.store(generation_ptr + row, generation, mask=row < n)
        count_faults(ring_ptr, (row < n) & (position < 0))
    else:
        for tile in range(program - row_programs, tl.sum(tiles, 0), tl.num_programs(0) - row_programs):
            key, number, offset = find_tile(tiles, sizes, lanes, tile, ALIGNMENT)
            device_rows, split, host_rows, stride, alignment, row_bytes, first_row, first_byte = load_key(
                table_ptr, key, n, number, TILE
            )
            shift = unit_shift(alignment)
            words = (row_bytes >> shift).to(tl.int32)
            element = tl.arange(0, TILE)
            row, column = rows_and_columns(element, (first_byte >> shift).to(tl.int32), words, TILE)
            mask = row < n - first_row
            # The seed is loaded here: hoisted out of the loop, its round keys would occupy twenty registers.
            position = draw_tile(tl.load(rng_ptr + SEED), rng_offset + first_row, size, row, words, TILE)
            source = row_address(position, device_rows, split, host_rows, stride) + (column.to(tl.int64) << shift)
            target = arena_ptr.to(tl.int64) + offset + first_row * row_bytes + first_byte
            copy_elements(source, target + (element << shift), shift, mask & (position >= 0), mask)
    advance_state(rng_ptr, ticket, rng_offset + n)


@triton.jit(
    do_not_specialize=["n_keys", "n", "skipped", "capacity", "advance", "row_programs"],
    do_not_specialize_on_alignment=["index_ptr"],
)
def rows_extend_kernel(
    table_ptr,  # int64 [n_keys, 5]: (device rows, row bytes, split, host rows, row stride), see gpubuf.kernels.rows
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
    written = tl.load(ring_ptr + WRITTEN)
    size = tl.load(ring_ptr + SIZE)
    ticket = take_ticket(ring_ptr + RING_TICKET)
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
            device_rows, split, host_rows, stride, alignment, row_bytes, first_row, first_byte = load_key(
                table_ptr, key, kept, number, TILE
            )
            source_stride = decoded(select(key, source_strides))
            source_address = decoded(select(key, source_addresses)) + skipped * source_stride
            # A worse aligned source is copied in narrower elements, in more than one pass.
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
                target = row_address(position, device_rows, split, host_rows, stride) + byte
                copy_elements(source, target, shift, row < kept, row < kept)
    advance_ring(ring_ptr, ticket, written, size, advance, capacity)


@triton.jit(
    do_not_specialize=["n_keys", "n", "capacity", "row_programs"],
    do_not_specialize_on_alignment=["index_ptr", "winner_ptr"],
)
def rows_write_kernel(
    table_ptr,  # int64 [n_keys, 5]: (device rows, row bytes, split, host rows, row stride), see gpubuf.kernels.rows
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
            device_rows, split, host_rows, stride, alignment, row_bytes, first_row, first_byte = load_key(
                table_ptr, key, n, number, TILE
            )
            source_address = decoded(select(key, source_addresses))
            source_stride = decoded(select(key, source_strides))
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
                target = row_address(position, device_rows, split, host_rows, stride) + byte
                copy_elements(source, target, shift, chosen, chosen)
