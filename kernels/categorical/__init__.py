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

from torch import Tensor

from gpubuf.kernels._operations import declare, differentiable
from gpubuf.kernels.td import NONE, check_rows

OWN, MIN, MIXTURE = range(3)
"""Which distribution of the next state a critic learns from: its own target's, that of the critic with the smallest
expected value in the row (the first of equals), or the mean of all of them."""

DIVERGENCE, VALUE_ERROR = range(2)
"""Priorities of a row: the divergence KL(target || critic), or the distance between the expected values. The largest of
all critics."""


def _check_logits(logits: Tensor, n: int) -> None:
    """ValueError unless ``logits`` are those of N critics for ``n`` rows, with two atoms or more."""
    nets, atoms = logits.shape[0] if logits.ndim > 1 else 0, logits.shape[-1] if logits.ndim > 1 else 0
    if not nets or atoms < 2 or logits.numel() != nets * n * atoms:
        raise ValueError(
            f"logits must be [N, *batch, atoms] with N > 0, {n} rows each and two atoms or more, got shape "
            f"{list(logits.shape)}"
        )


def _check_loss(logits: Tensor, target: Tensor, weight: Tensor | None, mask: Tensor | None) -> None:
    n = logits.shape[1:-1].numel()
    _check_logits(logits, n)
    nets, atoms = logits.shape[0], logits.shape[-1]
    if target.ndim < 2 or target.shape[-1] != atoms or target.numel() not in (n * atoms, nets * n * atoms):
        raise ValueError(
            f"the target of logits of shape {list(logits.shape)} must have that shape, or 1 in place of {nets}, got "
            f"shape {list(target.shape)}"
        )
    check_rows(n, weight=weight, mask=mask)


def check_support(v_min: float, v_max: float) -> None:
    """Raise ValueError unless ``v_min`` is below ``v_max`` and both are finite."""
    if not -float("inf") < v_min < v_max < float("inf"):
        raise ValueError(f"the support needs finite v_min < v_max, got {v_min} and {v_max}")


def _check_target(
    next_logits: Tensor, next_log_prob: Tensor | None, alpha: Tensor | None, reward: Tensor, terminated: Tensor,
    gamma: Tensor, steps: Tensor | None, reward_scale: Tensor | None, target: int,
) -> None:  # fmt: skip
    if (next_log_prob is None) != (alpha is None):
        raise ValueError("next_log_prob and alpha go together: give both, or neither")
    n = reward.numel()
    check_rows(n, next_log_prob=next_log_prob, terminated=terminated, steps=steps)
    check_rows(1, alpha=alpha, gamma=gamma, reward_scale=reward_scale)
    if target not in (OWN, MIN, MIXTURE):
        raise ValueError(f"target must be OWN, MIN or MIXTURE, got {target}")
    _check_logits(next_logits, n)


# --- target -----------------------------------------------------------------------------------------------------------


def _target_sizes(next_logits: Tensor, reward: Tensor, target: int) -> dict[str, int]:
    nets = next_logits.shape[0]
    return {"n": reward.numel(), "nets": nets, "atoms": next_logits.shape[-1], "targets": nets if target == OWN else 1}


categorical_target = declare(
    "categorical_target(Tensor next_logits, Tensor? next_log_prob, Tensor? alpha, Tensor reward, Tensor terminated,"
    " Tensor gamma, Tensor? steps, Tensor? reward_scale, float v_min, float v_max, int target) -> Tensor target",
    __name__,
    checks=[_check_target, check_support],
    sizes=_target_sizes,
    results=lambda next_logits, target: ((next_logits.shape[0] if target == OWN else 1, *next_logits.shape[1:]),),
    real="next_logits",
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


def _loss_sizes(logits: Tensor, target: Tensor) -> dict[str, int]:
    n, nets, atoms = logits.shape[1:-1].numel(), logits.shape[0], logits.shape[-1]
    return {"n": n, "nets": nets, "atoms": atoms, "shared": target.numel() == n * atoms}


categorical_loss = declare(
    "categorical_loss(Tensor logits, Tensor target, Tensor? weight, Tensor? mask, float v_min, float v_max,"
    " int priority, bool average, int reduction) -> (Tensor loss, Tensor priority, Tensor norm)",
    __name__,
    checks=[_check_loss, check_support],
    sizes=_loss_sizes,
    results=lambda logits, reduction: (logits.shape[1:-1] if reduction == NONE else (), logits.shape[1:-1], ()),
    real="logits",
)
"""``(loss, priority, norm)``: ``l_i = sum_k -sum_j target[k, i, j] log softmax(logits[k, i])_j``.

``target`` is ``[N, *S, A]``, or ``[1, *S, A]`` for all critics. With ``average`` the sum over critics is divided by N.
``priority``, of shape S, is the largest DIVERGENCE or VALUE_ERROR of the critics, neither weighted nor masked, NaN
where a critic or target is. ``norm`` is the factor of the reduction, for the backward. Differentiable in ``logits``
only, through ``loss``.

An atom without target mass adds nothing, even where its logit is -inf. The divergence is never negative, also where
rounding would make it so.
"""

categorical_loss_backward = declare(
    "categorical_loss_backward(Tensor grad, Tensor logits, Tensor target, Tensor? weight, Tensor? mask, Tensor norm,"
    " bool average, int reduction) -> Tensor grad_logits",
    __name__,
    sizes=_loss_sizes,
    real="logits",
)
"""Gradient of :data:`categorical_loss` by ``logits``: grad * norm * w_i * (softmax(logits[k, i]) - target[k, i]).

That is so because the target's mass sums to one; ``average`` divides by N.
"""

categorical_loss_direct = differentiable(categorical_loss, categorical_loss_backward)


# --- expected value ---------------------------------------------------------------------------------------------------


def _check_values(logits: Tensor) -> None:
    _check_logits(logits, logits.shape[1:-1].numel())


def _value_sizes(logits: Tensor) -> dict[str, int]:
    return {"n": logits.shape[:-1].numel(), "atoms": logits.shape[-1]}


expected_value = declare(
    "categorical_expected_value(Tensor logits, float v_min, float v_max) -> Tensor value",
    __name__,
    checks=[_check_values, check_support],
    sizes=_value_sizes,
    results=lambda logits: (logits.shape[:-1],),
    real="logits",
)
"""``sum_j softmax(logits)_j z_j``, ``[N, *S]``. Differentiable in ``logits``."""

expected_value_backward = declare(
    "categorical_expected_value_backward(Tensor grad, Tensor logits, Tensor value, float v_min, float v_max)"
    " -> Tensor grad_logits",
    __name__,
    sizes=_value_sizes,
    real="logits",
)
"""Gradient of :data:`expected_value`: grad[k, i] * softmax(logits[k, i])_j * (z_j - value[k, i])."""

expected_value_direct = differentiable(expected_value, expected_value_backward)
