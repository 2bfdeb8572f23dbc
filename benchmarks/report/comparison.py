"""One run as a table: the median of every library beside gpubuf's and the roofline, and a reason for every gap.

``python -m benchmarks`` prints it after it has measured; :mod:`benchmarks.report.curves` draws the same run.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path

from benchmarks.measure import roofline
from benchmarks.measure.figures import OPEN, against, microseconds
from benchmarks.measure.results import Run
from benchmarks.measure.roofline import Traffic
from benchmarks.workloads.registry import REGISTRY, TITLES

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


def libraries(run: Run, workloads: Iterable[str]) -> list[str]:
    """Who was measured on any of these workloads; ours first."""
    measured = {library for name in workloads for library in run.of(name)}
    return [name for name in TITLES if name in measured]


def medians(run: Run, workloads: Sequence[str]) -> list[list[str]]:
    """Head and rows: median µs per call, in brackets how many times as long as gpubuf's. Graphs have no ratio."""
    columns = libraries(run, workloads)
    rows = []
    for workload in workloads:
        ours, row = run.median(workload, OURS), [REGISTRY[workload].title]
        for name in columns:
            beside = None if name.startswith(OURS) else ours
            row.append(against(beside, run.median(workload, name), missing=OPEN if name == OURS else ""))
        rows.append(row)
    return [["median µs per call", *(TITLES[name] for name in columns)], *rows]


def roofline_of(run: Run, workload: str, graph: bool = False) -> float | None:
    """The least time of a workload in seconds, the same for all libraries; the launches of a graph take less.

    None where it is not counted, or the run measured no bandwidth.
    """
    extras = (each["extra_info"] for library, each in run.of(workload).items() if library.endswith("-graph") == graph)
    extra, measured = next((each for each in extras if "bytes" in each), None), run.machine.get("roofline")
    if extra is None or not measured:
        return None
    traffic = Traffic(extra["bytes"], extra["launches"], extra.get("bus", 0))
    return roofline.seconds(traffic, measured, "graph_launch_seconds" if graph else "launch_seconds")


def table(run: Run) -> list[list[str]]:
    """Head and rows for a terminal: the medians of all workloads, and how far above the roofline gpubuf's are."""
    head, *rows = medians(run, run.workloads)
    for name, row in zip(run.workloads, rows, strict=True):
        ours, least = run.median(name, OURS), roofline_of(run, name)
        row += [microseconds(least) if least else "", f"{ours / least:.1f}x" if ours and least else ""]
    return [[*head, "roofline", "of the roofline"], *rows]


def missing(run: Run) -> list[str]:
    """A line for each library and reason that something was not measured for."""
    found: dict[tuple[str, str], list[str]] = {}
    for skip in run.data.get("skipped", []):
        found.setdefault((skip["library"], skip["reason"]), []).append(skip["workload"])
    lines = []
    for (library, reason), which in found.items():
        shown = ", ".join(which[:3]) + (f" and {len(which) - 3} more" if len(which) > 3 else "")
        lines.append(f"{TITLES[library]}: {reason} ({shown})")
    return lines
