"""Temporal-difference learning in plain PyTorch, and what all losses share: critics combined, weights, reductions."""

from __future__ import annotations

import torch
from torch import Tensor

from gpubuf.kernels import td
from gpubuf.kernels._plain import plain
from gpubuf.kernels.td import AVERAGE, L1, L2, MEAN, NONE


def combined(q: Tensor, combine: int) -> Tensor:
    """One value ``[n]`` of critics ``[N, n]``. A NaN is the smallest, so that it is seen."""
    return q.mean(0) if combine == AVERAGE else q.amin(0)


def smallest_alone(q: Tensor, values: Tensor) -> Tensor:
    """``values`` at the first of the smallest critics ``[N, ...]``, zero at the others."""
    return torch.zeros_like(q).scatter_(0, q.min(0, keepdim=True).indices, values.unsqueeze(0))


def weights(n: int, weight: Tensor | None, mask: Tensor | None, like: Tensor) -> Tensor | None:
    """The weights ``[n]``, 0 where masked; None if all are 1."""
    if mask is None:
        return weight if weight is None else weight.view(n)
    return torch.where(mask.view(n), like.new_ones(()) if weight is None else weight.view(n), 0)


def reduced(rows: Tensor, weight: Tensor | None, mask: Tensor | None, reduction: int) -> tuple[Tensor, Tensor]:
    """``(loss, norm)`` of the losses of rows ``[n]``. What is masked is selected away."""
    n = len(rows)
    each = None if weight is None and mask is None else weights(n, weight, mask, rows)
    if each is None:
        norm = rows.new_full((), 1 if reduction != MEAN else 1 / n if n else 0)
    else:
        rows = (rows if mask is None else rows.where(mask.view(n), 0)) * each
        norm = rows.new_ones(())
        if reduction == MEAN:
            mass = each.sum()
            norm = mass.reciprocal().where(mass != 0, 0)
    return (rows, norm) if reduction == NONE else (rows.sum() * norm, norm)


def factors(grad: Tensor, norm: Tensor, n: int, weight: Tensor | None, mask: Tensor | None) -> Tensor:
    """What the derivative of each row's loss is multiplied with: ``[n]``, or ``[]`` if it is one number."""
    each, scale = weights(n, weight, mask, grad), grad.view(-1 if grad.ndim else ()) * norm
    return scale if each is None else scale * each


@plain(td.soft_td_target)
def soft_td_target(
    next_q: Tensor, next_log_prob: Tensor | None, alpha: Tensor | None, reward: Tensor, terminated: Tensor,
    gamma: Tensor, steps: Tensor | None, combine: int, n: int, nets: int,
) -> Tensor:  # fmt: skip
    reward, discount = reward.view(n), gamma if steps is None else gamma ** steps.view(n)
    value = _next_value(next_q.view(nets, n), next_log_prob, alpha, combine)
    return torch.where(terminated.view(n), reward, torch.addcmul(reward, discount, value))


def _next_value(q: Tensor, next_log_prob: Tensor | None, alpha: Tensor | None, combine: int) -> Tensor:
    value = combined(q, combine)
    if next_log_prob is None or alpha is None:
        return value
    return torch.addcmul(value, alpha, next_log_prob.view(-1), value=-1)


@plain(td.soft_lambda_return)
def soft_lambda_return(
    next_q: Tensor, next_log_prob: Tensor | None, alpha: Tensor | None, reward: Tensor, terminated: Tensor,
    done: Tensor, mask: Tensor | None, gamma: Tensor, lmbda: Tensor, steps: Tensor | None, length: int, inner: int,
    combine: int, n: int, nets: int,
) -> Tensor:  # fmt: skip
    """``G_t = a_t + b_t G_{t+1}``. A round makes of that ``a + b G`` of twice as many rows further on, so that a
    sequence takes as many rounds as its length has binary digits. What has the factor 0 is selected away.
    """
    shape = (-1, length, inner)
    if not n:
        return reward.clone()
    value = _next_value(next_q.view(nets, n), next_log_prob, alpha, combine).view(shape)
    discount = gamma if steps is None else gamma ** steps.view(shape)
    follows = ~done.view(shape)
    follows[:, -1] = False
    if mask is not None:
        follows[:, :-1] &= mask.view(shape)[:, 1:]
    goes_on = ~terminated.view(shape)
    bootstrap = torch.where(follows, (1 - lmbda) * value, value) * discount
    out = torch.where(goes_on, bootstrap, 0) + reward.view(shape)
    factor = torch.where(follows & goes_on, (lmbda * discount).expand_as(value), 0)
    step = 1
    while step < length:
        further = torch.where(factor[:, :-step] == 0, 0, factor[:, :-step] * out[:, step:])
        later = factor[:, :-step] * factor[:, step:]
        out = torch.cat((out[:, :-step] + further, out[:, -step:]), 1)
        factor = torch.cat((later, torch.zeros_like(factor[:, -step:])), 1)
        step *= 2
    return out


def distances(d: Tensor, far: Tensor, loss_function: int) -> Tensor:
    """The losses of differences ``d``, whose absolute values are ``far``."""
    if loss_function == L1:
        return far
    return d.square() if loss_function == L2 else torch.where(far < 1, 0.5 * d.square(), far - 0.5)


def slopes(d: Tensor, loss_function: int) -> Tensor:
    """The derivatives of :func:`distances`; it overwrites ``d``."""
    if loss_function == L1:
        # A NaN stays one.
        return torch.where(d.isnan(), d, d.sign())
    return d.mul_(2) if loss_function == L2 else d.clamp_(-1, 1)


@plain(td.td_loss)
def loss(
    q: Tensor, target: Tensor, weight: Tensor | None, mask: Tensor | None, loss_function: int, reduction: int, n: int,
    nets: int,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    d = q.view(nets, n) - target.view(n)
    far = d.abs()
    value, norm = reduced(distances(d, far, loss_function).sum(0), weight, mask, reduction)
    return value, far.amax(0), norm


@plain(td.td_loss_backward)
def loss_backward(
    grad: Tensor, q: Tensor, target: Tensor, weight: Tensor | None, mask: Tensor | None, norm: Tensor,
    loss_function: int, n: int, nets: int,
) -> Tensor:  # fmt: skip
    d = slopes(q.view(nets, n) - target.view(n), loss_function)
    d *= factors(grad, norm, n, weight, mask)
    return d if mask is None else d.where(mask.view(n), 0)
