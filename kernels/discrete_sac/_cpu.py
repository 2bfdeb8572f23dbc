"""Discrete soft actor-critic on the CPU.

One kernel serves both precisions: the flag ``wide`` says whether every float array is float64 or float32, and the
arithmetic is float64 either way. The address 0 stands for an absent argument.
"""

# Numba needs the real signatures: no `from __future__ import annotations`.

import math

import numpy as np

from gpubuf.kernels import discrete_sac
from gpubuf.kernels._jit import jit
from gpubuf.kernels._loops import loop
from gpubuf.kernels._primitives import exp_below_700, load, read, store, write
from gpubuf.kernels.td import NONE
from gpubuf.kernels.td._cpu_reduce import load_smallest, normaliser, weight_of

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


@loop(discrete_sac.soft_value)
def discrete_soft_value(q, logits, alpha, n, nets, n_actions, wide: bool, value_out):  # type: ignore[no-untyped-def]
    temperature, tile = read(alpha, wide, 0), rows_of_tile(n_actions)
    width = tile * n_actions
    shifted, e, smallest, other = np.empty(width), np.empty(width), np.empty(width), np.empty(width)
    for start in range(0, n, tile):
        rows = min(tile, n - start)
        load_tile(q, logits, wide, n, nets, n_actions, start, rows, shifted, e, smallest, other)
        for row in range(rows):
            _, log_prob, value = expectations(shifted, e, smallest, row * n_actions, n_actions)
            write(value_out, wide, start + row, value - temperature * log_prob)


@loop(discrete_sac.actor_loss)
def discrete_actor_loss(  # type: ignore[no-untyped-def]
    q, logits, alpha, weight, mask, reduction, n, nets, n_actions, wide: bool, loss_out, log_prob_out, entropy_out,
    norm_out,
):  # fmt: skip
    temperature, tile = read(alpha, wide, 0), rows_of_tile(n_actions)
    width = tile * n_actions
    shifted, e, smallest, other = np.empty(width), np.empty(width), np.empty(width), np.empty(width)
    total = mass = surprise = 0.0
    counted = 0
    for start in range(0, n, tile):
        rows = min(tile, n - start)
        load_tile(q, logits, wide, n, nets, n_actions, start, rows, shifted, e, smallest, other)
        for row in range(rows):
            _, log_prob, value = expectations(shifted, e, smallest, row * n_actions, n_actions)
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
    write(entropy_out, wide, 0, -surprise / max(counted, 1))
    if reduction != NONE:
        write(loss_out, wide, 0, total * norm)


@loop(discrete_sac.actor_loss_backward)
def discrete_actor_loss_backward(  # type: ignore[no-untyped-def]
    grad, q, logits, alpha, weight, mask, norm, reduction, n, nets, n_actions, wide: bool, grad_logits_out, grad_q_out
):
    temperature, scale, tile = read(alpha, wide, 0), read(norm, wide, 0), rows_of_tile(n_actions)
    width = tile * n_actions
    shifted, e, smallest, other = np.empty(width), np.empty(width), np.empty(width), np.empty(width)
    for start in range(0, n, tile):
        rows = min(tile, n - start)
        load_tile(q, logits, wide, n, nets, n_actions, start, rows, shifted, e, smallest, other)
        for row in range(rows):
            w, counts = weight_of(weight, mask, wide, start + row)
            factor = read(grad, wide, start + row if reduction == NONE else 0) * scale * w
            total, log_prob, value = expectations(shifted, e, smallest, row * n_actions, n_actions)
            # What all actions of the row have in common.
            share, level = factor / total, temperature * (math.log(total) + log_prob) - value
            for j in range(row * n_actions, (row + 1) * n_actions):
                mass = share * e[j] if counts and e[j] != 0 else 0.0
                slope = temperature * shifted[j] - smallest[j] - level
                other[j] = mass * slope if counts and e[j] != 0 else 0.0
                e[j] = mass
        store(other, grad_logits_out, wide, start * n_actions, rows * n_actions)
        if grad_q_out:
            first, count, which = start * n_actions, rows * n_actions, np.empty(width, np.int64)
            load_smallest(q, wide, n * n_actions, nets, first, count, smallest, which, other)
            for net in range(nets):
                for j in range(count):
                    other[j] = -e[j] if net == which[j] else 0.0
                store(other, grad_q_out, wide, net * n * n_actions + first, count)
