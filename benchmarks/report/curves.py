"""Latency over capacity, batch and row as pictures: :func:`panels` collects the curves, :func:`write` draws them.

A picture shows one axis of :data:`benchmarks.workloads.sweeps.AXES`, with a panel for each operation, and in a panel a
curve for each library and one for the roofline.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.measure.results import Run
from benchmarks.report import pictures
from benchmarks.report.comparison import OURS, libraries, names, read, roofline_of
from benchmarks.workloads.registry import PEERS, TITLES
from benchmarks.workloads.slices import CURVE, sized
from benchmarks.workloads.sweeps import AXES, Axis

COLORS = {
    "gpubuf": "tab:blue",
    "gpubuf-graph": "tab:cyan",
    "torchrl": "tab:orange",
    "cpprb": "tab:green",
    "flashbax": "tab:red",
    "sb3": "tab:purple",
}
ROOFLINES = {"roofline": "roofline", "roofline-graph": "roofline, in a graph"}
#: The rows that slices are drawn from grow as well; this panel stands beside those over the capacity.
SLICES_PANEL = "slices: write a row and sample"


Points = list[tuple[int, float]]
"""(value on the axis, seconds), by value."""


@dataclass(frozen=True)
class Panel:
    """The curves of one operation over one axis.

    Attributes:
        title: the operation.
        label: of the axis.
        curves: of each library; ``roofline`` and ``roofline-graph`` are the least possible time. Empty: not measured.
    """

    title: str
    label: str
    curves: dict[str, Points]


def measured(points: Iterable[tuple[int, float | None]]) -> Points:
    """Those that were measured."""
    return [(value, seconds) for value, seconds in points if seconds is not None]


def panel(run: Run, title: str, label: str, workloads: dict[str, int], peers: Sequence[str]) -> Panel:
    """The curves through these workloads, of every library that was asked and of every peer, asked or not.

    The rooflines come last: the one inside a CUDA graph where that was measured.
    """
    asked = libraries(run, workloads)
    curves = {
        name: measured((value, run.median(workload, name)) for workload, value in workloads.items())
        for name in TITLES
        if name in asked or name in peers
    }
    for name, library in (("roofline", OURS), ("roofline-graph", f"{OURS}-graph")):
        least = measured((value, roofline_of(run, workload, library)) for workload, value in workloads.items())
        curves |= {name: least} if least else {}
    return Panel(title, label, curves)


def panels(run: Run, axis: Axis) -> list[Panel]:
    """All panels of an axis, in the order of its operations; the capacity has one more, of slices."""
    tried = set(names(run, axis.name)) | {skip["workload"] for skip in run.data.get("skipped", [])}
    found = []
    for operation in axis.operations:
        workloads = {axis.name_of(operation, value): value for value in axis.values}
        workloads = {name: value for name, value in workloads.items() if name in tried}
        found.append(panel(run, operation.title, axis.label, workloads, PEERS))
    if axis is AXES[0]:
        slices = {sized(stored, capacity, "write-and-sample"): stored for stored, capacity in CURVE}
        sliced = {name: stored for name, stored in slices.items() if run.median(name, OURS) is not None}
        if sliced:
            found.append(panel(run, SLICES_PANEL, "rows stored", sliced, ("torchrl",)))
    return found


def picture(run: Run, axis: Axis, path: Path) -> bool:
    """The pictures of an axis side by side, as one PNG; whether anything was measured."""
    shown = [panel for panel in panels(run, axis) if any(panel.curves.values())]
    if not shown:
        return False
    # Two columns: what the text of a page has room for. The legend is where a panel is missing, else below.
    columns = min(len(shown), 2)
    rows = -(-len(shown) // columns)
    hole = len(shown) < rows * columns
    figure = pictures.new_figure(4.2 * columns, 3.4 * rows + (0.3 if hole else 0.9))
    for i, panel in enumerate(shown, 1):
        draw(pictures.axes_of(figure, panel.title, panel.label, "median µs per call", rows, columns, i), panel)
    legend = {
        label: handle for axes in figure.axes for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)
    }
    if hole:
        place = figure.add_subplot(rows, columns, rows * columns)
        place.axis("off")
        place.legend(legend.values(), legend, loc="center")
    else:
        figure.legend(legend.values(), legend, loc="outside lower center", ncols=min(len(legend), 4))
    figure.suptitle(f"{run.machine['device']['name']}: {axis.fixed}", fontsize=11)
    pictures.save(figure, path, [run])
    return True


def draw(axes: Any, panel: Panel) -> None:
    """One operation, log-log. A library without a point is not in the legend: the tables say why it has none."""
    for library, points in panel.curves.items():
        if not points:
            continue
        x = [value for value, _ in points]
        y = [seconds * 1e6 for _, seconds in points]
        if library in ROOFLINES:
            style = {"color": "0.35", "linestyle": "--" if library == "roofline" else ":", "marker": ""}
            label = ROOFLINES[library]
        else:
            style = {"color": COLORS.get(library, "0.6"), "marker": "o", "markersize": 4}
            style |= {"linewidth": 2.2 if library == "gpubuf" else 1.3}
            label = TITLES[library]
        axes.plot(x, y, label=label, **style)
    pictures.log_log(axes)


def write(paths: Sequence[Path], out: Path) -> list[Path]:
    """Draw the runs in some files of one machine.

    Args:
        paths: files of results; those that don't exist are passed over.
        out: the path of the pictures without ``-<axis>.png``.

    Returns:
        The pictures: one for each axis that was measured.

    Raises:
        ValueError: there are no results, or they are of different devices.
    """
    run = read(paths)
    out.parent.mkdir(parents=True, exist_ok=True)
    drawn = {axis: out.with_name(f"{out.name}-{axis.name}.png") for axis in AXES}
    return [path for axis, path in drawn.items() if picture(run, axis, path)]
