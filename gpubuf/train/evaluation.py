"""Plays whole episodes with a policy, and adds up their rewards."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from gpubuf.train.environments import Environments

#: Where an episode ends if the environment never ends it.
_MOST_STEPS = 10_000


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
