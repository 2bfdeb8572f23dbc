"""DiscreteSACLoss against the formulas, in float64, and where other implementations have failed."""

from __future__ import annotations

import pytest
import torch
from tensordict import TensorDict
from torch import nn
from torch.distributions import Categorical

from gpubuf.modules import MLP
from gpubuf.objectives import SoftUpdate
from tests.support.losses_setup import (
    ACTIONS,
    F64,
    assert_agrees,
    discrete_actor,
    discrete_batch,
    discrete_by_hand,
    make_discrete,
    separated,
    total,
)
from tests.support.sac_setup import CELLS, OBSERVATION, run_loss

NAN, INF = float("nan"), float("inf")
OUTPUTS = ["loss_actor", "loss_qvalue", "loss_alpha", "alpha", "entropy"]


def agree(loss, batch, **kwargs):
    assert_agrees(loss, run_loss(loss, batch, 0), discrete_by_hand(loss, batch, **kwargs))


@pytest.mark.parametrize("loss_function", ["l1", "l2", "huber"])
def test_loss_functions(loss_function):
    agree(separated(make_discrete(loss_function=loss_function)), discrete_batch(9))


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


@pytest.mark.parametrize("lmbda", [0.7, 1.0])
def test_sequences(lmbda):
    """TD(lambda), and TD(1), on batches [B, T]."""
    loss, batch = separated(make_discrete()), discrete_batch(3, 5)
    kind = {"value_type": "TD1"} if lmbda == 1 else {"value_type": "TDLambda", "lmbda": lmbda}
    loss.make_value_estimator(**kind, gamma=0.9)
    agree(loss, batch, gamma=0.9, lmbda=lmbda)


@pytest.mark.parametrize("parameter", ["logits", "probs"])
@pytest.mark.parametrize("distribution", ["OneHotCategorical", "Categorical"])
def test_actions_that_are_ruled_out(backend, parameter, distribution):
    """0 log 0 is 0, in both forms of a policy, and their critics may say anything."""

    class Masked(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = MLP(OBSERVATION, ACTIONS, CELLS, dtype=F64)

        def forward(self, observation):
            logits = self.net(observation).masked_fill(torch.tensor([False, True, False, False]), -INF)
            return logits if parameter == "logits" else logits.softmax(-1)

    actor = discrete_actor(getattr(torch.distributions, distribution), Masked(), parameter)
    loss, batch = separated(make_discrete(actor=actor)), discrete_batch(6)
    batch["action"] = nn.functional.one_hot(torch.tensor([0, 2, 3, 0, 2, 3]), ACTIONS)
    expected = discrete_by_hand(loss, batch)
    if parameter == "probs":
        # The oracle takes its logits from the network itself.
        logits = make_discrete(actor=discrete_actor(network=_LogitsOf(actor[0].module)))
        logits.load_state_dict(loss.state_dict(), strict=False)
        logits.qvalue_network_params.data.update_(loss.qvalue_network_params.data)
        logits.target_qvalue_network_params.data.update_(loss.target_qvalue_network_params.data)
        expected = discrete_by_hand(logits, batch)
        for name, value in run_loss(loss, batch, 0).items():
            torch.testing.assert_close(value, expected[name])
        total(run_loss(loss, batch, 0)).backward()
        assert all(parameter.grad.isfinite().all() for parameter in loss.parameters())
        return
    assert_agrees(loss, run_loss(loss, batch, 0), expected)


class _LogitsOf(nn.Module):
    def __init__(self, probabilities):
        super().__init__()
        self.probabilities = probabilities

    def forward(self, observation):
        return self.probabilities(observation).log()


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


def test_learning_on_a_bandit():
    """One step with rewards 0, 1, 0.9, 0: the policy prefers the best, softly, and the critics find the values."""
    torch.manual_seed(0)
    actor = discrete_actor(Categorical, MLP(OBSERVATION, ACTIONS, (16,), dtype=F64))
    loss = make_discrete("replicated", actor, action_space="categorical", fixed_alpha=True, alpha_init=0.1)
    optimizer, rewards = torch.optim.Adam(loss.parameters(), lr=1e-2), torch.tensor([0, 1, 0.9, 0], dtype=F64)
    updater = SoftUpdate(loss, tau=0.05)
    ones = torch.ones(64, OBSERVATION, dtype=F64)
    ended = torch.ones(64, 1, dtype=torch.bool)
    for _ in range(300):
        action = torch.randint(ACTIONS, (64,))
        following = {"observation": ones, "reward": rewards[action].unsqueeze(-1), "done": ended, "terminated": ended}
        batch = TensorDict({"observation": ones, "action": action, "next": TensorDict(following, [64])}, [64])
        optimizer.zero_grad()
        total(loss(batch)).backward()
        optimizer.step()
        updater.step()
    policy = actor.get_dist(TensorDict({"observation": ones[:1]}, [1])).probs[0]
    torch.testing.assert_close(policy, (rewards / 0.1).softmax(-1), atol=0.03, rtol=0)
    assert batch["td_error"].max() < 0.05
