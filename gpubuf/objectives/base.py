"""The base class of losses: keys, networks with their targets, what these see of a batch, weights, masks, outputs."""

from __future__ import annotations

import contextlib
import copy
import inspect
import math
import operator
from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields
from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, ClassVar, Self, overload

import torch
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import TensorDictModuleBase, TensorDictParams, dispatch
from tensordict.utils import NestedKey, unravel_key
from torch import Tensor, nn

from gpubuf.data import arguments
from gpubuf.data.recording import current
from gpubuf.data.storage.layout import priority_mask_key
from gpubuf.kernels import td
from gpubuf.modules.fast_call import entry
from gpubuf.objectives.batch import (
    AUTO_LOSS_MASK_KEYS,
    COUNTS,
    HAS_TARGET,
    LOSS_FUNCTIONS,
    REDUCTIONS,
    joint_mask,
    leaf_keys,
    maybe,
    next_key,
    one_of,
    per_row,
    without_ended,
    without_masked,
)
from gpubuf.objectives.networks import Networks, ParametersByName
from gpubuf.objectives.values import ESTIMATORS, TD0Estimator, ValueEstimators

if TYPE_CHECKING:
    from gpubuf.objectives.options import CommonOptions, LossOptions


warn = partial(
    arguments.warn, inside=("gpubuf.data.arguments", "gpubuf.objectives", "torch.nn.modules.module", "tensordict.nn.")
)
"""A warning that points to the caller of a loss, or of its constructor, however many classes that has."""


def _target_params(name: str) -> property:
    """The target parameters of the network ``name``: without them the present ones, None where there is no network."""

    def get(loss: Any) -> Any:
        targets, own = loss._modules.get(f"target_{name}_params"), getattr(loss, f"{name}_params", None)
        return targets if targets is not None or own is None else own.data

    return property(get)


class LossModule(TensorDictModuleBase):
    """Base class of losses: reads a TensorDict, returns one with entries ``"loss_*"``, or ``"loss"`` alone.

    Losses here compare values with temporal-difference targets (Sutton, 1988). A subclass runs its networks, calls
    :meth:`td_target` on the values of the next step and :meth:`td_loss` on those of this one, and writes the error of
    each row to ``tensor_keys.priority``. Before the first target it calls :meth:`make_value_estimator`.

    It may define ``forward``, and keep the parameters of its networks as ``TensorDictParams`` called ``*_params``, and
    those of target networks as ``target_*_params`` (see :func:`~gpubuf.objectives.target_parameters`), where the target
    updates find them. Or it takes a :class:`~gpubuf.objectives.networks.Networks` by :meth:`_take`, or without critics
    by :meth:`_have`, and implements :meth:`_losses` with these parts:

    * ``self._networks``: actor and further networks, and ``self._critics``: ``online``, ``detached`` and ``target``
      values of all critics, see :class:`~gpubuf.objectives.networks.Critics`;
    * :meth:`_seen`: the batch as networks may see it;
    * :meth:`_set_priority` and :meth:`_output`.

    A subclass extends the dataclass ``_AcceptedKeys``, whose fields are the keys that :meth:`set_keys` accepts.

    Args:
        loss_function: "smooth_l1", "l2", "l1" or "huber" (the same as "smooth_l1").
        reduction: "mean", "sum" or "none".

    Attributes:
        reduction: "mean", "sum" or "none".
        use_prioritized_weights: True, False, or "auto": weigh the rows where the batch has weights.

    Raises:
        ValueError: there is no such loss function or reduction.
    """

    @dataclass
    class _AcceptedKeys:
        priority: NestedKey = "td_error"
        reward: NestedKey = "reward"
        done: NestedKey = "done"
        terminated: NestedKey = "terminated"
        priority_weight: NestedKey = "priority_weight"

    if TYPE_CHECKING:
        # The losses of a batch, or those of its entries as keyword arguments, in the order of `out_keys`.
        @overload
        def __call__(self, tensordict: TensorDictBase, /) -> TensorDict: ...
        @overload
        def __call__(self, **entries: Tensor) -> tuple[Tensor, ...]: ...
        def __call__(self, *args: Any, **kwargs: Any) -> Any: ...

        # Networks, parameters and buffers, which PyTorch's types say little of.
        def __getattr__(self, name: str) -> Any: ...

    __signature__: inspect.Signature
    #: The frozen dataclass of the keyword arguments of a loss of an actor and critics, which its signature lists.
    Options: ClassVar[Any] = None
    #: TorchRL's name of the keys.
    default_keys: type = _AcceptedKeys
    default_value_estimator = ValueEstimators.TD0
    #: Those that :meth:`make_value_estimator` takes. A loss that makes its targets without :meth:`td_target` has fewer.
    SUPPORTED_VALUE_ESTIMATORS: tuple[ValueEstimators, ...] = tuple(ESTIMATORS)

    #: Entries of the output: losses, and scalars that ``reduction="none"`` leaves out.
    loss_names: tuple[str, ...] = ()
    scalar_names: tuple[str, ...] = ()
    #: Further entries, which come last.
    further_names: tuple[str, ...] = ()
    #: Keys that an actor knows, and where it does.
    _keys_of_actors: tuple[tuple[str, str], ...] = (("action", "dist_sample_keys"),)
    #: The rows of the batch, for messages: a shape follows.
    _rows: ClassVar[str] = "log-densities of shape"
    _schedulable_buffers: frozenset[str] = frozenset()

    actor_network_params: TensorDictParams
    qvalue_network_params: TensorDictParams
    target_actor_network_params = _target_params("actor_network")
    target_qvalue_network_params = _target_params("qvalue_network")
    target_value_network_params = _target_params("value_network")

    skip_done_states = False
    scalar_output_mode: str | None = None
    #: Whether targets move only where the policy learns.
    delayed_targets = False
    #: Whether NaN was named already, or whoever reads the losses names it.
    nan_named = False
    _networks: Any = None
    _out_keys: list[NestedKey] | None = None

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        cls.default_keys = cls._AcceptedKeys
        if cls.Options is not None:
            own, more = (inspect.signature(each).parameters.values() for each in (cls.__init__, cls.Options))
            named = [each for each in own if each.kind is not each.VAR_KEYWORD][1:]
            others = [each.replace(kind=each.KEYWORD_ONLY) for each in more if each.name not in {p.name for p in named}]
            cls.__signature__ = inspect.Signature([*named, *others])

    def __init__(self, *, loss_function: str = "smooth_l1", reduction: str = "mean") -> None:
        super().__init__()
        self.reduction = one_of(REDUCTIONS, reduction, "reduction")
        self.loss_function = one_of(LOSS_FUNCTIONS, loss_function, "loss_function")
        self.use_prioritized_weights: bool | str = "auto"
        self.loss_mask_key = "auto"
        self._tensor_keys: Any = self._AcceptedKeys()
        self.links_version = 0
        self._parameters_by_name = ParametersByName({})
        # Of this name and kind, because TorchRL's target updaters write it.
        self._has_update_associated = {"targets": False}
        self._first_call = self.register_forward_pre_hook(_check_updater).id
        self.register_load_state_dict_pre_hook(_before_loading)  # type: ignore[no-untyped-call]
        self.register_load_state_dict_post_hook(_after_loading)  # type: ignore[no-untyped-call]

    def __setattr__(self, name: str, value: Any) -> None:
        # `loss.log_alpha = -1.0` sets the value in place, which a captured graph sees.
        if name in type(self)._schedulable_buffers and isinstance(value, int | float):
            tensor = self._parameters.get(name, self._buffers.get(name))
            if tensor is not None:
                if math.isnan(value):
                    raise ValueError(f"{name} must be a number, got {value}")
                with torch.no_grad():
                    tensor.fill_(value)
                return
        super().__setattr__(name, value)

    # --- networks ---

    def _take(self, actor_network: Any, qvalue_network: Any, arguments: dict[str, Any]) -> Any:
        """Have the options that ``arguments`` make as attributes, run the networks, and know the keys of the actor.

        Returns:
            The options.
        """
        options: LossOptions = self.Options(**arguments)
        single = {"actor_network": (actor_network, options.delay_actor), **options.further}
        networks = Networks(single, qvalue_network, options)
        self._actor, self._critics = networks.single["actor_network"], networks.critics
        self._have(networks, options)
        return options

    def _have(self, networks: Networks, options: CommonOptions) -> None:
        """Run ``networks``, and have the options as attributes."""
        for field in fields(options):
            if field.name not in options.CONSUMED:
                setattr(self, field.name, getattr(options, field.name))
        if self.reduction == "none" and self.scalar_output_mode is None and self.scalar_names:
            warn(
                f"{type(self).__name__} with reduction='none' leaves {' and '.join(self.scalar_names)}, which are "
                "scalars, out of its output. Pass scalar_output_mode='exclude' to silence this warning, or "
                "'non_tensor' to have them as non-tensor data."
            )
            self.scalar_output_mode = "exclude"
        self._networks = networks
        for name, each in networks.every.items():
            # Modules are no submodules: their tensors are registered once, as the `*_params`.
            self.__dict__[name] = each.network
        for name, params in networks.parameters().items():
            setattr(self, name, params)
        self.refresh_links()
        first = next(iter(networks.single.values())).network
        found = {key: getattr(first, name, None) for key, name in self._keys_of_actors}
        self.set_keys(**{key: next(iter(value)) for key, value in found.items() if value})

    @property
    def device(self) -> torch.device:
        """The device of the parameters."""
        return next((parameter.device for parameter in self.parameters()), torch.device("cpu"))

    def refresh_links(self) -> None:
        """Look the parameters up again after they were moved or replaced. A subclass extends it."""
        self.links_version += 1
        if self._networks is not None:
            registered = {name: part for name, part in self._modules.items() if isinstance(part, TensorDictParams)}
            self._networks.refresh(registered)
            self._parameters_by_name = ParametersByName(registered)

    @torch.no_grad()
    def reset_parameters_recursive(self) -> None:  # type: ignore[override]
        """Draw the parameters of all networks anew, in place. Target parameters become equal to them."""
        for each in self._networks.every.values():
            each.redraw()
        if has_targets(self):
            for target, source in pairs_of(self):
                target.copy_(source)

    @property
    def vmap_randomness(self) -> str:
        """How random operations behave among stacked critics: "error", "same" or "different"."""
        randomness: str = self._critics.vmap_randomness
        return randomness

    def set_vmap_randomness(self, value: str) -> None:
        """Choose "error", "same" or "different"; see ``torch.vmap``. By default "different" where there is dropout."""
        self._critics.randomness = value

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        # A TensorDict would copy its tensors apart from the networks and optimisers that have them, too.
        for part in self._modules.values():
            if isinstance(part, TensorDictParams):
                tensors = part.apply(lambda tensor: copy.deepcopy(tensor, memo))
                memo[id(part)] = TensorDictParams(tensors, no_convert=True)
        out: Any = object.__new__(type(self))
        memo[id(self)] = out
        out.__setstate__(copy.deepcopy(self.__dict__, memo))
        return out

    def __setstate__(self, state: dict[str, Any]) -> None:
        # A TensorDict is unpickled apart from the modules that share its tensors.
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self.refresh_links()

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        out = super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self.refresh_links()
        return out

    def after_loading(self) -> None:
        """Called after ``load_state_dict``."""
        self.refresh_links()

    def target_pairs(self) -> list[tuple[Tensor, Tensor]]:
        """(target, source) of every target parameter and buffer of this loss.

        Raises:
            RuntimeError: there is none.
        """
        return pairs_of(self)

    # --- keys ---

    @property
    def tensor_keys(self) -> Any:
        """The keys in use; see :meth:`set_keys`."""
        return self._tensor_keys

    def set_keys(self, **kwargs: NestedKey | None) -> None:
        """Set where the loss reads and writes; None restores the default of that key.

        Raises:
            ValueError: there is no such key.
        """
        accepted = {field.name for field in fields(self._AcceptedKeys)}
        default = self._AcceptedKeys()
        for name, key in kwargs.items():
            if name not in accepted:
                raise ValueError(f"{name} is not an accepted tensordict key. Accepted keys are: {sorted(accepted)}.")
            setattr(self._tensor_keys, name, getattr(default, name) if key is None else key)
        if self._networks is not None:
            keys = self._tensor_keys
            # What networks read, other than actions; what critics read of these; what networks and targets read.
            self._states, actions = self._networks.keys(keys.action)
            following = [next_key(key) for key in self._states]
            self._read = [*self._states, *actions, *following, next_key(keys.reward)]
            flags = (next_key(key) for key in (keys.reward, keys.done, keys.terminated))
            wanted = [*(actions or [keys.action]), *flags, *self._states, *following]
            self.in_keys = list(dict.fromkeys(map(unravel_key, wanted)))

    @property
    def out_keys(self) -> list[NestedKey]:
        """The entries that :meth:`forward` returns; of those that you assign, or give to ``select_out_keys``, a part.

        Raises:
            ValueError: one that is assigned is not among them.
        """
        return self._every_out_key() if self._out_keys is None else self._out_keys

    @out_keys.setter
    def out_keys(self, value: Iterable[NestedKey]) -> None:
        chosen, every = [unravel_key(key) for key in value], self._every_out_key()
        if every and (unknown := [key for key in chosen if key not in every]):
            raise ValueError(f"{type(self).__name__} returns {every}, got {unknown}")
        self._out_keys = chosen

    def _every_out_key(self) -> list[NestedKey]:
        left_out = self.reduction == "none" and self.scalar_output_mode != "non_tensor"
        return [*self.loss_names, *(() if left_out else self.scalar_names), *self.further_names]

    # --- a call ---

    @dispatch
    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:  # type: ignore[override]
        """The losses of a batch; see the class. Writes the priority entry into ``tensordict``."""
        return self._evaluated(self._losses, tensordict)

    def _losses(self, tensordict: TensorDictBase) -> TensorDictBase:
        """The losses of a batch, made by :meth:`_output`."""
        raise NotImplementedError

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
                self._networks.refresh(given)
            found = losses(tensordict)
            if not (torch.compiler.is_compiling() or self.nan_named or current.recording is not None):
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
        key = self.tensor_keys.action
        actor: Any = getattr(self, "actor_network", None)
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

    def _look_for_nan(self, tensordict: TensorDictBase, losses: TensorDictBase) -> None:
        """:meth:`warn_of_nan` where that costs no synchronisation, and tensors have values."""
        for name, value in losses.items():
            if not name.startswith("loss"):
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
        names = [str(name) for name in self.out_keys if name in losses.keys() and str(name).startswith("loss")]
        found = [name for name in names if losses.get(name).isnan().any()]
        if not found or self.nan_named:
            return
        self.nan_named = True
        seen, places, of_ended = self._seen(tensordict), [], False
        rows_and_rest = (*tensordict.batch_size, -1)
        done = self.done(tensordict).bool().reshape(rows_and_rest).any(-1)
        for key in leaf_keys(seen, self._read):
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

    # --- rows of a batch ---

    def _seen(self, tensordict: TensorDictBase) -> TensorDictBase:
        """The batch as networks and targets see it; see :mod:`~gpubuf.objectives.batch`."""
        if self.skip_done_states:
            # First: masked rows take from the others what these have by then.
            flags = self.terminated(tensordict), self.done(tensordict)
            tensordict = without_ended(tensordict, self._states, *flags)
        present = tensordict.keys()
        for key in self._mask_keys:
            if (key if isinstance(key, str) else key[0]) in present:
                return self.without_masked(tensordict, self._read)
        return tensordict

    def without_masked(self, tensordict: TensorDictBase, keys: Iterable[NestedKey]) -> TensorDictBase:
        """The batch with finite numbers in masked rows, in the entries at ``keys``; the batch itself if it has no mask.

        The gradient of a masked row is 0, but 0 times NaN reaches the parameters of a network that has seen NaN.
        """
        return without_masked(tensordict, self._mask_keys, keys)

    @property
    def loss_mask_key(self) -> NestedKey | None:
        """Key of the mask, or None; "auto" for those of :data:`~gpubuf.objectives.batch.AUTO_LOSS_MASK_KEYS`."""
        return self._loss_mask_key

    @loss_mask_key.setter
    def loss_mask_key(self, key: NestedKey | None) -> None:
        self._loss_mask_key = key
        # Where the batch may have masks.
        self._mask_keys = AUTO_LOSS_MASK_KEYS if key == "auto" else () if key is None else (key,)

    def row_weights(
        self, tensordict: TensorDictBase, shape: torch.Size, target: bool = False
    ) -> tuple[Tensor | None, Tensor | None]:
        """(importance weights, mask) of a loss of ``shape``, each with one element per row or None.

        Args:
            tensordict: the batch.
            shape: of the loss.
            target: whether the loss compares with what was made of the next states: rows without a target do not count.

        Raises:
            KeyError: weights are demanded, and the batch has none.
        """
        key, present = self._tensor_keys.priority_weight, tensordict.keys()
        masks = (*self._mask_keys, HAS_TARGET) if target else self._mask_keys
        for each in (key, *masks):
            if (each if isinstance(each, str) else each[0]) in present:
                break
        else:
            if self.use_prioritized_weights is not True:
                return None, None
        weight = maybe(tensordict, key) if self.use_prioritized_weights else None
        if weight is not None:
            weight = per_row(weight, shape, str(key))
        elif self.use_prioritized_weights is True:
            raise KeyError(f"use_prioritized_weights=True, but the batch has no {key!r}")
        return weight, joint_mask(tensordict, masks, shape)

    def terminated(self, tensordict: TensorDictBase) -> Tensor:
        """Which rows do not bootstrap: those terminated, or, where the batch does not say, those done."""
        value: Tensor | None = tensordict.get(unravel_key(("next", self._tensor_keys.terminated)), None)
        return entry(tensordict, unravel_key(("next", self._tensor_keys.done))) if value is None else value

    def done(self, tensordict: TensorDictBase) -> Tensor:
        """Which rows end a trajectory: those done, or, where the batch does not say, those terminated."""
        value: Tensor | None = tensordict.get(unravel_key(("next", self._tensor_keys.done)), None)
        return entry(tensordict, unravel_key(("next", self._tensor_keys.terminated))) if value is None else value

    def bootstrap_rows(self, tensordict: TensorDictBase, shape: torch.Size) -> tuple[Tensor, Tensor, Tensor | None]:
        """(rewards, terminated flags, steps that each reward spans or None), each with one element for each row.

        Args:
            tensordict: the batch.
            shape: of a row of the loss, S.

        Raises:
            ValueError: an entry does not fit ``shape``.
        """
        keys = self._tensor_keys
        steps: Tensor | None = tensordict.get("steps_to_next_obs", None)
        return (
            per_row(entry(tensordict, unravel_key(("next", keys.reward))), shape, str(keys.reward)),
            per_row(self.terminated(tensordict), shape, str(keys.terminated)),
            None if steps is None else per_row(steps, shape, "steps_to_next_obs"),
        )

    # --- targets, and what is compared with them ---

    def make_value_estimator(
        self, value_type: Any = None, *, device: torch.device | str | None = None, **hyperparams: Any
    ) -> Self:
        """Choose how targets are made.

        Args:
            value_type: one of ``SUPPORTED_VALUE_ESTIMATORS``: its name, or the member of an enum of that name. None for
                TD0. TD1 and TDLambda need batches of sequences, ``[B, T]``.
            device: of the hyperparameters; default: that of the loss.
            **hyperparams: ``gamma`` (0.99), and for TDLambda ``lmbda`` (0.95).

        Returns:
            The loss itself.

        Raises:
            NotImplementedError: an estimator that this loss does not support.
            TypeError: a hyperparameter that the estimator does not have.
            ValueError: an unknown estimator, or a number out of [0, 1].
        """
        kind = self.default_value_estimator if value_type is None else ValueEstimators.parse(value_type)
        if kind not in self.SUPPORTED_VALUE_ESTIMATORS:
            names = ", ".join(each.name for each in self.SUPPORTED_VALUE_ESTIMATORS)
            raise NotImplementedError(f"{type(self).__name__} bootstraps with {names} only, got {value_type=}")
        estimator = ESTIMATORS[kind]
        known = estimator.hyperparameters
        if set(hyperparams) - set(known):
            count = "one hyperparameter" if len(known) == 1 else f"{len(known)} hyperparameters"
            raise TypeError(f"{kind.name} has {count}, {' and '.join(known)}, got {sorted(hyperparams)}")
        self._value_estimator = estimator(**hyperparams, device=self.device if device is None else device)
        return self

    @property
    def value_estimator(self) -> TD0Estimator:
        """The estimator that makes the targets: its ``gamma`` is the discount, its ``tensor_keys`` are the loss's."""
        keys = self.tensor_keys
        value = getattr(keys, "value", getattr(keys, "state_action_value", None))
        own = {"reward": keys.reward, "done": keys.done, "terminated": keys.terminated, "value": value}
        self._value_estimator.tensor_keys = SimpleNamespace(**own)
        return self._value_estimator

    @torch.no_grad()
    def td_target(
        self,
        next_q: Tensor,
        tensordict: TensorDictBase,
        shape: torch.Size,
        next_log_prob: Tensor | None = None,
        alpha: Tensor | None = None,
    ) -> Tensor:
        """What the value estimator makes of rewards and next values. No gradient.

        By default ``reward + gamma^steps * min_k next_q[k]``, without the value where terminated; see
        :mod:`gpubuf.objectives.values` for the others.

        Args:
            next_q: values of the next step by N critics, ``[N, *shape]`` or ``[N, *shape, 1]``.
            tensordict: the batch. ``"steps_to_next_obs"`` in it is the number of steps that a reward spans.
            shape: of a row of the loss, S.
            next_log_prob: log-densities of the next actions, S, for a soft target; with ``alpha``.
            alpha: the temperature, ``[]``.

        Returns:
            The targets, S.
        """
        reward, terminated, steps = self.bootstrap_rows(tensordict, shape)
        if next_log_prob is None:
            # Without log-densities the target has the shape of the reward.
            reward = reward.reshape(shape)
        return self._value_estimator.target(
            (next_q, next_log_prob, alpha, reward, terminated), steps, self, tensordict, shape
        )

    def td_loss(self, q: Tensor, target: Tensor, tensordict: TensorDictBase) -> tuple[Tensor, Tensor]:
        """(loss, ``max_k |q[k] - target|`` of each row) of N critics, summed over them.

        Args:
            q: values, ``[N, *S]`` or ``[N, *S, 1]``.
            target: what :meth:`td_target` returned, S.
            tensordict: the batch, for its importance weights and masks.
        """
        weight, mask = self.row_weights(tensordict, target.shape, target=True)
        code = LOSS_FUNCTIONS[self.loss_function]
        loss, td_error, _ = td.td_loss_direct(q, target, weight, mask, code, REDUCTIONS[self.reduction])
        return loss, td_error

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


def has_targets(loss: nn.Module) -> bool:
    """Whether ``loss`` has target parameters."""
    return any(name.startswith("target_") and name.endswith("_params") for name in loss._modules)


def pairs_of(loss: nn.Module) -> list[tuple[Tensor, Tensor]]:
    """(target, source) of every tensor in ``target_*_params`` and ``*_params`` of a loss, of this library or another.

    Raises:
        RuntimeError: there is none.
    """
    pairs: list[tuple[Tensor, Tensor]] = []
    for name, targets in loss.named_children():
        if name.startswith("target_") and name.endswith("_params"):
            sources: Any = getattr(loss, name.removeprefix("target_"))
            pairs += [(targets.get(key), sources.get(key)) for key in targets.keys(True, True)]  # type: ignore[operator]
    if not pairs:
        raise RuntimeError("Did not find any target parameters or buffers in the loss module.")
    return pairs


# It begins as TorchRL's: programs filter by these words.
NO_UPDATER = (
    "No target network updater has been associated with this loss module, which has target parameters: make one, such "
    "as gpubuf.SoftUpdate(loss, tau=0.005), or update them yourself."
)


def _check_updater(loss: LossModule, _: Any) -> None:
    """Before the first call: warn if nothing is going to update the targets. Then cost nothing any more."""
    if torch.compiler.is_compiling():
        return
    loss._forward_pre_hooks.pop(loss._first_call, None)
    if has_targets(loss) and not all(loss._has_update_associated.values()):
        warn(NO_UPDATER)


def _before_loading(loss: LossModule, *_: Any) -> None:
    if loss._networks is not None:
        for each in loss._networks.every.values():
            each.before_loading()


def _after_loading(loss: LossModule, _: Any) -> None:
    loss.after_loading()
