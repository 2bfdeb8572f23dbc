"""The loss of soft actor-critic, and what it shares with its variants: temperature, actor's loss, critics' targets."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import CompositeDistribution, InteractionType, TensorDictParams, set_interaction_type
from tensordict.utils import NestedKey, unravel_key
from torch import Tensor, nn

from gpubuf.kernels import sac, td
from gpubuf.kernels._operations import direct
from gpubuf.modules.fast_call import entry
from gpubuf.objectives.base import LossModule
from gpubuf.objectives.batch import HAS_TARGET, REDUCTIONS, joined, next_state, reduced
from gpubuf.objectives.networks import without_gradients
from gpubuf.objectives.options import CriticNetworks, LossOptions, leaf_of

_temperature_slope = direct(sac.temperature_loss)


@dataclass(frozen=True)
class SACOptions(LossOptions):
    """The keyword arguments that the variants of soft actor-critic share; see :class:`SACLoss`.

    Raises:
        ValueError: an argument is out of range.
    """

    CONSUMED = LossOptions.CONSUMED | {"alpha_init", "min_alpha", "max_alpha", "action_spec", "target_entropy"}

    alpha_init: float = 1.0
    min_alpha: float | None = None
    max_alpha: float | None = None
    action_spec: Any = None
    fixed_alpha: bool = False
    target_entropy: str | float = "auto"

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.alpha_init < math.inf:
            raise ValueError(f"alpha_init must be positive and finite, got {self.alpha_init}")
        low, high = self.min_alpha or 0.0, self.max_alpha or math.inf
        if not (0 <= low <= high and low < math.inf):
            raise ValueError(
                "the temperature needs 0 <= min_alpha <= max_alpha, and a finite min_alpha, got "
                f"{self.min_alpha} and {self.max_alpha}"
            )
        if isinstance(self.target_entropy, str) and self.target_entropy != "auto":
            raise ValueError(f"target_entropy must be a number or 'auto', got {self.target_entropy!r}")


class SoftActorCritic(LossModule):
    """What all variants of soft actor-critic share: a temperature, learnt or fixed, and the losses that it enters.

    Attributes:
        log_alpha: logarithm of the temperature, ``[]``: a parameter, or a buffer where it is fixed.
    """

    @dataclass
    class _AcceptedKeys(LossModule._AcceptedKeys):
        action: NestedKey = "action"
        state_action_value: NestedKey = "state_action_value"
        log_prob: NestedKey = "action_log_prob"
        value: NestedKey = "state_value"

    loss_names = ("loss_actor", "loss_qvalue", "loss_alpha")
    scalar_names = ("alpha", "entropy")
    _keys_of_actors: tuple[tuple[str, str], ...] = (("log_prob", "log_prob_keys"), *LossModule._keys_of_actors)
    _schedulable_buffers = frozenset({"alpha_init", "min_log_alpha", "max_log_alpha", "log_alpha"})

    #: How the actor's objective combines the critics: "min" or "mean".
    actor_value = "min"
    #: Whose log-densities the temperature learns from: the "current" actions' or the "next" ones'.
    temperature_from = "current"
    #: The factor of ``log pi + target_entropy`` in the temperature's loss: "log_alpha" or "alpha".
    temperature_loss = "log_alpha"
    #: Whether the critics see present and next rows as one batch: False or "critics". "all", the actor too, is for
    #: DistributionalSACLoss alone.
    joint_batch: bool | str = False

    Options: ClassVar[Any] = SACOptions
    log_alpha: Tensor
    _target_entropy: Tensor

    def __init__(self, actor_network: Any, qvalue_network: CriticNetworks, **options: Any) -> None:
        super().__init__()
        self._set_temperature(self._take(actor_network, qvalue_network, options))
        self.make_value_estimator()
        if self.joint_batch:
            self._actor.keep_running_statistics()
            self._critics.expect_joint_batches()
            self.refresh_links()

    # --- the temperature ---

    def _set_temperature(self, options: Any) -> None:
        """Register the temperature, its bounds and its aim, on the device of the policy."""
        like = next(self.actor_network_params.parameters(), torch.empty((), device=torch.get_default_device()))
        dtype = torch.float64 if like.dtype is torch.float64 else torch.get_default_dtype()
        number = functools.partial(torch.tensor, dtype=dtype, device=like.device)
        self.register_buffer("alpha_init", number(options.alpha_init))
        bounded = bool(options.min_alpha or options.max_alpha)
        for name, bound, none in (("min", options.min_alpha, -math.inf), ("max", options.max_alpha, math.inf)):
            self.register_buffer(f"{name}_log_alpha", number(math.log(bound) if bound else none) if bounded else None)
        log_alpha = number(math.log(options.alpha_init))
        if self.fixed_alpha:
            self.register_buffer("log_alpha", log_alpha)
        else:
            self.log_alpha = nn.Parameter(log_alpha)
        # A buffer in any case, so that every state_dict has it. NaN until it is known.
        self.register_buffer("_target_entropy", torch.full_like(self.alpha_init, math.nan))
        self._target_entropy_known = False
        known = self._known_entropy(options)
        if known is not None:
            self.target_entropy = known

    def _known_entropy(self, options: Any) -> float | None:
        """The entropy that the temperature aims at, if ``options`` or the policy say so; None: see the first batch."""
        if not isinstance(options.target_entropy, str):
            return float(options.target_entropy)
        spec = getattr(self.actor_network, "spec", None) if options.action_spec is None else options.action_spec
        size = _components(*leaf_of(spec, unravel_key(self.tensor_keys.action)))
        return None if size is None else self._automatic_entropy(size)

    def _automatic_entropy(self, components: int) -> float:
        """The entropy that "auto" stands for, of an action of so many components."""
        return -float(components)

    def after_loading(self) -> None:
        super().after_loading()
        self._target_entropy_known = not bool(self._target_entropy.isnan())

    @property
    def target_entropy(self) -> Tensor:
        """The entropy that the temperature aims at, ``[]``. Assign a number to change it, also within a captured graph.

        Raises:
            RuntimeError: it is "auto", there was no ``action_spec``, and no batch has been seen yet.
            ValueError: the number that is assigned is NaN or infinite. It stays what it was.
        """
        if not self._target_entropy_known:
            raise RuntimeError(
                "Cannot infer the dimensionality of the action before the first batch. Provide the target entropy "
                "explicitly, or an action_spec."
            )
        return self._target_entropy

    @target_entropy.setter
    def target_entropy(self, value: float) -> None:
        if not (isinstance(value, Tensor) or math.isfinite(value)):
            raise ValueError(f"target_entropy must be finite, got {value}")
        self._target_entropy.fill_(value)
        self._target_entropy_known = True

    def _learn_target_entropy(self, action: Tensor | TensorDictBase, shape: torch.Size) -> None:
        """Take "auto" from the first actions, which have one log-density for each of ``shape``."""
        parts = [action] if isinstance(action, Tensor) else action.values(True, True)
        self.target_entropy = self._automatic_entropy(sum(part.shape[len(shape) :].numel() for part in parts))

    def bounded_log_alpha(self) -> Tensor:
        """``log_alpha``, within its bounds from now on, without gradient."""
        log_alpha = self.log_alpha.detach()
        return log_alpha if self.min_log_alpha is None else log_alpha.clamp_(self.min_log_alpha, self.max_log_alpha)

    @property
    def alpha(self) -> Tensor:
        """The temperature, within its bounds, ``[]``, without gradient."""
        return self.bounded_log_alpha().exp()

    _alpha = alpha

    def alpha_loss(self, log_prob: Tensor) -> Tensor:
        """``-log_alpha (log_prob + target_entropy)`` of each row, neither weighted nor reduced, as TorchRL's.

        Args:
            log_prob: log-densities S of the actor's actions, which :meth:`actor_loss` returns.
        """
        return -self.log_alpha * (log_prob.detach() + self.target_entropy)

    def _temperature_loss(self, tensordict: TensorDictBase, log_prob: Tensor) -> Tensor:
        """The reduced loss of the temperature, by log-densities S without gradient."""
        weight, mask = self.row_weights(tensordict, log_prob.shape, target=self.temperature_from == "next")
        factor = self.log_alpha if self.temperature_loss == "log_alpha" else self.log_alpha.exp()
        _, slope = _temperature_slope(
            factor.detach(), log_prob, self._target_entropy, weight, mask, REDUCTIONS[self.reduction]
        )
        # A product has its gradient for less than an operation of our own has.
        loss: Tensor = factor * slope
        return loss

    # --- the whole loss, and its parts as TorchRL names them: programs that update the actor more rarely call these ---

    def _losses(self, tensordict: TensorDictBase, with_actor: bool = True) -> TensorDictBase:
        alpha, seen = self.alpha, self._seen(tensordict)
        with set_interaction_type(InteractionType.RANDOM):
            loss_qvalue, priority, found = self._critic_loss(seen, alpha)
            losses, scalars = {"loss_qvalue": loss_qvalue}, {"alpha": alpha}
            if self.further_names:
                losses |= self._further_losses(seen, alpha)
            if with_actor:
                loss_actor, log_prob, scalars["entropy"] = self._actor_loss(seen, alpha, found)
                losses = {"loss_actor": loss_actor, **losses}
        if self.temperature_from == "next":
            assert found is not None
            if not self._target_entropy_known:
                self._learn_target_entropy(tensordict.get(self._tensor_keys.action), found.shape)
            losses["loss_alpha"] = self._temperature_loss(seen, found)
        elif with_actor:
            # Detached: the backward of the temperature must not run through the actor's graph, and free it.
            losses["loss_alpha"] = self._temperature_loss(seen, log_prob.detach())
        self._set_priority(tensordict, seen, priority)
        return self._output(tensordict, losses, scalars)

    def critic_losses(self, tensordict: TensorDictBase) -> TensorDictBase:
        """The losses of an update that leaves the actor as it is: ``loss_qvalue``, and ``alpha``.

        And ``loss_alpha``, if the temperature learns from the next actions. For an actor that learns more rarely than
        its critics: what they need of it is computed, and nothing else. Writes the priority entry into ``tensordict``,
        as :meth:`forward` does, with the same numbers for the same noise.
        """
        return self._evaluated(functools.partial(self._losses, with_actor=False), tensordict)

    def qvalue_loss(self, tensordict: TensorDictBase) -> tuple[Tensor, dict[str, Tensor]]:
        """(``loss_qvalue``, ``{"td_error": priorities S}``), which it also writes into ``tensordict``."""
        seen = self._seen(tensordict)
        with set_interaction_type(InteractionType.RANDOM):
            loss, priority, _ = self._critic_loss(seen, self.alpha)
        return loss, {"td_error": self._set_priority(tensordict, seen, priority)}

    def actor_loss(self, tensordict: TensorDictBase) -> tuple[Tensor, dict[str, Tensor]]:
        """(``loss_actor``, ``{"log_prob": log-densities S of the actions drawn}``, without gradient)."""
        with set_interaction_type(InteractionType.RANDOM):
            loss, log_prob, _ = self._actor_loss(self._seen(tensordict), self.alpha)
        return loss, {"log_prob": log_prob.detach()}

    def _further_losses(self, tensordict: TensorDictBase, alpha: Tensor) -> dict[str, Tensor]:
        """The losses of networks other than actor and critics."""
        return {}

    # --- the critics ---

    def _critic_loss(self, tensordict: TensorDictBase, alpha: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """(reduced loss of all critics, priority of each row S, log-densities of the next actions S).

        The priority and the log-densities have no gradient; the latter serve a temperature that learns from the next
        actions. A subclass may return something else that its :meth:`_actor_loss` takes.
        """
        key, critics, state = self._tensor_keys.state_action_value, self._critics, next_state(tensordict)
        with without_gradients():
            _, next_log_prob = self._actor.target.run(state, self._act, state)
            shape = next_log_prob.shape
            next_q = None if self.joint_batch else self._next_values(state, shape)
        if next_q is not None:
            q = critics.online(tensordict, key)
        else:
            rows = joined(tensordict, state, self.qvalue_network.in_keys)
            q, next_q = critics.online(rows, key).chunk(2, 1)
            if self.delay_qvalue:
                with without_gradients():
                    _, next_q = critics.target(rows, key).chunk(2, 1)
            next_q = self._checked(next_q.detach(), shape)
        loss, priority = self._critic_distance(q, next_q, next_log_prob, alpha, tensordict)
        return loss, priority, next_log_prob

    def _next_values(self, state: TensorDictBase, shape: torch.Size) -> Tensor:
        """Values ``[N, *S]`` of the next states and actions by the target critics. The target takes their minimum."""
        return self._checked(self._critics.target(state, self._tensor_keys.state_action_value), shape)

    def _critic_distance(
        self, q: Tensor, next_q: Tensor, next_log_prob: Tensor, alpha: Tensor, tensordict: TensorDictBase
    ) -> tuple[Tensor, Tensor]:
        """(reduced loss of all critics, priority of each row S) between ``q`` and the target of ``next_q``."""
        target = self.td_target(next_q, tensordict, next_log_prob.shape, next_log_prob, alpha)
        return self.td_loss(q, target, tensordict)

    # --- the actor ---

    def _actor_loss(
        self, tensordict: TensorDictBase, alpha: Tensor, found: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """(reduced loss of the actor, log-densities S of the actions that it drew, mean entropy ``[]``)."""
        state, actor = tensordict.copy(), self._actor.online
        if self.joint_batch == "all":
            rows = joined(state, next_state(state), self.actor_network.in_keys)
            action, log_prob = (each.chunk(2)[0] for each in actor.run(rows, self._act, rows))
            self._put(state, action)
        else:
            action, log_prob = actor.run(state, self._act, state)
        shape = log_prob.shape
        if not self._target_entropy_known:
            self._learn_target_entropy(action, shape)
        q = self._policy_values(state, tensordict)
        weight, mask = self.row_weights(tensordict, shape)
        combine = td.AVERAGE if self.actor_value == "mean" else td.SMALLEST
        loss, entropy, _ = sac.actor_loss_direct(q, log_prob, alpha, weight, mask, REDUCTIONS[self.reduction], combine)
        if mask is not None:
            entropy = -reduced(log_prob.detach(), None, mask, "mean")
        return loss, log_prob, entropy

    def _act(self, actor: Any, state: TensorDictBase) -> tuple[Any, Tensor]:
        """(actions that ``actor`` draws in ``state``, log-densities S), both with gradients to its parameters.

        The actions are one tensor, or, of a ``tensordict.nn.CompositeDistribution``, a TensorDict of several; their
        log-density is then the sum of all parts. They are put into ``state``, where the critics find them.
        """
        dist = actor.get_dist(state)
        fused = None if isinstance(dist, CompositeDistribution) else getattr(dist, "rsample_and_log_prob", None)
        action, log_prob = drawn(dist) if fused is None else fused()
        if isinstance(action, Tensor):
            state.set(self._tensor_keys.action, action)
        else:
            self._put(state, action)
        return action, log_prob

    def _put(self, state: TensorDictBase, action: Any) -> None:
        """Put actions into ``state``: parts of a composite one where their distribution says, if it knows the key."""
        key = self._tensor_keys.action
        if isinstance(action, Tensor) or unravel_key(key) not in action.keys(True):
            state.set(key, action)
        else:
            state.update(action)

    def _policy_values(self, state: TensorDictBase, tensordict: TensorDictBase) -> Tensor:
        """Values ``[N, *S]`` of the actor's actions, which ``state`` has; ``tensordict`` is the batch. They reach the
        actor with gradients, and no parameter of the critics."""
        q: Tensor = self._critics.detached(state, self._tensor_keys.state_action_value)
        return q


def drawn(dist: Any) -> tuple[Any, Tensor]:
    """(actions, log-densities) of a distribution that can be differentiated by its parameters.

    A ``CompositeDistribution`` is drawn part by part: tensordict 0.14 knows no reparameterized draw of a composite that
    comes with its log-density.

    Raises:
        TypeError: it can't be differentiated, or its log-density is not one tensor.
    """
    if isinstance(dist, CompositeDistribution):
        parts = {key: drawn(part) for key, part in dist.dists.items()}
        rows = len(dist.batch_shape)
        of_parts = [each.flatten(rows).sum(-1) if each.ndim > rows else each for _, each in parts.values()]
        action = TensorDict({key: action for key, (action, _) in parts.items()}, dist.batch_shape)
        return action, functools.reduce(torch.add, of_parts)
    fused = getattr(dist, "rsample_and_log_prob", None)
    if fused is not None:
        action, log_prob = fused()
    elif not dist.has_rsample:
        raise TypeError(f"SAC differentiates through the action: {type(dist).__name__} has no rsample")
    else:
        action = dist.rsample()
        log_prob = dist.log_prob(action)
    if not isinstance(log_prob, Tensor):
        raise TypeError(f"the log-density of an action must be one tensor, got {type(log_prob).__name__}")
    return action, log_prob


@dataclass(frozen=True)
class SACLossOptions(SACOptions):
    """The keyword arguments of :class:`SACLoss`."""

    CONSUMED = SACOptions.CONSUMED | {"value_network"}

    value_network: Any = None
    delay_value: bool = True

    @property
    def further(self) -> Mapping[str, tuple[Any, bool]]:
        return {} if self.value_network is None else {"value_network": (self.value_network, self.delay_value)}


class SACLoss(SoftActorCritic):
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

    The keys of :meth:`set_keys` are action, value, state_action_value, reward, done, terminated, priority and
    priority_weight; log_prob is accepted, as TorchRL's, and not used.

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

    Options = SACLossOptions
    value_network_params: TensorDictParams | None

    def __init__(
        self, actor_network: Any, qvalue_network: CriticNetworks, value_network: Any = None, **options: Any
    ) -> None:
        super().__init__(actor_network, qvalue_network, value_network=value_network, **options)
        if value_network is None:
            self.value_network_params = None
        else:
            self.further_names = ("loss_value",)

    # TorchRL's name it by the version of SAC; the networks decide.
    qvalue_v1_loss = qvalue_v2_loss = SoftActorCritic.qvalue_loss

    def value_loss(self, tensordict: TensorDictBase) -> tuple[Tensor, dict[str, Tensor]]:
        """(``loss_value``, ``{}``).

        Raises:
            RuntimeError: the loss has no value network.
        """
        if self.value_network_params is None:
            raise RuntimeError("value_loss needs a value_network, and this loss has none")
        with set_interaction_type(InteractionType.RANDOM):
            return self._state_value_loss(self._seen(tensordict), self.alpha), {}

    def _further_losses(self, tensordict: TensorDictBase, alpha: Tensor) -> dict[str, Tensor]:
        return {"loss_value": self._state_value_loss(tensordict, alpha)}

    def _critic_loss(self, tensordict: TensorDictBase, alpha: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        if self.value_network_params is None:
            return super()._critic_loss(tensordict, alpha)
        with without_gradients():
            value = self._state_value(next_state(tensordict), target=True)
        target = self.td_target(value.unsqueeze(0), tensordict, value.shape)
        q = self._checked(self._critics.online(tensordict, self.tensor_keys.state_action_value), target.shape)
        loss, td_error = self.td_loss(self._own_chunks(q), target, tensordict)
        return loss, td_error.square(), None

    def _state_value(self, tensordict: TensorDictBase, target: bool) -> Tensor:
        """``V(s)``, S, by the value network or its target."""
        network = self._networks.single["value_network"]
        copy = network.target if target else network.online
        found = copy.run(tensordict, nn.Module.__call__, tensordict.copy())
        value: Tensor = entry(found, self.tensor_keys.value)
        return value.squeeze(-1) if value.ndim and value.shape[-1] == 1 else value

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

    def _state_value_loss(self, tensordict: TensorDictBase, alpha: Tensor) -> Tensor:
        """The reduced loss of the value network, whose target is ``min_k Qtarget_k(s, a~) - alpha log pi(a~|s)``."""
        value = self._state_value(tensordict, target=False)
        with without_gradients():
            state = tensordict.copy()
            _, log_prob = self._actor.target.run(state, self._act, state)
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


def _components(spec: Any, batch_dims: int) -> int | None:
    """Elements of ``spec`` beyond ``batch_dims`` dimensions, of all its leaves if it is composite."""
    if hasattr(spec, "keys"):
        sizes = [_components(spec[name], batch_dims) for name in spec.keys() if spec[name] is not None]
        known = [size for size in sizes if size is not None]
        return sum(known) if known and len(known) == len(sizes) else None
    shape = getattr(spec, "shape", None)
    return None if shape is None else math.prod(tuple(shape)[batch_dims:])
