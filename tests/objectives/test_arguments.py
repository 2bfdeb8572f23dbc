"""Constructors of the losses refuse what makes no sense, with a reason. Names and defaults: test_migration.py."""

from __future__ import annotations

import functools
import inspect
import math
from typing import Any

import gymnasium
import pytest
import torch

from tests.contracts.objectives import CLASSES
from tests.support.losses_setup import Bounded, make_dqn_loss
from tests.support.sac_setup import make_loss

NAN, INF = math.nan, math.inf

#: Of every loss that has the argument: the arguments, the error, and its words.
OF_EVERY_LOSS = [
    ({"gamma": 0.9}, TypeError, "make_value_estimator"),
    ({"priority_key": "p"}, RuntimeError, "set_keys"),
    ({"loss_function": "l3"}, ValueError, r"loss_function must be one of .*'l3'"),
    ({"reduction": "max"}, ValueError, "reduction must be one of"),
    ({"use_prioritized_weights": "always"}, ValueError, "one of .False, True, 'auto'., got 'always'"),
    ({"use_prioritized_weights": None}, ValueError, "use_prioritized_weights must be one of"),
    ({"scalar_output_mode": "tensor"}, ValueError, "one of .None, 'exclude', 'non_tensor'., got 'tensor'"),
    ({"reduction": "none", "scalar_output_mode": "drop"}, ValueError, "scalar_output_mode must be one of"),
    ({"alpha_init": 0.0}, ValueError, "alpha_init must be positive"),
    ({"alpha_init": NAN}, ValueError, "alpha_init must be positive and finite, got nan"),
    ({"alpha_init": INF}, ValueError, "alpha_init must be positive and finite, got inf"),
    ({"min_alpha": 2.0, "max_alpha": 1.0}, ValueError, "min_alpha <= max_alpha"),
    ({"min_alpha": NAN}, ValueError, "got nan and"),
    ({"min_alpha": INF}, ValueError, "a finite min_alpha, got inf and"),
    ({"max_alpha": NAN}, ValueError, "and nan"),
    ({"target_entropy": "low"}, ValueError, "target_entropy must be a number or 'auto', got 'low'"),
    ({"target_entropy": NAN}, ValueError, "target_entropy must be finite, got nan"),
    ({"target_entropy": -INF}, ValueError, "target_entropy must be finite, got -inf"),
]


@functools.cache
def parameters() -> list[tuple[Any, set[str]]]:
    """Every class of losses, with the names of its arguments."""
    return [(each, set(inspect.signature(type(each.loss())).parameters)) for each in CLASSES.values()]


@pytest.mark.parametrize(("options", "error", "message"), OF_EVERY_LOSS, ids=lambda value: str(value)[:40])
def test_refused_by_every_loss(options, error, message):
    """Case 53, among others: hyperparameters that are no numbers."""
    checked = 0
    for contract, known in parameters():
        if set(options) <= known:
            checked += 1
            with pytest.raises(error, match=message):
                contract.make(**options)
    assert checked >= 4


ONE = Bounded(-torch.ones(3), torch.ones(3))

#: Of single losses.
OF_ONE_LOSS = {
    "SACLoss": [
        ({"num_qvalue_nets": 3}, ValueError, "num_qvalue_nets=3, but the network is an ensemble of 2"),
        ({"num_qvalue_nets": 0}, ValueError, "num_qvalue_nets must be at least 1, got 0"),
        ({"critics": "list", "num_qvalue_nets": 1}, ValueError, "num_qvalue_nets=1, but 2 networks"),
    ],
    "TD3Loss": [
        ({"bounds": None}, ValueError, "one of bounds and action_spec, got bounds=None.*but not both"),
        ({"action_spec": ONE, "bounds": (-1, 1)}, ValueError, "one of bounds and action_spec"),
        ({"bounds": (1.0, -1.0)}, ValueError, "must not be above the upper ones"),
        ({"bounds": (NAN, 1.0)}, ValueError, "must not be above the upper ones"),
        ({"action_spec": gymnasium.spaces.Discrete(3)}, ValueError, "must have bounds.*got Discrete"),
        ({"policy_noise": -0.1}, ValueError, "policy_noise must be at least 0, got -0.1"),
        ({"noise_clip": NAN}, ValueError, "noise_clip must be at least 0, got nan"),
    ],
    "DiscreteSACLoss": [
        ({"num_actions": None}, ValueError, "needs the number of actions.*got num_actions=None"),
        ({"num_actions": 0}, ValueError, "got num_actions=0"),
        ({"action_space": "mult_one_hot"}, NotImplementedError, "the product 'mult_one_hot'"),
        ({"action_space": gymnasium.spaces.MultiDiscrete([2, 3])}, NotImplementedError, "MultiDiscrete"),
        ({"action_space": "box"}, ValueError, "'one-hot' or 'categorical'.*got 'box'"),
    ],
    "DQNLoss": [
        ({"double_dqn": True, "delay_value": False}, ValueError, "needs delay_value=True, got False"),
        ({"action_space": "mult_one_hot"}, NotImplementedError, "the product 'mult_one_hot'"),
        (
            {"network": torch.nn.Linear(3, 4)},
            TypeError,
            "value_network must say which keys.*a Linear does not",
        ),
    ],
    "REDQLoss": [
        ({"sub_sample_len": 0}, ValueError, "sub_sample_len must be in"),
        ({"sub_sample_len": 6}, ValueError, "got 6 of 5 critics"),
        ({"gSDE": True}, NotImplementedError, "gSDE"),
    ],
    "DistributionalSACLoss": [
        ({"v_min": 1.0, "v_max": 1.0}, ValueError, "v_min < v_max"),
        ({"v_max": INF}, ValueError, "finite"),
        ({"num_atoms": 1}, ValueError, "num_atoms must be at least 2, got 1"),
        ({"target": "max"}, ValueError, "target must be one of.*own"),
        ({"actor_value": "max"}, ValueError, "actor_value must be one of"),
        ({"priority": "td"}, ValueError, "priority must be one of"),
        ({"temperature_from": "last"}, ValueError, "temperature_from must be one of"),
        ({"temperature_loss": "beta"}, ValueError, "temperature_loss must be one of"),
        ({"joint_batch": True}, ValueError, "joint_batch must be one of"),
        ({"target_sigma": 0.0}, ValueError, "target_sigma must be positive"),
        ({"target_sigma": 0.1, "target_entropy": -1.0}, ValueError, "goes with target_entropy='auto'"),
        ({"cloning_weight": -1.0}, ValueError, "cloning_weight"),
        ({"reward_scale": NAN}, ValueError, "reward_scale"),
    ],
}


@pytest.mark.parametrize("name", OF_ONE_LOSS)
def test_refused_by_one_loss(name):
    for options, error, message in OF_ONE_LOSS[name]:
        with pytest.raises(error, match=message):
            {"SACLoss": make_loss, "DQNLoss": make_dqn_loss}.get(name, CLASSES[name].make)(**options)


def test_setters_refuse_what_is_no_number():
    """Case 53."""
    loss = make_loss(target_entropy=-2.0, min_alpha=0.1)
    with pytest.raises(ValueError, match="target_entropy must be finite, got nan"):
        loss.target_entropy = NAN
    for name in ("log_alpha", "min_log_alpha", "alpha_init"):
        with pytest.raises(ValueError, match=f"{name} must be a number, got nan"):
            setattr(loss, name, NAN)
    with pytest.raises(ValueError, match=r"gamma must be in \[0, 1\], got nan"):
        loss.make_value_estimator(gamma=NAN)
    assert loss.target_entropy == -2
    assert loss.alpha == 1
