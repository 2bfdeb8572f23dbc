"""Running statistics on the GPU: a program has some elements of a row, and all rows of the batch."""

import triton
import triton.language as tl

from gpubuf.kernels import moments

# Rows of ``state_ptr``, and places in ``rule_ptr``.
COUNT = tl.constexpr(moments.COUNT)
MEAN = tl.constexpr(moments.MEAN)
M2 = tl.constexpr(moments.M2)
PEAK = tl.constexpr(moments.PEAK)
EPS = tl.constexpr(moments.EPS)
PEAK_AT = tl.constexpr(moments.PEAK_AT)
UNTIL = tl.constexpr(moments.UNTIL)
ACTIVE = tl.constexpr(moments.ACTIVE)
GAMMA = tl.constexpr(moments.GAMMA)

INFINITY = tl.constexpr(float("inf"))


@triton.jit(do_not_specialize=["n"])
def moments_update_kernel(
    source_ptr,  # any real [n, elements]
    state_ptr,  # float64 [4, elements]
    mean_ptr,  # float32 [elements], out where HAS_MEAN
    factor_ptr,  # float32 [elements], out
    rule_ptr,  # float64 [5]
    n,
    elements,
    HAS_MEAN: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_WIDTH: tl.constexpr,
):
    """Mean and M2 of the batch in two passes, merged with those of the state. Grid: (cdiv(elements, BLOCK_WIDTH),)."""
    element = tl.program_id(0) * BLOCK_WIDTH + tl.arange(0, BLOCK_WIDTH)
    inside = element < elements
    row = tl.arange(0, BLOCK_ROWS).to(tl.int64)
    source_ptr += element[None, :]
    counts = tl.zeros([BLOCK_ROWS, BLOCK_WIDTH], tl.float64)
    totals = tl.zeros([BLOCK_ROWS, BLOCK_WIDTH], tl.float64)
    peaks = tl.zeros([BLOCK_ROWS, BLOCK_WIDTH], tl.float64)
    for start in range(0, n, BLOCK_ROWS):
        there = (start + row < n)[:, None] & inside[None, :]
        x = tl.load(source_ptr + (start + row)[:, None] * elements, mask=there, other=0).to(tl.float64)
        counted = there & (tl.abs(x) < INFINITY)
        x = tl.where(counted, x, 0.0)
        counts += tl.where(counted, 1.0, 0.0)
        totals += x
        peaks = tl.maximum(peaks, tl.abs(x))
    batch_count = tl.sum(counts, 0)
    batch_mean = tl.sum(totals, 0) / tl.where(batch_count > 0, batch_count, 1.0)
    squares = tl.zeros([BLOCK_ROWS, BLOCK_WIDTH], tl.float64)
    for start in range(0, n, BLOCK_ROWS):
        there = (start + row < n)[:, None] & inside[None, :]
        x = tl.load(source_ptr + (start + row)[:, None] * elements, mask=there, other=0).to(tl.float64)
        deviation = tl.where(there & (tl.abs(x) < INFINITY), x - batch_mean[None, :], 0.0)
        squares += deviation * deviation
    batch_m2 = tl.sum(squares, 0)
    batch_peak = tl.max(peaks, 0)

    state_ptr += element
    count = tl.load(state_ptr + COUNT * elements, mask=inside, other=0)
    mean = tl.load(state_ptr + MEAN * elements, mask=inside, other=0)
    m2 = tl.load(state_ptr + M2 * elements, mask=inside, other=0)
    peak = tl.load(state_ptr + PEAK * elements, mask=inside, other=0)
    until = tl.where(tl.load(rule_ptr + ACTIVE) != 0, tl.load(rule_ptr + UNTIL), 0.0)
    learns = (count < until) & (batch_count > 0)
    total = count + batch_count
    share = batch_count / tl.where(total > 0, total, 1.0)
    step = batch_mean - mean
    m2 = tl.where(learns, m2 + batch_m2 + step * step * count * share, m2)
    mean = tl.where(learns, mean + step * share, mean)
    count = tl.where(learns, total, count)
    peak = tl.where(learns, tl.maximum(peak, batch_peak), peak)
    tl.store(state_ptr + COUNT * elements, count, mask=inside)
    tl.store(state_ptr + MEAN * elements, mean, mask=inside)
    tl.store(state_ptr + M2 * elements, m2, mask=inside)
    tl.store(state_ptr + PEAK * elements, peak, mask=inside)

    variance = m2 / tl.where(count > 0, count, 1.0)
    scale = tl.maximum(tl.sqrt(variance + tl.load(rule_ptr + EPS)), peak / tl.load(rule_ptr + PEAK_AT))
    factor = tl.where(count > 0, 1.0 / scale, 1.0)
    tl.store(factor_ptr + element, factor.to(tl.float32), mask=inside)
    if HAS_MEAN:
        tl.store(mean_ptr + element, mean.to(tl.float32), mask=inside)


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
