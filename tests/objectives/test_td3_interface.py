"""TD3Loss's constructor, keys and outputs are TorchRL's; it is one graph, and waits for nothing."""

from __future__ import annotations

import inspect

import gymnasium
import pytest
import torch
from tensordict.nn import TensorDictModule

from gpubuf import capture
from gpubuf.modules import MLP
from gpubuf.objectives import SoftUpdate, TD3Loss
from tests.support.dispatched import Count
from tests.support.graph_recorder import RecordedCuda
from tests.support.losses_setup import (
    F64,
    assert_agrees,
    deterministic_actor,
    make_td3,
    separated,
    td3_by_hand,
    total,
)
from tests.support.sac_setup import (
    ACTION,
    CELLS,
    OBSERVATION,
    make_batch,
    run_loss,
)

NAN = float("nan")
LOW, HIGH = torch.tensor([-1.0, -0.5, -2.0]), torch.tensor([1.0, 0.25, 2.0])
DEFAULTS = {
    "action_spec": None,
    "bounds": None,
    "num_qvalue_nets": 2,
    "policy_noise": 0.2,
    "noise_clip": 0.5,
    "loss_function": "smooth_l1",
    "delay_actor": True,
    "delay_qvalue": True,
    "gamma": None,
    "priority_key": None,
    "separate_losses": False,
    "reduction": None,
    "skip_done_states": False,
    "deactivate_vmap": False,
    "use_prioritized_weights": "auto",
}
OUTPUTS = [
    "loss_actor",
    "loss_qvalue",
    "pred_value",
    "state_action_value_actor",
    "next_state_value",
    "target_value",
]


def agree(loss, batch, **kwargs):
    assert_agrees(loss, run_loss(loss, batch, 3), td3_by_hand(loss, batch, 3, **kwargs))


class Bounded:
    """A spec with the attributes of TorchRL's."""

    def __init__(self, low, high):
        self.space, self.shape = type("space", (), {"low": low, "high": high}), low.shape


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
    agree(loss, make_batch(9))


def test_constructor():
    parameters = inspect.signature(TD3Loss).parameters
    assert list(parameters) == ["actor_network", "qvalue_network", *DEFAULTS]
    assert {name: p.default for name, p in parameters.items() if name in DEFAULTS} == DEFAULTS
    assert all(parameters[name].kind is inspect.Parameter.KEYWORD_ONLY for name in DEFAULTS)


@pytest.mark.parametrize(
    ("kwargs", "error", "message"),
    [
        ({"bounds": None}, ValueError, "one of bounds and action_spec, got bounds=None and action_spec=None"),
        ({"action_spec": Bounded(LOW, HIGH), "bounds": (-1, 1)}, ValueError, "one of bounds and action_spec"),
        ({"bounds": (1.0, -1.0)}, ValueError, "must not be above the upper ones"),
        ({"bounds": (NAN, 1.0)}, ValueError, "must not be above the upper ones"),
        ({"action_spec": gymnasium.spaces.Discrete(3)}, ValueError, "must have bounds.*got Discrete"),
        ({"policy_noise": -0.1}, ValueError, "policy_noise must be at least 0, got -0.1"),
        ({"noise_clip": NAN}, ValueError, "noise_clip must be at least 0, got nan"),
        ({"gamma": 0.9}, TypeError, "make_value_estimator"),
        ({"priority_key": "p"}, RuntimeError, "set_keys"),
        ({"loss_function": "l3"}, ValueError, "loss_function must be one of"),
        ({"reduction": "max"}, ValueError, "reduction must be one of"),
        ({"use_prioritized_weights": None}, ValueError, "use_prioritized_weights must be one of"),
    ],
)
def test_refused_arguments(kwargs, error, message):
    with pytest.raises(error, match=message):
        make_td3(**kwargs)


def test_keys_and_keyword_call():
    """A tuple in the order of out_keys; every key can be renamed."""
    loss, batch = make_td3(), make_batch(5)
    names = {"action", "observation", *(("next", n) for n in ("observation", "reward", "done", "terminated"))}
    assert set(loss.in_keys) == names
    assert loss.out_keys == OUTPUTS
    torch.manual_seed(0)
    out = loss(**{"_".join(k) if isinstance(k, tuple) else k: batch[k] for k in names})
    truth = run_loss(loss, batch, 0)
    for name, value in zip(OUTPUTS, out, strict=True):
        torch.testing.assert_close(value, truth[name])
    with pytest.raises(ValueError, match="value is not an accepted"):
        loss.set_keys(value="q")
    loss.set_keys(reward="gain", priority="error")
    moved = batch.exclude(("next", "reward")).set(("next", "gain"), batch["next", "reward"])
    torch.testing.assert_close(run_loss(loss, moved, 0), truth)


def test_critics_of_another_shape_are_refused():
    critic = TensorDictModule(
        MLP(OBSERVATION + ACTION, 2, dtype=F64), ["observation", "action"], ["state_action_value"]
    )
    with pytest.raises(ValueError, match=r"must be \[2, 6, 1\].*actions of batch shape \[6\], got \[2, 6, 2\]"):
        make_td3(critic)(make_batch(6))


def test_targets():
    """Both networks are delayed by default, and can be asked not to be."""
    loss = make_td3()
    updater = SoftUpdate(loss, tau=0.5)
    before = loss.target_actor_network_params.clone()
    with torch.no_grad():
        for parameter in loss.parameters():
            parameter.add_(1.0)
    updater.step()
    for key in before.keys(True, True):
        torch.testing.assert_close(loss.target_actor_network_params.get(key), before.get(key) + 0.5)
    assert len(loss.target_pairs()) == len(list(loss.parameters()))
    plain = make_td3(delay_actor=False, delay_qvalue=False)
    assert not [name for name, _ in plain.named_buffers() if name.startswith("target_")]
    batch = make_batch(5)
    torch.testing.assert_close(run_loss(plain, batch, 3), td3_by_hand(plain, batch, 3))


def test_the_state_has_bounds_and_no_settings():
    """As TorchRL's state_dict; noise is a setting, which one may schedule."""
    loss = make_td3()
    names = {name for name in loss.state_dict() if "params" not in name}
    assert names == {"min_action", "max_action", "_value_estimator.gamma"}
    loss.policy_noise = 0.05
    assert loss.policy_noise == torch.tensor(0.05, dtype=F64)
    agree(separated(loss), make_batch(5))


def test_dispatched_operations():
    """Forward and backward, with the values that are reported."""
    loss, batch = make_td3(), make_batch(8)
    total(loss(batch)).backward()
    loss.zero_grad()
    with Count() as count:
        total(loss(batch)).backward()
    assert 50 < count.operations < 165


def test_what_changes_between_replays_is_seen(monkeypatch):
    """CASES 33: noise, its settings, discount and data are read at each replay of a captured step."""
    batches = [make_batch(6, seed=seed) for seed in range(6)]

    def run(machine):
        torch.manual_seed(0)
        loss, memory = make_td3(), make_batch(6)
        updater = SoftUpdate(loss, tau=0.1)
        optimizer = torch.optim.Adam(loss.parameters(), lr=1e-2, fused=True, capturable=True)

        def step():
            optimizer.zero_grad(set_to_none=False)
            out = loss(memory)
            total(out).backward()
            optimizer.step()
            updater.step()
            return out["loss_actor"], out["loss_qvalue"], out["next_state_value"], memory["td_error"]

        once = step if machine is None else capture(step, warmup=2)
        found = []
        for number, batch in enumerate(batches):
            memory.update_(batch)
            if number == 3:
                loss.policy_noise = 0.7
            if number == 4:
                loss.noise_clip = 0.1
                loss.value_estimator.gamma.fill_(0.5)
            found.append([tensor.clone() for tensor in once()])
        assert machine is None or machine.log.count("replay") == 4
        return found

    eager = run(None)
    for one, other in zip(run(RecordedCuda().install(monkeypatch)), eager, strict=True):
        torch.testing.assert_close(one, other)


def test_a_module_that_is_no_policy_is_refused():
    actor = TensorDictModule(MLP(OBSERVATION, ACTION, CELLS, dtype=F64), ["observation"], ["other"])
    with pytest.raises(KeyError, match=r"action.* is missing"):
        make_td3(actor=actor)(make_batch(3))
    assert deterministic_actor().out_keys == ["action"]
