"""The trajectory index on the GPU: the kernels that change it, and the bitmap of eligible starts.

Arguments that kernels share are listed in :mod:`gpubuf.kernels.trajectories._triton` and ``_triton_stages``.
"""

import triton
import triton.language as tl

from gpubuf.kernels.rows._triton_tiles import (
    DEVICE_ROWS,
    ENTRY,
    HOST_ROWS,
    ROW_BYTES,
    ROW_STRIDE,
    SPLIT,
    normalise,
    row_address,
)
from gpubuf.kernels.trajectories._triton import bit, last_age, load_ring, locate, step_of, words_of
from gpubuf.kernels.trajectories._triton_stages import (
    all_sums,
    first_word,
    run_above,
    run_of_bits,
    run_of_bytes,
    stage_bits,
    stage_bits_above,
    stage_sums,
    stage_weights,
    sums_start,
    wrapped,
)


@triton.jit
def lane_of(i, run, envs, ENVS: tl.constexpr):
    """Lane ``i`` of a program that has ``ENVS`` environments: (number in the run, environment, whether it is one).

    A program has few lanes: their numbers, unlike those of steps, are int32.
    """
    # Both divisions are by a constant power of two: shifts. All others by run-time sizes that need not be powers.
    j = (i // ENVS).to(tl.int64)
    env = tl.program_id(0).to(tl.int64) * ENVS + i % ENVS
    return j, env, (j < run) & (env < envs)


@triton.jit(
    do_not_specialize=[
        "n_signals", "n", "run_words", "n_others", "words", "depth",
        "steps", "envs", "levels", "slice_len", "min_len", "before", "after",
    ]
)  # fmt: skip
def trajectories_update_envs_kernel(
    ends_ptr,
    sums_ptr,
    ring_ptr,
    signals_ptr,
    others_ptr,
    n_signals,
    n,
    run_words,
    n_others,  # E; 0 for a rebuild
    words,  # of level 0, all environments
    depth,  # levels of sums above the weights
    steps,
    envs,
    levels,
    slice_len,
    min_len,
    before,
    after,
    BY_ID: tl.constexpr,
    BY_TRANSITION: tl.constexpr,
    SUMS: tl.constexpr,
    SPAN: tl.constexpr,
    SHIFT: tl.constexpr,
    BLOCK_ENVS: tl.constexpr,
    BLOCK_BYTES: tl.constexpr,
    BLOCK_WEIGHTS: tl.constexpr,
    BLOCK_NODES: tl.constexpr,
):
    """Bits and weights of BLOCK_ENVS environments by one program; with SUMS, which needs a grid of one, all else too.

    Grid: (cdiv(envs, BLOCK_ENVS),).
    """
    n = n.to(tl.int64)
    steps = steps.to(tl.int64)
    envs = envs.to(tl.int64)
    words = words.to(tl.int64)
    run_words = run_words.to(tl.int64)
    slice_len = slice_len.to(tl.int64)
    cursor, filled, oldest = load_ring(ring_ptr, steps, envs)
    block = tl.arange(0, BLOCK_BYTES)
    first, last = run_of_bits(cursor, n, steps, BY_ID)
    _, count, _ = run_of_bytes(first, last, steps, n >= steps)
    for start in range(0, count.to(tl.int32) * BLOCK_ENVS, BLOCK_BYTES):
        j, env, active = lane_of(start + block, count, envs, BLOCK_ENVS)
        stage_bits(ends_ptr, signals_ptr, n_signals, cursor, filled, n, j, env, active, steps, envs, BY_ID, SPAN)
    # The level below is complete. The ring is read again: over the flags there are no registers to hold it.
    tl.debug_barrier()
    cursor, filled, oldest = load_ring(ring_ptr, steps, envs)
    first, last = run_of_bits(cursor, n, steps, BY_ID)
    below = steps * 0
    positions = steps
    for _ in range(1, levels):
        positions = (positions + 63) >> 6
        first, last, _ = run_above(first, last, positions)
        _, count, _ = run_of_bytes(first, last, positions, n >= steps)
        for start in range(0, count.to(tl.int32) * BLOCK_ENVS, BLOCK_BYTES):
            j, env, active = lane_of(start + block, count, envs, BLOCK_ENVS)
            stage_bits_above(ends_ptr, below, first, last, positions, n >= steps, j, env, active, envs)
        below += positions * envs
        tl.debug_barrier()
    block = tl.arange(0, BLOCK_WEIGHTS)
    run = run_words + (n_others > 0).to(tl.int64)
    for start in range(0, run.to(tl.int32) * BLOCK_ENVS, BLOCK_WEIGHTS):
        j, env, active = lane_of(start + block, run, envs, BLOCK_ENVS)
        stage_weights(
            ends_ptr,
            sums_ptr,
            others_ptr,
            cursor,
            filled,
            oldest,
            n,
            j,
            env,
            active,
            run_words,
            steps,
            envs,
            levels,
            slice_len,
            min_len,
            before,
            after,
            BY_TRANSITION,
        )
    if SUMS:
        begin = first_word(cursor, n, steps, envs)
        all_sums(sums_ptr, others_ptr, begin, run_words * envs, n_others, 1, depth, words, SHIFT, BLOCK_NODES)


@triton.jit
def _entry_at(entry_ptr, row):
    """(address of a row, all that must be aligned for wide loads) of an entry of a table."""
    device_rows = tl.load(entry_ptr + DEVICE_ROWS)
    host_rows = tl.load(entry_ptr + HOST_ROWS)
    stride = tl.load(entry_ptr + ROW_STRIDE)
    at = row_address(row, device_rows, tl.load(entry_ptr + SPLIT), host_rows, stride)
    return at, device_rows | host_rows | stride


@triton.jit
def _any_differs(here, there, column, row_bytes, active, DTYPE: tl.constexpr, BLOCK_COLUMNS: tl.constexpr):
    """int32 [R, BLOCK_COLUMNS], some not zero in each active row whose bytes differ from the other's."""
    size: tl.constexpr = DTYPE.primitive_bitwidth // 8
    pointer: tl.constexpr = tl.pointer_type(DTYPE)
    found = (column * 0).to(tl.int32) + (active * 0).to(tl.int32)
    for begin in range(0, row_bytes, BLOCK_COLUMNS * size):
        byte = begin + column * size
        inside = active & (byte < row_bytes)
        value = tl.load((here + byte).to(pointer), mask=inside, other=0)
        found |= (value != tl.load((there + byte).to(pointer), mask=inside, other=0)).to(tl.int32)
    return found


@triton.jit(do_not_specialize=["n_pairs", "count", "steps", "envs"], do_not_specialize_on_alignment=["index_ptr"])
def trajectories_compare_kernel(
    breaks_ptr,  # uint8 [T * E]
    ring_ptr,
    pairs_ptr,  # int64 [n_pairs, 2, 5]
    index_ptr,  # int64 [count // 2], HAS_INDEX
    n_pairs,
    count,  # rows that are looked at
    steps,
    envs,
    HAS_INDEX: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
):
    """Which rows are not continued by the next one: see the operation. Grid: (cdiv(count, BLOCK_ROWS),)."""
    steps = steps.to(tl.int64)
    envs = envs.to(tl.int64)
    _, filled, oldest = load_ring(ring_ptr, steps, envs)
    i = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    active = i < count
    if HAS_INDEX:
        row, there = normalise(tl.load(index_ptr + (i >> 1), mask=active, other=0), steps * envs)
        active = active & there
        row = tl.where((i & 1) != 0, row - envs, row)
        row = tl.where(row < 0, row + steps * envs, row)
    else:
        # The newest step comes first.
        age = filled - 1 - i // envs
        active = active & (age >= 0)
        row = step_of(tl.maximum(age, 0), oldest, steps) * envs + i % envs
    step, _, age, stored = locate(row, active, filled, oldest, steps, envs)
    followed = (stored & (age < filled - 1))[:, None]
    following = tl.where(step == steps - 1, row - (steps - 1) * envs, row + envs)
    column = tl.arange(0, BLOCK_COLUMNS).to(tl.int64)[None, :]
    found = tl.zeros([BLOCK_ROWS, BLOCK_COLUMNS], tl.int32)
    for k in range(0, n_pairs):
        entry_ptr = pairs_ptr + 2 * k * ENTRY
        # Names of their own: a loop carries one that is there before, with the type that it has there.
        here, aligned = _entry_at(entry_ptr, row)
        behind, aligned_behind = _entry_at(entry_ptr + ENTRY, following)
        row_bytes = tl.load(entry_ptr + ROW_BYTES)
        aligned |= aligned_behind | row_bytes
        if (aligned & 7) == 0:
            found |= _any_differs(here[:, None], behind[:, None], column, row_bytes, followed, tl.int64, BLOCK_COLUMNS)
        elif (aligned & 3) == 0:
            found |= _any_differs(here[:, None], behind[:, None], column, row_bytes, followed, tl.int32, BLOCK_COLUMNS)
        else:
            found |= _any_differs(here[:, None], behind[:, None], column, row_bytes, followed, tl.uint8, BLOCK_COLUMNS)
    # A row that is named twice gets the same flag from both programs.
    tl.store(breaks_ptr + row, tl.max(found, 1).to(tl.uint8), mask=stored)


@triton.jit(do_not_specialize=["n_signals", "n", "steps", "envs"])
def trajectories_bits_kernel(
    ends_ptr,
    ring_ptr,
    signals_ptr,
    n_signals,
    n,
    steps,
    envs,
    BY_ID: tl.constexpr,
    SPAN: tl.constexpr,
    BLOCK_BYTES: tl.constexpr,
):
    """First launch of a large update: the flags of the steps written. Grid: (cdiv(bytes of the run, BLOCK_BYTES),)."""
    n = n.to(tl.int64)
    steps = steps.to(tl.int64)
    envs = envs.to(tl.int64)
    cursor, filled, _ = load_ring(ring_ptr, steps, envs)
    i = tl.program_id(0).to(tl.int64) * BLOCK_BYTES + tl.arange(0, BLOCK_BYTES)
    j = i // envs
    active = j >= 0
    env = i - j * envs
    stage_bits(ends_ptr, signals_ptr, n_signals, cursor, filled, n, j, env, active, steps, envs, BY_ID, SPAN)


@triton.jit(do_not_specialize=["n", "level", "steps", "envs"])
def trajectories_bits_above_kernel(
    ends_ptr,
    ring_ptr,
    n,
    level,
    steps,
    envs,
    BY_ID: tl.constexpr,
    BLOCK_BYTES: tl.constexpr,
):
    """The next launches: the summaries on ``level``, from 1 up. Grid: (cdiv(bytes of the run, BLOCK_BYTES),)."""
    n = n.to(tl.int64)
    steps = steps.to(tl.int64)
    envs = envs.to(tl.int64)
    cursor, _, _ = load_ring(ring_ptr, steps, envs)
    first, last = run_of_bits(cursor, n, steps, BY_ID)
    first, last, _ = run_above(first, last, words_of(steps, 0))
    below = steps * 0
    for lower in range(1, level):
        below += words_of(steps, lower - 1) * envs
        first, last, _ = run_above(first, last, words_of(steps, lower))
    i = tl.program_id(0).to(tl.int64) * BLOCK_BYTES + tl.arange(0, BLOCK_BYTES)
    j = i // envs
    active = j >= 0
    stage_bits_above(
        ends_ptr, below, first, last, words_of(steps, level - 1), n >= steps, j, i - j * envs, active, envs
    )


@triton.jit(
    do_not_specialize=[
        "n", "run_words", "n_others", "steps", "envs", "levels", "slice_len", "min_len", "before", "after"
    ]
)  # fmt: skip
def trajectories_weights_kernel(
    ends_ptr,
    sums_ptr,
    ring_ptr,
    others_ptr,
    n,
    run_words,
    n_others,  # E; 0 where all words are in the run
    steps,
    envs,
    levels,
    slice_len,
    min_len,
    before,
    after,
    BY_TRANSITION: tl.constexpr,
    BLOCK_WEIGHTS: tl.constexpr,
):
    """The weights, when all bits are there. Grid: (cdiv(run_words * envs + n_others, BLOCK_WEIGHTS),)."""
    steps = steps.to(tl.int64)
    envs = envs.to(tl.int64)
    run_words = run_words.to(tl.int64)
    cursor, filled, oldest = load_ring(ring_ptr, steps, envs)
    i = tl.program_id(0).to(tl.int64) * BLOCK_WEIGHTS + tl.arange(0, BLOCK_WEIGHTS)
    j = i // envs
    stage_weights(
        ends_ptr,
        sums_ptr,
        others_ptr,
        cursor,
        filled,
        oldest,
        n.to(tl.int64),
        j,
        i - j * envs,
        i < run_words * envs + n_others,
        run_words,
        steps,
        envs,
        levels,
        slice_len.to(tl.int64),
        min_len,
        before,
        after,
        BY_TRANSITION,
    )


@triton.jit(do_not_specialize=["n", "run", "n_others", "level", "words", "steps", "envs"])
def trajectories_sums_kernel(
    sums_ptr,
    ring_ptr,
    others_ptr,
    n,
    run,  # words in the run, all environments
    n_others,
    level,
    words,  # of level 0, all environments
    steps,
    envs,
    SHIFT: tl.constexpr,
    BLOCK_NODES: tl.constexpr,
):
    """A wide level of sums. Grid: (cdiv(entries, BLOCK_NODES),), entries as ``sums_entries`` has them."""
    words = words.to(tl.int64)
    i = tl.program_id(0).to(tl.int64) * BLOCK_NODES + tl.arange(0, BLOCK_NODES)
    steps = steps.to(tl.int64)
    envs = envs.to(tl.int64)
    cursor, _, _ = load_ring(ring_ptr, steps, envs)
    begin = first_word(cursor, n.to(tl.int64), steps, envs)
    below = sums_start(words, level - 1, SHIFT)
    stage_sums(sums_ptr, others_ptr, begin, run.to(tl.int64), n_others, i, level, below, words, SHIFT)


@triton.jit(do_not_specialize=["n", "run", "n_others", "first_level", "depth", "words", "steps", "envs"])
def trajectories_top_kernel(
    sums_ptr,
    ring_ptr,
    others_ptr,
    n,
    run,  # words in the run, all environments
    n_others,
    first_level,
    depth,
    words,  # of level 0, all environments
    steps,
    envs,
    SHIFT: tl.constexpr,
    BLOCK_NODES: tl.constexpr,
):
    """The narrow levels of sums, from ``first_level`` up to the root. Grid: (1,)."""
    steps = steps.to(tl.int64)
    envs = envs.to(tl.int64)
    cursor, _, _ = load_ring(ring_ptr, steps, envs)
    begin = first_word(cursor, n.to(tl.int64), steps, envs)
    words = words.to(tl.int64)
    all_sums(sums_ptr, others_ptr, begin, run.to(tl.int64), n_others, first_level, depth, words, SHIFT, BLOCK_NODES)


@triton.jit(do_not_specialize=["n_rows", "touched", "need", "run", "steps", "envs", "levels"])
def trajectories_update_eligible_kernel(
    eligible_ptr,  # int64 [eligible words]
    ends_ptr,
    ring_ptr,
    rows_ptr,  # int64 [n_rows]
    n_rows,
    touched,  # steps, n_rows / E
    need,
    run,  # words of ``eligible`` that hold these rows, a bound
    steps,
    envs,
    levels,
    STARTS_TOO: tl.constexpr,
    BLOCK_WORDS: tl.constexpr,
):
    """Whole words of ``eligible``: a row's bit follows from the index alone. Lanes also write which rows they are for.

    Grid: (cdiv(run, BLOCK_WORDS),); 64 * run is at least n_rows.
    """
    steps = steps.to(tl.int64)
    envs = envs.to(tl.int64)
    n_rows = n_rows.to(tl.int64)
    cursor, filled, oldest = load_ring(ring_ptr, steps, envs)
    capacity = steps * envs
    # The run ends with the step after the newest.
    begin = wrapped(cursor + 1 - touched, steps) * envs
    words = (capacity + 63) >> 6

    lane = tl.arange(0, BLOCK_WORDS * 64).to(tl.int64)
    i = tl.program_id(0).to(tl.int64) * BLOCK_WORDS * 64 + lane
    tl.store(rows_ptr + i, wrapped(begin + i, capacity), mask=i < n_rows)

    number = i >> 6
    word = wrapped((begin >> 6) + number, words)
    row = (word << 6) + (i & 63)
    step, env, age, stored = locate(row, number < run, filled, oldest, steps, envs)
    last = last_age(ends_ptr, step, env, age, stored, filled, oldest, steps, envs, levels)
    eligible = last - age + 1 >= need
    if STARTS_TOO:
        step_before = wrapped(step - 1, steps)
        searched = stored & (age > 0)
        flags = tl.load(ends_ptr + (step_before >> 6) * envs + env, mask=searched, other=-1)
        eligible = eligible | ((flags & bit(step_before)) != 0)
    bits = tl.where(stored & eligible, bit(row), 0)
    result = tl.sum(tl.reshape(bits, (BLOCK_WORDS, 64)), axis=1)
    number = tl.program_id(0).to(tl.int64) * BLOCK_WORDS + tl.arange(0, BLOCK_WORDS)
    tl.store(eligible_ptr + wrapped((begin >> 6) + number, words), result, mask=number < run)
