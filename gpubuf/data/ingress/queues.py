"""Queues of rows in shared memory, one per writer: one process fills it, the process of the buffer empties it.

A queue is a ring of rows per key, and two counters: rows ever published, which only the writer stores, and rows ever
taken, which only the learner stores. A writer copies rows, then publishes them; the learner copies rows, then releases
them. Neither takes a lock, so whoever is killed leaves nothing locked and nothing half published.

Two things are relied on. A store of an aligned 64-bit integer happens as a whole, on x86-64 and on AArch64. And what
comes before :func:`fence` in a process is seen before what comes after it: x86-64 keeps stores, and loads, in order
anyway; on AArch64 the release of a lock and the next acquisition of one are ordered (store-release, load-acquire).

The memory is anonymous (``memfd_create``): it has no name, needs no room in ``/dev/shm``, and the kernel frees it with
the last process that has it, however that ends.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import math
import mmap
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.reduction import DupFd
from typing import Any, cast

import numpy as np
import torch
from tensordict import TensorDict
from torch import Tensor

from gpubuf.data.ingress.options import MOST_STEPS
from gpubuf.data.storage.containers import numpy_dtype
from gpubuf.data.storage.layout import Leaf, RowLayout
from gpubuf.system import lock

#: Counters are 64-bit integers. Those that different processes store are in different cache lines.
_LINE = 8
# Of the whole segment, stored by the learner: whether and why it takes no more (see :data:`LEFT`), how many steps all
# writers may publish (below 0: any number), the rows and the write count of the buffer without what was published, and
# whether its first row may be any.
_LEFT, _LIMIT, _ROWS, _COUNT, _OPEN = 0, 1, 2, 3, 4
# By whoever takes a place: how many did. By whoever says what a row is: how often, and the bytes that this takes.
_CLIENTS, _SETTLED, _SAID = _LINE, _LINE + 1, _LINE + 2
_HEADER = 2 * _LINE
# Of one queue, stored by the writer: steps published, nanoseconds blocked, whether it is blocked now.
_PUBLISHED, _BLOCKED, _BLOCKS = 0, 1, 2
# Who the writer is: its process, when that began, the number of its client, and whether that has the place no more.
_PID, _START, _CLIENT, _CLOSED = _LINE, _LINE + 1, _LINE + 2, _LINE + 3
# And by the learner: steps taken.
_TAKEN = 2 * _LINE
_PER_QUEUE = 3 * _LINE
_ALIGNMENT = 64

_WORDS = 1 << 16
"""Bytes in which a writer can say what a row is."""

CLOSED, OTHER_ROWS = 1, 2
"""Why a learner takes no more: the buffer was closed or is gone, or has rows of another layout than the queues."""


def fence() -> None:
    """Memory is read and written before this, or after it, by this process: see the module."""
    # A lock of its own, which no interrupt can leave locked for others.
    lock = threading.Lock()
    lock.acquire()
    lock.release()
    lock.acquire()


def start_of(pid: int) -> int | None:
    """When a process began, in clock ticks since the machine did; None: it has ended. Tells reused numbers apart."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
    except OSError:
        return None
    return None if fields[0] in (b"Z", b"X", b"x") else int(fields[19])


def bits_of(dtype: torch.dtype) -> np.dtype[Any]:
    """NumPy's dtype of the same bytes: that of the same numbers, or unsigned integers."""
    return numpy_dtype(dtype) or np.dtype(f"u{dtype.itemsize}")


def as_bits(tensor: Tensor) -> np.ndarray:
    """A tensor as NumPy sees its bytes, of the dtype of :func:`bits_of`; a copy, if it is not on the host."""
    tensor = tensor.detach().cpu().resolve_conj().resolve_neg()
    if numpy_dtype(tensor.dtype) is None:
        tensor = tensor.contiguous().view(getattr(torch, bits_of(tensor.dtype).name))
    return tensor.numpy()


def of_bits(array: np.ndarray, dtype: torch.dtype) -> Tensor:
    """The inverse of :func:`as_bits`: a tensor of the same memory."""
    return torch.from_numpy(array).view(dtype)


@dataclass(frozen=True)
class QueuedRows:
    """The rows of a queue.

    Attributes:
        layout: keys, shapes and dtypes, as they are written.
        envs: dimensions of a step: ``()`` for a buffer of one dimension, ``(E,)`` for one of two.
        steps: steps in a queue.
    """

    layout: RowLayout
    envs: tuple[int, ...]
    steps: int

    def are(self, layout: RowLayout, envs: tuple[int, ...]) -> bool:
        """Whether the rows of a queue are like those of a layout, of which a step has ``envs``."""
        return (self.layout.leaves, self.envs) == (layout.leaves, envs)

    @functools.cached_property
    def step_rows(self) -> int:
        """Rows of a step: one for each environment."""
        return math.prod(self.envs)

    @functools.cached_property
    def step_bytes(self) -> int:
        """Bytes of a step."""
        return self.layout.row_bytes * self.step_rows

    @property
    def offsets(self) -> list[int]:
        """Where the keys begin in a queue, and where it ends."""
        n = self.steps * math.prod(self.envs)
        lengths = (-(-n * leaf.row_bytes // _ALIGNMENT) * _ALIGNMENT for leaf in self.layout.leaves)
        return list(itertools.accumulate(lengths, initial=0))


class Queues:
    """All queues of a buffer, as one process sees them.

    Passing one to a process that is being spawned passes the memory itself.

    Args:
        rows: what is in them.
        count: number of queues.
        queue_bytes: of each queue; None: what the rows take.
        handle, learner: the memory, and who made it; None: it is made.

    Attributes:
        rows, count: as given. The rows are others once a writer has said so, :meth:`settle`.
        learner: the process that made them, and when it began.
        columns: for each queue its memory, an array ``[steps, *envs, ...]`` per key, of the dtype of :func:`bits_of`.

    Raises:
        NotImplementedError: the operating system is not Linux.
    """

    def __init__(
        self,
        rows: QueuedRows,
        count: int,
        queue_bytes: int | None = None,
        handle: int | None = None,
        learner: tuple[int, int] | None = None,
    ) -> None:
        self.count = count
        self.learner = learner or (os.getpid(), start_of(os.getpid()) or 0)
        self._queue_bytes = rows.offsets[-1] if queue_bytes is None else queue_bytes
        self._words = 8 * (_HEADER + _PER_QUEUE * count)
        self._first = -(-(self._words + _WORDS) // mmap.PAGESIZE) * mmap.PAGESIZE
        n_bytes = self._first + count * self._queue_bytes
        if handle is None:
            if not hasattr(os, "memfd_create"):
                raise NotImplementedError("writers in other processes need Linux (memfd_create)")
            import fcntl

            handle = os.memfd_create("gpubuf-writers", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
            os.ftruncate(handle, n_bytes)
            # Who reads memory that another process has cut off is killed.
            fcntl.fcntl(handle, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
        self._handle = handle
        self.memory = mmap.mmap(handle, n_bytes)
        self._counters = memoryview(self.memory)[: self._words].cast("q")
        if not self._counters[_LIMIT]:
            self._counters[_LIMIT] = -1
        self._known = 0
        self._have(rows)
        self.follow()

    def _have(self, rows: QueuedRows) -> None:
        self.rows = rows
        *offsets, _ = rows.offsets
        self.columns: list[list[np.ndarray]] = []
        for queue in range(self.count):
            at = self._first + queue * self._queue_bytes
            keys = zip(rows.layout.leaves, offsets, strict=True)
            self.columns.append([self._column(leaf, at + offset) for leaf, offset in keys])

    def _column(self, leaf: Leaf, offset: int) -> np.ndarray:
        shape = (self.rows.steps, *self.rows.envs, *leaf.shape)
        return np.frombuffer(self.memory, bits_of(leaf.dtype), math.prod(shape), offset).reshape(shape)

    def __getstate__(self) -> dict[str, Any]:
        given = {"rows": self.rows, "count": self.count, "queue_bytes": self._queue_bytes, "learner": self.learner}
        return {**given, "handle": DupFd(self._handle)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(**{**state, "handle": state["handle"].detach()})  # type: ignore[misc]

    def __del__(self) -> None:
        with contextlib.suppress(AttributeError, OSError):
            os.close(self._handle)

    def _at(self, queue: int, counter: int) -> int:
        return _HEADER + queue * _PER_QUEUE + counter

    # What a row is

    def settle(self, layout: RowLayout, envs: tuple[int, ...]) -> bool:
        """Say what a row is, for a buffer that has none, before anybody has written one.

        Returns:
            Whether the rows are others now: these, or those that another one said first.

        Raises:
            ValueError: a queue has no room for a step.
        """
        with self.exclusive():
            if not self._counters[_OPEN] or any(map(self.published, range(self.count))):
                return self.follow()
            leaves = [[leaf.key, str(leaf.dtype).removeprefix("torch."), leaf.shape] for leaf in layout.leaves]
            rows = QueuedRows(layout, envs, 1)
            steps = min(self._queue_bytes // max(rows.step_bytes, 1), self.rows.steps)
            while steps and QueuedRows(layout, envs, steps).offsets[-1] > self._queue_bytes:
                steps -= 1
            words = json.dumps([leaves, envs, steps]).encode()
            if not steps or len(words) > _WORDS:
                raise ValueError(
                    f"a step of {rows.step_bytes} bytes has no room in a queue of {self._queue_bytes}: write a batch "
                    "before the process is started, or make the buffer with Writers(queue_steps=...)"
                )
            self.memory[self._words : self._words + len(words)] = words
            self._counters[_SAID] = len(words)
            fence()
            self._counters[_SETTLED] += 1
        return self.follow()

    def follow(self) -> bool:
        """Have the rows that a writer has said last. Returns whether they are others than before."""
        settled = self._counters[_SETTLED]
        if settled == self._known:
            return False
        fence()
        leaves, envs, steps = json.loads(self.memory[self._words : self._words + self._counters[_SAID]])
        example = TensorDict({}, [1, *envs])
        for key, dtype, shape in leaves:
            example.set(tuple(key), torch.empty((1, *envs, *shape), dtype=getattr(torch, dtype), device="cpu"))
        self._have(QueuedRows(RowLayout(example, 1 + len(envs)), tuple(envs), steps))
        self._known = settled
        return True

    @property
    def settled(self) -> bool:
        """Whether a writer has said what a row is."""
        return self._known > 0

    # The writer's end

    def room(self, queue: int, published: int) -> int:
        """Steps that may be written, of which ``published`` were ever published."""
        found = self.rows.steps - published + self._counters[self._at(queue, _TAKEN)]
        fence()
        return found

    def fill(self, queue: int, published: int, sources: Sequence[np.ndarray], start: int, n: int) -> None:
        """Copy ``n`` steps of ``sources``, from ``start`` on, behind the ``published`` ones."""
        for first, stop in self.pieces(published, n):
            count = stop - first
            for column, source in zip(self.columns[queue], sources, strict=True):
                column[first:stop] = source[start : start + count]
            start += count

    def publish(self, queue: int, published: int) -> None:
        """From now on the learner may take all steps up to ``published``, which are whole.

        A look at :attr:`left` after this is one after it for the learner, too.
        """
        fence()
        self._counters[self._at(queue, _PUBLISHED)] = published
        fence()

    @contextlib.contextmanager
    def blocking(self, queue: int) -> Iterator[None]:
        """While a writer waits for room."""
        began = time.monotonic()
        self._counters[self._at(queue, _BLOCKS)] = 1
        try:
            yield
        finally:
            self._counters[self._at(queue, _BLOCKS)] = 0
            self._counters[self._at(queue, _BLOCKED)] += int((time.monotonic() - began) * 1e9)

    def claim(self) -> int | None:
        """Take a place for this process. None: the free ones have steps of writers before, which are not taken yet.

        Raises:
            RuntimeError: processes write at all places.
        """
        own = os.getpid()
        with self.exclusive():
            free = [place for place in range(self.count) if self.writer(place) is None]
            for place in free:
                if self.published(place) == self.taken(place):
                    at = self._at(place, 0)
                    # A process that is killed here has not got the place.
                    self._counters[at + _CLOSED] = 1
                    self._counters[_CLIENTS] += 1
                    self._counters[at + _CLIENT] = self._counters[_CLIENTS]
                    self._counters[at + _BLOCKS] = 0
                    self._counters[at + _START] = start_of(own) or 0
                    self._counters[at + _PID] = own
                    fence()
                    self._counters[at + _CLOSED] = 0
                    return place
        if free:
            return None
        told = ", ".join(f"{place}: process {self.writer(place)}" for place in range(self.count))
        raise RuntimeError(
            f"all {self.count} places are taken ({told}): give the buffer more writers, or close a client"
        )

    def detach(self, queue: int, process: int) -> None:
        """The writer has finished, says ``process``: a process that was forked from it has nothing to say."""
        if process == os.getpid():
            fence()
            self._counters[self._at(queue, _CLOSED)] = 1

    @contextlib.contextmanager
    def exclusive(self) -> Iterator[None]:
        """While a place is claimed, rows are settled, or a writer publishes for the first time.

        The kernel takes the lock from a process that ends.
        """
        handle = os.open(f"/proc/self/fd/{self._handle}", os.O_RDWR | os.O_CLOEXEC)
        try:
            lock(handle)
            yield
        finally:
            os.close(handle)

    def allowed(self, steps: int) -> int:
        """How many of ``steps`` the learner lets the writers together publish more. Two may ask at a time."""
        limit = self._counters[_LIMIT]
        return steps if limit < 0 else min(steps, limit - sum(map(self.published, range(self.count))))

    @property
    def left(self) -> int:
        """Why the learner takes no more; 0: it does."""
        return self._counters[_LEFT]

    @property
    def stored(self) -> tuple[int, int]:
        """Rows written to the buffer, of which the newest are there, and how many it counts, with all published."""
        rows = sum(map(self.published, range(self.count))) * self.rows.step_rows
        return self._counters[_ROWS] + rows, self._counters[_COUNT] + rows

    # The learner's end

    def leave(self, process: int, why: int = CLOSED) -> None:
        """The learner takes no more, says ``process``: a process that was forked from it has nothing to say."""
        if process == os.getpid():
            self._counters[_LEFT] = why
            fence()

    def set_limit(self, steps: int) -> None:
        """All writers together may have published so many steps."""
        self._counters[_LIMIT] = steps

    def tell(self, rows: int, count: int, is_open: bool) -> None:
        """See :attr:`stored`: so much of it was not published here. ``is_open``: the first row may be any."""
        self._counters[_ROWS], self._counters[_COUNT], self._counters[_OPEN] = rows, count, is_open

    def client(self, queue: int) -> int:
        """The number of the client that has a queue, or had it last."""
        return self._counters[self._at(queue, _CLIENT)]

    def take_back(self, queue: int, published: int) -> None:
        """What a writer says it has published can't be: it is so much."""
        self._counters[self._at(queue, _PUBLISHED)] = published

    def published(self, queue: int) -> int:
        """Steps ever published. Call :func:`fence` before reading them."""
        return self._counters[self._at(queue, _PUBLISHED)]

    def taken(self, queue: int) -> int:
        """Steps ever taken."""
        return self._counters[self._at(queue, _TAKEN)]

    def release(self, queue: int, taken: int) -> None:
        """The steps up to ``taken`` were copied: their places may be written again."""
        fence()
        self._counters[self._at(queue, _TAKEN)] = taken

    def pieces(self, first: int, n: int) -> list[tuple[int, int]]:
        """Where ``n`` steps from the ``first`` ever published on lie: one or two ranges ``start, stop``."""
        start = first % self.rows.steps
        stop = min(start + n, self.rows.steps)
        found = [(start, stop)]
        if stop - start < n:
            found.append((0, n - (stop - start)))
        return found

    def blocked(self, queue: int) -> float:
        """Seconds that writers have waited for room."""
        return self._counters[self._at(queue, _BLOCKED)] / 1e9

    def blocks(self, queue: int) -> bool:
        """Whether the writer waits for room now."""
        return bool(self._counters[self._at(queue, _BLOCKS)])

    def closed(self, queue: int) -> bool:
        """Whether the writer has closed its client."""
        return bool(self._counters[self._at(queue, _CLOSED)])

    def writer(self, queue: int) -> int | None:
        """The process that writes to a queue now; None: there is none, it has closed its client, or it has ended."""
        pid = self._counters[self._at(queue, _PID)]
        if not pid or self._counters[self._at(queue, _CLOSED)]:
            return None
        return pid if start_of(pid) == self._counters[self._at(queue, _START)] else None


class NoQueues:
    """The queues of a buffer that has had no client."""

    rows = QueuedRows(cast("RowLayout", None), (), 2 * MOST_STEPS)

    def leave(self, process: int, why: int = CLOSED) -> None:
        """No process writes."""

    def set_limit(self, steps: int) -> None:
        """No process writes."""


def wait(again: Callable[[], bool], timeout: float | None) -> None:
    """Call ``again`` until it returns True, at growing intervals of up to 2 ms.

    Raises:
        TimeoutError: it did not, for ``timeout`` seconds (None: any number).
    """
    began, pause = time.monotonic(), 2e-5
    while not again():
        waited = time.monotonic() - began
        if timeout is not None and waited > timeout:
            raise TimeoutError
        time.sleep(pause)
        pause = min(2 * pause, 2e-3)
