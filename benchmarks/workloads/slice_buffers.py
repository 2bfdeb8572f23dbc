"""Buffers of trajectories, and how a batch of slices is checked before anything is timed.

gpubuf and TorchRL share one interface, so that both are given the same calls; :data:`VARIANTS` says how each is set up.
They store a :class:`Stream`: endless rows whose place in the order of writing follows from their content.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import cycle
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase

from benchmarks.peers.libraries import ALPHA, BETA, EPS, needing
from benchmarks.peers.sources import transitions

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
        """The content of the steps with these numbers, counted from the first one written."""
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
        stream: makes the rows.
        capacity: steps that there is room for; rows of content that repeats, so a multiple of the episodes' length.
        stored: steps written.
        n_slices: slices in a batch.
        slice_len: steps of a slice.
        at_a_time: steps of a write that is timed.
        chunk: steps of a write that fills the buffer.
        prioritized: slices start by priority.
        envs: environments of the stream.
        row_bytes: bytes of a row of it.
    """

    stream: Callable[[], Stream]
    capacity: int
    stored: int
    n_slices: int
    slice_len: int
    at_a_time: int = 1
    chunk: int = 1_000_000
    prioritized: bool = False
    envs: int = 1
    row_bytes: int = 2

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
        scene: the stored trajectories.
        device: where the buffer keeps its rows.

    Attributes:
        buffer: the library's own.
        written: number of steps written by checks and fills; calls that are timed don't count.

    Raises:
        UnavailableError: the library is missing, or has no such sampler here.
    """

    def __init__(self, variant: str, scene: Scene, device: str) -> None:
        self.variant, self.scene, self.device = VARIANTS[variant], scene, device
        with needing(self.variant.module):
            self.library: Any = importlib.import_module(self.variant.module)
        library = self.library
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
        with needing("TorchRL"):
            return self.library.PrioritizedSliceSampler(self.scene.capacity, ALPHA, BETA, EPS, **options)

    def use(self, variant: str) -> None:
        """Sample the same rows in another way."""
        if VARIANTS[variant] != self.variant:
            self.variant = VARIANTS[variant]
            self.buffer.set_sampler(self.sampler(self.variant))

    # Writing

    def fill(self, until: int) -> None:
        """Write the next steps, in large chunks, up to a number of steps in all."""
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
        """A batch and its info, as arrays by flat name; info counts where both have a key."""
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
        assert len(self.buffer) == min(self.written, self.scene.capacity) * self.stream.envs
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
        return self.buffer.sampler.trajectory_index.nbytes / self.buffer.storage.max_size
