"""SACLoss: outputs, keys, the temperature, agents, networks of every kind, returns of sequences, and a value network.

On batches that a buffer sampled, on actors that others built, and where other implementations have failed.
"""

from __future__ import annotations

import copy
import math

import gymnasium
import numpy as np
import pytest
import torch
from tensordict import TensorDict
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
from gpubuf.modules import MLP, EnsembleMLP, TanhNormal, make_sac_actor, make_sac_critic
from gpubuf.objectives import SACLoss, SoftUpdate, ValueEstimators
from tests.contracts.objectives import state_value
from tests.support import sac_setup
from tests.support.losses_setup import agree
from tests.support.sac_setup import (
    ACTION,
    CELLS,
    CRITICS,
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

F64 = torch.float64


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
            self.weight = nn.Parameter(torch.linspace(-0.2, 0.7, 8, dtype=F64))
            self.constant = nn.Parameter(torch.ones(1, dtype=F64))

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
    torch.testing.assert_close(loss.alpha, torch.tensor(0.2, dtype=F64))
    loss.log_alpha = math.log(0.7)
    assert isinstance(loss.log_alpha, nn.Parameter)
    torch.testing.assert_close(loss(make_batch(3))["alpha"], torch.tensor(0.7, dtype=F64))
    fixed = make_loss(alpha_init=0.2, fixed_alpha=True)
    assert "log_alpha" in dict(fixed.named_buffers())
    out = fixed(make_batch(3))
    assert not out["loss_alpha"].requires_grad
    torch.testing.assert_close(out["alpha"], torch.tensor(0.2, dtype=F64))


@pytest.mark.parametrize(("low", "high", "expected"), [(0.5, None, 0.5), (None, 0.01, 0.01), (0.05, 0.4, 0.1)])
def test_temperature_bounds(low, high, expected):
    """Applied at each call, to the parameter itself."""
    loss = make_loss(alpha_init=0.1, min_alpha=low, max_alpha=high)
    out = loss(make_batch(3))
    torch.testing.assert_close(out["alpha"], torch.tensor(expected, dtype=F64))
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


# Agents, odd shapes, and the target entropy


@pytest.mark.parametrize("skip", [False, True])
def test_agents(skip):
    """CASES 29 (TorchRL 2612): two networks for all agents, every key nested, done flags of their environment."""
    keys = {"in_keys": [("agents", "obs")], "action_key": ("agents", "action")}
    actor = make_sac_actor(OBSERVATION, ACTION, CELLS, **keys, dtype=F64)
    keys = {"in_keys": [("agents", "obs"), ("agents", "action")], "out_key": ("agents", "q")}
    critic = make_sac_critic(OBSERVATION, ACTION, CELLS, **keys, dtype=F64)
    loss = SACLoss(actor, critic, skip_done_states=skip)
    loss.set_keys(
        state_action_value=("agents", "q"), reward=("agents", "reward"), priority=("agents", "td_error"), done="done"
    )
    plain, flat = make_loss(), make_batch(4, 3)
    for name in ("actor_network_params", "qvalue_network_params", "target_qvalue_network_params"):
        getattr(plain, name).data.update_(getattr(loss, name).data)
    ended = torch.tensor([[True], [False], [True], [False]])
    flat["next", "terminated"].copy_(ended.unsqueeze(-1).expand(4, 3, 1))
    own = TensorDict({"obs": flat["observation"], "action": flat["action"]}, [4, 3])
    after = TensorDict({"obs": flat["next", "observation"].clone(), "reward": flat["next", "reward"]}, [4, 3])
    batch = TensorDict({"agents": own, "next": {"agents": after, "done": ended, "terminated": ended}}, [4])
    if skip:
        after["obs"][[0, 2]] = float("nan")
    ours, truth = run_loss(loss, batch, 2), run_loss(plain, flat, 2)
    assert loss.target_entropy == -ACTION
    assert ours["td_error"].shape == (4, 3)
    torch.testing.assert_close(ours, truth)
    found, expected = gradients(loss, total(ours)), gradients(plain, total(truth))
    torch.testing.assert_close(list(found.values()), list(expected.values()))


def test_an_agent_too_many_is_refused():
    """Nothing is broadcast that does not fit: the error states both shapes."""
    loss, batch = make_loss(), make_batch(4)
    batch["next"].set("terminated", torch.zeros(4, 3, 1, dtype=torch.bool))
    with pytest.raises(ValueError, match=r"'terminated' of shape \[4, 3, 1\].*\[4\]"):
        loss(batch)
    batch = make_batch(4)
    batch["next"].set("reward", torch.zeros(4, 2, dtype=F64))
    with pytest.raises(ValueError, match=r"'reward' of shape \[4, 2\]"):
        loss(batch)
    batch = make_batch(4).set("priority_weight", torch.zeros(4, 2))
    with pytest.raises(ValueError, match="priority_weight"):
        loss(batch)


def test_critics_that_do_not_go_with_the_policy_are_refused():
    """One value for all agents, one log-density for each."""

    class Central(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = EnsembleMLP(2, 3 * (OBSERVATION + ACTION), 1, CELLS, dtype=F64)

        def forward(self, observation, action):
            return self.net(torch.cat([observation, action], -1).flatten(-2))

    loss = SACLoss(make_actor(), TensorDictModule(Central(), ["observation", "action"], ["state_action_value"]))
    batch = make_batch(4, 3)
    batch.batch_size = [4]
    with pytest.raises(ValueError, match=r"\[2, 4, 3, 1\].*\[4, 3\].*\[2, 4, 1\]"):
        loss(batch)


class Spec(dict):
    """As much of TorchRL's composite specs as the loss looks at: a shape, and entries."""

    def __init__(self, shape: tuple[int, ...] = (), **entries: torch.Tensor | Spec) -> None:
        super().__init__(**entries)
        self.shape = torch.Size(shape)


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        (gymnasium.spaces.Box(-1, 1, (4,)), -4.0),
        (gymnasium.spaces.Box(-1, 1, (2, 3)), -6.0),
        (torch.zeros(7), -7.0),
        ({"action": np.zeros((5,))}, -5.0),
        (Spec(action=torch.zeros(4)), -4.0),
        (Spec((5,), action=torch.zeros(5, 4)), -4.0),
        (Spec(action=Spec(arm=torch.zeros(3), hand=torch.zeros(2, 2))), -7.0),
        (Spec((5,), action=Spec((5,), arm=torch.zeros(5, 3), hand=torch.zeros(5, 2))), -5.0),
    ],
    ids=["box", "matrix", "tensor", "mapping", "composite", "batched", "composite action", "batched composite action"],
)
def test_target_entropy_from_a_spec(spec, expected):
    """CASES 29: TorchRL 1494 (a batch or agents in the spec), 3291 and 3292 (always -1), 3312 (composite actions)."""
    loss = make_loss(action_spec=spec)
    assert loss.target_entropy == expected
    loss(make_batch(3))
    assert loss.target_entropy == expected


@pytest.mark.parametrize("shape", [(6,), (2, 3), (ACTION,), (OBSERVATION, ACTION)], ids=str)
def test_target_entropy_from_the_first_batch(shape):
    """Whatever the batch dimensions are: they may even be as long as the action is wide."""
    loss = make_loss()
    with pytest.raises(RuntimeError, match="before the first batch"):
        loss.target_entropy  # noqa: B018
    loss(make_batch(*shape))
    assert loss.target_entropy == -ACTION
    loss.target_entropy = -1.5
    loss(make_batch(*shape))
    assert loss.target_entropy == -1.5


def test_target_entropy_of_keyword_calls():
    """The batch size is guessed then, and must not matter: here observation, action and batch are as long."""
    actor = make_sac_actor(4, 4, CELLS, dtype=F64)
    loss = SACLoss(actor, make_sac_critic(4, 4, CELLS, dtype=F64))
    square = torch.randn(4, 4, dtype=F64)
    flag = torch.zeros(4, 1, dtype=torch.bool)
    loss(
        observation=square,
        action=square.tanh(),
        next_observation=square,
        next_reward=torch.zeros(4, 1, dtype=F64),
        next_done=flag,
        next_terminated=flag,
    )
    assert loss.target_entropy == -4.0


# Networks


def other_actor(distribution):
    network = nn.Sequential(MLP(OBSERVATION, 2 * ACTION, CELLS, dtype=F64), make_actor()[0].module[1])
    return ProbabilisticTensorDictSequential(
        TensorDictModule(network, ["observation"], ["loc", "scale"]),
        ProbabilisticTensorDictModule(["loc", "scale"], ["action"], distribution_class=distribution),
    )


def test_a_distribution_without_reparametrisation_is_refused():
    class Unfit(torch.distributions.Normal):
        has_rsample = False

    with pytest.raises(TypeError, match="Unfit has no rsample"):
        make_loss(actor=other_actor(Unfit))(make_batch(3))


@pytest.mark.parametrize("critics", CRITICS)
def test_parameters_are_followed_wherever_they_go(critics):
    """.to(), load_state_dict, assignment, and a new `.data`: the networks compute with what the loss holds."""
    loss, batch = make_loss(critics, delay_actor=True), make_batch(5)
    other = make_loss(critics, delay_actor=True)
    truth = run_loss(other, batch, 0)
    for assign in (False, True):
        fresh = make_loss(critics, delay_actor=True)
        fresh.load_state_dict(copy.deepcopy(other.state_dict()), assign=assign)
        assert fresh.target_entropy == -ACTION
        torch.testing.assert_close(run_loss(fresh, batch, 0), truth)
    with torch.no_grad():
        vector = torch.nn.utils.parameters_to_vector(other.parameters())
        torch.nn.utils.vector_to_parameters(vector.clone(), loss.parameters())
        for name in ("target_qvalue_network_params", "target_actor_network_params"):
            getattr(loss, name).data.update_(getattr(other, name).data)
    torch.testing.assert_close(run_loss(loss, batch, 0), truth)
    single = loss.to(torch.float32)
    batch32 = batch.apply(lambda t: t.float() if t.is_floating_point() else t)
    out = run_loss(single, batch32, 0)
    assert {value.dtype for value in out.values()} == {torch.float32}
    assert {gradient.dtype for gradient in gradients(single, total(out)).values()} == {torch.float32}
    assert single.value_estimator.gamma.dtype is F64
    assert all(
        p is q for p, q in zip(single.actor_network.parameters(), single.actor_network_params.parameters(), strict=True)
    )


def test_the_policy_is_the_users_own():
    """Training the loss trains the network that the user collects with."""
    actor = make_actor()
    loss = make_loss(actor=actor)
    mine = {id(parameter) for parameter in actor.parameters()}
    assert mine == {id(parameter) for parameter in loss.actor_network_params.parameters()}
    assert mine <= {id(parameter) for parameter in loss.parameters()}


def test_without_delayed_critics_the_present_ones_are_the_target():
    loss, batch = make_loss(delay_qvalue=False), make_batch(6)
    assert "target_qvalue_network_params" not in dict(loss.named_children())
    delayed = make_loss()
    for name in ("actor_network_params", "qvalue_network_params", "target_qvalue_network_params"):
        getattr(delayed, name).data.update_(getattr(loss, name).data)
    torch.testing.assert_close(run_loss(loss, batch, 0), run_loss(delayed, batch, 0))
    total(run_loss(loss, batch, 0)).backward()
    assert all(parameter.grad is not None for parameter in loss.parameters())


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"delay_actor": True},
        {"critics": "replicated", "separate_losses": True},
    ],
)
@pytest.mark.slow
# The compiler of torch 2.11 asks for that attribute, and warns.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_functional_call_within_compiled_code(options):
    torch._dynamo.reset()
    loss, batch = make_loss(target_entropy=-2.0, **options), make_batch(5)
    given = {name: (tensor.detach() * 0.9 + 0.01).requires_grad_() for name, tensor in loss.named_parameters()}
    before = run_loss(loss, batch, 0)

    def value(given):
        torch.manual_seed(0)
        return total(torch.func.functional_call(loss, given, (batch.clone(),)))

    expected = value(given)
    assert not torch.equal(expected, total(before))
    found = torch.compile(value, backend="aot_eager")(given)
    torch.testing.assert_close(found, expected)
    gradients = (torch.autograd.grad(each, list(given.values())) for each in (found, expected))
    for ours, truth in zip(*gradients, strict=True):
        torch.testing.assert_close(ours, truth)
    torch.testing.assert_close(run_loss(loss, batch, 0), before)


# TD1 and TD(lambda) on sequences


def lambda_loss(lmbda: float = 0.7) -> SACLoss:
    loss = make_loss(target_entropy=-2.0)
    return loss.make_value_estimator(ValueEstimators.TDLambda, gamma=0.9, lmbda=lmbda)


def test_the_dimension_named_time():
    batch = make_batch(4, 6)
    loss = lambda_loss()
    batch.names = ["time", None]
    turned = make_batch(4, 6).transpose(0, 1).contiguous()
    target = loss.td_target(torch.ones(2, 4, 6, dtype=F64), batch, torch.Size([4, 6]))
    truth = loss.td_target(torch.ones(2, 6, 4, dtype=F64), turned, torch.Size([6, 4]))
    torch.testing.assert_close(target, truth.T)


def test_truncation_bootstraps_and_termination_does_not(backend):
    """Case 22 in sequences: what follows an end is another trajectory."""
    loss, batch = lambda_loss(1.0), make_batch(2, 4)
    for name in ("terminated", "truncated", "done"):
        batch["next", name][:] = False
    batch["next", "done"][:, 1] = True
    batch["next", "terminated"][0, 1] = True
    values = torch.full((2, 2, 4), 10.0, dtype=F64)
    target = loss.td_target(values, batch, torch.Size([2, 4]))
    r = batch["next", "reward"].squeeze(-1)
    last = 0.9 * 10
    expected = [
        [r[0, 0] + 0.9 * r[0, 1], r[0, 1], r[0, 2] + 0.9 * (r[0, 3] + last), r[0, 3] + last],
        [r[1, 0] + 0.9 * (r[1, 1] + last), r[1, 1] + last, r[1, 2] + 0.9 * (r[1, 3] + last), r[1, 3] + last],
    ]
    torch.testing.assert_close(target, torch.tensor(expected, dtype=F64))


@pytest.mark.parametrize("make", [lambda_loss, make_loss], ids=["sequences", "one step"])
def test_flags_of_one_kind_stand_in_for_the_other(make):
    loss, batch = make(), make_batch(3, 4)
    same = batch.clone()
    same["next", "terminated"].copy_(same["next", "done"])
    values = torch.randn(2, 3, 4, dtype=F64)
    truth = loss.td_target(values, same, torch.Size([3, 4]))
    for missing in ("terminated", "done"):
        without = same.clone().exclude(("next", missing))
        assert torch.equal(loss.td_target(values, without, torch.Size([3, 4])), truth)


def test_agents_masks_and_steps(backend):
    """A row before a masked one bootstraps: what is behind may be padding. [B, T] of agents, too."""
    loss, batch = separated(lambda_loss()), make_batch(2, 4, 3)
    batch.batch_size = [2, 4]
    mask = torch.rand(2, 4, 3, generator=torch.Generator().manual_seed(1)) < 0.7
    steps = torch.randint(1, 4, (2, 4, 3), generator=torch.Generator().manual_seed(2))
    batch["collector", "mask"], batch["steps_to_next_obs"] = mask.unsqueeze(-1), steps.unsqueeze(-1)
    agree(loss, batch, gamma=0.9, lmbda=0.7, mask=mask, steps=steps)


def test_the_numbers_are_read_on_the_device():
    loss, batch = separated(lambda_loss(0.2)), make_batch(3, 4)
    loss.value_estimator.lmbda.fill_(0.7)
    agree(loss, batch, gamma=0.9, lmbda=0.7)
    moved = loss.to(torch.float32).value_estimator
    assert moved.gamma.dtype is moved.lmbda.dtype is F64
    assert {"gamma", "lmbda"} <= {name.rpartition(".")[2] for name in loss.state_dict()}


def test_a_batch_without_dimensions_is_refused():
    with pytest.raises(ValueError, match=r"a dimension of time, \[B, T\], got batch_size \[\]"):
        lambda_loss()(make_batch())


# With a value network: SAC's version 1


def with_value(critics="ensemble", **kwargs):
    return make_loss(critics, value_network=state_value(), target_entropy=-2.0, **kwargs)


def test_outputs_with_a_value_network():
    loss, batch = with_value(), make_batch(4)
    assert loss.out_keys == ["loss_actor", "loss_qvalue", "loss_alpha", "alpha", "entropy", "loss_value"]
    assert set(loss(batch).keys()) == set(loss.out_keys)
    rows = with_value(reduction="none", scalar_output_mode="exclude")(batch)
    assert {value.shape for value in rows.values()} == {(4,)}


def test_a_batch_that_does_not_divide_is_refused():
    with pytest.raises(RuntimeError, match=r"2 critics need a batch that 2 divides"):
        with_value()(make_batch(5))


def test_another_key_for_the_value():
    network = TensorDictModule(MLP(OBSERVATION, 1, CELLS, dtype=F64), ["observation"], [("agent", "worth")])
    loss = SACLoss(make_actor(), CRITICS["ensemble"]()[0], network)
    with pytest.raises(KeyError, match="state_value"):
        loss(make_batch(4))
    loss.set_keys(value=("agent", "worth"))
    assert loss(make_batch(4))["loss_value"].isfinite()


@pytest.mark.parametrize("delayed", [True, False])
def test_target_of_the_value_network(delayed):
    """With delay_value=False the present network makes the targets, without gradient."""
    loss, batch = with_value(delay_value=delayed), make_batch(4)
    assert ("target_value_network_params" in dict(loss.named_children())) == delayed
    before = run_loss(loss, batch, 0)["td_error"]
    with torch.no_grad():
        for parameter in loss.value_network_params.parameters():
            parameter.add_(0.3)
    assert torch.equal(run_loss(loss, batch, 0)["td_error"], before) == delayed
    SoftUpdate(loss, tau=0.5).step()


def test_parameters_of_two_networks_belong_to_the_first(backend):
    """separate_losses: what the value network shares with the actor learns from the actor's loss only, and so on."""

    def losses(separate):
        torch.manual_seed(0)
        shared = nn.Linear(OBSERVATION, OBSERVATION, dtype=F64)
        actor = make_actor()
        actor[0].module[0].insert(0, shared)
        value = TensorDictModule(
            nn.Sequential(shared, MLP(OBSERVATION, 1, CELLS, dtype=F64)), ["observation"], ["state_value"]
        )
        loss = SACLoss(actor, CRITICS["list"]()[0], value, target_entropy=-2.0, separate_losses=separate)
        return loss, shared, run_loss(loss, make_batch(4), 0)

    loss, shared, out = losses(False)
    assert torch.autograd.grad(out["loss_value"], shared.weight, allow_unused=True)[0] is not None
    loss, shared, out = losses(True)
    assert torch.autograd.grad(out["loss_value"], shared.weight, allow_unused=True, retain_graph=True)[0] is None
    assert torch.autograd.grad(out["loss_actor"], shared.weight)[0] is not None
    moved = copy.deepcopy(loss).to(torch.float32)
    assert all(value.isfinite().all() for value in moved(make_batch(4, dtype=torch.float32)).values())


def test_a_value_of_another_shape_is_refused():
    network = TensorDictModule(MLP(OBSERVATION, 3, CELLS, dtype=F64), ["observation"], ["state_value"])
    with pytest.raises(ValueError, match=r"does not fit|must be"):
        SACLoss(make_actor(), CRITICS["ensemble"]()[0], network)(make_batch(4))


def test_the_part_of_the_value_network():
    loss, batch = with_value(), make_batch(6)
    torch.manual_seed(0)
    found, further = loss.value_loss(batch)
    assert further == {}
    found.backward()
    trained = {name for name, parameter in loss.named_parameters() if parameter.grad is not None}
    assert trained
    assert all(name.startswith("value_network") for name in trained)
    with pytest.raises(RuntimeError, match="needs a value_network"):
        make_loss().value_loss(batch)
