"""The calls that are timed: operations on buffers of the user's sizes, each call with other inputs than the one before.

Inputs rotate so that a call finds no more in the second-level cache than it would in training. Every workload can also
compute its results from a state that is always the same: a configuration whose results differ from the rule's is not
used.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor

from gpubuf.data.samplers.random_state import RandomState
from gpubuf.data.samplers.sum_tree import SumTree
from gpubuf.data.storages.tensor_storage import TensorStorage
from gpubuf.kernels import config, rows, sac, sum_tree, tanh_normal, td, trajectories
from gpubuf.tuning.candidates import rule
from gpubuf.tuning.shapes import Job, Shapes

Call = Callable[[], Any]

TRAJECTORY = 200
"""Steps of the trajectories in an index."""


@dataclass(frozen=True)
class Workload:
    """Something to time.

    Attributes:
        name: of the call.
        calls: the same operation on other inputs each.
        n_bytes: bytes that a call has to read and write at least.
        result: the results of the operation, always from the same state.
    """

    name: str
    calls: list[Call]
    n_bytes: int
    result: Callable[[], list[Tensor]]


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
        self.ends = sorted({min(shapes.batch_sizes), max(shapes.batch_sizes)})
        self._storages: dict[tuple[str, int], TensorStorage] = {}

    def workloads(self, job: Job, fan_out: int = 0) -> list[Workload]:
        """The calls that decide about a job, by the mean of the logarithms of their times.

        Args:
            job: the point.
            fan_out: of the tree that it works on.
        """
        n = job.sizes.get("n", 0)
        match job.operation:
            case "rows_copy":
                return self._copies(job.capacity, n)
            case "sum_tree":
                tree = self._tree(job.capacity, fan_out)
                return [*(self._draws(tree, n) for n in self.ends), *(self._updates(tree, n) for n in self.ends)]
            case "sum_tree_update":
                return [self._updates(self._tree(job.capacity, fan_out), n)]
            case "sum_tree_draw":
                return [self._draws(self._tree(job.capacity, fan_out), n)]
            case "trajectories":
                index = _Index(self, job.capacity, fan_out)
                counts = sorted({max(n // self.shapes.slice_len, 1) for n in self.ends})
                # Draws first: they need an index that is whole, which updates at other cursors do not leave behind.
                return [*(index.draws(n) for n in counts), index.updates(1)]
            case "trajectories_update":
                return [_Index(self, job.capacity, fan_out, bool(job.sizes["by_id"])).updates(n)]
            case "trajectories_draw":
                return [_Index(self, job.capacity, fan_out).draws(n)]
            case "tanh_normal_sample" | "tanh_normal_backward":
                return [self._tanh_normal(n, job.operation)]
            case "loss_rows":
                return self._losses(n)
        raise ValueError(job.operation)

    def _generator(self) -> torch.Generator:
        """The same random inputs at every call."""
        return torch.Generator(self.device).manual_seed(0)

    def _random(self, *shape: int, generator: torch.Generator) -> Tensor:
        return torch.rand(shape, device=self.device, generator=generator)

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
        generator, arena_bytes = self._generator(), n * self.shapes.row_bytes
        # All batches of a graph are alive at once.
        rotations = max(min(self.rotations, 2**31 // arena_bytes), 2)
        stored = self._storage("read", capacity)
        size, capacity = stored.layout.arena(n).n_bytes, stored.max_size
        indices = [torch.randint(capacity, (n,), device=self.device, generator=generator) for _ in range(rotations)]
        rng = RandomState(0, device=self.device)
        gather: list[Call] = [
            partial(rows.gather, stored.table, stored.ring, index, capacity, size) for index in indices
        ]
        sample = partial(rows.sample, stored.table, stored.ring, rng.state, n, capacity, size)

        def gathered(call: Call) -> list[Tensor]:
            # Only the keys: the gaps between them in the arena are not written.
            arena, *others = call()
            return [*stored.layout.cut(arena, n), *others]

        def sampled() -> list[Tensor]:
            rng.manual_seed(0)
            return gathered(sample)

        # Room for several batches, and more than any second-level cache holds.
        written = self._storage("written", max(4 * n, 2**28 // self.shapes.row_bytes))
        sources = [[tensor.clone() for tensor in stored.layout.cut(call()[0], n)] for call in gather]
        ring = written.ring.clone()
        start = ring.clone()
        extend: list[Call] = [partial(rows.extend, written.table, some, ring, n, written.max_size) for some in sources]

        def extended() -> list[Tensor]:
            ring.copy_(start)
            index = extend[0]()
            arena, generation = rows.gather(written.table, ring, index, written.max_size, size)
            return [index, generation, ring.clone(), *written.layout.cut(arena, n)]

        return [
            Workload(f"gather {n:,}", gather, 2 * arena_bytes + 16 * n, lambda: gathered(gather[0])),
            Workload(f"sample {n:,}", [sample] * rotations, 2 * arena_bytes + 16 * n, sampled),
            Workload(f"extend {n:,}", extend, 2 * arena_bytes + 8 * n, extended),
        ]

    # The sum tree

    def _tree(self, capacity: int, fan_out: int) -> SumTree:
        tree = SumTree(capacity, alpha=0.6, beta=0.4, eps=1e-6, device=self.device, fan_out=fan_out)
        tree.leaves[:capacity].uniform_(0.1, 1.0, generator=self._generator())
        tree.rebuild()
        return tree

    def _updates(self, tree: SumTree, n: int) -> Workload:
        """Priorities of ``n`` rows; marks of new rows where ``n`` is no batch, but as many rows as a step writes."""
        mark, n, generator = n not in self.shapes.batch_sizes, min(n, tree.capacity), self._generator()
        # Rows in random order, one from each of n parts: distinct where there are as many.
        parts = [torch.randperm(n, device=self.device, generator=generator) for _ in range(self.rotations)]
        indices = [
            ((part + torch.rand(n, dtype=torch.float64, device=self.device, generator=generator)) * tree.capacity / n)
            .long()
            .clamp_(max=tree.capacity - 1)
            for part in parts
        ]
        # A maximum, so that new rows weigh the same whenever they are marked.
        tree.update(indices[0][:1], 2.0)
        calls: list[Call] = [
            partial(tree.mark, index) if mark else partial(tree.update, index, self._random(n, generator=generator))
            for index in indices
        ]
        touched = torch.cat(indices)

        def result() -> list[Tensor]:
            for call in calls:
                call()
            return [tree.leaves[touched], tree.nodes[:, -1].clone()]

        n_bytes, count, child = n * (8 + 4 + 4), tree.capacity, 4
        for _ in sum_tree.level_sizes(tree.capacity, tree.fan_out):
            count = -(-count // tree.fan_out)
            n_bytes += min(n, count) * (tree.fan_out * child + 24)
            child = 24
        return Workload(f"{'mark' if mark else 'update'} {n:,}", calls, n_bytes, result)

    def _draws(self, tree: SumTree, n: int) -> Workload:
        rng = RandomState(0, device=self.device)
        draw = partial(tree.draw, n, rng)
        inner = len(sum_tree.level_sizes(tree.capacity, tree.fan_out)) - 1
        n_bytes = n * (tree.fan_out * (4 + 8 * inner) + 8 + 4)

        def result() -> list[Tensor]:
            rng.manual_seed(0)
            return list(draw())

        return Workload(f"draw {n:,}", [draw] * self.rotations, n_bytes, result)

    # Losses

    def _tanh_normal(self, n: int, operation: str) -> Workload:
        """``n`` actions, or the gradients of ``n`` numbers of actions."""
        width, generator = self.shapes.action_width, self._generator()
        backward = operation == "tanh_normal_backward"
        n = max(n // width, 1) if backward else n
        grads = (self._random(n, width, generator=generator), self._random(n, generator=generator)) if backward else ()
        function = tanh_normal.sample_backward if backward else tanh_normal.sample
        calls: list[Call] = []
        for _ in range(self.rotations):
            inputs = [self._random(n, width, generator=generator) + 0.1 for _ in range(3)]
            calls.append(partial(function, *inputs, None, None, *grads, -1.0, 1.0, 1))
        name = f"tanh-normal {'backward ' if backward else ''}{n:,} x {width}"
        return Workload(name, calls, 4 * n * ((6 if backward else 4) * width + 1), lambda: list(calls[0]()))

    def _losses(self, n: int) -> list[Workload]:
        """The fused pieces of a loss over ``n`` rows."""
        generator, critics = self._generator(), 2
        one = torch.ones(1, device=self.device)
        gamma = torch.full((1,), 0.99, dtype=torch.float64, device=self.device)
        terminated = self._random(n, generator=generator) < 0.01
        rotating: list[list[Call]] = []
        for _ in range(self.rotations):
            q = self._random(critics, n, generator=generator)
            target, weight, log_prob = (self._random(n, generator=generator) for _ in range(3))
            rotating.append(
                [
                    partial(td.soft_td_target, q, log_prob, one, target, terminated, gamma, None),
                    partial(td.td_loss, q, target, weight, None, td.L2, td.MEAN),
                    partial(td.td_loss_backward, one, q, target, weight, None, one, td.L2, td.MEAN),
                    partial(sac.actor_loss, q, log_prob, one, None, None, td.MEAN),
                ]
            )
        words = {
            "target": critics + 3,
            "loss": critics + 3,
            "loss backward": 2 * critics + 2,
            "actor loss": critics + 1,
        }

        def result(call: Call) -> list[Tensor]:
            found = call()
            return [found] if isinstance(found, Tensor) else list(found)

        return [
            Workload(f"{name} {n:,}", list(calls), 4 * n * moved, partial(result, calls[0]))
            for (name, moved), calls in zip(words.items(), zip(*rotating, strict=True), strict=True)
        ]


class _Index:
    """A trajectory index over a full ring, in which every environment's trajectories end at other steps."""

    def __init__(self, bench: Bench, capacity: int, fan_out: int, by_id: bool = False) -> None:
        device = bench.device
        self.steps, self.envs, self.fan_out = bench.shapes.steps(capacity), bench.shapes.envs, fan_out
        self.by_id, self.rotations = by_id, bench.rotations
        # Short trajectories count as well: a small ring may have no others.
        self.rule = trajectories.Rule(bench.shapes.slice_len)
        row = torch.arange(self.steps * self.envs, device=device)
        # As 37 steps lie between the ends of neighbours, no step ends all trajectories.
        place = row // self.envs + 37 * (row % self.envs)
        signal = place // TRAJECTORY if by_id else place % TRAJECTORY == TRAJECTORY - 1
        self.storage = TensorStorage(TensorDict({"signal": signal[:, None]}, [len(row)], device=device), device=device)
        self.ends, self.sums = trajectories.new_index(self.steps, self.envs, fan_out, device)
        self.depth = len(trajectories.level_sizes(self.steps, self.envs, fan_out)) - 1

    def _ring(self, cursor: int) -> Tensor:
        """The counters of a full ring, in its second lap."""
        ring = self.storage.ring.clone()
        ring[rows.WRITTEN] = (self.steps + cursor) * self.envs
        return ring

    def _update(self, ring: Tensor, n: int) -> None:
        sizes = (n, self.steps, self.envs, self.fan_out, *self.rule)
        trajectories.update(self.ends, self.sums, ring, self.storage.table, self.by_id, *sizes)

    def _rebuild(self, ring: Tensor) -> None:
        """Index everything anew, by rule: the configuration being tried may be for single steps, and slow for all."""
        sizes = {"fan_out": self.fan_out, "n": self.steps, "envs": self.envs, "by_id": int(self.by_id)}
        with config.using(trajectories_update=rule("trajectories_update", sizes, self.steps)):
            self._update(ring, self.steps)

    def updates(self, n: int) -> Workload:
        """Writes of ``n`` steps at cursors all over the ring."""
        n = min(n, self.steps)
        at = [self.steps * i // self.rotations for i in range(self.rotations)]
        calls: list[Call] = [partial(self._update, self._ring(cursor), n) for cursor in at]
        before, after = self._ring(at[-1]), self._ring(at[-1] + n)
        weights = config.index_words(self.steps, self.envs)

        def result() -> list[Tensor]:
            self._rebuild(before)
            self._update(after, n)
            # Weights and the total: the sums between depend on the fan-out.
            return [self.ends.clone(), self.sums[:weights].clone(), self.sums[-1].clone()]

        words = min(n // 64 + 2, -(-self.steps // 64))
        signals = n * self.envs * (8 if self.by_id else 1)
        n_bytes = signals + self.envs * (16 * words + 8 * (words + 1)) + 8 * self.fan_out * self.depth * words
        return Workload(f"write {n:,} x {self.envs:,}", calls, n_bytes, result)

    def draws(self, n: int) -> Workload:
        """Draws of ``n`` slices."""
        rng, ring = RandomState(0, device=self.ends.device), self._ring(0)
        # The timed calls must find trajectories.
        self._rebuild(ring)
        sizes = (n, self.steps, self.envs, self.fan_out, *self.rule)
        draw = partial(trajectories.draw, self.ends, self.sums, ring, rng.state, None, *sizes)

        def result() -> list[Tensor]:
            self._rebuild(ring)
            rng.manual_seed(0)
            return list(draw())

        n_bytes = n * (8 * self.fan_out * self.depth + 9 * self.rule.slice_len + 8)
        return Workload(f"draw {n:,} x {self.rule.slice_len}", [draw] * self.rotations, n_bytes, result)
