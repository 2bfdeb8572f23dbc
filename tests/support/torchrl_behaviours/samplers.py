"""Samplers on their own, which a storage is given to, and in buffers: epochs and slices."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from typing import Any

import torch
from tensordict import TensorDict

from tests.support.torchrl_behaviours.asking import Facts, asked
from tests.support.torchrl_behaviours.priorities import priorities, seeds, trajectories


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


def facts(lib: Any) -> dict[str, Facts]:
    """All of them."""
    return {"epochs": epochs(lib), "slices": slices(lib), "priorities": priorities(lib), "seeds": seeds(lib)}
