"""The rows that the benchmarks store. They carry their number, so that a batch tells which rows it was made of."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np
import torch
from tensordict import TensorDict
from torch import Tensor

#: Bytes of different content that a source of large rows has; after that only the row number differs.
TABLE_BYTES = 1 << 28


def transitions(n: int, observation: int = 17, action: int = 6) -> TensorDict:
    """``n`` transitions of such widths; ``action[:, 0]`` is the row number."""
    generator = torch.Generator().manual_seed(0)

    def normal(width: int) -> Tensor:
        return torch.randn(n, width, generator=generator)

    actions = normal(action)
    # exact in float32 up to 2**24 rows
    actions[:, 0] = torch.arange(n)
    terminated = torch.rand(n, 1, generator=generator) < 0.001
    done = terminated | (torch.rand(n, 1, generator=generator) < 0.001)
    after = {"observation": normal(observation), "reward": normal(1), "done": done, "terminated": terminated}
    return TensorDict(
        {"observation": normal(observation), "action": actions, "next": TensorDict(after, batch_size=[n])},
        batch_size=[n],
    )


@dataclass(frozen=True)
class Layout:
    """The keys of a row: those of a transition.

    Attributes:
        observation: numbers of an observation.
        action: numbers of an action, whose first one is the row's number.
        shared: the next observation is the observation of the next row, so that it can be stored once.
    """

    observation: int
    action: int
    shared: bool = False

    @cached_property
    def row(self) -> dict[str, Tensor]:
        """One row, ``[1, width]`` by flat name: ``next.reward`` for ``("next", "reward")``."""
        return content(self, 1)

    @property
    def row_bytes(self) -> int:
        """Bytes of a row, all keys together."""
        return sum(column.nbytes for column in self.row.values())


#: Those of MuJoCo's HalfCheetah: 17 + 6 + 17 numbers.
TRANSITIONS = Layout(17, 6)
#: The same, as one environment gives them.
ONCE = Layout(17, 6, shared=True)


@lru_cache(maxsize=2)
def content(layout: Layout, n: int) -> dict[str, Tensor]:
    """``n`` rows, by flat name."""
    rows = transitions(n, layout.observation, layout.action)
    if layout.shared:
        rows["next", "observation"][:-1] = rows["observation"][1:]
    return dict(rows.flatten_keys(".").items())


@dataclass(frozen=True)
class Source:
    """The rows that a buffer is filled with: numbers 0 to ``capacity``, made when they are asked for.

    Attributes:
        layout: the keys of a row.
        capacity: how many there are.

    Raises:
        ValueError: there are more transitions than numbers that a float32 can tell apart.
    """

    layout: Layout
    capacity: int

    def __post_init__(self) -> None:
        if self.capacity > 1 << 24:
            raise ValueError(f"transitions are numbered up to {1 << 24}, not {self.capacity}")

    def __len__(self) -> int:
        return self.capacity

    def _columns(self, number: Tensor) -> dict[str, Tensor]:
        period = min(self.capacity, TABLE_BYTES // self.layout.row_bytes)
        columns = {name: column[number % period] for name, column in content(self.layout, period).items()}
        columns["action"][:, 0] = number
        return columns

    def rows(self, start: int, n: int) -> TensorDict:
        """Rows ``start`` to ``start + n``, memory of their own."""
        flat = self._columns(torch.arange(start, start + n))
        nested: TensorDict = TensorDict(flat, batch_size=[n]).unflatten_keys(".")
        return nested

    def columns(self, number: np.ndarray) -> dict[str, np.ndarray]:
        """The content of the rows with these numbers, by flat name."""
        return {name: column.numpy() for name, column in self._columns(torch.from_numpy(number)).items()}
