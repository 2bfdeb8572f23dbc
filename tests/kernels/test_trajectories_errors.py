"""What the trajectory index refuses, and what ``torch.library`` finds when it checks its operations."""

from __future__ import annotations

import pytest
import torch

from gpubuf.kernels import philox, trajectories
from gpubuf.kernels.trajectories import Rule
from tests.support.trajectory_setup import Index


def test_nothing_long_enough():
    """CASES 20, 25: the error names the longest trajectory; the random state stays as it was."""
    index = Index(200, 2, Rule(8, min_len=8), seed=1)
    index.write(260, 0.5)
    longest = max(map(len, index.model.trajectories()))
    index.rule = Rule(longest + 1, min_len=longest + 1)
    index.resum()
    rng = philox.new_state(1, "cpu")
    for rank in (None, torch.tensor([0])):
        with pytest.raises(RuntimeError, match=rf"longest has {longest} steps.*min_len={longest + 1}"):
            index.draw(rng, 1, rank)
    assert rng.tolist() == [1, 0, 0]


def test_nothing_stored():
    """CASES 25: an empty index raises, and never falls back to row 0."""
    index = Index(20)
    with pytest.raises(RuntimeError, match="longest has 0 steps"):
        index.draw(philox.new_state(1, "cpu"), 3)


@pytest.mark.parametrize("rank", [-1, 3, 2**62])
def test_rank_out_of_range(rank):
    index = Index(20, rule=Rule(1))
    index.write(3, 1.0)
    with pytest.raises(IndexError, match=rf"rank {rank}, entry 1, .* total of 3"):
        index.draw(philox.new_state(1, "cpu"), 2, torch.tensor([2, rank]))


@pytest.mark.parametrize("row", [-1, 6, 40, 2**62])
def test_rows_that_are_not_stored(row):
    """CASES 19: neither rows that were never written nor such as do not exist have a trajectory."""
    index = Index(20, 2)
    index.write(3, 0.1)
    with pytest.raises(IndexError, match=rf"row {row}, entry 1, is not stored: there are 6 rows"):
        index.bounds(torch.tensor([0, row]))
    with pytest.raises(IndexError, match=rf"row {row}, entry 1, is not stored"):
        index.slices(torch.tensor([5, row]), 2)


def test_refused_on_a_gpu_without_an_error(backend):
    """Under Triton: NO_ROW and length 0, where the CPU raises."""
    if backend == "numba":
        pytest.skip("raises instead")
    index = Index(20, 2, Rule(3))
    rng = philox.new_state(1, "cpu")
    drawn, length, last = index.draw(rng, 2)
    assert drawn.tolist() == [trajectories.NO_ROW] * 6
    assert length.tolist() == [0, 0]
    assert not last.any()
    index.write(3, 0.0)
    found = index.bounds(torch.tensor([0, 6, -1]))
    assert found[:, 0].tolist() == [0, 4, 3]
    assert found[:, 1:].tolist() == [[trajectories.NO_ROW] * 2] * 2 + [[0, 0]]
    drawn, length, last = index.slices(torch.tensor([6, 0]), 2)
    assert drawn.tolist() == [trajectories.NO_ROW] * 2 + [0, 2]
    assert length.tolist() == [0, 2]
    assert last.tolist() == [False, False, False, True]


@pytest.mark.parametrize("name", ["ends", "sums", "ring", "signals"])
def test_tensors_of_another_kind(backend, name):
    index = Index(20, 2)
    right = getattr(index, name)
    setattr(index, name, right.to(torch.int32))
    with pytest.raises(TypeError, match=f"{name} must be int64, not torch.int32"):
        index.update(1)
    setattr(index, name, right.new_zeros(right.numel() + 3))
    with pytest.raises(ValueError, match=f"{name} must have shape"):
        index.update(1)
    setattr(index, name, torch.stack([right, right], -1)[..., 0])
    with pytest.raises(ValueError, match=f"{name} must be contiguous"):
        index.update(1)


@pytest.mark.parametrize("rule", [Rule(0), Rule(1, min_len=0), Rule(1, before=-1), Rule(1, after=-1)])
def test_rules_that_are_none(backend, rule):
    index = Index(20, rule=rule)
    for call in (lambda: index.update(1), index.resum, lambda: index.draw(philox.new_state(1, "cpu"), 1)):
        with pytest.raises(ValueError, match=f"slice_len={rule.slice_len}, min_len={rule.min_len}"):
            call()


def test_numbers_out_of_range(backend):
    index = Index(20, 2)
    rng = philox.new_state(1, "cpu")
    with pytest.raises(ValueError, match="must not be negative"):
        index.update(-1)
    with pytest.raises(ValueError, match="must not be negative"):
        index.draw(rng, -1)
    with pytest.raises(ValueError, match="slice_len must be at least 1"):
        index.slices(torch.tensor([0]), 0)
    with pytest.raises(ValueError, match="need at least 1, not n=1 and need=0"):
        index.update_eligible(1, 0, True)
    with pytest.raises(ValueError, match=r"rank must have shape \[3\]"):
        index.draw(rng, 3, torch.tensor([0]))
    with pytest.raises(TypeError, match="start must be"):
        index.slices(torch.tensor([0.5]), 1)
    with pytest.raises(ValueError, match=r"eligible must have shape \[1\]"):
        trajectories.update_eligible(torch.zeros(7, dtype=torch.int64), index.ends, index.ring, 1, 1, True, 20, 2)
    with pytest.raises(ValueError, match="power of two"):
        trajectories.resum(index.ends, index.sums, index.ring, 20, 2, 12, *index.rule)
    with pytest.raises(ValueError, match="at least 1 step"):
        trajectories.bounds(index.ends, index.ring, torch.tensor([0]), 0, 2)


def test_signals_by_identifier_begin_with_one(backend):
    index = Index(20, by_id=True, keys=0)
    index.signals = torch.empty(0, 5, dtype=torch.int64)
    with pytest.raises(ValueError, match=r"signals must have shape \[1, 5\]"):
        index.update(1)


def test_what_is_compared_fits(backend):
    """The flags, the pairs and the rows of an index of 20 steps of two environments."""
    index = Index(20, 2)
    breaks, pairs = torch.zeros(40, dtype=torch.uint8), torch.stack([index.signals[0]] * 2).unsqueeze(0)
    for wrong, message in (
        ((breaks[:39], pairs, None, 1), r"uint8 tensor of 40 flags, not torch.uint8 of shape \[39\]"),
        ((breaks.bool(), pairs, None, 1), "uint8 tensor of 40 flags, not torch.bool"),
        ((breaks, pairs[:, :1], None, 1), r"pairs must have shape \[0, 2, 5\]"),
        ((breaks, pairs, None, -1), "must not be negative, but is -1"),
        ((breaks, pairs, torch.zeros(2, 2, dtype=torch.int64), 0), "index must have shape"),
    ):
        flags, given, rows, n = wrong
        with pytest.raises(ValueError, match=message):
            trajectories.compare(flags, index.ring, given, rows, n, 20, 2)


def test_opcheck():
    """The operations mutate what they say, alias nothing, and have the shapes of their fakes."""
    index = Index(70, 2, Rule(3))
    index.write(30, 0.2)
    shape, rule = (70, 2), index.rule
    tree = index.ends, index.sums, index.ring
    rng, rows = philox.new_state(1, "cpu"), torch.tensor([3, 5])
    torch.library.opcheck(trajectories.update, (*tree, index.signals, False, 3, *shape, 16, *rule))
    breaks, pairs = torch.zeros(140, dtype=torch.uint8), torch.stack([index.signals[0]] * 2).unsqueeze(0)
    torch.library.opcheck(trajectories.compare, (breaks, index.ring, pairs, None, 3, *shape))
    torch.library.opcheck(trajectories.compare, (breaks, index.ring, pairs, rows, 0, *shape))
    torch.library.opcheck(trajectories.resum, (*tree, *shape, 16, *rule))
    torch.library.opcheck(trajectories.draw, (*tree, rng, None, 4, *shape, 16, *rule))
    torch.library.opcheck(trajectories.draw, (*tree, rng, torch.tensor([0, 1]), 2, *shape, 16, *rule))
    torch.library.opcheck(trajectories.slices, (index.ends, index.ring, rows, 3, *shape))
    torch.library.opcheck(trajectories.bounds, (index.ends, index.ring, rows, *shape))
    torch.library.opcheck(trajectories.update_eligible, (index.eligible, index.ends, index.ring, 3, 2, True, *shape))
