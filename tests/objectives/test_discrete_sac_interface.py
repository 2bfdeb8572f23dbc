"""DiscreteSACLoss's constructor, keys and outputs are TorchRL's; it is one graph, and waits for nothing."""

from __future__ import annotations

import inspect
import math

import gymnasium
import pytest
import torch
from tensordict.nn import ProbabilisticTensorDictModule, ProbabilisticTensorDictSequential, TensorDictModule

from gpubuf.modules import MLP, EnsembleMLP
from gpubuf.objectives import DiscreteSACLoss
from tests.support.dispatched import Count
from tests.support.losses_setup import (
    ACTIONS,
    F64,
    discrete_actor,
    discrete_batch,
    make_discrete,
    total,
)
from tests.support.sac_setup import CELLS, OBSERVATION, run_loss

NAN, INF = float("nan"), float("inf")
DEFAULTS = {
    "action_space": None,
    "num_actions": None,
    "num_qvalue_nets": 2,
    "loss_function": "smooth_l1",
    "alpha_init": 1.0,
    "min_alpha": None,
    "max_alpha": None,
    "fixed_alpha": False,
    "target_entropy_weight": 0.98,
    "target_entropy": "auto",
    "delay_qvalue": True,
    "priority_key": None,
    "separate_losses": False,
    "reduction": None,
    "skip_done_states": False,
    "deactivate_vmap": False,
    "use_prioritized_weights": "auto",
    "scalar_output_mode": None,
}
OUTPUTS = ["loss_actor", "loss_qvalue", "loss_alpha", "alpha", "entropy"]


class OneHot:
    """A spec of the name and with the attributes of TorchRL's."""

    n = 5


@pytest.mark.parametrize(
    ("space", "name", "n"),
    [
        ("one-hot", "one-hot", ACTIONS),
        ("one_hot", "one-hot", ACTIONS),
        ("categorical", "categorical", ACTIONS),
        (gymnasium.spaces.Discrete(3), "categorical", 3),
        (OneHot(), "one-hot", 5),
        ({"action": OneHot()}, "one-hot", 5),
    ],
    # Not those of the objects, which have their addresses in them.
    ids=["one-hot", "one_hot", "categorical", "Gymnasium's", "a spec", "a composite spec"],
)
def test_action_spaces(space, name, n):
    """The target entropy is 0.98 log n, and says nothing of the batch's dimensions (CASES 29)."""
    kwargs = {"num_actions": ACTIONS} if isinstance(space, str) else {"num_actions": None}
    loss = make_discrete(action_space=space, **kwargs)
    assert loss.action_space == name
    torch.testing.assert_close(loss.target_entropy, torch.tensor(0.98 * math.log(n), dtype=F64))
    half = make_discrete(action_space=space, target_entropy_weight=0.5, **kwargs)
    torch.testing.assert_close(half.target_entropy, torch.tensor(0.5 * math.log(n), dtype=F64))
    assert make_discrete(action_space=space, target_entropy=-0.25, **kwargs).target_entropy == -0.25


def test_constructor():
    parameters = inspect.signature(DiscreteSACLoss).parameters
    assert list(parameters) == ["actor_network", "qvalue_network", *DEFAULTS]
    assert {name: p.default for name, p in parameters.items() if name in DEFAULTS} == DEFAULTS
    assert all(parameters[name].kind is inspect.Parameter.KEYWORD_ONLY for name in DEFAULTS)


@pytest.mark.parametrize(
    ("kwargs", "error", "message"),
    [
        ({"priority_key": "p"}, RuntimeError, "set_keys"),
        ({"loss_function": "l3"}, ValueError, "loss_function must be one of"),
        ({"reduction": "max"}, ValueError, "reduction must be one of"),
        ({"num_qvalue_nets": 3}, ValueError, "num_qvalue_nets=3, but the network is an ensemble of 2"),
        ({"alpha_init": math.nan}, ValueError, "alpha_init must be positive and finite, got nan"),
        ({"num_actions": None}, ValueError, "needs the number of actions.*got num_actions=None"),
        ({"num_actions": 0}, ValueError, "got num_actions=0"),
        ({"target_entropy": "low"}, ValueError, "target_entropy must be a number or 'auto', got 'low'"),
        ({"target_entropy": math.nan}, ValueError, "target_entropy must be finite, got nan"),
        ({"action_space": "mult_one_hot"}, NotImplementedError, "the product 'mult_one_hot'"),
        ({"action_space": gymnasium.spaces.MultiDiscrete([2, 3])}, NotImplementedError, "MultiDiscrete"),
        ({"action_space": "box"}, ValueError, "'one-hot' or 'categorical'.*got 'box'"),
        ({"use_prioritized_weights": None}, ValueError, "use_prioritized_weights must be one of"),
        ({"scalar_output_mode": "tensor"}, ValueError, "got 'tensor'"),
    ],
)
def test_refused_arguments(kwargs, error, message):
    with pytest.raises(error, match=message):
        make_discrete(**kwargs)


def test_without_an_action_space():
    with pytest.warns(UserWarning, match="reads actions as one-hot vectors"):
        assert make_discrete(action_space=None).action_space == "one-hot"


@pytest.mark.parametrize(
    ("space", "action", "message"),
    [
        ("one-hot", torch.zeros(4, dtype=torch.long), r"one-hot action must have shape \[4, 4\], got \[4\]"),
        ("categorical", torch.zeros(4, 4, dtype=torch.long), r"categorical action must have shape \[4\], got \[4, 4\]"),
    ],
)
def test_actions_of_another_space_are_refused(space, action, message):
    with pytest.raises(ValueError, match=message):
        make_discrete(action_space=space)(discrete_batch(4).set("action", action))


def test_networks_that_do_not_go_together_are_refused():
    critic = TensorDictModule(EnsembleMLP(2, OBSERVATION, 3, CELLS, dtype=F64), ["observation"], ["action_value"])
    loss = DiscreteSACLoss(discrete_actor(), critic, num_actions=4, action_space="one-hot")
    with pytest.raises(
        ValueError, match=r"'action_value' must be \[2, 6, 4\].*policy of shape \[6, 4\], got \[2, 6, 3"
    ):
        loss(discrete_batch(6))
    continuous = ProbabilisticTensorDictSequential(
        TensorDictModule(MLP(OBSERVATION, 1, dtype=F64), ["observation"], ["loc"]),
        ProbabilisticTensorDictModule(
            ["loc"], ["action"], distribution_class=torch.distributions.Normal, distribution_kwargs={"scale": 1.0}
        ),
    )
    with pytest.raises(TypeError, match="must have logits, got Normal"):
        make_discrete(actor=continuous)(discrete_batch(6))


def test_keys_and_keyword_call():
    """A tuple in the order of out_keys; every key can be renamed."""
    loss, batch = make_discrete(), discrete_batch(5)
    names = {"action", "observation", *(("next", n) for n in ("observation", "reward", "done", "terminated"))}
    assert set(loss.in_keys) == names
    assert loss.out_keys == OUTPUTS
    out = loss(**{"_".join(k) if isinstance(k, tuple) else k: batch[k] for k in names})
    truth = run_loss(loss, batch, 0)
    for name, value in zip(OUTPUTS, out, strict=True):
        torch.testing.assert_close(value, truth[name])
    with pytest.raises(ValueError, match="state_action_value is not an accepted"):
        loss.set_keys(state_action_value="q")
    critic = TensorDictModule(loss.qvalue_network.module, ["observation"], ["q"])
    renamed = DiscreteSACLoss(loss.actor_network, critic, action_space="one-hot", num_actions=ACTIONS)
    renamed.set_keys(action_value="q", priority="error", reward="gain", value="v", log_prob="l", action="chosen")
    moved = batch.exclude(("next", "reward"), "action").set(("next", "gain"), batch["next", "reward"])
    found = run_loss(renamed, moved.set("chosen", batch["action"]), 0)
    torch.testing.assert_close(found, truth)
    with pytest.raises(KeyError, match="gain"):
        renamed(batch)


def test_temperature():
    loss = make_discrete(alpha_init=0.2, min_alpha=0.5)
    torch.testing.assert_close(loss(discrete_batch(3))["alpha"], torch.tensor(0.5, dtype=F64))
    fixed = make_discrete(alpha_init=0.2, fixed_alpha=True)
    assert "log_alpha" in dict(fixed.named_buffers())
    assert not fixed(discrete_batch(3))["loss_alpha"].requires_grad


def test_dispatched_operations():
    """Forward and backward: about half as many as TorchRL's."""
    loss, batch = make_discrete(), discrete_batch(8)
    total(loss(batch)).backward()
    loss.zero_grad()
    with Count() as count:
        total(loss(batch)).backward()
    assert 50 < count.operations < 130
