"""DiscreteSACLoss's constructor, keys and outputs are TorchRL's; it is one graph, and waits for nothing."""

from __future__ import annotations

import inspect
import math

import gymnasium
import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import ProbabilisticTensorDictModule, ProbabilisticTensorDictSequential, TensorDictModule
from torch import nn

from gpubuf import capture
from gpubuf.modules import MLP, EnsembleMLP
from gpubuf.objectives import DiscreteSACLoss, SoftUpdate
from tests.support.dispatched import Count
from tests.support.fake_cuda import fake_cuda
from tests.support.graph_recorder import RecordedCuda
from tests.support.losses_setup import (
    ACTIONS,
    DISCRETE_CRITICS,
    F64,
    assert_agrees,
    discrete_actor,
    discrete_batch,
    discrete_by_hand,
    make_discrete,
    separated,
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


def agree(loss, batch, **kwargs):
    assert_agrees(loss, run_loss(loss, batch, 0), discrete_by_hand(loss, batch, **kwargs))


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


def test_no_reduction():
    with pytest.warns(UserWarning, match="DiscreteSACLoss with reduction='none' leaves alpha and entropy"):
        assert make_discrete(reduction="none")(discrete_batch(4)).batch_size == (4,)
    out = make_discrete(reduction="none", scalar_output_mode="non_tensor")(discrete_batch(4))
    assert out["alpha"] == 1.0
    assert out["entropy"].shape == ()


def test_the_batch_is_left_as_it_was():
    for skip in (False, True):
        batch = discrete_batch(4)
        before = batch.clone()
        make_discrete(skip_done_states=skip)(batch)
        added = {"td_error", "td_error_mask"} if skip else {"td_error"}
        assert set(batch.keys(True, True)) - set(before.keys(True, True)) == added
        assert (before == batch.exclude(*added)).all()
        assert not batch["td_error"].requires_grad


def test_temperature():
    loss = make_discrete(alpha_init=0.2, min_alpha=0.5)
    torch.testing.assert_close(loss(discrete_batch(3))["alpha"], torch.tensor(0.5, dtype=F64))
    fixed = make_discrete(alpha_init=0.2, fixed_alpha=True)
    assert "log_alpha" in dict(fixed.named_buffers())
    assert not fixed(discrete_batch(3))["loss_alpha"].requires_grad


@pytest.mark.parametrize(("critics", "space"), [("ensemble", "one-hot"), ("replicated", "categorical")])
def test_traced_as_one_graph(critics, space):
    """torch.compile(fullgraph=True) sees through the whole loss, backward included."""
    torch._dynamo.reset()
    loss, batch = separated(make_discrete(critics, action_space=space)), discrete_batch(6, space=space)

    def losses(observation, action, after, reward, terminated):
        following = {"observation": after, "reward": reward, "terminated": terminated, "done": terminated}
        data = {"observation": observation, "action": action, "next": TensorDict(following, [6])}
        return total(loss(TensorDict(data, [6])))

    arguments = [batch["observation"], batch["action"]]
    arguments += [batch["next", name] for name in ("observation", "reward", "terminated")]
    value = torch.compile(losses, backend="aot_eager", fullgraph=True)(*arguments)
    truth = total(discrete_by_hand(loss, batch))
    torch.testing.assert_close(value, truth)
    for one, other in zip(*(torch.autograd.grad(v, list(loss.parameters())) for v in (value, truth)), strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("critics", DISCRETE_CRITICS)
@pytest.mark.parametrize("space", ["one-hot", "categorical"])
def test_no_host_sync(critics, space, monkeypatch):
    """Nothing reads a value: construction, forward, backward, target update on fake tensors."""
    for name in ("kaiming_uniform_", "uniform_"):
        monkeypatch.setattr(nn.init, name, lambda tensor, *_, **__: tensor)
    for device in ("cuda", "cpu"):
        with fake_cuda(), torch.device(device), torch.set_grad_enabled(device == "cpu"):
            loss = make_discrete(critics, action_space=space, skip_done_states=True, min_alpha=0.1)
            updater, flag = SoftUpdate(loss, tau=0.01), torch.zeros(6, 1, dtype=torch.bool)
            following = {"observation": torch.randn(6, OBSERVATION, dtype=F64), "reward": torch.randn(6, 1)}
            shape = (6, ACTIONS) if space == "one-hot" else (6,)
            data = {
                "observation": torch.randn(6, OBSERVATION, dtype=F64),
                "action": torch.zeros(shape, dtype=torch.long),
                "priority_weight": torch.rand(6),
                ("collector", "mask"): torch.ones(6, 1, dtype=torch.bool),
                "next": TensorDict({**following, "terminated": flag, "done": flag}, [6]),
            }
            out = loss(TensorDict(data, [6]))
            if device == "cpu":
                total(out).backward()
            updater.step()
            assert out["loss_actor"].device.type == device


def test_dispatched_operations():
    """Forward and backward: about half as many as TorchRL's."""
    loss, batch = make_discrete(), discrete_batch(8)
    total(loss(batch)).backward()
    loss.zero_grad()
    with Count() as count:
        total(loss(batch)).backward()
    assert 50 < count.operations < 130


def test_functional_call_uses_the_parameters_it_is_given():
    loss, other, batch = make_discrete(), separated(make_discrete()), discrete_batch(5)
    given = {name: tensor.detach().clone() for name, tensor in (*other.named_parameters(), *other.named_buffers())}
    before, expected = run_loss(loss, batch, 0), run_loss(other, batch, 0)
    out = torch.func.functional_call(loss, given, (batch.clone(),))
    for name in OUTPUTS:
        torch.testing.assert_close(out[name], expected[name])
    torch.testing.assert_close(run_loss(loss, batch, 0), before)


def test_what_changes_between_replays_is_seen(monkeypatch):
    """CASES 33: temperature, target entropy, discount and data are read at each replay of a captured step."""
    batches = [discrete_batch(6, seed=seed) for seed in range(6)]

    def run(machine):
        torch.manual_seed(0)
        loss, memory = make_discrete(), discrete_batch(6)
        updater = SoftUpdate(loss, tau=0.1)
        optimizer = torch.optim.Adam(loss.parameters(), lr=1e-2, fused=True, capturable=True)

        def step():
            optimizer.zero_grad(set_to_none=False)
            out = loss(memory)
            total(out).backward()
            optimizer.step()
            updater.step()
            return out["loss_actor"], out["loss_qvalue"], out["loss_alpha"], memory["td_error"]

        once = step if machine is None else capture(step, warmup=2)
        found = []
        for number, batch in enumerate(batches):
            memory.update_(batch)
            if number == 4:
                loss.log_alpha = -1.5
                loss.target_entropy = 0.3
                loss.value_estimator.gamma.fill_(0.5)
            found.append([tensor.clone() for tensor in once()])
        assert machine is None or machine.log.count("replay") == 4
        return found

    eager = run(None)
    for one, other in zip(run(RecordedCuda().install(monkeypatch)), eager, strict=True):
        torch.testing.assert_close(one, other)
