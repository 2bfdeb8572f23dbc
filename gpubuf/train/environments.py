"""The interface between the training loop and its environments, on the host or on a device.

`gpubuf.train.gymnasium_environments` and `gpubuf.train.torch_environments` implement it, and
`gpubuf.train.environment_factory` chooses between the two. Both keep the last observation of an episode apart from the
first observation of the next.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor


class NotFiniteError(RuntimeError):
    """Something that a run must not go on with is NaN or infinite."""


@dataclass(frozen=True)
class Steps:
    """One step of all environments, `[E]` of them, on their device.

    Attributes:
        next_observation: `[E, O]` float32, the outcome of the step: the last of the episode if it has ended.
        observation: `[E, O]` float32, to act on next: the first of the next one if the episode has ended.
        reward: `[E, 1]` float32.
        terminated: `[E, 1]` bool, the task ended: there is no value after it.
        truncated: `[E, 1]` bool, the episode was cut short: its value goes on.
    """

    next_observation: Tensor
    observation: Tensor
    reward: Tensor
    terminated: Tensor
    truncated: Tensor


class Environments(Protocol):
    """Copies of an environment, stepped together, each reset as soon as its episode ends.

    Attributes:
        num_envs: How many, `E`.
        observation_size: Numbers in an observation, `O`.
        action_size: Numbers in an action, `A`; each is in [-1, 1].
        device: Of the tensors of a step.
        time_limit: Steps after which every episode is over; None if unknown.
        capturable: Whether a step is a fixed sequence of operations on the same tensors, without the host: it may then
            become part of a CUDA graph.
        shown_records: How many of the last records of episodes make up the mean return that is shown.
    """

    num_envs: int
    device: torch.device

    @property
    def observation_size(self) -> int: ...

    @property
    def action_size(self) -> int: ...

    @property
    def time_limit(self) -> int | None: ...

    @property
    def capturable(self) -> bool: ...

    @property
    def shown_records(self) -> int: ...

    def reset(self) -> Tensor:
        """Begin the first episodes again, the same at every call. Returns the observations, `[E, O]` float32."""

    def step(self, action: Tensor) -> Steps:
        """Act in every environment: `[E, A]` in [-1, 1], on any device; stretched to the bounds of the action space."""

    def take_episodes(self, due: bool) -> list[dict[str, Any]]:
        """Records of the metrics on the episodes that have ended since the last call.

        Args:
            due: Whether it is time for records that need a synchronisation with the device.
        """

    def state(self) -> dict[str, Any]:
        """The open episodes, as tensors and plain values."""

    def restore(self, state: dict[str, Any]) -> tuple[Tensor, list[int]]:
        """Bring the environments to where `state` was taken.

        Returns:
            The observations to act on, `[E, O]` float32, and the numbers of the environments that have begun a new
            episode, because theirs could not be restored.
        """

    def close(self) -> None:
        """Close the environments."""
