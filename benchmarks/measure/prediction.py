"""How long a call should take on an H200, from what its kernels execute: launches, instructions, bytes and trips.

On the device a launch takes ``launch + trips + max(bytes, instructions)``:

* all trips but one find what they look for in a cache; one goes to where rows lie;
* bytes are those that warps ask for: a number that all threads of a warp read comes once. A multiprocessor gets no
  more than its share of the bandwidth, also where the others ask for nothing;
* instructions are issued by the multiprocessors side by side, of which none is done before its program that has most.
  A multiprocessor with few warps waits for each instruction of a warp before the next.

An eager call takes at least the host's time for its launches. The constants fit replayed graphs on an H200, most calls
within 25 %; the price of a launch on the host, and the bandwidth of copies, are those that a run has measured.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Caches:
    """What a launch in a replayed graph meets.

    Attributes:
        cache: microseconds until a load returns that hits the second level of cache.
        memory: those of one that misses it.
        bandwidth: bytes a microsecond that all multiprocessors get together.
    """

    cache: float
    memory: float
    bandwidth: float


COLD = Caches(cache=0.18, memory=1.0, bandwidth=4.3e6)
"""Emptied, from the launch before to the one after."""

WARM = Caches(cache=0.1, memory=0.25, bandwidth=4e6)
"""With all data in the second level of cache."""

LAUNCH = 1.2
"""Microseconds of an empty kernel in a graph."""

PROCESSORS, CLOCK = 132, 1970.0
"""Multiprocessors, and their cycles a microsecond."""

MACHINE_CODE = 1.3
"""Instructions that ptxas makes of one of PTX, on average over four kernels."""

FULL, ALONE = 2.5, 0.25
"""Warp instructions a cycle of a multiprocessor: the most, and for each warp that is there."""


def on_device(launches: Sequence[Mapping[str, Any]], caches: Caches, others: int = 0) -> float:
    """Microseconds of a call in a graph, of whose launches ``tests.gates.ptx.counts`` tells what they execute.

    ``others`` are kernels of PyTorch, each of a few numbers: it takes one trip.
    """
    total = others * (LAUNCH + caches.memory)
    for launch in launches:
        trips = max(launch["trips"] - 1, 0) * caches.cache + caches.memory * (launch["trips"] > 0)
        warps = -(-launch["programs"] // PROCESSORS) * launch["warps"]
        instructions = max(launch["most_instructions"], launch["instructions"] / PROCESSORS) * MACHINE_CODE
        issued = instructions / min(FULL, warps * ALONE) / CLOCK
        share = caches.bandwidth * min(launch["programs"] / PROCESSORS, 1)
        total += LAUNCH + trips + max((launch["bytes_loaded"] + launch["bytes_stored"]) / share, issued)
    return total
