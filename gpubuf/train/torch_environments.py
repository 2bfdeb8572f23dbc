"""Environments made of tensor operations: thousands of copies, stepped together on the device of the training.

To add one: write a subclass of `TorchEnvironments` with its three methods, and name it in `TORCH_ENVIRONMENTS`. The
base class does the rest.
"""

from __future__ import annotations

import abc
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gpubuf.data.samplers.base import RandomState
from gpubuf.train.config import UsageError
from gpubuf.train.environments import Environments, Steps


@dataclass(frozen=True)
class Transition:
    """The outcome of an action, before anything is reset.

    Attributes:
        state: `[E, S]` float64.
        reward: `[E]` float64.
        terminated: `[E]` bool, the task has ended.
    """

    state: Tensor
    reward: Tensor
    terminated: Tensor


class TorchEnvironments(Environments):
    """``num_envs`` copies of an environment as tensors on a device.

    A step is a fixed sequence of operations that change the same tensors in place, and never synchronises: it can be
    captured into a CUDA graph. Every copy whose episode ends is reset in the same step, and draws its new beginning
    from a Philox stream whose state is a tensor, so that replays of a graph draw new ones.

    Args:
        num_envs: How many, `E`.
        seed: One or more words.
        device: Where they live.
    """

    #: Numbers in a state.
    state_size: int
    #: Random numbers that the beginning of an episode takes.
    random_numbers: int
    #: Steps after which an episode is truncated.
    time_limit: int
    #: What an action of 1 stands for, where actions are no choice among several.
    largest_action: float

    capturable = True
    shown_records = 1

    def __init__(self, num_envs: int, seed: int | Sequence[int], device: torch.device | str) -> None:
        self.num_envs = num_envs
        self.device = torch.device(device)
        if self.discrete:
            self.action_bounds = torch.tensor(0, device="cpu"), torch.tensor(self.action_size - 1, device="cpu")
        else:
            bound = torch.full((self.action_size,), self.largest_action, device="cpu")
            self.action_bounds = -bound, bound
        self._seed = int(np.random.SeedSequence(seed).generate_state(1, np.uint64)[0])
        self._random = RandomState(self._seed, device=self.device)
        self._state = torch.zeros(num_envs, self.state_size, dtype=torch.float64, device=self.device)
        self._returns = torch.zeros(num_envs, dtype=torch.float64, device=self.device)
        self._lengths = torch.zeros(num_envs, dtype=torch.int64, device=self.device)
        # Of the episodes that have ended: how many, the sum of their returns, the sum of their lengths.
        self._ended = torch.zeros(3, dtype=torch.float64, device=self.device)

    # The environment itself

    @abc.abstractmethod
    def begin(self, uniform: Tensor) -> Tensor:
        """First states `[E, S]` float64, from ``uniform`` `[E, random_numbers]` float64 in [0, 1)."""

    @abc.abstractmethod
    def transition(self, state: Tensor, action: Tensor) -> Transition:
        """Act.

        Args:
            state: `[E, S]` float64.
            action: `[E, A]` float32 in [-1, 1], to be stretched to what the environment takes, or one-hot.
        """

    @abc.abstractmethod
    def observe(self, state: Tensor) -> Tensor:
        """Observations `[E, *O]` of states `[E, S]`."""

    # Common to all environments

    def reset(self) -> Tensor:
        self._random.manual_seed(self._seed)
        self._state.copy_(self._fresh())
        for tensor in (self._returns, self._lengths, self._ended):
            tensor.zero_()
        return self.observe(self._state)

    def _fresh(self) -> Tensor:
        count = self.random_numbers
        return self.begin(self._random.uniform(self.num_envs * count).view(self.num_envs, count))

    def step(self, action: Tensor) -> Steps:
        """Act in every environment. No host sync.

        Args:
            action: `[E, A]` float32 in [-1, 1], or one-hot, on the environments' device.
        """
        after = self.transition(self._state, action)
        self._returns += after.reward
        self._lengths += 1
        truncated = self._lengths >= self.time_limit
        over = after.terminated | truncated
        # Every copy draws at every step, also without need: shapes must not depend on values.
        self._state.copy_(torch.where(over[:, None], self._fresh(), after.state))
        self._count(over)
        return Steps(
            next_observation=self.observe(after.state),
            observation=self.observe(self._state),
            reward=after.reward.float()[:, None],
            terminated=after.terminated[:, None],
            truncated=truncated[:, None],
        )

    def _count(self, over: Tensor) -> None:
        """Add the episodes that are over to the sums, and start theirs from zero."""
        each = torch.stack([over.double(), self._returns, self._lengths.double()])
        self._ended += torch.where(over, each, 0.0).sum(1)
        self._returns.masked_fill_(over, 0.0)
        self._lengths.masked_fill_(over, 0)

    def take_episodes(self, due: bool) -> list[dict[str, Any]]:
        """One record on all episodes that have ended since the last record; none if none has. Synchronises if ``due``.

        Args:
            due: Whether it is time for a record.
        """
        if not due:
            return []
        count, returns, lengths = self._ended.tolist()
        if count == 0:
            return []
        self._ended.zero_()
        means = {"mean_return": returns / count, "mean_length": lengths / count}
        return [{"kind": "episodes", "episodes": int(count), **means}]

    def state(self) -> dict[str, Any]:
        """The open episodes and the random stream: copies of the tensors."""
        return {name: tensor.clone() for name, tensor in self._tensors().items()}

    def restore(self, state: dict[str, Any]) -> tuple[Tensor, list[int]]:
        """Continue from where `state` was taken, in place. Returns the observations, `[E, *O]`, and an empty list.

        Raises:
            KeyError: A tensor is missing.
            RuntimeError: A tensor has another shape: the state is of other environments.
        """
        for name, tensor in self._tensors().items():
            if state[name].shape != tensor.shape:
                raise RuntimeError(f"{name} must be {list(tensor.shape)}, the state has {list(state[name].shape)}")
            tensor.copy_(state[name])
        return self.observe(self._state), []

    def _tensors(self) -> dict[str, Tensor]:
        return {
            "state": self._state,
            "returns": self._returns,
            "lengths": self._lengths,
            "ended": self._ended,
            "random": self._random.state,
        }


class Pendulum(TorchEnvironments):
    """Gymnasium's ``Pendulum-v1``: swing a pendulum up, and hold it there.

    The state is (angle, angular velocity), 0 upright; the observation (cos, sin, velocity). As in Gymnasium, the state
    is float64, and what the torque contributes is computed in float32.
    """

    observation_shape = (3,)
    action_size = 1
    state_size = 2
    random_numbers = 2
    time_limit = 200
    largest_action = 2.0

    _GRAVITY, _MASS, _LENGTH, _SECONDS = 10.0, 1.0, 1.0, 0.05
    _MOST_SPEED = 8.0
    _FIRST_ANGLE, _FIRST_SPEED = math.pi, 1.0

    def begin(self, uniform: Tensor) -> Tensor:
        """Angles in [-pi, pi), velocities in [-1, 1)."""
        angle, speed = (2 * uniform - 1).unbind(1)
        return torch.stack([angle * self._FIRST_ANGLE, speed * self._FIRST_SPEED], 1)

    def transition(self, state: Tensor, action: Tensor) -> Transition:
        """Semi-implicit Euler: the velocity first, then the angle with the new velocity."""
        angle, speed = state.unbind(1)
        torque = (action[:, 0] * self.largest_action).clamp(-self.largest_action, self.largest_action)
        # The distance from upright, as an angle in [-pi, pi).
        tilt = torch.remainder(angle + math.pi, 2 * math.pi) - math.pi
        cost = tilt.square() + 0.1 * speed.square() + 0.001 * torque.square()
        pull = 3 * self._GRAVITY / (2 * self._LENGTH) * angle.sin()
        push = 3.0 / (self._MASS * self._LENGTH**2) * torque
        speed = (speed + (pull + push) * self._SECONDS).clamp(-self._MOST_SPEED, self._MOST_SPEED)
        angle = angle + speed * self._SECONDS
        return Transition(torch.stack([angle, speed], 1), -cost, torch.zeros_like(cost, dtype=torch.bool))

    def observe(self, state: Tensor) -> Tensor:
        """(cos, sin, velocity)."""
        angle, speed = state.unbind(1)
        return torch.stack([angle.cos(), angle.sin(), speed], 1).float()


class Catch(TorchEnvironments):
    """Catch of bsuite (Osband et al., arXiv 1908.03568): move a paddle under a falling ball.

    The ball begins at the top, in any column, and falls a row a step. The actions move the paddle in the last row,
    which begins in the middle, to the left, not at all, or to the right. The episode terminates when the ball reaches
    that row, with a reward of 1 if the paddle is there, else -1. The observation is an image of a channel, whose pixels
    are 255 at ball and paddle, else 0. The state is (column of the ball, its row, column of the paddle).
    """

    ROWS, COLUMNS = 10, 5

    observation_shape = (1, ROWS, COLUMNS)
    action_size = 3
    discrete = True
    state_size = 3
    random_numbers = 1
    # No episode comes to it.
    time_limit = ROWS

    def begin(self, uniform: Tensor) -> Tensor:
        """The ball in each column with the same probability."""
        column = (uniform[:, 0] * self.COLUMNS).floor()
        return torch.stack([column, torch.zeros_like(column), torch.full_like(column, self.COLUMNS // 2)], 1)

    def transition(self, state: Tensor, action: Tensor) -> Transition:
        """The paddle moves while the ball falls."""
        column, row, paddle = state.unbind(1)
        paddle = (paddle + action.argmax(1) - 1).clamp(0, self.COLUMNS - 1)
        state = torch.stack([column, row + 1, paddle], 1)
        over = state[:, 1] == self.ROWS - 1
        return Transition(state, torch.where(over, torch.where(column == paddle, 1.0, -1.0).double(), 0.0), over)

    def observe(self, state: Tensor) -> Tensor:
        """Ball and paddle as pixels."""
        column, row, paddle = state.long().unbind(1)
        pixels = torch.arange(self.ROWS * self.COLUMNS, device=state.device)
        places = torch.stack([row * self.COLUMNS + column, (self.ROWS - 1) * self.COLUMNS + paddle], 1)
        lit = (pixels == places[..., None]).any(1)
        return (lit * 255).to(torch.uint8).reshape(-1, *self.observation_shape)


#: By the name that ``--env`` takes.
TORCH_ENVIRONMENTS: dict[str, type[TorchEnvironments]] = {"torch/Catch": Catch, "torch/Pendulum": Pendulum}


def make_torch_environments(
    name: str, num_envs: int, seed: int | Sequence[int], device: torch.device | str
) -> TorchEnvironments:
    """Make ``num_envs`` copies of the environment ``name`` of `TORCH_ENVIRONMENTS` on ``device``.

    Raises:
        UsageError: There is no such environment.
    """
    if name not in TORCH_ENVIRONMENTS:
        raise UsageError(f"unknown environment {name!r}; in torch there are {sorted(TORCH_ENVIRONMENTS)}")
    return TORCH_ENVIRONMENTS[name](num_envs, seed, device)
