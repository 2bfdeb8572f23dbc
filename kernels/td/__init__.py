"""Temporal-difference learning after the networks: targets, the loss of an ensemble of critics, and reductions.

A loss on values (DQN, TD3, SAC's critics) takes its target from :data:`soft_td_target`, or over whole sequences from
:data:`soft_lambda_return`, and its loss with the priority of each row from :data:`td_loss`. The reductions are shared
by every family of losses.

``n`` is the number of rows (all batch dimensions together, agents included) and ``N`` the number of critics. A
per-row argument is any tensor of ``n`` elements, read in row-major order: ``[B]`` and ``[B, 1]`` are the same, so that
no operation is spent on views. A critic's output is any tensor of ``N * n`` elements whose first dimension is N.

Arithmetic is float64 where the principal argument (``q``, or the log-densities where there is no critic) is, and
float32 otherwise, also for float16 and bfloat16; losses and errors come out in that *computing dtype*, gradients in the
dtype of their argument. Sums are added in a fixed order: results repeat to the bit. Nothing synchronises with the host.

The losses of a batch l_i become one number with weights ``w_i`` (1 where no weight is given, 0 where ``mask`` is
false): MEAN is sum(w_i l_i) / sum(w_i), SUM is sum(w_i l_i), NONE keeps the rows w_i l_i. A masked row is left out by
selection, so that a NaN in it reaches neither the value nor a gradient; where sum(w_i) is 0, so are the mean and its
gradients.

References: Sutton, "Learning to Predict by the Methods of Temporal Differences", 1988; Fujimoto et al., "Addressing
Function Approximation Error in Actor-Critic Methods", arXiv 1802.09477 (the minimum over critics); Haarnoja et al.,
"Soft Actor-Critic Algorithms and Applications", arXiv 1812.05905 (the entropy term).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from gpubuf.kernels._operations import declare, differentiable

NONE, MEAN, SUM = range(3)
"""Reductions."""

L1, L2, SMOOTH_L1 = range(3)
"""Distances between a value and its target."""

SMALLEST, AVERAGE = range(2)
"""The one value of an ensemble in a row: its smallest (the first of equals has the gradient), or its mean."""


def check_rows(n: int, **tensors: Tensor | None) -> None:
    """Raise ValueError unless every tensor has ``n`` elements."""
    for name, tensor in tensors.items():
        if tensor is not None and tensor.numel() != n:
            raise ValueError(f"{name} must have one element per row, {n} in all, got shape {list(tensor.shape)}")


def check_critics(q: Tensor, n: int, combine: int = SMALLEST) -> None:
    """Raise ValueError unless ``q`` is ``N`` critics of ``n`` rows, and ``combine`` a way to combine them."""
    if combine not in (SMALLEST, AVERAGE):
        raise ValueError(f"combine must be SMALLEST or AVERAGE, got {combine}")
    if q.ndim == 0 or q.shape[0] == 0 or q.numel() != q.shape[0] * n:
        raise ValueError(f"critic values must be [N, *batch] with N > 0 and {n} rows each, got shape {list(q.shape)}")


def check_target(
    next_q: Tensor, next_log_prob: Tensor | None, alpha: Tensor | None, reward: Tensor, terminated: Tensor,
    gamma: Tensor, steps: Tensor | None, combine: int,
) -> None:  # fmt: skip
    if (next_log_prob is None) != (alpha is None):
        raise ValueError("next_log_prob and alpha go together: give both, or neither")
    rows = reward if next_log_prob is None else next_log_prob
    n = rows.numel()
    check_critics(next_q, n, combine)
    check_rows(n, reward=reward, terminated=terminated, steps=steps)
    check_rows(1, alpha=alpha, gamma=gamma)


def loss_shape(rows: Tensor, reduction: int) -> Sequence[int]:
    """Shape of a loss: that of ``rows``, or ``[]`` where they are reduced."""
    return rows.shape if reduction == NONE else ()


# --- target -----------------------------------------------------------------------------------------------------------


def _target_sizes(next_q: Tensor, next_log_prob: Tensor | None, reward: Tensor) -> dict[str, int]:
    return {"n": (reward if next_log_prob is None else next_log_prob).numel(), "nets": next_q.shape[0]}


def _target_results(next_log_prob: Tensor | None, reward: Tensor) -> tuple[torch.Size]:
    return ((reward if next_log_prob is None else next_log_prob).shape,)


soft_td_target = declare(
    "soft_td_target(Tensor next_q, Tensor? next_log_prob, Tensor? alpha, Tensor reward, Tensor terminated,"
    " Tensor gamma, Tensor? steps, int combine=0) -> Tensor target",
    __name__,
    checks=[check_target],
    sizes=_target_sizes,
    results=_target_results,
    real="next_q",
)
"""``y = reward + gamma^steps * (min_k next_q[k] - alpha * next_log_prob)``, ``y = reward`` where terminated.

With ``combine`` AVERAGE the mean over k takes the place of the minimum, and is added up in the order of k.
Without ``next_log_prob`` and ``alpha`` (both None) the target has no entropy term: it is that of DQN and TD3. The shape
is that of ``next_log_prob``, or else of ``reward``. ``steps`` (any dtype; None: 1) is the number of steps that the
reward spans. A row is terminated where ``terminated`` is not zero; it is selected, not multiplied, so that a NaN in its
next value does no harm. ``alpha`` and ``gamma`` have one element and are read on the device. Not differentiable.
"""


# --- lambda return ----------------------------------------------------------------------------------------------------


def check_sequences(reward: Tensor, done: Tensor, mask: Tensor | None, lmbda: Tensor, length: int, inner: int) -> None:
    n = reward.numel()
    check_rows(n, done=done, mask=mask)
    check_rows(1, lmbda=lmbda)
    if length < 0 or inner < 0 or (n and (not length * inner or n % (length * inner))):
        raise ValueError(f"{n} rows are no whole number of sequences of length {length} with {inner} rows per step")


def _return_sizes(next_q: Tensor, reward: Tensor, length: int) -> dict[str, int]:
    n = reward.numel()
    return {"n": n, "nets": next_q.shape[0], "n_sequences": n // length if n else 0}


soft_lambda_return = declare(
    "soft_lambda_return(Tensor next_q, Tensor? next_log_prob, Tensor? alpha, Tensor reward, Tensor terminated,"
    " Tensor done, Tensor? mask, Tensor gamma, Tensor lmbda, Tensor? steps, int length, int inner, int combine=0)"
    " -> Tensor target",
    __name__,
    checks=[check_target, check_sequences],
    sizes=_return_sizes,
    results=_target_results,
    real="next_q",
)
"""The lambda returns G of sequences, by the recursion from their last rows to their first.

With the value of a row's next state ``V_t = min_k next_q[k, t] - alpha * next_log_prob[t]`` (or the mean over k, and
with or without the entropy term, as in :data:`soft_td_target`):

* ``G_t = reward_t`` where terminated;
* ``G_t = reward_t + gamma^steps * V_t`` where done and not terminated, in the last row, and before a masked row;
* ``G_t = reward_t + gamma^steps * ((1 - lmbda) V_t + lmbda G_{t+1})`` elsewhere.

``lmbda`` 0 is :data:`soft_td_target`; 1 is the sum of discounted rewards, and of the value at its end. The rows are
``[sequences, length, inner]``: ``inner`` is the number of rows of one step, such as agents. What a row does not use is
selected away, so that a NaN in it does no harm. ``gamma`` and ``lmbda`` have one element and are read on the device.
Not differentiable. A program goes through its sequences step by step: give it many sequences rather than one long one.

Reference: Sutton and Barto, "Reinforcement Learning: An Introduction", 2018, section 12.1.
"""


# --- ensemble loss ----------------------------------------------------------------------------------------------------


def check_loss(q: Tensor, target: Tensor, weight: Tensor | None, mask: Tensor | None) -> None:
    check_critics(q, target.numel())
    check_rows(target.numel(), weight=weight, mask=mask)


def _loss_sizes(q: Tensor, target: Tensor) -> dict[str, int]:
    return {"n": target.numel(), "nets": q.shape[0]}


td_loss = declare(
    "td_loss(Tensor q, Tensor target, Tensor? weight, Tensor? mask, int loss_function, int reduction)"
    " -> (Tensor loss, Tensor td_error, Tensor norm)",
    __name__,
    checks=[check_loss],
    sizes=_loss_sizes,
    results=lambda target, reduction: (loss_shape(target, reduction), target.shape, ()),
    real="q",
)
"""``(loss, td_error, norm)`` of an ensemble: ``l_i = sum_k distance(q[k, i] - target[i])``.

``distance`` is |d| (L1), d^2 (L2), or d^2/2 below 1 and |d| - 1/2 above (SMOOTH_L1, Huber's with delta 1).
``td_error`` is ``max_k |q[k, i] - target[i]|``, shaped as ``target``, neither weighted nor masked, NaN where a critic
is. ``norm`` is the factor of the reduction, 1 / sum(w) or 1, for the backward. Differentiable in ``q`` only, through
``loss``.
"""

td_loss_backward = declare(
    "td_loss_backward(Tensor grad, Tensor q, Tensor target, Tensor? weight, Tensor? mask, Tensor norm,"
    " int loss_function, int reduction) -> Tensor grad_q",
    __name__,
    sizes=_loss_sizes,
    real="q",
)
"""Gradient of :data:`td_loss` by ``q``: grad * norm * w_i * distance'(q[k, i] - target[i])."""

td_loss_direct = differentiable(td_loss, td_loss_backward)
