"""The clocks that time calls.

On a CPU that is the wall clock around one call. On a GPU a call only queues work: some calls are timed together, on the
GPU's own clock, between an event before the first and an event after the last of them.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

#: Approximate length of a turn on a GPU, and the most calls in it.
TURN_SECONDS, MOST_CALLS = 0.002, 32


@dataclass(frozen=True)
class Clock:
    """How a call is timed.

    Attributes:
        name: ``"wall"`` or ``"events"``.
        timer: seconds since some moment, once everything queued so far is done.
        wait: returns once everything queued so far is done; None: nothing is ever queued.
    """

    name: str
    timer: Callable[[], float]
    wait: Callable[[], None] | None = None


class EventTimer:
    """Seconds on the GPU's clock since the first call, by CUDA events on the current stream. Every call waits.

    Steps between calls are added up: an event tells milliseconds in float32, which is exact over a round and not over
    hours.
    """

    def __init__(self) -> None:
        self.last: Any = None
        self.seconds = 0.0

    def __call__(self) -> float:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        event.synchronize()
        if self.last is not None:
            self.seconds += self.last.elapsed_time(event) / 1e3
        self.last = event
        return self.seconds


WALL = Clock("wall", time.perf_counter)


def of(filled: Any, device: str) -> Clock:
    """The clock for calls on a filled buffer: CUDA events miss a library that has streams of its own."""
    if device == "cpu":
        return WALL
    if getattr(filled, "clock", "events") == "events":
        return Clock("events", EventTimer(), torch.cuda.synchronize)
    return Clock("wall", time.perf_counter, filled.wait)


def runs(call: Callable[[], object], clock: Clock, repeats: int, calls: int = 1) -> list[float]:
    """Seconds per call, of so many runs of some calls in a row."""
    found = []
    for _ in range(repeats):
        start = clock.timer()
        for _ in range(calls):
            call()
        found.append((clock.timer() - start) / calls)
    return found


def turn(call: Callable[[], object], clock: Clock) -> tuple[Callable[[], object], int]:
    """What is timed at a time, and how many (warm) calls that are: one on a CPU, several where calls are queued."""
    if clock.wait is None:
        return call, 1
    start = time.perf_counter()
    call()
    clock.wait()
    took = max(time.perf_counter() - start, 1e-9)
    calls = max(1, min(MOST_CALLS, int(TURN_SECONDS / took)))
    wait = clock.wait

    def many() -> None:
        for _ in range(calls):
            call()
        wait()

    return many, calls
