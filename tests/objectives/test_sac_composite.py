"""SACLoss on actors whose actions have several parts: tensordict's CompositeDistribution."""

from __future__ import annotations

import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import (
    CompositeDistribution,
    ProbabilisticTensorDictModule,
    ProbabilisticTensorDictSequential,
    TensorDictModule,
    set_composite_lp_aggregate,
)
from torch import Tensor, nn
from torch.distributions import Categorical, Independent, Normal
from torch.func import functional_call

from gpubuf.modules import MLP
from gpubuf.objectives import SACLoss
from tests.support import sac_setup
from tests.support.losses_setup import assert_agrees
from tests.support.sac_setup import run_loss

F64 = torch.float64
OBSERVATION, PARTS = 5, {"arm": 3, "hand": 2}


class Parameters(nn.Module):
    """Means and standard deviations of both parts."""

    def __init__(self) -> None:
        super().__init__()
        self.net = MLP(OBSERVATION, 2 * sum(PARTS.values()), (8,), dtype=F64)

    def forward(self, observation: Tensor) -> tuple[Tensor, ...]:
        arm, hand, raw_arm, raw_hand = self.net(observation).split([3, 2, 3, 2], -1)
        return arm, raw_arm.exp(), hand, raw_hand.exp()


class Critic(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = MLP(OBSERVATION + 5, 1, (8,), dtype=F64)

    def forward(self, *inputs: Tensor) -> Tensor:
        return self.net(torch.cat(inputs, -1))


def normal(loc: Tensor, scale: Tensor) -> Independent:
    return Independent(Normal(loc, scale), 1)


def composite_loss(root: tuple[str, ...] = ("action",), distribution=normal, **kwargs) -> SACLoss:
    keys = {part: (*root, part) if root else part for part in PARTS}
    params = [("params", part, name) for part in PARTS for name in ("loc", "scale")]
    actor = ProbabilisticTensorDictSequential(
        TensorDictModule(Parameters(), ["observation"], params),
        ProbabilisticTensorDictModule(
            in_keys=["params"],
            out_keys=list(keys.values()),
            distribution_class=CompositeDistribution,
            distribution_kwargs={"distribution_map": dict.fromkeys(PARTS, distribution), "name_map": keys},
            return_log_prob=True,
            default_interaction_type="random",
        ),
    )
    critics = [TensorDictModule(Critic(), ["observation", *keys.values()], ["state_action_value"]) for _ in range(2)]
    return SACLoss(actor, critics, **kwargs)


def make_batch(root: tuple[str, ...] = ("action",), *shape: int) -> TensorDict:
    shape = shape or (6,)
    generator = torch.Generator().manual_seed(0)

    def numbers(*size: int) -> Tensor:
        return torch.randn(*shape, *size, generator=generator, dtype=F64)

    flag = torch.zeros(*shape, 1, dtype=torch.bool)
    after = {"observation": numbers(OBSERVATION), "reward": numbers(1), "done": flag, "terminated": flag}
    batch = TensorDict({"observation": numbers(OBSERVATION), "next": TensorDict(after, shape)}, shape)
    for part, width in PARTS.items():
        batch[(*root, part)] = numbers(width)
    return batch


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("root", [("action",), ()], ids=["nested", "flat"])
@pytest.mark.parametrize(
    ("aggregate", "distribution", "joint"),
    [(False, normal, True), (True, normal, True), (False, Normal, True), (False, normal, False), (True, Normal, False)],
)
def test_composite_actions(backend, root, aggregate, distribution, joint, monkeypatch):
    """One log-density, the sum of both parts', and the losses and gradients of the formulas.

    ``joint``: whether tensordict's composite has ``rsample_and_log_prob``, as from 0.15 on.
    """
    if not joint:
        monkeypatch.delattr(CompositeDistribution, "rsample_and_log_prob", raising=False)
    with set_composite_lp_aggregate(aggregate):
        loss, batch = composite_loss(root, distribution), make_batch(root, 2, 3)
        before = batch.clone()
        ours = run_loss(loss, batch, 0)
        assert (batch == before).all()
    critic = Critic()

    def draw(actor, observation: Tensor, *_) -> tuple[Tensor, Tensor]:
        loc_arm, scale_arm, loc_hand, scale_hand = actor[0].module(observation)
        arm, hand = normal(loc_arm, scale_arm), normal(loc_hand, scale_hand)
        actions = arm.rsample(), hand.rsample()
        return torch.cat(actions, -1), arm.log_prob(actions[0]) + hand.log_prob(actions[1])

    def values(loss, params, *inputs: Tensor) -> Tensor:
        own = {".".join(key[1:]): params.get(key) for key in params.keys(True, True)}
        return torch.stack([functional_call(critic, {n: t[k] for n, t in own.items()}, inputs) for k in range(2)])

    monkeypatch.setattr(sac_setup, "draw_by_hand", draw)
    monkeypatch.setattr(sac_setup, "values_by_hand", values)
    whole = batch.select("observation", "next").set("action", torch.cat([batch[(*root, part)] for part in PARTS], -1))
    assert_agrees(loss, ours, sac_setup.by_hand(loss, whole, 0))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_parts_that_know_both_at_once(monkeypatch):
    """A part's own ``rsample_and_log_prob`` is called, in whatever version of tensordict."""

    class Known(Normal):
        def rsample_and_log_prob(self) -> tuple[Tensor, Tensor]:
            return self.loc, torch.full_like(self.loc, 0.5)

    monkeypatch.delattr(CompositeDistribution, "rsample_and_log_prob", raising=False)
    assert float(composite_loss(distribution=Known)(make_batch())["entropy"]) == -2.5


def test_a_part_that_cannot_be_differentiated():
    def categorical(loc: Tensor, scale: Tensor) -> Categorical:
        return Categorical(logits=loc)

    with pytest.raises(TypeError, match=r"^SAC differentiates through the action: Categorical has no rsample$"):
        composite_loss(distribution=categorical)(make_batch())


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_target_entropy_and_keys():
    """CASES 29 (TorchRL 3312): minus the components of all parts."""
    loss, batch = composite_loss(), make_batch()
    assert {("action", "arm"), ("action", "hand"), "observation", ("next", "observation")} <= set(loss.in_keys)
    assert not {("next", "action", "arm"), "params"} & set(loss.in_keys)
    loss(batch)
    assert loss.target_entropy == -5
