"""How long every call should take on an H200, from what its kernels execute.

:mod:`benchmarks.studies.kernels` has counted that: launches, programs, warp instructions, bytes, and the trips to
memory that a warp makes one after the other. The time of a launch is ``launch + trips + max(bytes, instructions)``:

* all trips but one find what they look for in a cache; one goes to where rows lie;
* bytes are those that threads ask for. What several of them share counts several times, a sector read for one byte of
  it once. A multiprocessor gets no more than its share of the bandwidth, also where the others ask for nothing;
* instructions are issued by the multiprocessors side by side, of which none is done before its program that has most.
  A multiprocessor with few warps waits for each instruction of a warp before the next.

The constants fit what was measured on an H200 on 2026-11-26. Ten launches under ncu took what :data:`PROFILED` says
within 25 %; tests/benchmarks/test_predict.py has them. In replayed graphs 31 of 36 calls took what :data:`WARM` says
within 25 %, and 29 what :data:`COLD` says; most are in docs/performance.md. Before a multiprocessor had a share of the
bandwidth, a priority update by one program was to take half of what it took.

``python -m benchmarks.studies.predict`` prints the table of docs/performance.md, of the committed counts. A measurement
on the device judges the model: where they differ by more than a quarter, a constant or a line here is wrong.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from benchmarks.measure.figures import OPEN, described, digits, table
from benchmarks.measure.results import Runs, newest_runs


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


def prediction_table(runs: Runs) -> str:
    """docs/performance.md: the prediction of every call, part by part, and what a GPU took."""
    run, measured = runs.get("kernels"), runs.get("calls on cuda")
    if run is None:
        return f"No run of `python -m benchmarks.studies.kernels` is committed: {OPEN}."
    took = {} if measured is None else {each["call"]: each for each in measured.data["calls"]}
    lines = []
    for call in run.data["kernels"]["launches"]:
        launches, found = call["launches"], took.get(call["call"], {})
        grids = " + ".join(f"{each['programs']} x {each['warps']}" for each in launches)
        most = " + ".join(f"{each['most_instructions']:,}" for each in launches)
        trips = " + ".join(str(each["trips"]) for each in launches)
        sums = [sum(each) for each in zip(*map(parts, launches), strict=True)]
        line = [call["call"], grids, most, trips, *map(digits, sums)]
        for what, caches in (("warm", WARM), ("cold", COLD)):
            line.append(digits(sum(microseconds(each, caches) for each in launches)))
            line.append(digits(found[what]) if what in found else OPEN)
        lines.append(line)
    constants = (
        f"Predicted for an H200, in a graph: {COLD.launch:.1f} µs per launch. Cold, {COLD.cache} µs per trip to the "
        f"cache and {COLD.memory} µs one to memory, and the longer of bytes at {COLD.bandwidth / 1e6:.1f} TB/s, of "
        f"which a multiprocessor gets its share, and instructions, {MACHINE_CODE} for one of PTX, of which it issues "
        f"{FULL} a cycle, or {ALONE} for each warp that it has. Warm, {WARM.cache} and {WARM.memory} µs per trip and "
        f"{WARM.bandwidth / 1e6:.1f} TB/s. The parts are those of a cold one. What the calls took is measured, by "
        "`python -m benchmarks.studies.gpu_calls cuda`."
    )
    head = ["call", "programs x warps", "warp instructions of a program", "trips", "µs of trips", "µs of bytes"]
    found_table = table([*head, "µs of instructions", "**warm**", "took", "**cold**", "took"], lines)
    return "\n\n".join([constants, found_table, *([described(measured)] if measured else [])])


if __name__ == "__main__":
    print(prediction_table(newest_runs()))
