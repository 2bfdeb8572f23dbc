"""Lambda returns as a recursion in PyTorch: their definition, and the oracle of the tests."""

from __future__ import annotations

import torch
from torch import Tensor

from gpubuf.kernels.td import SMALLEST
from gpubuf.kernels.td.reference import one_critic


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
