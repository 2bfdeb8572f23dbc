"""Every sampler of tests/contracts/samplers.py draws what a plain Python model says, as often as it says."""

from __future__ import annotations

import math
import warnings
import weakref
from collections import Counter
from collections.abc import Callable, Iterator

import pytest
import torch
from tensordict import TensorDict

from gpubuf import capture
from gpubuf.data import ReplayBuffer
from gpubuf.data.storage import placement
from gpubuf.integrations.edits import set_keys
from gpubuf.kernels.rows import FAULTS
from tests.contracts import SLOW_AND_NIGHTLY, each_option, first_quick
from tests.contracts.buffers import COPIES, write
from tests.contracts.samplers import (
    REFUSED,
    STEPS,
    UNITS,
    Model,
    SamplerContract,
    Unit,
    samplers,
)
from tests.support.fake_cuda import fake_cuda, no_blocking_copies
from tests.support.graph_recorder import RecordedCuda
from tests.support.graph_worlds import differences
from tests.support.placements import Machine
from tests.support.sum_tree_checks import bits_of, chi_square, chi_square_bound


@pytest.fixture(autouse=True)
def _chance() -> Iterator[None]:
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=r"sample\(batch_size=")
        yield


def drawn(contract: SamplerContract, buffer: ReplayBuffer, model: Model, n: int = UNITS) -> list[Unit]:
    """The units of a batch, which are such as can be drawn."""
    return model.check(*buffer.sample(n * contract.unit, return_info=True))


# What is drawn, and how often


#: Steps of a buffer that has begun, and of one that has gone round.
BEGUN, WRAPPED = STEPS - 3, STEPS + 8


@pytest.mark.parametrize(
    ("contract", "steps"), each_option(samplers(lambda contract: not contract.epochs), [BEGUN, WRAPPED]), ids=str
)
def test_frequencies(contract, steps):
    """CASES 3, 4, 7, 19, 20, 22: chi-square of the units of a large batch."""
    buffer, model = contract.filled(steps)
    # A length that is not asked for follows from the size of the batch.
    due, n = model.due(), UNITS if contract.form == "number" else 4000
    seen = Counter(unit for _ in range(4000 // n) for unit in drawn(contract, buffer, model, n))
    n = seen.total()
    if contract.form == "stratified":
        assert all(abs(seen[unit] - n * share) <= 2 for unit, share in due.items())
        return
    # Units that are due less than five times count together.
    often = [unit for unit, share in due.items() if n * share >= 5]
    counts = [*(seen[unit] for unit in often), n - sum(seen[unit] for unit in often)]
    shares = [*(due[unit] for unit in often), max(1 - sum(due[unit] for unit in often), 0.0)]
    assert chi_square(counts, shares) < chi_square_bound(len(often))


@pytest.mark.parametrize("contract", samplers(lambda contract: "without" in contract.kind), ids=str)
def test_epochs(contract):
    """Every row, or a slice of every trajectory, once an epoch."""
    buffer, model = contract.filled()
    everything, orders = {model.owner(unit) for unit in model.due()}, set()
    whole = contract.form != "drop last"
    for _ in range(6):
        batches = []
        while not batches or not buffer.sampler.ran_out:
            batches.append([model.owner(unit) for unit in drawn(contract, buffer, model)])
        assert len(batches) == (math.ceil if whole else math.floor)(len(everything) / UNITS)
        order = tuple(owner for batch in batches for owner in batch)
        assert len(set(order)) == len(order)
        assert set(order) == everything if whole else set(order) <= everything
        orders.add(order)
    assert (len(orders) > 1) == (contract.form != "in order" and len(everything) > 1)
    if contract.slices:
        # A write begins another epoch.
        drawn(contract, buffer, model)
        buffer.extend(model.rows_of(1))
        everything, found = {model.owner(unit) for unit in model.due()}, set[int]()
        while not found or not buffer.sampler.ran_out:
            found |= {model.owner(unit) for unit in drawn(contract, buffer, model)}
        assert found == everything


def test_a_batch_larger_than_the_rest_of_an_epoch_begins_the_next_one():
    buffer, _ = SamplerContract("without replacement", "drop last").filled()
    buffer.sample()
    assert len(set(buffer.sample(STEPS - UNITS + 1)["index"].tolist())) == STEPS - UNITS + 1
    with pytest.raises(ValueError, match="drop_last"):
        buffer.sample(STEPS + 1)


# Random operations


class History:
    """Random operations on a buffer and on its model."""

    def __init__(self, contract: SamplerContract, seed: int) -> None:
        self.contract = contract
        # The bitmaps of trajectories have words of 64 steps.
        self.steps = STEPS if seed % 2 == 0 or "fixed" in contract.ends else 70
        self.buffer, self.model = contract.new(steps=self.steps), Model(contract, seed, self.steps)
        self.kept: list[tuple[torch.Tensor, torch.Tensor, list[tuple[int, int]]]] = []

    def new(self, seed: int) -> ReplayBuffer:
        """For a copy."""
        return self.contract.new(seed=seed, steps=self.steps)

    def run(self, n: int) -> None:
        operations = [self.extend, self.extend, self.sample, self.sample, self.empty, self.duplicate, self.overwrite]
        operations += [self.give_priorities, self.return_priorities] if self.contract.prioritized else []
        for _ in range(n):
            self.model.random.choice(operations)()
            self.check()

    def check(self) -> None:
        """What the sampler knows of priorities and trajectories."""
        model, buffer, contract = self.model, self.buffer, self.contract
        if not buffer.initialized:
            return
        assert buffer.storage.unfinished is None
        if contract.prioritized:
            due = [model.q(row.number) for row in model.stored]
            assert buffer.sampler.tree.leaves[: len(due)].tolist() == pytest.approx(due, rel=1e-6)
        if contract.slices:
            found, trajectories = buffer.sampler.trajectories(), model.trajectories()
            assert found.first.tolist() == [t[0].position for t in trajectories]
            assert found.last.tolist() == [t[-1].position for t in trajectories]
            assert found.length.tolist() == [len(t) for t in trajectories]
            if not model.by_id:
                assert found.ended.tolist() == [t[-1].done for t in trajectories]
            index = buffer.sampler.trajectory_index
            sums = index.sums.clone()
            index.rebuild()
            assert torch.equal(index.sums, sums)
        # With a number of slices it is the last batch that says how long they are.
        fixed = contract.kind == "prioritized slices" and contract.form != "number"
        if fixed and (words := buffer.sampler.tree.eligible) is not None:
            eligible = {p for p, bit in enumerate(bits_of(words, len(due))) if bit}
            assert eligible == set(model.can_start.values())

    def extend(self) -> None:
        rows = self.model.rows_of(self.model.random.choice([1, 1, 2, 3, 7, self.steps, self.steps + 5]))
        write(self.buffer, rows, self.model.random)

    def sample(self) -> None:
        model, contract = self.model, self.contract
        can = self.buffer.initialized and self.buffer.can_sample()
        # Of rows it does not look at priorities, all of which may be zero.
        unaware = contract.prioritized and not contract.slices
        if not can or (unaware and not self.possible()):
            assert not self.possible()
            with pytest.raises((RuntimeError, ValueError)):
                self.buffer.sample()
            return
        # What is drawn is checked against what is possible.
        data, info = self.buffer.sample(return_info=True)
        units = model.check(data, info)
        if not contract.epochs:
            assert len(units) == UNITS
        if contract.prioritized:
            rows = [(row.number, row.position) for row in model.rows_at(info["index"])]
            self.kept.append((info["index"], info["index_generation"], rows))

    def possible(self) -> bool:
        enough = UNITS if self.contract.form == "drop last" else 1
        return len(self.model.stored) >= enough and bool(self.model.due())

    def give_priorities(self) -> None:
        if self.model.stored:
            self.model.give_priorities(self.buffer, self.model.random.randint(1, len(self.model.stored)))

    def return_priorities(self) -> None:
        """CASES 11, 12: those of rows that are gone are dropped, and of several for a row the last one counts."""
        if not self.kept:
            return
        index, generation, rows = self.kept.pop(self.model.random.randrange(len(self.kept)))
        priority = torch.tensor([float(self.model.random.randint(0, 5)) for _ in rows])
        self.buffer.update_priority(index, priority, generation=generation)
        stored = {row.number for row in self.model.stored}
        there = [(n, p) for (n, _), p in zip(rows, priority.tolist(), strict=True) if n in stored]
        if there:
            self.model.note_priorities(*map(list, zip(*there, strict=True)))

    def empty(self) -> None:
        if self.buffer.initialized and self.model.random.random() < 0.3:
            self.buffer.empty()
            self.model.empty()

    def duplicate(self) -> None:
        if self.model.stored:
            self.buffer = self.model.random.choice(list(COPIES.values()))(self, self.buffer)

    def overwrite(self) -> None:
        """A flag is changed through the buffer, or past it and announced."""
        if self.contract.ends != "done" or not self.model.stored:
            return
        row = self.model.random.choice(self.model.stored)
        row.done = not row.done
        index = self.model.index(torch.tensor([row.position]))
        flags = {
            "done": row.done,
            "terminated": row.done and row.number % 2 == 0,
            "truncated": row.done and row.number % 2,
        }
        past = self.contract.slices and self.model.random.random() < 0.5
        for name, flag in flags.items():
            if past:
                self.buffer.storage[:]["next", name].view(-1)[row.position] = flag
            else:
                set_keys(self.buffer, {("next", name): torch.tensor([[flag]])}, index, whole=False)
        if past:
            self.buffer.mark_update(index)
            self.model.priority[row.number] = self.model.new_priority


@pytest.mark.parametrize("contract", samplers(), ids=str)
def test_random_histories(contract):
    """CASES 12, 15, 16, 21, 24, 25: writes of any size, wraps, changes from outside, copies, late priorities."""
    for seed in range(2):
        History(contract, seed).run(30)


@pytest.mark.parametrize("seeds", first_quick([range(2, 6), range(6, 20)], marks=SLOW_AND_NIGHTLY), ids=str)
@pytest.mark.parametrize("contract", samplers(), ids=str)
def test_long_histories(contract, seeds):
    for seed in seeds:
        History(contract, seed).run(60)


@pytest.mark.parametrize(
    "contract", each_option(samplers(lambda contract: contract.capturable), marks=SLOW_AND_NIGHTLY), ids=str
)
def test_histories_through_the_kernels(contract, interpreter):
    """The same on Triton's interpreter, where faults are counted instead of raised."""
    history = History(contract, 0)
    history.extend()
    for _ in range(3):
        history.extend()
        history.check()
        if history.possible():
            history.sample()
    assert history.buffer.storage.ring.counters[FAULTS] == 0


# The life of a buffer


@pytest.mark.parametrize(("contract", "how"), each_option(samplers(), COPIES), ids=str)
def test_copies_go_on_with_the_same_batches(contract, how):
    """CASES 10, 18, 55."""
    buffer, model = contract.filled()
    buffer.sample()
    other = COPIES[how](contract, buffer)
    more = model.rows_of(2)
    for _ in range(3):
        assert not differences(buffer.sample(), other.sample())
        buffer.extend(more)
        other.extend(more)


@pytest.mark.parametrize("contract", each_option(samplers(lambda contract: "fixed" not in contract.ends)), ids=str)
def test_a_state_in_a_larger_storage(contract):
    """CASES 10: the rows lie elsewhere, and what belongs to them goes along; an epoch begins anew."""
    buffer, model = contract.filled()
    buffer.sample()
    larger = contract.new(steps=STEPS + 7)
    larger.load_state_dict(buffer.state_dict())
    for _ in range(3 if contract.epochs else 20):
        batch = larger.sample()
        assert set(contract.units(batch)) <= set(model.due())
        if contract.kind in ("prioritized", "prioritized hindsight"):
            due = [model.weight(number) for number in batch["number"].tolist()]
            assert batch["priority_weight"].tolist() == pytest.approx(due, rel=1e-5)
    assert larger.extend(model.rows_of(1)).reshape(-1)[0] == STEPS


@pytest.mark.parametrize("contract", each_option(samplers()), ids=str)
def test_the_same_seed_draws_the_same(contract):
    """Another seed draws others."""
    made = [contract.filled()[0] for _ in range(3)]
    for buffer, seed in zip(made, (5, 5, 6), strict=True):
        buffer.set_rng(torch.Generator().manual_seed(seed))
    batches = [[buffer.sample() for _ in range(3)] for buffer in made]
    assert not differences(batches[0], batches[1])
    if contract.form not in ("in order", "final"):
        numbers = [[batch["number"].tolist() for batch in found] for found in batches]
        assert numbers[2] != numbers[0]


@pytest.mark.parametrize("contract", each_option(samplers()), ids=str)
def test_several_batches_at_once(contract):
    """CASES 42: all of them from the same rows."""
    buffer, model = contract.filled()
    if contract.kind == "slices without replacement" or contract.ragged:
        with pytest.raises(ValueError, match=r"need drop_last=True|set pad_output=True"):
            buffer.sample(batches=2)
        return
    several = buffer.sample(batches=2)
    assert several.shape[0] == 2
    if contract.kind == "without replacement":
        numbers = several["number"].flatten().tolist()
        assert len(set(numbers)) == len(numbers) == 2 * UNITS
    for batch in several:
        units = contract.units(batch)
        assert len(units) == UNITS
        assert set(units) <= set(model.due())


@pytest.mark.parametrize("contract", each_option(samplers()), ids=str)
def test_an_empty_buffer(contract):
    """Nothing to draw is an error, before the first write and after the last row is gone."""
    buffer, model = contract.new(), Model(contract)
    for _ in range(2):
        assert not buffer.can_sample()
        with pytest.raises(RuntimeError, match="Cannot sample from an empty storage"):
            buffer.sample()
        buffer.extend(model.rows_of(STEPS))
        drawn(contract, buffer, model)
        buffer.empty()
        model.empty()


@pytest.mark.parametrize("contract", each_option(samplers()), ids=str)
def test_memory_is_as_planned(contract):
    buffer, _ = contract.filled()
    buffer.sample()
    taken, due = buffer.sampler.memory(), buffer.sampler.index_bytes(buffer.storage.shape, "cpu")
    # The order of an epoch of slices takes 8 bytes a trajectory.
    order = taken.index - due.index if contract.kind == "slices without replacement" else 0
    assert (taken.tree, taken.index) == (due.tree, due.index + order)
    assert 0 <= order <= 8 * STEPS * contract.envs


@pytest.mark.parametrize("contract", each_option(samplers()), ids=str)
def test_a_buffer_that_moves_draws_the_same(contract, monkeypatch):
    """CASES 12: to pinned memory, back, and to another device, where what is not rows is made anew; and freed."""
    Machine().install(monkeypatch, work_on_cpu=True)
    (stays, model), (moves, _) = contract.filled(), contract.filled()
    late = moves.sample(return_info=True)[1]
    stays.sample()
    for place in ("pinned", "cpu", "cpu:0"):
        if place == "cpu:0":
            monkeypatch.setattr(placement, "named", torch.device)
        moves.to(place)
        assert str(moves.storage.device) == place.replace("pinned", "cpu")
        for _ in range(2):
            rows = model.rows_of(2)
            for buffer in (stays, moves):
                buffer.extend(rows)
            batches = [buffer.sample() for buffer in (stays, moves)]
            assert not differences(batches[0], batches[1].to("cpu"))
            if contract.prioritized:
                for buffer, batch in zip((stays, moves), batches, strict=True):
                    buffer.update_tensordict_priority(batch.set("td_error", batch["number"] % 5 + 1.0))
    held = [weakref.ref(tensor) for tensor in moves.storage.columns.parts]
    moves.free()
    assert not [ref for ref in held if ref() is not None]
    assert moves.memory().total == 0
    with pytest.raises(RuntimeError):
        moves.sample()
    fresh, rows = contract.new(device="cpu:0"), Model(contract, 7).rows_of(STEPS - 1)
    for buffer in (moves, fresh):
        buffer.set_rng(torch.Generator().manual_seed(3))
        buffer.extend(rows)
    if contract.prioritized:
        moves.update_priority(late["index"], 50.0, generation=late["index_generation"])
    if contract.form != "processed":
        # Statistics stay, and generations go on.
        batches = [buffer.sample().exclude("index_generation") for buffer in (moves, fresh)]
        assert not differences(*batches)


@pytest.mark.parametrize(("call", "error", "text"), REFUSED)
def test_wrong_arguments(call, error, text):
    with pytest.raises(error, match=text):
        call()


# Graphs, compiled code, and nothing that waits


class Step:
    """A step to be captured or compiled."""

    def __init__(self, contract: SamplerContract) -> None:
        self.contract = contract
        self.buffer, self.model = contract.filled()
        self.buffer.sample()

    def __call__(self, rows: TensorDict) -> TensorDict:
        batch = self.buffer.sample()
        self.buffer.extend(rows)
        if self.contract.prioritized:
            batch["td_error"] = batch["number"] % 5 + 1.0
            self.buffer.update_tensordict_priority(batch)
        return batch

    def run(self, step: Callable[[TensorDict], TensorDict], n: int) -> list[TensorDict]:
        return [step(self.model.rows_of(2)).clone() for _ in range(n)]


@pytest.mark.parametrize("contract", each_option(samplers(lambda contract: contract.capturable)), ids=str)
def test_replays_of_a_captured_step_are_steps(contract, monkeypatch):
    """CASES 33."""
    eager, replayed = Step(contract), Step(contract)
    due = eager.run(eager, 6)
    machine = RecordedCuda().install(monkeypatch)
    machine.memory = replayed.buffer.storage.columns.parts
    step = capture(replayed, warmup=2)
    assert not differences(replayed.run(step, 6), due)
    assert step.captured


@pytest.mark.parametrize("contract", samplers(lambda contract: not contract.capturable), ids=str)
def test_what_the_host_decides_is_not_captured(contract, monkeypatch):
    step = Step(contract)
    RecordedCuda().install(monkeypatch)
    run = capture(step, warmup=1)
    run(step.model.rows_of(2))
    with pytest.raises(Exception, match=r"outside of the step|the host decides|only the GPU knows"):
        run(step.model.rows_of(2))


@pytest.mark.parametrize("contract", each_option(samplers(lambda contract: contract.capturable)), ids=str)
def test_nothing_waits_for_the_gpu(contract):
    """CASES 28: on fake CUDA tensors, where reading a value raises."""
    rows = Model(contract).rows_of(STEPS + 3)
    with fake_cuda():
        data = rows.apply(lambda x: torch.empty(x.shape, dtype=x.dtype, device="cuda"))
        buffer = contract.new(device="cuda")
        buffer.extend(data)
        buffer.sample()
        with no_blocking_copies():
            for _ in range(2):
                buffer.extend(data)
                batch = buffer.sample()
                if contract.prioritized:
                    batch["td_error"] = torch.empty(batch.shape, device="cuda")
                    buffer.update_tensordict_priority(batch)
                    buffer.mark_update(torch.zeros(3, dtype=torch.int64, device="cuda"))
            if contract.slices:
                buffer.sampler.rebuild()
            buffer.empty()
        assert all(leaf.device.type == "cuda" for leaf in batch.values(True, True))
