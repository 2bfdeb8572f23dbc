"""Objects of any kind in a ListStorage."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from gpubuf.integrations.torchrl import (
    LazyTensorStorage,
    ListStorage,
    PrioritizedSampler,
    ReplayBuffer,
    SliceSampler,
    TensorDictMaxValueWriter,
    TensorDictReplayBuffer,
)


def filled(n: int = 4, capacity: int | None = 6, **kwargs: Any) -> ReplayBuffer:
    buffer = ReplayBuffer(storage=ListStorage(capacity), batch_size=3, **kwargs)
    buffer.extend([f"object {i}" for i in range(n)])
    return buffer


def test_objects_come_back():
    buffer = filled()
    assert len(buffer) == 4
    data, info = buffer.sample(return_info=True)
    assert data == [f"object {i}" for i in info["index"].tolist()]
    assert buffer[0] == "object 0"
    assert buffer[-1] == buffer[torch.tensor(3)] == buffer[np.int64(3)] == "object 3"
    assert buffer[1:3] == ["object 1", "object 2"]
    assert buffer[[2, 0]] == buffer[torch.tensor([2, 0])] == ["object 2", "object 0"]
    assert buffer[:] == buffer[...] == [f"object {i}" for i in range(4)]
    with pytest.raises(IndexError):
        buffer[4]
    thing = object()
    assert buffer.add(thing) == 4
    assert buffer[4] is thing
    buffer[2] = "two"
    assert buffer[1:4] == ["object 1", "two", "object 3"]


def test_what_it_is_extended_by():
    for given in ([0, 1, 2], (0, 1, 2), {0, 1, 2}, range(3), np.arange(3)):
        buffer = ReplayBuffer(storage=ListStorage(5), batch_size=2)
        assert buffer.extend(given).tolist() == [0, 1, 2]
        assert sorted(buffer[:]) == [0, 1, 2]
    for nothing in ([], (), range(0), torch.zeros(0, 2)):
        assert buffer.extend(nothing).numel() == 0


def test_what_it_refuses():
    buffer = filled()
    for wrong in ({"a": torch.zeros(2)}, "text", 3):
        with pytest.raises(TypeError, match=r"add\(\) writes one object"):
            buffer.extend(wrong)
    new, slices = ReplayBuffer(storage=ListStorage(4), batch_size=2), SliceSampler(slice_len=2, traj_key="episode")
    for error, text, call in (
        (ValueError, "2 rows are addressed, 1 objects", lambda: buffer.__setitem__([0, 1], ["one"])),
        (ValueError, "one batch at a time", lambda: buffer.sample(batches=2)),
        (RuntimeError, "Its rows are objects", lambda: ReplayBuffer(ListStorage(4), sampler=slices).extend([1, 2])),
        (RuntimeError, "empty", new.sample),
        (NotImplementedError, "stay where they are", lambda: buffer.to("cpu")),
    ):
        with pytest.raises(error, match=text):
            call()
    assert buffer[:] == [f"object {i}" for i in range(4)]


def test_a_list_without_end():
    endless = filled(capacity=None)
    endless.extend(list(range(1000)))
    assert len(endless) == 1004
    endless.empty()
    endless.extend([1])
    assert endless[:] == [1]


def test_set():
    storage = ListStorage(4)
    storage.set(0, "a")
    storage.set([1, 2], ["b", "c"])
    storage.set(range(1, 4), ["B", "C", "d"])
    storage.set(torch.tensor(0), "A")
    assert storage[:] == storage._storage == ["A", "B", "C", "d"]
    with pytest.raises(IndexError):
        storage.set(4, "e")
    with pytest.raises(IndexError):
        ListStorage(4).set(1, "b")
    storage.set(..., [1, 2, 3, 4])
    assert storage[...] == [1, 2, 3, 4]
    assert 3 in storage[:]
    assert storage.contains(3)
    assert not storage.contains(4)


def test_batches_are_stacked_where_objects_allow_it():
    buffer = ReplayBuffer(storage=ListStorage(10), batch_size=5)
    given = torch.arange(6.0).view(3, 2)
    buffer.extend(given)
    given.zero_()
    assert buffer.sample().shape == (5, 2)
    assert buffer[:].tolist() == [[0, 1], [2, 3], [4, 5]]
    buffer.add(torch.zeros(3))
    assert [len(row) for row in buffer[[0, 3]]] == [2, 3]
    trees = ReplayBuffer(storage=ListStorage(10), batch_size=5)
    trees.extend([{"a": torch.tensor(i), "b": (torch.zeros(2),)} for i in range(3)])
    batch = trees.sample()
    assert batch["a"].shape == (5,)
    assert batch["b"][0].shape == (5, 2)
    trees.add({"a": "text"})
    assert isinstance(trees[:], list)
    own = ReplayBuffer(storage=ListStorage(10), batch_size=5, collate_fn=lambda items: "-".join(items))
    own.extend(["x", "y"])
    assert len(own.sample()) == 9
    assert own[:] == "x-y"
    assert own[0] == "x"


def test_tensordicts():
    buffer = TensorDictReplayBuffer(storage=ListStorage(10), batch_size=4)
    buffer.extend(TensorDict({"a": torch.arange(6)}, [6]))
    buffer.add(TensorDict({"a": torch.tensor(6)}))
    batch = buffer.sample()
    assert torch.equal(batch["a"], batch["index"])
    assert buffer[2]["a"] == 2
    # One object, several and all say where they are, in the storage as in the buffer.
    assert all(row["index"] == 2 for row in (buffer[2], buffer.storage[2], buffer.storage[2:3][0], buffer[2:3][0]))
    assert buffer[:]["index"].tolist() == list(range(7))
    assert [row["index"].item() for row in buffer.storage[[5, 1]]] == [5, 1]
    assert "index" not in buffer.storage.objects.items[2].keys()
    ragged = TensorDictReplayBuffer(storage=ListStorage(4), batch_size=2)
    ragged.extend([TensorDict({"a": torch.zeros(n)}) for n in (1, 2)])
    assert isinstance(ragged.sample(), list | TensorDict)
    assert isinstance(ragged[:], list)


def test_states_and_checkpoints(tmp_path: Path):
    buffer = ReplayBuffer(storage=ListStorage(4), batch_size=3)
    buffer.extend([1, "two", {"three": torch.ones(3)}, (4.0, None), [5], TensorDict({"a": torch.ones(2)}, [2])])
    buffer.sample()
    buffer.dumps(tmp_path / "objects")
    state = buffer.state_dict()
    for restore in (lambda other: other.loads(tmp_path / "objects"), lambda other: other.load_state_dict(state)):
        for capacity in (4, 9, None):
            other = filled(capacity=capacity) if capacity else ReplayBuffer(storage=ListStorage(), batch_size=3)
            restore(other)
            items = other[:]
            kinds = sorted(type(item).__name__ for item in items)
            assert kinds == ["TensorDict", "dict", "list", "tuple"]
            other.add("more")
            assert "more" in [item for item in other[:] if isinstance(item, str)]
    assert str(copy.deepcopy(buffer).sample()) == str(buffer.sample())
    buffer.add(object())
    with pytest.raises(TypeError, match="object"):
        buffer.dumps(tmp_path / "objects")
    with pytest.raises(ValueError, match="room"):
        ReplayBuffer(storage=ListStorage(2)).load_state_dict(state)


def test_a_loaded_state_is_the_buffers_own():
    """Its tensors were those of the caller, who may go on with them."""
    source, other = ReplayBuffer(storage=ListStorage(4), batch_size=2), ReplayBuffer(storage=ListStorage(4))
    source.extend([torch.zeros(2), {"a": torch.zeros(1)}])
    state = source.state_dict()
    other.load_state_dict(state)
    state["_storage"]["host"][0]["rows"][0].fill_(7.0)
    assert other[0].tolist() == [0.0, 0.0]


def test_objects_move_to_a_device():
    buffer = ReplayBuffer(storage=ListStorage(4, device="meta"), batch_size=2)
    buffer.extend([torch.zeros(2), {"a": (torch.zeros(1),)}, "text"])
    assert buffer[0].is_meta
    assert buffer[1]["a"][0].is_meta
    assert buffer[2] == "text"


def ranked(n: int, seed: int) -> TensorDict:
    return TensorDict({"reward": torch.randint(100, (n,), generator=torch.Generator().manual_seed(seed))}, [n])


@pytest.mark.parametrize("sizes", [(30,), (3, 9, 1, 1, 20), (1,) * 12])
def test_rows_of_the_highest_rank(sizes: tuple[int, ...]):
    """Each at the place that it has in a storage of tensors, also after a copy of the buffer."""
    buffers = [
        TensorDictReplayBuffer(storage=storage(7), writer=TensorDictMaxValueWriter("reward"))
        for storage in (ListStorage, LazyTensorStorage)
    ]
    for number, n in enumerate(sizes):
        index = [buffer.extend(ranked(n, number)).tolist() for buffer in buffers]
        assert index[0] == index[1]
        if number == 1:
            buffers = [copy.deepcopy(buffer) for buffer in buffers]
    best = TensorDict({"reward": torch.tensor(1000)}, [])
    assert buffers[0].add(best) == buffers[1].add(best)
    assert buffers[0].add(best * 0) is None
    rows, tensors = buffers[0].storage[:], buffers[1].storage[:]["reward"].tolist()
    assert [int(row["reward"]) for row in rows] == tensors
    assert (len(buffers[0]), buffers[0].write_count) == (len(buffers[1]), buffers[1].write_count)


def test_rows_of_the_highest_rank_need_a_capacity_and_a_rank():
    with pytest.raises(ValueError, match="give the ListStorage a max_size"):
        ReplayBuffer(storage=ListStorage(), writer=TensorDictMaxValueWriter())
    buffer = ReplayBuffer(storage=ListStorage(4), writer=TensorDictMaxValueWriter())
    for kind in (TypeError, RuntimeError):
        with pytest.raises(kind, match="expects data to be a tensor collection, got a str"):
            buffer.extend(["text"])
    assert len(buffer) == 0


def test_priorities_that_come_with_rows():
    sampler = PrioritizedSampler(4, 1.0, 1.0, eps=0.0)
    buffer = TensorDictReplayBuffer(storage=ListStorage(4), sampler=sampler, batch_size=2)
    rows = TensorDict({"a": torch.arange(3), "td_error": torch.arange(1.0, 4.0)}, [3])
    buffer.extend(rows)
    buffer.add(rows[2])
    assert sampler.tree.leaves[:4].tolist() == [1.0, 2.0, 3.0, 3.0]
    buffer.extend(list(rows[:2].exclude("td_error")))
    assert sampler.tree.leaves[:4].tolist() == [3.0, 3.0, 3.0, 3.0]
