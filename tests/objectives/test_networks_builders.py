"""The builders of FastSAC's and FlashSAC's networks, and these networks as the parts of a loss."""

from __future__ import annotations

import math

import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import InteractionType, TensorDictModule, set_interaction_type
from torch import nn

from gpubuf.modules import (
    MLP,
    SquashedGaussianParameters,
    TanhNormal,
    make_fastsac_actor,
    make_fastsac_critic,
    make_flashsac_actor,
    make_flashsac_critic,
    make_sac_actor,
    unit_weights,
)
from gpubuf.objectives import SACLoss, SoftUpdate

SMALL = {"fastsac": {"num_cells": (8, 6)}, "flashsac": {"width": 6, "num_blocks": 1, "expansion": 2}}
ACTORS = {"fastsac": make_fastsac_actor, "flashsac": make_flashsac_actor}
CRITICS = {"fastsac": make_fastsac_critic, "flashsac": make_flashsac_critic}


def batch(*shape, privileged=0):
    generator = torch.Generator().manual_seed(0)
    flags = torch.zeros(*shape, 1, dtype=torch.bool)

    def state():
        extra = {"state": torch.randn(*shape, privileged, generator=generator)} if privileged else {}
        return {"observation": torch.randn(*shape, 5, generator=generator), **extra}

    following = {**state(), "reward": torch.randn(*shape, 1, generator=generator), "done": flags, "terminated": flags}
    action = torch.rand(*shape, 3, generator=generator) * 2 - 1
    return TensorDict({**state(), "action": action, "next": following}, shape)


def total(out):
    return sum(value for key, value in out.items() if key.startswith("loss_"))


def running(loss):
    return {name: value.clone() for name, value in loss.state_dict().items() if "running" in name}


@pytest.mark.parametrize("name", SMALL)
def test_actors(name):
    actor = ACTORS[name](5, 3, low=[-1.0, -2, 0], high=2.0, return_log_prob=True, **SMALL[name])
    data = batch(6).select("observation")
    dist = actor.get_dist(data)
    assert isinstance(dist, TanhNormal)
    assert (dist.rsample().shape, dist.scale.shape) == ((6, 3), (6, 3))
    with torch.no_grad():
        out = actor(data)
        assert (out["action"].shape, out["action_log_prob"].shape) == ((6, 3), (6,))
        assert actor(batch().select("observation"))["action"].shape == (3,)  # one observation
        with set_interaction_type(InteractionType.DETERMINISTIC):
            torch.testing.assert_close(actor(data)["action"], actor.get_dist(data).deterministic_sample)


def test_the_standard_deviation_stays_in_its_range():
    split = SquashedGaussianParameters(-5.0, 1.0)
    loc, scale = split(torch.tensor([[7.0, 8.0, -9.0, 1.0, 0.0, -100.0, 100.0, math.atanh(0.5)]]))
    assert loc.tolist() == [[7, 8, -9, 1]]
    torch.testing.assert_close(scale.log(), torch.tensor([[-2.0, -5.0, 1.0, -0.5]]))
    with pytest.raises(ValueError, match="log_std_min"):
        SquashedGaussianParameters(1.0, 1.0)
    with pytest.raises(ValueError, match="log_std_min"):
        make_flashsac_actor(5, 3, 8, log_std_min=3)


@pytest.mark.parametrize("shape", [(6,), (2, 3)], ids=str)
@pytest.mark.parametrize("name", SMALL)
def test_critics(name, shape):
    """Logits of N nets, of keys that the actor need not know."""
    critic = CRITICS[name](9, 3, num_atoms=11, num_nets=3, in_keys=("observation", "state", "action"), **SMALL[name])
    data = batch(*shape, privileged=4)
    assert isinstance(critic, TensorDictModule)
    assert critic(data.clone().auto_batch_size_(0))["state_action_value"].shape == (3, *shape, 11)
    inputs = (data["observation"], data["state"], data["action"])
    torch.testing.assert_close(
        critic.eval().module(*inputs), critic.module(torch.cat(inputs, -1)), rtol=1e-5, atol=1e-6
    )


def test_sizes_of_the_programs():
    fast, flash = make_fastsac_critic(48, 12).module, make_flashsac_critic(48, 12).module
    widths = [part.weight.shape[-1] for part in fast.layers if hasattr(part, "in_features")]
    assert widths == [768, 384, 192, 101]
    assert [type(part).__name__ for part in fast.layers[:2]] == ["EnsembleLinear", "LayerNorm"]
    assert fast.layers[1].activation == "silu"
    assert [tuple(part.weight.shape) for part in flash.layers[2].layers[::2]] == [(2, 256, 1024), (2, 1024, 256)]
    assert flash.layers[-1].weight.shape == (2, 256, 101)
    assert len(unit_weights(flash)) == 12
    assert not unit_weights(fast)


@pytest.mark.parametrize("privileged", [0, 4])
@pytest.mark.parametrize("name", SMALL)
def test_in_a_loss(name, privileged):
    """Gradients reach everything; only the online pass moves running statistics, and the targets follow."""
    keys = ("observation", *(("state",) if privileged else ()), "action")
    actor = ACTORS[name](5, 3, **SMALL[name])
    critic = CRITICS[name](5 + privileged, 3, num_atoms=1, in_keys=keys, **SMALL[name])
    loss, data = SACLoss(actor, critic, num_qvalue_nets=2), batch(6, privileged=privileged)
    updater = SoftUpdate(loss, tau=0.25)
    first = running(loss)
    total(loss(data)).backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in loss.parameters())
    after = running(loss)
    assert bool(after) is (name == "flashsac")
    for key, value in after.items():
        assert torch.equal(value, first[key]) is key.startswith("target_"), key
    # Only once: by the mean of the present batch.
    if name == "flashsac":
        inputs = torch.cat([data[key] for key in keys], -1)
        mean = after["qvalue_network_params.module.layers.0.running_mean"]
        torch.testing.assert_close(mean, 0.01 * inputs.mean(0).expand_as(mean))
        mean = after["actor_network_params.module.0.module.0.0.running_mean"]
        torch.testing.assert_close(mean, 0.01 * data["observation"].mean(0))
    updater.step()
    for key, value in running(loss).items():
        if key.startswith("target_"):
            online = after[key.removeprefix("target_")]
            torch.testing.assert_close(value, first[key] + 0.25 * (online - first[key]))


def critic_alone(**options):
    """One network, which the loss copies and stacks."""
    return TensorDictModule(MLP(8, 1, (6,), **options), ["observation", "action"], ["state_action_value"])


@pytest.mark.parametrize("vmap", [True, False], ids=["vmap", "loop"])
@pytest.mark.parametrize(
    "options",
    [
        {"norm": "layer", "activation": nn.SiLU},
        {"norm": "rms", "dropout": 0.1},
        {"norm": "batch_renorm", "norm_place": "before", "norm_kwargs": {"renorm_warmup": 1}},
        {"norm": "batch", "num_blocks": 1, "unit_rows": True},
    ],
    ids=["layer", "rms", "renorm", "blocks"],
)
def test_copied_networks(options, vmap):
    loss = SACLoss(make_sac_actor(5, 3, (8,)), critic_alone(**options), num_qvalue_nets=2, deactivate_vmap=not vmap)
    first = running(loss)
    for _ in range(2):
        total(loss(batch(6))).backward()
    after = running(loss)
    for key, value in after.items():
        assert torch.equal(value, first[key]) is key.startswith("target_"), key
    counters = {key: value.tolist() for key, value in loss.state_dict().items() if "num_batches" in key}
    assert all(value == ([0, 0] if key.startswith("target_") else [2, 2]) for key, value in counters.items())
    with torch.no_grad():
        loss(batch(6))
    assert all(torch.equal(value, after[key]) for key, value in running(loss).items())


def test_first_policies_and_weights_of_the_programs():
    """holosoma: both heads 0, so mean 0 and standard deviation exp(-2.5). FlashSAC: orthogonal rows of unit length."""
    observation = TensorDict({"observation": torch.randn(6, 5)}, [6])
    with torch.no_grad():
        fast = make_fastsac_actor(5, 3, (16, 8)).get_dist(observation)
    assert fast.loc.eq(0).all()
    torch.testing.assert_close(fast.scale, torch.full((6, 3), math.exp(-2.5)))
    assert round(float(fast.scale[0, 0]), 3) == 0.082
    flash, critic = make_flashsac_actor(5, 3, 16), make_flashsac_critic(5, 3, 16, num_atoms=11)
    mlp = flash[0].module[0]
    eye = torch.eye(3)
    for head in mlp[-1].weight.chunk(2):
        torch.testing.assert_close(head @ head.T, eye)
    assert mlp[-1].bias.eq(0).all()
    narrow = mlp[2].layers[2].weight  # [16, 64]: fewer rows than a row has elements
    torch.testing.assert_close(narrow @ narrow.T, torch.eye(16))
    wide = mlp[2].layers[0].weight  # [64, 16]
    torch.testing.assert_close(wide.norm(dim=1), torch.ones(64))
    for net in critic.module.layers[-1].weight:  # [16, 11]
        torch.testing.assert_close(net.T @ net, torch.eye(11))
