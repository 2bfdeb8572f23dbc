"""The scale of rewards, against a loop over the steps, without a buffer."""

import math

import pytest
import torch
from tensordict import TensorDict
from torch import Tensor

from gpubuf.data import RewardScale
from gpubuf.data.processing.pipeline import Pipeline
from gpubuf.data.storage.layout import RowLayout
from tests.support.processing_setup import CPU, bound, close, generator, steps


def loop_of_returns(rewards: Tensor, ends: Tensor, before: Tensor, gamma: float) -> tuple[Tensor, Tensor]:
    total, out = before.clone(), []
    for reward, end in zip(rewards, ends, strict=True):
        total = total + reward
        out.append(total)
        total = torch.where(end.unsqueeze(-1), 0.0, gamma * total)
    return torch.stack(out), total


@pytest.mark.parametrize("cut", [(40,), (1,) * 40, (3, 17, 20)])
def test_reward_scale_against_a_loop(cut: tuple[int, ...]):
    data = steps(40, seed=5)
    scale = RewardScale(0.97, 5.0)
    pipeline = bound(scale)
    for part in data.split(list(cut)):
        pipeline.on_write(part, 1)
    ends = data["next", "done"]
    returns, _ = loop_of_returns(
        data["next", "reward"].double().unsqueeze(1), ends, torch.zeros(1, 1, dtype=torch.float64), 0.97
    )
    spread = (returns.var(correction=0) + 1e-8).sqrt()
    expected = 1 / max(spread.item(), returns.abs().max().item() / 5)
    close(scale.factor(), torch.tensor([expected], dtype=torch.float32), 1e-6)
    assert pipeline.options(("next", "reward")).keys() == {"mean", "factor"}
    assert not scale._moments["next", "reward"].mean.any()


def test_reward_scale_of_several_environments():
    """Rows [T, E], and rows of a storage of one dimension in which environments take turns."""
    data = TensorDict(
        {
            "next": {
                "reward": torch.randn(12, 4, 1, generator=generator()),
                "terminated": torch.rand(12, 4, 1, generator=generator(1)) < 0.2,
            }
        },
        [12, 4],
    )
    two, one = RewardScale(0.9), RewardScale(0.9, envs=4)
    a, b = Pipeline([two]), Pipeline([one])
    a.bind(RowLayout(data, 2).leaves, 4, CPU)
    b.bind(RowLayout(data, 2).leaves, 1, CPU)
    for part in data.split(5):
        a.on_write(part, 2)
        b.on_write(part.reshape(-1), 1)
    assert torch.equal(two.factor(), one.factor())
    returns, _ = loop_of_returns(
        data["next", "reward"].double(),
        data["next", "terminated"].squeeze(-1),
        torch.zeros(4, 1, dtype=torch.float64),
        0.9,
    )
    close(two.var(), returns.flatten(0, 1).var(0, correction=0))
    with pytest.raises(ValueError, match="4 environments, but 6 rows"):
        b.check_write(data.reshape(-1)[:6], 1)


def test_a_reward_that_is_not_finite_counts_as_zero():
    data = steps(4, ends=0)
    data["next", "reward"] = torch.tensor([[1.0], [math.nan], [math.inf], [2.0]])
    scale = RewardScale(0.5)
    bound(scale).on_write(data, 1)
    close(scale.mean(), torch.tensor([(1 + 0.5 + 0.25 + 2.125) / 4], dtype=torch.float64))


def test_reset_forgets_the_returns_alone():
    scale = RewardScale(0.5)
    pipeline = bound(scale)
    pipeline.on_write(steps(4, ends=0), 1)
    factor = scale.factor()
    scale.reset()
    assert torch.equal(scale.factor(), factor)
    assert not scale._returns["next", "reward"].any()


def test_reward_scale_needs_ends():
    data = steps(1).exclude(("next", "done"), ("next", "terminated"))
    with pytest.raises(ValueError, match="end_keys"):
        bound(RewardScale(0.9), data=data)
    with pytest.raises(ValueError, match="end_keys"):
        bound(RewardScale(0.9, end_keys=["flag"]))
