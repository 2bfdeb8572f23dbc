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

from torch import Tensor

from gpubuf.kernels._operations import declare, differentiable
from gpubuf.kernels.td import NONE, check_rows


def _check_values(q: Tensor, logits: Tensor, alpha: Tensor) -> None:
    if logits.ndim == 0 or logits.shape[-1] == 0:
        raise ValueError(f"logits must be [*batch, A] with A > 0, got shape {list(logits.shape)}")
    if q.ndim == 0 or q.shape[0] == 0 or q.shape[-1] != logits.shape[-1] or q.numel() != q.shape[0] * logits.numel():
        raise ValueError(
            f"critic values must be [N, *batch, A] with N > 0, to go with logits of shape {list(logits.shape)}, got "
            f"shape {list(q.shape)}"
        )
    check_rows(1, alpha=alpha)


def _check_weighting(logits: Tensor, weight: Tensor | None, mask: Tensor | None) -> None:
    check_rows(logits.shape[:-1].numel(), weight=weight, mask=mask)


def _sizes(q: Tensor, logits: Tensor) -> dict[str, int]:
    n_actions, n_elements = logits.shape[-1], logits.numel()
    return {"n": n_elements // n_actions, "n_actions": n_actions, "n_elements": n_elements, "nets": q.shape[0]}


# --- value ------------------------------------------------------------------------------------------------------------


soft_value = declare(
    "discrete_soft_value(Tensor q, Tensor logits, Tensor alpha) -> Tensor value",
    __name__,
    checks=[_check_values],
    sizes=_sizes,
    results=lambda logits: (logits.shape[:-1],),
    real="q logits",
)
"""``V[i] = sum_a p[i, a] * (min_k q[k, i, a] - alpha * log p[i, a])``, S, in the computing dtype.

``alpha`` has one element and is read on the device. A NaN critic is the smallest, so that it is seen. Not
differentiable. Pass the value on to :data:`gpubuf.kernels.td.soft_td_target`, as one critic without an entropy term.
"""


# --- actor objective --------------------------------------------------------------------------------------------------


actor_loss = declare(
    "discrete_actor_loss(Tensor q, Tensor logits, Tensor alpha, Tensor? weight, Tensor? mask, int reduction)"
    " -> (Tensor loss, Tensor log_prob, Tensor entropy, Tensor norm)",
    __name__,
    checks=[_check_values, _check_weighting],
    sizes=_sizes,
    results=lambda logits, reduction: (logits.shape[:-1] if reduction == NONE else (), logits.shape[:-1], (), ()),
    real="q logits",
)
"""``(loss, log_prob, entropy, norm)``: ``l_i = sum_a p[i, a] * (alpha * log p[i, a] - min_k q[k, i, a])``.

``log_prob`` is ``sum_a p[i, a] * log p[i, a]`` of every row, S, neither weighted nor masked. ``entropy`` is the mean of
``-log_prob`` over the rows that count, without weights. Differentiable in ``logits`` and in ``q`` (the first critic
that attains the minimum), through ``loss``; ``alpha`` is a constant.
"""


actor_loss_backward = declare(
    "discrete_actor_loss_backward(Tensor grad, Tensor q, Tensor logits, Tensor alpha, Tensor? weight, Tensor? mask,"
    " Tensor norm, int reduction, bool with_q) -> (Tensor grad_logits, Tensor grad_q)",
    __name__,
    sizes=_sizes,
    results=lambda q, logits, with_q: (logits, q if with_q else q.new_empty(0)),
    real="q logits",
)
"""Gradients of :data:`actor_loss` by ``logits`` and ``q``; the latter is empty, ``[0]``, without ``with_q``.

With ``f_i = grad * norm * w_i`` and ``m = min_k q[k, i, a]``: by the logit of ``a``, ``f_i p (alpha log p - m - l_i)``,
and ``-f_i p`` by the critic that attains the minimum.
"""

actor_loss_direct = differentiable(actor_loss, actor_loss_backward)
