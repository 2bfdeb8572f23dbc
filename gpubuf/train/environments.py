"""What the training loop asks of environments, whether Gymnasium's on the host or tensors on a device.

`make_environments` chooses by name: ``torch/...`` is one of `gpubuf.train.torch_environments`, anything else a
Gymnasium id. Both keep the last observation of an episode apart from the first one of the next.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from gpubuf.train.config import TORCH_PREFIX, UsageError

#: Where an episode of an evaluation ends if the environment never ends it.
_MOST_STEPS = 10_000


@dataclass(frozen=True)
class Steps:
    """One step of all environments, `[E]` of them, on their device.

    Attributes:
        next_observation: `[E, O]` float32, what the step led to; the last of the episode where it ended.
        observation: `[E, O]` float32, what to act on next; the first of the next episode where it ended.
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
        device: Where the tensors of a step are.
        time_limit: Steps after which every episode is over; None where that is not known.
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
            The observations to act on, `[E, O]` float32, and the numbers of the environments that could not be brought
            there and have begun a new episode instead.
        """

    def close(self) -> None:
        """Close the environments."""


def make_environments(name: str, num_envs: int, seed: int | Sequence[int], device: torch.device) -> Environments:
    """Make ``num_envs`` copies of the environment ``name``.

    Args:
        name: ``torch/...`` for environments on ``device``, else a Gymnasium id: those run on the host.
        num_envs: How many.
        seed: One or more words.
        device: Of the training.

    Raises:
        UsageError: There is no such environment, or it can't be trained on.
    """
    # Either kind is imported where it is wanted: environments on the device need no Gymnasium.
    if name.startswith(TORCH_PREFIX):
        from gpubuf.train.torch_environments import make_torch_environments

        return make_torch_environments(name, num_envs, seed, device)
    try:
        from gpubuf.train.gymnasium_environments import GymnasiumEnvironments
    except ModuleNotFoundError as error:
        raise UsageError(
            f'{name} needs a package that is not installed: {error}; pip install "gpubuf[train]"'
        ) from None

    return GymnasiumEnvironments(name, num_envs, seed)


class Evaluation:
    """Plays one episode in each of a set of environments; they begin alike every time.

    Args:
        environments: As many as there are to be episodes.
        act: Actions `[E, A]` in [-1, 1] for observations `[E, O]`.
        wrap: Applied to the function that makes one step, such as `gpubuf.capture`.
    """

    def __init__(
        self,
        environments: Environments,
        act: Callable[[Tensor], Tensor],
        wrap: Callable[[Callable[[], None]], Callable[[], Any]] = lambda step: step,
    ) -> None:
        self._environments = environments
        self._act = act
        count, device = environments.num_envs, environments.device
        self._observation = torch.zeros(count, environments.observation_size, device=device)
        self._returns = torch.zeros(count, dtype=torch.float64, device=device)
        self._running = torch.ones(count, dtype=torch.bool, device=device)
        self._step = wrap(self._advance)

    def _advance(self) -> None:
        steps = self._environments.step(self._act(self._observation))
        self._returns += torch.where(self._running, steps.reward[:, 0], 0.0)
        self._running &= ~(steps.terminated | steps.truncated)[:, 0]
        self._observation.copy_(steps.observation)

    def run(self, stop: Callable[[], bool] = lambda: False, max_steps: int = _MOST_STEPS) -> list[float]:
        """The undiscounted returns. Synchronises at the end; on the way only where no time limit is known.

        Args:
            stop: Asked before each step; when it says so, only the episodes that have ended are returned.
            max_steps: An episode that the environment never ends is ended here.
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
