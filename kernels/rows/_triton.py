"""Rows on the GPU: batches, copied or computed, all keys in one launch.

The grid of every kernel is one-dimensional. The first ``row_programs`` programs write what each row has once: index,
generation, faults. The others copy *tiles*: ``TILE`` elements of one key's batch. An element has 16, 8, 4, 2 or 1
bytes, the widest that divides all of the key's addresses and strides. A thread moves a few elements whatever their
width, so that a tile of a one-byte key takes as long as a tile of a wide one.

The number of tiles follows from the table, which is on the device; the host only guesses it. Copying program ``p`` of
``P`` therefore copies the tiles ``p``, ``p + P``, ... It finds a tile's key by a search in the running sum of the keys'
tiles.

Arguments of :func:`rows_compute_kernel` that are None on the host are any address here, and their ``HAS_`` is False.
"""

import triton
import triton.language as tl

from gpubuf.kernels.philox._triton import OFFSET, SEED, TICKET, advance_state, take_ticket
from gpubuf.kernels.rows._triton_fields import (
    STEPS,
    float_of,
    load_places,
    load_positions,
    make_tiles,
    newest_step,
)
from gpubuf.kernels.rows._triton_tiles import (
    SIZE,
    WRITTEN,
    copy_elements,
    count_faults,
    draw_position,
    draw_tile,
    find_tile,
    generation_of,
    load_key,
    load_tiles,
    normalise,
    row_address,
    rows_and_columns,
    unit_shift,
)


@triton.jit(
    do_not_specialize=["n_keys", "n", "capacity", "row_programs"],
    # Two words of an aligned index fit one access, and the compiler would lay out all copies for that.
    do_not_specialize_on_alignment=["index_ptr", "generation_ptr"],
)
def rows_gather_kernel(
    table_ptr,  # int64 [n_keys, 5]: (device rows, row bytes, split, host rows, row stride), see table_entry
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
    table_ptr,  # int64 [n_keys, 5]: (device rows, row bytes, split, host rows, row stride), see table_entry
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
    do_not_specialize=[
        "n_keys", "n", "rows", "steps", "envs", "n_steps", "gamma_bits", "mirror", "draws", "row_programs"
    ],
    do_not_specialize_on_alignment=["index_ptr", "generation_ptr"],
)  # fmt: skip
def rows_compute_kernel(
    fields_ptr,  # int64 [n_keys, 32], see gpubuf.kernels.rows.Field
    ring_ptr,  # int64 [4]: (written, size, ticket, faults)
    ends_ptr,  # int64 [cdiv(steps, 64) * envs], HAS_ENDS
    links_ptr,  # int32 [capacity], HAS_LINKS
    noise_ptr,  # int64 [3]: (seed, offset, ticket), advanced by rows * draws, HAS_NOISE
    rng_ptr,  # int64 [3]: (seed, offset, ticket), advanced by n, SAMPLE
    index_ptr,  # int64 [n]; with SAMPLE [rows], output
    arena_ptr,  # uint8 [arena_bytes], 64-byte aligned
    generation_ptr,  # int64 [rows]
    n_keys,
    n,
    rows,
    steps,
    envs,
    n_steps,
    gamma_bits,
    mirror,
    draws,
    row_programs,
    HAS_ENDS: tl.constexpr,
    HAS_LINKS: tl.constexpr,
    HAS_NOISE: tl.constexpr,
    SAMPLE: tl.constexpr,
    KEYS: tl.constexpr,
    TILE: tl.constexpr,
    ALIGNMENT: tl.constexpr,
):
    """arena[f, b] = field f of the batch's row b, from row index[b] or index[b - n]; generation of that row.

    With SAMPLE index[b] = min(floor(uniform(seed, offset + b) * size), size - 1), b < n: every program draws for itself
    the rows that it makes, for the generator is counter-based. rows = n, or 2 n if mirror is DOUBLED. gamma_bits are
    those of a float64. A row out of range, or whose next observation is lost, reads as zeros and counts as a fault.

    Grid: (row_programs + any number of tile programs,), where row_programs = cdiv(rows, TILE).
    """
    program = tl.program_id(0).to(tl.int64)
    n = n.to(tl.int64)
    envs = envs.to(tl.int64)
    draws = draws.to(tl.int64)
    steps = steps.to(tl.int64)
    rows = rows.to(tl.int64)
    written = tl.load(ring_ptr + WRITTEN)
    size = n
    if SAMPLE:
        size = tl.load(ring_ptr + SIZE)
    noise_offset = n * 0
    if HAS_NOISE:
        noise_offset = tl.load(noise_ptr + OFFSET)
        noise_ticket = take_ticket(noise_ptr + TICKET)
    rng_offset = noise_offset
    if SAMPLE:
        rng_offset = tl.load(rng_ptr + OFFSET)
        ticket = take_ticket(rng_ptr + TICKET)
    memory = (ends_ptr, links_ptr, noise_ptr, index_ptr, rng_ptr)
    before = (noise_offset, rng_offset, size)
    batch = (n, rows, mirror, draws)
    window = (newest_step(written, steps, envs), steps, envs, n_steps.to(tl.int64))
    if program < row_programs:
        row = program * TILE + tl.arange(0, TILE)
        # A name for these would make numbers of them.
        position, valid = load_positions(
            memory, before, batch, row, steps * envs, (HAS_ENDS, HAS_LINKS, HAS_NOISE, SAMPLE)
        )
        if SAMPLE:
            tl.store(index_ptr + row, position, mask=row < rows)
        if HAS_LINKS:
            places = load_places(memory, position, valid, STEPS, window, (HAS_ENDS, HAS_LINKS, HAS_NOISE, SAMPLE))
            valid = places >= 0
        generation = generation_of(position, valid, written, steps * envs)
        tl.store(generation_ptr + row, generation, mask=row < rows)
        count_faults(ring_ptr, (row < n) & ~valid)
    else:
        make_tiles(
            fields_ptr,
            arena_ptr,
            memory,
            before,
            batch,
            window,
            float_of(gamma_bits.to(tl.int64)),
            program - row_programs,
            tl.num_programs(0) - row_programs,
            n_keys,
            (HAS_ENDS, HAS_LINKS, HAS_NOISE, SAMPLE),
            KEYS,
            TILE,
            ALIGNMENT,
        )
    if SAMPLE:
        advance_state(rng_ptr, ticket, rng_offset + n)
    if HAS_NOISE:
        advance_state(noise_ptr, noise_ticket, noise_offset + rows * draws)
