"""DistributionalSACLoss against the formulas, in float64: each loss, each gradient, for every choice."""

from __future__ import annotations

import copy

import pytest
import torch

from gpubuf.objectives import DistributionalSACLoss
from tests.support.distributional_setup import (
    ATOMS,
    CHOICES,
    SUPPORT,
    by_hand,
    gaussian_entropy,
    make_distributional,
    make_logits,
)
from tests.support.precision import assert_no_worse
from tests.support.sac_setup import ACTION, gradients, make_actor, make_batch, run_loss, total


def agree(loss, batch, **kwargs):
    """The loss, its priorities and its gradients equal those of the formulas."""
    ours, truth = run_loss(loss, batch, 3), by_hand(loss, batch, 3, **kwargs)
    assert set(ours) == set(truth)
    for name, value in truth.items():
        torch.testing.assert_close(ours[name], value, msg=lambda text, name=name: f"{name}: {text}")
    found, expected = gradients(loss, total(ours)), gradients(loss, total(truth))
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, msg=lambda text, name=name: f"{name}: {text}")
        assert gradient.abs().max() > 0, name


@pytest.mark.parametrize("choice", CHOICES)
def test_no_reduction(choice):
    batch, weight = make_batch(6), torch.rand(6)
    loss = make_distributional(reduction="none", scalar_output_mode="exclude", **CHOICES[choice])
    ours = run_loss(loss, batch.clone().set("priority_weight", weight), 5)
    truth = by_hand(loss, batch, 5, weight=weight, reduction="none")
    assert set(ours) == {"loss_actor", "loss_qvalue", "loss_alpha", "td_error"}
    for name, value in ours.items():
        assert value.shape == (6,)
        torch.testing.assert_close(value, truth[name])
    found, expected = gradients(loss, total(ours)), gradients(loss, total(truth))
    for name in expected:
        torch.testing.assert_close(found[name], expected[name])


def test_reward_scale_is_set_in_place():
    loss, batch = make_distributional(), make_batch(6)
    memory = loss.reward_scale
    before = run_loss(loss, batch, 3)["loss_qvalue"]
    loss.reward_scale = 0.25
    assert loss.reward_scale is memory
    assert memory == 0.25
    assert not torch.equal(run_loss(loss, batch, 3)["loss_qvalue"], before)
    agree(loss, batch)
    scaled = batch.clone()
    scaled["next", "reward"].mul_(0.25)
    loss.reward_scale = 1
    agree(loss, scaled)
    with pytest.raises(ValueError, match="reward_scale"):
        loss.reward_scale = float("nan")


@pytest.mark.parametrize("sigma", [0.15, 2.0])
def test_the_entropy_of_a_sigma(sigma):
    loss = make_distributional(target_sigma=sigma)
    with pytest.raises(RuntimeError, match="before the first batch"):
        loss.target_entropy  # noqa: B018
    loss(make_batch(3))
    assert float(loss.target_entropy) == pytest.approx(gaussian_entropy(sigma))
    known = make_distributional(target_sigma=sigma, action_spec=torch.zeros(ACTION))
    assert float(known.target_entropy) == pytest.approx(gaussian_entropy(sigma))


def test_gradcheck_through_the_loss():
    """Finite differences through networks and operations at once, along one direction for each parameter."""
    loss, batch = make_distributional(**CHOICES["own, next"]), make_batch(3)
    generator = torch.Generator().manual_seed(0)
    owners = {"loss_qvalue": "qvalue_network_params", "loss_actor": "actor_network_params", "loss_alpha": "log_alpha"}
    for part, owner in owners.items():
        for name, tensor in loss.named_parameters():
            if not name.startswith(owner):
                continue
            (gradient,) = torch.autograd.grad(run_loss(loss, batch, 7)[part], tensor)
            direction = torch.randn(tensor.shape, generator=generator, dtype=tensor.dtype)
            values = []
            for step in (1e-6, -2e-6):
                with torch.no_grad():
                    tensor.add_(step * direction)
                values.append(run_loss(loss, batch, 7)[part].detach())
            with torch.no_grad():
                tensor.add_(1e-6 * direction)
            slope = (values[0] - values[1]) / 2e-6
            torch.testing.assert_close((gradient * direction).sum(), slope, rtol=1e-5, atol=1e-7, msg=f"{part} {name}")


def test_float32_is_no_worse_than_plain_torch():
    """The ml-cross-entropy criterion for the whole loss."""
    loss, batch = make_distributional(target_entropy=-3.0), make_batch(64)
    truth = by_hand(loss, batch, 0)
    torch.manual_seed(0)
    single = copy.deepcopy(loss).to(torch.float32)
    noises = [torch.randn(64, ACTION, dtype=torch.float64) for _ in range(2)]
    narrow = batch.apply(lambda t: t.float() if t.is_floating_point() else t)

    def run(function):
        queue, original = [noise.float() for noise in noises], torch.randn
        torch.randn = lambda *_, **__: queue.pop(0)
        try:
            return function()
        finally:
            torch.randn = original

    ours, plain = run(lambda: run_loss(single, narrow, 0)), run(lambda: by_hand(single, narrow, 0))
    for name, value in truth.items():
        assert_no_worse(ours[name].detach(), plain[name].detach(), value.detach(), 2e-6)


@pytest.mark.parametrize("choice", CHOICES)
def test_same_bits_twice(backend, choice):
    loss, batch = make_distributional(**CHOICES[choice]).to(torch.float32), make_batch(9, dtype=torch.float32)
    first, second = run_loss(loss, batch, 1), run_loss(loss, batch, 1)
    assert all(torch.equal(first[name], second[name]) for name in first)
    for one, other in zip(gradients(loss, total(first)).values(), gradients(loss, total(second)).values(), strict=True):
        assert torch.equal(one, other)


def test_presets():
    """The settings of the two programs; what is given takes precedence."""
    fast = DistributionalSACLoss.fastsac(make_actor(), make_logits(atoms=101))
    assert (fast.v_min, fast.v_max, fast.num_atoms, fast.target, fast.actor_value) == (-20, 20, 101, "own", "mean")
    assert (fast.temperature_from, fast.temperature_loss, fast.average_critics) == ("next", "alpha", False)
    assert float(fast.target_entropy) == 0
    assert float(fast.value_estimator.gamma) == 0.97
    assert float(fast.alpha) == pytest.approx(0.001)
    agree(fast, make_batch(5), gamma=0.97)
    agree(
        DistributionalSACLoss.fastsac(make_actor(), make_logits(), **SUPPORT, target_sigma=0.2),
        make_batch(5),
        gamma=0.97,
    )

    flash = DistributionalSACLoss.flashsac(make_actor(), make_logits(atoms=101))
    assert (flash.v_min, flash.v_max, flash.num_atoms, flash.target, flash.actor_value) == (-5, 5, 101, "min", "min")
    assert (flash.temperature_from, flash.temperature_loss, flash.average_critics) == ("current", "alpha", True)
    assert flash.joint_batch == "all"
    flash(make_batch(4))
    assert float(flash.target_entropy) == pytest.approx(gaussian_entropy(0.15))
    agree(DistributionalSACLoss.flashsac(make_actor(), make_logits(), **SUPPORT, joint_batch=False), make_batch(5))
    numbered = DistributionalSACLoss.flashsac(make_actor(), make_logits(), **SUPPORT, target_entropy=-1.0)
    assert numbered.target_entropy == -1


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"v_min": 1.0, "v_max": 1.0}, "v_min < v_max"),
        ({"v_max": float("inf")}, "finite"),
        ({"num_atoms": 1}, "num_atoms must be at least 2, got 1"),
        ({"target": "max"}, "target must be one of.*own"),
        ({"actor_value": "max"}, "actor_value must be one of"),
        ({"priority": "td"}, "priority must be one of"),
        ({"temperature_from": "last"}, "temperature_from must be one of"),
        ({"temperature_loss": "beta"}, "temperature_loss must be one of"),
        ({"joint_batch": True}, "joint_batch must be one of"),
        ({"target_sigma": 0.0}, "target_sigma must be positive"),
        ({"target_sigma": 0.1, "target_entropy": -1.0}, "goes with target_entropy='auto'"),
        ({"cloning_weight": -1.0}, "cloning_weight"),
        ({"reward_scale": float("nan")}, "reward_scale"),
    ],
)
def test_arguments_out_of_range(options, text):
    with pytest.raises(ValueError, match=text):
        DistributionalSACLoss(make_actor(), make_logits(), **{**SUPPORT, **options})


def test_logits_of_another_number_of_atoms_are_refused():
    loss = DistributionalSACLoss(make_actor(), make_logits(atoms=ATOMS - 1), **SUPPORT)
    with pytest.raises(ValueError, match=r"logits \[2, 4, 11\].*\[4\].*\[2, 4, 10\]"):
        loss(make_batch(4))
