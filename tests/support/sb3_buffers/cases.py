"""Streams of steps, and the buffers that get them: what the record and the tests share."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from gymnasium import spaces

STEPS = 12
#: Steps that are written: fewer than there is room for, and over the seam.
WRITTEN = (7, 31)
BOX = spaces.Box(-100, 100, (2,), np.float32)
SPACES = {
    "box": BOX,
    "image": spaces.Box(0, 255, (1, 2, 2), np.uint8),
    "discrete": spaces.Discrete(50),
    "dict": spaces.Dict(
        {"vector": BOX, "count": spaces.Discrete(50), "image": spaces.Box(0, 255, (1, 2, 1), np.uint8)}
    ),
}
ACTIONS = {"box": spaces.Box(-1, 1, (2,), np.float32), "discrete": spaces.Discrete(4)}

#: Name, class, spaces of observation and action, environments, arguments, whether VecNormalize is there.
CASES: list[tuple[str, str, str, str, int, dict[str, Any], bool]] = [
    ("vectors", "ReplayBuffer", "box", "box", 3, {}, False),
    ("one environment", "ReplayBuffer", "box", "discrete", 1, {}, False),
    ("no timeouts", "ReplayBuffer", "box", "box", 3, {"handle_timeout_termination": False}, False),
    ("images", "ReplayBuffer", "image", "discrete", 2, {}, False),
    ("discrete", "ReplayBuffer", "discrete", "discrete", 2, {}, False),
    ("dicts", "DictReplayBuffer", "dict", "box", 2, {}, False),
    ("several steps", "NStepReplayBuffer", "box", "box", 3, {"n_steps": 3, "gamma": 0.9}, False),
    ("normalised", "ReplayBuffer", "box", "box", 2, {}, True),
    ("normalised dicts", "DictReplayBuffer", "dict", "box", 2, {}, True),
    ("normalised steps", "NStepReplayBuffer", "box", "box", 2, {"n_steps": 3, "gamma": 0.9}, True),
]
MEAN, VARIANCE, REWARD_VARIANCE, CUT = np.array([3.0, -2.0]), np.array([4.0, 9.0]), 16.0, 2.5


def observation(space: str, numbers: np.ndarray) -> Any:
    """Observations of environments whose steps have these numbers."""
    if space == "dict":
        parts = SPACES["dict"].spaces
        return {name: _of(part, numbers) for name, part in parts.items()}
    return _of(SPACES[space], numbers)


def _of(space: Any, numbers: np.ndarray) -> np.ndarray:
    if isinstance(space, spaces.Discrete):
        return numbers % space.n
    place = np.arange(int(np.prod(space.shape))).reshape(space.shape)
    return (numbers.reshape(-1, *[1] * place.ndim) % 90 + place).astype(space.dtype)


def stream(space: str, action: str, envs: int, steps: int) -> Iterator[tuple[Any, ...]]:
    """The arguments of ``add``: episodes of different lengths, of which every second one ends by a timeout."""
    for step in range(steps):
        environment = np.arange(envs)
        # A new episode begins after every (4 + e)-th step, with numbers of its own.
        episode, numbers = step // (4 + environment), 7 * step + 13 * environment
        done = step % (4 + environment) == 3 + environment
        jump = 5 * (step + 1) // (4 + environment)
        own, following = numbers + 5 * step // (4 + environment), 7 * (step + 1) + 13 * environment + jump
        following = np.where(done, following + 31, following)
        if action == "discrete":
            actions = (step + environment) % 4
        else:
            actions = np.stack([np.cos(numbers), np.sin(numbers)], -1).astype(np.float32)
        infos = [{"TimeLimit.truncated": True} if d and e % 2 else {} for d, e in zip(done, episode, strict=True)]
        reward = (numbers % 17 - 8).astype(np.float32)
        yield observation(space, own), observation(space, following), actions, reward, done, infos
