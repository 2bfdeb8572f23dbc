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
from gpubuf.kernels import categorical, config, norms, rows, sac, tanh_normal, td, trajectories
from gpubuf.tuning.operations import Job, Shapes, steps_of

Call = Callable[[], Any]

TRAJECTORY = 200
"""Steps of the trajectories in an index."""


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

    def workloads(self, job: Job, fan_out: int = 0) -> list[Workload]:
        """The calls that decide about a job, by the mean of the logarithms of their times.

        Args:
            job: the point.
            fan_out: of the tree that it works on.
        """
        ends = sorted({min(self.shapes.batch_sizes), max(self.shapes.batch_sizes)})
        n, capacity = job.sizes.get("n", 0), job.sizes.get("capacity", 0)
        match job.operation:
            case "rows_copy":
                return self._copies(capacity, n)
            case "sum_tree":
                tree = self._tree(capacity, fan_out)
                return [*(self._draws(tree, n) for n in ends), *(self._updates(tree, n) for n in ends)]
            case "sum_tree_update":
                return [self._updates(self._tree(capacity, fan_out), n)]
            case "sum_tree_draw":
                return [self._draws(self._tree(capacity, fan_out), n)]
            case "trajectories":
                index = _Index(self, job.sizes, fan_out)
                # Draws first: they need an index that is whole, which updates at other cursors do not leave behind.
                return [*(index.draws(n) for n in sorted(set(map(self.shapes.slices, ends)))), index.updates(1)]
            case "trajectories_update":
                return [_Index(self, job.sizes, fan_out).updates(n)]
            case "trajectories_draw":
                return [_Index(self, job.sizes, fan_out).draws(n)]
            case "tanh_normal_sample" | "tanh_normal_backward":
                return [self._tanh_normal(n, job.operation == "tanh_normal_backward")]
            case "loss_rows":
                return self._losses(n)
            case "atom_rows":
                return self._atoms(n, job.sizes["atoms"])
            case "norm_rows":
                return self._row_norms(n, job.sizes["width"])
            case "norm_columns":
                return self._batch_norms(n, job.sizes["width"])
        raise ValueError(job.operation)

    def _random(self, *shape: int, generator: torch.Generator) -> Tensor:
        return torch.rand(shape, device=self.device, generator=generator)

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

    def _tree(self, capacity: int, fan_out: int) -> SumTree:
        tree = SumTree(capacity, alpha=0.6, beta=0.4, eps=1e-6, device=self.device, fan_out=fan_out)
        tree.leaves[:capacity].uniform_(0.1, 1.0, generator=self._generator())
        tree.rebuild()
        return tree

    def _updates(self, tree: SumTree, n: int) -> Workload:
        """Priorities of ``n`` rows; marks of new rows where ``n`` is no batch, but as many rows as a step writes."""
        mark, n, generator = n not in self.shapes.batch_sizes, min(n, tree.capacity), self._generator()
        calls: list[Call] = []
        touched = []
        # A maximum, so that new rows weigh the same whenever they are marked.
        tree.update(torch.zeros(1, dtype=torch.int64, device=self.device), 2.0)
        for _ in range(self.rotations):
            # Rows in random order, one from each of n parts: distinct where there are as many.
            part = torch.randperm(n, device=self.device, generator=generator)
            place = part + torch.rand(n, dtype=torch.float64, device=self.device, generator=generator)
            index = (place * tree.capacity / n).long().clamp_(max=tree.capacity - 1)
            priority = () if mark else (self._random(n, generator=generator),)
            calls.append(partial(tree.mark if mark else tree.update, index, *priority))
            touched.append(index)

        def result() -> list[Tensor]:
            for call in calls:
                call()
            return [tree.leaves[torch.cat(touched)], tree.nodes[:, -1].clone()]

        return Workload(f"{'mark' if mark else 'update'} {n:,}", calls, result)

    def _draws(self, tree: SumTree, n: int) -> Workload:
        rng = RandomState(0, device=self.device)
        draw = partial(tree.draw, n, rng)
        return Workload(f"draw {n:,}", [draw] * self.rotations, partial(_seeded, rng, draw))

    # Losses

    def _tanh_normal(self, n: int, backward: bool) -> Workload:
        """``n`` actions, or the gradients of ``n`` numbers of actions."""
        width, generator = self.shapes.action_width, self._generator()
        n = max(n // width, 1) if backward else n
        grads = (self._random(n, width, generator=generator), self._random(n, generator=generator)) if backward else ()
        function = tanh_normal.sample_backward if backward else tanh_normal.sample
        calls: list[Call] = []
        for _ in range(self.rotations):
            inputs = [self._random(n, width, generator=generator) + 0.1 for _ in range(3)]
            calls.append(partial(function, *inputs, None, None, *grads, -1.0, 1.0, 1))
        return Workload(f"tanh-normal {'backward ' if backward else ''}{n:,} x {width}", calls, calls[0])

    def _losses(self, n: int) -> list[Workload]:
        """The fused pieces of a loss over ``n`` rows, with two critics."""
        generator = self._generator()
        one = torch.ones(1, device=self.device)
        gamma = torch.full((1,), 0.99, dtype=torch.float64, device=self.device)
        terminated = self._random(n, generator=generator) < 0.01
        calls: dict[str, list[Call]] = {"target": [], "loss": [], "loss backward": [], "actor loss": []}
        for _ in range(self.rotations):
            q = self._random(2, n, generator=generator)
            target, weight, log_prob = (self._random(n, generator=generator) for _ in range(3))
            calls["target"].append(partial(td.soft_td_target, q, log_prob, one, target, terminated, gamma, None))
            calls["loss"].append(partial(td.td_loss, q, target, weight, None, td.L2, td.MEAN))
            backward = partial(td.td_loss_backward, one, q, target, weight, None, one, td.L2, td.MEAN)
            calls["loss backward"].append(backward)
            calls["actor loss"].append(partial(sac.actor_loss, q, log_prob, one, None, None, td.MEAN))
        return [Workload(f"{name} {n:,}", some, some[0]) for name, some in calls.items()]

    def _atoms(self, n: int, atoms: int) -> list[Workload]:
        """The losses of two categorical critics over ``n`` rows, but for the target: a row of it has a program."""
        generator, one, support = self._generator(), torch.ones(1, device=self.device), (-10.0, 10.0)
        calls: dict[str, list[Call]] = {"loss": [], "loss backward": [], "values": [], "values backward": []}
        for _ in range(self._alive(2 * n * atoms)):
            logits, mass = (self._random(2, n, atoms, generator=generator) for _ in range(2))
            mass, value = mass / mass.sum(-1, keepdim=True), self._random(2, n, generator=generator)
            rest = (*support, categorical.DIVERGENCE, False, td.MEAN)
            calls["loss"].append(partial(categorical.categorical_loss, logits, mass, None, None, *rest))
            backward = (one, logits, mass, None, None, one, False, td.MEAN)
            calls["loss backward"].append(partial(categorical.categorical_loss_backward, *backward))
            calls["values"].append(partial(categorical.expected_value, logits, *support))
            gradient = partial(categorical.expected_value_backward, value, logits, value, *support)
            calls["values backward"].append(gradient)
        return [Workload(f"categorical {name} {n:,} x {atoms}", some, some[0]) for name, some in calls.items()]

    def _row_norms(self, n: int, width: int) -> list[Workload]:
        """Layer norm and SiLU of two nets."""
        generator = self._generator()
        weight, bias = (self._random(2, 1, width, generator=generator) for _ in range(2))
        calls: dict[str, list[Call]] = {"layer norm": [], "layer norm backward": []}
        for _ in range(self._alive(2 * n * width)):
            x, grad = (self._random(2, n, width, generator=generator) for _ in range(2))
            rest = (norms.LAYER, norms.SILU)
            forward = partial(norms.norm_activation, x, weight, bias, 1e-5, *rest)
            calls["layer norm"].append(forward)
            backward = partial(norms.norm_activation_backward, grad, x, weight, bias, forward()[1], *rest)
            calls["layer norm backward"].append(backward)
        return [Workload(f"{name} {n:,} x {width}", some, some[0]) for name, some in calls.items()]

    def _batch_norms(self, n: int, width: int) -> list[Workload]:
        """Batch norm and ReLU of two nets."""
        generator = self._generator()
        weight, bias = (self._random(2, 1, width, generator=generator) for _ in range(2))
        calls: dict[str, list[Call]] = {"moments": [], "batch norm": [], "batch norm backward": []}
        for _ in range(self._alive(2 * n * width)):
            x, grad = (self._random(2, n, width, generator=generator) for _ in range(2))
            calls["moments"].append(partial(norms.batch_moments, x, weight))
            rest = (x, weight, bias, *norms.batch_moments(x, weight), 1e-5, norms.RELU, True)
            calls["batch norm"].append(partial(norms.batch_norm_activation, *rest))
            calls["batch norm backward"].append(partial(norms.batch_norm_activation_backward, grad, *rest))
        return [Workload(f"{name} {n:,} x {width}", some, some[0]) for name, some in calls.items()]

    def _alive(self, numbers: int) -> int:
        """How many inputs of so many float32 numbers may be alive at once: all batches of a graph are."""
        return max(min(self.rotations, 2**31 // (16 * numbers)), 2)


def _tensors(found: Any) -> list[Tensor]:
    return [found] if isinstance(found, Tensor) else [tensor for item in found for tensor in _tensors(item)]


def _seeded(rng: RandomState, draw: Call) -> Any:
    """The same random draw every time."""
    rng.manual_seed(0)
    return draw()


class _Index:
    """A trajectory index over a full ring, in which every environment's trajectories end at other steps."""

    def __init__(self, bench: Bench, sizes: dict[str, int], fan_out: int) -> None:
        device = bench.device
        self.steps, self.envs, self.fan_out = steps_of(sizes), sizes["envs"], fan_out
        self.by_id, self.rotations = bool(sizes.get("by_id")), bench.rotations
        # Short trajectories count as well: a small ring may have no others.
        self.rule = trajectories.Rule(bench.shapes.slice_len)
        row = torch.arange(self.steps * self.envs, device=device)
        # As 37 steps lie between the ends of neighbours, no step ends all trajectories.
        place = row // self.envs + 37 * (row % self.envs)
        signal = place // TRAJECTORY if self.by_id else place % TRAJECTORY == TRAJECTORY - 1
        self.storage = TensorStorage(TensorDict({"signal": signal[:, None]}, [len(row)], device=device), device=device)
        self.ends, self.sums = trajectories.new_index(self.steps, self.envs, fan_out, device)

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
        with config.by_rule():
            self._update(ring, self.steps)

    def updates(self, n: int) -> Workload:
        """Writes of ``n`` steps at cursors all over the ring."""
        n = min(n, self.steps)
        at = [self.steps * i // self.rotations for i in range(self.rotations)]
        calls = [partial(self._update, self._ring(cursor), n) for cursor in at]
        before, after = self._ring(at[-1]), self._ring(at[-1] + n)
        weights = config.index_words(self.steps, self.envs)

        def result() -> list[Tensor]:
            self._rebuild(before)
            self._update(after, n)
            # Weights and the total: the sums between depend on the fan-out.
            return [self.ends.clone(), self.sums[:weights].clone(), self.sums[-1].clone()]

        return Workload(f"write {n:,} x {self.envs:,}", calls, result)

    def draws(self, n: int) -> Workload:
        """Draws of ``n`` slices."""
        rng, ring = RandomState(0, device=self.ends.device), self._ring(0)
        # The timed calls must find trajectories.
        self._rebuild(ring)
        sizes = (n, self.steps, self.envs, self.fan_out, *self.rule)
        draw = partial(trajectories.draw, self.ends, self.sums, ring, rng.state, None, *sizes)

        def result() -> Any:
            self._rebuild(ring)
            return _seeded(rng, draw)

        return Workload(f"draw {n:,} x {self.rule.slice_len}", [draw] * self.rotations, result)
