"""Value estimators: they make a target from a reward and the value of the next state."""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from typing import Any

import torch
from torch import Tensor, nn

from gpubuf.kernels import td


class ValueEstimators(Enum):
    """The estimators that TorchRL names. Here: TD0."""

    TD0 = "Bootstrapped TD (1-step return)"
    TD1 = "TD(1) (infinity-step return)"
    TDLambda = "TD(lambda)"
    GAE = "Generalized advantage estimate"
    VTrace = "V-trace"

    @classmethod
    def parse(cls, value: Any) -> ValueEstimators:
        """The member that ``value`` names: a member, its name (in any case), or an enum of another library.

        Raises:
            ValueError: there is no such estimator.
        """
        name = value if isinstance(value, str) else getattr(value, "name", None)
        for member in cls:
            if isinstance(name, str) and name.lower() in (member.name.lower(), member.value.lower()):
                return member
        raise ValueError(f"value_type must be one of {[member.name for member in cls]}, got {value!r}")


class TD0Estimator(nn.Module):
    """``reward + gamma^steps * V(next)``, without V where terminated (Sutton, 1988).

    Args:
        gamma: discount, in [0, 1].
        device: of the discount.

    Attributes:
        gamma: the discount, float64 ``[]``, read on the device at every use: set it with ``fill_``.

    Raises:
        ValueError: the discount is out of range.
    """

    gamma: Tensor

    def __init__(self, gamma: float, device: torch.device | str | None = None) -> None:
        super().__init__()
        if not 0 <= gamma <= 1:
            raise ValueError(f"gamma must be in [0, 1], got {gamma}")
        self.register_buffer("gamma", torch.tensor(gamma, dtype=torch.float64, device=device))

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> TD0Estimator:
        # Rounded to bfloat16 it would be another discount: follow the device only.
        precise = self.gamma
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self.gamma = precise.to(self.gamma.device)
        return self

    def soft_target(
        self,
        next_q: Tensor,
        next_log_prob: Tensor | None,
        alpha: Tensor | None,
        reward: Tensor,
        terminated: Tensor,
        steps: Tensor | None,
    ) -> Tensor:
        """See :data:`gpubuf.kernels.td.soft_td_target`."""
        target: Tensor = td.soft_td_target(next_q, next_log_prob, alpha, reward, terminated, self.gamma, steps)
        return target
