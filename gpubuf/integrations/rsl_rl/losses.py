"""The loss of FastTD3: TD3 with categorical critics."""

from __future__ import annotations

from typing import Any

import torch
from tensordict import TensorDictBase
from torch import Tensor

from gpubuf.kernels import categorical
from gpubuf.kernels._operations import direct
from gpubuf.modules.fast_call import output
from gpubuf.objectives import TD3Loss
from gpubuf.objectives.batch import REDUCTIONS, reduced
from gpubuf.objectives.networks import without_gradients

_categorical_target = direct(categorical.categorical_target)


class CategoricalTD3Loss(TD3Loss):
    """TD3 whose critics return logits of ``num_atoms`` values from v_min to v_max (Seo et al., arXiv 2505.22642).

    All critics learn from the distribution of the smallest target critic, by cross entropy; the actor from the smallest
    expected value. The program (FastTD3 229ed59) has no target of the actor, moves the targets of the critics in each
    update, and is the reference.

    Args:
        actor_network, qvalue_network: as for :class:`~gpubuf.objectives.TD3Loss`; the critics have ``num_atoms``
            outputs.
        v_min, v_max: the first and the last value.
        num_atoms: number of values, A.
        **options: those of :class:`~gpubuf.objectives.TD3Loss`.
    """

    loss_names = ("loss_actor", "loss_qvalue", "state_action_value_actor")
    delayed_targets = False

    def __init__(
        self, actor_network: Any, qvalue_network: Any, *, v_min: float, v_max: float, num_atoms: int, **options: Any
    ) -> None:
        categorical.check_support(v_min, v_max)
        super().__init__(actor_network, qvalue_network, **{"delay_actor": False, **options})
        self.v_min, self.v_max, self.num_atoms = v_min, v_max, num_atoms

    def _checked(self, q: Tensor, shape: torch.Size) -> Tensor:
        if q.shape[1:] != (*shape, self.num_atoms):
            raise ValueError(
                f"the critics must return logits [N, *{list(shape)}, {self.num_atoms}], got {list(q.shape)}"
            )
        return q

    def _value_loss(self, tensordict: TensorDictBase, seen: TensorDictBase) -> tuple[Tensor, dict[str, Tensor]]:
        support = self.v_min, self.v_max
        with without_gradients():
            next_q, shape = self._next_values(seen)
            reward, terminated, steps = self.bootstrap_rows(seen, shape)
            rows = next_q, None, None, reward, terminated, self._value_estimator.gamma, steps, None
            target = _categorical_target(*rows, *support, categorical.MIN)
        q = self._checked(self._critics.online(seen, self.tensor_keys.state_action_value), shape)
        weight, mask = self.row_weights(seen, shape, target=True)
        codes = categorical.DIVERGENCE, False, REDUCTIONS[self.reduction]
        loss, priority, _ = categorical.categorical_loss_direct(q, target, weight, mask, *support, *codes)
        self._set_priority(tensordict, seen, priority)
        return loss, {}

    def _actor_loss(self, tensordict: TensorDictBase) -> tuple[Tensor, Tensor]:
        state = tensordict.copy()
        action = self._actor.online.run(state, output, state, self.tensor_keys.action)
        state.set(self.tensor_keys.action, action)
        logits = self._checked(self._critics.detached(state, self.tensor_keys.state_action_value), action.shape[:-1])
        values: Any = categorical.expected_value_direct(logits, self.v_min, self.v_max)
        weight, mask = self.row_weights(tensordict, action.shape[:-1])
        return reduced(-values.amin(0), weight, mask, self.reduction), values.detach()
