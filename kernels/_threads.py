"""Threads for large batches on the CPU: a compiled kernel works on each part of a batch in a thread of its own.

What comes out does not depend on the number of parts. Threads are started at their first use and kept. Between calls
they wait without using the processor and hold nothing. They are daemons: the end of the program does not wait for them.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from queue import SimpleQueue
from typing import Any

import torch

#: Rows of a batch that are worth a thread. One thread gathers so many, of six small keys, in a quarter of a
#: millisecond. To hand them over takes 10 to 20 µs where a core is idle, and a time slice where none is.
ROWS_A_THREAD = 8_192

#: Rows from which on there may be two parts.
TWO_PARTS = 2 * ROWS_A_THREAD

# Parts begin at multiples of this, so that no two threads write to one cache line.
_STEP = 64


def parts(n: int) -> list[tuple[int, int]]:
    """First row and number of rows of each part of a batch of ``n``: one for each of ``torch.get_num_threads()``."""
    threads = max(min(torch.get_num_threads(), n // ROWS_A_THREAD), 1)
    length = -(-n // (threads * _STEP)) * _STEP
    return [(first, min(length, n - first)) for first in range(0, n, length)]


class _Task:
    """A call of a kernel by a worker, unless the caller takes it back before it has begun.

    Either side first says what it is about to do, and then looks at what the other has said: they never both do it.
    Every step of the caller's may be repeated, so that an interrupt does no harm wherever it comes.
    """

    def __init__(self, kernel: Callable[..., Any], arguments: Sequence[Any]) -> None:
        self.kernel, self.arguments = kernel, arguments
        self.result: Any = None
        self.error: BaseException | None = None
        self.begun = self.taken_back = self.performed = self.finished = False
        self._gate = threading.Lock()
        self._gate.acquire()

    def perform(self) -> None:
        self.begun = True
        try:
            if not self.taken_back:
                self.performed = True
                self.result = self.kernel(*self.arguments)
        except BaseException as error:
            # The caller's to raise: the thread goes on.
            self.error = error
        self.finished = True
        self._gate.release()

    def outcome(self) -> Any:
        """The kernel's result: the worker's, or from here where that has not come to it."""
        interrupt = self.settle()
        if interrupt is not None:
            raise interrupt
        if not self.performed:
            return self.kernel(*self.arguments)
        if self.error is not None:
            raise self.error
        return self.result

    def settle(self) -> BaseException | None:
        """Wait until the worker does nothing any more, on memory of the caller's. Returns what interrupted."""
        self.taken_back, interrupt = True, None
        while self.begun and not self.finished:
            try:
                self._gate.acquire(True, 1.0)
            except BaseException as error:
                interrupt = error
        return interrupt


class _Workers:
    """The threads of a process. One batch has them at a time; others are then worked on by their own thread alone."""

    def __init__(self) -> None:
        self._busy = threading.Lock()
        self._queues: list[SimpleQueue[_Task]] = []

    def call(self, kernel: Callable[..., Any], arguments: Sequence[Sequence[Any]]) -> list[Any]:
        if len(arguments) == 1 or self._busy.locked():
            return [kernel(*one) for one in arguments]
        # Not `acquire`: an interrupt could come after it, before a `try` that would release the lock. Of two threads
        # that find it free at the same time, one waits.
        with self._busy:
            return self._share(kernel, arguments)

    def _share(self, kernel: Callable[..., Any], arguments: Sequence[Sequence[Any]]) -> list[Any]:
        tasks = [_Task(kernel, one) for one in arguments[1:]]
        interrupt = None
        try:
            while len(self._queues) < len(tasks):
                self._start()
            for queue, task in zip(self._queues, tasks, strict=False):
                queue.put(task)
            results = [kernel(*arguments[0]), *(task.outcome() for task in tasks)]
        finally:
            for task in tasks:
                interrupt = task.settle() or interrupt
        if interrupt is not None:
            raise interrupt
        return results

    def _start(self) -> None:
        queue: SimpleQueue[_Task] = SimpleQueue()
        threading.Thread(target=_work, args=(queue,), name="gpubuf-kernels", daemon=True).start()
        self._queues.append(queue)


def _work(queue: SimpleQueue[_Task]) -> None:
    while True:
        queue.get().perform()


_workers = _Workers()


def call_in_parts(kernel: Callable[..., Any], before: tuple[Any, ...], n: int, after: tuple[Any, ...]) -> Sequence[Any]:
    """``kernel(*before, first, length, *after)`` for each part of a batch of ``n`` rows; returns all results.

    The caller's thread does the first part, and waits for all.
    """
    if n < TWO_PARTS:
        return (kernel(*before, 0, n, *after),)
    return _workers.call(kernel, [(*before, first, length, *after) for first, length in parts(n)])


def _after_fork() -> None:
    # Only the forking thread goes on in a child.
    global _workers
    _workers = _Workers()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
