"""Rows that are dicts, tuples and lists of tensors: in and out in their own structure."""

from __future__ import annotations

from collections import OrderedDict, namedtuple
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from gpubuf.data import (
    LazyTensorStorage,
    ReplayBuffer,
    TensorDictReplayBuffer,
    TensorStorage,
)

Point = namedtuple("Point", ["x", "y"])


def batch(n: int, first: int = 0) -> dict[str, Any]:
    """``n`` rows, each of which tells its number in every tensor."""
    number = torch.arange(first, first + n)
    return {
        "observation": OrderedDict(
            pixels=number.to(torch.uint8).view(n, 1).expand(n, 3), state=(number.float(), number)
        ),
        "point": Point(number.double(), number.view(n, 1).float().expand(n, 2)),
        "list": [number.int(), number % 2 == 0],
        "inner": TensorDict({"a": number}, [n]),
        7: number,
    }


def numbers(data: dict[str, Any]) -> list[int]:
    """The numbers of the rows, after a check that all tensors of a row agree."""
    found = data[7]
    assert list(data) == ["observation", "point", "list", "inner", 7]
    assert isinstance(data["observation"], dict)
    assert type(data["observation"]["state"]) is tuple
    assert type(data["list"]) is list
    assert isinstance(data["inner"], TensorDict)
    assert data["inner"].batch_size == found.shape
    state, point = data["observation"]["state"], data["point"]
    assert (type(point).__name__, point._fields) == ("Point", ("x", "y"))
    for other in (state[0], state[1], point.x, point.y[..., 0], point.y[..., 1], data["list"][0], data["inner"]["a"]):
        assert torch.equal(other.long(), found)
    assert torch.equal(data["observation"]["pixels"].long()[..., 2], found)
    assert torch.equal(data["list"][1], found % 2 == 0)
    assert (point.x.dtype, data["list"][0].dtype) == (torch.float64, torch.int32)
    return found.reshape(-1).tolist()


def row(number: int) -> dict[str, Any]:
    buffer = ReplayBuffer(storage=LazyTensorStorage(1))
    buffer.extend(batch(1, number))
    return buffer[0]


def filled(capacity: int = 10, n: int = 6, **kwargs: Any) -> ReplayBuffer:
    buffer = ReplayBuffer(storage=LazyTensorStorage(capacity), batch_size=4, **kwargs)
    buffer.extend(batch(n))
    return buffer


def test_the_structure_comes_back():
    buffer = filled()
    assert set(numbers(buffer.sample())) <= set(range(6))
    data, info = buffer.sample(return_info=True)
    assert numbers(data) == info["index"].tolist()
    assert type(data["point"]) is Point
    assert numbers(buffer[:]) == list(range(6))
    assert numbers(buffer[2:4]) == [2, 3]
    assert numbers(buffer[3]) == [3]
    assert numbers(buffer[[4, -1]]) == [4, 5]
    assert numbers(buffer[torch.tensor([1, 1])]) == [1, 1]
    assert numbers(buffer.sample(batches=2))
    assert buffer.sample(batches=2)[7].shape == (2, 4)
    assert buffer.storage.get(0)[7].shape == ()


def test_named_tuples():
    def make(n: int, first: int = 0) -> Point:
        number = torch.arange(first, first + n)
        return Point(number, number.float())

    buffer = ReplayBuffer(storage=LazyTensorStorage(5), batch_size=3)
    buffer.extend(make(4))
    buffer.add(Point(*(t[0] for t in make(1, 4))))
    got = buffer.sample()
    assert type(got) is Point
    assert torch.equal(got[0].float(), got[1])
    assert buffer[:][0].tolist() == [0, 1, 2, 3, 4]


def test_what_does_not_fit_is_refused_and_nothing_written():
    buffer = filled()
    wrong: list[tuple[Any, str]] = [
        ({k: v for k, v in batch(2).items() if k != "list"}, "list"),
        ({**batch(2), "more": torch.zeros(2)}, "more"),
        ({**batch(2), "list": tuple(batch(2)["list"])}, "tuple"),
        ({**batch(2), "list": batch(2)["list"][:1]}, "2 entries"),
        ({**batch(2), 7: torch.zeros(2)}, "float32"),
        ({**batch(2), 7: torch.zeros(2, 2, dtype=torch.int64)}, r"shape \(2,\)"),
        ({**batch(2), 7: torch.zeros(3, dtype=torch.int64)}, "3"),
        ({**batch(2), 7: {"a": torch.zeros(2)}}, "dict"),
        (Point(torch.zeros(2), torch.zeros(2)), "Point"),
    ]
    for data, match in wrong:
        with pytest.raises(ValueError, match=match):
            buffer.extend(data)
    assert numbers(buffer[:]) == list(range(6))
    for data, match in (
        ({"a": torch.zeros(2), "b": ["x", "y"]}, "storage of objects"),
        ({(1, 2): torch.zeros(2)}, "text or integers"),
    ):
        with pytest.raises(TypeError, match=match):
            ReplayBuffer(storage=LazyTensorStorage(3)).extend(data)
    with pytest.raises(ValueError, match="same text"):
        ReplayBuffer(storage=LazyTensorStorage(3)).extend({1: torch.zeros(2), "1": torch.zeros(2)})
    with pytest.raises(TypeError, match="a list means several rows"):
        filled().add([torch.zeros(())])
    with pytest.raises(TypeError, match="stores TensorDicts"):
        TensorDictReplayBuffer(storage=LazyTensorStorage(3)).extend(batch(2))


def test_keys_with_fewer_rows_than_others_are_named():
    """An episode of Minari's with one observation too few: all keys with their rows, not the first one after them."""
    buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(9))
    seen, taken = np.zeros((3, 2), np.float32), np.zeros((3, 1), np.float32)
    episode = {"observation": seen[:-1], "action": taken, "next": {"observation": seen[1:], "reward": taken}}
    with pytest.raises(ValueError, match=r"got observation, next.observation: \[2\]; action, next.reward: \[3\]$"):
        buffer.extend(episode)
    assert len(buffer) == 0


def test_transforms_see_the_structure():
    seen: list[Any] = []
    buffer = ReplayBuffer(storage=LazyTensorStorage(5), batch_size=2, transform=lambda data: seen.append(data) or data)
    buffer.append_transform(lambda data: {**data, "b": data["a"] + 1}, invert=True)
    given = {"a": torch.zeros(3)}
    buffer.extend(given)
    assert set(given) == {"a"}
    assert buffer.sample()["b"].tolist() == [1.0, 1.0]
    assert type(seen[0]) is dict
    plain = ReplayBuffer(storage=LazyTensorStorage(5), batch_size=2, collate_fn=lambda data: data["a"])
    plain.extend(given)
    assert plain.sample().shape == (2,)


def test_given_memory_and_dtypes():
    memory = {"a": torch.arange(5), "b": (torch.rand(5, 2),)}
    full = ReplayBuffer(storage=TensorStorage(memory), batch_size=3)
    assert len(full) == 5
    assert torch.equal(full[:]["b"][0], memory["b"][0])
    full[0] = {"a": torch.tensor(9), "b": (torch.zeros(2),)}
    assert memory["a"][0] == 9
    stored = LazyTensorStorage(5, dtypes={"a": torch.int16, ("b", "0"): torch.float16})
    other = ReplayBuffer(storage=stored, batch_size=3)
    other.extend({"a": torch.arange(4), "b": (torch.arange(4.0),)})
    assert other.sample()["a"].dtype is torch.int64
    assert other[:]["b"][0].tolist() == [0, 1, 2, 3]
