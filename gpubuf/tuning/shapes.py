"""The sizes that a user has, and the points to tune that follow from them."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from gpubuf.data.storages.layout import Key
from gpubuf.kernels import config

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
class Job:
    """One point: an operation, and the sizes that its configuration is to be tuned for.

    Attributes:
        operation: a name of :data:`gpubuf.kernels._spaces.SPACES`.
        capacity: rows of the buffer; 0 where it does not matter.
        sizes: the sizes that the configuration depends on, except the fan-out.
        tree: the tree whose fan-out the configuration depends on, ``"sum_tree"`` or ``"trajectories"``, or None.
    """

    operation: str
    capacity: int
    sizes: dict[str, int] = field(hash=False)
    tree: str | None = None

    def __str__(self) -> str:
        sizes = ", ".join(f"{name} {value:,}" for name, value in self.sizes.items())
        return f"{self.operation} ({sizes})"


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

    def steps(self, capacity: int) -> int:
        """Steps of a ring of ``capacity`` rows."""
        return -(-capacity // self.envs)

    def describe(self) -> dict[str, Any]:
        """As JSON has it."""
        row = {".".join(key): f"{'x'.join(map(str, s))}:{str(d).removeprefix('torch.')}" for key, d, s in self.row}
        return {
            "capacity": list(self.capacities),
            "batch_size": list(self.batch_sizes),
            "row": row,
            "envs": self.envs,
            "slice_len": self.slice_len,
        }


def jobs(shapes: Shapes, thorough: bool = False) -> list[Job]:
    """The points to tune, in order: the fan-out of a tree comes before what depends on it."""
    found = [job for capacity in shapes.capacities for job in _tree_jobs(shapes, capacity, thorough)]
    width = shapes.action_width
    for n in shapes.batch_sizes:
        found += [
            Job("rows_copy", shapes.capacities[0], {"n_bytes": n * shapes.row_bytes, "n": n}),
            Job("loss_rows", 0, {"n": n}),
            Job("tanh_normal_sample", 0, {"n": n, "width": width}),
            Job("tanh_normal_backward", 0, {"n": n * width}),
        ]
    # The headline comes first, so that it is what there is most time for.
    order = ("sum_tree", "trajectories", "rows_copy", "sum_tree_update", "sum_tree_draw")
    return sorted(found, key=lambda job: order.index(job.operation) if job.operation in order else len(order))


def _tree_jobs(shapes: Shapes, capacity: int, thorough: bool) -> Iterator[Job]:
    steps = shapes.steps(capacity)
    yield Job("sum_tree", capacity, {"capacity": capacity})
    # The rows of a step are marked. For a few rows there is little to choose.
    marked = {shapes.envs} if thorough or shapes.envs >= 64 else set()
    for n in sorted({*shapes.batch_sizes} | marked):
        yield Job("sum_tree_update", capacity, {"n": n}, "sum_tree")
    for n in shapes.batch_sizes:
        yield Job("sum_tree_draw", capacity, {"n": n}, "sum_tree")
    yield Job("trajectories", capacity, {"words": config.index_words(steps, shapes.envs)})
    for n in sorted({min(n, steps) for n in ((1, 32, 1024) if thorough else (1, 32))}):
        for by_id in (0, 1) if thorough else (0,):
            sizes = {"n": n, "envs": shapes.envs, "by_id": by_id}
            yield Job("trajectories_update", capacity, sizes, "trajectories")
    for n in sorted({max(n // shapes.slice_len, 1) for n in shapes.batch_sizes}):
        yield Job("trajectories_draw", capacity, {"n": n, "slice_len": shapes.slice_len}, "trajectories")
