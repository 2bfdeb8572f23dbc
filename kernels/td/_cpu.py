"""Temporal-difference learning on the CPU: compiled loops, and lambda returns in plain PyTorch.

One kernel serves both precisions: the flag ``wide`` says whether every float array is float64 or float32, and the
arithmetic is float64 either way. The address 0 stands for an absent argument.
"""

# Numba needs the real signatures: no `from __future__ import annotations`.

import numpy as np
import torch
from numba import carray
from torch import Tensor

from gpubuf.kernels import td
from gpubuf.kernels._jit import jit
from gpubuf.kernels._loops import loop
from gpubuf.kernels._operations import computing_dtype
from gpubuf.kernels._primitives import as_u8, load, read, store, total_of, write
from gpubuf.kernels.td import AVERAGE, L1, L2, NONE, SMALLEST, check_sequences, check_target
from gpubuf.kernels.td._cpu_reduce import (
    TILE,
    load_factors,
    load_mean,
    load_smallest,
    load_weights,
    normaliser,
)


@loop(td.soft_td_target)
def soft_td_target(  # type: ignore[no-untyped-def]
    next_q, next_log_prob, alpha, reward, terminated, gamma: float, steps, combine, n, nets, wide: bool, target_out
):
    temperature = read(alpha, wide, 0) if alpha else 0.0
    ended = carray(as_u8(terminated), n)
    values, rewards, other, which = np.empty(TILE), np.empty(TILE), np.empty(TILE), np.empty(TILE, np.int64)
    for first in range(0, n, TILE):
        count = min(TILE, n - first)
        if combine == AVERAGE:
            load_mean(next_q, wide, n, nets, first, count, values, other)
        else:
            load_smallest(next_q, wide, n, nets, first, count, values, which, other)
        if next_log_prob:
            load(next_log_prob, wide, first, count, other)
            for j in range(count):
                values[j] -= temperature * other[j]
        if steps:
            load(steps, wide, first, count, other)
            for j in range(count):
                values[j] *= gamma ** other[j]
        else:
            for j in range(count):
                values[j] *= gamma
        load(reward, wide, first, count, rewards)
        for j in range(count):
            values[j] = rewards[j] if ended[first + j] else rewards[j] + values[j]
        store(values, target_out, wide, first, count)


def _flat(tensor: Tensor, n: int, dtype: torch.dtype) -> Tensor:
    """``[n]``, of ``dtype``."""
    # `to` and `reshape` take a microsecond each where there is nothing to do.
    tensor = tensor if tensor.dtype is dtype else tensor.to(dtype)
    return tensor if tensor.ndim == 1 else tensor.reshape(n)


def _next_value(
    next_q: Tensor, next_log_prob: Tensor | None, alpha: Tensor | None, combine: int, n: int, real: torch.dtype
) -> Tensor:
    """``[n]``, in memory of its own."""
    critics = (next_q if next_q.dtype is real else next_q.to(real)).reshape(next_q.shape[0], n)
    value = critics.sum(0).div_(critics.shape[0]) if combine == AVERAGE else critics.amin(0)
    if next_log_prob is not None and alpha is not None:
        value.sub_(_flat(next_log_prob, n, real), alpha=alpha.item())
    return value


def soft_lambda_return(
    next_q: Tensor, next_log_prob: Tensor | None, alpha: Tensor | None, reward: Tensor, terminated: Tensor,
    done: Tensor, mask: Tensor | None, gamma: Tensor, lmbda: Tensor, steps: Tensor | None, length: int, inner: int,
    combine: int = SMALLEST,
) -> Tensor:  # fmt: skip
    """See :data:`gpubuf.kernels.td.soft_lambda_return`.

    ``G_t = a_t + b_t G_{t+1}``. A round makes of that ``a + b G`` of twice as many rows further on, so that a sequence
    takes as many rounds as its length has binary digits. What has the factor 0 is selected away.
    """
    check_target(next_q, next_log_prob, alpha, reward, terminated, gamma, steps, combine)
    check_sequences(reward, done, mask, lmbda, length, inner)
    rows = (reward if next_log_prob is None else next_log_prob).shape
    n, real = rows.numel(), computing_dtype(next_q)
    if not n:
        return torch.empty(rows, dtype=real, device="cpu")
    shape, share = (-1, length, inner), lmbda.item()
    value = _next_value(next_q, next_log_prob, alpha, combine, n, real).reshape(shape)
    discount: Tensor | float = gamma.item() if steps is None else gamma.item() ** _flat(steps, n, real).reshape(shape)
    follows = ~_flat(done, n, torch.bool).reshape(shape)
    follows[:, -1] = False
    if mask is not None:
        follows[:, :-1] &= _flat(mask, n, torch.bool).reshape(shape)[:, 1:]
    goes_on = ~_flat(terminated, n, torch.bool).reshape(shape)
    bootstrap = torch.where(follows, (1 - share) * value, value) * discount
    out = torch.where(goes_on, bootstrap, 0.0) + _flat(reward, n, real).reshape(shape)
    factor = torch.where(follows & goes_on, torch.full_like(value, share) * discount, 0.0)
    step = 1
    while step < length:
        further = torch.where(factor[:, :-step] == 0, 0.0, factor[:, :-step] * out[:, step:])
        later = factor[:, :-step] * factor[:, step:]
        out = torch.cat((out[:, :-step] + further, out[:, -step:]), 1)
        factor = torch.cat((later, torch.zeros_like(factor[:, -step:])), 1)
        step *= 2
    return out.reshape(rows)


@jit(forceinline=True)
def _add_distances(d, loss_function, count, loss, largest):  # type: ignore[no-untyped-def]
    """Add one critic's distances to ``loss``; by differences ``d`` of a tile of rows."""
    for j in range(count):
        magnitude = abs(d[j])
        far = (magnitude > largest[j]) | (magnitude != magnitude)
        largest[j] = magnitude if far else largest[j]
    if loss_function == L1:
        for j in range(count):
            loss[j] += abs(d[j])
    elif loss_function == L2:
        for j in range(count):
            loss[j] += d[j] * d[j]
    else:
        for j in range(count):
            magnitude = abs(d[j])
            loss[j] += 0.5 * d[j] * d[j] if magnitude < 1 else magnitude - 0.5


@loop(td.td_loss)
def loss(  # type: ignore[no-untyped-def]
    q, target, weight, mask, loss_function, reduction, n, nets, wide: bool, loss_out, td_error_out, norm_out
):
    total = mass = 0.0
    targets, d, rows, largest = np.empty(TILE), np.empty(TILE), np.empty(TILE), np.empty(TILE)
    weights, counts = np.empty(TILE), np.empty(TILE, np.bool_)
    for first in range(0, n, TILE):
        count = min(TILE, n - first)
        load(target, wide, first, count, targets)
        for j in range(count):
            rows[j] = largest[j] = 0.0
        for net in range(nets):
            load(q, wide, net * n + first, count, d)
            for j in range(count):
                d[j] -= targets[j]
            _add_distances(d, loss_function, count, rows, largest)
        store(largest, td_error_out, wide, first, count)
        load_weights(weight, mask, wide, first, count, weights, counts)
        for j in range(count):
            rows[j] = weights[j] * rows[j] if counts[j] else 0.0
        if reduction == NONE:
            store(rows, loss_out, wide, first, count)
        total += total_of(rows, count)
        mass += total_of(weights, count)
    norm = normaliser(mass, reduction)
    write(norm_out, wide, 0, norm)
    if reduction != NONE:
        write(loss_out, wide, 0, total * norm)


@jit(forceinline=True)
def _slopes(d, loss_function, count):  # type: ignore[no-untyped-def]
    """Derivatives of the distance, in the place of differences ``d``. By comparisons that a NaN fails: it stays one."""
    if loss_function == L2:
        for j in range(count):
            d[j] *= 2
    elif loss_function == L1:
        for j in range(count):
            d[j] = (1.0 if d[j] > 0 else -1.0) if abs(d[j]) > 0 else d[j]
    else:
        for j in range(count):
            d[j] = (1.0 if d[j] > 0 else -1.0) if abs(d[j]) >= 1 else d[j]


@loop(td.td_loss_backward)
def loss_backward(  # type: ignore[no-untyped-def]
    grad, q, target, weight, mask, norm, loss_function, reduction, n, nets, wide: bool, grad_q_out
):
    scale = read(norm, wide, 0)
    targets, d, factors, grads = np.empty(TILE), np.empty(TILE), np.empty(TILE), np.empty(TILE)
    counts = np.empty(TILE, np.bool_)
    for first in range(0, n, TILE):
        count = min(TILE, n - first)
        load(target, wide, first, count, targets)
        load_weights(weight, mask, wide, first, count, factors, counts)
        load_factors(grad, scale, reduction, wide, first, count, factors, grads)
        for net in range(nets):
            load(q, wide, net * n + first, count, d)
            for j in range(count):
                d[j] -= targets[j]
            _slopes(d, loss_function, count)
            for j in range(count):
                d[j] = d[j] * factors[j] if counts[j] else 0.0
            store(d, grad_q_out, wide, net * n + first, count)
