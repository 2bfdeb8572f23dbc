"""Turns: what makes each operation of a buffer one step, for the threads of the host and for the streams of a GPU."""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Iterator
from typing import Protocol

import torch

from gpubuf.data.capturing import used
from gpubuf.data.storages import TensorStorage


class Draw(Protocol):
    """A draw that was asked for and has not been made."""

    def perform(self) -> None:
        """Make it. Raises nothing that belongs to the consumer."""


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

    def begin(self, device: torch.device) -> None:
        """Before an operation, on the stream that is current."""
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
        if torch.cuda.is_current_stream_capturing():
            return
        stream = torch.cuda.current_stream(device)
        if self._event is None and self._last is not None and stream != self._last:
            self._event = torch.cuda.Event()
        if self._event is not None:
            self._event.record(stream)
        self._last = stream

    def joined(self, stream: torch.cuda.Stream) -> None:
        """``stream`` has waited for everything so far: begin anew, as if all operations had been on it."""
        self._last, self._event = stream, None


class Turn:
    """A reentrant lock of a buffer, ``with turn:``.

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
        self._lock = threading.RLock()
        self._depth = 0
        self._streams = StreamOrder()
        self._has_cuda: bool | None = None

    def on_gpu(self) -> bool:
        """Whether operations are launches on a real GPU; fake tensors claim to be on one where there is none."""
        # Past the properties, which would cost more than all else in a turn.
        ring = self.storage._ring
        if ring is None or not ring.counters.is_cuda:
            return False
        if self._has_cuda is None:
            self._has_cuda = torch.cuda.is_available()
        return self._has_cuda

    @property
    def device(self) -> torch.device | None:
        """Where the buffer works; None before its first write."""
        ring = self.storage._ring
        return None if ring is None else ring.counters.device

    def joined(self, stream: torch.cuda.Stream) -> None:
        """See :meth:`StreamOrder.joined`."""
        self._streams.joined(stream)

    def _begin(self) -> None:
        used(self)
        if self.on_gpu():
            self._streams.begin(self.storage.ring.device)

    def _end(self) -> None:
        if self.on_gpu():
            self._streams.end(self.storage.ring.device)

    def __enter__(self) -> Turn:
        self._lock.acquire()
        self._depth += 1
        if self._depth == 1:
            try:
                self._begin()
                while self.pending:
                    self.pending[0].perform()
                    self.pending.popleft()
            except BaseException:
                self._depth = 0
                self._lock.release()
                raise
        return self

    def __exit__(self, *exception: object) -> None:
        try:
            if self._depth == 1:
                self._end()
        finally:
            self._depth -= 1
            self._lock.release()

    @contextlib.contextmanager
    def released(self) -> Iterator[None]:
        """Let others have their turns for a while, from within one's own, however deep."""
        depth = self._depth
        self._end()
        self._depth = 0
        for _ in range(depth):
            self._lock.release()
        try:
            yield
        finally:
            for _ in range(depth):
                self._lock.acquire()
            self._depth = depth
            self._begin()
