"""The trajectory index on the GPU: the kernels that change it, and the bitmap of eligible starts.

Arguments that kernels share are listed in :mod:`gpubuf.kernels.trajectories._triton` and ``_triton_stages``.
"""

import triton
import triton.language as tl

from gpubuf.kernels.trajectories._triton import bit, last_age, load_ring, locate, words_of
from gpubuf.kernels.trajectories._triton_stages import (
    all_sums,
    bits_bound,
    first_word,
    stage_bits,
    stage_bits_above,
    stage_sums,
    stage_weights,
    sums_start,
    wrapped,
)


@triton.jit
def lane_of(i, run, envs, ENVS: tl.constexpr):
    """Lane ``i`` of a program that has ``ENVS`` environments: (number in the run, environment, whether it is one)."""
    # Both divisions are by a constant power of two: shifts. All others by run-time sizes that need not be powers.
    j = i // ENVS
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
    BLOCK_WORDS: tl.constexpr,
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
    block = tl.arange(0, BLOCK_WORDS).to(tl.int64)
    for start in range(0, run_words * BLOCK_ENVS, BLOCK_WORDS):
        j, env, active = lane_of(start + block, run_words, envs, BLOCK_ENVS)
        stage_bits(ends_ptr, ring_ptr, signals_ptr, n_signals, n, j, env, active, steps, envs, BY_ID, SPAN)
    for level in range(1, levels):
        # The level below is complete.
        tl.debug_barrier()
        run = bits_bound(run_words, words_of(steps, level), level)
        for start in range(0, run * BLOCK_ENVS, BLOCK_WORDS):
            j, env, active = lane_of(start + block, run, envs, BLOCK_ENVS)
            stage_bits_above(ends_ptr, ring_ptr, n, level, j, env, active, steps, envs, SPAN)
    tl.debug_barrier()
    block = tl.arange(0, BLOCK_WEIGHTS).to(tl.int64)
    run = run_words + (n_others > 0).to(tl.int64)
    for start in range(0, run * BLOCK_ENVS, BLOCK_WEIGHTS):
        j, env, active = lane_of(start + block, run, envs, BLOCK_ENVS)
        stage_weights(
            ends_ptr,
            sums_ptr,
            ring_ptr,
            others_ptr,
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
        begin = first_word(ring_ptr, n, steps, envs)
        all_sums(sums_ptr, others_ptr, begin, run_words * envs, n_others, 1, depth, words, SHIFT, BLOCK_NODES)


@triton.jit(do_not_specialize=["n_signals", "n", "run_words", "steps", "envs"])
def trajectories_bits_kernel(
    ends_ptr,
    ring_ptr,
    signals_ptr,
    n_signals,
    n,
    run_words,
    steps,
    envs,
    BY_ID: tl.constexpr,
    SPAN: tl.constexpr,
    BLOCK_WORDS: tl.constexpr,
):
    """First launch of a large update: the flags of the steps written. Grid: (cdiv(run_words * envs, BLOCK_WORDS),)."""
    steps = steps.to(tl.int64)
    envs = envs.to(tl.int64)
    i = tl.program_id(0).to(tl.int64) * BLOCK_WORDS + tl.arange(0, BLOCK_WORDS)
    j = i // envs
    active = j < run_words
    stage_bits(
        ends_ptr, ring_ptr, signals_ptr, n_signals, n.to(tl.int64), j, i - j * envs, active, steps, envs, BY_ID, SPAN
    )


@triton.jit(do_not_specialize=["n", "run", "level", "steps", "envs"])
def trajectories_bits_above_kernel(
    ends_ptr,
    ring_ptr,
    n,
    run,  # words of one environment in the run on this level, a bound
    level,
    steps,
    envs,
    SPAN: tl.constexpr,
    BLOCK_WORDS: tl.constexpr,
):
    """The next launches: the summaries on ``level``, from 1 up. Grid: (cdiv(run * envs, BLOCK_WORDS),)."""
    steps = steps.to(tl.int64)
    envs = envs.to(tl.int64)
    i = tl.program_id(0).to(tl.int64) * BLOCK_WORDS + tl.arange(0, BLOCK_WORDS)
    j = i // envs
    stage_bits_above(ends_ptr, ring_ptr, n.to(tl.int64), level, j, i - j * envs, j < run, steps, envs, SPAN)


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
    i = tl.program_id(0).to(tl.int64) * BLOCK_WEIGHTS + tl.arange(0, BLOCK_WEIGHTS)
    j = i // envs
    stage_weights(
        ends_ptr,
        sums_ptr,
        ring_ptr,
        others_ptr,
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
    begin = first_word(ring_ptr, n.to(tl.int64), steps.to(tl.int64), envs.to(tl.int64))
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
    begin = first_word(ring_ptr, n.to(tl.int64), steps.to(tl.int64), envs.to(tl.int64))
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
