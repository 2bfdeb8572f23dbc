"""Soft actor-critic's own losses in plain PyTorch."""

from __future__ import annotations

from torch import Tensor

from gpubuf.kernels import sac
from gpubuf.kernels._plain import plain
from gpubuf.kernels.td import AVERAGE
from gpubuf.kernels.td._cpu import combined, factors, reduced, smallest_alone


@plain(sac.actor_loss)
def actor_loss(
    q: Tensor, log_prob: Tensor, alpha: Tensor, weight: Tensor | None, mask: Tensor | None, reduction: int,
    combine: int, n: int, nets: int,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    log_prob = log_prob.view(n)
    loss, norm = reduced(alpha * log_prob - combined(q.view(nets, n), combine), weight, mask, reduction)
    return loss, log_prob.sum() / -max(n, 1), norm


@plain(sac.actor_loss_backward)
def actor_loss_backward(
    grad: Tensor, q: Tensor, alpha: Tensor, weight: Tensor | None, mask: Tensor | None, norm: Tensor, combine: int,
    n: int, nets: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    q, factor = q.view(nets, n), factors(grad, norm, n, weight, mask).expand(n)
    by_q = (factor / -nets).expand(nets, n) if combine == AVERAGE else smallest_alone(q, -factor)
    return by_q, alpha * factor


@plain(sac.temperature_loss)
def temperature_loss(
    log_alpha: Tensor, log_prob: Tensor, target_entropy: Tensor, weight: Tensor | None, mask: Tensor | None,
    reduction: int, n: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    slope, _ = reduced(-(log_prob.view(n) + target_entropy), weight, mask, reduction)
    return log_alpha * slope, slope
