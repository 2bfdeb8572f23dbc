"""Turns: what makes each operation of a buffer one step, for the threads of the host and for the streams of a GPU."""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from threading import get_ident
from typing import Any, Protocol

import torch

from gpubuf.data.capturing import outside_captures, used
from gpubuf.data.storages import TensorStorage


class Draw(Protocol):
    """A draw that was asked for and has not been made."""

    def perform(self) -> None:
        """Make it. Raises nothing that belongs to the consumer."""


_raw_stream: Callable[[int], int] | None = getattr(torch._C, "_cuda_getCurrentRawStream", None)
"""The handle of a device's current stream: 0.1 µs, where ``torch.cuda.current_stream`` takes 1 to 2."""


def _handle(device: torch.device) -> tuple[int, int] | None:
    """What tells the current stream of ``device`` from all others; None in a torch without CUDA."""
    return None if _raw_stream is None else (device.index, _raw_stream(device.index))


class StreamOrder:
    """Makes an operation on one CUDA stream wait for the one before it on another. Never waits on the host.

    As long as all operations are on one stream, nothing is recorded. The first one on another stream waits for
    everything on the first; from then on each leaves an event behind, and the next one on another stream waits for that
    alone.

    While a graph is captured nothing is recorded and nothing waits: an event of another stream can't be part of the
    graph. ``torch.cuda.graph`` synchronises before it captures. What :func:`gpubuf.capture` returns takes its turn at
    each replay; around replays of other graphs, which the buffer can't see, ordering is up to who replays.
    """

    def __init__(self) -> None:
        self._last: torch.cuda.Stream | None = None
        self._event: torch.cuda.Event | None = None
        self._used: list[torch.cuda.Stream] = []
        # Of the last stream, where that was the current one.
        self._handle: tuple[int, int] | None = None

    def begin(self, device: torch.device) -> None:
        """Before an operation, on the stream that is current."""
        if self._handle is not None and _handle(device) == self._handle:
            return
        last = self._last
        if last is None or torch.cuda.is_current_stream_capturing():
            return
        stream = torch.cuda.current_stream(device)
        if stream == last:
            return
        if self._event is None:
            stream.wait_stream(last)
        else:
            stream.wait_event(self._event)

    def end(self, device: torch.device) -> None:
        """After an operation."""
        handle = _handle(device)
        if self._event is None and handle is not None and handle == self._handle:
            return
        if torch.cuda.is_current_stream_capturing():
            return
        stream = torch.cuda.current_stream(device)
        if self._event is None and self._last is not None and stream != self._last:
            self._event = torch.cuda.Event()
        if self._event is not None:
            self._event.record(stream)
        self._note(stream, handle)

    def joined(self, stream: torch.cuda.Stream) -> None:
        """``stream`` has waited for everything so far: begin anew, as if all operations had been on it."""
        self._note(stream)
        self._event = None

    def _note(self, stream: torch.cuda.Stream, handle: tuple[int, int] | None = None) -> None:
        if stream != self._last and stream not in self._used:
            self._used.append(stream)
        self._last, self._handle = stream, handle

    def settle(self) -> None:
        """Before memory is given up: every stream that the buffer was used on waits for its last operation.

        The allocator gives memory back to the stream on which it was made, and knows nothing of the others.
        """
        last = self._last
        if last is None:
            return
        for stream in self._used:
            if stream == last:
                continue
            if self._event is None:
                stream.wait_stream(last)
            else:
                stream.wait_event(self._event)


_compiling = torch.compiler.is_compiling


def turn_of(turn: AbstractContextManager[Any]) -> AbstractContextManager[Any]:
    """``with turn_of(turn):``, for what may be compiled: there are no turns while code is traced.

    When compiled code runs, what its operations read and write orders them, but not against other threads.
    """
    return contextlib.nullcontext() if _compiling() else turn


class Turn:
    """A reentrant lock of a buffer, ``with turn:``. Threads have their turns in the order in which they asked.

    Draws that were asked for earlier are made before anything else happens in a turn, so that what a batch holds
    depends on the order of the calls and not on how threads happen to run. Operations on a GPU are ordered across
    streams.

    Args:
        storage: the buffer's storage.

    Attributes:
        storage: the buffer's storage; to be set where that is replaced.
        pending: draws that were asked for, in order.
    """

    def __init__(self, storage: TensorStorage) -> None:
        self.storage = storage
        self.pending: deque[Draw] = deque()
        # A lock alone goes to who comes first when it is free, which is the thread that has just let go of it: one that
        # writes in a loop would keep all others out.
        self._lock = threading.Lock()
        self._waiting: deque[threading.Lock] = deque()
        self._owner = 0
        self._depth = 0
        self._streams = StreamOrder()
        # The turn holds on to the storage: its memory is released after this.
        weakref.finalize(self, outside_captures, self._streams.settle).atexit = False
        self._has_cuda: bool | None = None

    def gpu(self) -> torch.device | None:
        """The GPU that operations are launched on, or None. Fake tensors claim to be on one that is not there."""
        # Past the properties, which would cost more than all else in a turn.
        ring = self.storage._ring
        if ring is None or not ring.counters.is_cuda:
            return None
        if self._has_cuda is None:
            self._has_cuda = torch.cuda.is_available()
        return ring.counters.device if self._has_cuda else None

    def on_gpu(self) -> bool:
        """Whether operations are launches on a GPU."""
        return self.gpu() is not None

    @property
    def device(self) -> torch.device | None:
        """Where the buffer works; None before its first write."""
        ring = self.storage._ring
        return None if ring is None else ring.counters.device

    def joined(self, stream: torch.cuda.Stream) -> None:
        """See :meth:`StreamOrder.joined`. ``stream``, which is current, waits for what other threads did."""
        with self:
            self._streams.joined(stream)

    def settle(self) -> None:
        """See :meth:`StreamOrder.settle`."""
        outside_captures(self._streams.settle)

    def _begin(self) -> None:
        used(self)
        device = self.gpu()
        if device is not None:
            self._streams.begin(device)

    def _acquire(self) -> None:
        if self._waiting or not self._lock.acquire(False):
            self._stand_in_line()
        self._owner = get_ident()

    def _stand_in_line(self) -> None:
        """Wait until the lock is handed over, locked."""
        gate = threading.Lock()
        gate.acquire()
        self._waiting.append(gate)
        try:
            # Whoever had the lock may have let go of it before there was anybody in line.
            if self._lock.acquire(False):
                self._pass_on()
            gate.acquire()
        except BaseException:
            try:
                self._waiting.remove(gate)
            except ValueError:
                # It was this thread's turn already.
                self._pass_on()
            raise

    def _pass_on(self) -> None:
        """Hand the lock over to the thread that has waited longest; with nobody in line, let go of it."""
        while True:
            try:
                self._waiting.popleft().release()
                return
            except IndexError:
                self._lock.release()
            # A thread that stood in line before the release has found the lock taken, and would wait for ever.
            if not self._waiting or not self._lock.acquire(False):
                return

    def _leave(self) -> None:
        self._owner = 0
        if self._waiting:
            self._pass_on()
            return
        self._lock.release()
        # As in `_pass_on`.
        if self._waiting and self._lock.acquire(False):
            self._pass_on()

    def __enter__(self) -> Turn:
        if self._owner == get_ident():
            self._depth += 1
            return self
        self._acquire()
        self._depth = 1
        try:
            self._begin()
            while self.pending:
                self.pending[0].perform()
                self.pending.popleft()
        except BaseException:
            self._leave()
            raise
        return self

    def __exit__(self, *exception: object) -> None:
        if self._depth > 1:
            self._depth -= 1
            return
        try:
            device = self.gpu()
            if device is not None:
                self._streams.end(device)
        finally:
            self._leave()

    @contextlib.contextmanager
    def released(self) -> Iterator[None]:
        """Let others have their turns for a while, from within one's own, however deep."""
        depth, self._depth = self._depth, 1
        self.__exit__()
        try:
            yield
        finally:
            interrupt = None
            while self._owner != get_ident():
                try:
                    self._acquire()
                except BaseException as error:
                    # Whoever began the turn is going to end it, and must have it then.
                    interrupt = error
            self._depth = depth
            self._begin()
            if interrupt is not None:
                raise interrupt
