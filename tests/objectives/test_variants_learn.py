"""Each loss of continuous actions but SACLoss finds the best action of a bandit; SACLoss learns in tests/train."""

from __future__ import annotations

import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import InteractionType, TensorDictModule, set_interaction_type
from torch import nn

from gpubuf import CrossQLoss, DistributionalSACLoss, REDQLoss, SoftUpdate, TD3Loss
from gpubuf.modules import (
    MLP,
    EnsembleMLP,
    make_fastsac_actor,
    make_fastsac_critic,
    make_flashsac_actor,
    make_flashsac_critic,
    make_sac_actor,
    make_sac_critic,
)
from tests.contracts import first_quick
from tests.support.sac_setup import total

SUPPORT = {"v_min": -3.0, "v_max": 1.0, "num_atoms": 41, "fixed_alpha": True, "alpha_init": 0.02}


def fastsac():
    critic = make_fastsac_critic(1, 1, (32,), num_atoms=41)
    return DistributionalSACLoss.fastsac(make_fastsac_actor(1, 1, (32,)), critic, **SUPPORT)


def flashsac():
    critic = make_flashsac_critic(1, 1, 32, num_atoms=41, num_blocks=1)
    return DistributionalSACLoss.flashsac(make_flashsac_actor(1, 1, 16, num_blocks=1), critic, **SUPPORT)


def crossq():
    network = EnsembleMLP(2, 2, 1, (32, 32), norm="batch", norm_kwargs={"momentum": 0.1})
    critics = TensorDictModule(network, ["observation", "action"], ["state_action_value"])
    return CrossQLoss(make_sac_actor(1, 1, (32,)), critics, fixed_alpha=True, alpha_init=0.02)


def redq():
    critics = make_sac_critic(1, 1, (32,), num_nets=5)
    return REDQLoss(make_sac_actor(1, 1, (32,)), critics, num_qvalue_nets=5, fixed_alpha=True, alpha_init=0.1)


def td3():
    actor = TensorDictModule(nn.Sequential(MLP(1, 1, (32,)), nn.Tanh()), ["observation"], ["action"])
    return TD3Loss(actor, make_sac_critic(1, 1, (32,)), bounds=(-1.0, 1.0))


@pytest.mark.parametrize("make", first_quick([flashsac, crossq, redq, fastsac, td3]))
def test_learning_on_a_bandit(make):
    """One step episodes with reward -(a - s)^2 for s in -0.5 .. 0.5: the policy finds s."""
    torch.manual_seed(0)
    loss = make()
    updater = None if make is crossq else SoftUpdate(loss, tau=0.05)
    optimizer = torch.optim.Adam(loss.parameters(), lr=1e-2)
    ended = torch.ones(64, 1, dtype=torch.bool)
    for _ in range(160):
        state, action = torch.rand(64, 1) - 0.5, torch.rand(64, 1) * 2 - 1
        following = {
            "observation": torch.rand(64, 1) - 0.5,
            "reward": -((action - state) ** 2),
            "done": ended,
            "terminated": ended,
        }
        batch = TensorDict({"observation": state, "action": action, "next": TensorDict(following, [64])}, [64])
        optimizer.zero_grad()
        total(loss(batch)).backward()
        optimizer.step()
        if updater is not None:
            updater.step()
    loss.actor_network.eval()
    state = torch.linspace(-0.4, 0.4, 9).unsqueeze(-1)
    with torch.no_grad(), set_interaction_type(InteractionType.DETERMINISTIC):
        found = loss.actor_network(TensorDict({"observation": state}, [9]))["action"]
    # The mean of |s| is 0.22.
    assert (found - state).abs().mean() < 0.15
