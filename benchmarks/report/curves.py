"""Latency over capacity, batch and row as pictures: :func:`curves` collects them, :func:`write` draws.

A picture shows one axis of :data:`benchmarks.workloads.sweeps.AXES`, with a panel for each operation, and in a panel a
curve for each library and one for the roofline.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from benchmarks.measure.results import Run
from benchmarks.report import pictures
from benchmarks.report.comparison import libraries, read, roofline_of
from benchmarks.workloads.registry import TITLES
from benchmarks.workloads.replay import Operation
from benchmarks.workloads.sweeps import AXES, Axis

COLORS = {
    "gpubuf": "tab:blue",
    "gpubuf-graph": "tab:cyan",
    "torchrl": "tab:orange",
    "cpprb": "tab:green",
    "flashbax": "tab:red",
    "sb3": "tab:purple",
}
ROOFLINES = {"roofline": ("roofline", "--"), "roofline-graph": ("roofline, in a graph", ":")}

Curves = dict[str, list[tuple[int, float]]]
"""By library, or key of :data:`ROOFLINES`: (value on the axis, seconds) of all points, by value."""


def curves(run: Run, axis: Axis, operation: Operation) -> Curves:
    """The curves of one operation over one axis, of everything that was measured."""
    values = {axis.name_of(operation, value): value for value in axis.values}
    found = {
        library: {value: run.median(name, library) for name, value in values.items()}
        for library in libraries(run, values)
    }
    for name in ROOFLINES if found else ():
        graph = name.endswith("-graph")
        found[name] = {value: roofline_of(run, workload, graph) for workload, value in values.items()}
    measured = {
        name: [(value, seconds) for value, seconds in points.items() if seconds is not None]
        for name, points in found.items()
    }
    return {name: points for name, points in measured.items() if points}


def picture(run: Run, axis: Axis, path: Path) -> bool:
    """The panels of an axis, two in a row, as one PNG; whether anything was measured."""
    panels = {operation.title: curves(run, axis, operation) for operation in axis.operations}
    panels = {title: found for title, found in panels.items() if found}
    if not panels:
        return False
    rows = -(-len(panels) // 2)
    figure = pictures.new_figure(8.4, 3.4 * rows + 0.9)
    legend = {}
    for i, (title, found) in enumerate(panels.items(), 1):
        axes = pictures.axes_of(figure, title, axis.label, "median µs per call", rows, 2, i)
        for name, points in found.items():
            if name in ROOFLINES:
                label, dashes = ROOFLINES[name]
                style = {"color": "0.35", "linestyle": dashes}
            else:
                label = TITLES[name]
                style = {"color": COLORS[name], "marker": "o", "markersize": 4}
            x, y = zip(*points, strict=True)
            (legend[label],) = axes.plot(x, [seconds * 1e6 for seconds in y], **style)
        pictures.log_log(axes)
    figure.legend(legend.values(), legend, loc="outside lower center", ncols=4)
    figure.suptitle(f"{run.machine['device']['name']}: {axis.fixed}", fontsize=11)
    pictures.save(figure, path, [run])
    return True


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
