"""The losses of an update that trains the critics alone: those of a whole update, with nothing for the actor."""

import pytest
import torch

from tests.support.sac_setup import make_batch, make_loss


def seeded(function, batch):
    torch.manual_seed(3)
    return function(batch)


@pytest.mark.parametrize("critics", ["ensemble", "vmap"])
def test_they_are_those_of_a_whole_update(critics):
    """The same loss, gradients and priorities for the same noise."""
    loss, batch, alone = make_loss(critics), make_batch(6), make_batch(6)
    whole, found = seeded(loss, batch), seeded(loss.critic_losses, alone)
    assert set(found.keys()) == {"loss_qvalue", "alpha"}
    assert torch.equal(found["loss_qvalue"], whole["loss_qvalue"])
    assert torch.equal(alone["td_error"], batch["td_error"])
    parameters = [p for p in loss.qvalue_network_params.parameters() if p.requires_grad]
    due = torch.autograd.grad(whole["loss_qvalue"], parameters)
    for one, two in zip(torch.autograd.grad(found["loss_qvalue"], parameters), due, strict=True):
        assert torch.equal(one, two)


def test_only_critics_get_gradients():
    loss = make_loss()
    seeded(loss.critic_losses, make_batch(6))["loss_qvalue"].backward()
    assert all(p.grad is not None for p in loss.qvalue_network_params.parameters())
    assert all(p.grad is None for p in loss.actor_network_params.parameters())
    assert loss.log_alpha.grad is None


def test_a_temperature_that_learns_from_the_next_actions_learns_here_too():
    loss = make_loss()
    loss.temperature_from = "next"
    whole, found = (seeded(function, make_batch(6)) for function in (loss, loss.critic_losses))
    assert set(found.keys()) == {"loss_qvalue", "loss_alpha", "alpha"}
    assert torch.equal(found["loss_alpha"], whole["loss_alpha"])
    # "auto" is known from the first batch, whichever comes first.
    other = make_loss(actor=loss.actor_network)
    other.temperature_from = "next"
    seeded(other.critic_losses, make_batch(6))
    assert float(other.target_entropy) == float(loss.target_entropy) == -3.0


def test_they_run_on_parameters_that_were_put_in():
    """As the losses of a whole update do, and leave the loss on its own afterwards."""
    loss, batch = make_loss(), make_batch(6)
    before = seeded(loss.critic_losses, batch)["loss_qvalue"]
    params = {name: torch.zeros_like(p) for name, p in loss.named_parameters() if name.startswith("qvalue")}
    replaced = seeded(lambda b: torch.func.functional_call(_Alone(loss), _under(params), (b,)), batch)
    assert not torch.equal(replaced, before)
    assert torch.equal(seeded(loss.critic_losses, batch)["loss_qvalue"], before)


class _Alone(torch.nn.Module):
    def __init__(self, loss):
        super().__init__()
        self.loss = loss

    def forward(self, batch):
        return self.loss.critic_losses(batch)["loss_qvalue"]


def _under(params):
    return {f"loss.{name}": tensor for name, tensor in params.items()}
