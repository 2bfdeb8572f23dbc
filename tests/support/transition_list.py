"""The model of a buffer of transitions: a list without bounds, one for each environment."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from tensordict import TensorDict

WIDTH = 3


@dataclass(frozen=True)
class Transition:
    """One row. Observations are a small number, repeated :data:`WIDTH` times: many are equal by chance."""

    observation: int
    number: int
    reward: float
    next_observation: int
    terminated: bool
    truncated: bool

    @property
    def ends(self) -> bool:
        return self.terminated or self.truncated


def as_batch(rows: list[Transition], shape: tuple[int, ...]) -> TensorDict:
    """Rows as the TensorDict that is written."""

    def column(values: list, dtype: torch.dtype, width: int = 1) -> torch.Tensor:
        return torch.tensor(values, dtype=dtype).view(-1, 1).repeat(1, width).view(*shape, width)

    after = {
        "observation": column([row.next_observation for row in rows], torch.float32, WIDTH),
        "reward": column([row.reward for row in rows], torch.float32),
        "terminated": column([row.terminated for row in rows], torch.bool),
        "truncated": column([row.truncated for row in rows], torch.bool),
        "done": column([row.ends for row in rows], torch.bool),
    }
    root = {
        "observation": column([row.observation for row in rows], torch.float32, WIDTH),
        "number": column([row.number for row in rows], torch.int64),
    }
    return TensorDict({**root, "next": TensorDict(after, shape)}, shape)


class TransitionList:
    """What was written to a ring of ``steps`` steps of ``envs`` environments: all of it."""

    def __init__(self, steps: int, envs: int) -> None:
        self.steps, self.envs = steps, envs
        self.of_env: list[list[Transition]] = [[] for _ in range(envs)]
        self.first = 0

    @property
    def written(self) -> int:
        """Steps so far."""
        return len(self.of_env[0])

    @property
    def oldest(self) -> int:
        """The oldest step that is stored."""
        return max(self.first, self.written - self.steps)

    @property
    def stored(self) -> list[int]:
        """Positions of the rows that are stored, in rising order."""
        return sorted(
            step % self.steps * self.envs + env for step in range(self.oldest, self.written) for env in range(self.envs)
        )

    def empty(self) -> None:
        """Forget every row; the next one goes to position 0."""
        gap = -self.written % self.steps
        for rows in self.of_env:
            rows += [Transition(0, -1, 0.0, 0, False, False)] * gap
        self.first = self.written

    def place(self, position: int) -> tuple[int, int]:
        """The step and the environment of the row that is stored at a position."""
        slot, env = divmod(position, self.envs)
        return self.written - 1 - (self.written - 1 - slot) % self.steps, env

    def at(self, position: int) -> Transition:
        """The row that is stored at a position."""
        step, env = self.place(position)
        return self.of_env[env][step]

    def put(self, position: int, row: Transition) -> None:
        """Overwrite it."""
        step, env = self.place(position)
        self.of_env[env][step] = row

    def n_step(self, position: int, n: int, gamma: float) -> tuple[Transition, int]:
        """The row of a batch with ``n`` steps, and how many there are."""
        step, env = self.place(position)
        rows = self.of_env[env][step : min(step + n, self.written)]
        count = next((i + 1 for i, row in enumerate(rows) if row.ends), len(rows))
        last = rows[count - 1]
        reward = sum(gamma**j * row.reward for j, row in enumerate(rows[:count]))
        return replace(last, observation=rows[0].observation, number=rows[0].number, reward=reward), count
