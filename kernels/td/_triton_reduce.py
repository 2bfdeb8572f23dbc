"""Reductions of losses on the GPU, which every kernel of a loss calls.

They compute in REAL, float32 or float64. Rows are flat and contiguous. ``rows`` are (numbers of rows, which of them are
there); ``weighting`` is (weight_ptr, mask_ptr), with None for what is not given.

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
