"""Several batches in one draw: ``sample(batches=K)``."""

from __future__ import annotations

import pytest
import torch

from gpubuf import (
    LazyTensorStorage,
    PrioritizedSampler,
    RandomSampler,
    SamplerWithoutReplacement,
    TensorDictPrioritizedReplayBuffer,
    TensorDictReplayBuffer,
)
from tests.support.transitions import same, transitions


def new(sampler=None, capacity: int = 50, n: int = 40, ndim: int = 1, **options) -> TensorDictReplayBuffer:
    buffer = TensorDictReplayBuffer(
        storage=LazyTensorStorage(capacity, ndim=ndim),
        sampler=sampler,
        generator=torch.Generator().manual_seed(1),
        **{"batch_size": 8, **options},
    )
    if n:
        data = transitions(n)
        buffer.extend(data if ndim == 1 else data.view(2, n // 2))
    return buffer


@pytest.mark.parametrize("ndim", [1, 2])
@pytest.mark.parametrize(
    "sampler", [RandomSampler, lambda: PrioritizedSampler(50, 0.6, 0.4)], ids=["uniform", "prioritized"]
)
def test_they_are_one_large_batch_cut_into_parts(sampler, ndim):
    """The same rows, and the same random numbers, as a batch of K times the size."""
    several, large = (new(sampler(), ndim=ndim, batch_size=size) for size in (8, 24))
    batch, due = several.sample(batches=3), large.sample()
    assert batch.batch_size == (3, 8)
    assert same(batch.reshape(-1), due)
    assert batch["index"].shape == ((3, 8) if ndim == 1 else (3, 8, 2))
    assert torch.equal(batch["index"].flatten(0, 1), due["index"])
    for key in set(due.keys()) - {"index", "next"}:
        assert batch[key].shape[:2] == (3, 8)
    assert batch["observation"].is_contiguous()
    assert same(several.sample(), large.sample()[:8])


@pytest.mark.parametrize("ndim", [1, 2])
@pytest.mark.parametrize("way", ["all at once", "by index", "one part after the other"])
def test_priorities_come_back_for_all_parts(way, ndim):
    """Case 42: in one update; of a row in several parts the last priority counts."""
    buffer = TensorDictPrioritizedReplayBuffer(
        alpha=1.0, beta=0.5, eps=0.0, storage=LazyTensorStorage(20, ndim=ndim), batch_size=8
    )
    data = transitions(20)
    buffer.extend(data if ndim == 1 else data.view(2, 10))
    batch = buffer.sample(batches=6)
    batch["td_error"] = 1.0 + torch.arange(48.0).view(6, 8)
    if way == "all at once":
        buffer.update_tensordict_priority(batch)
    elif way == "by index":
        buffer.update_priority(batch["index"], batch["td_error"], generation=batch["index_generation"])
    else:
        for part in batch:
            buffer.update_tensordict_priority(part)
    positions = batch["index"].reshape(48, -1)
    flat = positions[:, 0] if ndim == 1 else positions[:, 0] * 2 + positions[:, 1]
    due = torch.ones(20)
    for row, priority in zip(flat.tolist(), batch["td_error"].flatten().tolist(), strict=True):
        due[row] = priority
    assert len(set(flat.tolist())) < 48
    torch.testing.assert_close(buffer.sampler.tree.leaves[:20], due)


def test_priorities_of_more_dimensions_and_of_rows_that_are_gone():
    """Case 42: as for single batches."""
    buffer = TensorDictPrioritizedReplayBuffer(
        alpha=1.0, beta=0.5, eps=0.0, storage=LazyTensorStorage(20), batch_size=8
    )
    buffer.extend(transitions(20))
    batch = buffer.sample(batches=3)
    batch["td_error"] = torch.stack([torch.full((3, 8), 7.0), torch.full((3, 8), 5.0)], -1)
    buffer.extend(transitions(10, 20))
    buffer.update_tensordict_priority(batch)
    rows = batch["index"].flatten()
    leaves = buffer.sampler.tree.leaves
    assert (leaves[rows[rows >= 10]] == 7).all()
    assert (leaves[:10] == 1).all()


def test_every_part_of_a_stratified_draw_is_stratified():
    """Not cut out of one: the first part would hold the first rows of the storage alone."""
    buffer = new(PrioritizedSampler(50, 1.0, 0.5, stratified=True), n=40, batch_size=10)
    for part in buffer.sample(batches=4):
        # The weights are equal: a row from every four.
        assert (part["index"] // 4).tolist() == list(range(10))
        assert part["priority_weight"].tolist() == [1.0] * 10


@pytest.mark.parametrize("drop_last", [False, True])
def test_epochs(drop_last):
    """Every row once an epoch, also where an epoch ends within a draw."""
    buffer = new(SamplerWithoutReplacement(drop_last=drop_last), n=20, batch_size=3)
    seen = torch.cat([buffer.sample(batches=4)["index"].flatten() for _ in range(5)]).tolist()
    length = 18 if drop_last else 20
    for start in range(0, 60 - length + 1, length):
        assert len(set(seen[start : start + length])) == length


def test_collate_and_transforms_see_all_of_them():
    shapes = []
    buffer = new(
        collate_fn=lambda data: shapes.append(data.shape) or data, transform=lambda data: data.set("x", data["action"])
    )
    assert buffer.sample(batches=3)["x"].shape == (3, 8, 1)
    assert shapes == [(3, 8)]


def test_a_sampler_of_ones_own():
    """One that draws by itself is asked for one large batch."""

    class Own(RandomSampler):
        def draw(self, n):
            self.asked = n
            return super().draw(n)

    buffer = new(Own())
    assert buffer.sample(batches=3).batch_size == (3, 8)
    assert buffer.sampler.asked == 24
