"""Temporal-difference losses: value estimators, targets, the loss of an ensemble of critics, and priorities."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Any, Self

import torch
from tensordict import TensorDictBase
from tensordict.utils import NestedKey, unravel_key
from torch import Tensor, nn

from gpubuf.kernels import td
from gpubuf.kernels._registry import without_dispatch
from gpubuf.modules.fast_call import entry
from gpubuf.objectives.base import LossModule, one_of
from gpubuf.objectives.batch import LOSS_FUNCTIONS, REDUCTIONS, per_row


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


class TD0Estimator(nn.Module):
    """``reward + gamma^steps * V(next)``, without V where terminated (Sutton, 1988).

    Args:
        gamma: discount, in [0, 1].
        device: of the discount.

    Attributes:
        gamma: the discount, float64 ``[]``, read on the device at every use: set it with ``fill_``.
        tensor_keys: the keys of the loss, as :attr:`TDLossModule.value_estimator` says them.

    Raises:
        ValueError: the discount is out of range.
    """

    gamma: Tensor
    tensor_keys: EstimatorKeys
    hyperparameters: tuple[str, ...] = ("gamma",)

    def __init__(self, gamma: float = DEFAULT_GAMMA, device: torch.device | str | None = None) -> None:
        super().__init__()
        self._set("gamma", gamma, device)

    def _set(self, name: str, value: float, device: torch.device | str | None) -> None:
        value = float(value)
        if not 0 <= value <= 1:
            raise ValueError(f"{name} must be in [0, 1], got {value}")
        self.register_buffer(name, torch.tensor(value, dtype=torch.float64, device=device))

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


@dataclass(frozen=True)
class EstimatorKeys:
    """Where an estimator reads, by the loss that has it."""

    reward: NestedKey
    done: NestedKey
    terminated: NestedKey
    value: NestedKey | None


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


class TDLossModule(LossModule):
    """A loss that compares values with temporal-difference targets (Sutton, 1988).

    A subclass runs its networks, calls :meth:`td_target` on the values of the next step and :meth:`td_loss` on those of
    this one, and writes the error of each row to ``tensor_keys.priority``. Before the first target it calls
    :meth:`make_value_estimator`.

    Args:
        loss_function: "smooth_l1", "l2", "l1" or "huber" (the same as "smooth_l1").
        reduction: "mean", "sum" or "none".

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

    default_value_estimator = ValueEstimators.TD0
    #: Those that :meth:`make_value_estimator` takes. A loss that makes its targets without :meth:`td_target` has fewer.
    SUPPORTED_VALUE_ESTIMATORS: tuple[ValueEstimators, ...] = tuple(ESTIMATORS)

    def __init__(self, *, loss_function: str = "smooth_l1", reduction: str = "mean") -> None:
        super().__init__()
        self.reduction = one_of(REDUCTIONS, reduction, "reduction")
        self.loss_function = one_of(LOSS_FUNCTIONS, loss_function, "loss_function")

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
        self._value_estimator.tensor_keys = EstimatorKeys(keys.reward, keys.done, keys.terminated, value)
        return self._value_estimator

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
        rows = next_q, next_log_prob, alpha, reward, terminated
        estimator = self._value_estimator
        target: Tensor
        if not isinstance(estimator, TDLambdaEstimator):
            target = _soft_td_target(*rows, estimator.gamma, steps, td.SMALLEST)
        else:
            done = per_row(self.done(tensordict), shape, str(self.tensor_keys.done))
            _, mask = self.row_weights(tensordict, shape, target=True)
            settings = estimator.gamma, estimator.lmbda, steps, *steps_of(tensordict, shape)
            target = td.soft_lambda_return(*rows, done, mask, *settings)
        return target

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
