"""Temporal-difference targets and losses on the GPU, and the reductions that the kernels of all losses call.

Every kernel computes in REAL, float32 or float64, whatever the dtypes of its arguments. Rows are flat and contiguous;
critics are ``[nets, n]``. ``rows`` are (numbers of rows, which of them are there); ``weighting`` is (weight_ptr,
mask_ptr), with None for what is not given.

Reductions are blocked: a program writes the sums of its block, and either it is the only one (SINGLE) and finishes, or
a second kernel adds the blocks in order.
"""

import triton
import triton.language as tl

from gpubuf.kernels import td

# Values of REDUCTION.
NONE, MEAN, SUM = map(tl.constexpr, range(td.SUM + 1))

# Rows of ``partial_ptr``, of one number for each program: sums of w_i * l_i, of w_i, and of the log-densities.
LOSSES, WEIGHTS, LOG_PROBS = map(tl.constexpr, range(3))


@triton.jit
def mask_weights(weighting, rows, REAL: tl.constexpr):
    """(weight of each row, whether the row counts)."""
    weight_ptr, mask_ptr = weighting
    row, counts = rows
    if mask_ptr is not None:
        counts = counts & (tl.load(mask_ptr + row, mask=counts, other=0) != 0)
    weight = tl.where(counts, 1.0, 0.0).to(REAL)
    if weight_ptr is not None:
        weight = tl.load(weight_ptr + row, mask=counts, other=0).to(REAL)
    return weight, counts


@triton.jit
def inverse_or_zero(total):
    """1 / total, and 0 where the total is 0. In float32 to 2 units in the last place, below the error of the sum."""
    return tl.where(total == 0, 0.0, 1.0 / tl.where(total == 0, 1.0, total))


@triton.jit
def store_reduced(value, weighting, outputs, rows, REAL: tl.constexpr, REDUCTION: tl.constexpr, SINGLE: tl.constexpr):
    """Store w_i * value_i per row (NONE), the finished MEAN or SUM, or this block's two sums.

    ``value`` is the loss of each row, and ``outputs`` are (loss_ptr, norm_ptr, partial_ptr).
    """
    loss_ptr, norm_ptr, partial_ptr = outputs
    row, inside = rows
    weight, counts = mask_weights(weighting, rows, REAL)
    product = tl.where(counts, weight * value, 0.0)
    program = tl.program_id(0)
    if REDUCTION == NONE:
        tl.store(loss_ptr + row, product, mask=inside)
        if program == 0:
            tl.store(norm_ptr, 1.0)
    else:
        loss = tl.sum(product, 0)
        total = tl.sum(weight, 0)
        if SINGLE:
            norm = inverse_or_zero(total) if REDUCTION == MEAN else total * 0 + 1.0
            tl.store(loss_ptr, loss * norm)
            tl.store(norm_ptr, norm)
        else:
            tl.store(partial_ptr + program + tl.num_programs(0) * LOSSES, loss)
            tl.store(partial_ptr + program + tl.num_programs(0) * WEIGHTS, total)


@triton.jit
def add_partials(partial_ptr, count, REAL: tl.constexpr, BLOCK: tl.constexpr):
    """Sum of ``count`` numbers, in an order that depends on nothing else."""
    total = tl.zeros([BLOCK], REAL)
    for start in range(0, count, BLOCK):
        index = start + tl.arange(0, BLOCK)
        total += tl.load(partial_ptr + index, mask=index < count, other=0)
    return tl.sum(total, 0)


@triton.jit
def finish_reduction(
    partial_ptr, loss_ptr, norm_ptr, count, REAL: tl.constexpr, REDUCTION: tl.constexpr, BLOCK: tl.constexpr
):
    """Add the sums of all blocks, and store the MEAN or the SUM, and its factor."""
    loss = add_partials(partial_ptr + count * LOSSES, count, REAL, BLOCK)
    total = add_partials(partial_ptr + count * WEIGHTS, count, REAL, BLOCK)
    norm = inverse_or_zero(total) if REDUCTION == MEAN else total * 0 + 1.0
    tl.store(loss_ptr, loss * norm)
    tl.store(norm_ptr, norm)


@triton.jit
def row_factor(grad_ptr, norm_ptr, weighting, rows, REAL: tl.constexpr, REDUCTION: tl.constexpr):
    """(derivative of the reduced loss by the loss of each row, times the incoming gradient; whether the row counts)."""
    row, inside = rows
    weight, counts = mask_weights(weighting, rows, REAL)
    grad = tl.load(grad_ptr + row, mask=inside, other=0).to(REAL) if REDUCTION == NONE else tl.load(grad_ptr).to(REAL)
    return grad * tl.load(norm_ptr).to(REAL) * weight, counts


# Values of LOSS_FUNCTION.
L1, L2, SMOOTH_L1 = map(tl.constexpr, range(td.SMOOTH_L1 + 1))

# Value of COMBINE.
AVERAGE = tl.constexpr(td.AVERAGE)


@triton.jit
def smallest_critic(q_ptr, row, inside, n, nets, REAL: tl.constexpr):
    """(min_k q[k], the first k that attains it) of each row; a NaN is the smallest, so that it is seen."""
    q_ptr += row
    smallest = tl.load(q_ptr, mask=inside, other=0).to(REAL)
    which = tl.zeros(row.shape, tl.int32)
    for net in range(1, nets):
        # Stepping the pointer keeps net * n out of 32-bit arithmetic.
        q_ptr += n
        q = tl.load(q_ptr, mask=inside, other=0).to(REAL)
        better = (q < smallest) | ((q != q) & (smallest == smallest))
        smallest = tl.where(better, q, smallest)
        which = tl.where(better, net, which)
    return smallest, which


@triton.jit
def one_critic(q_ptr, row, inside, n, nets, REAL: tl.constexpr, COMBINE: tl.constexpr):
    """(the smallest critic or the mean of all of them, the first k that attains the minimum) of each row."""
    if COMBINE == AVERAGE:
        q_ptr += row
        value = tl.zeros(row.shape, REAL)
        which = tl.zeros(row.shape, tl.int32)
        for _ in range(nets):
            value += tl.load(q_ptr, mask=inside, other=0).to(REAL)
            q_ptr += n
        value = value / nets
    else:
        value, which = smallest_critic(q_ptr, row, inside, n, nets, REAL)
    return value, which


@triton.jit
def power_of(gamma, steps):
    """gamma^steps, in float64."""
    # gamma^0 is 1 also for gamma = 0, where the logarithm is infinite.
    return tl.where(steps == 0, 1.0, tl.exp2(tl.log2(gamma) * steps))


@triton.jit
def next_value(next_q_ptr, entropy, steps_ptr, gamma, row, inside, n, nets, REAL: tl.constexpr, COMBINE: tl.constexpr):
    """(min_k or mean_k next_q[k] - alpha * next_log_prob, gamma^steps) of each row.

    ``entropy`` is (next_log_prob_ptr, alpha_ptr), or None; without ``steps_ptr`` every row has one step.
    """
    value, _ = one_critic(next_q_ptr, row, inside, n, nets, REAL, COMBINE)
    if entropy is not None:
        alpha = tl.load(entropy[1]).to(REAL)
        value -= alpha * tl.load(entropy[0] + row, mask=inside, other=0).to(REAL)
    discount = gamma + tl.zeros(row.shape, tl.float64)
    if steps_ptr is not None:
        discount = power_of(gamma, tl.load(steps_ptr + row, mask=inside, other=1).to(tl.float64))
    return value, discount.to(REAL)


@triton.jit(do_not_specialize=["n"])
def soft_td_target_kernel(
    next_q_ptr,  # any float [nets, n]
    next_log_prob_ptr,  # any float [n], read where HAS_NEXT_LOG_PROB
    alpha_ptr,  # any float [1], read where HAS_NEXT_LOG_PROB
    reward_ptr,  # any number [n]
    terminated_ptr,  # bool as uint8, or any number [n]
    gamma_ptr,  # any float [1]
    steps_ptr,  # any number [n], read where HAS_STEPS
    target_ptr,  # REAL [n], out
    n,
    nets,
    REAL: tl.constexpr,
    HAS_NEXT_LOG_PROB: tl.constexpr,
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
    entropy = (next_log_prob_ptr, alpha_ptr) if HAS_NEXT_LOG_PROB else None
    steps = steps_ptr if HAS_STEPS else None
    value, discount = next_value(next_q_ptr, entropy, steps, gamma, row, inside, n, nets, REAL, COMBINE)
    terminated = tl.load(terminated_ptr + row, mask=inside, other=0) != 0
    reward = tl.load(reward_ptr + row, mask=inside, other=0).to(REAL)
    tl.store(target_ptr + row, reward + tl.where(terminated, 0.0, discount * value), mask=inside)


@triton.jit
def distance_value(d, LOSS_FUNCTION: tl.constexpr):
    """|d| (L1), d^2 (L2), or d^2/2 below 1 and |d| - 1/2 above (SMOOTH_L1)."""
    magnitude = tl.abs(d)
    if LOSS_FUNCTION == L1:
        out = magnitude
    elif LOSS_FUNCTION == L2:
        out = d * d
    else:
        out = tl.where(magnitude < 1, 0.5 * d * d, magnitude - 0.5)
    return out


@triton.jit
def distance_slope(d, LOSS_FUNCTION: tl.constexpr):
    """Derivative of distance_value; 0 at the kink of |d|."""
    sign = tl.where(d > 0, 1.0, tl.where(d < 0, -1.0, d))
    if LOSS_FUNCTION == L1:
        out = sign
    elif LOSS_FUNCTION == L2:
        out = 2 * d
    else:
        out = tl.where(tl.abs(d) < 1, d, sign)
    return out


@triton.jit(do_not_specialize=["n"])
def td_loss_kernel(
    q_ptr,  # any float [nets, n]
    target_ptr,  # any float [n]
    weight_ptr,  # any float [n], read where HAS_WEIGHT
    mask_ptr,  # uint8 [n], read where HAS_MASK
    loss_ptr,  # REAL [n] or [1], out
    td_error_ptr,  # REAL [n], out
    norm_ptr,  # REAL [1], out
    partial_ptr,  # REAL [2, programs], out where not SINGLE
    n,
    nets,
    REAL: tl.constexpr,
    LOSS_FUNCTION: tl.constexpr,
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
    for _ in range(nets):
        d = tl.load(q_ptr, mask=inside, other=0).to(REAL) - target
        q_ptr += n
        loss += distance_value(d, LOSS_FUNCTION)
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
    q_ptr,  # any float [nets, n]
    target_ptr,  # any float [n]
    weight_ptr,  # any float [n], read where HAS_WEIGHT
    mask_ptr,  # uint8 [n], read where HAS_MASK
    norm_ptr,  # REAL [1]
    grad_q_ptr,  # any float [nets, n], out
    n,
    nets,
    REAL: tl.constexpr,
    LOSS_FUNCTION: tl.constexpr,
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
    for _ in range(nets):
        d = tl.load(q_ptr, mask=inside, other=0).to(REAL) - target
        tl.store(grad_q_ptr, tl.where(counts, factor * distance_slope(d, LOSS_FUNCTION), 0.0), mask=inside)
        q_ptr += n
        grad_q_ptr += n


@triton.jit(do_not_specialize=["n", "n_sequences", "length"])
def soft_lambda_return_kernel(
    next_q_ptr,  # any float [nets, n]
    next_log_prob_ptr,  # any float [n], read where HAS_NEXT_LOG_PROB
    alpha_ptr,  # any float [1], read where HAS_NEXT_LOG_PROB
    reward_ptr,  # any number [n]
    terminated_ptr,  # bool as uint8, or any number [n]
    done_ptr,  # bool as uint8, or any number [n]
    mask_ptr,  # uint8 [n], read where HAS_MASK
    gamma_ptr,  # any float [1]
    lmbda_ptr,  # any float [1]
    steps_ptr,  # any number [n], read where HAS_STEPS
    target_ptr,  # REAL [n], out
    n,
    n_sequences,
    length,
    inner,
    nets,
    REAL: tl.constexpr,
    HAS_NEXT_LOG_PROB: tl.constexpr,
    HAS_STEPS: tl.constexpr,
    HAS_MASK: tl.constexpr,
    COMBINE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """target_t = reward_t + (terminated ? 0 : gamma^steps * (last ? V_t : (1 - lmbda) V_t + lmbda target_{t+1})).

    V_t is the value of soft_td_target_kernel. Rows are [.., length, inner]; a lane has one sequence.
    Grid: (cdiv(n_sequences, BLOCK),).
    """
    sequence = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = sequence < n_sequences
    width = inner + tl.zeros([BLOCK], tl.int64)
    # The last row of each sequence.
    row = (sequence // width) * width * length + (length - 1) * width + sequence % width
    gamma = tl.load(gamma_ptr).to(tl.float64)
    lmbda = tl.load(lmbda_ptr).to(tl.float64).to(REAL)
    target = tl.zeros([BLOCK], REAL)
    follows = tl.zeros([BLOCK], tl.int1)
    for _ in range(length):
        entropy = (next_log_prob_ptr, alpha_ptr) if HAS_NEXT_LOG_PROB else None
        steps = steps_ptr if HAS_STEPS else None
        value, discount = next_value(next_q_ptr, entropy, steps, gamma, row, inside, n, nets, REAL, COMBINE)
        done = tl.load(done_ptr + row, mask=inside, other=0) != 0
        terminated = tl.load(terminated_ptr + row, mask=inside, other=0) != 0
        reward = tl.load(reward_ptr + row, mask=inside, other=0).to(REAL)
        value = tl.where(follows & (done == 0), (1 - lmbda) * value + lmbda * target, value)
        target = reward + tl.where(terminated, 0.0, discount * value)
        tl.store(target_ptr + row, target, mask=inside)
        follows = inside
        if HAS_MASK:
            follows = inside & (tl.load(mask_ptr + row, mask=inside, other=0) != 0)
        row -= width
