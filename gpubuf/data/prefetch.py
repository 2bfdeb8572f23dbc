"""Batches prepared ahead: drawn, gathered, collated, transformed and pinned while the consumer computes.

With the rows on the CPU, one worker thread prepares them: one, so that draws and transforms run in order. The kernels
release the interpreter lock. With the rows on a GPU, the caller launches the work on a stream of its own.

An interrupt may strike the consumer anywhere. So what passes between the threads passes by one call of a function
written in C (``SimpleQueue`` and ``deque``), locks are held by :class:`~gpubuf.data.lock.Guard`, and a
batch is waited for only by those who can make it themselves, should nobody else be at it.

A batch is drawn as of the moment at which it was asked for. If another operation (a write, new priorities) comes before
the worker has drawn it, that operation makes the draw first: see
:class:`~gpubuf.data.lock.BufferLock`. So the contents of batches depend only on the order of the calls.
"""

from __future__ import annotations

import _thread
import atexit
import contextlib
import functools
import os
import threading
import time
import traceback
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from queue import Empty, SimpleQueue
from typing import Any, NamedTuple

import torch
from tensordict import TensorDictBase, is_tensorclass
from torch import Tensor

from gpubuf.data.lock import BufferLock, Guard, _nothing
from gpubuf.data.storage.layout import Data
from gpubuf.kernels._threads import stay_alone

_warned = False


def map_tensors(data: Any, function: Callable[[Tensor], Tensor]) -> Any:
    """``data`` with ``function`` applied to every tensor in it. Other values stay as they are.

    Args:
        data: a tensor, a TensorDict or tensorclass, or tuples, lists and mappings of them, nested.
        function: from a tensor to one of the same shape.

    Returns:
        Containers of the same types, new ones. The device that a TensorDict claims makes no difference.
    """
    if isinstance(data, Tensor):
        return function(data)
    if isinstance(data, TensorDictBase) or is_tensorclass(data):
        return data.apply(function)
    if isinstance(data, Mapping):
        return type(data)({key: map_tensors(value, function) for key, value in data.items()})  # type: ignore[call-arg]
    if isinstance(data, tuple) and hasattr(data, "_fields"):
        return type(data)(*(map_tensors(value, function) for value in data))
    if isinstance(data, (tuple, list)):
        return type(data)(map_tensors(value, function) for value in data)
    return data


def tensors_of(data: Any) -> Iterator[Tensor]:
    """Every tensor in ``data``, which is as for :func:`map_tensors`."""
    if isinstance(data, Tensor):
        yield data
    elif isinstance(data, TensorDictBase) or is_tensorclass(data):
        yield from (value for value in data.values(True, True) if isinstance(value, Tensor))
    elif isinstance(data, (Mapping, tuple, list)):
        for value in data.values() if isinstance(data, Mapping) else data:
            yield from tensors_of(value)


def copied(data: Any, device: torch.device | str | None, *, claim: bool = False) -> Any:
    """A copy of ``data``, on ``device`` if that is not None; ``claim``: set the TensorDict's device."""
    if device is None:
        return map_tensors(data, Tensor.clone)
    if claim and (isinstance(data, TensorDictBase) or is_tensorclass(data)):
        data = data.to(device)
    return map_tensors(data, lambda tensor: tensor.to(device, copy=True))


def pin(data: Any) -> Any:
    """``data`` with every CPU tensor copied to pinned memory. Tensors on a GPU stay as they are.

    A tensor that occurs several times is copied once, and occurs several times in the result.

    Args:
        data: as for :func:`map_tensors`. Neither it nor its tensors change.

    Returns:
        The same structure, in which ``is_pinned()`` holds for every CPU tensor; or ``data`` itself if there is no
        accelerator, with one warning a process. No host sync.
    """
    global _warned
    if not torch.cuda.is_available():
        if not _warned:
            _warned = True
            warnings.warn("pin_memory=True has no effect without an accelerator", stacklevel=3)
        return data
    done: dict[int, Tensor] = {}

    def pinned(tensor: Tensor) -> Tensor:
        if tensor.device.type != "cpu":
            return tensor
        copy = done.get(id(tensor))
        if copy is None:
            copy = done[id(tensor)] = tensor.pin_memory()
        return copy

    return map_tensors(data, pinned)


def clear_traceback(error: BaseException) -> None:
    """Empty the functions that an error has come through.

    They refer to the buffer, whose queue keeps the error until its batch is asked for: neither would be freed before
    garbage is collected.
    """
    seen: set[int] = set()
    chain: list[BaseException | None] = [error]
    while chain:
        one = chain.pop()
        if one is not None and id(one) not in seen:
            seen.add(id(one))
            traceback.clear_frames(one.__traceback__)
            chain += [one.__cause__, one.__context__]


_STATE_KEYS = ("data", "info", "ran_out", "device", "claimed")


#: The tasks of every worker that runs. It says so itself: whoever starts it can be interrupted before and after.
_workers = set[SimpleQueue[Any]]()


def _work(tasks: SimpleQueue[Any], threads: int, token: object) -> None:
    """The worker's thread, which is there as long as ``token`` is.

    Torch uses as many threads in it as in the consumer, and gpubuf's kernels one.
    """
    try:
        _workers.add(tasks)
        torch.set_num_threads(threads)
        stay_alone()
        while (task := tasks.get()) is not None:
            # The consumer is told of it.
            with contextlib.suppress(BaseException):
                task()
            del task
    finally:
        _workers.discard(tasks)
        # The traceback of a batch that failed leads here.
        del token


def _started(owner: Prefetcher) -> tuple[SimpleQueue[Any], Callable[[], object]]:
    """A worker that ends with its owner: its tasks, and whether it is there.

    A function of its own: no traceback that leads through the caller holds the token. And no ``threading.Thread``: an
    interrupt while that starts may keep the new thread waiting for ever.
    """
    tasks, token = SimpleQueue[Any](), threading.Lock()
    weakref.finalize(owner, tasks.put, None).atexit = False
    # OpenMP and MKL keep a number of threads for every thread that calls them: this one's is the caller's.
    _thread.start_new_thread(_work, (tasks, torch.get_num_threads(), token))
    return tasks, weakref.ref(token)


def _end_workers() -> None:
    """Before the interpreter takes itself apart."""
    while _workers:
        # One that has just been started may come last.
        for tasks in [*_workers]:
            tasks.put(None)
        time.sleep(0.001)


atexit.register(_end_workers)
# The threads stay with the parent.
os.register_at_fork(after_in_child=_workers.clear)


def _is_entry(entry: Any) -> bool:
    """Whether ``entry`` is a batch in the queue's state."""
    if not isinstance(entry, dict) or sorted(entry) != sorted(_STATE_KEYS):
        return False
    info, device = entry["info"], entry["device"]
    pairs = isinstance(info, list) and all(
        isinstance(pair, (list, tuple)) and len(pair) == 2 and _is_key(pair[0]) and isinstance(pair[1], Tensor)
        for pair in info
    )
    if not pairs or "index" not in (key for key, _ in info):
        return False
    flags = isinstance(entry["ran_out"], bool) and isinstance(entry["claimed"], bool)
    return flags and (device is None or device == "storage" or _is_device(device))


def _is_key(key: Any) -> bool:
    return isinstance(key, str) or (
        isinstance(key, (list, tuple)) and len(key) > 0 and all(isinstance(name, str) for name in key)
    )


def _is_device(name: Any) -> bool:
    """Whether there is a device of this name here."""
    try:
        return isinstance(name, str) and torch.empty(0, device=name).device.type != "meta"
    except (AssertionError, RuntimeError):
        return False


class Batch(NamedTuple):
    """A batch on its way to the consumer."""

    data: Data
    info: dict[Any, Tensor]
    ran_out: bool  # whether it is the last one of an epoch
    has_info: bool = False  # whether ``info`` is part of ``data``


class SideStream:
    """CUDA streams for work ahead of the consumer, and the events that tie them to the consumer's. No host sync.

    Does nothing unless CUDA is in use.
    """

    def __init__(self) -> None:
        self._streams: dict[torch.device, torch.cuda.Stream] = {}

    def fork(self, device: torch.device | None) -> tuple[torch.device, torch.cuda.Event] | None:
        """Note, in the consumer's thread, what its stream has been given up to now; ``device`` None: the current."""
        if not torch.cuda.is_initialized():
            return None
        if device is None:
            device = torch.device("cuda", torch.cuda.current_device())
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(device))
        return device, event

    @contextlib.contextmanager
    def running(self, fork: tuple[torch.device, torch.cuda.Event] | None) -> Iterator[None]:
        """Make the side stream current, after the work noted by ``fork``."""
        if fork is None:
            yield
            return
        device, event = fork
        stream = self._streams.get(device)
        if stream is None:
            stream = self._streams[device] = torch.cuda.Stream(device)
        stream.wait_event(event)
        with torch.cuda.stream(stream):
            yield

    def ready(self, batch: Batch) -> dict[torch.device, torch.cuda.Event]:
        """An event for every GPU on which the batch has tensors, recorded on the streams that are current."""
        if not torch.cuda.is_initialized():
            return {}
        events = {}
        for device in {t.device for t in tensors_of((batch.data, batch.info)) if t.is_cuda}:
            events[device] = torch.cuda.Event()
            events[device].record(torch.cuda.current_stream(device))
        return events

    def join(self, batch: Batch, ready: dict[torch.device, torch.cuda.Event]) -> None:
        """Hand the batch to the streams that are current now: they wait for it, and its memory waits for them."""
        if not ready:
            return
        for device, event in ready.items():
            torch.cuda.current_stream(device).wait_event(event)
        for tensor in tensors_of((batch.data, batch.info)):
            if tensor.is_cuda:
                tensor.record_stream(torch.cuda.current_stream(tensor.device))


class _Asked:
    """One batch that was asked for.

    Attributes:
        draw, finish: make it. Given up once that is done: they hold on to the buffer.
        fork: of the consumer's stream, see :class:`SideStream`.
        worker: the thread that it was given to, as long as that is there.
        undrawable: whether it has to be drawn again when it is asked for: the draw failed, or the batch was dropped.
        drawn: the batch before ``finish``, or the error of the draw.
        outcome: the batch, or the error that takes its place.
        ready: events after which the batch is ready.
        opened: has something in it once there is an outcome.
    """

    def __init__(
        self,
        draw: Callable[[], Batch] | None = None,
        finish: Callable[[Batch], Batch] | None = None,
        fork: tuple[torch.device, torch.cuda.Event] | None = None,
        outcome: Batch | None = None,
    ) -> None:
        self.draw, self.finish, self.fork = draw, finish, fork
        self.grad = torch.is_grad_enabled()
        self.worker: Callable[[], object] = _nobody
        self.undrawable = self.dropped = False
        self.drawn: Batch | Exception | None = None
        self.outcome: Batch | Exception | None = outcome
        self.ready: dict[torch.device, torch.cuda.Event] = {}
        self.opened: SimpleQueue[None] = SimpleQueue()

    def perform(self) -> None:
        """Draw and gather, unless that is done. An error is kept for the consumer."""
        if self.draw is None or self.drawn is not None:
            return
        try:
            self.drawn = self.draw()
        except Exception as error:
            self.drawn, self.undrawable = error, True

    def finished(self) -> Batch:
        """Collate, transform, pin what was drawn."""
        if not isinstance(self.drawn, Batch):
            assert self.drawn is not None
            raise self.drawn
        assert self.finish is not None
        return self.finish(self.drawn)


def _nobody() -> None:
    """The worker of a batch that no thread was given."""


class _Quiet(Guard):
    """See :meth:`Prefetcher.quiet`. Shares the lock of its door."""

    def __init__(self, ahead: Prefetcher, discard: bool) -> None:
        self._ahead, self._discard = ahead, discard
        self._lock, self._give_back = ahead._door._lock, ahead._door._give_back

    def _take(self) -> Callable[..., None]:
        ahead, lock = self._ahead, self._ahead._lock
        if not self._lock.acquire(False):
            lock.outside(self._lock.acquire)
        while self._discard and ahead.queue:
            ahead.queue.popleft().dropped = True
        while busy := ahead._unfinished():
            lock.outside(functools.partial(ahead._finish, busy))
        return _nothing


class Prefetcher:
    """The queue of batches in preparation.

    Args:
        depth: number of batches in preparation while the consumer has one. With 0 the queue only delivers batches
            that :meth:`replace` put there.
        lock: the buffer's lock.

    Attributes:
        queue: the batches that were asked for ahead.
    """

    def __init__(self, depth: int, lock: BufferLock) -> None:
        self.depth = depth
        self._lock = lock
        self.queue: deque[_Asked] = deque()
        self._side = SideStream()
        # Whoever asks for batches comes through the door, and whoever wants quiet keeps it. The buffer's lock may be
        # taken with the door held, but not the other way round.
        self._door = Guard()
        # Held by the thread that prepares a batch, before the buffer's lock.
        self._making = Guard()
        self._current: Callable[[], _Asked | None] = _nobody
        self._worker: tuple[SimpleQueue[Any], Callable[[], object]] | None = None

    def __len__(self) -> int:
        return len(self.queue)

    @property
    def active(self) -> bool:
        """Whether :meth:`take` has anything to do."""
        return self.depth > 0 or bool(self.queue)

    # For the consumer

    def take(self, draw: Callable[[], Batch], finish: Callable[[Batch], Batch]) -> Batch | None:
        """The next batch. Asks for those after it.

        Args:
            draw: draws and gathers a batch.
            finish: collates, transforms and pins it.

        Returns:
            The batch, or None if the caller has to prepare it: inside a transform, while a CUDA graph is captured,
            and when a queue of depth 0 is empty.

        Raises:
            Exception: what the draw or a transform raised, with its traceback. A draw that fails ahead of time is
                forgotten, and made again when its batch is asked for.
        """
        on_gpu = self._lock.on_gpu()
        if self._bypassed(on_gpu):
            return None
        ahead = self.depth
        while True:
            with self._door:
                fresh = not self.queue
                if fresh and self.depth == 0:
                    return None
                while len(self.queue) <= ahead:
                    self.queue.append(self._ask(draw, finish, on_gpu))
                slot = self.queue.popleft()
                asked = [slot, *self.queue] if on_gpu else [slot]
            # Those ahead are asked for once: if every draw fails, this would never end.
            ahead = 0
            try:
                self._finish(asked)
                return self._delivered(slot)
            except Exception:
                if fresh or not slot.undrawable:
                    raise
            finally:
                # An error whose traceback led back to it would keep the buffer until the garbage is collected.
                del slot, asked

    def take_other(self, draw: Callable[[], Batch], finish: Callable[[Batch], Batch]) -> Batch | None:
        """A batch unlike those of the queue, which stay there; drawn and transformed after them.

        Returns:
            As :meth:`take`; None also if the caller's own thread prepares the batches.
        """
        on_gpu = self._lock.on_gpu()
        if self.depth == 0 or on_gpu or self._bypassed(on_gpu):
            return None
        with self._door:
            slot = self._ask(draw, finish, on_gpu)
        try:
            self._finish([slot])
            return self._delivered(slot)
        finally:
            del slot

    def _bypassed(self, on_gpu: bool) -> bool:
        # In a transform, or while it is to be quiet.
        own = self._making.held or self._door.held
        return own or (on_gpu and torch.cuda.is_current_stream_capturing())

    def _delivered(self, slot: _Asked) -> Batch:
        outcome = slot.outcome
        try:
            if not isinstance(outcome, Batch):
                assert outcome is not None
                raise outcome
            self._side.join(outcome, slot.ready)
            return outcome
        finally:
            del slot, outcome

    def _finish(self, slots: list[_Asked]) -> None:
        """Wait until batches are prepared. What is left by nobody's fault but an interrupt's is prepared here."""
        for slot in slots:
            while slot.outcome is None:
                if slot.worker() is None:
                    self._prepare(slot)
                    continue
                with contextlib.suppress(Empty):
                    # Looks now and then whether the worker is still there.
                    slot.opened.get(timeout=1.0)
                    slot.opened.put(None)

    # Preparation

    def _ask(self, draw: Callable[[], Batch], finish: Callable[[Batch], Batch], on_gpu: bool) -> _Asked:
        slot = _Asked(draw, finish, self._side.fork(self._lock.storage.ring.device if on_gpu else None))
        if not on_gpu:
            # An interrupt between these loses a batch that nobody waits for.
            tasks, slot.worker = self._running()
            self._lock.pending.append(slot)
            tasks.put(functools.partial(self._prepare, slot))
        return slot

    def _running(self) -> tuple[SimpleQueue[Any], Callable[[], object]]:
        """The tasks of the worker, which is started if there is none, and whether it is there."""
        if self._worker is None or self._worker[1]() is None:
            self._worker = _started(self)
        return self._worker

    def _prepare(self, slot: _Asked) -> None:
        """Prepare a batch, unless that is done."""
        try:
            with self._making:
                if slot.outcome is None:
                    slot.outcome = self._prepared(slot)
        except BaseException as error:
            clear_traceback(error)
            if isinstance(error, Exception):
                slot.outcome = error
            elif slot.outcome is None:
                # The interrupt is not the batch's: that is drawn anew when it is asked for.
                slot.undrawable, slot.outcome = True, RuntimeError("the preparation of a batch was interrupted")
                raise
        finally:
            slot.draw = slot.finish = slot.drawn = None
            slot.opened.put(None)
            del slot, self

    def _prepared(self, slot: _Asked) -> Batch:
        if slot.dropped:
            slot.undrawable = True
            raise RuntimeError("the batch was dropped")
        if not threading.main_thread().is_alive():
            raise RuntimeError("no batch can be prepared while the interpreter shuts down")
        with torch.set_grad_enabled(slot.grad), self._side.running(slot.fork):
            with self._lock:
                # From here on the batch does not need the lock: see `_unfinished`.
                self._current = weakref.ref(slot)
                slot.perform()
            batch = slot.finished()
            slot.ready = self._side.ready(batch)
            return batch

    # For the buffer

    def quiet(self, *, discard: bool = False) -> Guard:
        """``with ahead.quiet():``, with the lock held: no batch is in preparation, and nobody asks for one.

        While it waits for that, it releases the lock: a transform may need it.

        Args:
            discard: drop the queue.

        Raises:
            RuntimeError: called by a transform.
        """
        if self._making.held:
            raise RuntimeError("a transform can't do this to its buffer: it would wait for its own batch")
        return _Quiet(self, discard)

    def _unfinished(self) -> list[_Asked]:
        """The batches of the queue that are not prepared, and the one at which a thread works now.

        Called with the lock held: no thread can begin another one then, since the draw needs the lock.
        """
        return [slot for slot in (self._current(), *self.queue) if slot is not None and slot.outcome is None]

    @staticmethod
    def check(state: Any) -> None:
        """Raise unless :meth:`prepared` can take ``state``.

        Raises:
            ValueError: ``state`` is not what :meth:`state_dict` returns.
        """
        if not isinstance(state, list) or not all(map(_is_entry, state)):
            raise ValueError(f"the prefetched batches of a state are a list of dicts of {_STATE_KEYS}, got {state!r}")

    def discard(self) -> None:
        """Drop the queue, before its rows are released. Call it with the lock held."""
        if self.active:
            with self.quiet(discard=True):
                self.queue.clear()
        self._lock.settle()

    # State

    @property
    def home(self) -> torch.device | None:
        """Where the rows are, and with them the batches of the queue."""
        storage = self._lock.storage
        return storage.device if storage.initialized else None

    def state_dict(self) -> list[dict[str, Any]]:
        """Copies of the batches in the queue, all of them finished; used inside :meth:`quiet`."""
        state, home = [], self.home
        for slot in self.queue:
            if isinstance(slot.outcome, Batch):
                batch = self._delivered(slot)
                devices = {t.device for t in tensors_of(batch.data)}
                device = devices.pop() if len(devices) == 1 else None
                state.append(
                    {
                        "data": copied(batch.data, None),
                        # Keys may be tuples, which a checkpoint's dictionaries can't have.
                        "info": [[key, value.clone()] for key, value in batch.info.items()],
                        "ran_out": batch.ran_out,
                        "device": None if device is None else "storage" if device == home else str(device),
                        "claimed": getattr(batch.data, "device", None) is not None,
                    }
                )
        return state

    def prepared(self, state: list[dict[str, Any]], pinned: bool) -> list[_Asked]:
        """Copies of the batches of :meth:`state_dict`, for :meth:`replace`.

        Batches that lay on the device of the storage then come to its present device.
        """
        home, slots = self.home, []
        for entry in state:
            device = home if entry["device"] == "storage" else entry["device"]
            data = copied(entry["data"], device, claim=entry["claimed"])
            info = {k if isinstance(k, str) else tuple(k): copied(v, home) for k, v in entry["info"]}
            if pinned:
                data, info = pin((data, info))
            slots.append(_Asked(outcome=Batch(data, info, entry["ran_out"])))
        return slots

    def replace(self, slots: list[_Asked]) -> None:
        """Make these the queue; used inside :meth:`quiet`. Can't fail."""
        self.queue.clear()
        self.queue.extend(slots)
