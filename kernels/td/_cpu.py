"""Temporal-difference targets and losses on the CPU.

One kernel serves both precisions: the flag ``wide`` says whether every float array is float64 or float32, and the
arithmetic is float64 either way. The address 0 stands for an absent argument.
"""

# Numba needs the real signatures: no `from __future__ import annotations`.

import numpy as np
import torch
from numba import carray
from torch import Tensor

from gpubuf.kernels._differentiable import computing_dtype, dense
from gpubuf.kernels._floats import load, read, store, total_of, write
from gpubuf.kernels._jit import OPTIONS, jit
from gpubuf.kernels._pointers import as_u8
from gpubuf.kernels.td import AVERAGE, L1, L2, NONE, SMALLEST, check_critics, check_rows, check_target
from gpubuf.kernels.td._cpu_reduce import (
    TILE,
    address,
    load_factors,
    load_mean,
    load_smallest,
    load_weights,
    normaliser,
    weighting,
)


@jit(
    "void(int64, int64, int64, int64, int64, int64, int64, int64, int64, int64, boolean, int64)",
    **OPTIONS,
)
def _soft_td_target(next_q, next_log_prob, alpha, reward, terminated, gamma, steps, combine, n, nets, wide, target):  # type: ignore[no-untyped-def]
    discount = read(gamma, True, 0)
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
                values[j] *= discount ** other[j]
        else:
            for j in range(count):
                values[j] *= discount
        load(reward, wide, first, count, rewards)
        for j in range(count):
            values[j] = rewards[j] if ended[first + j] else rewards[j] + values[j]
        store(values, target, wide, first, count)


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


@jit(
    "void(int64, int64, int64, int64, int64, int64, int64, int64, boolean, int64, int64, int64)",
    **OPTIONS,
)
def _td_loss(q, target, weight, mask, loss_function, reduction, n, nets, wide, loss_out, td_error, norm_out):  # type: ignore[no-untyped-def]
    total = mass = 0.0
    targets, d, loss, largest = np.empty(TILE), np.empty(TILE), np.empty(TILE), np.empty(TILE)
    weights, counts = np.empty(TILE), np.empty(TILE, np.bool_)
    for first in range(0, n, TILE):
        count = min(TILE, n - first)
        load(target, wide, first, count, targets)
        for j in range(count):
            loss[j] = largest[j] = 0.0
        for net in range(nets):
            load(q, wide, net * n + first, count, d)
            for j in range(count):
                d[j] -= targets[j]
            _add_distances(d, loss_function, count, loss, largest)
        store(largest, td_error, wide, first, count)
        load_weights(weight, mask, wide, first, count, weights, counts)
        for j in range(count):
            loss[j] = weights[j] * loss[j] if counts[j] else 0.0
        if reduction == NONE:
            store(loss, loss_out, wide, first, count)
        total += total_of(loss, count)
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


@jit(
    "void(int64, int64, int64, int64, int64, int64, int64, int64, int64, int64, boolean, int64)",
    **OPTIONS,
)
def _td_loss_backward(grad, q, target, weight, mask, norm, loss_function, reduction, n, nets, wide, by_q):  # type: ignore[no-untyped-def]
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
                d[j] = factors[j] * d[j] if counts[j] else 0.0
            store(d, by_q, wide, net * n + first, count)


def soft_td_target(
    next_q: Tensor,
    next_log_prob: Tensor | None,
    alpha: Tensor | None,
    reward: Tensor,
    terminated: Tensor,
    gamma: Tensor,
    steps: Tensor | None,
    combine: int = SMALLEST,
) -> Tensor:
    """See :data:`gpubuf.kernels.td.soft_td_target`."""
    rows = check_target(next_q, next_log_prob, alpha, reward, terminated, gamma, steps, combine)
    real = computing_dtype(next_q)
    target = torch.empty(rows, dtype=real)
    next_q = dense(next_q, real)
    next_log_prob = None if next_log_prob is None else dense(next_log_prob, real)
    alpha = None if alpha is None else dense(alpha, real)
    reward, terminated, gamma = dense(reward, real), dense(terminated, torch.bool), dense(gamma, torch.float64)
    steps = None if steps is None else dense(steps, real)
    _soft_td_target(
        next_q.data_ptr(),
        address(next_log_prob),
        address(alpha),
        reward.data_ptr(),
        terminated.data_ptr(),
        gamma.data_ptr(),
        address(steps),
        combine,
        rows.numel(),
        next_q.shape[0],
        real is torch.float64,
        target.data_ptr(),
    )
    return target


def td_loss(
    q: Tensor, target: Tensor, weight: Tensor | None, mask: Tensor | None, loss_function: int, reduction: int
) -> tuple[Tensor, Tensor, Tensor]:
    """See :data:`gpubuf.kernels.td.td_loss`."""
    n = target.numel()
    check_critics(q, n)
    check_rows(n, weight=weight, mask=mask)
    real = computing_dtype(q)
    loss = torch.empty(target.shape if reduction == NONE else (), dtype=real)
    td_error, norm = torch.empty(target.shape, dtype=real), torch.empty((), dtype=real)
    q, target = dense(q, real), dense(target, real)
    weight, mask = weighting(weight, mask, real)
    _td_loss(
        q.data_ptr(),
        target.data_ptr(),
        address(weight),
        address(mask),
        loss_function,
        reduction,
        n,
        q.shape[0],
        real is torch.float64,
        loss.data_ptr(),
        td_error.data_ptr(),
        norm.data_ptr(),
    )
    return loss, td_error, norm


def td_loss_backward(
    grad: Tensor,
    q: Tensor,
    target: Tensor,
    weight: Tensor | None,
    mask: Tensor | None,
    norm: Tensor,
    loss_function: int,
    reduction: int,
) -> Tensor:
    """See :data:`gpubuf.kernels.td.td_loss_backward`."""
    real = computing_dtype(q)
    by_q = torch.empty(q.shape, dtype=real)
    grad, critics, target = dense(grad, real), dense(q, real), dense(target, real)
    weight, mask = weighting(weight, mask, real)
    _td_loss_backward(
        grad.data_ptr(),
        critics.data_ptr(),
        target.data_ptr(),
        address(weight),
        address(mask),
        norm.data_ptr(),
        loss_function,
        reduction,
        target.numel(),
        q.shape[0],
        real is torch.float64,
        by_q.data_ptr(),
    )
    return by_q.to(q.dtype)
