"""Soft actor-critic over a finite set of actions: expectations over the policy instead of samples from it.

``n`` is the number of rows (all batch dimensions together, agents included), ``A`` the number of actions and ``N`` the
number of critics. ``logits`` are ``[*S, A]``, of any size: the policy is their softmax, ``p``. Critic values are
``[N, *S, A]``. Per-row arguments, dtypes, weights, masks and reductions are those of :mod:`gpubuf.kernels.td`.

An action with ``p = 0`` (its logit is -inf, or its probability is below the smallest float) takes no part: 0 log 0 is
0, its critic value may be anything, and its logit gets no gradient. Logarithm and softmax are taken in one, so that
every other action has a finite one. A row in which every logit is -inf is NaN.

The temperature's loss is :data:`gpubuf.kernels.sac.temperature_loss` of the ``log_prob`` that :data:`actor_loss`
returns.

Reference: Christodoulou, "Soft Actor-Critic for Discrete Action Settings", arXiv 1910.07207.
"""

from __future__ import annotations

import functools
from typing import Any

from torch import Tensor

from gpubuf.kernels._differentiable import computing_dtype, direct, register_autograd
from gpubuf.kernels._registry import define
from gpubuf.kernels.td import NONE, check_rows


def check_values(q: Tensor, logits: Tensor) -> int:
    """The number of rows of ``logits``; ValueError unless they are ``[*S, A]`` and ``q`` N times as many."""
    if logits.ndim == 0 or logits.shape[-1] == 0:
        raise ValueError(f"logits must be [*batch, A] with A > 0, got shape {list(logits.shape)}")
    if q.ndim == 0 or q.shape[0] == 0 or q.shape[-1] != logits.shape[-1] or q.numel() != q.shape[0] * logits.numel():
        raise ValueError(
            f"critic values must be [N, *batch, A] with N > 0, to go with logits of shape {list(logits.shape)}, got "
            f"shape {list(q.shape)}"
        )
    return logits.numel() // logits.shape[-1]


def check_actor(q: Tensor, logits: Tensor, alpha: Tensor, weight: Tensor | None, mask: Tensor | None) -> int:
    """The number of rows; ValueError unless the arguments of :data:`actor_loss` fit each other."""
    n = check_values(q, logits)
    check_rows(n, weight=weight, mask=mask)
    check_rows(1, alpha=alpha)
    return n


# --- value ------------------------------------------------------------------------------------------------------------


soft_value = define(
    "discrete_soft_value(Tensor next_q, Tensor logits, Tensor alpha) -> Tensor",
    cpu="gpubuf.kernels.discrete_sac._cpu:soft_value",
    cuda="gpubuf.kernels.discrete_sac._launch:soft_value",
    fake=lambda next_q, logits, alpha: next_q.new_empty(logits.shape[:-1], dtype=computing_dtype(next_q, logits)),
)
"""``V[i] = sum_a p[i, a] * (min_k next_q[k, i, a] - alpha * log p[i, a])``, S, in the computing dtype.

``alpha`` has one element and is read on the device. A NaN critic is the smallest, so that it is seen. Not
differentiable. Pass the value on to :data:`gpubuf.kernels.td.soft_td_target`, as one critic without an entropy term.
"""


# --- actor objective --------------------------------------------------------------------------------------------------


def _actor_loss_fake(q: Tensor, logits: Tensor, *options: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    new, rows = functools.partial(q.new_empty, dtype=computing_dtype(q, logits)), logits.shape[:-1]
    return new(rows if options[-1] == NONE else ()), new(rows), new(()), new(())


actor_loss = define(
    "discrete_actor_loss(Tensor q, Tensor logits, Tensor alpha, Tensor? weight, Tensor? mask, int reduction)"
    " -> (Tensor, Tensor, Tensor, Tensor)",
    cpu="gpubuf.kernels.discrete_sac._cpu:actor_loss",
    cuda="gpubuf.kernels.discrete_sac._launch:actor_loss",
    fake=_actor_loss_fake,
)
"""``(loss, log_prob, entropy, norm)``: ``l_i = sum_a p[i, a] * (alpha * log p[i, a] - min_k q[k, i, a])``.

``log_prob`` is ``sum_a p[i, a] * log p[i, a]`` of every row, S, neither weighted nor masked. ``entropy`` is the mean of
``-log_prob`` over the rows that count, without weights. Differentiable in ``logits`` and in ``q`` (the first critic
that attains the minimum), through ``loss``; ``alpha`` is a constant.
"""


def _actor_loss_backward_fake(grad: Tensor, q: Tensor, logits: Tensor, *others: Any) -> tuple[Tensor, Tensor]:
    return logits.new_empty(logits.shape), q.new_empty(q.shape if others[-1] else (0,))


actor_loss_backward = define(
    "discrete_actor_loss_backward(Tensor grad, Tensor q, Tensor logits, Tensor alpha, Tensor? weight, Tensor? mask,"
    " Tensor norm, int reduction, bool with_q) -> (Tensor, Tensor)",
    cpu="gpubuf.kernels.discrete_sac._cpu:actor_loss_backward",
    cuda="gpubuf.kernels.discrete_sac._launch:actor_loss_backward",
    fake=_actor_loss_backward_fake,
)
"""Gradients of :data:`actor_loss` by ``logits`` and ``q``; the latter is empty, ``[0]``, without ``with_q``.

With ``f_i = grad * norm * w_i`` and ``m = min_k q[k, i, a]``: by the logit of ``a``, ``f_i p (alpha log p - m - l_i)``,
and ``-f_i p`` by the critic that attains the minimum.
"""


_actor_loss_gradient = direct(actor_loss_backward)


def _actor_loss_setup(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    q, logits, alpha, weight, mask, ctx.reduction = inputs
    _, log_prob, entropy, norm = output
    ctx.save_for_backward(q, logits, alpha, weight, mask, norm)
    ctx.mark_non_differentiable(log_prob, entropy, norm)
    ctx.set_materialize_grads(False)


def _actor_loss_backward(ctx: Any, grad: Tensor | None, *_: Any) -> tuple[Any, ...]:
    by_q = by_logits = None
    if grad is not None:
        with_q = ctx.needs_input_grad[0]
        by_logits, by_q = _actor_loss_gradient(grad, *ctx.saved_tensors, ctx.reduction, with_q)
        by_q = by_q if with_q else None
    return by_q, by_logits, None, None, None, None


actor_loss_direct = register_autograd(actor_loss, _actor_loss_setup, _actor_loss_backward)
