"""What programs written for TorchRL do with a loss besides calling it: its parts, keys, outputs and parameters.

Its own tests were walked through one by one with these losses; what they ask that nothing else tests is here.
"""

from __future__ import annotations

import copy
from functools import partial

import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import (
    CompositeDistribution,
    InteractionType,
    ProbabilisticTensorDictModule,
    ProbabilisticTensorDictSequential,
    TensorDictModule,
    TensorDictSequential,
    set_interaction_type,
)
from torch import nn

from gpubuf.modules import MLP, TanhNormal, make_sac_actor
from gpubuf.objectives import CrossQLoss, REDQLoss, SACLoss, TD3Loss
from gpubuf.objectives.networks import SideBySide
from tests.contracts.objectives import CLASSES, OF_ACTORS
from tests.support.losses_setup import make_td3
from tests.support.sac_setup import ACTION, CELLS, OBSERVATION, make_actor, make_batch, make_loss, run_loss, total


def loss_and_batch(name: str, *shape: int, **kwargs):
    contract = CLASSES[name]
    return contract.loss(**{"target_entropy": 0.5, **kwargs}), contract.batch(*shape)


# --- the parts of a loss ---


@pytest.mark.parametrize("name", OF_ACTORS)
@pytest.mark.parametrize("skip", [False, True])
def test_parts_are_those_of_the_whole(name, skip):
    """Critics first and then the actor, as the scripts of CrossQ and TD3 call them: with the noise of one call."""
    loss, batch = loss_and_batch(name, 6, skip_done_states=skip)
    if skip:
        batch["next", "done"][0], batch["next", "terminated"][0] = True, False
        batch["next", "observation"][0] = torch.nan
    whole = run_loss(loss, batch, 1)
    torch.manual_seed(1)
    td3 = name == "TD3Loss"
    of_critics, values = (loss.value_loss if td3 else loss.qvalue_loss)(batch)
    of_actor, further = loss.actor_loss(batch)
    torch.testing.assert_close(of_critics, whole["loss_qvalue"])
    torch.testing.assert_close(of_actor, whole["loss_actor"])
    torch.testing.assert_close(batch["td_error"], whole["td_error"])
    assert ("td_error_mask" in batch.keys()) == skip
    if td3:
        assert set(values) == {"td_error", "next_state_value", "pred_value", "target_value"}
        assert values["td_error"].shape == (2, 6)
        torch.testing.assert_close(further["state_action_value_actor"], whole["state_action_value_actor"])
        return
    assert values["td_error"] is batch["td_error"]
    rows = loss.alpha_loss(further["log_prob"])
    assert rows.shape == (() if name == "CrossQLoss" else (6,))
    assert not further["log_prob"].requires_grad
    if name != "REDQLoss":
        torch.testing.assert_close(rows.mean(), whole["loss_alpha"])


def test_weights_and_masks_of_a_part():
    """The part of the temperature takes the batch for them, as TorchRL's of CrossQ does."""
    loss, batch = loss_and_batch("CrossQLoss", 6)
    batch["collector", "mask"] = torch.arange(6) < 4
    log_prob = torch.randn(6, dtype=torch.float64)
    rows = -loss.log_alpha * (log_prob + 0.5)
    torch.testing.assert_close(loss.alpha_loss(log_prob, batch), rows[:4].mean())
    torch.testing.assert_close(loss.alpha_loss(log_prob=log_prob), rows.mean())


# --- keys and outputs ---


def composite_actor(**kwargs):
    network = nn.Sequential(MLP(OBSERVATION, 2 * ACTION, CELLS, dtype=torch.float64), Halves())
    outputs = [("params", "motor", "loc"), ("params", "motor", "scale")]
    return ProbabilisticTensorDictSequential(
        TensorDictModule(network, ["observation"], outputs),
        ProbabilisticTensorDictModule(
            ["params"],
            ["action"],
            distribution_class=partial(CompositeDistribution, distribution_map={"motor": TanhNormal}),
        ),
    )


class Halves(nn.Module):
    def forward(self, x):
        loc, scale = x.chunk(2, -1)
        return loc, scale.exp()


class OnParts(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = MLP(OBSERVATION + ACTION, 1, CELLS, dtype=torch.float64)

    def forward(self, observation, action):
        return self.body(observation, action if isinstance(action, torch.Tensor) else action["motor"])


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("masked", [False, True])
def test_a_composite_action_under_one_key(version, masked):
    """The actor draws ``{"motor": ...}`` for its one key "action", and the critic reads "action": as of one tensor."""
    value = TensorDictModule(MLP(OBSERVATION, 1, CELLS, dtype=torch.float64), ["observation"], ["state_value"])
    critic = TensorDictModule(OnParts(), ["observation", "action"], ["state_action_value"])
    critics = [copy.deepcopy(critic), critic]
    loss = SACLoss(composite_actor(), critics, value if version == 1 else None)
    plain = SACLoss(
        make_plain(loss.actor_network), copy.deepcopy(critics), copy.deepcopy(loss.__dict__.get("value_network"))
    )
    batch = make_batch(6)
    if masked:
        batch["collector", "mask"] = torch.arange(6) != 2
        batch["action"][2] = batch["observation"][2] = torch.nan
    truth = run_loss(plain, batch, 0)
    batch["action"] = TensorDict({"motor": batch["action"]}, [6])
    ours = run_loss(loss, batch, 0)
    assert float(loss.target_entropy) == -ACTION
    for key, expected in truth.items():
        torch.testing.assert_close(ours[key], expected)


def make_plain(actor):
    """The same network with one tensor for its action."""
    return ProbabilisticTensorDictSequential(
        TensorDictModule(copy.deepcopy(actor[0].module), ["observation"], ["loc", "scale"]),
        ProbabilisticTensorDictModule(["loc", "scale"], ["action"], distribution_class=TanhNormal),
    )


@pytest.mark.parametrize("name", OF_ACTORS)
def test_chosen_outputs(name):
    """Of a call with a TensorDict, and in the order given of one with arguments."""
    loss, batch = loss_and_batch(name, 6)
    arguments = {"_".join(key) if isinstance(key, tuple) else key: batch[key] for key in loss.in_keys}
    torch.manual_seed(0)
    every = dict(zip(loss.out_keys, loss(**arguments), strict=True))
    outputs = list(loss.out_keys)
    loss.select_out_keys("loss_qvalue", "loss_actor")
    assert loss.out_keys == ["loss_qvalue", "loss_actor"]
    torch.manual_seed(0)
    of_critics, of_actor = loss(**arguments)
    torch.testing.assert_close((of_critics, of_actor), (every["loss_qvalue"], every["loss_actor"]))
    assert set(loss(batch).keys()) == {"loss_actor", "loss_qvalue"}
    loss.reset_out_keys()
    assert loss.out_keys == outputs
    loss.out_keys = ["loss_actor"]
    torch.manual_seed(0)
    torch.testing.assert_close(loss(**arguments), every["loss_actor"])
    with pytest.raises(ValueError, match=r"SACLoss returns|TD3Loss returns|REDQLoss returns|CrossQLoss returns"):
        loss.out_keys = ["loss_of_nothing"]
    assert loss.out_keys == ["loss_actor"]


def test_the_order_of_arguments():
    loss, batch = make_loss(), make_batch(6)
    keys = list(reversed(loss.in_keys))
    loss.in_keys = keys
    torch.manual_seed(0)
    found = loss(*(batch[key] for key in keys))
    torch.testing.assert_close(found[0], run_loss(loss, batch, 0)["loss_actor"])


@pytest.mark.parametrize("name", CLASSES)
def test_keys_of_the_estimator(name):
    loss, _ = loss_and_batch(name, 6)
    loss.set_keys(reward="gain")
    loss.make_value_estimator("TD0" if name == "DistributionalSACLoss" else "TDLambda")
    loss.set_keys(done=("over", "all"), terminated=("over", "stopped"))
    keys = loss.value_estimator.tensor_keys
    assert (keys.reward, keys.done, keys.terminated) == ("gain", ("over", "all"), ("over", "stopped"))
    other = {"TD3Loss": "state_action_value", "DQNLoss": "chosen_action_value"}
    assert keys.value == other.get(name, "state_value")


def test_keys_that_the_actor_knows():
    actor = ProbabilisticTensorDictSequential(
        make_actor()[0],
        ProbabilisticTensorDictModule(
            ["loc", "scale"], ["action"], distribution_class=TanhNormal, return_log_prob=True, log_prob_key="density"
        ),
    )
    critic = TensorDictModule(OnParts(), ["observation", "action"], ["state_action_value"])
    assert SACLoss(actor, critic).tensor_keys.log_prob == "density"
    assert REDQLoss(actor, critic).tensor_keys.sample_log_prob == "density"
    assert CrossQLoss(actor, critic).tensor_keys.log_prob == "_log_prob"
    moving = make_sac_actor(OBSERVATION, ACTION, CELLS, action_key=("agents", "move"))
    assert SACLoss(moving, critic).tensor_keys.action == ("agents", "move")
    # An actor that draws serves as one that doesn't.
    assert TD3Loss(actor, critic, bounds=(-1.0, 1.0)).tensor_keys.action == "action"


# --- parameters ---


@pytest.mark.parametrize("name", CLASSES)
def test_parameters_drawn_anew(name):
    """Every one of them, in place, so that optimisers keep them; the targets follow."""
    loss, batch = loss_and_batch(name, 6)
    own = {key: (tensor, tensor.detach().clone()) for key, tensor in loss.named_parameters() if "network" in key}
    loss.reset_parameters_recursive()
    for key, (tensor, before) in own.items():
        assert dict(loss.named_parameters())[key] is tensor
        assert not torch.equal(tensor, before), key
    if name != "CrossQLoss":
        assert all(torch.equal(target, source) for target, source in loss.target_pairs())
    assert total(run_loss(loss, batch, 0)).isfinite()
    if name in OF_ACTORS:
        critics = loss.qvalue_network_params
        first = next(value for value in critics.values(True, True) if value.ndim > 2 or name == "TD3Loss")
        assert not torch.equal(first[0], first[1])


@pytest.mark.parametrize("separate", [False, True])
def test_making_a_loss_leaves_shared_parameters_alone(separate):
    """A batch may have a graph through them: that backward must still run."""
    body = TensorDictModule(nn.Linear(OBSERVATION, 7, dtype=torch.float64), ["observation"], ["hidden"])
    head = TensorDictModule(nn.Linear(7, ACTION, dtype=torch.float64), ["hidden"], ["action"])
    actor = TensorDictSequential(body, head)
    critic = TensorDictModule(
        MLP(7 + ACTION, 1, CELLS, dtype=torch.float64), ["hidden", "action"], ["state_action_value"]
    )
    batch = make_batch(6)
    drawn = actor(batch.clone())["action"].sin()
    make_td3(TensorDictSequential(body, critic), actor, separate_losses=separate)
    drawn.sum().backward()
    assert body.module.weight.grad is not None


@pytest.mark.parametrize("batched", [False, True])
def test_critics_that_have_the_actor_among_their_parts(batched):
    """Those of an actor-critic with common layers do. They take its mode: nothing is drawn within ``torch.vmap``."""
    actor = make_actor()
    body = TensorDictModule(OnParts(), ["observation", "action"], ["state_action_value"])
    critic = TensorDictSequential(copy.deepcopy(actor), body)
    critics = SideBySide([critic, copy.deepcopy(critic)]) if batched else critic
    loss, batch = REDQLoss(actor, critics, num_qvalue_nets=2, target_entropy=0.5), make_batch(6)
    values = []
    for seed in (0, 1):
        torch.manual_seed(seed)
        values.append(loss._critics.online(batch, "state_action_value"))
    torch.testing.assert_close(*values, rtol=0, atol=0)
    if batched:
        with set_interaction_type(InteractionType.DETERMINISTIC):
            expected = critic(batch.select("observation"))["state_action_value"]
        torch.testing.assert_close(values[0][0], expected)
    assert loss(batch)["loss_qvalue"].isfinite()


def test_one_critic_of_redq():
    """The default of ``sub_sample_len`` fits any number of critics."""
    critic = TensorDictModule(OnParts(), ["observation", "action"], ["state_action_value"])
    for number, taken in ((1, 1), (2, 2), (5, 2)):
        assert REDQLoss(make_actor(), copy.deepcopy(critic), num_qvalue_nets=number).sub_sample_len == taken
