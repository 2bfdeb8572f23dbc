"""Loads that fail late: the buffer is as it was, or, where that can't be had, empty; never something in between."""

from __future__ import annotations

import copy
import functools
import signal
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from gpubuf import (
    LazyMemmapStorage,
    LazyTensorStorage,
    PrioritizedSampler,
    PrioritizedSliceSampler,
    RandomSampler,
    ReplayBuffer,
    SamplerWithoutReplacement,
    SliceSampler,
    TensorDictReplayBuffer,
)
from gpubuf.data.checkpoints import restore
from gpubuf.data.storage import host_memory
from gpubuf.data.storage.layout import Pieces
from gpubuf.data.writers import TensorDictRoundRobinWriter
from tests.support.checkpoint_setup import contents
from tests.support.interrupts import interrupted
from tests.support.transitions import same, transitions

CAPACITY = 40


class FailedError(Exception):
    """What the components of these tests raise."""


def failing(base: type, *, late: bool) -> type:
    """A sampler of the user's own that can't be loaded: found out at once, or when all of it has changed."""

    class Failing(base):
        broken = True

        def __init__(self, *arguments: Any, **named: Any) -> None:
            super().__init__(*arguments, **named)
            self.history = [torch.zeros(2)]

        def load_state_dict(self, *arguments: Any, **named: Any) -> None:
            if late or not self.broken:
                super().load_state_dict(*arguments, **named)
                self.history[0].fill_(7.0)
                self.history.append(torch.ones(1))
            if self.broken:
                raise FailedError

    return Failing


SAMPLERS: dict[str, Callable[[bool], Any]] = {
    "random": lambda late: failing(RandomSampler, late=late)(),
    "without replacement": lambda late: failing(SamplerWithoutReplacement, late=late)(),
    "prioritized": lambda late: failing(PrioritizedSampler, late=late)(CAPACITY, 0.7, 0.5),
    "slices": lambda late: failing(SliceSampler, late=late)(slice_len=2),
    "prioritized slices": lambda late: failing(PrioritizedSliceSampler, late=late)(CAPACITY, 0.7, 0.5, slice_len=2),
}


def filled(sampler: Any, n: int = 55, start: int = 0, **named: Any) -> TensorDictReplayBuffer:
    buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(CAPACITY), sampler=sampler, **named)
    buffer.extend(transitions(n, start=start))
    batch = buffer.sample(6)
    if isinstance(sampler, PrioritizedSampler):
        buffer.update_priority(batch["index"], torch.rand(6))
    return buffer


def checkpoint(sampler: Any, **named: Any) -> dict[str, Any]:
    return copy.deepcopy(filled(sampler, start=500, **named).state_dict())


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("sampler", SAMPLERS)
def test_a_sampler_that_fails_leaves_the_buffer_as_it_was(sampler, late):
    buffer, state = filled(SAMPLERS[sampler](late)), checkpoint(SAMPLERS[sampler](late))
    before, addresses = contents(buffer), [t.data_ptr() for t in buffer.storage.row_tensors]
    twin = TensorDictReplayBuffer(storage=LazyTensorStorage(CAPACITY), sampler=SAMPLERS[sampler](late))
    twin.sampler.broken = False
    twin.load_state_dict(copy.deepcopy(buffer.state_dict()))
    with pytest.raises(FailedError):
        buffer.load_state_dict(state)
    assert contents(buffer) == before
    assert [t.data_ptr() for t in buffer.storage.row_tensors] == addresses
    assert [t.tolist() for t in buffer.sampler.history] == [[0.0, 0.0]]
    for _ in range(3):
        assert same(buffer.sample(6), twin.sample(6))
    buffer.sampler.broken = False
    buffer.load_state_dict(state)
    assert buffer[:]["next", "step"].min() == 515


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("sampler", SAMPLERS)
def test_an_empty_buffer_stays_empty(sampler, late):
    buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(CAPACITY), sampler=SAMPLERS[sampler](late))
    with pytest.raises(FailedError):
        buffer.load_state_dict(checkpoint(SAMPLERS[sampler](late)))
    assert not buffer.initialized
    assert buffer.write_count == len(buffer) == 0
    # Rows of another form fit: nothing of the checkpoint is left.
    buffer.extend(transitions(8).exclude("action"))
    assert buffer.sample(4).shape == (4,)
    assert buffer.write_count == 8


class Normalise(nn.Module):
    """Has a buffer, and something beside it that can fail when it is loaded."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(3))
        self.broken, self.extra = False, [0]

    def forward(self, data):
        return data

    def get_extra_state(self):
        return self.extra[0]

    def set_extra_state(self, state):
        self.extra[0] = state
        if self.broken:
            raise FailedError


@pytest.mark.parametrize("sampler", [RandomSampler, lambda: PrioritizedSampler(CAPACITY, 0.7, 0.5)])
def test_a_transform_that_fails_leaves_the_buffer_as_it_was(sampler, tmp_path):
    saved, buffer = filled(sampler(), start=500, transform=Normalise()), filled(sampler(), transform=Normalise())
    of_saved, own = (one.transform.steps[0].transform for one in (saved, buffer))
    of_saved.mean.fill_(3.0)
    of_saved.extra = [4]
    saved.save(tmp_path)
    before, place, own.broken = contents(buffer), own.mean.data_ptr(), True
    with pytest.raises(FailedError):
        buffer.load(tmp_path)
    assert contents(buffer) == before
    assert own.mean.tolist() == [0.0] * 3
    assert own.mean.data_ptr() == place
    assert own.extra == [0]
    own.broken = False
    buffer.load(tmp_path)
    assert own.mean.tolist() == [3.0] * 3
    assert own.extra == [4]


def test_a_writer_that_fails_leaves_the_buffer_as_it_was():
    class Failing(TensorDictRoundRobinWriter):
        def load_state_dict(self, state):
            raise FailedError

    buffer, state = filled(PrioritizedSampler(CAPACITY, 0.7, 0.5)), checkpoint(PrioritizedSampler(CAPACITY, 0.7, 0.5))
    buffer.set_writer(Failing())
    before = contents(buffer)
    with pytest.raises(FailedError):
        buffer.load_state_dict(state)
    assert contents(buffer) == before


def test_the_batches_in_preparation_are_those_of_before():
    named = {"prefetch": 2, "batch_size": 6}
    buffer = filled(SAMPLERS["prioritized"](True), **named)
    twin = filled(SAMPLERS["prioritized"](True), **named)
    twin.sampler.broken = False
    for one in (buffer, twin):
        one.sample()
    twin.load_state_dict(copy.deepcopy(buffer.state_dict()))
    with pytest.raises(FailedError):
        buffer.load_state_dict(checkpoint(SAMPLERS["prioritized"](True), **named))
    for _ in range(5):
        assert same(buffer.sample(), twin.sample())


@pytest.mark.parametrize(
    ("sampler", "arguments"), [(SliceSampler, ()), (PrioritizedSliceSampler, (CAPACITY, 0.7, 0.5))]
)
def test_rows_that_a_slice_sampler_can_do_nothing_with(sampler, arguments):
    """An empty buffer looks at the keys of the checkpoint before it allocates anything."""
    state = checkpoint(sampler(*arguments, slice_len=2))
    state["_storage"]["rows"] = state["_storage"]["rows"].exclude(("next", "done"))
    buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(CAPACITY), sampler=sampler(*arguments, slice_len=2))
    with pytest.raises(ValueError, match="can't serve the rows"):
        buffer.load_state_dict(state)
    assert not buffer.initialized
    assert buffer.sampler._index is None


def test_without_room_for_a_copy_the_buffer_is_left_empty(monkeypatch):
    buffer, state = filled(SAMPLERS["prioritized"](True)), checkpoint(SAMPLERS["prioritized"](True))
    monkeypatch.setattr(host_memory, "free", lambda device=None: host_memory.Free(1000))
    with pytest.raises(FailedError) as raised:
        buffer.load_state_dict(state)
    assert raised.value.__notes__ == ["the rows were being replaced: the buffer is empty now"]
    check_empty(buffer)


def check_empty(buffer: ReplayBuffer) -> None:
    assert len(buffer) == 0
    with pytest.raises(RuntimeError, match="empty"):
        buffer.sample(4)
    buffer.extend(transitions(9, start=900))
    assert buffer[:]["next", "step"].tolist() == list(range(900, 909))
    assert buffer.sample(4)["next", "step"].min() >= 900


@pytest.mark.parametrize("room", [True, False])
def test_an_error_between_rows(monkeypatch, room):
    """The buffer is as it was, where the host had room to remember it, and else empty."""
    buffer, state = filled(PrioritizedSampler(CAPACITY, 0.7, 0.5)), checkpoint(PrioritizedSampler(CAPACITY, 0.7, 0.5))
    rows, before = state["_storage"]["rows"], contents(buffer)
    if not room:
        monkeypatch.setattr(host_memory, "free", lambda device=None: host_memory.Free(1000))

    def parts():
        yield 0, rows[:10]
        raise FailedError

    state["_storage"]["rows"] = Pieces(rows, parts())
    with pytest.raises(FailedError) as raised:
        buffer.load_state_dict(state)
    if room:
        assert contents(buffer) == before
        return
    assert raised.value.__notes__ == ["the rows were being replaced: the buffer is empty now"]
    check_empty(buffer)


@pytest.mark.parametrize("room", [True, False])
@pytest.mark.parametrize("times", [1, 2])
def test_signals_between_rows(monkeypatch, caplog, room, times):
    """Without room to remember the buffer one waits until the load is done, and a second one does not."""
    buffer, state = filled(PrioritizedSampler(CAPACITY, 0.7, 0.5)), checkpoint(PrioritizedSampler(CAPACITY, 0.7, 0.5))
    rows, before, handler = state["_storage"]["rows"], contents(buffer), signal.getsignal(signal.SIGINT)
    if not room:
        monkeypatch.setattr(host_memory, "free", lambda device=None: host_memory.Free(1000))

    def parts():
        yield 0, rows[:10]
        for _ in range(times):
            signal.raise_signal(signal.SIGINT)
        yield 10, rows[10:]

    state["_storage"]["rows"] = Pieces(rows, parts())
    with pytest.raises(KeyboardInterrupt) as raised:
        buffer.load_state_dict(state)
    assert signal.getsignal(signal.SIGINT) is handler
    assert ("waits until the buffer is whole" in caplog.text) == (not room)
    if room:
        assert contents(buffer) == before
    elif times == 1:
        assert same(buffer[:].exclude("index"), rows)
    else:
        assert raised.value.__notes__ == ["the rows were being replaced: the buffer is empty now"]
        check_empty(buffer)


def test_a_second_signal_waits_until_the_buffer_is_put_back(monkeypatch):
    """It does not stop what the first one made necessary."""
    buffer, state = filled(PrioritizedSampler(CAPACITY, 0.7, 0.5)), checkpoint(PrioritizedSampler(CAPACITY, 0.7, 0.5))
    before, load, loads = contents(buffer), LazyTensorStorage.load_state_dict, []

    def interrupted_load(storage, state):
        loads.append(load(storage, state))
        signal.raise_signal(signal.SIGINT)
        return loads[-1]

    monkeypatch.setattr(LazyTensorStorage, "load_state_dict", interrupted_load)
    with pytest.raises(KeyboardInterrupt):
        buffer.load_state_dict(state)
    assert len(loads) == 2
    assert contents(buffer) == before


INTERRUPTED: dict[str, Callable[[], Any]] = {
    "random": RandomSampler,
    "without replacement": SamplerWithoutReplacement,
    "prioritized": lambda: PrioritizedSampler(CAPACITY, 0.7, 0.5),
    "prioritized slices": lambda: PrioritizedSliceSampler(CAPACITY, 0.7, 0.5, slice_len=2),
    "custom": lambda: SAMPLERS["prioritized"](True),
}


# CPython tells of an interrupt while it closes a generator, and goes on.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize(("path", "lines"), [(False, False), (False, True), (True, False)])
@pytest.mark.parametrize(
    ("sampler", "room", "pace"),
    [
        *((name, True, 75) for name in INTERRUPTED),
        ("random", False, 75),
        ("prioritized slices", False, 75),
        *(pytest.param(name, True, 1, marks=pytest.mark.slow) for name in INTERRUPTED),
    ],
)
def test_a_load_that_is_interrupted_anywhere(monkeypatch, sampler, room, path, lines, pace, tmp_path):
    """All is as it was, down to the next batches and the size of batches; or all is that of the state.

    Also without room to remember the buffer.
    """
    if not room:
        monkeypatch.setattr(host_memory, "free", lambda device=None: host_memory.Free(1000))

    def made(shift: int, **named: Any) -> ReplayBuffer:
        torch.manual_seed(shift)
        buffer = TensorDictReplayBuffer(
            storage=LazyTensorStorage(CAPACITY), sampler=INTERRUPTED[sampler](), prefetch=1, **named
        )
        buffer.sampler.broken = False
        buffer.extend(transitions(CAPACITY + 7, start=shift))
        buffer.sample()
        return buffer

    def prepared() -> tuple[ReplayBuffer, Callable[[], None]]:
        buffer = made(0, batch_size=4)
        return buffer, functools.partial(*((buffer.load, tmp_path) if path else (buffer.load_state_dict, state)))

    source = made(500, batch_size=6)
    source.save(tmp_path)
    state, new = source.state_dict(), contents(source)
    # Numba does not survive an interrupt while it compiles.
    prepared()[1]()
    (buffer, load), place, sizes = prepared(), 0, set()
    old = contents(buffer)
    while interrupted(load, place, lines=lines):
        sizes.add(buffer.batch_size)
        assert contents(buffer) == (old if buffer.batch_size == 4 else new)
        if buffer.batch_size == 6:
            buffer, load = prepared()
        place += pace
    assert place > 100
    assert 4 in sizes
    assert contents(buffer) == new


def test_a_new_buffer_copies_no_rows(monkeypatch):
    copies = []
    monkeypatch.setattr(restore, "copied", lambda data, device: copies.append(len(data)) or data.clone())
    state = checkpoint(PrioritizedSampler(CAPACITY, 0.7, 0.5))
    buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(CAPACITY), sampler=PrioritizedSampler(CAPACITY, 0.7, 0.5))
    buffer.load_state_dict(state)
    assert copies == []
    buffer.load_state_dict(state)
    assert copies == [CAPACITY]


def test_rows_in_files_are_emptied(tmp_path):
    """Files that were made for the rows of a load stay, without rows."""
    storage = LazyMemmapStorage(CAPACITY, scratch_dir=tmp_path)
    buffer = TensorDictReplayBuffer(storage=storage, sampler=SAMPLERS["prioritized"](True))
    with pytest.raises(FailedError):
        buffer.load_state_dict(checkpoint(SAMPLERS["prioritized"](True)))
    check_empty(buffer)
