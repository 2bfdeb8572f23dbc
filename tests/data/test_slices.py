"""Slice samplers: what they draw, what they say about it, and what they refuse."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from fractions import Fraction

import pytest
import torch
from tensordict import TensorDict

from gpubuf import (
    LazyTensorStorage,
    PrioritizedSliceSampler,
    ReplayBuffer,
    SliceSampler,
    SliceSamplerWithoutReplacement,
    TensorDictReplayBuffer,
)
from tests.support.slice_model import SliceModel, episodes, filled, split
from tests.support.sum_tree_checks import chi_square, chi_square_bound


def check_distribution(buffer: ReplayBuffer, slice_len: int, due: dict[tuple[int, ...], Fraction], n: int) -> None:
    """Chi-square of the slices of one large batch."""
    seen = Counter(split(buffer.sample(n * slice_len)))
    assert set(seen) <= set(due)
    statistic = chi_square([seen[numbers] for numbers in due], [float(share) for share in due.values()])
    assert statistic < chi_square_bound(len(due) - 1)


# What is drawn


@pytest.mark.parametrize("weighting", ["trajectory", "transition"])
@pytest.mark.parametrize("options", [{}, {"strict_length": False}, {"span": True}, {"span": (1, 2)}])
def test_distribution(weighting, options):
    """Uniform over eligible trajectories, then over starts; or uniform over starts. CASES 19 and 20."""
    torch.manual_seed(0)
    buffer, model = filled(SliceSampler(slice_len=4, weighting=weighting, **options), episodes(1, 5, 3, 9, 4, 2, 0))
    span = options.get("span", (0, 0))
    before, after = (3, 3) if span is True else span
    due = model.slices(4, options.get("strict_length", True), before, after, weighting == "transition")
    check_distribution(buffer, 4, due, 4000)


def test_distribution_of_many_environments():
    """CASES 19: slices never mix environments."""
    torch.manual_seed(0)
    flags = [[(t + e) % (3 + e) == 0 for e in range(5)] for t in range(25)]
    buffer, model = filled(SliceSampler(slice_len=3), flags, capacity=5 * 20)
    check_distribution(buffer, 3, model.slices(3), 8000)


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


def test_distribution_of_priorities():
    """The start of a slice is drawn in proportion to its priority among eligible starts; equal ones are uniform."""
    torch.manual_seed(0)
    sampler = PrioritizedSliceSampler(1000, alpha=1.0, beta=1.0, eps=0.0, slice_len=4)
    buffer, model = filled(sampler, episodes(1, 5, 3, 9, 4, 2, 0))
    check_distribution(buffer, 4, model.slices(4, by_transition=True), 4000)
    eligible = model.starts(4, False)
    # Rows that can't start a slice have by far the largest priorities.
    priority = {row.number: 1000.0 for row in model.rows[0]} | {n: float(i + 1) for i, n in enumerate(eligible)}
    buffer.update_priority(
        torch.tensor([row.position for row in model.rows[0]]), torch.tensor([priority[r.number] for r in model.rows[0]])
    )
    total = sum(int(priority[n]) for n in eligible)
    due = {tuple(range(n, n + 4)): Fraction(int(priority[n]), total) for n in eligible}
    check_distribution(buffer, 4, due, 4000)
    batch = buffer.sample(64)
    weight = [1.0 / priority[numbers[0]] for numbers in split(batch) for _ in numbers]
    assert batch["priority_weight"].tolist() == pytest.approx(weight, rel=1e-5)


def test_priorities_of_ineligible_starts_stay():
    """They count as soon as their trajectory has grown: nothing was overwritten to hide them."""
    sampler = PrioritizedSliceSampler(100, alpha=1.0, beta=1.0, eps=0.0, slice_len=3)
    buffer, model = filled(sampler, episodes(2, 0), capacity=100)
    buffer.update_priority(torch.tensor([0, 1]), torch.tensor([5.0, 3.0]))
    with pytest.raises(RuntimeError, match="3 steps are needed"):
        buffer.sample(3)
    buffer.extend(model.write([[False]]))
    assert set(split(buffer.sample(30))) == {(0, 1, 2)}
    assert sampler.tree.leaves[:3].tolist() == [5.0, 3.0, 5.0]
    buffer.extend(model.write([[False]]))
    assert float(sampler.tree.total) == 8.0
    assert set(split(buffer.sample(300))) == {(0, 1, 2), (1, 2, 3)}


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


def test_nothing_is_long_enough():
    """CASES 25: raise, never fall back to row 0."""
    for sampler in (
        SliceSampler(slice_len=4),
        SliceSamplerWithoutReplacement(slice_len=4),
        PrioritizedSliceSampler(1000, 1.0, 1.0, slice_len=4),
    ):
        buffer, _ = filled(sampler, episodes(3, 1, 2))
        with pytest.raises(RuntimeError, match=r"4 steps are needed.*3"):
            buffer.sample(8)


def test_the_trajectory_in_progress():
    """CASES 21: sampleable up to its last written row, and in one piece when it goes on."""
    sampler = SliceSampler(slice_len=3)
    buffer, model = filled(sampler, episodes(4, 0))
    for n in range(5, 9):
        buffer.extend(model.write([[False]]))
        assert set(split(buffer.sample(300))) == set(model.slices(3)) == {(i, i + 1, i + 2) for i in range(n - 2)}
    assert sampler.trajectories().ended.tolist() == [False]


@pytest.mark.parametrize("chunk", [1, 3, 7, 10, 11, 25])
def test_the_seam(chunk):
    """CASES 15 and 16: the newest rows are never paired with the oldest, whatever the size of the writes."""
    sampler = SliceSampler(slice_len=3)
    buffer, model = filled(sampler, episodes(0 + 5), capacity=10)
    for _ in range(30):
        buffer.extend(model.write([[False]] * chunk))
        due = set(model.slices(3))
        seen = set(split(buffer.sample(600)))
        assert seen == due
        assert all(b == a + 1 for one in seen for a, b in itertools.pairwise(one))


def test_heads_that_were_overwritten():
    """CASES 19: what is left of an old trajectory can be drawn, what is gone cannot (TorchRL 1969, 2193, 2208)."""
    sampler = SliceSampler(slice_len=3)
    buffer, model = filled(sampler, episodes(6, 4), capacity=10)
    for written in range(1, 8):
        buffer.extend(model.write([[False]]))
        oldest = written
        assert min(min(one) for one in split(buffer.sample(3000))) >= oldest
        assert set(split(buffer.sample(3000))) == set(model.slices(3))


@pytest.mark.parametrize("weighting", ["trajectory", "transition"])
@pytest.mark.parametrize("by_id", [False, True])
@pytest.mark.parametrize(("steps", "envs", "end"), [(200, 1, 0.02), (200, 1, 0.3), (130, 3, 0.02), (300, 2, 0.004)])
def test_the_index_stays_exact(steps, envs, end, by_id, weighting):
    """After each of hundreds of small writes, in rings of several words, it counts what the model counts (CASES 15)."""
    flags = random.Random(0)
    keys = {"traj_key": "trajectory"} if by_id else {"end_key": ("next", "done")}
    sampler = SliceSampler(slice_len=3, weighting=weighting, **keys)
    model = SliceModel(steps, envs, by_id)
    storage = LazyTensorStorage(steps * envs, ndim=1 if envs == 1 else 2)
    buffer = TensorDictReplayBuffer(storage=storage, sampler=sampler)
    for _ in range(200):
        n = flags.choice([1, 1, 2, 5, 40])
        buffer.extend(model.write([[flags.random() < end for _ in range(envs)] for _ in range(n)]))
        index = sampler.trajectory_index
        offsets = [index.rule.offsets(len(t)) for t in model.trajectories()]
        assert int(index.total) == (sum(offsets) if weighting == "transition" else sum(map(bool, offsets)))
    # A rebuild changes nothing.
    before = index.ends.clone(), index.sums.clone()
    index.rebuild()
    assert torch.equal(index.sums, before[1])
    assert by_id or torch.equal(index.ends, before[0])


# What is said about it


def test_batches_are_flat_and_flagged():
    """CASES 24: the first flag is set at every slice start."""
    buffer, _ = filled(SliceSampler(slice_len=4), episodes(6, 5, 8))
    batch, info = buffer.sample(32, return_info=True)
    assert batch.batch_size == (32,)
    for key in (("next", "truncated"), ("next", "done"), ("next", "terminated"), "is_init"):
        assert info[key].shape == (32, 1)
        assert info[key].dtype is torch.bool
        assert torch.equal(info[key], batch[key])
    numbers = batch["number"].view(8, 4)
    assert torch.equal(numbers - numbers[:, :1], torch.arange(4).expand(8, 4))
    assert torch.equal(batch["index"].view(8, 4), numbers)
    last = torch.tensor([False, False, False, True]).repeat(8)
    first = torch.tensor([True, False, False, False]).repeat(8)
    stored = buffer.storage[batch["index"]]
    assert torch.equal(batch["next", "truncated"].squeeze(1), last)
    assert torch.equal(batch["next", "done"].squeeze(1), stored["next", "done"].squeeze(1) | last)
    assert torch.equal(batch["next", "terminated"], stored["next", "terminated"])
    assert torch.equal(batch["is_init"].squeeze(1), stored["is_init"].squeeze(1) | first)
    # In the buffer nothing has changed.
    assert torch.equal(buffer.storage[:]["next", "done"].squeeze(1), torch.tensor(episodes(6, 5, 8)).squeeze(1))


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


def test_short_slices():
    """Without strict_length the batch is ragged; padded, it says which steps are real."""
    torch.manual_seed(0)
    buffer, _ = filled(SliceSampler(slice_len=4, strict_length=False), episodes(1, 2, 3))
    slices = split(buffer.sample(400))
    assert len(slices) == 100
    assert set(slices) == {(0,), (1, 2), (3, 4, 5)}
    buffer, _ = filled(SliceSampler(slice_len=4, strict_length=False, pad_output=True), episodes(1, 2, 3))
    batch, info = buffer.sample(400, return_info=True)
    assert batch.batch_size == (400,)
    real = info["collector", "mask"].view(100, 4)
    assert torch.equal(batch["collector", "mask"], info["collector", "mask"])
    numbers, last = batch["number"].view(100, 4), batch["next", "truncated"].view(100, 4)
    assert {tuple(row[mask].tolist()) for row, mask in zip(numbers, real, strict=True)} == set(slices)
    lengths = real.sum(1)
    assert torch.equal(last.nonzero(), torch.stack([torch.arange(100), lengths - 1], 1))
    # What is behind the last step repeats it.
    assert torch.equal(numbers, numbers.gather(1, torch.minimum(torch.arange(4).expand(100, 4), lengths[:, None] - 1)))


@pytest.mark.parametrize("envs", [1, 3])
def test_stacked_batches(envs):
    sampler = SliceSampler(slice_len=4, stack=True)
    buffer, _ = filled(sampler, [[t % 6 == 5] * envs for t in range(40)])
    batch, info = buffer.sample(32, return_info=True)
    assert batch.batch_size == (8, 4)
    assert batch["next"].batch_size == (8, 4)
    assert info["index"].shape == ((8, 4) if envs == 1 else (8, 4, 2))
    assert batch["next", "truncated"].shape == (8, 4, 1)
    assert batch["next", "truncated"].squeeze(-1).tolist() == [[False, False, False, True]] * 8
    assert (batch["number"].diff(dim=1) == envs).all()
    sampler = PrioritizedSliceSampler(1000, 1.0, 1.0, slice_len=4, stack=True)
    buffer, _ = filled(sampler, [[t % 6 == 5] * envs for t in range(40)])
    batch = buffer.sample(32)
    assert batch["priority_weight"].shape == batch["index_generation"].shape == (8, 4)
    batch["td_error"] = torch.rand(8, 4)
    buffer.update_tensordict_priority(batch)
    with pytest.raises(ValueError, match="equal lengths"):
        SliceSampler(slice_len=4, strict_length=False, stack=True)


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


def test_truncated_episodes_end_slices():
    """CASES 22: with end_keys, steps that were truncated but not terminated end a trajectory too."""
    n = 12
    flags = {name: torch.zeros(n, 1, dtype=torch.bool) for name in ("terminated", "truncated")}
    flags["terminated"][3] = flags["truncated"][7] = True
    data = TensorDict({"number": torch.arange(n), "next": flags}, [n])
    sampler = SliceSampler(slice_len=4, end_keys=[("next", "terminated"), ("next", "truncated"), ("next", "absent")])
    buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(n), sampler=sampler)
    buffer.extend(data)
    assert set(split(buffer.sample(400))) == {(0, 1, 2, 3), (4, 5, 6, 7), (8, 9, 10, 11)}
    assert sampler.trajectories().length.tolist() == [4, 4, 4]
