"""`sample_columns` gives what `sample` gives, as one tensor per key."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from gpubuf import (
    LazyTensorStorage,
    ListStorage,
    ReplayBuffer,
    SliceSampler,
    TensorDictPrioritizedReplayBuffer,
    TensorDictReplayBuffer,
)
from gpubuf.data import Normalize

ROWS = 40


def rows(shape: tuple[int, ...] = (ROWS,)) -> TensorDict:
    generator = torch.Generator().manual_seed(0)
    following = {
        "observation": torch.randn(*shape, 3, generator=generator),
        "reward": torch.randn(*shape, 1, generator=generator),
        "done": torch.rand(*shape, 1, generator=generator) < 0.1,
    }
    return TensorDict({"observation": torch.randn(*shape, 3, generator=generator), "next": following}, shape)


def storage(**options: Any) -> LazyTensorStorage:
    return LazyTensorStorage(ROWS, **options)


BUFFERS: dict[str, Callable[[], ReplayBuffer]] = {
    "uniform": lambda: ReplayBuffer(storage=storage()),
    "TensorDict": lambda: TensorDictReplayBuffer(storage=storage(), batch_size=16),
    "prioritized": lambda: TensorDictPrioritizedReplayBuffer(alpha=0.7, beta=0.5, storage=storage()),
    "two dimensions": lambda: TensorDictReplayBuffer(storage=storage(ndim=2)),
    "n steps": lambda: TensorDictReplayBuffer(storage=storage(ndim=2), n_steps=3, reward_keys=[("next", "reward")]),
    "processed": lambda: ReplayBuffer(storage=storage(), process=[Normalize("observation")]),
    "slices": lambda: TensorDictReplayBuffer(storage=storage(), sampler=SliceSampler(slice_len=4)),
    "transformed": lambda: ReplayBuffer(
        storage=storage(), transform=lambda data: data.set("twice", data["observation"] * 2)
    ),
    "collated": lambda: ReplayBuffer(storage=storage(), collate_fn=lambda data: data.exclude(("next", "done"))),
}


@pytest.mark.parametrize("name", BUFFERS)
def test_columns_are_those_of_a_sample(name: str):
    """The same draw: keys, numbers and memory of its own, with the info of the draw."""
    buffer, other = BUFFERS[name](), BUFFERS[name]()
    for each in (buffer, other):
        each.extend(rows((4, ROWS // 4) if each.storage.ndim == 2 else (ROWS,)))
        each.set_rng(torch.Generator().manual_seed(3))
    batch, info = other.sample(16, return_info=True)
    columns = buffer.sample_columns(16)
    expected = {key: value for key, value in batch.items(True, True) if key not in info}
    assert columns.keys() - expected.keys() == info.keys() | {"index_generation"}
    for key, value in expected.items():
        assert torch.equal(columns[key], value), key
        assert columns[key].untyped_storage().data_ptr() != columns["index"].untyped_storage().data_ptr()
    index = buffer.storage.unravel(columns["index"])
    assert torch.equal(index, info["index"].reshape(index.shape))
    assert torch.equal(columns["index_generation"], buffer.storage.generations(columns["index"]))
    if name == "prioritized":
        assert torch.equal(columns["priority_weight"], info["priority_weight"])


def test_the_batch_size_is_that_of_the_constructor():
    buffer = TensorDictReplayBuffer(storage=storage(), batch_size=16)
    buffer.extend(rows())
    assert buffer.sample_columns()["observation"].shape == (16, 3)
    with pytest.raises(RuntimeError, match="batch_size not specified"):
        ReplayBuffer(storage=storage()).sample_columns()


def test_what_has_no_columns_is_refused():
    buffer = ReplayBuffer(storage=storage())
    buffer.extend(torch.arange(ROWS))
    with pytest.raises(ValueError, match="a single tensor have no keys"):
        buffer.sample_columns(4)
    buffer = ReplayBuffer(storage=storage(), collate_fn=lambda data: data["observation"])
    buffer.extend(rows())
    with pytest.raises(ValueError, match=r"a Tensor here: sample\(\) gives them"):
        buffer.sample_columns(4)


def test_rows_that_are_dicts_have_their_keys():
    buffer = ReplayBuffer(storage=storage())
    buffer.extend({"a": torch.arange(ROWS), "b": {"c": torch.arange(ROWS) * 2}})
    columns = buffer.sample_columns(8)
    assert torch.equal(columns["b", "c"], columns["a"] * 2)
    assert torch.equal(columns["a"], columns["index"])


def test_objects_are_no_columns():
    buffer = ReplayBuffer(storage=ListStorage(4))
    buffer.extend(["a", "b"])
    with pytest.raises(ValueError, match="data that are not tensors"):
        buffer.sample_columns(1)
