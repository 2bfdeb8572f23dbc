"""Discrete soft actor-critic as formulas of PyTorch: the definition of the operations, and the oracle of the tests."""

from __future__ import annotations

import torch
from torch import Tensor

from tests.kernels.reference.td import reduce


def expectation(logits: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """(sum_a p log p, sum_a p values) of ``logits`` and ``values``, both [*S, A]; actions with p = 0 take no part."""
    log_p = torch.log_softmax(logits, -1)
    possible = log_p.exp() != 0
    p = torch.where(possible, log_p.exp(), 0.0)
    log_p, values = torch.where(possible, log_p, 0.0), torch.where(possible, values, 0.0)
    return (p * log_p).sum(-1), (p * values).sum(-1)


def soft_value(q: Tensor, logits: Tensor, alpha: Tensor | float) -> Tensor:
    """The value of each row of ``q`` [N, *S, A]."""
    log_prob, value = expectation(logits, q.min(0).values)
    return value - alpha * log_prob


def actor_loss(
    q: Tensor, logits: Tensor, alpha: Tensor | float, weight: Tensor | None, mask: Tensor | None, reduction: str
) -> tuple[Tensor, Tensor, Tensor]:
    """(loss, log_prob, entropy)."""
    log_prob, value = expectation(logits, q.min(0).values)
    counted = log_prob if mask is None else log_prob[mask.reshape(log_prob.shape)]
    return reduce(alpha * log_prob - value, weight, mask, reduction), log_prob, -counted.mean()
