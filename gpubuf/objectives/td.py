"""The base class of losses on values: targets, the loss of an ensemble of critics, and priorities."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Self

import torch
from tensordict import TensorDictBase
from tensordict.utils import NestedKey
from torch import Tensor

from gpubuf.kernels import td
from gpubuf.modules.plain import entry
from gpubuf.objectives.loss_module import LossModule
from gpubuf.objectives.masks import maybe
from gpubuf.objectives.reductions import COMBINATIONS, LOSS_FUNCTIONS, REDUCTIONS, lookup
from gpubuf.objectives.shapes import next_key, per_row
from gpubuf.objectives.values import (
    ESTIMATORS,
    EstimatorKeys,
    TD0Estimator,
    TDLambdaEstimator,
    ValueEstimators,
    make_estimator,
    steps_of,
)


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
        lookup(REDUCTIONS, reduction, "reduction")
        lookup(LOSS_FUNCTIONS, loss_function, "loss_function")
        self.reduction, self.loss_function = reduction, loss_function

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
        self._value_estimator = make_estimator(kind, self.device if device is None else device, hyperparams)
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
        value = tensordict.get(next_key(self.tensor_keys.terminated), None)
        return entry(tensordict, next_key(self.tensor_keys.done)) if value is None else value

    def done(self, tensordict: TensorDictBase) -> Tensor:
        """Which rows end a trajectory: those done, or, where the batch does not say, those terminated."""
        value = tensordict.get(next_key(self.tensor_keys.done), None)
        return entry(tensordict, next_key(self.tensor_keys.terminated)) if value is None else value

    def bootstrap_rows(self, tensordict: TensorDictBase, shape: torch.Size) -> tuple[Tensor, Tensor, Tensor | None]:
        """(rewards, terminated flags, steps that each reward spans or None), each with one element for each row.

        Args:
            tensordict: the batch.
            shape: of a row of the loss, S.

        Raises:
            ValueError: an entry does not fit ``shape``.
        """
        keys = self.tensor_keys
        steps = maybe(tensordict, "steps_to_next_obs")
        return (
            per_row(entry(tensordict, next_key(keys.reward)), shape, str(keys.reward)),
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
        combine: str = "min",
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
            combine: "min" or "mean" of the critics.

        Returns:
            The targets, S.
        """
        reward, terminated, steps = self.bootstrap_rows(tensordict, shape)
        if next_log_prob is None:
            # Without log-densities the target has the shape of the reward.
            reward = reward.reshape(shape)
        soft, code = (next_q, next_log_prob, alpha), COMBINATIONS[combine]
        estimator = self._value_estimator
        if not isinstance(estimator, TDLambdaEstimator):
            return estimator.soft_target(*soft, reward, terminated, steps, code)
        done = per_row(self.done(tensordict), shape, str(self.tensor_keys.done))
        _, mask = self.row_weights(tensordict, shape, target=True)
        times = steps_of(tensordict, shape)
        return estimator.soft_return(*soft, reward, terminated, done, mask, steps, *times, code)

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
