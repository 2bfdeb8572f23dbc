"""Soft actor-critic's own losses, of the actor and of the temperature, forward and backward, one kernel each.

The critics' loss and target, shapes, dtypes, weights, masks and reductions are those of :mod:`gpubuf.kernels.td`.

Reference: Haarnoja et al., "Soft Actor-Critic Algorithms and Applications", arXiv 1812.05905.
"""

from __future__ import annotations

from torch import Tensor

from gpubuf.kernels._operations import declare, differentiable
from gpubuf.kernels.td import check_critics, check_rows, loss_shape

# --- actor objective --------------------------------------------------------------------------------------------------


def _check_actor(
    q: Tensor, log_prob: Tensor, alpha: Tensor, weight: Tensor | None, mask: Tensor | None, combine: int
) -> None:
    n = log_prob.numel()
    check_critics(q, n, combine)
    check_rows(n, weight=weight, mask=mask)
    check_rows(1, alpha=alpha)


def _actor_sizes(q: Tensor, log_prob: Tensor) -> dict[str, int]:
    return {"n": log_prob.numel(), "nets": q.shape[0]}


actor_loss = declare(
    "sac_actor_loss(Tensor q, Tensor log_prob, Tensor alpha, Tensor? weight, Tensor? mask, int reduction,"
    " int combine=0) -> (Tensor loss, Tensor entropy, Tensor norm)",
    __name__,
    checks=[_check_actor],
    sizes=_actor_sizes,
    results=lambda log_prob, reduction: (loss_shape(log_prob, reduction), (), ()),
    real="q",
)
"""``(loss, entropy, norm)``: ``l_i = alpha * log_prob[i] - min_k q[k, i]``.

With ``combine`` AVERAGE (see :mod:`gpubuf.kernels.td`) the mean over k takes the place of the minimum.

``entropy`` is the plain mean of ``-log_prob`` over all rows, for the log. Differentiable in ``q`` (the first critic
that attains the minimum, or all of them alike) and ``log_prob``, through ``loss``; ``alpha`` is a constant.
"""

actor_loss_backward = declare(
    "sac_actor_loss_backward(Tensor grad, Tensor q, Tensor log_prob, Tensor alpha, Tensor? weight, Tensor? mask,"
    " Tensor norm, int reduction, int combine=0) -> (Tensor grad_q, Tensor grad_log_prob)",
    __name__,
    sizes=_actor_sizes,
    real="q",
)
"""Gradients of :data:`actor_loss` by ``q`` and ``log_prob``."""

actor_loss_direct = differentiable(actor_loss, actor_loss_backward)


# --- temperature ------------------------------------------------------------------------------------------------------


def _check_temperature(
    log_alpha: Tensor, log_prob: Tensor, target_entropy: Tensor, weight: Tensor | None, mask: Tensor | None
) -> None:
    check_rows(log_prob.numel(), weight=weight, mask=mask)
    check_rows(1, log_alpha=log_alpha, target_entropy=target_entropy)


temperature_loss = declare(
    "sac_temperature_loss(Tensor log_alpha, Tensor log_prob, Tensor target_entropy, Tensor? weight, Tensor? mask,"
    " int reduction) -> (Tensor loss, Tensor slope)",
    __name__,
    checks=[_check_temperature],
    sizes=lambda log_prob: {"n": log_prob.numel()},
    results=lambda log_prob, reduction: (loss_shape(log_prob, reduction),) * 2,
    real="log_prob",
)
"""``(loss, slope)``: ``l_i = -log_alpha * (log_prob[i] + target_entropy)``; slope is the derivative by log_alpha.

The loss acts on log_alpha, not on alpha, as in TorchRL. Not differentiable: multiply ``slope`` by what learns.
"""
