"""DistributionalSACLoss where losses fail: terminal states, masks, agents, graphs, compiled code, other devices."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import TensorDictModule

from gpubuf.modules import EnsembleMLP, make_sac_actor
from gpubuf.objectives import DistributionalSACLoss, SoftUpdate
from tests.support.distributional_setup import ATOMS, CHOICES, SUPPORT, by_hand, make_distributional, separated
from tests.support.fake_cuda import fake_cuda
from tests.support.graph_recorder import recorded
from tests.support.sac_setup import ACTION, CELLS, OBSERVATION, gradients, make_batch, run_loss, total

LOSSES = ("loss_qvalue", "loss_actor", "loss_alpha")


@pytest.mark.parametrize("skip", [False, True])
@pytest.mark.parametrize("choice", ["min", "own, next", "mixture"])
def test_truncated_rows_bootstrap(choice, skip):
    """CASES 22: truncated and not terminated: the next distribution counts."""
    loss = make_distributional(skip_done_states=skip, **CHOICES[choice])
    batch = make_batch(5)
    batch["next", "terminated"][:], batch["next", "truncated"][:], batch["next", "done"][:] = False, True, True
    ours, truth = run_loss(loss, batch, 3), by_hand(loss, batch, 3)
    for name, value in truth.items():
        torch.testing.assert_close(ours[name], value)
    batch["next", "terminated"][:] = True
    assert not torch.equal(run_loss(loss, batch, 3)["loss_qvalue"], ours["loss_qvalue"])


@pytest.mark.parametrize("choice", ["min", "own, next", "mixture"])
def test_terminated_rows_never_show_their_next_observation(backend, choice):
    """CASES 29 (TorchRL 2590): NaN there, and losses, priorities and gradients are finite and the right ones."""
    batch = make_batch(9)
    ended = batch["next", "terminated"].squeeze(-1)
    own = torch.where(ended.unsqueeze(-1), batch["observation"], batch["next", "observation"])
    batch["next", "observation"][ended] = math.nan
    loss = make_distributional(skip_done_states=True, **CHOICES[choice])
    ours, truth = run_loss(loss, batch, 1), by_hand(loss, batch, 1, next_observation=own)
    for name, value in truth.items():
        assert ours[name].isfinite().all()
        torch.testing.assert_close(ours[name], value)
    found, expected = gradients(loss, total(ours)), gradients(loss, total(truth))
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # the interpreter computes with NumPy
def test_a_terminated_row_does_not_see_its_next_distribution(backend):
    """CASES 29: without the flag too: its logits are selected away, not multiplied by 0."""
    batch = make_batch(9)
    clean = batch.clone()
    batch["next", "observation"][batch["next", "terminated"].squeeze(-1)] = math.nan
    loss = make_distributional()
    ours, truth = run_loss(loss, batch, 1), run_loss(loss, clean, 1)
    for name in truth:
        torch.testing.assert_close(ours[name], truth[name])


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("choice", ["own, next", "min, sigma"])
def test_what_masked_rows_hold_reaches_nothing(choice, reduction, bad):
    options = {"scalar_output_mode": "non_tensor"} if reduction == "none" else {}
    loss = make_distributional(reduction=reduction, **options, **CHOICES[choice])
    batch, mask = make_batch(6), torch.tensor([True, False, True, True, False, True])
    batch.set(("collector", "mask"), mask)
    expected = run_loss(loss, batch, 0)
    wanted = gradients(loss, total(expected))
    for key in ("observation", "action", ("next", "observation"), ("next", "reward")):
        spoilt = batch.clone()
        spoilt[key][~mask] = bad
        ours = run_loss(loss, spoilt, 0)
        assert ours["td_error"].isfinite().all()
        for name in LOSSES:
            torch.testing.assert_close(ours[name], expected[name])
        for name, gradient in gradients(loss, total(ours)).items():
            torch.testing.assert_close(gradient, wanted[name])


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
def test_nothing_is_baked_into_a_graph(choice):
    """CASES 33: temperature, discount, target entropy and reward scale change between replays."""
    options = {**CHOICES[choice], "target_sigma": None, "target_entropy": -2.0}
    loss, batch = make_distributional(**options), make_batch(6)
    with torch.no_grad(), recorded() as graph:
        out = loss(batch)
    for seed in range(3):
        loss.log_alpha = -0.3 * seed
        loss.value_estimator.gamma.fill_(0.9 + 0.02 * seed)
        loss.target_entropy = -1.0 - seed
        loss.reward_scale = 0.5 + seed
        torch.manual_seed(seed)
        graph.replay()
        truth = run_loss(loss, batch, seed)
        for name in LOSSES:
            torch.testing.assert_close(out[name], truth[name].detach())
        assert torch.equal(batch["td_error"], truth["td_error"])


@pytest.mark.parametrize("choice", ["own, next", "min, sigma"])
def test_traced_as_one_graph(choice):
    """Compiled once, backward included; a reward scale that is set in place is no constant."""
    torch._dynamo.reset()
    loss, batch = make_distributional(**CHOICES[choice]), make_batch(6)
    run_loss(loss, batch, 0)  # the target entropy is known from here on
    compiled = torch.compile(loss, backend="aot_eager", fullgraph=True)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for seed in range(2):
            loss.reward_scale = 1.0 + seed
            torch.manual_seed(seed)
            ours = compiled(batch.clone())
            truth = run_loss(loss, batch, seed)
            found, expected = gradients(loss, total(ours)), gradients(loss, total(truth))
            for name in LOSSES:
                torch.testing.assert_close(ours[name], truth[name])
            for name in expected:
                torch.testing.assert_close(found[name], expected[name])


@pytest.mark.parametrize("choice", CHOICES)
@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_no_host_sync(choice, device):
    """Forward and target update on fake tensors, which refuse to be read; the backward on the CPU's."""
    with fake_cuda(), torch.device(device), torch.set_grad_enabled(device == "cpu"):
        loss = DistributionalSACLoss(
            make_sac_actor(5, 3, (8,)),
            TensorDictModule(EnsembleMLP(2, 8, ATOMS, (8,)), ["observation", "action"], ["state_action_value"]),
            **{**SUPPORT, **CHOICES[choice]},
        )
        updater = SoftUpdate(loss, tau=0.01)
        flag = torch.zeros(6, 1, dtype=torch.bool)
        following = {"observation": torch.randn(6, 5), "reward": torch.randn(6, 1), "terminated": flag, "done": flag}
        own = {"observation": torch.randn(6, 5), "action": torch.randn(6, 3), "priority_weight": torch.rand(6)}
        more = {"steps_to_next_obs": torch.ones(6, 1, dtype=torch.int64), ("collector", "mask"): ~flag}
        batch = TensorDict({**own, **more, "next": TensorDict(following, [6])}, [6])
        for _ in range(2):
            out = loss(batch)
            if device == "cpu":
                total(out).backward()
            updater.step()
        assert out["loss_actor"].device.type == batch["td_error"].device.type == device


def test_copies_states_and_given_parameters():
    """A copy, a loss that has loaded the state, and ``functional_call`` on the parameters give the same numbers."""
    loss, batch = make_distributional(target_entropy=-2.0), make_batch(5)
    loss.reward_scale = 0.7
    expected = run_loss(loss, batch, 0)
    other = make_distributional(target_entropy=-1.0)
    given = {name: t.detach().clone() for name, t in (*loss.named_parameters(), *loss.named_buffers())}
    torch.manual_seed(0)
    through = torch.func.functional_call(loss, given, (batch.clone(),))
    other.load_state_dict(loss.state_dict())
    assert other.reward_scale == 0.7
    for out in (run_loss(copy.deepcopy(loss), batch, 0), run_loss(other, batch, 0), through):
        for name in LOSSES:
            torch.testing.assert_close(out[name], expected[name])


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
