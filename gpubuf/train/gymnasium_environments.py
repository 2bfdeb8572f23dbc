"""Gymnasium environments behind the interface of the training loop.

`make` checks that an environment can be trained on, and says why if not. `GymnasiumEnvironments` steps several copies
together, with actions in [-1, 1]. It keeps the last observation of an episode, which Gymnasium's vector environments
replace by the first one of the next. `EpisodeRecorder` makes an open episode resumable.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from importlib.metadata import entry_points
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from gymnasium.spaces import Box, Discrete
from numpy.typing import NDArray
from torch import Tensor

from gpubuf.train.config import UsageError
from gpubuf.train.environments import Environments, NotFiniteError, Steps

#: An open episode longer than this is not recorded further: a resumed run begins a new one.
MAX_RECORDED_STEPS = 100_000


class EnvironmentUnusableError(UsageError):
    """The environment doesn't exist, lacks a package, or can't train this agent."""


def make(name: str) -> gym.Env[NDArray[Any], NDArray[Any]]:
    """Make the environment ``name``, with a flat observation, or an image in uint8, `[C, H, W]`.

    Raises:
        EnvironmentUnusableError: It is unknown, needs a package that is not installed, or has other actions than
            continuous ones with bounds or one of several.
    """
    try:
        env = _made(name)
    except (gym.error.DependencyNotInstalled, ModuleNotFoundError) as error:
        hint = 'those of MuJoCo are in "gpubuf[mujoco]"'
        raise EnvironmentUnusableError(f"{name} needs a package that is not installed: {error}; {hint}") from None
    except gym.error.Error as error:
        raise EnvironmentUnusableError(f"unknown environment {name!r}: {error}") from None
    space, observed = env.action_space, env.observation_space
    if isinstance(space, Box) and np.issubdtype(space.dtype, np.floating):
        if not (np.isfinite(space.low).all() and np.isfinite(space.high).all()):
            raise EnvironmentUnusableError(f"{name} has actions without bounds, {space}; SAC needs bounded ones")
    elif not isinstance(space, Discrete):
        raise EnvironmentUnusableError(
            f"{name} has the action space {space}: actions here are continuous (a Box of floats), or one of several "
            "(Discrete)"
        )
    if _is_image(observed):
        return Image(env)
    if image := _image(observed):
        raise EnvironmentUnusableError(
            f"{name} has images among its observations, {image}: the networks here see one image, [C, H, W], "
            "[H, W, C] or [H, W], or features. Register such an environment, or train a network of your own with "
            "gpubuf's buffers and losses"
        )
    if isinstance(observed, Box) and len(observed.shape) == 1:
        return env
    if not observed.is_np_flattenable:
        raise EnvironmentUnusableError(f"{name} has observations that can't be flattened, {observed}")
    return gym.wrappers.FlattenObservation(env)


@functools.cache
def _register_installed() -> None:
    """As Gymnasium did before 1.0. Packages of that time, such as MinAtar, rely on it."""
    for each in entry_points(group="gymnasium.envs"):
        each.load()()


def _made(name: str) -> gym.Env[Any, Any]:
    try:
        return gym.make(name, disable_env_checker=True)
    except gym.error.NamespaceNotFound:
        _register_installed()
    return gym.make(name, disable_env_checker=True)


def _is_image(space: gym.Space[Any]) -> bool:
    """Whether an observation is one image: bytes, or planes of bits as MinAtar's."""
    kinds = {(2, "uint8"), (3, "uint8"), (3, "bool")}
    return isinstance(space, Box) and (len(space.shape), str(space.dtype)) in kinds


class Image(gym.ObservationWrapper[Any, Any, Any]):
    """Images as bytes with the channels first: the shorter one of first and last dimension, or one. True is 255."""

    def __init__(self, env: gym.Env[Any, Any]) -> None:
        super().__init__(env)
        space = env.observation_space
        assert isinstance(space, Box)
        shape = space.shape if len(space.shape) == 3 else (1, *space.shape)
        self._shape, self._last = shape, shape[2] < shape[0]
        self._factor = np.uint8(255 if space.dtype == np.bool_ else 1)
        self.observation_space = Box(0, 255, (shape[2], *shape[:2]) if self._last else shape, np.uint8)

    def observation(self, observation: NDArray[Any]) -> NDArray[np.uint8]:
        """As above."""
        pixels = np.asarray(observation, np.uint8).reshape(self._shape) * self._factor
        return np.moveaxis(pixels, 2, 0) if self._last else pixels


def _image(space: gym.Space[Any]) -> Box | None:
    """An image that is part of an observation, if there is one."""
    if isinstance(space, Box):
        return space if space.dtype == np.uint8 and len(space.shape) > 1 else None
    parts = getattr(space, "spaces", ())
    found = map(_image, parts.values() if isinstance(parts, Mapping) else parts)
    return next(filter(None, found), None)


class EpisodeRecorder(gym.Wrapper[Any, Any, Any, Any]):
    """Counts returns, and remembers the beginning and the actions of the episode, so that it can be played again.

    Replaying is exact for every environment whose randomness comes from its ``np_random``. It needs neither pickling
    nor knowledge of the environment.
    """

    def __init__(self, env: gym.Env[Any, Any]) -> None:
        super().__init__(env)
        self._start: dict[str, Any] = {}
        self._actions: list[NDArray[Any]] = []
        #: The last one.
        self.observation: Any = None
        self._return, self._length = 0.0, 0
        #: Records of the episodes that have ended.
        self.ended: list[dict[str, Any]] = []

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        # Each access to a generator's state makes a new dictionary, so nobody changes this one.
        self._start = {"seed": seed} if seed is not None else {"generator": self.np_random.bit_generator.state}
        self._actions, self._return, self._length = [], 0.0, 0
        observation, info = super().reset(seed=seed, options=options)
        self.observation = np.array(observation)
        return self.observation, info

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        taken = np.array(action)
        observation, reward, terminated, truncated, info = super().step(action)
        # An environment may give its own array, which the reset writes over.
        self.observation = np.array(observation)
        if len(self._actions) <= MAX_RECORDED_STEPS:
            self._actions.append(taken)
        self._return, self._length = self._return + float(reward), self._length + 1
        if terminated or truncated:
            self.ended.append({"kind": "episode", "return": self._return, "length": self._length})
        return self.observation, reward, terminated, truncated, info

    def mark(self) -> tuple[Any, ...]:
        """Where the record is, for `rewind`."""
        return self._start, self._actions, len(self._actions), self._return, self._length, self.observation

    def rewind(self, mark: tuple[Any, ...]) -> None:
        """Record nothing of the step after `mark`: another environment has failed in it, and nobody stores it."""
        self._start, self._actions, steps, self._return, self._length, self.observation = mark
        del self._actions[steps:]
        self.ended.clear()

    def state(self) -> dict[str, Any]:
        """The recorded episode for `restore`, as tensors and plain values."""
        return {
            "start": self._start,
            "actions": torch.from_numpy(np.stack(self._actions)) if self._actions else None,
            "observation": torch.from_numpy(np.array(self.observation)),
        }

    def restore(self, state: dict[str, Any]) -> bool:
        """Play the recorded episode up to where it was.

        Returns:
            Whether the environment is there. If not (the episode was too long, or other randomness was involved), it
            must be reset.
        """
        start = state["start"]
        actions = [] if state["actions"] is None else state["actions"].numpy()
        if len(actions) > MAX_RECORDED_STEPS:
            return False
        if "seed" in start:
            self.reset(seed=start["seed"])
        else:
            self.np_random.bit_generator.state = start["generator"]
            self.reset()
        for action in actions:
            _, _, terminated, truncated, _ = self.step(action)
            if terminated or truncated:
                return False
        return np.array_equal(np.asarray(self.observation), state["observation"].numpy(), equal_nan=True)


class GymnasiumEnvironments(Environments):
    """``num_envs`` copies of an environment, stepped together, each reset as soon as its episode ends.

    Args:
        name: The environment's Gymnasium id.
        num_envs: How many.
        seed: One or more words. Environment i gets the i-th number of their `numpy.random.SeedSequence`, so that runs
            with neighbouring seeds share none.

    Raises:
        EnvironmentUnusableError: See `make`.
    """

    device = torch.device("cpu")

    def __init__(self, name: str, num_envs: int, seed: int | Sequence[int]) -> None:
        self._name = name
        self._recorders = [EpisodeRecorder(make(name)) for _ in range(num_envs)]
        space = self._recorders[0].action_space
        self.num_envs = num_envs
        observed = self._recorders[0].observation_space
        assert observed.shape is not None
        self.observation_shape = observed.shape if _is_image(observed) else (int(np.prod(observed.shape)),)
        self._dtype = np.uint8 if self.images else np.float32
        if isinstance(space, Discrete):
            self.discrete, self.action_size, self._first = True, int(space.n), int(space.start)
            low, high = np.asarray(space.start), np.asarray(space.start + space.n - 1)
            self.action_bounds = torch.from_numpy(low), torch.from_numpy(high)
        else:
            assert isinstance(space, Box)
            self.action_size = int(np.prod(space.shape))
            self._action_shape, self._action_dtype = space.shape, space.dtype
            low, high = space.low.astype(np.float64), space.high.astype(np.float64)
            self._centre, self._scale = (high + low) / 2, (high - low) / 2
            self.action_bounds = torch.from_numpy(low).float(), torch.from_numpy(high).float()
        self._seeds = [int(word) for word in np.random.SeedSequence(seed).generate_state(num_envs)]

    def reset(self) -> Tensor:
        each = zip(self._recorders, self._seeds, strict=True)
        first = self._stacked([recorder.reset(seed=seed)[0] for recorder, seed in each])
        self.take_episodes(True)
        self._check("observation", first)
        return torch.from_numpy(first)

    def step(self, action: Tensor) -> Steps:
        actions = action.cpu().numpy()
        if not np.isfinite(actions).all():
            raise NotFiniteError(f"training diverged: the policy's actions for {self._name} are NaN or infinite")
        marks = [recorder.mark() for recorder in self._recorders]
        try:
            return self._step(actions)
        except Exception:
            for recorder, mark in zip(self._recorders, marks, strict=True):
                recorder.rewind(mark)
            raise

    def _step(self, actions: NDArray[Any]) -> Steps:
        found = [each.step(action) for each, action in zip(self._recorders, self._stretched(actions), strict=True)]
        observations, rewards, terminated, truncated, _ = zip(*found, strict=True)
        next_observation = observation = self._stacked(observations)
        with np.errstate(over="ignore"):
            reward = np.array(rewards, np.float32)[:, None]
        self._check("observation", next_observation)
        self._check("reward", reward)
        flags = np.array((terminated, truncated), bool)[..., None]
        if flags.any():
            observation = next_observation.copy()
            for i in np.flatnonzero(flags.any(0)):
                observation[i] = self._stacked([self._recorders[i].reset()[0]])
            self._check("observation", observation)
        return Steps(*map(torch.from_numpy, (next_observation, observation, reward, *flags)))

    def take_episodes(self, due: bool) -> list[dict[str, Any]]:
        """A record of every episode that has ended since the last call, in the order of the environments."""
        ended = [record for recorder in self._recorders for record in recorder.ended]
        for recorder in self._recorders:
            recorder.ended.clear()
        return ended

    def _stretched(self, action: NDArray[np.float32]) -> NDArray[Any]:
        """Actions as the environments take them."""
        if self.discrete:
            return np.asarray(action.argmax(1) + self._first)
        scaled = self._centre + self._scale * action.reshape(self.num_envs, *self._action_shape)
        return np.asarray(scaled, self._action_dtype)

    def _check(self, what: str, values: NDArray[Any]) -> None:
        finite = np.isfinite(values)
        if not finite.all():
            i = int(finite.reshape(self.num_envs, -1).all(1).argmin())
            raise NotFiniteError(
                f"the {what} of {self._name} is NaN or infinite, as float32: {values[i].tolist()}, in copy {i} of "
                f"{self.num_envs}. Nothing of this step was stored"
            )

    def _stacked(self, observations: Sequence[Any]) -> NDArray[Any]:
        """Observations as one array, `[n, *O]`."""
        with np.errstate(over="ignore"):
            return np.array(observations).reshape(len(observations), *self.observation_shape).astype(self._dtype)

    def state(self) -> dict[str, Any]:
        return {"episodes": [recorder.state() for recorder in self._recorders]}

    def restore(self, state: dict[str, Any]) -> tuple[Tensor, list[int]]:
        """Continue from where `state` was taken, by playing the open episodes again."""
        self.reset()
        each = zip(self._recorders, state["episodes"], strict=True)
        lost = [i for i, (recorder, episode) in enumerate(each) if not recorder.restore(episode)]
        for i in lost:
            self._recorders[i].reset()
        # Of an episode that ended when it was played again.
        self.take_episodes(True)
        return torch.from_numpy(self._stacked([recorder.observation for recorder in self._recorders])), lost

    def close(self) -> None:
        for recorder in self._recorders:
            recorder.close()
