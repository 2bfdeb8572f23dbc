"""Value estimators: what temporal-difference losses compare values with."""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from typing import Any

import torch
from tensordict import TensorDictBase
from torch import Tensor, nn

from gpubuf.kernels import td
from gpubuf.kernels._registry import without_dispatch
from gpubuf.objectives.batch import per_row


class ValueEstimators(Enum):
    """The estimators that TorchRL names. Here: TD0, TD1 and TDLambda."""

    TD0 = "Bootstrapped TD (1-step return)"
    TD1 = "TD(1) (infinity-step return)"
    TDLambda = "TD(lambda)"
    GAE = "Generalized advantage estimate"
    MAGAE = "Multi-agent generalized advantage estimate"
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


DEFAULT_GAMMA, DEFAULT_LMBDA = 0.99, 0.95

_soft_td_target = without_dispatch(td.soft_td_target, given=("reward", "terminated", "steps"))


def steps_of(tensordict: TensorDictBase, shape: torch.Size) -> tuple[int, int]:
    """(steps of each sequence, rows of each step) in a batch whose rows have ``shape``.

    Time is the dimension of the batch that is named ``"time"``, or else its last one: ``[B, T]``.

    Raises:
        ValueError: the batch has no dimensions.
    """
    names = tensordict.names if tensordict._has_names() else ()
    time = names.index("time") if "time" in names else tensordict.ndim - 1
    if not 0 <= time < len(shape):
        raise ValueError(
            f"returns over several steps need a batch with a dimension of time, [B, T], got batch_size "
            f"{list(tensordict.batch_size)} and a loss of shape {list(shape)}"
        )
    return shape[time], shape[time + 1 :].numel()


class TD0Estimator(nn.Module):
    """``reward + gamma^steps * V(next)``, without V where terminated (Sutton, 1988).

    Args:
        gamma: discount, in [0, 1].
        device: of the discount.

    Attributes:
        gamma: the discount, float64 ``[]``, read on the device at every use: set it with ``fill_``.
        tensor_keys: the keys of the loss, as :attr:`LossModule.value_estimator` says them.

    Raises:
        ValueError: the discount is out of range.
    """

    gamma: Tensor
    tensor_keys: Any
    hyperparameters: tuple[str, ...] = ("gamma",)

    def __init__(self, gamma: float = DEFAULT_GAMMA, device: torch.device | str | None = None) -> None:
        super().__init__()
        self._set("gamma", gamma, device)

    def _set(self, name: str, value: float, device: torch.device | str | None) -> None:
        value = float(value)
        if not 0 <= value <= 1:
            raise ValueError(f"{name} must be in [0, 1], got {value}")
        self.register_buffer(name, torch.tensor(value, dtype=torch.float64, device=device))

    def target(
        self, rows: tuple[Tensor | None, ...], steps: Tensor | None, loss: Any, batch: TensorDictBase, shape: torch.Size
    ) -> Tensor:
        """What a loss compares values with, S.

        Args:
            rows: next values ``[N, *S]``, log-densities and temperature of a soft target or None, rewards, and
                terminated flags: the first arguments of :func:`~gpubuf.kernels.td.soft_td_target`.
            steps: that each reward spans, or None.
            loss: the loss, which knows the keys of the batch.
            batch: transitions.
            shape: S.
        """
        found: Tensor = _soft_td_target(*rows, self.gamma, steps, td.SMALLEST)
        return found

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> TD0Estimator:
        # Rounded to bfloat16 it would be another discount: follow the device only.
        precise = dict(self._buffers)
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        for name, tensor in precise.items():
            moved = self._buffers[name]
            assert tensor is not None
            assert moved is not None
            self._buffers[name] = tensor.to(moved.device)
        return self


class TDLambdaEstimator(TD0Estimator):
    """Lambda returns of sequences (Sutton and Barto, 2018, section 12.1).

    ``G_t = reward_t + gamma^steps ((1 - lmbda) V(next_t) + lmbda G_{t+1})``. Where row t is done but not terminated,
    is the last of its sequence, or comes before a masked row, V(next_t) takes the place of the bracket. Where it is
    terminated, the bracket is 0. ``lmbda`` 0 is :class:`TD0Estimator`.

    Args:
        gamma: discount, in [0, 1].
        lmbda: share of the following return, in [0, 1].
        device: of both.

    Attributes:
        gamma: see :class:`TD0Estimator`.
        lmbda: float64 ``[]``, read on the device at every use: set it with ``fill_``.

    Raises:
        ValueError: a number is out of range.
    """

    lmbda: Tensor
    hyperparameters: tuple[str, ...] = ("gamma", "lmbda")

    def __init__(
        self, gamma: float = DEFAULT_GAMMA, lmbda: float = DEFAULT_LMBDA, device: torch.device | str | None = None
    ) -> None:
        super().__init__(gamma, device)
        self._set("lmbda", lmbda, device)

    def target(
        self, rows: tuple[Tensor | None, ...], steps: Tensor | None, loss: Any, batch: TensorDictBase, shape: torch.Size
    ) -> Tensor:
        done = per_row(loss.done(batch), shape, str(loss.tensor_keys.done))
        _, mask = loss.row_weights(batch, shape, target=True)
        found: Tensor = td.soft_lambda_return(*rows, done, mask, self.gamma, self.lmbda, steps, *steps_of(batch, shape))
        return found


class TD1Estimator(TDLambdaEstimator):
    """Discounted sums of rewards until a trajectory's end, and the value there: :class:`TDLambdaEstimator` with 1.

    Args:
        gamma: discount, in [0, 1].
        device: of the discount.
    """

    hyperparameters = ("gamma",)

    def __init__(self, gamma: float = DEFAULT_GAMMA, device: torch.device | str | None = None) -> None:
        super().__init__(gamma, 1.0, device)


ESTIMATORS: dict[ValueEstimators, type[TD0Estimator]] = {
    ValueEstimators.TD0: TD0Estimator,
    ValueEstimators.TD1: TD1Estimator,
    ValueEstimators.TDLambda: TDLambdaEstimator,
}
