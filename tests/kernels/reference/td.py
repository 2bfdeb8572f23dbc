"""The operations of temporal-difference learning as formulas of PyTorch: their definition, and the oracle of the tests.

They are written to be read. In float64 they are the truth; in float32 they are what you would have without the kernels.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from gpubuf.kernels.td import AVERAGE, SMALLEST


def one_critic(q: Tensor, combine: int) -> Tensor:
    """The smallest of N critics [N, *S], whose gradient goes to the first of equals, or their mean."""
    return q.mean(0) if combine == AVERAGE else q.min(0).values


def soft_td_target(
    next_q: Tensor,
    next_log_prob: Tensor | float,
    alpha: Tensor | float,
    reward: Tensor,
    terminated: Tensor,
    gamma: float,
    steps: Tensor | None = None,
    combine: int = SMALLEST,
) -> Tensor:
    """Of ``next_q`` [N, *S] and rows of shape S: the reward, and the discounted value of the next state."""
    value = one_critic(next_q, combine) - alpha * next_log_prob
    discount = gamma if steps is None else gamma ** steps.to(value.dtype)
    return reward + torch.where(terminated, 0.0, discount * value)


def distance(a: Tensor, b: Tensor, loss_function: str) -> Tensor:
    """The distance of each element, not reduced."""
    functions = {"l1": functional.l1_loss, "l2": functional.mse_loss, "smooth_l1": functional.smooth_l1_loss}
    return functions[loss_function](a, b, reduction="none")


def reduce(rows: Tensor, weight: Tensor | None, mask: Tensor | None, reduction: str) -> Tensor:
    """One number (or the weighted rows) of per-row losses."""
    w = torch.ones_like(rows) if weight is None else weight.to(rows.dtype).reshape(rows.shape)
    if mask is not None:
        m = mask.reshape(rows.shape)
        rows, w = torch.where(m, rows, 0.0), torch.where(m, w, 0.0)
    if reduction == "none":
        return w * rows
    total = (w * rows).sum()
    return total if reduction == "sum" else total / w.sum()


def td_loss(
    q: Tensor, target: Tensor, weight: Tensor | None, mask: Tensor | None, loss_function: str, reduction: str
) -> tuple[Tensor, Tensor]:
    """(loss, |TD error| of each row) of ``q`` [N, *S] and ``target`` S."""
    each = distance(q, target.expand_as(q), loss_function)
    return reduce(each.sum(0), weight, mask, reduction), (q - target).abs().amax(0)


def soft_lambda_return(
    next_q: Tensor,
    next_log_prob: Tensor | float,
    alpha: Tensor | float,
    reward: Tensor,
    terminated: Tensor,
    done: Tensor,
    mask: Tensor | None,
    gamma: float,
    lmbda: float,
    steps: Tensor | None = None,
    combine: int = SMALLEST,
) -> Tensor:
    """Of ``next_q`` [N, B, T, A] and rows [B, T, A], with the steps of a sequence along T."""
    value = one_critic(next_q, combine) - alpha * next_log_prob
    discount = torch.full_like(value, gamma) if steps is None else gamma ** steps.to(value.dtype)
    out = torch.empty_like(value)
    for t in reversed(range(value.shape[1])):
        bootstrap = value[:, t]
        if t + 1 < value.shape[1]:
            follows = ~done[:, t] if mask is None else ~done[:, t] & mask[:, t + 1]
            bootstrap = torch.where(follows, (1 - lmbda) * bootstrap + lmbda * out[:, t + 1], bootstrap)
        out[:, t] = reward[:, t] + torch.where(terminated[:, t], 0.0, discount[:, t] * bootstrap)
    return out
