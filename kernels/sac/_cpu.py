"""Soft actor-critic on the CPU.

One kernel serves both precisions: the flag ``wide`` says whether every float array is float64 or float32, and the
arithmetic is float64 either way. The address 0 stands for an absent argument.
"""

# Numba needs the real signatures: no `from __future__ import annotations`.

import math

import torch
from numba import carray
from torch import Tensor

from gpubuf.kernels._differentiable import computing_dtype, dense
from gpubuf.kernels._jit import OPTIONS, jit
from gpubuf.kernels._pointers import as_u8
from gpubuf.kernels.sac import L1, L2, MEAN, NONE, check_critics, check_rows
from gpubuf.kernels.tanh_normal._cpu import read, write


@jit(forceinline=True)
def _weight_of(weight, mask, wide, row):  # type: ignore[no-untyped-def]
    """(weight of the row, whether it counts)."""
    if mask and not carray(as_u8(mask), row + 1)[row]:
        return 0.0, False
    return (read(weight, wide, row) if weight else 1.0), True


@jit(forceinline=True)
def _normaliser(total, reduction):  # type: ignore[no-untyped-def]
    if reduction != MEAN:
        return 1.0
    return 1 / total if total else 0.0


@jit(forceinline=True)
def _smallest_critic(q, wide, n, nets, row):  # type: ignore[no-untyped-def]
    """(min_k q[k, row], the first k that attains it); a NaN is the smallest, so that it is seen."""
    smallest, which = read(q, wide, row), 0
    for net in range(1, nets):
        value = read(q, wide, net * n + row)
        if value < smallest or (value != value and smallest == smallest):
            smallest, which = value, net
    return smallest, which


@jit(
    "void(int64, int64, int64, int64, int64, int64, int64, int64, int64, boolean, int64)",
    **OPTIONS,
)
def _soft_td_target(next_q, next_log_prob, alpha, reward, terminated, gamma, steps, n, nets, wide, target):  # type: ignore[no-untyped-def]
    temperature, discount = read(alpha, wide, 0), read(gamma, True, 0)
    ended = carray(as_u8(terminated), n)
    for row in range(n):
        y = read(reward, wide, row)
        if not ended[row]:
            smallest, _ = _smallest_critic(next_q, wide, n, nets, row)
            power = discount ** read(steps, wide, row) if steps else discount
            y += power * (smallest - temperature * read(next_log_prob, wide, row))
        write(target, wide, row, y)


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
        w, counts = _weight_of(weight, mask, wide, row)
        product = w * loss if counts else 0.0
        if reduction == NONE:
            write(loss_out, wide, row, product)
        total += product
        mass += w
    norm = _normaliser(mass, reduction)
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
        w, counts = _weight_of(weight, mask, wide, row)
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


@jit(
    "void(int64, int64, int64, int64, int64, int64, int64, int64, boolean, int64, int64, int64)",
    **OPTIONS,
)
def _actor_loss(q, log_prob, alpha, weight, mask, reduction, n, nets, wide, loss_out, entropy, norm_out):  # type: ignore[no-untyped-def]
    temperature = read(alpha, wide, 0)
    total = mass = surprise = 0.0
    for row in range(n):
        smallest, _ = _smallest_critic(q, wide, n, nets, row)
        density = read(log_prob, wide, row)
        surprise += density
        w, counts = _weight_of(weight, mask, wide, row)
        product = w * (temperature * density - smallest) if counts else 0.0
        if reduction == NONE:
            write(loss_out, wide, row, product)
        total += product
        mass += w
    norm = _normaliser(mass, reduction)
    write(norm_out, wide, 0, norm)
    write(entropy, wide, 0, -surprise / max(n, 1))
    if reduction != NONE:
        write(loss_out, wide, 0, total * norm)


@jit(
    "void(int64, int64, int64, int64, int64, int64, int64, int64, int64, boolean, int64, int64)",
    **OPTIONS,
)
def _actor_loss_backward(grad, q, alpha, weight, mask, norm, reduction, n, nets, wide, by_q, by_log_prob):  # type: ignore[no-untyped-def]
    temperature, scale = read(alpha, wide, 0), read(norm, wide, 0)
    for row in range(n):
        w, _ = _weight_of(weight, mask, wide, row)
        factor = read(grad, wide, row if reduction == NONE else 0) * scale * w
        write(by_log_prob, wide, row, factor * temperature)
        _, which = _smallest_critic(q, wide, n, nets, row)
        for net in range(nets):
            write(by_q, wide, net * n + row, -factor if net == which else 0.0)


@jit(
    "void(int64, int64, int64, int64, int64, int64, int64, boolean, int64, int64)",
    **OPTIONS,
)
def _temperature_loss(log_alpha, log_prob, target_entropy, weight, mask, reduction, n, wide, loss_out, slope_out):  # type: ignore[no-untyped-def]
    logarithm, aim = read(log_alpha, wide, 0), read(target_entropy, wide, 0)
    total = mass = 0.0
    for row in range(n):
        w, counts = _weight_of(weight, mask, wide, row)
        product = -w * (read(log_prob, wide, row) + aim) if counts else 0.0
        if reduction == NONE:
            write(slope_out, wide, row, product)
            write(loss_out, wide, row, logarithm * product)
        total += product
        mass += w
    if reduction != NONE:
        total *= _normaliser(mass, reduction)
        write(slope_out, wide, 0, total)
        write(loss_out, wide, 0, logarithm * total)


def _address(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


def _weighting(weight: Tensor | None, mask: Tensor | None, real: torch.dtype) -> tuple[Tensor | None, Tensor | None]:
    """Both as the kernels read them. The caller keeps them alive while a kernel uses their addresses."""
    return None if weight is None else dense(weight, real), None if mask is None else dense(mask, torch.bool)


def soft_td_target(
    next_q: Tensor,
    next_log_prob: Tensor,
    alpha: Tensor,
    reward: Tensor,
    terminated: Tensor,
    gamma: Tensor,
    steps: Tensor | None,
) -> Tensor:
    """See :data:`gpubuf.kernels.sac.soft_td_target`."""
    n = next_log_prob.numel()
    check_critics(next_q, n)
    check_rows(n, reward=reward, terminated=terminated, steps=steps)
    check_rows(1, alpha=alpha, gamma=gamma)
    real = computing_dtype(next_q)
    target = torch.empty(next_log_prob.shape, dtype=real)
    next_q, next_log_prob, alpha = dense(next_q, real), dense(next_log_prob, real), dense(alpha, real)
    reward, terminated, gamma = dense(reward, real), dense(terminated, torch.bool), dense(gamma, torch.float64)
    steps = None if steps is None else dense(steps, real)
    _soft_td_target(
        next_q.data_ptr(),
        next_log_prob.data_ptr(),
        alpha.data_ptr(),
        reward.data_ptr(),
        terminated.data_ptr(),
        gamma.data_ptr(),
        _address(steps),
        n,
        next_q.shape[0],
        real is torch.float64,
        target.data_ptr(),
    )
    return target


def td_loss(
    q: Tensor, target: Tensor, weight: Tensor | None, mask: Tensor | None, loss_function: int, reduction: int
) -> tuple[Tensor, Tensor, Tensor]:
    """See :data:`gpubuf.kernels.sac.td_loss`."""
    n = target.numel()
    check_critics(q, n)
    check_rows(n, weight=weight, mask=mask)
    real = computing_dtype(q)
    loss = torch.empty(target.shape if reduction == NONE else (), dtype=real)
    td_error, norm = torch.empty(target.shape, dtype=real), torch.empty((), dtype=real)
    q, target = dense(q, real), dense(target, real)
    weight, mask = _weighting(weight, mask, real)
    _td_loss(
        q.data_ptr(),
        target.data_ptr(),
        _address(weight),
        _address(mask),
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
    """See :data:`gpubuf.kernels.sac.td_loss_backward`."""
    real = computing_dtype(q)
    by_q = torch.empty(q.shape, dtype=real)
    grad, critics, target = dense(grad, real), dense(q, real), dense(target, real)
    weight, mask = _weighting(weight, mask, real)
    _td_loss_backward(
        grad.data_ptr(),
        critics.data_ptr(),
        target.data_ptr(),
        _address(weight),
        _address(mask),
        norm.data_ptr(),
        loss_function,
        reduction,
        target.numel(),
        q.shape[0],
        real is torch.float64,
        by_q.data_ptr(),
    )
    return by_q.to(q.dtype)


def actor_loss(
    q: Tensor, log_prob: Tensor, alpha: Tensor, weight: Tensor | None, mask: Tensor | None, reduction: int
) -> tuple[Tensor, Tensor, Tensor]:
    """See :data:`gpubuf.kernels.sac.actor_loss`."""
    n = log_prob.numel()
    check_critics(q, n)
    check_rows(n, weight=weight, mask=mask)
    check_rows(1, alpha=alpha)
    real = computing_dtype(q)
    loss = torch.empty(log_prob.shape if reduction == NONE else (), dtype=real)
    entropy, norm = torch.empty((), dtype=real), torch.empty((), dtype=real)
    q, log_prob, alpha = dense(q, real), dense(log_prob, real), dense(alpha, real)
    weight, mask = _weighting(weight, mask, real)
    _actor_loss(
        q.data_ptr(),
        log_prob.data_ptr(),
        alpha.data_ptr(),
        _address(weight),
        _address(mask),
        reduction,
        n,
        q.shape[0],
        real is torch.float64,
        loss.data_ptr(),
        entropy.data_ptr(),
        norm.data_ptr(),
    )
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
) -> tuple[Tensor, Tensor]:
    """See :data:`gpubuf.kernels.sac.actor_loss_backward`."""
    real = computing_dtype(q)
    by_q, by_log_prob = torch.empty(q.shape, dtype=real), torch.empty(log_prob.shape, dtype=real)
    grad, critics, alpha = dense(grad, real), dense(q, real), dense(alpha, real)
    weight, mask = _weighting(weight, mask, real)
    _actor_loss_backward(
        grad.data_ptr(),
        critics.data_ptr(),
        alpha.data_ptr(),
        _address(weight),
        _address(mask),
        norm.data_ptr(),
        reduction,
        log_prob.numel(),
        q.shape[0],
        real is torch.float64,
        by_q.data_ptr(),
        by_log_prob.data_ptr(),
    )
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
    log_alpha, log_prob = dense(log_alpha, real), dense(log_prob, real)
    target_entropy = dense(target_entropy, real)
    weight, mask = _weighting(weight, mask, real)
    _temperature_loss(
        log_alpha.data_ptr(),
        log_prob.data_ptr(),
        target_entropy.data_ptr(),
        _address(weight),
        _address(mask),
        reduction,
        n,
        real is torch.float64,
        loss.data_ptr(),
        slope.data_ptr(),
    )
    return loss, slope
