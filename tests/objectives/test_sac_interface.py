"""SACLoss's constructor, keys and outputs are TorchRL's; its cost is counted; nothing in it waits for the host."""

from __future__ import annotations

import copy
import inspect
import math

import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import TensorDictModule, TensorDictParams
from torch import nn

from benchmarks.workloads.plain_losses import make_batch as plain_batch
from gpubuf.modules import MLP, make_sac_actor, make_sac_critic
from gpubuf.objectives import LossModule, SACLoss, ValueEstimators
from tests.support import sac_setup
from tests.support.dispatched import Count
from tests.support.sac_setup import CRITICS, make_actor, make_batch, make_loss, run_loss, total

DEFAULTS = {
    "value_network": None,
    "num_qvalue_nets": 2,
    "loss_function": "smooth_l1",
    "alpha_init": 1.0,
    "min_alpha": None,
    "max_alpha": None,
    "action_spec": None,
    "fixed_alpha": False,
    "target_entropy": "auto",
    "delay_actor": False,
    "delay_qvalue": True,
    "delay_value": True,
    "gamma": None,
    "priority_key": None,
    "separate_losses": False,
    "reduction": None,
    "skip_done_states": False,
    "deactivate_vmap": False,
    "use_prioritized_weights": "auto",
    "scalar_output_mode": None,
}
OUTPUTS = ["loss_actor", "loss_qvalue", "loss_alpha", "alpha", "entropy"]


def test_constructor():
    parameters = inspect.signature(SACLoss).parameters
    assert list(parameters) == ["actor_network", "qvalue_network", *DEFAULTS]
    assert {name: p.default for name, p in parameters.items() if name in DEFAULTS} == DEFAULTS
    assert all(parameters[name].kind is inspect.Parameter.KEYWORD_ONLY for name in list(DEFAULTS)[1:])


@pytest.mark.parametrize(
    ("kwargs", "error", "message"),
    [
        ({"gamma": 0.9}, TypeError, "make_value_estimator"),
        ({"priority_key": "p"}, RuntimeError, "set_keys"),
        ({"loss_function": "l3"}, ValueError, r"loss_function must be one of .*'l3'"),
        ({"reduction": "max"}, ValueError, "reduction must be one of"),
        ({"num_qvalue_nets": 3}, ValueError, "num_qvalue_nets=3, but the network is an ensemble of 2"),
        ({"alpha_init": 0.0}, ValueError, "alpha_init must be positive"),
        ({"min_alpha": 2.0, "max_alpha": 1.0}, ValueError, "min_alpha <= max_alpha"),
        ({"target_entropy": "low"}, ValueError, "target_entropy"),
        ({"num_qvalue_nets": 0}, ValueError, "num_qvalue_nets must be at least 1, got 0"),
        ({"alpha_init": math.nan}, ValueError, "alpha_init must be positive and finite, got nan"),
        ({"alpha_init": math.inf}, ValueError, "alpha_init must be positive and finite, got inf"),
        ({"min_alpha": math.nan}, ValueError, "got nan and None"),
        ({"min_alpha": math.inf}, ValueError, "a finite min_alpha, got inf and None"),
        ({"max_alpha": math.nan}, ValueError, "got None and nan"),
        ({"target_entropy": math.nan}, ValueError, "target_entropy must be finite, got nan"),
        ({"target_entropy": -math.inf}, ValueError, "target_entropy must be finite, got -inf"),
        ({"use_prioritized_weights": "always"}, ValueError, "one of .False, True, 'auto'., got 'always'"),
        ({"use_prioritized_weights": None}, ValueError, "use_prioritized_weights must be one of"),
        ({"scalar_output_mode": "tensor"}, ValueError, "one of .None, 'exclude', 'non_tensor'., got 'tensor'"),
        ({"reduction": "none", "scalar_output_mode": "drop"}, ValueError, "scalar_output_mode must be one of"),
    ],
)
def test_refused_arguments(kwargs, error, message):
    """Case 53, among others: hyperparameters that are no numbers."""
    with pytest.raises(error, match=message):
        make_loss(**kwargs)


def test_setters_refuse_what_is_no_number():
    """Case 53."""
    loss = make_loss(target_entropy=-2.0, min_alpha=0.1)
    with pytest.raises(ValueError, match="target_entropy must be finite, got nan"):
        loss.target_entropy = math.nan
    for name in ("log_alpha", "min_log_alpha", "alpha_init"):
        with pytest.raises(ValueError, match=f"{name} must be a number, got nan"):
            setattr(loss, name, math.nan)
    with pytest.raises(ValueError, match=r"gamma must be in \[0, 1\], got nan"):
        loss.make_value_estimator(gamma=math.nan)
    assert loss.target_entropy == -2
    assert loss.alpha == 1


def test_a_list_of_another_length_is_refused():
    with pytest.raises(ValueError, match="num_qvalue_nets=2, but 1 networks"):
        SACLoss(make_actor(), [sac_setup.normalised_critic()])


def test_keys():
    """The entries that are read and written, before and after set_keys."""
    loss = make_loss()
    assert set(loss.in_keys) == {
        "action",
        "observation",
        ("next", "reward"),
        ("next", "done"),
        ("next", "terminated"),
        ("next", "observation"),
    }
    assert loss.out_keys == OUTPUTS
    with pytest.raises(ValueError, match="priority_key is not an accepted tensordict key"):
        loss.set_keys(priority_key="p")
    loss.set_keys(priority="error", reward=("extra", "gain"), terminated="ended")
    assert ("next", "extra", "gain") in loss.in_keys
    assert ("next", "reward") not in loss.in_keys
    assert (loss.tensor_keys.priority, loss.tensor_keys.done) == ("error", "done")
    batch = make_batch(4)
    plain = run_loss(make_loss_like(loss), batch, 0)
    following = batch["next"]
    batch.set(
        "next",
        TensorDict(
            {
                "observation": following["observation"],
                "extra": {"gain": following["reward"]},
                "ended": following["terminated"],
                "done": following["done"],
            },
            [4],
        ),
    )
    torch.testing.assert_close(run_loss(loss, batch, 0), plain)
    loss.set_keys(priority=None, reward=None, terminated=None)
    assert loss.tensor_keys == SACLoss.default_keys()


def make_loss_like(loss):
    other = make_loss()
    for name in ("actor_network_params", "qvalue_network_params", "target_qvalue_network_params"):
        getattr(other, name).data.update_(getattr(loss, name).data)
    return other


def test_the_actors_key_is_taken_over():
    actor = make_sac_actor(5, 3, (8,), action_key=("agents", "move"))
    assert SACLoss(actor, make_sac_critic(5, 3, (8,))).tensor_keys.action == ("agents", "move")


@pytest.mark.parametrize("missing", ["action", "observation", ("next", "reward"), ("next", "observation")])
def test_a_missing_entry_is_named(missing):
    name = missing if isinstance(missing, str) else missing[-1]
    with pytest.raises(KeyError, match=name):
        make_loss()(make_batch(3).exclude(missing))


def test_keyword_call():
    """A tuple in the order of out_keys."""
    loss, batch = make_loss(), make_batch(5)
    torch.manual_seed(0)
    out = loss(
        observation=batch["observation"],
        action=batch["action"],
        next_observation=batch["next", "observation"],
        next_reward=batch["next", "reward"],
        next_done=batch["next", "done"],
        next_terminated=batch["next", "terminated"],
    )
    truth = run_loss(loss, batch, 0)
    assert isinstance(out, tuple)
    for name, value in zip(OUTPUTS, out, strict=True):
        torch.testing.assert_close(value, truth[name])


def test_outputs_are_scalars():
    out = make_loss()(make_batch(5))
    assert list(out.keys()) == OUTPUTS
    assert out.batch_size == ()
    assert all(value.shape == () for value in out.values())
    assert not out["alpha"].requires_grad
    assert not out["entropy"].requires_grad


@pytest.mark.parametrize("critics", CRITICS)
def test_parameters_feed_optimisers(critics):
    """As TorchRL's examples do it."""
    loss = make_loss(critics)
    assert isinstance(loss, LossModule)
    for name in ("actor_network_params", "qvalue_network_params", "target_qvalue_network_params"):
        assert isinstance(getattr(loss, name), TensorDictParams)
    critic = list(loss.qvalue_network_params.flatten_keys().values())
    actor = list(loss.actor_network_params.flatten_keys().values())
    optimizers = [torch.optim.Adam(critic), torch.optim.Adam(actor), torch.optim.Adam([loss.log_alpha])]
    before = [parameter.detach().clone() for parameter in loss.parameters()]
    total(loss(make_batch(5))).backward()
    for optimizer in optimizers:
        optimizer.step()
    assert not any(torch.equal(*pair) for pair in zip(before, loss.parameters(), strict=True))
    assert len(list(loss.parameters())) == len(critic) + len(actor) + 1
    if critics in ("replicated", "list", "vmap", "vmap of a list", "loop"):
        assert loss.qvalue_network_params.batch_size == (2,)


def test_redrawn_copies_differ():
    """Replicas of one network start apart, also where one object is given twice."""
    network = sac_setup.normalised_critic()
    for networks in (network, [network, network]):
        weight = SACLoss(make_actor(), networks).qvalue_network_params["module", "head", "weight"]
        assert not torch.equal(weight[0], weight[1])
        assert weight.abs().max() <= 1 / math.sqrt(8)


def test_parameters_without_reset_are_redrawn_in_their_range():
    class Own(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.linspace(-0.2, 0.7, 8, dtype=torch.float64))
            self.constant = nn.Parameter(torch.ones(1, dtype=torch.float64))

        def forward(self, observation, action):
            return (torch.cat([observation, action], -1) * self.weight).sum(-1, keepdim=True) + self.constant

    loss = SACLoss(make_actor(), TensorDictModule(Own(), ["observation", "action"], ["state_action_value"]))
    weight = loss.qvalue_network_params["module", "weight"]
    assert weight.shape == (2, 8)
    assert ((weight >= -0.2) & (weight <= 0.7)).all()
    assert not torch.equal(weight[0], weight[1])
    assert (loss.qvalue_network_params["module", "constant"] == 1).all()


def test_temperature():
    loss = make_loss(alpha_init=0.2)
    assert isinstance(loss.log_alpha, nn.Parameter)
    torch.testing.assert_close(loss.alpha, torch.tensor(0.2, dtype=torch.float64))
    loss.log_alpha = math.log(0.7)
    assert isinstance(loss.log_alpha, nn.Parameter)
    torch.testing.assert_close(loss(make_batch(3))["alpha"], torch.tensor(0.7, dtype=torch.float64))
    fixed = make_loss(alpha_init=0.2, fixed_alpha=True)
    assert "log_alpha" in dict(fixed.named_buffers())
    out = fixed(make_batch(3))
    assert not out["loss_alpha"].requires_grad
    torch.testing.assert_close(out["alpha"], torch.tensor(0.2, dtype=torch.float64))


@pytest.mark.parametrize(("low", "high", "expected"), [(0.5, None, 0.5), (None, 0.01, 0.01), (0.05, 0.4, 0.1)])
def test_temperature_bounds(low, high, expected):
    """Applied at each call, to the parameter itself."""
    loss = make_loss(alpha_init=0.1, min_alpha=low, max_alpha=high)
    out = loss(make_batch(3))
    torch.testing.assert_close(out["alpha"], torch.tensor(expected, dtype=torch.float64))
    torch.testing.assert_close(loss.log_alpha.exp().detach(), out["alpha"])
    total(out).backward()


def test_value_estimators():
    loss = make_loss()

    class Foreign:
        name = "TD0"

    for value_type in (None, "TD0", "td0", ValueEstimators.TD0, Foreign()):
        assert loss.make_value_estimator(value_type, gamma=0.5) is loss
        assert loss.value_estimator.gamma == 0.5
    assert loss.make_value_estimator().value_estimator.gamma == 0.99
    loss.make_value_estimator(ValueEstimators.TDLambda, gamma=0.9, lmbda=0.5)
    assert (loss.value_estimator.gamma, loss.value_estimator.lmbda) == (0.9, 0.5)
    assert loss.make_value_estimator("TDLambda").value_estimator.lmbda == 0.95
    assert loss.make_value_estimator("TD1", gamma=0.7).value_estimator.lmbda == 1
    for value_type in ("GAE", ValueEstimators.VTrace):
        with pytest.raises(NotImplementedError, match="TD0, TD1, TDLambda only"):
            loss.make_value_estimator(value_type)
    with pytest.raises(ValueError, match="value_type"):
        loss.make_value_estimator("TD2")
    with pytest.raises(TypeError, match=r"TD0 has one hyperparameter, gamma, got .'lmbda'."):
        loss.make_value_estimator(lmbda=0.9)
    with pytest.raises(TypeError, match="TDLambda has 2 hyperparameters"):
        loss.make_value_estimator("TDLambda", average_rewards=True)
    with pytest.raises(ValueError, match=r"lmbda must be in \[0, 1\]"):
        loss.make_value_estimator("TDLambda", lmbda=1.5)
    with pytest.raises(ValueError, match=r"\[0, 1\]"):
        loss.make_value_estimator(gamma=1.5)


def test_dropout_in_stacked_critics():
    """Each critic drops its own units, unless told otherwise; evaluation mode is followed."""
    network = sac_setup.normalised_critic()
    network.module.body.insert(2, nn.Dropout(0.5))
    loss = SACLoss(make_actor(), network)
    assert loss.vmap_randomness == "different"
    batch = make_batch(50)
    first, second = (loss._critics.online(batch, "state_action_value") for _ in range(2))
    assert not torch.equal(first, second)
    loss.qvalue_network.eval()
    first, second = (loss._critics.online(batch, "state_action_value") for _ in range(2))
    torch.testing.assert_close(first, second)
    loss.set_vmap_randomness("error")
    loss.qvalue_network.train()
    with pytest.raises(RuntimeError, match="random"):
        loss(batch)


@pytest.mark.parametrize("critics", ["ensemble", "replicated", "list"])
def test_dispatched_operations(critics):
    """Forward and backward of the figure in DESIGN.md section 6: fewer than 200; TorchRL needs 415 to 1033."""

    def network():
        return TensorDictModule(MLP(23, 1), ["observation", "action"], ["state_action_value"])

    networks = {"ensemble": make_sac_critic(17, 6), "replicated": network(), "list": [network(), network()]}
    loss, batch = SACLoss(make_sac_actor(17, 6), networks[critics]), plain_batch(256)
    total(loss(batch)).backward()
    loss.zero_grad()
    with Count() as count:
        total(loss(batch)).backward()
    assert 100 < count.operations < 200


@pytest.mark.parametrize("options", [{}, {"delay_actor": True}, {"delay_qvalue": False}, {"separate_losses": True}])
def test_functional_call_uses_the_parameters_it_is_given(options):
    loss, other = (make_loss(target_entropy=-2.0, **options) for _ in range(2))
    batch = make_batch(5)
    with torch.no_grad():
        for tensor in (*other.parameters(), *other.buffers()):
            if tensor.is_floating_point() and tensor.numel() > 1:
                tensor.mul_(0.9).add_(0.01)
    given = {name: tensor.detach().clone() for name, tensor in (*other.named_parameters(), *other.named_buffers())}
    for name, _ in other.named_parameters():
        given[name].requires_grad_()
    before = run_loss(loss, batch, 0)
    expected = run_loss(other, batch, 0)
    assert not torch.equal(expected["loss_actor"], before["loss_actor"])

    torch.manual_seed(0)
    out = torch.func.functional_call(loss, given, (batch.clone(),))
    for name in OUTPUTS:
        torch.testing.assert_close(out[name], expected[name])
    losses = ("loss_actor", "loss_qvalue", "loss_alpha")
    sum(out[name] for name in losses).backward()
    other.zero_grad()
    sum(expected[name] for name in losses).backward()
    for name, parameter in other.named_parameters():
        torch.testing.assert_close(given[name].grad, parameter.grad)
    assert all(parameter.grad is None for parameter in loss.parameters())
    # Afterwards the loss has its own again, also in a copy.
    torch.testing.assert_close(run_loss(loss, batch, 0), before)
    torch.testing.assert_close(run_loss(copy.deepcopy(loss), batch, 0), before)
