"""SACLoss where other implementations have failed: terminal states, agents, odd shapes."""

from __future__ import annotations

import gymnasium
import numpy as np
import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import (
    TensorDictModule,
)
from torch import nn

from gpubuf.modules import EnsembleMLP, make_sac_actor, make_sac_critic
from gpubuf.objectives import SACLoss
from tests.support.sac_setup import (
    ACTION,
    CELLS,
    OBSERVATION,
    gradients,
    make_actor,
    make_batch,
    make_loss,
    run_loss,
    total,
)


@pytest.mark.parametrize("skip", [False, True])
def test_agents(skip):
    """CASES 29 (TorchRL 2612): two networks for all agents, every key nested, done flags of their environment."""
    keys = {"in_keys": [("agents", "obs")], "action_key": ("agents", "action")}
    actor = make_sac_actor(OBSERVATION, ACTION, CELLS, **keys, dtype=torch.float64)
    keys = {"in_keys": [("agents", "obs"), ("agents", "action")], "out_key": ("agents", "q")}
    critic = make_sac_critic(OBSERVATION, ACTION, CELLS, **keys, dtype=torch.float64)
    loss = SACLoss(actor, critic, skip_done_states=skip)
    loss.set_keys(
        state_action_value=("agents", "q"), reward=("agents", "reward"), priority=("agents", "td_error"), done="done"
    )
    plain, flat = make_loss(), make_batch(4, 3)
    for name in ("actor_network_params", "qvalue_network_params", "target_qvalue_network_params"):
        getattr(plain, name).data.update_(getattr(loss, name).data)
    ended = torch.tensor([[True], [False], [True], [False]])
    flat["next", "terminated"].copy_(ended.unsqueeze(-1).expand(4, 3, 1))
    own = TensorDict({"obs": flat["observation"], "action": flat["action"]}, [4, 3])
    after = TensorDict({"obs": flat["next", "observation"].clone(), "reward": flat["next", "reward"]}, [4, 3])
    batch = TensorDict({"agents": own, "next": {"agents": after, "done": ended, "terminated": ended}}, [4])
    if skip:
        after["obs"][[0, 2]] = float("nan")
    ours, truth = run_loss(loss, batch, 2), run_loss(plain, flat, 2)
    assert loss.target_entropy == -ACTION
    assert ours["td_error"].shape == (4, 3)
    torch.testing.assert_close(ours, truth)
    found, expected = gradients(loss, total(ours)), gradients(plain, total(truth))
    torch.testing.assert_close(list(found.values()), list(expected.values()))


def test_an_agent_too_many_is_refused():
    """Nothing is broadcast that does not fit: the error states both shapes."""
    loss, batch = make_loss(), make_batch(4)
    batch["next"].set("terminated", torch.zeros(4, 3, 1, dtype=torch.bool))
    with pytest.raises(ValueError, match=r"'terminated' of shape \[4, 3, 1\].*\[4\]"):
        loss(batch)
    batch = make_batch(4)
    batch["next"].set("reward", torch.zeros(4, 2, dtype=torch.float64))
    with pytest.raises(ValueError, match=r"'reward' of shape \[4, 2\]"):
        loss(batch)
    batch = make_batch(4).set("priority_weight", torch.zeros(4, 2))
    with pytest.raises(ValueError, match="priority_weight"):
        loss(batch)


def test_critics_that_do_not_go_with_the_policy_are_refused():
    """One value for all agents, one log-density for each."""

    class Central(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = EnsembleMLP(2, 3 * (OBSERVATION + ACTION), 1, CELLS, dtype=torch.float64)

        def forward(self, observation, action):
            return self.net(torch.cat([observation, action], -1).flatten(-2))

    loss = SACLoss(make_actor(), TensorDictModule(Central(), ["observation", "action"], ["state_action_value"]))
    batch = make_batch(4, 3)
    batch.batch_size = [4]
    with pytest.raises(ValueError, match=r"\[2, 4, 3, 1\].*\[4, 3\].*\[2, 4, 1\]"):
        loss(batch)


class Spec(dict):
    """As much of TorchRL's composite specs as the loss looks at: a shape, and entries."""

    def __init__(self, shape: tuple[int, ...] = (), **entries: torch.Tensor | Spec) -> None:
        super().__init__(**entries)
        self.shape = torch.Size(shape)


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        (gymnasium.spaces.Box(-1, 1, (4,)), -4.0),
        (gymnasium.spaces.Box(-1, 1, (2, 3)), -6.0),
        (torch.zeros(7), -7.0),
        ({"action": np.zeros((5,))}, -5.0),
        (Spec(action=torch.zeros(4)), -4.0),
        (Spec((5,), action=torch.zeros(5, 4)), -4.0),
        (Spec(action=Spec(arm=torch.zeros(3), hand=torch.zeros(2, 2))), -7.0),
        (Spec((5,), action=Spec((5,), arm=torch.zeros(5, 3), hand=torch.zeros(5, 2))), -5.0),
    ],
    ids=["box", "matrix", "tensor", "mapping", "composite", "batched", "composite action", "batched composite action"],
)
def test_target_entropy_from_a_spec(spec, expected):
    """CASES 29: TorchRL 1494 (a batch or agents in the spec), 3291 and 3292 (always -1), 3312 (composite actions)."""
    loss = make_loss(action_spec=spec)
    assert loss.target_entropy == expected
    loss(make_batch(3))
    assert loss.target_entropy == expected


@pytest.mark.parametrize("shape", [(6,), (2, 3), (ACTION,), (OBSERVATION, ACTION)], ids=str)
def test_target_entropy_from_the_first_batch(shape):
    """Whatever the batch dimensions are: they may even be as long as the action is wide."""
    loss = make_loss()
    with pytest.raises(RuntimeError, match="before the first batch"):
        loss.target_entropy  # noqa: B018
    loss(make_batch(*shape))
    assert loss.target_entropy == -ACTION
    loss.target_entropy = -1.5
    loss(make_batch(*shape))
    assert loss.target_entropy == -1.5


def test_target_entropy_of_keyword_calls():
    """The batch size is guessed then, and must not matter: here observation, action and batch are as long."""
    actor = make_sac_actor(4, 4, CELLS, dtype=torch.float64)
    loss = SACLoss(actor, make_sac_critic(4, 4, CELLS, dtype=torch.float64))
    square = torch.randn(4, 4, dtype=torch.float64)
    flag = torch.zeros(4, 1, dtype=torch.bool)
    loss(
        observation=square,
        action=square.tanh(),
        next_observation=square,
        next_reward=torch.zeros(4, 1, dtype=torch.float64),
        next_done=flag,
        next_terminated=flag,
    )
    assert loss.target_entropy == -4.0
