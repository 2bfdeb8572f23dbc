"""Whether the host kept its speed while something was measured.

The host of a machine on loan has two states, 1.7 times apart, and changes from one to the other within a run. A probe,
a fixed piece of work of the host, is therefore timed before and after every row of a table. A row whose probes differ
is measured again, and what they said is kept in its result.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import Any, TypeVar

import torch

#: Pieces of work in a probe, which are empty launches on a GPU, and how often it is repeated: the least time counts.
PIECES, REPEATS = 100, 5
#: How far apart two probes of one state may be, and how often a row is measured at most.
CLOSE, TRIES = 1.15, 4

Found = TypeVar("Found")
Probe = Callable[[], float]


def pieces(device: str) -> Callable[[], object]:
    """The work of a probe: empty launches by the launcher that gpubuf's prepared calls use; on a CPU, additions."""
    if device == "cpu":
        number = torch.zeros(64)

        def add() -> None:
            for _ in range(PIECES):
                torch.add(number, 1.0, out=number)

        return add
    from benchmarks.measure._triton import empty_kernel
    from gpubuf.kernels._launching import Ready, launch, launches_noted

    calls: list[Any] = []
    anything = torch.zeros(1, device=device)
    with launches_noted(calls):
        launch(empty_kernel, 1, anything)
    return Ready(calls * PIECES, anything.get_device()).launch


@functools.cache
def probe_of(device: str) -> Probe:
    """What returns the microseconds of one piece of work now. On a GPU it waits for the device."""
    work = pieces(device)

    def probe() -> float:
        took = []
        for _ in range(REPEATS):
            if device == "cuda":
                torch.cuda.synchronize()
            start = time.perf_counter()
            work()
            took.append(time.perf_counter() - start)
        return min(took) / PIECES * 1e6

    return probe


def steady(measure: Callable[[], Found], probe: Probe) -> tuple[Found, dict[str, Any]]:
    """Measure between two probes that agree, within :data:`TRIES`; else what was between the two that differ least.

    Returns:
        What ``measure`` has found; and for the file of results the probes ``before`` and ``after``, how many ``tries``
        it took, and whether the probes have ``agreed``.
    """
    tried: list[tuple[float, Found, dict[str, Any]]] = []
    before = probe()
    while len(tried) < TRIES and not (tried and tried[-1][0] <= CLOSE):
        found, after = measure(), probe()
        apart = max(before, after) / min(before, after)
        said = {"before": round(before, 3), "after": round(after, 3), "agreed": apart <= CLOSE}
        tried.append((apart, found, said))
        before = after
    _, found, said = min(tried, key=lambda each: each[0])
    return found, {**said, "tries": len(tried)}
