"""Adapters of the libraries whose buffers are no dictionaries of PyTorch tensors: flashbax, Stable-Baselines3."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict
from torch import Tensor

from benchmarks.peers.libraries import ALPHA, BETA, Library, UnavailableError, needing
from benchmarks.peers.sources import TINY


class Flashbax(Library):
    """flashbax: pure functions on a state of JAX arrays, compiled; the state is donated, as its documentation says.

    A call that returns has only been queued, so every call waits for its result: on a CPU there is nothing to overlap
    with. Weights are the user's business there: computed from the probabilities, in the same compiled function.
    """

    name = "flashbax"
    title = "flashbax"
    # the sum tree has two float32 for each leaf of the next power of two
    tree_bytes = 16
    weights_over = "batch"
    exact_sums = False

    def load(self) -> None:
        with needing("flashbax"):
            import flashbax
            import jax
        self.library, self.jax = flashbax, jax
        kind = "gpu" if self.device == "cuda" else "cpu"
        try:
            self.home = jax.devices(kind)[0]
        except RuntimeError as error:
            raise UnavailableError(f"JAX sees no {kind} here: {error}") from error
        if len(self.source) >= 1 << 31:
            raise UnavailableError("flashbax counts rows in int32")

    def open(self) -> None:
        jax = self.jax
        row = {name: jax.device_put(column[0], self.home) for name, column in self.rows(self.source.rows(0, 1)).items()}
        # The state depends on the size of the buffer alone, not on that of batches.
        buffer = self.make(1)
        with jax.default_device(self.home):
            self.state = buffer.init(row)
            self.key = jax.random.PRNGKey(0)
        self.add = jax.jit(buffer.add, donate_argnums=0)
        if self.prioritized:
            self.set_priorities = jax.jit(buffer.set_priorities, donate_argnums=0)
        self.draws: dict[int, Callable[..., Any]] = {}
        self.steps: dict[int, Callable[..., Any]] = {}
        self.extend, self.sample = self.write, self.draw
        self.update, self.step = self.change, self.take_step

    def make(self, n: int) -> Any:
        """The functions of a buffer whose batches have ``n`` rows."""
        options = {"max_length": len(self.source), "min_length": 1, "sample_batch_size": n, "add_batches": True}
        if not self.prioritized:
            return self.library.make_item_buffer(**options)
        kind = "gpu" if self.device == "cuda" else "cpu"
        return self.library.make_prioritised_item_buffer(**options, priority_exponent=ALPHA, device=kind)

    def drawing(self, n: int) -> Callable[[Any, Any], tuple[Any, Any]]:
        """A function of state and key: the next key, and a batch of ``n``."""
        buffer, split = self.make(n), self.jax.random.split

        def draw(state: Any, key: Any) -> tuple[Any, Any]:
            key, this = split(key)
            drawn = buffer.sample(state, this)
            batch = dict(drawn.experience)
            if self.prioritized:
                weight = drawn.probabilities**-BETA
                batch |= {"index": drawn.indices, "weight": weight / weight.max()}
            return key, batch

        return draw

    def write(self, rows: Any) -> None:
        self.state = self.jax.block_until_ready(self.add(self.state, rows))

    def draw(self, n: int) -> Any:
        if n not in self.draws:
            self.draws[n] = self.jax.jit(self.drawing(n))
        self.key, batch = self.jax.block_until_ready(self.draws[n](self.state, self.key))
        return batch

    def change(self, index: Any, priority: Any) -> None:
        self.state = self.jax.block_until_ready(self.set_priorities(self.state, index, priority))

    def take_step(self, n: int, priority: Any) -> Any:
        if n not in self.steps:
            draw, set_priorities = self.drawing(n), self.make(n).set_priorities

            def step(state: Any, key: Any, priority: Any) -> tuple[Any, Any, Any]:
                key, batch = draw(state, key)
                return set_priorities(state, batch["index"], priority), key, batch

            self.steps[n] = self.jax.jit(step, donate_argnums=0)
        result = self.jax.block_until_ready(self.steps[n](self.state, self.key, priority))
        self.state, self.key, batch = result
        return batch

    def rows(self, source: TensorDict) -> Any:
        return self.jax.device_put(self.rows_on_host(source), self.home)

    def rows_on_host(self, source: TensorDict) -> dict[str, np.ndarray]:
        return {name: column.numpy() for name, column in source.flatten_keys(".").items()}

    def priorities(self, index: Tensor, priority: Tensor) -> tuple[Any, Any]:
        pair = (index.numpy().astype(np.int32), priority.numpy())
        return tuple(self.jax.device_put(pair, self.home))

    def training_batch(self, n: int) -> tuple[Any, ...]:
        batch = self.sample(n)
        names = ("observation", "action", "next.observation", "next.reward", "next.terminated")
        return tuple(batch[name] for name in names)

    def columns(self, batch: Any) -> dict[str, np.ndarray]:
        return {name: np.asarray(column) for name, column in batch.items()}

    def stored(self, position: np.ndarray) -> dict[str, np.ndarray]:
        return {name: np.asarray(column[0, position]) for name, column in self.state.experience.items()}

    @property
    def clock(self) -> str:
        return "wall"


class StableBaselines(Library):
    """Stable-Baselines3's ``ReplayBuffer``: NumPy arrays on the host, batches copied to the device; uniform only.

    It writes a step of all environments at a time. There are as many as divide both the capacity and 256, so that a
    batch of rows is some whole steps. Rows of :data:`TINY` get the action, reward and flags that it can't leave out.
    """

    name = "sb3"
    title = "Stable-Baselines3"
    lacks = frozenset({"next.done"})

    def load(self) -> None:
        if self.prioritized:
            raise UnavailableError("Stable-Baselines3 has no prioritized buffer")
        with needing("Stable-Baselines3"):
            from gymnasium import spaces
            from stable_baselines3.common.buffers import ReplayBuffer
        self.spaces, self.buffer_class = spaces, ReplayBuffer
        self.envs = math.gcd(len(self.source), 256)

    def row_bytes(self) -> int:
        # observation and next observation, action, and three float32: reward, done, timeout
        return 24 if self.source.layout is TINY else self.source.layout.row_bytes + 10

    def open(self) -> None:
        layout = self.source.layout
        dtype = np.int32 if layout is TINY else np.float32
        limits = np.iinfo(dtype) if layout is TINY else np.finfo(dtype)

        def box(width: int, dtype: Any, limits: Any) -> Any:
            return self.spaces.Box(limits.min, limits.max, (width,), dtype)

        self.buffer = self.buffer_class(
            len(self.source),
            box(layout.width("observation"), dtype, limits),
            box(max(layout.width("action"), 1), np.float32, np.finfo(np.float32)),
            device=self.device,
            n_envs=self.envs,
        )
        self.sample = self.buffer.sample
        self.extend = self.write

    def write(self, steps: list[tuple[Any, ...]]) -> None:
        add = self.buffer.add
        for step in steps:
            add(*step)

    def arrays(self, source: TensorDict) -> dict[str, np.ndarray]:
        """Columns by the names of the buffer's arrays."""
        flat = {name: column.numpy() for name, column in source.flatten_keys(".").items()}
        n = len(source)
        observation, nothing = flat["observation"], np.zeros((n, 1), np.float32)
        done = flat.get("next.done", nothing).astype(bool)
        return {
            "observations": observation,
            "next_observations": flat.get("next.observation", observation),
            "actions": flat.get("action", nothing),
            "rewards": flat.get("next.reward", nothing)[:, 0],
            "dones": done[:, 0],
            "timeouts": (done & ~flat.get("next.terminated", done))[:, 0],
        }

    def rows(self, source: TensorDict) -> list[tuple[Any, ...]]:
        if len(source) % self.envs:
            raise UnavailableError(f"it writes steps of all its {self.envs} environments, not {len(source)} rows")
        columns = list(self.arrays(source).values())
        infos: list[dict[str, bool]] = [{}, {"TimeLimit.truncated": True}]
        steps = []
        for start in range(0, len(source), self.envs):
            *step, timeouts = (column[start : start + self.envs] for column in columns)
            steps.append((*step, [infos[int(timeout)] for timeout in timeouts]))
        return steps

    def fill(self) -> None:
        # Into the arrays, as `add` does for every step: in Python that takes minutes for 100 M rows.
        n = 1_000_000 // self.envs * self.envs
        for start in range(0, len(self.source), n):
            rows = self.source.rows(start, min(n, len(self.source) - start))
            for name, column in self.arrays(rows).items():
                array = getattr(self.buffer, name)
                array.reshape(-1, *array.shape[2:])[start : start + len(rows)] = column
        self.buffer.full = True

    def priorities(self, index: Tensor, priority: Tensor) -> tuple[Any, Any]:
        raise NotImplementedError("Stable-Baselines3 has no priorities")

    def training_batch(self, n: int) -> tuple[Any, ...]:
        batch = self.buffer.sample(n)
        return batch.observations, batch.actions, batch.next_observations, batch.rewards, batch.dones

    def columns(self, batch: Any) -> dict[str, np.ndarray]:
        flat = {
            "observation": batch.observations,
            "action": batch.actions,
            "next.observation": batch.next_observations,
            "next.terminated": batch.dones,
            "next.reward": batch.rewards,
        }
        return self.named({name: column.cpu().numpy() for name, column in flat.items()})

    def stored(self, position: np.ndarray) -> dict[str, np.ndarray]:
        names = {"observations": "observation", "actions": "action", "next_observations": "next.observation"}
        arrays = {ours: getattr(self.buffer, theirs) for theirs, ours in names.items()}
        arrays["next.terminated"] = self.buffer.dones[..., None] * (1 - self.buffer.timeouts[..., None])
        arrays["next.reward"] = self.buffer.rewards[..., None]
        return self.named({name: array.reshape(-1, array.shape[-1])[position] for name, array in arrays.items()})

    def named(self, columns: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        """The columns of the layout, with their dtypes."""
        layout = self.source.layout
        return {
            column.name: columns[column.name].astype(torch.empty(0, dtype=column.dtype).numpy().dtype)
            for column in layout.columns
            if column.name not in self.lacks
        }
