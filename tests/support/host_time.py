"""Time on the host, and calls of Python, of calls on a GPU: ``python -m tests.support.host_time``.

There need be no GPU: Triton's own launcher runs over a driver whose launches do nothing, on tensors in host memory
(tests.support.no_gpu). What a GPU adds is the driver's own time for a launch, 2 to 3 us, and the allocator's. The
least of many repeats counts, for the machine may have other work.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

from benchmarks.studies.kernels import episodes, filled_buffer
from tests.support.no_gpu import install

BATCH = 256


def calls_on_a_gpu() -> Iterator[tuple[str, Callable[[], Any]]]:
    """The calls by name."""
    for name in ("uniform", "prioritized", "slices", "prioritized slices"):
        buffer = filled_buffer(name)
        yield f"{name} sample", lambda buffer=buffer: buffer.sample(BATCH)
        if buffer.sampler.has_priorities:
            batch = buffer.sample(BATCH)
            batch["td_error"] = torch.rand(BATCH)
            yield f"{name} update", lambda buffer=buffer, batch=batch: buffer.update_tensordict_priority(batch)
        rows = episodes(BATCH)
        yield f"{name} extend {BATCH}", lambda buffer=buffer, rows=rows: buffer.extend(rows)


def count_calls(call: Callable[[], Any], repeats: int = 8) -> int:
    """Calls of gpubuf's own functions in one call: the least of several, for the first ones prepare the others."""
    found = 0

    def note(frame: Any, event: str, argument: Any) -> None:
        nonlocal found
        found += event == "call" and ("/gpubuf/" in frame.f_code.co_filename or "/kernels/" in frame.f_code.co_filename)

    counts = []
    for _ in range(repeats):
        found = 0
        sys.setprofile(note)
        try:
            call()
        finally:
            sys.setprofile(None)
        counts.append(found)
    return min(counts)


def least_time(call: Callable[[], Any], calls: int = 100, repeats: int = 100) -> float:
    """Microseconds of processor time."""
    least = float("inf")
    for _ in range(repeats):
        start = time.thread_time()
        for _ in range(calls):
            call()
        least = min(least, time.thread_time() - start)
    return least / calls * 1e6


def main() -> None:
    """Print a line per call, or with ``--count`` the numbers of calls as JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", action="store_true", help="count calls of Python only, and print JSON")
    count_only = parser.parse_args().count
    torch.set_num_threads(1)
    driver = install()
    found = {}
    for name, call in calls_on_a_gpu():
        found[name] = count_calls(call)
        if not count_only:
            before = driver.launches()
            call()
            launches = driver.launches() - before
            print(f"{name:28} {launches} launches, {found[name]:3} calls, {least_time(call):6.1f} us", flush=True)
    if count_only:
        print(json.dumps(found))


if __name__ == "__main__":
    main()
