"""TorchRL's interface to batches from several buffers."""

from __future__ import annotations

import pytest
import torch

from gpubuf import ReplayBufferEnsemble
from gpubuf.data import LazyTensorStorage, PrioritizedSampler, RandomSampler, TensorDictRoundRobinWriter
from tests.support.mixed_setup import part
from tests.support.transitions import transitions


def test_probabilities_are_shares():
    """Flat batches, whose info says from which buffer each row is."""
    for options, due in (({"p": [0.25, 0.75]}, [2, 6]), ({"sample_from_all": True}, [4, 4]), ({}, [4, 4])):
        ensemble = ReplayBufferEnsemble(part(12, 0), part(12, 100), batch_size=8, **options)
        batch, info = ensemble.sample(return_info=True)
        assert torch.equal(info["buffer_ids"], info["buffer"])
        assert torch.equal(batch["buffer_ids"], (batch["observation"][:, 0] >= 100).long())
        assert torch.bincount(batch["buffer_ids"]).tolist() == due
    assert ensemble[1].storage.max_size == 20
    assert next(iter(ensemble)).shape == (8,)


def test_made_of_parts():
    ensemble = ReplayBufferEnsemble(
        storages=[LazyTensorStorage(10), LazyTensorStorage(12)],
        samplers=[RandomSampler(), PrioritizedSampler(12, 0.6, 0.4)],
        writers=[TensorDictRoundRobinWriter(), TensorDictRoundRobinWriter()],
        p=torch.tensor([0.5, 0.5]),
        num_buffer_sampled=2,
    )
    for number in range(2):
        ensemble.extend(transitions(8, 100 * number), buffer=number)
    batch = ensemble.sample(6)
    assert batch["buffer_ids"].tolist() == [0] * 3 + [1] * 3
    assert "priority_weight" in batch.keys()


def test_refused():
    one, other = part(12, 0), part(12, 100)
    for arguments in ((), (one,)):
        with pytest.raises(TypeError, match="either buffers or storages"):
            ReplayBufferEnsemble(*arguments, storages=[LazyTensorStorage(3)] if arguments else None)
    with pytest.raises(TypeError, match="buffers have their own"):
        ReplayBufferEnsemble(one, samplers=[RandomSampler()])
    with pytest.raises(ValueError, match="2 storages and 1 samplers"):
        ReplayBufferEnsemble(storages=[LazyTensorStorage(3), LazyTensorStorage(3)], samplers=[RandomSampler()])
    with pytest.raises(ValueError, match="exclude each other"):
        ReplayBufferEnsemble(one, other, p=[0.5, 0.5], sample_from_all=True)
    for options in ({"p": "sampleable"}, {"num_buffer_sampled": 1}, {"routing_key": "task"}):
        with pytest.raises(NotImplementedError, match="not supported by gpubuf"):
            ReplayBufferEnsemble(one, other, **options)
