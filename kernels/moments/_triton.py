"""Running statistics on the GPU: a program has some elements of a row, and all rows of a batch or a part of them."""

import triton
import triton.language as tl

from gpubuf.kernels import moments

# Rows of ``state_ptr``, and places in ``rule_ptr``.
COUNT, MEAN, M2, PEAK = map(tl.constexpr, range(moments.PEAK + 1))
EPS, PEAK_AT, UNTIL, ACTIVE, GAMMA = map(tl.constexpr, range(moments.GAMMA + 1))

INFINITY = tl.constexpr(float("inf"))


@triton.jit
def load_numbers(source_ptr, first, last, elements, inside, BLOCK_ROWS: tl.constexpr):
    """(float64 numbers of rows from ``first`` to ``last``, which of them are finite); the others are 0."""
    row = first + tl.arange(0, BLOCK_ROWS)
    there = (row < last)[:, None] & inside[None, :]
    x = tl.load(source_ptr + row[:, None] * elements, mask=there, other=0).to(tl.float64)
    counted = there & (tl.abs(x) < INFINITY)
    return tl.where(counted, x, 0.0), counted


@triton.jit
def arrives_last(ticket_ptr, n):
    """Whether this program is the last of ``n``. If so, it may read what the others stored, and tickets start anew."""
    # The atomic is one thread's: the barrier puts the stores of all before it.
    tl.debug_barrier()
    last = tl.atomic_add(ticket_ptr, 1, sem="acq_rel") == n - 1
    if last:
        tl.store(ticket_ptr, 0)
    return last


@triton.jit
def load_moments(pointer, elements, there):
    """(count, mean, M2, peak) of elements, of which a count begins at ``pointer``."""
    count = tl.load(pointer + COUNT * elements, mask=there, other=0)
    mean = tl.load(pointer + MEAN * elements, mask=there, other=0)
    m2 = tl.load(pointer + M2 * elements, mask=there, other=0)
    return count, mean, m2, tl.load(pointer + PEAK * elements, mask=there, other=0)


@triton.jit
def store_moments(pointer, elements, there, count, mean, m2, peak):
    """The reverse of :func:`load_moments`."""
    tl.store(pointer + COUNT * elements, count, mask=there)
    tl.store(pointer + MEAN * elements, mean, mask=there)
    tl.store(pointer + M2 * elements, m2, mask=there)
    tl.store(pointer + PEAK * elements, peak, mask=there)


@triton.jit
def merge_into_state(state_ptr, mean_ptr, factor_ptr, rule_ptr, element, inside, elements, batch):
    """Take the moments of a batch into those of the state, and write what is read of it."""
    batch_count, batch_mean, batch_m2, batch_peak = batch
    count, mean, m2, peak = load_moments(state_ptr + element, elements, inside)
    until = tl.where(tl.load(rule_ptr + ACTIVE) != 0, tl.load(rule_ptr + UNTIL), 0.0)
    learns = (count < until) & (batch_count > 0)
    total = count + batch_count
    share = batch_count / tl.where(total > 0, total, 1.0)
    step = batch_mean - mean
    m2 = tl.where(learns, m2 + batch_m2 + step * step * count * share, m2)
    mean = tl.where(learns, mean + step * share, mean)
    count = tl.where(learns, total, count)
    peak = tl.where(learns, tl.maximum(peak, batch_peak), peak)
    store_moments(state_ptr + element, elements, inside, count, mean, m2, peak)

    variance = m2 / tl.where(count > 0, count, 1.0)
    scale = tl.maximum(tl.sqrt(variance + tl.load(rule_ptr + EPS)), peak / tl.load(rule_ptr + PEAK_AT))
    factor = tl.where(count > 0, 1.0 / scale, 1.0)
    tl.store(factor_ptr + element, factor.to(tl.float32), mask=inside)
    tl.store(mean_ptr + element, mean.to(tl.float32), mask=inside)


@triton.jit(do_not_specialize=["n", "elements", "n_blocks", "n_parts", "part_rows"])
def moments_update_kernel(
    source_ptr,  # any real [n, elements]
    state_ptr,  # float64 [4, elements]
    mean_ptr,  # float32 [elements], out
    factor_ptr,  # float32 [elements], out
    rule_ptr,  # float64 [5]
    parts_ptr,  # float64 [n_parts, 4, elements], scratch where BLOCK_PARTS > 1
    tickets_ptr,  # int64 [n_blocks], zero before and afterwards, used where BLOCK_PARTS > 1
    n,
    elements,
    n_blocks,  # blocks of elements
    n_parts,  # of the rows
    part_rows,  # rows of a part
    BLOCK_ROWS: tl.constexpr,
    BLOCK_WIDTH: tl.constexpr,
    BLOCK_PARTS: tl.constexpr,  # at least n_parts; 1 if that is 1
):
    """Mean and M2 of the batch, merged with those of the state.

    A program has a part of the rows of a block of elements, in two passes; the first rows stay in registers. The last
    program of a block merges all parts, in their order, whichever it is: ``mean = sum(n_i mean_i) / n`` and
    ``M2 = sum(M2_i + n_i (mean_i - mean)^2)``.

    Grid: (n_parts * n_blocks,), n_blocks = cdiv(elements, BLOCK_WIDTH), n_parts = cdiv(n, part_rows).
    """
    block = tl.program_id(0) % n_blocks
    part = (tl.program_id(0) // n_blocks).to(tl.int64)
    element = block * BLOCK_WIDTH + tl.arange(0, BLOCK_WIDTH)
    inside = element < elements
    first = part * part_rows
    last = tl.minimum(first + part_rows, n)
    source_ptr += element[None, :]
    x, counted = load_numbers(source_ptr, first, last, elements, inside, BLOCK_ROWS)
    counts = counted.to(tl.int32)
    totals = x
    peaks = tl.abs(x)
    for start in range(first + BLOCK_ROWS, last, BLOCK_ROWS):
        more, also = load_numbers(source_ptr, start, last, elements, inside, BLOCK_ROWS)
        counts += also.to(tl.int32)
        totals += more
        peaks = tl.maximum(peaks, tl.abs(more))
    count = tl.sum(counts, 0).to(tl.float64)
    mean = tl.sum(totals, 0) / tl.where(count > 0, count, 1.0)
    peak = tl.max(peaks, 0)
    deviation = tl.where(counted, x - mean[None, :], 0.0)
    squares = deviation * deviation
    for start in range(first + BLOCK_ROWS, last, BLOCK_ROWS):
        more, also = load_numbers(source_ptr, start, last, elements, inside, BLOCK_ROWS)
        deviation = tl.where(also, more - mean[None, :], 0.0)
        squares += deviation * deviation
    m2 = tl.sum(squares, 0)

    outputs = (state_ptr, mean_ptr, factor_ptr)
    if BLOCK_PARTS == 1:
        merge_into_state(*outputs, rule_ptr, element, inside, elements, (count, mean, m2, peak))
    else:
        store_moments(parts_ptr + part * 4 * elements + element, elements, inside, count, mean, m2, peak)
        if arrives_last(tickets_ptr + block, n_parts):
            each = tl.arange(0, BLOCK_PARTS)
            there = (each < n_parts)[:, None] & inside[None, :]
            each_ptr = parts_ptr + each.to(tl.int64)[:, None] * 4 * elements + element[None, :]
            some, means, m2s, tops = load_moments(each_ptr, elements, there)
            count = tl.sum(some, 0)
            mean = tl.sum(some * means, 0) / tl.where(count > 0, count, 1.0)
            step = means - mean[None, :]
            batch = (count, mean, tl.sum(m2s + some * step * step, 0), tl.max(tops, 0))
            merge_into_state(*outputs, rule_ptr, element, inside, elements, batch)


@triton.jit(do_not_specialize=["steps"])
def moments_returns_kernel(
    rewards_ptr,  # any real [steps, envs, elements]
    ends_ptr,  # bool as uint8 [steps, envs]
    before_ptr,  # float64 [envs, elements], advanced
    rule_ptr,  # float64 [5]
    out_ptr,  # float64 [steps, envs, elements]
    steps,
    lanes,  # envs * elements
    elements,
    BLOCK: tl.constexpr,
):
    """G_t = reward_t + (step t - 1 ends ? 0 : gamma * G_(t-1)), step by step. Grid: (cdiv(lanes, BLOCK),)."""
    lane = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = lane < lanes
    gamma = tl.load(rule_ptr + GAMMA)
    before = tl.load(before_ptr + lane, mask=inside, other=0)
    rewards_ptr += lane
    out_ptr += lane
    ends_ptr += lane // elements
    for _ in range(steps):
        reward = tl.load(rewards_ptr, mask=inside, other=0).to(tl.float64)
        total = before + tl.where(tl.abs(reward) < INFINITY, reward, 0.0)
        tl.store(out_ptr, total, mask=inside)
        before = tl.where(tl.load(ends_ptr, mask=inside, other=1) != 0, 0.0, gamma * total)
        # Stepping the pointers keeps step * lanes out of 32-bit arithmetic.
        rewards_ptr += lanes
        out_ptr += lanes
        ends_ptr += lanes // elements
    tl.store(before_ptr + lane, before, mask=inside)
