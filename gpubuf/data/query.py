"""The stored rows as trajectories, and those among them that fulfil a condition."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from tensordict import TensorDictBase, is_tensorclass, lazy_stack
from torch import Tensor

from gpubuf.data.lock import BufferLock
from gpubuf.data.predicates import ElementwisePredicate
from gpubuf.data.storage.layout import as_written
from gpubuf.data.storage.recipe import END_NAMES
from gpubuf.data.storage.schema import NEXT_KEY
from gpubuf.data.storage.tensor_storage import TensorStorage
from gpubuf.data.transforms import Compose
from gpubuf.data.writers import Writer

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


class Queries:
    """Finds trajectories in a buffer. A mixin of a method that users call on the buffer."""

    _storage: TensorStorage
    _writer: Writer
    _transform: Compose
    _lock: BufferLock

    def query(self, predicate: Predicate | None = None, *, trajectory_key: Any = None) -> list[Trajectory]:
        """The stored trajectories that fulfil a condition, the oldest first; of several environments, one by one.

        Trajectories end where their identifier changes, or else at flags under "next" or at the root, at the newest
        row, and where a storage with ``ends="flags+continuity"`` finds that rows don't continue. The oldest one may
        have lost its first steps. Those that lie across the seam of the ring are whole, in the order of time.
        Transforms are applied to each.

        Args:
            predicate: a condition made of :data:`traj`, or a function of a :class:`Trajectory`. Default: all of them.
            trajectory_key: where the identifiers are. Default: ``("collector", "traj_ids")``, ``"traj_ids"`` or
                ``"episode"``, if one of these is stored.

        Returns:
            Trajectories: views of the storage where ints and slices give views, and copies otherwise. Synchronises.

        Raises:
            TypeError: the rows are no TensorDicts, or the predicate compares steps without ``any()`` or ``all()``.
            KeyError: nothing tells where trajectories end.
        """
        with self._lock:
            storage = self._storage
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
            if len(storage) == storage.max_size and self._writer.in_order:
                oldest = storage.cursor // storage.shape[1:].numel()
            found = []
            broken = None
            if storage.breaks is not None:
                broken = storage.breaks.found[: len(storage)].reshape(rows.batch_size[: storage.ndim])
            for data in pieces(rows, storage.ndim, oldest, trajectory_key, broken):
                if len(self._transform):
                    data = self._transform(data)
                trajectory = Trajectory(data)
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
        where = torch.unravel_index(torch.tensor(number), tuple(envs)) if envs else ()
        start = 0
        for stop in (ended.nonzero().squeeze(-1) + 1).tolist():
            first, last = (start + oldest) % steps, (stop - 1 + oldest) % steps
            span: Any = slice(first, last + 1)
            if last < first:
                span = (torch.arange(start, stop) + oldest) % steps
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
    for group in ([(NEXT_KEY, name) for name in END_NAMES], [(name,) for name in END_NAMES]):
        flags = [flag for key in group if (flag := rows.get(as_written(key), None)) is not None]
        if flags:
            ended = torch.stack([flag.reshape(*shape, -1).ne(0).any(-1) for flag in flags]).any(0)
            ended = ended.roll(-oldest, 0)
            ended[-1] = True
            return ended
    raise KeyError(
        f"Cannot split data into trajectories: neither {[str(key) for key in _IDENTIFIERS]} nor {list(END_NAMES)} are "
        "stored; give trajectory_key"
    )


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
