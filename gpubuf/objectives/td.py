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
from gpubuf.objectives.reductions import LOSS_FUNCTIONS, REDUCTIONS, lookup
from gpubuf.objectives.shapes import next_key, per_row
from gpubuf.objectives.values import TD0Estimator, ValueEstimators

DEFAULT_GAMMA = 0.99


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

    def __init__(self, *, loss_function: str = "smooth_l1", reduction: str = "mean") -> None:
        super().__init__()
        lookup(REDUCTIONS, reduction, "reduction")
        lookup(LOSS_FUNCTIONS, loss_function, "loss_function")
        self.reduction, self.loss_function = reduction, loss_function

    def make_value_estimator(self, value_type: Any = None, **hyperparams: Any) -> Self:
        """Choose how targets are made: TD(0) with discount ``gamma`` (0.99).

        Args:
            value_type: None, or "TD0" or the member of an enum of that name.
            **hyperparams: ``gamma``.

        Returns:
            The loss itself.

        Raises:
            NotImplementedError: another estimator.
            TypeError: another hyperparameter.
            ValueError: an unknown estimator, or a discount out of [0, 1].
        """
        if value_type is not None and ValueEstimators.parse(value_type) is not ValueEstimators.TD0:
            raise NotImplementedError(f"{type(self).__name__} bootstraps with TD0 only, got value_type={value_type!r}")
        gamma = hyperparams.pop("gamma", DEFAULT_GAMMA)
        if hyperparams:
            raise TypeError(f"TD0 has one hyperparameter, gamma, got {sorted(hyperparams)}")
        self._value_estimator = TD0Estimator(float(gamma), self.device)
        return self

    @property
    def value_estimator(self) -> TD0Estimator:
        """The estimator that makes the targets; its ``gamma`` is the discount."""
        return self._value_estimator

    def terminated(self, tensordict: TensorDictBase) -> Tensor:
        """Which rows do not bootstrap: those terminated, or, where the batch does not say, those done."""
        value = tensordict.get(next_key(self.tensor_keys.terminated), None)
        return entry(tensordict, next_key(self.tensor_keys.done)) if value is None else value

    def bootstrap_rows(self, tensordict: TensorDictBase, shape: torch.Size) -> tuple[Tensor, Tensor, Tensor | None]:
        """(rewards, terminated flags, steps that each reward spans or None), each with one element for each row.

        Args:
            tensordict: the batch.
            shape: of a row of the loss, S.

        Raises:
            ValueError: an entry does not fit ``shape``.
        """
        keys = self.tensor_keys
        steps = tensordict.get("steps_to_next_obs", None)
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
    ) -> Tensor:
        """``reward + gamma^steps * min_k next_q[k]``, without the value where terminated. No gradient.

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
        return self._value_estimator.soft_target(
            next_q,
            next_log_prob,
            alpha,
            # Without log-densities the target has the shape of the reward.
            reward.reshape(shape) if next_log_prob is None else reward,
            terminated,
            steps,
        )

    def td_loss(self, q: Tensor, target: Tensor, tensordict: TensorDictBase) -> tuple[Tensor, Tensor]:
        """(loss, ``max_k |q[k] - target|`` of each row) of N critics, summed over them.

        Args:
            q: values, ``[N, *S]`` or ``[N, *S, 1]``.
            target: what :meth:`td_target` returned, S.
            tensordict: the batch, for its importance weights and masks.
        """
        weight, mask = self.row_weights(tensordict, target.shape)
        code = LOSS_FUNCTIONS[self.loss_function]
        loss, td_error, _ = td.td_loss(q, target, weight, mask, code, REDUCTIONS[self.reduction])
        return loss, td_error
