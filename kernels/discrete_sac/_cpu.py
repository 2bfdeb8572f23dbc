"""Discrete soft actor-critic in plain PyTorch."""

from __future__ import annotations

from torch import Tensor

from gpubuf.kernels import discrete_sac
from gpubuf.kernels._plain import plain
from gpubuf.kernels.td._cpu import factors, reduced, smallest_alone


def _policy(q: Tensor, logits: Tensor, nets: int, n: int, n_actions: int) -> tuple[Tensor, Tensor, Tensor]:
    """``(p, log p, min_k q)``, ``[n, A]``; the last two are 0 where ``p`` is. A NaN is the smallest critic."""
    log_p = logits.view(n, n_actions).log_softmax(-1)
    p = log_p.exp()
    impossible = p == 0
    return p, log_p.masked_fill(impossible, 0), q.view(nets, n, n_actions).amin(0).masked_fill(impossible, 0)


@plain(discrete_sac.soft_value)
def discrete_soft_value(q: Tensor, logits: Tensor, alpha: Tensor, nets: int, n: int, n_actions: int) -> Tensor:
    p, log_p, value = _policy(q, logits, nets, n, n_actions)
    return (p * (value - alpha * log_p)).sum(-1)


@plain(discrete_sac.actor_loss)
def discrete_actor_loss(
    q: Tensor, logits: Tensor, alpha: Tensor, weight: Tensor | None, mask: Tensor | None, reduction: int, nets: int,
    n: int, n_actions: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    p, log_p, value = _policy(q, logits, nets, n, n_actions)
    log_prob = (p * log_p).sum(-1)
    loss, norm = reduced(alpha * log_prob - (p * value).sum(-1), weight, mask, reduction)
    counted = log_prob if mask is None else log_prob[mask.view(n)]
    return loss, log_prob, counted.sum() / -max(len(counted), 1), norm


@plain(discrete_sac.actor_loss_backward)
def discrete_actor_loss_backward(
    grad: Tensor, q: Tensor, logits: Tensor, alpha: Tensor, weight: Tensor | None, mask: Tensor | None, norm: Tensor,
    with_q: bool, nets: int, n: int, n_actions: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    p, log_p, value = _policy(q, logits, nets, n, n_actions)
    slope = alpha * log_p - value
    mass = factors(grad, norm, n, weight, mask).view(-1, 1) * p
    by_logits = mass * (slope - (p * slope).sum(-1, keepdim=True))
    if mask is not None:
        mass, by_logits = (each.where(mask.view(n, 1), 0) for each in (mass, by_logits))
    return by_logits, smallest_alone(q.view(nets, n, n_actions), -mass) if with_q else q.new_empty(0)
