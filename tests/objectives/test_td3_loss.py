"""TD3Loss against the formulas, in float64, and where other implementations have failed."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import TensorDictModule
from torch import nn

from gpubuf.modules import make_sac_critic
from gpubuf.objectives import SoftUpdate, TD3Loss
from gpubuf.objectives.batch import reduced
from tests.support.losses_setup import (
    assert_agrees,
    make_td3,
    separated,
    td3_by_hand,
    total,
)
from tests.support.sac_setup import (
    make_batch,
    run_loss,
)

NAN = float("nan")
OUTPUTS = [
    "loss_actor",
    "loss_qvalue",
    "pred_value",
    "state_action_value_actor",
    "next_state_value",
    "target_value",
]


def agree(loss, batch, **kwargs):
    assert_agrees(loss, run_loss(loss, batch, 3), td3_by_hand(loss, batch, 3, **kwargs))


@pytest.mark.parametrize("loss_function", ["l1", "l2", "huber"])
def test_loss_functions(loss_function):
    agree(separated(make_td3(loss_function=loss_function)), make_batch(9))


@pytest.mark.parametrize("noise", [0.0, 0.05, 3.0])
@pytest.mark.parametrize("clip", [0.0, 0.1, math.inf])
def test_noise(noise, clip):
    """Clipped before it is added; the sum is clipped to the bounds."""
    agree(separated(make_td3(policy_noise=noise, noise_clip=clip, bounds=(-0.1, 0.1))), make_batch(9))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("n", [0, 1, 40])
def test_the_reduction_without_kernels(dtype, n):
    """The same numbers as those of the kernels, and 0 for a mean over nothing."""
    from gpubuf.kernels import sac
    from gpubuf.objectives.batch import REDUCTIONS

    rows, weight, mask = torch.randn(n, 1).to(dtype), torch.rand(n), torch.arange(n) % 3 != 1
    for name, code in REDUCTIONS.items():
        for w, m in ((None, None), (weight, None), (None, mask), (weight, mask), (weight, mask & False)):
            truth, *_ = sac.actor_loss(-rows.unsqueeze(0), torch.zeros(n, 1), torch.zeros(()), w, m, code)
            ours = reduced(rows, w, m, name)
            assert ours.dtype is truth.dtype
            torch.testing.assert_close(ours, truth)


@pytest.mark.parametrize("lmbda", [0.7, 1.0])
def test_sequences(lmbda):
    """TD(lambda), and TD(1), on batches [B, T]."""
    loss, batch = separated(make_td3()), make_batch(3, 5)
    kind = {"value_type": "TD1"} if lmbda == 1 else {"value_type": "TDLambda", "lmbda": lmbda}
    loss.make_value_estimator(**kind, gamma=0.9)
    agree(loss, batch, gamma=0.9, lmbda=lmbda)


def test_the_noise_differs_between_calls_and_rows():
    loss, batch = make_td3(policy_noise=0.3), make_batch(1).expand(50).clone()
    values = [loss(batch)["next_state_value"] for _ in range(2)]
    assert values[0].unique().numel() == 50
    assert not (values[0] == values[1]).any()


def test_learning_on_a_bandit():
    """One step episodes with reward -(a - 0.5)^2: the policy finds 0.5."""
    torch.manual_seed(0)
    actor = TensorDictModule(
        nn.Sequential(nn.Linear(1, 16), nn.ReLU(), nn.Linear(16, 1), nn.Tanh()), ["observation"], ["action"]
    )
    loss = TD3Loss(actor, make_sac_critic(1, 1, (32,)), bounds=(np.float32(-1), np.float32(1)), loss_function="l2")
    updater = SoftUpdate(loss, tau=0.05)
    groups = [{"params": list(loss.qvalue_network_params.values(True, True))}]
    groups += [{"params": list(loss.actor_network_params.values(True, True)), "lr": 1e-3}]
    optimizer, ones = torch.optim.Adam(groups, lr=1e-2), torch.ones(128, 1)
    for _ in range(500):
        action = torch.rand(128, 1) * 2 - 1
        following = {
            "observation": ones,
            "reward": -((action - 0.5) ** 2),
            "done": ones.bool(),
            "terminated": ones.bool(),
        }
        batch = TensorDict({"observation": ones, "action": action, "next": TensorDict(following, [128])}, [128])
        optimizer.zero_grad()
        total(loss(batch)).backward()
        optimizer.step()
        updater.step()
    assert abs(actor(TensorDict({"observation": ones[:1]}, [1]))["action"].item() - 0.5) < 0.1


def test_a_batch_without_rows_has_losses_of_zero():
    """As the other losses; it could not be reshaped."""
    loss = make_td3()
    out = run_loss(loss, make_batch(6)[:0], 3)
    assert out["pred_value"].shape == (2, 0)
    both = out["loss_actor"] + out["loss_qvalue"]
    assert both == 0
    both.backward()
    assert all((parameter.grad == 0).all() for parameter in loss.parameters() if parameter.grad is not None)
