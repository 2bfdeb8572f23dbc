"""The batch ahead within captured steps: a branch of the graph gathers it, and it is the one that an eager loop has."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from torch import Tensor

from gpubuf import CaptureError, LazyTensorStorage, TensorDictPrioritizedReplayBuffer, capture
from gpubuf.data import prefetch, recording
from gpubuf.data.batches import Batch
from gpubuf.data.prefetch import Prefetched, PrefetchedInGraphs
from tests.support import learners
from tests.support.graph_recorder import RecordedCuda
from tests.support.graph_worlds import BATCH, SAMPLERS, InBranches, Pinned, differences, run
from tests.support.placements import Machine

WARMUP, CALLS = 2, 12
#: Batches of slices of any length are refused in a graph, whether there is a batch ahead or not.
each_sampler = pytest.mark.parametrize("sampler", SAMPLERS)


@pytest.fixture(autouse=True)
def host(monkeypatch: pytest.MonkeyPatch) -> Machine:
    """The CPU does the GPU's work for pinned rows."""
    return Machine().install(monkeypatch, work_on_cpu=True)


@pytest.fixture
def rows_on_gpu(host: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    """And for rows that it would have in its own memory."""
    monkeypatch.setattr(prefetch, "GRAPH_DEVICES", frozenset({"cpu"}))


def captured(world: Pinned, machine: RecordedCuda) -> Any:
    machine.memory = world.buffer.storage.columns.parts
    return capture(world.step, warmup=WARMUP)


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("draws", [1, 2])
@each_sampler
def test_replays_are_eager_steps(sampler, draws, late, machine):
    """With the same prefetch, however early or late the branch runs: the same batches, priorities, random numbers."""
    machine.late = late
    eager = Pinned(sampler, draws)
    due = run(eager, eager.step, CALLS)
    world = Pinned(sampler, draws)
    step = captured(world, machine)
    found = run(world, step, CALLS)
    assert step.captured
    assert isinstance(world.buffer.parts.batches, Prefetched)
    for number in range(CALLS):
        assert not differences(found[number], due[number], f"call {number}"), [n for n, _ in world.state()]


def test_the_branch_begins_with_the_step_and_ends_before_what_comes_next(machine):
    """The step waits for it where it uses the buffer again, and at its end at the latest."""
    world = Pinned("uniform")
    machine.memory = world.buffer.storage.columns.parts
    between: list[int] = []

    def step() -> Tensor:
        batch = world.buffer.sample()
        between.append(len(machine.log))
        return batch["observation"] * 2

    run_step = capture(step, warmup=1)
    for _ in range(3):
        run_step()
    begin = next(i for i, entry in enumerate(machine.log) if entry.startswith("capture"))
    assert machine.log[begin + 1 : between[1]] == ["side waits for side"] * 2
    assert machine.log[between[1]] == "side waits for side"


def written(world: Pinned) -> None:
    world.buffer.extend(world.data(50))


def emptied(world: Pinned) -> None:
    world.buffer.empty()
    for number in range(60, 64):
        world.buffer.extend(world.data(number))


def another_size(world: Pinned) -> None:
    world.buffer.parts.batches.part(BATCH // 2)


def eager_steps(world: Pinned) -> None:
    for number in range(70, 73):
        Pinned.step(world, world.data(number))


def moved(world: Pinned) -> None:
    world.buffer.to("cpu")
    world.buffer.to("pinned")


BETWEEN: dict[str, Callable[[Pinned], object]] = {
    "a write": written,
    "empty": emptied,
    "a draw of another size": another_size,
    "eager steps": eager_steps,
    "state_dict": lambda world: world.buffer.state_dict(),
    "load_state_dict": lambda world: world.buffer.load_state_dict(copy.deepcopy(world.buffer.state_dict())),
    "set_rng": lambda world: world.buffer.set_rng(torch.Generator().manual_seed(5)),
}


@pytest.mark.parametrize("what", BETWEEN)
@pytest.mark.parametrize("sampler", ["uniform", "prioritized", "slices"])
def test_what_comes_between_replays(sampler, what, machine):
    """It throws the batch ahead away, and takes its draw back, as it does in an eager loop; or it leaves it alone."""
    machine.late = True
    results = []
    for graphs in (False, True):
        world = Pinned(sampler)
        step = captured(world, machine) if graphs else world.step

        def take(data: TensorDict, step: Any = step) -> Any:
            try:
                return step(data)
            except CaptureError:
                # Another random stream or index, as without a batch ahead.
                step.reset()
                return step(data)

        found = []
        for _ in range(4):
            found += run(world, take, 4)
            BETWEEN[what](world)
        results.append(found)
    assert step.captured
    assert not differences(results[1], results[0])


def test_saved_and_resumed_runs_agree(machine):
    """A run that replays graphs is saved between two steps; the other one is resumed from that, and is eager."""
    world, other = Pinned("prioritized"), Pinned("prioritized")
    step = captured(world, machine)
    run(world, step, 7)
    other.buffer.load_state_dict(copy.deepcopy(world.buffer.state_dict()), end_trajectories=False)
    other.beta.copy_(world.beta)
    assert step.captured
    assert not differences(run(world, step, 5), run(other, other.step, 5))


def test_a_learner(machine):
    """Its updates of both kinds have graphs of their own, and share the batch ahead."""
    states = []
    for graphs in (False, True):
        world = learners.World(capture=graphs)
        storage = LazyTensorStorage(learners.ROWS, device="pinned")
        options: dict[str, Any] = {"alpha": 0.6, "beta": 0.4, "batch_size": learners.BATCH, "prefetch": 1}
        world.learner.buffer = world.buffer = TensorDictPrioritizedReplayBuffer(storage=storage, **options)
        world.buffer.extend(learners.transitions())
        torch.manual_seed(2)
        losses = world.run(14, policy_every=2)
        states.append((world.state(), losses))
    assert world.learner.captured
    (due, losses), (found, replayed) = states
    assert replayed == losses
    assert not [name for name in due if not torch.equal(found[name], due[name])]


def test_graphs_take_turns(machine, monkeypatch):
    """Two captured steps of one buffer: each takes the batch that the other one has left, from the memory of both."""
    eager = Pinned("prioritized")
    due = run(eager, eager.step, 18)
    world = Pinned("prioritized")
    steps, found, taken = [captured(world, machine) for _ in range(2)], [], []
    take = Prefetched._taken
    monkeypatch.setattr(Prefetched, "_taken", lambda self, *request: (taken.append(request), take(self, *request))[1])
    for number in range(18):
        data = world.data(number)
        index, batch = steps[number // 2 % 2](data)
        state = [value for _, value in world.state()]
        found.append((index.clone(), batch.clone(), torch.tensor(len(world.buffer)), state))
    assert all(step.captured for step in steps)
    assert not differences(found, due)
    # By the warm-up of both, and before the first replay.
    assert len(taken) == 2 * WARMUP + 1


def test_a_graph_does_not_outlive_the_batch_ahead(machine):
    """Rows that moved to where none is made: the buffer can't take back what the graph draws."""
    world = Pinned("uniform")
    step = captured(world, machine)
    run(world, step, 4)
    world.buffer.to("cpu")
    with pytest.raises(CaptureError, match="moved, freed or given other parts"):
        step(world.data(0))
    step.reset()
    run(world, step, 4)
    world.buffer.to("pinned")
    step.reset()
    run(world, step, 4)
    assert step.captured


def test_a_batch_of_a_graph_is_not_written_over(machine):
    """CASES 85: an eager draw gets what a replay has left, and the next replay leaves that alone."""
    world = Pinned("uniform")
    step = captured(world, machine)
    run(world, step, 4)
    batch = world.buffer.sample()
    before = batch.clone()
    run(world, step, 3)
    assert not differences(batch, before)


REFUSED: dict[str, Callable[[Pinned], object]] = {
    "the buffer was used before": lambda world: (world.buffer.mark_update(0), world.buffer.sample()),
    "another size": lambda world: world.buffer.sample(BATCH // 2),
    "with and without info": lambda world: (world.buffer.sample(), world.buffer.sample(include_info=False)),
}


@pytest.mark.filterwarnings("ignore:.*overrides the constructor's")
@pytest.mark.parametrize("what", REFUSED)
def test_draws_that_a_graph_can_not_have(what, machine):
    """It is said, and the batch ahead is as it was."""
    batches = []
    for graphs in (False, True):
        world = Pinned("uniform")

        def work(world: Pinned = world) -> None:
            REFUSED[what](world)

        step = capture(work, warmup=1, device="cpu")
        step()
        if graphs:
            with pytest.raises(CaptureError, match="with prefetch, draw"):
                step()
        batches.append(world.buffer.sample())
    assert not differences(*batches)


def test_a_failed_step_ends_its_branch(machine):
    """The error is that of the step: a capture with a branch that is not joined would end with one of its own."""
    world, failing = Pinned("uniform"), [False]

    def work() -> Tensor:
        batch = world.buffer.sample()
        if failing[0]:
            raise ValueError("no luck")
        return batch["observation"]

    step = capture(work, warmup=1)
    step()
    failing[0] = True
    with pytest.raises(ValueError, match="no luck"):
        step()
    failing[0] = False
    step()
    assert step.captured


def test_a_branch_that_is_not_waited_for_is_found(machine, monkeypatch):
    """The machine can tell: without the wait the tests above fail."""
    monkeypatch.setattr(recording.Recording, "join", lambda self, *operations: None)
    world = Pinned("uniform")
    step = captured(world, machine)
    with pytest.raises(RuntimeError, match="unjoined work"):
        run(world, step, WARMUP + 1)


# Rows on a GPU


def worlds(sampler: str, draws: int = 1) -> tuple[Pinned, InBranches]:
    """Of a graph, and of eager calls that do what replays do."""
    found = Pinned(sampler, draws, rows=None), InBranches(sampler, draws)
    for each in found:
        each.buffer.set_rng(torch.Generator().manual_seed(0))
    return found


def replayed(
    sampler: str, machine: RecordedCuda, draws: int = 1, what: Callable[[Pinned], object] | None = None
) -> Any:
    """Differences of a step in a graph from eager calls that do what replays do, call by call; and its world.

    ``what`` comes after every fourth call.
    """
    world, model = worlds(sampler, draws)
    step = captured(world, machine)
    wrong = []
    for number in range(16):
        try:
            found = run(world, lambda data: step(data), 1)
        except CaptureError:
            step.reset()
            found = run(world, lambda data: step(data), 1)
        model.replays = step.captured
        wrong += differences(found, run(model, model.step, 1), f"call {number}")
        model.replays = False
        if what is not None and number % 4 == 3:
            for each in (world, model):
                what(each)
            if what in THROWN_AWAY:
                model.ahead = None
    assert step.captured
    assert type(world.buffer.parts.batches) is PrefetchedInGraphs
    return wrong, world


THROWN_AWAY = [emptied, *(BETWEEN[name] for name in ("state_dict", "load_state_dict", "set_rng"))]


@pytest.mark.usefixtures("rows_on_gpu")
@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("draws", [1, 2])
@each_sampler
def test_with_rows_on_a_gpu_replays_have_a_batch_ahead(sampler, draws, late, machine):
    """However early or late the branch runs: it draws after the priorities of the replay before, and before its own."""
    machine.late = late
    assert not replayed(sampler, machine, draws)[0]


@pytest.mark.usefixtures("rows_on_gpu")
@pytest.mark.parametrize("what", BETWEEN)
@pytest.mark.parametrize("sampler", ["uniform", "prioritized", "slices"])
def test_what_comes_between_replays_with_rows_on_a_gpu(sampler, what, machine):
    """Eager draws leave the batch ahead alone. What forgets or saves rows throws it away."""
    machine.late = True
    wrong, world = replayed(sampler, machine, what=BETWEEN[what])
    assert not wrong
    assert world.buffer.parts.batches.ahead == int(BETWEEN[what] not in THROWN_AWAY)


@pytest.mark.usefixtures("rows_on_gpu")
def test_a_run_with_rows_on_a_gpu_is_saved_and_resumed(machine):
    """What is ahead is not saved: the run that is resumed draws as the one that goes on."""
    _, world = replayed("prioritized", machine)
    step, model = captured(world, machine), InBranches("prioritized")
    run(world, step, 7)
    model.buffer.load_state_dict(copy.deepcopy(world.buffer.state_dict()), end_trajectories=False)
    model.beta.copy_(world.beta)
    model.replays = step.captured
    assert model.replays
    assert not differences(run(world, step, 5), run(model, model.step, 5))


@pytest.mark.usefixtures("rows_on_gpu")
def test_priorities_that_do_not_wait_for_the_branch_are_found(machine, monkeypatch):
    """The machine can tell: the branch then draws by the priorities that its own replay has set."""
    machine.late, join = True, recording.Recording.join
    monkeypatch.setattr(recording.Recording, "join", lambda self, *one: None if one else join(self))
    assert replayed("prioritized", machine)[0]


@pytest.mark.parametrize("other", [torch.zeros(4, 3, dtype=torch.int32), torch.zeros(4, 3).T, torch.zeros(5, 3)])
def test_graphs_share_memory_for_batches_that_are_alike(other):
    """Of another dtype, order or size it is memory of its own: a graph would take numbers for what they are not."""
    line = prefetch._Line()

    def kept(rows: Tensor) -> Tensor:
        batch, memory, parts = line.keep(Batch({"rows": rows}, {"index": torch.arange(len(rows))}, False))
        assert batch.data["rows"].untyped_storage()._cdata == memory.untyped_storage()._cdata
        assert [each.nbytes for each in parts] == [rows.nbytes, 8 * len(rows)]
        return memory

    first = kept(torch.zeros(4, 3))
    assert kept(torch.ones(4, 3)) is first
    assert kept(other) is not first


@pytest.mark.usefixtures("rows_on_gpu")
@pytest.mark.parametrize("rows", ["pinned", None])
def test_a_replay_begins_with_one_copy_of_the_batch_ahead(rows, machine):
    """Of all that it lies in, which are rows, positions, weights and generations."""
    world = Pinned("prioritized", rows=rows)
    machine.memory = world.buffer.storage.columns.parts
    found: list[str] = []

    def step() -> Tensor:
        batch = world.buffer.sample()
        if machine.recorder is not None:
            main = [each for each in machine.recorder.calls if each.stream is machine._current and each.results]
            found.extend(each.operation.name() for each in main if each.results)
        return batch["observation"] * 2

    run_step = capture(step, warmup=1)
    for _ in range(2):
        run_step()
    assert found == ["aten::clone"]


OTHERS: dict[str, Callable[[Pinned], TensorDict]] = {
    "after another call": lambda world: (world.buffer.mark_update(0), world.buffer.sample())[1],
    "of another size": lambda world: world.buffer.sample(BATCH // 2),
    "without info after one with it": lambda world: (world.draw(), world.buffer.sample(include_info=False))[1],
}


@pytest.mark.usefixtures("rows_on_gpu")
@pytest.mark.filterwarnings("ignore:.*overrides the constructor's")
@pytest.mark.parametrize("what", OTHERS)
def test_other_draws_of_rows_on_a_gpu_are_made_when_they_are_asked_for(what, machine):
    """In a graph too, where such draws of rows in pinned memory are refused."""
    world, model = worlds("uniform")
    machine.memory = world.buffer.storage.columns.parts
    step = capture(lambda: OTHERS[what](world), warmup=1)
    for _ in range(5):
        found = step()
        model.replays = step.captured
        assert not differences(found, OTHERS[what](model))
    assert step.captured


@pytest.mark.usefixtures("rows_on_gpu")
def test_a_learner_with_rows_on_a_gpu(machine):
    """It learns from the batches of an eager loop over pinned rows that begins to prefetch where graphs begin."""
    states = []
    for place in ("pinned", "cpu"):
        world = learners.World(capture=place == "cpu")
        storage = LazyTensorStorage(learners.ROWS, device=place)
        options: dict[str, Any] = {"alpha": 0.6, "beta": 0.4, "batch_size": learners.BATCH, "prefetch": 1}
        world.learner.buffer = world.buffer = TensorDictPrioritizedReplayBuffer(storage=storage, **options)
        world.buffer.extend(learners.transitions())
        torch.manual_seed(2)
        losses = []
        for number in range(14):
            if number <= 6:
                # Three calls of each kind are eager, and the first replay finds no batch.
                world.buffer.parts.batches.discard()
            losses.append({name: float(each) for name, each in world.learner(policy=number % 2 == 1).items()})
        states.append((world.state(), losses))
    assert world.learner.captured
    (due, losses), (found, replayed) = states
    assert replayed == losses
    assert not [name for name in due if not torch.equal(found[name], due[name])]
