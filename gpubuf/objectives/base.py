"""The base class of losses: keys, parameters and their targets, importance weights and masks."""

from __future__ import annotations

import copy
import math
import sys
import warnings
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, overload

import torch
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import TensorDictModuleBase, TensorDictParams
from tensordict.utils import NestedKey
from torch import Tensor, nn

from gpubuf.objectives.batch import AUTO_LOSS_MASK_KEYS, HAS_TARGET, joint_mask, maybe, per_row, without_masked


def one_of(choices: Collection[Any], value: Any, argument: str) -> Any:
    """``value``; ValueError if it is none of ``choices``."""
    # By type too: 1 is equal to True.
    if not any(type(value) is type(choice) and value == choice for choice in choices):
        raise ValueError(f"{argument} must be one of {list(choices)}, got {value!r}")
    return value


def warn(text: str) -> None:
    """A warning that points to the caller of a loss, or of its constructor, however many classes that has."""
    level, frame = 1, sys._getframe()
    inside = ("gpubuf.objectives", "torch.nn.modules.module", "tensordict.nn.")
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith(inside):
        level, frame = level + 1, frame.f_back
    warnings.warn(text, category=UserWarning, stacklevel=level)


class LossModule(TensorDictModuleBase):
    """Base class of losses: reads a TensorDict, returns one with entries ``"loss_*"``.

    A subclass defines a dataclass ``_AcceptedKeys``, whose fields are the keys that :meth:`set_keys` accepts. It keeps
    the parameters of its networks as ``TensorDictParams`` called ``*_params``, and those of target networks as
    ``target_*_params`` (see :func:`~gpubuf.objectives.target_parameters`), where the target updates find them.

    Attributes:
        reduction: "mean", "sum" or "none".
        use_prioritized_weights: True, False, or "auto": weigh the rows where the batch has weights.
    """

    @dataclass
    class _AcceptedKeys:
        pass

    if TYPE_CHECKING:
        # The losses of a batch, or those of its entries as keyword arguments, in the order of `out_keys`.
        @overload
        def __call__(self, tensordict: TensorDictBase, /) -> TensorDict: ...
        @overload
        def __call__(self, **entries: Tensor) -> tuple[Tensor, ...]: ...
        def __call__(self, *args: Any, **kwargs: Any) -> Any: ...

        # Networks, parameters and buffers, which PyTorch's types say little of.
        def __getattr__(self, name: str) -> Any: ...

    #: TorchRL's name of the keys.
    default_keys: type = _AcceptedKeys
    _schedulable_buffers: frozenset[str] = frozenset()

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        cls.default_keys = cls._AcceptedKeys

    def __init__(self) -> None:
        super().__init__()
        self.reduction = "mean"
        self.use_prioritized_weights: bool | str = "auto"
        self.loss_mask_key = "auto"
        self._tensor_keys: Any = self._AcceptedKeys()
        self.links_version = 0
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

    @property
    def device(self) -> torch.device:
        """The device of the parameters."""
        return next((parameter.device for parameter in self.parameters()), torch.device("cpu"))

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

    def refresh_links(self) -> None:
        """Look the parameters up again after they were moved or replaced. A subclass extends it."""
        self.links_version += 1

    def before_loading(self) -> None:
        """Called before ``load_state_dict`` writes into the tensors."""

    def after_loading(self) -> None:
        """Called after ``load_state_dict``."""
        self.refresh_links()

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

    def target_pairs(self) -> list[tuple[Tensor, Tensor]]:
        """(target, source) of every target parameter and buffer of this loss.

        Raises:
            RuntimeError: there is none.
        """
        return pairs_of(self)

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

    @property
    def loss_mask_key(self) -> NestedKey | None:
        """Key of the mask, or None; "auto" for those of :data:`~gpubuf.objectives.batch.AUTO_LOSS_MASK_KEYS`."""
        return self._loss_mask_key

    @loss_mask_key.setter
    def loss_mask_key(self, key: NestedKey | None) -> None:
        self._loss_mask_key = key
        # Where the batch may have masks.
        self._mask_keys = AUTO_LOSS_MASK_KEYS if key == "auto" else () if key is None else (key,)

    def without_masked(self, tensordict: TensorDictBase, keys: Iterable[NestedKey]) -> TensorDictBase:
        """The batch with finite numbers in masked rows, in the entries at ``keys``; the batch itself if it has no mask.

        The gradient of a masked row is 0, but 0 times NaN reaches the parameters of a network that has seen NaN.
        """
        return without_masked(tensordict, self._mask_keys, keys)


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
    targets = any(name.startswith("target_") and name.endswith("_params") for name in loss._modules)
    if targets and not all(loss._has_update_associated.values()):
        warn(NO_UPDATER)


def _before_loading(loss: LossModule, *_: Any) -> None:
    loss.before_loading()


def _after_loading(loss: LossModule, _: Any) -> None:
    loss.after_loading()
