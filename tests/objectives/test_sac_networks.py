"""SACLoss and its networks: shared parameters, other distributions, copies, delayed ones."""

from __future__ import annotations

import copy

import pytest
import torch
from tensordict.nn import (
    ProbabilisticTensorDictModule,
    ProbabilisticTensorDictSequential,
    TensorDictModule,
)
from torch import nn

from gpubuf.modules import MLP
from tests.support.sac_setup import (
    ACTION,
    CELLS,
    CRITICS,
    OBSERVATION,
    gradients,
    make_actor,
    make_batch,
    make_loss,
    run_loss,
    total,
)


def other_actor(distribution):
    network = nn.Sequential(MLP(OBSERVATION, 2 * ACTION, CELLS, dtype=torch.float64), make_actor()[0].module[1])
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
    assert single.value_estimator.gamma.dtype is torch.float64
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
