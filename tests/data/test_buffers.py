"""Buffers at large: writing, reading, sampling, the interface that TorchRL's users bring along, and its errors."""

from __future__ import annotations

import warnings

import pytest
import torch
from tensordict import TensorDict
from torch import nn

from gpubuf.data import (
    LazyTensorStorage,
    PrioritizedSliceSampler,
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


def prioritized_slices() -> PrioritizedSliceSampler:
    return PrioritizedSliceSampler(8, alpha=0.7, beta=0.5, slice_len=1)


@pytest.mark.parametrize("by_columns", [False, True])
@pytest.mark.parametrize("ndim", [1, 2])
@pytest.mark.parametrize("sampler", [RandomSampler, prioritized_slices])
def test_an_emptied_buffer_takes_rows_of_another_form(sampler, ndim, by_columns):
    """As TorchRL's: a program that warms up with other keys goes on."""
    buffer = TensorDictReplayBuffer(
        storage=LazyTensorStorage(8, ndim=ndim), sampler=sampler(), batch_size=4, dim_extend=0
    )
    done = torch.zeros(4, 1, dtype=torch.bool)
    first = TensorDict({"a": torch.arange(4.0), "next": {"done": done}}, [4])
    second = TensorDict({"b": torch.ones(4, 3), "next": {"done": done}}, [4])
    index = buffer.extend(first if ndim == 1 else first.view(2, 2))
    buffer.empty()
    other = second if ndim == 1 else second.view(4, 1)
    if by_columns:
        buffer.extend_columns({"b": other["b"], ("next", "done"): other["next", "done"]})
    else:
        assert torch.equal(buffer.extend(other), torch.tensor([[i, 0] for i in range(4)] if ndim == 2 else range(4)))
    assert set(buffer.sample().keys()) >= {"b", "next"}
    assert buffer.write_count == len(buffer) == 4
    if sampler is prioritized_slices and ndim == 1:
        # A priority that returns for a row of before comes too late.
        due = buffer.sampler.tree.leaves.clone()
        buffer.update_priority(index, 9.0, generation=torch.zeros(4, dtype=torch.int64))
        assert torch.equal(buffer.sampler.tree.leaves, due)
    with pytest.raises(ValueError, match="give that a placeholder for what comes later, or empty"):
        buffer.extend(first if ndim == 1 else first.view(4, 1))
    mapped = ReplayBuffer(storage=TensorStorage(torch.zeros(8, 2)))
    mapped.empty()
    mapped.extend(torch.ones(3, 5))
    assert mapped[:].shape == (3, 5)


def test_a_count_of_rows_goes_on_with_rows_of_another_form():
    """``empty(False)`` keeps it; ``free()`` and the state of a buffer that nothing was written to begin anew."""
    buffer = ReplayBuffer(storage=LazyTensorStorage(8))
    buffer.extend(torch.zeros(5, 2))
    buffer.empty(empty_write_count=False)
    buffer.extend(torch.zeros(3, 4))
    assert (len(buffer), buffer.write_count) == (3, 8)
    buffer.free()
    assert buffer.write_count == 0
    buffer.extend(torch.zeros(3, 4))
    assert buffer.write_count == 3
    buffer.load_state_dict(ReplayBuffer(storage=LazyTensorStorage(8)).state_dict())
    assert (len(buffer), buffer.write_count) == (0, 0)


@pytest.mark.usefixtures("backend")
class TestWriting:
    @pytest.mark.parametrize(
        ("kind", "sampler", "ndim"), [(ReplayBuffer, RandomSampler, 1), (TensorDictReplayBuffer, prioritized_slices, 2)]
    )
    def test_an_empty_first_write_settles_nothing(self, kind, sampler, ndim):
        """CASES 15: an empty list, zero rows, no keys: what rows look like is up to the first that has any."""
        buffer = kind(storage=LazyTensorStorage(8, ndim=ndim), sampler=sampler())
        none, some = ((0,), (4,)) if ndim == 1 else ((2, 0), (2, 4))
        nothing = [
            [],
            TensorDict({}, none),
            TensorDict({"other": torch.zeros(*none, 3)}, none),
            TensorDict({}, some),
            TensorDict({"next": TensorDict({}, some)}, some),
        ]
        for data in nothing:
            index = buffer.extend(data)
            assert index.dtype is torch.int64
            assert index.shape == ((0,) if ndim == 1 else (0, 2))
            assert not buffer.initialized
        index = buffer.extend(transitions(4 * ndim).reshape(some))
        for data in nothing[:3]:
            assert buffer.extend(data).shape == (0, *index.shape[1:])
        assert len(buffer) == buffer.write_count == index.shape[0]
        with pytest.raises(ValueError, match="missing"):
            buffer.extend(TensorDict({}, some))
        assert len(buffer.sample(4)) == 4

    def test_a_storage_of_no_keys_is_refused(self):
        with pytest.raises(ValueError, match="no keys"):
            TensorStorage(TensorDict({}, [4]), device="auto")

    def test_thousands_of_wraps_and_counters_beyond_int32(self):
        """CASES 15: TorchRL's counters are int32 and wrap silently at 2**31."""
        buffer = buffer_of(3)
        buffer.extend(transitions(2))
        far = 3 * 2**40 + 1
        buffer.storage.ring.counters[0] = far
        buffer.storage.refresh()
        assert buffer.write_count == far
        assert buffer.extend(transitions(4)).tolist() == [-1, 2, 0, 1]
        assert buffer.write_count == far + 4

    def test_the_callers_tensordict_is_never_changed(self):
        data = transitions(4)
        before = data.clone()
        buffer = buffer_of(8, transform=_Doubling())
        buffer.extend(data)
        buffer.sample(4)
        assert same(data, before)
        assert buffer.storage[:]["observation"].equal(before["observation"] * 2)

    def test_rows_that_require_grad_are_stored_detached(self):
        buffer = buffer_of(4)
        data = TensorDict({"x": torch.randn(2, 3, requires_grad=True)}, [2])
        buffer.extend(data)
        assert not buffer.sample(2)["x"].requires_grad

    def test_rows_out_of_range_are_reported_by_whatever_synchronises(self, backend):
        """A GPU can't raise without a sync; the interpreter shows what it does instead."""
        if backend == "numba":
            pytest.skip("the CPU raises at once: see test_indexing")
        buffer = buffer_of(4)
        buffer.extend(transitions(4))
        tensors, generation = buffer.storage.plans.batch.gather(torch.tensor([3, 9]))
        assert generation.tolist() == [1, -1]
        assert all(not t[1].any() for t in tensors)
        with pytest.raises(IndexError, match="1 rows"):
            buffer.state_dict()
        assert buffer.state_dict()["_storage"]["size"] == 4


class _Doubling(nn.Module):
    """A transform with an inverse that works in place, as TorchRL's do."""

    def forward(self, td):
        return td

    def inv(self, td):
        return td.set("observation", td["observation"].mul(2))


@pytest.mark.usefixtures("backend")
class TestSampling:
    def test_a_batch_is_owned_by_the_caller(self):
        """CASES 35: a batch kept by the user is never overwritten by later samples or writes."""
        buffer = buffer_of(10)
        buffer.extend(transitions(10))
        kept = buffer.sample(6)
        before = kept.clone()
        buffer.sample(6)
        buffer.extend(transitions(10, 500))
        assert same(kept, before)

    def test_changing_one_key_in_place_leaves_backward_through_another_intact(self):
        """CASES 35: the keys of a batch may share one allocation, but no version counter."""
        buffer = buffer_of(10)
        buffer.extend(transitions(10))
        batch = buffer.sample(4)
        weight = torch.ones(3, requires_grad=True)
        loss = (batch["observation"] * weight).square().sum()
        step = batch["next", "step"].clone()
        batch["pixels"].zero_()
        batch["next", "reward"].fill_(7)
        loss.backward()
        assert torch.equal(weight.grad, 2 * batch["observation"].square().sum(0))
        assert torch.equal(batch["next", "step"], step)

    def test_every_key_is_contiguous_and_aligned(self, backend):
        """Also in a batch of a megabyte and more, which is one allocation."""
        buffer = buffer_of(10)
        buffer.extend(transitions(10))
        for n in (3, 30_000) if backend == "numba" else (3,):
            batch = buffer.sample(n)
            assert same(batch, transitions(10)[batch["index"]])
            for value in batch.values(True, True):
                assert value.is_contiguous()
                assert value.data_ptr() % 16 == 0


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
    with pytest.raises(ValueError, match="prefetch"):
        ReplayBuffer(prefetch=2)
    with pytest.raises(ValueError, match="prefetch"):
        ReplayBuffer(prefetch=-1, batch_size=4)


def test_reading_before_the_first_write_raises():
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
