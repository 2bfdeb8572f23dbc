"""TorchRL's checkpointers and hooks write and read the rows of gpubuf's buffers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tensordict import TensorDict

from gpubuf import data

theirs = pytest.importorskip("torchrl.data", reason="needs TorchRL")
KINDS = ("TensorStorageCheckpointer", "FlatStorageCheckpointer", "NestedStorageCheckpointer", "H5StorageCheckpointer")


def steps(n: int, start: int = 0) -> TensorDict:
    """``n`` steps of episodes of five, as TorchRL's environments give them."""
    number = torch.arange(start, start + n)
    observation = number.float().unsqueeze(-1)
    done = (number % 5 == 4).unsqueeze(-1)
    never = torch.zeros_like(done)
    flags = {"done": never, "terminated": never, "truncated": never}
    ends = {"done": done, "terminated": done, "truncated": never}
    coming = {"observation": observation + 1, "reward": observation, **ends}
    return TensorDict({"observation": observation, "action": observation * 2, **flags, "next": coming}, [n]).clone()


def buffer_of(library: Any, kind: str, n: int = 0) -> Any:
    if kind.startswith("H5"):
        pytest.importorskip("h5py", reason="needs h5py")
    checkpointer = getattr(theirs, kind)()
    buffer = library.ReplayBuffer(storage=library.LazyTensorStorage(10), checkpointer=checkpointer, batch_size=3)
    for start in range(0, n, 7):
        buffer.extend(steps(min(7, n - start), start))
    return buffer


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("n", [7, 10, 14])
@pytest.mark.parametrize("writer", [data, theirs], ids=["gpubuf", "TorchRL"])
def test_buffers_are_saved_and_loaded(tmp_path, kind, n, writer):
    first, other = buffer_of(writer, kind, n), buffer_of(data, kind)
    first.dumps(str(tmp_path))
    other.loads(str(tmp_path))
    assert (other[:] == first[:]).all()
    assert other.write_count == first.write_count
    for buffer in (first, other):
        buffer.extend(steps(2, 50))
    assert (other[:] == first[:]).all()


def test_hooks(tmp_path):
    first, other = (data.ReplayBuffer(storage=data.LazyTensorStorage(10)) for _ in range(2))
    first.register_save_hook(theirs.TED2Flat())
    other.register_load_hook(theirs.Flat2TED())
    first.extend(steps(10))
    first.dumps(tmp_path)
    # Observations are stored once, with the last one of each episode.
    assert TensorDict.load_memmap(tmp_path / "storage")["observation"].shape == (12, 1)
    other.loads(tmp_path)
    assert (other[:] == first[:]).all()


def test_storages_are_exchanged(tmp_path):
    first, other = data.TensorStorage(steps(6)), theirs.LazyTensorStorage(6)
    first.dumps(tmp_path)
    other.loads(tmp_path)
    assert (other[:] == first[:]).all()
    written = theirs.ReplayBuffer(storage=theirs.LazyTensorStorage(6), batch_size=2)
    written.extend(steps(4, 30))
    written.storage.dumps(tmp_path)
    again = data.LazyTensorStorage(6)
    again.loads(tmp_path)
    assert (again[:] == written[:]).all()
    assert again.cursor == 4


@pytest.mark.parametrize("kind", ["ListStorageCheckpointer", "StorageEnsembleCheckpointer"])
def test_checkpointers_of_other_storages_are_refused(kind):
    with pytest.raises(TypeError, match="leave checkpointer= out"):
        data.ReplayBuffer(checkpointer=getattr(theirs, kind)())
