"""What is timed: operations on buffers of the user's sizes, each call with other inputs than the one before.

Inputs rotate so that a call finds no more in the second-level cache than it would in training. Every workload can also
say what it computes, from a state that is always the same: a configuration whose results differ from the rule's is not
used.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
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
        name: what it is.
        calls: the same operation on other inputs each.
        n_bytes: what a call has to read and write at least.
        result: what the operation computes, always from the same state.
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
        self._storages: dict[tuple[str, int], TensorStorage] = {}

    def workloads(self, job: Job, fan_out: int = 0) -> list[Workload]:
        """What decides about a job: the mean of the logarithms of the times of these.

        Args:
            job: the point.
            fan_out: of the tree that it works on.
        """
        make: Callable[..., list[Workload]] = getattr(self, f"_{job.operation}")
        return make(job, fan_out)

    # Random inputs, the same at every call

    def _generator(self) -> torch.Generator:
        return torch.Generator(self.device).manual_seed(0)

    def _random(self, *shape: int, generator: torch.Generator) -> Tensor:
        return torch.rand(shape, device=self.device, generator=generator)

    def _distinct(self, n: int, below: int, generator: torch.Generator) -> Tensor:
        """Rows in random order, one from each of ``n`` parts: distinct where there are as many."""
        parts = torch.randperm(n, device=self.device, generator=generator)
        uniform = torch.rand(n, device=self.device, generator=generator, dtype=torch.float64)
        return ((parts + uniform) * (below / n)).long().clamp_(max=below - 1)

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

    def _rows_copy(self, job: Job, _: int) -> list[Workload]:
        n, generator = job.sizes["n"], self._generator()
        arena_bytes = n * self.shapes.row_bytes
        # All batches of a graph are alive at once.
        rotations = max(min(self.rotations, 2**31 // max(arena_bytes, 1)), 2)
        stored = self._storage("read", job.capacity)
        size, capacity = stored.layout.arena(n).n_bytes, stored.max_size
        indices = [torch.randint(capacity, (n,), device=self.device, generator=generator) for _ in range(rotations)]
        rng = RandomState(0, device=self.device)
        gather = [functools.partial(rows.gather, stored.table, stored.ring, index, capacity, size) for index in indices]
        sample = functools.partial(rows.sample, stored.table, stored.ring, rng.state, n, capacity, size)

        def gathered(call: Call) -> list[Tensor]:
            # Only the keys: what lies between them in the arena is not written.
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
        extend = [functools.partial(rows.extend, written.table, some, ring, n, written.max_size) for some in sources]

        def extended() -> list[Tensor]:
            ring.copy_(start)
            index = extend[0]()
            arena, generation = rows.gather(written.table, ring, index, written.max_size, size)
            return [index, generation, ring.clone(), *written.layout.cut(arena, n)]

        return [
            Workload(f"gather {n:,}", list(gather), 2 * arena_bytes + 16 * n, lambda: gathered(gather[0])),
            Workload(f"sample {n:,}", [sample] * rotations, 2 * arena_bytes + 16 * n, sampled),
            Workload(f"extend {n:,}", list(extend), 2 * arena_bytes + 8 * n, extended),
        ]

    # The sum tree

    def _tree(self, capacity: int, fan_out: int) -> SumTree:
        tree = SumTree(capacity, alpha=0.6, beta=0.4, eps=1e-6, device=self.device, fan_out=fan_out)
        tree.leaves[:capacity].uniform_(0.1, 1.0, generator=self._generator())
        tree.rebuild()
        return tree

    def _updates(self, tree: SumTree, n: int, mark: bool) -> Workload:
        n, generator = min(n, tree.capacity), self._generator()
        indices = [self._distinct(n, tree.capacity, generator) for _ in range(self.rotations)]
        priorities = [self._random(n, generator=generator) for _ in range(self.rotations)]
        touched = torch.cat(indices)
        # A maximum, so that new rows weigh the same whenever they are marked.
        tree.update(indices[0][:1], 2.0)
        calls: list[Call] = [
            functools.partial(tree.mark, index) if mark else functools.partial(tree.update, index, priority)
            for index, priority in zip(indices, priorities, strict=True)
        ]

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

        def result() -> list[Tensor]:
            rng.manual_seed(0)
            return list(tree.draw(n, rng))

        inner = len(sum_tree.level_sizes(tree.capacity, tree.fan_out)) - 1
        n_bytes = n * (tree.fan_out * (4 + 8 * inner) + 8 + 4)
        return Workload(f"draw {n:,}", [functools.partial(tree.draw, n, rng)] * self.rotations, n_bytes, result)

    def _sum_tree(self, job: Job, fan_out: int) -> list[Workload]:
        tree = self._tree(job.capacity, fan_out)
        sizes = sorted({min(self.shapes.batch_sizes), max(self.shapes.batch_sizes)})
        return [*(self._draws(tree, n) for n in sizes), *(self._updates(tree, n, False) for n in sizes)]

    def _sum_tree_update(self, job: Job, fan_out: int) -> list[Workload]:
        tree, n = self._tree(job.capacity, fan_out), job.sizes["n"]
        # New rows are marked, as many as a step writes; batches come back with priorities.
        return [self._updates(tree, n, mark) for mark in (False, True) if (n not in self.shapes.batch_sizes) == mark]

    def _sum_tree_draw(self, job: Job, fan_out: int) -> list[Workload]:
        return [self._draws(self._tree(job.capacity, fan_out), job.sizes["n"])]

    # The trajectory index

    def _index(self, capacity: int, fan_out: int, by_id: bool) -> _Index:
        return _Index(self.shapes, capacity, fan_out, by_id, self.device, self.rotations)

    def _trajectories(self, job: Job, fan_out: int) -> list[Workload]:
        index = self._index(job.capacity, fan_out, False)
        sizes = min(self.shapes.batch_sizes), max(self.shapes.batch_sizes)
        counts = sorted({max(n // self.shapes.slice_len, 1) for n in sizes})
        # Draws first: they need an index that is whole, which updates at other cursors do not leave behind.
        return [*(index.draws(n) for n in counts), index.updates(1)]

    def _trajectories_update(self, job: Job, fan_out: int) -> list[Workload]:
        return [self._index(job.capacity, fan_out, bool(job.sizes["by_id"])).updates(job.sizes["n"])]

    def _trajectories_draw(self, job: Job, fan_out: int) -> list[Workload]:
        return [self._index(job.capacity, fan_out, False).draws(job.sizes["n"])]

    # Losses

    def _tanh_normal_inputs(self, n: int) -> list[tuple[Any, ...]]:
        width, generator = self.shapes.action_width, self._generator()
        return [
            (*(self._random(n, width, generator=generator) + 0.1 for _ in range(3)), None, None)
            for _ in range(self.rotations)
        ]

    def _tanh_normal_sample(self, job: Job, _: int) -> list[Workload]:
        n, width = job.sizes["n"], job.sizes["width"]
        calls: list[Call] = [
            functools.partial(tanh_normal.sample, *inputs, -1.0, 1.0, 1) for inputs in self._tanh_normal_inputs(n)
        ]
        return [Workload(f"tanh-normal {n:,} x {width}", calls, 4 * n * (4 * width + 1), lambda: list(calls[0]()))]

    def _tanh_normal_backward(self, job: Job, _: int) -> list[Workload]:
        width = self.shapes.action_width
        n, generator = max(job.sizes["n"] // width, 1), self._generator()
        grads = self._random(n, width, generator=generator), self._random(n, generator=generator)
        calls: list[Call] = [
            functools.partial(tanh_normal.sample_backward, *inputs, *grads, -1.0, 1.0, 1)
            for inputs in self._tanh_normal_inputs(n)
        ]
        return [
            Workload(f"tanh-normal backward {n:,} x {width}", calls, 4 * n * (6 * width + 1), lambda: list(calls[0]()))
        ]

    def _loss_rows(self, job: Job, _: int) -> list[Workload]:
        n, generator, critics = job.sizes["n"], self._generator(), 2
        one = torch.ones(1, device=self.device)
        gamma = torch.full((1,), 0.99, dtype=torch.float64, device=self.device)
        terminated = self._random(n, generator=generator) < 0.01
        calls: dict[str, list[Call]] = {"target": [], "loss": [], "loss backward": [], "actor loss": []}
        for _i in range(self.rotations):
            q = self._random(critics, n, generator=generator)
            target, weight, log_prob = (self._random(n, generator=generator) for _j in range(3))
            loss = functools.partial(td.td_loss, q, target, weight, None, td.L2, td.MEAN)
            calls["target"].append(
                functools.partial(td.soft_td_target, q, log_prob, one, target, terminated, gamma, None)
            )
            calls["loss"].append(loss)
            backward = functools.partial(td.td_loss_backward, one, q, target, weight, None)
            calls["loss backward"].append(functools.partial(backward, one, td.L2, td.MEAN))
            calls["actor loss"].append(functools.partial(sac.actor_loss, q, log_prob, one, None, None, td.MEAN))
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
            Workload(f"{name} {n:,}", some, 4 * n * words[name], functools.partial(result, some[0]))
            for name, some in calls.items()
        ]


class _Index:
    """A trajectory index over a full ring, in which every environment's trajectories end at other steps."""

    def __init__(
        self, shapes: Shapes, capacity: int, fan_out: int, by_id: bool, device: torch.device, rotations: int
    ) -> None:
        self.steps, self.envs, self.fan_out = shapes.steps(capacity), shapes.envs, fan_out
        self.by_id, self.rotations = by_id, rotations
        # Short trajectories count as well: a small ring may have no others.
        self.rule = trajectories.Rule(shapes.slice_len)
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
        trajectories.update(
            self.ends,
            self.sums,
            ring,
            self.storage.table,
            self.by_id,
            n,
            self.steps,
            self.envs,
            self.fan_out,
            *self.rule,
        )

    def _rebuild(self, ring: Tensor) -> None:
        """Index everything anew, by rule: what is tried out may be for single steps, and slow for all."""
        sizes = {"fan_out": self.fan_out, "n": self.steps, "envs": self.envs, "by_id": int(self.by_id)}
        with config.using(trajectories_update=rule("trajectories_update", sizes, self.steps)):
            self._update(ring, self.steps)

    def updates(self, n: int) -> Workload:
        """Writes of ``n`` steps at cursors all over the ring."""
        n = min(n, self.steps)
        at = [self.steps * i // self.rotations for i in range(self.rotations)]
        calls: list[Call] = [functools.partial(self._update, self._ring(cursor), n) for cursor in at]
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
        # What is timed must find trajectories.
        self._rebuild(ring)
        draw = functools.partial(
            trajectories.draw,
            self.ends,
            self.sums,
            ring,
            rng.state,
            None,
            n,
            self.steps,
            self.envs,
            self.fan_out,
            *self.rule,
        )

        def result() -> list[Tensor]:
            self._rebuild(ring)
            rng.manual_seed(0)
            return list(draw())

        n_bytes = n * (8 * self.fan_out * self.depth + 9 * self.rule.slice_len + 8)
        return Workload(f"draw {n:,} x {self.rule.slice_len}", [draw] * self.rotations, n_bytes, result)
