"""Slice samplers: what they draw, what they say about it, and what they refuse."""

from __future__ import annotations

import pytest
import torch
from tensordict import TensorDict

from gpubuf import (
    LazyTensorStorage,
    ReplayBuffer,
    SliceSampler,
    TensorDictReplayBuffer,
)
from tests.support.slice_model import SliceModel, episodes, filled, split
from tests.support.sum_tree_checks import chi_square, chi_square_bound

# What is drawn


@pytest.mark.parametrize("weighting", ["trajectory", "transition"])
def test_distribution_in_a_large_buffer(weighting):
    """Chi-square over trajectories, and over the places in them, where a ring of 400 000 rows has wrapped."""
    generator = torch.Generator().manual_seed(0)
    done = torch.rand(600_000, 1, generator=generator) < 0.02
    sampler = SliceSampler(slice_len=8, weighting=weighting)
    buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(400_000), sampler=sampler)
    buffer.set_rng(generator)
    buffer.extend(TensorDict({"number": torch.arange(600_000), "next": {"done": done}}, [600_000]))
    found = sampler.trajectories()
    assert found.length.sum() == 400_000
    eligible = found.length >= 8
    starts = torch.where(eligible, found.length - 7, 0)
    share = starts if weighting == "transition" else eligible.long()
    n, groups = 100_000, 200
    first = buffer.sample(8 * n)["number"].view(n, 8)[:, 0].contiguous()
    oldest = torch.cat([torch.zeros(1, dtype=torch.int64), found.length.cumsum(0)])[:-1] + 200_000
    which = torch.searchsorted(oldest, first, right=True) - 1
    assert eligible[which].all()
    group = torch.arange(len(found)) * groups // len(found)
    counts = torch.zeros(groups).index_add_(0, group[which], torch.ones(n))
    expected = torch.zeros(groups).index_add_(0, group, share.float()) / share.sum()
    assert chi_square(counts.tolist(), expected.tolist()) < chi_square_bound(groups - 1)
    # The place among the eligible starts of its trajectory, with a random rest, is uniform in [0, 1).
    place = (first - oldest[which] + torch.rand(n, generator=generator)) / starts[which]
    counts = torch.histc(place, 50, 0, 1)
    assert chi_square(counts.tolist(), [1 / 50] * 50) < chi_square_bound(49)


def test_one_long_trajectory_among_a_million_short_ones():
    """CASES 20: still exact, and the error names the longest where there is none."""
    flags = torch.ones(1_000_000, 1, dtype=torch.bool)
    data = TensorDict({"number": torch.arange(1_000_000), "next": {"done": flags}}, [1_000_000])
    flags[543_210:543_219] = False
    buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(1_000_000), sampler=SliceSampler(slice_len=10))
    buffer.extend(data)
    batch = buffer.sample(1000)
    assert set(split(batch)) == {tuple(range(543_210, 543_220))}
    buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(1_000_000), sampler=SliceSampler(slice_len=11))
    buffer.extend(data)
    with pytest.raises(RuntimeError, match=r"11 steps are needed, the longest .* has 10"):
        buffer.sample(11)


# What is said about it


def test_a_plain_buffer_keeps_its_batches_as_stored():
    model = SliceModel(100, 1)
    buffer = ReplayBuffer(storage=LazyTensorStorage(100), sampler=SliceSampler(num_slices=5), batch_size=20)
    buffer.extend(model.write(episodes(6, 5, 8)))
    batch, info = buffer.sample(return_info=True)
    assert set(batch.keys(True, True)) == {"number", "trajectory", "is_init", ("next", "done"), ("next", "terminated")}
    assert torch.equal(batch["next", "done"], buffer.storage[info["index"]]["next", "done"])
    assert info["next", "truncated"].sum() == 5


def test_keys_that_are_not_wanted():
    buffer, _ = filled(SliceSampler(slice_len=2, truncated_key=None, init_key=None), episodes(6, 5))
    batch, info = buffer.sample(8, return_info=True)
    assert set(info) == {"index"}
    assert torch.equal(batch["is_init"], buffer.storage[batch["index"]]["is_init"])
    buffer, _ = filled(SliceSampler(slice_len=2, truncated_key="cut", init_key="first"), episodes(6, 5))
    batch, info = buffer.sample(8, return_info=True)
    assert set(info) == {"index", "cut", "done", "terminated"}
    assert torch.equal(batch["done"], batch["cut"])
    assert not batch["terminated"].any()


def test_flags_of_agents():
    """A done flag of one element per agent keeps its shape, and any agent's ends the trajectory (CASES 29)."""
    done = torch.zeros(12, 3, 1, dtype=torch.bool)
    done[5, 1] = True
    data = TensorDict({"number": torch.arange(12), "next": {"done": done}}, [12])
    buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(12), sampler=SliceSampler(slice_len=6))
    buffer.extend(data)
    batch = buffer.sample(60)
    assert {one[0] for one in batch["number"].view(10, 6).tolist()} <= {0, 6}
    assert batch["next", "done"].shape == batch["next", "truncated"].shape == (60, 3, 1)
    assert batch["next", "truncated"].view(10, 6, 3)[:, -1].all()
    assert not batch["next", "truncated"].view(10, 6, 3)[:, :-1].any()
