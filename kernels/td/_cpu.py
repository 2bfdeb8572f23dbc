"""Temporal-difference targets and losses on the CPU.

One kernel serves both precisions: the flag ``wide`` says whether every float array is float64 or float32, and the
arithmetic is float64 either way. The address 0 stands for an absent argument.
"""

# Numba needs the real signatures: no `from __future__ import annotations`.

import math

import torch
from numba import carray
from torch import Tensor

from gpubuf.kernels._differentiable import computing_dtype, dense
from gpubuf.kernels._floats import read, write
from gpubuf.kernels._jit import OPTIONS, jit
from gpubuf.kernels._pointers import as_u8
from gpubuf.kernels.td import AVERAGE, L1, L2, NONE, SMALLEST, check_critics, check_rows, check_target
from gpubuf.kernels.td._cpu_reduce import address, normaliser, one_critic, weight_of, weighting


@jit(forceinline=True)
def _targets(next_q, next_log_prob, alpha, reward, terminated, gamma, steps, combine, n, nets, wide, target):  # type: ignore[no-untyped-def]
    discount = read(gamma, True, 0)
    temperature = read(alpha, wide, 0) if alpha else 0.0
    ended = carray(as_u8(terminated), n)
    for row in range(n):
        y = read(reward, wide, row)
        if not ended[row]:
            value, _ = one_critic(next_q, wide, n, nets, row, combine)
            if next_log_prob:
                value -= temperature * read(next_log_prob, wide, row)
            y += (discount ** read(steps, wide, row) if steps else discount) * value
        write(target, wide, row, y)


@jit(
    "void(int64, int64, int64, int64, int64, int64, int64, int64, int64, int64, boolean, int64)",
    **OPTIONS,
)
def _soft_td_target(next_q, next_log_prob, alpha, reward, terminated, gamma, steps, combine, n, nets, wide, target):  # type: ignore[no-untyped-def]
    # Two loops, neither of which asks in each row: that took half as long again.
    if combine == AVERAGE:
        _targets(next_q, next_log_prob, alpha, reward, terminated, gamma, steps, AVERAGE, n, nets, wide, target)
    else:
        _targets(next_q, next_log_prob, alpha, reward, terminated, gamma, steps, SMALLEST, n, nets, wide, target)


@jit(
    "void(int64, int64, int64, int64, int64, int64, int64, int64, boolean, int64, int64, int64)",
    **OPTIONS,
)
def _td_loss(q, target, weight, mask, loss_function, reduction, n, nets, wide, loss_out, td_error, norm_out):  # type: ignore[no-untyped-def]
    total = mass = 0.0
    for row in range(n):
        y = read(target, wide, row)
        loss = largest = 0.0
        for net in range(nets):
            d = read(q, wide, net * n + row) - y
            magnitude = abs(d)
            if magnitude > largest or magnitude != magnitude:
                largest = magnitude
            if loss_function == L1:
                loss += magnitude
            elif loss_function == L2:
                loss += d * d
            else:
                loss += 0.5 * d * d if magnitude < 1 else magnitude - 0.5
        write(td_error, wide, row, largest)
        w, counts = weight_of(weight, mask, wide, row)
        product = w * loss if counts else 0.0
        if reduction == NONE:
            write(loss_out, wide, row, product)
        total += product
        mass += w
    norm = normaliser(mass, reduction)
    write(norm_out, wide, 0, norm)
    if reduction != NONE:
        write(loss_out, wide, 0, total * norm)


@jit(
    "void(int64, int64, int64, int64, int64, int64, int64, int64, int64, int64, boolean, int64)",
    **OPTIONS,
)
def _td_loss_backward(grad, q, target, weight, mask, norm, loss_function, reduction, n, nets, wide, by_q):  # type: ignore[no-untyped-def]
    scale = read(norm, wide, 0)
    for row in range(n):
        w, counts = weight_of(weight, mask, wide, row)
        factor = read(grad, wide, row if reduction == NONE else 0) * scale * w
        y = read(target, wide, row)
        for net in range(nets):
            slope = 0.0
            if counts:
                slope = read(q, wide, net * n + row) - y
                if loss_function == L2:
                    slope *= 2
                # By comparisons that a NaN fails, so that it stays one.
                elif (loss_function == L1 and abs(slope) > 0) or abs(slope) >= 1:
                    slope = math.copysign(1.0, slope)
                slope *= factor
            write(by_q, wide, net * n + row, slope)


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
