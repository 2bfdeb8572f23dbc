"""Soft actor-critic's own losses on the CPU.

One kernel serves both precisions: the flag ``wide`` says whether every float array is float64 or float32, and the
arithmetic is float64 either way. The address 0 stands for an absent argument.
"""

# Numba needs the real signatures: no `from __future__ import annotations`.

import numpy as np

from gpubuf.kernels import sac
from gpubuf.kernels._loops import loop
from gpubuf.kernels._primitives import load, read, store, total_of, write
from gpubuf.kernels.td import AVERAGE, NONE
from gpubuf.kernels.td._cpu_reduce import (
    TILE,
    load_factors,
    load_mean,
    load_smallest,
    load_weights,
    normaliser,
    weight_of,
)


@loop(sac.actor_loss)
def actor_loss(  # type: ignore[no-untyped-def]
    q, log_prob, alpha, weight, mask, reduction, combine, n, nets, wide: bool, loss_out, entropy_out, norm_out
):
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
    write(entropy_out, wide, 0, -surprise / max(n, 1))
    if reduction != NONE:
        write(loss_out, wide, 0, total * norm)


@loop(sac.actor_loss_backward)
def actor_loss_backward(  # type: ignore[no-untyped-def]
    grad, q, alpha, weight, mask, norm, reduction, combine, n, nets, wide: bool, grad_q_out, grad_log_prob_out
):
    temperature, scale = read(alpha, wide, 0), read(norm, wide, 0)
    factors, values, other = np.empty(TILE), np.empty(TILE), np.empty(TILE)
    which, counts = np.empty(TILE, np.int64), np.empty(TILE, np.bool_)
    for first in range(0, n, TILE):
        count = min(TILE, n - first)
        load_weights(weight, mask, wide, first, count, factors, counts)
        load_factors(grad, scale, reduction, wide, first, count, factors, other)
        for j in range(count):
            other[j] = factors[j] * temperature
        store(other, grad_log_prob_out, wide, first, count)
        if combine == AVERAGE:
            for j in range(count):
                other[j] = -factors[j] / nets
            for net in range(nets):
                store(other, grad_q_out, wide, net * n + first, count)
            continue
        load_smallest(q, wide, n, nets, first, count, values, which, other)
        for net in range(nets):
            for j in range(count):
                other[j] = -factors[j] if net == which[j] else 0.0
            store(other, grad_q_out, wide, net * n + first, count)


@loop(sac.temperature_loss)
def temperature_loss(log_alpha, log_prob, target_entropy, weight, mask, reduction, n, wide: bool, loss_out, slope_out):  # type: ignore[no-untyped-def]
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
