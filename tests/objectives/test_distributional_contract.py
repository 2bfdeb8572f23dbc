"""DistributionalSACLoss where losses fail: terminal states, masks, agents, graphs, compiled code, other devices."""

from __future__ import annotations

import copy

import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import TensorDictModule

from gpubuf.modules import EnsembleMLP, make_sac_actor
from gpubuf.objectives import DistributionalSACLoss
from tests.support.distributional_setup import ATOMS, CHOICES, SUPPORT, make_distributional, separated
from tests.support.sac_setup import ACTION, CELLS, OBSERVATION, gradients, make_batch, run_loss, total

LOSSES = ("loss_qvalue", "loss_actor", "loss_alpha")


@pytest.mark.parametrize("done_shape", [(4,), (4, 1), (4, 3), (4, 3, 1)], ids=str)
@pytest.mark.parametrize("choice", CHOICES)
def test_agents(done_shape, choice):
    """CASES 29 (TorchRL 2612): every key nested, and done flags of fewer and more dimensions than the loss."""
    actor = make_sac_actor(
        OBSERVATION, ACTION, CELLS, in_keys=[("agents", "obs")], action_key=("agents", "action"), dtype=torch.float64
    )
    network = EnsembleMLP(2, OBSERVATION + ACTION, ATOMS, CELLS, dtype=torch.float64)
    critics = TensorDictModule(network, [("agents", "obs"), ("agents", "action")], [("agents", "logits")])
    loss = separated(DistributionalSACLoss(actor, critics, **{**SUPPORT, **CHOICES[choice]}))
    loss.set_keys(
        state_action_value=("agents", "logits"),
        reward=("agents", "reward"),
        priority=("agents", "td_error"),
        done="done",
    )
    flat = make_batch(4, 3)
    ended = torch.tensor([True, False, True, False])
    flat["next", "terminated"].copy_(ended.reshape(4, 1, 1).expand(4, 3, 1))
    done = ended.reshape(4, *[1] * (len(done_shape) - 1)).expand(done_shape).clone()
    own = TensorDict({"obs": flat["observation"], "action": flat["action"]}, [4, 3])
    after = TensorDict({"obs": flat["next", "observation"], "reward": flat["next", "reward"]}, [4, 3])
    following = {"agents": after, "done": done, "terminated": done}
    batch = TensorDict({"agents": own, "next": TensorDict(following, [4])}, [4])
    plain = make_distributional(**CHOICES[choice])
    for name in ("actor_network_params", "qvalue_network_params", "target_qvalue_network_params"):
        getattr(plain, name).data.update_(getattr(loss, name).data)
    if loss.delay_actor:
        plain.target_actor_network_params.data.update_(loss.target_actor_network_params.data)
    ours, truth = run_loss(loss, batch, 2), run_loss(plain, flat, 2)
    assert ours["td_error"].shape == (4, 3)
    for name in truth:
        torch.testing.assert_close(ours[name], truth[name])
    found, expected = gradients(loss, total(ours)), gradients(plain, total(truth))
    for one, other in zip(found.values(), expected.values(), strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("choice", CHOICES)
def test_updates_that_leave_the_actor_alone(choice):
    """``critic_losses`` gives the numbers of a whole call with the same noise."""
    loss, batch = make_distributional(**CHOICES[choice], fixed_alpha=True), make_batch(5)
    whole = run_loss(loss, batch, 2)
    torch.manual_seed(2)
    out = loss.critic_losses(batch)
    torch.testing.assert_close(out["loss_qvalue"], whole["loss_qvalue"])
    torch.testing.assert_close(batch["td_error"], whole["td_error"])
    assert ("loss_alpha" in out.keys()) == (loss.temperature_from == "next")
    if "loss_alpha" in out.keys():
        torch.testing.assert_close(out["loss_alpha"], whole["loss_alpha"])


def test_keyword_calls():
    loss, batch = make_distributional(target_entropy=-2.0), make_batch(5)
    truth = run_loss(loss, batch, 1)
    torch.manual_seed(1)
    out = loss(
        observation=batch["observation"],
        action=batch["action"],
        **{f"next_{name}": batch["next", name] for name in ("observation", "reward", "done", "terminated")},
    )
    assert loss.out_keys == ["loss_actor", "loss_qvalue", "loss_alpha", "alpha", "entropy"]
    for name, value in zip(loss.out_keys, out, strict=True):
        torch.testing.assert_close(value, truth[name])


def test_other_value_estimators_are_refused():
    with pytest.raises(NotImplementedError, match="TD0 only"):
        make_distributional().make_value_estimator("TDLambda")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("choice", CHOICES)
def test_on_a_gpu_as_on_the_cpu(choice, monkeypatch):
    loss, batch = make_distributional(**CHOICES[choice]), make_batch(33)
    other, noise = copy.deepcopy(loss).cuda(), torch.randn(33, ACTION, dtype=torch.float64)
    monkeypatch.setattr(torch, "randn", lambda *_, device=None, **__: noise.to(device))
    ours, truth = run_loss(other, batch.cuda(), 0), run_loss(loss, batch, 0)
    for name, value in truth.items():
        torch.testing.assert_close(ours[name].cpu(), value)
