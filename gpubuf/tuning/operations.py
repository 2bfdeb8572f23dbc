"""The user's sizes, the operations to tune at them, and the configurations to try: pure functions of the sizes."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from gpubuf.data.storage.layout import Key
from gpubuf.kernels import config
from gpubuf.kernels._tuned import invalid
from gpubuf.kernels.config import SPACES, FanOut
from gpubuf.kernels.trajectories._launch import run_bounds

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


THREAD_ELEMENTS = 64
"""Elements of a tile that a thread may hold in a candidate: with more, the registers can't suffice."""

ATOMS = 101
"""Atoms of a categorical critic: those of FastSAC, FlashSAC and XQC."""

NORM_WIDTHS = (256, 768)
"""Features of a layer that is normalised; without time for more, the first."""

Sizes = Mapping[str, int]


SHARES = {
    "sum_tree": 8,
    "trajectories": 6,
    "rows_copy": 3,
    "sum_tree_update": 4,
    "sum_tree_draw": 2,
    "trajectories_update": 3,
    "trajectories_draw": 2,
    "loss_rows": 1,
    "tanh_normal_sample": 1,
    "tanh_normal_backward": 1,
    "atom_rows": 1,
    "norm_rows": 1,
    "norm_columns": 1,
}
"""The operations in the order in which they are tuned, the headline first: there is most time for it.

The numbers are shares of the time: by how many kernels a configuration compiles, and how much depends on the choice.
"""


@dataclass(frozen=True)
class Job:
    """One point: an operation, and the sizes that it is to be tuned for. The fan-out is missing until it is chosen."""

    operation: str
    sizes: dict[str, int] = field(hash=False)

    def __str__(self) -> str:
        return f"{self.operation} ({', '.join(f'{name} {value:,}' for name, value in self.sizes.items())})"

    @property
    def tree(self) -> str:
        """The operation that stands for the tree whose fan-out the configuration depends on; "" if on none."""
        space = SPACES[self.operation]
        return space.families[0] if "fan_out" in space.sizes else ""


def jobs(shapes: Shapes, thorough: bool = False) -> list[Job]:
    """The points to tune, in order: the fan-out of a tree comes before what depends on it."""
    found = []
    batches, width = shapes.batch_sizes, shapes.action_width
    norm_widths = NORM_WIDTHS if thorough else NORM_WIDTHS[:1]
    # The rows of a step are marked. For a few rows there is little to choose.
    marked = {shapes.envs} if thorough or shapes.envs >= 64 else set()
    for capacity in shapes.capacities:
        tree = {"capacity": capacity}
        index = tree | {"envs": shapes.envs}
        steps = steps_of(index)
        found += [Job("sum_tree", tree), Job("trajectories", index | {"words": config.index_words(steps, shapes.envs)})]
        found += [Job("sum_tree_update", tree | {"n": n}) for n in sorted({*batches} | marked)]
        found += [Job("sum_tree_draw", tree | {"n": n}) for n in batches]
        for n in sorted({min(n, steps) for n in ((1, 32, 1024) if thorough else (1, 32))}):
            by_ids = (0, 1) if thorough else (0,)
            found += [Job("trajectories_update", index | {"n": n, "by_id": by_id}) for by_id in by_ids]
        counts = sorted(set(map(shapes.slices, batches)))
        found += [Job("trajectories_draw", index | {"n": n, "slice_len": shapes.slice_len}) for n in counts]
    for n in batches:
        found += [
            Job("rows_copy", {"capacity": shapes.capacities[0], "n_bytes": n * shapes.row_bytes, "n": n}),
            Job("loss_rows", {"n": n}),
            Job("tanh_normal_sample", {"n": n, "width": width}),
            Job("tanh_normal_backward", {"n": n * width}),
            Job("atom_rows", {"n": n, "atoms": ATOMS}),
            *(Job(name, {"n": n, "width": cells}) for name in ("norm_rows", "norm_columns") for cells in norm_widths),
        ]
    return sorted(found, key=lambda job: list(SHARES).index(job.operation))


def steps_of(sizes: Sizes) -> int:
    """Steps of the ring of a trajectory index."""
    return -(-sizes["capacity"] // sizes["envs"])


def _index_update(sizes: Sizes) -> Any:
    run_words = run_bounds(sizes["n"], (config.index_words(steps_of(sizes), 1),))[0]
    return config.index_update(sizes["fan_out"], sizes["n"], run_words, sizes["envs"], bool(sizes["by_id"]))


#: How those are chosen that :data:`config.CHOICES` lacks, or whose sizes are not its arguments.
_RULES: dict[str, Callable[[Sizes], Any]] = {
    "sum_tree": lambda sizes: FanOut(config.tree_fan_out(sizes["capacity"], "cuda")),
    "trajectories": lambda sizes: FanOut(config.index_fan_out(steps_of(sizes), sizes["envs"], "cuda")),
    "trajectories_update": _index_update,
}


@config.by_rule()
def rule(operation: str, sizes: Sizes) -> Any:
    """The configuration without a tuned file."""
    if operation in _RULES:
        return _RULES[operation](sizes)
    return config.CHOICES[operation](**{name: sizes[name] for name in SPACES[operation].sizes})


def candidates(operation: str, sizes: Sizes, thorough: bool = False) -> list[Any]:
    """Configurations to try at these sizes, each once, the rule's first.

    Quick: one field is half or twice the rule's. Thorough: up to two fields are, or are a quarter or four times. A
    tuned file may hold any of them.
    """
    first = rule(operation, sizes)
    bases = [first]
    if operation == "sum_tree_update" and sizes["n"] <= 16 * 1024:
        # One program for all stages, or a launch for each: where the border lies depends on the device.
        bases.append(config.tree_update(sizes["fan_out"], 2**20 if first.single_program else 1))
    found = []
    for base in bases:
        found += [base, *_around(base, sizes, 2 if thorough else 1, 2 if thorough or isinstance(base, FanOut) else 1)]
    return [first, *(made for made in dict.fromkeys(found) if made != first and _worth_trying(operation, sizes, made))]


def _around(base: Any, sizes: Sizes, changes: int, doublings: int) -> Iterator[Any]:
    """``base`` with up to ``changes`` of its fields changed by up to ``doublings`` factors of two."""
    values = {name: _other_values(name, value, sizes, doublings) for name, value in dataclasses.asdict(base).items()}
    for number in range(1, changes + 1):
        for changed in itertools.combinations(values, number):
            for chosen in itertools.product(*(values[name] for name in changed)):
                yield dataclasses.replace(base, **dict(zip(changed, chosen, strict=True)))


def _other_values(name: str, value: int, sizes: Sizes, doublings: int) -> list[int]:
    if name == "single_program":
        # The other fields follow from it: see the bases above.
        return []
    if name == "block_envs":
        # 0 is a launch per stage; nothing lies halfway to it.
        envs = min(config.ceil_power(sizes["envs"]), 64)
        return sorted({0, min(envs, 8), envs} - {value})
    powers = range(1, doublings + 1)
    return [made for power in powers for made in (value << power, value >> power) if made]


def _worth_trying(operation: str, sizes: Sizes, made: Any) -> bool:
    space = SPACES[operation]
    threads = 32 * getattr(made, "num_warps", 16)
    point = {name: sizes[name] for name in space.sizes}
    return not invalid(space, point, dataclasses.asdict(made)) and space.tile(sizes, made) <= THREAD_ELEMENTS * threads
