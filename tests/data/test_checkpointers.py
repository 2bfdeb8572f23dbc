"""Save and load hooks, and checkpointers: TorchRL's and those of users."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from tensordict import TensorDict

from gpubuf import data as gpubuf_data
from gpubuf.data import (
    LazyMemmapStorage,
    LazyTensorStorage,
    ListStorage,
    PrioritizedSampler,
    ReplayBuffer,
    SliceSampler,
    TensorDictReplayBuffer,
    TensorStorage,
)
from tests.support.torchrl_buffers.hooks import Doubled, Halved, Remembered, filled, rows
from tests.support.transitions import same, transitions


def test_a_save_with_hooks_restores_everything(tmp_path):
    def made(seed):
        sampler = PrioritizedSampler(6, alpha=1.0, beta=1.0)
        buffer = TensorDictReplayBuffer(
            storage=LazyTensorStorage(6), sampler=sampler, batch_size=4, generator=torch.Generator().manual_seed(seed)
        )
        buffer.register_save_hook(Doubled([]))
        buffer.register_load_hook(Halved([]))
        return buffer

    buffer, other = made(0), made(1)
    for start in (0, 3, 6):
        buffer.extend(rows(3, start))
    buffer.update_priority(torch.arange(6), torch.arange(6.0))
    buffer.save(tmp_path)
    other.load(tmp_path)
    assert same(other[:], buffer[:])
    for _ in range(3):
        mine, yours = buffer.sample(), other.sample()
        assert (mine == yours).all()
        buffer.extend(rows(2, 20))
        other.extend(rows(2, 20))


def test_a_smaller_dump_goes_into_a_larger_storage(tmp_path):
    buffer = filled(gpubuf_data, 8)
    buffer.register_save_hook(Doubled([]))
    buffer.save(tmp_path)
    other = ReplayBuffer(storage=LazyTensorStorage(20))
    other.register_load_hook(Halved([]))
    other.load(tmp_path)
    assert other["a"].tolist() == [2, 3, 4, 5, 6, 7]


def test_the_earlier_checkpoint_stays_whole(tmp_path):
    buffer = filled(gpubuf_data, 4)
    buffer.register_save_hook(Doubled([]))
    buffer.save(tmp_path)
    first = os.readlink(tmp_path / "storage")

    def failing(data, path):
        (Path(path) / "something").touch()
        raise OSError("no room")

    buffer.register_save_hook(failing)
    buffer.extend(rows(2, 50))
    with pytest.raises(OSError, match="no room"):
        buffer.save(tmp_path)
    assert [entry.name for entry in tmp_path.glob("storage-*")] == [first]
    other = filled(gpubuf_data, 0)
    other.register_load_hook(Halved([]))
    other.load(tmp_path)
    assert other["a"].tolist() == [0, 1, 2, 3]
    buffer.storage.checkpointer = None
    buffer.save(tmp_path)
    assert not list(tmp_path.glob("storage*"))
    plain = filled(gpubuf_data, 0)
    plain.load(tmp_path)
    assert plain["a"].tolist() == [0, 1, 2, 3, 50, 51]


def test_what_can_not_be_loaded_changes_nothing(tmp_path):
    buffer = filled(gpubuf_data, 4, checkpointer=Remembered())
    buffer.save(tmp_path)
    other = filled(gpubuf_data, 2)
    with pytest.raises(ValueError, match="saved by a Remembered: give the buffer that checkpointer"):
        other.load(tmp_path)
    broken = filled(gpubuf_data, 3, checkpointer=Remembered())
    Remembered.kept["len"] = 99
    with pytest.raises(ValueError, match="99 rows"):
        broken.load(tmp_path)
    assert [each["a"].tolist() for each in (other, broken)] == [[0, 1], [0, 1, 2]]


def test_checkpointers_are_checked():
    class StorageEnsembleCheckpointer(Remembered): ...

    with pytest.raises(TypeError, match="dumps"):
        ReplayBuffer(checkpointer=object())
    with pytest.raises(TypeError, match="StorageEnsemble"):
        ReplayBuffer(checkpointer=StorageEnsembleCheckpointer())
    buffer = ReplayBuffer(storage=LazyTensorStorage(4, dtypes={"a": torch.int32}), checkpointer=Remembered())
    buffer.extend(rows(2))
    with pytest.raises(NotImplementedError, match="without dtypes"):
        buffer.save("never")


STORAGES = {
    "plain": lambda: LazyTensorStorage(8),
    "two dimensions": lambda: LazyTensorStorage(8, ndim=2),
    "other dtypes": lambda: LazyTensorStorage(8, dtypes={"observation": torch.float16}),
    "shared": lambda: LazyTensorStorage(8, share_next=True),
}


@pytest.mark.parametrize("kind", STORAGES)
@pytest.mark.parametrize("n", [4, 12])
def test_a_storage_alone(tmp_path, kind, n):
    first, other = (ReplayBuffer(storage=STORAGES[kind](), batch_size=4) for _ in range(2))
    for start in range(0, n, 4):
        data = transitions(4, start)
        first.extend(data.view(2, 2) if kind == "two dimensions" else data)
    first.storage.dumps(tmp_path / "new" / "storage")
    other.storage.loads(tmp_path / "new" / "storage")
    assert same(other[:], first[:])
    assert len(other) == len(first)
    assert other.storage.cursor == first.storage.cursor
    first.storage.save(tmp_path / "new" / "storage")
    other.sample()


def test_objects_text_and_containers(tmp_path):
    for make, data in (
        (lambda: ListStorage(4), ["a", "b", "c"]),
        (lambda: LazyTensorStorage(4), {"x": torch.arange(3.0), "y": (torch.ones(3, 2),)}),
        (lambda: LazyTensorStorage(4), torch.arange(3.0)),
    ):
        first, other = (ReplayBuffer(storage=make()) for _ in range(2))
        first.extend(data)
        first.storage.dumps(tmp_path)
        other.storage.loads(tmp_path)
        assert str(other[:]) == str(first[:])


def test_samplers_hear_of_rows_that_were_loaded(tmp_path, backend):
    data = rows(6).set(("next", "done"), torch.tensor([0, 0, 1, 0, 0, 1], dtype=torch.bool).unsqueeze(-1))
    TensorStorage(data).dumps(tmp_path)
    slices = ReplayBuffer(storage=LazyTensorStorage(6), sampler=SliceSampler(slice_len=3), batch_size=3)
    prioritized = ReplayBuffer(storage=LazyTensorStorage(6), sampler=PrioritizedSampler(6, 1.0, 1.0))
    for buffer in (slices, prioritized):
        buffer.extend(data[:1].clone())
        buffer.storage.loads(tmp_path)
    assert {tuple(slices.sample()["a"].tolist()) for _ in range(12)} == {(0, 1, 2), (3, 4, 5)}
    assert set(prioritized.sample(300)["a"].tolist()) == set(range(6))


def test_files_of_a_memmap_storage(tmp_path):
    buffer = ReplayBuffer(storage=LazyMemmapStorage(6, scratch_dir=tmp_path / "rows"))
    buffer.extend(rows(4))
    buffer.storage.dumps(tmp_path / "dump")
    other = LazyMemmapStorage(6, scratch_dir=tmp_path / "other")
    other.loads(tmp_path / "dump")
    assert other[:]["a"].tolist() == [0, 1, 2, 3]


def test_a_damaged_dump_is_refused(tmp_path):
    with pytest.raises(FileNotFoundError):
        LazyTensorStorage(4).loads(tmp_path / "nothing")
    with pytest.raises(ValueError, match="holds no"):
        LazyTensorStorage(4).loads(tmp_path)
    storage = TensorStorage(rows(4))
    storage.dumps(tmp_path)
    (tmp_path / "a.memmap").write_bytes(b"")
    with pytest.raises(ValueError, match="bytes"):
        storage.loads(tmp_path)
    assert storage[:]["a"].tolist() == [0, 1, 2, 3]
    assert isinstance(storage[:], TensorDict)


def test_flat_storages():
    buffer = ReplayBuffer(storage=LazyTensorStorage(8, ndim=2))
    buffer.extend(transitions(6).view(2, 3))
    flat = buffer.storage.flatten()
    assert flat[:]["next", "step"].tolist() == [0, 3, 1, 4, 2, 5]
    assert flat.flatten() is flat
    assert len(ReplayBuffer(storage=flat)) == 6


def test_attached_buffers():
    buffer = ReplayBuffer(storage=LazyTensorStorage(4))
    buffer.storage.attach(buffer)
    with pytest.raises(NotImplementedError, match="mark_update"):
        LazyTensorStorage(4).attach(buffer)
