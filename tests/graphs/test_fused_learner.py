"""A learner whose updates of soft actor-critic are those of a GPU: whole perceptrons, captured."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from torch.optim.optimizer import register_optimizer_step_post_hook

from gpubuf.data.recording import Recording
from gpubuf.modules import LayerNorm, make_fastsac_actor, make_fastsac_critic
from gpubuf.objectives import DistributionalSACLoss
from gpubuf.objectives.fused import FusedSACUpdate
from gpubuf.optim import AdamW
from tests.support.counted_launches import counted_launches
from tests.support.graph_recorder import RecordedCuda
from tests.support.interpreter import triton_on_cpu
from tests.support.learners import ACTION, CHANGES, CONSTANT, OBSERVATION, World, changed, sac_loss, transitions

F32 = torch.float32


def world_of(**options: Any) -> World:
    """In float32; its loss does not look for NaN, as it does on a CPU alone."""
    world = World(dtype=F32, **options)
    world.loss.nan_named = True
    return world


def captures(machine: RecordedCuda) -> int:
    return sum(entry.startswith("capture") for entry in machine.log)


@pytest.mark.parametrize("change", CHANGES)
def test_changes_take_effect(change, machine: RecordedCuda):
    """CASES 84: after a change the replays are what eager updates are, bit for bit; only some need another graph."""
    due = changed(world_of(capture=False), CHANGES[change])
    world = world_of()
    found = changed(world, CHANGES[change])
    assert not [name for name in due if not torch.equal(found[name], due[name])]
    assert world.learner.captured
    assert isinstance(world.learner._explicit, FusedSACUpdate) == (change != "a frozen parameter")
    assert captures(machine) == (2 if change in CONSTANT else 4)


@pytest.mark.parametrize("late", [False, True])
def test_priorities_are_given_back_beside_the_step(late, machine: RecordedCuda):
    """In a branch of the graph, which may run before or after all that learns: both are what eager updates are."""
    machine.late = late
    due, world = world_of(capture=False), world_of()
    for each in (due, world):
        torch.manual_seed(0)
        each.run(8)
    side = machine.log.index("side waits for side", machine.log.index("capture on side"))
    assert "side waits for side" in machine.log[side + 1 :]
    found, expected = world.state(), due.state()
    assert not [name for name in expected if not torch.equal(found[name], expected[name])]
    assert world.learner.captured


def test_the_optimiser_keeps_the_state_that_the_general_update_leaves(machine: RecordedCuda):
    """The same tensors of the same names, and numbers equal up to rounding."""
    worlds = [world_of(general=general, capture=False) for general in (False, True)]
    for world in worlds:
        torch.manual_seed(0)
        world.run(4)
    found, due = (world.state() for world in worlds)
    assert found.keys() == due.keys()
    for name in due:
        torch.testing.assert_close(found[name], due[name], rtol=1e-3, atol=1e-4, msg=name)
    assert isinstance(worlds[0].learner._explicit, FusedSACUpdate)


def test_another_precision_of_products_drops_the_graphs(machine: RecordedCuda):
    """A replay would repeat the old one."""
    world = world_of()
    world.run(5)
    assert world.learner.captured
    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("high")
        world.run(1)
        assert not world.learner.captured
        world.run(5)
        assert world.learner.captured
    finally:
        torch.set_float32_matmul_precision(before)
    world.run(1)
    assert not world.learner.captured


def test_two_sizes_of_batches_at_once(machine: RecordedCuda):
    """Each has memory of its own, which the graph of the other leaves alone."""
    states = []
    for capture in (False, True):
        world = world_of(capture=capture)
        world.learner.buffer = None
        torch.manual_seed(3)
        for _ in range(6):
            for rows in (8, 12):
                world.learner(transitions(rows, dtype=F32))
        states.append(world.state())
    due, found = states
    assert not [name for name in due if not torch.equal(found[name], due[name])]
    assert captures(machine) == 2
    assert isinstance(world.learner._explicit, FusedSACUpdate)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda learner: pickle.loads(pickle.dumps(learner))])
def test_a_copy_goes_on_by_itself(copied, machine: RecordedCuda):
    world = world_of()
    torch.manual_seed(0)
    world.run(5)
    before = world.state()
    other = copied(world.learner)
    for _ in range(5):
        other()
    after = world.state()
    assert not [name for name in before if not torch.equal(after[name], before[name])]
    assert other.captured
    assert isinstance(other._explicit, FusedSACUpdate)
    assert other._explicit is not world.learner._explicit


def test_a_hook_of_the_optimiser_leads_to_another_graph(machine: RecordedCuda):
    world, seen = world_of(), []
    world.run(6)
    before = captures(machine)
    world.optimizer.register_step_pre_hook(lambda *_: seen.append(1))
    world.run(6)
    assert seen
    assert captures(machine) == before + 1


def test_an_update_in_inference_mode_leaves_nothing_behind(machine: RecordedCuda):
    """What an update needs in between is its own: tensors of inference mode would refuse the next one's writes."""
    world = world_of(capture=False)
    world.run(1)
    world.learner.buffer = None
    batches = [transitions(12, dtype=F32) for _ in range(2)]
    with torch.inference_mode():
        world.learner(batches[0].clone())
    world.learner(batches[1])


def test_a_graph_keeps_the_memory_that_it_writes(monkeypatch: pytest.MonkeyPatch, machine: RecordedCuda):
    """Also when the update is made anew."""
    held = []
    holds = Recording.holds

    def noted(self: Recording, owner: object, *names: str) -> None:
        held.append((owner, names))
        holds(self, owner, *names)

    monkeypatch.setattr(Recording, "holds", noted)
    world = world_of()
    world.run(5)
    assert (world.learner._explicit, ("critics",)) in held


def test_updates_under_autocast_are_captured_and_a_graph_of_float32_is_not_replayed(machine: RecordedCuda):
    """As ``gpubuf train --bfloat16`` calls a learner; here by autograd, which a CPU has under autocast."""
    states = []
    for capture in (False, True):
        world = world_of(capture=capture)
        torch.manual_seed(2)
        for enabled in (False, True):
            for number in range(6):
                with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
                    world.run(1)
                assert world.learner.captured == (capture and number > 2)
        states.append(world.state())
    due, found = states
    assert not [name for name in due if not torch.equal(found[name], due[name])]
    assert captures(machine) == 2


@pytest.mark.parametrize("capture", [False, True])
def test_transforms_of_the_buffer_compute_without_autocast(capture, machine: RecordedCuda):
    """An autocast around the learner is for the loss: batches are those of a buffer without a learner."""
    world, seen = world_of(capture=capture), []
    network = torch.nn.Linear(OBSERVATION, OBSERVATION)

    def encoded(batch: TensorDict) -> TensorDict:
        with torch.no_grad():
            features = network(batch["observation"])
        seen.append((features.dtype, torch.is_autocast_enabled("cpu")))
        return batch.set("observation", features)

    world.buffer.append_transform(encoded)
    hook = torch.nn.modules.module.register_module_forward_hook(
        lambda module, _, out: seen.append("loss") if getattr(out, "dtype", None) is torch.bfloat16 else None
    )
    try:
        with torch.autocast("cpu", torch.bfloat16):
            world.run(5)
            assert torch.is_autocast_enabled("cpu")
    finally:
        hook.remove()
    assert world.learner.captured == capture
    assert "loss" in seen
    assert set(seen) == {"loss", (F32, False)}


@pytest.mark.parametrize(("policy", "launches"), [(True, 5), (False, 4)])
def test_launches(policy, launches, machine: RecordedCuda):
    """Of a whole update, with the step of the optimiser and of the targets; the noise is PyTorch's launch."""
    world = world_of(capture=False)
    batch = transitions(8, dtype=F32)
    world.learner.buffer = None
    with triton_on_cpu():
        world.learner(batch.clone(), policy=policy)
        with counted_launches() as found:
            world.learner(batch.clone(), policy=policy)
    assert all(name.startswith("perceptrons_") for name in found)
    assert sum(found.values()) == launches


@pytest.mark.parametrize("through_triton", [False, True])
def test_a_step_in_the_launch_of_the_gradients_is_that_of_the_optimiser(through_triton, machine: RecordedCuda):
    """Parameters, moments and targets, for updates with the policy and without; a watched optimiser steps itself."""
    states = []
    for watched in (False, True):
        world = world_of(capture=False)
        if watched:
            world.optimizer.register_step_pre_hook(lambda *_: None)
        torch.manual_seed(2)
        with triton_on_cpu(through_triton):
            world.run(4, policy_every=2)
        stored = [each.grad is not None for each in world.loss.parameters() if each.requires_grad]
        assert any(stored) == watched
        states.append(world.state())
    found, due = states
    assert found.keys() == due.keys()
    for name in due:
        torch.testing.assert_close(found[name], due[name], rtol=1e-5, atol=1e-6, msg=name)


def of_fixed_pairs(**options: Any) -> World:
    """The optimiser moves a target whose source is no parameter."""
    world = world_of(**options)
    learning = world.optimizer.param_groups[0]["params"]
    world.far, source = torch.zeros(5), torch.ones(5)
    world.learner.optimizer = AdamW(learning, 1e-2, targets=[*world.loss.target_pairs(), (world.far, source)], tau=0.1)
    return world


def of_a_delayed_actor(**options: Any) -> World:
    torch.manual_seed(0)
    world = world_of(loss=sac_loss(delay_actor=True).to(F32), **options)
    with torch.no_grad():
        world.far = first_target(world.loss).add_(1)
    return world


def first_target(loss: Any) -> torch.Tensor:
    """The actor's."""
    return next(each for name, each in loss.named_buffers() if name.startswith("target_actor_network_params"))


@pytest.mark.parametrize("make", [of_fixed_pairs, of_a_delayed_actor])
def test_targets_of_entries_without_gradients_move(make, machine: RecordedCuda):
    """That of the policy while the critics alone learn, and of what is no parameter: as the optimiser's own step."""
    found = []
    for general in (False, True):
        world = make(general=general, capture=False)
        before = world.far.clone()
        for _ in range(3):
            world.learner(policy=False)
        assert not torch.equal(world.far, before)
        found.append(world.far.clone())
    torch.testing.assert_close(*found)


class Halved(AdamW):
    """A step of the user's own, which reads gradients."""

    def step(self, closure: Any = None, *, groups: Any = None, targets: bool = True) -> Any:
        for group in self.param_groups:
            for each in group["params"]:
                if each.grad is not None:
                    each.grad.mul_(0.5)
        return super().step(closure, groups=groups, targets=targets)


def test_an_optimiser_with_a_step_of_its_own_gets_gradients(machine: RecordedCuda):
    world = world_of(capture=False)
    world.learner.optimizer = Halved(world.optimizer.param_groups[0]["params"], 1e-2, targets=world.loss, tau=0.1)
    world.run(1)
    assert isinstance(world.learner._explicit, FusedSACUpdate)
    assert all(each.grad is not None for each in world.loss.parameters() if each.requires_grad)


def test_a_hook_of_all_optimisers_gets_gradients(machine: RecordedCuda):
    world, found = world_of(capture=False), []
    stored = lambda optimizer, *_: found.extend(each.grad is not None for each in optimizer.param_groups[0]["params"])  # noqa: E731
    handle = register_optimizer_step_post_hook(stored)
    try:
        world.run(1)
    finally:
        handle.remove()
    assert found
    assert all(found)


@pytest.mark.parametrize("capture", [False, True])
def test_an_autocast_around_several_updates_is_one_around_each(capture, machine: RecordedCuda):
    """PyTorch keeps its casts of weights as long: they would be those before the first step."""
    states = []
    for around in (1, 8):
        world = world_of(capture=capture)
        torch.manual_seed(2)
        for _ in range(8 // around):
            with torch.autocast("cpu", torch.bfloat16):
                world.run(around)
        states.append(world.state())
    due, found = states
    assert not [name for name in due if not torch.equal(found[name], due[name])]


def fastsac_world(**options: Any) -> World:
    """Whose critics are categorical, and whose networks have layer norms."""
    torch.manual_seed(1)
    actor, critic = make_fastsac_actor(OBSERVATION, ACTION, (9, 6)), make_fastsac_critic(OBSERVATION, ACTION, (10, 7))
    return world_of(loss=DistributionalSACLoss.fastsac(actor, critic), **options)


def test_fastsac_is_captured(machine: RecordedCuda):
    """With a policy that learns once in four updates: bit for bit what eager updates are, priorities too."""
    due, world = fastsac_world(capture=False), fastsac_world()
    for each in (due, world):
        torch.manual_seed(0)
        each.run(24, policy_every=4)
        each.loss.reward_scale.fill_(0.5)
        each.run(8, policy_every=4)
    found, expected = world.state(), due.state()
    assert not [name for name in expected if not torch.equal(found[name], expected[name])]
    assert isinstance(world.learner._explicit, FusedSACUpdate)
    assert captures(machine) == 2
    assert world.learner.captured


def test_fastsac_learns_as_by_autograd(machine: RecordedCuda):
    """Parameters, moments, targets and priorities after some updates, up to rounding."""
    worlds = [fastsac_world(general=general, capture=False) for general in (False, True)]
    for world in worlds:
        torch.manual_seed(0)
        world.run(8, policy_every=2)
    found, due = (world.state() for world in worlds)
    assert found.keys() == due.keys()
    for name in due:
        torch.testing.assert_close(found[name], due[name], rtol=1e-3, atol=1e-4, msg=name)


def test_another_epsilon_of_norms_leads_to_another_graph(machine: RecordedCuda):
    worlds = [fastsac_world(capture=capture) for capture in (False, True)]
    for world in worlds:
        torch.manual_seed(0)
        world.run(5)
        for part in world.loss.modules():
            if isinstance(part, LayerNorm):
                part.eps = 0.5
        for part in world.loss._critics.network.modules():
            if isinstance(part, LayerNorm):
                part.eps = 0.25
        world.run(5)
    due, found = (world.state() for world in worlds)
    assert not [name for name in due if not torch.equal(found[name], due[name])]
    assert captures(machine) == 2
