"""The sizes that a user has."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

from gpubuf.data.storage.layout import Key

#: A key of a row, its dtype, and its shape in one row.
Entry = tuple[Key, torch.dtype, tuple[int, ...]]

TRANSITION: tuple[Entry, ...] = (
    (("observation",), torch.float32, (17,)),
    (("action",), torch.float32, (6,)),
    (("next", "observation"), torch.float32, (17,)),
    (("next", "reward"), torch.float32, (1,)),
    (("next", "done"), torch.bool, (1,)),
    (("next", "terminated"), torch.bool, (1,)),
)
"""A row of a task from MuJoCo, the default."""


@dataclass(frozen=True)
class Shapes:
    """The sizes that a user has.

    Attributes:
        capacities: rows of a buffer.
        batch_sizes: rows of a batch.
        row: the keys of a row.
        envs: environments side by side; a step writes a row of each.
        slice_len: steps of a slice; a batch has ``batch_size // slice_len`` of them.

    Raises:
        ValueError: one of them makes no sense.
    """

    capacities: tuple[int, ...] = (1_000_000,)
    batch_sizes: tuple[int, ...] = (256, 4096, 32768)
    row: tuple[Entry, ...] = TRANSITION
    envs: int = 1
    slice_len: int = 4

    def __post_init__(self) -> None:
        if not self.capacities or not self.batch_sizes or not self.row:
            raise ValueError("there must be a capacity, a batch size and a key of a row")
        if min(*self.capacities, *self.batch_sizes, self.envs, self.slice_len) < 1:
            raise ValueError(f"capacity, batch size, envs and slice length must be at least 1, got {self}")
        if self.row_bytes == 0:
            raise ValueError("rows of no bytes need no tuning")
        if len({key for key, _, _ in self.row}) < len(self.row):
            raise ValueError("a key is given twice")

    @property
    def row_bytes(self) -> int:
        """Bytes of one row, all keys together."""
        return sum(math.prod(shape) * dtype.itemsize for _, dtype, shape in self.row)

    @property
    def action_width(self) -> int:
        """Numbers of an action: of the key of that name, or 6."""
        return next((math.prod(shape) for key, _, shape in self.row if key[-1] == "action"), 6) or 6

    def slices(self, batch_size: int) -> int:
        """Slices of a batch."""
        return max(batch_size // self.slice_len, 1)

    def describe(self) -> dict[str, Any]:
        """As JSON has it."""
        row = {".".join(key): f"{'x'.join(map(str, s))}:{str(d).removeprefix('torch.')}" for key, d, s in self.row}
        return vars(self) | {"row": row}
