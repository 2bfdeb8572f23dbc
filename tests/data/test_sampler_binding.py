"""A sampler serves the storage that it is bound to; samplers of one's own."""

import pytest
import torch
from torch import Tensor

from gpubuf.data import (
    LazyTensorStorage,
    PrioritizedSampler,
    RandomSampler,
    Sampler,
    SamplerWithoutReplacement,
    SliceSampler,
    TensorDictReplayBuffer,
)
from tests.support.transitions import transitions

SAMPLERS = {
    "random": RandomSampler,
    "without replacement": SamplerWithoutReplacement,
    "prioritized": lambda: PrioritizedSampler(100, 0.7, 0.5),
    "slices": lambda: SliceSampler(slice_len=1),
}


def filled(sampler: Sampler, n: int = 20) -> TensorDictReplayBuffer:
    buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(20), sampler=sampler, batch_size=5)
    buffer.extend(transitions(n))
    return buffer


@pytest.mark.parametrize("kind", SAMPLERS)
def test_a_sampler_of_two_buffers_is_refused(kind):
    """Each would draw rows of its own storage by what the sampler knows of the other's."""
    sampler = SAMPLERS[kind]()
    buffer = filled(sampler)
    with pytest.raises(ValueError, match="a sampler of its own"):
        filled(sampler)
    with pytest.raises(ValueError, match="a sampler of its own"):
        sampler.sample(LazyTensorStorage(20), 4)
    assert buffer.sample().shape == (5,)


@pytest.mark.parametrize("kind", SAMPLERS)
@pytest.mark.parametrize("left", ["gone", "given another sampler"])
def test_a_sampler_moves_on_to_another_buffer(kind, left):
    """It begins there with a tree, an index and an epoch of its own."""
    sampler = SAMPLERS[kind]()
    first = filled(sampler)
    first.sample()
    if left == "gone":
        del first
    else:
        first.set_sampler(RandomSampler())
    second = filled(sampler, 10)
    assert second.sample()["index"].max() < 10
    assert sampler.storage is second.storage
    if kind == "prioritized":
        assert float(sampler.tree.total) == pytest.approx(10.0)


def test_a_sampler_that_returns_takes_all_rows_for_new():
    sampler = PrioritizedSampler(20, 1.0, 0.5)
    buffer = filled(sampler, 10)
    buffer.set_sampler(RandomSampler())
    buffer.extend(transitions(5))
    buffer.set_sampler(sampler)
    buffer.sample()
    assert float(sampler.tree.total) == pytest.approx(15.0)


class EvenRandom(RandomSampler):
    """Overrides a sampler that chooses and gathers in one launch, and uses its choice."""

    def sample(self, storage, batch_size):
        index, info = super().sample(storage, batch_size)
        return index // 2 * 2, info


class EvenChosen(RandomSampler):
    """As above, the other way."""

    def choose(self, n):
        positions, info = super().choose(n)
        return positions // 2 * 2, info


@pytest.mark.parametrize("kind", [EvenRandom, EvenChosen])
def test_a_sampler_derived_from_one_of_ours(kind, tmp_path):
    """Through extend, sample, update and a checkpoint."""
    buffer = filled(kind(), 13)
    batch = buffer.sample(5)
    assert not (batch["index"] % 2).any()
    assert torch.equal(batch["observation"], buffer[batch["index"]]["observation"])
    index, info = buffer.sampler.sample(buffer.storage, 5)
    assert (index.shape, info) == ((5,), {})
    buffer.update_tensordict_priority(batch.set("td_error", torch.ones(5)))
    with pytest.warns(UserWarning, match="has no priorities"):
        buffer.update_priority(index, 1.0)
    buffer.save(tmp_path)
    other = TensorDictReplayBuffer(storage=LazyTensorStorage(20), sampler=kind(), batch_size=5)
    other.load(tmp_path)
    assert torch.equal(buffer.sample(5)["index"], other.sample()["index"])


class Counting(EvenChosen):
    """Declares that it has a use for priorities, and keeps them."""

    has_priorities = True

    def __init__(self) -> None:
        super().__init__()
        self.priorities = torch.zeros(20)

    def on_write(self, positions: Tensor, priority: Tensor | None) -> None:
        self.priorities[positions] = 1.0 if priority is None else priority

    def update_priority(self, index, priority, *, storage=None, generation=None):
        self.priorities[index] = priority


def test_a_sampler_of_ones_own_with_priorities():
    buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(20), sampler=Counting(), batch_size=5)
    buffer.extend(transitions(13).set("td_error", torch.zeros(13, 2)), update_priority=False)
    assert buffer.sampler.priorities[:13].tolist() == [1.0] * 13
    buffer.extend(transitions(2).set("td_error", torch.tensor([[2.0, 3.0], [5.0, 4.0]])))
    assert buffer.sampler.priorities[13:15].tolist() == [3.0, 5.0]
    batch = buffer.sample()
    assert torch.equal(batch["index_generation"], torch.ones(5, dtype=torch.int64))
    batch["td_error"] = torch.full((5, 2), 7.0)
    buffer.update_tensordict_priority(batch)
    assert buffer.sampler.priorities[batch["index"]].tolist() == [7.0] * 5
