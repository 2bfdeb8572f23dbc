"""What save and load hooks, and checkpointers, are called with, and what becomes of rows."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any, ClassVar

import torch
from tensordict import TensorDict


def rows(n: int, start: int = 0) -> TensorDict:
    """``n`` rows that tell which they are."""
    number = torch.arange(start, start + n)
    return TensorDict({"a": number, "next": {"reward": number.float().unsqueeze(-1)}}, [n])


class Doubled:
    """A save hook that has all the attributes that checkpointers set."""

    is_full: Any = "not set"
    shift: Any = "not set"

    def __init__(self, told: list[Any]) -> None:
        self.told = told

    def __call__(self, data: TensorDict, path: Any = None) -> TensorDict:
        self.told.append(["save", list(data.batch_size), self.is_full, int(self.shift), Path(path).is_dir()])
        changed = data.clone()
        changed["a"] = data["a"] * 2
        return changed


class Halved:
    """A load hook."""

    def __init__(self, told: list[Any]) -> None:
        self.told = told

    def __call__(self, data: TensorDict, out: Any = None) -> TensorDict:
        self.told.append(["load", list(data.batch_size)])
        changed = data.clone()
        changed["a"] = data["a"] // 2
        return changed


class Remembered:
    """A checkpointer of a user's own, that keeps rows in memory."""

    kept: ClassVar[dict[str, Any]] = {}

    def dumps(self, storage: Any, path: Any) -> None:
        self.kept["rows"] = storage._storage.clone()
        self.kept["len"] = len(storage)

    def loads(self, storage: Any, path: Any) -> None:
        if not storage.initialized:
            storage._init(self.kept["rows"][0])
        storage._storage.copy_(self.kept["rows"])
        storage._len = self.kept["len"]


def filled(data: Any, n: int, **options: Any) -> Any:
    """A buffer that ``n`` rows were written to, three at a time."""
    buffer = data.ReplayBuffer(storage=data.LazyTensorStorage(6), batch_size=2, **options)
    for start in range(0, n, 3):
        buffer.extend(rows(min(3, n - start), start))
    return buffer


def story(data: Any) -> dict[str, Any]:
    """What the buffers of ``data``, a module, give."""
    told: dict[str, Any] = {}
    for n in (2, 4, 6, 8, 9):
        calls: list[Any] = []
        with tempfile.TemporaryDirectory() as folder:
            buffer = filled(data, n)
            buffer.register_save_hook(Doubled(calls))
            buffer.dumps(folder)
            told[f"{n} in the files"] = TensorDict.load_memmap(Path(folder) / "storage")["a"][: len(buffer)].tolist()
            for used in (False, True):
                other = filled(data, 6 if used else 0)
                other.register_load_hook(Halved(calls))
                other.loads(folder)
                told[f"{n} loaded, {used}"] = [len(other), other[:]["a"].tolist(), other.write_count]
                other.extend(rows(1, 100))
                told[f"{n} goes on, {used}"] = [len(other), other[:]["a"].tolist()]
        told[f"{n} calls"] = calls
    with tempfile.TemporaryDirectory() as folder:
        own = filled(data, 4, checkpointer=Remembered())
        own.dumps(folder)
        other = filled(data, 0, checkpointer=Remembered())
        other.loads(folder)
        kind = type(other.storage.checkpointer).__name__
        told["a checkpointer"] = [len(other), other[:]["a"].tolist(), kind]
        storage = data.LazyTensorStorage(6)
        storage.checkpointer = Remembered()
        storage.loads(folder)
        told["a storage with one"] = [len(storage), storage[:]["a"].tolist()]
        storage.checkpointer = None
        told["its own again"] = type(storage.checkpointer).__name__
    for n in (4, 6):
        with tempfile.TemporaryDirectory() as folder:
            filled(data, n).storage.dumps(Path(folder))
            other = data.LazyTensorStorage(6)
            other.loads(Path(folder))
            told[f"a storage of {n} alone"] = [len(other), other[:]["a"].tolist(), other[1]["next", "reward"].tolist()]
    try:
        data.LazyTensorStorage(6).dumps(tempfile.mkdtemp())
    except RuntimeError:
        told["never written"] = "RuntimeError"
    return told
