"""The stored rows as trajectories, and conditions on them: ``traj.reward.sum() > 100``."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from typing import Any

import torch
from tensordict import TensorDictBase, is_tensorclass, lazy_stack
from torch import Tensor

from gpubuf.data.storage.layout import as_key, as_written
from gpubuf.data.storage.schema import END_NAMES, NEXT_KEY, default_ends
from gpubuf.data.storage.storage import TensorStorage

Keys = frozenset[Any] | None


class _OfTrajectory:
    """Something that is computed of a trajectory.

    Args:
        fn: takes a :class:`Trajectory`.
        description: for its ``repr``.
        keys: the keys that ``fn`` reads; None: not known.
    """

    def __init__(self, fn: Callable[[Any], Any], description: str = "predicate", keys: Keys = None) -> None:
        self._fn, self._description, self._keys = fn, description, keys

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._description})"


class TrajectoryPredicate(_OfTrajectory):
    """A condition on a trajectory. Join several with ``&`` and ``|``, and negate one with ``~``.

    Args:
        fn: takes a :class:`Trajectory`, and returns something true or false.
        description: for its ``repr``.
        keys: the keys that ``fn`` reads; None: not known.
    """

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


class ElementwisePredicate(_OfTrajectory):
    """A comparison of every step, which ``any()`` or ``all()`` make a condition of."""

    def any(self) -> TrajectoryPredicate:
        """It holds for one step, or more."""
        return TrajectoryPredicate(lambda t: self._fn(t).any(), f"{self._description}.any()", self._keys)

    def all(self) -> TrajectoryPredicate:
        """It holds for every step."""
        return TrajectoryPredicate(lambda t: self._fn(t).all(), f"{self._description}.all()", self._keys)

    def __call__(self, trajectory: Any = None) -> bool:
        raise TypeError(f"{self._description} compares every step: add .any() or .all() to make one condition of it")


class _Compared(_OfTrajectory):
    """A quantity of a trajectory that can be compared with a number."""

    _condition: type

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


#: Where identifiers of trajectories are looked for, in this order.
_IDENTIFIERS = (("collector", "traj_ids"), "traj_ids", "episode")

Predicate = Callable[[Any], bool]


class Trajectory:
    """The steps of one trajectory, in order.

    A key is an attribute, an index or :meth:`get`. One that is not at the root is looked for under "next", so that
    ``trajectory.reward`` is ``trajectory.data["next", "reward"]``. Slices and indices give parts of it.

    Args:
        data: a TensorDict ``[T]``.

    Raises:
        ValueError: it has another number of batch dimensions.
    """

    def __init__(self, data: TensorDictBase) -> None:
        if data.batch_dims != 1:
            raise ValueError(f"a trajectory has a single batch dimension, got the batch size {list(data.batch_size)}")
        self.data = data

    @property
    def batch_size(self) -> torch.Size:
        """``[T]``."""
        return self.data.batch_size

    @property
    def length(self) -> int:
        """The number of steps."""
        return int(self.data.batch_size[0])

    def __len__(self) -> int:
        return self.length

    @property
    def total_reward(self) -> Tensor:
        """The sum of the rewards."""
        found: Tensor = self.reward.sum()
        return found

    def get(self, key: Any, default: Any = None) -> Any:
        """The entry of a key, or of the key of this name under "next"."""
        value = self.data.get(key, None)
        if value is None and isinstance(key, str):
            value = self.data.get((NEXT_KEY, key), None)
        return default if value is None else value

    def keys(self, *args: Any, **options: Any) -> Any:
        """The keys of the data."""
        return self.data.keys(*args, **options)

    def __getattr__(self, name: str) -> Any:
        value = None if name.startswith("_") or name == "data" else self.get(name)
        if value is None:
            raise AttributeError(f"the trajectory has no entry {name!r}, neither at the root nor under 'next'")
        return value

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, str) or (isinstance(index, tuple) and all(isinstance(part, str) for part in index)):
            return self.data[index]
        found = self.data[index]
        return Trajectory(found) if found.batch_dims == 1 else found

    def __repr__(self) -> str:
        return f"Trajectory(length={self.length}, keys={sorted(map(str, self.data.keys()))})"


def stored_trajectories(
    storage: TensorStorage,
    in_order: bool,
    transform: Callable[[Any], Any] | None,
    predicate: Predicate | None,
    trajectory_key: Any,
) -> list[Trajectory]:
    """The trajectories of a storage; see :meth:`gpubuf.ReplayBuffer.query`.

    Args:
        storage: holds the rows.
        in_order: whether they lie in the order in which they were written.
        transform: applied to each; None: nothing.
        predicate, trajectory_key: as for the method.
    """
    if not len(storage):
        return []
    check(predicate)
    rows = storage[:]
    if isinstance(rows, list) and rows and all(isinstance(row, TensorDictBase) for row in rows):
        rows = lazy_stack(rows)
    if is_tensorclass(rows):
        rows = rows.to_tensordict(retain_none=False)
    if not isinstance(rows, TensorDictBase):
        raise TypeError(
            f"a query needs a tensordict-backed storage, of TensorDicts; this one gives a {type(rows).__name__}"
        )
    oldest = 0
    if len(storage) == storage.max_size and in_order:
        oldest = storage.cursor // storage.shape[1:].numel()
    found = []
    broken = None
    if storage.marks.rows is not None:
        broken = (storage.marks.rows[: len(storage)] != 0).reshape(rows.batch_size[: storage.ndim])
    for data in pieces(rows, storage.ndim, oldest, trajectory_key, broken):
        trajectory = Trajectory(data if transform is None else transform(data))
        if predicate is None or predicate(trajectory):
            found.append(trajectory)
    return found


def check(predicate: Any) -> None:
    """Raise a TypeError for what is no condition yet, gpubuf's or TorchRL's."""
    if isinstance(predicate, ElementwisePredicate) or type(predicate).__name__ == "_ElementwisePredicate":
        predicate(None)


def pieces(
    rows: TensorDictBase, ndim: int, oldest: int, trajectory_key: Any, broken: Tensor | None = None
) -> Iterator[TensorDictBase]:
    """Rows ``[T]`` or ``[T, E]`` by trajectories, also cut at ``broken`` ones; time begins with step ``oldest``."""
    steps, *envs = rows.batch_size[:ndim]
    ends = _ends(rows, ndim, oldest, trajectory_key)
    if broken is not None:
        ends = ends | broken.roll(-oldest, 0).to(ends.device)
    ends = ends.reshape(steps, -1).cpu()
    for number, ended in enumerate(ends.unbind(-1)):
        where = torch.unravel_index(torch.tensor(number, device="cpu"), tuple(envs)) if envs else ()
        start = 0
        for stop in (ended.nonzero().squeeze(-1) + 1).tolist():
            first, last = (start + oldest) % steps, (stop - 1 + oldest) % steps
            span: Any = slice(first, last + 1)
            if last < first:
                span = (torch.arange(start, stop, device="cpu") + oldest) % steps
            yield rows[(span, *map(int, where))]
            start = stop


def _ends(rows: TensorDictBase, ndim: int, oldest: int, trajectory_key: Any) -> Tensor:
    """Which steps end a trajectory, in the order of time: bool of the shape of the rows."""
    shape = rows.batch_size[:ndim]
    for key in _IDENTIFIERS if trajectory_key is None else (trajectory_key,):
        found = rows.get(key, None)
        if found is not None:
            identifiers = found.reshape(shape).roll(-oldest, 0)
            ends = torch.ones(shape, dtype=torch.bool, device=identifiers.device)
            ends[:-1] = identifiers[1:] != identifiers[:-1]
            return ends
    if trajectory_key is not None:
        raise KeyError(f"trajectory_key {trajectory_key!r} is not stored")
    keys = default_ends(lambda key: rows.get(key, None) is not None)
    if not keys:
        raise KeyError(
            f"Cannot split data into trajectories: neither {[str(key) for key in _IDENTIFIERS]} nor {list(END_NAMES)} "
            "are stored; give trajectory_key"
        )
    ended = torch.stack([rows.get(key).reshape(*shape, -1).ne(0).any(-1) for key in keys]).any(0).roll(-oldest, 0)
    ended[-1] = True
    return ended


def iter_trajectories(data: TensorDictBase, trajectory_key: Any = None) -> Iterator[Trajectory]:
    """The trajectories of a TensorDict ``[n]`` of rows that follow each other: views. Synchronises.

    Args:
        data: the rows.
        trajectory_key: as for :meth:`gpubuf.ReplayBuffer.query`.

    Raises:
        TypeError: ``data`` is no TensorDict.
        ValueError: it has several batch dimensions.
        KeyError: nothing tells where trajectories end.
    """
    if not isinstance(data, TensorDictBase):
        raise TypeError(f"expected a TensorDictBase, got a {type(data).__name__}")
    if data.batch_dims != 1:
        raise ValueError(f"rows follow each other in one batch dimension, got the batch size {list(data.batch_size)}")
    if len(data):
        yield from map(Trajectory, pieces(data, 1, 0, trajectory_key))


def filter_trajectories(
    data: TensorDictBase, predicate: Predicate | None = None, *, trajectory_key: Any = None
) -> list[Trajectory]:
    """Those of :func:`iter_trajectories` that fulfil a condition. Raises as that, and as :meth:`ReplayBuffer.query`."""
    check(predicate)
    found = iter_trajectories(data, trajectory_key)
    return [trajectory for trajectory in found if predicate is None or predicate(trajectory)]
