"""Discrete soft actor-critic on the CPU.

One kernel serves both precisions: the flag ``wide`` says whether every float array is float64 or float32, and the
arithmetic is float64 either way. The address 0 stands for an absent argument.
"""

# Numba needs the real signatures: no `from __future__ import annotations`.

import math

import torch
from torch import Tensor

from gpubuf.kernels._differentiable import computing_dtype, dense
from gpubuf.kernels._elementary import exp_below_700
from gpubuf.kernels._floats import read, write
from gpubuf.kernels._jit import OPTIONS, jit
from gpubuf.kernels.discrete_sac import check_actor, check_values
from gpubuf.kernels.td import NONE, check_rows
from gpubuf.kernels.td._cpu_reduce import address, normaliser, smallest_critic, weight_of, weighting


@jit(forceinline=True)
def largest_logit(logits, wide, first, actions):  # type: ignore[no-untyped-def]
    """The largest logit of the row that begins at ``first``. A NaN is left to the sum of the exponentials."""
    largest = read(logits, wide, first)
    for element in range(first + 1, first + actions):
        logit = read(logits, wide, element)
        if logit > largest or largest != largest:
            largest = logit
    return largest


@jit(forceinline=True)
def expectations(q, logits, wide, n, nets, actions, row):  # type: ignore[no-untyped-def]
    """(largest logit, sum_a e, sum_a p log p, sum_a p min_k q) with e = exp(logit - largest) and p = e / sum e."""
    first = row * actions
    largest = largest_logit(logits, wide, first, actions)
    total = by_logit = by_value = 0.0
    for element in range(first, first + actions):
        shifted = read(logits, wide, element) - largest
        e = exp_below_700(shifted)
        total += e
        if e != 0:
            smallest, _ = smallest_critic(q, wide, n * actions, nets, element)
            by_logit += e * shifted
            by_value += e * smallest
    return largest, total, by_logit / total - math.log(total), by_value / total


@jit("void(int64, int64, int64, int64, int64, int64, boolean, int64)", **OPTIONS)
def _soft_value(q, logits, alpha, n, nets, actions, wide, value_out):  # type: ignore[no-untyped-def]
    temperature = read(alpha, wide, 0)
    for row in range(n):
        _, _, log_prob, value = expectations(q, logits, wide, n, nets, actions, row)
        write(value_out, wide, row, value - temperature * log_prob)


@jit(
    "void(int64, int64, int64, int64, int64, int64, int64, int64, int64, boolean, int64, int64, int64, int64)",
    **OPTIONS,
)
def _actor_loss(  # type: ignore[no-untyped-def]
    q, logits, alpha, weight, mask, reduction, n, nets, actions, wide, loss_out, log_prob_out, entropy, norm_out
):
    temperature = read(alpha, wide, 0)
    total = mass = surprise = 0.0
    counted = 0
    for row in range(n):
        _, _, log_prob, value = expectations(q, logits, wide, n, nets, actions, row)
        write(log_prob_out, wide, row, log_prob)
        w, counts = weight_of(weight, mask, wide, row)
        product = 0.0
        if counts:
            product = w * (temperature * log_prob - value)
            surprise += log_prob
            counted += 1
        if reduction == NONE:
            write(loss_out, wide, row, product)
        total += product
        mass += w
    norm = normaliser(mass, reduction)
    write(norm_out, wide, 0, norm)
    write(entropy, wide, 0, -surprise / max(counted, 1))
    if reduction != NONE:
        write(loss_out, wide, 0, total * norm)


@jit(
    "void(int64, int64, int64, int64, int64, int64, int64, int64, int64, int64, int64, boolean, int64, int64)",
    **OPTIONS,
)
def _actor_loss_backward(  # type: ignore[no-untyped-def]
    grad, q, logits, alpha, weight, mask, norm, reduction, n, nets, actions, wide, by_logits, by_q
):
    temperature, scale = read(alpha, wide, 0), read(norm, wide, 0)
    for row in range(n):
        w, counts = weight_of(weight, mask, wide, row)
        factor = read(grad, wide, row if reduction == NONE else 0) * scale * w
        largest, total, log_prob, value = expectations(q, logits, wide, n, nets, actions, row)
        loss, log_total = temperature * log_prob - value, math.log(total)
        for action in range(actions):
            element = row * actions + action
            shifted = read(logits, wide, element) - largest
            e = exp_below_700(shifted)
            slope = mass = 0.0
            which = 0
            if counts and e != 0:
                smallest, which = smallest_critic(q, wide, n * actions, nets, element)
                mass = factor * e / total
                slope = mass * (temperature * (shifted - log_total) - smallest - loss)
            write(by_logits, wide, element, slope)
            if by_q:
                for net in range(nets):
                    write(by_q, wide, net * n * actions + element, -mass if net == which else 0.0)


def soft_value(next_q: Tensor, logits: Tensor, alpha: Tensor) -> Tensor:
    """See :data:`gpubuf.kernels.discrete_sac.soft_value`."""
    n = check_values(next_q, logits)
    check_rows(1, alpha=alpha)
    real = computing_dtype(next_q, logits)
    value = torch.empty(logits.shape[:-1], dtype=real)
    next_q, logits, alpha = dense(next_q, real), dense(logits, real), dense(alpha, real)
    _soft_value(
        next_q.data_ptr(),
        logits.data_ptr(),
        alpha.data_ptr(),
        n,
        next_q.shape[0],
        logits.shape[-1],
        real is torch.float64,
        value.data_ptr(),
    )
    return value


def actor_loss(
    q: Tensor, logits: Tensor, alpha: Tensor, weight: Tensor | None, mask: Tensor | None, reduction: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """See :data:`gpubuf.kernels.discrete_sac.actor_loss`."""
    n = check_actor(q, logits, alpha, weight, mask)
    real, rows = computing_dtype(q, logits), logits.shape[:-1]
    loss, log_prob = torch.empty(rows if reduction == NONE else (), dtype=real), torch.empty(rows, dtype=real)
    entropy, norm = torch.empty((), dtype=real), torch.empty((), dtype=real)
    q, logits, alpha = dense(q, real), dense(logits, real), dense(alpha, real)
    weight, mask = weighting(weight, mask, real)
    _actor_loss(
        q.data_ptr(),
        logits.data_ptr(),
        alpha.data_ptr(),
        address(weight),
        address(mask),
        reduction,
        n,
        q.shape[0],
        logits.shape[-1],
        real is torch.float64,
        loss.data_ptr(),
        log_prob.data_ptr(),
        entropy.data_ptr(),
        norm.data_ptr(),
    )
    return loss, log_prob, entropy, norm


def actor_loss_backward(
    grad: Tensor,
    q: Tensor,
    logits: Tensor,
    alpha: Tensor,
    weight: Tensor | None,
    mask: Tensor | None,
    norm: Tensor,
    reduction: int,
    with_q: bool,
) -> tuple[Tensor, Tensor]:
    """See :data:`gpubuf.kernels.discrete_sac.actor_loss_backward`."""
    real = computing_dtype(q, logits)
    by_logits, by_q = torch.empty(logits.shape, dtype=real), torch.empty(q.shape if with_q else (0,), dtype=real)
    grad, critics, given, alpha = dense(grad, real), dense(q, real), dense(logits, real), dense(alpha, real)
    weight, mask = weighting(weight, mask, real)
    _actor_loss_backward(
        grad.data_ptr(),
        critics.data_ptr(),
        given.data_ptr(),
        alpha.data_ptr(),
        address(weight),
        address(mask),
        norm.data_ptr(),
        reduction,
        logits.numel() // logits.shape[-1],
        q.shape[0],
        logits.shape[-1],
        real is torch.float64,
        by_logits.data_ptr(),
        by_q.data_ptr() if with_q else 0,
    )
    return by_logits.to(logits.dtype), by_q.to(q.dtype)
