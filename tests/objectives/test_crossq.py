"""CrossQLoss and the joint batches of DistributionalSACLoss: which rows and which statistics a batch norm sees."""

from __future__ import annotations

import copy

import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import TensorDictModule
from torch import nn

from gpubuf.kernels.categorical import DIVERGENCE, MIN
from gpubuf.modules import MLP, BatchNorm, EnsembleMLP
from gpubuf.modules.norms import count_rows, set_statistics
from gpubuf.objectives import CrossQLoss, DistributionalSACLoss, SACLoss, TD3Loss
from tests.contracts.objectives import NORMALISED, norms
from tests.contracts.objectives import normalised_actor as our_actor
from tests.kernels.reference import categorical as reference
from tests.kernels.reference import td
from tests.support.distributional_setup import SUPPORT
from tests.support.sac_setup import (
    ACTION,
    CELLS,
    KEYS,
    OBSERVATION,
    VALUE,
    draw_by_hand,
    gradients,
    make_actor,
    make_batch,
    run_loss,
    total,
    values_by_hand,
)

CRITICS = {
    "ensemble": (NORMALISED["ensemble"], {}),
    "vmap": (NORMALISED["vmap"], {}),
    "loop": (NORMALISED["vmap"], {"deactivate_vmap": True}),
}


def normalised_actor():
    """An actor with PyTorch's batch norm before its first layer."""
    actor = make_actor()
    actor[0].module[0].insert(0, nn.BatchNorm1d(OBSERVATION, momentum=0.3, dtype=torch.float64))
    return actor


def formulas(loss, batch, seed, joint_actor=False):
    """The losses written out with explicit modes, on copies of the parameters and statistics."""
    torch.manual_seed(seed)
    alpha, following, actor = loss.log_alpha.detach().exp(), batch["next"], loss.actor_network
    training = loss.qvalue_network.training
    rows = len(batch)
    online = loss.qvalue_network_params
    # A copy of the statistics: in training mode a pass changes them in place.
    params = TensorDict(
        {k: v.clone() if not isinstance(v, nn.Parameter) else v for k, v in online.items(True, True)}, []
    )
    with torch.no_grad():
        next_action, next_log_prob = draw_by_hand(actor, following["observation"], training=False)
    observations = torch.cat([batch["observation"], following["observation"]])
    actions = torch.cat([batch["action"], next_action])
    reward, ended = (following[name].reshape(rows) for name in ("reward", "terminated"))
    both = values_by_hand(loss, params, observations, actions, training)
    out = {}
    if isinstance(loss, DistributionalSACLoss):
        limits = loss.v_min, loss.v_max
        with torch.no_grad():
            targets = loss.target_qvalue_network_params.clone()
            set_statistics(loss.qvalue_network, "batch")
            next_logits = values_by_hand(loss, targets, observations, actions, training)[:, rows:]
            set_statistics(loss.qvalue_network, "update")
            m = reference.categorical_target(
                next_logits, next_log_prob, alpha, reward, ended, 0.99, None, 1.0, *limits, MIN
            )
        out["loss_qvalue"], out["td_error"] = reference.categorical_loss(
            both[:, :rows], m, None, None, *limits, DIVERGENCE, loss.average_critics, "mean"
        )
    else:
        q, next_q = both[:, :rows, 0], both[:, rows:, 0].detach()
        y = td.soft_td_target(next_q, next_log_prob, alpha, reward, ended, 0.99)
        out["loss_qvalue"] = td.distance(q, y.expand_as(q), loss.loss_function).sum(0).mean()
        out["td_error"] = (q - y).abs().amax(0)
    out["td_error"] = out["td_error"].detach()
    seen = observations if joint_actor else batch["observation"]
    action, log_prob = (part[:rows] for part in draw_by_hand(actor, seen, training=training))
    detached = TensorDict({k: v.detach() for k, v in params.items(True, True)}, [])
    value = values_by_hand(loss, detached, batch["observation"], action, training=False)
    value = reference.expected_value(value, *limits) if value.shape[-1] > 1 else value[..., 0]
    out["loss_actor"] = (alpha * log_prob - value.min(0).values).mean()
    factor = loss.log_alpha if loss.temperature_loss == "log_alpha" else loss.log_alpha.exp()
    out["loss_alpha"] = -factor * (log_prob.detach().mean() + float(loss.target_entropy))
    return out, params


def agree(loss, batch, **kwargs):
    truth, params = formulas(loss, batch, 3, **kwargs)
    expected = gradients(loss, total(truth))
    ours = run_loss(loss, batch, 3)
    for name, value in truth.items():
        torch.testing.assert_close(ours[name], value, msg=lambda text, name=name: f"{name}: {text}")
    for name, gradient in gradients(loss, total(ours)).items():
        torch.testing.assert_close(gradient, expected[name], msg=lambda text, name=name: f"{name}: {text}")
    for key, value in loss.qvalue_network_params.items(True, True):
        torch.testing.assert_close(value.detach(), params.get(key).detach(), msg=str(key))


@pytest.mark.parametrize("critics", CRITICS)
@pytest.mark.parametrize("actor", [make_actor, normalised_actor])
@pytest.mark.parametrize("training", [True, False])
def test_losses_gradients_and_statistics(critics, actor, training):
    """The joint batch moves the statistics, once; the actor's loss and the next action use them and leave them."""
    make, options = CRITICS[critics]
    loss = CrossQLoss(actor(), make(1), target_entropy=-2.0, **options)
    batch = make_batch(7)
    loss.actor_network.train(training)
    loss.qvalue_network.train(training)
    for _ in range(2):
        agree(loss, batch)
    for part in (*loss.actor_network.modules(), *loss.qvalue_network.modules()):
        assert part.training is training


@pytest.mark.parametrize("critics", CRITICS)
@pytest.mark.parametrize("joint", ["critics", "all"])
def test_joint_batches_of_distributions(critics, joint):
    make, options = CRITICS[critics]
    options = {**SUPPORT, **options, "joint_batch": joint, "target_entropy": -2.0}
    loss = DistributionalSACLoss(normalised_actor(), make(SUPPORT["num_atoms"]), **options)
    for _ in range(2):
        agree(loss, make_batch(7), joint_actor=joint == "all")


def test_joint_batches_without_target_networks():
    """One pass makes both: as in CrossQ."""
    options = {**SUPPORT, "joint_batch": "critics", "delay_qvalue": False, "target_entropy": -2.0}
    loss = DistributionalSACLoss(make_actor(), CRITICS["ensemble"][0](SUPPORT["num_atoms"]), **options)
    norm = next(part for part in loss.qvalue_network.modules() if isinstance(part, BatchNorm))
    before = norm.running_mean.clone()
    out = run_loss(loss, make_batch(6), 0)
    assert not torch.equal(norm.running_mean, before)
    assert all(gradient.isfinite().all() for gradient in gradients(loss, total(out)).values())


def test_nan_in_terminal_observations():
    """CASES 29: a batch norm would carry it into every row."""
    loss, batch = CrossQLoss(make_actor(), CRITICS["ensemble"][0](1), skip_done_states=True), make_batch(9)
    batch["next", "observation"][batch["next", "terminated"].squeeze(-1)] = float("nan")
    out = run_loss(loss, batch, 0)
    assert all(value.isfinite().all() for value in out.values())
    assert all(gradient.isfinite().all() for gradient in gradients(loss, total(out)).values())
    assert all(buffer.isfinite().all() for buffer in loss.buffers())


def filled(batch, value):
    """``batch`` with a mask, and ``value`` wherever a masked row holds a number that a network or a target reads."""
    batch = batch.clone()
    mask = torch.arange(batch.numel()).reshape(batch.shape) % 3 != 1
    batch.set("shifted_valid", mask)
    for key in ("observation", "action", ("next", "observation"), ("next", "reward")):
        batch.get(key)[~mask] = value
    return batch


def our_critics(outputs=1, **options):
    network = EnsembleMLP(2, OBSERVATION + ACTION, outputs, CELLS, **(options or norms()))
    return TensorDictModule(network, KEYS, VALUE)


MASKED = {
    "CrossQLoss": lambda: CrossQLoss(our_actor(), our_critics(), target_entropy=-2.0),
    "CrossQLoss, batch renorm": lambda: CrossQLoss(
        our_actor(**norms("batch_renorm", renorm_warmup=1)),
        our_critics(**norms("batch_renorm", renorm_warmup=1)),
        target_entropy=-2.0,
    ),
    "CrossQLoss, vmap": lambda: CrossQLoss(
        our_actor(),
        TensorDictModule(MLP(OBSERVATION + ACTION, 1, CELLS, **norms()), KEYS, VALUE),
        target_entropy=-2.0,
    ),
    "DistributionalSACLoss": lambda: DistributionalSACLoss(
        our_actor(), our_critics(SUPPORT["num_atoms"]), **SUPPORT, joint_batch="all", target_entropy=-2.0
    ),
    "SACLoss": lambda: SACLoss(our_actor(), our_critics(), target_entropy=-2.0),
    "TD3Loss": lambda: TD3Loss(
        TensorDictModule(MLP(OBSERVATION, ACTION, CELLS, **norms()), ["observation"], ["action"]),
        our_critics(),
        bounds=(-1.0, 1.0),
        policy_noise=0.0,
    ),
}


def after(loss, batch):
    """Losses, gradients and statistics after a call, with the priorities of the rows that count."""
    out = run_loss(loss, batch, 3)
    losses = {key: value for key, value in out.items() if key.startswith("loss_")}
    named = {name: p for name, p in loss.named_parameters() if p.requires_grad}
    slopes = dict(zip(named, torch.autograd.grad(sum(losses.values()), named.values()), strict=True))
    mask = batch.get("shifted_valid", torch.ones(batch.shape, dtype=torch.bool))
    buffers = {name: buffer.clone() for name, buffer in loss.named_buffers()}
    return {**losses, **slopes, **buffers, "td_error": out["td_error"].reshape(mask.shape)[mask]}


@pytest.mark.parametrize("shape", [(7,), (4, 3)], ids=str)
@pytest.mark.parametrize("name", MASKED)
def test_masked_rows_change_no_statistic(name, shape):
    """Case 64: whatever they hold, losses, gradients and running statistics are the same."""
    first, clean = MASKED[name](), make_batch(*shape)
    due = after(copy.deepcopy(first), filled(clean, 0.0))
    assert any(not torch.equal(buffer, due[key]) for key, buffer in first.named_buffers() if "running" in key)
    for value in (1e3, float("nan"), float("inf")):
        found = after(copy.deepcopy(first), filled(clean, value))
        for key, each in due.items():
            assert each.isfinite().all()
            torch.testing.assert_close(found[key], each, rtol=1e-9, atol=1e-9, msg=f"{value}: {key}")


@pytest.mark.parametrize("name", ["CrossQLoss", "CrossQLoss, vmap", "DistributionalSACLoss"])
def test_masked_rows_are_left_out_of_statistics(name):
    """Case 64: with two copies of the batch, of which one is masked, losses and statistics are those of one alone."""
    first, batch = MASKED[name](), make_batch(6)
    for norm in (part for part in first.modules() if isinstance(part, BatchNorm)):
        assert norm.counts is None
    noise = torch.randn(6, ACTION, dtype=torch.float64)
    twice = torch.cat([batch, filled(batch, 1e3).exclude("shifted_valid")])
    twice["shifted_valid"] = torch.arange(12) < 6
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "randn", lambda shape, **_: noise.repeat(shape[0] // 6, 1))
        one, two = after(copy.deepcopy(first), batch), after(copy.deepcopy(first), twice)
    for key in one:
        torch.testing.assert_close(two[key], one[key], rtol=1e-9, atol=1e-9, msg=key)


@pytest.mark.parametrize("name", MASKED)
def test_all_rows_masked(name):
    """Case 64: nothing moves, and every number is finite."""
    loss, batch = MASKED[name](), make_batch(5)
    batch.set("shifted_valid", torch.zeros(5, dtype=torch.bool))
    batch["observation"].fill_(float("nan"))
    before = {key: value.clone() for key, value in loss.named_buffers()}
    found = after(loss, batch)
    assert all(value.isfinite().all() for value in found.values())
    assert all(torch.equal(found[key], value) for key, value in before.items() if "running" in key)


def test_flags_of_rows_have_to_fit():
    norm = BatchNorm(3)
    count_rows(norm, torch.ones(5, dtype=torch.bool))
    with pytest.raises(ValueError, match=r"of each: got \[5\] for an input of \[4, 3\]"):
        norm(torch.randn(4, 3))
