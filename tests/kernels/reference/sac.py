"""Soft actor-critic's own losses as formulas of PyTorch: their definition, and the oracle of the tests."""

from __future__ import annotations

from torch import Tensor

from gpubuf.kernels.td import SMALLEST
from tests.kernels.reference.td import one_critic, reduce


def actor_loss(
    q: Tensor,
    log_prob: Tensor,
    alpha: Tensor,
    weight: Tensor | None,
    mask: Tensor | None,
    reduction: str,
    combine: int = SMALLEST,
) -> tuple[Tensor, Tensor]:
    """(loss, entropy) of ``q`` [N, *S] and ``log_prob`` S."""
    return reduce(alpha * log_prob - one_critic(q, combine), weight, mask, reduction), -log_prob.mean()


def temperature_loss(
    log_alpha: Tensor,
    log_prob: Tensor,
    target_entropy: Tensor,
    weight: Tensor | None,
    mask: Tensor | None,
    reduction: str,
) -> Tensor:
    """The loss acts on log_alpha, not on alpha, as in TorchRL."""
    return reduce(-log_alpha * (log_prob + target_entropy), weight, mask, reduction)
