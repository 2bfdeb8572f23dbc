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
    F64,
    assert_agrees,
    make_td3,
    separated,
    td3_by_hand,
    total,
)
from tests.support.sac_setup import (
    CRITICS,
    linear_critic,
    make_batch,
    normalised_critic,
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


@pytest.mark.parametrize("critics", CRITICS)
def test_losses_and_gradients(backend, critics):
    networks, further = CRITICS[critics]()
    agree(separated(make_td3(networks, **further)), make_batch(7))


@pytest.mark.parametrize("loss_function", ["l1", "l2", "huber"])
def test_loss_functions(loss_function):
    agree(separated(make_td3(loss_function=loss_function)), make_batch(9))


@pytest.mark.parametrize("noise", [0.0, 0.05, 3.0])
@pytest.mark.parametrize("clip", [0.0, 0.1, math.inf])
def test_noise(noise, clip):
    """Clipped before it is added; the sum is clipped to the bounds."""
    agree(separated(make_td3(policy_noise=noise, noise_clip=clip, bounds=(-0.1, 0.1))), make_batch(9))


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_importance_weights_and_masks(backend, reduction):
    """NaN in masked rows reaches nothing."""
    batch, weight, mask = make_batch(11), torch.rand(11) + 0.1, torch.arange(11) % 3 != 0
    loss = separated(make_td3(reduction=reduction))
    given = batch.clone().set("priority_weight", weight).set("shifted_valid", mask.unsqueeze(-1))
    truth = td3_by_hand(loss, batch, 3, weight=weight, mask=mask, reduction=reduction)
    for key in ("observation", "action", ("next", "observation"), ("next", "reward")):
        given[key][~mask] = NAN
    ours = run_loss(loss, given, 3)
    for name in ("pred_value", "state_action_value_actor", "next_state_value", "target_value", "td_error"):
        assert ours[name].isfinite().all()
        torch.testing.assert_close(ours.pop(name)[..., mask], truth.pop(name)[..., mask])
    assert_agrees(loss, ours, truth)


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


def test_weights_can_be_refused_and_demanded():
    batch = make_batch(6)
    weighted = batch.clone().set("priority_weight", torch.rand(6))
    agree(make_td3(use_prioritized_weights=False), weighted)
    with pytest.raises(KeyError, match="priority_weight"):
        make_td3(use_prioritized_weights=True)(batch)


def test_discount_and_steps(backend):
    batch, steps = make_batch(8), torch.randint(1, 6, (8, 1))
    loss = separated(make_td3())
    loss.make_value_estimator(gamma=0.9)
    agree(loss, batch.clone().set("steps_to_next_obs", steps), gamma=0.9, steps=steps)


@pytest.mark.parametrize("lmbda", [0.7, 1.0])
def test_sequences(lmbda):
    """TD(lambda), and TD(1), on batches [B, T]."""
    loss, batch = separated(make_td3()), make_batch(3, 5)
    kind = {"value_type": "TD1"} if lmbda == 1 else {"value_type": "TDLambda", "lmbda": lmbda}
    loss.make_value_estimator(**kind, gamma=0.9)
    agree(loss, batch, gamma=0.9, lmbda=lmbda)


def test_truncated_rows_bootstrap(backend):
    """CASES 22: truncated and not terminated: the next value counts."""
    loss, batch = separated(make_td3()), make_batch(5)
    batch["next", "terminated"][:] = False
    batch["next", "truncated"][:] = True
    batch["next", "done"][:] = True
    agree(loss, batch)
    ended = batch.clone()
    ended["next", "terminated"][:] = True
    assert torch.equal(run_loss(loss, ended, 3)["target_value"], batch["next", "reward"].squeeze(-1))


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # the interpreter computes with NumPy
def test_terminal_observations_may_be_nan(backend):
    """CASES 29 (TorchRL 2590): the value there is selected away, where TorchRL multiplies it by 0."""
    loss, batch = separated(make_td3()), make_batch(9)
    ended = batch["next", "terminated"].squeeze(-1)
    assert 0 < ended.sum() < 9
    truth = td3_by_hand(loss, batch, 3)
    batch["next", "observation"][ended] = NAN
    ours = run_loss(loss, batch, 3)
    assert ours.pop("next_state_value").isnan().equal(ended)
    del truth["next_state_value"]
    assert_agrees(loss, ours, truth)


@pytest.mark.parametrize("flags", [(4,), (4, 1), (4, 3), (4, 3, 1), (4, 1, 1)], ids=str)
def test_agents(flags):
    """CASES 29 (TorchRL 2612): done flags and rewards of fewer and of more dimensions than the loss."""
    loss, batch = separated(make_td3()), make_batch(4, 3)
    ended, reward = torch.tensor([True, False, True, False]), torch.randn(4, dtype=F64)
    full = batch.clone()
    full["next", "terminated"].copy_(ended.reshape(4, 1, 1))
    full["next", "reward"].copy_(reward.reshape(4, 1, 1))
    given = batch.clone()
    given.batch_size = [4]
    given["next"].batch_size = [4]
    for name, value in (("terminated", ended), ("done", ended), ("reward", reward)):
        given["next", name] = value.reshape(4, *[1] * (len(flags) - 1)).expand(flags).clone()
    agree(loss, full)
    torch.testing.assert_close(run_loss(loss, given, 3), run_loss(loss, full, 3))


def test_the_noise_differs_between_calls_and_rows():
    loss, batch = make_td3(policy_noise=0.3), make_batch(1).expand(50).clone()
    values = [loss(batch)["next_state_value"] for _ in range(2)]
    assert values[0].unique().numel() == 50
    assert not (values[0] == values[1]).any()


def test_each_loss_reaches_its_own_parameters_only():
    """The actor's loss sees the first critic; all of them are reported."""
    for critics in (None, linear_critic(), normalised_critic()):
        loss = make_td3(critics)
        owners = {"loss_qvalue": "qvalue_network_params", "loss_actor": "actor_network_params"}
        named, out = dict(loss.named_parameters()), run_loss(loss, make_batch(6), 0)
        for part, owner in owners.items():
            grads = torch.autograd.grad(out[part], list(named.values()), allow_unused=True)
            for name, gradient in zip(named, grads, strict=True):
                assert (gradient is not None) == name.startswith(owner), (part, name)
        assert not any(out[name].requires_grad for name in OUTPUTS[2:])
        torch.testing.assert_close(out["loss_actor"], -out["state_action_value_actor"][0].mean())


def test_autocast_keeps_losses_in_float32():
    """bfloat16 networks, float32 sums: the loss is that of the rounded values, not a rounded loss."""
    loss = separated(make_td3(policy_noise=0.0)).float()
    batch = make_batch(512, dtype=torch.float32)
    truth = run_loss(loss, batch, 0)
    with torch.autocast("cpu", torch.bfloat16):
        out = run_loss(loss, batch, 0)
    assert out["pred_value"].dtype is torch.bfloat16
    for name in ("loss_actor", "loss_qvalue", "td_error", "target_value"):
        assert out[name].dtype is torch.float32
        torch.testing.assert_close(out[name], truth[name], rtol=0.03, atol=0.03)
    error = out["pred_value"].double() - out["target_value"].double()
    rows = torch.where(error.abs() < 1, error**2 / 2, error.abs() - 0.5).sum(0)
    torch.testing.assert_close(out["loss_qvalue"].double(), rows.mean(), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(out["loss_actor"].double(), -out["state_action_value_actor"][0].double().mean())
    total(out).backward()
    assert all(parameter.grad.isfinite().all() for parameter in loss.parameters())


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
