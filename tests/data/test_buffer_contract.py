"""Every way to make a buffer of tests/contracts/buffers.py does what a plain Python model does."""

from __future__ import annotations

import contextlib
import copy
import functools
import itertools
import pickle
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from gpubuf import ReplayBuffer, capture, plan
from gpubuf.data import LazyMemmapStorage, moving
from gpubuf.data.storage import column, memmap
from gpubuf.integrations.edits import set_keys
from gpubuf.kernels.rows import FAULTS, WRITTEN
from tests.contracts import SLOW_AND_NIGHTLY, each_option, first_quick
from tests.contracts.buffers import (
    BATCH,
    CONTRACTS,
    COPIES,
    STEPS,
    BufferContract,
    Model,
    by_files,
    by_state,
    contracts,
    write,
)
from tests.support.fake_cuda import fake_cuda, no_blocking_copies
from tests.support.graph_recorder import RecordedCuda
from tests.support.graph_worlds import differences
from tests.support.interpreter import triton_on_cpu
from tests.support.interrupted_buffers import check_derived, is_free
from tests.support.interrupts import interrupted
from tests.support.placements import GIB, Machine
from tests.support.threads import together

#: The model's observations are equal by chance, which may look like the rows of another order.
ANOTHER_ORDER = r"rows continue along dimension 1, not 0: transpose|the rows of \d+ environments take turns"


@pytest.fixture(autouse=True)
def _chance(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    torch.manual_seed(0)
    # The model's rows are small.
    monkeypatch.setattr(memmap, "LARGE_ROW", 1)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=ANOTHER_ORDER)
        warnings.filterwarnings("ignore", message="Got conflicting batch_sizes")
        warnings.filterwarnings("ignore", message="batch_size=")
        yield


def batches(buffer: ReplayBuffer, n: int = 3) -> list[Any]:
    """Batches with their info; priorities go back on the way."""
    found = []
    for number in range(n):
        data, info = buffer.sample(return_info=True)
        found.append((data, sorted(info.items(), key=str)))
        if "priority_weight" in info:
            priority = info["index"].reshape(BATCH, -1).sum(-1) % 5 + number + 1.0
            buffer.update_priority(info["index"], priority, generation=info["index_generation"])
    return found


def same(a: Any, b: Any) -> bool:
    """Whether two batches, or lists of them, are equal bit for bit."""
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, str):
        return a == b
    if isinstance(a, TensorDict) and "text" in a.keys():
        return a.get("text").tolist() == b.get("text").tolist() and same(a.exclude("text"), b.exclude("text"))
    if isinstance(a, tuple | list):
        return len(a) == len(b) and all(map(same, a, b))
    return not differences(a, b)


def on_device(contract: BufferContract) -> bool:
    return contract.on_device


def has_columns(contract: BufferContract) -> bool:
    """Whether its rows may be written as one array for each key."""
    return contract.rows == "tensordict" and contract.storage != "list"


class History:
    """Random operations on a buffer and on its model."""

    def __init__(self, contract: BufferContract, seed: int) -> None:
        self.contract = contract
        self.buffer, self.model = contract.new(), Model(contract, seed)
        self.kept: list[tuple[list[int], list[int]]] = []
        self.columns = has_columns(contract)

    def run(self, n: int, reading: Callable[[], AbstractContextManager[Any]] = contextlib.nullcontext) -> None:
        operations = [self.extend, self.extend, self.sample, self.sample, self.add, self.empty, self.duplicate]
        operations += [self.overwrite, self.set_key, self.update_if_present]
        operations += [self.end, self.end] * self.contract.marks
        for _ in range(n):
            self.model.random.choice(operations)()
            with reading():
                self.model.check_rows(self.buffer)
            if self.buffer.initialized:
                assert self.buffer.storage.ring.counters[FAULTS] == 0
                assert self.buffer.write_count == self.model.written_rows

    def extend(self) -> None:
        rows = self.model.write(n := self.model.random.choice([1, 2, 3, 7, STEPS, STEPS + 5]))
        if self.columns and self.model.random.random() < 0.5:
            write(self.buffer, rows, self.model.random)
            return
        index = self.buffer.extend(rows)
        first = max(n - STEPS, 0) * self.model.envs
        gone, left = index[:first], self.model.positions(index[first:])
        assert (gone == -1).all()
        newest = range(self.model.written - min(n, STEPS), self.model.written)
        assert left == [step % STEPS * self.model.envs + env for step in newest for env in range(self.model.envs)]

    def add(self) -> None:
        rows = self.model.write(1)
        if self.columns and self.model.random.random() < 0.5:
            self.buffer.add_columns({key: value.numpy() for key, value in first_row(rows).items(True, True)})
            return
        self.buffer.add(tuple(x[0] for x in rows) if isinstance(rows, tuple) else first_row(rows))

    def sample(self) -> None:
        if not (self.buffer.initialized and self.buffer.can_sample()):
            assert self.contract.slices or not self.model.stored
            with pytest.raises(RuntimeError):
                self.buffer.sample()
            return
        batches = None if self.contract.storage == "list" else self.model.random.choice([None, None, 2])
        data, info = self.buffer.sample(return_info=True, batches=batches)
        if self.contract.prefetch:
            # It may have been chosen before the last write.
            return
        self.model.check_batch(self.buffer, data, info)
        if "index_generation" in info:
            positions = self.model.positions(info["index"])
            self.kept.append((positions, info["index_generation"].reshape(-1).tolist()))

    def empty(self) -> None:
        if self.buffer.initialized and self.model.random.random() < 0.5:
            self.buffer.empty()
            self.model.empty()

    def end(self) -> None:
        if self.model.stored:
            self.model.end(self.buffer, self.model.random.choice([None, *range(self.contract.envs)]))

    def duplicate(self) -> None:
        if self.model.stored:
            self.buffer = self.model.random.choice(list(COPIES.values()))(self.contract, self.buffer)

    def overwrite(self) -> None:
        if self.contract.storage == "list" or not (positions := self.model.chosen(3)):
            return
        index = self.model.index(positions)
        self.buffer[index] = self.model.overwrite(positions)
        self.buffer.mark_update(index)

    def set_key(self) -> None:
        if not self.columns or not (at := self.model.chosen(3)):
            return
        numbers = [self.model.renumber(position) for position in at]
        set_keys(self.buffer, {"number": torch.tensor(numbers).unsqueeze(-1)}, self.model.index(at), whole=False)

    def update_if_present(self) -> None:
        """Only rows that are still those that were sampled are updated."""
        if not self.columns or not self.kept:
            return
        positions, generations = self.kept.pop(self.model.random.randrange(len(self.kept)))
        sampled = dict(zip(positions, generations, strict=True))
        stored = set(self.model.stored)
        numbers = [
            self.model.renumber(at) if at in stored and self.model.generation(at) == generation else -1
            for at, generation in sampled.items()
        ]
        back = TensorDict({"number": torch.tensor(numbers).unsqueeze(-1)}, [len(numbers)])
        self.buffer.update_if_present(
            self.model.index(list(sampled)), back, generation=torch.tensor(list(sampled.values()))
        )


def first_row(rows: Any) -> Any:
    """The first step of a batch."""
    return {key: first_row(x) for key, x in rows.items()} if isinstance(rows, dict) else rows[0]


@pytest.mark.parametrize("contract", contracts(), ids=str)
def test_random_histories(contract):
    """Rows by identity and index, generations, the wrap of the ring, more rows than the capacity, emptying, edits.

    CASES 17, 39, 57: no reward from beyond the cursor, and windows that end where trajectories do.
    """
    History(contract, 0).run(40)


@pytest.mark.parametrize("seed", first_quick(range(1, 20), 4, SLOW_AND_NIGHTLY))
@pytest.mark.parametrize("contract", contracts(), ids=str)
def test_long_histories(contract, seed):
    History(contract, seed).run(60)


@pytest.mark.parametrize("contract", first_quick(contracts(on_device), 2), ids=str)
def test_random_histories_through_the_kernels(contract, interpreter):
    """The same on Triton's interpreter, which takes long: it reads all rows in the end only."""
    history = History(contract, 0)
    history.run(6, functools.partial(triton_on_cpu, False))
    history.model.check_rows(history.buffer)


@pytest.mark.parametrize(("contract", "how"), each_option(contracts(), COPIES), ids=str)
def test_copies_draw_the_same_batches_and_share_nothing(contract, how):
    """CASES 55: rows, priorities, trajectories and the random stream are there."""
    buffer, model = contract.filled()
    batches(buffer)
    other = COPIES[how](contract, buffer)
    assert same(batches(buffer), batches(other))
    rows = buffer[model.index(model.stored)]
    other.extend(Model(contract, 7).write(5))
    assert same(buffer[model.index(model.stored)], rows)
    model.check_rows(buffer)
    buffer.extend(model.write(3))
    model.check_rows(buffer)


def in_memory(contract: BufferContract) -> bool:
    return contract.storage == "tensor"


OTHERS: dict[str, Callable[[BufferContract], BufferContract]] = {
    "larger": lambda contract: replace(contract, steps=STEPS + 7),
    "stored once or not": lambda contract: replace(contract, share_next=not contract.share_next),
    "other steps": lambda contract: replace(contract, steps=STEPS + 1, n_steps=1 if contract.n_steps > 1 else 5),
}


def can_be_other(contract: BufferContract, other: str) -> bool:
    """Whether there is such a buffer."""
    made = OTHERS[other](contract)
    windows = contract.slices or contract.relabel or contract.rows == "tuple"
    return not ((windows and made.n_steps > 1) or (contract.rows == "tuple" and made.share_next))


def emptied(contract: BufferContract, seed: int) -> ReplayBuffer:
    """A buffer that has had other rows."""
    buffer = contract.new(seed=seed)
    buffer.extend(Model(contract, seed).write(3))
    buffer.empty()
    return buffer


@pytest.mark.parametrize(("contract", "other"), each_option(contracts(on_device), OTHERS, suits=can_be_other), ids=str)
def test_other_storages_take_the_state_over(contract, other):
    """CASES 39: of another capacity, with the rows oldest first; with observations stored once; with other windows."""
    made = OTHERS[other](contract)
    buffer, model = contract.filled()
    positions = model.chosen(2)
    buffer[model.index(positions)] = model.overwrite(positions)
    for copied in (by_state, by_files):
        taken = copied(SimpleNamespace(new=functools.partial(emptied, made)), buffer)
        now = model.turned(made) if made.steps > STEPS else copy.deepcopy(model)
        now.contract = made
        for _ in range(3):
            assert taken.write_count == now.written_rows
            now.check_rows(taken)
            now.check_batch(taken, *taken.sample(return_info=True))
            taken.extend(now.write(3))


@pytest.mark.parametrize("contract", contracts(lambda contract: contract.storage == "memmap"), ids=str)
def test_files_are_opened_again(contract):
    """Without a flush, and without a copy: two storages on the same files see each other's rows."""
    buffer, model = contract.filled()
    again = contract.new(storage=LazyMemmapStorage.open(buffer.storage.scratch_dir))
    positions = model.chosen(3)
    again[model.index(positions)] = model.overwrite(positions)
    again.mark_update(model.index(positions))
    model.check_rows(buffer)
    assert again.storage.shape == buffer.storage.shape
    for _ in range(3):
        assert again.write_count == model.written_rows
        model.check_rows(again)
        if not contract.prefetch:
            model.check_batch(again, *again.sample(return_info=True))
        again.extend(model.write(3))
    again.empty()
    assert len(LazyMemmapStorage.open(buffer.storage.scratch_dir)) == 0


def scarce(*arguments: Any) -> Any:
    raise RuntimeError("out of memory")


@pytest.mark.parametrize("contract", each_option(contracts(in_memory)), ids=str)
def test_rows_lie_anywhere_and_move(contract, monkeypatch):
    """CASES 27: in one place, pinned, or in two, batches and edits are those of a buffer that stays."""
    machine = Machine(device=GIB).install(monkeypatch, work_on_cpu=True)
    monkeypatch.setattr(moving, "CHUNK_BYTES", 64)
    contract = replace(contract, steps=140)
    stays, moves, model = contract.new(), contract.new(device="split:60%"), Model(contract)
    for place in ("", "pinned", "cpu", "split:60%", "pinned"):
        if place:
            with monkeypatch.context() as patched:
                patched.setattr(column, "new_record", scarce)
                with pytest.raises(RuntimeError, match="out of memory"):
                    moves.to(place)
            tables = moves.storage.plans.batch.table, moves.parts.reader.table
            assert moves.to(place) is moves
            # Captured graphs read the tables where they are.
            assert tables[0] is moves.storage.plans.batch.table
            assert tables[1] is moves.parts.reader.table
            assert moves.storage.placement.kind == place.partition(":")[0]
            assert bool(machine.pinned) == (place != "cpu")
        rows, edited = model.write(60), model.chosen(5)
        for buffer in (stays, moves):
            buffer.extend(rows)
        if contract.rows == "tensordict":
            generation = torch.tensor([model.generation(position) for position in edited])
            numbers = torch.tensor([model.renumber(position) for position in edited]).unsqueeze(-1)
            back = TensorDict({"number": numbers}, [len(edited)])
            for buffer in (stays, moves):
                buffer.update_if_present(model.index(edited), back, generation=generation)
        model.check_rows(moves)
        assert same(batches(moves), batches(stays))
    moves.free()
    assert moves.memory().total == 0
    moves.extend(Model(contract, 4).write(3))
    assert len(moves) == 3 * model.envs


def planned(contract: BufferContract) -> bool:
    return in_memory(contract) and has_columns(contract) and not contract.relabel


@pytest.mark.parametrize(
    ("contract", "kind"), each_option(contracts(planned), ["cpu", "cuda", "pinned", "split"]), ids=str
)
def test_memory_is_as_planned(contract, kind, monkeypatch):
    """Byte for byte, wherever it is: rows, tree, index and counters."""
    contract = replace(contract, steps=150, process=False)
    machine = Machine(device=20_000 if kind == "split" else GIB).install(monkeypatch)
    rows, sampler = Model(contract).write(150), contract.new().sampler
    made = plan(
        rows.reshape(-1),
        contract.capacity,
        sampler=lambda: sampler,
        envs=max(contract.envs, 1),
        n_steps=contract.n_steps,
        **contract.storage_options,
    )
    with fake_cuda() if kind != "cpu" else contextlib.nullcontext():
        buffer = contract.new(device=kind)
        assert buffer.memory().total == 0
        if kind != "cpu":
            rows = rows.apply(lambda x: torch.empty(x.shape, dtype=x.dtype, device="cuda"), device="cuda")
        buffer.extend(rows)
        buffer.sample()
        taken = buffer.memory()
    due = made.fit(kind)
    assert (taken.rows, taken.counters) == (made.rows, made.counters)
    assert (taken.tree, taken.index) == (due.index.tree, due.index.index)
    assert taken.total == due.device_bytes + due.host_bytes
    assert buffer.storage.nbytes == made.rows
    if kind != "cpu":
        assert due.host_bytes == sum(machine.ever_pinned)


class Step:
    """A step to be captured or compiled: what it draws, writes and changes."""

    def __init__(self, contract: BufferContract, steps: int = STEPS + 5) -> None:
        self.contract = contract
        self.buffer, self.model = contract.filled(steps)
        self.buffer.sampler.random_state("cpu")

    def __call__(self, rows: Any) -> Any:
        batch, info = self.buffer.sample(return_info=True)
        index = self.buffer.extend(rows)
        if self.contract.prioritized:
            priority = info["index"].reshape(BATCH, -1).sum(-1) + 1.0
            self.buffer.update_priority(info["index"], priority, generation=info["index_generation"])
        if "index_generation" in info and self.contract.rows == "tensordict":
            patch = TensorDict({"number": batch["number"] + 1}, batch.shape)
            self.buffer.update_if_present(info["index"], patch, generation=info["index_generation"])
        return batch, index, info["index"]

    def run(self, step: Callable[[Any], Any], n: int) -> list[Any]:
        return [
            (copy.deepcopy(step(self.model.write(3))), copy.deepcopy(self.buffer[self.model.index(self.model.stored)]))
            for _ in range(n)
        ]


def captured(contract: BufferContract) -> bool:
    return contract.on_device and contract.sampler != "without replacement"


@pytest.mark.parametrize("contract", contracts(captured), ids=str)
def test_replays_of_a_captured_step_are_steps(contract, monkeypatch):
    """CASES 14, 33: cursor, random numbers and priorities go on at each replay."""
    eager, replayed = Step(contract), Step(contract)
    due = eager.run(eager, 8)
    machine = RecordedCuda().install(monkeypatch)
    sharing = replayed.buffer.storage.sharing
    machine.memory = [*replayed.buffer.storage.columns.parts, *(sharing.sides if sharing is not None else [])]
    step = capture(replayed, warmup=2)
    assert same(replayed.run(step, 8), due)
    assert step.captured
    assert replayed.buffer.write_count == eager.buffer.write_count


@pytest.mark.parametrize("contract", each_option(contracts(on_device)), ids=str)
def test_nothing_waits_for_the_gpu(contract):
    """CASES 28: on fake CUDA tensors, where reading a value raises."""
    contract = replace(contract, process=False)
    model = Model(contract)
    rows = [model.write(n) for n in (3, STEPS + 5, 3)]

    def to_cuda(data: Any) -> Any:
        if isinstance(data, dict):
            return {key: to_cuda(value) for key, value in data.items()}
        if isinstance(data, tuple):
            return tuple(map(to_cuda, data))
        return data.apply(empty, device="cuda") if hasattr(data, "apply") else empty(data)

    def empty(x: torch.Tensor) -> torch.Tensor:
        return torch.empty(x.shape, dtype=x.dtype, device="cuda")

    with fake_cuda(), no_blocking_copies():
        buffer = contract.new(device="cuda")
        for data in rows:
            given = to_cuda(data)
            if contract.rows == "tensordict":
                given["td_error"] = torch.empty(*given.shape, 1, device="cuda")
            index = buffer.extend(given)
            assert index.device.type == "cuda"
            if contract.marks:
                buffer.end_trajectories()
            batch, info = buffer.sample(return_info=True)
            assert info["index"].device.type == "cuda"
            leaves = batch.values(True, True) if hasattr(batch, "batch_size") else [info["index"]]
            assert all(leaf.device.type == "cuda" for leaf in leaves)
            if contract.prioritized:
                buffer.update_priority(info["index"], torch.empty(BATCH, device="cuda"))
                buffer.mark_update(info["index"])
            if has_columns(contract):
                buffer.extend_columns(dict(given.items(True, True)))
                buffer.add_columns([given[key][0] for key in buffer.column_keys])
                number = torch.empty(len(index), 1, dtype=torch.int64, device="cuda")
                back = TensorDict({"number": number}, [len(index)])
                buffer.update_if_present(index, back, generation=number[:, 0])
        buffer.empty()


#: And at how many places each is interrupted.
OPERATIONS: dict[str, tuple[Callable[[ReplayBuffer, Any], Any], int]] = {
    "extend": (lambda buffer, rows: buffer.extend(rows), 31),
    "sample": (lambda buffer, rows: buffer.sample(), 31),
    "empty": (lambda buffer, rows: buffer.empty(), 7),
    "columns": (lambda buffer, rows: buffer.extend_columns(rows), 61),
    "overwrite": (lambda buffer, rows: buffer.__setitem__(*rows), 29),
    "load": (lambda buffer, rows: buffer.load_state_dict(buffer.state_dict()), 97),
}


def can_be_interrupted(contract: BufferContract) -> bool:
    return in_memory(contract)


def can_run(contract: BufferContract, operation: str) -> bool:
    return operation != "columns" or has_columns(contract)


@pytest.mark.parametrize("pace", first_quick([4, 1], marks=((), pytest.mark.nightly)))
@pytest.mark.parametrize(
    ("contract", "operation"), each_option(contracts(can_be_interrupted), OPERATIONS, suits=can_run), ids=str
)
def test_an_interrupt_leaves_all_or_nothing(contract, operation, pace):
    """CASES 54: of a write, and the buffer goes on. Each contract is interrupted at places of its own."""
    run, stride = OPERATIONS[operation]
    stride *= pace
    buffer, before = contract.filled()
    origin, done = pickle.dumps(buffer), copy.deepcopy(before)
    rows: Any = done.write(5) if operation in ("extend", "columns") else None
    if operation == "columns":
        rows = {key: value.numpy() for key, value in rows.items(True, True)}
    if operation == "empty":
        done.empty()
    elif operation == "overwrite":
        positions = done.chosen(2)
        rows = done.index(positions), done.overwrite(positions)
    written = buffer.write_count
    # Numba does not survive an interrupt while it compiles.
    run(buffer, rows)
    models = pickle.dumps(before), pickle.dumps(done)

    def rows_are_written(buffer: ReplayBuffer) -> bool:
        return int(buffer.storage.ring.counters[WRITTEN]) != written

    def goes_on(place: int, since: Callable[[ReplayBuffer], bool] | None = None) -> bool:
        """Whether there is such a place."""
        buffer = pickle.loads(origin)
        if not interrupted(
            functools.partial(run, buffer, rows), place, since=since and functools.partial(since, buffer)
        ):
            return False
        assert is_free(buffer)
        if operation == "load" and not len(buffer):
            buffer.extend(Model(contract, 5).write(STEPS))
            assert len(buffer) == contract.capacity
            buffer.sample()
            check_derived(buffer.sampler)
            return True
        if operation == "overwrite":
            numbers = contract.read(buffer[rows[0]])["number"].reshape(-1).tolist()
            outcome = done if numbers == [done.at(position).number for position in positions] else before
        else:
            outcome = before if (len(buffer), buffer.write_count) == (len(before.stored), before.written_rows) else done
        now = pickle.loads(models[outcome is done])
        check_derived(buffer.sampler)
        now.check_rows(buffer)
        buffer.extend(now.write(STEPS))
        now.check_rows(buffer)
        now.check_batch(buffer, *buffer.sample(return_info=True))
        return True

    places = itertools.count(CONTRACTS.index(contract) * stride // len(CONTRACTS), stride)
    assert next(place for place in places if not goes_on(place)) > stride
    if operation in ("extend", "columns"):
        # Here the kernels have written rows of which the host knows nothing.
        assert all(goes_on(place, rows_are_written) for place in range(4))


def mistakes(contract: BufferContract, model: Model) -> dict[str, tuple[Any, ...]]:
    """Calls that are refused, the errors, and what some of them say."""
    rows = Model(contract, 5).write(3)
    found: dict[str, tuple[Any, ...]] = {
        "no batch": (lambda buffer: buffer.sample(0), ValueError),
        "an index beyond": (lambda buffer: buffer[torch.tensor([10**6])], IndexError),
    }
    if contract.storage == "list":
        return found
    if contract.rows == "tensordict":
        found |= {
            "a missing key": (lambda buffer: buffer.extend(rows.exclude("number")), ValueError),
            "an unknown key": (
                lambda buffer: buffer.extend(rows.clone().set(("next", "other"), rows["number"])),
                ValueError,
            ),
            "a missing key below": (lambda buffer: buffer.extend(rows.exclude(("next", "reward"))), ValueError),
            "a tensor for a TensorDict": (
                lambda buffer: buffer.extend(rows.clone().set("next", rows["number"])),
                ValueError,
            ),
            "another dtype": (
                lambda buffer: buffer.extend(rows.clone().set("number", rows["number"] + 0.5)),
                ValueError,
                r"rows of shape \(1,\) and torch.int64, the batch .* and torch.float32",
            ),
            "another shape": (
                lambda buffer: buffer.extend(rows.clone().set("number", rows["number"].expand(*rows.shape, 2))),
                ValueError,
                r"rows of shape \(1,\) .* the batch rows of shape \(2,\)",
            ),
            "no such key": (lambda buffer: set_keys(buffer, {"other": 1}, slice(None), whole=True), KeyError),
            "a value too wide": (
                lambda buffer: set_keys(buffer, {"number": torch.zeros(2, 5)}, [0, 1], whole=False),
                ValueError,
            ),
        }
    if not contract.envs:
        found["a write beyond"] = (lambda buffer: buffer.__setitem__(torch.tensor([99, 0, 1]), rows), IndexError)
    return found


@pytest.mark.parametrize("contract", contracts(), ids=str)
def test_a_refused_call_changes_nothing(contract):
    """Also where writes of that size are prepared."""
    buffer, model = contract.filled()
    for _ in range(3):
        buffer.extend(model.write(3))
    state = pickle.dumps(buffer)
    for what, (call, error, *text) in mistakes(contract, model).items():
        with pytest.raises(error, match=next(iter(text), None)):
            call(buffer)
        model.check_rows(buffer)
        assert buffer.write_count == model.written_rows, what
    assert same(batches(buffer), batches(pickle.loads(state)))


@pytest.mark.parametrize("contract", contracts(), ids=str)
def test_threads_see_whole_rows(contract):
    """CASES 32: one writes, one draws, one copies."""
    buffer, model = contract.filled()

    def write() -> None:
        for _ in range(15):
            buffer.extend(model.write(2))

    def read() -> None:
        for _ in range(15):
            batch = contract.read(buffer.sample())
            assert ((batch["next", "done"] | ~batch["next", "terminated"]) == 1).all()

    def save() -> None:
        for _ in range(4):
            state = buffer.operation.run(lambda: copy.deepcopy(buffer.state_dict()))
            contract.new().load_state_dict(state)

    together(write, read, save)
    model.check_rows(buffer)
    assert buffer.write_count == model.written_rows
