"""The lock of a buffer. It makes each operation one step, for the threads of the host and for the streams of a GPU."""

from __future__ import annotations

import contextlib
import functools
import threading
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from typing import Self, TypeVar

import torch
from torch._compile import _disable_dynamo

from gpubuf.data.recording import current, outside_captures, used
from gpubuf.data.storage.storage import TensorStorage

_T = TypeVar("_T")


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
        if stream != last:
            self._wait(stream, last)

    def _wait(self, stream: torch.cuda.Stream, last: torch.cuda.Stream) -> None:
        """Make a stream wait for the last operation, which was on another one."""
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
            if stream != last:
                self._wait(stream, last)


#: Decorates what a training step calls: ``torch.compile`` leaves its graph for it, and it runs as it does without.
graph_break = _disable_dynamo


def _nothing(*exception: object) -> None:
    """The end of a block."""


class _Exit:
    """``Guard.__exit__``: takes the lock when a ``with`` begins, and gives it what ends its block.

    ``with`` looks its exit up before it enters the block, and keeps it where nothing else refers to it.
    """

    def __get__(self, guard: Guard | None, kind: type | None = None) -> Callable[..., None]:
        if guard is None:
            raise AttributeError("the exit of a lock depends on the lock")
        lock = guard._lock
        # `held` spelled out: each operation comes here.
        if lock._is_owned():  # type: ignore[attr-defined]
            return _nothing
        try:
            return _hold(guard._take(), guard._give_back)
        except BaseException:
            if lock._is_owned():  # type: ignore[attr-defined]
                guard._give_back(None)
            raise


def _hold(end: Callable[..., None], give_back: Callable[..., None]) -> Callable[..., None]:
    """Holds a lock that was taken. A function of its own: the traceback of a draw keeps the locals of its callers."""
    hold = functools.partial(end)
    try:
        # In its own attributes: its end refers to the lock.
        hold.given_back = weakref.ref(hold, give_back)  # type: ignore[attr-defined]
        return hold
    except BaseException:
        vars(hold).clear()
        raise


class Guard:
    """A reentrant lock, ``with guard:``, that no interrupt can leave held.

    An exception can come at any call, that of an ``__exit__`` too: from Ctrl-C, a timer, another thread. A function of
    Python that has to release a lock may never begin. So a ``with`` holds the lock by an object, and the lock is
    released when that object is freed, by a function written in C: however the block is left, nothing comes between.
    """

    __exit__ = _Exit()

    def __init__(self) -> None:
        self.renew()

    def renew(self) -> None:
        """Begin with a lock that nobody has."""
        # Reentrant so that it knows its owner. A `with` inside another one leaves it alone.
        self._lock = threading.RLock()
        # It is told about the weak reference too.
        self._give_back = functools.partial(self._lock.__exit__, None, None)

    def __enter__(self) -> Self:
        return self

    @property
    def held(self) -> bool:
        """Whether this thread holds the lock."""
        return self._lock._is_owned()  # type: ignore[attr-defined, no-any-return]

    def _take(self) -> Callable[..., None]:
        """Take the lock. Returns what is called at the end of the block, before the lock is released."""
        self._lock.acquire()
        return _nothing


class BufferLock(Guard):
    """The lock of a buffer, ``with lock:``. Threads get it in the order in which they asked.

    Operations on a GPU are ordered across streams. If an operation was interrupted, the next one finishes its work.

    Args:
        storage: the buffer's storage.
        mend: finishes an interrupted operation; a method, held weakly.

    Attributes:
        storage: the buffer's storage; to be set when that is replaced.
        intake: a weak reference to what takes in the rows of other processes, called before each operation; None: no
            process but this one writes.
    """

    def __init__(self, storage: TensorStorage, mend: Callable[[], None] | None = None) -> None:
        self.storage = storage
        self._mend = None if mend is None else weakref.WeakMethod(mend)
        self.intake: Callable[[], Callable[[], object] | None] | None = None
        self._streams = StreamOrder()
        # The lock holds on to the storage: its memory is released after this.
        weakref.finalize(self, outside_captures, self._streams.settle).atexit = False
        self._has_cuda: bool | None = None
        self.renew()

    def renew(self) -> None:
        """Begin with a lock that nobody has: in a copy, and in a forked process."""
        super().renew()
        # A free lock goes to the first thread that asks, mostly the one that has just released it: a thread that writes
        # in a loop would keep all others out. So a thread that waits holds a place in this line until it has the lock.
        self._waiting: deque[Guard] = deque()

    def abandon(self) -> bool:
        """In a forked process, begin with a lock that nobody has. Returns whether another thread had it."""
        taken = not self.held and not self._lock.acquire(False)
        self.renew()
        return taken

    @property
    def in_use(self) -> bool:
        """Whether the buffer that the lock was made for is still there."""
        return self._mend is None or self._mend() is not None

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
        if self.intake is not None and (take := self.intake()) is not None:
            take()

    def _take(self) -> Callable[..., None]:
        if self._waiting or not self._lock.acquire(False):
            self._stand_in_line()
        storage, ring = self.storage, self.storage._ring
        # Past `gpu`, which is a call. The first write decides whether the buffer is on a GPU.
        launches = (ring is None or ring.counters.is_cuda) and self._cuda_present()
        if storage.unfinished is not None or current.locks is not None or launches or self.intake is not None:
            self._begin()
        return self.ended if launches else _nothing

    def _stand_in_line(self) -> None:
        """Take the lock after all who came before."""
        line, place = self._waiting, Guard()
        with place:
            try:
                line.append(place)
                while (first := line[0]) is not place:
                    with first:
                        # The first thread has got the lock or given up. An interrupt may have kept it in the line.
                        if line[0] is first:
                            line.popleft()
                self._lock.acquire()
            finally:
                with contextlib.suppress(ValueError):
                    line.remove(place)

    def mend(self) -> None:
        """Finish an interrupted operation. With the lock held there is none left."""
        with self:
            pass

    def ended(self, *exception: object) -> None:
        """Note where on its stream an operation on a GPU ends."""
        device = self.gpu()
        if device is not None:
            self._streams.end(device)


def under(locks: Sequence[BufferLock], action: Callable[[], _T]) -> _T:
    """``action()`` with the locks of several buffers held. They are taken in one order, whoever asks for them."""
    return holding(sorted(locks, key=id), action)


def holding(guards: Sequence[Guard], action: Callable[[], _T]) -> _T:
    """``action()`` with locks held, which are taken one after the other."""
    if not guards:
        return action()
    with guards[0]:
        return holding(guards[1:], action)
