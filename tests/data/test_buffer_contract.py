"""Every way to make a buffer of tests/contracts/buffers.py does what a plain Python model does."""

from __future__ import annotations

import copy
import functools
import itertools
import pickle
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from gpubuf import ReplayBuffer, capture
from gpubuf.kernels.rows import FAULTS
from tests.contracts.buffers import BATCH, STEPS, BufferContract, Model, by_files, by_state, contracts
from tests.support.fake_cuda import fake_cuda, no_blocking_copies
from tests.support.graph_recorder import RecordedCuda
from tests.support.graph_worlds import differences
from tests.support.interrupted_buffers import is_free
from tests.support.interrupts import interrupted
from tests.support.threads import together

COPIES: dict[str, Callable[[BufferContract, ReplayBuffer], ReplayBuffer]] = {
    "state_dict": by_state,
    "files": by_files,
    "pickle": lambda contract, buffer: pickle.loads(pickle.dumps(buffer)),
    "deepcopy": lambda contract, buffer: copy.deepcopy(buffer),
}
#: The model's observations are equal by chance, which may look like the rows of another order.
ANOTHER_ORDER = r"rows continue along dimension 1, not 0: transpose|the rows of \d+ environments take turns"


@pytest.fixture(autouse=True)
def _chance() -> Iterator[None]:
    torch.manual_seed(0)
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
    if isinstance(a, tuple | list):
        return len(a) == len(b) and all(map(same, a, b))
    return not differences(a, b)


class History:
    """Random operations on a buffer and on its model."""

    def __init__(self, contract: BufferContract, seed: int) -> None:
        self.contract = contract
        self.buffer, self.model = contract.new(), Model(contract, seed)
        self.kept: list[tuple[list[int], list[int]]] = []

    def run(self, n: int) -> None:
        operations = [self.extend, self.extend, self.sample, self.sample, self.add, self.empty, self.duplicate]
        # A prefetched batch holds the rows of another moment: only its copies are checked.
        operations += [self.overwrite, self.set_key, self.update_if_present]
        for _ in range(n):
            self.model.random.choice(operations)()
            self.model.check_rows(self.buffer)
            assert self.buffer.storage.ring[FAULTS] == 0 if self.buffer.initialized else True

    def extend(self) -> None:
        index = self.buffer.extend(self.model.write(n := self.model.random.choice([1, 2, 3, 7, STEPS, STEPS + 5])))
        first = max(n - STEPS, 0) * self.model.envs
        gone, left = index[:first], self.model.positions(index[first:])
        assert (gone == -1).all()
        newest = range(self.model.written - min(n, STEPS), self.model.written)
        assert left == [step % STEPS * self.model.envs + env for step in newest for env in range(self.model.envs)]

    def add(self) -> None:
        rows = self.model.write(1)
        self.buffer.add(tuple(x[0] for x in rows) if isinstance(rows, tuple) else first_row(rows))

    def sample(self) -> None:
        if not (self.buffer.initialized and self.buffer.can_sample()):
            assert self.contract.slices or not self.model.stored
            with pytest.raises(RuntimeError):
                self.buffer.sample()
            return
        data, info = self.buffer.sample(return_info=True)
        if self.contract.prefetch:
            return
        self.model.check_batch(self.buffer, data, info)
        if "index_generation" in info:
            positions = self.model.positions(info["index"])
            self.kept.append((positions, info["index_generation"].reshape(-1).tolist()))

    def empty(self) -> None:
        if self.buffer.initialized and self.model.random.random() < 0.5:
            self.buffer.empty()
            self.model.empty()

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
        if self.contract.rows != "tensordict" or self.contract.storage == "list" or not (at := self.model.chosen(3)):
            return
        numbers = [self.model.renumber(position) for position in at]
        self.buffer.set_at_("number", torch.tensor(numbers).unsqueeze(-1), self.model.index(at))

    def update_if_present(self) -> None:
        """Only rows that are still those that were sampled are updated."""
        if self.contract.rows != "tensordict" or self.contract.storage == "list" or not self.kept:
            return
        positions, generations = self.kept.pop(self.model.random.randrange(len(self.kept)))
        sampled = dict(zip(positions, generations, strict=True))
        stored = set(self.model.stored)
        numbers = [
            self.model.renumber(at) if at in stored and self.model.generation(at) == generation else -1
            for at, generation in sampled.items()
        ]
        patch = {"number": torch.tensor(numbers).unsqueeze(-1)}
        self.buffer.update_if_present(
            self.model.index(list(sampled)), patch=patch, generation=torch.tensor(list(sampled.values()))
        )


def first_row(rows: Any) -> Any:
    """The first step of a batch."""
    return {key: first_row(x) for key, x in rows.items()} if isinstance(rows, dict) else rows[0]


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("contract", contracts(), ids=str)
def test_random_histories(contract, seed):
    """Rows by identity and index, generations, the wrap of the ring, more rows than the capacity, emptying, edits."""
    History(contract, seed).run(40)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3, 20))
@pytest.mark.parametrize("contract", contracts(), ids=str)
def test_long_histories(contract, seed):
    History(contract, seed).run(60)


@pytest.mark.parametrize("contract", contracts(lambda contract: contract.on_device, quick=4), ids=str)
def test_random_histories_through_the_kernels(contract, interpreter):
    """The same on Triton's interpreter."""
    History(contract, 0).run(6)


@pytest.mark.parametrize("how", COPIES)
@pytest.mark.parametrize("contract", contracts(), ids=str)
def test_copies_draw_the_same_batches_and_share_nothing(contract, how):
    """CASES 55: rows, priorities, trajectories and the random stream are there."""
    buffer, model = contract.filled()
    batches(buffer)
    other = COPIES[how](contract, buffer)
    if not contract.prefetch or how in ("state_dict", "files"):
        # Batches that were prepared ahead are part of a state, but not of a copy.
        assert same(batches(buffer), batches(other))
    rows = buffer[model.index(model.stored)]
    other.extend(Model(contract, 7).write(5))
    assert same(buffer[model.index(model.stored)], rows)
    model.check_rows(buffer)
    buffer.extend(model.write(3))
    model.check_rows(buffer)


class Step:
    """A step to be captured or compiled: what it draws, writes and changes."""

    def __init__(self, contract: BufferContract) -> None:
        self.contract = contract
        self.buffer, self.model = contract.filled()
        self.buffer.sampler.random_state("cpu")

    def __call__(self, rows: Any) -> Any:
        batch, info = self.buffer.sample(return_info=True)
        index = self.buffer.extend(rows)
        if self.contract.prioritized:
            priority = info["index"].reshape(BATCH, -1).sum(-1) + 1.0
            self.buffer.update_priority(info["index"], priority, generation=info["index_generation"])
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
    machine.memory = [*replayed.buffer.storage.row_tensors, *(sharing.sides if sharing is not None else [])]
    step = capture(replayed, warmup=2)
    assert same(replayed.run(step, 8), due)
    assert step.captured
    assert replayed.buffer.write_count == eager.buffer.write_count


@pytest.mark.parametrize("contract", contracts(captured), ids=str)
def test_a_compiled_step_is_one_graph(contract):
    eager, compiled = Step(contract), Step(contract)
    due = eager.run(eager, 6)
    torch._dynamo.reset()
    with torch._dynamo.config.patch(error_on_recompile=True):
        assert same(compiled.run(torch.compile(compiled.__call__, fullgraph=True, backend="eager"), 6), due)


@pytest.mark.parametrize("contract", contracts(lambda contract: contract.on_device), ids=str)
def test_nothing_waits_for_the_gpu(contract):
    """CASES 28: on fake CUDA tensors, where reading a value raises."""
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
            assert buffer.extend(to_cuda(data)).device.type == "cuda"
            batch, info = buffer.sample(return_info=True)
            assert info["index"].device.type == "cuda"
            leaves = batch.values(True, True) if hasattr(batch, "batch_size") else [info["index"]]
            assert all(leaf.device.type == "cuda" for leaf in leaves)
            if contract.prioritized:
                buffer.update_priority(info["index"], torch.empty(BATCH, device="cuda"))
                buffer.mark_update(info["index"])
        buffer.empty()


#: And at how many places each is interrupted.
OPERATIONS: dict[str, tuple[Callable[[ReplayBuffer, Any], Any], int]] = {
    "extend": (lambda buffer, rows: buffer.extend(rows), 23),
    "sample": (lambda buffer, rows: buffer.sample(), 31),
    "empty": (lambda buffer, rows: buffer.empty(), 7),
    "load": (lambda buffer, rows: buffer.load_state_dict(buffer.state_dict()), 397),
}


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("contract", contracts(lambda contract: contract.on_device), ids=str)
def test_an_interrupt_leaves_all_or_nothing(contract, operation):
    """CASES 54: of a write, and the buffer goes on."""
    run, stride = OPERATIONS[operation]
    buffer, before = contract.filled()
    origin, done = pickle.dumps(buffer), copy.deepcopy(before)
    rows = done.write(5) if operation == "extend" else None
    if operation == "empty":
        done.empty()
    # Numba does not survive an interrupt while it compiles.
    run(buffer, rows)
    for place in itertools.count(0, stride):
        buffer = pickle.loads(origin)
        if not interrupted(functools.partial(run, buffer, rows), place):
            break
        assert is_free(buffer)
        outcome = before if (len(buffer), buffer.write_count) == (len(before.stored), before.written_rows) else done
        now = copy.deepcopy(outcome)
        now.check_rows(buffer)
        buffer.extend(now.write(STEPS))
        now.check_rows(buffer)
        now.check_batch(buffer, *buffer.sample(return_info=True))
    assert place > stride


def mistakes(contract: BufferContract, model: Model) -> dict[str, tuple[Callable[[ReplayBuffer], Any], Any]]:
    """Calls that are refused, and the errors."""
    rows = Model(contract, 5).write(3)
    found: dict[str, tuple[Callable[[ReplayBuffer], Any], Any]] = {
        "no batch": (lambda buffer: buffer.sample(0), ValueError),
        "an index beyond": (lambda buffer: buffer[torch.tensor([10**6])], IndexError),
    }
    if contract.storage == "list":
        return found
    if contract.rows == "tensordict":
        found |= {
            "a missing key": (lambda buffer: buffer.extend(rows.exclude("number")), ValueError),
            "an unknown key": (lambda buffer: buffer.extend(rows.clone().set("other", rows["number"])), ValueError),
            "another dtype": (
                lambda buffer: buffer.extend(rows.clone().set("number", rows["number"] + 0.5)),
                ValueError,
            ),
            "another shape": (
                lambda buffer: buffer.extend(rows.clone().set("number", rows["number"].expand(*rows.shape, 2))),
                ValueError,
            ),
            "no such key": (lambda buffer: buffer.set_("other", 1), KeyError),
            "a value too wide": (lambda buffer: buffer.set_at_("number", torch.zeros(2, 5), [0, 1]), ValueError),
        }
    if not contract.envs:
        found["a write beyond"] = (lambda buffer: buffer.__setitem__(torch.tensor([99, 0, 1]), rows), IndexError)
    return found


@pytest.mark.parametrize("contract", contracts(), ids=str)
def test_a_refused_call_changes_nothing(contract):
    buffer, model = contract.filled()
    state = pickle.dumps(buffer)
    for what, (call, error) in mistakes(contract, model).items():
        with pytest.raises(error):
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
            contract.new().load_state_dict(copy.deepcopy(buffer.state_dict()))

    together(write, read, save)
    model.check_rows(buffer)
    assert buffer.write_count == model.written_rows
