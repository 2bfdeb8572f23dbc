"""The order of a buffer's work on several CUDA streams, on a machine that has none."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace

import pytest
import torch

from gpubuf import LazyTensorStorage, PrioritizedSampler, RandomSampler, TensorDictReplayBuffer
from gpubuf.data import operation, prefetch
from gpubuf.data.operation import Operation, StreamOrder
from gpubuf.data.samplers.base import Drawn
from tests.support import placements
from tests.support.transitions import transitions


class Stream:
    def __init__(self, name: str, log: list) -> None:
        self.name, self.log = name, log

    def wait_stream(self, other: Stream) -> None:
        self.log.append(f"{self.name} waits for {other.name}")

    def wait_event(self, event: Event) -> None:
        self.log.append(f"{self.name} waits for {event.at}")


class Event:
    at = "nothing"

    def record(self, stream: Stream) -> None:
        stream.log.append(f"event on {stream.name}")
        self.at = f"event on {stream.name}"


class Machine:
    """CUDA streams that only note what they are told."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, handles: bool = True) -> None:
        self.log: list[str] = []
        self.default, self.other = Stream("default", self.log), Stream("other", self.log)
        self.current, self.capturing = self.default, False
        cuda = torch.cuda
        monkeypatch.setattr(cuda, "is_initialized", lambda: True)
        monkeypatch.setattr(cuda, "current_device", lambda: 0)
        monkeypatch.setattr(cuda, "current_stream", lambda device=None: self.current)
        monkeypatch.setattr(
            operation, "_raw_stream", (lambda index: id(self.current)) if handles else operation._no_handle
        )
        monkeypatch.setattr(cuda, "is_current_stream_capturing", lambda: self.capturing)
        monkeypatch.setattr(cuda, "Event", Event)
        monkeypatch.setattr(cuda, "Stream", lambda device=None: Stream("side", self.log))
        monkeypatch.setattr(cuda, "stream", self.on)

    @contextlib.contextmanager
    def on(self, stream: Stream):
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before

    def said(self) -> list[str]:
        log = self.log.copy()
        self.log.clear()
        return log


DEVICE = torch.device("cuda", 0)


@pytest.mark.parametrize("handles", [True, False])
def test_streams_wait_for_each_other(monkeypatch, handles):
    """CASES 32: one stream alone records nothing; a second one waits, and from then on for events alone.

    Whether or not torch tells the streams' handles.
    """
    machine, order = Machine(monkeypatch, handles), StreamOrder()

    def operation(stream: Stream) -> list[str]:
        with machine.on(stream):
            order.begin(DEVICE)
            order.end(DEVICE)
        return machine.said()

    assert operation(machine.default) == []
    assert operation(machine.default) == []
    assert operation(machine.other) == ["other waits for default", "event on other"]
    assert operation(machine.other) == ["event on other"]
    assert operation(machine.default) == ["default waits for event on other", "event on default"]
    machine.capturing = True
    assert operation(machine.other) == []
    machine.capturing = False
    assert operation(machine.other) == ["other waits for event on default", "event on other"]


def test_default_streams_of_two_devices_are_two(monkeypatch):
    """They have the same handle. A buffer may have moved between two operations."""
    machine, order = Machine(monkeypatch), StreamOrder()
    monkeypatch.setattr(operation, "_raw_stream", lambda index: 0)
    order.begin(DEVICE)
    order.end(DEVICE)
    with machine.on(machine.other):
        order.begin(torch.device("cuda", 1))
    assert machine.said() == ["other waits for default"]


def test_a_dropped_buffer_is_waited_for(monkeypatch):
    """By all streams that its memory may belong to: a draw made ahead still reads it, and moves its random state on."""
    machine, order = Machine(monkeypatch), StreamOrder()
    for stream in (machine.default, machine.other):
        with machine.on(stream):
            order.begin(DEVICE)
            order.end(DEVICE)
    machine.said()
    order.settle()
    assert machine.said() == ["default waits for event on other"]
    order.joined(machine.default)
    order.settle()
    assert machine.said() == ["other waits for default"]

    # The lock of a buffer does so when it goes, and the buffer when it gets another storage.
    buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(10), batch_size=2)
    settled = []
    monkeypatch.setattr(buffer.operation._streams, "_used", [machine.default])
    monkeypatch.setattr(StreamOrder, "settle", lambda self: settled.append(self))
    buffer.set_storage(LazyTensorStorage(10))
    assert settled == [buffer.operation._streams]
    other = TensorDictReplayBuffer(storage=LazyTensorStorage(10), batch_size=2, prefetch=1)
    other.set_sampler(PrioritizedSampler(10, 0.7, 0.5))
    assert settled[1:] == [other.operation._streams]


def test_what_another_thread_does_during_a_capture_is_waited_for(monkeypatch):
    """Its event is no part of the graph, and the replay comes after it."""
    machine = Machine(monkeypatch)
    own = Operation(LazyTensorStorage(10))
    counters = SimpleNamespace(is_cuda=True, device=DEVICE)
    monkeypatch.setattr(own.storage, "ring", SimpleNamespace(counters=counters))
    monkeypatch.setattr(own, "_has_cuda", True)
    own.mend()
    # The capture begins: what comes before it is on the stream of whoever captures.
    own.joined(machine.default)
    with machine.on(machine.other):
        own.mend()
    assert machine.said() == ["other waits for default", "event on other"]
    own.joined(machine.default)
    assert machine.said()[0] == "default waits for event on other"
    own.mend()
    assert machine.said() == []


def test_a_batch_ahead_is_tied_to_its_consumer(monkeypatch):
    """Its stream comes after all that the buffer did before, and whoever takes it after its stream."""
    memory = placements.Machine().install(monkeypatch, work_on_cpu=True)
    machine = Machine(monkeypatch)
    log = machine.log
    storage = LazyTensorStorage(10, device="pinned")
    buffer = TensorDictReplayBuffer(storage=storage, sampler=RandomSampler(), batch_size=2, prefetch=1)
    buffer.extend(transitions(10))
    assert memory.pinned
    own = buffer.operation

    def step(action, args, named):
        own._streams.begin(DEVICE)
        try:
            return action(*args, **named)
        finally:
            own._streams.end(DEVICE)

    def draw(n: int) -> Drawn:
        log.append(f"draw on {machine.current.name}")
        return RandomSampler.draw(buffer.sampler, n)

    used = SimpleNamespace(
        is_cuda=True,
        device=DEVICE,
        record_stream=lambda stream: log.append(f"used on {stream.name}"),
        untyped_storage=lambda: SimpleNamespace(_cdata=1),
    )
    # Two tensors in one memory, of which the allocator is told once.
    monkeypatch.setattr(prefetch, "tensors_of", lambda data: [used, used])
    monkeypatch.setattr(own, "_step", step)
    monkeypatch.setattr(own, "gpu", lambda: DEVICE)
    monkeypatch.setattr(buffer.sampler, "draw", draw)
    buffer.sample()
    assert log == ["draw on default", "side waits for default", "draw on side", "event on side"]
    log.clear()
    with machine.on(machine.other):
        buffer.sample()
    assert log == [
        "other waits for event on side",
        "used on other",
        "event on other",
        "side waits for event on other",
        "draw on side",
        "event on side",
    ]
