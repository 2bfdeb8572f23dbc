"""What a run says: medians beside those of the others and the floor, points of curves, and what was not measured."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from benchmarks.measure import roofline
from benchmarks.measure.roofline import Traffic
from benchmarks.report.runs import Run
from benchmarks.report.tables import OPEN, against, microseconds, or_open
from benchmarks.workloads.placements import PLACEMENTS
from benchmarks.workloads.registry import PEERS, TITLES, environment
from benchmarks.workloads.slices import SIZES, sized
from benchmarks.workloads.sweeps import AXES, Axis

OURS = "gpubuf"
#: What slices draw from grows as well; they are part of the tables.
SLICES_PANEL = "slices: write a row and sample"


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


def floor_of(run: Run, workload: str, library: str = OURS) -> float | None:
    """The least time of a workload in seconds; None where it is not counted, or the run measured no bandwidth.

    It is the same for all libraries, but for replays of graphs, whose launches take less, and for rows on the host.
    """
    measured, graph = run.machine.get("floor"), library.endswith("-graph")
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
    """Head and rows: median µs a call of each library, in brackets how many times as long as gpubuf; and the floor."""
    columns = libraries(run, workloads)
    titles = {b["extra_info"]["workload"]: b["extra_info"].get("title", "") for b in run.data["benchmarks"]}
    lines = [["median µs a call", *(TITLES[name] for name in columns), "floor", "of the floor"]]
    for name in workloads:
        ours, least = run.median(name, OURS), floor_of(run, name)
        cells = [
            against(ours if library != OURS else None, run.median(name, library), missing="-") for library in columns
        ]
        times = f"{ours / least:.1f}x" if ours and least else "-"
        lines.append([titles[name] or name, *cells, microseconds(least) if least else "-", times])
    return lines


def placements(run: Run) -> list[list[str]]:
    """Head and rows: batches by where their rows lie, each with a floor of its own; empty where none were measured."""
    lines = []
    for benchmark in run.data["benchmarks"]:
        extra = benchmark["extra_info"]
        workload, library = extra["workload"], extra["library"]
        if library in PLACEMENTS:
            seconds, least = run.median(workload, library), floor_of(run, workload, library)
            times = f"{seconds / least:.1f}x" if seconds and least else "-"
            lines.append([f"{extra['batch']:,} rows", TITLES[library], or_open(seconds), or_open(least), times])
    return (
        [["rows of 4 KiB to the GPU", "they lie", "median µs a call", "floor", "of the floor"], *lines] if lines else []
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


@dataclass(frozen=True)
class Curve:
    """The time of one library over an axis.

    Attributes:
        library: whose; ``floor`` and ``floor-graph`` are the least that is possible.
        points: (value on the axis, seconds), by value.
        reason: why there are none, or not all.
    """

    library: str
    points: tuple[tuple[int, float], ...]
    reason: str = ""


@dataclass(frozen=True)
class Panel:
    """The curves of one operation over one axis."""

    title: str
    label: str
    curves: tuple[Curve, ...]


def curve(run: Run, library: str, workloads: dict[str, int]) -> Curve:
    """The curve of a library through workloads with these values."""
    points = [(value, run.median(name, library)) for name, value in workloads.items()]
    reasons = {
        skip["reason"]
        for skip in run.data.get("skipped", [])
        if skip["library"] == library and skip["workload"] in workloads
    }
    measured = tuple((value, seconds) for value, seconds in points if seconds is not None)
    return Curve(library, measured, "; ".join(sorted(reasons)) or ("" if measured else OPEN))


def floors(run: Run, workloads: dict[str, int]) -> list[Curve]:
    """What is possible, and what is possible inside a graph where that was measured."""
    found = []
    for name, library in (("floor", OURS), ("floor-graph", f"{OURS}-graph")):
        points = [(value, floor_of(run, workload, library)) for workload, value in workloads.items()]
        measured = tuple((value, seconds) for value, seconds in points if seconds is not None)
        if measured:
            found.append(Curve(name, measured))
    return found


def panel(run: Run, title: str, label: str, workloads: dict[str, int], peers: Sequence[str]) -> Panel:
    """The curves through these workloads: of everybody who was asked, of every peer whether asked or not."""
    asked = libraries(run, workloads)
    shown = [name for name in TITLES if name in asked or name in peers]
    return Panel(title, label, (*(curve(run, name, workloads) for name in shown), *floors(run, workloads)))


def panels(run: Run, axis: Axis) -> list[Panel]:
    """All pictures of an axis, in the order of its operations; slices come last on that of the capacity."""
    tried = set(names(run, axis.name)) | {skip["workload"] for skip in run.data.get("skipped", [])}
    found = []
    for operation in axis.operations:
        workloads = {axis.name_of(operation, value): value for value in axis.values}
        workloads = {name: value for name, value in workloads.items() if name in tried}
        found.append(panel(run, operation.title, axis.label, workloads, PEERS))
    if axis is AXES[0]:
        slices = {sized(stored, capacity, "write-and-sample"): stored for stored, capacity in SIZES}
        measured = {name: stored for name, stored in slices.items() if run.median(name, OURS) is not None}
        if measured:
            found.append(panel(run, SLICES_PANEL, "rows stored", measured, ("torchrl",)))
    return found


def environments(run: Run) -> list[str]:
    """A line for each environment whose versions are not those of ours."""
    versions = run.machine.get("environments", {})
    ours = versions.get(environment(OURS), run.machine["versions"])
    lines = []
    for name, found in versions.items():
        own = {package: version for package, version in found.items() if ours.get(package) != version}
        if own:
            lines.append(f"{TITLES[name]}: {', '.join(f'{package} {version}' for package, version in own.items())}")
    return lines
