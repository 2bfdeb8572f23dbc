"""Writes the measured figures into README.md and docs/performance.md, so that none of them is typed by hand.

``python -m benchmarks.report`` reads the newest file of ``benchmarks/results/`` for every kind of device and rewrites
what stands between the markers ``<!-- figures: NAME -->`` and ``<!-- end of figures -->``. With ``--check`` it changes
nothing, and fails where a page is out of date. The plot of the slices is drawn from the same runs.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.machine import RESULTS
from benchmarks.slices import OPERATIONS, SIZES, SLICES, short, sized
from benchmarks.workloads import WORKLOADS

ROOT = Path(__file__).parent.parent
PAGES = ("README.md", "docs/performance.md")
PLOT = "docs/slices.png"
TITLES = {
    "gpubuf": "gpubuf",
    "gpubuf-random": "gpubuf without an index",
    "torchrl": "TorchRL",
    "torchrl-uncached": "TorchRL, uncached",
    "cpprb": "cpprb",
    "plain": "plain PyTorch",
}
KINDS = {"cpu": "CPU", "cuda": "GPU"}
OPEN = "open"


@dataclass(frozen=True)
class Run:
    """One file of results.

    Attributes:
        source: the file's path from the root of the project.
        data: its content, as pytest-benchmark writes it.
    """

    source: str
    data: dict[str, Any]

    @property
    def machine(self) -> dict[str, Any]:
        """What the run says about its machine."""
        return self.data["machine_info"]

    def entry(self, workload: str, library: str) -> dict[str, Any] | None:
        """The statistics of one library on one workload, in seconds a call, or None."""
        for benchmark in self.data["benchmarks"]:
            extra = benchmark["extra_info"]
            if (extra.get("workload"), extra.get("library")) == (workload, library):
                return {name: benchmark["stats"][name] / extra["calls"] for name in ("median", "iqr", "min")}
        return None

    def median(self, workload: str, library: str) -> float | None:
        """Seconds a call, or None."""
        entry = self.entry(workload, library)
        return entry["median"] if entry else None

    def libraries(self) -> list[str]:
        """Which libraries were measured, gpubuf first."""
        measured = {benchmark["extra_info"].get("library") for benchmark in self.data["benchmarks"]}
        return [name for name in TITLES if name in measured]

    def workloads(self) -> list[str]:
        """Which workloads were measured, in their registered order; slices are not among them."""
        measured = {benchmark["extra_info"].get("workload") for benchmark in self.data["benchmarks"]} - SLICES.keys()
        known = [name for name in WORKLOADS if name in measured]
        return known + sorted(name for name in measured if name and name not in WORKLOADS)

    def index_bytes(self, workload: str) -> str:
        """Bytes of gpubuf's trajectory index for a row that there is room for."""
        for benchmark in self.data["benchmarks"]:
            extra = benchmark["extra_info"]
            if extra.get("workload") == workload and "index_bytes_per_row" in extra:
                return f"{extra['index_bytes_per_row']:.3f}"
        return OPEN

    def slices(self) -> list[str]:
        """Which workloads of slices were measured, in their registered order."""
        measured = {benchmark["extra_info"].get("workload") for benchmark in self.data["benchmarks"]}
        return [name for name in SLICES if name in measured]


def newest_runs(folder: Path = RESULTS) -> dict[str, Run]:
    """The newest run of every kind: benchmarks by device (``cpu``, ``cuda``), and ``training``."""
    runs: dict[str, Run] = {}
    for path in sorted(folder.glob("*.json")):
        data = json.loads(path.read_text())
        kind = "training" if "training" in data else data["machine_info"]["device"]["kind"]
        if kind not in runs or data["datetime"] > runs[kind].data["datetime"]:
            runs[kind] = Run(path.relative_to(folder.parent.parent).as_posix(), data)
    return runs


def microseconds(seconds: float) -> str:
    """Three significant digits, or all digits before the point: ``9.17``, ``76.2``, ``1062``."""
    value = seconds * 1e6
    return f"{value:.{max(0, 2 - len(str(int(value))) + 1)}f}"


def label(workload: str) -> str:
    """``uniform-sample-256`` as ``uniform sample, 256``."""
    if workload in SLICES:
        return SLICES[workload].title
    title, _, batch = workload.rpartition("-")
    return f"{title.replace('-', ' ')}, {batch}"


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table whose first column is text and the others numbers."""
    lines = [head, ["---"] + ["---:"] * (len(head) - 1), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def described(run: Run) -> str:
    """Device, versions and conditions of a run, in one sentence."""
    machine = run.machine
    versions = ", ".join(f"{name} {version}" for name, version in machine["versions"].items() if name != "gpubuf")
    threads = f"{machine['threads']} thread" + ("s" if machine["threads"] != 1 else "")
    return (
        f"{machine['device']['name']}, Python {machine['python_version']}, {threads}; {versions}; "
        f"{run.data['datetime'][:10]}, [`{run.source}`]({{root}}{run.source})."
    )


def comparison_table(runs: dict[str, Run], replay: bool) -> str:
    """README: median time a call, and how many times as long the peers take."""
    cpu, gpu = runs.get("cpu"), runs.get("cuda")
    workloads = [name for name in (cpu.workloads() if cpu else WORKLOADS) if (name in WORKLOADS) == replay]
    peers = [
        name
        for name in (cpu.libraries() if cpu else [])
        if name != "gpubuf" and any(cpu.entry(workload, name) for workload in workloads)
    ]
    rows = []
    for workload in workloads:
        ours = cpu.entry(workload, "gpubuf") if cpu else None
        row = [label(workload), microseconds(ours["median"]) if ours else OPEN]
        for peer in peers:
            theirs = cpu.entry(workload, peer) if cpu else None
            ratio = f" ({theirs['median'] / ours['median']:.1f}x)" if ours and theirs else ""
            row.append(microseconds(theirs["median"]) + ratio if theirs else "")
        on_gpu = gpu.entry(workload, "gpubuf") if gpu else None
        rows.append([*row, microseconds(on_gpu["median"]) if on_gpu else OPEN])
    head = ["median µs a call", "gpubuf", *(TITLES[name] for name in peers), "gpubuf on a GPU"]
    return table(head, rows)


def conditions(runs: dict[str, Run]) -> str:
    """README: the machines and versions of the runs of benchmarks."""
    return "\n\n".join(described(runs[kind]) for kind in ("cpu", "cuda") if kind in runs) or f"{OPEN}."


def spreads(run: Run, workloads: Sequence[str]) -> str:
    """Median, interquartile range and minimum of every library."""
    rows = []
    for workload in workloads:
        for library in run.libraries():
            entry = run.entry(workload, library)
            if entry:
                numbers = [microseconds(entry[name]) for name in ("median", "iqr", "min")]
                rows.append([label(workload), TITLES[library], *numbers])
    return table(["µs a call", "library", "median", "interquartile range", "minimum"], rows)


def spread_table(runs: dict[str, Run], kind: str) -> str:
    """docs/performance.md: median, interquartile range and minimum of every library on one kind of device."""
    run = runs.get(kind)
    if run is None:
        return f"No run on this kind of device is committed: {OPEN}."
    machine = run.machine
    load = f"Load of the machine before the run: {machine['load_before']:.2f} on {machine['cores']} cores."
    parts = [spreads(run, run.workloads()), described(run), load]
    if "gpu_tests" in run.data:
        tests = run.data["gpu_tests"]
        parts.append(f"GPU tests: {tests['passed']} passed, {tests['failed']} failed, {tests['skipped']} skipped.")
    return "\n\n".join(parts)


def training_table(runs: dict[str, Run]) -> str:
    """README: mean return of the final evaluation for every seed, time and speed of training."""
    run = runs.get("training")
    if run is None:
        return f"No training runs are committed: {OPEN}."
    modes: dict[str, list[dict[str, Any]]] = {}
    for result in run.data["training"]:
        mode = "prioritized" if result["prioritized"] else "uniform"
        modes.setdefault(f"{result['env']}, {mode}, {result['steps']:,} steps", []).append(result)
    rows = []
    for mode, results in modes.items():
        returns = ", ".join(f"{r['mean_return']:.1f} (seed {r['seed']})" for r in results)
        minutes = sum(r["timing"]["seconds"] for r in results) / len(results) / 60
        speed = sum(r["timing"]["steps_per_second"] for r in results) / len(results)
        rows.append([mode, returns, f"{minutes:.1f}", f"{speed:.0f}"])
    episodes = run.data["training"][0]["episodes"]
    head = ["`make train`", f"mean return of {episodes} episodes", "minutes", "steps a second"]
    return "\n\n".join([table(head, rows), described(run)])


def against(ours: float | None, theirs: float | None) -> str:
    """``402000 (2010x)``, or ``open``."""
    if theirs is None:
        return OPEN
    return microseconds(theirs) + (f" ({theirs / ours:.1f}x)" if ours else "")


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
            row += [OPEN if ours is None else microseconds(ours), against(ours, run.median(workload, "torchrl"))]
            if "torchrl-uncached" in SLICES[workload].variants:
                row.append(against(ours, run.median(workload, "torchrl-uncached")))
        rows.append([*row, run.index_bytes(sized(stored, capacity, "sample"))])
    head = ["rows stored, in room for", "sample", "TorchRL, cached", "TorchRL, uncached"]
    head += ["write a row and sample", "TorchRL, cached", "bytes of index a row"]

    def rise(least: int) -> str:
        chosen = {
            name: [m for stored in found if stored >= least for m in found[stored]] for name, found in medians.items()
        }
        return ", ".join(f"{OPERATIONS[name]} {max(m) / min(m):.2f}" for name, m in chosen.items() if m)

    rises = f"gpubuf, largest median over smallest: {rise(0)}; of those with 5M rows and more: {rise(5_000_000)}."
    return "\n\n".join([table(head, rows), rises])


def other_slices_table(run: Run) -> str:
    """What else there is about slices: filling, many environments, priorities."""
    rows, of_sizes = [], {sized(*size, operation) for size in SIZES for operation in OPERATIONS}
    for name in run.slices():
        if name in of_sizes:
            continue
        ours, without = run.median(name, "gpubuf"), run.median(name, "gpubuf-random")
        plain = f"{microseconds(without)} (index: {(ours / without - 1) * 100:+.0f} %)" if ours and without else ""
        theirs = run.median(name, "torchrl")
        rows.append([label(name), OPEN if ours is None else microseconds(ours), plain, against(ours, theirs)])
    return table(["median µs a call", "gpubuf", TITLES["gpubuf-random"], "TorchRL"], rows)


def slices_section(runs: dict[str, Run], spread: bool = True) -> str:
    """Slices on every kind of device: docs/performance.md, and without the spread README.md."""
    measured = {kind: run for kind, run in runs.items() if kind in KINDS and run.slices()}
    if not measured:
        return f"No run with slices is committed: {OPEN}."
    parts = [f"![Time to write a row and sample, by rows stored]({{root}}{PLOT})"]
    for kind, run in measured.items():
        parts += [f"**{KINDS[kind]}**, median µs a call:", sizes_table(run), other_slices_table(run)]
        if spread:
            parts += ["Medians and spread:", spreads(run, run.slices()), described(run)]
    return "\n\n".join(parts)


def plot_source(runs: dict[str, Run]) -> str:
    """Which runs the plot shows; it says so itself, in its metadata. Empty where none has slices."""
    shown = [run for kind, run in sorted(runs.items()) if kind in KINDS and run.slices()]
    named = ", ".join(f"{run.source} of {run.data['datetime']}" for run in shown)
    return f"Drawn from {named}." if named else ""


def is_plot_of(path: Path, runs: dict[str, Run]) -> bool:
    """Whether the plot at ``path`` was drawn from these runs. True where there is nothing to draw."""
    source = plot_source(runs)
    return not source or (path.exists() and f"Source\0{source}".encode("latin-1") in path.read_bytes())


def draw_plot(path: Path, runs: dict[str, Run]) -> None:
    """Time to write a row and draw a batch of slices over the rows stored, by library and device, as a PNG."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for kind, style in (("cpu", "-"), ("cuda", "--")):
        for library, color in (("gpubuf", "tab:blue"), ("torchrl", "tab:orange")):
            points = []
            for stored, capacity in SIZES if kind in runs else ():
                median = runs[kind].median(sized(stored, capacity, "write-and-sample"), library)
                if median is not None:
                    points.append((stored, median * 1e6))
            if points:
                title = f"{TITLES[library]}, {KINDS[kind]}"
                axes.loglog(*zip(*points, strict=True), style, color=color, marker="o", label=title)
    axes.set_title("write a row, then sample 256 slices of 4")
    axes.set_xlabel("rows stored")
    axes.set_ylabel("µs")
    axes.grid(alpha=0.3, which="both")
    axes.legend(loc="best")
    figure.savefig(path, dpi=120, metadata={"Source": plot_source(runs)})


FIGURES: dict[str, Callable[[dict[str, Run]], str]] = {
    "replay": lambda runs: comparison_table(runs, replay=True),
    "loss": lambda runs: comparison_table(runs, replay=False),
    "conditions": conditions,
    "cpu": lambda runs: spread_table(runs, "cpu"),
    "gpu": lambda runs: spread_table(runs, "cuda"),
    "training": training_table,
    "slices": slices_section,
    "slices_in_short": lambda runs: slices_section(runs, spread=False),
}

_BLOCK = re.compile(r"(<!-- figures: (\w+) -->\n).*?(<!-- end of figures -->)", re.DOTALL)


def rewritten(page: str, runs: dict[str, Run], root: str) -> str:
    """The page with every block of figures as the runs have it; ``root`` is the way to the project's root.

    Raises:
        ValueError: a block asks for figures that nobody knows.
    """

    def block(match: re.Match[str]) -> str:
        if match[2] not in FIGURES:
            raise ValueError(f"figures {match[2]!r} are unknown; there are {sorted(FIGURES)}")
        return f"{match[1]}\n{FIGURES[match[2]](runs).replace('{root}', root)}\n\n{match[3]}"

    return _BLOCK.sub(block, page)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.report", description=__doc__.partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="change nothing; fail where a page is out of date")
    options = parser.parse_args(arguments)
    runs = newest_runs()
    stale = []
    for name in PAGES:
        path = ROOT / name
        old = path.read_text()
        new = rewritten(old, runs, "../" * name.count("/"))
        if new != old:
            stale.append(name)
            if not options.check:
                path.write_text(new)
    if not is_plot_of(ROOT / PLOT, runs):
        stale.append(PLOT)
        if not options.check:
            draw_plot(ROOT / PLOT, runs)
    print(f"{'out of date' if options.check else 'rewritten'}: {', '.join(stale) or 'none'}")
    return 1 if options.check and stale else 0


if __name__ == "__main__":
    sys.exit(main())
