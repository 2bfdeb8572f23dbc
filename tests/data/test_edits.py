"""Stored rows are changed in place, counted, forgotten and protected, as TorchRL's buffers do it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tensordict import NonTensorStack, TensorDict

from gpubuf.integrations.torchrl import (
    ImmutableDatasetWriter,
    LazyTensorStorage,
    PrioritizedSampler,
    ReplayBuffer,
    TensorDictReplayBuffer,
    TensorStorage,
)
from tests.support.torchrl_buffers.edits import rows


def two_dimensional() -> TensorDictReplayBuffer:
    buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(12, ndim=2))
    buffer.extend(TensorDict({"a": torch.arange(10).view(2, 5)}, [2, 5]))
    return buffer


def test_two_dimensions_are_steps_and_environments(backend):
    buffer = two_dimensional()
    assert buffer[:]["a"].tolist() == [list(range(5)), list(range(5, 10))]
    buffer.set_("a", torch.arange(10).view(5, 2))
    assert buffer.storage[:]["a"].flatten().tolist() == list(range(10))
    buffer.set_at_("a", -1, 0)
    buffer.set_at_("a", torch.tensor([[7], [8]]), slice(1, 3))
    buffer.set_at_("a", torch.tensor([70, 71]), torch.tensor([[3, 1], [4, 0]]))
    buffer.set_at_("a", 90, (torch.tensor([4]), torch.tensor([1])))
    assert buffer.storage[:]["a"].tolist() == [[-1, -1], [7, 7], [8, 8], [6, 70], [71, 90]]
    buffer.write_all(TensorDict({"a": torch.arange(5).view(1, 5)}, [1, 5]))
    assert buffer.storage[:]["a"].tolist() == [[0, -1], [1, 7], [2, 8], [3, 70], [4, 90]]
    for envs, text in ((1, "2 are addressed"), (3, "2 are addressed")):
        with pytest.raises(ValueError, match=text):
            buffer.write_all(TensorDict({"a": torch.zeros(envs, 5, dtype=torch.long)}, [envs, 5]), end=3)
    with pytest.raises(ValueError, match=r"the buffer \[2, 5\]"):
        buffer.write_all(TensorDict({"a": torch.zeros(2, 6, dtype=torch.long)}, [2, 6]))
    coordinates = torch.tensor([[4, 1], [5, 0], [0, 2], [-5, -2]])
    assert buffer.storage.contains(coordinates).tolist() == [True, False, False, True]


def test_stored_forms(backend):
    """Values are given as they are written, and stored as rows are."""
    storage = LazyTensorStorage(6, dtypes={"obs": torch.float16})
    buffer = ReplayBuffer(storage=storage)
    buffer.extend(rows(4))
    buffer.set_("obs", torch.full((4, 2), 0.5)).set_at_("obs", torch.tensor([2.0, 3.0]), 1)
    assert buffer[:]["obs"].tolist() == [[0.5, 0.5], [2.0, 3.0], [0.5, 0.5], [0.5, 0.5]]
    shared = ReplayBuffer(storage=LazyTensorStorage(6, share_next=["a"]))
    shared.extend(TensorDict({"a": torch.arange(4.0), "next": {"a": torch.arange(1, 5.0), "b": torch.zeros(4)}}, [4]))
    with pytest.raises(ValueError, match="share_next"):
        shared.set_("a", torch.zeros(4))
    shared.set_(("next", "b"), 3)
    assert shared[:]["next", "b"].tolist() == [3.0] * 4
    plain = ReplayBuffer(storage=LazyTensorStorage(6))
    plain.extend(torch.arange(4.0))
    plain.write_all(torch.arange(2.0) + 7)
    assert plain.read_all_in_order().tolist() == [7.0, 8.0, 2.0, 3.0]


def test_inverse_transforms_apply_to_write_all():
    class Scale:
        def __call__(self, data: Any) -> Any:
            return data.set("a", data["a"] * 2)

        def inv(self, data: Any) -> Any:
            return data.set("a", data["a"] // 2)

    buffer = ReplayBuffer(storage=LazyTensorStorage(4), transform=Scale())
    buffer.extend(TensorDict({"a": torch.arange(4) * 2}, [4]))
    given = buffer.read_all_in_order()
    given["a"] = given["a"] + 2
    kept = given.clone()
    buffer.write_all(given)
    assert (given == kept).all()
    assert buffer.storage[:]["a"].tolist() == [1, 2, 3, 4]


def test_an_immutable_buffer_refuses_every_write():
    whole = rows(6)
    sampler = PrioritizedSampler(6, 1, 1)
    buffer = TensorDictReplayBuffer(
        storage=TensorStorage(whole.clone()),
        writer=ImmutableDatasetWriter(),
        batch_size=3,
        sampler=sampler,
    )
    batch = buffer.sample()
    for write in (
        lambda: buffer.add(whole[0]),
        lambda: buffer.extend(whole),
        lambda: buffer.set_("a", 1),
        lambda: buffer.set_at_("a", 1, 0),
        lambda: buffer.update_({"a": 1}),
        lambda: buffer.write_all(whole),
        lambda: buffer.__setitem__(0, whole[0]),
        lambda: buffer.update_if_present(batch["index"], batch.select("a"), generation=batch["index_generation"]),
        buffer.empty,
    ):
        with pytest.raises(RuntimeError, match="ImmutableDatasetWriter"):
            write()
    assert (buffer[:].select(*whole.keys()) == whole).all()
    buffer.update_priority(batch["index"], 3.0)
    assert len(buffer.sample()) == 3


@pytest.mark.parametrize("dim_extend", [0, 1])
def test_a_key_of_all_rows_is_assigned_as_it_is_read(dim_extend):
    buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(12, ndim=2), dim_extend=dim_extend)
    buffer.extend(TensorDict({"a": torch.arange(10).view(2, 5), "next": {"b": torch.zeros(2, 5)}}, [2, 5]))
    due = buffer["a"] - 7
    buffer["a"] = due
    buffer["next", "b"] = 3
    assert torch.equal(buffer["a"], due)
    assert buffer["next", "b"].eq(3).all()


def test_text_is_assigned_as_tensors_are():
    """CASES 75: it was a success that changed nothing."""
    buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(8), batch_size=2)
    text = NonTensorStack("a", "b", "c", "d")
    buffer.extend(TensorDict({"a": torch.arange(4.0), "text": text}, [4]))
    buffer.set_at_("text", NonTensorStack("x", "y"), [3, 0])
    assert buffer[:].get("text").tolist() == ["y", "b", "c", "x"]
    buffer["text"] = NonTensorStack("p", "q", "r", "s")
    assert buffer[:].get("text").tolist() == ["p", "q", "r", "s"]
    with pytest.raises(ValueError, match="4 rows are addressed"):
        buffer["text"] = NonTensorStack("p", "q")
