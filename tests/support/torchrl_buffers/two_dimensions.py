"""Rows of storages of two dimensions, read and written by many kinds of index."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch
from tensordict import TensorDict

from tests.support.torchrl_buffers import edits

#: Of both libraries.
INDICES: dict[str, Any] = {
    "all": slice(None),
    "...": ...,
    "slice": slice(1, 3),
    "from the end": slice(-1, None),
    "key": "a",
    "nested key": ("next", "b"),
    "two ints": (0, 1),
    "slice and int": (slice(None), 1),
    "int and slice": (1, slice(0, 1)),
}


def rows(envs: int, steps: int, dim_extend: int | None) -> TensorDict:
    """Numbered rows in the shape in which they are written."""
    number = torch.arange(envs * steps).view(envs, steps)
    data = TensorDict({"a": number, "next": {"b": number.unsqueeze(-1) * torch.tensor([1, 10])}}, [envs, steps])
    return data.transpose(0, 1) if dim_extend == 0 else data


def outcome(call: Callable[[], Any]) -> Any:
    """What a call gives, but for the index of rows, which differs."""

    def without_index() -> Any:
        found = call()
        return found.exclude("index") if isinstance(found, TensorDict) else found

    return edits.outcome(without_index)


def told_of(buffer: Any, steps: int, dim_extend: int | None) -> dict[str, Any]:
    """What a buffer with two environments gives that so many steps were written to; it has room for six."""
    found = {name: outcome(lambda i=index: buffer[i]) for name, index in INDICES.items()}
    found["storage"] = outcome(lambda: buffer.storage[:])
    found["one"] = outcome(lambda: buffer.storage[1])
    found["read"] = outcome(lambda: buffer.read_all_in_order(1))
    found["length"] = len(buffer)
    if steps >= 6:
        # Of a buffer that is not full TorchRL's can't be written through an index.
        found["written"] = [outcome(lambda: buffer.write_all(buffer[:].clone())), outcome(lambda: buffer[:])]
        new = rows(2, 6, dim_extend).apply(lambda value: value + 100)
        if "index" in buffer[:].keys():
            new["index"] = buffer[:]["index"]
        found["set"] = [outcome(lambda: buffer.__setitem__(slice(None), new)), outcome(lambda: buffer[:])]
    number = torch.arange(2 * min(steps, 6)).view(-1, 2)
    found["set_"] = [outcome(lambda: buffer.set_("a", number)), outcome(lambda: buffer[:])]
    return found


def story(data: Any, every: int = 4) -> dict[str, Any]:
    """What the buffers of ``data``, a module, give: in every so many of the cases."""
    told: dict[str, Any] = {}
    cases = list(itertools.product(("ReplayBuffer", "TensorDictReplayBuffer"), (None, 0, 1), (5, 6, 9)))
    for kind, dim_extend, steps in cases[::every]:
        buffer = getattr(data, kind)(storage=data.LazyTensorStorage(12, ndim=2), dim_extend=dim_extend)
        for each in rows(2, steps, dim_extend).split(3, 0 if dim_extend == 0 else 1):
            buffer.extend(each.contiguous())
        told[f"{kind} {dim_extend} {steps}"] = told_of(buffer, steps, dim_extend)
    return told
