"""The lock of a buffer. It makes each operation one step, for the threads of the host and for the streams of a GPU."""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch

from gpubuf.data.runtime.recording import current, outside_captures, used
from gpubuf.data.storages.tensor_storage import TensorStorage


class PendingDraw(Protocol):
    """A draw that was asked for and has not been made."""

    def perform(self) -> None:
        """Make it. Raises nothing that belongs to the consumer."""


_raw_stream: Callable[[int], int] | None = getattr(torch._C, "_cuda_getCurrentRawStream", None)
"""The handle of a device's current stream: 0.1 µs, where ``torch.cuda.current_stream`` takes 1 to 2."""


def _handle(device: torch.device) -> tuple[int, int] | None:
    """An identifier of the current stream of ``device``; None in a torch without CUDA."""
    return None if _raw_stream is None else (device.index, _raw_stream(device.index))


class StreamOrder:
    """Makes an operation on one CUDA stream wait for the one before it on another. Never waits on the host.

    As long as all operations are on one stream, nothing is recorded. The first one on another stream waits for
    everything on the first; from then on each leaves an event behind, and the next one on another stream waits for that
    alone.

    While a graph is captured nothing is recorded and nothing waits: an event of another stream can't be part of the
    graph. ``torch.cuda.graph`` synchronises before it captures. A step captured by :func:`gpubuf.capture` takes the
    lock at each replay. The buffer can't see replays of other graphs: whoever replays one has to order it.
    """

    def __init__(self) -> None:
        self._last: torch.cuda.Stream | None = None
        self._event: torch.cuda.Event | None = None
        self._used: list[torch.cuda.Stream] = []
        # Of the last stream, if that was the current one.
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


def unless_compiling(lock: AbstractContextManager[Any]) -> AbstractContextManager[Any]:
    """``with unless_compiling(lock):``, for code that may be compiled: traced code takes no lock.

    Compiled operations are ordered by the data that they read and write, but not against other threads.
    """
    return contextlib.nullcontext() if _compiling() else lock


def _nothing(*exception: object) -> None:
    """The exit of a ``with`` whose thread held the lock already."""


class _End:
    """``BufferLock.__exit__``, chosen when a ``with`` begins.

    ``with`` looks it up before it enters. An interrupt can come when a function of Python is entered, and would keep it
    from releasing the lock. The method of ``threading.RLock`` is written in C, and can't be interrupted.
    """

    def __get__(self, lock: BufferLock | None, kind: type | None = None) -> Callable[..., None]:
        if lock is None:
            raise AttributeError("the exit of a lock depends on the lock")
        inner = lock._lock
        # `held` spelled out, as in `BufferLock.__enter__`: each operation comes here.
        if inner._is_owned():  # type: ignore[attr-defined]
            return _nothing
        # The first write decides whether the buffer is on a GPU.
        launches = lock._cuda_present() if lock.storage._ring is None else lock.gpu() is not None
        return lock._end_on_gpu if launches else inner.__exit__


class BufferLock:
    """A reentrant lock of a buffer, ``with lock:``. Threads get it in the order in which they asked.

    Whoever gets it makes the draws that were asked for earlier first. So the contents of a batch depend on the order of
    the calls and not on how threads happen to run. Operations on a GPU are ordered across streams. If an operation was
    interrupted, the next one finishes its work.

    Args:
        storage: the buffer's storage.
        mend: finishes an interrupted operation; a method, held weakly.

    Attributes:
        storage: the buffer's storage; to be set when that is replaced.
        pending: draws that were asked for, in order.
    """

    __exit__ = _End()

    def __init__(self, storage: TensorStorage, mend: Callable[[], None] | None = None) -> None:
        self.storage = storage
        self.pending: deque[PendingDraw] = deque()
        self._mend = None if mend is None else weakref.WeakMethod(mend)
        self._streams = StreamOrder()
        # The lock holds on to the storage: its memory is released after this.
        weakref.finalize(self, outside_captures, self._streams.settle).atexit = False
        self._has_cuda: bool | None = None
        self.renew()

    def renew(self) -> None:
        """Begin with a lock that nobody has: in a copy, and in a forked process."""
        # Reentrant so that it knows its owner. A `with` inside another one leaves it alone.
        self._lock = threading.RLock()
        # A free lock goes to the first thread that asks, mostly the one that has just released it: a thread that writes
        # in a loop would keep all others out. So a thread that waits holds a gate in this line until it has the lock.
        self._waiting: deque[threading.Lock] = deque()
        self.pending.clear()

    @property
    def in_use(self) -> bool:
        """Whether the buffer that the lock was made for is still there."""
        return self._mend is None or self._mend() is not None

    @property
    def held(self) -> bool:
        """Whether this thread holds the lock."""
        return self._lock._is_owned()  # type: ignore[attr-defined, no-any-return]

    def gpu(self) -> torch.device | None:
        """The GPU that operations are launched on, or None. Fake tensors claim to be on one that is not there."""
        # Past the properties, which would cost more than all else here.
        ring = self.storage._ring
        if ring is None or not ring.counters.is_cuda:
            return None
        return ring.counters.device if self._cuda_present() else None

    def on_gpu(self) -> bool:
        """Whether operations are launches on a GPU."""
        return self.gpu() is not None

    def _cuda_present(self) -> bool:
        if self._has_cuda is None:
            self._has_cuda = torch.cuda.is_available()
        return self._has_cuda

    @property
    def device(self) -> torch.device | None:
        """The device that the buffer works on; None before its first write."""
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
        if self.storage.unfinished is not None and self._mend is not None:
            mend = self._mend()
            if mend is not None:
                mend()
        while self.pending:
            self.pending[0].perform()
            self.pending.popleft()

    def _acquire(self) -> None:
        if self._waiting or not self._lock.acquire(False):
            self._stand_in_line()

    def _stand_in_line(self) -> None:
        """Take the lock after all who came before."""
        line, gate = self._waiting, threading.Lock()
        with gate:
            try:
                line.append(gate)
                while (first := line[0]) is not gate:
                    with first:
                        # The first thread has got the lock or given up. An interrupt may have kept it in the line.
                        if line[0] is first:
                            line.popleft()
                self._lock.acquire()
            finally:
                with contextlib.suppress(ValueError):
                    line.remove(gate)

    def _release(self) -> None:
        if self.held:
            self._lock.release()

    def __enter__(self) -> BufferLock:
        lock = self._lock
        if lock._is_owned():  # type: ignore[attr-defined]
            return self
        try:
            if self._waiting or not lock.acquire(False):
                self._stand_in_line()
            if (
                self.storage.unfinished is not None
                or self.pending
                or current.locks is not None
                or self.gpu() is not None
            ):
                self._begin()
            return self
        except BaseException:
            self._release()
            raise

    def mend(self) -> None:
        """Finish an interrupted operation. With the lock held there is none left."""
        with self:
            pass

    def ended(self) -> None:
        """Note where on its stream an operation on a GPU ends."""
        device = self.gpu()
        if device is not None:
            self._streams.end(device)

    def _end_on_gpu(self, *exception: object) -> None:
        try:
            self.ended()
        finally:
            self._lock.release()

    @contextlib.contextmanager
    def taken(self) -> Iterator[None]:
        """``with lock:`` for an :class:`contextlib.ExitStack`."""
        with self:
            yield

    def outside(self, wait: Callable[[], object]) -> None:
        """Release the lock, which this thread holds however often, while ``wait`` runs; then take it again."""
        interrupt: BaseException | None = None
        try:
            self.ended()
            self._lock.release()
            wait()
        finally:
            while True:
                # `held` is a call as well, behind which an interrupt can come.
                try:
                    while not self.held:
                        self._acquire()
                    break
                except BaseException as error:
                    # The caller is going to release the lock, and must hold it then.
                    interrupt = error
            if interrupt is not None:
                raise interrupt
            self._begin()
