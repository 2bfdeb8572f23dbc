"""Soft actor-critic on the GPU.

Every kernel computes in REAL, float32 or float64, whatever the dtypes of its arguments. Rows are flat and contiguous;
critics are ``[n_nets, n]``. Reductions are blocked: a program writes the sums of its block, and either it is the only
one (SINGLE) and finishes, or ``finish_*_kernel`` adds the blocks in order.
"""

import triton
import triton.language as tl


@triton.jit
def mask_weights(
    weight_ptr, mask_ptr, row, inside, REAL: tl.constexpr, HAS_WEIGHT: tl.constexpr, HAS_MASK: tl.constexpr
):
    """(weight of each row, whether the row counts)."""
    counts = inside
    if HAS_MASK:
        counts = counts & (tl.load(mask_ptr + row, mask=inside, other=0) != 0)
    weight = tl.where(counts, 1.0, 0.0).to(REAL)
    if HAS_WEIGHT:
        weight = tl.load(weight_ptr + row, mask=counts, other=0).to(REAL)
    return weight, counts


@triton.jit
def inverse_or_zero(total):
    """1 / total, and 0 where the total is 0. In float32 to 2 units in the last place, below the error of the sum."""
    return tl.where(total == 0, 0.0, 1.0 / tl.where(total == 0, 1.0, total))


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


@triton.jit(do_not_specialize=["n"])
def soft_td_target_kernel(
    next_q_ptr,  # any float [n_nets, n]
    next_log_prob_ptr,  # any float [n]
    alpha_ptr,  # any float [1]
    reward_ptr,  # any number [n]
    terminated_ptr,  # bool as uint8, or any number [n]
    gamma_ptr,  # any float [1]
    steps_ptr,  # any number [n], read where HAS_STEPS
    target_ptr,  # REAL [n], out
    n,
    n_nets,
    REAL: tl.constexpr,
    HAS_STEPS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """target = reward + (terminated ? 0 : gamma^steps * (min_k next_q[k] - alpha * next_log_prob)).

    Grid: (cdiv(n, BLOCK),).
    """
    row = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = row < n
    smallest, _ = smallest_critic(next_q_ptr, row, inside, n, n_nets, REAL)
    alpha = tl.load(alpha_ptr).to(REAL)
    value = smallest - alpha * tl.load(next_log_prob_ptr + row, mask=inside, other=0).to(REAL)
    gamma = tl.load(gamma_ptr).to(tl.float64)
    discount = gamma + tl.zeros([BLOCK], tl.float64)
    if HAS_STEPS:
        steps = tl.load(steps_ptr + row, mask=inside, other=1).to(tl.float64)
        # gamma^0 is 1 also for gamma = 0, where the logarithm is infinite.
        discount = tl.where(steps == 0, 1.0, tl.exp2(tl.log2(gamma) * steps))
    terminated = tl.load(terminated_ptr + row, mask=inside, other=0) != 0
    reward = tl.load(reward_ptr + row, mask=inside, other=0).to(REAL)
    tl.store(target_ptr + row, reward + tl.where(terminated, 0.0, discount.to(REAL) * value), mask=inside)


@triton.jit
def distance_value(d, LOSS: tl.constexpr):
    """|d| (0), d^2 (1), or d^2/2 below 1 and |d| - 1/2 above (2)."""
    magnitude = tl.abs(d)
    if LOSS == 0:
        out = magnitude
    elif LOSS == 1:
        out = d * d
    else:
        out = tl.where(magnitude < 1, 0.5 * d * d, magnitude - 0.5)
    return out


@triton.jit
def distance_slope(d, LOSS: tl.constexpr):
    """Derivative of distance_value; 0 at the kink of |d|."""
    sign = tl.where(d > 0, 1.0, tl.where(d < 0, -1.0, d))
    if LOSS == 0:
        out = sign
    elif LOSS == 1:
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
    store_reduced(
        loss, weight_ptr, mask_ptr, loss_ptr, norm_ptr, partial_ptr, row, inside, REAL, REDUCTION, HAS_WEIGHT, HAS_MASK,
        SINGLE,
    )  # fmt: skip


@triton.jit
def store_reduced(
    value,  # REAL [BLOCK]: the loss of each row
    weight_ptr,
    mask_ptr,
    loss_ptr,
    norm_ptr,
    partial_ptr,
    row,
    inside,
    REAL: tl.constexpr,
    REDUCTION: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    HAS_MASK: tl.constexpr,
    SINGLE: tl.constexpr,
):
    """Store w_i * value_i per row (REDUCTION 0), the finished mean (1) or sum (2), or this block's two sums."""
    weight, counts = mask_weights(weight_ptr, mask_ptr, row, inside, REAL, HAS_WEIGHT, HAS_MASK)
    product = tl.where(counts, weight * value, 0.0)
    program = tl.program_id(0)
    if REDUCTION == 0:
        tl.store(loss_ptr + row, product, mask=inside)
        if program == 0:
            tl.store(norm_ptr, 1.0)
    else:
        loss = tl.sum(product, 0)
        total = tl.sum(weight, 0)
        if SINGLE:
            norm = inverse_or_zero(total) if REDUCTION == 1 else total * 0 + 1.0
            tl.store(loss_ptr, loss * norm)
            tl.store(norm_ptr, norm)
        else:
            tl.store(partial_ptr + program, loss)
            tl.store(partial_ptr + tl.num_programs(0) + program, total)


@triton.jit
def add_partials(partial_ptr, count, REAL: tl.constexpr, BLOCK: tl.constexpr):
    """Sum of ``count`` numbers, in an order that depends on nothing else."""
    total = tl.zeros([BLOCK], REAL)
    for start in range(0, count, BLOCK):
        index = start + tl.arange(0, BLOCK)
        total += tl.load(partial_ptr + index, mask=index < count, other=0)
    return tl.sum(total, 0)


@triton.jit(do_not_specialize=["count", "n"])
def finish_loss_kernel(
    partial_ptr,  # REAL [3, count] (the third row where HAS_ENTROPY): sums of w * l, of w, of log_prob
    loss_ptr,  # REAL [1], out, where REDUCTION is not 0
    norm_ptr,  # REAL [1], out, where REDUCTION is not 0
    entropy_ptr,  # REAL [1], out where HAS_ENTROPY
    count,
    n,
    REAL: tl.constexpr,
    REDUCTION: tl.constexpr,
    HAS_ENTROPY: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Add the sums of all blocks and finish the reduction. Grid: (1,)."""
    if REDUCTION != 0:
        loss = add_partials(partial_ptr, count, REAL, BLOCK)
        total = add_partials(partial_ptr + count, count, REAL, BLOCK)
        norm = inverse_or_zero(total) if REDUCTION == 1 else total * 0 + 1.0
        tl.store(loss_ptr, loss * norm)
        tl.store(norm_ptr, norm)
    if HAS_ENTROPY:
        tl.store(entropy_ptr, -add_partials(partial_ptr + 2 * count, count, REAL, BLOCK) / n)


@triton.jit(do_not_specialize=["n"])
def td_loss_backward_kernel(
    grad_ptr,  # any float [n] where REDUCTION is 0, else [1]
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
    factor, counts = row_factor(
        grad_ptr, weight_ptr, mask_ptr, norm_ptr, row, inside, REAL, REDUCTION, HAS_WEIGHT, HAS_MASK
    )
    target = tl.load(target_ptr + row, mask=inside, other=0).to(REAL)
    q_ptr += row
    grad_q_ptr += row
    for _ in range(n_nets):
        d = tl.load(q_ptr, mask=inside, other=0).to(REAL) - target
        tl.store(grad_q_ptr, tl.where(counts, factor * distance_slope(d, LOSS), 0.0), mask=inside)
        q_ptr += n
        grad_q_ptr += n


@triton.jit
def row_factor(
    grad_ptr,
    weight_ptr,
    mask_ptr,
    norm_ptr,
    row,
    inside,
    REAL: tl.constexpr,
    REDUCTION: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    HAS_MASK: tl.constexpr,
):
    """(derivative of the reduced loss by the loss of each row, times the incoming gradient; whether the row counts)."""
    weight, counts = mask_weights(weight_ptr, mask_ptr, row, inside, REAL, HAS_WEIGHT, HAS_MASK)
    grad = tl.load(grad_ptr + row, mask=inside, other=0).to(REAL) if REDUCTION == 0 else tl.load(grad_ptr).to(REAL)
    return grad * tl.load(norm_ptr).to(REAL) * weight, counts


@triton.jit(do_not_specialize=["n"])
def actor_loss_kernel(
    q_ptr,  # any float [n_nets, n]
    log_prob_ptr,  # any float [n]
    alpha_ptr,  # any float [1]
    weight_ptr,  # any float [n], read where HAS_WEIGHT
    mask_ptr,  # uint8 [n], read where HAS_MASK
    loss_ptr,  # REAL [n] or [1], out
    entropy_ptr,  # REAL [1], out where SINGLE
    norm_ptr,  # REAL [1], out
    partial_ptr,  # REAL [3, programs], out where not SINGLE
    n,
    n_nets,
    REAL: tl.constexpr,
    REDUCTION: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    HAS_MASK: tl.constexpr,
    SINGLE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """l_i = alpha * log_prob[i] - min_k q[k, i], and the entropy -mean(log_prob). Grid: (cdiv(n, BLOCK),)."""
    row = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = row < n
    smallest, _ = smallest_critic(q_ptr, row, inside, n, n_nets, REAL)
    log_prob = tl.load(log_prob_ptr + row, mask=inside, other=0).to(REAL)
    loss = tl.load(alpha_ptr).to(REAL) * log_prob - smallest
    store_reduced(
        loss, weight_ptr, mask_ptr, loss_ptr, norm_ptr, partial_ptr, row, inside, REAL, REDUCTION, HAS_WEIGHT, HAS_MASK,
        SINGLE,
    )  # fmt: skip
    surprise = tl.sum(log_prob, 0)
    if SINGLE:
        tl.store(entropy_ptr, -surprise / n)
    else:
        tl.store(partial_ptr + 2 * tl.num_programs(0) + tl.program_id(0), surprise)


@triton.jit(do_not_specialize=["n"])
def actor_loss_backward_kernel(
    grad_ptr,  # any float [n] where REDUCTION is 0, else [1]
    q_ptr,  # any float [n_nets, n]
    alpha_ptr,  # any float [1]
    weight_ptr,  # any float [n], read where HAS_WEIGHT
    mask_ptr,  # uint8 [n], read where HAS_MASK
    norm_ptr,  # REAL [1]
    grad_q_ptr,  # any float [n_nets, n], out
    grad_log_prob_ptr,  # any float [n], out
    n,
    n_nets,
    REAL: tl.constexpr,
    REDUCTION: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    HAS_MASK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """grad_log_prob = f_i * alpha; grad_q = -f_i at the critic that attains the minimum, else 0.

    f_i = grad * norm * w_i. Grid: (cdiv(n, BLOCK),).
    """
    row = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = row < n
    factor, _ = row_factor(grad_ptr, weight_ptr, mask_ptr, norm_ptr, row, inside, REAL, REDUCTION, HAS_WEIGHT, HAS_MASK)
    alpha = tl.load(alpha_ptr).to(REAL)
    tl.store(grad_log_prob_ptr + row, factor * alpha, mask=inside)
    _, which = smallest_critic(q_ptr, row, inside, n, n_nets, REAL)
    grad_q_ptr += row
    for net in range(n_nets):
        tl.store(grad_q_ptr, tl.where(which == net, -factor, 0.0), mask=inside)
        grad_q_ptr += n


@triton.jit(do_not_specialize=["n"])
def temperature_loss_kernel(
    log_alpha_ptr,  # any float [1]
    log_prob_ptr,  # any float [n]
    target_entropy_ptr,  # any float [1]
    weight_ptr,  # any float [n], read where HAS_WEIGHT
    mask_ptr,  # uint8 [n], read where HAS_MASK
    loss_ptr,  # REAL [n] or [1], out
    slope_ptr,  # REAL [n] or [1], out
    partial_ptr,  # REAL [2, programs], out where not SINGLE
    n,
    REAL: tl.constexpr,
    REDUCTION: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    HAS_MASK: tl.constexpr,
    SINGLE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """slope = reduction of -(log_prob[i] + target_entropy), loss = log_alpha * slope. Grid: (cdiv(n, BLOCK),)."""
    row = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = row < n
    log_alpha = tl.load(log_alpha_ptr).to(REAL)
    target_entropy = tl.load(target_entropy_ptr).to(REAL)
    value = -(tl.load(log_prob_ptr + row, mask=inside, other=0).to(REAL) + target_entropy)
    weight, counts = mask_weights(weight_ptr, mask_ptr, row, inside, REAL, HAS_WEIGHT, HAS_MASK)
    product = tl.where(counts, weight * value, 0.0)
    if REDUCTION == 0:
        tl.store(slope_ptr + row, product, mask=inside)
        tl.store(loss_ptr + row, log_alpha * product, mask=inside)
    else:
        slope = tl.sum(product, 0)
        total = tl.sum(weight, 0)
        if SINGLE:
            if REDUCTION == 1:
                slope = slope * inverse_or_zero(total)
            tl.store(slope_ptr, slope)
            tl.store(loss_ptr, log_alpha * slope)
        else:
            tl.store(partial_ptr + tl.program_id(0), slope)
            tl.store(partial_ptr + tl.num_programs(0) + tl.program_id(0), total)


@triton.jit(do_not_specialize=["count"])
def finish_temperature_kernel(
    partial_ptr,  # REAL [2, count]: sums of w * value, of w
    log_alpha_ptr,  # any float [1]
    loss_ptr,  # REAL [1], out
    slope_ptr,  # REAL [1], out
    count,
    REAL: tl.constexpr,
    REDUCTION: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Add the sums of all blocks and finish the reduction. Grid: (1,)."""
    slope = add_partials(partial_ptr, count, REAL, BLOCK)
    if REDUCTION == 1:
        slope = slope * inverse_or_zero(add_partials(partial_ptr + count, count, REAL, BLOCK))
    tl.store(slope_ptr, slope)
    tl.store(loss_ptr, tl.load(log_alpha_ptr).to(REAL) * slope)
