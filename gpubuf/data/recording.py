"""Connects buffers with captured CUDA graphs.

A graph repeats launches and nothing else. The work of an operation on the host, such as counting rows for ``len()``, is
noted in a :class:`Recording` while the graph is captured, and done again at each replay.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import threading
from collections import deque
from collections.abc import Callable, Hashable, Iterator, Sequence
from operator import attrgetter
from typing import Any, NamedTuple, Protocol

import torch


class Unfinished(NamedTuple):
    """A mark that an operation sets before it changes anything, and takes away when all is done.

    An exception can come between any two steps of the host: from Ctrl-C, a timer, another thread. The next operation
    finds the mark and finishes the work; see :meth:`gpubuf.data.parts.Parts.mend`.

    Attributes:
        written: how many rows had ever been written when a write began; the sampler may not know of those after them.
        counted: whether the host's mirror of the counters is right.
        empties: whether everything is being forgotten, or replaced: the buffer is empty.
        recounts: whether the count of rows written begins again at 0 with that.
        frees: whether the memory is being released, too.
    """

    written: int | None = None
    counted: bool = True
    empties: bool = False
    recounts: bool = False
    frees: bool = False


#: Data derived from rows or priorities is being changed.
DERIVED = Unfinished()

#: All rows are being forgotten, or replaced.
EMPTIES = Unfinished(empties=True)

#: All memory is being released.
FREES = Unfinished(frees=True)

#: A captured graph is being replayed, which counts rows on the device.
REPLAY = Unfinished(counted=False)


@contextlib.contextmanager
def emptied_unless_done(storages: Sequence[Any]) -> Iterator[None]:
    """Around the replacement of all that storages hold: if it does not finish, the next operation empties them."""
    outer = [storage.unfinished for storage in storages]
    try:
        for storage in storages:
            storage.unfinished = EMPTIES
        yield
        for storage, mark in zip(storages, outer, strict=True):
            storage.unfinished = mark
    except BaseException:
        for storage in storages:
            storage.unfinished = EMPTIES
        raise


_PLAIN = frozenset({bool, float, int, str, tuple})


def is_same(one: Any, other: Any) -> bool:
    """Whether two values are the same to a graph: one object, or equal numbers, texts or tuples."""
    return one is other or (type(one) is type(other) in _PLAIN and one == other)


class CaptureError(RuntimeError):
    """A step that can't be captured in a CUDA graph, or a graph that no longer fits what it was captured with."""


class RecordedOperation(Protocol):
    """Runs what a buffer does: see :class:`gpubuf.data.operation.Operation`."""

    storage: Any

    def run(self, action: Callable[[], Any]) -> Any:
        """``action()`` as one operation of the buffer."""

    @property
    def device(self) -> torch.device | None:
        """The device that the buffer works on; None before its first write."""

    def joined(self, stream: torch.cuda.Stream) -> None:
        """All operations so far come before what ``stream`` is given from now on."""


class Recording:
    """The work on the host that goes with the replays of one graph.

    Attributes:
        operations: those of the buffers that the graph uses.
        begun: one for each of their calls, in order.
        branches: the streams on which work of an operation goes on, in a branch of the graph.
        kept: memory that replays leave something in for the next one, by its owner.
    """

    def __init__(self) -> None:
        self.operations: list[RecordedOperation] = []
        self.begun: list[RecordedOperation] = []
        self.branches: dict[RecordedOperation, torch.cuda.Stream] = {}
        self.kept: dict[Hashable, Any] = {}
        self._before: dict[Hashable, Callable[[], None]] = {}
        self._after: list[Callable[[], None]] = []
        self._undo: list[Callable[[], None]] = []
        self._held: dict[tuple[int, str], tuple[Any, Callable[[Any], Any], Any]] = {}

    def before(self, key: Hashable, action: Callable[[], None]) -> None:
        """Do ``action`` before each replay; of several with the same key, the first."""
        self._before.setdefault(key, action)

    def after(self, action: Callable[[], None]) -> None:
        """Do ``action`` after each replay, as often as it was noted."""
        self._after.append(action)

    def undo(self, action: Callable[[], None]) -> None:
        """Do ``action`` if the capture is given up: its launches then never run."""
        self._undo.append(action)

    def join(self, *operations: RecordedOperation) -> None:
        """What comes next on the current stream comes after the branches of these operations; of all if none is given.

        A graph has to end on the stream on which it began.
        """
        for one in operations or list(self.branches):
            branch = self.branches.pop(one, None)
            if branch is not None:
                torch.cuda.current_stream(branch.device).wait_stream(branch)

    def refuse(self, reason: str) -> None:
        """Raise: the step does what a graph can't repeat.

        Raises:
            CaptureError: always.
        """
        raise CaptureError(f"this can't be captured in a CUDA graph: {reason}")

    def abandon(self) -> None:
        """The capture is given up: undo the work on the host."""
        for action in reversed(self._undo):
            action()

    def holds(self, owner: Any, *attributes: str) -> None:
        """The graph uses the present values of these attributes: refuse replays once they are replaced.

        ``"a.b"`` is an attribute of an attribute.
        """
        for name in attributes:
            get = attrgetter(name)
            self._held.setdefault((id(owner), name), (owner, get, get(owner)))

    def replay(self, launch: Callable[[], object]) -> None:
        """Replay by ``launch``: one operation of all the buffers, with its work on the host.

        Raises:
            CaptureError: a buffer has replaced something that the graph uses.
        """
        action = functools.partial(self._replay, launch)
        for one in reversed(self.operations):
            action = functools.partial(one.run, action)
        action()

    def _replay(self, launch: Callable[[], object]) -> None:
        for owner, get, value in self._held.values():
            try:
                now = get(owner)
            except AttributeError:
                now = None
            # Past a call for most: every replay comes here.
            if now is not value and not is_same(now, value):
                raise CaptureError(
                    f"a {type(owner).__name__} was moved, freed or given other parts, settings or shares since its "
                    "step was captured: call reset() on the captured step, and it is captured anew"
                )
        for action in self._before.values():
            action()
        # After an interrupt only the device knows whether the replay ran.
        action = functools.partial(self._launched, launch)
        for one in self.operations:
            action = functools.partial(one.storage.changing, action, what=REPLAY)
        action()

    def _launched(self, launch: Callable[[], object]) -> None:
        launch()
        for action in self._after:
            action()


class _Current(threading.local):
    recording: Recording | None = None
    operations: list[RecordedOperation] | None = None


#: The recording, and the operations of the buffers in use, of this thread.
current = _Current()


class _Eager(Recording):
    """Of a step that is not captured: what is noted is forgotten, and nothing is refused."""

    def before(self, key: Hashable, action: Callable[[], None]) -> None:
        pass

    def after(self, action: Callable[[], None]) -> None:
        pass

    def undo(self, action: Callable[[], None]) -> None:
        pass

    def holds(self, owner: Any, *attributes: str) -> None:
        pass

    def refuse(self, reason: str) -> None:
        pass


_EAGER = _Eager()


def at_replays() -> Recording:
    """Where an operation notes what is to be done at each replay of the step that it is part of, now as well.

    A step that is not captured takes such notes, and does nothing with them.
    """
    return current.recording or _EAGER


def each_run(counters: torch.Tensor, action: Callable[..., None], *args: Any) -> None:
    """``action(*args)``, for what was launched with ``counters``: now, and at each replay where a step is captured.

    Within a graph that another program captures nothing is done, for its replays can't be seen.
    """
    if current.recording is not None:
        current.recording.after(functools.partial(action, *args))
    elif not (counters.is_cuda and capturing()):
        action(*args)


def capturing() -> bool:
    """Whether work on the current CUDA stream goes into a graph, whoever captures it."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


def runs_now() -> bool:
    """Whether what an operation does happens now and once: no step is recorded, and no graph is captured."""
    # `capturing` spelled out: every sample on a GPU comes here.
    captured = torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()
    return current.recording is None and not captured


def host_can_read(tensor: torch.Tensor) -> bool:
    """Whether the host may look at a tensor's values now, without waiting for a GPU."""
    return runs_now() and tensor.is_cpu and type(tensor) is torch.Tensor


# Captures of `gpubuf.capture` that are under way, in all threads: one entry each.
_captures: list[object] = []
_postponed: deque[Callable[[], None]] = deque()


@contextlib.contextmanager
def capture_under_way() -> Iterator[None]:
    """Around a capture: garbage is not collected, and actions that would break the capture are put off.

    Finalisers of tensors, graphs and pinned memory call CUDA, and may not do so while a capture is under way. Garbage
    is collected afterwards.
    """
    capture, collects = object(), gc.isenabled()
    # All of it within the `try`: an interrupt can come after any call.
    try:
        gc.disable()
        _captures.append(capture)
        yield
    finally:
        if capture in _captures:
            _captures.remove(capture)
        if collects:
            gc.enable()
        do_postponed()


def outside_captures(action: Callable[[], None]) -> None:
    """Do ``action``, which would break a capture, as a wait for the device does: now, or once no capture is under way.

    A capture that gpubuf did not begin is known in its own thread only. The next call does the actions that it put off.
    A forked process does nothing, because it may not use its parent's CUDA.
    """
    if torch.cuda._is_in_bad_fork():
        return
    _postponed.append(action)
    do_postponed()


def do_postponed() -> None:
    """Do what :func:`outside_captures` has put off, if it can be done now."""
    while _postponed and not _captures and not capturing():
        try:
            action = _postponed.popleft()
        except IndexError:
            # Another thread, or a finaliser that has just run, has done it.
            return
        action()


@contextlib.contextmanager
def recorded(into: Recording) -> Iterator[None]:
    """Note in ``into`` the work of operations in this thread from now on."""
    with watched(into.operations):
        previous, current.recording = current.recording, into
        try:
            yield
        finally:
            current.recording = previous


@contextlib.contextmanager
def watched(operations: list[RecordedOperation]) -> Iterator[None]:
    """Enter into ``operations`` those of the buffers that are used from now on, in this thread."""
    previous, current.operations = current.operations, operations
    try:
        yield
    finally:
        current.operations = previous


def used(operation: RecordedOperation) -> None:
    """An operation of a buffer begins."""
    operations = current.operations
    if operations is not None and operation not in operations:
        operations.append(operation)
    if current.recording is not None:
        current.recording.join(operation)
        current.recording.begun.append(operation)
