"""``buffer._storage = other``, as programs for TorchRL write for want of a setter, replaces the part at once."""

from __future__ import annotations

import pytest
import torch

from gpubuf.data import (
    LazyTensorStorage,
    ListStorage,
    PrioritizedSampler,
    ReplayBuffer,
    RoundRobinWriter,
    SamplerWithoutReplacement,
    SliceSampler,
    TensorDictMaxValueWriter,
    TensorStorage,
)
from tests.support.transitions import transitions


@pytest.mark.parametrize("delayed", [False, True])
@pytest.mark.parametrize("prefetch", [0, 2])
def test_samples_are_of_the_assigned_storage(backend, delayed, prefetch):
    options = {"batch_size": 8, "prefetch": prefetch}
    buffer = ReplayBuffer(storage=LazyTensorStorage(16), delayed_init=delayed, **options)
    if not delayed:
        buffer.extend(transitions(16))
        buffer.sample()
    buffer._storage = TensorStorage(transitions(6, 100))
    assert set(buffer.sample()["next", "step"].tolist()) <= set(range(100, 106))
    assert len(buffer) == 6
    buffer.extend(transitions(2, 200))
    assert sorted(buffer["next", "step"].tolist()) == [102, 103, 104, 105, 200, 201]


def test_an_assigned_storage_has_the_priorities_of_new_rows(backend):
    buffer = ReplayBuffer(storage=LazyTensorStorage(8), sampler=PrioritizedSampler(8, alpha=1.0, beta=1.0))
    buffer.extend(transitions(8))
    buffer._storage = TensorStorage(transitions(8, 50))
    buffer.update_priority(torch.arange(7), 0.0)
    assert set(buffer.sample(20)["next", "step"].tolist()) == {57}


def test_samplers_and_writers_are_assigned_too(backend):
    buffer = ReplayBuffer(storage=LazyTensorStorage(8), batch_size=4)
    buffer.extend(transitions(8))
    buffer._sampler = SamplerWithoutReplacement()
    drawn = torch.cat([buffer.sample()["next", "step"] for _ in range(2)])
    assert sorted(drawn.tolist()) == list(range(8))
    buffer._writer = RoundRobinWriter(track_generations=True)
    assert "index_generation" in buffer.sample(return_info=True)[1]


def test_what_does_not_fit_is_refused_and_nothing_changes(backend):
    buffer = ReplayBuffer(storage=LazyTensorStorage(8), sampler=SliceSampler(slice_len=2, end_key=("next", "done")))
    before = buffer.storage
    with pytest.raises(TypeError, match="expected a TensorStorage"):
        buffer._storage = object()
    assert buffer.storage is before
    with pytest.raises(ValueError, match=r".*"):
        buffer._writer = TensorDictMaxValueWriter()


def test_the_constructors_collate_fn_stays_with_an_assigned_storage():
    buffer = ReplayBuffer(storage=ListStorage(4), collate_fn=len, batch_size=3)
    buffer._storage = ListStorage(8)
    buffer.extend(list("abcd"))
    assert buffer.sample() == 3
