"""Samplers on their own, which a storage is given to, and in buffers: epochs, slices, priorities."""

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


def epochs(lib: Any) -> Facts:
    """SamplerWithoutReplacement: the sizes of batches, and when an epoch ends."""

    def alone(size: int, samples: int, drop_last: bool) -> Any:
        storage = lib.ListStorage(size)
        storage.set(range(size), range(size))
        sampler = lib.SamplerWithoutReplacement(drop_last=drop_last)
        found = []
        for _ in range(6):
            index, _ = sampler.sample(storage, samples)
            found.append([index.numel(), index.unique().numel(), sampler.ran_out])
        return [len(storage), found]

    def iterated(size: int, drop_last: bool, prefetch: int, storage: str) -> Any:
        buffer = lib.ReplayBuffer(
            storage=getattr(lib, storage)(size),
            sampler=lib.SamplerWithoutReplacement(drop_last=drop_last),
            batch_size=3,
            prefetch=prefetch,
        )
        buffer.extend([torch.tensor([i]) for i in range(size)])
        rounds = [[batch.flatten().tolist() for batch in buffer] for _ in range(3)]
        # Threads of TorchRL's finish in any order.
        return [sorted(map(len, batches)) for batches in rounds], [
            len({i for batch in batches for i in batch}) for batches in rounds
        ]

    def no_batch_size(drop_last: bool) -> Any:
        sampler = lib.SamplerWithoutReplacement(drop_last=drop_last)
        return len(lib.ReplayBuffer(storage=lib.ListStorage(10), sampler=sampler))

    def without_size(action: str) -> Any:
        buffer = lib.ReplayBuffer(storage=lib.ListStorage(10), sampler=lib.SamplerWithoutReplacement())
        buffer.extend(torch.zeros(10))
        buffer.sample(3)
        return list(buffer) if action == "iterate" else buffer.sample()

    def in_order() -> Any:
        buffer = lib.ReplayBuffer(
            storage=lib.LazyTensorStorage(10), sampler=lib.SamplerWithoutReplacement(shuffle=False), batch_size=4
        )
        buffer.extend(torch.arange(10))
        return [batch.tolist() for batch in buffer]

    def restored(by_folder: bool) -> Any:
        buffers = [
            lib.TensorDictReplayBuffer(
                storage=lib.LazyTensorStorage(100), sampler=lib.SamplerWithoutReplacement(drop_last=True), batch_size=8
            )
            for _ in range(2)
        ]
        buffers[0].extend(TensorDict({"a": torch.arange(27)}, [27]))
        buffers[0].sample()
        with tempfile.TemporaryDirectory() as path:
            if by_folder:
                buffers[0].dumps(path)
                buffers[1].loads(path)
            else:
                buffers[1].load_state_dict(buffers[0].state_dict())
        drawn = [buffer.sample()["a"].tolist() for buffer in buffers]
        return [drawn[0] == drawn[1], len(drawn[0])]

    def rest_of_the_epoch() -> Any:
        buffer = lib.TensorDictReplayBuffer(storage=lib.LazyTensorStorage(100), sampler=lib.SamplerWithoutReplacement())
        for _ in range(3):
            buffer.extend(TensorDict({"a": torch.ones(1)}, [1]))
        drawn = [float(buffer.sample(1)["a"]) for _ in range(3)]
        buffer.extend(TensorDict({"a": torch.zeros(1)}, [1]))
        return [drawn, len(buffer)]

    actions: dict[str, Callable[[], Any]] = {
        f"{size} in {samples}, drop_last: {drop}": lambda s=size, n=samples, d=drop: alone(s, n, d)
        for size in (10, 15, 20)
        for samples in (5, 9, 11, 16)
        for drop in (True, False)
    }
    actions |= {
        f"iterated {size}, drop_last: {drop}, ahead: {ahead}, {storage}": lambda s=size, d=drop, p=ahead, k=storage: (
            iterated(s, d, p, k)
        )
        for size in (10, 12)
        for drop in (True, False)
        for ahead in (0, 3)
        for storage in ("ListStorage", "LazyTensorStorage")
    }
    return asked(
        {
            **actions,
            "drop_last needs a size": lambda: no_batch_size(True),
            "none needed": lambda: no_batch_size(False),
            "iterate without a size": lambda: without_size("iterate"),
            "sample without a size": lambda: without_size(""),
            "in order": in_order,
            "by state": lambda: restored(False),
            "by folder": lambda: restored(True),
            "as it grows": rest_of_the_epoch,
        }
    )


def slices(lib: Any) -> Facts:
    """Samplers of slices, which are given a storage."""

    def drawn(
        kind: str,
        size: int,
        key: Any,
        done_key: Any,
        with_key: bool,
        storage: str = "LazyTensorStorage",
        **options: Any,
    ) -> Any:
        kept = lib.LazyTensorStorage(100)
        rows = trajectories(key if with_key else None, done_key)
        kept.set(range(100), rows)
        if kind == "PrioritizedSliceSampler":
            options |= {"max_capacity": 100, "alpha": 0.7, "beta": 0.9}
        truncated = "truncated" if isinstance(done_key, str) else (*done_key[:-1], "truncated")
        sampler = getattr(lib, kind)(traj_key=key, end_key=done_key, truncated_key=truncated, **options)
        if kind == "PrioritizedSliceSampler":
            sampler.extend(torch.arange(100))
            sampler.update_priority(torch.arange(100), 1, storage=kept)
        seen: set[int] = set()
        found: dict[str, Any] = {"steps": True, "whole": True, "ends": True, "sizes": set()}
        for _ in range(40):
            index, info = sampler.sample(kept, batch_size=size)
            batch = kept[index]
            found["sizes"].add(len(batch))
            seen |= set(batch["which"].tolist())
            ends = info[truncated].view(-1)
            starts = torch.cat([torch.tensor([True]), ends[:-1]])
            inside = ~starts
            found["steps"] &= bool((batch["steps"].diff() == 1)[inside[1:]].all())
            found["whole"] &= bool((batch["which"].diff() == 0)[inside[1:]].all())
            found["ends"] &= bool(info[done_key].view(-1)[ends].all())
        keys = sorted(str(key) for key in info)
        return [
            found["steps"],
            found["whole"],
            found["ends"],
            sorted(found["sizes"]),
            sorted(seen),
            keys,
            [list(info[truncated].shape[1:]), type(index).__name__],
        ]

    def one_epoch(size: int, n: int) -> Any:
        kept = lib.LazyTensorStorage(100)
        kept.set(range(100), trajectories("episode", "done", (5,) * 20))
        sampler = lib.SliceSamplerWithoutReplacement(num_slices=n, traj_key="episode", end_key="done")
        found: list[int] = []
        for _ in range(20 // n):
            index, info = sampler.sample(kept, batch_size=size)
            found += kept[index]["which"].view(n, -1)[:, 0].tolist()
        return [sorted(found) == list(range(1, 21)), sorted(map(str, info))]

    def lengths(strict: bool) -> Any:
        buffer = lib.ReplayBuffer(
            storage=lib.LazyTensorStorage(12),
            sampler=lib.SliceSampler(num_slices=2, strict_length=strict, traj_key="which"),
            batch_size=8,
        )
        buffer.extend(trajectories(None, None, (2, 10)))
        sizes, seen = set(), set()
        for _ in range(60):
            batch = buffer.sample()
            sizes.add(len(batch))
            seen |= set(batch["which"].tolist())
        return [sorted(sizes), sorted(seen)]

    def span(given: Any, ndim: int) -> Any:
        rows = trajectories(None, None, (10,) * 12)
        buffer = lib.TensorDictReplayBuffer(
            sampler=lib.SliceSampler(num_slices=10, traj_key="which", span=given),
            batch_size=50,
            storage=lib.LazyTensorStorage(120, ndim=ndim),
        )
        buffer.extend(rows if ndim == 1 else rows.reshape(4, 30))
        shortest, first, last = 99, set(), set()
        for _ in range(80):
            batch = buffer.sample()
            stops = batch["next", "truncated"].view(-1).nonzero().flatten().tolist()
            begin = 0
            for stop in stops:
                part = batch[begin : stop + 1]
                shortest = min(shortest, len(part))
                if len(part) < 5:
                    (first if int(part["steps"][0]) == 0 else last).add(len(part))
                begin = stop + 1
        return [shortest, sorted(first), sorted(last)]

    def at_capacity(kind: str) -> Any:
        trajectory = torch.stack([torch.arange(4).repeat_interleave(3), torch.arange(2).repeat_interleave(6)])
        rows = TensorDict({"trajectory": trajectory, "steps": torch.arange(12).expand(2, 12)}, [2, 12])
        buffer = lib.ReplayBuffer(
            sampler=getattr(lib, kind)(traj_key="trajectory", num_slices=2),
            storage=lib.LazyTensorStorage(20, ndim=2),
            batch_size=6,
        )
        buffer.extend(rows)
        seen: set[int] = set()
        for number, batch in enumerate(buffer):
            seen |= set(batch["steps"].tolist())
            if number == 60:
                break
        return [len(buffer), 9 in seen]

    def refused(change: str) -> Any:
        rows = trajectories(None)
        storage = lib.LazyTensorStorage(100)
        if change == "two flags a row":
            rows["next", "done"] = rows["next", "done"].unsqueeze(1).expand(100, 5, 1)
        elif change == "objects":
            storage = lib.ListStorage(100)
        elif change == "no flag":
            del rows["next", "done"]
        storage.set(range(100), rows)
        size = 101 if change == "no divisor" else 100
        index, _ = lib.SliceSampler(num_slices=20).sample(storage, batch_size=size)
        return len(index)

    def constructed(**options: Any) -> Any:
        return str(type(lib.SliceSampler(**options)).__name__)

    actions: dict[str, Callable[[], Any]] = {}
    for key, done_key in (("episode", "done"), (("some", "episode"), ("some", "done")), ("episode", ("next", "done"))):
        for with_key in (True, False):
            for kind, size, options in (
                ("SliceSampler", 100, {"num_slices": 20}),
                ("SliceSampler", 120, {"slice_len": 4}),
                ("SliceSampler", 101, {"slice_len": 101, "strict_length": False}),
                ("PrioritizedSliceSampler", 100, {"num_slices": 20}),
            ):
                if with_key or kind == "SliceSampler":
                    name = f"{kind} {size} {options} {key} {done_key} with the key: {with_key}"
                    actions[name] = lambda a=(kind, size, key, done_key, with_key), o=options: drawn(*a, **o)
    actions |= {f"epoch of {n}": lambda s=size, n=n: one_epoch(s, n) for size, n in ((20, 4), (4, 2))}
    actions |= {f"strict_length: {strict}": lambda s=strict: lengths(s) for strict in (True, False)}
    actions |= {
        f"span {given}, ndim {ndim}": lambda g=given, d=ndim: span(g, d)
        for given in ((2, 2), [4, 4], 3, (False, True), True)
        for ndim in (1, 2)
    }
    actions |= {
        f"full, {kind}": lambda k=kind: at_capacity(k) for kind in ("SliceSampler", "SliceSamplerWithoutReplacement")
    }
    actions |= {
        f"refused: {change}": lambda c=change: refused(c)
        for change in ("two flags a row", "objects", "no flag", "no divisor")
    }
    actions |= {
        "neither": constructed,
        "both": lambda: constructed(num_slices=2, slice_len=2),
        "two keys": lambda: constructed(num_slices=2, end_key="done", end_keys=["done"]),
        "without replacement": lambda: constructed(num_slices=2, replacement=False),
    }
    return asked(actions)


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


def facts(lib: Any) -> dict[str, Facts]:
    """All of them."""
    return {"epochs": epochs(lib), "slices": slices(lib), "priorities": priorities(lib), "seeds": seeds(lib)}
