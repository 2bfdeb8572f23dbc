"""Writers by themselves, and storages that are replaced."""

from __future__ import annotations

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
    for number, place in ((5, 0), (7, 1), (6, 0), (3, None), (9, 0)):
        assert best.writer.add(rows(1, number)[0]) == place
    assert sorted(best["a"].tolist()) == [7, 9]


def test_arguments_of_writers():
    assert isinstance(Writer(compilable=True), Writer)
    assert RoundRobinWriter(True, track_generations=True).tracks_generations
    writer = ImmutableDatasetWriter(compilable=True)
    buffer = ReplayBuffer(storage=TensorStorage(rows(3)), writer=writer)
    with pytest.raises(RuntimeError, match="can't be changed") as refused:
        buffer.writer.add(rows(1)[0])
    assert str(refused.value) == writer.WRITING_ERR
