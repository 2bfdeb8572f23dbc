"""Slices of trajectories from buffers of rising size, and the check of each batch before it is timed.

gpubuf and TorchRL share one interface, so that both are given the same calls. Their buffers store a :class:`Stream`:
endless rows whose place in the order of writing follows from their content.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass
from itertools import cycle
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict

from benchmarks.peers.libraries import ALPHA, BETA, EPS, flat_arrays, needing
from benchmarks.peers.sources import TRANSITIONS, transitions
from benchmarks.workloads.replay import OVERWHELMING, POOL
from benchmarks.workloads.workload import Workload

END_KEY = ("next", "done")
#: Where a library's classes are, and further arguments of its slice sampler.
LIBRARIES: dict[str, tuple[str, dict[str, Any]]] = {
    "gpubuf": ("gpubuf", {}),
    "torchrl": ("torchrl.data", {"cache_values": True}),
}
#: Rows of an episode of :func:`wide_stream`.
EPISODE = 100
#: Rows of a write that fills a buffer.
CHUNK = 1_000_000
#: Rows that are written one at a time, and read back, before such writes are timed.
WRITES_CHECKED = 32


def thin_stream(period: int, episode: int = 500) -> TensorDict:
    """``[period]`` rows: an observation of a byte and a done flag, which tell the row's number modulo ``episode``.

    ``period`` is a multiple of ``episode``, and ``episode`` is 250 or 500. After the last row the first follows.
    """
    row = torch.arange(period)
    done = (row % episode == episode - 1).view(-1, 1)
    return TensorDict({"observation": (row % 250).to(torch.uint8), "next": {"done": done}}, [period])


def wide_stream(period: int) -> TensorDict:
    """The transitions of the other benchmarks, in episodes that are terminated."""
    rows = transitions(period)
    done = (torch.arange(period) % EPISODE == EPISODE - 1).view(-1, 1)
    rows["next", "done"], rows["next", "terminated"] = done, done.clone()
    return rows


class SliceBuffer:
    """A buffer of some library, with the first rows of a stream.

    Args:
        library: a key of :data:`LIBRARIES`.
        entry: the workload: rows, sizes, and whether slices start by priority.
        device: where the buffer keeps its rows.

    Attributes:
        buffer: the library's own.
        written: number of rows written by checks and fills; calls that are timed don't count.

    Raises:
        UnavailableError: the library is missing, or has no such sampler here.
    """

    def __init__(self, library: str, entry: Slices, device: str) -> None:
        module, options = LIBRARIES[library]
        self.entry, self.device, self.stream, self.written = entry, device, entry.stream(), 0
        with needing(module):
            kinds: Any = importlib.import_module(module)
        options = {"slice_len": entry.slice_len, "end_key": END_KEY, **options}
        with needing("TorchRL"):
            if entry.prioritized:
                sampler = kinds.PrioritizedSliceSampler(entry.capacity, ALPHA, BETA, EPS, **options)
            else:
                sampler = kinds.SliceSampler(**options)
        storage = kinds.LazyTensorStorage(entry.capacity, device=device)
        kind = kinds.TensorDictReplayBuffer if entry.prioritized else kinds.ReplayBuffer
        self.buffer: Any = kind(storage=storage, sampler=sampler)
        self.fill(entry.stored)

    def fill(self, until: int) -> None:
        """Write the next rows, in large chunks, up to a number of rows in all."""
        period = len(self.stream)
        while self.written < until:
            start = self.written % period
            n = min(CHUNK, until - self.written, period - start)
            self.buffer.extend(self.stream[start : start + n].to(self.device))
            self.written += n

    def next_rows(self, n: int) -> Iterator[Any]:
        """The next ``n`` rows, one at a time, over and over; made beforehand."""
        at = [(self.written + offset) % len(self.stream) for offset in range(n)]
        return cycle([self.stream[row : row + 1].clone().to(self.device) for row in at])

    def draw(self) -> dict[str, np.ndarray]:
        """A batch, by flat name; its info counts where both have a key."""
        batch, info = self.buffer.sample(self.entry.batch, return_info=True)
        flat = flat_arrays(batch)
        for key, value in info.items():
            name = key if isinstance(key, str) else ".".join(key)
            flat[name] = torch.stack(value, -1).cpu().numpy() if isinstance(value, tuple) else value.cpu().numpy()
        return flat

    def rows(self, number: np.ndarray) -> dict[str, np.ndarray]:
        """The content of the rows with these numbers, counted from the first one written."""
        return {name: column[number % len(self.stream)] for name, column in flat_arrays(self.stream).items()}

    def check_newest(self, n: int) -> None:
        """Assert that the newest ``n`` rows are where they should be."""
        assert len(self.buffer) == min(self.written, self.entry.capacity)
        number = np.arange(self.written - n, self.written)
        found = flat_arrays(self.buffer[torch.from_numpy(number % self.entry.capacity).to(self.device)])
        for name, expected in self.rows(number).items():
            np.testing.assert_array_equal(found[name].reshape(expected.shape), expected, err_msg=name)

    def check_slices(self) -> tuple[np.ndarray, dict[str, np.ndarray]]:
        """Assert that a batch is made of whole slices of single episodes; return their starts' index, and the batch."""
        entry, drawn = self.entry, self.draw()
        shape, capacity = (entry.batch // entry.slice_len, entry.slice_len), entry.capacity
        index = drawn["index"].reshape(shape)
        assert ((index >= 0) & (index < min(self.written, capacity))).all()
        newest = self.written - 1
        number = newest - (newest - index) % capacity
        stored = self.rows(number.ravel())
        for name, expected in stored.items():
            if name not in ("next.done", "next.terminated"):
                np.testing.assert_array_equal(drawn[name].reshape(expected.shape), expected, err_msg=name)
        # Numbers jump at the cursor, whatever the content there.
        assert (np.diff(number, axis=1) == 1).all()
        done = stored["next.done"].reshape(shape)
        assert not done[:, :-1].any()
        last = np.zeros(shape, dtype=bool)
        last[:, -1] = True
        for name, flags in (("truncated", last), ("done", done | last)):
            np.testing.assert_array_equal(drawn[f"next.{name}"].reshape(shape), flags, err_msg=name)
        if not entry.prioritized:
            # From everywhere, by more than six standard deviations of 256 slices, and many different ones.
            newer = (number[:, 0] >= self.written - min(self.written, capacity) // 2).mean()
            assert 0.3 < newer < 0.7
            assert np.unique(number[:, 0]).size > len(number) // 4
        return index[:, 0], drawn

    def set_priorities(self) -> np.ndarray:
        """Give every row a priority of its own; returns them."""
        n = self.entry.capacity
        priority = torch.rand(n, generator=torch.Generator().manual_seed(2)) + 0.1
        self.buffer.update_priority(torch.arange(n, device=self.device), priority.to(self.device))
        return priority.numpy().astype(np.float64)

    def check_priorities(self) -> None:
        """Assert that weights are those of the starts by the formula (Schaul et al., 2016), up to its normalisation.

        Whether the smallest priority counts among all rows or among those where a slice can start is a library's
        choice.
        """
        weight = (self.set_priorities() + EPS) ** ALPHA
        start, drawn = self.check_slices()
        expected, found = np.repeat(weight[start] ** -BETA, self.entry.slice_len), drawn["priority_weight"].ravel()
        np.testing.assert_allclose(found / found.max(), expected / expected.max(), rtol=1e-5)
        assert found.max() <= 1


Prepare = Callable[[SliceBuffer], Callable[[], object]]


def sampling(filled: SliceBuffer) -> Callable[[], object]:
    """Draw a batch of slices."""
    if filled.entry.prioritized:
        filled.check_priorities()
    filled.check_slices()
    sample, n = filled.buffer.sample, filled.entry.batch
    return lambda: sample(n)


def writing_and_sampling(filled: SliceBuffer) -> Callable[[], object]:
    """Write one row, then draw a batch of slices: nothing about the rows before holds over the write."""
    if filled.entry.prioritized:
        filled.set_priorities()
    for i in range(WRITES_CHECKED):
        filled.buffer.extend(next(filled.next_rows(1)))
        filled.written += 1
        if i % 8 == 0:
            filled.check_slices()
    filled.check_newest(WRITES_CHECKED)
    # As many as an episode of the longest is, so that episodes go on to end.
    rows, extend, sample, n = filled.next_rows(500), filled.buffer.extend, filled.buffer.sample, filled.entry.batch

    def call() -> object:
        extend(next(rows))
        return sample(n)

    return call


def stepping(filled: SliceBuffer) -> Callable[[], object]:
    """Draw a batch of slices, then set the priorities of all its rows."""
    filled.check_priorities()
    buffer, n = filled.buffer, filled.entry.batch
    generator = torch.Generator().manual_seed(1)
    pool = cycle([(torch.rand(n, generator=generator) + 0.1).to(filled.device) for _ in range(POOL)])

    def call() -> Any:
        batch = buffer.sample(n)
        batch["td_error"] = next(pool)
        buffer.update_tensordict_priority(batch)
        return batch

    # More rows at which a slice can start than one batch covers: those that it draws lose their priority.
    row = np.arange(filled.entry.capacity)
    chosen = row[row % EPISODE <= EPISODE - filled.entry.slice_len][: 2 * n]
    buffer.update_priority(torch.from_numpy(chosen).to(filled.device), OVERWHELMING)
    first = call()["index"].cpu().numpy().reshape(-1)
    again, _ = filled.check_slices()
    assert np.isin(first[:: filled.entry.slice_len], chosen).all()
    assert np.isin(again, np.setdiff1d(chosen, first)).all()
    filled.set_priorities()
    return call


@dataclass(frozen=True, kw_only=True)
class Slices(Workload):
    """One operation on a buffer of trajectories.

    Attributes:
        stream: makes the rows.
        stored: rows written.
        slice_len: rows of a slice.
        prioritized: slices start by priority.
        operation: checks the library against the oracle, and returns the call to time.
    """

    stream: Callable[[], TensorDict]
    stored: int
    slice_len: int
    operation: Prepare
    prioritized: bool = False
    libraries: tuple[str, ...] = ("gpubuf", "torchrl")

    def fill(self, library: str, device: str) -> SliceBuffer:
        return SliceBuffer(library, self, device)

    def prepare(self, filled: SliceBuffer, library: str, device: str) -> Callable[[], object]:
        return self.operation(filled)

    def contents(self, library: str) -> Hashable:
        return library, self.stream, self.capacity, self.stored, self.slice_len, self.prioritized


def short(n: int) -> str:
    """``5M`` for 5 000 000, ``1.2M``, ``100k``."""
    return f"{n / 1e6:g}M" if n >= 1_000_000 else f"{n / 1e3:g}k"


def _thin() -> TensorDict:
    return thin_stream(1_000_000)


def _wide() -> TensorDict:
    return wide_stream(1_000_000)


def _of_size(stored: int, capacity: int, name: str, title: str, operation: Prepare) -> Slices:
    sizes = f"{short(stored)} in {short(capacity)}"
    return Slices(
        name=f"slices-{sizes.replace(' ', '-')}-{name}",
        title=f"slices, {sizes}: {title}",
        **{"stream": _thin, "capacity": capacity, "stored": stored, "batch": 1024, "slice_len": 4, "row_bytes": 2},
        **{"operation": operation, "quick": capacity <= 200_000},
    )


def _by_priority(name: str, title: str, operation: Prepare) -> Slices:
    return Slices(
        name=f"prioritized-slices-{name}",
        title=f"prioritized slices: {title}",
        **{"stream": _wide, "capacity": 1_000_000, "stored": 1_000_000, "batch": 1024, "slice_len": 8},
        **{"row_bytes": TRANSITIONS.row_bytes, "operation": operation, "quick": False},
        prioritized=True,
    )


_SIZES = ((100_000, 120_000), (1_000_000, 1_200_000), (5_000_000, 6_000_000), (100_000_000, 120_000_000))
_SAMPLE = ("sample", "sample", sampling)
_WRITE = ("write-and-sample", "write a row and sample", writing_and_sampling)
#: By name.
SLICES = {
    workload.name: workload
    for workload in (
        *(_of_size(*size, *operation) for size in _SIZES for operation in (_SAMPLE, _WRITE)),
        *(_by_priority(*each) for each in (_SAMPLE, ("sample-and-update", "sample and update", stepping), _WRITE)),
    )
}
