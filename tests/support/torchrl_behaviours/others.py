"""Writers, transforms, several buffers, several dimensions, and what buffers refuse."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from tensordict import TensorDict, tensorclass
from torch.utils._pytree import tree_map

from tests.support.torchrl_behaviours.asking import Facts, asked, data_of, form


@tensorclass
class Data:
    """Rows as a tensorclass."""

    x: torch.Tensor
    z: torch.Tensor


def ranks(lib: Any) -> Facts:
    """TensorDictMaxValueWriter: which rows stay."""

    def stay(size: int, device: str = "cpu") -> Any:
        buffer = lib.TensorDictReplayBuffer(
            storage=lib.LazyTensorStorage(size, device=device),
            sampler=lib.SamplerWithoutReplacement(),
            batch_size=10,
            writer=lib.TensorDictMaxValueWriter(rank_key="key"),
        )
        found = []
        for low, one_by_one in ((0.0, False), (0.3, False), (0.6, True), (-1.0, False)):
            rows = TensorDict({"key": low + torch.arange(size) / size / 4, "obs": torch.arange(size)}, [size])
            if one_by_one:
                for row in rows:
                    buffer.add(row)
            else:
                buffer.extend(rows)
            drawn = buffer.sample()
            found.append([bool((drawn["key"] >= low).all()), len(drawn["index"].unique()), len(buffer)])
        return found

    def reduced(shape: tuple[int, ...], reduction: str) -> Any:
        writer = lib.TensorDictMaxValueWriter(rank_key="key", reduction=reduction)
        buffer = lib.TensorDictReplayBuffer(
            storage=lib.LazyTensorStorage(1), sampler=lib.SamplerWithoutReplacement(), batch_size=1, writer=writer
        )
        key = torch.rand(4, *shape, generator=torch.Generator().manual_seed(5))
        index = buffer.extend(TensorDict({"key": key, "obs": torch.arange(4)}, [4]))
        return [buffer.sample()["obs"], index.tolist()]

    def dimensions() -> Any:
        storage = lib.LazyTensorStorage(10, ndim=2)
        return len(lib.ReplayBuffer(storage=storage, writer=lib.TensorDictMaxValueWriter()))

    actions: dict[str, Callable[[], Any]] = {f"stay in {size}": lambda s=size: stay(s) for size in (20, 30)}
    actions |= {
        f"{reduction} of {shape}": lambda s=shape, r=reduction: reduced(s, r)
        for shape in ((), (1,), (2, 3))
        for reduction in ("max", "min", "mean", "median", "sum")
    }
    return asked({**actions, "two dimensions": dimensions})


def writers(lib: Any) -> Facts:
    """Places and counts of the rows written."""

    def story(kind: str, generations: bool) -> Any:
        buffer = lib.TensorDictReplayBuffer(
            storage=lib.LazyTensorStorage(8), writer=getattr(lib, kind)(track_generations=generations), batch_size=4
        )
        index = buffer.extend(data_of("tensordict", 6))
        found = [index, buffer.writer._cursor, buffer.write_count]
        index = buffer.extend(data_of("tensordict", 5))
        found += [index, buffer.writer._cursor, buffer.write_count, buffer.writer.tracks_generations]
        found.append("index_generation" in buffer.sample().keys())
        buffer.writer.write_at(torch.tensor([2, 5]), data_of("tensordict", 2))
        found += [buffer[[2, 5]]["a"], buffer.writer._cursor, len(buffer)]
        buffer.empty()
        return [*found, buffer.writer._cursor, buffer.write_count, len(buffer)]

    def moved(kind: str) -> Any:
        buffer = lib.TensorDictReplayBuffer(
            storage=lib.LazyTensorStorage(8), writer=getattr(lib, kind)(track_generations=True), batch_size=4
        )
        index = buffer.extend(data_of("tensordict", 8))
        before = buffer.writer.generations_of(index)
        buffer.extend(data_of("tensordict", 3))
        buffer.writer.write_at(torch.tensor([5]), data_of("tensordict", 1))
        return (buffer.writer.generations_of(index) - before).tolist()

    def immutable(way: str) -> Any:
        storage = lib.TensorStorage(data_of("tensordict", 5))
        buffer = lib.TensorDictReplayBuffer(storage=storage, writer=lib.ImmutableDatasetWriter(), batch_size=3)
        if way == "sample":
            return [len(buffer), len(buffer.sample())]
        if way == "empty":
            return buffer.empty()
        return buffer.extend(data_of("tensordict", 2)) if way == "extend" else buffer.add(data_of("tensordict", 1)[0])

    actions: dict[str, Callable[[], Any]] = {
        f"{kind}, generations: {generations}": lambda k=kind, g=generations: story(k, g)
        for kind in ("RoundRobinWriter", "TensorDictRoundRobinWriter")
        for generations in (False, True)
    }
    actions |= {f"generations of {kind}": lambda k=kind: moved(k) for kind in ("TensorDictRoundRobinWriter",)}
    actions |= {f"immutable: {way}": lambda w=way: immutable(w) for way in ("sample", "extend", "add", "empty")}
    return asked(actions)


def transforms(lib: Any) -> Facts:
    """Functions on batches that are drawn, read or written."""

    def at(way: str) -> Any:
        def doubled(rows: TensorDict) -> TensorDict:
            return rows.set("double", rows["a"] * 2)

        given = {"transform": doubled} if way == "constructor" else {}
        given |= {"transform_factory": lambda: doubled} if way == "factory" else {}
        buffer = lib.ReplayBuffer(storage=lib.LazyTensorStorage(10), batch_size=2, **given)
        if way == "appended":
            buffer.append_transform(doubled)
        if way == "inserted":
            buffer.append_transform(lambda rows: rows.set("a", rows["a"] + 1))
            buffer.insert_transform(0, doubled)
        buffer.extend(data_of("tensordict", 3))
        rows = buffer[:]
        return [rows["a"], rows["double"], "double" in buffer.sample().keys(), "double" in buffer.storage[:].keys()]

    def beyond() -> Any:
        buffer = lib.ReplayBuffer(storage=lib.LazyTensorStorage(10), transform=lambda rows: rows, batch_size=2)
        buffer.insert_transform(10, lambda rows: rows)
        return len(buffer.transform)

    def of_trees(appended: bool) -> Any:
        def zeroed(rows: Any) -> Any:
            return tree_map(lambda value: value * 0, rows)

        buffer = lib.ReplayBuffer(storage=lib.LazyTensorStorage(100), **({} if appended else {"transform": zeroed}))
        if appended:
            buffer.append_transform(zeroed)
        buffer.add({"a": torch.randn(3), "b": {"c": (torch.ones(2), [torch.ones(1)])}, 30: -torch.ones(())})
        drawn = buffer.sample(10)
        return [form(drawn), float(drawn["b"]["c"][0].abs().sum() + drawn[30].abs().sum())]

    def inverse() -> Any:
        buffer = lib.ReplayBuffer(storage=lib.LazyTensorStorage(10), batch_size=4)
        rows = TensorDict({"a": torch.zeros(10)}, [10])

        def more(rows: TensorDict) -> TensorDict:
            rows += 1
            return rows

        buffer.append_transform(more, invert=True)
        buffer.extend(rows)
        return [float(buffer[:]["a"].sum()), float(rows["a"].sum())]

    def nothing_yet() -> Any:
        buffer = lib.TensorDictReplayBuffer(storage=lib.LazyTensorStorage(10), batch_size=4)
        buffer.append_transform(lambda rows: None, invert=True)
        return [len(buffer.extend(data_of("tensordict", 3))), len(buffer)]

    def collated() -> Any:
        buffer = lib.ReplayBuffer(
            storage=lib.ListStorage(10), collate_fn=lambda rows: torch.stack(rows, 0), batch_size=1
        )
        buffer.add(TensorDict({"a": torch.ones(2, 4)}, []))
        return form(buffer.sample())

    ways = ("constructor", "factory", "appended", "inserted")
    return asked(
        {
            **{way: lambda w=way: at(w) for way in ways},
            "inserted beyond": beyond,
            "of trees": lambda: of_trees(False),
            "of trees, appended": lambda: of_trees(True),
            "inverse": inverse,
            "inverse of nothing": nothing_yet,
            "collated": collated,
        }
    )


def dimensions(lib: Any) -> Facts:
    """Rows of every kind in one and two dimensions."""

    def rows(kind: str, ndim: int) -> Any:
        shape = (12,) if ndim == 1 else (4, 3)
        if kind == "tree":
            return {"x": (torch.ones(*shape, 2), torch.ones(*shape, 3)), "y": [{"z": torch.ones(shape)}]}
        if kind == "tensorclass":
            return Data(x=torch.ones(*shape, 2), z=torch.ones((*shape, 1), dtype=torch.bool), batch_size=shape)
        return TensorDict({"x": torch.ones(*shape, 2), "y": {"z": torch.ones(*shape, 3)}}, shape)

    def told(buffer: str, sampler: str | None, kind: str, ndim: int) -> Any:
        options: dict[str, Any] = {"alpha": 0.9, "beta": 1.1} if "Prioritized" in buffer else {}
        if sampler is not None:
            options["sampler"] = getattr(lib, sampler)()
        made = getattr(lib, buffer)(storage=lib.LazyTensorStorage(100, ndim=ndim), batch_size=4, **options)
        texts = [bool(str(made))]
        index = made.extend(rows(kind, ndim))
        drawn = made.sample()
        if isinstance(drawn, TensorDict):
            drawn = drawn.exclude("index_generation")
        return [texts, list(index.shape), len(made), form(made[:]), form(drawn), bool(str(made))]

    actions: dict[str, Callable[[], Any]] = {}
    for kind in ("tensordict", "tensorclass", "tree"):
        buffers: list[tuple[str, str | None]] = [
            ("ReplayBuffer", "RandomSampler"),
            ("ReplayBuffer", "SamplerWithoutReplacement"),
            ("PrioritizedReplayBuffer", None),
        ]
        if kind == "tensordict":
            buffers += [("TensorDictReplayBuffer", "RandomSampler"), ("TensorDictPrioritizedReplayBuffer", None)]
        for buffer, sampler in buffers:
            for ndim in (1, 2):
                actions[f"{buffer} {sampler} {kind} {ndim}"] = lambda a=(buffer, sampler, kind, ndim): told(*a)
    return asked(actions)


def default_parts(lib: Any) -> Facts:
    """Buffers that make their own storage."""

    def story(kind: str) -> Any:
        options = {"alpha": 0.8, "beta": 0.9} if "Prioritized" in kind else {}
        buffer = getattr(lib, kind)(batch_size=3, **options)
        given = data_of("tensordict", 5) if kind.startswith("TensorDict") else [torch.tensor([i]) for i in range(5)]
        index = buffer.extend(given)
        drawn = buffer.sample(1)
        value = drawn["a"] if isinstance(drawn, TensorDict) else drawn
        found = [index, len(buffer), buffer.writer._cursor, len(buffer[:4]), len(buffer[4:]), value.shape]
        buffer.empty()
        return [*found, len(buffer)]

    def emptied(kind: str) -> Any:
        options = {"alpha": 0.8, "beta": 0.9} if "Prioritized" in kind else {}
        buffer = getattr(lib, kind)(batch_size=3, **options)
        buffer.add(data_of("tensordict", 1)[0])
        buffer.empty()
        return buffer.sample()

    def refused(kind: str, rows: Any, **options: Any) -> Any:
        return len(getattr(lib, kind)(**options).extend(rows))

    kinds = ("ReplayBuffer", "PrioritizedReplayBuffer", "TensorDictReplayBuffer", "TensorDictPrioritizedReplayBuffer")
    actions: dict[str, Callable[[], Any]] = {kind: lambda k=kind: story(k) for kind in kinds}
    for kind in kinds:
        actions[f"empty {kind}"] = lambda k=kind: emptied(k)
    parts = {"storage": "no storage", "sampler": "no sampler", "writer": "no writer"}
    actions |= {f"wrong {name}": lambda n=name, v=value: lib.ReplayBuffer(**{n: v}) for name, value in parts.items()}
    actions |= {
        "tensors for TensorDicts": lambda: refused("TensorDictReplayBuffer", torch.zeros(3)),
        "update_priority": lambda: lib.ReplayBuffer().extend(torch.zeros(3), update_priority=True),
        "prefetch without a size": lambda: lib.ReplayBuffer(prefetch=2),
        "transform twice": lambda: lib.ReplayBuffer(transform=lambda x: x, transform_factory=lambda: lambda x: x),
        "dim_extend": lambda: lib.ReplayBuffer(dim_extend=-1),
        "beyond the rows": lambda: _five(lib)[7],
    }
    return asked(actions)


def _five(lib: Any) -> Any:
    buffer = lib.ReplayBuffer(storage=lib.LazyTensorStorage(10))
    buffer.extend(torch.arange(5))
    return buffer


def ensembles(lib: Any) -> Facts:
    """Several buffers as one."""

    def made(**options: Any) -> Any:
        buffers = []
        for number in range(3):
            buffer = lib.ReplayBuffer(storage=lib.LazyTensorStorage(100))
            buffer.extend(TensorDict({"root": torch.full((90,), number)}, [90]))
            buffers.append(buffer)
        return lib.ReplayBufferEnsemble(*buffers, **options), buffers

    def drawn(within: set[int], **options: Any) -> Any:
        batches = [made(batch_size=48, **options)[0].sample() for _ in range(8)]
        seen = {number for batch in batches for number in batch["root"].unique().tolist()}
        return [list(batches[0].batch_size), seen <= within]

    def parts() -> Any:
        ensemble, buffers = made(batch_size=48)
        return [ensemble[0] is buffers[0], ensemble[:] is ensemble, len(ensemble)]

    def iterated() -> Any:
        return len(next(iter(made(batch_size=48)[0])).view(-1))

    every = {0, 1, 2}
    return asked(
        {
            "by shares": lambda: drawn({1, 2}, p=[0.0, 0.9, 0.1]),
            "equal": lambda: drawn(every),
            "of all": lambda: drawn(every, sample_from_all=True),
            "from three": lambda: drawn(every, num_buffer_sampled=3),
            "from more": lambda: drawn(every, num_buffer_sampled=16),
            "parts": parts,
            "iterated": iterated,
        }
    )


def facts(lib: Any) -> dict[str, Facts]:
    """All of them."""
    return {
        "ranks": ranks(lib),
        "writers": writers(lib),
        "transforms": transforms(lib),
        "dimensions": dimensions(lib),
        "default parts": default_parts(lib),
        "ensembles": ensembles(lib),
    }
