"""The user's sizes, the operations to tune at them, and the configurations to try: pure functions of the sizes."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from gpubuf.data.storage.layout import Key
from gpubuf.kernels import config
from gpubuf.kernels._tuned import invalid
from gpubuf.kernels.config import SPACES

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

OPERATIONS = ("rows_copy", "sum_tree_update", "sum_tree_draw")
"""What is tuned. Of other kernels nothing beat the rules, on any GPU that was tried."""


@dataclass(frozen=True)
class Shapes:
    """The sizes that a user has.

    Attributes:
        capacities: rows of a buffer.
        batch_sizes: rows of a batch.
        row: the keys of a row.

    Raises:
        ValueError: one of them makes no sense.
    """

    capacities: tuple[int, ...] = (1_000_000,)
    batch_sizes: tuple[int, ...] = (256, 4096, 32768)
    row: tuple[Entry, ...] = TRANSITION

    def __post_init__(self) -> None:
        if not self.capacities or not self.batch_sizes or not self.row:
            raise ValueError("there must be a capacity, a batch size and a key of a row")
        if min(*self.capacities, *self.batch_sizes) < 1:
            raise ValueError(f"capacity and batch size must be at least 1, got {self}")
        if self.row_bytes == 0:
            raise ValueError("rows of no bytes need no tuning")
        if len({key for key, _, _ in self.row}) < len(self.row):
            raise ValueError("a key is given twice")

    @property
    def row_bytes(self) -> int:
        """Bytes of one row, all keys together."""
        return sum(math.prod(shape) * dtype.itemsize for _, dtype, shape in self.row)

    def describe(self) -> dict[str, Any]:
        """As JSON has it."""
        row = {".".join(key): f"{'x'.join(map(str, s))}:{str(d).removeprefix('torch.')}" for key, d, s in self.row}
        return vars(self) | {"row": row}


THREAD_ELEMENTS = 64
"""Elements of a tile that a thread may hold in a candidate: with more, the registers can't suffice."""

Sizes = Mapping[str, int]


@dataclass(frozen=True)
class Job:
    """One point: an operation, and the sizes that it is to be tuned for."""

    operation: str
    sizes: dict[str, int] = field(hash=False)

    def __str__(self) -> str:
        return f"{self.operation} ({', '.join(f'{name} {value:,}' for name, value in self.sizes.items())})"

    @property
    def point(self) -> dict[str, int]:
        """The sizes that its configuration depends on."""
        return {name: self.sizes[name] for name in SPACES[self.operation].sizes}


def jobs(shapes: Shapes) -> list[Job]:
    """The points to tune, in order."""
    first = shapes.capacities[0]
    found = [Job("rows_copy", {"capacity": first, "n_bytes": n * shapes.row_bytes, "n": n}) for n in shapes.batch_sizes]
    for capacity in shapes.capacities:
        tree = {"capacity": capacity, "fan_out": config.tree_fan_out(capacity, "cuda")}
        found += [Job(name, tree | {"n": n}) for name in OPERATIONS[1:] for n in shapes.batch_sizes]
    return found


@config.by_rule()
def rule(operation: str, sizes: Sizes) -> Any:
    """The configuration without a tuned file."""
    return config.CHOICES[operation](**{name: sizes[name] for name in SPACES[operation].sizes})


def candidates(job: Job) -> list[Any]:
    """Configurations to try, each once: the rule's first, then those of which one field is half or twice the rule's."""
    first = rule(job.operation, job.sizes)
    bases = [first]
    if job.operation == "sum_tree_update" and job.sizes["n"] <= 16 * 1024:
        # One program for all stages, or a launch for each: where the border lies depends on the device.
        bases.append(config.tree_update(job.sizes["fan_out"], 2**20 if first.single_program else 1))
    found = []
    for base in bases:
        found.append(base)
        for name, value in dataclasses.asdict(base).items():
            # The other fields follow from `single_program`: see the bases above.
            values = () if name == "single_program" else (value << 1, value >> 1)
            found += [dataclasses.replace(base, **{name: made}) for made in values if made]
    return [first, *(made for made in dict.fromkeys(found) if made != first and _worth_trying(job, made))]


def _worth_trying(job: Job, made: Any) -> bool:
    space, threads = SPACES[job.operation], 32 * made.num_warps
    usable = not invalid(space, job.point, dataclasses.asdict(made))
    return usable and space.tile(job.sizes, made) <= THREAD_ELEMENTS * threads
