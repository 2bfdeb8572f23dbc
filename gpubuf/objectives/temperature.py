"""The temperature of maximum-entropy losses, and the entropy that it aims at."""

from __future__ import annotations

import math
from typing import Any

import torch
from tensordict import TensorDictBase
from tensordict.utils import NestedKey, unravel_key
from torch import Tensor, nn

from gpubuf.objectives.base import LossModule


class TemperatureLossModule(LossModule):
    """A loss with a temperature, learnt or fixed.

    Attributes:
        log_alpha: logarithm of the temperature, ``[]``: a parameter, or a buffer where it is fixed.
    """

    log_alpha: Tensor
    _target_entropy: Tensor
    _schedulable_buffers = frozenset({"alpha_init", "min_log_alpha", "max_log_alpha", "log_alpha"})

    def _set_temperature(
        self,
        like: Tensor | None,
        alpha_init: float,
        min_alpha: float | None,
        max_alpha: float | None,
        fixed_alpha: bool,
    ) -> None:
        """Register the temperature and its bounds, on the device of ``like``, a parameter of the policy."""
        if not 0 < alpha_init < math.inf:
            raise ValueError(f"alpha_init must be positive and finite, got {alpha_init}")
        self.fixed_alpha = fixed_alpha
        dtype = torch.float64 if like is not None and like.dtype is torch.float64 else torch.get_default_dtype()
        device = None if like is None else like.device
        self.register_buffer("alpha_init", torch.tensor(alpha_init, dtype=dtype, device=device))
        if min_alpha or max_alpha:
            low, high = min_alpha or 0.0, max_alpha or math.inf
            if not (0 <= low <= high and low < math.inf):
                raise ValueError(
                    "the temperature needs 0 <= min_alpha <= max_alpha, and a finite min_alpha, got "
                    f"{min_alpha} and {max_alpha}"
                )
            logs = (math.log(low) if low else -math.inf, math.log(high))
        for i, name in enumerate(("min_log_alpha", "max_log_alpha")):
            bound = torch.tensor(logs[i], dtype=dtype, device=device) if min_alpha or max_alpha else None
            self.register_buffer(name, bound)
        log_alpha = torch.tensor(math.log(alpha_init), dtype=dtype, device=device)
        if self.fixed_alpha:
            self.register_buffer("log_alpha", log_alpha)
        else:
            self.log_alpha = nn.Parameter(log_alpha)

    def _set_target_entropy(self, target_entropy: str | float, action_spec: Any, action_key: NestedKey) -> None:
        # A buffer in any case, so that every state_dict has it. NaN until it is known.
        self.register_buffer("_target_entropy", torch.full_like(self.alpha_init, math.nan))
        self._target_entropy_known = False
        if isinstance(target_entropy, str):
            if target_entropy != "auto":
                raise ValueError(f"target_entropy must be a number or 'auto', got {target_entropy!r}")
            size = _action_size(action_spec, action_key)
            if size is None:
                return
            target_entropy = self._automatic_entropy(size)
        self.target_entropy = target_entropy

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
        if isinstance(value, int | float) and not math.isfinite(value):
            raise ValueError(f"target_entropy must be finite, got {value}")
        self._target_entropy.fill_(value)
        self._target_entropy_known = True

    def _learn_target_entropy(self, action: Tensor | TensorDictBase, shape: torch.Size) -> None:
        """Take "auto" from the first actions, which have one log-density for each of ``shape``."""
        if not self._target_entropy_known:
            parts = [action] if isinstance(action, Tensor) else action.values(True, True)
            self.target_entropy = self._automatic_entropy(sum(part.shape[len(shape) :].numel() for part in parts))

    @property
    def alpha(self) -> Tensor:
        """The temperature, within its bounds, ``[]``, without gradient."""
        if self.min_log_alpha is not None:
            self.log_alpha.detach().clamp_(self.min_log_alpha, self.max_log_alpha)
        return self.log_alpha.detach().exp()

    _alpha = alpha

    def alpha_loss(self, log_prob: Tensor) -> Tensor:
        """``-log_alpha (log_prob + target_entropy)`` of each row, neither weighted nor reduced, as TorchRL's.

        Args:
            log_prob: log-densities S of the actor's actions, which :meth:`actor_loss` returns.
        """
        return -self.log_alpha * (log_prob.detach() + self.target_entropy)

    @property
    def device(self) -> torch.device:
        """The device of the temperature."""
        return self.log_alpha.device


def _action_size(spec: Any, key: NestedKey) -> int | None:
    """Components of one action in ``spec``, without the dimensions of the containers that hold it; None if unknown."""
    path = unravel_key(key)
    container = 0
    for name in path if isinstance(path, tuple) else (path,):
        if not hasattr(spec, "keys"):
            break
        container = len(getattr(spec, "shape", None) or ())
        spec = spec[name]
    return _components(spec, container)


def _components(spec: Any, batch_dims: int) -> int | None:
    """Elements of ``spec`` beyond ``batch_dims`` dimensions, of all its leaves if it is composite."""
    if hasattr(spec, "keys"):
        sizes = [_components(spec[name], batch_dims) for name in spec.keys() if spec[name] is not None]
        known = [size for size in sizes if size is not None]
        return sum(known) if known and len(known) == len(sizes) else None
    shape = getattr(spec, "shape", None)
    return None if shape is None else math.prod(tuple(shape)[batch_dims:])
