"""Parameters that several networks have: of two critics, of a critic's own layers, of actor and critics."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from tensordict.nn import ProbabilisticTensorDictModule, ProbabilisticTensorDictSequential, TensorDictModule
from torch import Tensor, nn

from gpubuf.modules import TanhNormal
from gpubuf.objectives import SACLoss, SoftUpdate
from tests.support.sac_setup import ACTION, KEYS, OBSERVATION, VALUE, make_actor, make_batch, run_loss, total

pytestmark = pytest.mark.filterwarnings("ignore:No target network updater")


class Encoded(nn.Module):
    """A critic on an encoder that others may have, too."""

    def __init__(self, encoder: nn.Module) -> None:
        super().__init__()
        self.encoder, self.head = encoder, nn.Linear(OBSERVATION + ACTION, 1, dtype=torch.float64)

    def forward(self, observation: Tensor, action: Tensor) -> Tensor:
        return self.head(torch.cat([self.encoder(observation).tanh(), action], -1))


class Pair(nn.Module):
    ensemble_size = 2

    def __init__(self, encoder: nn.Module) -> None:
        super().__init__()
        self.first, self.second = Encoded(encoder), Encoded(encoder)

    def forward(self, observation: Tensor, action: Tensor) -> Tensor:
        return torch.stack([self.first(observation, action), self.second(observation, action)])


class Policy(nn.Module):
    def __init__(self, encoder: nn.Module) -> None:
        super().__init__()
        self.encoder, self.head = encoder, nn.Linear(OBSERVATION, 2 * ACTION, dtype=torch.float64)

    def forward(self, observation: Tensor) -> tuple[Tensor, Tensor]:
        loc, raw = self.head(self.encoder(observation).tanh()).chunk(2, -1)
        return loc, raw.sigmoid() + 0.1


class Tied(nn.Module):
    """One layer in two places."""

    def __init__(self) -> None:
        super().__init__()
        self.first = self.second = nn.Linear(OBSERVATION + ACTION, OBSERVATION + ACTION, dtype=torch.float64)
        self.head = nn.Linear(OBSERVATION + ACTION, 1, dtype=torch.float64)

    def forward(self, observation: Tensor, action: Tensor) -> Tensor:
        x = self.first(torch.cat([observation, action], -1)).tanh()
        return self.head(self.second(x).tanh())


def encoder() -> nn.Linear:
    return nn.Linear(OBSERVATION, OBSERVATION, dtype=torch.float64)


def critic(network: nn.Module) -> TensorDictModule:
    return TensorDictModule(network, KEYS, VALUE)


def actor_on(shared: nn.Module) -> ProbabilisticTensorDictSequential:
    return ProbabilisticTensorDictSequential(
        TensorDictModule(Policy(shared), ["observation"], ["loc", "scale"]),
        ProbabilisticTensorDictModule(["loc", "scale"], ["action"], distribution_class=TanhNormal),
    )


def make_loss(form: str, separate: bool = False) -> SACLoss:
    """The actor and two critics on one encoder."""
    torch.manual_seed(0)
    shared = encoder()
    networks = {
        "ensemble": lambda: critic(Pair(shared)),
        "list": lambda: [critic(Encoded(shared)), critic(Encoded(shared))],
        "replicated": lambda: critic(Encoded(shared)),
    }
    return SACLoss(actor_on(shared), networks[form](), separate_losses=separate, target_entropy=-1.0)


def gradients(loss: SACLoss, out) -> list[Tensor]:
    return list(torch.autograd.grad(total(out), list(loss.parameters())))


def test_critics_of_a_list_keep_the_encoder_that_they_share():
    """Stacked, each had a copy of its own, and the encoder was not trained."""
    torch.manual_seed(0)
    shared, batch = encoder(), make_batch(7)
    members = [critic(Encoded(shared)), critic(Encoded(shared))]
    as_one = critic(Pair(shared))
    as_one.module.first.head.load_state_dict(members[0].module.head.state_dict())
    as_one.module.second.head.load_state_dict(members[1].module.head.state_dict())
    actor = make_actor()
    ours, expected = (
        SACLoss(actor, networks, target_entropy=-1.0, separate_losses=False) for networks in (members, as_one)
    )
    assert any(parameter is shared.weight for parameter in ours.parameters())
    assert len(list(ours.parameters())) == len(list(expected.parameters()))
    for loss in (ours, expected):
        shared.zero_grad()
        out = run_loss(loss, batch, 3)
        total(out).backward()
        loss.seen = shared.weight.grad.clone(), total(out).detach(), out["td_error"]
    for a, b in zip(ours.seen, expected.seen, strict=True):
        torch.testing.assert_close(a, b)
    updater = SoftUpdate(ours, tau=0.5)
    with torch.no_grad():
        shared.weight.add_(1.0)
    updater.step()
    moved = [t for k, t in ours.target_qvalue_network_params.items(True, True) if k[-2:] == ("encoder", "weight")]
    assert len(moved) == 2
    for target in moved:
        torch.testing.assert_close(target, shared.weight.detach() - 0.5)


@pytest.mark.parametrize("networks", ["replicated", "list"])
def test_a_layer_in_two_places_of_a_critic_stays_one(networks):
    torch.manual_seed(0)
    loss = SACLoss(
        make_actor(),
        critic(Tied()) if networks == "replicated" else [critic(Tied()), critic(Tied())],
        target_entropy=-1.0,
    )
    names = [name for name, _ in loss.qvalue_network_params.named_parameters()]
    assert len(names) == 4
    optimizer = torch.optim.SGD(loss.parameters(), 0.1)
    total(run_loss(loss, make_batch(6), 3)).backward()
    optimizer.step()
    params = loss.qvalue_network_params
    assert params["module", "first", "weight"] is params["module", "second", "weight"]
    total(run_loss(copy.deepcopy(loss), make_batch(6), 3)).backward()


@pytest.mark.parametrize(
    "duplicate", [copy.deepcopy, lambda loss: pickle.loads(pickle.dumps(loss))], ids=["copy", "pickle"]
)
@pytest.mark.parametrize("separate", [False, True])
@pytest.mark.parametrize("form", ["ensemble", "list", "replicated"])
def test_a_copy_shares_what_the_original_shares(form, separate, duplicate):
    """The encoder of a copy was one parameter in the actor and another in the critics."""
    loss, batch = make_loss(form, separate), make_batch(6)
    same = duplicate(loss)
    assert [name for name, _ in same.named_parameters()] == [name for name, _ in loss.named_parameters()]
    out, other = run_loss(loss, batch, 3), run_loss(same, batch, 3)
    torch.testing.assert_close(total(out), total(other), rtol=0, atol=0)
    torch.testing.assert_close(gradients(loss, out), gradients(same, other), rtol=0, atol=0)


def test_the_copy_of_a_loss_and_its_optimiser_learns():
    """The copied optimiser had parameters that no network had."""
    loss, batch = make_loss("ensemble"), make_batch(6)
    loss, optimizer = copy.deepcopy((loss, torch.optim.SGD(loss.parameters(), 0.1)))
    before = total(run_loss(loss, batch, 3))
    before.backward()
    optimizer.step()
    assert total(run_loss(loss, batch, 3)) < before


@pytest.mark.parametrize("form", ["ensemble", "list", "replicated"])
def test_the_state_of_separate_losses_is_loaded(form):
    """Of stacked critics it could not be: a shared parameter was one tensor seen several times."""
    loss, batch = make_loss(form, separate=True), make_batch(6)
    state, expected = copy.deepcopy(loss.state_dict()), total(run_loss(loss, batch, 3))
    with torch.no_grad():
        for parameter in loss.parameters():
            parameter.add_(0.1)
    assert not torch.isclose(total(run_loss(loss, batch, 3)), expected)
    loss.load_state_dict(state)
    torch.testing.assert_close(total(run_loss(loss, batch, 3)), expected, rtol=0, atol=0)
    with torch.no_grad():
        loss.actor_network[0].module.encoder.weight.add_(1.0)
    seen = [t for k, t in loss.qvalue_network_params.items(True, True) if k[-2:] == ("encoder", "weight")]
    assert all((t == loss.actor_network[0].module.encoder.weight).all() for t in seen)


@pytest.mark.parametrize("separate", [False, True])
@pytest.mark.parametrize("form", ["ensemble", "list", "replicated"])
def test_whose_loss_trains_what_is_shared(form, separate):
    """The critics' too, or with ``separate_losses`` the actor's only; the critics see every change, also in copies."""
    loss = make_loss(form, separate)
    for moved in (loss, copy.deepcopy(loss), copy.deepcopy(loss).to(torch.float32)):
        batch = make_batch(6, dtype=moved.log_alpha.dtype)
        mine, out = moved.actor_network[0].module.encoder.weight, run_loss(moved, batch, 0)
        slope = torch.autograd.grad(out["loss_qvalue"], mine, allow_unused=True, retain_graph=True)[0]
        # One network that is copied gets an encoder for each copy, unless that is the actor's to train.
        assert (slope is not None) == (not separate and form != "replicated")
        assert torch.autograd.grad(out["loss_actor"], mine)[0].abs().max() > 0
        if separate:
            with torch.no_grad():
                mine.add_(1.0)
            assert not torch.equal(run_loss(moved, batch, 0)["td_error"], out["td_error"])
        assert sum(parameter is mine for parameter in moved.parameters()) == 1
