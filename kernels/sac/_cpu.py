"""Soft actor-critic's own losses on the CPU.

One kernel serves both precisions: the flag ``wide`` says whether every float array is float64 or float32, and the
arithmetic is float64 either way. The address 0 stands for an absent argument.
"""

# Numba needs the real signatures: no `from __future__ import annotations`.

import numpy as np
import torch
from torch import Tensor

from gpubuf.kernels._differentiable import computing_dtype
from gpubuf.kernels._floats import call, flags, load, read, store, total_of, write
from gpubuf.kernels._jit import OPTIONS, jit
from gpubuf.kernels.td import AVERAGE, NONE, SMALLEST, check_critics, check_rows
from gpubuf.kernels.td._cpu_reduce import (
    TILE,
    load_factors,
    load_mean,
    load_smallest,
    load_weights,
    normaliser,
    weight_of,
)


@jit(
    "void(int64, int64, int64, int64, int64, int64, int64, int64, int64, boolean, int64, int64, int64)",
    **OPTIONS,
)
def _actor_loss(q, log_prob, alpha, weight, mask, reduction, combine, n, nets, wide, loss_out, entropy, norm_out):  # type: ignore[no-untyped-def]
    temperature = read(alpha, wide, 0)
    total = mass = surprise = 0.0
    values, densities, weights = np.empty(TILE), np.empty(TILE), np.empty(TILE)
    which, counts = np.empty(TILE, np.int64), np.empty(TILE, np.bool_)
    for first in range(0, n, TILE):
        count = min(TILE, n - first)
        if combine == AVERAGE:
            load_mean(q, wide, n, nets, first, count, values, densities)
        else:
            load_smallest(q, wide, n, nets, first, count, values, which, densities)
        load(log_prob, wide, first, count, densities)
        load_weights(weight, mask, wide, first, count, weights, counts)
        for j in range(count):
            values[j] = weights[j] * (temperature * densities[j] - values[j]) if counts[j] else 0.0
        if reduction == NONE:
            store(values, loss_out, wide, first, count)
        surprise += total_of(densities, count)
        total += total_of(values, count)
        mass += total_of(weights, count)
    norm = normaliser(mass, reduction)
    write(norm_out, wide, 0, norm)
    write(entropy, wide, 0, -surprise / max(n, 1))
    if reduction != NONE:
        write(loss_out, wide, 0, total * norm)


@jit(
    "void(int64, int64, int64, int64, int64, int64, int64, int64, int64, int64, boolean, int64, int64)",
    **OPTIONS,
)
def _actor_loss_backward(grad, q, alpha, weight, mask, norm, reduction, combine, n, nets, wide, by_q, by_log_prob):  # type: ignore[no-untyped-def]
    temperature, scale = read(alpha, wide, 0), read(norm, wide, 0)
    factors, values, other = np.empty(TILE), np.empty(TILE), np.empty(TILE)
    which, counts = np.empty(TILE, np.int64), np.empty(TILE, np.bool_)
    for first in range(0, n, TILE):
        count = min(TILE, n - first)
        load_weights(weight, mask, wide, first, count, factors, counts)
        load_factors(grad, scale, reduction, wide, first, count, factors, other)
        for j in range(count):
            other[j] = factors[j] * temperature
        store(other, by_log_prob, wide, first, count)
        if combine == AVERAGE:
            for j in range(count):
                other[j] = -factors[j] / nets
            for net in range(nets):
                store(other, by_q, wide, net * n + first, count)
            continue
        load_smallest(q, wide, n, nets, first, count, values, which, other)
        for net in range(nets):
            for j in range(count):
                other[j] = -factors[j] if net == which[j] else 0.0
            store(other, by_q, wide, net * n + first, count)


@jit(
    "void(int64, int64, int64, int64, int64, int64, int64, boolean, int64, int64)",
    **OPTIONS,
)
def _temperature_loss(log_alpha, log_prob, target_entropy, weight, mask, reduction, n, wide, loss_out, slope_out):  # type: ignore[no-untyped-def]
    logarithm, aim = read(log_alpha, wide, 0), read(target_entropy, wide, 0)
    total = mass = 0.0
    for row in range(n):
        w, counts = weight_of(weight, mask, wide, row)
        product = -w * (read(log_prob, wide, row) + aim) if counts else 0.0
        if reduction == NONE:
            write(slope_out, wide, row, product)
            write(loss_out, wide, row, logarithm * product)
        total += product
        mass += w
    if reduction != NONE:
        total *= normaliser(mass, reduction)
        write(slope_out, wide, 0, total)
        write(loss_out, wide, 0, logarithm * total)


def actor_loss(
    q: Tensor,
    log_prob: Tensor,
    alpha: Tensor,
    weight: Tensor | None,
    mask: Tensor | None,
    reduction: int,
    combine: int = SMALLEST,
) -> tuple[Tensor, Tensor, Tensor]:
    """See :data:`gpubuf.kernels.sac.actor_loss`."""
    n = log_prob.numel()
    check_critics(q, n, combine)
    check_rows(n, weight=weight, mask=mask)
    check_rows(1, alpha=alpha)
    real = computing_dtype(q)
    loss = torch.empty(log_prob.shape if reduction == NONE else (), dtype=real)
    entropy, norm = torch.empty((), dtype=real), torch.empty((), dtype=real)
    wide = real is torch.float64
    rows = (q, log_prob, alpha, weight, flags(mask))
    call(_actor_loss, real, *rows, reduction, combine, n, q.shape[0], wide, loss, entropy, norm)
    return loss, entropy, norm


def actor_loss_backward(
    grad: Tensor,
    q: Tensor,
    log_prob: Tensor,
    alpha: Tensor,
    weight: Tensor | None,
    mask: Tensor | None,
    norm: Tensor,
    reduction: int,
    combine: int = SMALLEST,
) -> tuple[Tensor, Tensor]:
    """See :data:`gpubuf.kernels.sac.actor_loss_backward`."""
    real = computing_dtype(q)
    by_q, by_log_prob = torch.empty(q.shape, dtype=real), torch.empty(log_prob.shape, dtype=real)
    n, wide = log_prob.numel(), real is torch.float64
    rows = (grad, q, alpha, weight, flags(mask), norm)
    call(_actor_loss_backward, real, *rows, reduction, combine, n, q.shape[0], wide, by_q, by_log_prob)
    return by_q.to(q.dtype), by_log_prob.to(log_prob.dtype)


def temperature_loss(
    log_alpha: Tensor,
    log_prob: Tensor,
    target_entropy: Tensor,
    weight: Tensor | None,
    mask: Tensor | None,
    reduction: int,
) -> tuple[Tensor, Tensor]:
    """See :data:`gpubuf.kernels.sac.temperature_loss`."""
    n = log_prob.numel()
    check_rows(n, weight=weight, mask=mask)
    check_rows(1, log_alpha=log_alpha, target_entropy=target_entropy)
    real = computing_dtype(log_prob)
    shape = log_prob.shape if reduction == NONE else torch.Size()
    loss, slope = torch.empty(shape, dtype=real), torch.empty(shape, dtype=real)
    wide = real is torch.float64
    rows = (log_alpha, log_prob, target_entropy, weight, flags(mask))
    call(_temperature_loss, real, *rows, reduction, n, wide, loss, slope)
    return loss, slope
