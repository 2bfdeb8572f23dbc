"""Transitions on the GPU: batches, computed or copied, all fields in one launch.

Grids and tiles are those of :mod:`gpubuf.kernels.rows._triton`: the first ``row_programs`` programs write what each row
of the batch has once, the others have tiles of fields. Arguments that are None on the host are any address here, and
their ``HAS_`` is False.
"""

import triton
import triton.language as tl

from gpubuf.kernels.philox._triton import OFFSET, TICKET, advance_state, take_ticket
from gpubuf.kernels.rows._triton_tiles import SIZE, WRITTEN, count_faults
from gpubuf.kernels.transitions._triton_batch import make_tiles
from gpubuf.kernels.transitions._triton_fields import (
    STEPS,
    float_of,
    load_places,
    load_positions,
    newest_step,
    quotient,
)


@triton.jit
def _make_rows(
    ring_ptr,
    ends_ptr,
    links_ptr,
    index_ptr,
    rng_ptr,
    drawn_ptr,
    generation_ptr,
    rng_offset,
    size,
    written,
    newest,
    row,
    n,
    rows,
    steps,
    envs,
    n_steps,
    HAS_ENDS: tl.constexpr,
    HAS_LINKS: tl.constexpr,
    SAMPLE: tl.constexpr,
):
    """Index, generation and faults of rows of a batch."""
    position, valid = load_positions(index_ptr, rng_ptr, rng_offset, size, row, n, rows, steps * envs, SAMPLE)
    if SAMPLE:
        tl.store(drawn_ptr + row, position, mask=row < rows)
    if HAS_LINKS:
        place = load_places(
            ends_ptr, links_ptr, position, valid, STEPS, newest, steps, envs, n_steps, HAS_ENDS, HAS_LINKS
        )
        valid = place >= 0
    laps = quotient(written, steps * envs)
    generation = laps + (position < written - laps * (steps * envs)).to(tl.int64)
    tl.store(generation_ptr + row, tl.where(valid, generation, -1), mask=row < rows)
    count_faults(ring_ptr, (row < n) & ~valid)


@triton.jit(
    do_not_specialize=[
        "n_keys",
        "n",
        "rows",
        "steps",
        "envs",
        "n_steps",
        "gamma_bits",
        "mirror",
        "draws",
        "row_programs",
    ],
    # As in rows_gather_kernel.
    do_not_specialize_on_alignment=["index_ptr", "generation_ptr"],
)
def transitions_gather_kernel(
    fields_ptr,  # int64 [n_keys, 32], see gpubuf.kernels.transitions.Field
    ring_ptr,  # int64 [4]: (written, size, ticket, faults)
    ends_ptr,  # int64 [cdiv(steps, 64) * envs], HAS_ENDS
    links_ptr,  # int32 [capacity], HAS_LINKS
    noise_ptr,  # int64 [3]: (seed, offset, ticket), advanced by rows * draws, HAS_NOISE
    index_ptr,  # int64 [n]
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
    KEYS: tl.constexpr,
    TILE: tl.constexpr,
    ALIGNMENT: tl.constexpr,
):
    """arena[f, b] = field f of the batch's row b, from row index[b] or index[b - n]; generation of that row.

    rows = n, or 2 n if mirror is DOUBLED. gamma_bits are the bits of a float64. A row out of range, or whose next
    observation is lost, reads as zeros and counts as a fault.
    Grid: (row_programs + any number of tile programs,), where row_programs = cdiv(rows, TILE).
    """
    program = tl.program_id(0).to(tl.int64)
    n = n.to(tl.int64)
    envs = envs.to(tl.int64)
    n_steps = n_steps.to(tl.int64)
    draws = draws.to(tl.int64)
    steps = steps.to(tl.int64)
    rows = rows.to(tl.int64)
    written = tl.load(ring_ptr + WRITTEN)
    newest = newest_step(written, steps, envs)
    noise_offset = n * 0
    if HAS_NOISE:
        noise_offset = tl.load(noise_ptr + OFFSET)
        noise_ticket = take_ticket(noise_ptr + TICKET)
    if program < row_programs:
        _make_rows(
            ring_ptr,
            ends_ptr,
            links_ptr,
            index_ptr,
            noise_ptr,
            generation_ptr,
            generation_ptr,
            noise_offset,
            n,
            written,
            newest,
            program * TILE + tl.arange(0, TILE),
            n,
            rows,
            steps,
            envs,
            n_steps,
            HAS_ENDS,
            HAS_LINKS,
            False,
        )
    else:
        make_tiles(
            fields_ptr,
            ends_ptr,
            links_ptr,
            noise_ptr,
            index_ptr,
            noise_ptr,
            arena_ptr,
            noise_offset,
            noise_offset,
            n,
            newest,
            program - row_programs,
            tl.num_programs(0) - row_programs,
            n_keys,
            n,
            rows,
            steps,
            envs,
            n_steps,
            float_of(gamma_bits.to(tl.int64)),
            mirror,
            draws,
            HAS_ENDS,
            HAS_LINKS,
            HAS_NOISE,
            False,
            KEYS,
            TILE,
            ALIGNMENT,
        )
    if HAS_NOISE:
        advance_state(noise_ptr, noise_ticket, noise_offset + rows * draws)


@triton.jit(
    do_not_specialize=[
        "n_keys",
        "n",
        "rows",
        "steps",
        "envs",
        "n_steps",
        "gamma_bits",
        "mirror",
        "draws",
        "row_programs",
    ],
    do_not_specialize_on_alignment=["index_ptr", "generation_ptr"],
)
def transitions_sample_kernel(
    fields_ptr,  # int64 [n_keys, 32], see gpubuf.kernels.transitions.Field
    ring_ptr,  # int64 [4]: (written, size, ticket, faults)
    ends_ptr,  # int64 [cdiv(steps, 64) * envs], HAS_ENDS
    links_ptr,  # int32 [capacity], HAS_LINKS
    noise_ptr,  # int64 [3]: (seed, offset, ticket), advanced by rows * draws, HAS_NOISE
    rng_ptr,  # int64 [3]: (seed, offset, ticket), advanced by n
    arena_ptr,  # uint8 [arena_bytes], 64-byte aligned
    index_ptr,  # int64 [rows], output
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
    KEYS: tl.constexpr,
    TILE: tl.constexpr,
    ALIGNMENT: tl.constexpr,
):
    """index[b] = min(floor(uniform(seed, offset + b) * size), size - 1), b < n, then as transitions_gather_kernel.

    Every program draws for itself the rows that it makes: the generator is counter-based. Grid: as there.
    """
    program = tl.program_id(0).to(tl.int64)
    n = n.to(tl.int64)
    envs = envs.to(tl.int64)
    n_steps = n_steps.to(tl.int64)
    draws = draws.to(tl.int64)
    steps = steps.to(tl.int64)
    rows = rows.to(tl.int64)
    written = tl.load(ring_ptr + WRITTEN)
    size = tl.load(ring_ptr + SIZE)
    newest = newest_step(written, steps, envs)
    noise_offset = n * 0
    if HAS_NOISE:
        noise_offset = tl.load(noise_ptr + OFFSET)
        noise_ticket = take_ticket(noise_ptr + TICKET)
    rng_offset = tl.load(rng_ptr + OFFSET)
    ticket = take_ticket(rng_ptr + TICKET)
    if program < row_programs:
        _make_rows(
            ring_ptr,
            ends_ptr,
            links_ptr,
            index_ptr,
            rng_ptr,
            index_ptr,
            generation_ptr,
            rng_offset,
            size,
            written,
            newest,
            program * TILE + tl.arange(0, TILE),
            n,
            rows,
            steps,
            envs,
            n_steps,
            HAS_ENDS,
            HAS_LINKS,
            True,
        )
    else:
        make_tiles(
            fields_ptr,
            ends_ptr,
            links_ptr,
            noise_ptr,
            index_ptr,
            rng_ptr,
            arena_ptr,
            rng_offset,
            noise_offset,
            size,
            newest,
            program - row_programs,
            tl.num_programs(0) - row_programs,
            n_keys,
            n,
            rows,
            steps,
            envs,
            n_steps,
            float_of(gamma_bits.to(tl.int64)),
            mirror,
            draws,
            HAS_ENDS,
            HAS_LINKS,
            HAS_NOISE,
            True,
            KEYS,
            TILE,
            ALIGNMENT,
        )
    advance_state(rng_ptr, ticket, rng_offset + n)
    if HAS_NOISE:
        advance_state(noise_ptr, noise_ticket, noise_offset + rows * draws)
