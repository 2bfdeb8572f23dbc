"""The loss of soft actor-critic with categorical critics: FastSAC, FlashSAC, XQC."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, Self

import torch
from tensordict import TensorDictBase
from torch import Tensor

from gpubuf.kernels import categorical
from gpubuf.kernels._operations import direct
from gpubuf.modules.fast_call import entry
from gpubuf.objectives.batch import REDUCTIONS, one_of, reduced
from gpubuf.objectives.sac import SACOptions, SoftActorCritic
from gpubuf.objectives.values import ValueEstimators

_categorical_target = direct(categorical.categorical_target)

TARGETS = {"own": categorical.OWN, "min": categorical.MIN, "mixture": categorical.MIXTURE}
PRIORITIES = {"divergence": categorical.DIVERGENCE, "value_error": categorical.VALUE_ERROR}


@dataclass(frozen=True, kw_only=True)
class DistributionalOptions(SACOptions):
    """The keyword arguments of :class:`DistributionalSACLoss`.

    Raises:
        ValueError: an argument is out of range or none of its choices.
    """

    CONSUMED = SACOptions.CONSUMED | {"reward_scale"}

    v_min: float
    v_max: float
    num_atoms: int
    target: str = "min"
    actor_value: str = "min"
    target_sigma: float | None = None
    temperature_from: str = "current"
    temperature_loss: str = "log_alpha"
    priority: str = "divergence"
    average_critics: bool = False
    reward_scale: float = 1.0
    cloning_weight: float = 0.0
    joint_batch: bool | str = False
    loss_function: str = field(default="smooth_l1", init=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        categorical.check_support(self.v_min, self.v_max)
        if self.num_atoms < 2:
            raise ValueError(f"num_atoms must be at least 2, got {self.num_atoms}")
        if self.target_sigma is not None and (self.target_entropy != "auto" or not 0 < self.target_sigma < math.inf):
            raise ValueError(
                "target_sigma must be positive and finite, and goes with target_entropy='auto', got "
                f"{self.target_sigma} and {self.target_entropy!r}"
            )
        if not math.isfinite(self.reward_scale):
            raise ValueError(f"reward_scale must be finite, got {self.reward_scale}")
        if not 0 <= self.cloning_weight < math.inf:
            raise ValueError(f"cloning_weight must be finite and not negative, got {self.cloning_weight}")
        one_of(TARGETS, self.target, "target")
        one_of(PRIORITIES, self.priority, "priority")
        one_of(("mean", "min"), self.actor_value, "actor_value")
        one_of(("current", "next"), self.temperature_from, "temperature_from")
        one_of(("log_alpha", "alpha"), self.temperature_loss, "temperature_loss")
        one_of((False, "critics", "all"), self.joint_batch, "joint_batch")


class DistributionalSACLoss(SoftActorCritic):
    """Soft actor-critic whose critics return distributions: logits of ``num_atoms`` values from v_min to v_max.

    With S the batch shape, N critics, z_1 .. z_A the atoms, a distance D apart, p the softmax of the target critics'
    logits and m their projection:

    * ``loss_qvalue``: ``sum_k -sum_j m_kj log softmax(logits_k(s, a))_j``, the cross entropy (Bellemare et al., arXiv
      1707.06887), where ``m_kj = sum_i p_ki max(0, 1 - |T z_i - z_j| / D)`` and
      ``T z = clip(c r + gamma^steps (1 - terminated) (z - alpha log pi(a'|s')), v_min, v_max)``;
    * ``loss_actor``: ``alpha log pi(a|s) - E_k``, of the mean or the minimum over k of ``E_k = sum_j z_j softmax_kj``;
    * ``loss_alpha``: ``-log_alpha (log pi + target_entropy)``, or ``-alpha (...)``.

    Call, keys, outputs, weights, masks and reductions are those of :class:`~gpubuf.objectives.SACLoss`. The critics'
    entry ``"state_action_value"`` holds logits, ``[N, *S, A]``. The priority of a row is written into the batch. All
    sums have a fixed order: results repeat to the bit, which they do not where a GPU adds by scattering.

    :meth:`fastsac` and :meth:`flashsac` make the losses of these two programs.

    Args:
        actor_network: as in :class:`~gpubuf.objectives.SACLoss`, and so are all arguments that are not listed here.
        qvalue_network: as in :class:`~gpubuf.objectives.SACLoss`, with ``num_atoms`` outputs.
        v_min: value of the first atom.
        v_max: value of the last atom.
        num_atoms: number of atoms, A.
        target: the distribution of the next state that a critic learns from: "own", that of its own target; "min", for
            all critics that of the smallest expected value in the row; "mixture", the mean of all.
        actor_value: "mean" or "min" over the critics' expected values in ``loss_actor``.
        target_entropy: a number, or "auto": minus the number of action components, or see ``target_sigma``.
        target_sigma: with "auto", the entropy of a normal distribution of this standard deviation in each of d action
            components instead: ``d / 2 * log(2 pi e sigma^2)``.
        temperature_from: whose log-densities ``loss_alpha`` learns from: those of the "current" state's actions, or the
            "next" state's.
        temperature_loss: what multiplies them, "log_alpha" or "alpha".
        priority: "divergence", the largest KL(target || critic) of the critics, or "value_error", the largest distance
            between their expected values.
        average_critics: divide the sum over critics by N.
        reward_scale: factor c of the rewards. Assign a number to change it, also within a captured graph.
        cloning_weight: with w > 0, the actor is kept near the actions of the batch: each row of ``loss_actor`` has
            ``w mean(|E|) mean_j (a_j - batch action_j)^2`` on top, without gradient through the mean of ``|E|``, the
            mean or minimum of the critics, over the rows that count (arXiv 2306.02451).
        joint_batch: False; "critics": the rows (s, a) and (s', a') pass the critics and their targets as one batch, so
            that batch norms see both; "all": the actor too sees s and s' in its own loss, and learns from s. Either
            way, batch norms use the statistics of the batch in the networks that learn and in the target critics, and
            running ones elsewhere: in the critics of the actor's loss, and in the actor of next actions.

    Attributes:
        reward_scale: the factor of the rewards, ``[]``, read on the device.

    Raises:
        ValueError: an argument is out of range or none of its choices. When called: the critics do not return
            ``[N, *S, num_atoms]``.
    """

    Options = DistributionalOptions
    reward_scale: Tensor
    _schedulable_buffers = SoftActorCritic._schedulable_buffers | {"reward_scale"}
    SUPPORTED_VALUE_ESTIMATORS = (ValueEstimators.TD0,)

    def _set_temperature(self, options: Any) -> None:
        super()._set_temperature(options)
        self.register_buffer("reward_scale", torch.full_like(self.alpha_init, options.reward_scale))

    @classmethod
    def fastsac(cls, actor_network: Any, qvalue_network: Any, **kwargs: Any) -> Self:
        """The loss of FastSAC (Seo et al., arXiv 2512.01996; holosoma fc600e7, ``agents/fast_sac``).

        Each critic learns from its own target, the actor from the mean of the critics, the temperature from the next
        actions. 101 atoms on -20..20, target entropy 0, first temperature 0.001, discount 0.97. The program updates the
        targets with ``SoftUpdate(loss, tau=0.125)``, and the actor once in four updates of the critics.

        Args:
            actor_network: the policy.
            qvalue_network: the critics.
            **kwargs: arguments of :class:`DistributionalSACLoss`, which take precedence.
        """
        settings: dict[str, Any] = {
            "v_min": -20.0,
            "v_max": 20.0,
            "num_atoms": 101,
            "target": "own",
            "actor_value": "mean",
            "target_entropy": 0.0 if kwargs.get("target_sigma") is None else "auto",
            "alpha_init": 0.001,
            "temperature_from": "next",
            "temperature_loss": "alpha",
        }
        return cls(actor_network, qvalue_network, **{**settings, **kwargs}).make_value_estimator(gamma=0.97)

    @classmethod
    def flashsac(cls, actor_network: Any, qvalue_network: Any, **kwargs: Any) -> Self:
        """The loss of FlashSAC (its program at 87edc90, ``agents/flashSAC/update.py``).

        All critics learn from the target of the smallest one and are averaged, the actor learns from the minimum, the
        entropy is that of sigma 0.15, the first temperature 0.01. 101 atoms on -5..5; present and next rows pass actor
        and critics as one batch.
        The program scales rewards into that range by the spread of the returns: set ``reward_scale``. It updates the
        targets with ``SoftUpdate(loss, tau=0.01)``, and the actor every other time.

        Args:
            actor_network: the policy.
            qvalue_network: the critics.
            **kwargs: arguments of :class:`DistributionalSACLoss`, which take precedence.
        """
        settings: dict[str, Any] = {
            "v_min": -5.0,
            "v_max": 5.0,
            "num_atoms": 101,
            "target": "min",
            "actor_value": "min",
            "alpha_init": 0.01,
            "average_critics": True,
            "temperature_loss": "alpha",
            "joint_batch": "all",
        }
        if "target_entropy" not in kwargs:
            settings["target_sigma"] = 0.15
        return cls(actor_network, qvalue_network, **{**settings, **kwargs})

    def _automatic_entropy(self, components: int) -> float:
        if self.target_sigma is None:
            return super()._automatic_entropy(components)
        return 0.5 * components * math.log(2 * math.pi * math.e * self.target_sigma**2)

    def _checked(self, q: Tensor, shape: torch.Size) -> Tensor:
        if q.shape[1:] != (*shape, self.num_atoms):
            raise ValueError(
                f"the critics' {self.tensor_keys.state_action_value!r} must be logits "
                f"{[q.shape[0], *shape, self.num_atoms]} to go with log-densities of shape {list(shape)}, got "
                f"{list(q.shape)}"
            )
        return q

    def _critic_distance(
        self, q: Tensor, next_q: Tensor, next_log_prob: Tensor, alpha: Tensor, tensordict: TensorDictBase
    ) -> tuple[Tensor, Tensor]:
        shape, support = next_log_prob.shape, (self.v_min, self.v_max)
        reward, terminated, steps = self.bootstrap_rows(tensordict, shape)
        soft = next_q, next_log_prob, alpha, reward, terminated, self._value_estimator.gamma, steps
        target = _categorical_target(*soft, self.reward_scale, *support, TARGETS[self.target])
        weight, mask = self.row_weights(tensordict, shape, target=True)
        codes = PRIORITIES[self.priority], self.average_critics, REDUCTIONS[self.reduction]
        loss, priority, _ = categorical.categorical_loss_direct(q, target, weight, mask, *support, *codes)
        return loss, priority

    def _policy_values(self, state: TensorDictBase, tensordict: TensorDictBase) -> Tensor:
        logits = super()._policy_values(state, tensordict)
        logits = self._checked(logits, logits.shape[1:-1])
        values: Tensor = categorical.expected_value_direct(logits, self.v_min, self.v_max)
        if not self.cloning_weight:
            return values
        key = self.tensor_keys.action
        apart = entry(state, key) - entry(tensordict, key)
        cost = apart.square().flatten(values.ndim - 1).mean(-1)
        constant = values.detach()
        sizes = (constant.mean(0) if self.actor_value == "mean" else constant.amin(0)).abs()
        _, mask = self.row_weights(tensordict, sizes.shape)
        size = reduced(sizes, None, mask, "mean")
        # The same amount for every critic moves their minimum, and their mean, by that amount.
        near: Tensor = values - self.cloning_weight * size * cost
        return near
