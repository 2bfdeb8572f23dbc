"""The trajectory index on the GPU: the stages of an update.

A write changes a *run* of steps, cyclic like the ring, and therefore a run of words on every level of ``ends``. A lane
is a pair of a word's number ``j`` in the run and an environment. A word follows from what is below it and from its own
bits outside the run, and so do weights and sums: if two lanes have the same one, they store the same value in any
order.

A helper whose name starts with ``stage`` does the work of one launch on one block. If an environment has few words, one
program does all stages of its environments, with a barrier between. Otherwise every stage is a launch of its own.

Arguments that all kernels share are those of :mod:`gpubuf.kernels.trajectories._triton`, and

* ``signals_ptr``: int64 [n_signals, 5], entries of a table of :mod:`gpubuf.kernels.rows`;
* ``others_ptr``: int64 [E], scratch: the word of the first end after the cursor of every environment, or -1;
* ``n``: steps written; ``run_words``: words of one environment that they can lie in, a bound.
"""

import triton
import triton.language as tl

from gpubuf.kernels.rows._triton_tiles import DEVICE_ROWS, ENTRY, HOST_ROWS, ROW_BYTES, ROW_STRIDE, SPLIT, row_address
from gpubuf.kernels.trajectories._triton import (
    age_of,
    bit,
    count_bits,
    first_of_word,
    last_age,
    load_ring,
    load_word,
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
def run_above(first, last, words):
    """(first, last, number) of the slots, of ``words``, in which the positions of a cyclic run lie."""
    head = first >> 6
    tail = last >> 6
    count = tail - head + 1
    # A run that goes all the way round may end in the word in which it begins.
    count = tl.where((count < 1) | ((count == 1) & (first > last)), count + words, count)
    whole = count >= words
    return tl.where(whole, 0, head), tl.where(whole, words - 1, tail), tl.minimum(count, words)


@triton.jit
def bits_bound(run_words, words, level):
    """Bound of the number of slots of a run on ``level``, from that on level 0: the partial words are two, or three."""
    for _ in range(0, level):
        run_words = tl.minimum(run_words, ((run_words + 125) >> 6) + 1)
    return tl.minimum(run_words, words)


@triton.jit
def run_bits(slot, first, last, count, SPAN: tl.constexpr):
    """Positions [R, SPAN], of ``count``, and which of them lie in the words ``slot`` and in the run.

    With a SPAN of 64 they are the bits of the word; a smaller one holds the whole run.
    """
    lane = tl.arange(0, SPAN).to(tl.int64)[None, :]
    if SPAN == 64:
        position = (slot[:, None] << 6) + lane
        after = position >= first
        before = position <= last
        inside = ((after | before) & (first > last)) | (after & before)
        return position, inside & (position < count)
    position = wrapped(first + lane, count) + (slot * 0)[:, None]
    return position, ((position >> 6) == slot[:, None]) & (lane <= wrapped(last - first, count))


# Memory


@triton.jit
def differs(address, next_address, active, kept, DTYPE: tl.constexpr, COMPARES: tl.constexpr):
    """Whether an element is not zero or, if it is compared, not as the ``kept`` bits of that at the next address."""
    value = tl.load(address.to(tl.pointer_type(DTYPE)), mask=active, other=0)
    if COMPARES:
        # A mask of bits, the same for all lanes, takes fewer registers than one of lanes.
        return value != (tl.load(next_address.to(tl.pointer_type(DTYPE)), mask=active, other=0) & kept.to(DTYPE))
    return value != 0


@triton.jit
def _load_flags(signals_ptr, n_signals, row, seam, active, steps, envs, BY_ID: tl.constexpr):
    """Whether trajectories end at rows; the next step of one at the ``seam`` is in the first rows.

    With BY_ID the first of the signals is an identifier, and is compared.
    """
    flag = active & (row < 0)
    for k in range(0, n_signals):
        device_rows = tl.load(signals_ptr + k * ENTRY + DEVICE_ROWS)
        row_bytes = tl.load(signals_ptr + k * ENTRY + ROW_BYTES)
        split = tl.load(signals_ptr + k * ENTRY + SPLIT)
        host_rows = tl.load(signals_ptr + k * ENTRY + HOST_ROWS)
        stride = tl.load(signals_ptr + k * ENTRY + ROW_STRIDE)
        if BY_ID:
            address = row_address(row, device_rows, split, host_rows, stride)
        else:
            # As there, in the form that needs fewer registers here.
            address = device_rows + row * stride + tl.where(row < split, 0, host_rows - device_rows)
        next_row = row + tl.where(seam, envs - steps * envs, envs)
        next_address = row_address(next_row, device_rows, split, host_rows, stride)
        kept = tl.where(k == 0, -1, 0)
        # Identifiers are words as a rule, and flags single bytes.
        if BY_ID and ((device_rows | host_rows | row_bytes | stride) & 7) == 0:
            for byte in range(0, row_bytes, 8):
                flag |= differs(address + byte, next_address + byte, active, kept, tl.int64, BY_ID)
        else:
            for byte in range(0, row_bytes):
                flag |= differs(address + byte, next_address + byte, active, kept, tl.uint8, BY_ID)
    return flag


@triton.jit
def _store_bits(target, touched, value, position, active, rebuild):
    """Put the touched bits of words; the others stay, but for a rebuild."""
    bits = bit(position)
    touched_bits = tl.sum(tl.where(touched, bits, 0), axis=1)
    old = tl.load(target, mask=active & (rebuild == 0), other=0)
    tl.store(target, (old & ~touched_bits) | tl.sum(tl.where(touched & value, bits, 0), axis=1), mask=active)


@triton.jit
def stage_bits(
    ends_ptr, ring_ptr, signals_ptr, n_signals, n, j, env, active, steps, envs, BY_ID: tl.constexpr, SPAN: tl.constexpr
):
    """Words of level 0: the flags of the steps written. By identifiers, the step before them has got a next one."""
    cursor, filled, oldest = load_ring(ring_ptr, steps, envs)
    words = words_of(steps, 0)
    first, last = run_of_steps(cursor, n + 1, steps)
    head, _, count = run_above(first, last, words)
    slot = wrapped(head + j, words)
    active = active & (j < count)
    lane = tl.arange(0, SPAN).to(tl.int64)[None, :]
    step = (slot[:, None] << 6) + lane if SPAN == 64 else wrapped(cursor - 1 - lane, steps) + (slot * 0)[:, None]
    age = age_of(step, oldest, steps)
    touched = (active[:, None] & (step < steps) & (age < filled)) & (step >> 6 == slot[:, None])
    touched = touched & (age >= filled - n - (1 if BY_ID else 0))
    # The newest step is followed by none.
    stored = touched & (age < filled - (1 if BY_ID else 0))
    row = step * envs + env[:, None]
    seam = step == steps - 1
    flag = _load_flags(signals_ptr, n_signals, row, seam, stored, steps, envs, BY_ID)
    _store_bits(ends_ptr + slot * envs + env, touched, flag, step, active, n >= steps)


@triton.jit
def stage_bits_above(ends_ptr, ring_ptr, n, level, j, env, active, steps, envs, SPAN: tl.constexpr):
    """Words of a level from 1 up: which of the words of the run below are not zero."""
    cursor, _, _ = load_ring(ring_ptr, steps, envs)
    first, last = run_of_steps(cursor, n + 1, steps)
    start = steps * 0
    # A value of its own: the compiler carries no name that enters a loop as another one and becomes it there.
    below = steps * 0
    for lower in range(0, level):
        first, last, _ = run_above(first, last, words_of(steps, lower))
        below = start
        start += words_of(steps, lower) * envs
    head, _, count = run_above(first, last, words_of(steps, level))
    slot = wrapped(head + j, words_of(steps, level))
    active = active & (j < count)
    child, touched = run_bits(slot, first, last, words_of(steps, level - 1), SPAN)
    touched = touched & active[:, None]
    some = tl.load(ends_ptr + below + child * envs + env[:, None], mask=touched, other=0) != 0
    _store_bits(ends_ptr + start + slot * envs + env, touched, some, child, active, n >= steps)


@triton.jit
def _store_weights(
    ends_ptr,
    sums_ptr,
    slot,
    env,
    active,
    filled,
    oldest,
    steps,
    envs,
    levels,
    slice_len,
    min_len,
    before,
    after,
    BY_TRANSITION: tl.constexpr,
):
    """The weights of words: those of the trajectories that end in them."""
    rest = load_word(ends_ptr, slot, env, active, filled, oldest, steps, envs)
    first = first_of_word(ends_ptr, slot, env, rest != 0, oldest, steps, envs, levels)
    weight = rest * 0
    # As in the draw: one reduction, before the loop.
    for _ in range(tl.max(count_bits(rest), 0)):
        age, length, others = next_in_word(rest, slot, first, oldest, steps)
        own = weight_of(length, slice_len, min_len, before, after, BY_TRANSITION)
        weight += tl.where(rest != 0, own, 0)
        first = age + 1
        rest = tl.where(rest != 0, others, 0)
    tl.store(sums_ptr + slot * envs + env, weight, mask=active)


@triton.jit
def stage_weights(
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
    BY_TRANSITION: tl.constexpr,
):
    """Weights of the words of the run; ``j = run_words`` is the word of the first end after the cursor."""
    cursor, filled, oldest = load_ring(ring_ptr, steps, envs)
    words = words_of(steps, 0)
    first, last = run_of_steps(cursor, n + 1, steps)
    head, _, count = run_above(first, last, words)
    # Before the ring is full nothing has lost its head, and after a rebuild every word is in the run.
    beheaded = active & (j == run_words) & (filled == steps) & (n < steps)
    age = last_age(ends_ptr, oldest + j * 0, env, j * 0, beheaded, filled, oldest, steps, envs, levels)
    slot = tl.where(j < run_words, wrapped(head + j, words), step_of(age, oldest, steps) >> 6)
    tl.store(others_ptr + env, tl.where(beheaded, slot * envs + env, -1), mask=active & (j == run_words))
    _store_weights(
        ends_ptr,
        sums_ptr,
        slot,
        env,
        (active & (j < run_words) & (j < count)) | beheaded,
        filled,
        oldest,
        steps,
        envs,
        levels,
        slice_len,
        min_len,
        before,
        after,
        BY_TRANSITION,
    )


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
def first_word(ring_ptr, n, steps, envs):
    """The first word of the run on level 0, all environments counted."""
    cursor, _, _ = load_ring(ring_ptr, steps, envs)
    first, _ = run_of_steps(cursor, n + 1, steps)
    return (first >> 6) * envs


@triton.jit
def stage_sums(sums_ptr, others_ptr, begin, run, n_others, i, level, below, words, SHIFT: tl.constexpr):
    """Entries ``i`` of a level of sums, from the level that starts ``below``; ``begin`` is that of the run."""
    fan_out: tl.constexpr = 1 << SHIFT
    count, listed, entries, dense = sums_entries(run, n_others, words, level, SHIFT)
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
def all_sums(
    sums_ptr,
    others_ptr,
    begin,
    run,
    n_others,
    first_level,
    depth,
    words,
    SHIFT: tl.constexpr,
    BLOCK_NODES: tl.constexpr,
):
    """All levels from ``first_level`` up, by one program."""
    block = tl.arange(0, BLOCK_NODES).to(tl.int64)
    below = sums_start(words, first_level - 1, SHIFT)
    for level in range(first_level, depth + 1):
        # The level below is complete.
        tl.debug_barrier()
        count, _, entries, _ = sums_entries(run, n_others, words, level, SHIFT)
        for start in range(0, entries, BLOCK_NODES):
            stage_sums(sums_ptr, others_ptr, begin, run, n_others, start + block, level, below, words, SHIFT)
        below += count << SHIFT
