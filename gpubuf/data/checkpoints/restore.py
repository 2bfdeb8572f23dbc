"""Putting a state into a buffer: all of it, or nothing.

What can be verified is verified before anything changes. For what only shows when it is tried (transforms and samplers
of the user's own, memory that runs out, an interrupt) the buffer remembers what it was, and is put back.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import signal
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FrameType, FunctionType, MethodType, ModuleType, TracebackType
from typing import Any, Self

import torch
from torch import Tensor, nn

from gpubuf.data.checkpoints.parts import Parts
from gpubuf.data.checkpoints.validate import check_batch_size, check_processing
from gpubuf.data.lock import BufferLock
from gpubuf.data.prefetch import copied, tensors_of
from gpubuf.data.samplers.base import Sampler
from gpubuf.data.storage import host_memory
from gpubuf.data.storage.layout import Data, Pieces, RowLayout
from gpubuf.data.storage.linking import Repeated
from gpubuf.data.storage.row_memory import Storage
from gpubuf.data.storage.schema import Form
from gpubuf.data.storage.tensor_storage import TensorStorage

logger = logging.getLogger("gpubuf")

#: Where the state of a buffer says that it is one of several.
TOGETHER = "_together"


class Signals:
    """What the program does at a signal, such as Ctrl-C, it does later while :attr:`wait` says so.

    The first signal of a kind waits for :meth:`end`; a second one does not. An exception that a signal raises makes
    all later ones wait: what it interrupts is put back.

    Attributes:
        wait: whether signals wait.
    """

    def __init__(self) -> None:
        self.wait = self._ended = False
        self._handlers: dict[int, Callable[[int, FrameType | None], Any]] = {}
        self._waiting: dict[int, FrameType | None] = {}

    def begin(self) -> None:
        """Take the place of the program's handlers. They are called in the main thread alone; elsewhere none wait."""
        if threading.current_thread() is threading.main_thread():
            for number in signal.valid_signals():
                handler = signal.getsignal(number)
                if callable(handler):
                    self._handlers[number] = handler
                    signal.signal(number, self._handle)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.wait and not self._ended and number not in self._waiting:
            self._waiting[number] = frame
            logger.warning(
                "signal %d (%s) waits until the buffer is whole; another one does not, and can leave the buffer empty",
                number,
                signal.strsignal(number),
            )
            return
        self._waiting.pop(number, None)
        try:
            self._handlers[number](number, frame)
        except BaseException:
            self.wait = True
            raise

    def end(self) -> None:
        """Give the handlers their places back, and call those of the signals that wait."""
        self._ended = True
        with contextlib.ExitStack() as stack:
            for number, handler in self._handlers.items():
                if signal.getsignal(number) == self._handle:
                    signal.signal(number, handler)
                if number in self._waiting:
                    stack.callback(handler, number, self._waiting[number])


@dataclass
class Together:
    """Buffers that all take their states, or none: what has to be put back is put back for all of them.

    Attributes:
        stack: puts things back.
        signals: those that come meanwhile.
        last: what is done once all have their states.
        finished: whether all of it is done, and nothing is put back any more.
    """

    stack: contextlib.ExitStack
    signals: Signals
    last: list[Callable[[], None]] = field(default_factory=list)
    finished: bool = False

    def finish(self) -> None:
        """All have their states."""
        self.signals.wait = True
        for action in self.last:
            action()
        self.finished = True


@contextmanager
def together(*transforms: nn.Module) -> Iterator[Together]:
    """Around the restoration of buffers whose locks are held, and of transforms that they have in common."""
    before = Before(*transforms)
    with contextlib.ExitStack() as stack:
        group = Together(stack, Signals())
        # After all has been put back.
        stack.callback(group.signals.end)
        try:
            group.signals.begin()
            yield group
            group.finish()
        except BaseException:
            group.signals.wait = True
            if not group.finished:
                before.put_back()
            raise


def check(parts: Parts, state: dict[str, Any]) -> None:
    """Raise unless a buffer of these parts can take ``state``, as far as that shows before it is tried.

    Raises:
        ValueError: it can't; the buffer is as it was.
    """
    _checked_rows(parts, state)


def _checked_rows(parts: Parts, state: dict[str, Any]) -> dict[str, Any]:
    storage, sampler = parts.storage, parts.sampler
    kind = state["_sampler"]["type"]
    if kind != type(sampler).__name__:
        raise ValueError(f"the state is that of a {kind}, this buffer has a {type(sampler).__name__}")
    check_batch_size(state["_batch_size"])
    parts.prefetcher.check(state.get("_prefetch", []))
    check_processing(parts.processing, state)
    rows = dict(state["_storage"])
    if rows["initialized"]:
        rows["rows"] = Pieces.of(rows["rows"], storage.ndim)
        if not storage.initialized:
            _check_rows(sampler, storage, storage.form_for(rows))
            shape = storage.full_shape(tuple(rows["shape"]))
            storage.beside = sampler.index_beside(storage.requested_device, shape)
        storage.check_state(rows)
    return rows


def restore(parts: Parts, state: dict[str, Any]) -> None:
    """Restore the state of a buffer whose lock is held. See :meth:`gpubuf.ReplayBuffer.load_state_dict`."""
    storage, sampler, ahead = parts.storage, parts.sampler, parts.prefetcher
    batch_size: int | None = state["_batch_size"]
    group: Together | None = state.get(TOGETHER)
    rows, queue = _checked_rows(parts, state), state.get("_prefetch", [])
    with ahead.quiet(), together() if group is None else contextlib.nullcontext(group) as whole:
        replacement = whole.stack.enter_context(Replacement(parts, whole))
        parts.transform.load_state_dict(state["_transforms"])
        if parts.processing is not None:
            parts.processing.load_state_dict(state["_processing"])
        slots = ahead.prepared(queue, parts.pin_memory) if storage.initialized else None
        order = storage.load_state_dict(replacement.watched(rows))
        replacement.begun = True
        sampler.load_state_dict(state["_sampler"], order)
        parts.writer.load_state_dict(state["_writer"])
        if slots is None:
            slots = ahead.prepared(queue, parts.pin_memory)
        whole.last.append(functools.partial(replacement.take, slots, batch_size))


def _check_rows(sampler: Sampler, storage: TensorStorage, form: Form) -> None:
    try:
        sampler.check_rows(form.written, storage.ndim)
        storage.check_rows(form)
    except (LookupError, RuntimeError, TypeError) as error:
        raise ValueError(f"the buffer can't serve the rows of the state: {error}") from error


# The rows


class Replacement:
    """Puts a buffer back as it was where the ``with`` block that replaces its contents does not finish.

    Rows that are to be replaced are copied to the host first, if there is room. Otherwise signals wait until all is
    replaced, and an error then leaves an empty buffer behind, never a mixture.

    Attributes:
        begun: whether rows may have been replaced.
    """

    def __init__(self, parts: Parts, whole: Together) -> None:
        self._parts, self._whole = parts, whole
        self._storage, self._sampler, self._writer = parts.storage, parts.sampler, parts.writer
        self._fresh = not self._storage.initialized
        self._kept = None if self._fresh else _kept(self._storage)
        self._counters = (0, 0) if self._fresh else (self._storage.written, len(self._storage))
        self._skipped = self._storage.written - self._storage.rows_written
        self._laps, self._unfinished = self._storage._laps, self._storage.unfinished
        self._queue = list(parts.prefetcher.queue)
        self._around = Before(*(part for part in (parts.transform, parts.processing) if part is not None))
        self._before = Before(self._sampler, self._writer)
        self.begun = False

    def take(self, slots: list[Any], batch_size: int | None) -> None:
        """All is replaced: give the buffer the queue and the batch size of the state too."""
        self._parts.prefetcher.replace(slots)
        self._parts.adopt(batch_size)

    def watched(self, state: dict[str, Any]) -> dict[str, Any]:
        """The storage's state; :attr:`begun` is set when the first of its rows are asked for."""
        if not state["initialized"]:
            return state
        example, parts = state["rows"]
        return {**state, "rows": Pieces(example, Repeated(functools.partial(self._watched, parts)))}

    def _watched(self, parts: Iterable[tuple[int, Data]]) -> Iterator[tuple[int, Data]]:
        self.begin()
        yield from parts

    def begin(self) -> None:
        """Rows are replaced from here on."""
        self._whole.signals.wait |= self._kept is None and not self._fresh
        self.begun = True

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        # What is done last refers to this object.
        self._whole.last.clear()
        if self._whole.finished or error is None:
            return
        storage = self._storage
        if self._fresh:
            if storage.relocatable:
                storage.free()
                storage._laps = self._laps
            else:
                storage.empty()
        elif not self.begun:
            storage.counters.set(*self._counters)
            storage.counters.skipped = self._skipped
        elif self._kept is not None:
            try:
                storage.load_state_dict(self._kept)
            except BaseException as another:
                self._forget(another)
                raise
        else:
            self._forget(error)
        if self._fresh or not self.begun or self._kept is not None:
            self._before.put_back()
        self._around.put_back()
        storage.unfinished = self._unfinished
        self._parts.prefetcher.replace(self._queue)
        self._parts.adopt(self._parts.batch_size)

    def _forget(self, error: BaseException) -> None:
        self._storage.empty()
        self._sampler.empty()
        error.add_note("the rows were being replaced: the buffer is empty now")


def _is_own(component: object) -> bool:
    return type(component).__module__.partition(".")[0] == __name__.partition(".")[0]


def _kept(storage: TensorStorage) -> dict[str, Any] | None:
    """A copy of a storage's state on the host; None where that would take more than half of the free memory."""
    state = storage.state_dict()
    if 2 * sum(tensor.nbytes for tensor in tensors_of(state)) > host_memory.free().host:
        return None
    views = {name: state[name] for name in ("rows", "sharing") if name in state}
    return state | {name: copied(value, torch.device("cpu")) for name, value in views.items()}


# Objects

# The models of batches in a layout have no memory that could be copied.
_NO_PARTS = (Storage, BufferLock, RowLayout, type, ModuleType, FunctionType, MethodType)


class Before:
    """Remembers objects with all their parts: attributes, containers and tensors.

    Tensors are put back into the memory that they had, so that captured graphs and views see it. Looked into is what is
    gpubuf's own, a module of PyTorch, or of the same Python module as what refers to it.
    """

    def __init__(self, *objects: object) -> None:
        self._containers: list[tuple[Any, Any]] = []
        self._tensors: list[tuple[Tensor, Tensor]] = []
        self._seen: dict[int, object] = {}
        for thing in objects:
            self._note(vars(thing), type(thing).__module__)

    def _note(self, value: Any, home: str) -> None:
        if id(value) in self._seen or isinstance(value, _NO_PARTS):
            return
        self._seen[id(value)] = value
        if isinstance(value, Tensor):
            self._tensors.append((value, value.detach().clone()))
        elif isinstance(value, (dict, list, set, deque, tuple)):
            if not isinstance(value, tuple):
                self._containers.append((value, value.copy()))
            for item in list(value.values()) if isinstance(value, dict) else value:
                self._note(item, home)
        elif hasattr(value, "__dict__") and (
            isinstance(value, nn.Module) or _is_own(value) or type(value).__module__ == home
        ):
            self._note(vars(value), type(value).__module__)

    def put_back(self) -> None:
        """Make all of it what it was."""
        for container, before in self._containers:
            container.clear()
            (container.extend if isinstance(container, (list, deque)) else container.update)(before)
        with torch.no_grad():
            for tensor, before in self._tensors:
                tensor.copy_(before)
