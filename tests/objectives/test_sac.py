"""SACLoss: masks, outputs, keys, critics that are copied, the temperature, and its cost.

SACLoss on batches that a buffer sampled, on actors that others built, and on one set of critics in several forms.
"""

from __future__ import annotations

import math

import pytest
import torch
from tensordict.nn import (
    InteractionType,
    NormalParamExtractor,
    ProbabilisticTensorDictModule,
    ProbabilisticTensorDictSequential,
    TensorDictModule,
    set_interaction_type,
)
from torch import nn
from torch.distributions import Independent, Normal

from gpubuf.data import LazyTensorStorage, PrioritizedSampler, TensorDictReplayBuffer
from gpubuf.modules import TanhNormal
from gpubuf.objectives import SACLoss, ValueEstimators
from tests.support import sac_setup
from tests.support.losses_setup import agree
from tests.support.sac_setup import (
    ACTION,
    OBSERVATION,
    gradients,
    linear_critic,
    make_actor,
    make_batch,
    make_loss,
    run_loss,
    separated,
    total,
)


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


F64 = torch.float64


def prioritized_buffer(rows=32):
    """A buffer whose rows have different priorities, sampled in batches of 8."""
    sampler = PrioritizedSampler(rows, alpha=0.7, beta=0.5)
    buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(rows), sampler=sampler, batch_size=8)
    index = buffer.extend(make_batch(rows))
    buffer.update_priority(index, torch.linspace(0.1, 4.0, rows))
    return buffer


def test_a_sampled_batch(backend):
    """The weights of the buffer weigh the losses, and the priorities that the loss writes go back to their rows."""
    torch.manual_seed(0)
    buffer, loss = prioritized_buffer(), make_loss()
    batch = buffer.sample()
    weight = batch["priority_weight"].double().reshape(8)
    assert weight.unique().numel() > 1
    weighted, plain = run_loss(loss, batch, 1), make_loss(reduction="none", scalar_output_mode="exclude")
    plain.load_state_dict(loss.state_dict())
    each = run_loss(plain, batch.exclude("priority_weight"), 1)
    for name in ("loss_actor", "loss_qvalue", "loss_alpha"):
        assert each[name].shape == (8,)
        torch.testing.assert_close(weighted[name], (weight * each[name]).sum() / weight.sum())
    loss(batch)
    buffer.update_tensordict_priority(batch)
    priorities = torch.linspace(0.1, 4.0, 32)
    for row, error in zip(batch["index"].reshape(-1).tolist(), batch["td_error"].tolist(), strict=True):
        priorities[row] = error
    leaves = (priorities.double() + buffer.sampler.eps) ** 0.7
    torch.testing.assert_close(buffer.sampler.tree.total.double().reshape(()), leaves.sum(), rtol=1e-6, atol=0)


UNUSED_IN_BACKWARD = [("next", "observation"), ("next", "reward"), ("next", "terminated"), ("next", "done")]


@pytest.mark.parametrize("key", UNUSED_IN_BACKWARD, ids=str)
def test_a_key_changed_in_place_after_the_forward_pass(backend, key):
    """CASES 35: keys share an allocation, but backward fails for none of them because of another."""
    torch.manual_seed(0)
    batch, loss = prioritized_buffer().sample(), make_loss()
    expected = gradients(loss, total(run_loss(loss, batch.clone(), 1)))
    out = run_loss(loss, batch, 1)
    others = {name: value.clone() for name, value in batch.items(True, True) if name != key}
    batch[key].zero_()
    found = gradients(loss, total(out))
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, rtol=0, atol=0)
    for name, value in others.items():
        assert torch.equal(batch[name], value)


@pytest.mark.parametrize("key", ["observation", "action", "priority_weight"])
def test_a_key_that_backward_reads_is_guarded(key):
    """CASES 35, the other way round: changing what backward reads is an error, or without effect; never wrong."""
    torch.manual_seed(0)
    batch, loss = prioritized_buffer().sample(), make_loss()
    expected = gradients(loss, total(run_loss(loss, batch.clone(), 1)))
    out = run_loss(loss, batch, 1)
    batch[key].zero_()
    try:
        found = gradients(loss, total(out))
    except RuntimeError as error:
        assert "modified by an inplace operation" in str(error)  # noqa: PT017
    else:
        torch.testing.assert_close(found, expected, rtol=0, atol=0)


def independent_normal(loc, scale):
    return Independent(Normal(loc, scale), 1)


def test_a_latent_inside_the_actor_is_drawn_at_random():
    """The loss asks for random draws, also of what precedes the action, whatever the context says."""
    latent = TensorDictModule(
        nn.Sequential(nn.Linear(OBSERVATION, 8, dtype=F64), NormalParamExtractor()),
        ["observation"],
        ["latent_loc", "latent_scale"],
    )
    actor = ProbabilisticTensorDictSequential(
        latent,
        ProbabilisticTensorDictModule(
            {"loc": "latent_loc", "scale": "latent_scale"},
            ["latent"],
            distribution_class=independent_normal,
            default_interaction_type=InteractionType.DETERMINISTIC,
        ),
        TensorDictModule(
            nn.Sequential(nn.Linear(4, 2 * ACTION, dtype=F64), NormalParamExtractor()), ["latent"], ["loc", "scale"]
        ),
        ProbabilisticTensorDictModule(["loc", "scale"], ["action"], distribution_class=TanhNormal),
        return_composite=False,
    )
    loss, batch = make_loss(actor=actor, target_entropy=-1.0), make_batch(6)
    random = run_loss(loss, batch, 0)
    with set_interaction_type(InteractionType.RANDOM):
        torch.testing.assert_close(run_loss(loss, batch, 0), random)
    with set_interaction_type(InteractionType.DETERMINISTIC):
        torch.testing.assert_close(run_loss(loss, batch, 0), random)
    torch.manual_seed(0)
    with torch.no_grad():
        for state in (batch["next"], batch):
            loc, scale = latent.module(state["observation"])
            drawn = loc + scale * torch.randn(6, 4, dtype=F64)
            dist = TanhNormal(*actor[2].module(drawn))
            _, log_prob = dist.rsample_and_log_prob()
    torch.testing.assert_close(random["entropy"], -log_prob.mean())


def test_an_observation_that_agents_share():
    """CASES 29: the critics see a common state next to the agents' own; rows of one agent that ended keep it."""
    state, shape = 4, (5, 2)
    batch = make_batch(*shape)
    batch.batch_size = [5]
    batch["next"].batch_size = [5]
    batch["state"], batch["next", "state"] = (torch.randn(5, state, dtype=F64) for _ in range(2))
    ended = torch.tensor([[True, True], [True, False], [False, False], [False, True], [True, True]])
    batch["next", "terminated"], batch["next", "done"] = ended.unsqueeze(-1), ended.unsqueeze(-1)

    class WithState(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = linear_critic().module
            self.state = nn.Linear(state, 1, dtype=F64)

        def forward(self, observation, action, shared):
            return self.net(observation, action) + self.state(shared).unsqueeze(-2)

    keys = ["observation", "action", "state"]
    members = [TensorDictModule(WithState(), keys, ["state_action_value"]) for _ in range(2)]
    plain, skipping = (SACLoss(make_actor(), members, skip_done_states=flag) for flag in (False, True))
    skipping.load_state_dict(plain.state_dict())
    truth = run_loss(plain, batch, 3)
    torch.testing.assert_close(run_loss(skipping, batch, 3), truth)
    # Where both agents ended, the next state may be anything; the others' must be seen as it is.
    gone = batch.clone()
    gone["next", "state"][ended.all(-1)] = math.nan
    found = run_loss(skipping, gone, 3)
    torch.testing.assert_close(found, truth)
    assert all(gradient.isfinite().all() for gradient in gradients(skipping, total(found)).values())
