"""Operations of a buffer: each is one step, for the threads of the host and for the streams of a GPU."""

from __future__ import annotations

import contextlib
import functools
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from operator import attrgetter
from typing import Any, TypeVar, cast

import torch
from torch._compile import _disable_dynamo

from gpubuf.data.recording import capturing, current, outside_captures, used
from gpubuf.data.storage.storage import TensorStorage

_T = TypeVar("_T")
_Method = TypeVar("_Method", bound=Callable[..., Any])


def _no_compiler() -> object:
    """Says that nothing is compiled."""


try:
    from torch._C._dynamo import eval_frame

    _compiler: Callable[[], object] = eval_frame.get_eval_frame_callback
    _SKIPPED: Any = eval_frame._FrameExecStrategy(eval_frame._FrameAction.SKIP, eval_frame._FrameAction.DEFAULT)
except (ImportError, AttributeError, TypeError):  # A PyTorch with other insides.
    _compiler, _SKIPPED = _no_compiler, None


def _no_handle(index: int) -> object:
    """Differs from all others."""
    return object()


_raw_stream: Callable[[int], object] = getattr(torch._C, "_cuda_getCurrentRawStream", _no_handle)
"""The handle of a device's current stream: 0.1 µs, where ``torch.cuda.current_stream`` takes 1 to 2."""


def _handle(device: torch.device) -> tuple[int, object]:
    """An identifier of the current stream of ``device``."""
    return device.index, _raw_stream(device.index)


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
        # Those that the buffer was used on, the last one at the end.
        self._used: list[torch.cuda.Stream] = []
        self._event: torch.cuda.Event | None = None
        # Of the last stream, if that was the current one.
        self._handle: tuple[int, object] | None = None
        #: The identifier of the stream that has all operations so far: one on it has nothing to wait for, or to note.
        self.only: tuple[int, object] | None = None

    def begin(self, device: torch.device) -> None:
        """Before an operation, on the stream that is current."""
        if _handle(device) == self._handle or not self._used or torch.cuda.is_current_stream_capturing():
            return
        stream = torch.cuda.current_stream(device)
        if stream != self._used[-1]:
            self._wait(stream)

    def _wait(self, stream: torch.cuda.Stream) -> None:
        """Make a stream wait for the last operation, which was on another one."""
        if self._event is None:
            stream.wait_stream(self._used[-1])
        else:
            stream.wait_event(self._event)

    def end(self, device: torch.device) -> None:
        """After an operation."""
        handle = _handle(device)
        if self._event is None and handle == self._handle:
            return
        if torch.cuda.is_current_stream_capturing():
            return
        stream = torch.cuda.current_stream(device)
        if self._event is None and self._used and stream != self._used[-1]:
            self._event = torch.cuda.Event()
        if self._event is not None:
            self._event.record(stream)
        self._note(stream, handle)

    def joined(self, stream: torch.cuda.Stream) -> None:
        """``stream`` has waited for everything so far: begin anew, as if all operations had been on it."""
        self._event = None
        self._note(stream)

    def _note(self, stream: torch.cuda.Stream, handle: tuple[int, object] | None = None) -> None:
        self._used, self._handle = [*(each for each in self._used if each != stream), stream], handle
        self.only = handle if self._event is None else None

    def settle(self) -> None:
        """Before memory is given up: every stream that the buffer was used on waits for its last operation.

        The allocator gives memory back to the stream on which it was made, and knows nothing of the others.
        """
        for stream in self._used[:-1]:
            self._wait(stream)


def graph_break(method: _Method) -> _Method:
    """Decorates what a training step calls: ``torch.compile`` leaves its graph for it, and it runs as it does without.

    What PyTorch has for that takes a tenth of a small write, and is asked only where something is compiled.
    """
    apart = _disable_dynamo(method)

    @functools.wraps(method)
    def call(*args: Any, **named: Any) -> Any:
        return (method if _compiler() is None else apart)(*args, **named)

    return _without_frame(cast("_Method", call))


def _without_frame(call: _Method) -> _Method:
    """A function whose frame the compiler leaves alone, and which it leaves its graph for."""
    if _SKIPPED is None:
        return cast("_Method", _disable_dynamo(call))
    eval_frame.set_code_exec_strategy(call.__code__, _SKIPPED)
    vars(call)["_torchdynamo_disable"] = True
    return call


class Operation:
    """Runs what a buffer does: one operation at a time, in the order in which threads asked for it.

    Operations on a GPU are ordered across streams. If one was interrupted, the next one finishes its work. An exception
    can come at any call, from Ctrl-C, a timer or another thread: the lock is held by ``with`` alone, whose end is a
    function written in C, so that nothing leaves it held.

    Args:
        storage: the buffer's storage.
        mend: finishes an interrupted operation; a method, held weakly.

    Attributes:
        storage: the buffer's storage; to be set when that is replaced.
        lock: is held by the thread whose operation runs.
        intake: a weak reference to what takes in the rows of other processes, called before each operation; None: no
            process but this one writes.
    """

    def __init__(self, storage: TensorStorage, mend: Callable[[], None] | None = None) -> None:
        self.storage = storage
        self._mend = (lambda: _nothing) if mend is None else weakref.WeakMethod(mend)
        self.intake: Callable[[], Callable[[], object] | None] | None = None
        self._streams = StreamOrder()
        # The operation holds on to the storage: its memory is released after this.
        weakref.finalize(self, outside_captures, self._streams.settle).atexit = False
        self.renew()

    def renew(self) -> None:
        """Begin with a lock that nobody has: in a copy, and in a forked process."""
        # Reentrant so that it knows its owner: what an operation calls is part of it.
        self.lock = threading.RLock()
        # A free lock goes to the first thread that asks, mostly the one that has just released it: a thread that writes
        # in a loop would keep all others out. So a thread that waits has a place here until it has the lock.
        self.line: deque[Any] = deque()
        # Whether to look for one. Right but for a moment: it costs a turn, no more.
        self._busy = False

    def run(self, action: Callable[..., _T], *args: Any, **named: Any) -> _T:
        """``action(*args, **named)`` as one operation, or as a part of the one that calls this."""
        # `held` spelled out: every call comes here.
        if self.lock._is_owned():  # type: ignore[attr-defined]
            return action(*args, **named)
        if self.line or self._busy:
            return self._in_line(action, args, named)
        with self.lock: return self._step(action, args, named)  # noqa: E701  # fmt: skip

    write = run
    """Runs what writes rows. In a process that was handed the buffer of another, nothing else can be done with it."""

    @property
    def held(self) -> bool:
        """Whether an operation of this thread runs."""
        return self.lock._is_owned()  # type: ignore[attr-defined, no-any-return]

    # A `with` on one line: a debugger that stops at lines can't interrupt between its block and its end.

    def _in_line(self, action: Callable[..., _T], args: Any, named: Any) -> _T:
        """:meth:`run`, after all who came before."""
        place = threading.RLock()
        with place: return self._wait(place, action, args, named)  # noqa: E701  # fmt: skip

    def _wait(self, place: Any, action: Callable[..., _T], args: Any, named: Any) -> _T:
        line = self.line
        try:
            line.append(place)
            while (first := line[0]) is not place:
                with first: self._pass(first)  # noqa: E701  # fmt: skip
            with self.lock: return self._turn(place, action, args, named)  # noqa: E701  # fmt: skip
        finally:
            with contextlib.suppress(ValueError):
                line.remove(place)

    def _pass(self, first: Any) -> None:
        """The thread of the first place is done, or gave up: an interrupt may have kept it in the line."""
        if self.line[0] is first:
            self.line.popleft()

    def _turn(self, place: Any, action: Callable[..., _T], args: Any, named: Any) -> _T:
        self._busy = True
        self.line.remove(place)
        return self._step(action, args, named)

    def _step(self, action: Callable[..., _T], args: Any, named: Any) -> _T:
        storage = self.storage
        # Past `gpu`, which is a call, and on a GPU past those about streams while there is but one.
        counters = storage.ring.counters
        number = counters.device.index if counters.is_cuda and self._has_cuda else -1
        orderly = number < 0 or self._streams.only == (number, _raw_stream(number))
        try:
            self._busy = True
            if (
                storage.unfinished is not None
                or current.operations is not None
                or self.intake is not None
                or not orderly
            ):
                self._begin()
            return action(*args, **named)
        finally:
            self._busy = False
            # A write may allocate the rows, and a move may bring them elsewhere.
            if not orderly or self.storage.ring.counters is not counters:
                self.ended()

    def _begin(self) -> None:
        used(self)
        device = self.gpu()
        if device is not None:
            self._streams.begin(device)
        if self.storage.unfinished is not None:
            (self._mend() or _nothing)()
        if self.intake is not None and current.recording is None and (take := self.intake()) is not None:
            take()

    def ended(self) -> None:
        """Note where on its stream an operation on a GPU ends."""
        device = self.gpu()
        if device is not None:
            self._streams.end(device)

    @contextlib.contextmanager
    def block(self) -> Iterator[None]:
        """Around what is to be one operation, for programs that know a lock, ``with buffer._replay_lock:``."""
        if self.held:
            yield
            return
        with self.lock:
            # Begins as every operation does; those within the block are parts of it.
            self._step(_nothing, (), {})
            try:
                yield
            finally:
                self.ended()

    def mend(self) -> None:
        """Finish an interrupted operation. Within one there is none."""
        self.run(_nothing)

    def abandon(self) -> bool:
        """In a forked process, begin with a lock that nobody has. Returns whether another thread had it."""
        taken = not self.held and not self.lock.acquire(False)
        self.renew()
        return taken

    @property
    def in_use(self) -> bool:
        """Whether the buffer is still there."""
        return self._mend() is not None

    def gpu(self) -> torch.device | None:
        """The GPU that operations are launched on, or None. Fake tensors claim to be on one that is not there."""
        # Past the properties, which would cost more than all else here.
        counters = self.storage.ring.counters
        return counters.device if counters.is_cuda and self._has_cuda else None

    def launches_at_once(self) -> bool:
        """Whether what is launched runs, rather than become part of a graph that is captured on the current stream."""
        return self.gpu() is None or not capturing()

    @functools.cached_property
    def _has_cuda(self) -> bool:
        return torch.cuda.is_available()

    @property
    def device(self) -> torch.device | None:
        """The device that the buffer works on; None before its first write."""
        return self.storage.ring.counters.device if self.storage.initialized else None

    def joined(self, stream: torch.cuda.Stream) -> None:
        """See :meth:`StreamOrder.joined`. ``stream``, which is current, waits for what other threads did."""
        self.run(self._streams.joined, stream)

    def settle(self) -> None:
        """See :meth:`StreamOrder.settle`."""
        outside_captures(self._streams.settle)


def _nothing() -> None:
    """An operation that has nothing to do of its own."""


class Alone:
    """The operation of what is part of no buffer."""

    in_use = False

    def run(self, action: Callable[..., _T], *args: Any, **named: Any) -> _T:
        """``action(*args, **named)``."""
        return action(*args, **named)


#: See :class:`Alone`.
ALONE = Alone()


def operation(method: _Method) -> _Method:
    """Make a method of a buffer, or of one of its parts, one operation of it; a graph break to ``torch.compile``."""
    return _run_by(attrgetter("operation.run"), method)


def writing(method: _Method) -> _Method:
    """:func:`operation` for a method that writes rows."""
    return _run_by(attrgetter("operation.write"), method)


def _run_by(runner: Callable[[Any], Callable[..., Any]], method: _Method) -> _Method:
    @graph_break
    def apart(self: Any, *args: Any, **named: Any) -> Any:
        return runner(self)(method, self, *args, **named)

    # `graph_break` spelled out: every operation comes here.
    @functools.wraps(method)
    def step(self: Any, *args: Any, **named: Any) -> Any:
        if _compiler() is not None:
            return apart(self, *args, **named)
        return runner(self)(method, self, *args, **named)

    return _without_frame(cast("_Method", step))


def together(operations: Iterable[Operation], action: Callable[[], _T]) -> _T:
    """``action()`` as one operation of several buffers. Their locks are taken in one order, whoever asks for them."""
    for one in sorted(operations, key=id, reverse=True):
        action = functools.partial(one.run, action)
    return action()
