"""The batch ahead: where there is one, which one it is, and what throws it away and takes its draw back."""

from __future__ import annotations

import copy
import functools
import mmap
import os
import pickle
import threading
from collections import deque
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from gpubuf import system
from gpubuf.data import (
    Hindsight,
    LazyMemmapStorage,
    LazyTensorStorage,
    Normalize,
    RandomSampler,
    RandomShift,
    ReplayBuffer,
    SamplerWithoutReplacement,
    SliceSamplerWithoutReplacement,
    TensorDictReplayBuffer,
    TensorStorage,
    prefetch,
)
from gpubuf.data.batches import Batches
from gpubuf.data.prefetch import Prefetched
from gpubuf.data.recording import CaptureError, Recording, recorded
from gpubuf.data.storage import memmap
from tests.contracts import buffers
from tests.support.interrupted_buffers import is_free
from tests.support.interrupts import interrupted
from tests.support.placements import Machine
from tests.support.transitions import same, transitions

SAMPLERS = {
    **{name: functools.partial(make, 60) for name, make in buffers.SAMPLERS.items()},
    "in order": lambda: SamplerWithoutReplacement(shuffle=False, drop_last=True),
    "slices in turn": lambda: SliceSamplerWithoutReplacement(slice_len=4),
}
STORAGES: dict[str, Callable[[], Any]] = {
    "pinned": lambda: LazyTensorStorage(60, device="pinned"),
    "split": lambda: LazyTensorStorage(60, device="split:60%"),
    "files": lambda: LazyMemmapStorage(60),
}


@pytest.fixture(autouse=True)
def machine(monkeypatch):
    """The CPU does the GPU's work for pinned rows, and no row is too small to be requested."""
    monkeypatch.setattr(memmap, "LARGE_ROW", 1)
    return Machine().install(monkeypatch, work_on_cpu=True)


def new(storage: Any, sampler: str, prefetch: int | None, **options) -> TensorDictReplayBuffer:
    options = {"batch_size": 8, "generator": torch.Generator().manual_seed(1), **options}
    made = STORAGES[storage]() if isinstance(storage, str) else storage
    return TensorDictReplayBuffer(storage=made, sampler=SAMPLERS[sampler](), prefetch=prefetch, **options)


def pair(storage: str, sampler: str, rows: int = 50, **options) -> list[TensorDictReplayBuffer]:
    """A buffer without prefetch, and one with it, which has a batch ahead of no one yet."""
    found = [new(storage, sampler, prefetch, **options) for prefetch in (None, 3)]
    for buffer in found:
        buffer.extend(transitions(rows))
        if "prioritized" in sampler:
            buffer.update_priority(torch.arange(rows), torch.arange(rows) + 1.0)
    return found


def identical(a: TensorDict, b: TensorDict) -> bool:
    """As ``same``, and the index too."""
    return same(a, b) and torch.equal(a["index"], b["index"])


each_storage = pytest.mark.parametrize("storage", STORAGES)
each_sampler = pytest.mark.parametrize("sampler", SAMPLERS)


# Where a batch is ahead


@each_storage
@each_sampler
def test_a_batch_is_ahead_where_that_pays(storage, sampler):
    plain, ahead = pair(storage, sampler)
    assert (type(plain.parts.batches), type(ahead.parts.batches)) == (Batches, Prefetched)
    assert ahead.parts.batches.ahead == 0
    ahead.sample()
    # Slices of files are chosen anew: only their pages are requested.
    assert ahead.parts.batches.ahead == int(storage != "files" or "slices" not in sampler)


class Own(RandomSampler):
    def choose(self, n):
        return torch.full((n,), 3), {}


@pytest.mark.parametrize(
    ("storage", "options"),
    [
        (LazyTensorStorage(60), {}),
        (TensorStorage(transitions(60)), {}),
        (LazyMemmapStorage(60), {"prefetch": 0}),
        (LazyMemmapStorage(60), {"sampler": Own()}),
    ],
)
def test_there_is_none_elsewhere(storage, options):
    """In memory a sample is one launch; and what a sampler of one's own changes nobody else can take back."""
    buffer = ReplayBuffer(storage=storage, **{"batch_size": 4, "prefetch": 2, **options})
    buffer.extend(transitions(60))
    buffer.sample()
    assert type(buffer.parts.batches) is Batches


def test_small_rows_of_files_are_not_requested(monkeypatch):
    monkeypatch.setattr(memmap, "LARGE_ROW", 256)
    _, ahead = pair("files", "uniform")
    assert type(ahead.parts.batches) is Batches


def test_it_follows_the_rows():
    """To where they move, and to where the next first write puts them."""
    buffer = new("pinned", "uniform", 2)
    assert type(buffer.parts.batches) is Batches
    kinds = []
    buffer.extend(transitions(50))
    for place in ("pinned", "cpu", "split:60%"):
        kinds.append(type(buffer.to(place).parts.batches))
        buffer.sample()
    buffer.free()
    buffer.extend(transitions(50))
    kinds.append(type(buffer.parts.batches))
    buffer.set_storage(LazyTensorStorage(60))
    kinds.append(type(buffer.parts.batches))
    assert kinds == [Prefetched, Batches, Prefetched, Prefetched, Batches]


# Which batch it is


@each_storage
@each_sampler
def test_batches_are_those_that_come_without(storage, sampler):
    """In order, through epochs, and beside draws of other kinds."""
    plain, ahead = pair(storage, sampler)
    for i in range(40):
        assert identical(ahead.sample(), plain.sample())
        assert ahead.sampler.ran_out == plain.sampler.ran_out
        if i == 10:
            assert not (ahead.sample(include_info=False) != plain.sample(include_info=False)).any()
        if i == 20:
            with pytest.warns(UserWarning, match="batch_size=4"):
                assert identical(ahead.sample(4), plain.sample(4))
        if i == 25:
            due, found = (buffer.sample_columns() for buffer in (plain, ahead))
            assert all(torch.equal(due[key], found[key]) for key in due)
        if i == 30 and sampler != "slices in turn":
            assert identical(ahead.sample(batches=2), plain.sample(batches=2))


class Reference:
    """A batch is drawn when the one before it is asked for."""

    def __init__(self, buffer: TensorDictReplayBuffer) -> None:
        self.buffer, self.queue = buffer, deque()

    def sample(self) -> TensorDict:
        while len(self.queue) < 2:
            self.queue.append(self.buffer.sample())
        return self.queue.popleft()


@each_storage
@each_sampler
def test_a_batch_is_one_step_old(storage, sampler):
    """Pinned rows are those of the draw. Of files the choice is, with the rows as they are; slices are of now."""
    plain, ahead = pair(storage, sampler)
    of_now = storage == "files" and "slices" in sampler
    reference = plain if of_now else Reference(plain)
    for i in range(12):
        batch, due = ahead.sample(), reference.sample()
        assert torch.equal(batch["index"], due["index"])
        if storage != "files" or of_now:
            assert same(batch, due)
        else:
            assert same(batch.exclude("priority_weight", "index_generation"), ahead[batch["index"]])
        if "prioritized" in sampler:
            assert torch.equal(batch["priority_weight"], due["priority_weight"])
        for buffer in (plain, ahead):
            buffer.extend(transitions(9, 20 * i))
            if "prioritized" in sampler:
                buffer.sampler.beta = 0.1 * i
                buffer.update_priority(torch.arange(i % 20), 0.1 + i)


@pytest.mark.parametrize("storage", ["pinned", "files"])
def test_late_priorities_of_overwritten_rows_are_dropped(storage):
    """CASES 12: a batch that was drawn ahead of a write has the generations of its rows."""
    _, ahead = pair(storage, "prioritized", 60)
    ahead.sample()
    ahead.extend(transitions(60, 60))
    batch = ahead.sample()
    assert ((batch["next", "step"] < 60) == (storage == "pinned")).all()
    before = ahead.sampler.tree.state_dict()["leaves"].clone()
    ahead.update_tensordict_priority(batch.set("td_error", torch.full((8,), 9.0)))
    changed = ahead.sampler.tree.state_dict()["leaves"] != before
    assert changed.any() == (storage == "files")


@pytest.mark.parametrize("storage", ["pinned", "files"])
def test_random_numbers_of_processing_and_hindsight_are_taken_back(storage):
    rows = TensorDict(
        {
            "pixels": torch.randint(256, (40, 1, 6, 6), dtype=torch.uint8),
            "achieved_goal": torch.arange(40.0).unsqueeze(1),
            "desired_goal": torch.zeros(40, 1),
            "next": {
                "reward": torch.zeros(40, 1),
                "achieved_goal": torch.arange(40.0).unsqueeze(1) + 1,
                "done": (torch.arange(40) % 10 == 9).unsqueeze(1),
            },
        },
        [40],
    )
    relabel = {"goal_key": "desired_goal", "achieved_key": ("next", "achieved_goal")}

    def reward(achieved, goal, data):
        return (achieved - goal).abs()

    found = []
    for depth in (None, 1):
        hindsight = Hindsight(reward, **relabel)
        buffer = new(storage, "uniform", depth, process=[RandomShift("pixels", 2)], relabel=hindsight)
        buffer.extend(rows)
        found.append(buffer)
    plain, ahead = found
    for i in range(12):
        assert same(ahead.sample().exclude("index"), plain.sample().exclude("index"))
        if i % 3 == 0:
            assert ahead.state_dict()["_processing"]["random"]["state"].tolist() == (
                plain.state_dict()["_processing"]["random"]["state"].tolist()
            )


def test_a_batch_from_pinned_memory_has_the_statistics_of_its_draw():
    buffer = new("pinned", "uniform", 1, process=[Normalize("observation")])
    buffer.extend(transitions(20))
    buffer.sample()
    before = buffer.sampler.random_state("cpu").state.clone()
    for step in range(1, 4):
        buffer.extend(transitions(10, 1000 * step))
    assert buffer.sample()["observation"].abs().max() < 3
    assert not torch.equal(before, buffer.sampler.random_state("cpu").state)


# What throws it away


def emptied(buffer: TensorDictReplayBuffer) -> None:
    buffer.empty()
    buffer.extend(transitions(50, 500))


def freed(buffer: TensorDictReplayBuffer) -> None:
    buffer.free()
    buffer.extend(transitions(50, 500))


THROWN_AWAY: dict[str, Callable[[TensorDictReplayBuffer], Any]] = {
    "empty": emptied,
    "free": freed,
    "to": lambda buffer: buffer.to("cpu"),
    "state_dict": lambda buffer: buffer.state_dict(),
    "load_state_dict": lambda buffer: buffer.load_state_dict(copy.deepcopy(buffer.state_dict())),
    "pickle": pickle.dumps,
    "set_sampler": lambda buffer: buffer.set_sampler(SAMPLERS["in order"]()),
    "set_writer": lambda buffer: buffer.set_writer(buffer.writer),
    "set_rng": lambda buffer: buffer.set_rng(torch.Generator().manual_seed(5)),
    "sample(5)": lambda buffer: buffer.parts.batches.part(5),
}


@pytest.mark.parametrize("what", THROWN_AWAY)
@pytest.mark.parametrize("storage", ["pinned", "files"])
def test_what_throws_it_away_takes_its_draw_back(storage, what):
    if storage == "files" and what in ("free", "to"):
        pytest.skip("files stay where they are")
    plain, ahead = pair(storage, "without replacement")
    for buffer in (plain, ahead):
        buffer.sample()
        THROWN_AWAY[what](buffer)
    assert ahead.parts.batches.ahead == 0
    for _ in range(8):
        assert identical(ahead.sample(), plain.sample())


@pytest.mark.parametrize("size", [8, 40])
def test_an_epoch_that_was_given_up_is_not_put_back(size):
    """Its trajectories are others; also where the batch ahead was its last one."""
    plain, ahead = pair("pinned", "slices in turn", batch_size=size)
    for buffer in (plain, ahead):
        buffer.sample()
        buffer.sampler.rebuild()
        buffer.state_dict()
    for _ in range(4):
        assert identical(ahead.sample(), plain.sample())


def test_a_sample_within_a_turn_makes_none():
    _, ahead = pair("pinned", "uniform")
    ahead.operation.run(ahead.sample)
    assert ahead.parts.batches.ahead == 0


@each_storage
@each_sampler
def test_saved_and_resumed_runs_agree(storage, sampler, tmp_path):
    """Whatever was written since the batch ahead was drawn."""
    _, run = pair(storage, sampler)
    run.sample()
    run.extend(transitions(9, 100))
    run.save(tmp_path / "c")
    resumed = new(storage, sampler, 1, generator=None)
    resumed.load(tmp_path / "c", end_trajectories=False)
    for i in range(10):
        assert identical(run.sample(), resumed.sample())
        if i == 5:
            for buffer in (run, resumed):
                buffer.extend(transitions(3, 200))


def test_a_failed_draw_ahead_is_made_when_its_batch_is_asked_for():
    plain, ahead = pair("pinned", "in order", 10, batch_size=20)
    for buffer in (plain, ahead):
        with pytest.raises(ValueError, match=r"batch size \(20\) is greater than .* in use, 10 rows"):
            buffer.sample()
        buffer.extend(transitions(30))
    for _ in range(4):
        assert identical(ahead.sample(), plain.sample())
    choose = ahead.sampler.choose
    ahead.sampler.choose = lambda n: (
        choose(n) if ahead.parts.batches.ahead else (_ for _ in ()).throw(ValueError("late"))
    )
    ahead.sample()
    with pytest.raises(ValueError, match="late"):
        ahead.sample()


def test_transforms_run_when_a_batch_is_asked_for_and_may_read_the_buffer():
    seen = []
    _, ahead = pair("pinned", "uniform", transform=lambda batch: seen.append(1) or batch)
    ahead.sample()
    assert len(seen) == 1
    first = torch.zeros(8, dtype=torch.int64)
    ahead.append_transform(lambda batch: batch.set("first", ahead.storage[first]["action"]))
    ahead.append_transform(lambda batch: batch if ahead.state_dict() else None)
    assert torch.equal(ahead.sample()["first"], ahead.storage[first]["action"])


def test_a_graph_takes_no_batch_that_was_made_outside_of_it(monkeypatch):
    """Graphs of gpubuf.capture make that of pinned rows themselves: tests/graphs/test_ahead.py."""
    _, ahead = pair("files", "uniform")
    ahead.sample()
    with recorded(Recording()), pytest.raises(CaptureError, match="use a buffer without prefetch"):
        ahead.sample()
    _, ahead = pair("pinned", "uniform")
    ahead.sample()
    monkeypatch.setattr(prefetch, "capturing", lambda: True)
    with pytest.raises(RuntimeError, match="use a buffer without prefetch"):
        ahead.sample()


# Files


def test_pages_of_the_next_batch_are_requested(monkeypatch):
    """Of every large key, of the rows that the next batch is made of, from the beginning of a page."""
    asked: list[tuple[int, int]] = []
    monkeypatch.setattr(system, "read_ahead", lambda start, length: asked.append((start, start + length)))
    monkeypatch.setattr(memmap, "LARGE_ROW", 256)
    rows = TensorDict(
        {
            "pixels": torch.randint(256, (500, 3000), dtype=torch.uint8),
            "next": {"reward": torch.zeros(500, 1), "done": torch.zeros(500, 1, dtype=torch.bool)},
        },
        [500],
    )
    for n_steps in (1, 3):
        storage = LazyMemmapStorage(500)
        buffer = TensorDictReplayBuffer(storage=storage, batch_size=8, prefetch=1, n_steps=n_steps)
        buffer.extend(rows)
        asked.clear()
        buffer.sample()
        pages, (address,) = (
            list(asked),
            [tensor.data_ptr() for tensor in storage.columns.parts if tensor.dim() == 2 and tensor.shape[1] == 3000],
        )
        index = buffer.sample()["index"]
        assert len(pages) == 8 * (1 if n_steps == 1 else 2)
        assert all(start % 4096 == 0 for start, _ in pages)
        for row in index.tolist():
            for at in {row, (row + n_steps - 1) % 500}:
                first = address + 3000 * at
                assert any(start <= first and first + 3000 <= stop for start, stop in pages)


def test_nothing_is_requested_of_rows_that_are_in_memory(monkeypatch):
    """As long as no page has to be waited for."""
    asked, faults = [], 7
    monkeypatch.setattr(system, "read_ahead", lambda *arguments: asked.append(arguments))
    monkeypatch.setattr(system, "slow_page_faults", lambda: faults)
    _, ahead = pair("files", "uniform")
    for _ in range(memmap.PATIENCE):
        ahead.sample()
    assert len(asked) == memmap.PATIENCE * 8 * len(ahead.storage.columns.parts)
    asked.clear()
    ahead.sample()
    assert not asked
    faults += 1
    ahead.sample()
    assert asked


def test_the_system_takes_requests():
    storage = LazyMemmapStorage(10)
    storage.append(TensorDict({"pixels": torch.zeros(10, 9000)}, [10]))
    (start,) = (tensor.data_ptr() for tensor in storage.columns.parts)
    assert system._madvise(start // 4096 * 4096, 9000 * 40, mmap.MADV_WILLNEED) == 0
    storage.request(torch.tensor([0, 9]))


# Threads, interrupts, forks


@pytest.mark.parametrize("storage", ["pinned", "files"])
def test_two_consumers_share_an_epoch(storage):
    made = LazyMemmapStorage(400) if storage == "files" else LazyTensorStorage(400, device="pinned")
    buffer = new(made, "without replacement", 3, batch_size=4)
    buffer.extend(transitions(400))
    seen = []

    def consume():
        seen.extend(buffer.sample()["index"] for _ in range(50))

    threads = [threading.Thread(target=consume) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert torch.cat(seen).sort().values.tolist() == list(range(400))


@pytest.mark.parametrize("pace", [5, pytest.param(1, marks=pytest.mark.nightly)])
@pytest.mark.parametrize(("storage", "sampler"), [("pinned", "prioritized"), ("files", "without replacement")])
def test_a_sample_that_is_interrupted_anywhere(storage, sampler, pace):
    """CASES 63: a batch may be lost; no batch comes twice, a saved run is the run, and nobody waits for ever."""
    state = pair(storage, sampler)[0].state_dict()
    place = 0
    while True:
        buffer = new(storage, sampler, 1)
        buffer.load_state_dict(state)
        first = buffer.sample()
        if not interrupted(buffer.sample, place):
            break
        batch = buffer.sample()
        if "without" in sampler and not buffer.sampler.ran_out:
            assert not set(batch["index"].tolist()) & set(first["index"].tolist())
        resumed = new(storage, sampler, 1)
        resumed.load_state_dict(copy.deepcopy(buffer.state_dict()))
        assert identical(resumed.sample(), buffer.sample())
        buffer.extend(transitions(3))
        assert is_free(buffer)
        place += pace
    assert place > 20


def test_a_forked_process_goes_on_with_the_epoch():
    """CASES 55."""
    _, buffer = pair("files", "in order")
    buffer.sample()
    receiver, sender = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.write(sender, bytes(buffer.sample()["index"].tolist()))
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    assert list(os.read(receiver, 100)) == buffer.sample()["index"].tolist() == list(range(8, 16))
    os.close(receiver)
    os.close(sender)
