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


@dataclass(frozen=True)
class Column:
    """One key of a row: ``[width]``, by its flat name, ``next.reward`` for ``("next", "reward")``."""

    name: str
    width: int
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """Bytes of it in a row."""
        return self.width * self.dtype.itemsize

    @property
    def array_dtype(self) -> np.dtype:
        """The dtype of a NumPy array of it."""
        return torch.empty(0, dtype=self.dtype).numpy().dtype


@dataclass(frozen=True)
class Layout:
    """The keys of a row.

    Attributes:
        columns: its keys.
        number: the column whose first entry is the row's number.
    """

    columns: tuple[Column, ...]
    number: str

    @property
    def row_bytes(self) -> int:
        """Bytes of a row, all keys together."""
        return sum(column.nbytes for column in self.columns)

    def width(self, name: str) -> int:
        """Numbers of a column in a row; 0 where there is no such column."""
        return next((column.width for column in self.columns if column.name == name), 0)


def transitions_layout(observation: int, action: int) -> Layout:
    """Observation, action and next observation of float32, reward, done, terminated."""
    widths = (("observation", observation), ("action", action), ("next.observation", observation), ("next.reward", 1))
    floats = [Column(name, width, torch.float32) for name, width in widths]
    flags = [Column(name, 1, torch.bool) for name in ("next.done", "next.terminated")]
    return Layout((*floats, *flags), "action")


#: Those of MuJoCo's HalfCheetah: 17 + 6 + 17 numbers.
TRANSITIONS = transitions_layout(17, 6)
#: As small as a row can be that still carries its number.
TINY = Layout((Column("observation", 1, torch.int32),), "observation")


def transitions(n: int, seed: int = 0, observation: int = 17, action: int = 6) -> TensorDict:
    """``n`` transitions of such widths; ``action[:, 0]`` is the row number."""
    generator = torch.Generator().manual_seed(seed)

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
class Source:
    """The rows that a buffer is filled with: numbers 0 to ``capacity``, made when they are asked for.

    Attributes:
        layout: the keys of a row: transitions, or :data:`TINY`.
        capacity: how many there are.

    Raises:
        ValueError: there are more transitions than numbers that a float32 can tell apart.
    """

    layout: Layout
    capacity: int

    def __post_init__(self) -> None:
        if self.layout is not TINY and self.capacity > 1 << 24:
            raise ValueError(f"transitions are numbered up to {1 << 24}, not {self.capacity}")

    def __len__(self) -> int:
        return self.capacity

    @cached_property
    def table(self) -> dict[str, Tensor]:
        """One period of the content, by flat name."""
        period = min(self.capacity, TABLE_BYTES // self.layout.row_bytes)
        if self.layout is TINY:
            return {}
        return dict(_table(period, self.layout.width("observation"), self.layout.width("action")))

    def _columns(self, number: Tensor) -> dict[str, Tensor]:
        columns = {}
        for column in self.layout.columns:
            table = self.table.get(column.name)
            if table is None:
                content = torch.empty(len(number), column.width, dtype=column.dtype)
            else:
                content = table[number % len(table)]
            if column.name == self.layout.number:
                content[:, 0] = number
            columns[column.name] = content
        return columns

    def rows(self, start: int, n: int) -> TensorDict:
        """Rows ``start`` to ``start + n``, memory of their own."""
        flat = self._columns(torch.arange(start, start + n))
        nested: TensorDict = TensorDict(flat, batch_size=[n]).unflatten_keys(".")
        return nested

    def columns(self, number: np.ndarray) -> dict[str, np.ndarray]:
        """The content of the rows with these numbers, by flat name."""
        return {name: column.numpy() for name, column in self._columns(torch.from_numpy(number)).items()}


@lru_cache(maxsize=2)
def _table(period: int, observation: int, action: int) -> tuple[tuple[str, Tensor], ...]:
    return tuple(transitions(period, 0, observation, action).flatten_keys(".").items())
