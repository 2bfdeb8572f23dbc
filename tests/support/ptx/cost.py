"""How long every call should take on an H200, from what its kernels execute: launches, instructions, bytes and trips.

The time of a launch is ``launch + trips + max(bytes, instructions)``:

* all trips but one find what they look for in a cache; one goes to where rows lie;
* bytes are those that threads ask for. What several of them share counts several times, a sector read for one byte of
  it once. A multiprocessor gets no more than its share of the bandwidth, also where the others ask for nothing;
* instructions are issued by the multiprocessors side by side, of which none is done before its program that has most.
  A multiprocessor with few warps waits for each instruction of a warp before the next.

The constants fit what was measured on an H200 on 2026-11-26. Ten launches under ncu took what :data:`PROFILED` says
within 25 %; tests/benchmarks/test_predict.py has them. In replayed graphs 31 of 36 calls took what :data:`WARM` says
within 25 %, and 29 what :data:`COLD` says.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Caches:
    """What a launch meets.

    Attributes:
        launch: microseconds of an empty kernel.
        cache: microseconds until a load returns that hits the second level of cache.
        memory: those of one that misses it.
        bandwidth: bytes a microsecond that all multiprocessors get together.
    """

    launch: float
    cache: float
    memory: float
    bandwidth: float


PROFILED = Caches(launch=2.0, cache=0.1, memory=0.8, bandwidth=2.4e6)
"""Emptied, under ncu. Most trips after the first find a line that another warp, or the same one, has asked for."""

COLD = Caches(launch=1.2, cache=0.18, memory=1.0, bandwidth=2.7e6)
"""Emptied, in a replayed graph, from the launch before to the one after."""

WARM = Caches(launch=1.2, cache=0.1, memory=0.25, bandwidth=4e6)
"""In a replayed graph, with all data in the second level of cache."""

PROCESSORS, CLOCK = 132, 1970.0
"""Multiprocessors, and their cycles a microsecond."""

MACHINE_CODE = 1.3
"""Instructions that ptxas makes of one of PTX, on average over four kernels."""

FULL, ALONE = 2.5, 0.25
"""Warp instructions a cycle of a multiprocessor: the most, and for each warp that is there."""


def parts(launch: Mapping[str, Any], caches: Caches = COLD) -> tuple[float, float, float]:
    """Microseconds of a launch: of its trips, bytes and instructions."""
    trips = max(launch["trips"] - 1, 0) * caches.cache + caches.memory * (launch["trips"] > 0)
    warps = -(-launch["programs"] // PROCESSORS) * launch["warps"]
    instructions = max(launch["most_instructions"], launch["instructions"] / PROCESSORS) * MACHINE_CODE
    cycles = instructions / min(FULL, warps * ALONE)
    share = caches.bandwidth * min(launch["programs"] / PROCESSORS, 1)
    return trips, (launch["bytes_loaded"] + launch["bytes_stored"]) / share, cycles / CLOCK


def microseconds(launch: Mapping[str, Any], caches: Caches = COLD) -> float:
    """The prediction."""
    trips, moved, issued = parts(launch, caches)
    return caches.launch + trips + max(moved, issued)
