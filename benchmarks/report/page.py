"""Draws a run: latency over capacity, batch and row, as pictures and as one page that needs nothing else."""

from __future__ import annotations

import base64
import html
import json
from collections.abc import Sequence
from io import BytesIO
from pathlib import Path

from benchmarks.measure import roofline
from benchmarks.report.comparison import Panel, combined, environments, missing, names, panels, placements, table
from benchmarks.report.runs import Run
from benchmarks.report.tables import load_before
from benchmarks.workloads.registry import TITLES
from benchmarks.workloads.sweeps import AXES, Axis

COLORS = {
    "gpubuf": "tab:blue",
    "gpubuf-graph": "tab:cyan",
    "torchrl": "tab:orange",
    "cpprb": "tab:green",
    "flashbax": "tab:red",
    "sb3": "tab:purple",
}
FLOORS = {"floor": "floor", "floor-graph": "floor, in a graph"}

STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; max-width: 76rem; margin: 2rem auto; padding: 0 1rem; color: #1b1f24; }
img { max-width: 100%; } h2 { margin-top: 2.5rem; }
div.wide { overflow-x: auto; } table { border-collapse: collapse; font-size: 14px; }
th, td { padding: .2rem .7rem; text-align: right; border-bottom: 1px solid #d8dde3; white-space: nowrap; }
th:first-child, td:first-child { text-align: left; }
ul.missing { color: #6a3b00; } p.small { color: #57606a; font-size: 14px; }
"""


def picture(run: Run, axis: Axis) -> bytes:
    """The pictures of an axis side by side, as one PNG; empty where nothing was measured."""
    shown = [panel for panel in panels(run, axis) if any(curve.points for curve in panel.curves)]
    if not shown:
        return b""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    columns = min(len(shown), 3)
    rows = -(-len(shown) // columns)
    figure = Figure(figsize=(4.6 * columns, 3.9 * rows + 0.9), layout="constrained")
    FigureCanvasAgg(figure)
    for i, panel in enumerate(shown):
        draw(figure.add_subplot(rows, columns, i + 1), panel)
    legend = {}
    for axes in figure.axes:
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
            # a line with points wins over one that says that there are none
            if label not in legend or len(handle.get_xdata()):
                legend[label] = handle
    labels = [label if len(h.get_xdata()) else f"{label}: not measured" for label, h in legend.items()]
    figure.legend(legend.values(), labels, loc="outside lower center", ncols=min(len(labels), 4))
    figure.suptitle(f"{run.machine['device']['name']}: {axis.fixed}", fontsize=11)
    out = BytesIO()
    figure.savefig(out, dpi=110, metadata={"Source": f"Drawn from {run.source} of {run.data['datetime']}."})
    return out.getvalue()


def draw(axes: object, panel: Panel) -> None:
    """One operation, log-log. A library without a point keeps its place in the legend."""
    for curve in panel.curves:
        x = [value for value, _ in curve.points]
        y = [seconds * 1e6 for _, seconds in curve.points]
        if curve.library in FLOORS:
            style = {"color": "0.35", "linestyle": "--" if curve.library == "floor" else ":", "marker": ""}
            label = FLOORS[curve.library]
        else:
            style = {"color": COLORS.get(curve.library, "0.6"), "marker": "o", "markersize": 4}
            style |= {"linewidth": 2.2 if curve.library == "gpubuf" else 1.3}
            label = TITLES[curve.library]
        axes.loglog(x, y, label=label, **style)  # type: ignore[attr-defined]
    axes.set_title(panel.title)  # type: ignore[attr-defined]
    axes.set_xlabel(panel.label)  # type: ignore[attr-defined]
    axes.set_ylabel("median µs a call")  # type: ignore[attr-defined]
    axes.grid(alpha=0.3, which="both")  # type: ignore[attr-defined]


def html_table(lines: Sequence[Sequence[str]]) -> str:
    """Head and rows as HTML."""
    head, *rows = [[html.escape(cell) for cell in line] for line in lines]
    parts = ["<tr>" + "".join(f"<th>{cell}</th>" for cell in head) + "</tr>"]
    parts += ["<tr>" + "".join(f"<td>{cell}</td>" for cell in row) + "</tr>" for row in rows]
    return '<div class="wide"><table>\n' + "\n".join(parts) + "\n</table></div>"


def html_list(lines: Sequence[str], kind: str) -> str:
    """A list, or nothing."""
    items = "\n".join(f"<li>{html.escape(line)}</li>" for line in lines)
    return f'<ul class="{kind}">\n{items}\n</ul>' if lines else ""


def section(run: Run, axis: Axis, image: bytes) -> str:
    """The part of the page about an axis."""
    workloads = names(run, axis.name)
    title = f"<h2>Over the {axis.name}</h2>\n<p>{html.escape(axis.label)}; {html.escape(axis.fixed)}.</p>"
    if not workloads:
        return f"{title}\n<p>Not measured: open.</p>"
    inlined = base64.b64encode(image).decode()
    alt = f"Latency over the {axis.name}, log-log, with the floor"
    shown = [f'<img alt="{alt}" src="data:image/png;base64,{inlined}">', html_table(table(run, workloads))]
    left_out = missing(run, [axis.name_of(operation, value) for operation in axis.operations for value in axis.values])
    heading = "<p>Not measured:</p>" if left_out else ""
    return "\n".join([title, *shown, heading, html_list(left_out, "missing")])


def rendered(run: Run, images: dict[str, bytes]) -> str:
    """The page. It holds its pictures, and asks for nothing from elsewhere."""
    machine = run.machine
    versions = ", ".join(f"{name} {version}" for name, version in machine["versions"].items())
    threads = f"{machine['threads']} thread" + ("s" if machine["threads"] != 1 else "")
    where = f"{machine['device']['name']}, Python {machine['python_version']}, {threads}; {versions}."
    measured = machine.get("floor")
    facts = [where, f"{run.data['datetime'][:16].replace('T', ' ')} UTC. {load_before(run)}"]
    facts += [f"Measured by the run itself: {roofline.describe(measured)}."] if measured else []
    facts += [f"In an environment of its own: {line}." for line in environments(run)]
    tables = names(run)
    points = {axis.name_of(operation, value) for axis in AXES for operation in axis.operations for value in axis.values}
    parts = [
        "<!doctype html>",
        '<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">',
        f"<title>gpubuf on {html.escape(machine['device']['name'])}</title><style>{STYLE}</style></head><body>",
        f"<h1>gpubuf on {html.escape(machine['device']['name'])}</h1>",
        *(f'<p class="small">{html.escape(fact)}</p>' for fact in facts),
        "<p>Every library's result was compared with what was stored before it was timed. In brackets: how many times "
        "as long as gpubuf. The floor: the bytes that have to be read and written over the bandwidth of a copy, and "
        "the launches that have to happen times what one takes; on a CPU a launch is the call of an operation that "
        "finds nothing to do. Rows, indices, priorities and weights count; nodes of trees, cache lines and latency "
        "don't.</p>",
        *(section(run, axis, images.get(axis.name, b"")) for axis in AXES),
    ]
    if tables:
        parts += ["<h2>Workloads</h2>", html_table(table(run, tables))]
        left_out = missing(run, {skip["workload"] for skip in run.data.get("skipped", [])} - points)
        parts += ["<p>Not measured:</p>" if left_out else "", html_list(left_out, "missing")]
    placed = placements(run)
    if placed:
        parts += ["<h2>Where the rows lie</h2>", html_table(placed)]
    return "\n".join([*parts, "</body></html>", ""])


def read(paths: Sequence[Path]) -> Run:
    """The files that exist, as one run."""
    return combined([Run(path.name, json.loads(path.read_text())) for path in paths if path.exists()])


def write(paths: Sequence[Path], out: Path) -> list[Path]:
    """Draw the runs in some files, of one machine.

    Args:
        paths: files of results; those that don't exist are passed over.
        out: the page. A picture for each axis goes beside it.

    Returns:
        What was written.

    Raises:
        ValueError: there are no results, or they are of different devices.
    """
    run = read(paths)
    images = {axis.name: picture(run, axis) for axis in AXES}
    out.parent.mkdir(parents=True, exist_ok=True)
    written = [out]
    out.write_text(rendered(run, images))
    for name, image in images.items():
        if image:
            path = out.with_name(f"{out.stem}-{name}.png")
            path.write_bytes(image)
            written.append(path)
    return written
