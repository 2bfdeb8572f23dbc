"""One run as tables: the median of every library beside gpubuf's and the roofline, and a reason for every gap.

``python -m benchmarks`` prints these tables after it has measured; :mod:`benchmarks.report.curves` draws the same run.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path

from benchmarks.measure import roofline
from benchmarks.measure.figures import against, microseconds, or_open
from benchmarks.measure.results import Run
from benchmarks.measure.roofline import Traffic
from benchmarks.workloads.placements import PLACEMENTS
from benchmarks.workloads.registry import TITLES

OURS = "gpubuf"


def combined(runs: Sequence[Run]) -> Run:
    """Several files of one machine as one.

    Raises:
        ValueError: there are none, or they are of different devices.
    """
    if not runs:
        raise ValueError("there are no results to show")
    devices = {(run.machine["device"]["kind"], run.machine["device"]["name"]) for run in runs}
    if len(devices) > 1:
        raise ValueError(f"results of one device are needed, but these are of {sorted(devices)}")
    parts = {key: [entry for run in runs for entry in run.data.get(key, [])] for key in ("benchmarks", "skipped")}
    return Run(runs[0].source, {**runs[0].data, **parts})


def read(paths: Sequence[Path]) -> Run:
    """The files that exist, as one run."""
    return combined([Run(path.name, json.loads(path.read_text())) for path in paths if path.exists()])


def names(run: Run, axis: str | None = None) -> list[str]:
    """Workloads that were tried: the points of an axis, or (None) those of the tables; as the run lists them.

    Placements are not among them: :func:`placements` has those.
    """
    found = {
        b["extra_info"]["workload"]: b["extra_info"].get("axis")
        for b in run.data["benchmarks"]
        if b["extra_info"]["library"] not in PLACEMENTS
    }
    return [name for name, of in found.items() if of == axis]


def libraries(run: Run, workloads: Iterable[str]) -> list[str]:
    """Who was asked to do these workloads, whether it could or not; ours first."""
    of_these = set(workloads)
    asked = {b["extra_info"]["library"] for b in run.data["benchmarks"] if b["extra_info"]["workload"] in of_these}
    asked |= {skip["library"] for skip in run.data.get("skipped", []) if skip["workload"] in of_these}
    return [name for name in TITLES if name in asked]


def roofline_of(run: Run, workload: str, library: str = OURS) -> float | None:
    """The least time of a workload in seconds; None where it is not counted, or the run measured no bandwidth.

    It is the same for all libraries, but for replays of graphs, whose launches take less, and for rows on the host.
    """
    measured, graph = run.machine.get("roofline"), library.endswith("-graph")
    counted = [
        benchmark["extra_info"]
        for benchmark in run.data["benchmarks"]
        if benchmark["extra_info"]["workload"] == workload
        and "bytes" in benchmark["extra_info"]
        and benchmark["extra_info"]["library"].endswith("-graph") == graph
    ]
    if not counted or not measured:
        return None
    extra = next((extra for extra in counted if extra["library"] == library), counted[0])
    traffic = Traffic(extra["bytes"], extra["launches"], extra.get("bus", 0))
    return roofline.seconds(traffic, measured, "graph_launch_seconds" if graph else "launch_seconds")


def table(run: Run, workloads: Sequence[str]) -> list[list[str]]:
    """Head and rows: median µs per call, in brackets how many times as long as gpubuf's; the roofline comes last."""
    columns = libraries(run, workloads)
    titles = {b["extra_info"]["workload"]: b["extra_info"].get("title", "") for b in run.data["benchmarks"]}
    lines = [["median µs per call", *(TITLES[name] for name in columns), "roofline", "of the roofline"]]
    for name in workloads:
        ours, least = run.median(name, OURS), roofline_of(run, name)
        cells = [
            against(ours if library != OURS else None, run.median(name, library), missing="-") for library in columns
        ]
        times = f"{ours / least:.1f}x" if ours and least else "-"
        lines.append([titles[name] or name, *cells, microseconds(least) if least else "-", times])
    return lines


def placements(run: Run) -> list[list[str]]:
    """Head and rows: batches by where their rows lie, each with its own roofline; empty where none were measured."""
    lines = []
    for benchmark in run.data["benchmarks"]:
        extra = benchmark["extra_info"]
        workload, library = extra["workload"], extra["library"]
        if library in PLACEMENTS:
            seconds, least = run.median(workload, library), roofline_of(run, workload, library)
            times = f"{seconds / least:.1f}x" if seconds and least else "-"
            lines.append([f"{extra['batch']:,} rows", TITLES[library], or_open(seconds), or_open(least), times])
    return (
        [["rows of 4 KiB to the GPU", "they lie", "median µs per call", "roofline", "of the roofline"], *lines]
        if lines
        else []
    )


def missing(run: Run, workloads: Iterable[str] | None = None) -> list[str]:
    """A line for each library and reason that something was not measured for."""
    of_these = None if workloads is None else set(workloads)
    found: dict[tuple[str, str], list[str]] = {}
    for skip in run.data.get("skipped", []):
        if of_these is None or skip["workload"] in of_these:
            found.setdefault((skip["library"], skip["reason"]), []).append(skip["workload"])
    lines = []
    for (library, reason), which in found.items():
        shown = ", ".join(which[:3]) + (f" and {len(which) - 3} more" if len(which) > 3 else "")
        lines.append(f"{TITLES[library]}: {reason} ({shown})")
    return lines
