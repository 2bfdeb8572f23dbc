"""The loss of soft actor-critic."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from tensordict import TensorDictBase
from tensordict.nn import InteractionType, TensorDictModule, set_interaction_type
from tensordict.utils import NestedKey
from torch import Tensor

from gpubuf.kernels import sac, td
from gpubuf.kernels._differentiable import direct
from gpubuf.objectives.actor_critic import ActorCriticLossModule
from gpubuf.objectives.batch import REDUCTIONS
from gpubuf.objectives.state_value import StateValueLossModule
from gpubuf.objectives.temperature import TemperatureLossModule

_temperature_loss = direct(sac.temperature_loss)


class SACLoss(TemperatureLossModule, StateValueLossModule):
    """Soft actor-critic (Haarnoja et al., arXiv 1812.05905; with a value network arXiv 1801.01290).

    With S the batch shape of the log-density of the actions (agents included), N critics and ``terminated``, not
    ``done``, to stop bootstrapping:

    * ``loss_qvalue``: sum over critics of ``loss_function`` between Q(s, a) and
      ``y = r + gamma^steps (1 - terminated) (min_k Qtarget_k(s', a') - alpha log pi(a'|s'))``;
    * ``loss_actor``: ``alpha log pi(a|s) - min_k Q_k(s, a)``, with gradients to the actor only;
    * ``loss_alpha``: ``-log_alpha (log pi(a|s) + target_entropy)``, on log_alpha, as in TorchRL.

    That is version 2. With a ``value_network``, version 1, the target is
    ``y = r + gamma^steps (1 - terminated) Vtarget(s')``, and a fourth loss trains the value network:

    * ``loss_value``: ``loss_function`` between V(s) and ``min_k Qtarget_k(s, a) - alpha log pi(a|s)``, for actions that
      the actor (its target, if delayed) draws. No gradient reaches the actor or the critics.
    * ``loss_qvalue``: as TorchRL has it, the batch is cut into N chunks along its first dimension, and critic k learns
      from the k-th alone: ``loss_function`` between Q_k(s, a) and y. N must divide the batch. The priority of a row is
      the squared error of its critic. (Every critic runs on the whole batch, so that any kind of critic will do.)

    :meth:`make_value_estimator` chooses TD1 or TDLambda in place of the one-step target. The batch must then be made of
    sequences, ``[B, T]``: time is its dimension named "time", or its last one. See
    :class:`~gpubuf.objectives.values.TDLambdaEstimator` for the formula.

    Call it with a TensorDict: it returns a TensorDict of ``loss_actor``, ``loss_qvalue``, ``loss_alpha``, ``alpha`` and
    ``entropy``, all ``[]``, and writes ``"td_error"``, ``max_k |Q_k - y|`` of shape S, into its input, the priority of
    each row. Or call it with keyword arguments named after ``in_keys`` (nested keys joined by ``_``): it returns a
    tuple in the order of ``out_keys``. Nothing synchronises with the host. The losses share no graph: one backward of
    their sum gives the gradients of separate ones.

    Where the batch has ``"priority_weight"``, every loss is ``sum(w l) / sum(w)`` (Schaul et al., 2016, but normalised
    over the batch); where it has ``("collector", "mask")`` or ``"shifted_valid"``, rows marked false are left out,
    also of the entropy, and may hold NaN. Reward, done flags, weights and masks may have fewer or more dimensions than
    S: dimensions are added on the right, and trailing ones of size 1 dropped. ``"steps_to_next_obs"`` gives the number
    of steps that a reward spans.

    Args:
        actor_network: the policy, with a method ``get_dist(tensordict)``. A distribution that offers
            ``rsample_and_log_prob()``, as :class:`~gpubuf.modules.TanhNormal` does, is asked for both at once; of any
            other, ``rsample()`` and ``log_prob()`` are called. The actions may be a TensorDict of several parts, those
            of a ``tensordict.nn.CompositeDistribution``.
        qvalue_network: one network, which is copied ``num_qvalue_nets`` times and drawn anew; a list of networks; or a
            natively batched ensemble such as :func:`~gpubuf.modules.make_sac_critic` builds, whose values are
            ``[num_qvalue_nets, *S, 1]`` and which runs as it is.
        value_network: a network of state values, ``[*S, 1]`` at the key ``value``. With it the loss is version 1.
        num_qvalue_nets: number of critics, N.
        loss_function: "smooth_l1", "l2", "l1" or "huber" (the same as "smooth_l1").
        alpha_init: first temperature.
        min_alpha: bounds of the temperature, applied at each call.
        max_alpha: see ``min_alpha``.
        action_spec: anything with a ``shape``, for ``target_entropy="auto"``: a Gymnasium space, a TorchRL spec, or a
            composite one that holds the action at its key.
        fixed_alpha: keep the temperature as a buffer instead of a parameter.
        target_entropy: a number, or "auto": minus the number of action components, without batch and agent dimensions,
            of all parts of a composite action. Taken from ``action_spec`` if given, otherwise from the first batch.
        delay_actor: draw the next actions from target parameters of the actor.
        delay_qvalue: evaluate the next values with target parameters of the critics.
        delay_value: evaluate the next states with target parameters of the value network.
        gamma: refused; see :meth:`make_value_estimator`.
        priority_key: refused; see :meth:`set_keys`.
        separate_losses: parameters that critics and actor share get gradients from the actor's loss only. Those that
            critics share with the value network get theirs from its loss only.
        reduction: "mean" (default), "sum", or "none" for losses of shape S, weighted, 0 where masked.
        skip_done_states: keep the next states of ended rows from the networks. A terminated row has its own state
            there, whatever the next one holds, NaN included. A truncated one bootstraps from its real next state; where
            that is not finite, the row has no target: the critics' loss leaves it out as if it were masked, and it
            gives no priority (0, and False at ``"td_error_mask"``, by which buffers leave the old one). A row is what
            one done flag stands for.
        deactivate_vmap: run several critics one after the other.
        use_prioritized_weights: False, True (a batch without weights is an error), or "auto".
        scalar_output_mode: whether ``alpha`` and ``entropy`` are returned with ``reduction="none"``: "exclude" (also
            for None, with a warning) or "non_tensor".

    Attributes:
        actor_network_params: parameters of the actor, the very ones of ``actor_network``.
        qvalue_network_params: parameters of the critics; stacked ``[N, ...]`` unless the ensemble is natively batched.
        target_qvalue_network_params: their targets, as buffers; updated by :class:`~gpubuf.objectives.SoftUpdate`.
        value_network_params: parameters of the value network, or None; and so ``target_value_network_params``.
        log_alpha: logarithm of the temperature, ``[]``.

    Raises:
        TypeError: ``gamma`` is given.
        RuntimeError: ``priority_key`` is given.
        ValueError: an argument is out of range, or the critics are not ``num_qvalue_nets``.
    """

    @dataclass
    class _AcceptedKeys(ActorCriticLossModule._AcceptedKeys):
        value: NestedKey = "state_value"

    default_keys = _AcceptedKeys
    loss_names = ("loss_actor", "loss_qvalue", "loss_alpha")
    scalar_names = ("alpha", "entropy")

    #: How the actor's objective combines the critics: "min" or "mean".
    actor_value = "min"
    #: Whose log-densities the temperature learns from: the "current" actions' or the "next" ones'.
    temperature_from = "current"
    #: The factor of ``log pi + target_entropy`` in the temperature's loss: "log_alpha" or "alpha".
    temperature_loss = "log_alpha"

    def __init__(
        self,
        actor_network: Any,
        qvalue_network: TensorDictModule | Sequence[TensorDictModule],
        value_network: Any = None,
        *,
        num_qvalue_nets: int = 2,
        loss_function: str = "smooth_l1",
        alpha_init: float = 1.0,
        min_alpha: float | None = None,
        max_alpha: float | None = None,
        action_spec: Any = None,
        fixed_alpha: bool = False,
        target_entropy: str | float = "auto",
        delay_actor: bool = False,
        delay_qvalue: bool = True,
        delay_value: bool = True,
        gamma: float | None = None,
        priority_key: str | None = None,
        separate_losses: bool = False,
        reduction: str | None = None,
        skip_done_states: bool = False,
        deactivate_vmap: bool = False,
        use_prioritized_weights: str | bool = "auto",
        scalar_output_mode: str | None = None,
    ) -> None:
        super().__init__(
            actor_network,
            qvalue_network,
            num_qvalue_nets=num_qvalue_nets,
            delay_actor=delay_actor,
            delay_qvalue=delay_qvalue,
            separate_losses=separate_losses,
            skip_done_states=skip_done_states,
            deactivate_vmap=deactivate_vmap,
            loss_function=loss_function,
            reduction=reduction,
            use_prioritized_weights=use_prioritized_weights,
            scalar_output_mode=scalar_output_mode,
            gamma=gamma,
            priority_key=priority_key,
            further={} if value_network is None else {"value_network": (value_network, delay_value)},
        )
        self.delay_value = delay_value
        if value_network is None:
            self.value_network_params = self.target_value_network_params = None
        else:
            self.further_loss_names = ("loss_value",)
        first = next((p for p in self.actor_network_params.parameters()), None)
        self._set_temperature(first, alpha_init, min_alpha, max_alpha, fixed_alpha)
        if action_spec is None:
            action_spec = getattr(actor_network, "spec", None)
        self._set_target_entropy(target_entropy, action_spec, self.tensor_keys.action)
        self.make_value_estimator()

    def set_keys(self, **kwargs: NestedKey | None) -> None:
        """Set where the loss reads and writes; None restores the default of that key.

        The keys are action, value, state_action_value, reward, done, terminated, priority and priority_weight;
        log_prob is accepted, as TorchRL's, and not used.

        Raises:
            ValueError: there is no such key.
        """
        super().set_keys(**kwargs)

    def _losses(self, tensordict: TensorDictBase) -> TensorDictBase:
        alpha = self.alpha
        seen = self._seen(tensordict)
        with set_interaction_type(InteractionType.RANDOM):
            losses, priority, next_log_prob = self._value_losses(seen, alpha)
            loss_actor, log_prob, entropy = self._actor_loss(seen, alpha)
        # Detached: the backward of the temperature must not run through the actor's graph, and free it.
        learnt_from = log_prob.detach() if self.temperature_from == "current" else next_log_prob
        assert learnt_from is not None
        losses = {"loss_actor": loss_actor, **losses, "loss_alpha": self._temperature_loss(seen, learnt_from)}
        self._set_priority(tensordict, seen, priority)
        return self._output(tensordict, losses, {"alpha": alpha, "entropy": entropy})

    def critic_losses(self, tensordict: TensorDictBase) -> TensorDictBase:
        """The losses of an update that leaves the actor as it is: ``loss_qvalue``, and ``alpha``.

        And ``loss_alpha``, if the temperature learns from the next actions. For an actor that learns more rarely than
        its critics: what they need of it is computed, and nothing else. Writes the priority entry into ``tensordict``,
        as :meth:`forward` does, with the same numbers for the same noise.
        """
        given = self._parameters_by_name.replaced()
        with contextlib.nullcontext() if given is None else self._using(given):
            alpha = self.alpha
            seen = self._seen(tensordict)
            with set_interaction_type(InteractionType.RANDOM):
                losses, priority, next_log_prob = self._value_losses(seen, alpha)
            if self.temperature_from == "next":
                assert next_log_prob is not None
                self._learn_target_entropy(tensordict.get(self.tensor_keys.action), next_log_prob.shape)
                losses["loss_alpha"] = self._temperature_loss(seen, next_log_prob)
            self._set_priority(tensordict, seen, priority)
            found = self._output(tensordict, losses, {"alpha": alpha})
            self._look_for_nan(tensordict, found)
            return found

    # The parts of `forward`, as TorchRL names them. Programs that update the actor more rarely call them instead.

    def qvalue_loss(self, tensordict: TensorDictBase) -> tuple[Tensor, dict[str, Tensor]]:
        """(``loss_qvalue``, ``{"td_error": priorities S}``), which it also writes into ``tensordict``."""
        seen = self._seen(tensordict)
        with set_interaction_type(InteractionType.RANDOM):
            loss, priority, _ = self._critic_loss(seen, self.alpha)
        return loss, {"td_error": self._set_priority(tensordict, seen, priority)}

    # TorchRL's name it by the version of SAC; the networks decide.
    qvalue_v1_loss = qvalue_v2_loss = qvalue_loss

    def actor_loss(self, tensordict: TensorDictBase) -> tuple[Tensor, dict[str, Tensor]]:
        """(``loss_actor``, ``{"log_prob": log-densities S of the actions drawn}``, without gradient)."""
        with set_interaction_type(InteractionType.RANDOM):
            loss, log_prob, _ = self._actor_loss(self._seen(tensordict), self.alpha)
        return loss, {"log_prob": log_prob.detach()}

    def value_loss(self, tensordict: TensorDictBase) -> tuple[Tensor, dict[str, Tensor]]:
        """(``loss_value``, ``{}``).

        Raises:
            RuntimeError: the loss has no value network.
        """
        if self.value_network_params is None:
            raise RuntimeError("value_loss needs a value_network, and this loss has none")
        with set_interaction_type(InteractionType.RANDOM):
            return self._state_value_loss(self._seen(tensordict), self.alpha), {}

    def _value_losses(
        self, tensordict: TensorDictBase, alpha: Tensor
    ) -> tuple[dict[str, Tensor], Tensor, Tensor | None]:
        """(losses of critics and value network, priorities S, log-densities S of the next actions where drawn)."""
        loss, priority, next_log_prob = self._critic_loss(tensordict, alpha)
        losses = {"loss_qvalue": loss}
        if self.value_network_params is not None:
            losses["loss_value"] = self._state_value_loss(tensordict, alpha)
        return losses, priority, next_log_prob

    def _next_values(self, state: TensorDictBase, shape: torch.Size) -> Tensor:
        """Values ``[N, *S]`` of the next states and actions by the target critics. The target takes their minimum."""
        return self._checked(self._critics.target(state, self.tensor_keys.state_action_value), shape)

    @torch.no_grad()
    def _target(self, tensordict: TensorDictBase, alpha: Tensor) -> tuple[Tensor, Tensor]:
        """(targets of the critics, log-densities of the next actions), both S. No gradient."""
        state, log_prob = self._next_action(tensordict)
        next_q = self._next_values(state, log_prob.shape)
        return self.td_target(next_q, tensordict, log_prob.shape, log_prob, alpha), log_prob

    def _critic_loss(self, tensordict: TensorDictBase, alpha: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """(reduced loss of all critics, priority of each row S, log-densities of the next actions S).

        A subclass with critics of another kind replaces it. The priority and the log-densities have no gradient; the
        latter serve a temperature that learns from the next actions.
        """
        if self.value_network_params is not None:
            return *self._critic_loss_by_state_value(tensordict), None
        target, next_log_prob = self._target(tensordict, alpha)
        q = self._checked(self._critics.online(tensordict, self.tensor_keys.state_action_value), target.shape)
        loss, td_error = self.td_loss(q, target, tensordict)
        return loss, td_error, next_log_prob

    def _actor_loss(self, tensordict: TensorDictBase, alpha: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(reduced loss of the actor, log-densities S of the actions that it drew, mean entropy ``[]``)."""
        state = tensordict.copy()
        action, log_prob = self._policy_action(state)
        self._act(state, action)
        shape = log_prob.shape
        self._learn_target_entropy(action, shape)
        q = self._checked(self._policy_values(state, tensordict), shape)
        weight, mask = self.row_weights(tensordict, shape)
        combine = td.AVERAGE if self.actor_value == "mean" else td.SMALLEST
        loss, entropy, _ = sac.actor_loss_direct(q, log_prob, alpha, weight, mask, REDUCTIONS[self.reduction], combine)
        if mask is not None:
            counts = mask.reshape(shape).bool()
            entropy = -torch.where(counts, log_prob.detach(), 0.0).sum() / counts.sum().clamp(min=1)
        return loss, log_prob, entropy

    def _policy_action(self, state: TensorDictBase) -> tuple[Tensor, Tensor]:
        """(actions of the actor in ``state``, log-densities S), with gradients: those that the actor learns from."""
        return self._draw(self.actor_network, state)

    def _policy_values(self, state: TensorDictBase, tensordict: TensorDictBase) -> Tensor:
        """Values ``[N, *S]`` of the actor's actions, which ``state`` has; ``tensordict`` is the batch. They reach the
        actor with gradients, and no parameter of the critics."""
        return self._critic_values(self._critics.detached(state, self.tensor_keys.state_action_value))

    def _temperature_loss(self, tensordict: TensorDictBase, log_prob: Tensor) -> Tensor:
        """The reduced loss of the temperature, by log-densities S without gradient."""
        weight, mask = self.row_weights(tensordict, log_prob.shape, target=self.temperature_from == "next")
        factor = self.log_alpha if self.temperature_loss == "log_alpha" else self.log_alpha.exp()
        _, slope = _temperature_loss(
            factor.detach(), log_prob, self._target_entropy, weight, mask, REDUCTIONS[self.reduction]
        )
        # A product has its gradient for less than an operation of our own has.
        loss: Tensor = factor * slope
        return loss
