"""The loss of randomized ensembled double Q-learning."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from tensordict import TensorDictBase
from tensordict.utils import NestedKey
from torch import Tensor

from gpubuf.objectives.options import CriticNetworks
from gpubuf.objectives.sac import SACOptions, SoftActorCritic


@dataclass(frozen=True)
class REDQOptions(SACOptions):
    """The keyword arguments of :class:`REDQLoss`.

    Raises:
        ValueError: an argument is out of range.
        NotImplementedError: ``gSDE=True``.
    """

    num_qvalue_nets: int = 10
    sub_sample_len: int | None = None
    min_alpha: float | None = 0.1
    max_alpha: float | None = 10.0
    delay_actor: bool = field(default=False, init=False)
    gSDE: bool = False  # noqa: N815

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.gSDE:
            raise NotImplementedError("the noise is that of the actor's distribution: leave gSDE out")
        if self.sub_sample_len is None:
            object.__setattr__(self, "sub_sample_len", min(2, self.num_qvalue_nets))
        elif not 1 <= self.sub_sample_len <= self.num_qvalue_nets:
            raise ValueError(
                f"sub_sample_len must be in [1, num_qvalue_nets], got {self.sub_sample_len} of {self.num_qvalue_nets} "
                "critics"
            )


class REDQLoss(SoftActorCritic):
    """Randomized ensembled double Q-learning: SAC with many critics (Chen et al., arXiv 2101.05982).

    The formulas are those of :class:`~gpubuf.objectives.SACLoss`, except that

    * a target takes the minimum over ``sub_sample_len`` of the N critics, drawn anew in each call, for the whole batch;
    * ``loss_qvalue`` is the mean over critics, not the sum;
    * ``loss_actor`` takes the mean of all critics: ``alpha log pi(a|s) - mean_k Q_k(s, a)``;
    * ``loss_alpha`` is ``-alpha (log pi(a|s) + target_entropy)``, on alpha.

    Besides the losses it returns, without gradient and of each row whatever the reduction: ``state_action_value_actor``
    (Q_k(s, a) of the actor's actions, ``[N, *S]``), ``action_log_prob_actor`` (their log-densities, S),
    ``next.state_value`` (what the target bootstraps from, S) and ``target_value`` (y, S).

    The values are TorchRL's, except that it squares ``"td_error"``, and that its entropy and ``loss_alpha`` mix in the
    actions of the next states; the actions of the present ones are those that the actor learns from.

    The subset is drawn on the device: in a captured graph each replay draws another. RLPD (Ball et al., arXiv
    2302.02948) and DroQ (Hiraoka et al., arXiv 2110.02034) are this loss with other networks: DroQ's critics have
    dropout and layer norm, and it takes ``num_qvalue_nets=2, sub_sample_len=2``.

    Args:
        actor_network: as in :class:`~gpubuf.objectives.SACLoss`, and so are all arguments that are not listed here.
        qvalue_network: as in :class:`~gpubuf.objectives.SACLoss`.
        num_qvalue_nets: number of critics, N.
        sub_sample_len: number of critics, M, whose minimum a target takes; default: 2, or the only one.
        min_alpha: least temperature.
        max_alpha: greatest temperature.
        gSDE: refused unless False: the noise is that of the actor's distribution.

    Raises:
        ValueError: ``sub_sample_len`` is not in [1, num_qvalue_nets], or another argument is out of range.
        NotImplementedError: ``gSDE=True``.
    """

    @dataclass
    class _AcceptedKeys(SoftActorCritic._AcceptedKeys):
        sample_log_prob: NestedKey = "sample_log_prob"

    _keys_of_actors = (*SoftActorCritic._keys_of_actors, ("sample_log_prob", "log_prob_keys"))
    Options = REDQOptions
    actor_value = "mean"
    temperature_loss = "alpha"
    further_names = ("state_action_value_actor", "action_log_prob_actor", "next.state_value", "target_value")

    def __init__(self, actor_network: Any, qvalue_network: CriticNetworks, **options: Any) -> None:
        super().__init__(actor_network, qvalue_network, **options)
        self._critics.expect_subsets(self.sub_sample_len)
        #: Outputs of the call in progress, by the names in :attr:`further_names`.
        self._row_outputs: dict[str, Tensor] = {}

    def _next_values(self, state: TensorDictBase, shape: torch.Size) -> Tensor:
        if self.sub_sample_len == self.num_qvalue_nets:
            return super()._next_values(state, shape)
        subset = torch.randperm(self.num_qvalue_nets, device=self.log_alpha.device).narrow(0, 0, self.sub_sample_len)
        return self._checked(self._critics.target_subset(state, self._tensor_keys.state_action_value, subset), shape)

    def _losses(self, tensordict: TensorDictBase, with_actor: bool = True) -> TensorDictBase:
        found = super()._losses(tensordict, with_actor)
        rows, self._row_outputs = self._row_outputs, {}
        if not with_actor:
            return found
        values = rows["state_action_value_actor"].reshape(self.num_qvalue_nets, *rows["target_value"].shape)
        # No batch size would fit values of all critics and rows alike.
        found.batch_size = torch.Size([])
        return found.update({name: rows[name] for name in self.further_names} | {"state_action_value_actor": values})

    def _critic_distance(
        self, q: Tensor, next_q: Tensor, next_log_prob: Tensor, alpha: Tensor, tensordict: TensorDictBase
    ) -> tuple[Tensor, Tensor]:
        shape = next_log_prob.shape
        target = self.td_target(next_q, tensordict, shape, next_log_prob, alpha)
        loss, td_error = self.td_loss(q, target, tensordict)
        value = next_q.reshape(len(next_q), *shape).amin(0) - alpha * next_log_prob
        self._row_outputs.update({"next.state_value": value, "target_value": target})
        return loss / self.num_qvalue_nets, td_error

    def _policy_values(self, state: TensorDictBase, tensordict: TensorDictBase) -> Tensor:
        q = super()._policy_values(state, tensordict)
        self._row_outputs["state_action_value_actor"] = q.detach()
        return q

    def _temperature_loss(self, tensordict: TensorDictBase, log_prob: Tensor) -> Tensor:
        self._row_outputs["action_log_prob_actor"] = log_prob
        return super()._temperature_loss(tensordict, log_prob)
