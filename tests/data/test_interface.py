"""The interface of the buffers: what TorchRL's users bring along, and what it says when something is wrong."""

from __future__ import annotations

import warnings

import pytest
import torch

from gpubuf.data import (
    LazyTensorStorage,
    RandomSampler,
    ReplayBuffer,
    RoundRobinWriter,
    TensorDictReplayBuffer,
    TensorDictRoundRobinWriter,
    TensorStorage,
)
from tests.support.transitions import same, transitions


def buffer_of(capacity: int, **kwargs) -> TensorDictReplayBuffer:
    return TensorDictReplayBuffer(storage=LazyTensorStorage(capacity), **kwargs)


def test_defaults():
    buffer = ReplayBuffer()
    assert buffer.storage.max_size == 1000
    assert isinstance(buffer.sampler, RandomSampler)
    assert isinstance(buffer.writer, RoundRobinWriter)
    assert isinstance(TensorDictReplayBuffer().writer, TensorDictRoundRobinWriter)


def test_components_may_be_factories_and_are_checked():
    buffer = ReplayBuffer(storage=lambda: LazyTensorStorage(3), sampler=RandomSampler, writer=RoundRobinWriter)
    assert buffer.storage.max_size == 3
    for name in ("storage", "sampler", "writer"):
        with pytest.raises(TypeError, match=name.capitalize()):
            ReplayBuffer(**{name: object()})
    with pytest.raises(TypeError):
        TensorDictReplayBuffer(storage=LazyTensorStorage(3)).extend(torch.zeros(3))


def test_batch_size():
    buffer = buffer_of(4, batch_size=2)
    buffer.extend(transitions(4))
    with pytest.warns(UserWarning, match="batch_size=3"):
        assert buffer.sample(3).batch_size == (3,)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        buffer.sample(3)
    free = buffer_of(4)
    free.extend(transitions(4))
    with pytest.raises(RuntimeError, match="batch_size"):
        free.sample()
    with pytest.raises(RuntimeError, match="batch_size"):
        next(iter(free))
    with pytest.raises(ValueError, match="prefetch"):
        ReplayBuffer(prefetch=2)
    with pytest.raises(ValueError, match="prefetch"):
        ReplayBuffer(prefetch=-1, batch_size=4)


def test_sampling_before_the_first_write_raises():
    with pytest.raises(RuntimeError, match="empty"):
        buffer_of(4).sample(1)
    with pytest.raises(RuntimeError, match="not initialized"):
        buffer_of(4)[0]


def test_update_priority_without_priorities():
    with pytest.raises(NotImplementedError):
        ReplayBuffer(storage=LazyTensorStorage(3)).extend(transitions(1), update_priority=False)
    buffer = buffer_of(3)
    buffer.extend(transitions(3))
    with pytest.warns(UserWarning, match="no priorities"):
        buffer.update_priority(torch.tensor([0]), 1.0)
    buffer.update_tensordict_priority(buffer.sample(2))


def test_what_is_out_of_scope_says_so():
    for argument in ("service_backend", "transport_options"):
        with pytest.raises(NotImplementedError, match=argument):
            ReplayBuffer(**{argument: 1})


def test_a_full_storage_can_be_given():
    data = transitions(5)
    buffer = TensorDictReplayBuffer(storage=TensorStorage(data))
    assert len(buffer) == 5
    assert same(buffer[:], data)
    assert buffer.storage[:]["observation"].data_ptr() != 0
    assert buffer.extend(transitions(1, 9)).tolist() == [0]
    with pytest.raises(ValueError, match="max_size"):
        TensorStorage(data, max_size=4)


def test_an_index_in_the_data_is_not_stored():
    buffer = buffer_of(8)
    buffer.extend(transitions(4))
    buffer.extend(buffer.sample(3))
    assert len(buffer) == 7
    assert "index" not in {leaf.name for leaf in buffer.storage.layout.leaves}
    assert buffer.storage[:]["index"].tolist() == list(range(7))


def test_repr_is_readable():
    buffer = buffer_of(4)
    assert "not initialized" in repr(buffer)
    buffer.extend(transitions(2))
    assert "2/4 rows" in repr(buffer)
    assert "('next', 'reward')" in repr(buffer)
