"""Stable-Baselines3's buffers and ours, full of rows."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
from gymnasium import spaces

from benchmarks.measure.in_turn import Contender

BATCH, ROWS = 256, 1_000_000
#: Steps that are written over and over, with an episode of 500 in each environment.
STEPS, EPISODE = 2_000, 500
BOX, ACTION = spaces.Box(-10, 10, (17,), np.float32), spaces.Box(-1, 1, (6,), np.float32)
IMAGE = spaces.Box(0, 255, (4, 84, 84), np.uint8)
DICT = spaces.Dict({"position": BOX, "goal": spaces.Box(-10, 10, (3,), np.float32)})


def steps_of(space: Any, envs: int, count: int) -> list[tuple[Any, ...]]:
    """The arguments of ``add`` for steps whose next observation is the observation of the step behind."""
    rng = np.random.default_rng(0)

    def observed() -> Any:
        if isinstance(space, spaces.Dict):
            return {name: rng.standard_normal((envs, *part.shape), np.float32) for name, part in space.spaces.items()}
        if space.dtype == np.uint8:
            return rng.integers(0, 255, (envs, *space.shape), np.uint8)
        return rng.standard_normal((envs, *space.shape), np.float32)

    observations = [observed() for _ in range(count)]
    found = []
    for at in range(count):
        done = np.full(envs, at % EPISODE == EPISODE - 1)
        infos: list[dict[str, Any]] = [{"TimeLimit.truncated": True} if ended else {} for ended in done]
        action, reward = rng.standard_normal((envs, 6), np.float32), rng.standard_normal(envs, np.float32)
        found.append((observations[at], observations[(at + 1) % count], action, reward, done, infos))
    return found


def held(buffer: Any) -> int:
    """Bytes of all arrays of a buffer of Stable-Baselines3."""
    found = 0
    for value in vars(buffer).values():
        parts = value.values() if isinstance(value, dict) else [value]
        found += sum(part.nbytes for part in parts if isinstance(part, np.ndarray))
    return found


def contender(buffer: Any, steps: list[tuple[Any, ...]], n_bytes: int | None = None) -> Contender:
    """A buffer, full."""
    endless: Iterator[tuple[Any, ...]] = itertools.cycle(steps)
    while not buffer.full:
        buffer.add(*next(endless))

    def add() -> None:
        buffer.add(*next(endless))

    def step() -> None:
        buffer.add(*next(endless))
        buffer.sample(BATCH)

    calls = {"add": add, f"sample {BATCH}": lambda: buffer.sample(BATCH), f"add and sample {BATCH}": step}
    return Contender(calls, buffer.buffer.memory().total if n_bytes is None else n_bytes)


def _pair(theirs: str, ours: Any, space: Any, envs: int, rows: int, once: bool, **options: Any) -> dict[str, Contender]:
    from stable_baselines3.common import buffers  # type: ignore[import-not-found]

    steps = steps_of(space, envs, 200 if space is IMAGE else STEPS)
    own = getattr(buffers, theirs)(rows, space, ACTION, "cpu", n_envs=envs, **options)
    found = {"Stable-Baselines3": contender(own, steps, held(own))}
    if once and theirs == "ReplayBuffer":
        half = buffers.ReplayBuffer(
            rows, space, ACTION, "cpu", envs, optimize_memory_usage=True, handle_timeout_termination=False
        )
        found["Stable-Baselines3, optimize_memory_usage (no timeouts)"] = contender(half, steps, held(half))
    found["gpubuf"] = contender(ours(rows, space, ACTION, "cpu", n_envs=envs, **options), steps)
    if once:
        shared = ours(rows, space, ACTION, "cpu", n_envs=envs, optimize_memory_usage=True, **options)
        found["gpubuf, optimize_memory_usage"] = contender(shared, steps)
        # As many as there are ends of episodes, four times over.
        ends = max(4 * rows // EPISODE, envs)
        fitted = ours(
            rows, space, ACTION, "cpu", n_envs=envs, optimize_memory_usage=True, next_capacity=ends, **options
        )
        found["gpubuf, optimize_memory_usage, next_capacity for these episodes"] = contender(fitted, steps)
    return found


def one() -> dict[str, Contender]:
    """One environment."""
    from gpubuf.integrations import sb3

    return _pair("ReplayBuffer", sb3.ReplayBuffer, BOX, 1, ROWS, True)


def eight() -> dict[str, Contender]:
    """Eight environments."""
    from gpubuf.integrations import sb3

    return _pair("ReplayBuffer", sb3.ReplayBuffer, BOX, 8, ROWS, True)


def n_step() -> dict[str, Contender]:
    """Returns of three steps."""
    from gpubuf.integrations import sb3

    return _pair("NStepReplayBuffer", sb3.NStepReplayBuffer, BOX, 1, ROWS, False)


def images() -> dict[str, Contender]:
    """Images of Atari."""
    from gpubuf.integrations import sb3

    return _pair("ReplayBuffer", sb3.ReplayBuffer, IMAGE, 1, 10_000, True)


def dicts() -> dict[str, Contender]:
    """Observations that are dicts, as of environments with goals."""
    from gpubuf.integrations import sb3

    return _pair("DictReplayBuffer", sb3.DictReplayBuffer, DICT, 1, ROWS, True)


def cleanrl() -> dict[str, Contender]:
    """CleanRL's scripts handle timeouts themselves."""
    from gpubuf.integrations.cleanrl import ReplayBuffer

    return _pair("ReplayBuffer", ReplayBuffer, BOX, 1, ROWS, False, handle_timeout_termination=False)
