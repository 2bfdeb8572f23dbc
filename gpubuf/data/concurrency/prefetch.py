"""Batches prepared ahead: drawn, gathered, collated, transformed and pinned while the consumer computes.

With the rows on the CPU, one worker thread prepares them: one, so that draws and transforms run in order. The kernels
release the interpreter lock. With the rows on a GPU, the caller launches the work on a stream of its own.

A batch is drawn as of the moment at which it was asked for. If another operation (a write, new priorities) comes before
the worker has drawn it, that operation makes the draw first: see
:class:`~gpubuf.data.concurrency.locking.BufferLock`. So the contents of batches depend only on the order of the calls.
"""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gpubuf.data.concurrency.locking import BufferLock
from gpubuf.data.concurrency.pinning import copied, pin, tensors_of
from gpubuf.data.runtime.kept_errors import forget_locals
from gpubuf.data.storages.layout import Data
from gpubuf.kernels._threads import stay_alone

_STATE_KEYS = ("data", "info", "ran_out", "device", "claimed")


def _beside_the_consumer(threads: int) -> None:
    """Set up the worker: torch uses as many threads in it as in the consumer, and gpubuf's kernels one."""
    torch.set_num_threads(threads)
    stay_alone()


def _is_entry(entry: Any) -> bool:
    """Whether ``entry`` is a batch in the queue's state."""
    if not isinstance(entry, dict) or sorted(entry) != sorted(_STATE_KEYS):
        return False
    info, device = entry["info"], entry["device"]
    pairs = isinstance(info, list) and all(
        isinstance(pair, (list, tuple)) and len(pair) == 2 and isinstance(pair[1], Tensor) for pair in info
    )
    flags = isinstance(entry["ran_out"], bool) and isinstance(entry["claimed"], bool)
    return pairs and flags and (device is None or isinstance(device, str))


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
        """Make the side stream current, behind the work noted by ``fork``."""
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
    """One batch that was asked for. ``draw`` and ``finish`` are given up once done: they hold on to the buffer."""

    def __init__(
        self,
        draw: Callable[[], Batch] | None = None,
        finish: Callable[[Batch], Batch] | None = None,
        fork: tuple[torch.device, torch.cuda.Event] | None = None,
    ) -> None:
        self.future: Future[Batch] = Future()
        # Open once the batch is there. A wait for the future itself could be interrupted while it holds its lock.
        self.gate = threading.Lock()
        self.grad = torch.is_grad_enabled()
        self.fork = fork
        self.ready: dict[torch.device, torch.cuda.Event] = {}
        self.undrawable = False
        self._draw = draw
        self._finish = finish
        self._drawn: Batch | Exception | None = None

    @classmethod
    def finished(cls, batch: Batch) -> _Asked:
        """A batch that is there."""
        slot = cls()
        slot.future.set_result(batch)
        return slot

    def perform(self) -> None:
        """Draw and gather, unless that is done. An error is kept for the consumer."""
        draw, self._draw = self._draw, None
        if draw is None:
            return
        try:
            self._drawn = draw()
        except Exception as error:
            self._drawn, self.undrawable = error, True
        except BaseException:
            self._draw = draw
            raise

    def finish(self) -> Batch:
        """Collate, transform, pin."""
        drawn, self._drawn = self._drawn, None
        if not isinstance(drawn, Batch):
            assert drawn is not None
            raise drawn
        assert self._finish is not None
        return self._finish(drawn)

    def let_go(self) -> None:
        """Drop all references to the buffer."""
        self._draw = self._finish = self._drawn = None


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
        self._executor: ThreadPoolExecutor | None = None
        self._side = SideStream()
        # Entered with the buffer's lock held or without; the buffer's lock is never taken inside it.
        # The lock is C's and used as such: an interrupt can't leave it held, as it can a function of Python.
        self._mutex = threading.RLock()
        self._condition = threading.Condition(self._mutex)
        self._unfinished: set[_Asked] = set()
        self._holders: set[object] = set()  # those for whom it is to be quiet
        self._preparing: set[int] = set()  # threads that prepare a batch now

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
            with self._mutex:
                self._wait_for(self._open)
                fresh = not self.queue
                if fresh and self.depth == 0:
                    return None
                asked = [self._ask(draw, finish, on_gpu) for _ in range(1 + ahead - len(self.queue))]
                self.queue.extend(asked)
                slot = self.queue.popleft()
            if on_gpu:
                for one in asked:
                    self._prepare(one)
            # Those ahead are asked for once: if every draw fails, this would never end.
            ahead = 0
            try:
                return self._wait(slot)
            except Exception:
                if fresh or not slot.undrawable:
                    raise
            finally:
                # An error whose traceback led back to it would keep the buffer until the garbage is collected.
                del slot.future, slot, asked

    def take_other(self, draw: Callable[[], Batch], finish: Callable[[Batch], Batch]) -> Batch | None:
        """A batch unlike those of the queue, which stay there; drawn and transformed behind them.

        Returns:
            As :meth:`take`; None also if the caller's own thread prepares the batches.
        """
        on_gpu = self._lock.on_gpu()
        if self.depth == 0 or on_gpu or self._bypassed(on_gpu):
            return None
        with self._mutex:
            self._wait_for(self._open)
            slot = self._ask(draw, finish, on_gpu)
        try:
            return self._wait(slot)
        finally:
            del slot.future, slot

    def _wait_for(self, predicate: Callable[[], bool]) -> None:
        """Wait, with the mutex held. Looks again now and then: an interrupt may have kept a notice back."""
        while not self._condition.wait_for(predicate, 1.0):
            pass

    def _open(self) -> bool:
        return not self._holders

    def _bypassed(self, on_gpu: bool) -> bool:
        return threading.get_ident() in self._preparing or (on_gpu and torch.cuda.is_current_stream_capturing())

    def _wait(self, slot: _Asked) -> Batch:
        try:
            with slot.gate:
                batch = slot.future.result()
            self._side.join(batch, slot.ready)
            return batch
        finally:
            del slot

    # Preparation

    def _ask(self, draw: Callable[[], Batch], finish: Callable[[Batch], Batch], on_gpu: bool) -> _Asked:
        slot = _Asked(draw, finish, self._side.fork(self._lock.storage.ring.device if on_gpu else None))
        slot.gate.acquire()
        self._unfinished.add(slot)
        if on_gpu:
            return slot
        if self._executor is None:
            # OpenMP and MKL keep a number of threads for every thread that calls them: this one's is the caller's.
            threads = torch.get_num_threads()
            self._executor = ThreadPoolExecutor(1, "gpubuf-prefetch", _beside_the_consumer, (threads,))
        try:
            self._executor.submit(self._prepare, slot)
            self._lock.pending.append(slot)
        except BaseException:
            # Interrupted: nobody is going to ask for this one.
            slot.future.cancel()
            self._unfinished.discard(slot)
            raise
        return slot

    def _prepare(self, slot: _Asked) -> None:
        future = slot.future
        if not future.set_running_or_notify_cancel():
            return
        thread = threading.get_ident()
        self._preparing.add(thread)
        try:
            if not threading.main_thread().is_alive():
                raise RuntimeError("no batch can be prepared while the interpreter shuts down")
            with torch.set_grad_enabled(slot.grad), self._side.running(slot.fork):
                with self._lock:
                    slot.perform()
                batch = slot.finish()
                slot.ready = self._side.ready(batch)
            future.set_result(batch)
        except BaseException as error:
            forget_locals(error)
            if isinstance(error, Exception):
                future.set_exception(error)
            else:
                # The interrupt is not the batch's: that is drawn anew when it is asked for.
                slot.undrawable = True
                future.set_exception(RuntimeError("the preparation of a batch was interrupted"))
                raise
        finally:
            slot.let_go()
            self._preparing.discard(thread)
            with self._mutex:
                self._unfinished.discard(slot)
                self._condition.notify_all()
            slot.gate.release()
            del slot, future, self

    # For the buffer

    @contextlib.contextmanager
    def quiet(self, *, discard: bool = False) -> Iterator[None]:
        """Wait until no batch is in preparation, and let nobody ask for one. Call it with the lock held.

        While it waits, it releases the lock: a transform may need it.

        Args:
            discard: drop the queue.

        Raises:
            RuntimeError: called by a transform.
        """
        if threading.get_ident() in self._preparing:
            raise RuntimeError("a transform can't do this to its buffer: it would wait for its own batch")
        holder = object()
        # All of it within the `try`: an interrupt can come behind any call, also that which leaves a `with`.
        try:
            with self._mutex:
                self._holders.add(holder)
                while discard and self.queue:
                    slot = self.queue.popleft()
                    if slot.future.cancel():
                        slot.let_go()
                        self._unfinished.discard(slot)
            if self._unfinished:
                self._lock.outside(self._until_idle)
            yield
        finally:
            with self._mutex:
                self._holders.discard(holder)
                self._condition.notify_all()

    def _until_idle(self) -> None:
        with self._mutex:
            self._wait_for(lambda: not self._unfinished)

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
                pass
        self._lock.settle()

    # State

    @contextlib.contextmanager
    def carried(self, pinned: bool) -> Iterator[None]:
        """Take the queue along while the storage moves to another device. Call it with the lock held."""
        with self.quiet():
            before, state = self._home, self.state_dict()
            yield
            if self._home != before:
                self.replace(self.prepared(state, pinned))

    @property
    def _home(self) -> torch.device | None:
        storage = self._lock.storage
        return storage.device if storage.initialized else None

    def state_dict(self) -> list[dict[str, Any]]:
        """Copies of the batches in the queue, all of them finished; used inside :meth:`quiet`."""
        state, home = [], self._home
        for slot in self.queue:
            if slot.future.exception() is None:
                batch = self._wait(slot)
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
        home, slots = self._home, []
        for entry in state:
            device = home if entry["device"] == "storage" else entry["device"]
            data = copied(entry["data"], device, claim=entry["claimed"])
            info = {k if isinstance(k, str) else tuple(k): copied(v, home) for k, v in entry["info"]}
            if pinned:
                data, info = pin((data, info))
            slots.append(_Asked.finished(Batch(data, info, entry["ran_out"])))
        return slots

    def replace(self, slots: list[_Asked]) -> None:
        """Make these the queue; used inside :meth:`quiet`. Can't fail."""
        with self._mutex:
            self.queue.clear()
            self.queue.extend(slots)
