"""DistributionalSACLoss: settings, presets, the same bits in every run, and a GPU."""

from __future__ import annotations

import copy

import pytest
import torch

from gpubuf.objectives import DistributionalSACLoss
from tests.support.distributional_setup import (
    ATOMS,
    CHOICES,
    SUPPORT,
    gaussian_entropy,
    make_distributional,
    make_logits,
)
from tests.support.losses_setup import agree
from tests.support.sac_setup import ACTION, make_actor, make_batch, run_loss


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


def test_logits_of_another_number_of_atoms_are_refused():
    loss = DistributionalSACLoss(make_actor(), make_logits(atoms=ATOMS - 1), **SUPPORT)
    with pytest.raises(ValueError, match=r"logits \[2, 4, 11\].*\[4\].*\[2, 4, 10\]"):
        loss(make_batch(4))


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
