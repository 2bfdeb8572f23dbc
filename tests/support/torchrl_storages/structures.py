"""Writes structures.json: in which structure TorchRL gives rows of many kinds back, by every way of reading them.

Run it where TorchRL 0.14.1 is installed, from the root of the repository:
``python -m tests.support.torchrl_storages.structures``.
"""

from __future__ import annotations

import json
import warnings
from collections import OrderedDict, namedtuple
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from tensordict import NonTensorStack, TensorDict, TensorDictBase, is_non_tensor
from torch import Tensor

FILE = Path(__file__).with_suffix(".json")
Point = namedtuple("Point", ["x", "y"])


def number(n: int) -> Tensor:
    return torch.arange(n)


KINDS: dict[str, Callable[[int], Any]] = {
    "tensor": lambda n: number(n).float().view(n, 1),
    "TensorDict": lambda n: TensorDict({"a": number(n), "b": {"c": torch.zeros(n, 2)}}, [n]),
    "dict": lambda n: {"a": number(n), "b": torch.zeros(n, 2)},
    "nested dict": lambda n: {"obs": {"image": torch.zeros(n, 2, 2, dtype=torch.uint8), "state": number(n).float()}},
    "OrderedDict": lambda n: OrderedDict(b=number(n), a=torch.zeros(n)),
    "tuple": lambda n: (number(n), torch.zeros(n, 2)),
    "nested tuple": lambda n: (number(n), (torch.zeros(n), {"a": torch.ones(n, 1)})),
    "namedtuple": lambda n: Point(number(n), torch.zeros(n, 2)),
    "list in a dict": lambda n: {"a": [number(n), torch.zeros(n, dtype=torch.bool)]},
    "TensorDict in a dict": lambda n: {"td": TensorDict({"a": number(n)}, [n]), "x": torch.zeros(n)},
    "text": lambda n: TensorDict({"a": number(n), "text": NonTensorStack(*map(str, range(n)))}, [n]),
    "one text": lambda n: TensorDict({"a": number(n), "inner": TensorDict({"text": "same"}, [n])}, [n]),
}
"""Batches of ``n`` rows."""

OBJECTS: dict[str, Any] = {
    "texts": ["a", "b", "c", "d"],
    "numbers": [1, 2, 3, 4],
    "tensors": list(torch.zeros(4, 2)),
    "tensors of different shapes": [torch.zeros(n) for n in range(1, 5)],
    "a tensor": torch.zeros(4, 3),
    "TensorDicts": TensorDict({"a": number(4)}, [4]),
    "dicts": [{"a": torch.zeros(2), "b": (torch.ones(()),)} for _ in range(4)],
}
"""What a ListStorage is extended by."""


def told(value: Any) -> Any:
    """The structure of a value, as plain values."""
    if isinstance(value, Tensor):
        return [str(value.dtype), list(value.shape)]
    if is_non_tensor(value):
        return ["not a tensor", list(value.batch_size)]
    if isinstance(value, TensorDictBase):
        entries = {key: told(value.get(key)) for key in sorted(value.keys())}
        return {"TensorDict": list(value.batch_size), "entries": entries}
    if isinstance(value, dict):
        return {"dict": sorted([key, told(entry)] for key, entry in value.items())}
    if isinstance(value, (tuple, list)):
        return {type(value).__name__: [told(entry) for entry in value]}
    return type(value).__name__


def attempt(action: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    """What an action gives, or the type of its error."""
    try:
        return told(action(*arguments, **options))
    except Exception as error:
        return f"error: {type(error).__name__}"


def row_of(kind: str) -> Any:
    """One row, without a batch dimension."""

    def first(value: Any) -> Any:
        if isinstance(value, dict):
            return type(value)((key, first(entry)) for key, entry in value.items())
        if isinstance(value, Point):
            return Point(*map(first, value))
        return type(value)(map(first, value)) if isinstance(value, (tuple, list)) else value[0]

    return first(KINDS[kind](1))


def reads(buffer: Any) -> dict[str, Any]:
    """A buffer of at least 4 rows, read in every way."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return {
            "sample": attempt(lambda: buffer.sample()),
            "info": attempt(lambda: sorted(buffer.sample(return_info=True)[1])),
            "int": attempt(lambda: buffer[1]),
            "slice": attempt(lambda: buffer[1:3]),
            "list": attempt(lambda: buffer[[0, 2]]),
            "tensor": attempt(lambda: buffer[torch.tensor([0, 2])]),
            "all": attempt(lambda: buffer[:]),
            "storage int": attempt(lambda: buffer.storage[1]),
            "storage list": attempt(lambda: buffer.storage[[0, 2]]),
            "len": len(buffer),
        }


def kinds(data: Any) -> dict[str, Any]:
    """Rows of every kind in a LazyTensorStorage of the module ``data``."""
    found = {}
    for kind, make in KINDS.items():
        buffer = data.ReplayBuffer(storage=data.LazyTensorStorage(6), batch_size=3)
        written = {"extend": attempt(buffer.extend, make(4))}
        written["add"] = attempt(buffer.add, row_of(kind))
        written["overwrite"] = attempt(buffer.__setitem__, 0, row_of(kind))
        written["overwrite two"] = attempt(buffer.__setitem__, [1, 2], make(2))
        rows = [row_of(kind), row_of(kind)]
        written["extend by rows"] = attempt(buffer.extend, rows)
        found[kind] = {**written, **reads(buffer)}
    return found


def objects(data: Any) -> dict[str, Any]:
    """Objects of every kind in a ListStorage of the module ``data``."""
    found = {}
    for kind, given in OBJECTS.items():
        buffer = data.ReplayBuffer(storage=data.ListStorage(6), batch_size=3)
        written = {"extend": attempt(buffer.extend, given)}
        written["add"] = attempt(buffer.add, given[0])
        found[kind] = {**written, **reads(buffer)}
    return found


def sets(data: Any) -> dict[str, Any]:
    """``storage.set`` and assignment at many indices, before the first write and after it."""
    found = {}
    rows = KINDS["TensorDict"](3)
    cursors = {"range": range(3), "slice": slice(0, 3), "list": [0, 1, 2], "tensor": torch.arange(3)}
    for name, cursor in cursors.items():
        for before in (0, 3):
            storage = data.LazyTensorStorage(6)
            if before:
                storage.set(range(3), rows)
            way = f"{name} after {before}"
            found[f"set {way}"] = attempt(storage.set, cursor, rows, set_cursor=not before)
            found[f"then {way}"] = attempt(storage.__getitem__, slice(None))
            found[f"len {way}"] = len(storage)
    storage = data.LazyTensorStorage(6)
    found["set an int"] = attempt(storage.set, 0, rows[0])
    found["then an int"] = attempt(storage.__getitem__, slice(None))
    storage = data.LazyTensorStorage(6)
    storage.set(range(3), rows)
    found["ellipsis"] = attempt(storage.__getitem__, ...)
    found["_len"] = storage._len
    found["_storage"] = attempt(lambda: storage._storage)
    return found


def main() -> None:
    import torchrl
    import torchrl.data as data

    found = {"torchrl": torchrl.__version__, "kinds": kinds(data), "objects": objects(data), "sets": sets(data)}
    FILE.write_text(json.dumps(found, sort_keys=True) + "\n")


if __name__ == "__main__":
    main()
