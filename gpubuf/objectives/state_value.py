"""What version 1 of soft actor-critic adds: a network of state values between the actor and the critics' target."""

from __future__ import annotations

import torch
from tensordict import TensorDictBase
from tensordict.nn import TensorDictParams
from torch import Tensor

from gpubuf.modules.fast_call import entry
from gpubuf.objectives.actor_critic import ActorCriticLossModule
from gpubuf.objectives.batch import HAS_TARGET, counting_rows
from gpubuf.objectives.networks import run_counting


class StateValueLossModule(ActorCriticLossModule):
    """The losses of critics and of a state value, where a loss has a network called ``value_network``.

    Reference: Haarnoja et al., "Soft Actor-Critic: Off-Policy Maximum Entropy Deep Reinforcement Learning with a
    Stochastic Actor", arXiv 1801.01290.
    """

    value_network_params: TensorDictParams | None

    def _state_value(self, tensordict: TensorDictBase, target: bool) -> Tensor:
        """``V(s)``, S, by the value network or its target."""
        network = self._networks["value_network"]
        module = network.target() if target else network.online()
        counts = counting_rows(tensordict, module.in_keys)
        found = run_counting(module, counts, lambda: module(tensordict.copy()))
        value: Tensor = entry(found, self.tensor_keys.value)
        return value.squeeze(-1) if value.ndim and value.shape[-1] == 1 else value

    @torch.no_grad()
    def _state_value_target(self, tensordict: TensorDictBase) -> Tensor:
        """Targets of the critics, S: what the value estimator makes of ``V(s')`` by the target value network."""
        value = self._state_value(self._next_state(tensordict), target=True)
        return self.td_target(value.unsqueeze(0), tensordict, value.shape)

    def _own_chunks(self, q: Tensor) -> Tensor:
        """Of ``q`` ``[N, B, ...]`` the values that the critics learn from, ``[1, B, ...]``: the k-th of N from the k-th
        chunk of the batch.

        Raises:
            RuntimeError: the batch does not divide.
        """
        n = self.num_qvalue_nets
        if q.ndim < 2 or q.shape[1] % n:
            raise RuntimeError(
                f"with a value network each critic learns from its own part of the batch: {n} critics need a batch "
                f"that {n} divides, got values of shape {list(q.shape)}"
            )
        chunks: Tensor = q.unflatten(1, (n, q.shape[1] // n))
        return chunks.diagonal(dim1=0, dim2=1).movedim(-1, 0).flatten(0, 1).unsqueeze(0)

    def _critic_loss_by_state_value(self, tensordict: TensorDictBase) -> tuple[Tensor, Tensor]:
        """(reduced loss of all critics, squared error of each row S)."""
        target = self._state_value_target(tensordict)
        q = self._checked(self._critics.online(tensordict, self.tensor_keys.state_action_value), target.shape)
        loss, td_error = self.td_loss(self._own_chunks(q), target, tensordict)
        return loss, td_error.square()

    def _state_value_loss(self, tensordict: TensorDictBase, alpha: Tensor) -> Tensor:
        """The reduced loss of the value network, whose target is ``min_k Qtarget_k(s, a~) - alpha log pi(a~|s)``."""
        value = self._state_value(tensordict, target=False)
        with torch.no_grad():
            state = tensordict.copy()
            action, log_prob = self._draw(self._networks["actor_network"].target(), state)
            self._act(state, action)
            q = self._checked(self._critics.target(state, self.tensor_keys.state_action_value), log_prob.shape)
            target = q.amin(0).reshape(log_prob.shape) - alpha * log_prob
        if value.shape != target.shape:
            raise ValueError(
                f"the {self.tensor_keys.value!r} of a state must be {[*target.shape, 1]} to go with log-densities of "
                f"shape {list(target.shape)}, got {list(value.shape)}"
            )
        # This target is of the present state: every row has one.
        loss, _ = self.td_loss(value.unsqueeze(0), target, tensordict.exclude(HAS_TARGET))
        return loss
