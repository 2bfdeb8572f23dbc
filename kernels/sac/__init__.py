"""Soft actor-critic's own losses, of the actor and of the temperature, forward and backward, one kernel each.

The critics' loss and target, shapes, dtypes, weights, masks and reductions are those of :mod:`gpubuf.kernels.td`.

Reference: Haarnoja et al., "Soft Actor-Critic Algorithms and Applications", arXiv 1812.05905.
"""

from __future__ import annotations

import functools
from typing import Any

from torch import Tensor

from gpubuf.kernels._differentiable import computing_dtype, direct, register_autograd
from gpubuf.kernels._registry import define
from gpubuf.kernels.td import loss_shape

# --- actor objective --------------------------------------------------------------------------------------------------


def _actor_loss_fake(
    q: Tensor, log_prob: Tensor, alpha: Tensor, weight: Tensor | None, mask: Tensor | None, reduction: int, *_: Any
) -> tuple[Tensor, Tensor, Tensor]:
    new = functools.partial(q.new_empty, dtype=computing_dtype(q))
    return new(loss_shape(log_prob, reduction)), new(()), new(())


actor_loss = define(
    "sac_actor_loss(Tensor q, Tensor log_prob, Tensor alpha, Tensor? weight, Tensor? mask, int reduction,"
    " int combine=0) -> (Tensor, Tensor, Tensor)",
    cpu="gpubuf.kernels.sac._cpu:actor_loss",
    cuda="gpubuf.kernels.sac._launch:actor_loss",
    fake=_actor_loss_fake,
)
"""``(loss, entropy, norm)``: ``l_i = alpha * log_prob[i] - min_k q[k, i]``.

With ``combine`` AVERAGE (see :mod:`gpubuf.kernels.td`) the mean over k takes the place of the minimum.

``entropy`` is the plain mean of ``-log_prob`` over all rows, for the log. Differentiable in ``q`` (the first critic
that attains the minimum, or all of them alike) and ``log_prob``, through ``loss``; ``alpha`` is a constant.
"""

actor_loss_backward = define(
    "sac_actor_loss_backward(Tensor grad, Tensor q, Tensor log_prob, Tensor alpha, Tensor? weight, Tensor? mask,"
    " Tensor norm, int reduction, int combine=0) -> (Tensor, Tensor)",
    cpu="gpubuf.kernels.sac._cpu:actor_loss_backward",
    cuda="gpubuf.kernels.sac._launch:actor_loss_backward",
    fake=lambda grad, q, log_prob, *_: (q.new_empty(q.shape), log_prob.new_empty(log_prob.shape)),
)
"""Gradients of :data:`actor_loss` by ``q`` and ``log_prob``."""


_backward = direct(actor_loss_backward)


def _actor_loss_setup(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    q, log_prob, alpha, weight, mask, *ctx.constants = inputs
    _, entropy, norm = output
    ctx.save_for_backward(q, log_prob, alpha, weight, mask, norm)
    ctx.mark_non_differentiable(entropy, norm)
    ctx.set_materialize_grads(False)


def _actor_loss_backward(ctx: Any, grad: Tensor | None, *_: Any) -> tuple[Any, ...]:
    by_q = by_log_prob = None
    if grad is not None:
        by_q, by_log_prob = _backward(grad, *ctx.saved_tensors, *ctx.constants)
    return by_q, by_log_prob, None, None, None, *(None for _ in ctx.constants)


actor_loss_direct = register_autograd(actor_loss, _actor_loss_setup, _actor_loss_backward)
""":data:`actor_loss`, past PyTorch's dispatcher in eager mode. Give all arguments, by position."""


# --- temperature ------------------------------------------------------------------------------------------------------


def _temperature_loss_fake(log_alpha: Tensor, log_prob: Tensor, *options: Any) -> tuple[Tensor, Tensor]:
    new = functools.partial(log_prob.new_empty, loss_shape(log_prob, options[-1]), dtype=computing_dtype(log_prob))
    return new(), new()


temperature_loss = define(
    "sac_temperature_loss(Tensor log_alpha, Tensor log_prob, Tensor target_entropy, Tensor? weight, Tensor? mask,"
    " int reduction) -> (Tensor, Tensor)",
    cpu="gpubuf.kernels.sac._cpu:temperature_loss",
    cuda="gpubuf.kernels.sac._launch:temperature_loss",
    fake=_temperature_loss_fake,
)
"""``(loss, slope)``: ``l_i = -log_alpha * (log_prob[i] + target_entropy)``; slope is the derivative by log_alpha.

The loss acts on log_alpha, not on alpha, as in TorchRL. Differentiable in ``log_alpha`` only, through ``loss``.
"""


def _temperature_loss_setup(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    log_alpha, slope = inputs[0], output[1]
    ctx.save_for_backward(slope)
    ctx.shape, ctx.dtype = log_alpha.shape, log_alpha.dtype
    ctx.mark_non_differentiable(slope)
    ctx.set_materialize_grads(False)


def _temperature_loss_backward(ctx: Any, grad: Tensor | None, *_: Any) -> tuple[Any, ...]:
    by_log_alpha = None
    if grad is not None:
        (slope,) = ctx.saved_tensors
        product = grad * slope
        by_log_alpha = (product.sum() if product.ndim else product).to(ctx.dtype).reshape(ctx.shape)
    return by_log_alpha, None, None, None, None, None


temperature_loss_direct = register_autograd(temperature_loss, _temperature_loss_setup, _temperature_loss_backward)
