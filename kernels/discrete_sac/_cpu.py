"""Discrete soft actor-critic on the CPU.

One kernel serves both precisions: the flag ``wide`` says whether every float array is float64 or float32, and the
arithmetic is float64 either way. The address 0 stands for an absent argument.
"""

# Numba needs the real signatures: no `from __future__ import annotations`.

import math

import numpy as np
import torch
from torch import Tensor

from gpubuf.kernels._differentiable import computing_dtype
from gpubuf.kernels._elementary import exp_below_700
from gpubuf.kernels._floats import call, flags, load, read, store, write
from gpubuf.kernels._jit import OPTIONS, jit
from gpubuf.kernels.discrete_sac import check_actor, check_values
from gpubuf.kernels.td import NONE, check_rows
from gpubuf.kernels.td._cpu_reduce import normaliser, smallest_critic, weight_of

#: Elements of a tile of whole rows, if a row has no more: the buffers stay in the first cache.
TILE = 512


@jit(forceinline=True)
def rows_of_tile(actions):  # type: ignore[no-untyped-def]
    """How many rows are worked on at a time."""
    return max(TILE // actions, 1)


@jit(forceinline=True)
def load_tile(q, logits, wide, n, nets, actions, start, rows, shifted, e, smallest, other):  # type: ignore[no-untyped-def]
    """``shifted``, logits less the largest of their row; ``e``, its exponential; ``smallest``, min_k q.

    Where ``e`` is 0 the others are 0 as well. A NaN critic is the smallest; a NaN logit is in ``e``. The loops over all
    elements have no branches, so that LLVM vectorises them.
    """
    first, count = start * actions, rows * actions
    load(logits, wide, first, count, shifted)
    for row in range(rows):
        largest = shifted[row * actions]
        for j in range(row * actions, (row + 1) * actions):
            logit = shifted[j]
            largest = logit if logit > largest or largest != largest else largest
        for j in range(row * actions, (row + 1) * actions):
            shifted[j] -= largest
    for j in range(count):
        e[j] = exp_below_700(shifted[j])
    load(q, wide, first, count, smallest)
    for net in range(1, nets):
        load(q, wide, net * n * actions + first, count, other)
        for j in range(count):
            value, least = other[j], smallest[j]
            better = ((value < least) | (value != value)) & (least == least)
            smallest[j] = value if better else least
    for j in range(count):
        possible = e[j] != 0
        shifted[j] = shifted[j] if possible else 0.0
        smallest[j] = smallest[j] if possible else 0.0


@jit(forceinline=True)
def expectations(shifted, e, smallest, first, actions):  # type: ignore[no-untyped-def]
    """(sum_a e, sum_a p log p, sum_a p min_k q) with p = e / sum e, of the row that begins at ``first``."""
    total = by_logit = by_value = 0.0
    for j in range(first, first + actions):
        total += e[j]
        by_logit += e[j] * shifted[j]
        by_value += e[j] * smallest[j]
    return total, by_logit / total - math.log(total), by_value / total


@jit("void(int64, int64, int64, int64, int64, int64, boolean, int64)", **OPTIONS)
def _soft_value(q, logits, alpha, n, nets, actions, wide, value_out):  # type: ignore[no-untyped-def]
    temperature, tile = read(alpha, wide, 0), rows_of_tile(actions)
    width = tile * actions
    shifted, e, smallest, other = np.empty(width), np.empty(width), np.empty(width), np.empty(width)
    for start in range(0, n, tile):
        rows = min(tile, n - start)
        load_tile(q, logits, wide, n, nets, actions, start, rows, shifted, e, smallest, other)
        for row in range(rows):
            _, log_prob, value = expectations(shifted, e, smallest, row * actions, actions)
            write(value_out, wide, start + row, value - temperature * log_prob)


@jit(
    "void(int64, int64, int64, int64, int64, int64, int64, int64, int64, boolean, int64, int64, int64, int64)",
    **OPTIONS,
)
def _actor_loss(  # type: ignore[no-untyped-def]
    q, logits, alpha, weight, mask, reduction, n, nets, actions, wide, loss_out, log_prob_out, entropy, norm_out
):
    temperature, tile = read(alpha, wide, 0), rows_of_tile(actions)
    width = tile * actions
    shifted, e, smallest, other = np.empty(width), np.empty(width), np.empty(width), np.empty(width)
    total = mass = surprise = 0.0
    counted = 0
    for start in range(0, n, tile):
        rows = min(tile, n - start)
        load_tile(q, logits, wide, n, nets, actions, start, rows, shifted, e, smallest, other)
        for row in range(rows):
            _, log_prob, value = expectations(shifted, e, smallest, row * actions, actions)
            write(log_prob_out, wide, start + row, log_prob)
            w, counts = weight_of(weight, mask, wide, start + row)
            product = 0.0
            if counts:
                product = w * (temperature * log_prob - value)
                surprise += log_prob
                counted += 1
            if reduction == NONE:
                write(loss_out, wide, start + row, product)
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
    temperature, scale, tile = read(alpha, wide, 0), read(norm, wide, 0), rows_of_tile(actions)
    width = tile * actions
    shifted, e, smallest, other = np.empty(width), np.empty(width), np.empty(width), np.empty(width)
    for start in range(0, n, tile):
        rows = min(tile, n - start)
        load_tile(q, logits, wide, n, nets, actions, start, rows, shifted, e, smallest, other)
        for row in range(rows):
            w, counts = weight_of(weight, mask, wide, start + row)
            factor = read(grad, wide, start + row if reduction == NONE else 0) * scale * w
            total, log_prob, value = expectations(shifted, e, smallest, row * actions, actions)
            # What all actions of the row have in common.
            share, level = factor / total, temperature * (math.log(total) + log_prob) - value
            for j in range(row * actions, (row + 1) * actions):
                mass = share * e[j] if counts and e[j] != 0 else 0.0
                slope = temperature * shifted[j] - smallest[j] - level
                other[j] = mass * slope if counts and e[j] != 0 else 0.0
                e[j] = mass
        store(other, by_logits, wide, start * actions, rows * actions)
        if by_q:
            for j in range(rows * actions):
                element = start * actions + j
                _, which = smallest_critic(q, wide, n * actions, nets, element)
                for net in range(nets):
                    write(by_q, wide, net * n * actions + element, -e[j] if net == which else 0.0)


def soft_value(next_q: Tensor, logits: Tensor, alpha: Tensor) -> Tensor:
    """See :data:`gpubuf.kernels.discrete_sac.soft_value`."""
    n = check_values(next_q, logits)
    check_rows(1, alpha=alpha)
    real = computing_dtype(next_q, logits)
    value = torch.empty(logits.shape[:-1], dtype=real)
    wide = real is torch.float64
    call(_soft_value, real, next_q, logits, alpha, n, next_q.shape[0], logits.shape[-1], wide, value)
    return value


def actor_loss(
    q: Tensor, logits: Tensor, alpha: Tensor, weight: Tensor | None, mask: Tensor | None, reduction: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """See :data:`gpubuf.kernels.discrete_sac.actor_loss`."""
    n = check_actor(q, logits, alpha, weight, mask)
    real, rows = computing_dtype(q, logits), logits.shape[:-1]
    loss, log_prob = torch.empty(rows if reduction == NONE else (), dtype=real), torch.empty(rows, dtype=real)
    entropy, norm = torch.empty((), dtype=real), torch.empty((), dtype=real)
    sizes, wide = (n, q.shape[0], logits.shape[-1]), real is torch.float64
    given = (q, logits, alpha, weight, flags(mask))
    call(_actor_loss, real, *given, reduction, *sizes, wide, loss, log_prob, entropy, norm)
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
    actions, wide = logits.shape[-1], real is torch.float64
    given = (grad, q, logits, alpha, weight, flags(mask), norm)
    sizes = (logits.numel() // actions, q.shape[0], actions)
    # What has no elements has the address 0.
    call(_actor_loss_backward, real, *given, reduction, *sizes, wide, by_logits, by_q)
    return by_logits.to(logits.dtype), by_q.to(q.dtype)
