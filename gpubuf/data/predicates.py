"""Conditions on trajectories: ``traj.reward.sum() > 100``, for :meth:`gpubuf.ReplayBuffer.query`."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from gpubuf.data.storage.layout import as_key, as_written

Keys = frozenset[Any] | None


class TrajectoryPredicate:
    """A condition on a trajectory. Join several with ``&`` and ``|``, and negate one with ``~``.

    Args:
        fn: takes a :class:`Trajectory`, and returns something true or false.
        description: for its ``repr``.
        keys: the keys that ``fn`` reads; None: not known.
    """

    def __init__(self, fn: Callable[[Any], Any], description: str = "predicate", keys: Keys = None) -> None:
        self._fn, self._description, self._keys = fn, description, keys

    def required_keys(self) -> Keys:
        """The keys that the condition reads; None: not known."""
        return self._keys

    def __call__(self, trajectory: Any) -> bool:
        return bool(self._fn(trajectory))

    def __and__(self, other: TrajectoryPredicate) -> TrajectoryPredicate:
        return self._joined(other, lambda one, two: one and two, "&")

    def __or__(self, other: TrajectoryPredicate) -> TrajectoryPredicate:
        return self._joined(other, lambda one, two: one or two, "|")

    def __invert__(self) -> TrajectoryPredicate:
        return TrajectoryPredicate(lambda trajectory: not self(trajectory), f"~{self._description}", self._keys)

    def _joined(self, other: TrajectoryPredicate, join: Callable[[bool, bool], bool], sign: str) -> TrajectoryPredicate:
        keys = None if self._keys is None or other._keys is None else self._keys | other._keys
        text = f"({self._description} {sign} {other._description})"
        return TrajectoryPredicate(lambda trajectory: join(self(trajectory), other(trajectory)), text, keys)

    def __repr__(self) -> str:
        return f"TrajectoryPredicate({self._description})"


class ElementwisePredicate:
    """A comparison of every step, which ``any()`` or ``all()`` make a condition of."""

    def __init__(self, fn: Callable[[Any], Any], description: str, keys: Keys) -> None:
        self._fn, self._description, self._keys = fn, description, keys

    def any(self) -> TrajectoryPredicate:
        """It holds for one step, or more."""
        return TrajectoryPredicate(lambda t: self._fn(t).any(), f"{self._description}.any()", self._keys)

    def all(self) -> TrajectoryPredicate:
        """It holds for every step."""
        return TrajectoryPredicate(lambda t: self._fn(t).all(), f"{self._description}.all()", self._keys)

    def __call__(self, trajectory: Any = None) -> bool:
        raise TypeError(f"{self._description} compares every step: add .any() or .all() to make one condition of it")

    def __repr__(self) -> str:
        return f"ElementwisePredicate({self._description})"


class _Compared:
    """A quantity of a trajectory that can be compared with a number."""

    _condition: type

    def __init__(self, fn: Callable[[Any], Any], description: str, keys: Keys) -> None:
        self._fn, self._description, self._keys = fn, description, keys

    def _compare(self, compare: Callable[[Any, Any], Any], other: Any, sign: str) -> Any:
        text = f"({self._description} {sign} {other!r})"
        return self._condition(lambda trajectory: compare(self._fn(trajectory), other), text, self._keys)

    def __gt__(self, other: Any) -> Any:
        return self._compare(operator.gt, other, ">")

    def __ge__(self, other: Any) -> Any:
        return self._compare(operator.ge, other, ">=")

    def __lt__(self, other: Any) -> Any:
        return self._compare(operator.lt, other, "<")

    def __le__(self, other: Any) -> Any:
        return self._compare(operator.le, other, "<=")

    def __eq__(self, other: object) -> Any:
        return self._compare(operator.eq, other, "==")

    def __ne__(self, other: object) -> Any:
        return self._compare(operator.ne, other, "!=")

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return self._description


class _Number(_Compared):
    """One number of a trajectory, such as a sum of rewards."""

    _condition = TrajectoryPredicate


class _Field(_Compared):
    """A key of every step. Compare it as it is, or reduce it to a number."""

    _condition = ElementwisePredicate

    def __init__(self, key: Any, description: str) -> None:
        super().__init__(lambda trajectory: _value(trajectory, key), description, frozenset({as_written(as_key(key))}))

    def _reduced(self, reduce: Callable[[Tensor], Any], name: str) -> _Number:
        return _Number(lambda trajectory: reduce(self._fn(trajectory)), f"{self._description}.{name}()", self._keys)

    def sum(self) -> _Number:
        """The sum over the trajectory."""
        return self._reduced(torch.sum, "sum")

    def mean(self) -> _Number:
        """The mean over the trajectory, in floating point."""
        return self._reduced(lambda value: value.float().mean(), "mean")

    def max(self) -> _Number:
        """The largest value."""
        return self._reduced(torch.max, "max")

    def min(self) -> _Number:
        """The smallest value."""
        return self._reduced(torch.min, "min")

    def first(self) -> _Number:
        """The value of the first step."""
        return self._reduced(lambda value: value[0], "first")

    def last(self) -> _Number:
        """The value of the last step."""
        return self._reduced(lambda value: value[-1], "last")


def _value(trajectory: Any, key: Any) -> Any:
    value = trajectory.get(key)
    if value is None:
        raise KeyError(f"the trajectories have no key {key!r}, nor one of this name under 'next'")
    return value


class _Trajectories:
    """``traj``: where conditions on trajectories begin. A key is an attribute, or an index where it is nested."""

    @property
    def length(self) -> _Number:
        """The number of steps."""
        return _Number(lambda trajectory: trajectory.length, "traj.length", frozenset())

    @property
    def total_reward(self) -> _Number:
        """The sum of the rewards."""
        return _Number(lambda trajectory: trajectory.total_reward, "traj.total_reward", frozenset({"reward"}))

    def __getattr__(self, name: str) -> _Field:
        if name.startswith("_"):
            raise AttributeError(name)
        return _Field(name, f"traj.{name}")

    def __getitem__(self, key: Any) -> _Field:
        return _Field(key, f"traj[{key!r}]")

    def __repr__(self) -> str:
        return "traj"


#: Where conditions on trajectories begin: ``(traj.reward.sum() > 100) & (traj.length < 200)``.
traj = _Trajectories()
