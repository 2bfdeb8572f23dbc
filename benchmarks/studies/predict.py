"""How long every call should take on an H200, from what its kernels execute.

:mod:`benchmarks.studies.kernels` has counted that: launches, programs, warp instructions, bytes, and the trips to
memory that a warp makes one after the other. The time of a launch is ``LAUNCH + trips + max(bytes, instructions)``:

* all trips but one find what they look for in the second level of cache; one goes to memory, where rows lie;
* bytes are those that threads ask for. What several of them share counts several times, a sector read for one byte of
  it once;
* instructions are issued by the multiprocessors side by side, of which none is done before its program that has most.
  A multiprocessor with few warps waits for each instruction of a warp before the next.

``python -m benchmarks.studies.predict`` prints the table of docs/performance.md, of the committed counts. A measurement
on the device judges the model: where they differ by more than half, a constant or a line here is wrong.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from benchmarks.measure.figures import OPEN, described, digits, table
from benchmarks.measure.results import Runs, newest_runs

LAUNCH = 2.0
"""Microseconds of an empty kernel in a replayed graph, from the one before to the one after; eager ones take 5."""

CACHE, MEMORY = 0.25, 0.6
"""Microseconds until a load returns that hits the second level of cache, and one that misses it."""

BANDWIDTH = 4.1e6
"""Bytes a microsecond that a copy reaches: 85 % of the nominal 4.8 TB/s of HBM3e."""

PROCESSORS, CLOCK = 132, 1750.0
"""Multiprocessors, and their cycles a microsecond."""

MACHINE_CODE = 1.3
"""Instructions that ptxas makes of one of PTX, on average over four kernels."""

FULL, ALONE = 2.5, 0.25
"""Warp instructions a cycle of a multiprocessor: the most, and for each warp that is there."""


def parts(launch: Mapping[str, Any]) -> tuple[float, float, float]:
    """Microseconds of a launch: of its trips, bytes and instructions."""
    trips = max(launch["trips"] - 1, 0) * CACHE + MEMORY * (launch["trips"] > 0)
    warps = -(-launch["programs"] // PROCESSORS) * launch["warps"]
    instructions = max(launch["most_instructions"], launch["instructions"] / PROCESSORS) * MACHINE_CODE
    cycles = instructions / min(FULL, warps * ALONE)
    return trips, (launch["bytes_loaded"] + launch["bytes_stored"]) / BANDWIDTH, cycles / CLOCK


def microseconds(launch: Mapping[str, Any]) -> float:
    """The prediction, in a graph."""
    trips, moved, issued = parts(launch)
    return LAUNCH + trips + max(moved, issued)


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
        time = sum(map(microseconds, launches))
        figures = [digits(found[what]) if what in found else OPEN for what in ("warm", "cold")]
        lines.append([call["call"], grids, most, trips, *map(digits, sums), digits(time), *figures])
    constants = (
        f"Predicted for an H200, in a graph: {LAUNCH:.1f} µs per launch, {CACHE} µs per trip to the cache and "
        f"{MEMORY} µs one to memory, and the longer of bytes at {BANDWIDTH / 1e6:.1f} TB/s and instructions, "
        f"{MACHINE_CODE} for one of PTX, of which a multiprocessor issues {FULL} a cycle, or {ALONE} for each warp "
        "that it has. Warm and cold are measured, by `python -m benchmarks.studies.gpu_calls cuda`."
    )
    head = ["call", "programs x warps", "warp instructions of a program", "trips", "µs of trips", "µs of bytes"]
    found_table = table([*head, "µs of instructions", "**µs**", "warm", "cold"], lines)
    return "\n\n".join([constants, found_table, *([described(measured)] if measured else [])])


if __name__ == "__main__":
    print(prediction_table(newest_runs()))
