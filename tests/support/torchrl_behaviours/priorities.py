"""Prioritized samplers in every buffer, and buffers with a generator."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from typing import Any

import torch
from tensordict import TensorDict

from tests.support.torchrl_behaviours.asking import Facts, asked, leaves

LENGTHS = (30, 25, 15, 30)


def trajectories(key: Any = "episode", done_key: Any = ("next", "done"), lengths: tuple[int, ...] = LENGTHS) -> Any:
    """Rows that know their trajectory, counted from 1, and their step in it."""
    done = torch.cat([torch.arange(n) == n - 1 for n in lengths]).unsqueeze(-1)
    steps = torch.cat([torch.arange(n) for n in lengths])
    number = torch.arange(1, len(lengths) + 1).repeat_interleave(torch.tensor(lengths))
    rows = TensorDict({"count": torch.arange(len(steps)), "steps": steps, "which": number}, [len(steps)])
    if key is not None:
        rows[key] = number
    if done_key is not None:
        rows[done_key] = done
    return rows


def priorities(lib: Any) -> Facts:
    """Prioritized samplers in every buffer, by the priorities that rows then have."""

    def updated(kind: str, ndim: int) -> Any:
        shape = (10,) if ndim == 1 else (2, 5)
        rows = TensorDict({"a": torch.arange(5 * ndim).expand(shape) if ndim == 2 else torch.arange(10)}, shape)
        rows["p"] = torch.ones(shape) / 2
        storage = lib.LazyTensorStorage(100, ndim=ndim)
        if kind == "TensorDictPrioritizedReplayBuffer":
            buffer = lib.TensorDictPrioritizedReplayBuffer(
                alpha=1.0, beta=1.0, storage=storage, batch_size=4, priority_key="p"
            )
        else:
            sampler = lib.PrioritizedSampler(max_capacity=100, alpha=1.0, beta=1.0)
            buffer = getattr(lib, kind)(sampler=sampler, storage=storage, batch_size=4)
        index = buffer.extend(rows)
        found = [index.shape, leaves(buffer.sampler, 10)]
        buffer.update_priority(index, 2)
        found.append(leaves(buffer.sampler, 10))
        drawn, info = buffer.sample(return_info=True)
        buffer.update_priority(info["index"], 3)
        found.append(sorted(set(leaves(buffer.sampler, 10))))
        if kind != "ReplayBuffer":
            drawn = buffer.sample()
            drawn.set(buffer.priority_key, torch.full((4,), 1e6))
            buffer.update_tensordict_priority(drawn)
            found.append(max(leaves(buffer.sampler, 10)))
            again = buffer.sample()
            found.append(set(again["a"].tolist()) <= set(drawn["a"].tolist()))
        return found

    def largest(within: bool) -> Any:
        sampler = lib.PrioritizedSampler(max_capacity=11, alpha=1.0, beta=1.0, max_priority_within_buffer=within)
        buffer = lib.ReplayBuffer(storage=lib.LazyTensorStorage(11), sampler=sampler)
        found = []
        for number in range(20):
            index = buffer.add(torch.tensor(number))
            found.append([int(index), round(leaves(sampler, 11)[int(index)], 4)])
            buffer.update_priority(index, 21 - number)
        found.append(round(float(sampler.default_priority), 4))
        index = buffer.extend(torch.arange(10))
        buffer.update_priority(index, 12)
        return [*found, round(float(sampler.default_priority), 4), leaves(sampler, 11)]

    def of_slices(strict: bool, ndim: int, again: bool) -> Any:
        rows = trajectories(None, "done", (5, 10, 15, 20, 25))
        rows["priority"] = torch.where(rows["which"] == 1, 10, 1)
        rows = rows if ndim == 1 else torch.stack([rows, rows])
        buffer = lib.TensorDictReplayBuffer(
            storage=lib.LazyTensorStorage(rows.numel(), ndim=ndim),
            sampler=lib.PrioritizedSliceSampler(
                max_capacity=rows.numel(),
                alpha=1.0,
                beta=1.0,
                end_key="done",
                slice_len=10,
                strict_length=strict,
                cache_values=True,
            ),
            batch_size=50,
        )
        if again:
            buffer.extend(rows[..., : rows.shape[-1] // 3])
        index = buffer.extend(rows)
        buffer.update_priority(index, rows["priority"])
        sizes, seen = set(), set()
        for _ in range(40):
            batch = buffer.sample()
            sizes.add(len(batch) < 50)
            seen |= set(batch["which"].tolist())
        return [index.shape, sorted(sizes), sorted(seen)]

    def episodes() -> Any:
        sampler = lib.PrioritizedSliceSampler(max_capacity=100, alpha=0.7, beta=0.9, num_slices=10)
        buffer = lib.TensorDictReplayBuffer(storage=lib.LazyTensorStorage(100), sampler=sampler, batch_size=20)
        buffer.extend(trajectories())
        before = torch.cat([buffer.sample()["which"] for _ in range(20)]).unique()
        weights = torch.cat([torch.full((n,), float(number % 2)) for number, n in enumerate(LENGTHS, 1)])
        sampler.update_priority(torch.arange(100), weights)
        after = torch.cat([buffer.sample()["which"] for _ in range(20)]).unique()
        return [before, after, sorted({str(k) for k in buffer.sample(return_info=True)[1]} - {"index_generation"})]

    def shared() -> Any:
        storage, writer = lib.LazyTensorStorage(100), lib.RoundRobinWriter()
        uniform = lib.ReplayBuffer(storage=storage, writer=writer, sampler=lib.RandomSampler(), batch_size=10)
        sampler = lib.PrioritizedSampler(max_capacity=100, alpha=0.7, beta=1.1)
        other = lib.ReplayBuffer(storage=storage, writer=writer, sampler=sampler, batch_size=10)
        uniform.extend(TensorDict({"a": torch.arange(50)}, [50]))
        uniform.sample()
        other.sample()
        return [len(uniform), len(storage), len(other), leaves(sampler, 60)]

    def before_the_storage() -> Any:
        sampler = lib.PrioritizedSampler(max_capacity=100, alpha=1.0, beta=0.9)
        sampler.update_priority(torch.arange(5), torch.arange(1.0, 6.0))
        return leaves(sampler, 5)

    def bad(**options: Any) -> Any:
        return str(lib.PrioritizedSampler(10, **{"alpha": 0.7, "beta": 0.9, **options}).alpha)

    def scheduled() -> Any:
        buffer = lib.TensorDictPrioritizedReplayBuffer(
            alpha=torch.tensor(1.0), beta=torch.tensor(0.1), storage=lib.LazyTensorStorage(20)
        )
        buffer.extend(TensorDict({"a": torch.zeros(20)}, [20]))
        sampler = buffer.sampler
        for attribute in ("alpha", "beta"):
            setattr(sampler, attribute, getattr(sampler, attribute) * 0.5)
        buffer.sample(4)
        return [round(float(sampler.alpha), 5), round(float(sampler.beta), 5)]

    def reduced(reduction: str) -> Any:
        buffer = lib.TensorDictReplayBuffer(
            sampler=lib.PrioritizedSampler(5, alpha=1.0, beta=0.9, reduction=reduction), batch_size=3
        )
        buffer.extend(TensorDict({"obs": torch.randn(3, 4, 5)}, [3, 4]))
        drawn = buffer.sample()
        drawn.set("td_error", torch.tensor([4.0, 1.0, 3.0, 2.0]).expand(3, 4))
        buffer.update_tensordict_priority(drawn)
        again = buffer.sample()
        weighted = next(key for key in again.keys() if key.endswith("weight"))
        return [max(leaves(buffer.sampler, 3)), again.batch_size, again[weighted].shape]

    actions: dict[str, Callable[[], Any]] = {
        f"{kind}, ndim {ndim}": lambda k=kind, d=ndim: updated(k, d)
        for kind in ("ReplayBuffer", "TensorDictReplayBuffer", "TensorDictPrioritizedReplayBuffer")
        for ndim in (1, 2)
    }
    actions |= {f"largest, within the buffer: {within}": lambda w=within: largest(w) for within in (True, False)}
    actions |= {
        f"slices, strict: {strict}, ndim {ndim}, again: {again}": lambda s=strict, d=ndim, a=again: of_slices(s, d, a)
        for strict in (True, False)
        for ndim in (1, 2)
        for again in (True, False)
    }
    actions |= {f"reduction {name}": lambda n=name: reduced(n) for name in ("min", "max", "mean", "median")}
    actions |= {
        f"bad {name} {value}": lambda n=name, v=value: bad(**{n: v})
        for name, value in (("alpha", -1.0), ("beta", -1.0), ("eps", -1.0), ("reduction", "sums"))
    }
    return asked(
        {
            **actions,
            "episodes": episodes,
            "one storage": shared,
            "before the storage": before_the_storage,
            "scheduled": scheduled,
        }
    )


def seeds(lib: Any) -> Facts:
    """A buffer with a generator draws the same after the same state."""

    def again(sampler: str, way: str) -> Any:
        made = {
            "RandomSampler": lambda: lib.RandomSampler(),
            "PrioritizedSampler": lambda: lib.PrioritizedSampler(100, 1.0, 1.0),
            "SliceSampler": lambda: lib.SliceSampler(num_slices=4),
        }[sampler]()
        buffer = lib.ReplayBuffer(
            sampler=made, storage=lib.LazyTensorStorage(100), generator=torch.Generator().manual_seed(1)
        )
        buffer.extend(trajectories())
        with tempfile.TemporaryDirectory() as path:
            saved = buffer.dumps(path) if way == "folder" else buffer.state_dict()
            first = buffer.sample(32)["count"].tolist()
            if way == "folder":
                buffer.loads(path)
            else:
                buffer.load_state_dict(saved)
        second, third = (buffer.sample(32)["count"].tolist() for _ in range(2))
        return [first == second, first == third]

    return asked(
        {
            f"{sampler} by {way}": lambda s=sampler, w=way: again(s, w)
            for sampler in ("RandomSampler", "PrioritizedSampler", "SliceSampler")
            for way in ("state", "folder")
        }
    )
