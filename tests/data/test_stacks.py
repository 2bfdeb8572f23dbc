"""Frame stacks: what is stored of Gymnasium's own stacks gives them back bit for bit, and what is no stack is refused."""

from __future__ import annotations

import copy
import random
from dataclasses import dataclass
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium.wrappers import FrameStackObservation
from tensordict import TensorDict
from torch import Tensor

from gpubuf.data import (
    Compose,
    FrameStack,
    LazyTensorStorage,
    PrioritizedSampler,
    RandomSampler,
    ReplayBuffer,
    TensorDictReplayBuffer,
    Window,
)

GAMMA = 0.5


class Frames(gym.Env[Any, Any]):
    """Random frames, NaN among floats, in episodes of random lengths that end or are cut off."""

    def __init__(self, dtype: Any, shape: tuple[int, ...], seed: int) -> None:
        self.random = np.random.default_rng(seed)
        high = 255 if dtype == np.uint8 else 1
        self.observation_space = gym.spaces.Box(0, high, shape, dtype)
        self.action_space = gym.spaces.Discrete(2)

    def frame(self) -> np.ndarray:
        frame = self.random.integers(256, size=self.observation_space.shape).astype(self.observation_space.dtype)
        if frame.dtype != np.uint8 and self.random.random() < 0.2:
            frame.reshape(-1)[0] = np.nan
        return frame

    def reset(self, **options: Any) -> Any:
        return self.frame(), {}

    def step(self, action: Any) -> Any:
        end = self.random.random()
        return self.frame(), float(self.random.integers(9)), end < 0.15, 0.15 <= end < 0.25, {}


@dataclass
class Row:
    """A row as it was written. ``last``: nothing that is stored continues it."""

    number: int
    stack: Tensor
    coming: Tensor
    reward: float
    terminated: bool
    truncated: bool
    last: bool


class Program:
    """A program that steps environments with stacked observations, and writes what they give.

    Args:
        seed: of all choices.
        once_more: how the buffer differs from the default.
    """

    def __init__(self, seed: int, **options: Any) -> None:
        self.random = random.Random(seed)
        choose = self.random.choice
        self.frames, self.n_envs, self.steps = choose([2, 3, 4]), choose([1, 1, 2, 3]), choose([5, 9, 20])
        self.n_steps, self.padding = choose([1, 1, 3]), choose(["reset", "zero"])
        dtype, shape = choose([(np.uint8, (2, 3)), (np.float32, (2,)), (np.uint8, ())])
        self.sampler = choose([RandomSampler, lambda: PrioritizedSampler(self.steps * self.n_envs, 0.7, 0.5)])
        self.envs = [
            FrameStackObservation(Frames(dtype, shape, 10 * seed + env), self.frames, padding_type=self.padding)
            for env in range(self.n_envs)
        ]
        self.options = options
        self.buffer = self.new()
        self.now = [env.reset()[0] for env in self.envs]
        self.rows: list[list[Row]] = [[] for _ in self.envs]
        self.count = 0

    def new(self, more: int = 0) -> TensorDictReplayBuffer:
        capacity = (self.steps + more) * self.n_envs
        self.steps += more
        return TensorDictReplayBuffer(
            storage=LazyTensorStorage(
                capacity, ndim=1 + (self.n_envs > 1), share_next=["pixels"], next_capacity=capacity
            ),
            sampler=self.sampler() if not more else RandomSampler(),
            transform=FrameStack(["pixels"], self.frames, padding=self.padding),
            batch_size=32,
            n_steps=self.n_steps,
            gamma=GAMMA,
            generator=torch.Generator().manual_seed(self.random.randrange(1000)),
            **self.options,
        )

    # What is written

    def row(self, env: int) -> Row:
        stack = self.now[env]
        coming, reward, terminated, truncated, _ = self.envs[env].step(0)
        over = terminated or truncated
        self.now[env] = self.envs[env].reset()[0] if over else coming
        self.count += 1
        return Row(self.count, torch.tensor(stack), torch.tensor(coming), reward, terminated, truncated, over)

    def made(self, n: int) -> tuple[TensorDict, list[list[Row]]]:
        """A batch of ``n`` steps, ``[n]`` or ``[E, n]``, and its rows."""
        rows = [[self.row(env) for _ in range(n)] for env in range(self.n_envs)]
        batch = torch.stack([batch_of(each) for each in rows])
        return batch if self.n_envs > 1 else batch[0], rows

    def keep(self, rows: list[list[Row]]) -> None:
        for kept, new in zip(self.rows, rows, strict=True):
            kept += new
            self.full = len(kept) > self.steps
            del kept[: -self.steps]

    def write(self) -> None:
        """Write in any of the ways that there are."""
        batch, rows = self.made(n := self.random.choice([1, 1, 2, 3, 7, self.steps + 2]))
        way = self.random.choice(["extend", "columns", "dict", "single"])
        if way == "single" and n == 1:
            self.buffer.add(batch[..., 0])
        elif way == "columns":
            self.buffer.extend_columns(dict(batch.items(True, True)))
        elif way == "dict" and self.n_envs == 1:
            self.buffer.extend({**batch.to_dict(), "next": batch["next"].to_dict()})
        else:
            before = batch.clone()
            self.buffer.extend(batch)
            assert all(torch.equal(bits(value), bits(before[key])) for key, value in batch.items(True, True))
        self.keep(rows)

    # What happens besides

    def leave(self) -> None:
        """Leave the episodes."""
        self.buffer.end_trajectories()
        for kept in self.rows:
            if kept:
                kept[-1].last = True
        self.now = [env.reset()[0] for env in self.envs]

    def empty(self) -> None:
        self.buffer.empty()
        self.rows, self.now = [[] for _ in self.envs], [env.reset()[0] for env in self.envs]

    def load(self) -> None:
        """Go on in another buffer: in new episodes, or in those of before."""
        if not self.buffer.initialized:
            return
        other, go_on = self.new(self.random.choice([0, 4])), self.random.random() < 0.5
        if other.storage.max_size != self.buffer.storage.max_size or not len(self.buffer):
            other = copy.deepcopy(self.buffer)
            self.steps = other.storage.max_size // self.n_envs
        else:
            other.load_state_dict(self.buffer.state_dict(), end_trajectories=not go_on)
        self.buffer = other
        if not go_on:
            self.leave()

    def fault(self) -> None:
        """A batch with a bit that is no stack's: its row is named, nothing is written, and the next one is taken."""
        batch, rows = self.made(n := self.random.choice([1, 2, 5]))
        key = self.random.choice(["pixels", ("next", "pixels")])
        wrong = batch.clone()
        every = wrong[key].view(torch.uint8).view(self.n_envs, n, self.frames, -1)
        env, step = self.random.randrange(self.n_envs), self.random.randrange(n)
        every[env, step, self.random.randrange(self.frames - 1), 0] ^= 1
        before = self.buffer.write_count
        whose = f" of environment {env}:" if self.n_envs > 1 else ":"
        with pytest.raises(ValueError, match=f"^row {step}{whose} {key!r}".replace("(", r"\(").replace(")", r"\)")):
            self.buffer.extend(wrong)
        assert self.buffer.write_count == before
        self.buffer.extend(batch)
        self.keep(rows)

    def act(self) -> None:
        choose = self.random.choice
        choose([self.write] * 6 + [self.fault, self.leave, self.empty, self.load])()
        self.check()

    # What is due

    def due(self, env: int, i: int) -> tuple[Row, Row, float]:
        """A row, the last of its steps, and its return."""
        rows, last = self.rows[env], i
        while last + 1 < len(rows) and last + 1 < i + self.n_steps and not rows[last].last:
            last += 1
        return rows[i], rows[last], sum(GAMMA**k * row.reward for k, row in enumerate(rows[i : last + 1]))

    def check(self) -> None:
        """All that is drawn is what was written."""
        if not len(self.buffer) or not self.buffer.can_sample():
            return
        places = {row.number: (env, i) for env, rows in enumerate(self.rows) for i, row in enumerate(rows)}
        batch, info = self.buffer.sample(return_info=True)
        found = [self.due(*places[number]) for number in batch["number"].tolist()]
        assert same(batch["pixels"], torch.stack([row.stack for row, _, _ in found]))
        assert same(batch["next", "pixels"], torch.stack([last.coming for _, last, _ in found]))
        assert batch["next", "reward"].flatten().tolist() == [total for _, _, total in found]
        assert batch["next", "terminated"].flatten().tolist() == [last.terminated for _, last, _ in found]
        if self.buffer.sampler.has_priorities:
            self.buffer.update_priority(info["index"], torch.rand(32), generation=info["index_generation"])


def bits(value: Tensor) -> Tensor:
    return value.contiguous().view(torch.uint8)


def same(one: Tensor, two: Tensor) -> bool:
    """Whether two tensors are alike bit for bit."""
    return one.shape == two.shape and one.dtype == two.dtype and torch.equal(bits(one), bits(two))


def batch_of(rows: list[Row]) -> TensorDict:
    def column(name: str) -> Tensor:
        return torch.tensor([getattr(row, name) for row in rows]).unsqueeze(-1)

    after = {name: column(name) for name in ("reward", "terminated", "truncated")}
    after["pixels"] = torch.stack([row.coming for row in rows])
    data = {"number": column("number").squeeze(-1), "pixels": torch.stack([row.stack for row in rows]), "next": after}
    return TensorDict(data, [len(rows)])


@pytest.mark.parametrize("seed", range(40))
def test_stacks_come_back(seed):
    """CASES 79. Random histories of Gymnasium's stacks, with steps, priorities, ends, loads and refused writes."""
    program = Program(seed)
    for _ in range(25):
        program.act()
