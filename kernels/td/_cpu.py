"""Temporal-difference learning on the CPU, in plain PyTorch: see docs/decisions.md for what compiled loops would save.

Rows are one dimension here, critics ``[N, n]``, and numbers of one element are read at once.
"""

from __future__ import annotations

import torch
from torch import Tensor

from gpubuf.kernels._operations import computing_dtype
from gpubuf.kernels.td import AVERAGE, L1, L2, MEAN, NONE, SMALLEST, check_loss, check_sequences, check_target


def _flat(tensor: Tensor, n: int, dtype: torch.dtype) -> Tensor:
    """``[n]``, of ``dtype``."""
    # `to` and `reshape` take a microsecond each where there is nothing to do.
    tensor = tensor if tensor.dtype is dtype else tensor.to(dtype)
    return tensor if tensor.ndim == 1 else tensor.reshape(n)


def _weights_of(
    weight: Tensor | None, mask: Tensor | None, n: int, real: torch.dtype
) -> tuple[Tensor | None, Tensor | None]:
    """(weights with 0 in masked rows, which rows count), both ``[n]``; None where all are 1, and where all count."""
    counts = None if mask is None else _flat(mask, n, torch.bool)
    if weight is None:
        return (None if counts is None else counts.to(real)), counts
    weight = _flat(weight, n, real)
    return (weight if counts is None else torch.where(counts, weight, 0.0)), counts


def _selected(rows: Tensor, counts: Tensor | None) -> Tensor:
    """``rows``, and 0 where a row does not count."""
    return rows if counts is None else torch.where(counts, rows, 0.0)


def _next_value(
    next_q: Tensor, next_log_prob: Tensor | None, alpha: Tensor | None, combine: int, n: int, real: torch.dtype
) -> Tensor:
    """``[n]``, in memory of its own."""
    critics = (next_q if next_q.dtype is real else next_q.to(real)).reshape(next_q.shape[0], n)
    value = critics.sum(0).div_(critics.shape[0]) if combine == AVERAGE else critics.amin(0)
    if next_log_prob is not None and alpha is not None:
        value.sub_(_flat(next_log_prob, n, real), alpha=alpha.item())
    return value


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
    check_target(next_q, next_log_prob, alpha, reward, terminated, gamma, steps, combine)
    rows = (reward if next_log_prob is None else next_log_prob).shape
    n, real = rows.numel(), computing_dtype(next_q)
    target = _next_value(next_q, next_log_prob, alpha, combine, n, real)
    target.mul_(gamma.item() if steps is None else gamma.item() ** _flat(steps, n, real))
    return target.masked_fill_(_flat(terminated, n, torch.bool), 0).add_(_flat(reward, n, real)).reshape(rows)


def soft_lambda_return(
    next_q: Tensor,
    next_log_prob: Tensor | None,
    alpha: Tensor | None,
    reward: Tensor,
    terminated: Tensor,
    done: Tensor,
    mask: Tensor | None,
    gamma: Tensor,
    lmbda: Tensor,
    steps: Tensor | None,
    length: int,
    inner: int,
    combine: int = SMALLEST,
) -> Tensor:
    """See :data:`gpubuf.kernels.td.soft_lambda_return`.

    ``G_t = a_t + b_t G_{t+1}``. A round makes of that ``a + b G`` of twice as many rows further on, so that a sequence
    takes as many rounds as its length has binary digits. What has the factor 0 is selected away.
    """
    check_target(next_q, next_log_prob, alpha, reward, terminated, gamma, steps, combine)
    check_sequences(reward, done, mask, lmbda, length, inner)
    rows = (reward if next_log_prob is None else next_log_prob).shape
    n, real = rows.numel(), computing_dtype(next_q)
    if not n:
        return torch.empty(rows, dtype=real)
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


def loss(
    q: Tensor, target: Tensor, weight: Tensor | None, mask: Tensor | None, loss_function: int, reduction: int
) -> tuple[Tensor, Tensor, Tensor]:
    """See :data:`gpubuf.kernels.td.td_loss`."""
    check_loss(q, target, weight, mask)
    n = target.numel()
    distance = _differences(q, target, n).abs_()
    td_error = distance.amax(0).reshape(target.shape)
    if loss_function == L2:
        distance = distance.square_()
    elif loss_function != L1:
        # As Huber's, with one pass less: the square of what is below 1, and the rest.
        near = distance.clamp(max=1)
        distance = near.mul(-0.5).add_(distance).mul_(near)
    rows = distance.sum(0)
    w, counts = _weights_of(weight, mask, n, rows.dtype)
    total = n if w is None else w.sum().item()
    norm = 1.0 if reduction != MEAN else 1 / total if total else 0.0
    rows = _selected(rows if w is None else w * rows, counts)
    reduced = rows.reshape(target.shape) if reduction == NONE else rows.sum().mul_(norm)
    return reduced, td_error, rows.new_full((), norm)


def _differences(q: Tensor, target: Tensor, n: int) -> Tensor:
    """``[N, n]``, in memory of its own."""
    real = computing_dtype(q)
    return (q if q.dtype is real else q.to(real)).reshape(q.shape[0], n) - _flat(target, n, real)


def loss_backward(
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
    n = target.numel()
    slope = _differences(q, target, n)
    if loss_function == L2:
        slope.mul_(2)
    elif loss_function == L1:
        slope = torch.where(slope.isnan(), slope, slope.sign())
    else:
        slope.clamp_(-1, 1)
    w, counts = _weights_of(weight, mask, n, slope.dtype)
    factor = (grad.reshape(n) if reduction == NONE else grad).to(norm.dtype) * norm
    by_q = _selected(slope.mul_(factor if w is None else factor * w), counts).reshape(q.shape)
    return by_q if by_q.dtype is q.dtype else by_q.to(q.dtype)
