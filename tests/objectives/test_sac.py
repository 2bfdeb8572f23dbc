"""SACLoss: masks, outputs, keys, critics that are copied, the temperature, and its cost."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from tensordict.nn import TensorDictModule
from torch import nn

from gpubuf.modules import make_sac_actor, make_sac_critic
from gpubuf.objectives import SACLoss, ValueEstimators
from tests.support import sac_setup
from tests.support.losses_setup import agree
from tests.support.precision import assert_no_worse
from tests.support.sac_setup import by_hand, gradients, make_actor, make_batch, make_loss, run_loss, separated, total


def test_mask_key():
    batch = make_batch(6)
    mask = torch.tensor([True, False, True, True, False, True])
    batch.set("mine", mask).set("shifted_valid", torch.zeros(6, dtype=torch.bool))
    loss = separated(make_loss())
    loss.loss_mask_key = "mine"
    agree(loss, batch, mask=mask)
    loss.loss_mask_key = None
    agree(loss, batch)


def test_no_reduction_with_scalars():
    with pytest.warns(UserWarning, match="leaves alpha and entropy"):
        assert make_loss(reduction="none")(make_batch(4)).batch_size == (4,)
    out = make_loss(reduction="none", scalar_output_mode="non_tensor")(make_batch(4))
    assert out["alpha"] == 1.0
    assert "entropy" in out.keys()


def test_separate_steps_in_torchrl_order():
    """The temperature's optimiser may step before the actor's backward, as in TorchRL's examples."""
    loss = make_loss(min_alpha=0.1)
    out = run_loss(loss, make_batch(4), 0)
    optimizer = torch.optim.SGD([loss.log_alpha], lr=0.1)
    out["loss_alpha"].backward()
    optimizer.step()
    out["loss_actor"].backward()
    out["loss_qvalue"].backward()
    assert all(parameter.grad is not None for parameter in loss.parameters())


def test_float32_is_no_worse_than_plain_torch():
    """The ml-cross-entropy criterion for the whole loss."""
    torch.manual_seed(0)
    loss = separated(make_loss(target_entropy=-3.0))
    batch = make_batch(64)
    truth = by_hand(loss, batch, 0)
    expected = gradients(loss, total(truth))
    # The noise of another dtype is another one: take it where both have the same, from the actor's mean.
    single = copy.deepcopy(loss).to(torch.float32)
    torch.manual_seed(0)
    noises = [torch.randn(64, 3, dtype=torch.float64) for _ in range(2)]

    def run(function):
        # one list for each evaluation
        queue = [noise.float() for noise in noises]
        original = torch.randn
        torch.randn = lambda *_, **__: queue.pop(0)
        try:
            return function()
        finally:
            torch.randn = original

    batch32 = batch.apply(lambda t: t.float() if t.is_floating_point() else t)
    ours = run(lambda: run_loss(single, batch32, 0))
    plain = run(lambda: by_hand(single, batch32, 0))
    for name in truth:
        assert_no_worse(ours[name].detach(), plain[name].detach(), truth[name].detach(), 1e-6)
    found, other = gradients(single, total(ours)), gradients(single, total(plain))
    for name in expected:
        assert_no_worse(found[name], other[name], expected[name], 1e-6)


def test_the_actors_key_is_taken_over():
    actor = make_sac_actor(5, 3, (8,), action_key=("agents", "move"))
    assert SACLoss(actor, make_sac_critic(5, 3, (8,))).tensor_keys.action == ("agents", "move")


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
    for value_type in ("GAE", ValueEstimators.MAGAE, ValueEstimators.VTrace):
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


def test_half_precision_networks():
    """Networks whose parameters are bfloat16, without autocast."""
    half = make_loss().to(torch.bfloat16)
    batch = make_batch(16).apply(lambda t: t.bfloat16() if t.is_floating_point() else t)
    out = half(batch)
    total(out).backward()
    assert {out[name].dtype for name in ("loss_actor", "loss_qvalue")} == {torch.float32}
    assert all(parameter.grad.dtype is torch.bfloat16 for parameter in half.parameters())
