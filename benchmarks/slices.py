"""Slices of trajectories: what is stored, how it is sampled, and how a batch is checked before anything is timed.

gpubuf and TorchRL share one interface, so that both are given the same calls; :data:`VARIANTS` says how each is set up.
What they store is a :class:`Stream`: rows whose place in the order of writing follows from their content, endlessly.
"""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import cycle
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase

from benchmarks.libraries import ALPHA, BETA, EPS, UnavailableError
from benchmarks.workloads import OVERWHELMING, POOL, transitions

END_KEY = ("next", "done")


@dataclass(frozen=True)
class Stream:
    """Steps of environments, in order, one period of them; after the last the first follows.

    Attributes:
        rows: ``[P, E]``, contiguous.
    """

    rows: TensorDict

    @property
    def envs(self) -> int:
        return self.rows.shape[1]

    def block(self, start: int, n: int) -> TensorDict:
        """Steps ``start`` to ``start + n`` of the period: ``[n]`` for one environment, else ``[E, n]``. Views."""
        block = self.rows[start : start + n]
        return block.squeeze(1) if self.envs == 1 else block.transpose(0, 1)

    def columns(self, number: np.ndarray, env: np.ndarray) -> dict[str, np.ndarray]:
        """What is in the steps of these numbers, counted from the first one written."""
        at = number % len(self.rows)
        return {name: column.numpy()[at, env] for name, column in self.rows.flatten_keys(".").items()}


def thin_stream(period: int, episode: int = 500) -> Stream:
    """One observation of a byte and a done flag; together they tell the row number modulo ``episode``.

    Args:
        period: number of rows, a multiple of ``episode``.
        episode: length of every episode, 250 or 500.
    """
    row = torch.arange(period)
    done = (row % episode == episode - 1).view(-1, 1)
    rows = {"observation": (row % 250).to(torch.uint8), "next": {"done": done}}
    return Stream(TensorDict(rows, [period]).unsqueeze(1))


def wide_stream(period: int, episode: int) -> Stream:
    """The transitions of the other benchmarks, in episodes of this length that are terminated."""
    rows = transitions(period)
    done = (torch.arange(period) % episode == episode - 1).view(-1, 1)
    rows["next", "done"], rows["next", "terminated"] = done, done.clone()
    return Stream(rows.unsqueeze(1))


def environments_stream(period: int, envs: int, shortest: int, longest: int) -> Stream:
    """The transitions of many environments, whose episodes have random lengths."""
    rows = transitions(period * envs).view(period, envs)
    generator = np.random.default_rng(0)
    lengths = generator.integers(shortest, longest + 1, (envs, period // shortest + 2))
    # the first episode of each is under way already, so that they don't all begin at once
    ends = lengths.cumsum(1) - generator.integers(1, shortest, (envs, 1)) - 1
    done = np.zeros((period, envs, 1), dtype=bool)
    env, episode = np.nonzero(ends < period)
    done[ends[env, episode], env] = True
    rows["next", "done"] = torch.from_numpy(done)
    rows["next", "terminated"] = torch.from_numpy(done.copy())
    return Stream(rows)


@dataclass(frozen=True)
class Scene:
    """A buffer before anything is timed.

    Attributes:
        stream: makes what is written.
        capacity: steps that there is room for; rows of content that repeats, so a multiple of the episodes' length.
        stored: steps written.
        n_slices: slices in a batch.
        slice_len: steps of a slice.
        at_a_time: steps of a write that is timed.
        chunk: steps of a write that fills the buffer.
        prioritized: slices start by priority.
    """

    stream: Callable[[], Stream]
    capacity: int
    stored: int
    n_slices: int
    slice_len: int
    at_a_time: int = 1
    chunk: int = 1_000_000
    prioritized: bool = False

    @property
    def batch_size(self) -> int:
        """Transitions in a batch."""
        return self.n_slices * self.slice_len


@dataclass(frozen=True)
class Variant:
    """How a library is set up.

    Attributes:
        module: where its classes are.
        slices: whether it samples slices; if not, single rows.
        options: further arguments of its slice sampler.
    """

    module: str
    slices: bool = True
    options: dict[str, Any] = field(default_factory=dict)


VARIANTS = {
    "gpubuf": Variant("gpubuf"),
    "gpubuf-random": Variant("gpubuf", slices=False),
    "torchrl": Variant("torchrl.data", options={"cache_values": True}),
    "torchrl-uncached": Variant("torchrl.data"),
}


class SliceBuffer:
    """A buffer of some library, with the first ``scene.stored`` steps of the scene's stream.

    Args:
        variant: a key of :data:`VARIANTS`.
        scene: what is stored.
        device: where the buffer keeps its rows.

    Attributes:
        buffer: the library's own.
        written: number of steps written by checks and fills; calls that are timed don't count.

    Raises:
        UnavailableError: the library is missing, or has no such sampler here.
    """

    def __init__(self, variant: str, scene: Scene, device: str) -> None:
        self.variant, self.scene, self.device = VARIANTS[variant], scene, device
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                library = importlib.import_module(self.variant.module)
        except ImportError as error:
            raise UnavailableError(f"{self.variant.module} is not installed here: {error}") from error
        self.library: Any = library
        self.stream = scene.stream()
        envs = self.stream.envs
        storage = library.LazyTensorStorage(scene.capacity * envs, ndim=1 if envs == 1 else 2, device=device)
        kind = library.TensorDictReplayBuffer if scene.prioritized else library.ReplayBuffer
        self.buffer: Any = kind(storage=storage, sampler=self.sampler(self.variant))
        self.written = 0
        self.fill(scene.stored)

    def sampler(self, variant: Variant) -> Any:
        """The library's sampler of slices, or of rows."""
        if not variant.slices:
            return self.library.RandomSampler()
        options = {"slice_len": self.scene.slice_len, "end_key": END_KEY, **variant.options}
        if not self.scene.prioritized:
            return self.library.SliceSampler(**options)
        try:
            return self.library.PrioritizedSliceSampler(self.scene.capacity, ALPHA, BETA, EPS, **options)
        except RuntimeError as error:
            if "SegmentTree" not in str(error):
                raise
            raise UnavailableError(f"TorchRL's prioritized sampler does not load here: {error}") from error

    def use(self, variant: str) -> None:
        """Sample the same rows in another way."""
        if VARIANTS[variant] != self.variant:
            self.variant = VARIANTS[variant]
            self.buffer.set_sampler(self.sampler(self.variant))

    # Writing

    def fill(self, until: int) -> None:
        """Write the steps that follow, in large chunks, until so many have been written."""
        period = len(self.stream.rows)
        while self.written < until:
            start = self.written % period
            n = min(self.scene.chunk, until - self.written, period - start)
            self.buffer.extend(self.stream.block(start, n).to(self.device))
            self.written += n

    def blocks(self, most: int) -> Iterator[TensorDictBase]:
        """The writes that follow, ``scene.at_a_time`` steps each, made beforehand and endlessly.

        Args:
            most: steps after which they may repeat, instead of the whole period of the stream.
        """
        n, period = self.scene.at_a_time, len(self.stream.rows)
        starts = [(self.written + offset) % period for offset in range(0, min(most, period), n)]
        assert all(start + n <= period for start in starts), "a write goes over the end of the stream's period"
        return cycle([self.stream.block(start, n).clone().to(self.device) for start in starts])

    # Checking

    def columns(self, data: TensorDictBase, info: dict[Any, Any] | None = None) -> dict[str, np.ndarray]:
        """A batch, and what is known about it, as arrays by flat name; info counts where both have a key."""
        flat = {name: column.cpu().numpy() for name, column in data.flatten_keys(".").items()}
        for key, value in (info or {}).items():
            name = key if isinstance(key, str) else ".".join(key)
            if isinstance(value, tuple):
                value = torch.stack(value, -1)
            flat[name] = value.cpu().numpy()
        return flat

    def draw(self) -> dict[str, np.ndarray]:
        """A batch, as the library gives it."""
        return self.columns(*self.buffer.sample(self.scene.batch_size, return_info=True))

    def numbers(self, index: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Which steps of which environments lie at an index now: the number of each, counted from the first."""
        index = index.reshape(len(index), -1)
        step, env = index[:, 0], index[:, 1] if index.shape[1] > 1 else np.zeros_like(index[:, 0])
        capacity, newest = self.scene.capacity, self.written - 1
        assert (step >= 0).all()
        assert (step < min(self.written, capacity)).all()
        return newest - (newest - step) % capacity, env

    def check_rows(self, index: np.ndarray, columns: dict[str, np.ndarray], derived: tuple[str, ...] = ()) -> None:
        """Assert that rows have the content that was last written there."""
        for name, expected in self.stream.columns(*self.numbers(index)).items():
            if name not in derived:
                np.testing.assert_array_equal(columns[name].reshape(expected.shape), expected, err_msg=name)

    def check_newest(self, n: int) -> None:
        """Assert that the newest ``n`` steps are where they should be."""
        step = np.arange(self.written - n, self.written) % self.scene.capacity
        envs = self.stream.envs
        index = step if envs == 1 else np.stack([step.repeat(envs), np.tile(np.arange(envs), n)], -1)
        places = torch.from_numpy(index).to(self.device)
        rows = self.buffer.storage[places if envs == 1 else places.unbind(-1)]
        self.check_rows(index, self.columns(rows))

    def check_slices(self) -> tuple[np.ndarray, dict[str, np.ndarray]]:
        """Assert that a batch is made of whole slices of single episodes; return their starts' index, and the batch."""
        drawn, shape = self.draw(), (self.scene.n_slices, self.scene.slice_len)
        index = drawn["index"].reshape(self.scene.batch_size, -1)
        number, env = self.numbers(index)
        self.check_rows(index, drawn, derived=("next.done", "next.terminated"))
        number, env = number.reshape(shape), env.reshape(shape)
        # Numbers jump at the cursor, whatever the content there.
        assert (np.diff(number, axis=1) == 1).all()
        assert (env == env[:, :1]).all()
        stored = self.stream.columns(number, env)
        done = stored["next.done"].reshape(shape)
        assert not done[:, :-1].any()
        last = np.zeros(shape, dtype=bool)
        last[:, -1] = True
        terminated = stored.get("next.terminated", np.zeros(shape, dtype=bool))
        for name, flags in (("truncated", last), ("done", done | last), ("terminated", terminated)):
            np.testing.assert_array_equal(drawn[f"next.{name}"].reshape(shape), flags.reshape(shape), err_msg=name)
        if not self.scene.prioritized:
            self.check_spread(number[:, 0], env[:, 0])
        return index.reshape(*shape, -1)[:, 0], drawn

    def check_spread(self, number: np.ndarray, env: np.ndarray) -> None:
        """Assert that slices come from everywhere: from the older half and the newer, many different ones."""
        stored = min(self.written, self.scene.capacity)
        newer = (number >= self.written - stored // 2).mean()
        # more than six standard deviations for 256 slices and more
        assert 0.3 < newer < 0.7
        assert np.unique(number * self.stream.envs + env).size > self.scene.n_slices // 4

    def index_bytes(self) -> float:
        """Bytes of the trajectory index for a row that there is room for (gpubuf's; a test reads its size)."""
        return self.buffer.sampler.index_for(self.buffer.storage).nbytes / self.buffer.storage.max_size


def sampling(filled: SliceBuffer) -> Callable[[], object]:
    """Draw a batch of slices."""
    if filled.scene.prioritized:
        check_priorities(filled)
    else:
        filled.check_slices()
    sample, n = filled.buffer.sample, filled.scene.batch_size
    return lambda: sample(n)


#: Steps that are written one at a time, and read back, before such writes are timed.
WRITES_CHECKED = 32


def writing_and_sampling(filled: SliceBuffer) -> Callable[[], object]:
    """Write one step, then draw a batch of slices: nothing about the rows before holds over the write."""
    if filled.scene.prioritized:
        set_priorities(filled)
    for _ in range(WRITES_CHECKED):
        filled.buffer.extend(next(filled.blocks(1)))
        filled.written += filled.scene.at_a_time
        filled.check_slices()
    filled.check_newest(WRITES_CHECKED)
    # As many as an episode of the longest is, so that episodes go on to end.
    blocks, buffer, n = filled.blocks(500), filled.buffer, filled.scene.batch_size
    extend, sample = buffer.extend, buffer.sample

    def call() -> object:
        extend(next(blocks))
        return sample(n)

    return call


def filling(filled: SliceBuffer) -> Callable[[], object]:
    """Write a block of steps into a full ring, after half of an empty one was written and read back."""
    scene, sliced = filled.scene, filled.variant.slices
    blocks, extend = filled.blocks(len(filled.stream.rows)), filled.buffer.extend
    for until in (scene.capacity // 2, scene.capacity + 2 * scene.at_a_time):
        while filled.written < until:
            extend(next(blocks))
            filled.written += scene.at_a_time
        filled.check_newest(min(filled.written, 3 * scene.at_a_time))
        if sliced:
            filled.check_slices()
    return lambda: extend(next(blocks))


def set_priorities(filled: SliceBuffer) -> np.ndarray:
    """Give every row a priority of its own; returns them."""
    n = filled.scene.capacity
    priority = torch.rand(n, generator=torch.Generator().manual_seed(2)) + 0.1
    filled.buffer.update_priority(torch.arange(n, device=filled.device), priority.to(filled.device))
    return priority.numpy().astype(np.float64)


def legal_starts(filled: SliceBuffer) -> np.ndarray:
    """The rows of an exactly full buffer at which a slice can start."""
    ends = np.flatnonzero(filled.stream.rows["next", "done"].numpy().ravel()[: filled.scene.capacity])
    row = np.arange(filled.scene.capacity)
    left = np.append(ends, filled.scene.capacity - 1)[np.searchsorted(ends, row)] - row + 1
    return left >= filled.scene.slice_len


def check_priorities(filled: SliceBuffer) -> None:
    """Assert that starts are legal and weighed by the formula (Schaul et al., 2016), up to its normalisation.

    Whether the smallest priority counts among all rows or among those where a slice can start is a library's choice.
    """
    weight = (set_priorities(filled) + EPS) ** ALPHA
    starts, drawn = filled.check_slices()
    start = starts[:, 0]
    assert legal_starts(filled)[start].all()
    expected = np.repeat(weight[start] ** -BETA, filled.scene.slice_len)
    found = drawn["priority_weight"].ravel()
    np.testing.assert_allclose(found / found.max(), expected / expected.max(), rtol=1e-5)
    assert found.max() <= 1


def stepping(filled: SliceBuffer) -> Callable[[], object]:
    """Draw a batch of slices, then set the priorities of all its rows."""
    check_priorities(filled)
    buffer, n = filled.buffer, filled.scene.batch_size
    generator = torch.Generator().manual_seed(1)
    pool = cycle([(torch.rand(n, generator=generator) + 0.1).to(filled.device) for _ in range(POOL)])

    def call() -> object:
        batch = buffer.sample(n)
        batch["td_error"] = next(pool)
        buffer.update_tensordict_priority(batch)
        return batch

    # Of so many legal starts more remain overwhelming than one batch of slices covers.
    chosen = np.flatnonzero(legal_starts(filled))[: 2 * n]
    buffer.update_priority(torch.from_numpy(chosen).to(filled.device), OVERWHELMING)
    first: Any = call()
    assert np.isin(first["index"].cpu().numpy().reshape(-1, filled.scene.slice_len)[:, 0], chosen).all()
    again, _ = filled.check_slices()
    assert np.isin(again[:, 0], np.setdiff1d(chosen, first["index"].cpu().numpy().ravel())).all()
    set_priorities(filled)
    return call


@dataclass(frozen=True)
class SliceWorkload:
    """One operation on one scene.

    Attributes:
        name: the group of its benchmarks.
        title: what it is, for people.
        scene: what is stored.
        operation: checks the library against the oracle, and returns what is timed.
        variants: who does it.
        huge: needs gigabytes and minutes.
    """

    name: str
    title: str
    scene: Scene
    operation: Callable[[SliceBuffer], Callable[[], object]]
    variants: tuple[str, ...] = ("gpubuf", "torchrl")
    huge: bool = False


def short(n: int) -> str:
    """``5M`` for 5 000 000, ``1.2M``, ``100k``."""
    return f"{n / 1e6:g}M" if n >= 1_000_000 else f"{n / 1e3:g}k"


#: (rows stored, capacity) of the buffers of 500-step episodes, of which slices of 4 are drawn, 1024 rows a batch.
SIZES = (
    (100_000, 120_000),
    (1_000_000, 1_200_000),
    (5_000_000, 6_000_000),
    (5_000_000, 600_000_000),
    (10_000_000, 12_000_000),
    (100_000_000, 120_000_000),
    (346_000_000, 600_000_000),
)
#: From so many rows on, a workload is run on request only.
HUGE = 50_000_000
ENVS, ENV_STEPS = 4096, 244


def _of_size(stored: int, capacity: int) -> Iterator[SliceWorkload]:
    scene = Scene(lambda: thin_stream(1_000_000), capacity, stored, n_slices=256, slice_len=4)
    size, huge = f"{short(stored)}-in-{short(capacity)}", capacity >= HUGE
    title = f"slices, {short(stored)} in {short(capacity)}"
    both = ("gpubuf", "torchrl")
    yield SliceWorkload(f"slices-{size}-sample", f"{title}: sample", scene, sampling, (*both, "torchrl-uncached"), huge)
    yield SliceWorkload(
        f"slices-{size}-write-and-sample", f"{title}: write a row and sample", scene, writing_and_sampling, both, huge
    )


def _filling(name: str, title: str, stream: Callable[[], Stream], capacity: int) -> SliceWorkload:
    scene = Scene(stream, capacity, stored=0, n_slices=256, slice_len=4, at_a_time=4096)
    return SliceWorkload(name, title, scene, filling, ("gpubuf-random", "gpubuf", "torchrl"))


_ENVS = Scene(
    lambda: environments_stream(300, ENVS, 20, 200),
    ENV_STEPS,
    stored=ENV_STEPS + 20,
    n_slices=1024,
    slice_len=8,
    chunk=50,
)
_PRIORITIZED = Scene(
    lambda: wide_stream(1_000_000, 100),
    1_000_000,
    1_000_000,
    n_slices=128,
    slice_len=8,
    chunk=100_000,
    prioritized=True,
)
_ALL = (
    *(workload for size in SIZES for workload in _of_size(*size)),
    _filling("filling-4096", "write 4096 rows of 2 bytes", lambda: thin_stream(512_000), 6_000_000),
    _filling("filling-transitions-4096", "write 4096 transitions", lambda: wide_stream(512_000, 500), 1_000_000),
    SliceWorkload("slices-envs-sample", f"{ENVS} environments: sample", _ENVS, sampling),
    SliceWorkload(
        "slices-envs-write-and-sample", f"{ENVS} environments: write a step and sample", _ENVS, writing_and_sampling
    ),
    SliceWorkload("prioritized-slices-sample", "prioritized slices: sample", _PRIORITIZED, sampling),
    SliceWorkload(
        "prioritized-slices-sample-and-update", "prioritized slices: sample and update", _PRIORITIZED, stepping
    ),
    SliceWorkload(
        "prioritized-slices-write-and-sample",
        "prioritized slices: write a row and sample",
        _PRIORITIZED,
        writing_and_sampling,
    ),
)
#: By name.
SLICES = {workload.name: workload for workload in _ALL}
