"""The learner on a CPU: updates that are written out are those of autograd, whatever users change between two."""

from __future__ import annotations

import copy
import itertools
import pickle
import random
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import TensorDictModule
from torch import Tensor, nn

from gpubuf import Learner, SACLoss, SoftUpdate, TD3Loss
from gpubuf.modules import MLP, EnsembleMLP, make_sac_actor, make_sac_critic
from gpubuf.objectives.explicit import UnknownError, update_of
from gpubuf.optim import AdamW
from tests.support.learners import (
    ACTION,
    BATCH,
    CHANGES,
    DOUBLE,
    LOSSES,
    OBSERVATION,
    Plain,
    World,
    first_weight,
    sac_loss,
    td3_loss,
    transitions,
)

KEYS = ["observation", "action"]


def written_out(loss: Any) -> Any:
    # What asks for an updater of the targets, once.
    loss._forward_pre_hooks.clear()
    return update_of(loss, loss.parameters())


def learning(loss: Any) -> dict[str, Tensor]:
    return {name: each for name, each in loss.named_parameters() if each.requires_grad}


def check_gradients(loss: Any, batch: TensorDict, policy: bool = True) -> None:
    """Assert that losses, priorities and gradients are those of autograd, for the same noise."""
    update = written_out(loss)
    mine, theirs = batch.clone(), batch.clone()
    assert update.fits(mine)
    torch.manual_seed(1)
    found = update(mine, policy)
    gradients = {name: each.grad for name, each in learning(loss).items()}
    for each in loss.parameters():
        each.grad = None
    torch.manual_seed(1)
    due = loss(theirs) if policy else loss.critic_losses(theirs)
    total = sum(value for name, value in due.items() if name.startswith("loss_"))
    total.backward()
    close = {"rtol": 1e-12, "atol": 1e-13}
    for name, value in found.items():
        torch.testing.assert_close(value, due[name].detach(), **close)
    assert {name for name in due.keys() if name.startswith("loss_")} <= found.keys()
    assert set(mine.keys(True, True)) == set(theirs.keys(True, True))
    torch.testing.assert_close(mine["td_error"], theirs["td_error"], **close)
    for name, each in learning(loss).items():
        if each.grad is None:
            assert gradients[name] is None, name
            continue
        scale = each.grad.abs().max().item()
        torch.testing.assert_close(gradients[name], each.grad, rtol=1e-12, atol=1e-12 * max(scale, 1e-3), msg=name)
        each.grad = None


OPTIONS: dict[str, list[dict[str, Any]]] = {
    "sac": [
        {"fixed_alpha": True, "alpha_init": 0.3},
        {"min_alpha": 0.5, "alpha_init": 0.1},
        {"target_entropy": "auto"},
        {"delay_actor": True},
        {"delay_qvalue": False},
    ],
    "td3": [{"policy_noise": 0.5, "noise_clip": 0.1}, {"bounds": (-0.5, 0.25)}, {"delay_actor": False}],
}
SHARED: list[dict[str, Any]] = [
    {},
    {"loss_function": "l2"},
    {"loss_function": "l1"},
    {"reduction": "sum"},
    {"num_qvalue_nets": 1},
    {"num_qvalue_nets": 5},
    {"skip_done_states": True},
    {"use_prioritized_weights": False},
]
BATCHES: dict[str, dict[str, Any]] = {
    "plain": {},
    "weights": {"priority_weight": torch.linspace(0.1, 1, 23, dtype=torch.float64)},
    "mask": {"collector": {"mask": torch.arange(23) % 3 > 0}},
}


@pytest.mark.parametrize("policy", [True, False])
@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("kind", LOSSES)
def test_gradients_are_those_of_autograd(kind, batch, policy):
    for options in (*SHARED, *OPTIONS[kind]):
        torch.manual_seed(0)
        check_gradients(LOSSES[kind](**options), transitions(23, **BATCHES[batch]), policy)


@pytest.mark.parametrize("kind", LOSSES)
def test_random_networks(kind):
    """Widths from one up, no hidden layer at all, a single row: what autograd does, to the last digits."""
    draw = random.Random(3)
    for _ in range(25):
        cells = tuple(draw.choice((1, 2, 3, 7, 16, 33)) for _ in range(draw.randrange(4)))
        options: dict[str, Any] = {"num_qvalue_nets": draw.randrange(1, 4)}
        if kind == "sac" and draw.random() < 0.5:
            options["fixed_alpha"] = True
        torch.manual_seed(draw.randrange(100))
        loss = LOSSES[kind](cells, **options)
        for target in (each for name, each in loss.named_buffers() if "target_" in name and each.is_floating_point()):
            if target.ndim:
                target.add_(0.1 * torch.randn_like(target))
        check_gradients(loss, transitions(draw.choice((1, 2, 17, 64))), draw.random() < 0.7)


def bounded() -> SACLoss:
    bounds = {"low": [-2.0, -1.0], "high": [0.5, 3.0]}
    return SACLoss(
        make_sac_actor(OBSERVATION, ACTION, (8,), **bounds, **DOUBLE),
        make_sac_critic(OBSERVATION, ACTION, (8,), **DOUBLE),
        target_entropy=-2.0,
    )


def stacked(critics: Any = None) -> SACLoss:
    """Critics that SACLoss itself has stacked."""
    network = TensorDictModule(MLP(OBSERVATION + ACTION, 1, (8, 8), **DOUBLE), KEYS, ["state_action_value"])
    return SACLoss(make_sac_actor(OBSERVATION, ACTION, (8,), **DOUBLE), critics or network, target_entropy=-2.0)


def action_first() -> SACLoss:
    network = EnsembleMLP(2, OBSERVATION + ACTION, 1, (8,), **DOUBLE)
    return stacked(TensorDictModule(network, KEYS[::-1], ["state_action_value"]))


def no_bias() -> SACLoss:
    network = EnsembleMLP(2, OBSERVATION + ACTION, 1, (8,), bias=False, **DOUBLE)
    return stacked(TensorDictModule(network, KEYS, ["state_action_value"]))


@pytest.mark.parametrize("make", [bounded, stacked, action_first, no_bias])
def test_other_forms(make):
    torch.manual_seed(0)
    check_gradients(make(), transitions(23))


def test_sequences_in_the_target():
    """The value estimator is the loss's own."""
    loss = sac_loss()
    loss.make_value_estimator(gamma=0.3)
    check_gradients(loss, transitions(23))


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("ours", [True, False])
@pytest.mark.parametrize("kind", LOSSES)
def test_changes_take_effect(kind, ours, change):
    """CASES 84: what users change is the same in both ways, and the state of the user's objects too."""
    worlds = [World(kind, general=general, ours=ours) for general in (False, True)]
    for world in worlds:
        torch.manual_seed(2)
        world.run(6, policy_every=2)
        CHANGES[change](world)
        world.run(6, policy_every=2)
    found, due = (world.state() for world in worlds)
    assert found.keys() == due.keys()
    for name in due:
        torch.testing.assert_close(found[name], due[name], rtol=1e-9, atol=1e-10, msg=name)
    assert worlds[0].learner._explicit is not None
    assert worlds[1].learner._explicit is None


def test_a_change_matters():
    """The test above would see it."""
    unchanged = World()
    torch.manual_seed(2)
    unchanged.run(12, policy_every=2)
    for name in CHANGES:
        world = World()
        torch.manual_seed(2)
        world.run(6, policy_every=2)
        CHANGES[name](world)
        world.run(6, policy_every=2)
        same = torch.equal(first_weight(world.loss), first_weight(unchanged.loss))
        assert same == (name == "nothing"), name


def replaced(loss: Any) -> None:
    layer = loss.actor_network[0].module[0][0]
    layer.weight = nn.Parameter(layer.weight.detach().clone())


def hooked_module(loss: Any) -> None:
    loss.actor_network[0].module[0][0].register_forward_hook(lambda *_: None)


def hooked_tensor(loss: Any) -> None:
    first_weight(loss).register_hook(lambda grad: 2 * grad)


def hooked_after(loss: Any) -> None:
    first_weight(loss).register_post_accumulate_grad_hook(lambda _: None)


def hooked_temperature(loss: Any) -> None:
    loss.log_alpha.register_hook(lambda grad: 2 * grad)


def other_method(loss: Any) -> None:
    loss.critic_losses = lambda batch: SACLoss.critic_losses(loss, batch)


def other_layer(loss: Any) -> None:
    layer = loss.actor_network[0].module[0][0]
    layer.forward = lambda x: 2 * nn.Linear.forward(layer, x)


def other_activation(loss: Any) -> None:
    loss.actor_network[0].module[0][1] = nn.Tanh()


def other_objective(loss: Any) -> None:
    loss.actor_value = "mean"


@pytest.mark.parametrize(
    "change",
    [
        replaced, hooked_module, hooked_tensor, hooked_after, hooked_temperature, other_method, other_layer,
        other_activation, other_objective,
    ],
)  # fmt: skip
def test_what_is_not_known_goes_the_general_way(change):
    """Also in the middle of a training."""
    world = World()
    world.run(2)
    assert world.learner._explicit is not None
    change(world.loss)
    world.run(1)
    assert world.learner._explicit is None


def test_an_update_whose_making_was_interrupted_is_made_again(monkeypatch):
    world = World()
    world.run(2)
    world.loss.loss_function = "l1"
    with monkeypatch.context() as context:
        context.setattr("gpubuf.learner.update_of", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            world.run(1)
    before = world.learner._explicit
    world.run(1)
    assert before is None
    assert world.learner._explicit is not None


def test_a_transposed_weight_in_the_same_memory_is_noticed():
    world = World()
    world.run(1)
    weight = world.loss.actor_network[0].module[0][2].weight
    weight.data = weight.data.t()
    assert not world.learner._watch.unchanged()


@pytest.mark.parametrize("general", [False, True])
def test_what_has_made_the_observations_learns(general):
    """An encoder before the learner, with parameters in its optimiser."""
    torch.manual_seed(0)
    loss, encoder = sac_loss(), nn.Linear(OBSERVATION, OBSERVATION, **DOUBLE)
    optimizer = torch.optim.SGD([*learning(loss).values(), *encoder.parameters()], 0.1)
    learner = Learner(Plain(loss) if general else loss, optimizer, target=SoftUpdate(loss, tau=0.1))
    before, batch = encoder.weight.detach().clone(), transitions(8)
    learner(batch.set("observation", encoder(batch["observation"])))
    assert not torch.equal(encoder.weight, before)


def test_keys_are_noticed():
    world = World()
    world.run(1)
    watch = world.learner._watch
    assert watch.unchanged()
    world.loss.set_keys(priority="error")
    assert not watch.unchanged()
    batch = world.buffer.sample()
    Learner(world.loss, world.optimizer)(batch)
    assert "error" in batch.keys()
    assert "td_error" not in batch.keys()


def other_losses() -> list[Any]:
    actor, critic = make_sac_actor(OBSERVATION, ACTION, (8,)), make_sac_critic(OBSERVATION, ACTION, (8,))
    new = lambda **kwargs: MLP(OBSERVATION, 2 * ACTION, (8,), **kwargs)  # noqa: E731

    class Variant(SACLoss):
        pass

    mixed = make_sac_actor(OBSERVATION, ACTION, (8,), dtype=torch.float64)
    return [
        Variant(actor, critic),
        SACLoss(mixed, critic),
        SACLoss(actor, make_sac_critic(OBSERVATION, ACTION, (8,), norm="layer")),
        SACLoss(actor, make_sac_critic(OBSERVATION, ACTION, (8,), activation=nn.SiLU)),
        SACLoss(make_sac_actor(OBSERVATION, ACTION, (8,), activation=nn.ELU), critic),
        SACLoss(actor, critic, value_network=TensorDictModule(new(), ["observation"], ["state_value"])),
        TD3Loss(
            TensorDictModule(MLP(OBSERVATION, ACTION, (8,)), ["observation"], ["action"]), critic, bounds=(-1.0, 1.0)
        ),
        SACLoss(actor.bfloat16(), critic.bfloat16()),
    ]


def test_losses_that_are_not_known():
    for loss in other_losses():
        with pytest.raises(UnknownError):
            written_out(loss)


def test_parameters_without_an_optimiser_are_not_known():
    """Autograd adds their gradients up."""
    loss = sac_loss()
    loss._forward_pre_hooks.clear()
    with pytest.raises(UnknownError, match="optimiser"):
        update_of(loss, [first_weight(loss)])


@pytest.mark.parametrize(
    "change",
    [
        lambda batch: batch.unsqueeze(0),
        lambda batch: batch.set("observation", batch["observation"].float()),
        lambda batch: batch.set("action", batch["action"][:, :1]),
        lambda batch: batch[:0],
        lambda batch: batch.exclude("action"),
        lambda batch: batch.exclude("next"),
    ],
)
def test_batches_that_do_not_fit(change):
    assert not written_out(sac_loss()).fits(change(transitions(8)))


def test_gradients_of_nothing_are_none():
    """Of parameters that the optimiser has, and the loss does not use: as after ``zero_grad``."""
    loss, other = sac_loss(), nn.Parameter(torch.ones(3, **DOUBLE))
    optimizer = AdamW([*learning(loss).values(), other], 1e-2)
    learner = Learner(loss, optimizer, target=SoftUpdate(loss, tau=0.1))
    other.grad = torch.ones(3, **DOUBLE)
    learner(transitions(8))
    assert other.grad is None
    assert other.tolist() == [1, 1, 1]
    learner(transitions(8), policy=False)
    assert all(each.grad is None for each in loss.actor_network_params.parameters())
    assert loss.log_alpha.grad is None
    assert learner._explicit is not None


def test_a_state_dict_is_a_users():
    """Modules and optimiser keep their tensors: views of nothing else, at the same addresses."""
    world = World()
    before = {name: each.data_ptr() for name, each in world.loss.state_dict().items()}
    world.run(3)
    assert {name: each.data_ptr() for name, each in world.loss.state_dict().items()} == before
    plain = torch.optim.AdamW(learning(world.loss).values(), 1e-2)
    plain.load_state_dict(world.optimizer.state_dict())
    assert world.loss.actor_network[0].module[0][0].weight is first_weight(world.loss)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda learner: pickle.loads(pickle.dumps(learner))])
@pytest.mark.parametrize("ours", [True, False])
def test_a_copy_goes_on_by_itself(ours, copied):
    """After updates too, whose prepared calls are on the memory of the original."""
    world, due = World(ours=ours), World(ours=ours)
    for each in (world, due):
        torch.manual_seed(0)
        each.run(3)
    original, world.learner = world.learner, copied(world.learner)
    before = world.state()
    world.loss, world.optimizer, world.buffer = (
        getattr(world.learner, name) for name in ("loss", "optimizer", "buffer")
    )
    for each in (world, due):
        torch.manual_seed(1)
        each.run(3)
    found, expected = world.state(), due.state()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    world.loss, world.optimizer, world.buffer = original.loss, original.optimizer, original.buffer
    after = world.state()
    assert all(torch.equal(after[name], before[name]) for name in before)


# --- calls ---


def test_a_batch_of_the_users():
    loss = td3_loss()
    learner = Learner(loss, AdamW(learning(loss).values(), 1e-3, targets=loss, tau=0.1))
    batch = transitions(BATCH)
    out = learner(batch)
    assert out.keys() == {"loss_actor", "loss_qvalue"}
    assert batch["td_error"].shape == (BATCH,)
    assert not any(value.requires_grad for value in out.values())


def test_a_learner_needs_rows():
    loss = sac_loss()
    learner = Learner(loss, AdamW(learning(loss).values(), 1e-3, targets=loss, tau=0.1))
    with pytest.raises(ValueError, match=r"without a buffer needs a batch: learner\(batch\)"):
        learner()


def test_a_loss_must_be_a_number():
    weight = nn.Parameter(torch.ones(2))
    for loss in (
        lambda batch: {"lost": weight.sum()},
        lambda batch: {"loss_a": weight},
        lambda batch: {"loss": weight},
    ):
        with pytest.raises(ValueError, match=r"a learner minimises scalars called 'loss_\*', or 'loss', got"):
            Learner(loss, torch.optim.SGD([weight], 0.1))(TensorDict({}, [1]))


def test_a_sum_beside_its_parts_is_not_minimised_too():
    """An entry called "loss" is minimised alone."""
    for parts, due in (({}, 0.9), ({"loss_a": 2.0}, 0.8), ({"loss_a": 2.0, "loss_b": 3.0}, 0.5)):
        weight = nn.Parameter(torch.ones(()))

        def loss(batch: Any, parts: Any = parts, weight: Any = weight) -> dict[str, Tensor]:
            return {"loss": weight * 1.0, **{name: weight * factor for name, factor in parts.items()}}

        found = Learner(loss, torch.optim.SGD([weight], 0.1))(TensorDict({}, [1]))
        assert float(weight.detach()) == pytest.approx(due)
        assert found.keys() == {"loss", *parts}


@pytest.mark.parametrize("enabled", [True, False])
def test_autograd_runs_in_the_calling_thread(enabled):
    """What users say of it is as they left it, also after an error."""
    weight, seen = nn.Parameter(torch.ones(2)), []

    def note(grad: Tensor) -> None:
        seen.append(torch._C._is_multithreading_enabled())
        if len(seen) == 2:
            raise ZeroDivisionError

    weight.register_hook(note)
    learner = Learner(lambda batch: {"loss_a": weight.sum()}, torch.optim.SGD([weight], 0.1))
    with torch.autograd.set_multithreading_enabled(enabled):
        learner(TensorDict({}, [1]))
        with pytest.raises(ZeroDivisionError):
            learner(TensorDict({}, [1]))
        assert torch._C._is_multithreading_enabled() is enabled
    assert seen == [False, False]


def test_any_function_may_be_the_loss():
    weight = nn.Parameter(torch.ones(2))
    learner = Learner(lambda batch: {"loss_a": weight.sum(), "rows": weight}, torch.optim.SGD([weight], 0.1))
    assert learner(TensorDict({}, [1])).to_dict() == {"loss_a": torch.tensor(2.0)}
    assert torch.allclose(weight, torch.full((2,), 0.9))


def test_td3_moves_its_targets_with_the_policy():
    world = World("td3")
    targets = [each.clone() for each in world.loss.target_qvalue_network_params.values(True, True)]
    world.learner(policy=False)
    assert all(map(torch.equal, targets, world.loss.target_qvalue_network_params.values(True, True)))
    world.learner()
    assert not any(map(torch.equal, targets, world.loss.target_qvalue_network_params.values(True, True)))


def test_a_loss_that_nobody_moves_the_targets_of():
    loss = sac_loss()
    with pytest.warns(UserWarning, match="No target network updater"):
        Learner(loss, torch.optim.Adam(loss.parameters()))


def test_nan_is_named_once():
    world = World()
    world.buffer.storage[:]  # filled
    batch = transitions(BATCH)
    batch["observation"][0] = torch.nan
    learner = Learner(world.loss, world.optimizer)
    with pytest.warns(UserWarning, match="SACLoss: .* NaN"):
        learner(batch)
    learner(batch)
    assert learner._explicit is not None


def test_batches_of_several_sizes():
    """The memory in between grows and shrinks."""
    loss = sac_loss()
    for size in itertools.islice(itertools.cycle((5, 40, 1, 17)), 9):
        check_gradients(loss, transitions(size))
