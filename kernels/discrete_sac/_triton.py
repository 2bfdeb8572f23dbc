"""Discrete soft actor-critic on the GPU.

Every kernel computes in REAL, float32 or float64, whatever the dtypes of its arguments. Rows are flat and contiguous;
logits are ``[n, n_actions]``, critics ``[nets, n, n_actions]``. A program takes ROWS rows, ACTIONS actions at a time.
The reductions are those of ``td/_triton.py``.
"""

import triton
import triton.language as tl

from gpubuf.kernels.td._triton import (
    LOG_PROBS,
    NONE,
    add_partials,
    finish_reduction,
    mask_weights,
    row_factor,
    smallest_critic,
    store_reduced,
)

# A row of ``partial_ptr``, after those of td: the number of rows that count.
COUNTS = tl.constexpr(3)


@triton.jit
def rows_of_program(q_ptr, logits_ptr, n, n_actions, ROWS: tl.constexpr):
    """(first row, numbers from it on, rows, which of these there are, critics and logits from the first row on)."""
    first = tl.program_id(0).to(tl.int64) * ROWS
    lane = tl.arange(0, ROWS)
    row = first + lane
    return first, lane, row, row < n, q_ptr + first * n_actions, logits_ptr + first * n_actions


@triton.jit
def tile_of(lane, inside, start, n_actions, ACTIONS: tl.constexpr):
    """(offsets of ROWS rows by ACTIONS actions from the program's first element, whether each is in bounds).

    32 bits are enough for a program of up to 1024 elements at a time, and halve the registers of a tile.
    """
    action = start + tl.arange(0, ACTIONS)
    return lane[:, None] * n_actions + action[None, :], inside[:, None] & (action < n_actions)[None, :]


@triton.jit
def largest_logit(logits_ptr, lane, inside, n_actions, REAL: tl.constexpr, ACTIONS: tl.constexpr):
    """The largest logit of each row, 0 outside. A NaN is left to the sum of the exponentials."""
    largest = tl.full(lane.shape, float("-inf"), REAL)
    for start in range(0, n_actions, ACTIONS):
        offset, within = tile_of(lane, inside, start, n_actions, ACTIONS)
        logits = tl.load(logits_ptr + offset, mask=within, other=float("-inf")).to(REAL)
        largest = tl.maximum(largest, tl.max(logits, 1))
    return tl.where(inside, largest, 0.0)


@triton.jit
def exponentials(logits_ptr, offset, within, largest, REAL: tl.constexpr):
    """(logit - largest, its exponential) of each element; (0, 0) where that is 0."""
    logits = tl.load(logits_ptr + offset, mask=within, other=float("-inf")).to(REAL)
    shifted = logits - largest[:, None]
    e = tl.exp(shifted)
    return tl.where(e == 0, 0.0, shifted), e


@triton.jit
def expectations(
    q_ptr, logits_ptr, lane, inside, n_actions, n_elements, nets, REAL: tl.constexpr, ACTIONS: tl.constexpr
):
    """(largest logit, sum_a e, sum_a p log p, sum_a p min_k q) with e = exp(logit - largest) and p = e / sum e."""
    largest = largest_logit(logits_ptr, lane, inside, n_actions, REAL, ACTIONS)
    total = tl.zeros(lane.shape, REAL)
    by_logit = tl.zeros(lane.shape, REAL)
    by_value = tl.zeros(lane.shape, REAL)
    for start in range(0, n_actions, ACTIONS):
        offset, within = tile_of(lane, inside, start, n_actions, ACTIONS)
        shifted, e = exponentials(logits_ptr, offset, within, largest, REAL)
        smallest, _ = smallest_critic(q_ptr, offset, within, n_elements, nets, REAL)
        total += tl.sum(e, 1)
        by_logit += tl.sum(e * shifted, 1)
        by_value += tl.sum(e * tl.where(e == 0, 0.0, smallest), 1)
    total = tl.where(inside, total, 1.0)
    inverse = 1.0 / total
    return largest, total, by_logit * inverse - tl.log(total), by_value * inverse


@triton.jit(do_not_specialize=["n"])
def soft_value_kernel(
    q_ptr,  # any float [nets, n, n_actions]
    logits_ptr,  # any float [n, n_actions]
    alpha_ptr,  # any float [1]
    value_ptr,  # REAL [n], out
    n,
    n_actions,
    n_elements,  # n * n_actions
    nets,
    REAL: tl.constexpr,
    ROWS: tl.constexpr,
    ACTIONS: tl.constexpr,
):
    """value = sum_a p * (min_k q - alpha * log p). Grid: (cdiv(n, ROWS),)."""
    _, lane, row, inside, q_ptr, logits_ptr = rows_of_program(q_ptr, logits_ptr, n, n_actions, ROWS)
    _, _, log_prob, value = expectations(q_ptr, logits_ptr, lane, inside, n_actions, n_elements, nets, REAL, ACTIONS)
    tl.store(value_ptr + row, value - tl.load(alpha_ptr).to(REAL) * log_prob, mask=inside)


@triton.jit(do_not_specialize=["n"])
def actor_loss_kernel(
    q_ptr,  # any float [nets, n, n_actions]
    logits_ptr,  # any float [n, n_actions]
    alpha_ptr,  # any float [1]
    weight_ptr,  # any float [n], read where HAS_WEIGHT
    mask_ptr,  # uint8 [n], read where HAS_MASK
    loss_ptr,  # REAL [n] or [1], out
    log_prob_ptr,  # REAL [n], out
    entropy_ptr,  # REAL [1], out where SINGLE
    norm_ptr,  # REAL [1], out
    partial_ptr,  # REAL [4, programs], out where not SINGLE
    n,
    n_actions,
    n_elements,  # n * n_actions
    nets,
    REAL: tl.constexpr,
    REDUCTION: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    HAS_MASK: tl.constexpr,
    SINGLE: tl.constexpr,
    ROWS: tl.constexpr,
    ACTIONS: tl.constexpr,
):
    """l_i = sum_a p (alpha log p - min_k q), log_prob = sum_a p log p, and the entropy. Grid: (cdiv(n, ROWS),)."""
    _, lane, row, inside, q_ptr, logits_ptr = rows_of_program(q_ptr, logits_ptr, n, n_actions, ROWS)
    _, _, log_prob, value = expectations(q_ptr, logits_ptr, lane, inside, n_actions, n_elements, nets, REAL, ACTIONS)
    tl.store(log_prob_ptr + row, log_prob, mask=inside)
    loss = tl.load(alpha_ptr).to(REAL) * log_prob - value
    weighting = (weight_ptr if HAS_WEIGHT else None, mask_ptr if HAS_MASK else None)
    store_reduced(loss, weighting, (loss_ptr, norm_ptr, partial_ptr), (row, inside), REAL, REDUCTION, SINGLE)
    # Whether a row counts is a matter of the mask alone.
    counting, counts = mask_weights((None, weighting[1]), (row, inside), REAL)
    surprise = tl.sum(tl.where(counts, log_prob, 0.0), 0)
    count = tl.sum(counting, 0)
    if SINGLE:
        tl.store(entropy_ptr, -surprise / tl.maximum(count, 1.0))
    else:
        tl.store(partial_ptr + tl.program_id(0) + tl.num_programs(0) * LOG_PROBS, surprise)
        tl.store(partial_ptr + tl.program_id(0) + tl.num_programs(0) * COUNTS, count)


@triton.jit(do_not_specialize=["count"])
def finish_actor_loss_kernel(
    partial_ptr,  # REAL [4, count]: sums of w * l, of w, of log_prob, of the rows that count
    loss_ptr,  # REAL [1], out, where REDUCTION is not NONE
    norm_ptr,  # REAL [1], out, where REDUCTION is not NONE
    entropy_ptr,  # REAL [1], out
    count,
    REAL: tl.constexpr,
    REDUCTION: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Add the sums of all blocks, finish the reduction, and divide for the entropy. Grid: (1,)."""
    if REDUCTION != NONE:
        finish_reduction(partial_ptr, loss_ptr, norm_ptr, count, REAL, REDUCTION, BLOCK)
    surprise = add_partials(partial_ptr + count * LOG_PROBS, count, REAL, BLOCK)
    rows = add_partials(partial_ptr + count * COUNTS, count, REAL, BLOCK)
    tl.store(entropy_ptr, -surprise / tl.maximum(rows, 1.0))


@triton.jit(do_not_specialize=["n"])
def actor_loss_backward_kernel(
    grad_ptr,  # any float [n] where REDUCTION is NONE, else [1]
    q_ptr,  # any float [nets, n, n_actions]
    logits_ptr,  # any float [n, n_actions]
    alpha_ptr,  # any float [1]
    weight_ptr,  # any float [n], read where HAS_WEIGHT
    mask_ptr,  # uint8 [n], read where HAS_MASK
    norm_ptr,  # REAL [1]
    grad_logits_ptr,  # any float [n, n_actions], out
    grad_q_ptr,  # any float [nets, n, n_actions], out where WITH_Q
    n,
    n_actions,
    n_elements,  # n * n_actions
    nets,
    REAL: tl.constexpr,
    REDUCTION: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    HAS_MASK: tl.constexpr,
    WITH_Q: tl.constexpr,
    ROWS: tl.constexpr,
    ACTIONS: tl.constexpr,
):
    """grad_logits = f_i p (alpha log p - min_k q - l_i); grad_q = -f_i p at the critic with the minimum, else 0.

    f_i = grad * norm * w_i. Grid: (cdiv(n, ROWS),).
    """
    first, lane, row, inside, q_ptr, logits_ptr = rows_of_program(q_ptr, logits_ptr, n, n_actions, ROWS)
    weighting = (weight_ptr if HAS_WEIGHT else None, mask_ptr if HAS_MASK else None)
    factor, counts = row_factor(grad_ptr, norm_ptr, weighting, (row, inside), REAL, REDUCTION)
    alpha = tl.load(alpha_ptr).to(REAL)
    largest, total, log_prob, value = expectations(
        q_ptr, logits_ptr, lane, inside, n_actions, n_elements, nets, REAL, ACTIONS
    )
    loss = alpha * log_prob - value
    log_total = tl.log(total)
    grad_logits_ptr += first * n_actions
    grad_q_ptr += first * n_actions
    for start in range(0, n_actions, ACTIONS):
        offset, within = tile_of(lane, inside, start, n_actions, ACTIONS)
        shifted, e = exponentials(logits_ptr, offset, within, largest, REAL)
        smallest, which = smallest_critic(q_ptr, offset, within, n_elements, nets, REAL)
        takes_part = counts[:, None] & (e != 0)
        mass = tl.where(takes_part, (factor / total)[:, None] * e, 0.0)
        slope = alpha * (shifted - log_total[:, None]) - smallest - loss[:, None]
        tl.store(grad_logits_ptr + offset, tl.where(takes_part, mass * slope, 0.0), mask=within)
        if WITH_Q:
            by_q_ptr = grad_q_ptr
            for net in range(nets):
                tl.store(by_q_ptr + offset, tl.where(which == net, -mass, 0.0), mask=within)
                by_q_ptr += n_elements
