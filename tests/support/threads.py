"""Threads in tests: started together, and waited for."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable

from gpubuf.data.operation import Operation


def together(*jobs: Callable[[], None]) -> None:
    """Run the jobs in threads of their own until all are done, and raise what the first to fail raised."""
    failures: list[BaseException] = []

    def run(job: Callable[[], None]) -> None:
        try:
            job()
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=run, args=(job,)) for job in jobs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]


def wait_for_line(operation: Operation, n: int) -> None:
    """Until so many threads wait for their turn."""
    while len(operation.line) < n:
        os.sched_yield()
