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

Call = Callable[[], object]
#: Approximate length of a turn on a GPU, and the most calls in it.
TURN_SECONDS, MOST_CALLS = 0.002, 32


@dataclass(frozen=True)
class Clock:
    """How a call is timed.

    Attributes:
        name: ``"wall"``, or ``"events"`` for calls that only queue their work, so that several are timed together.
        seconds: of a call and all that it has queued; it waits for that.
    """

    name: str
    seconds: Callable[[Call], float]


def by_wall(call: Call) -> float:
    """Seconds of a call that returns once its work is done."""
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def by_events(call: Call) -> float:
    """Seconds of a call on the GPU's clock, by CUDA events on the current stream."""
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    call()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / 1e3


WALL = Clock("wall", by_wall)


def of(filled: Any, device: str) -> Clock:
    """The clock for calls on a filled buffer: events miss a library with streams of its own, whose calls wait."""
    if device != "cpu" and getattr(filled, "clock", "events") == "events":
        return Clock("events", by_events)
    return WALL


def several(call: Call, calls: int) -> Call:
    """So many calls as one."""

    def many() -> None:
        for _ in range(calls):
            call()

    return many


def runs(call: Call, clock: Clock, repeats: int, calls: int = 1) -> list[float]:
    """Seconds per call, of so many runs of some calls in a row."""
    return [clock.seconds(several(call, calls)) / calls for _ in range(repeats)]


def turn(call: Call, clock: Clock) -> tuple[Call, int]:
    """What is timed at a time, and how many (warm) calls that are: one on a CPU, several where calls are queued."""
    if clock.name == "wall":
        return call, 1
    calls = max(1, min(MOST_CALLS, int(TURN_SECONDS / max(clock.seconds(call), 1e-9))))
    return several(call, calls), calls
