"""Temporal-difference targets and losses on the GPU.

Every kernel computes in REAL, float32 or float64, whatever the dtypes of its arguments. Rows are flat and contiguous;
critics are ``[n_nets, n]``.
"""

import triton
import triton.language as tl

from gpubuf.kernels import td
from gpubuf.kernels.td._triton_reduce import finish_reduction, row_factor, store_reduced

# Values of LOSS.
L1, L2, SMOOTH_L1 = map(tl.constexpr, range(td.SMOOTH_L1 + 1))

# Value of COMBINE.
AVERAGE = tl.constexpr(td.AVERAGE)


@triton.jit
def smallest_critic(q_ptr, row, inside, n, n_nets, REAL: tl.constexpr):
    """(min_k q[k], the first k that attains it) of each row; a NaN is the smallest, so that it is seen."""
    q_ptr += row
    smallest = tl.load(q_ptr, mask=inside, other=0).to(REAL)
    which = tl.zeros(row.shape, tl.int32)
    for net in range(1, n_nets):
        # Stepping the pointer keeps net * n out of 32-bit arithmetic.
        q_ptr += n
        q = tl.load(q_ptr, mask=inside, other=0).to(REAL)
        better = (q < smallest) | ((q != q) & (smallest == smallest))
        smallest = tl.where(better, q, smallest)
        which = tl.where(better, net, which)
    return smallest, which


@triton.jit
def one_critic(q_ptr, row, inside, n, n_nets, REAL: tl.constexpr, COMBINE: tl.constexpr):
    """(the smallest critic or the mean of all of them, the first k that attains the minimum) of each row."""
    if COMBINE == AVERAGE:
        q_ptr += row
        value = tl.zeros(row.shape, REAL)
        which = tl.zeros(row.shape, tl.int32)
        for _ in range(n_nets):
            value += tl.load(q_ptr, mask=inside, other=0).to(REAL)
            q_ptr += n
        value = value / n_nets
    else:
        value, which = smallest_critic(q_ptr, row, inside, n, n_nets, REAL)
    return value, which


@triton.jit
def power_of(gamma, steps):
    """gamma^steps, in float64."""
    # gamma^0 is 1 also for gamma = 0, where the logarithm is infinite.
    return tl.where(steps == 0, 1.0, tl.exp2(tl.log2(gamma) * steps))


@triton.jit
def next_value(
    next_q_ptr, entropy, steps_ptr, gamma, row, inside, n, n_nets, REAL: tl.constexpr, COMBINE: tl.constexpr
):
    """(min_k or mean_k next_q[k] - alpha * next_log_prob, gamma^steps) of each row.

    ``entropy`` is (next_log_prob_ptr, alpha_ptr), or None; without ``steps_ptr`` every row has one step.
    """
    value, _ = one_critic(next_q_ptr, row, inside, n, n_nets, REAL, COMBINE)
    if entropy is not None:
        alpha = tl.load(entropy[1]).to(REAL)
        value -= alpha * tl.load(entropy[0] + row, mask=inside, other=0).to(REAL)
    discount = gamma + tl.zeros(row.shape, tl.float64)
    if steps_ptr is not None:
        discount = power_of(gamma, tl.load(steps_ptr + row, mask=inside, other=1).to(tl.float64))
    return value, discount.to(REAL)


@triton.jit(do_not_specialize=["n"])
def soft_td_target_kernel(
    next_q_ptr,  # any float [n_nets, n]
    next_log_prob_ptr,  # any float [n], read where HAS_LOG_PROB
    alpha_ptr,  # any float [1], read where HAS_LOG_PROB
    reward_ptr,  # any number [n]
    terminated_ptr,  # bool as uint8, or any number [n]
    gamma_ptr,  # any float [1]
    steps_ptr,  # any number [n], read where HAS_STEPS
    target_ptr,  # REAL [n], out
    n,
    n_nets,
    REAL: tl.constexpr,
    HAS_LOG_PROB: tl.constexpr,
    HAS_STEPS: tl.constexpr,
    COMBINE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """target = reward + (terminated ? 0 : gamma^steps * (min_k or mean_k next_q[k] - alpha * next_log_prob)).

    Grid: (cdiv(n, BLOCK),).
    """
    row = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = row < n
    gamma = tl.load(gamma_ptr).to(tl.float64)
    entropy = (next_log_prob_ptr, alpha_ptr) if HAS_LOG_PROB else None
    steps = steps_ptr if HAS_STEPS else None
    value, discount = next_value(next_q_ptr, entropy, steps, gamma, row, inside, n, n_nets, REAL, COMBINE)
    terminated = tl.load(terminated_ptr + row, mask=inside, other=0) != 0
    reward = tl.load(reward_ptr + row, mask=inside, other=0).to(REAL)
    tl.store(target_ptr + row, reward + tl.where(terminated, 0.0, discount * value), mask=inside)


@triton.jit
def distance_value(d, LOSS: tl.constexpr):
    """|d| (L1), d^2 (L2), or d^2/2 below 1 and |d| - 1/2 above (SMOOTH_L1)."""
    magnitude = tl.abs(d)
    if LOSS == L1:
        out = magnitude
    elif LOSS == L2:
        out = d * d
    else:
        out = tl.where(magnitude < 1, 0.5 * d * d, magnitude - 0.5)
    return out


@triton.jit
def distance_slope(d, LOSS: tl.constexpr):
    """Derivative of distance_value; 0 at the kink of |d|."""
    sign = tl.where(d > 0, 1.0, tl.where(d < 0, -1.0, d))
    if LOSS == L1:
        out = sign
    elif LOSS == L2:
        out = 2 * d
    else:
        out = tl.where(tl.abs(d) < 1, d, sign)
    return out


@triton.jit(do_not_specialize=["n"])
def td_loss_kernel(
    q_ptr,  # any float [n_nets, n]
    target_ptr,  # any float [n]
    weight_ptr,  # any float [n], read where HAS_WEIGHT
    mask_ptr,  # uint8 [n], read where HAS_MASK
    loss_ptr,  # REAL [n] or [1], out
    td_error_ptr,  # REAL [n], out
    norm_ptr,  # REAL [1], out
    partial_ptr,  # REAL [2, programs], out where not SINGLE
    n,
    n_nets,
    REAL: tl.constexpr,
    LOSS: tl.constexpr,
    REDUCTION: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    HAS_MASK: tl.constexpr,
    SINGLE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """l_i = sum_k distance(q[k, i] - target[i]) and max_k |q[k, i] - target[i]|. Grid: (cdiv(n, BLOCK),)."""
    row = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = row < n
    target = tl.load(target_ptr + row, mask=inside, other=0).to(REAL)
    loss = tl.zeros([BLOCK], REAL)
    largest = tl.zeros([BLOCK], REAL)
    q_ptr += row
    for _ in range(n_nets):
        d = tl.load(q_ptr, mask=inside, other=0).to(REAL) - target
        q_ptr += n
        loss += distance_value(d, LOSS)
        # A NaN stays: the comparison of a NaN with itself fails, and so does any that would replace it.
        largest = tl.where((tl.abs(d) > largest) | (d != d), tl.abs(d), largest)
    tl.store(td_error_ptr + row, largest, mask=inside)
    weighting = (weight_ptr if HAS_WEIGHT else None, mask_ptr if HAS_MASK else None)
    store_reduced(loss, weighting, (loss_ptr, norm_ptr, partial_ptr), (row, inside), REAL, REDUCTION, SINGLE)


@triton.jit(do_not_specialize=["count"])
def finish_loss_kernel(
    partial_ptr,  # REAL [2, count]: sums of w * l, of w
    loss_ptr,  # REAL [1], out
    norm_ptr,  # REAL [1], out
    count,
    REAL: tl.constexpr,
    REDUCTION: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Add the sums of all blocks and finish the reduction. Grid: (1,)."""
    finish_reduction(partial_ptr, loss_ptr, norm_ptr, count, REAL, REDUCTION, BLOCK)


@triton.jit(do_not_specialize=["n"])
def td_loss_backward_kernel(
    grad_ptr,  # any float [n] where REDUCTION is NONE, else [1]
    q_ptr,  # any float [n_nets, n]
    target_ptr,  # any float [n]
    weight_ptr,  # any float [n], read where HAS_WEIGHT
    mask_ptr,  # uint8 [n], read where HAS_MASK
    norm_ptr,  # REAL [1]
    grad_q_ptr,  # any float [n_nets, n], out
    n,
    n_nets,
    REAL: tl.constexpr,
    LOSS: tl.constexpr,
    REDUCTION: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    HAS_MASK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """grad_q[k, i] = grad * norm * w_i * distance'(q[k, i] - target[i]). Grid: (cdiv(n, BLOCK),)."""
    row = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = row < n
    weighting = (weight_ptr if HAS_WEIGHT else None, mask_ptr if HAS_MASK else None)
    factor, counts = row_factor(grad_ptr, norm_ptr, weighting, (row, inside), REAL, REDUCTION)
    target = tl.load(target_ptr + row, mask=inside, other=0).to(REAL)
    q_ptr += row
    grad_q_ptr += row
    for _ in range(n_nets):
        d = tl.load(q_ptr, mask=inside, other=0).to(REAL) - target
        tl.store(grad_q_ptr, tl.where(counts, factor * distance_slope(d, LOSS), 0.0), mask=inside)
        q_ptr += n
        grad_q_ptr += n
