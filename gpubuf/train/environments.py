"""Environments of the training, on the host or on a device: their interface, and the evaluation of a policy.

`gpubuf.train.gymnasium_environments` and `gpubuf.train.torch_environments` implement the interface. Both keep the last
observation of an episode apart from the first observation of the next."""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gpubuf import graphs

#: What environments are for: the second word of their seeds.
TRAINING, CURVE, FINAL = range(3)


class NotFiniteError(RuntimeError):
    """Something that a run must not go on with is NaN or infinite."""


@dataclass(frozen=True)
class Steps:
    """One step of all environments, `[E]` of them, on their device.

    `O` is the shape of an observation: float32 numbers, or the bytes of an image.

    Attributes:
        next_observation: `[E, *O]`, the outcome of the step: the last of the episode if it has ended.
        observation: `[E, *O]`, to act on next: the first of the next one if the episode has ended.
        reward: `[E, 1]` float32.
        terminated: `[E, 1]` bool, the task ended: there is no value after it.
        truncated: `[E, 1]` bool, the episode was cut short: its value goes on.
    """

    next_observation: Tensor
    observation: Tensor
    reward: Tensor
    terminated: Tensor
    truncated: Tensor


class Environments(abc.ABC):
    """Copies of an environment, stepped together, each reset as soon as its episode ends.

    Attributes:
        num_envs: How many, `E`.
        observation_shape: Of an observation, `O`: one dimension of float32 numbers, or `[C, H, W]`, an image in uint8.
        action_size: Numbers in an action, `A`; each is in [-1, 1].
        action_bounds: What -1 and 1 stand for, two float32 tensors in the shape of one action, on the CPU; the numbers
            of the first and the last of several actions, int64 `[]`.
        discrete: Whether an action is one of `A`, a one-hot vector.
        device: Of the tensors of a step.
        time_limit: Steps after which every episode is over; None if unknown.
        capturable: Whether a step is a fixed sequence of operations on the same tensors, without the host: it may then
            become part of a CUDA graph.
        shown_records: How many of the last records of episodes make up the mean return that is shown.
    """

    num_envs: int
    observation_shape: tuple[int, ...]
    action_size: int
    action_bounds: tuple[Tensor, Tensor]
    device: torch.device
    discrete = False
    time_limit: int | None = None
    capturable = False
    shown_records = 10

    @property
    def images(self) -> bool:
        """Whether observations are images."""
        return len(self.observation_shape) == 3

    def blank(self, device: torch.device) -> Tensor:
        """Zeros in the place of observations, `[E, *O]`."""
        dtype = torch.uint8 if self.images else torch.float32
        return torch.zeros(self.num_envs, *self.observation_shape, dtype=dtype, device=device)

    @abc.abstractmethod
    def reset(self) -> Tensor:
        """Begin the first episodes again, the same at every call. Returns the observations, `[E, *O]`."""

    @abc.abstractmethod
    def step(self, action: Tensor) -> Steps:
        """Act in every environment: `[E, A]` in [-1, 1], on any device, which are stretched to the bounds of the action
        space, or one-hot.

        Raises:
            NotFiniteError: an action, an observation or a reward is NaN or infinite, and the environments can tell
                without waiting for a device.
        """

    @abc.abstractmethod
    def take_episodes(self, due: bool) -> list[dict[str, Any]]:
        """Records of the metrics on the episodes that have ended since the last call.

        Args:
            due: Whether it is time for records that need a synchronisation with the device.
        """

    @abc.abstractmethod
    def state(self) -> dict[str, Any]:
        """The open episodes, as tensors and plain values."""

    @abc.abstractmethod
    def restore(self, state: dict[str, Any]) -> tuple[Tensor, list[int]]:
        """Bring the environments to where `state` was taken.

        Returns:
            The observations to act on, `[E, *O]`, and the numbers of the environments that have begun a new
            episode, because theirs could not be restored.
        """

    def close(self) -> None:  # noqa: B027 (tensors need no closing)
        """Close the environments."""


class Stacked(Environments):
    """Environments whose observations are the last ones of the episode, oldest first, along their first dimension.

    The first observation of an episode stands for those before it.

    Args:
        environments: Whose observations are stacked.
        frames: How many make a stack.
    """

    def __init__(self, environments: Environments, frames: int) -> None:
        self._single, self._frames = environments, frames
        self._channels, *size = environments.observation_shape
        self.observation_shape = (frames * self._channels, *size)
        for name in ("num_envs", "action_size", "action_bounds", "device", "discrete", "time_limit", "capturable"):
            setattr(self, name, getattr(environments, name))
        self.shown_records = environments.shown_records
        self._stack = self.blank(environments.device)

    def _began(self, observation: Tensor) -> Tensor:
        return torch.cat([observation] * self._frames, 1)

    def reset(self) -> Tensor:
        return self._stack.copy_(self._began(self._single.reset())).clone()

    def step(self, action: Tensor) -> Steps:
        steps = self._single.step(action)
        following = torch.cat([self._stack[:, self._channels :], steps.next_observation], 1)
        over = (steps.terminated | steps.truncated).reshape(-1, *[1] * len(self.observation_shape))
        observation = torch.where(over, self._began(steps.observation), following)
        self._stack.copy_(observation)
        return dataclasses.replace(steps, next_observation=following, observation=observation)

    def take_episodes(self, due: bool) -> list[dict[str, Any]]:
        return self._single.take_episodes(due)

    def state(self) -> dict[str, Any]:
        return {"single": self._single.state(), "stack": self._stack.clone()}

    def restore(self, state: dict[str, Any]) -> tuple[Tensor, list[int]]:
        """Continue from where `state` was taken."""
        observation, lost = self._single.restore(state["single"])
        self._stack.copy_(state["stack"])
        self._stack[lost] = self._began(observation)[lost]
        return self._stack.clone(), lost

    def close(self) -> None:
        self._single.close()


#: Where an episode ends if the environment never ends it.
_MOST_STEPS = 10_000


class Evaluation:
    """Plays one episode in each of a set of environments; they begin alike every time.

    Args:
        environments: As many as there are to be episodes.
        act: Actions `[E, A]` in [-1, 1] for observations `[E, *O]`.
        captured: Whether a step is captured into a CUDA graph.
    """

    def __init__(self, environments: Environments, act: Callable[[Tensor], Tensor], captured: bool = False) -> None:
        self._environments = environments
        self._act = act
        count, device = environments.num_envs, environments.device
        self._observation = environments.blank(device)
        self._returns = torch.zeros(count, dtype=torch.float64, device=device)
        self._running = torch.ones(count, dtype=torch.bool, device=device)
        self._step = graphs.capture(self._advance) if captured else self._advance

    def _advance(self) -> None:
        steps = self._environments.step(self._act(self._observation))
        self._returns += torch.where(self._running, steps.reward[:, 0], 0.0)
        self._running &= ~(steps.terminated | steps.truncated)[:, 0]
        self._observation.copy_(steps.observation)

    def run(self, stop: Callable[[], bool] = lambda: False, max_steps: int = _MOST_STEPS) -> list[float]:
        """The undiscounted returns. Synchronises at the end, and at every step if no time limit is known.

        Args:
            stop: Called before each step; if it returns True, only the episodes that have ended are returned.
            max_steps: Longer episodes are ended here.
        """
        self._observation.copy_(self._environments.reset())
        self._returns.zero_()
        self._running.fill_(True)
        limit = self._environments.time_limit
        for _ in range(max_steps if limit is None else min(limit, max_steps)):
            if stop():
                return self._returns[~self._running].tolist()
            self._step()
            if limit is None and not self._running.any():
                break
        return self._returns.tolist()

    def close(self) -> None:
        """Close the environments."""
        self._environments.close()
