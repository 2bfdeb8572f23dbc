"""The base class of losses of an actor and several critics: their networks, what these see, keys and outputs."""

from __future__ import annotations

import contextlib
import functools
import inspect
import math
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import CompositeDistribution, TensorDictModule, TensorDictParams, dispatch
from tensordict.utils import NestedKey, unravel_key
from torch import Tensor, nn

from gpubuf.data.recording import current_recording
from gpubuf.data.storage.layout import priority_mask_key
from gpubuf.modules.fast_call import entry
from gpubuf.objectives.base import one_of, pairs_of, warn
from gpubuf.objectives.batch import (
    COUNTS,
    HAS_TARGET,
    joint_mask,
    leaf_keys,
    next_key,
    without_ended,
)
from gpubuf.objectives.critics import make_critics
from gpubuf.objectives.networks import (
    ParametersByName,
    Path,
    SingleNetwork,
    leaves,
    paths,
    redraw,
    target_parameters,
)
from gpubuf.objectives.values import TDLossModule


def _target_params(name: str) -> property:
    """The target parameters of the network ``name``: without them the present ones, None where there is no network."""

    def get(loss: Any) -> Any:
        targets, own = loss._modules.get(f"target_{name}_params"), getattr(loss, f"{name}_params", None)
        return targets if targets is not None or own is None else own.data

    return property(get)


def leaf_of(spec: Any, key: NestedKey) -> tuple[Any, int]:
    """(what ``spec`` says of the entry at ``key``, number of dimensions of the containers that hold it).

    Args:
        spec: a space or spec, of the entry itself or a composite one.
        key: of the entry.
    """
    container = 0
    for name in key if isinstance(key, tuple) else (key,):
        if isinstance(spec, str) or not hasattr(spec, "keys"):
            break
        container = len(getattr(spec, "shape", None) or ())
        spec = spec[name]
    return spec, container


def taking(options: type) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Decorates a constructor whose keyword arguments are the fields of ``options``: its signature lists them."""

    def listed(constructor: Any) -> Any:
        signature = inspect.signature(constructor)
        own = [each for each in signature.parameters.values() if each.kind is not each.VAR_KEYWORD]
        more = [each for name, each in inspect.signature(options).parameters.items() if name != "self"]
        keywords = [each.replace(kind=each.KEYWORD_ONLY) for each in more]
        constructor.__signature__ = signature.replace(parameters=[*own, *keywords])
        return constructor

    return listed


@dataclass(frozen=True)
class ActorCriticOptions:
    """The keyword arguments that losses of an actor and N critics share; :class:`~gpubuf.objectives.SACLoss` has their
    meaning. A field that is no argument of a loss, but has a value there, has ``init=False`` in its options.

    Raises:
        TypeError: ``gamma`` is given.
        RuntimeError: ``priority_key`` is given.
        ValueError: an argument is out of range or none of its choices.
    """

    #: Those that a loss has as attributes, too.
    ATTRIBUTES: ClassVar[tuple[str, ...]] = (
        *("num_qvalue_nets", "delay_actor", "delay_qvalue", "skip_done_states", "deactivate_vmap"),
        *("use_prioritized_weights", "scalar_output_mode"),
    )

    num_qvalue_nets: int = 2
    loss_function: str = "smooth_l1"
    delay_actor: bool = False
    delay_qvalue: bool = True
    gamma: float | None = None
    priority_key: str | None = None
    separate_losses: bool = False
    reduction: str | None = None
    skip_done_states: bool = False
    deactivate_vmap: bool = False
    use_prioritized_weights: str | bool = "auto"
    scalar_output_mode: str | None = None

    def __post_init__(self) -> None:
        if self.gamma is not None:
            raise TypeError("gamma is not an argument of the loss: call loss.make_value_estimator(gamma=...)")
        if self.priority_key is not None:
            raise RuntimeError(
                "Setting 'priority_key' via the constructor is deprecated, use .set_keys(<key>='some_key') instead."
            )
        if self.num_qvalue_nets < 1:
            raise ValueError(f"num_qvalue_nets must be at least 1, got {self.num_qvalue_nets}")
        one_of((False, True, "auto"), self.use_prioritized_weights, "use_prioritized_weights")
        one_of((None, "exclude", "non_tensor"), self.scalar_output_mode, "scalar_output_mode")


class ActorCriticLossModule(TDLossModule):
    """A loss of an actor and N critics.

    It holds the networks with their target parameters, runs them on the states of a batch, and makes the output. A
    subclass implements :meth:`_losses` with these parts:

    * ``self._networks["actor_network"].online.run(state, self._act, state)``: actions of the actor, with gradients;
      :meth:`_next_action`: of the next states, without;
    * ``self._critics``: ``online``, ``detached`` and ``target`` values of all critics, see
      :class:`~gpubuf.objectives.critics.Critics`;
    * :meth:`td_target` and :meth:`td_loss`, from :class:`TDLossModule`;
    * :meth:`_output`: the TensorDict to return.

    Args:
        actor_network: the policy.
        qvalue_network: one network, a list of ``num_qvalue_nets``, or a natively batched ensemble.
        options: the arguments that such losses share.
        further: networks besides, by name, each with whether it has target parameters. Of networks that share
            parameters, actor, further networks and critics, the first owns them.

    Raises:
        ValueError: an option is none of its choices, or the critics are not ``num_qvalue_nets``.
    """

    @dataclass
    class _AcceptedKeys(TDLossModule._AcceptedKeys):
        action: NestedKey = "action"
        state_action_value: NestedKey = "state_action_value"
        log_prob: NestedKey = "action_log_prob"

    actor_network_params: TensorDictParams
    qvalue_network_params: TensorDictParams
    target_actor_network_params = _target_params("actor_network")
    target_qvalue_network_params = _target_params("qvalue_network")
    target_value_network_params = _target_params("value_network")

    #: Entries of the output: losses, and scalars that ``reduction="none"`` leaves out.
    loss_names: tuple[str, ...] = ("loss_actor", "loss_qvalue")
    scalar_names: tuple[str, ...] = ()
    #: Losses of further networks, which come last.
    further_loss_names: tuple[str, ...] = ()
    #: Keys that an actor knows, and where it does.
    _keys_of_actors: tuple[tuple[str, str], ...] = (("log_prob", "log_prob_keys"), ("action", "dist_sample_keys"))
    #: The rows of the batch, for messages: a shape follows.
    _rows: ClassVar[str] = "log-densities of shape"

    def __init__(
        self,
        actor_network: Any,
        qvalue_network: TensorDictModule | Sequence[TensorDictModule],
        options: ActorCriticOptions,
        further: Mapping[str, tuple[Any, bool]] | None = None,
    ) -> None:
        reduction = "mean" if options.reduction is None else options.reduction
        super().__init__(loss_function=options.loss_function, reduction=reduction)
        for name in options.ATTRIBUTES:
            setattr(self, name, getattr(options, name))
        if reduction == "none" and options.scalar_output_mode is None and self.scalar_names:
            warn(
                f"{type(self).__name__} with reduction='none' leaves {' and '.join(self.scalar_names)}, which are "
                "scalars, out of its output. Pass scalar_output_mode='exclude' to silence this warning, or "
                "'non_tensor' to have them as non-tensor data."
            )
            self.scalar_output_mode = "exclude"
        #: Whether NaN was named already, or whoever reads the losses names it.
        self.nan_named = False
        self._out_keys: list[NestedKey] | None = None
        self._set_networks(actor_network, qvalue_network, options.separate_losses, further or {})
        found = {key: getattr(actor_network, name, None) for key, name in self._keys_of_actors}
        self.set_keys(**{key: next(iter(value)) for key, value in found.items() if value})

    # --- networks ---

    def _set_networks(
        self,
        actor_network: Any,
        qvalue_network: Any,
        separate_losses: bool,
        further: Mapping[str, tuple[Any, bool]],
    ) -> None:
        # Modules and copies are no submodules: their tensors are registered once, as the `*_params`.
        self.__dict__["_networks"] = {}
        several = qvalue_network if isinstance(qvalue_network, list | tuple | nn.ModuleList) else [qvalue_network]
        for name, network in (("actor_network", actor_network), *(("qvalue_network", each) for each in several)):
            if not hasattr(network, "in_keys"):
                raise TypeError(
                    f"{name} must say which keys it reads and writes, and a {type(network).__name__} does not: wrap it "
                    "in tensordict.nn.TensorDictModule(network, in_keys=[...], out_keys=[...]), or take one of "
                    "gpubuf.modules, such as make_sac_actor and make_sac_critic"
                )
        self._separate_losses = separate_losses
        self._add_network("actor_network", actor_network, self.delay_actor)
        for name, (network, delayed) in further.items():
            self._add_network(name, network, delayed)
        shared = self._trained_elsewhere()
        critics = make_critics(qvalue_network, self.num_qvalue_nets, use_vmap=not self.deactivate_vmap, shared=shared)
        self.__dict__["_critics"], self.__dict__["qvalue_network"] = critics, critics.network
        self.qvalue_network_params = critics.params
        if self.delay_qvalue:
            self.target_qvalue_network_params = target_parameters(self.qvalue_network_params)
        self.refresh_links()

    def _add_network(self, name: str, network: Any, delayed: bool) -> None:
        """Register ``network`` as ``<name>``, its parameters as ``<name>_params``, and targets where ``delayed``."""
        single = SingleNetwork(network, self._trained_elsewhere(), delayed)
        self._networks[name], self.__dict__[name] = single, network
        setattr(self, f"{name}_params", single.params)
        if delayed:
            setattr(self, f"target_{name}_params", target_parameters(single.params))

    def _trained_elsewhere(self) -> dict[int, Path]:
        """Parameters that networks added from now on may share, but not train: their owner and path, by id."""
        shared: dict[int, Path] = {}
        if self._separate_losses:
            for name, single in self._networks.items():
                for path, tensor in zip(paths(single.params), leaves(single.params), strict=True):
                    if tensor.requires_grad:
                        shared[id(tensor)] = (name, *path)
        return shared

    def refresh_links(self) -> None:
        super().refresh_links()
        if "_critics" not in self.__dict__:
            return
        registered = {name: part for name, part in self._modules.items() if isinstance(part, TensorDictParams)}
        self._run_on(registered)
        self.__dict__["_parameters_by_name"] = ParametersByName(registered)

    @torch.no_grad()
    def reset_parameters_recursive(self) -> None:  # type: ignore[override]
        """Draw the parameters of all networks anew, in place. Target parameters become equal to them."""
        for single in self._networks.values():
            redraw(single.network)
        self._critics.redraw()
        if any(name.startswith("target_") for name in self._modules):
            for target, source in pairs_of(self):
                target.copy_(source)

    def before_loading(self) -> None:
        super().before_loading()
        self._critics.before_loading()

    def _run_on(self, params: dict[str, Any]) -> None:
        """Put ``params``, by the names that this loss has for them, into the networks."""
        owners = {name: params[f"{name}_params"] for name in self._networks}
        for name, network in (*self._networks.items(), ("qvalue_network", self._critics)):
            network.refresh(params[f"{name}_params"], params.get(f"target_{name}_params"), owners)

    @property
    def vmap_randomness(self) -> str:
        """How random operations behave among stacked critics: "error", "same" or "different"."""
        randomness: str = self._critics.vmap_randomness
        return randomness

    def set_vmap_randomness(self, value: str) -> None:
        """Choose "error", "same" or "different"; see ``torch.vmap``. By default "different" where there is dropout."""
        self._critics.randomness = value

    # --- keys and outputs ---

    @property
    def in_keys(self) -> list[NestedKey]:
        """The entries that :meth:`forward` reads, in the order of its arguments.

        They follow from the networks and from :meth:`set_keys`; what you assign holds until the next call of that.
        """
        return self._in_keys

    @in_keys.setter
    def in_keys(self, value: Any) -> None:
        self._in_keys = [unravel_key(key) for key in value]

    def set_keys(self, **kwargs: NestedKey | None) -> None:
        super().set_keys(**kwargs)
        # Read at every call.
        self._in_keys: list[NestedKey] = self._find_in_keys()

    def _find_in_keys(self) -> list[NestedKey]:
        keys, states = self.tensor_keys, self._state_keys()
        read = [unravel_key(key) for key in self.qvalue_network.in_keys if self._is_action(unravel_key(key))]
        wanted = [
            *(read or [keys.action]),
            *(next_key(key) for key in (keys.reward, keys.done, keys.terminated)),
            *states,
            *map(next_key, states),
        ]
        return list(dict.fromkeys(map(unravel_key, wanted)))

    def _state_keys(self) -> list[NestedKey]:
        """The entries that networks read, other than actions."""
        networks = [*(single.network for single in self._networks.values()), self.qvalue_network]
        keys = dict.fromkeys(key for network in networks for key in _read_by(network))
        return [key for key in keys if not self._is_action(key)]

    def _is_action(self, key: NestedKey) -> bool:
        """Whether ``key`` is that of the action, of a part of it, or of something that the actor draws."""
        names = key if isinstance(key, tuple) else (key,)
        own = unravel_key(self.tensor_keys.action)
        root = own if isinstance(own, tuple) else (own,)
        drawn = map(unravel_key, getattr(self.actor_network, "dist_sample_keys", None) or ())
        return names[: len(root)] == root or key in drawn

    @property
    def out_keys(self) -> list[NestedKey]:
        """The entries that :meth:`forward` returns; of those that you assign, or give to ``select_out_keys``, a part.

        Raises:
            ValueError: one that is assigned is not among them.
        """
        return self._every_out_key() if self._out_keys is None else self._out_keys

    @out_keys.setter
    def out_keys(self, value: Any) -> None:
        chosen, every = [unravel_key(key) for key in value], self._every_out_key()
        if unknown := [key for key in chosen if key not in every]:
            raise ValueError(f"{type(self).__name__} returns {every}, got {unknown}")
        self._out_keys = chosen

    def _every_out_key(self) -> list[NestedKey]:
        left_out = self.reduction == "none" and self.scalar_output_mode != "non_tensor"
        return [*self.loss_names, *(() if left_out else self.scalar_names), *self.further_loss_names]

    @dispatch
    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:  # type: ignore[override]
        """The losses of a batch; see the class. Writes the priority entry into ``tensordict``."""
        return self._evaluated(self._losses, tensordict)

    def _evaluated(
        self, losses: Callable[[TensorDictBase], TensorDictBase], tensordict: TensorDictBase
    ) -> TensorDictBase:
        """``losses(tensordict)``, by the parameters that ``functional_call`` gives for a while, if it does.

        Raises:
            ValueError: the batch has actions of another width than the policy gives.
        """
        # Compiled code has a guard for each of them, for it would otherwise run on the parameters of its first call.
        given = self._parameters_by_name.replaced()
        try:
            if given is not None:
                self._run_on(given)
            found = losses(tensordict)
            if not (torch.compiler.is_compiling() or self.nan_named or current_recording() is not None):
                self._look_for_nan(tensordict, found)
        except RuntimeError:
            self._check_action_width(tensordict)
            raise
        finally:
            if given is not None:
                self.refresh_links()
        return found

    def _check_action_width(self, tensordict: TensorDictBase) -> None:
        """Raise ValueError if the batch has actions of another width than the policy gives."""
        key, actor = self.tensor_keys.action, self.actor_network
        given: Any = ()
        due = 0
        with torch.no_grad(), contextlib.suppress(Exception):
            given = tensordict.get(key).shape
            due = actor(tensordict.select(*actor.in_keys, strict=False)).get(key).shape[-1]
        if due not in (0, *given[-1:]):
            raise ValueError(
                f"the batch has actions of {given[-1]} numbers at {key!r}, and the policy gives {due}: the shape is "
                f"{list(given)}, and [..., {due}] is needed"
            )

    def _losses(self, tensordict: TensorDictBase) -> TensorDictBase:
        """The losses of a batch, made by :meth:`_output`."""
        raise NotImplementedError

    def _look_for_nan(self, tensordict: TensorDictBase, losses: TensorDictBase) -> None:
        """:meth:`warn_of_nan` where that costs no synchronisation, and tensors have values."""
        for name, value in losses.items():
            if not name.startswith("loss_"):
                continue
            if type(value) is not Tensor or not value.is_cpu or torch._C._functorch.is_functorch_wrapped_tensor(value):
                return
            # `isnan` of one number is two more operations in every call.
            if math.isnan(value.item()) if value.ndim == 0 else bool(value.isnan().any()):
                return self.warn_of_nan(tensordict, losses)

    def warn_of_nan(self, tensordict: TensorDictBase, losses: TensorDictBase) -> None:
        """Warn if any of ``losses`` is NaN, once in the life of this loss, and say where the batch is not finite.

        On a CPU, outside compiled code, every call of the loss does so. On a GPU and in compiled code nothing looks at
        the values. There call it where you read the losses anyway, to log them, say: it synchronises.

        Args:
            tensordict: the batch.
            losses: what the loss returned for it.
        """
        names = [str(name) for name in self.out_keys if name in losses.keys() and str(name).startswith("loss_")]
        found = [name for name in names if losses.get(name).isnan().any()]
        if not found or self.nan_named:
            return
        self.nan_named = True
        seen, places, of_ended = self._seen(tensordict), [], False
        rows_and_rest = (*tensordict.batch_size, -1)
        done = self.done(tensordict).bool().reshape(rows_and_rest).any(-1)
        for key in leaf_keys(seen, self._keys_seen()):
            rows = ~entry(seen, key).isfinite().reshape(rows_and_rest).all(-1)
            if rows.any():
                ended = int((rows & done).sum())
                of_ended = of_ended or (key[0] == "next" and ended > 0)
                places.append(f"at {key!r} in {int(rows.sum())} of {rows.numel()} rows ({ended} of them done)")
        text = f"{type(self).__name__}: {' and '.join(found)} NaN. "
        if not places:
            text += "The batch is finite where the networks look: look at their parameters."
        else:
            text += f"The batch is not finite {', and '.join(places)}."
            if of_ended and not self.skip_done_states:
                text += " skip_done_states=True keeps the next states of ended rows from the networks."
        warn(text)

    def _output(
        self, tensordict: TensorDictBase, losses: dict[str, Tensor], scalars: dict[str, Tensor]
    ) -> TensorDictBase:
        """What :meth:`forward` returns: ``losses``, and ``scalars`` where the reduction has a place for them."""
        if self.reduction != "none":
            return TensorDict({**losses, **scalars}, batch_size=[])
        out = TensorDict(losses, batch_size=tensordict.batch_size)
        if self.scalar_output_mode == "non_tensor":
            for name, value in scalars.items():
                out.set_non_tensor(name, value)
        return out

    # --- what the networks see, and what they say ---

    def _keys_seen(self) -> Iterator[NestedKey]:
        """The entries that networks and targets read. A generator: it runs only if the batch has masks."""
        states = self._state_keys()
        yield from states
        yield from (key for key in map(unravel_key, self.qvalue_network.in_keys) if self._is_action(key))
        yield from map(next_key, states)
        yield next_key(self.tensor_keys.reward)

    def _seen(self, tensordict: TensorDictBase) -> TensorDictBase:
        """The batch as networks and targets see it; see :mod:`~gpubuf.objectives.batch`."""
        if self.skip_done_states:
            # First: masked rows take from the others what these have by then.
            flags = self.terminated(tensordict), self.done(tensordict)
            tensordict = without_ended(tensordict, self._state_keys(), *flags)
        present = tensordict.keys()
        for key in self._mask_keys:
            if (key if isinstance(key, str) else key[0]) in present:
                return self.without_masked(tensordict, self._keys_seen())
        return tensordict

    def _set_priority(self, tensordict: TensorDictBase, seen: TensorDictBase, priority: Tensor) -> Tensor:
        """Write the priority of each row into the batch, of rows without a target 0, and which rows have one.

        Masked rows have none either; what stands there is as TorchRL leaves it.

        Returns:
            What was written.
        """
        key, present = self._tensor_keys.priority, seen.keys()
        known = joint_mask(seen, (HAS_TARGET,), priority.shape) if HAS_TARGET in present else None
        if known is not None:
            priority = torch.where(known.reshape(priority.shape), priority, 0)
        if HAS_TARGET in present or COUNTS in present:
            counted = joint_mask(seen, (*self._mask_keys, HAS_TARGET), priority.shape)
            assert counted is not None
            tensordict.set(priority_mask_key(key), counted.reshape(priority.shape))
        tensordict.set(key, priority)
        return priority

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

    def _next_state(self, tensordict: TensorDictBase) -> TensorDictBase:
        """The entries of the next step in a TensorDict of their own."""
        following: TensorDictBase | None = tensordict.get("next", None)
        if following is None:
            raise KeyError(
                f"the batch has no 'next', where the step after is; its keys are {sorted(tensordict.keys())}"
            )
        return following.copy()

    @torch.no_grad()
    def _next_action(self, tensordict: TensorDictBase) -> tuple[TensorDictBase, Tensor]:
        """(next states with actions that the actor, or its target, draws in them, log-densities S). No gradient."""
        state = self._next_state(tensordict)
        _, log_prob = self._networks["actor_network"].target.run(state, self._act, state)
        return state, log_prob

    def _checked(self, q: Tensor, shape: torch.Size) -> Tensor:
        """``q``, which critics have returned; ValueError unless it goes with rows of ``shape``."""
        own = q.shape[1:-1] if q.ndim == len(shape) + 2 and q.shape[-1] == 1 else q.shape[1:]
        # Element by element: compiled code with sizes that vary takes tuples for different whose elements are equal.
        if len(own) != len(shape) or not all(map(operator.eq, own, shape)):
            raise ValueError(
                f"the critics' {self._tensor_keys.state_action_value!r} must be {[q.shape[0], *shape, 1]} to go with "
                f"{self._rows} {list(shape)}, got {list(q.shape)}"
            )
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


def _read_by(network: Any) -> list[NestedKey]:
    """The keys that ``network`` reads, without those of TensorDicts that its first modules fill entry by entry."""
    read = [unravel_key(key) for key in network.in_keys]
    parts: list[Any] = list(network.module) if isinstance(getattr(network, "module", None), nn.ModuleList) else []
    filled = {key[0] for part in parts for key in map(unravel_key, part.out_keys) if isinstance(key, tuple)}
    return [key for key in read if key not in filled or key in parts[0].in_keys]
