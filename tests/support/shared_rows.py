"""Rows whose next observations mostly are the observations of the rows behind, and a list that remembers them all."""

from __future__ import annotations

import random
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor

from gpubuf import LazyTensorStorage, TensorDictReplayBuffer

WIDTH = 6
KEYS = ("observation", "number", ("next", "observation"), ("next", "reward"), ("next", "done"))


class Stream:
    """Makes steps of environments. Observations have few values, so that equal ones meet by chance, too.

    Args:
        seed: of all choices.
        envs: environments; None: rows of one dimension.
        breaks: how often, of 100 steps, the observation that follows is another than was announced.
    """

    def __init__(self, seed: int = 0, envs: int | None = None, breaks: int = 20) -> None:
        self.random = random.Random(seed)
        self.envs, self.breaks, self.count = envs, breaks, 0
        self.now = [self.observation() for _ in range(envs or 1)]

    def observation(self) -> Tensor:
        """One out of a few: NaN with two different payloads, and both zeros, among them."""
        bits = self.random.choice([0x7FC00000, 0x7FC00001, 0, -0x80000000, *range(1, 12)])
        return torch.full((WIDTH,), bits, dtype=torch.int32).view(torch.float32)

    def steps(self, n: int) -> TensorDict:
        """``n`` steps: ``[n]`` rows, or ``[n, envs]``."""
        found: list[TensorDict] = []
        for _ in range(n):
            row = []
            for env in range(self.envs or 1):
                coming = self.observation()
                row.append(self._row(self.now[env], coming))
                self.now[env] = self.observation() if self.random.randrange(100) < self.breaks else coming
            found.append(torch.stack(row) if self.envs else row[0])
        if not found:
            return self.rows_at(0)
        return torch.stack(found)

    def rows_at(self, n: int) -> TensorDict:
        """``n`` rows, ``[n]``, that have nothing to do with each other."""
        if n == 0:
            shape = (0, self.envs) if self.envs else (0,)
            return self._row(self.now[0], self.now[0]).expand(*shape)
        return torch.stack([self._row(self.observation(), self.observation()) for _ in range(n)])

    def _row(self, now: Tensor, coming: Tensor) -> TensorDict:
        self.count += 1
        number = torch.tensor(self.count)
        following = {"observation": coming, "reward": number[None] / 2, "done": (number % 7 == 0)[None]}
        return TensorDict({"observation": now, "number": number, "next": TensorDict(following, [])}, [])


class Ring:
    """The rows that a storage has, each as it was written: the last ``capacity`` of a list, by position."""

    def __init__(self, capacity: int) -> None:
        self.capacity, self.written = capacity, 0
        self.rows: dict[int, TensorDict] = {}

    def __deepcopy__(self, memo: dict[int, Any]) -> Ring:
        """Another ring with the same rows: those that TensorDict copies lose the sign of zero."""
        other = Ring(self.capacity)
        other.written, other.rows = self.written, dict(self.rows)
        return other

    def extend(self, data: TensorDict) -> None:
        """Write steps at the cursor."""
        for row in data.reshape(-1).unbind(0):
            self.rows[self.written % self.capacity] = row
            self.written += 1

    def write(self, index: list[int], data: TensorDict) -> None:
        """Overwrite rows in place."""
        for position, row in zip(index, data.unbind(0), strict=True):
            self.rows[position] = row

    def empty(self) -> None:
        """Forget all rows."""
        self.rows.clear()
        self.written = -(-self.written // self.capacity) * self.capacity

    def __len__(self) -> int:
        return len(self.rows)

    def at(self, positions: list[int]) -> TensorDict:
        """Rows by position."""
        return torch.stack([self.rows[position] for position in positions])


def same_bytes(a: TensorDict, b: TensorDict) -> bool:
    """Whether two batches agree in all of :data:`KEYS`, bit by bit."""
    return all(
        torch.equal(a[key].contiguous().view(torch.uint8), b[key].contiguous().view(torch.uint8)) for key in KEYS
    )


def shared(capacity: int, *, envs: int | None = None, **arguments: Any) -> TensorDictReplayBuffer:
    """A buffer that stores observations once."""
    arguments = {"share_next": True, "next_capacity": capacity} | arguments
    storage = LazyTensorStorage(capacity, ndim=1 if envs is None else 2, **arguments)
    # Time is the first dimension of what Stream makes.
    return TensorDictReplayBuffer(storage=storage, batch_size=16, dim_extend=0)


def check(buffer: TensorDictReplayBuffer, ring: Ring) -> None:
    """Whatever way rows are read, they are what was written."""
    storage = buffer.storage
    assert len(buffer) == len(ring)
    if not len(ring):
        return
    everything = ring.at(list(range(len(ring))))
    assert same_bytes(buffer[:].reshape(-1), everything)
    order = torch.randperm(len(ring))
    rows = storage.plans.batch.assemble(storage.gather(order.to(storage.device))[0])
    assert same_bytes(rows, everything[order])
    sample, info = buffer.sample(return_info=True)
    positions = info["index"]
    if storage.ndim > 1:
        positions = positions[..., 0] * storage.shape[1] + positions[..., 1]
    assert same_bytes(sample, everything[positions.cpu()])
