"""Writes the measured figures into README.md and the pages of docs/, so that none of them is typed by hand.

``python -m benchmarks.report`` reads the newest file of every kind in ``benchmarks/results/``, and rewrites the blocks
between the markers ``<!-- figures: NAME -->`` and ``<!-- end of figures -->``. With ``--check`` it changes nothing, and
fails if a page is out of date. The plot of the slices is drawn from the same runs.
"""

from __future__ import annotations

import argparse
import functools
import inspect
import re
import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.measure.figures import (
    OPEN,
    against,
    conditions,
    described,
    microseconds,
    of_run,
    or_open,
    table,
)
from benchmarks.measure.machine import RESULTS
from benchmarks.measure.results import Run, Runs, newest_runs
from benchmarks.peers.libraries import LIBRARIES, GpubufGraph
from benchmarks.report import pictures
from benchmarks.report.comparison import libraries, medians
from benchmarks.report.learning import LEARNING_PLOT, algorithms_section, draw_learning, speed_section, training_table
from benchmarks.report.memory import memory_tables
from benchmarks.studies.kernels import launches_table
from benchmarks.studies.side_by_side import TABLES, section
from benchmarks.studies.writers import writers_section
from benchmarks.workloads.registry import REGISTRY, TITLES
from benchmarks.workloads.replay import WORKLOADS
from benchmarks.workloads.slices import CURVE, OPERATIONS, SIZES, SLICES, short, sized

ROOT = Path(__file__).parents[2]
PLOT = "docs/slices.png"
KINDS = {"cpu": "CPU", "cuda": "GPU"}


def workloads(run: Run) -> list[str]:
    """Which workloads were measured, in their registered order; slices are not among them."""
    measured = set(run.workloads) - SLICES.keys()
    return [name for name in WORKLOADS if name in measured] + sorted(measured - WORKLOADS.keys())


def slice_workloads(run: Run) -> list[str]:
    """Which workloads of slices were measured, in their registered order."""
    return [name for name in SLICES if name in run.workloads]


def comparison_table(run: Run, replay: bool) -> str:
    """docs/performance.md: median time of a call on one kind of device, and how many times as long the peers take."""
    names = [name for name in workloads(run) if (name in WORKLOADS) == replay]
    if not names:
        return f"Nothing of this is measured: {OPEN}."
    head, *rows = medians(run, names)
    return table(head, rows)


HEADLINES = (
    *(f"{call}-between-updates-256" for call in ("batch", "prioritized-batch", "sample-and-update")),
    *("uniform-sample-256", "prioritized-sample-256", "sample-and-update-256", "extend-256"),
    *(sized(5_000_000, 6_000_000, "write-and-sample"), "SAC-update-256"),
)


def headline_table(runs: Runs) -> str:
    """README: the calls of a training step on every kind of device, beside TorchRL and the fastest other library."""
    measured = {name for kind in KINDS if kind in runs for name in runs[kind].workloads}
    names = [name for name in HEADLINES if name in measured]
    head, rows = ["median µs per call"], [[REGISTRY[name].title] for name in names]
    others = [name for name in TITLES if not name.startswith(("gpubuf", "torchrl")) and name != "plain"]
    for kind, run in ((kind, runs[kind]) for kind in KINDS if kind in runs):
        graph = kind == "cuda"
        device = run.machine["device"]["name"]
        head += [device, *(["in a graph"] if graph else []), "TorchRL", "fastest other"]
        for name, row in zip(names, rows, strict=True):
            ours = run.median(name, "gpubuf")
            row.append(or_open(ours) if kind in REGISTRY[name].devices else "")
            if graph:
                row.append(against(None, run.median(name, "gpubuf-graph"), missing=""))
            row.append(against(ours, run.median(name, "torchrl"), missing=""))
            found = [(time, peer) for peer in others if (time := run.median(name, peer))]
            time, peer = min(found, default=(None, ""))
            row.append(f"{against(ours, time, missing='')} {TITLES.get(peer, '')}".strip())
    return table(head, rows) if len(head) > 1 else f"{OPEN}."


def training_batches(runs: Runs) -> str:
    """docs/performance.md: the code that is timed between updates, of every library."""
    shown: dict[Callable[..., Any], list[str]] = {}
    for library in LIBRARIES.values():
        if library is not GpubufGraph:
            shown.setdefault(library.training_batch, []).append(library.title)
    parts = []
    for method, titles in shown.items():
        code = textwrap.dedent(inspect.getsource(method)).partition("\n")[2]
        parts.append(f"{', '.join(titles)}:\n\n```text\n{textwrap.dedent(code)}```")
    return "\n\n".join(parts)


def machines(runs: Runs) -> str:
    """The machines and versions of the runs of benchmarks."""
    return "\n\n".join(described(runs[kind]) for kind in ("cpu", "cuda") if kind in runs) or f"{OPEN}."


def spreads(run: Run, names: Sequence[str]) -> str:
    """Median, interquartile range and minimum of every library."""
    rows = []
    for workload in names:
        for library in libraries(run, [workload]):
            if entry := run.entry(workload, library):
                numbers = [microseconds(entry[name]) for name in ("median", "iqr", "min")]
                rows.append([REGISTRY[workload].title, TITLES[library], *numbers])
    return table(["µs per call", "library", "median", "interquartile range", "minimum"], rows)


def spread_table(run: Run) -> str:
    """docs/performance.md: median, interquartile range and minimum of every library on one kind of device."""
    parts = [spreads(run, workloads(run)), conditions(run)]
    if "gpu_tests" in run.data:
        tests = run.data["gpu_tests"]
        failures = "".join(f" Failed: `{name}`." for name in tests["failures"])
        parts.append(
            f"GPU tests: {tests['passed']} passed, {tests['failed']} failed, {tests['skipped']} skipped.{failures}"
        )
    return "\n\n".join(parts)


@of_run("threads", "with several numbers of threads")
def threads_table(run: Run) -> str:
    """docs/performance.md: the same calls with several numbers of threads."""
    each = {n: Run(run.source, {**run.data, "benchmarks": found}) for n, found in run.data["threads"].items()}
    (first, few), *_, (last, many) = each.items()
    rows = []
    for workload in few.workloads:
        for library in libraries(few, [workload]):
            before, after = few.entry(workload, library), many.entry(workload, library)
            if before and after:
                numbers = [microseconds(entry[name]) for entry in (before, after) for name in ("median", "min")]
                rows.append(
                    [REGISTRY[workload].title, TITLES[library], *numbers, f"{before['median'] / after['median']:.2f}x"]
                )
    columns = [f"{name}, threads: {n}" for n in (first, last) for name in ("median", "minimum")]
    return f"{table(['µs per call', 'library', *columns, 'gain'], rows)}\n\n{conditions(run)}"


def sizes_table(run: Run) -> str:
    """Slices from buffers of rising size, and by how much gpubuf's time rises."""
    rows: list[list[str]] = []
    medians: dict[str, dict[int, list[float]]] = {operation: {} for operation in OPERATIONS}
    for stored, capacity in SIZES:
        row = [f"{short(stored)} in {short(capacity)}"]
        for operation, found in medians.items():
            workload = sized(stored, capacity, operation)
            ours = run.median(workload, "gpubuf")
            if ours is not None:
                found.setdefault(stored, []).append(ours)
            row += [or_open(ours), against(ours, run.median(workload, "torchrl"))]
            if "torchrl-uncached" in SLICES[workload].libraries:
                row.append(against(ours, run.median(workload, "torchrl-uncached")))
        found_here = run.of(sized(stored, capacity, "sample")).get("gpubuf", {"extra_info": {}})
        index_bytes = found_here["extra_info"].get("index_bytes_per_row")
        rows.append([*row, OPEN if index_bytes is None else f"{index_bytes:.3f}"])
    head = ["rows stored, in room for", "sample", "TorchRL, cached", "TorchRL, uncached"]
    head += ["write a row and sample", "TorchRL, cached", "bytes of index per row"]

    def rise(least: int) -> str:
        chosen = {
            name: [m for stored in found if stored >= least for m in found[stored]] for name, found in medians.items()
        }
        return ", ".join(f"{OPERATIONS[name]} {max(m) / min(m):.2f}" for name, m in chosen.items() if m)

    rises = f"gpubuf, largest median over smallest: {rise(0)}; of those with 5M rows and more: {rise(5_000_000)}."
    return "\n\n".join([table(head, rows), rises])


def other_slices_table(run: Run) -> str:
    """The other workloads of slices: filling, many environments, priorities."""
    rows, of_sizes = [], {sized(*size, operation) for size in SIZES for operation in OPERATIONS}
    for name in slice_workloads(run):
        if name in of_sizes:
            continue
        ours, without = run.median(name, "gpubuf"), run.median(name, "gpubuf-random")
        plain = f"{microseconds(without)} (index: {(ours / without - 1) * 100:+.0f} %)" if ours and without else ""
        theirs = run.median(name, "torchrl")
        rows.append([REGISTRY[name].title, or_open(ours), plain, against(ours, theirs)])
    return table(["median µs per call", "gpubuf", TITLES["gpubuf-random"], "TorchRL"], rows)


def slices_section(runs: Runs) -> str:
    """docs/performance.md: slices on every kind of device."""
    measured = {kind: run for kind, run in runs.items() if kind in KINDS and slice_workloads(run)}
    if not measured:
        return f"No run with slices is committed: {OPEN}."
    parts = [f"![Time to write a row and sample, by rows stored]({{root}}{PLOT})"]
    for kind, run in measured.items():
        parts += [f"**{KINDS[kind]}**, median µs per call:", sizes_table(run), other_slices_table(run)]
        parts += ["Medians and spread:", spreads(run, slice_workloads(run)), described(run)]
    return "\n\n".join(parts)


def sliced(runs: Runs) -> list[Run]:
    """The runs that :func:`draw_plot` shows."""
    return [run for kind, run in sorted(runs.items()) if kind in KINDS and slice_workloads(run)]


def draw_plot(path: Path, runs: Runs) -> None:
    """Time to write a row and draw a batch of slices over the rows stored, by library and device, as a PNG."""
    figure = pictures.new_figure(7, 4)
    axes = pictures.axes_of(figure, "write a row, then sample 256 slices of 4", "rows stored", "median µs per call")
    for kind, style in (("cpu", "-"), ("cuda", "--")):
        for library, color in (("gpubuf", "tab:blue"), ("torchrl", "tab:orange")):
            points = []
            for stored, capacity in CURVE if kind in runs else ():
                median = runs[kind].median(sized(stored, capacity, "write-and-sample"), library)
                if median is not None:
                    points.append((stored, median * 1e6))
            if points:
                title = f"{TITLES[library]}, {KINDS[kind]}"
                axes.plot(*zip(*points, strict=True), style, color=color, marker="o", label=title)
    pictures.log_log(axes)
    axes.legend(loc="best")
    pictures.save(figure, path, sliced(runs), 120)


def curves_section(runs: Runs, folder: Path = RESULTS / "curves") -> str:
    """The pictures that the newest run of every kind of device has drawn."""
    parts = []
    for kind, title in KINDS.items():
        run = runs.get(kind)
        drawn = sorted(folder.glob(f"{Path(run.source).stem}-*.png")) if run else []
        if not drawn:
            parts.append(f"**{title}**: {OPEN}.")
            continue
        parts.append(
            f"**{title}**, by capacity, batch and row; the file of results beside the pictures has the numbers."
        )
        parts += [f"![Latency by {p.stem.rpartition('-')[2]}]({{root}}{p.relative_to(ROOT).as_posix()})" for p in drawn]
    return "\n\n".join(parts)


FIGURES: dict[str, Callable[[Runs], str]] = {
    **{
        f"{name}{'_gpu' if kind == 'cuda' else ''}": of_run(kind, "on this kind of device")(
            functools.partial(comparison_table, replay=name == "replay")
        )
        for name in ("replay", "loss")
        for kind in KINDS
    },
    "headlines": headline_table,
    "threads": threads_table,
    "conditions": machines,
    "training_batches": training_batches,
    "cpu": of_run("cpu", "on this kind of device")(spread_table),
    "gpu": of_run("cuda", "on this kind of device")(spread_table),
    "training": training_table,
    "training_gpu": lambda runs: training_table(runs, "learning on cuda"),
    "speed": speed_section,
    "algorithms": algorithms_section,
    "memory": memory_tables,
    "launches": launches_table,
    "writers": writers_section,
    "slices": slices_section,
    "curves": curves_section,
    **{
        page: functools.partial(section, page)
        for page in dict.fromkeys(each.page for tables in TABLES.values() for each in tables.values())
    },
}

BLOCK = re.compile(r"(<!-- figures: (\w+) -->\n).*?(<!-- end of figures -->)", re.DOTALL)


def pages() -> list[str]:
    """Every page with figures, from the root of the project."""
    found = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    return [path.relative_to(ROOT).as_posix() for path in found if BLOCK.search(path.read_text())]


def rewritten(page: str, runs: Runs, root: str) -> str:
    """The page with every block of figures as the runs have it; ``root`` is the way to the project's root.

    Raises:
        ValueError: a block asks for figures that nobody knows.
    """

    def block(match: re.Match[str]) -> str:
        if match[2] not in FIGURES:
            raise ValueError(f"figures {match[2]!r} are unknown; there are {sorted(FIGURES)}")
        return f"{match[1]}\n{FIGURES[match[2]](runs).replace('{root}', root)}\n\n{match[3]}"

    return BLOCK.sub(block, page)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.report", description=__doc__.partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="change nothing; fail where a page is out of date")
    options = parser.parse_args(arguments)
    runs = newest_runs()
    stale = []
    for name in pages():
        path = ROOT / name
        old = path.read_text()
        new = rewritten(old, runs, "../" * name.count("/"))
        if new != old:
            stale.append(name)
            if not options.check:
                path.write_text(new)
    learned = [runs["learning"]] if "learning" in runs else []
    plots: dict[str, tuple[list[Run], Callable[[Path], None]]] = {
        PLOT: (sliced(runs), lambda path: draw_plot(path, runs)),
        LEARNING_PLOT: (learned, lambda path: draw_learning(path, *learned)),
    }
    for name, (shown, draw) in plots.items():
        if not pictures.is_of(ROOT / name, shown):
            stale.append(name)
            if not options.check:
                draw(ROOT / name)
    print(f"{'out of date' if options.check else 'rewritten'}: {', '.join(stale) or 'none'}")
    return 1 if options.check and stale else 0
