"""Batches that a thread prepares."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from queue import SimpleQueue
from typing import TypeVar

T = TypeVar("T")


def ahead(make: Callable[[], T], depth: int) -> Iterator[T]:
    """Results of ``make``, called by a thread, of which up to ``depth`` wait.

    An exception of ``make`` is raised where its result would have come. The thread ends with the iterator.
    """
    if depth < 1:
        raise ValueError(f"queue_size must be at least 1, got {depth}")
    results: SimpleQueue[tuple[T | None, BaseException | None]] = SimpleQueue()
    room, stopped = threading.Semaphore(depth), threading.Event()

    def work() -> None:
        while room.acquire() and not stopped.is_set():
            try:
                results.put((make(), None))
            except BaseException as error:
                results.put((None, error))
                return

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    try:
        while True:
            result, error = results.get()
            if error is not None:
                raise error
            room.release()
            yield result  # type: ignore[misc]
    finally:
        stopped.set()
        room.release()
        thread.join()
