"""The calls that are timed: operations on buffers of the user's sizes, each call with other inputs than the one before.

Inputs rotate so that a call finds no more in the second-level cache than it would in training. Every workload can also
compute its results from a state that is always the same: a configuration whose results differ from the rule's is not
used.
"""

from __future__ import annotations

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
from gpubuf.data.storage.storage import TensorStorage
from gpubuf.kernels import rows
from gpubuf.tuning.operations import Job, Shapes

Call = Callable[[], Any]


@dataclass(frozen=True)
class Workload:
    """Something to time.

    Attributes:
        name: of the call.
        calls: the same operation on other inputs each.
        compute: the operation, always from the same state.
    """

    name: str
    calls: Sequence[Call]
    compute: Call

    def result(self) -> list[Tensor]:
        """The results of the operation."""
        return _tensors(self.compute())


class Bench:
    """Makes the workloads of jobs. It keeps the buffers of the last one.

    Args:
        shapes: the user's sizes.
        device: where.
        rotations: calls of a workload, each with other inputs.
        memory: bytes that rows may take: a larger buffer is represented by a part of it.
    """

    def __init__(self, shapes: Shapes, device: torch.device, rotations: int = 8, memory: int = 2**33) -> None:
        self.shapes, self.device, self.rotations, self.memory = shapes, device, rotations, memory
        self._storages: dict[tuple[str, int], TensorStorage] = {}

    def workloads(self, job: Job) -> list[Workload]:
        """The calls that decide about a job, by the mean of the logarithms of their times."""
        n, capacity = job.sizes["n"], job.sizes["capacity"]
        if job.operation == "rows_copy":
            return self._copies(capacity, n)
        tree = SumTree(capacity, alpha=0.6, beta=0.4, eps=1e-6, device=self.device, fan_out=job.sizes["fan_out"])
        tree.leaves[:capacity].uniform_(0.1, 1.0, generator=self._generator())
        tree.rebuild()
        return [self._updates(tree, n) if job.operation == "sum_tree_update" else self._draws(tree, n)]

    def _generator(self) -> torch.Generator:
        """The same random inputs at every call."""
        return torch.Generator(self.device).manual_seed(0)

    # Rows

    def _storage(self, use: str, capacity: int) -> TensorStorage:
        """A full storage of random bytes, at most as large as ``memory``; one for each use."""
        n = max(min(capacity, self.memory // self.shapes.row_bytes), 1)
        if (use, n) not in self._storages:
            self._storages = {key: storage for key, storage in self._storages.items() if key[0] != use}
            generator = self._generator()
            rows_of = TensorDict(batch_size=[n], device=self.device)
            for key, dtype, shape in self.shapes.row:
                # Bytes of 0 and 1 are valid whatever the dtype, booleans included, and never a NaN.
                n_bytes = n * math.prod(shape) * dtype.itemsize
                tensor = torch.empty(n_bytes, dtype=torch.uint8, device=self.device).random_(0, 2, generator=generator)
                rows_of[key] = tensor.view(dtype).view(n, *shape)
            self._storages[use, n] = TensorStorage(rows_of, device=self.device)
        return self._storages[use, n]

    def _copies(self, capacity: int, n: int) -> list[Workload]:
        """Gathers, samples and writes of ``n`` rows."""
        generator = self._generator()
        # All batches of a graph are alive at once.
        rotations = max(min(self.rotations, 2**31 // (n * self.shapes.row_bytes)), 2)
        stored = self._storage("read", capacity)
        indices = [
            torch.randint(stored.max_size, (n,), device=self.device, generator=generator) for _ in range(rotations)
        ]
        rng = RandomState(0, device=self.device)
        gather = [partial(stored.gather, index) for index in indices]
        sample = partial(stored.sample_uniform, rng.state, n)

        # Room for several batches, and more than any second-level cache holds.
        written = self._storage("written", max(4 * n, 2**28 // self.shapes.row_bytes))
        start = written.ring.clone()
        sources = [[key.clone() for key in call()[0]] for call in gather]
        extend = [partial(rows.extend, written.table, source, written.ring, n, written.max_size) for source in sources]

        def extended() -> Any:
            written.ring.copy_(start)
            index = extend[0]()
            return index, written.ring.clone(), written.gather(index)

        return [
            Workload(f"gather {n:,}", gather, gather[0]),
            Workload(f"sample {n:,}", [sample] * rotations, partial(_seeded, rng, sample)),
            Workload(f"extend {n:,}", extend, extended),
        ]

    # The sum tree

    def _updates(self, tree: SumTree, n: int) -> Workload:
        """Priorities of ``n`` rows."""
        n, generator = min(n, tree.capacity), self._generator()
        calls: list[Call] = []
        touched = []
        for _ in range(self.rotations):
            # Rows in random order, one from each of n parts: distinct where there are as many.
            part = torch.randperm(n, device=self.device, generator=generator)
            place = part + torch.rand(n, dtype=torch.float64, device=self.device, generator=generator)
            index = (place * tree.capacity / n).long().clamp_(max=tree.capacity - 1)
            priority = torch.rand(n, device=self.device, generator=generator)
            calls.append(partial(tree.update, index, priority))
            touched.append(index)

        def result() -> list[Tensor]:
            for call in calls:
                call()
            return [tree.leaves[torch.cat(touched)], tree.nodes[:, -1].clone()]

        return Workload(f"update {n:,}", calls, result)

    def _draws(self, tree: SumTree, n: int) -> Workload:
        rng = RandomState(0, device=self.device)
        draw = partial(tree.draw, n, rng)
        return Workload(f"draw {n:,}", [draw] * self.rotations, partial(_seeded, rng, draw))


def _tensors(found: Any) -> list[Tensor]:
    return [found] if isinstance(found, Tensor) else [tensor for item in found for tensor in _tensors(item)]


def _seeded(rng: RandomState, draw: Call) -> Any:
    """The same random draw every time."""
    rng.manual_seed(0)
    return draw()
