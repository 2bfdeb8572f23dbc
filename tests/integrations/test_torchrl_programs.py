"""What programs that were written for TorchRL do that TorchRL takes no more, or never took.

What both give is in tests/contracts/test_torchrl.py.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from gpubuf.integrations import torchrl as data
from tests.contracts.torchrl_programs import run, transitions


@pytest.mark.filterwarnings("ignore")
def test_tensorclasses_in_a_tensordict_buffer():
    """The buffer tutorial does it, and TorchRL refuses it by now. The class has no field for an index."""
    one_row, rows = run("tensorclasses TensorDictReplayBuffer", data)
    assert [row["Row"]["a"] for row in one_row] == [["int64", 12, 10]] * 4
    assert rows["Row"].keys() == {"TensorDict", "a", "nested"}


def test_the_scripts_way_to_update_priorities():
    """SAC's and TD3's scripts pass the batch alone to ``update_priority``, which TorchRL takes no more."""
    buffer = data.TensorDictPrioritizedReplayBuffer(alpha=1.0, beta=1.0, eps=0.0, batch_size=8)
    buffer.extend(transitions(20))
    batch = buffer.sample()
    batch["td_error"] = torch.arange(8.0) + 5
    buffer.update_priority(batch)
    last = {int(i): float(p) for i, p in zip(batch["index"], batch["td_error"], strict=True)}
    assert buffer.sampler.tree.leaves[list(last)].tolist() == pytest.approx(list(last.values()))


def test_update_priority_without_priorities():
    message = "needs the index and the priority of rows: a batch that carries both goes to update_tensordict_priority"
    for buffer in (data.PrioritizedReplayBuffer(alpha=1.0, beta=1.0), data.TensorDictReplayBuffer()):
        buffer.extend(transitions(20))
        with pytest.raises(TypeError, match=message):
            buffer.update_priority(torch.arange(3))


@pytest.mark.parametrize("first", [range(5), ["a", 0], [None], (1, 2)], ids=["range", "list", "none", "tuple"])
def test_objects_in_a_buffer_that_was_given_no_storage(first: Any):
    """TorchRL's default storage takes anything; tensors still lie in one piece here."""
    buffer = data.ReplayBuffer(batch_size=4, collate_fn=lambda found: found)
    buffer.extend(first)
    assert isinstance(buffer.storage, data.ListStorage)
    assert len(buffer) == len(first)
    assert len(buffer.sample()) == 4


@pytest.mark.parametrize(
    "first",
    [torch.zeros(5, 2), transitions(5), [torch.zeros(2)] * 5, {"a": (torch.zeros(5), [torch.zeros(5)])}],
    ids=["tensor", "TensorDict", "list", "dict"],
)
def test_tensors_in_a_buffer_that_was_given_no_storage(first: Any):
    buffer = data.ReplayBuffer()
    buffer.extend(first)
    assert isinstance(buffer.storage, data.LazyTensorStorage)
    assert len(buffer) == 5


def test_one_object_in_a_buffer_that_was_given_no_storage():
    buffer = data.ReplayBuffer()
    assert [buffer.add("a"), buffer.add(1)] == [0, 1]


def test_rows_with_their_files():
    """A folder may be given by a TemporaryDirectory, as the buffer tutorial does, and is that folder."""
    with tempfile.TemporaryDirectory() as name:
        folder = tempfile.TemporaryDirectory(dir=name)
        storage = data.LazyMemmapStorage(10, scratch_dir=folder)
        assert storage._storage is None
        buffer = data.ReplayBuffer(storage=storage)
        rows = TensorDict({"a": torch.arange(3), "b": {"c": torch.ones(3)}}, [3])
        buffer.extend(rows)
        for key in ("a", ("b", "c")):
            file = Path(storage._storage[key].filename)
            assert file.is_relative_to(folder.name)
            assert torch.equal(storage._storage[key][:3], rows[key])
        buffer.extend(rows + 5)
        assert storage._storage["a"][:6].tolist() == [0, 1, 2, 5, 6, 7]
        del buffer, storage
        folder.cleanup()
