"""Captured steps, on a machine whose CUDA graphs are recordings of the CPU: see tests/support/graph_recorder.py."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext

import pytest
import torch
from tensordict import TensorDict
from torch import Tensor

from gpubuf import HardUpdate, capture
from gpubuf.data import moving
from gpubuf.graphs import Captured
from gpubuf.kernels.config import in_graph
from tests.contracts import first_quick
from tests.support.graph_recorder import RecordedCuda, recorded
from tests.support.graph_worlds import CAPACITY, COMPUTED, WORLDS, WRITTEN, World, differences, run
from tests.support.interpreter import triton_on_cpu
from tests.support.sac_setup import make_loss

CALLS, WARMUP = 14, 2


def captured(world: World, machine: RecordedCuda, step: Callable[..., object] | None = None) -> Captured:
    machine.memory = world.buffer.storage.columns.parts
    return capture(world.step if step is None else step, warmup=WARMUP)


#: What the contract of buffers has not: learning, an annealed beta with computed rows, several environments.
OWN = [name for name in WORLDS if name.startswith("soft") or "environments" in name or "bytes" in name]


@pytest.mark.parametrize("name", OWN)
def test_replays_are_steps(name, machine):
    """CASES 14, 33: cursor, random numbers, priorities, running maximum and an annealed beta go on at each replay."""
    eager = WORLDS[name]("cpu")
    due = run(eager, eager.step, CALLS)
    world = WORLDS[name]("cpu")
    step = captured(world, machine)
    found = run(world, step, CALLS)
    assert step.captured
    assert machine.log.count("replay") == CALLS - WARMUP
    for number in range(CALLS):
        assert not differences(found[number], due[number], f"call {number}"), [n for n, _ in world.state()]
    assert len(world.buffer) == CAPACITY
    assert world.buffer.write_count == int(world.buffer.storage.ring.counters[0])


@pytest.mark.parametrize("name", first_quick(["prioritized slices", "uniform"]))
def test_replays_are_steps_through_the_kernels(name, machine):
    """The same on Triton's interpreter."""
    with triton_on_cpu():
        eager = WORLDS[name]("cpu")
        due = run(eager, eager.step, WARMUP + 2)
        world = WORLDS[name]("cpu")
        assert not differences(run(world, captured(world, machine), WARMUP + 2), due)


def host_size(world: World) -> Callable[[TensorDict], Tensor]:
    """Draws among as many rows as the host says that there are."""
    return lambda data: torch.rand(8) * len(world.buffer)


def test_what_the_host_decides_goes_wrong(machine):
    """The recordings are no better than graphs: the tests above can fail."""
    results = []
    for graphs in (False, True):
        world = World("prioritized")
        world.buffer.update_priority(torch.arange(18), torch.arange(1.0, 19.0))
        step = host_size(world)
        if graphs:
            step = captured(world, machine, step)
        results.append([])
        for number in range(6):
            results[-1].append(step(world.data(number)).clone())
            world.buffer.extend(world.data(number))
    eager, replayed = results
    assert not differences(replayed[: WARMUP + 1], eager[: WARMUP + 1])
    assert differences(replayed[WARMUP + 1 :], eager[WARMUP + 1 :])


def test_a_shape_that_depends_on_data_goes_wrong():
    x = torch.tensor([1.0, -1.0, 1.0])
    with recorded() as recorder:
        x[x > 0].sum()
    recorder.replay()
    x.fill_(1.0)
    with pytest.raises(AssertionError, match="another shape"):
        recorder.replay()


@pytest.mark.parametrize(("name", "before"), [("prioritized", 1), ("slices", 0), ("prioritized slices", 2)])
def test_replays_and_other_use_take_turns(name, before, machine):
    """Writes, and draws (of slices of another length, too) between the calls; the first before the capture or after."""
    results = []
    for graphs in (False, True):
        world = WORLDS[name]("cpu")
        step = captured(world, machine) if graphs else world.step
        results.append(run(world, step, WARMUP + before))
        for number in range(WARMUP + before, CALLS):
            # Slices of 4 become slices of 2 and 8 where their number is what is given.
            world.buffer.sampler.slice_len, world.buffer.sampler.num_slices = None, 4
            with pytest.warns(UserWarning, match="batch_size") if number == WARMUP + before else nullcontext():
                other = world.buffer.sample(8 if number % 2 else 32)
            world.buffer.sampler.slice_len, world.buffer.sampler.num_slices = 4, None
            if number % 3 == 0:
                world.buffer.extend(world.data(100 + number))
            results[-1].append(other.clone())
            results[-1] += run(world, step, 1)
    assert not differences(results[1], results[0])


@pytest.mark.parametrize(("interval", "steps"), [(1, 1), (3, 1), (5, 2)])
def test_targets_that_are_copied_at_intervals(interval, steps, machine):
    """The host counts in eager use, the device in a graph; they agree, whichever is used."""
    results = []
    for graphs in (False, True):
        torch.manual_seed(0)
        loss = make_loss(target_entropy=-3.0)
        updater = HardUpdate(loss, value_network_update_interval=interval)

        def step(loss=loss, updater=updater) -> None:
            with torch.no_grad():
                for parameter in loss.parameters():
                    parameter.add_(1)
            for _ in range(steps):
                updater.step()

        taken = capture(step, warmup=1, device="cpu") if graphs else step
        found = []
        for number in range(12):
            (step if number % 4 == 2 else taken)()
            found.append((torch.tensor(updater.counter), [target.clone() for target, _ in loss.target_pairs()]))
        results.append(found)
    assert "replay" in machine.log
    assert not differences(results[1], results[0])


def test_launches_are_chosen_for_a_graph_from_the_warm_up_on(machine):
    """What the capture launches must have been launched before: a capture can't load kernels."""
    chosen = []

    def step() -> Tensor:
        chosen.append(in_graph())
        return torch.zeros(1)

    captured_step = capture(step, warmup=WARMUP, device="cpu")
    for _ in range(WARMUP + 2):
        captured_step()
    assert captured_step.captured
    assert chosen == [True] * (WARMUP + 1)
    assert not in_graph()


def test_the_order_of_streams(machine):
    """The warm-up and the capture are on one side stream, between what is before and what is after."""
    counter = torch.zeros(())
    step = capture(lambda: counter.add_(1), warmup=1, device="cpu")
    for due in (1, 2, 3):
        assert step().item() == due
    aside = ["side waits for main", "main waits for side"]
    assert machine.log == [*aside, aside[0], "capture on side", aside[1], "replay", "replay"]


def test_a_replay_is_a_turn_of_its_buffers(machine):
    """Other threads, and draws that were asked for earlier, are kept in order."""
    world = World("uniform")
    step = captured(world, machine)
    for number in range(WARMUP + 1):
        step(world.data(number))
    owners = []
    replay = step._graph.replay
    step._graph.replay = lambda: (owners.append(world.buffer.operation.held), replay())
    step(world.data(0))
    assert owners == [True]


def test_without_a_gpu_every_call_is_the_step():
    eager = World("prioritized")
    due = run(eager, eager.step, 4)
    world = World("prioritized")
    step = capture(world.step, warmup=1)
    assert not differences(run(world, step, 4), due)
    assert not step.captured
    assert "eagerly on cpu" in repr(step)


@pytest.mark.parametrize("n_steps", [1, 3])
def test_a_replay_reads_the_rows_where_they_are_by_then(machine, n_steps):
    """A move within a device keeps the tables that a graph reads, and what follows its writes."""
    world = World("uniform", storage=COMPUTED, n_steps=n_steps)
    storage = world.buffer.storage
    step = captured(world, machine)
    for number in range(3):
        step(world.data(number))
    target = storage.placement
    rows = moving._Rows(storage, target)
    rows._places = [None] * len(rows._places)
    rows.to(target, lambda n: None)
    before = [part.data_ptr() for part in storage.columns.parts]
    storage.relocated(target)
    machine.memory = storage.columns.parts
    _, batch = step(world.data(7))
    assert [part.data_ptr() for part in storage.columns.parts] == before
    stored = world.buffer[:]["action"]
    assert all((row == stored).all(1).any() for row in batch["action"])


def test_a_compiled_step_can_be_captured(machine, monkeypatch):
    """Losses, gradients and priorities are those of eager steps, and rows are counted."""
    # Compiled code looks whether numbers that lie on the CPU are NaN. On a GPU it doesn't.
    monkeypatch.setattr("gpubuf.graphs.SYNCHRONISING", {})
    torch._dynamo.reset()
    eager = World("prioritized", learn="soft")
    due = run(eager, eager.step, 6)
    world = World("prioritized", learn="soft")

    compiled = torch.compile(world.learning, backend="aot_eager")

    def step(data: TensorDict) -> tuple[Tensor, TensorDict]:
        loss, index, batch = compiled(data)
        world.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        world.optimizer.step()
        world.updater.step()
        return index, batch

    found = run(world, captured(world, machine, step), 6)
    # Compiled arithmetic may round in another order; what is drawn, and so all the rest, is the same.
    for (index, batch, length, _), (due_index, due_batch, due_length, _) in zip(found, due, strict=True):
        assert not differences((index, batch["index"], length), (due_index, due_batch["index"], due_length))
        torch.testing.assert_close(batch["td_error"], due_batch["td_error"])
    for parameter, expected in zip(world.loss.parameters(), eager.loss.parameters(), strict=True):
        torch.testing.assert_close(parameter, expected)
    assert world.buffer.write_count == int(world.buffer.storage.ring.counters[0]) == (6 + 3) * WRITTEN
