"""DiscreteSACLoss: sets of actions, policies that rule some out, keys, and what is refused."""

from __future__ import annotations

import math

import gymnasium
import pytest
import torch
from tensordict.nn import ProbabilisticTensorDictModule, ProbabilisticTensorDictSequential, TensorDictModule
from torch import nn
from torch.distributions import Categorical, OneHotCategorical

from gpubuf.modules import MLP, EnsembleMLP
from gpubuf.objectives import DiscreteSACLoss
from tests.support.losses_setup import (
    ACTIONS,
    F64,
    assert_agrees,
    discrete_actor,
    discrete_batch,
    discrete_by_hand,
    make_discrete,
)
from tests.support.sac_setup import CELLS, OBSERVATION, gradients, run_loss, separated, total


class OneHot:
    """A spec of the name and with the attributes of TorchRL's."""

    n = 5


@pytest.mark.parametrize(
    ("space", "name", "n"),
    [
        ("one-hot", "one-hot", ACTIONS),
        ("one_hot", "one-hot", ACTIONS),
        ("categorical", "categorical", ACTIONS),
        (gymnasium.spaces.Discrete(3), "categorical", 3),
        (OneHot(), "one-hot", 5),
        ({"action": OneHot()}, "one-hot", 5),
    ],
    # Not those of the objects, which have their addresses in them.
    ids=["one-hot", "one_hot", "categorical", "Gymnasium's", "a spec", "a composite spec"],
)
def test_action_spaces(space, name, n):
    """The target entropy is 0.98 log n, and says nothing of the batch's dimensions (CASES 29)."""
    kwargs = {"num_actions": ACTIONS} if isinstance(space, str) else {"num_actions": None}
    loss = make_discrete(action_space=space, **kwargs)
    assert loss.action_space == name
    torch.testing.assert_close(loss.target_entropy, torch.tensor(0.98 * math.log(n), dtype=F64))
    half = make_discrete(action_space=space, target_entropy_weight=0.5, **kwargs)
    torch.testing.assert_close(half.target_entropy, torch.tensor(0.5 * math.log(n), dtype=F64))
    assert make_discrete(action_space=space, target_entropy=-0.25, **kwargs).target_entropy == -0.25


def test_without_an_action_space():
    with pytest.warns(UserWarning, match="reads actions as one-hot vectors"):
        assert make_discrete(action_space=None).action_space == "one-hot"


@pytest.mark.parametrize(
    ("space", "action", "message"),
    [
        ("one-hot", torch.zeros(4, dtype=torch.long), r"one-hot action must have shape \[4, 4\], got \[4\]"),
        ("categorical", torch.zeros(4, 4, dtype=torch.long), r"categorical action must have shape \[4\], got \[4, 4\]"),
    ],
)
def test_actions_of_another_space_are_refused(space, action, message):
    with pytest.raises(ValueError, match=message):
        make_discrete(action_space=space)(discrete_batch(4).set("action", action))


def test_networks_that_do_not_go_together_are_refused():
    critic = TensorDictModule(EnsembleMLP(2, OBSERVATION, 3, CELLS, dtype=F64), ["observation"], ["action_value"])
    loss = DiscreteSACLoss(discrete_actor(), critic, num_actions=4, action_space="one-hot")
    with pytest.raises(
        ValueError, match=r"'action_value' must be \[2, 6, 4\].*policy of shape \[6, 4\], got \[2, 6, 3"
    ):
        loss(discrete_batch(6))
    continuous = ProbabilisticTensorDictSequential(
        TensorDictModule(MLP(OBSERVATION, 1, dtype=F64), ["observation"], ["loc"]),
        ProbabilisticTensorDictModule(
            ["loc"], ["action"], distribution_class=torch.distributions.Normal, distribution_kwargs={"scale": 1.0}
        ),
    )
    with pytest.raises(TypeError, match="must have logits, got Normal"):
        make_discrete(actor=continuous)(discrete_batch(6))


def test_keys():
    """Every key can be renamed."""
    loss, batch = make_discrete(), discrete_batch(5)
    with pytest.raises(ValueError, match="state_action_value is not an accepted"):
        loss.set_keys(state_action_value="q")
    critic = TensorDictModule(loss.qvalue_network.module, ["observation"], ["q"])
    renamed = DiscreteSACLoss(loss.actor_network, critic, action_space="one-hot", num_actions=ACTIONS)
    renamed.set_keys(action_value="q", priority="error", reward="gain", value="v", log_prob="l", action="chosen")
    moved = batch.exclude(("next", "reward"), "action").set(("next", "gain"), batch["next", "reward"])
    found = run_loss(renamed, moved.set("chosen", batch["action"]), 0)
    torch.testing.assert_close(found, run_loss(loss, batch, 0))


def test_action_spaces_agree(backend):
    """One-hot vectors of any dtype, indices of any dtype with and without a last dimension."""
    loss, indexed = make_discrete(), make_discrete(action_space="categorical")
    indexed.load_state_dict(loss.state_dict())
    batch = discrete_batch(3, 2)
    separated(loss)
    separated(indexed)
    truth = discrete_by_hand(loss, batch)["td_error"]
    index = batch["action"].argmax(-1)
    for action in (batch["action"], batch["action"].bool(), batch["action"].float()):
        ours = run_loss(loss, batch.clone().set("action", action), 0)
        torch.testing.assert_close(ours["td_error"], truth)
        assert_agrees(loss, ours, discrete_by_hand(loss, batch))
    for action in (index, index.unsqueeze(-1), index.int(), index.to(torch.uint8)):
        ours = run_loss(indexed, batch.clone().set("action", action), 0)
        torch.testing.assert_close(ours["td_error"], truth)
        assert_agrees(indexed, ours, discrete_by_hand(indexed, batch))


class Masked(nn.Module):
    """A policy that never takes the second action."""

    def __init__(self, parameter):
        super().__init__()
        self.net, self.parameter = MLP(OBSERVATION, ACTIONS, CELLS, dtype=F64), parameter

    def forward(self, observation):
        logits = self.net(observation).masked_fill(torch.tensor([False, True, False, False]), -math.inf)
        return logits if self.parameter == "logits" else logits.softmax(-1)


@pytest.mark.parametrize("distribution", [OneHotCategorical, Categorical])
def test_actions_that_are_ruled_out(backend, distribution):
    """0 log 0 is 0, in both forms of a policy, and their critics may say anything."""
    batch = discrete_batch(6)
    batch["action"] = nn.functional.one_hot(torch.tensor([0, 2, 3, 0, 2, 3]), ACTIONS)
    loss, same = (
        separated(make_discrete(actor=discrete_actor(distribution, Masked(parameter), parameter)))
        for parameter in ("logits", "probs")
    )
    same.load_state_dict(loss.state_dict())
    ours, other = run_loss(loss, batch, 0), run_loss(same, batch, 0)
    assert_agrees(loss, ours, discrete_by_hand(loss, batch))
    torch.testing.assert_close(other, ours)
    torch.testing.assert_close(gradients(same, total(other)), gradients(loss, total(run_loss(loss, batch, 0))))


def test_critics_run_once_for_both_losses():
    """The actor's loss takes the critics' own values, unless a gradient is to reach the observations."""
    loss, batch = make_discrete(), discrete_batch(6)
    runs = []
    online, detached = loss._critics.online, loss._critics.detached
    loss._critics.online = lambda *args: runs.append("online") or online(*args)
    loss._critics.detached = lambda *args: runs.append("detached") or detached(*args)
    loss(batch.clone())
    assert runs == ["online"]
    batch["observation"].requires_grad_()
    out = loss(batch)
    assert runs == ["online", "online", "detached"]
    (by_actor,) = torch.autograd.grad(out["loss_actor"], batch["observation"], retain_graph=True)

    def objective(observation):
        logits, q = loss.actor_network[0].module(observation), loss.qvalue_network.module(observation)
        return (logits.softmax(-1) * (logits.log_softmax(-1) - q.amin(0))).sum(-1).mean()

    expected = torch.autograd.functional.jacobian(objective, batch["observation"].detach())
    torch.testing.assert_close(by_actor, expected)
