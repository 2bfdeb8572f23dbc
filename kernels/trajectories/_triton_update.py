"""The trajectory index on the GPU: the kernels that change it, and the bitmap of eligible starts.

A write changes a *run* of steps, cyclic like the ring, and therefore a run of words on every level of ``ends``. A lane
is a pair of a number ``j`` in the run and an environment. It has a byte of a level of ``ends``, or a weight: a whole
byte in one thread takes no exchange between threads. It follows from what is below it and from its own bits outside the
run, and so do sums: if two lanes have the same one, they store the same value in any order.

A helper whose name starts with ``stage`` does the work of one launch on one block. If an environment has few words, one
program does all stages of its environments, with a barrier between. Otherwise every stage is a launch of its own.

Arguments that all kernels share are those of :mod:`gpubuf.kernels.trajectories._triton`, and

* ``signals_ptr``: int64 [n_signals, 5], entries of a table of :mod:`gpubuf.kernels.rows`;
* ``others_ptr``: int64 [E], scratch: the word of the first end after the cursor of every environment, or -1;
* ``n``: steps written; ``run_words``: words of one environment that they can lie in, a bound.
* in helpers, ``ring``: (cursor, filled, oldest); ``lane``: (number in the run, environment, whether it is one);
  ``shape``: (steps, envs, levels); ``run`` of sums: (others_ptr, its first word, its words, how many others).
"""

import triton
import triton.language as tl

from gpubuf.kernels._launching import jit_for_any_size
from gpubuf.kernels.rows._triton_tiles import (
    ENTRY,
    ROW_BYTES,
    ROW_STRIDE,
    column_address,
    load_column,
    row_address,
)
from gpubuf.kernels.trajectories._triton import (
    age_of,
    bit,
    count_bits,
    last_age,
    load_ring,
    load_word,
    locate,
    nearest_end,
    next_in_word,
    nodes_of,
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
    value = tl.load(here.to(pointer), mask=(wanted & 1) != 0, other=0)
    found = wanted * 0
    for i in tl.static_range(SPAN):
        following = behind if i + 1 == SPAN else tl.where(i + 1 < left, here + (i + 1) * pitch, behind)
        next_value = tl.load(following.to(pointer), mask=(needed & (2 << i)) != 0, other=0)
        found |= (value != next_value).to(tl.int32) << i
        value = next_value
    return found


@triton.jit
def _load_flags(signals_ptr, n_signals, step, env, wanted, steps, envs, BY_ID: tl.constexpr, SPAN: tl.constexpr):
    """Bits: whether trajectories end at the ``wanted`` ones of SPAN steps, which share a byte.

    With BY_ID the first of the signals is an identifier, and is compared.
    """
    row = step * envs + env
    flags = wanted * 0
    if BY_ID:
        memory = load_column(signals_ptr)
        row_bytes = tl.load(signals_ptr + ROW_BYTES)
        device_rows, _split, host_rows, stride = memory
        here = row_address(row, *memory)
        # After the last step of a ring comes the first.
        left = tl.minimum(steps - step, SPAN)
        behind = row_address(tl.where(step + left < steps, row + left * envs, env), *memory)
        # Identifiers are words as a rule, and flags single bytes.
        if ((device_rows | host_rows | row_bytes | stride) & 7) == 0:
            for byte in range(0, row_bytes, 8):
                flags |= _changes(here + byte, behind + byte, envs * stride, left, wanted, tl.int64, SPAN)
        else:
            for byte in range(0, row_bytes):
                flags |= _changes(here + byte, behind + byte, envs * stride, left, wanted, tl.uint8, SPAN)
    for k in range(1 if BY_ID else 0, n_signals):
        entry_ptr = signals_ptr + k * ENTRY
        pitch = envs * tl.load(entry_ptr + ROW_STRIDE)
        # Memories change at a multiple of 64 steps: the others of the byte lie in the one of the first.
        address = column_address(entry_ptr, row)
        for byte in range(0, tl.load(entry_ptr + ROW_BYTES)):
            for i in tl.static_range(SPAN):
                at = (address + byte + i * pitch).to(tl.pointer_type(tl.uint8))
                value = tl.load(at, mask=(wanted & (1 << i)) != 0, other=0)
                flags |= (value != 0).to(tl.int32) << i
    return flags & wanted


@triton.jit
def _kept_bits(ends_ptr, word, byte, touched, active, rebuild):
    """(where a byte of words lies, those of its bits that stay, whether to store it): a rebuild keeps none."""
    target = (ends_ptr + word).to(tl.pointer_type(tl.uint8)) + (byte & 7)
    active = active & (rebuild | (touched != 0))
    old = tl.load(target, mask=active & ~rebuild & (touched != 255), other=0)
    return target, old & ~touched, active


@triton.jit
def run_of_bits(cursor, n, steps, BY_ID: tl.constexpr):
    """(first, last) of the steps whose flags a write of ``n`` changes: with identifiers the step before it as well.

    That one has got a next one.
    """
    return run_of_steps(cursor, n + (1 if BY_ID else 0), steps)


@triton.jit
def stage_bits(ends_ptr, signals_ptr, n_signals, ring, n, lane, steps, envs, BY_ID: tl.constexpr, SPAN: tl.constexpr):
    """Bytes of the run on level 0: the flags of the steps written."""
    cursor, filled, _oldest = ring
    j, env, active = lane
    rebuild = n >= steps
    first, last = run_of_bits(cursor, n, steps, BY_ID)
    byte, touched, active = byte_of_run(j, active, first, last, steps, filled, rebuild)
    # Before the flags, so that it takes no round trip of its own.
    target, kept, stored = _kept_bits(ends_ptr, (byte >> 3) * envs + env, byte, touched, active, rebuild)
    wanted = touched
    if BY_ID:
        # The newest step is followed by none.
        newest = wrapped(cursor - 1, steps)
        wanted = tl.where(newest >> 3 == byte, touched & ~(1 << (newest & 7).to(tl.int32)), touched)
    if SPAN == 1:
        # Of one step written a single flag is read.
        newest = wrapped(cursor - 1, steps)
        one = (wanted != 0).to(tl.int32)
        flags = _load_flags(signals_ptr, n_signals, newest, env, one, steps, envs, BY_ID, SPAN)
        flags = tl.where(flags != 0, wanted, 0)
    else:
        flags = _load_flags(signals_ptr, n_signals, byte << 3, env, wanted, steps, envs, BY_ID, SPAN)
    tl.store(target, (kept | flags).to(tl.uint8), mask=stored)


@triton.jit
def stage_bits_above(ends_ptr, below, first, last, positions, rebuild, lane, envs):
    """Bytes of the run on a level from 1 up: which of the words of the run below are not zero.

    That level starts ``below`` and has ``positions`` words for each environment, of which the run has ``first ..
    last``.
    """
    j, env, active = lane
    byte, touched, active = byte_of_run(j, active, first, last, positions, positions, rebuild)
    word = below + (positions + (byte >> 3)) * envs + env
    target, kept, stored = _kept_bits(ends_ptr, word, byte, touched, active, rebuild)
    child_ptr = ends_ptr + below + (byte << 3) * envs + env
    some = touched * 0
    for i in tl.static_range(8):
        child = tl.load(child_ptr + i * envs, mask=(touched & (1 << i)) != 0, other=0)
        some |= (child != 0).to(tl.int32) << i
    tl.store(target, (kept | some).to(tl.uint8), mask=stored)


@triton.jit
def stage_weights(memory, ring, n, lane, run_words, shape, rule, BY_TRANSITION: tl.constexpr):
    """Weights of the words of the run, those of the trajectories that end in them.

    Number ``run_words`` is the word of the first end after the cursor, if that is not in the run.
    """
    ends_ptr, sums_ptr, others_ptr = memory
    cursor, filled, oldest = ring
    j, env, active = lane
    steps, envs, levels = shape
    words = words_of(steps, 0)
    first, last = run_of_steps(cursor, n + 1, steps)
    head, _, count = run_above(first, last, words)
    slot = wrapped(head + j, words)
    rest = load_word(ends_ptr, slot, env, active & (j < run_words) & (j < count), filled, oldest, steps, envs)
    # Before the ring is full nothing has lost its head, and after a rebuild every word is in the run.
    beheaded = active & (j == run_words) & (filled == steps) & (n < steps)
    start = tl.where(beheaded, oldest, (slot << 6) - 1)
    end = nearest_end(ends_ptr, start, env, beheaded | (rest != 0), steps, envs, levels, beheaded)
    # Without an end after it, it ends in the word of the newest step.
    beheaded = beheaded & (end >= 0) & (wrapped((end >> 6) - head, words) >= count)
    slot = tl.where(beheaded, end >> 6, slot)
    other = slot * envs + env
    tl.store(others_ptr + env, tl.where(beheaded, other, -1), mask=active & (j == run_words))
    stored = beheaded | (active & (j < run_words) & (j < count))
    rest = tl.where(beheaded, tl.load(ends_ptr + other, mask=beheaded, other=0), rest)
    # No trajectory reaches back beyond the oldest step, which an age that no step has says.
    first = tl.where(beheaded, steps, tl.where(end < 0, 0, age_of(end, oldest, steps) + 1))
    weight = rest * 0
    # As in the draw: one reduction, before the loop.
    for _ in range(tl.max(count_bits(rest), 0)):
        age, length, others = next_in_word(rest, slot, first, oldest, steps)
        own = weight_of(length, *rule, BY_TRANSITION)
        weight += tl.where(rest != 0, own, 0)
        first = age + 1
        rest = tl.where(rest != 0, others, 0)
    tl.store(sums_ptr + other, weight, mask=stored)


@triton.jit
def sums_entries(run, n_others, words, level, SHIFT: tl.constexpr):
    """(nodes of a level, entries of the run, entries in all, whether these are simply all nodes).

    ``run`` bounds the words of the run of all environments, which lie side by side.
    """
    count = nodes_of(words, level, SHIFT)
    # Partial at both ends, and at the seam.
    listed = ((run - 1) >> (level * SHIFT)) + 3
    return count, listed, tl.minimum(count, listed + n_others), count <= listed + n_others


@triton.jit
def first_word(cursor, n, steps, envs):
    """The first word of the run on level 0, all environments counted."""
    first, _ = run_of_steps(cursor, n + 1, steps)
    return (first >> 6) * envs


@triton.jit
def stage_sums(sums_ptr, run, i, level, below, words, SHIFT: tl.constexpr):
    """Entries ``i`` of a level of sums, from the level that starts ``below``."""
    others_ptr, begin, run_words, n_others = run
    fan_out: tl.constexpr = 1 << SHIFT
    count, listed, entries, dense = sums_entries(run_words, n_others, words, level, SHIFT)
    node = wrapped((begin >> (level * SHIFT)) + tl.minimum(i, listed - 1), count)
    from_others = (i >= listed) & (i < entries) & (dense == 0)
    other = tl.load(others_ptr + i - listed, mask=from_others, other=0)
    # An entry leaves a node to the entry right before it if that has the same one.
    other_before = tl.load(others_ptr + i - listed - 1, mask=from_others & (i > listed), other=-1)
    shift = level * SHIFT
    node = tl.where(from_others, other >> shift, node)
    node = tl.where(dense, i, node)
    repeated = from_others & ((other < 0) | (other_before >> shift == other >> shift))
    stored = ((i < entries) & ~repeated)[:, None]
    child = (node << SHIFT)[:, None] + tl.arange(0, fan_out)[None, :]
    real = child < nodes_of(words, level - 1, SHIFT)
    weight = tl.load(sums_ptr + below + child, mask=stored & real, other=0)
    # The padding of the level below is zero whatever was there, for a rebuild.
    tl.store(sums_ptr + below + child, weight * 0, mask=stored & ~real)
    tl.store(sums_ptr + below + (count << SHIFT) + node, tl.sum(weight, axis=1), mask=(i < entries) & ~repeated)


@triton.jit
def sums_start(words, level, SHIFT: tl.constexpr):
    """Position of ``level`` in ``sums``."""
    start = words * 0
    for lower in range(0, level):
        start += nodes_of(words, lower + 1, SHIFT) << SHIFT
    return start


@triton.jit
def all_sums(sums_ptr, run, first_level, depth, words, SHIFT: tl.constexpr, BLOCK_NODES: tl.constexpr):
    """All levels from ``first_level`` up, by one program."""
    _others_ptr, _begin, run_words, n_others = run
    block = tl.arange(0, BLOCK_NODES).to(tl.int64)
    below = sums_start(words, first_level - 1, SHIFT)
    for level in range(first_level, depth + 1):
        # The level below is complete.
        tl.debug_barrier()
        count, _, entries, _ = sums_entries(run_words, n_others, words, level, SHIFT)
        for start in range(0, entries, BLOCK_NODES):
            stage_sums(sums_ptr, run, start + block, level, below, words, SHIFT)
        below += count << SHIFT


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
    ring = load_ring(ring_ptr, steps, envs)
    block = tl.arange(0, BLOCK_BYTES)
    first, last = run_of_bits(ring[0], n, steps, BY_ID)
    _, count, _ = run_of_bytes(first, last, steps, n >= steps)
    for start in range(0, count.to(tl.int32) * BLOCK_ENVS, BLOCK_BYTES):
        lane = lane_of(start + block, count, envs, BLOCK_ENVS)
        stage_bits(ends_ptr, signals_ptr, n_signals, ring, n, lane, steps, envs, BY_ID, SPAN)
    # The level below is complete. The ring is read again: over the flags there are no registers to hold it.
    tl.debug_barrier()
    ring = load_ring(ring_ptr, steps, envs)
    first, last = run_of_bits(ring[0], n, steps, BY_ID)
    below = steps * 0
    positions = steps
    for _ in range(1, levels):
        positions = (positions + 63) >> 6
        first, last, _ = run_above(first, last, positions)
        _, count, _ = run_of_bytes(first, last, positions, n >= steps)
        for start in range(0, count.to(tl.int32) * BLOCK_ENVS, BLOCK_BYTES):
            lane = lane_of(start + block, count, envs, BLOCK_ENVS)
            stage_bits_above(ends_ptr, below, first, last, positions, n >= steps, lane, envs)
        below += positions * envs
        tl.debug_barrier()
    block = tl.arange(0, BLOCK_WEIGHTS)
    memory = (ends_ptr, sums_ptr, others_ptr)
    rule = (slice_len, min_len, before, after)
    run = run_words + (n_others > 0).to(tl.int64)
    for start in range(0, run.to(tl.int32) * BLOCK_ENVS, BLOCK_WEIGHTS):
        lane = lane_of(start + block, run, envs, BLOCK_ENVS)
        stage_weights(memory, ring, n, lane, run_words, (steps, envs, levels), rule, BY_TRANSITION)
    if SUMS:
        runs = (others_ptr, first_word(ring[0], n, steps, envs), run_words * envs, n_others)
        all_sums(sums_ptr, runs, 1, depth, words, SHIFT, BLOCK_NODES)


@jit_for_any_size()
def trajectories_bits_kernel(
    ends_ptr, ring_ptr, signals_ptr, n_signals, n, steps, envs, BY_ID: tl.constexpr, SPAN: tl.constexpr,
    BLOCK_BYTES: tl.constexpr,
):  # fmt: skip
    """First launch of a large update: the flags of the steps written. Grid: (cdiv(bytes of the run, BLOCK_BYTES),)."""
    n = n.to(tl.int64)
    steps = steps.to(tl.int64)
    envs = envs.to(tl.int64)
    ring = load_ring(ring_ptr, steps, envs)
    i = tl.program_id(0).to(tl.int64) * BLOCK_BYTES + tl.arange(0, BLOCK_BYTES)
    j = i // envs
    stage_bits(ends_ptr, signals_ptr, n_signals, ring, n, (j, i - j * envs, j >= 0), steps, envs, BY_ID, SPAN)


@jit_for_any_size()
def trajectories_bits_above_kernel(
    ends_ptr, ring_ptr, n, level, steps, envs, BY_ID: tl.constexpr, BLOCK_BYTES: tl.constexpr
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
    lane = (j, i - j * envs, j >= 0)
    stage_bits_above(ends_ptr, below, first, last, words_of(steps, level - 1), n >= steps, lane, envs)


@jit_for_any_size()
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
    ring = load_ring(ring_ptr, steps, envs)
    i = tl.program_id(0).to(tl.int64) * BLOCK_WEIGHTS + tl.arange(0, BLOCK_WEIGHTS)
    j = i // envs
    lane = (j, i - j * envs, i < run_words * envs + n_others)
    memory = (ends_ptr, sums_ptr, others_ptr)
    rule = (slice_len.to(tl.int64), min_len, before, after)
    stage_weights(memory, ring, n.to(tl.int64), lane, run_words, (steps, envs, levels), rule, BY_TRANSITION)


@jit_for_any_size()
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
    stage_sums(sums_ptr, (others_ptr, begin, run.to(tl.int64), n_others), i, level, below, words, SHIFT)


@jit_for_any_size()
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
    runs = (others_ptr, begin, run.to(tl.int64), n_others)
    all_sums(sums_ptr, runs, first_level, depth, words, SHIFT, BLOCK_NODES)


@jit_for_any_size()
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
