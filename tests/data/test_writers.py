"""Writers by themselves, and storages that are replaced."""

from __future__ import annotations

import json

import pytest
import torch

from gpubuf.integrations.torchrl import (
    ImmutableDatasetWriter,
    LazyTensorStorage,
    ReplayBuffer,
    RoundRobinWriter,
    TensorDictMaxValueWriter,
    TensorDictReplayBuffer,
    TensorStorage,
    Writer,
)
from tests.support.torchrl_buffers.edits import rows


def test_a_new_storage_has_its_collate_fn():
    buffer = ReplayBuffer(storage=LazyTensorStorage(8), collate_fn=lambda batch: batch["a"], batch_size=3)
    buffer.extend(rows(4))
    assert isinstance(buffer.sample(), torch.Tensor)
    before = buffer.set_storage(TensorStorage(rows(4)))
    assert set(buffer.sample().keys()) == {"a", "obs", "next"}
    buffer.set_storage(before, lambda batch: batch["obs"])
    assert buffer.sample().shape == (3, 2)
    with pytest.raises(TypeError, match="Storage"):
        buffer.set_storage(object())
    assert buffer.sample().shape == (3, 2)


def test_a_writer_adds_a_row(backend):
    buffer = ReplayBuffer(storage=LazyTensorStorage(3))
    assert [buffer.writer.add(rows(1, i)[0]) for i in range(5)] == [0, 1, 2, 0, 1]
    assert sorted(buffer["a"].tolist()) == [2, 3, 4]
    two = ReplayBuffer(storage=LazyTensorStorage(8, ndim=2))
    assert two.writer.add(rows(2)).tolist() == [[0, 0], [0, 1]]
    best = TensorDictReplayBuffer(storage=LazyTensorStorage(2), writer=TensorDictMaxValueWriter("a"))
    assert [best.writer.get_insert_index(rows(1, 5)[0]), best.writer.add(rows(1, 5)[0])] == [0, 0]
    for number, place in ((7, 1), (6, 0), (3, None), (9, 0)):
        assert best.writer.get_insert_index(rows(1, number)[0]) == place
        assert best.writer.add(rows(1, number)[0]) == place
    assert sorted(best["a"].tolist()) == [7, 9]


@pytest.mark.parametrize("n", [2, 5, 8])
def test_storage_and_writer_are_saved_one_by_one(tmp_path, n):
    first, other = (ReplayBuffer(storage=LazyTensorStorage(5)) for _ in range(2))
    for i in range(n):
        first.extend(rows(1, i))
    first.storage.dumps(tmp_path / "storage")
    first.writer.dumps(tmp_path / "writer")
    # As TorchRL's: the place of the next row is in the writer's file alone.
    described = tmp_path / "storage" / "storage_metadata.json"
    content = json.loads(described.read_text())
    assert content.pop("gpubuf")["written"] == n
    described.write_text(json.dumps(content))
    assert json.loads((tmp_path / "writer" / "metadata.json").read_text()) == {"cursor": n % 5, "write_count": n}
    other.storage.loads(tmp_path / "storage")
    other.writer.loads(tmp_path / "writer")
    assert other.write_count == n
    for buffer in (first, other):
        buffer.extend(rows(2, 50))
    assert other["a"].tolist() == first["a"].tolist()


def test_a_writer_that_does_not_fit_is_refused(tmp_path):
    first, other = (ReplayBuffer(storage=LazyTensorStorage(5)) for _ in range(2))
    first.extend(rows(3))
    first.writer.dumps(tmp_path)
    other.extend(rows(2))
    with pytest.raises(ValueError, match="cursor is at step 3"):
        other.writer.loads(tmp_path)
    with pytest.raises(ValueError, match="missing"):
        other.writer.loads(tmp_path / "nothing")
    best, again = (
        TensorDictReplayBuffer(storage=LazyTensorStorage(3), writer=TensorDictMaxValueWriter("a")) for _ in range(2)
    )
    best.extend(rows(5))
    best.writer.dumps(tmp_path / "best")
    again.extend(rows(5))
    again.writer.loads(tmp_path / "best")
    assert again.add(rows(1, 9)[0]) == best.add(rows(1, 9)[0])


def test_arguments_of_writers():
    assert isinstance(Writer(compilable=True), Writer)
    assert RoundRobinWriter(True, track_generations=True).tracks_generations
    writer = ImmutableDatasetWriter(compilable=True)
    buffer = ReplayBuffer(storage=TensorStorage(rows(3)), writer=writer)
    with pytest.raises(RuntimeError, match="can't be changed") as refused:
        buffer.writer.add(rows(1)[0])
    assert str(refused.value) == writer.WRITING_ERR
    writer.dumps("nowhere")
    writer.loads("nowhere")
