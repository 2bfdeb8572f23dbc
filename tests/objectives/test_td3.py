"""TD3Loss: bounds, noise, states and what is refused."""

from __future__ import annotations

import math

import gymnasium
import pytest
import torch
from tensordict.nn import TensorDictModule

from gpubuf.modules import MLP
from gpubuf.objectives import SoftUpdate
from tests.support.losses_setup import F64, Bounded, agree, deterministic_actor, make_td3, td3_by_hand
from tests.support.sac_setup import ACTION, CELLS, OBSERVATION, make_batch, normalised_critic, run_loss, separated

LOW, HIGH = torch.tensor([-1.0, -0.5, -2.0]), torch.tensor([1.0, 0.25, 2.0])


class Composite(dict):
    def __init__(self, shape, **entries):
        super().__init__(**entries)
        self.shape = torch.Size(shape)


@pytest.mark.parametrize(
    "given",
    [
        {"bounds": (LOW, HIGH)},
        {"bounds": (LOW.tolist(), HIGH.numpy())},
        {"action_spec": gymnasium.spaces.Box(LOW.numpy(), HIGH.numpy())},
        {"action_spec": Bounded(LOW, HIGH)},
        {"action_spec": Composite((), action=Bounded(LOW, HIGH))},
        {"action_spec": Composite((4,), action=Bounded(LOW.expand(4, 3), HIGH.expand(4, 3)))},
    ],
    ids=["tensors", "lists", "box", "bounded", "composite", "composite of environments"],
)
def test_bounds(given):
    loss = separated(make_td3(policy_noise=2.0, noise_clip=5.0, **given))
    torch.testing.assert_close(loss.min_action, LOW.double())
    torch.testing.assert_close(loss.max_action, HIGH.double())
    agree(loss, make_batch(9), td3_by_hand)


def test_critics_of_another_shape_are_refused():
    critic = TensorDictModule(
        MLP(OBSERVATION + ACTION, 2, dtype=F64), ["observation", "action"], ["state_action_value"]
    )
    with pytest.raises(ValueError, match=r"must be \[2, 6, 1\].*actions of batch shape \[6\], got \[2, 6, 2\]"):
        make_td3(critic)(make_batch(6))


def test_the_state_has_bounds_and_no_settings():
    """As TorchRL's state_dict; noise is a setting, which one may schedule."""
    loss = make_td3()
    names = {name for name in loss.state_dict() if "params" not in name}
    assert names == {"min_action", "max_action", "_value_estimator.gamma"}
    loss.policy_noise = 0.05
    assert loss.policy_noise == torch.tensor(0.05, dtype=F64)
    agree(separated(loss), make_batch(5), td3_by_hand)


def test_a_module_that_is_no_policy_is_refused():
    actor = TensorDictModule(MLP(OBSERVATION, ACTION, CELLS, dtype=F64), ["observation"], ["other"])
    with pytest.raises(KeyError, match=r"action.* is missing"):
        make_td3(actor=actor)(make_batch(3))
    assert deterministic_actor().out_keys == ["action"]


def test_without_targets():
    loss, batch = make_td3(delay_actor=False, delay_qvalue=False), make_batch(6)
    assert not [name for name, _ in loss.named_buffers() if name.startswith("target_")]
    agree(loss, batch, td3_by_hand)


@pytest.mark.parametrize("noise", [0.0, 0.05, 3.0])
@pytest.mark.parametrize("clip", [0.0, 0.1, math.inf])
def test_noise(noise, clip):
    """Clipped before it is added; the sum is clipped to the bounds."""
    agree(separated(make_td3(policy_noise=noise, noise_clip=clip, bounds=(-0.1, 0.1))), make_batch(9), td3_by_hand)


def test_the_noise_differs_between_calls_and_rows():
    loss, batch = make_td3(policy_noise=0.3), make_batch(1).expand(50).clone()
    values = [loss(batch)["next_state_value"] for _ in range(2)]
    assert values[0].unique().numel() == 50
    assert not (values[0] == values[1]).any()


@pytest.mark.slow
def test_a_second_size_of_batch_in_compiled_code():
    """It was refused: the critics' shape counted as another than the same shape of the actions."""
    loss = make_td3(normalised_critic())
    SoftUpdate(loss, tau=0.5)
    compiled = torch.compile(loss, backend="eager", fullgraph=True)
    for rows in (6, 4):
        batch = make_batch(rows)
        expected = run_loss(loss, batch, 3)
        torch.manual_seed(3)
        out = compiled(batch.clone())
        torch.testing.assert_close({key: out[key] for key in out.keys()}, {key: expected[key] for key in out.keys()})
