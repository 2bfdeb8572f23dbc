"""Categorical critics: projected targets, the cross entropy of an ensemble, and expected values.

The value of such a critic is a distribution over ``A`` *atoms*, numbers z_1 .. z_A evenly spaced from ``v_min`` to
``v_max``, a distance D apart. The critic returns logits, ``[N, *S, A]`` for N critics and rows of shape S; the mass of
an atom is their softmax.

Rows, weights, masks, reductions and the computing dtype are those of :mod:`gpubuf.kernels.td`. ``n`` is the number of
rows. Sums are added in a fixed order, without atomics: results repeat to the bit. Nothing synchronises with the host.

References: Bellemare, Dabney, Munos, "A Distributional Perspective on Reinforcement Learning", arXiv 1707.06887 (atoms
and projection); Seo et al., "Learning Sim-to-Real Humanoid Locomotion in 15 Minutes", arXiv 2512.01996 (a target for
each critic, with an entropy term); Palenicek et al., "XQC", arXiv 2509.25174 (one target, of the smallest critic).
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from gpubuf.kernels._differentiable import computing_dtype, direct, register_autograd
from gpubuf.kernels._registry import define
from gpubuf.kernels.td import check_rows, loss_shape

OWN, MIN, MIXTURE = range(3)
"""Which distribution of the next state a critic learns from: its own target's, that of the critic with the smallest
expected value in the row (the first of equals), or the mean of all of them."""

DIVERGENCE, VALUE_ERROR = range(2)
"""Priorities of a row: the divergence KL(target || critic), or the distance between the expected values. The largest of
all critics."""


def check_logits(logits: Tensor, n: int) -> tuple[int, int]:
    """``(N, A)``; ValueError unless ``logits`` are those of N critics for ``n`` rows, with two atoms or more."""
    nets, atoms = logits.shape[0] if logits.ndim > 1 else 0, logits.shape[-1] if logits.ndim > 1 else 0
    if not nets or atoms < 2 or logits.numel() != nets * n * atoms:
        raise ValueError(
            f"logits must be [N, *batch, atoms] with N > 0, {n} rows each and two atoms or more, got shape "
            f"{list(logits.shape)}"
        )
    return nets, atoms


def check_loss(
    logits: Tensor, target: Tensor, weight: Tensor | None, mask: Tensor | None, v_min: float, v_max: float
) -> tuple[int, int, int]:
    """``(n, N, A)``; ValueError unless the arguments of :data:`categorical_loss` fit each other."""
    n = logits.shape[1:-1].numel()
    nets, atoms = check_logits(logits, n)
    if target.ndim < 2 or target.shape[-1] != atoms or target.numel() not in (n * atoms, nets * n * atoms):
        raise ValueError(
            f"the target of logits of shape {list(logits.shape)} must have that shape, or 1 in place of {nets}, got "
            f"shape {list(target.shape)}"
        )
    check_rows(n, weight=weight, mask=mask)
    check_support(v_min, v_max)
    return n, nets, atoms


def check_support(v_min: float, v_max: float) -> None:
    """Raise ValueError unless ``v_min`` is below ``v_max`` and both are finite."""
    if not -float("inf") < v_min < v_max < float("inf"):
        raise ValueError(f"the support needs finite v_min < v_max, got {v_min} and {v_max}")


def check_categorical_target(
    next_logits: Tensor,
    next_log_prob: Tensor | None,
    alpha: Tensor | None,
    reward: Tensor,
    terminated: Tensor,
    gamma: Tensor,
    steps: Tensor | None,
    reward_scale: Tensor | None,
    v_min: float,
    v_max: float,
    target: int,
) -> tuple[int, int]:
    """``(N, A)``; ValueError unless the arguments of :data:`categorical_target` fit each other."""
    if (next_log_prob is None) != (alpha is None):
        raise ValueError("next_log_prob and alpha go together: give both, or neither")
    n = reward.numel()
    check_rows(n, next_log_prob=next_log_prob, terminated=terminated, steps=steps)
    check_rows(1, alpha=alpha, gamma=gamma, reward_scale=reward_scale)
    check_support(v_min, v_max)
    if target not in (OWN, MIN, MIXTURE):
        raise ValueError(f"target must be OWN, MIN or MIXTURE, got {target}")
    return check_logits(next_logits, n)


# --- target -----------------------------------------------------------------------------------------------------------


def _target_fake(next_logits: Tensor, *rest: Any) -> Tensor:
    nets = next_logits.shape[0] if rest[-1] == OWN else 1
    return next_logits.new_empty((nets, *next_logits.shape[1:]), dtype=computing_dtype(next_logits))


categorical_target = define(
    "categorical_target(Tensor next_logits, Tensor? next_log_prob, Tensor? alpha, Tensor reward, Tensor terminated,"
    " Tensor gamma, Tensor? steps, Tensor? reward_scale, float v_min, float v_max, int target) -> Tensor",
    cpu="gpubuf.kernels.categorical._cpu:categorical_target",
    cuda="gpubuf.kernels.categorical._launch:categorical_target",
    fake=_target_fake,
)
"""The mass m that critics learn, ``[N, *S, A]`` where each has its own target, else ``[1, *S, A]``.

Atom j moves to ``T z_j = clip(reward * reward_scale + gamma^steps (z_j - alpha * next_log_prob), v_min, v_max)``, and
to ``clip(reward * reward_scale, v_min, v_max)`` where terminated. Its mass p_j, a softmax of ``next_logits`` as OWN,
MIN or MIXTURE choose it, is shared among the two atoms around: ``m_k = sum_j p_j max(0, 1 - |T z_j - z_k| / D)``. Where
``T z_j`` falls on an atom, the whole mass goes there. Every row of m sums to one to 1e-6 in float32.

A row is terminated where ``terminated`` is not zero; it is selected, not multiplied: neither logits nor log-density of
its next state count. A row with NaN in it (its reward, a logit that counts, its log-density) has NaN in all its masses,
and in no other row's. ``alpha``, ``gamma`` and
``reward_scale`` (None: 1) have one element and are read on the device; ``steps`` as in
:data:`gpubuf.kernels.td.soft_td_target`. Without ``next_log_prob`` and ``alpha`` (both None) there is no entropy term.
Not differentiable.
"""


# --- loss -------------------------------------------------------------------------------------------------------------


def _loss_fake(
    logits: Tensor, target: Tensor, weight: Tensor | None, mask: Tensor | None, *rest: Any
) -> tuple[Tensor, Tensor, Tensor]:
    dtype, rows = computing_dtype(logits), logits.new_empty(logits.shape[1:-1], device="meta")
    return (
        logits.new_empty(loss_shape(rows, rest[-1]), dtype=dtype),
        logits.new_empty(rows.shape, dtype=dtype),
        logits.new_empty((), dtype=dtype),
    )


categorical_loss = define(
    "categorical_loss(Tensor logits, Tensor target, Tensor? weight, Tensor? mask, float v_min, float v_max,"
    " int priority, bool average, int reduction) -> (Tensor, Tensor, Tensor)",
    cpu="gpubuf.kernels.categorical._cpu_loss:categorical_loss",
    cuda="gpubuf.kernels.categorical._launch:categorical_loss",
    fake=_loss_fake,
)
"""``(loss, priority, norm)``: ``l_i = sum_k -sum_j target[k, i, j] log softmax(logits[k, i])_j``.

``target`` is ``[N, *S, A]``, or ``[1, *S, A]`` for all critics. With ``average`` the sum over critics is divided by N.
``priority``, of shape S, is the largest DIVERGENCE or VALUE_ERROR of the critics, neither weighted nor masked, NaN
where a critic or target is. ``norm`` is the factor of the reduction, for the backward. Differentiable in ``logits``
only, through ``loss``.

An atom without target mass adds nothing, even where its logit is -inf. The divergence is never negative, also where
rounding would make it so.
"""

categorical_loss_backward = define(
    "categorical_loss_backward(Tensor grad, Tensor logits, Tensor target, Tensor? weight, Tensor? mask, Tensor norm,"
    " bool average, int reduction) -> Tensor",
    cpu="gpubuf.kernels.categorical._cpu_loss:categorical_loss_backward",
    cuda="gpubuf.kernels.categorical._launch:categorical_loss_backward",
    fake=lambda grad, logits, *_: logits.new_empty(logits.shape),
)
"""Gradient of :data:`categorical_loss` by ``logits``: grad * norm * w_i * (softmax(logits[k, i]) - target[k, i]).

That is so because the target's mass sums to one; ``average`` divides by N.
"""


_loss_gradient = direct(categorical_loss_backward)


def _loss_setup(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    logits, target, weight, mask, _, _, _, ctx.average, ctx.reduction = inputs
    _, priority, norm = output
    ctx.save_for_backward(logits, target, weight, mask, norm)
    ctx.mark_non_differentiable(priority, norm)
    ctx.set_materialize_grads(False)


def _loss_backward(ctx: Any, grad: Tensor | None, *_: Any) -> tuple[Any, ...]:
    by_logits = None
    if grad is not None:
        by_logits = _loss_gradient(grad, *ctx.saved_tensors, ctx.average, ctx.reduction)
    return by_logits, None, None, None, None, None, None, None, None


categorical_loss_direct = register_autograd(categorical_loss, _loss_setup, _loss_backward)


# --- expected value ---------------------------------------------------------------------------------------------------


expected_value = define(
    "categorical_expected_value(Tensor logits, float v_min, float v_max) -> Tensor",
    cpu="gpubuf.kernels.categorical._cpu:expected_value",
    cuda="gpubuf.kernels.categorical._launch:expected_value",
    fake=lambda logits, *_: logits.new_empty(logits.shape[:-1], dtype=computing_dtype(logits)),
)
"""``sum_j softmax(logits)_j z_j``, ``[N, *S]``. Differentiable in ``logits``."""

expected_value_backward = define(
    "categorical_expected_value_backward(Tensor grad, Tensor logits, Tensor value, float v_min, float v_max) -> Tensor",
    cpu="gpubuf.kernels.categorical._cpu:expected_value_backward",
    cuda="gpubuf.kernels.categorical._launch:expected_value_backward",
    fake=lambda grad, logits, *_: logits.new_empty(logits.shape),
)
"""Gradient of :data:`expected_value`: grad[k, i] * softmax(logits[k, i])_j * (z_j - value[k, i])."""


_value_gradient = direct(expected_value_backward)


def _value_setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    logits, *ctx.support = inputs
    ctx.save_for_backward(logits, output)
    ctx.set_materialize_grads(False)


def _value_backward(ctx: Any, grad: Tensor | None) -> tuple[Any, ...]:
    by_logits = None if grad is None else _value_gradient(grad, *ctx.saved_tensors, *ctx.support)
    return by_logits, None, None


expected_value_direct = register_autograd(expected_value, _value_setup, _value_backward)
