"""SACLoss with a value network, SAC's version 1: losses, gradients, chunks of the batch, targets and keys."""

from __future__ import annotations

import copy

import pytest
import torch
from tensordict.nn import TensorDictModule
from torch import nn

from gpubuf.modules import MLP
from gpubuf.objectives import SACLoss, SoftUpdate
from tests.contracts.objectives import state_value
from tests.support.sac_setup import CELLS, CRITICS, OBSERVATION, make_actor, make_batch, make_loss, run_loss

F64 = torch.float64


def with_value(critics="ensemble", **kwargs):
    return make_loss(critics, value_network=state_value(), target_entropy=-2.0, **kwargs)


def test_outputs():
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


def test_its_part():
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
