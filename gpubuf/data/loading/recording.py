"""What the files of a data set hold, and its rows in order, as buffers store them."""

from __future__ import annotations

import functools
import importlib
import itertools
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from tensordict import TensorDict
from torch import Tensor

from gpubuf.data.processing.statistics import Normalize
from gpubuf.data.storage.layout import Key, as_key, as_written
from gpubuf.data.storage.share_next import entries_of

if TYPE_CHECKING:
    from gpubuf.planning import Plan

#: Bytes that are read at a time: enough frames for all threads. Two chunks are in memory, one of which is written.
CHUNK_BYTES = 1 << 28

#: Bytes of rows that are not copied once more, to leave out some between them: they are written in several calls.
LARGE_ROW = 1 << 12

FLAGS = ("done", "terminated", "truncated")

_NAMES: dict[Key, str] = {
    ("observation",): "observation observations obs",
    ("next", "observation"): "next_observation next_observations next_obs",
    ("action",): "action actions",
    ("next", "reward"): "reward rewards",
}
_FLAG_NAMES = {
    "terminated": "terminals terminated terminations",
    "truncated": "timeouts truncated truncations",
    "done": "done dones",
    "episode": "episode episode_index episode_id traj_ids trajectory",
    "valid": "valids",
}
_KEYS = {name: key for key, names in _NAMES.items() for name in names.split()}
_FLAGS = {name: flag for flag, names in _FLAG_NAMES.items() for name in names.split()}


def key_of(name: str) -> Key:
    """Where rows have a column, from its name in a file: ``"observations/rgb"`` is ``("observation", "rgb")``."""
    first, *rest = name.replace("/", ".").removeprefix("next.").split(".")
    return (*_KEYS.get(first, (first,)), *rest)


def stamps(paths: Sequence[Path]) -> list[list[Any]]:
    """Name, size and time of files: other ones after a change."""
    return [[path.name, path.stat().st_size, path.stat().st_mtime_ns] for path in paths]


def overlaps(starts: npt.NDArray[Any], start: int, stop: int) -> Iterator[tuple[int, slice, slice]]:
    """The parts that have records ``start .. stop``: number, which of its records, and which of these they are.

    ``starts`` are the first records of all parts, and the number of records.
    """
    first = int(np.searchsorted(starts, start, "right")) - 1
    for number in range(first, int(np.searchsorted(starts, stop))):
        begin, low, high = int(starts[number]), max(start, int(starts[number])), min(stop, int(starts[number + 1]))
        yield number, slice(low - begin, high - begin), slice(low - start, high - start)


def needed(package: str) -> Any:
    """A package that reads a format.

    Raises:
        ImportError: it is missing.
    """
    try:
        return importlib.import_module(package)
    except ImportError as error:
        raise ImportError(f'this format needs {package.partition(".")[0]}: pip install "gpubuf[datasets]"') from error


def flag_of(name: str) -> str:
    """Which of the flags of :meth:`Steps.of` a column is, from its name in a file; ``""``: none."""
    return _FLAGS.get(name.removeprefix("next."), "")


@dataclass(frozen=True)
class Column:
    """A column of a data set.

    Attributes:
        key: where rows have it.
        shape: of a record.
        dtype: in which it is read: float32 for float64 in the files, complex64 for complex128.
        has_next: whether it is an observation: ``("next", *key)`` is then that of the next record, unless the files
            have a column for it.
    """

    key: Key
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    has_next: bool = False

    @classmethod
    def of(cls, key: Key, shape: Sequence[int], dtype: Any) -> Column:
        """With the dtype in which what is stored in ``dtype`` is read."""
        given = np.dtype(dtype)
        widest = np.dtype({"f": np.float32, "c": np.complex64}.get(given.kind, given)).newbyteorder("=")
        kept = widest if given.itemsize > widest.itemsize else given.newbyteorder("=")
        return cls(key, tuple(shape), kept, key[0] == "observation")

    @property
    def row_shape(self) -> tuple[int, ...]:
        """In a row: one number under "next" has a dimension of its own, as losses take it."""
        return (1,) if self.key[0] == "next" and not self.shape else self.shape

    @property
    def n_bytes(self) -> int:
        """Of a record."""
        return int(np.prod(self.shape)) * self.dtype.itemsize


@dataclass(frozen=True)
class Steps:
    """What the records of a data set are to each other, bool ``[records]`` each.

    Attributes:
        end: the next record is not what this one led to.
        terminated, truncated: as recorded.
        last: an observation alone: what the record before it led to. Always an :attr:`end`.
    """

    end: npt.NDArray[np.bool_]
    terminated: npt.NDArray[np.bool_]
    truncated: npt.NDArray[np.bool_]
    last: npt.NDArray[np.bool_]

    @classmethod
    def of(cls, flags: Mapping[str, npt.NDArray[Any]]) -> Steps:
        """Those of a table.

        Args:
            flags: ``"terminated"``, ``"truncated"``, ``"done"`` (an end, and a termination where the table has no
                other word for that and the row is not truncated), ``"episode"`` (whose change is an end), ``"valid"``
                (false: an observation alone), ``[records]`` each.

        Raises:
            ValueError: there are none, or they are of different lengths.
        """
        if not flags:
            raise ValueError(f"no column says where trajectories end: expected one of {sorted(_FLAGS)}")
        n, sizes = len(next(iter(flags.values()))), {name: np.size(flag) for name, flag in flags.items()}
        if set(sizes.values()) != {n}:
            raise ValueError(f"columns that say where trajectories end are of one number for each record, got {sizes}")
        found = {name: np.asarray(flag).reshape(n).astype(bool) for name, flag in flags.items() if name != "episode"}
        never = np.zeros(n, bool)
        truncated, done = found.get("truncated", never), found.get("done", never)
        terminated = found.get("terminated", done & ~truncated)
        last = ~found["valid"] if "valid" in found else never
        end = last.copy() if "valid" in found else terminated | truncated | done
        if "episode" in flags:
            episode = np.asarray(flags["episode"]).reshape(n)
            end[:-1] |= episode[1:] != episode[:-1]
        end[-1:] = True
        return cls(end, terminated & ~last, truncated, last)


class Source(Protocol):
    """A data set in files, as records in order. A class of your own is one by having these.

    Attributes:
        columns: by their names in the files.
        steps: the ends of trajectories.
        identity: what JSON can say, such as :func:`stamps`: an interrupted load goes on where it is the same.
        statistics: what the files say of columns, by their names: count, mean, m2 (the sum of squared deviations) and
            peak (the largest magnitude), float64 ``[elements]`` each, as in the state of a ``Normalize``.
    """

    columns: dict[str, Column]
    steps: Steps
    identity: Any
    statistics: dict[str, dict[str, Tensor]]

    def tasks(self, name: str, start: int, stop: int, out: npt.NDArray[Any], /) -> Sequence[Callable[[], None]]:
        """What reads records ``start .. stop`` of a column into ``out``, in any order and in several threads.

        Asked in order: the records of a call follow those of the one before it, whose tasks are done.
        """


class Table:
    """A source whose columns are arrays, some of which say where trajectories end.

    Without rewards and next observations it is one of OGBench: a terminal, or what is not valid, is an observation
    alone, and what the record before it led to, by truncation.

    Args:
        identity: of the source.
        arrays: shape ``[records, ...]`` and dtype of each, by their names in the files.
        fill: reads records of an array from a number on into memory.
        flags: more of those that :meth:`Steps.of` takes.

    Raises:
        ValueError: nothing says where trajectories end; or observations, actions or rewards are of another number of
            records.
    """

    def __init__(
        self,
        identity: Any,
        arrays: Mapping[str, tuple[tuple[int, ...], np.dtype[Any]]],
        fill: Callable[[str, int, npt.NDArray[Any]], None],
        flags: Mapping[str, npt.NDArray[Any]] | None = None,
    ) -> None:
        self.identity, self._fill = identity, fill
        self.statistics: dict[str, dict[str, Tensor]] = {}
        found = dict(flags or {})
        for name, (shape, dtype) in arrays.items():
            if flag_of(name):
                found[flag_of(name)] = np.empty(shape, dtype)
                fill(name, 0, found[flag_of(name)])
        if (
            "terminals" in arrays
            and found.keys() <= {"terminated", "valid"}
            and not any(key_of(name)[0] == "next" for name in arrays)
        ):
            found = {"valid": found.get("valid", found["terminated"] == 0)}
        self.steps = Steps.of(found)
        for name, (shape, _) in arrays.items():
            if key_of(name) in _NAMES and shape[:1] != self.steps.end.shape:
                raise ValueError(f"{name!r} has the shape {shape}, and the data set {len(self.steps.end)} records")
        self.columns = {
            name: Column.of(key_of(name), shape[1:], dtype)
            for name, (shape, dtype) in arrays.items()
            if shape[:1] == self.steps.end.shape and dtype.kind in "biufc" and not flag_of(name)
        }

    def tasks(self, name: str, start: int, stop: int, out: npt.NDArray[Any], /) -> Sequence[Callable[[], None]]:
        return [functools.partial(self._fill, name, start, out)]


@dataclass
class Recording:
    """The rows of a data set: see :func:`gpubuf.data.open_dataset`.

    Attributes:
        source: what reads the files.
        columns: those that are loaded, by their names in the files.
        next_observations, keep_last: as given.
    """

    source: Source
    columns: Mapping[str, Column]
    next_observations: bool = True
    keep_last: bool = False
    _kept: npt.NDArray[np.bool_] = field(init=False, repr=False)
    _done: npt.NDArray[np.bool_] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        steps, kept = self.source.steps, ~self.source.steps.last
        if self.shared and not self.keep_last:
            kept &= ~steps.end | steps.terminated
        if not kept.any():
            raise ValueError("the data set has no transitions")
        taken = [(column.key, name) for name, column in self.columns.items()]
        for (key, name), (other_key, other) in itertools.pairwise(sorted(taken)):
            if other_key[: len(key)] == key:
                raise ValueError(
                    f"{name!r} and {other!r} are both for {as_written(key)!r} of a row: choose one by keys="
                )
        self._kept, self._done = kept, steps.end | steps.terminated | steps.truncated
        # What leads to an observation that is no row of its own ends its trajectory.
        self._done[:-1] |= ~kept[1:]

    @classmethod
    def of(cls, source: Source, keys: Any = None, next_observations: bool = True, keep_last: bool = False) -> Recording:
        """With chosen keys: see :func:`gpubuf.data.open_dataset`."""
        known = source.columns
        if isinstance(keys, Mapping):
            named = {name: as_key(key) for key, name in keys.items()}
            if len(named) < len(keys):
                raise ValueError(f"keys= takes each column for one key of a row, got {dict(keys)}")
        else:
            usual = [name for name, column in known.items() if (column.key[0],) in _NAMES or column.key[0] == "next"]
            named = {name: known[name].key if name in known else () for name in (usual if keys is None else keys)}
        missing = sorted(named.keys() - known.keys())
        if missing:
            raise KeyError(
                f"the data set has no {missing[0]!r} of numbers, one for each record: it has {sorted(known)}"
            )
        # A recorded next observation goes with the observation.
        twins = {("next", *known[name].key): ("next", *key) for name, key in named.items() if known[name].has_next}
        for name in [name for name, column in known.items() if column.key in twins]:
            named.setdefault(name, twins[known[name].key])
            if not next_observations:
                del named[name]
        chosen = {name: replace(known[name], key=key) for name, key in named.items()}
        return cls(source, chosen, next_observations, keep_last)

    @property
    def shared(self) -> list[Key]:
        """The observations whose next ones are those of the next record."""
        keys = {column.key for column in self.columns.values()}
        found = [column.key for column in self.columns.values() if column.has_next]
        return [key for key in found if ("next", *key) not in keys] if self.next_observations else []

    @property
    def rows(self) -> int:
        """The number of transitions."""
        return int(self._kept.sum())

    @property
    def trajectories(self) -> int:
        """How many end."""
        return int((self._done & self._kept).sum())

    @property
    def spec(self) -> dict[Key, tuple[tuple[int, ...], torch.dtype]]:
        """Shape and dtype of each key of a row, as :func:`gpubuf.plan` takes it."""
        found = {}
        for column in self.columns.values():
            dtype = torch.from_numpy(np.empty(0, column.dtype)).dtype
            found[column.key] = column.row_shape, dtype
            if column.key in self.shared:
                found["next", *column.key] = column.row_shape, dtype
        return found | {("next", flag): ((1,), torch.bool) for flag in FLAGS}

    @property
    def row_bytes(self) -> int:
        """Bytes that are read for a row."""
        return sum(column.n_bytes for column in self.columns.values())

    @property
    def identity(self) -> dict[str, Any]:
        """What tells it from others, as JSON has it."""
        columns = {name: [list(c.key), list(c.shape), c.dtype.str] for name, c in self.columns.items()}
        options = [self.next_observations, self.keep_last, self.rows]
        found: dict[str, Any] = json.loads(json.dumps([self.source.identity, columns, options]))
        return found

    def sharing(self, capacity: int) -> dict[str, Any]:
        """Options of a storage that has observations once; ``{}`` where none has a next one."""
        spec = self.spec
        pairs = [c.key for c in self.columns.values() if c.has_next and spec.get(("next", *c.key)) == spec[c.key]]
        room = self.trajectories
        # Next observations that were recorded may be any, and rows that are to come, too.
        if pairs != self.shared or capacity > self.rows:
            room = max(room, entries_of(capacity, 1, None))
        return {"share_next": pairs, "next_capacity": room} if pairs else {}

    def plan(self, capacity: int | None = None, *, sampler: Any = "uniform", in_files: bool = False) -> Plan:
        """The memory that its rows take, and where they fit now, as :func:`gpubuf.plan` says. Reads no rows.

        Args:
            capacity: room for so many rows. Default: those of the data set.
            sampler: as for :func:`gpubuf.plan`.
            in_files: of mapped files, which have next observations too.
        """
        size = self.rows if capacity is None else capacity
        # Imports this package.
        from gpubuf.planning import plan

        return plan(self.spec, size, sampler=sampler, **({} if in_files else self.sharing(size)))

    def normalize(self, keys: Any = None, **options: Any) -> Normalize:
        """Gives keys mean 0 and variance 1 by what the data set says of them, for ``process=`` of a buffer.

        Args:
            keys: a list of keys. Default: all of fractions that it says something of.
            **options: of :class:`gpubuf.Normalize`, but for ``update``.

        Raises:
            KeyError: the files say nothing of a key.
        """
        stated = self.source.statistics
        known = {c.key: stated[name] for name, c in self.columns.items() if name in stated and c.dtype.kind == "f"}
        chosen = list(known) if keys is None else [as_key(key) for key in keys]
        missing = [as_written(key) for key in chosen if key not in known]
        if missing or not chosen:
            raise KeyError(f"the files have no statistics of {missing or 'any key'}: process=[Normalize(keys)] counts")
        moments = {str(number): known[key] for number, key in enumerate(chosen)}
        made = Normalize([as_written(key) for key in chosen], update="manual", **options)
        return made.merge({"moments": moments}).eval()

    def batches(self, begin: int = 0, workers: int | None = None) -> Iterator[TensorDict]:
        """Its rows in order, in pieces of at most 256 MB, each good until the next one is asked for.

        Args:
            begin: leave out so many rows.
            workers: threads that read. Default: as :class:`concurrent.futures.ThreadPoolExecutor` has.
        """
        n, first = len(self._kept), int(np.flatnonzero(self._kept)[begin])
        size = max(min(CHUNK_BYTES // max(self.row_bytes, 1), 1 << 16, n - first), 1)
        # The first record of a piece is the last one of the piece before.
        memory = [{name: np.empty((size + 1, *c.shape), c.dtype) for name, c in self.columns.items()} for _ in range(2)]

        def read(start: int, into: dict[str, npt.NDArray[Any]]) -> list[Future[None]]:
            stop = min(start + size, n)
            parts = (self.source.tasks(name, start, stop, out[1 : stop - start + 1]) for name, out in into.items())
            return [pool.submit(task) for task in itertools.chain.from_iterable(parts)]

        with ThreadPoolExecutor(workers) as pool:
            ahead = read(first, memory[0])
            for number, start in enumerate(range(first, n, size)):
                for each in ahead:
                    each.result()
                piece, other = memory[number % 2], memory[1 - number % 2]
                for name, records in piece.items():
                    records[0] = other[name][-1]
                ahead = read(start + size, other) if start + size < n else []
                yield from self._batches(piece, start, max(start - 1, first), start + size - 1 if ahead else n)

    def _batches(self, memory: dict[str, npt.NDArray[Any]], start: int, low: int, high: int) -> Iterator[TensorDict]:
        """The rows among records ``low .. high``, of which ``memory`` has those from ``start - 1`` on."""
        steps, all_rows = self.source.steps, low + np.flatnonzero(self._kept[low:high])
        jumps = (np.diff(all_rows) != 1) | steps.end[all_rows][:-1] if self.row_bytes >= LARGE_ROW else ()
        for index in np.split(all_rows, np.flatnonzero(jumps) + 1):
            batch, following = TensorDict({}, [len(index)]), index + ~steps.end[index]
            for name, column in self.columns.items():
                records = torch.from_numpy(memory[name]).view(-1, *column.row_shape)
                batch[column.key] = _taken(records, index - start + 1)
                if column.key in self.shared:
                    batch["next", *column.key] = _taken(records, following - start + 1)
            done, terminated = self._done[index], steps.terminated[index]
            truncated = steps.truncated[index] | (done & ~terminated)
            for flag, value in zip(FLAGS, (done, terminated, truncated), strict=True):
                batch["next", flag] = torch.from_numpy(value).unsqueeze(1)
            yield batch


def _taken(records: Tensor, index: npt.NDArray[np.int64]) -> Tensor:
    """Rows of a tensor: a view where they follow each other."""
    if len(index) and (np.diff(index) == 1).all():
        return records[index[0] : index[-1] + 1]
    return records[torch.from_numpy(index)]
