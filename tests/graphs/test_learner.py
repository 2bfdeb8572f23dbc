"""A learner whose updates are replayed as graphs: what users change between two of them takes effect (CASES 84)."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from gpubuf import Learner, SACLoss, SoftUpdate
from gpubuf.modules import make_sac_actor, make_sac_critic
from tests.support.graph_recorder import RecordedCuda
from tests.support.host_time import count_calls
from tests.support.learners import (
    ACTION,
    BATCH,
    CHANGES,
    CONSTANT,
    DOUBLE,
    OBSERVATION,
    ROWS,
    World,
    changed,
    sac_loss,
    transitions,
)


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("kind", ["sac", "td3"])
def test_changes_take_effect(kind, change, machine: RecordedCuda):
    """CASES 84: after a change the replays are what eager updates are, bit for bit; only some need another graph."""
    due = changed(World(kind, capture=False), CHANGES[change])
    world = World(kind)
    found = changed(world, CHANGES[change])
    assert found.keys() == due.keys()
    assert not [name for name in due if not torch.equal(found[name], due[name])]
    assert world.learner.captured
    captures = sum(entry.startswith("capture") for entry in machine.log)
    assert captures == (2 if change in CONSTANT else 4)


@pytest.mark.parametrize("change", ["nothing", "the learning rate", "a loaded optimiser state"])
def test_changes_of_another_optimiser(change, machine: RecordedCuda):
    """It keeps its numbers on the host, and its state in new tensors: another graph."""
    due = changed(World(ours=False, capture=False, fused=True), CHANGES[change])
    world = World(ours=False, fused=True)
    found = changed(world, CHANGES[change])
    assert not [name for name in due if not torch.equal(found[name], due[name])]
    assert world.learner.captured
    assert sum(entry.startswith("capture") for entry in machine.log) == (2 if change == "nothing" else 4)


def clipping(world: World) -> None:
    world.optimizer.max_grad_norm = 0.01


def another_group(world: World) -> None:
    """The last parameter, which stays the last one."""
    last = world.optimizer.param_groups[0]["params"].pop()
    world.optimizer.add_param_group({"params": [last], "lr": 0.1})


def a_rate_on_the_device(world: World) -> None:
    world.optimizer.param_groups[0]["lr"] = torch.tensor(0.05)


OF_OPTIMISERS = [(True, clipping), (True, another_group), (False, another_group), (True, a_rate_on_the_device)]


@pytest.mark.parametrize(("ours", "change"), OF_OPTIMISERS)
def test_what_an_optimiser_does_takes_effect(ours, change, machine: RecordedCuda):
    due = changed(World(ours=ours, capture=False, fused=not ours), change)
    world = World(ours=ours, fused=not ours)
    found = changed(world, change)
    assert not [name for name in due if not torch.equal(found[name], due[name])]
    assert world.learner.captured
    assert sum(entry.startswith("capture") for entry in machine.log) == 4


def test_another_group_before_the_capture(machine: RecordedCuda):
    """The optimiser makes its tables anew, which is part of a warm-up."""
    world = World()
    world.run(3)
    another_group(world)
    world.run(8)
    assert world.learner.captured


@pytest.mark.parametrize("rate", [lambda lr: lr * 10, float])
def test_a_rate_on_the_device_may_be_replaced(rate, machine: RecordedCuda):
    def change(world: World) -> None:
        (group,) = world.optimizer.param_groups
        group["lr"] = rate(group["lr"])

    states = []
    for capture in (False, True):
        world = World(capture=capture)
        a_rate_on_the_device(world)
        states.append(changed(world, change))
    due, found = states
    assert not [name for name in due if not torch.equal(found[name], due[name])]
    assert world.learner.captured


@pytest.mark.parametrize("capture", [True, False])
def test_modes_take_effect(capture, machine: RecordedCuda):
    """CASES 84: dropout ends at ``eval()``, and begins again at ``train()``."""
    critic = make_sac_critic(OBSERVATION, ACTION, (8,), dropout=0.5, **DOUBLE)
    loss = SACLoss(make_sac_actor(OBSERVATION, ACTION, (8,), **DOUBLE), critic, target_entropy=-1.0)
    world = World(loss=loss, capture=capture)
    rows, spread = transitions(BATCH), []
    for training in (True, False, True):
        critic.train(training)
        world.run(6)
        values = []
        for _ in range(2):
            torch.manual_seed(0)
            values.append(loss.critic_losses(rows.clone())["loss_qvalue"])
            torch.manual_seed(1)
            values.append(loss.critic_losses(rows.clone())["loss_qvalue"])
        spread.append(bool(values[0] != values[1]))
    assert spread[0]
    assert world.learner.captured == capture
    assert sum(entry.startswith("capture") for entry in machine.log) == (3 if capture else 0)


def test_a_replaced_parameter_takes_effect(machine: RecordedCuda):
    """CASES 84: the module has another parameter, which the optimiser does not know."""

    def replace(world: World) -> None:
        layer = world.loss.actor_network[0].module[0][0]
        layer.weight = nn.Parameter(layer.weight.detach() * 1.5)

    due = changed(World(capture=False), replace)
    found = changed(World(), replace)
    assert not [name for name in due if not torch.equal(found[name], due[name])]


@pytest.mark.parametrize(
    "change",
    [
        lambda world: setattr(world.loss.actor_network[0].module[0], "1", nn.Tanh()),
        lambda world: setattr(world.loss, "loss_mask_key", None),
        lambda world: setattr(world.learner, "target", SoftUpdate(world.loss, tau=0.4)),
    ],
)
def test_what_else_a_graph_repeats(change, machine: RecordedCuda):
    """CASES 84: an activation, the key of masks, and what moves the targets."""
    states = []
    for capture in (False, True):
        world = World(ours=False, fused=True, capture=capture)
        world.buffer.free()
        world.buffer.extend(transitions(shifted_valid=torch.arange(ROWS) % 3 > 0))
        states.append(changed(world, change))
    assert world.learner.captured
    due, found = states
    assert not [name for name in due if not torch.equal(found[name], due[name])]
    assert sum(entry.startswith("capture") for entry in machine.log) == 4


def _norm(world: World) -> Any:
    return next(part for part in world.loss._critics.network.modules() if hasattr(part, "eps"))


@pytest.mark.parametrize(
    "change",
    [
        lambda world: setattr(_norm(world), "eps", 0.5),
        lambda world: _norm(world).register_forward_hook(lambda module, given, out: 2 * out),
        lambda world: next(world.loss.actor_network.parameters()).register_hook(lambda gradient: 2 * gradient),
        lambda world: setattr(world.buffer.parts, "batch_size", 8),
    ],
)
def test_numbers_and_hooks_of_modules_take_effect(change, machine: RecordedCuda):
    """CASES 84: that of a layer's normalisation, of a module and of a parameter; and the size of batches."""
    states = []
    for capture in (False, True):
        torch.manual_seed(0)
        critic = make_sac_critic(OBSERVATION, ACTION, (8,), norm="layer", **DOUBLE)
        loss = SACLoss(make_sac_actor(OBSERVATION, ACTION, (8,), **DOUBLE), critic, target_entropy=-1.0)
        world = World(loss=loss, capture=capture)
        states.append(changed(world, change))
    assert world.learner.captured
    due, found = states
    assert not [name for name in due if not torch.equal(found[name], due[name])]
    assert sum(entry.startswith("capture") for entry in machine.log) == 4


class Encoded(SACLoss):
    """A loss of a user, with a module of its own."""

    def __init__(self) -> None:
        actor = make_sac_actor(OBSERVATION, ACTION, (8,), **DOUBLE)
        super().__init__(actor, make_sac_critic(OBSERVATION, ACTION, (8,), **DOUBLE), target_entropy=-1.0)
        self.encoder = nn.Sequential(nn.Linear(OBSERVATION, OBSERVATION, **DOUBLE), nn.Dropout(0.5))

    def forward(self, batch: Any) -> Any:
        with torch.no_grad():
            batch["observation"] = self.encoder(batch["observation"])
        return super().forward(batch)


@pytest.mark.parametrize(
    "change", [lambda encoder: encoder.eval(), lambda encoder: encoder.__setitem__(0, nn.Identity())]
)
def test_modules_of_a_users_loss_take_effect(change, machine: RecordedCuda):
    states = []
    for capture in (False, True):
        torch.manual_seed(1)
        world = World(loss=Encoded(), capture=capture)
        world.run(6)
        change(world.loss.encoder)
        world.run(6)
        states.append(world.state())
    assert world.learner.captured
    due, found = states
    assert not [name for name in due if not torch.equal(found[name], due[name])]


def test_a_second_hook_of_a_parameter_takes_effect(machine: RecordedCuda):
    def hooked(world: World) -> None:
        next(world.loss.actor_network.parameters()).register_hook(lambda gradient: 2 * gradient)

    world = World()
    for number in range(8):
        if number in (0, 4):
            hooked(world)
        world.run(1)
        assert world.learner.captured == (number in (3, 7))


def test_calls_of_python_per_replay(machine: RecordedCuda):
    """Each costs some 100 ns, and what else is looked at is so by functions written in C."""
    world = World()
    world.run(5)
    (step,) = world.learner._graphs.values()
    step._graph = SimpleNamespace(replay=lambda: None)
    assert count_calls(world.learner) <= 35


def test_what_is_replaced_by_the_same_needs_no_other_graph(machine: RecordedCuda):
    """A number that is computed anew before each update."""
    world = World()
    for number in range(10):
        world.loss.own_number = float(str(0.5))
        world.run(1)
        assert world.learner.captured == (number > 2)
    assert sum(entry.startswith("capture") for entry in machine.log) == 1


def test_given_batches(machine: RecordedCuda):
    """A graph for each form; priorities go into the batch, in memory of their own."""
    worlds = [World(capture=False), World()]
    for world in worlds:
        world.learner.buffer = None
        torch.manual_seed(3)
    found = []
    for world in worlds:
        torch.manual_seed(3)
        batches = [transitions(rows) for _ in range(6) for rows in (8, 12)]
        for batch in batches:
            world.learner(batch)
        found.append((world.state(), [batch["td_error"] for batch in batches]))
    (due, priorities), (state, written) = found
    assert not [name for name in due if not torch.equal(state[name], due[name])]
    assert all(map(torch.equal, written, priorities))
    assert sum(entry.startswith("capture") for entry in machine.log) == 2


def test_losses_are_kept(machine: RecordedCuda):
    """CASES 85: those of each update stay what they were."""
    worlds = World(capture=False), World()
    torch.manual_seed(2)
    due = [worlds[0].learner() for _ in range(8)]
    torch.manual_seed(2)
    found = [worlds[1].learner() for _ in range(8)]
    assert worlds[1].learner.captured
    for one, other in zip(found, due, strict=True):
        assert not [name for name in other.keys() if not torch.equal(one[name], other[name])]


def test_a_refused_capture_is_said_once(machine: RecordedCuda):
    """An update that waits for the device runs eagerly."""
    weight = nn.Parameter(torch.ones(2))

    def loss(batch):
        assert float(weight.detach().sum()) < 10
        return {"loss_a": weight.sum()}

    learner = Learner(loss, torch.optim.SGD([weight], 0.1))
    rows = transitions(4)
    for _ in range(3):
        learner(rows)
    with pytest.warns(UserWarning, match="the learner runs eagerly: the step can't be captured.*reads a value"):
        learner(rows)
    learner(rows)
    assert not learner.captured
    assert torch.allclose(weight, torch.full((2,), 0.5))


def test_a_moved_buffer_gets_another_graph(machine: RecordedCuda):
    world = World()
    world.run(5)
    world.buffer.load_state_dict(world.buffer.state_dict())
    world.buffer.empty()
    world.buffer.extend(transitions(40))
    world.run(5)
    assert world.learner.captured


def test_capture_may_be_declined(machine: RecordedCuda):
    world = World(capture=False)
    world.run(6)
    assert not world.learner.captured
    assert not machine.log


def test_a_learner_does_not_live_on_in_its_optimiser():
    loss = sac_loss()
    loss._has_update_associated = dict.fromkeys(loss._has_update_associated, True)
    optimizer = torch.optim.Adam(loss.parameters())
    Learner(loss, optimizer)
    optimizer.load_state_dict(optimizer.state_dict())
