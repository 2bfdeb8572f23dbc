"""Soft actor-critic's own losses on the GPU.

Every kernel computes in REAL, float32 or float64, whatever the dtypes of its arguments. Rows are flat and contiguous;
critics are ``[nets, n]``. The reductions are those of ``td/_triton.py``.
"""

import triton
import triton.language as tl

from gpubuf.kernels.td._triton import (
    AVERAGE,
    LOG_PROBS,
    LOSSES,
    MEAN,
    NONE,
    WEIGHTS,
    add_partials,
    finish_reduction,
    inverse_or_zero,
    mask_weights,
    one_critic,
    row_factor,
    smallest_critic,
    store_reduced,
)


@triton.jit(do_not_specialize=["n"])
def actor_loss_kernel(
    q_ptr,  # any float [nets, n]
    log_prob_ptr,  # any float [n]
    alpha_ptr,  # any float [1]
    weight_ptr,  # any float [n], read where HAS_WEIGHT
    mask_ptr,  # uint8 [n], read where HAS_MASK
    loss_ptr,  # REAL [n] or [1], out
    entropy_ptr,  # REAL [1], out where SINGLE
    norm_ptr,  # REAL [1], out
    partial_ptr,  # REAL [3, programs], out where not SINGLE
    n,
    nets,
    REAL: tl.constexpr,
    REDUCTION: tl.constexpr,
    COMBINE: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    HAS_MASK: tl.constexpr,
    SINGLE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """l_i = alpha * log_prob[i] - min_k or mean_k q[k, i], and the entropy -mean(log_prob). Grid: (cdiv(n, BLOCK),)."""
    row = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = row < n
    value, _ = one_critic(q_ptr, row, inside, n, nets, REAL, COMBINE)
    log_prob = tl.load(log_prob_ptr + row, mask=inside, other=0).to(REAL)
    loss = tl.load(alpha_ptr).to(REAL) * log_prob - value
    weighting = (weight_ptr if HAS_WEIGHT else None, mask_ptr if HAS_MASK else None)
    store_reduced(loss, weighting, (loss_ptr, norm_ptr, partial_ptr), (row, inside), REAL, REDUCTION, SINGLE)
    surprise = tl.sum(log_prob, 0)
    if SINGLE:
        tl.store(entropy_ptr, -surprise / n)
    else:
        tl.store(partial_ptr + tl.program_id(0) + tl.num_programs(0) * LOG_PROBS, surprise)


@triton.jit(do_not_specialize=["count", "n"])
def finish_actor_loss_kernel(
    partial_ptr,  # REAL [3, count]: sums of w * l, of w, of log_prob
    loss_ptr,  # REAL [1], out, where REDUCTION is not NONE
    norm_ptr,  # REAL [1], out, where REDUCTION is not NONE
    entropy_ptr,  # REAL [1], out
    count,
    n,
    REAL: tl.constexpr,
    REDUCTION: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Add the sums of all blocks, finish the reduction, and divide for the entropy. Grid: (1,)."""
    if REDUCTION != NONE:
        finish_reduction(partial_ptr, loss_ptr, norm_ptr, count, REAL, REDUCTION, BLOCK)
    tl.store(entropy_ptr, -add_partials(partial_ptr + count * LOG_PROBS, count, REAL, BLOCK) / n)


@triton.jit(do_not_specialize=["n"])
def actor_loss_backward_kernel(
    grad_ptr,  # any float [n] where REDUCTION is NONE, else [1]
    q_ptr,  # any float [nets, n]
    alpha_ptr,  # any float [1]
    weight_ptr,  # any float [n], read where HAS_WEIGHT
    mask_ptr,  # uint8 [n], read where HAS_MASK
    norm_ptr,  # REAL [1]
    grad_q_ptr,  # any float [nets, n], out
    grad_log_prob_ptr,  # any float [n], out
    n,
    nets,
    REAL: tl.constexpr,
    REDUCTION: tl.constexpr,
    COMBINE: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    HAS_MASK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """grad_log_prob = f_i * alpha; grad_q = -f_i at the critic that attains the minimum, else 0, or -f_i / N at all.

    f_i = grad * norm * w_i. Grid: (cdiv(n, BLOCK),).
    """
    row = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = row < n
    weighting = (weight_ptr if HAS_WEIGHT else None, mask_ptr if HAS_MASK else None)
    factor, _ = row_factor(grad_ptr, norm_ptr, weighting, (row, inside), REAL, REDUCTION)
    alpha = tl.load(alpha_ptr).to(REAL)
    tl.store(grad_log_prob_ptr + row, factor * alpha, mask=inside)
    grad_q_ptr += row
    if COMBINE == AVERAGE:
        share = -factor / nets
        for _ in range(nets):
            tl.store(grad_q_ptr, share, mask=inside)
            grad_q_ptr += n
    else:
        _, which = smallest_critic(q_ptr, row, inside, n, nets, REAL)
        for net in range(nets):
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
    weighting = (weight_ptr if HAS_WEIGHT else None, mask_ptr if HAS_MASK else None)
    weight, counts = mask_weights(weighting, (row, inside), REAL)
    product = tl.where(counts, weight * value, 0.0)
    if REDUCTION == NONE:
        tl.store(slope_ptr + row, product, mask=inside)
        tl.store(loss_ptr + row, log_alpha * product, mask=inside)
    else:
        slope = tl.sum(product, 0)
        total = tl.sum(weight, 0)
        if SINGLE:
            if REDUCTION == MEAN:
                slope = slope * inverse_or_zero(total)
            tl.store(slope_ptr, slope)
            tl.store(loss_ptr, log_alpha * slope)
        else:
            tl.store(partial_ptr + tl.program_id(0) + tl.num_programs(0) * LOSSES, slope)
            tl.store(partial_ptr + tl.program_id(0) + tl.num_programs(0) * WEIGHTS, total)


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
    slope = add_partials(partial_ptr + count * LOSSES, count, REAL, BLOCK)
    if REDUCTION == MEAN:
        slope = slope * inverse_or_zero(add_partials(partial_ptr + count * WEIGHTS, count, REAL, BLOCK))
    tl.store(slope_ptr, slope)
    tl.store(loss_ptr, tl.load(log_alpha_ptr).to(REAL) * slope)
