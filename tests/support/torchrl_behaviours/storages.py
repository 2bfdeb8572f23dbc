"""Storages on their own and under a buffer: rows in and out, in place, from states and folders."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from tensordict import LazyStackedTensorDict, TensorDict, tensorclass
from torch.utils._pytree import tree_map

from tests.support.torchrl_behaviours.asking import Facts, asked, data_of, form, numbers

LAZY = ("LazyTensorStorage", "LazyMemmapStorage")


@tensorclass
class Row:
    """A tensorclass with one in it."""

    a: torch.Tensor
    nested: TensorDict


def kinds(*shape: int) -> dict[str, Any]:
    """A batch of every kind."""
    found = {kind: data_of(kind, *shape) for kind in ("tensor", "tensordict", "tree")}
    nested = TensorDict({"b": torch.ones(*shape, 2)}, shape)
    found["tensorclass"] = Row(a=torch.arange(torch.Size(shape).numel()).view(*shape), nested=nested, batch_size=shape)
    return found


def zeros(rows: Any) -> Any:
    return tree_map(torch.zeros_like, rows) if isinstance(rows, dict) else torch.zeros_like(rows)


def given(lib: Any) -> Facts:
    """A TensorStorage of tensors that are there."""
    actions: dict[str, Callable[[], Any]] = {
        "None": lambda: lib.TensorStorage(None),
        "another max_size": lambda: lib.TensorStorage(torch.zeros(3), max_size=4),
        "memmap on a GPU": lambda: lib.LazyMemmapStorage(3, device="cuda"),
    }
    for kind, rows in kinds(10, 11).items():

        def overwritten(rows: Any = rows) -> Any:
            storage = lib.TensorStorage(rows)
            storage.set(range(10), zeros(rows))
            return [len(storage), form(storage.get(range(10))), sum(numbers(storage.get(range(10))))]

        def state(rows: Any = rows) -> Any:
            other = lib.TensorStorage(zeros(rows))
            other.load_state_dict(lib.TensorStorage(rows).state_dict())
            return [numbers(other.get(range(10))) == numbers(rows), type(other.get(range(10))) is type(rows)]

        actions |= {f"overwritten {kind}": overwritten, f"state of {kind}": state}
    return asked(actions)


def lazy(lib: Any, kind: str) -> Facts:
    """A storage that is made by its first rows."""
    storage = getattr(lib, kind)

    def listed(rows: Any) -> Any:
        made = storage(max_size=1000)
        made.set(list(range(3)), rows)
        return [made._storage.shape, len(made), form(made.get([1, 2])), form(made.get(1)), form(made[:])]

    def trees() -> Any:
        rows = [(torch.full((3, 4), i), {"a": torch.full((3, 4), i), "b": torch.full((3, 4), i)}) for i in range(10)]
        buffer = lib.ReplayBuffer(storage=storage(1000), sampler=lib.SamplerWithoutReplacement())
        buffer.extend(rows)
        drawn = buffer.sample(10)
        return [len(buffer), len(buffer.storage), form(drawn), drawn[1]["b"].unique()]

    def different() -> Any:
        buffer = lib.ReplayBuffer(storage=storage(1000))
        return buffer.extend([torch.zeros(4), torch.zeros(1)])

    def ragged() -> Any:
        buffer = lib.ReplayBuffer(storage=storage(6), batch_size=2)
        parts = (TensorDict({"a": torch.rand(5, length, 8)}, [5]) for length in (4, 3))
        buffer.extend(LazyStackedTensorDict(*parts, stack_dim=1))
        return [len(buffer), len(buffer.sample(3))]

    def stacked() -> Any:
        buffer = lib.ReplayBuffer(storage=storage(6), batch_size=2)
        parts = [TensorDict({"a": torch.full((5, 8), i)}, [5]) for i in range(2)]
        buffer.extend(LazyStackedTensorDict(*parts, stack_dim=1))
        return [len(buffer), form(buffer.sample(3)), form(buffer[:])]

    def listed_batches() -> Any:
        buffer = lib.ReplayBuffer(storage=storage(100))
        buffer.extend([TensorDict({"a": torch.randn(2, 3)}, [2])])
        return [len(buffer), buffer[:].shape]

    return asked(
        {
            "list of positions": lambda: listed(data_of("tensordict", 3, 4)),
            "list of positions, tensorclass": lambda: listed(kinds(3, 4)["tensorclass"]),
            "trees": trees,
            "different shapes": different,
            "ragged stack": ragged,
            "lazy stack": stacked,
            "list of batches": listed_batches,
        }
    )


def in_place(lib: Any, kind: str) -> Facts:
    """Rows of a buffer that are overwritten."""
    listed = kind == "ListStorage"
    collate = {"collate_fn": torch.stack} if listed else {}

    def rows(n: int, value: int | None = None) -> TensorDict:
        values = torch.arange(n) if value is None else torch.full((n,), value)
        return TensorDict({"a": values, ("b", "c"): values}, [n])

    def made(capacity: int = 102) -> Any:
        buffer = lib.ReplayBuffer(storage=getattr(lib, kind)(capacity), **collate)
        buffer.extend(rows(100))
        return buffer

    def overwrite(index: Any, n: int) -> Any:
        buffer = made()
        buffer[index] = rows(n, 0)
        return [int(buffer[index]["b", "c"].sum()), len(buffer), buffer.writer._cursor, int(buffer[:]["a"].sum())]

    def transformed() -> Any:
        buffer = lib.ReplayBuffer(storage=getattr(lib, kind)(102), **collate)
        buffer.append_transform(lambda x: x + 1, invert=True)
        buffer.append_transform(lambda x: x + 1)
        buffer.extend(rows(100))
        before = buffer[3:5]["a"]
        buffer[3:4] = rows(1, 0)
        buffer[torch.arange(30, 40)] = rows(10, 0)
        return [before, buffer[3:5]["a"], buffer[30:40]["b", "c"], len(buffer)]

    def new_key() -> Any:
        buffer = made()
        buffer[3:4] = rows(1, 0).set("d", torch.ones(1))
        return ["d" in buffer[3].keys(), "d" in buffer[3:4].keys()]

    return asked(
        {
            "slice of one": lambda: overwrite(slice(3, 4), 1),
            "slice": lambda: overwrite(slice(10, 20), 10),
            "tensor": lambda: overwrite(torch.arange(30, 40), 10),
            "list": lambda: overwrite([4, 8], 2),
            "transformed": transformed,
            "new key": new_key,
        }
    )


def several_dimensions(lib: Any, kind: str) -> Facts:
    """``[E, T]`` rows: reading and overwriting by environment and time."""

    def made() -> Any:
        buffer = lib.ReplayBuffer(storage=getattr(lib, kind)(102, ndim=2))
        values = torch.arange(50).expand(2, 50)
        buffer.extend(TensorDict({"a": values, ("b", "c"): values}, [2, 50]))
        return buffer

    def zeros(n: int) -> TensorDict:
        return TensorDict({"a": torch.zeros(n, dtype=torch.int64), ("b", "c"): torch.zeros(n, dtype=torch.int64)}, [n])

    def overwrite(index: Any, n: int) -> Any:
        buffer = made()
        buffer[index] = zeros(n)
        rows = buffer[:]["a"]
        return [rows.shape, rows.sum(1), len(buffer), buffer.writer._cursor]

    return asked(
        {
            "one environment": lambda: overwrite((0, slice(3, 4)), 1),
            "all environments": lambda: overwrite((slice(None), slice(10, 20)), 10),
            "all": lambda: [form(made()[:]), len(made())],
            "steps of one environment": lambda: form(made()[0, 3:5]),
            "one step of all": lambda: form(made()[:, 2]),
            "size": lambda: made().storage.max_size,
            "by key": lambda: [made()["a"].shape, made()["b", "c"].shape],
        }
    )


def states(lib: Any) -> Facts:
    """Buffers from the states and folders of others, and storages from folders."""
    row = TensorDict({"observation": torch.ones(1, 4), "next": {"observation": torch.ones(1, 4)}}, [1])

    def state(given: str, taken: str, begun: bool) -> Any:
        buffer = lib.TensorDictReplayBuffer(storage=getattr(lib, given)(100), prefetch=3, batch_size=3)
        for _ in range(3):
            buffer.extend(row)
        saved = buffer.state_dict()
        other = lib.TensorDictReplayBuffer(
            storage=getattr(lib, taken)(100), prefetch=3, batch_size=saved["_batch_size"]
        )
        if begun:
            other.extend(row)
        other.load_state_dict(saved)
        return [len(other), bool((other.sample().exclude("index") == 1).all()), other.writer._cursor]

    def folder(kind: str, rows: str, begun: bool) -> Any:
        with tempfile.TemporaryDirectory() as path:
            storage, other = getattr(lib, kind)(10), getattr(lib, kind)(10)
            storage.set(range(3), kinds(3)[rows])
            storage.dumps(Path(path))
            storage.dumps(Path(path))
            if begun:
                other.set(range(3), zeros(kinds(3)[rows]))
            other.loads(Path(path))
            return [len(other), numbers(other[:]), form(other[:])]

    def existing(again: bool) -> Any:
        with tempfile.TemporaryDirectory() as path:
            for option in ({}, {"existsok": True} if again else {}):
                buffer = lib.ReplayBuffer(storage=lib.LazyMemmapStorage(10, scratch_dir=path, **option))
                buffer.extend(TensorDict({"a": torch.arange(3)}, [3]))
            return numbers(buffer[:])

    actions: dict[str, Callable[[], Any]] = {
        "folder in use": lambda: existing(False),
        "folder in use, existsok": lambda: existing(True),
    }
    for begun in (False, True):
        for given, taken in (LAZY, LAZY[::-1], LAZY[:1] * 2):
            actions[f"{given} to {taken}, begun: {begun}"] = lambda g=given, t=taken, b=begun: state(g, t, b)
        for rows in ("tensor", "tensordict", "tree", "tensorclass"):
            kind = LAZY[rows == "tensordict"]
            actions[f"folder of {kind}, {rows}, begun: {begun}"] = lambda k=kind, r=rows, b=begun: folder(k, r, b)
    return asked(actions)


def facts(lib: Any) -> dict[str, Facts]:
    """All of them, by the name of the storage."""
    found = {"TensorStorage": given(lib), "states": states(lib)}
    for kind in LAZY:
        found[kind] = lazy(lib, kind)
        found[f"{kind} of two dimensions"] = several_dimensions(lib, kind)
    found |= {f"{kind} in place": in_place(lib, kind) for kind in (*LAZY, "ListStorage")}
    return found
