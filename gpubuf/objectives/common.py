"""What losses share: configurable keys, importance weights, masks, target parameters."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

import torch
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModuleBase
from tensordict.utils import NestedKey, unravel_key
from torch import Tensor

from gpubuf.kernels import td
from gpubuf.objectives.shapes import per_row

REDUCTIONS = {"none": td.NONE, "mean": td.MEAN, "sum": td.SUM}
LOSS_FUNCTIONS = {"l1": td.L1, "l2": td.L2, "smooth_l1": td.SMOOTH_L1, "huber": td.SMOOTH_L1}

#: Entries of a batch that, where present, say which rows count; all that are there must agree.
AUTO_LOSS_MASK_KEYS: tuple[NestedKey, ...] = (("collector", "mask"), "shifted_valid")


def lookup(table: dict[str, int], name: str, argument: str) -> int:
    """The code of ``name``; ValueError if there is none."""
    if name not in table:
        raise ValueError(f"{argument} must be one of {sorted(table)}, got {name!r}")
    return table[name]


def next_key(key: NestedKey) -> NestedKey:
    """Where a transition has the value of ``key`` after its step."""
    return unravel_key(("next", key))


def one_of(choices: tuple[Any, ...], value: Any, argument: str) -> Any:
    """``value``; ValueError if it is none of ``choices``."""
    # By type too: 1 is equal to True.
    if not any(type(value) is type(choice) and value == choice for choice in choices):
        raise ValueError(f"{argument} must be one of {list(choices)}, got {value!r}")
    return value


class LossModule(TensorDictModuleBase):
    """Base class of losses: reads a TensorDict, returns one with entries ``"loss_*"``.

    A subclass defines a dataclass ``_AcceptedKeys``, whose fields are the keys that :meth:`set_keys` accepts.

    Attributes:
        reduction: "mean", "sum" or "none".
        use_prioritized_weights: True, False, or "auto": weigh the rows where the batch has weights.
        loss_mask_key: key of the mask, "auto" for those of :data:`AUTO_LOSS_MASK_KEYS`, or None for no mask.
    """

    @dataclass
    class _AcceptedKeys:
        pass

    _schedulable_buffers: frozenset[str] = frozenset()

    def __init__(self) -> None:
        super().__init__()
        self.reduction = "mean"
        self.use_prioritized_weights: bool | str = "auto"
        self.loss_mask_key: NestedKey | None = "auto"
        self._tensor_keys = self._AcceptedKeys()
        self.links_version = 0
        self.register_load_state_dict_post_hook(_take_up_loaded)

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

    def __getattr__(self, name: str) -> Any:
        if name.startswith("target_") and name.endswith("_params"):
            params = self._modules.get(name)
            # Without delayed parameters, the present ones serve as targets.
            return params if params is not None else getattr(self, name.removeprefix("target_")).data
        return super().__getattr__(name)

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
        """Take up parameters anew after they were moved or replaced. A subclass extends it."""
        self.links_version += 1

    def take_up_loaded(self) -> None:
        """Called after ``load_state_dict``."""
        self.refresh_links()

    def __setstate__(self, state: dict[str, Any]) -> None:
        # A TensorDict is copied (or unpickled) apart from the modules that share its tensors.
        super().__setstate__(state)
        self.refresh_links()

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        out = super()._apply(fn, recurse)
        self.refresh_links()
        return out

    def target_pairs(self) -> list[tuple[Tensor, Tensor]]:
        """(target, source) of every target parameter and buffer of this loss.

        Raises:
            RuntimeError: there is none.
        """
        pairs: list[tuple[Tensor, Tensor]] = []
        for name, targets in self._modules.items():
            if name.startswith("target_") and name.endswith("_params") and targets is not None:
                sources: Any = getattr(self, name.removeprefix("target_"))
                pairs += [(targets.get(key), sources.get(key)) for key in targets.keys(True, True)]  # type: ignore[operator]
        if not pairs:
            raise RuntimeError("Did not find any target parameters or buffers in the loss module.")
        return pairs

    @property
    def _mask_keys(self) -> tuple[NestedKey, ...]:
        """Where masks are looked for."""
        chosen = self.loss_mask_key
        return AUTO_LOSS_MASK_KEYS if chosen == "auto" else () if chosen is None else (chosen,)

    def _row_weights(self, tensordict: TensorDictBase, shape: torch.Size) -> tuple[Tensor | None, Tensor | None]:
        """(importance weights, mask) of a loss of ``shape``, each with one element per row or None."""
        key = self.tensor_keys.priority_weight
        weight = mask = None
        if self.use_prioritized_weights in (True, "auto"):
            weight = tensordict.get(key, None)
            if weight is not None:
                weight = per_row(weight, shape, str(key))
            elif self.use_prioritized_weights is True:
                raise KeyError(f"use_prioritized_weights=True, but the batch has no {key!r}")
        for mask_key in self._mask_keys:
            entry = tensordict.get(mask_key, None)
            if entry is not None:
                entry = per_row(entry, shape, str(mask_key))
                mask = entry if mask is None else mask.reshape(shape) & entry.reshape(shape)
        return weight, mask


def _take_up_loaded(loss: LossModule, _: Any) -> None:
    loss.take_up_loaded()


def refuse_deprecated(**kwargs: Any) -> None:
    """Raise RuntimeError for an argument that became a key."""
    for name, value in kwargs.items():
        if value is not None:
            raise RuntimeError(
                f"Setting {name!r} via the constructor is deprecated, use .set_keys(<key>='some_key') instead."
            )


def warn(text: str) -> None:
    """A warning that points to the caller of the loss's constructor."""
    warnings.warn(text, category=UserWarning, stacklevel=3)
