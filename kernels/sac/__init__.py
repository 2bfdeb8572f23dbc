"""Soft actor-critic: the elementwise mathematics behind the networks, forward and backward, one kernel each.

``n`` is the number of rows (all batch dimensions together, agents included) and ``N`` the number of critics. A
per-row argument is any tensor of ``n`` elements, read in row-major order: ``[B]`` and ``[B, 1]`` are the same, so that
no operation is spent on views. A critic's output is any tensor of ``N * n`` elements whose first dimension is N.

Arithmetic is float64 where the principal argument (``q``, or ``log_prob`` where there is no critic) is, and float32
otherwise, also for float16 and bfloat16; losses and errors come out in that *computing dtype*, gradients in the dtype
of their argument. Sums are added in a fixed order: results repeat to the bit. Nothing here synchronises with the host.

The losses of a batch l_i become one number with weights ``w_i`` (1 where no weight is given, 0 where ``mask`` is
false): MEAN is sum(w_i l_i) / sum(w_i), SUM is sum(w_i l_i), NONE keeps the rows w_i l_i. A masked row is left out by
selection, so that a NaN in it reaches neither the value nor a gradient; where sum(w_i) is 0, so are the mean and its
gradients.

Reference: Haarnoja et al., "Soft Actor-Critic Algorithms and Applications", arXiv 1812.05905.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from gpubuf.kernels._differentiable import computing_dtype, register_autograd
from gpubuf.kernels._registry import define

NONE, MEAN, SUM = range(3)
L1, L2, SMOOTH_L1 = range(3)


def check_rows(n: int, **tensors: Tensor | None) -> None:
    """Raise ValueError unless every tensor has ``n`` elements."""
    for name, tensor in tensors.items():
        if tensor is not None and tensor.numel() != n:
            raise ValueError(f"{name} must have one element per row, {n} in all, got shape {list(tensor.shape)}")


def check_critics(q: Tensor, n: int) -> None:
    """Raise ValueError unless ``q`` is ``N`` critics of ``n`` rows."""
    if q.ndim == 0 or q.shape[0] == 0 or q.numel() != q.shape[0] * n:
        raise ValueError(f"critic values must be [N, *batch] with N > 0 and {n} rows each, got shape {list(q.shape)}")


# --- soft target ------------------------------------------------------------------------------------------------------


def _soft_td_target_fake(
    next_q: Tensor,
    next_log_prob: Tensor,
    alpha: Tensor,
    reward: Tensor,
    terminated: Tensor,
    gamma: Tensor,
    steps: Tensor | None,
) -> Tensor:
    return next_log_prob.new_empty(next_log_prob.shape, dtype=computing_dtype(next_q))


soft_td_target = define(
    "soft_td_target(Tensor next_q, Tensor next_log_prob, Tensor alpha, Tensor reward, Tensor terminated,"
    " Tensor gamma, Tensor? steps) -> Tensor",
    cpu="gpubuf.kernels.sac._cpu:soft_td_target",
    cuda="gpubuf.kernels.sac._launch:soft_td_target",
    fake=_soft_td_target_fake,
)
"""``y = reward + gamma^steps * (min_k next_q[k] - alpha * next_log_prob)``, ``y = reward`` where terminated.

The shape is that of ``next_log_prob``. ``terminated`` is true where it is not zero, ``steps`` (any dtype; 1 where it is
None) is the number of steps that the reward spans. A terminated row is selected, not multiplied: a NaN in its next
value does no harm. ``alpha`` and ``gamma`` have one element and are read on the device. Not differentiable.
"""


# --- critic loss ------------------------------------------------------------------------------------------------------


def _loss_shape(rows: Tensor, reduction: int) -> torch.Size:
    return rows.shape if reduction == NONE else torch.Size()


def _td_loss_fake(
    q: Tensor, target: Tensor, weight: Tensor | None, mask: Tensor | None, loss_function: int, reduction: int
) -> tuple[Tensor, Tensor, Tensor]:
    dtype = computing_dtype(q)
    return (
        q.new_empty(_loss_shape(target, reduction), dtype=dtype),
        q.new_empty(target.shape, dtype=dtype),
        q.new_empty((), dtype=dtype),
    )


td_loss = define(
    "td_loss(Tensor q, Tensor target, Tensor? weight, Tensor? mask, int loss_function, int reduction)"
    " -> (Tensor, Tensor, Tensor)",
    cpu="gpubuf.kernels.sac._cpu:td_loss",
    cuda="gpubuf.kernels.sac._launch:td_loss",
    fake=_td_loss_fake,
)
"""``(loss, td_error, norm)`` of an ensemble: ``l_i = sum_k distance(q[k, i] - target[i])``.

``distance`` is |d| (L1), d^2 (L2), or d^2/2 below 1 and |d| - 1/2 above (SMOOTH_L1, Huber's with delta 1).
``td_error`` is ``max_k |q[k, i] - target[i]|``, shaped as ``target``, neither weighted nor masked, NaN where a critic
is. ``norm`` is the factor of the reduction, 1 / sum(w) or 1, for the backward. Differentiable in ``q`` only, through
``loss``.
"""

td_loss_backward = define(
    "td_loss_backward(Tensor grad, Tensor q, Tensor target, Tensor? weight, Tensor? mask, Tensor norm,"
    " int loss_function, int reduction) -> Tensor",
    cpu="gpubuf.kernels.sac._cpu:td_loss_backward",
    cuda="gpubuf.kernels.sac._launch:td_loss_backward",
    fake=lambda grad, q, *_: q.new_empty(q.shape),
)
"""Gradient of :data:`td_loss` by ``q``: grad * norm * w_i * distance'(q[k, i] - target[i])."""


def _td_loss_setup(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    q, target, weight, mask, *ctx.constants = inputs
    _, td_error, norm = output
    ctx.save_for_backward(q, target, weight, mask, norm)
    ctx.mark_non_differentiable(td_error, norm)
    ctx.set_materialize_grads(False)


def _td_loss_backward(ctx: Any, grad: Tensor | None, *_: Any) -> tuple[Any, ...]:
    by_q = None if grad is None else td_loss_backward(grad, *ctx.saved_tensors, *ctx.constants)
    return by_q, None, None, None, None, None


register_autograd(td_loss, _td_loss_setup, _td_loss_backward)


# --- actor objective --------------------------------------------------------------------------------------------------


def _actor_loss_fake(
    q: Tensor, log_prob: Tensor, alpha: Tensor, weight: Tensor | None, mask: Tensor | None, reduction: int
) -> tuple[Tensor, Tensor, Tensor]:
    dtype = computing_dtype(q)
    return (
        q.new_empty(_loss_shape(log_prob, reduction), dtype=dtype),
        q.new_empty((), dtype=dtype),
        q.new_empty((), dtype=dtype),
    )


actor_loss = define(
    "sac_actor_loss(Tensor q, Tensor log_prob, Tensor alpha, Tensor? weight, Tensor? mask, int reduction)"
    " -> (Tensor, Tensor, Tensor)",
    cpu="gpubuf.kernels.sac._cpu:actor_loss",
    cuda="gpubuf.kernels.sac._launch:actor_loss",
    fake=_actor_loss_fake,
)
"""``(loss, entropy, norm)``: ``l_i = alpha * log_prob[i] - min_k q[k, i]``.

``entropy`` is the plain mean of ``-log_prob`` over all rows, for the log. Differentiable in ``q`` (the first critic
that attains the minimum) and ``log_prob``, through ``loss``; ``alpha`` is a constant.
"""

actor_loss_backward = define(
    "sac_actor_loss_backward(Tensor grad, Tensor q, Tensor log_prob, Tensor alpha, Tensor? weight, Tensor? mask,"
    " Tensor norm, int reduction) -> (Tensor, Tensor)",
    cpu="gpubuf.kernels.sac._cpu:actor_loss_backward",
    cuda="gpubuf.kernels.sac._launch:actor_loss_backward",
    fake=lambda grad, q, log_prob, *_: (q.new_empty(q.shape), log_prob.new_empty(log_prob.shape)),
)
"""Gradients of :data:`actor_loss` by ``q`` and ``log_prob``."""


def _actor_loss_setup(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    q, log_prob, alpha, weight, mask, ctx.reduction = inputs
    _, entropy, norm = output
    ctx.save_for_backward(q, log_prob, alpha, weight, mask, norm)
    ctx.mark_non_differentiable(entropy, norm)
    ctx.set_materialize_grads(False)


def _actor_loss_backward(ctx: Any, grad: Tensor | None, *_: Any) -> tuple[Any, ...]:
    by_q = by_log_prob = None
    if grad is not None:
        by_q, by_log_prob = actor_loss_backward(grad, *ctx.saved_tensors, ctx.reduction)
    return by_q, by_log_prob, None, None, None, None


register_autograd(actor_loss, _actor_loss_setup, _actor_loss_backward)


# --- temperature ------------------------------------------------------------------------------------------------------


def _temperature_loss_fake(
    log_alpha: Tensor,
    log_prob: Tensor,
    target_entropy: Tensor,
    weight: Tensor | None,
    mask: Tensor | None,
    reduction: int,
) -> tuple[Tensor, Tensor]:
    shape, dtype = _loss_shape(log_prob, reduction), computing_dtype(log_prob)
    return log_prob.new_empty(shape, dtype=dtype), log_prob.new_empty(shape, dtype=dtype)


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


register_autograd(temperature_loss, _temperature_loss_setup, _temperature_loss_backward)
