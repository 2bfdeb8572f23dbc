"""Compose, transforms that change their batch in place, and inverse ones that have nothing to write yet."""

from __future__ import annotations

import copy

import pytest
import torch
from tensordict import TensorDict
from torch import nn

from gpubuf import ListStorage
from gpubuf.data import Compose, LazyMemmapStorage, LazyTensorStorage, ReplayBuffer, TensorDictReplayBuffer


def add(number: int):
    def transform(batch):
        return batch.apply(lambda value: value + number)

    return transform


class Waits(nn.Module):
    """Writes nothing until it has had ``calls`` batches."""

    def __init__(self, calls: int) -> None:
        super().__init__()
        self.calls = calls

    def forward(self, data):
        return data

    def inv(self, data):
        self.calls -= 1
        return None if self.calls >= 0 else data


def numbers(start: int, stop: int) -> TensorDict:
    return TensorDict({"number": torch.arange(start, stop)}, [stop - start])


def test_it_gives_the_objects_that_it_was_given():
    first, second, third = add(1), Waits(0), nn.Identity()
    compose = Compose(first, second)
    compose.append(third)
    assert [*compose] == compose.transforms == [first, second, third]
    assert compose[0] is first
    assert compose[-1] is third
    assert isinstance(compose[1:], Compose)
    assert compose[1:].transforms == [second, third]
    assert len(compose) == 3
    assert second in compose
    with pytest.raises(IndexError):
        compose[3]


@pytest.mark.parametrize("given", ["one by one", "a list", "by name"])
def test_it_takes_transforms_as_torchrl_does(given):
    both = [add(1), add(2)]
    compose = {
        "one by one": lambda: Compose(*both),
        "a list": lambda: Compose(both),
        "by name": lambda: Compose(transforms=both),
    }[given]()
    assert compose.transforms == both


def test_transforms_are_inserted_and_removed():
    a, b, c = add(1), add(2), add(3)
    compose = Compose(a)
    compose.insert(-1, b)
    compose.insert(0, c)
    assert compose.transforms == [c, b, a]
    assert compose.pop() is a
    assert compose.pop(0) is c
    with pytest.raises(ValueError, match=r"the index must be in \[-1, 1\], got 2"):
        compose.insert(2, a)
    with pytest.raises(TypeError, match="not both"):
        Compose(a, transforms=[b])
    with pytest.raises(TypeError, match="must be callable"):
        Compose(1)


def test_a_compose_gives_a_buffer_its_transforms():
    first, second, third = add(1), add(10), add(100)
    buffer = ReplayBuffer(storage=LazyTensorStorage(5), transform=Compose(first, second), batch_size=4)
    buffer.append_transform(Compose(third))
    assert buffer.transform.transforms == [first, second, third]
    assert buffer.transform[1] is second
    buffer.extend(numbers(0, 1))
    assert buffer.sample()["number"].tolist() == [111] * 4


@pytest.mark.parametrize("kind", [ReplayBuffer, TensorDictReplayBuffer])
@pytest.mark.parametrize("ndim", [1, 2])
def test_an_inverse_transform_may_keep_the_rows_for_later(kind, ndim):
    buffer = kind(storage=LazyTensorStorage(8, ndim=ndim), transform=Compose(add(0), Waits(2)), batch_size=2)
    data = numbers(0, 4) if ndim == 1 else numbers(0, 4).reshape(2, 2)
    written = buffer.extend(data)
    assert written.shape == ((0,) if ndim == 1 else (0, 2))
    assert written.dtype is torch.int64
    assert len(buffer) == 0
    added = buffer.add(data[0] if ndim == 1 else data[:, 0])
    assert isinstance(added, torch.Tensor)
    assert added.numel() == 0
    assert len(buffer) == 0
    assert buffer.extend(data).shape[0] == 4
    assert len(buffer) == 4
    assert buffer.sample()["number"].numel() == 2


def test_a_callable_that_only_applies_to_written_rows_may_too():
    buffer = ReplayBuffer(storage=LazyTensorStorage(8), batch_size=2)
    buffer.append_transform(lambda data: data if len(data) > 1 else None, invert=True)
    assert buffer.extend(numbers(0, 1)).numel() == 0
    assert buffer.extend(numbers(0, 3)).tolist() == [0, 1, 2]


def test_it_can_be_copied():
    compose = Compose(Waits(3), nn.Identity())
    again = copy.deepcopy(compose)
    assert [type(transform) for transform in again] == [Waits, nn.Identity]
    assert again[0] is not compose[0]


class TestTorchRLsOwn:
    """Objects of TorchRL's in a buffer of ours. Run where TorchRL is installed."""

    def test_multi_step_transform_in_its_compose_waits_for_its_steps(self):
        transforms = pytest.importorskip("torchrl.envs.transforms")
        own = transforms.Compose(transforms.MultiStepTransform(n_steps=3, gamma=0.5))
        buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(20), transform=own, batch_size=4)
        lengths = [len(buffer)]
        for start in range(0, 10, 2):
            buffer.extend(_transitions(start, start + 2))
            lengths.append(len(buffer))
        assert lengths == [0, 0, 1, 3, 5, 7]
        assert buffer[:]["next", "reward"].flatten().tolist() == [i + (i + 1) / 2 + (i + 2) / 4 for i in range(7)]
        assert buffer.transform[0] is own


def _transitions(start: int, stop: int) -> TensorDict:
    n = stop - start
    step = torch.arange(start, stop).float().unsqueeze(1)
    flag = torch.zeros(n, 1, dtype=torch.bool)
    after = {"observation": step + 1, "reward": step, "done": flag, "terminated": flag.clone()}
    return TensorDict({"observation": step, "next": after}, [n])


def doubles(batch):
    """A transform, or a collate function, that changes tensors in place."""
    for key in batch.keys() if isinstance(batch, TensorDict) else batch if isinstance(batch, dict) else [None]:
        (batch if key is None else batch[key]).mul_(2)
    return batch


@pytest.mark.parametrize("option", ["transform", "collate_fn"])
@pytest.mark.parametrize("storage", [LazyTensorStorage, LazyMemmapStorage])
@pytest.mark.parametrize("index", [slice(None), slice(1, 3), ..., -1, "number"])
def test_a_transform_in_place_has_rows_of_its_own(option, storage, index):
    """Issue 45, A10: what is changed in place, whatever the index, is not what is stored."""
    buffer = ReplayBuffer(storage(4), **{option: doubles})
    buffer.extend(numbers(1, 5))
    read, factor = buffer[index], 1 if option == "collate_fn" and index == -1 else 2
    read = read if isinstance(index, str) else read["number"]
    assert read.tolist() == (factor * torch.arange(1, 5)[slice(None) if isinstance(index, str) else index]).tolist()
    assert buffer.storage[:]["number"].tolist() == [1, 2, 3, 4]


@pytest.mark.parametrize("index", [slice(None), (slice(None), 0), (0, 1), 0])
@pytest.mark.parametrize("rows", [numbers(0, 6).reshape(2, 3), {"number": torch.arange(6).reshape(2, 3)}])
def test_so_it_has_in_two_dimensions_and_of_other_rows(index, rows):
    buffer = ReplayBuffer(LazyTensorStorage(6, ndim=2), transform=doubles)
    buffer.extend(rows)
    assert torch.equal(buffer[index]["number"], 2 * rows["number"][index])
    assert buffer.storage[:]["number"].sum() == 15


def test_so_it_has_of_a_list_of_tensors():
    buffer = ReplayBuffer(ListStorage(4), transform=doubles)
    buffer.extend(torch.ones(4, 2))
    assert buffer[0].tolist() == [2, 2]
    assert buffer[:2].tolist() == [[2, 2], [2, 2]]
    assert buffer.storage[0].tolist() == [1, 1]


def test_without_transforms_a_slice_is_a_view():
    buffer = ReplayBuffer(LazyTensorStorage(4))
    buffer.extend(numbers(0, 4))
    buffer[:]["number"].mul_(2)
    assert buffer.storage[:]["number"].tolist() == [0, 2, 4, 6]
