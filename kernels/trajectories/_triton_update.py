"""The trajectory index on the GPU: the kernels that change it, and the bitmap of eligible starts.

A write changes a *run* of steps, cyclic like the ring, and therefore a run of words on every level of ``ends``. A lane
is a pair of a number ``j`` in the run and an environment. It has a byte of end flags, a word of the run, or a weight: a
whole byte in one thread takes no exchange between threads. Bits above, and sums, are changed by atomics that are right
in any order, so that nobody reads what others change before the next barrier.

A helper whose name starts with ``stage`` does the work of one launch on one block. If an environment has few words, one
program does all stages of its environments, with a barrier between. Otherwise every stage is a launch of its own.

Arguments that all kernels share are those of :mod:`gpubuf.kernels.trajectories._triton`, and

* ``signals_ptr``: int64 [n_signals, 5], entries of a table of :mod:`gpubuf.kernels.rows`;
* ``n``: steps written; ``run_words``: words of one environment that they can lie in, a bound.
* in helpers, ``signals``: (signals_ptr, n_signals, the first one); ``ring``: (cursor, filled, oldest);
  ``lane``: (number in the run, environment, whether it is one).
"""

import triton
import triton.language as tl

from gpubuf.kernels._launching import jit_for_any_size
from gpubuf.kernels.rows._triton_tiles import (
    ENTRY,
    ROW_BYTES,
    load_column,
    row_address,
)
from gpubuf.kernels.trajectories._triton import (
    age_of,
    bit,
    count_bits,
    first_age,
    first_of_word,
    last_age,
    load_past,
    load_ring,
    load_word,
    locate,
    nearest_end,
    next_in_word,
    nodes_of,
    step_of,
    weight_of,
    words_of,
)

# Arithmetic: these helpers neither load nor store.


@triton.jit
def wrapped(position, count):
    """``position`` modulo ``count``, for positions in -count .. 2 count - 1."""
    return tl.where(position < 0, position + count, tl.where(position < count, position, position - count))


@triton.jit
def run_of_steps(cursor, n, steps):
    """(first, last) of the newest ``n`` steps, all of them where there are no more."""
    whole = n >= steps
    return tl.where(whole, 0, wrapped(cursor - n, steps)), tl.where(whole, steps - 1, wrapped(cursor - 1, steps))


@triton.jit
def run_above(first, last, parts, SHIFT: tl.constexpr = 6):
    """(first, last, number) of the words, or of other ``parts`` of 1 << SHIFT, where positions of a cyclic run lie."""
    head = first >> SHIFT
    tail = last >> SHIFT
    count = tail - head + 1
    # A run that goes all the way round may end in the part in which it begins.
    count = tl.where((count < 1) | ((count == 1) & (first > last)), count + parts, count)
    whole = count >= parts
    return tl.where(whole, 0, head), tl.where(whole, parts - 1, tail), tl.minimum(count, parts)


@triton.jit
def run_of_bytes(first, last, positions, rebuild):
    """(first, number, of how many) of the bytes of an environment that hold the bits of a run of ``positions``.

    A rebuild also clears the bytes of the last word after the last position.
    """
    parts = tl.where(rebuild, ((positions + 63) >> 6) << 3, (positions + 7) >> 3)
    head, _, count = run_above(first, last, parts, 3)
    return head, tl.where(rebuild, parts, count), parts


@triton.jit
def bits_before(position, begin):
    """int32: which of the eight positions from ``begin`` on lie before another one."""
    return (1 << tl.minimum(tl.maximum(position - begin, 0), 8).to(tl.int32)) - 1


@triton.jit
def byte_of_run(j, active, first, last, positions, known, rebuild):
    """(byte, its bits in the run, whether there is one) for the numbers ``j`` of bytes in a run of ``positions``.

    The first ``known`` positions are in use.
    """
    head, count, parts = run_of_bytes(first, last, positions, rebuild)
    byte = wrapped(head + j, parts)
    begin = byte << 3
    before = bits_before(last + 1, begin)
    after = ~bits_before(first, begin)
    inside = tl.where(first > last, before | after, before & after) & bits_before(known, begin)
    active = active & (j < count)
    return byte, tl.where(active, inside, 0), active


# Memory


@triton.jit
def _changes(here, behind, pitch, left, wanted, DTYPE: tl.constexpr, SPAN: tl.constexpr):
    """Bits: which values, ``pitch`` bytes apart, differ from the next; ``left`` of them come before that ``behind``."""
    pointer: tl.constexpr = tl.pointer_type(DTYPE)
    needed = wanted | (wanted << 1)
    values = (tl.load(here.to(pointer), mask=(wanted & 1) != 0, other=0),)  # type: tl.tuple
    for i in tl.static_range(SPAN):
        following = behind if i + 1 == SPAN else tl.where(i + 1 < left, here + (i + 1) * pitch, behind)
        values += (tl.load(following.to(pointer), mask=(needed & (2 << i)) != 0, other=0),)
    found = wanted * 0
    for i in tl.static_range(SPAN):
        found |= (values[i] != values[i + 1]).to(tl.int32) << i
    return found


@triton.jit
def load_signal(signals_ptr, k, n_signals):
    """(device_rows, split, host_rows, stride, row_bytes) of signal ``k``, or of the last one."""
    entry_ptr = signals_ptr + tl.minimum(k, n_signals - 1) * ENTRY
    device_rows, split, host_rows, stride = load_column(entry_ptr)
    return device_rows, split, host_rows, stride, tl.load(entry_ptr + ROW_BYTES)


@triton.jit
def _load_flags(signals, step, env, wanted, steps, envs, BY_ID: tl.constexpr, SPAN: tl.constexpr):
    """Bits: whether trajectories end at the ``wanted`` ones of SPAN steps, which share a byte.

    With BY_ID the first of the signals is an identifier, and is compared.
    """
    signals_ptr, n_signals, signal = signals
    device_rows, split, host_rows, stride, row_bytes = signal
    row = step * envs + env
    flags = wanted * 0
    if BY_ID:
        here = row_address(row, device_rows, split, host_rows, stride)
        # After the last step of a ring comes the first.
        left = tl.minimum(steps - step, SPAN)
        behind = tl.where(step + left < steps, row + left * envs, env)
        behind = row_address(behind, device_rows, split, host_rows, stride)
        # Identifiers are words as a rule, and flags single bytes.
        if ((device_rows | host_rows | row_bytes | stride) & 7) == 0:
            for byte in range(0, row_bytes, 8):
                flags |= _changes(here + byte, behind + byte, envs * stride, left, wanted, tl.int64, SPAN)
        else:
            for byte in range(0, row_bytes):
                flags |= _changes(here + byte, behind + byte, envs * stride, left, wanted, tl.uint8, SPAN)
        device_rows, split, host_rows, stride, row_bytes = load_signal(signals_ptr, 1, n_signals)
    for k in range(1 if BY_ID else 0, n_signals):
        pitch = envs * stride
        # Memories change at a multiple of 64 steps: the others of the byte lie in the one of the first.
        address = row_address(row, device_rows, split, host_rows, stride)
        n_bytes = row_bytes
        # The flags of one signal and the place of the next are under way together.
        device_rows, split, host_rows, stride, row_bytes = load_signal(signals_ptr, k + 1, n_signals)
        for byte in range(0, n_bytes):
            values = ()  # type: tl.tuple
            for i in tl.static_range(SPAN):
                at = (address + byte + i * pitch).to(tl.pointer_type(tl.uint8))
                values += (tl.load(at, mask=(wanted & (1 << i)) != 0, other=0),)
            for i in tl.static_range(SPAN):
                flags |= (values[i] != 0).to(tl.int32) << i
    return flags & wanted


@triton.jit
def _byte_before(ends_ptr, word, byte, touched, active, rebuild):
    """(where a byte of words lies, what it is, whether to store it); if none of its bits stay it counts as zero."""
    target = (ends_ptr + word).to(tl.pointer_type(tl.uint8)) + (byte & 7)
    active = active & (rebuild | (touched != 0))
    return target, tl.load(target, mask=active & ~rebuild & (touched != 255), other=0), active


@triton.jit
def run_of_bits(cursor, n, steps, BY_ID: tl.constexpr):
    """(first, last) of the steps whose flags a write of ``n`` changes: with identifiers the step before it as well.

    That one has got a next one.
    """
    return run_of_steps(cursor, n + (1 if BY_ID else 0), steps)


@triton.jit
def stage_bits(ends_ptr, signals, ring, n, lane, steps, envs, BY_ID: tl.constexpr, SPAN: tl.constexpr):
    """Bytes of the run on level 0: the flags of the steps written."""
    cursor, filled, _oldest = ring
    j, env, active = lane
    rebuild = n >= steps
    first, last = run_of_bits(cursor, n, steps, BY_ID)
    byte, touched, active = byte_of_run(j, active, first, last, steps, filled, rebuild)
    # Before the flags, so that it takes no round trip of its own.
    target, before, stored = _byte_before(ends_ptr, (byte >> 3) * envs + env, byte, touched, active, rebuild)
    wanted = touched
    if BY_ID:
        # The newest step is followed by none.
        newest = wrapped(cursor - 1, steps)
        wanted = tl.where(newest >> 3 == byte, touched & ~(1 << (newest & 7).to(tl.int32)), touched)
    if SPAN == 1:
        # Of one step written a single flag is read.
        newest = wrapped(cursor - 1, steps)
        one = (wanted != 0).to(tl.int32)
        flags = _load_flags(signals, newest, env, one, steps, envs, BY_ID, SPAN)
        flags = tl.where(flags != 0, wanted, 0)
    else:
        flags = _load_flags(signals, byte << 3, env, wanted, steps, envs, BY_ID, SPAN)
    tl.store(target, (before & ~touched | flags).to(tl.uint8), mask=stored)


@triton.jit
def run_of_words(first, last, positions, rebuild):
    """(first, last, number, of how many) of the words of an environment that hold a run of ``positions`` below.

    A rebuild also clears the bits of the last word above them that stand for no word.
    """
    first, last, count = run_above(first, last, positions)
    padded = (positions + 63) >> 6 << 6
    return first, last, tl.where(rebuild, padded, count), tl.where(rebuild, padded, positions)


@triton.jit
def stage_bits_above(ends_ptr, below, first, positions, padded, lane, envs):
    """Bits of the run on a level from 1 up: which of the words of the run below are not zero.

    That level starts ``below`` and has ``positions`` words for each environment, of which ``first`` is the run's first.
    A bit belongs to one lane: atomics leave the same word in any order, and nobody waits for one.
    """
    j, env, active = lane
    position = wrapped(first + j, padded)
    child = tl.load(ends_ptr + below + position * envs + env, mask=active & (position < positions), other=0)
    word_ptr = ends_ptr + below + (positions + (position >> 6)) * envs + env
    tl.atomic_or(word_ptr, bit(position), mask=active & (child != 0), sem="relaxed")
    tl.atomic_and(word_ptr, ~bit(position), mask=active & (child == 0), sem="relaxed")


@triton.jit
def stage_weights(
    memory, ring, n, lane, run_words, shape, rule, past, TOGETHER: tl.constexpr, BY_TRANSITION: tl.constexpr,
    LEVELS: tl.constexpr, SHIFT: tl.constexpr,
):  # fmt: skip
    """Weights of the words of the run, those of the trajectories that end in them, and the sums above them.

    The run goes on with the oldest ``past`` steps, which are others now. Number ``run_words`` is the word of the first
    end after these, if that is not in the run. A lane has a word of its own, by whose change of weight it changes the
    sums: numbers are whole, so that they are right in any order, and no level waits for another. TOGETHER: lanes change
    the root as one. A rebuild leaves the sums to others.
    """
    ends_ptr, sums_ptr = memory
    cursor, filled, oldest = ring
    j, env, active = lane
    steps, envs, depth = shape
    words = words_of(steps, 0)
    left_out = tl.where(filled == steps, tl.minimum(past, steps - 1), 0)
    first, last = run_of_steps(cursor + left_out, n + 1 + left_out, steps)
    head, _, count = run_above(first, last, words)
    slot = wrapped(head + j, words)
    rest = load_word(ends_ptr, slot, env, active & (j < run_words) & (j < count), filled, oldest, steps, envs)
    # Before the ring is full nothing has lost its head, and after a rebuild every word is in the run.
    beheaded = active & (j == run_words) & (filled == steps) & (n < steps)
    start = tl.where(beheaded, step_of(left_out, oldest, steps), (slot << 6) - 1)
    end, end_word = nearest_end(ends_ptr, start, env, beheaded | (rest != 0), steps, envs, beheaded, LEVELS)
    # Without an end after it, it ends in the word of the newest step.
    beheaded = beheaded & (end >= 0) & (wrapped((end >> 6) - head, words) >= count)
    slot = tl.where(beheaded, end >> 6, slot)
    stored = beheaded | (active & (j < run_words) & (j < count))
    node = slot * envs + env
    before = tl.load(sums_ptr + node, mask=stored & (n < steps), other=0)
    rest = tl.where(beheaded, end_word, rest)
    # No trajectory reaches back beyond the oldest step, which an age that no step has says.
    first = tl.where(beheaded, steps, tl.where(end < 0, 0, age_of(end, oldest, steps) + 1))
    weight = rest * 0
    # As in the draw: one reduction, before the loop.
    for _ in range(tl.max(count_bits(rest), 0)):
        age, length, others = next_in_word(rest, slot, first, past, oldest, steps)
        own = weight_of(length, *rule, BY_TRANSITION)
        weight += tl.where(rest != 0, own, 0)
        first = age + 1
        rest = tl.where(rest != 0, others, 0)
    tl.store(sums_ptr + node, weight, mask=stored)
    if n < steps:
        change = tl.where(stored, weight - before, 0)
        nodes = words * envs
        level_ptr = sums_ptr
        for _ in range(1, depth if TOGETHER else depth + 1):
            nodes = nodes_of(nodes, 1, SHIFT)
            level_ptr += nodes << SHIFT
            node = node >> SHIFT
            tl.atomic_add(level_ptr + node, change, mask=change != 0, sem="relaxed")
        if TOGETHER:
            level_ptr += nodes_of(nodes, 1, SHIFT) << SHIFT
            tl.atomic_add(level_ptr, tl.sum(change, 0), sem="relaxed")


@triton.jit
def stage_sums(sums_ptr, node, below, count, words, SHIFT: tl.constexpr):
    """Nodes of a level of sums that has ``count``, from the level that starts ``below`` and has ``words`` of them."""
    fan_out: tl.constexpr = 1 << SHIFT
    stored = node < count
    child = (node << SHIFT)[:, None] + tl.arange(0, fan_out)[None, :]
    real = child < words
    weight = tl.load(sums_ptr + below + child, mask=stored[:, None] & real, other=0)
    # The padding of the level below is zero whatever was there.
    tl.store(sums_ptr + below + child, weight * 0, mask=stored[:, None] & ~real)
    tl.store(sums_ptr + below + (count << SHIFT) + node, tl.sum(weight, axis=1), mask=stored)


# Kernels


@triton.jit
def lane_of(i, run, envs, ENVS: tl.constexpr):
    """Lane ``i`` of a program that has ``ENVS`` environments: (number in the run, environment, whether it is one).

    A program has few lanes: their numbers, unlike those of steps, are int32.
    """
    # Both divisions are by a constant power of two: shifts. All others by run-time sizes that need not be powers.
    j = (i // ENVS).to(tl.int64)
    env = tl.program_id(0).to(tl.int64) * ENVS + i % ENVS
    return j, env, (j < run) & (env < envs)


@jit_for_any_size()
def trajectories_update_envs_kernel(
    ends_ptr,
    sums_ptr,  # not read without HAS_SUMS
    ring_ptr,
    signals_ptr,
    n_signals,
    n,
    run_words,
    depth,  # levels of sums above the weights
    steps,
    envs,
    slice_len,
    min_len,
    before,
    after,
    past,
    BY_ID: tl.constexpr,
    SPAN: tl.constexpr,
    LEVELS: tl.constexpr,
    HAS_SUMS: tl.constexpr,
    BY_TRANSITION: tl.constexpr,
    TOGETHER: tl.constexpr,
    SHIFT: tl.constexpr,
    BLOCK_ENVS: tl.constexpr,
    BLOCK_BYTES: tl.constexpr,
    BLOCK_WEIGHTS: tl.constexpr,
):
    """Bits of BLOCK_ENVS environments by one program, with HAS_SUMS weights and sums too; those not of a rebuild.

    Grid: (cdiv(envs, BLOCK_ENVS),).
    """
    n = n.to(tl.int64)
    steps = steps.to(tl.int64)
    envs = envs.to(tl.int64)
    run_words = run_words.to(tl.int64)
    slice_len = slice_len.to(tl.int64)
    signals = (signals_ptr, n_signals, load_signal(signals_ptr, 0, n_signals))
    ring = load_ring(ring_ptr, steps, envs)
    # Here, so that it takes no round trip of its own.
    past = load_past(ring_ptr, past, steps * envs)
    block = tl.arange(0, BLOCK_BYTES)
    first, last = run_of_bits(ring[0], n, steps, BY_ID)
    _, count, _ = run_of_bytes(first, last, steps, n >= steps)
    for start in range(0, count.to(tl.int32) * BLOCK_ENVS, BLOCK_BYTES):
        lane = lane_of(start + block, count, envs, BLOCK_ENVS)
        stage_bits(ends_ptr, signals, ring, n, lane, steps, envs, BY_ID, SPAN)
    # The level below is complete.
    tl.debug_barrier()
    below = steps * 0
    positions = steps
    for _ in tl.static_range(1, LEVELS):
        positions = (positions + 63) >> 6
        first, last, count, padded = run_of_words(first, last, positions, n >= steps)
        for start in range(0, count.to(tl.int32) * BLOCK_ENVS, BLOCK_BYTES):
            lane = lane_of(start + block, count, envs, BLOCK_ENVS)
            stage_bits_above(ends_ptr, below, first, positions, padded, lane, envs)
        below += positions * envs
        tl.debug_barrier()
    if HAS_SUMS:
        block = tl.arange(0, BLOCK_WEIGHTS)
        memory, shape = (ends_ptr, sums_ptr), (steps, envs, depth)
        rule = (slice_len, min_len, before, after)
        run = run_words + (n < steps).to(tl.int64)
        for start in range(0, run.to(tl.int32) * BLOCK_ENVS, BLOCK_WEIGHTS):
            lane = lane_of(start + block, run, envs, BLOCK_ENVS)
            stage_weights(memory, ring, n, lane, run_words, shape, rule, past, TOGETHER, BY_TRANSITION, LEVELS, SHIFT)


@jit_for_any_size()
def trajectories_bits_kernel(
    ends_ptr, ring_ptr, signals_ptr, n_signals, n, steps, envs, BY_ID: tl.constexpr, SPAN: tl.constexpr,
    BLOCK_BYTES: tl.constexpr,
):  # fmt: skip
    """First launch of a large update: the flags of the steps written. Grid: (cdiv(bytes of the run, BLOCK_BYTES),)."""
    n = n.to(tl.int64)
    steps = steps.to(tl.int64)
    envs = envs.to(tl.int64)
    signals = (signals_ptr, n_signals, load_signal(signals_ptr, 0, n_signals))
    ring = load_ring(ring_ptr, steps, envs)
    i = tl.program_id(0).to(tl.int64) * BLOCK_BYTES + tl.arange(0, BLOCK_BYTES)
    j = i // envs
    stage_bits(ends_ptr, signals, ring, n, (j, i - j * envs, j >= 0), steps, envs, BY_ID, SPAN)


@jit_for_any_size()
def trajectories_bits_above_kernel(
    ends_ptr, ring_ptr, n, level, steps, envs, BY_ID: tl.constexpr, BLOCK_WORDS: tl.constexpr
):
    """The next launches: the summaries on ``level``, from 1 up. Grid: (cdiv(words of the run, BLOCK_WORDS),)."""
    n = n.to(tl.int64)
    steps = steps.to(tl.int64)
    envs = envs.to(tl.int64)
    cursor, _, _ = load_ring(ring_ptr, steps, envs)
    first, last = run_of_bits(cursor, n, steps, BY_ID)
    below = steps * 0
    for lower in range(0, level - 1):
        below += words_of(steps, lower) * envs
        first, last, _whole = run_above(first, last, words_of(steps, lower))
    positions = words_of(steps, level - 1)
    first, _, count, padded = run_of_words(first, last, positions, n >= steps)
    i = tl.program_id(0).to(tl.int64) * BLOCK_WORDS + tl.arange(0, BLOCK_WORDS)
    j = i // envs
    stage_bits_above(ends_ptr, below, first, positions, padded, (j, i - j * envs, j < count), envs)


@jit_for_any_size()
def trajectories_weights_kernel(
    ends_ptr,
    sums_ptr,
    ring_ptr,
    n,
    run_words,
    depth,  # levels of sums above the weights
    steps,
    envs,
    slice_len,
    min_len,
    before,
    after,
    past,
    LEVELS: tl.constexpr,
    BY_TRANSITION: tl.constexpr,
    SHIFT: tl.constexpr,
    BLOCK_WEIGHTS: tl.constexpr,
):
    """The weights, when all bits are there, and unless all words are in the run the sums.

    Grid: (cdiv(words of the run, and one more unless that has all, of all environments, BLOCK_WEIGHTS),).
    """
    n = n.to(tl.int64)
    steps = steps.to(tl.int64)
    envs = envs.to(tl.int64)
    run_words = run_words.to(tl.int64)
    ring = load_ring(ring_ptr, steps, envs)
    i = tl.program_id(0).to(tl.int64) * BLOCK_WEIGHTS + tl.arange(0, BLOCK_WEIGHTS)
    j = i // envs
    lane = (j, i - j * envs, j < run_words + (n < steps).to(tl.int64))
    memory, shape = (ends_ptr, sums_ptr), (steps, envs, depth)
    rule, past = (slice_len.to(tl.int64), min_len, before, after), load_past(ring_ptr, past, steps * envs)
    stage_weights(memory, ring, n, lane, run_words, shape, rule, past, True, BY_TRANSITION, LEVELS, SHIFT)


@jit_for_any_size()
def trajectories_sums_kernel(
    sums_ptr,
    level,
    words,  # of level 0, all environments
    SHIFT: tl.constexpr,
    BLOCK_NODES: tl.constexpr,
):
    """A wide level of sums, all of it. Grid: (cdiv(nodes, BLOCK_NODES),)."""
    words = words.to(tl.int64)
    node = tl.program_id(0).to(tl.int64) * BLOCK_NODES + tl.arange(0, BLOCK_NODES)
    below = words * 0
    for lower in range(1, level):
        below += nodes_of(words, lower, SHIFT) << SHIFT
    stage_sums(sums_ptr, node, below, nodes_of(words, level, SHIFT), nodes_of(words, level - 1, SHIFT), SHIFT)


@jit_for_any_size()
def trajectories_top_kernel(
    sums_ptr,
    first_level,
    depth,
    words,  # of level 0, all environments
    SHIFT: tl.constexpr,
    BLOCK_NODES: tl.constexpr,
):
    """The narrow levels of sums, from ``first_level`` up to the root. Grid: (1,)."""
    words = words.to(tl.int64)
    block = tl.arange(0, BLOCK_NODES).to(tl.int64)
    below = words * 0
    for lower in range(1, first_level):
        below += nodes_of(words, lower, SHIFT) << SHIFT
    for level in range(first_level, depth + 1):
        count = nodes_of(words, level, SHIFT)
        for start in range(0, count, BLOCK_NODES):
            stage_sums(sums_ptr, start + block, below, count, nodes_of(words, level - 1, SHIFT), SHIFT)
        below += count << SHIFT
        # The level is complete.
        tl.debug_barrier()


@jit_for_any_size()
def trajectories_update_eligible_kernel(
    eligible_ptr,  # int64 [eligible words]
    ends_ptr,
    ring_ptr,
    rows_ptr,  # int64 [n_rows]
    n_rows,
    touched,  # steps, n_rows / E
    edge,  # of them the oldest ones
    need,
    before,
    past,
    run,  # words of ``eligible`` that hold these rows, a bound
    steps,
    envs,
    LEVELS: tl.constexpr,
    STARTS_TOO: tl.constexpr,
    LOOKS_BACK: tl.constexpr,
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
    # The run ends with the oldest steps, which come after the newest.
    begin = wrapped(cursor + edge - touched, steps) * envs
    words = (capacity + 63) >> 6

    lane = tl.arange(0, BLOCK_WORDS * 64).to(tl.int64)
    i = tl.program_id(0).to(tl.int64) * BLOCK_WORDS * 64 + lane
    tl.store(rows_ptr + i, wrapped(begin + i, capacity), mask=i < n_rows)

    number = i >> 6
    word = wrapped((begin >> 6) + number, words)
    row = (word << 6) + (i & 63)
    step, env, age, stored = locate(row, number < run, filled, oldest, steps, envs)
    last = last_age(ends_ptr, step, env, age, stored, filled, oldest, steps, envs, LEVELS)
    eligible = last - age + 1 >= need
    if LOOKS_BACK:
        first = first_age(ends_ptr, step, env, age, stored, oldest, steps, envs, LEVELS)
        first = tl.maximum(first + before, load_past(ring_ptr, past, steps * envs))
        if STARTS_TOO:
            eligible = eligible | (age == first)
        eligible = eligible & (age >= first)
    elif STARTS_TOO:
        step_before = wrapped(step - 1, steps)
        searched = stored & (age > 0)
        flags = tl.load(ends_ptr + (step_before >> 6) * envs + env, mask=searched, other=-1)
        eligible = eligible | ((flags & bit(step_before)) != 0)
    bits = tl.where(stored & eligible, bit(row), 0)
    result = tl.sum(tl.reshape(bits, (BLOCK_WORDS, 64)), axis=1)
    number = tl.program_id(0).to(tl.int64) * BLOCK_WORDS + tl.arange(0, BLOCK_WORDS)
    tl.store(eligible_ptr + wrapped((begin >> 6) + number, words), result, mask=number < run)


@triton.jit
def _discounted(decay, value, later_decay, later_value):
    """Two runs of a discounted sum as one: of ``decay * before + value``."""
    return decay * later_decay, later_decay * value + later_value


@jit_for_any_size()
def trajectories_update_returns_kernel(
    returns_ptr,  # float32 [T * E, elements]
    ends_ptr,
    ring_ptr,
    rewards_ptr,  # int64 [1, 5], a column
    rule_ptr,  # float64 [3] = (gamma, scale, offset)
    n,
    steps,
    envs,
    elements,
    LEVELS: tl.constexpr,
    DTYPE: tl.constexpr,
    BLOCK_STEPS: tl.constexpr,
):
    """A program has the trajectories that end in a word of the run, and one element of their rewards.

    It goes back from each end, a block of steps at a time: lane i is i steps before the first of them, a scan over the
    lanes gives ``G = reward + gamma * G of the step after``, and the last lane leads to the next block. What is in
    progress ends virtually, with NaN in place of 0, and is followed through the ``n`` steps alone.

    Grid: (words of the run * E * elements,).
    """
    n = n.to(tl.int64)
    steps = steps.to(tl.int64)
    envs = envs.to(tl.int64)
    elements = elements.to(tl.int64)
    program = tl.program_id(0).to(tl.int64)
    element = program % elements
    env = program // elements % envs
    j = program // elements // envs
    cursor, filled, oldest = load_ring(ring_ptr, steps, envs)
    first, last = run_of_steps(cursor, n, steps)
    words = words_of(steps, 0)
    head, _, count = run_above(first, last, words)
    slot = wrapped(head + j, words)
    flags = tl.load(ends_ptr + slot * envs + env, mask=j < count, other=0)
    rest = load_word(ends_ptr, slot, env, j < count, filled, oldest, steps, envs)
    begin = first_of_word(ends_ptr, slot, env, rest != 0, oldest, steps, envs, LEVELS)
    device_rows, split, host_rows, stride = load_column(rewards_ptr)
    gamma = tl.load(rule_ptr)
    scale = tl.load(rule_ptr + 1)
    offset = tl.load(rule_ptr + 2)
    pointer: tl.constexpr = tl.pointer_type(DTYPE)
    lane = tl.arange(0, BLOCK_STEPS)
    decays = tl.full((BLOCK_STEPS,), 1.0, tl.float64) * gamma
    for _ in range(count_bits(rest)):
        age, length, others = next_in_word(rest, slot, begin, 0, oldest, steps)
        ended = (flags & rest & -rest) != 0
        length = tl.where(ended, length, tl.minimum(length, n))
        length = tl.where(age < filled - n, 0, length)
        value = tl.where(ended, 0.0, float("nan")).to(tl.float64)
        for start in range(0, length, BLOCK_STEPS):
            back = start + lane
            inside = back < length
            row = step_of(tl.where(inside, age - back, 0), oldest, steps) * envs + env
            address = row_address(row, device_rows, split, host_rows, stride).to(pointer) + element
            reward = tl.load(address, mask=inside & ended, other=0).to(tl.float64) * scale + offset
            decay, total = tl.associative_scan((decays, reward), 0, _discounted)
            total += decay * value
            tl.store(returns_ptr + row * elements + element, total.to(tl.float32), mask=inside)
            value = tl.sum(tl.where(lane == BLOCK_STEPS - 1, total, 0.0), 0)
        begin = age + 1
        rest = others
