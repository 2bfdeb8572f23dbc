"""The loss of soft actor-critic."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import InteractionType, TensorDictModule, TensorDictParams, dispatch, set_interaction_type
from tensordict.utils import NestedKey, unravel_key
from torch import Tensor

from gpubuf.kernels import sac
from gpubuf.modules.plain import entry
from gpubuf.objectives.arguments import one_of, refuse_deprecated, warn
from gpubuf.objectives.critics import make_critics
from gpubuf.objectives.functional import ParametersByName
from gpubuf.objectives.networks import ParameterPlaces, SwappableCopy, leaves, paths, target_parameters
from gpubuf.objectives.reductions import REDUCTIONS
from gpubuf.objectives.shapes import next_key, rows_of
from gpubuf.objectives.td import TDLossModule
from gpubuf.objectives.temperature import TemperatureLossModule


class SACLoss(TemperatureLossModule, TDLossModule):
    """Soft actor-critic without a value network (Haarnoja et al., arXiv 1812.05905).

    With S the batch shape of the log-density of the actions (agents included), N critics and ``terminated``, not
    ``done``, to stop bootstrapping:

    * ``loss_qvalue``: sum over critics of ``loss_function`` between Q(s, a) and
      ``y = r + gamma^steps (1 - terminated) (min_k Qtarget_k(s', a') - alpha log pi(a'|s'))``;
    * ``loss_actor``: ``alpha log pi(a|s) - min_k Q_k(s, a)``, with gradients to the actor only;
    * ``loss_alpha``: ``-log_alpha (log pi(a|s) + target_entropy)``, on log_alpha, as in TorchRL.

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
            other, ``rsample()`` and ``log_prob()`` are called.
        qvalue_network: one network, which is copied ``num_qvalue_nets`` times and drawn anew; a list of networks; or a
            natively batched ensemble such as :func:`~gpubuf.modules.make_sac_critic` builds, whose values are
            ``[num_qvalue_nets, *S, 1]`` and which runs as it is.
        value_network: not supported.
        num_qvalue_nets: number of critics, N.
        loss_function: "smooth_l1", "l2", "l1" or "huber" (the same as "smooth_l1").
        alpha_init: first temperature.
        min_alpha: bounds of the temperature, applied at each call.
        max_alpha: see ``min_alpha``.
        action_spec: anything with a ``shape``, for ``target_entropy="auto"``: a Gymnasium space, a TorchRL spec, or a
            composite one that holds the action at its key.
        fixed_alpha: keep the temperature as a buffer instead of a parameter.
        target_entropy: a number, or "auto": minus the number of action components, without batch and agent dimensions.
            Taken from ``action_spec`` if given, otherwise from the first batch.
        delay_actor: draw the next actions from target parameters of the actor. delay_qvalue: evaluate the next values
        with target parameters of the critics. delay_value: of no effect without a value network. gamma: refused; see
        :meth:`make_value_estimator`. priority_key: refused; see :meth:`set_keys`. separate_losses: parameters that
        critics and actor share get gradients from the actor's loss only. reduction: "mean" (default), "sum", or "none"
        for losses of shape S, weighted, 0 where masked. skip_done_states: in terminated rows every network sees the
        row's own observation instead of the next one, which may
            then be anything, NaN included. Truncated rows bootstrap from the real next observation. Shapes stay.
        deactivate_vmap: run several critics one after the other. use_prioritized_weights: False, True (a batch without
        weights is an error), or "auto". scalar_output_mode: whether ``alpha`` and ``entropy`` are returned with
        ``reduction="none"``: "exclude" (also for
            None, with a warning) or "non_tensor".

    Attributes:
        actor_network_params: parameters of the actor, the very ones of ``actor_network``.
        qvalue_network_params: parameters of the critics; stacked ``[N, ...]`` unless the ensemble is natively batched.
        target_qvalue_network_params: their targets, as buffers; updated by :class:`~gpubuf.objectives.SoftUpdate`.
        log_alpha: logarithm of the temperature, ``[]``.

    Raises:
        NotImplementedError: a value network is given.
        TypeError: ``gamma`` is given.
        RuntimeError: ``priority_key`` is given.
        ValueError: an argument is out of range, or the critics are not ``num_qvalue_nets``.
    """

    @dataclass
    class _AcceptedKeys(TDLossModule._AcceptedKeys):
        action: NestedKey = "action"
        value: NestedKey = "state_value"
        state_action_value: NestedKey = "state_action_value"
        log_prob: NestedKey = "action_log_prob"

    default_keys = _AcceptedKeys

    actor_network_params: TensorDictParams
    qvalue_network_params: TensorDictParams

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
        if value_network is not None:
            raise NotImplementedError("SACLoss is SAC's version 2, which has no value network: leave value_network out")
        if gamma is not None:
            raise TypeError("gamma is not an argument of the loss: call loss.make_value_estimator(gamma=...)")
        refuse_deprecated(priority_key=priority_key)
        super().__init__(loss_function=loss_function, reduction="mean" if reduction is None else reduction)
        if num_qvalue_nets < 1:
            raise ValueError(f"num_qvalue_nets must be at least 1, got {num_qvalue_nets}")
        self.num_qvalue_nets = num_qvalue_nets
        self.delay_actor, self.delay_qvalue, self.delay_value = delay_actor, delay_qvalue, delay_value
        self.skip_done_states, self.deactivate_vmap = skip_done_states, deactivate_vmap
        self.use_prioritized_weights = one_of((False, True, "auto"), use_prioritized_weights, "use_prioritized_weights")
        one_of((None, "exclude", "non_tensor"), scalar_output_mode, "scalar_output_mode")
        if self.reduction == "none" and scalar_output_mode is None:
            warn(
                "SACLoss with reduction='none' leaves alpha and entropy, which are scalars, out of its output. Pass "
                "scalar_output_mode='exclude' to silence this warning, or 'non_tensor' to have them as non-tensor data."
            )
            scalar_output_mode = "exclude"
        self.scalar_output_mode = scalar_output_mode
        self._set_networks(actor_network, qvalue_network, separate_losses)
        names = {"log_prob": "log_prob_keys", "action": "dist_sample_keys"}
        found = {key: getattr(actor_network, name, None) for key, name in names.items()}
        self.set_keys(**{key: next(iter(value)) for key, value in found.items() if value})
        first = next((p for p in self.actor_network_params.parameters()), None)
        self._set_temperature(first, alpha_init, min_alpha, max_alpha, fixed_alpha)
        if action_spec is None:
            action_spec = getattr(actor_network, "spec", None)
        self._set_target_entropy(target_entropy, action_spec, self.tensor_keys.action)
        self.make_value_estimator()

    def _set_networks(self, actor_network: Any, qvalue_network: Any, separate_losses: bool) -> None:
        # Modules and copies are no submodules: their tensors are registered once, as the `*_params`.
        self.__dict__["actor_network"] = actor_network
        params = TensorDictParams(TensorDict.from_module(actor_network), no_convert=True)
        self.actor_network_params = params
        where = paths(params)
        self.__dict__["_actor_places"] = ParameterPlaces(actor_network, where)
        trained = {id(t): path for path, t in zip(where, leaves(params), strict=True) if t.requires_grad}
        shared = trained if separate_losses else {}
        critics = make_critics(qvalue_network, self.num_qvalue_nets, use_vmap=not self.deactivate_vmap, shared=shared)
        self.__dict__["_critics"], self.__dict__["qvalue_network"] = critics, critics.network
        self.qvalue_network_params = critics.params
        self.__dict__["_delayed_actor"] = None
        if self.delay_actor:
            self.target_actor_network_params = target_parameters(self.actor_network_params)
            self.__dict__["_delayed_actor"] = SwappableCopy(actor_network, where)
        if self.delay_qvalue:
            self.target_qvalue_network_params = target_parameters(self.qvalue_network_params)
        self.refresh_links()

    def refresh_links(self) -> None:
        super().refresh_links()
        if "_delayed_actor" not in self.__dict__:
            return
        self._actor_places.fill(leaves(self.actor_network_params))
        targets: Any = self._modules.get("target_qvalue_network_params")
        self._critics.refresh(targets, self.actor_network_params)
        if self._delayed_actor is not None:
            self._delayed_actor.places.fill(leaves(self.target_actor_network_params))
        registered = {name: part for name, part in self._modules.items() if isinstance(part, TensorDictParams)}
        self.__dict__["_parameters_by_name"] = ParametersByName(registered)

    @contextlib.contextmanager
    def _using(self, given: dict[str, TensorDict]) -> Iterator[None]:
        """Within it the networks run on other parameters."""
        own = self._critics.params
        try:
            actor = given["actor_network_params"]
            self._actor_places.fill(leaves(actor))
            self._critics.params = given["qvalue_network_params"]
            self._critics.refresh(given.get("target_qvalue_network_params"), actor)
            if self._delayed_actor is not None:
                self._delayed_actor.places.fill(leaves(given["target_actor_network_params"]))
            yield
        finally:
            self._critics.params = own
            self.refresh_links()

    @property
    def vmap_randomness(self) -> str:
        """How random operations behave among stacked critics: "error", "same" or "different"."""
        randomness: str = self._critics.vmap_randomness
        return randomness

    def set_vmap_randomness(self, value: str) -> None:
        """Choose "error", "same" or "different"; see ``torch.vmap``. By default "different" where there is dropout."""
        self._critics.randomness = value

    @property
    def in_keys(self) -> list[NestedKey]:
        """The entries that :meth:`forward` reads."""
        return self._in_keys

    @in_keys.setter
    def in_keys(self, value: Any) -> None:
        raise AttributeError("in_keys follow from the networks and from set_keys()")

    def set_keys(self, **kwargs: NestedKey | None) -> None:
        """Set where the loss reads and writes; None restores the default of that key.

        The keys are action, state_action_value, reward, done, terminated, priority and priority_weight; value and
        log_prob are accepted, as TorchRL's, and not used.

        Raises:
            ValueError: there is no such key.
        """
        super().set_keys(**kwargs)
        # Read at every call.
        self._in_keys: list[NestedKey] = self._find_in_keys()

    def _find_in_keys(self) -> list[NestedKey]:
        keys = self.tensor_keys
        actor = list(self.actor_network.in_keys)
        wanted = [
            keys.action,
            *(next_key(key) for key in (keys.reward, keys.done, keys.terminated)),
            *actor,
            *map(next_key, actor),
            *self.qvalue_network.in_keys,
            *(next_key(key) for key in self.qvalue_network.in_keys if unravel_key(key) != unravel_key(keys.action)),
        ]
        return list(dict.fromkeys(map(unravel_key, wanted)))

    @property
    def out_keys(self) -> list[NestedKey]:
        """The entries that :meth:`forward` returns."""
        losses: list[NestedKey] = ["loss_actor", "loss_qvalue", "loss_alpha"]
        return losses if self._scalars_left_out else [*losses, "alpha", "entropy"]

    @out_keys.setter
    def out_keys(self, value: Any) -> None:
        raise AttributeError("out_keys are fixed")

    @property
    def _scalars_left_out(self) -> bool:
        return self.reduction == "none" and self.scalar_output_mode != "non_tensor"

    @dispatch
    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:  # type: ignore[override]
        """The losses of a batch; see the class. Writes the priority entry into ``tensordict``."""
        # Compiled code has a guard for each of them, for it would otherwise run on the parameters of its first call.
        given = self._parameters_by_name.replaced()
        if given is None:
            return self._losses(tensordict)
        with self._using(given):
            return self._losses(tensordict)

    def _losses(self, tensordict: TensorDictBase) -> TensorDictBase:
        alpha = self.alpha
        seen = self.without_masked(tensordict, self._keys_seen())
        with set_interaction_type(InteractionType.RANDOM):
            loss_qvalue, td_error = self._critic_loss(seen, alpha)
            loss_actor, loss_alpha, entropy = self._actor_and_temperature_loss(seen, alpha)
        tensordict.set(self.tensor_keys.priority, td_error)
        losses = {"loss_actor": loss_actor, "loss_qvalue": loss_qvalue, "loss_alpha": loss_alpha}
        if self.reduction != "none":
            return TensorDict({**losses, "alpha": alpha, "entropy": entropy}, batch_size=[])
        out = TensorDict(losses, batch_size=tensordict.batch_size)
        if self.scalar_output_mode == "non_tensor":
            out.set_non_tensor("alpha", alpha)
            out.set_non_tensor("entropy", entropy)
        return out

    def _keys_seen(self) -> Iterator[NestedKey]:
        """The entries that networks and targets read. A generator: it runs only if the batch has masks."""
        action = unravel_key(self.tensor_keys.action)
        keys = dict.fromkeys(map(unravel_key, (*self.actor_network.in_keys, *self.qvalue_network.in_keys)))
        yield from keys
        yield from (next_key(key) for key in keys if key != action)
        yield next_key(self.tensor_keys.reward)

    def _draw(self, actor: Any, tensordict: TensorDictBase) -> tuple[Tensor, Tensor]:
        """(actions, log-densities) that can be differentiated by the parameters of ``actor``."""
        dist = actor.get_dist(tensordict)
        fused = getattr(dist, "rsample_and_log_prob", None)
        if fused is not None:
            drawn: tuple[Tensor, Tensor] = fused()
            return drawn
        if not dist.has_rsample:
            raise TypeError(f"SAC differentiates through the action: {type(dist).__name__} has no rsample")
        action = dist.rsample()
        log_prob = dist.log_prob(action)
        if not isinstance(log_prob, Tensor):
            raise TypeError(f"the log-density of an action must be one tensor, got {type(log_prob).__name__}")
        return action, log_prob

    def _checked(self, q: Tensor, shape: torch.Size) -> Tensor:
        if q.shape[1:] not in (shape, (*shape, 1)):
            raise ValueError(
                f"the critics' {self.tensor_keys.state_action_value!r} must be {[q.shape[0], *shape, 1]} to go with "
                f"log-densities of shape {list(shape)}, got {list(q.shape)}"
            )
        return q

    def _next_state(self, tensordict: TensorDictBase) -> TensorDictBase:
        """The entries of the next step in a TensorDict of their own, with nothing that no network may see."""
        state: TensorDictBase = tensordict.get("next").copy()
        if self.skip_done_states:
            ended = self.terminated(tensordict).bool()
            action = unravel_key(self.tensor_keys.action)
            keys = map(unravel_key, (*self.actor_network.in_keys, *self.qvalue_network.in_keys))
            for key in dict.fromkeys(key for key in keys if key != action):
                own, after = entry(tensordict, key), entry(tensordict, next_key(key))
                state.set(key, torch.where(rows_of(ended, after), own, after))
        return state

    @torch.no_grad()
    def _target(self, tensordict: TensorDictBase, alpha: Tensor) -> Tensor:
        keys = self.tensor_keys
        state = self._next_state(tensordict)
        delayed = self._delayed_actor
        if delayed is not None:
            delayed.follow_mode()
        action, log_prob = self._draw(self.actor_network if delayed is None else delayed.module, state)
        state.set(keys.action, action)
        shape = log_prob.shape
        next_q = self._checked(self._critics.target(state, keys.state_action_value), shape)
        return self.td_target(next_q, tensordict, shape, log_prob, alpha)

    def _critic_loss(self, tensordict: TensorDictBase, alpha: Tensor) -> tuple[Tensor, Tensor]:
        """(loss, |td_error| of every row)."""
        target = self._target(tensordict, alpha)
        q = self._checked(self._critics.online(tensordict, self.tensor_keys.state_action_value), target.shape)
        return self.td_loss(q, target, tensordict)

    def _actor_and_temperature_loss(self, tensordict: TensorDictBase, alpha: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(actor's loss, temperature's loss, entropy)."""
        state = tensordict.copy()
        action, log_prob = self._draw(self.actor_network, state)
        state.set(self.tensor_keys.action, action)
        shape, code = log_prob.shape, REDUCTIONS[self.reduction]
        q = self._checked(self._critics.detached(state, self.tensor_keys.state_action_value), shape)
        weight, mask = self.row_weights(tensordict, shape)
        loss_actor, entropy, _ = sac.actor_loss(q, log_prob, alpha, weight, mask, code)
        if mask is not None:
            counts = mask.reshape(shape).bool()
            entropy = -torch.where(counts, log_prob.detach(), 0.0).sum() / counts.sum().clamp(min=1)
        if not self._target_entropy_known:
            self.target_entropy = -float(action.shape[len(shape) :].numel())
        # Detached: the backward of the temperature must not run through the actor's graph, and free it.
        loss_alpha, _ = sac.temperature_loss(
            self.log_alpha, log_prob.detach(), self._target_entropy, weight, mask, code
        )
        return loss_actor, loss_alpha, entropy
