"""The user's sizes, the points to tune, the configurations to try at each, and the calls that are timed.

Each call has other inputs than the one before, so that it finds no more in the second-level cache than it would in
training. Every workload can also compute its results from a state that is always the same: a configuration whose
results differ from the rule's is not used.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor

from gpubuf.data.samplers.base import RandomState
from gpubuf.data.samplers.sum_tree import SumTree
from gpubuf.data.storage.layout import Key
from gpubuf.data.storage.storage import TensorStorage
from gpubuf.kernels import config, rows
from gpubuf.kernels._tuned import invalid
from gpubuf.kernels.config import SPACES

#: A key of a row, its dtype, and its shape in one row.
Entry = tuple[Key, torch.dtype, tuple[int, ...]]

#: What is tuned. Of other kernels nothing beat the rules, on any GPU that was tried.
OPERATIONS = ("rows_copy", "sum_tree_update", "sum_tree_draw")

#: Elements of a tile that a thread may hold in a candidate: with more, the registers can't suffice.
THREAD_ELEMENTS = 64


@dataclass(frozen=True)
class Job:
    """One point: an operation, and the sizes that it is to be tuned for."""

    operation: str
    sizes: dict[str, int]

    def __str__(self) -> str:
        return f"{self.operation} ({', '.join(f'{name} {value:,}' for name, value in self.sizes.items())})"

    @property
    def point(self) -> dict[str, int]:
        """The sizes that its configuration depends on."""
        return {name: self.sizes[name] for name in SPACES[self.operation].sizes}


def jobs(capacities: Sequence[int], batch_sizes: Sequence[int], row: Sequence[Entry]) -> list[Job]:
    """The points to tune, in order, for rows of a buffer, rows of a batch, and the keys of a row."""
    row_bytes = sum(math.prod(shape) * dtype.itemsize for _, dtype, shape in row)
    found = [Job("rows_copy", {"capacity": capacities[0], "n_bytes": n * row_bytes, "n": n}) for n in batch_sizes]
    for capacity in capacities:
        tree = {"capacity": capacity, "fan_out": config.tree_fan_out(capacity, "cuda")}
        found += [Job(name, tree | {"n": n}) for name in OPERATIONS[1:] for n in batch_sizes]
    return found


@config.by_rule()
def candidates(job: Job) -> list[Any]:
    """Configurations to try, each once: the rule's first, then those of which one field is half or twice the rule's."""
    first = config.CHOICES[job.operation](**job.point)
    bases = [first]
    if job.operation == "sum_tree_update" and job.sizes["n"] <= 16 * 1024:
        # One program for all stages, or a launch for each: where the border lies depends on the device.
        bases.append(config.tree_update(job.sizes["fan_out"], 2**20 if first.single_program else 1))
    found = list(bases)
    for base in bases:
        for name, value in dataclasses.asdict(base).items():
            # The other fields follow from `single_program`: see the bases above.
            if name != "single_program":
                found += [dataclasses.replace(base, **{name: made}) for made in (value << 1, value >> 1)]
    return [first, *(made for made in dict.fromkeys(found) if made != first and _worth_trying(job, made))]


def _worth_trying(job: Job, made: Any) -> bool:
    if invalid(SPACES[job.operation], job.point, dataclasses.asdict(made)):
        return False
    fits: bool = SPACES[job.operation].tile(job.sizes, made) <= THREAD_ELEMENTS * 32 * made.num_warps
    return fits


@dataclass(frozen=True)
class Workload:
    """Something to time.

    Attributes:
        name: of the call.
        calls: the same operation on other inputs each.
        compute: the operation, always from the same state.
    """

    name: str
    calls: Sequence[Callable[[], Any]]
    compute: Callable[[], Any]


def workloads(job: Job, row: Sequence[Entry], device: torch.device, memory: int, rotations: int = 8) -> list[Workload]:
    """The calls that decide about a job.

    Args:
        job: the point.
        row: the keys of a row.
        device: where.
        memory: bytes that rows may take: a larger buffer is represented by a part of it.
        rotations: calls of a workload, each with other inputs.
    """
    n, capacity, generator = job.sizes["n"], job.sizes["capacity"], torch.Generator(device).manual_seed(0)
    rng = RandomState(0, device=device)

    def seeded(draw: Callable[[], Any]) -> Any:
        rng.manual_seed(0)
        return draw()

    if job.operation == "rows_copy":
        row_bytes = job.sizes["n_bytes"] // n
        stored = _storage(row, min(capacity, memory // row_bytes), device, generator)
        # Room for several batches, and more than any second-level cache holds.
        written = _storage(row, min(max(4 * n, 2**28 // row_bytes), memory // row_bytes), device, generator)
        start = written.ring.counters.clone()
        # All batches of a round are alive at once.
        times = range(max(min(rotations, 2**31 // (n * row_bytes)), 2))
        indices = [torch.randint(stored.max_size, (n,), device=device, generator=generator) for _ in times]

        # Functions of the storages, whose memory a plan alone would not keep.
        def read(index: Tensor) -> Any:
            return stored.plans.batch.gather(index)

        def sample() -> Any:
            return stored.plans.batch.sample_uniform(rng.state, n)

        def write(source: list[Tensor]) -> Any:
            return rows.extend(written.rows.table, source, written.ring.counters, n, written.max_size)

        gather = [partial(read, index) for index in indices]
        extend = [partial(write, [key.clone() for key in call()[0]]) for call in gather]

        def extended() -> Any:
            written.ring.counters.copy_(start)
            index = extend[0]()
            return index, written.ring.counters.clone(), written.plans.batch.gather(index)

        return [
            Workload(f"gather {n:,}", gather, gather[0]),
            Workload(f"sample {n:,}", [sample] * len(times), partial(seeded, sample)),
            Workload(f"extend {n:,}", extend, extended),
        ]
    tree = SumTree(capacity, alpha=0.6, beta=0.4, eps=1e-6, device=device, fan_out=job.sizes["fan_out"])
    tree.leaves[:capacity].uniform_(0.1, 1.0, generator=generator)
    tree.rebuild()
    if job.operation == "sum_tree_draw":
        draw = partial(tree.draw, n, rng)
        return [Workload(f"draw {n:,}", [draw] * rotations, partial(seeded, draw))]
    # Rows in random order, one from each of n parts: distinct where there are as many.
    n = min(n, capacity)
    orders = (torch.randperm(n, device=device, generator=generator).double() for _ in range(rotations))
    indices = [((order + 0.5) * capacity / n).long() for order in orders]
    updates = [partial(tree.update, index, torch.rand(n, device=device, generator=generator)) for index in indices]

    def updated() -> Any:
        for update in updates:
            update()
        return tree.leaves[torch.cat(indices)], tree.nodes[:, -1].clone()

    return [Workload(f"update {n:,}", updates, updated)]


def _storage(row: Sequence[Entry], n: int, device: torch.device, generator: torch.Generator) -> TensorStorage:
    """A full storage of random bytes."""
    stored = TensorDict(batch_size=[n], device=device)
    for key, dtype, shape in row:
        # Bytes of 0 and 1 are valid whatever the dtype, booleans included, and never a NaN.
        size = n * math.prod(shape) * dtype.itemsize
        tensor = torch.empty(size, dtype=torch.uint8, device=device).random_(0, 2, generator=generator)
        stored[key] = tensor.view(dtype).view(n, *shape)
    return TensorStorage(stored, device=device)
