"""Running statistics and normalisation, against plain torch, without a buffer."""

import copy

import pytest
import torch
from tensordict import TensorDict

from gpubuf.data import Clip, Normalize, RewardScale
from gpubuf.data.processing.pipeline import Pipeline
from gpubuf.data.processing.statistics import merged
from gpubuf.data.storage.layout import RowLayout
from tests.support.processing_setup import CPU, bound, close, generator, steps

# Moments


def test_a_batch_with_zero_variance():
    """Case 44: what equals the mean becomes 0, also after one row; clip bounds the rest."""
    normalize = Normalize("observation", clip=5)
    pipeline = bound(normalize)
    data = steps(1)
    data["observation"] = torch.full((1, 3), 0.1)
    for _ in range(3):
        pipeline.on_write(data, 1)
        assert normalize(data["observation"]).tolist() == [[0.0] * 3]
        assert normalize(torch.full((1, 3), 7.0)).tolist() == [[5.0] * 3]
    assert normalize.var().tolist() == [0, 0, 0]


def test_before_the_first_row_nothing_changes():
    normalize = Normalize("observation")
    bound(normalize)
    x = torch.randn(4, 3, generator=generator())
    assert torch.equal(normalize(x), x)


def state_of(rows: torch.Tensor) -> torch.Tensor:
    variance, mean = torch.var_mean(rows.double(), 0, correction=0)
    n = torch.full_like(mean, len(rows))
    return torch.stack((n, mean, variance * n, rows.double().abs().amax(0)))


def test_merged_statistics_are_those_of_both():
    rows = torch.randn(50, 3, generator=generator())
    a, b, both = (state_of(part) for part in (rows[:20], rows[20:], rows))
    close(merged(a, b), both)
    close(merged(a, torch.zeros_like(a)), a)
    close(merged(torch.zeros_like(a), b), b)


# Normalize


def test_normalize_learns_from_the_root_and_serves_its_twin():
    normalize = Normalize(["observation", "action"])
    pipeline = bound(normalize)
    batches = [steps(n, seed=n) for n in (1, 6, 30)]
    for batch in batches:
        pipeline.on_write(batch, 1)
    rows = torch.cat(batches)["observation"].double()
    close(normalize.mean("observation"), rows.mean(0))
    close(normalize.var(("next", "observation")), rows.var(0, correction=0))
    assert normalize.count("action").tolist() == [37, 37]
    assert pipeline.options(("observation",)) == pipeline.options(("next", "observation"))
    assert pipeline.options(("next", "reward")) == {}
    out = normalize(batches[0])
    expected = (batches[0]["next", "observation"] - rows.mean(0)) / (rows.var(0, correction=0) + 1e-8).sqrt()
    close(out["next", "observation"], expected.float(), 1e-5)
    assert out["next", "reward"] is batches[0]["next", "reward"]
    assert torch.equal(batches[0]["observation"], steps(1, seed=1)["observation"])


def test_normalize_reads_two_dimensions_and_rows_of_two():
    data = TensorDict({"observation": torch.randn(6, 4, 2, 3, generator=generator())}, [6, 4])
    normalize = Normalize("observation")
    pipeline = Pipeline([normalize])
    pipeline.bind(RowLayout(data, 2).leaves, 4, CPU)
    pipeline.on_write(data, 2)
    close(normalize.mean(), data["observation"].double().mean((0, 1)))
    assert normalize.mean().shape == (2, 3)
    assert normalize(data["observation"]).shape == (6, 4, 2, 3)


def test_frozen_statistics_stay_and_still_apply():
    normalize = Normalize("observation")
    pipeline = bound(normalize)
    pipeline.on_write(steps(10), 1)
    before = normalize.mean()
    factor = pipeline.options(("observation",))
    assert normalize.eval() is normalize
    assert not normalize.training
    pipeline.on_write(steps(10, seed=1), 1)
    normalize.update(steps(10, seed=2))
    assert torch.equal(normalize.mean(), before)
    assert pipeline.options(("observation",)) == factor
    normalize.train()
    pipeline.on_write(steps(10, seed=1), 1)
    assert normalize.count().tolist() == [20] * 3


def test_until():
    normalize = Normalize("observation", until=10)
    pipeline = bound(normalize)
    for seed in range(5):
        pipeline.on_write(steps(4, seed=seed), 1)
    assert normalize.count().tolist() == [12] * 3


def test_addresses_stay_where_they_are():
    normalize, scale = Normalize("observation"), RewardScale(0.9)
    pipeline = bound(normalize, scale)
    before = {key: pipeline.options(key) for key in (("observation",), ("next", "reward"))}
    pipeline.on_write(steps(5), 1)
    state = pipeline.state_dict()
    pipeline.load_state_dict(state)
    normalize.merge(copy.deepcopy(normalize)).eval()
    pipeline.bind(RowLayout(steps(1), 1).leaves, 1, CPU)
    for key, options in before.items():
        assert pipeline.options(key) == options


def test_rewards_given_by_hand_count_as_written_ones():
    """``update`` learns what a write does. A state that was loaded stays as it is when its object learns more."""
    written, told = RewardScale(0.9), RewardScale(0.9)
    pipelines = [bound(scale) for scale in (written, told)]
    for pipeline in pipelines:
        pipeline.on_write(steps(6), 1)
    pipelines[0].on_write(steps(5, seed=1), 1)
    told.update(steps(5, seed=1))
    same = [scale.state_dict() for scale in (written, told)]
    assert torch.equal(same[0]["returns"]["0"], same[1]["returns"]["0"])
    assert written.count().tolist() == told.count().tolist()
    close(written.var(), told.var())
    fresh, loaded = RewardScale(0.9), told.state_dict()
    fresh.load_state_dict(loaded)
    bound(fresh).on_write(steps(4, seed=2), 1)
    assert torch.equal(loaded["returns"]["0"], same[1]["returns"]["0"])


def test_merge_of_two_ranks():
    ranks = [Normalize("observation"), Normalize("observation")]
    for number, normalize in enumerate(ranks):
        bound(normalize).on_write(steps(20 + number, seed=number), 1)
    rows = torch.cat([steps(20), steps(21, seed=1)])["observation"].double()
    by_state = copy.deepcopy(ranks[0]).merge(ranks[1].state_dict())
    ranks[0].merge(ranks[1])
    for merged_one in (by_state, ranks[0]):
        close(merged_one.mean(), rows.mean(0))
        close(merged_one.var(), rows.var(0, correction=0))
    fresh = Normalize("observation").merge(ranks[1])
    close(fresh.mean(), ranks[1].mean())
    with pytest.raises(ValueError, match="keys"):
        ranks[0].merge(Normalize("action"))


def test_states_that_can_not_be_loaded():
    normalize = Normalize("observation")
    pipeline = bound(normalize)
    pipeline.on_write(steps(3), 1)
    good = pipeline.state_dict()
    wide = bound(Normalize("observation"), data=steps(1, width=5))
    with pytest.raises(ValueError, match="5 elements"):
        wide.load_state_dict(good)
    with pytest.raises(ValueError, match="processing"):
        bound(Clip("observation", -1, 1)).load_state_dict(good)
    for damage in (
        {"count": torch.tensor([-1.0] * 3).double()},
        {"mean": torch.zeros(3)},
        {"m2": torch.zeros(2).double()},
    ):
        bad = copy.deepcopy(good)
        bad["steps"]["0"]["moments"]["0"].update(damage)
        with pytest.raises(ValueError, match=r"float64|lengths|negative"):
            pipeline.load_state_dict(bad)
    assert normalize.count().tolist() == [3] * 3
