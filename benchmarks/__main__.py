"""``python -m benchmarks``: measures gpubuf beside other libraries, prints a table and draws curves."""

from __future__ import annotations

import argparse
import datetime
import fnmatch
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from benchmarks.measure.machine import result_path
from benchmarks.report import curves
from benchmarks.report.comparison import missing, read, table
from benchmarks.run import compare_threads, curves_path, run_benchmarks
from benchmarks.workloads.registry import REGISTRY, TITLES
from gpubuf.terminal import show


def registered() -> list[tuple[str, ...]]:
    """Every workload with its sizes and the libraries that run it."""
    lines: list[tuple[str, ...]] = [("workload", "capacity", "batch", "bytes per row", "libraries")]
    for entry in REGISTRY.values():
        sizes = (f"{size:,}" for size in (entry.capacity, entry.batch, entry.row_bytes))
        lines.append((entry.name, *sizes, " ".join(entry.libraries)))
    return lines


def workload_names(pattern: str) -> list[str]:
    """The workloads whose names match."""
    names = fnmatch.filter(REGISTRY, pattern)
    if not names:
        raise argparse.ArgumentTypeError(f"no workload is called {pattern!r}; python -m benchmarks --list names them")
    return names


def chosen(options: argparse.Namespace) -> list[str]:
    """The options of benchmarks/conftest.py that make the same choice."""
    names = [name for some in options.workload for name in some]
    # Names of points of curves ask for curves, as --report does.
    points = options.report or any(REGISTRY[name].axis for name in names)
    switches = {"--quick": options.quick, "--huge": options.huge, "--curves": points}
    given = [*(f"--workload={name}" for name in names), *(f"--library={name}" for name in options.library)]
    return given + [switch for switch, wanted in switches.items() if wanted]


def parser() -> argparse.ArgumentParser:
    """The command line."""
    found = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description="Measure gpubuf beside other libraries, each in its own environment, and against the roofline of "
        "bytes and launches. `make bench` makes the environments of the others.",
        epilog="Exit codes: 0 measured, with a reason for everything left out; 1 a check of gpubuf's own results "
        "failed; 2 the request can't be met.",
        allow_abbrev=False,
    )
    add = found.add_argument
    add(
        "--workload",
        action="append",
        default=[],
        type=workload_names,
        metavar="PATTERN",
        help="only workloads whose name matches, such as 'uniform*' or 'capacity/*'; repeat for several",
    )
    only = "only this library; repeat for several"
    add("--library", action="append", default=[], choices=TITLES, metavar="NAME", help=only)
    add("--device", choices=("cpu", "cuda"), help="default: cuda where there is a GPU")
    add("--quick", action="store_true", help="fewer workloads, less time for each: about a minute")
    add("--huge", action="store_true", help="also tables that take gigabytes and minutes")
    add("--report", action="store_true", help="also measure latency over capacity, batch and row, and draw it as PNG")
    threads = "compare these numbers of threads, on calls of many rows"
    add("--threads", type=int, nargs="+", metavar="N", help=threads)
    add("--out", type=Path, metavar="FOLDER", help="where the results go (default: runs/bench-DEVICE-TIME)")
    add("--list", action="store_true", help="list workloads and libraries; measure nothing")
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line ``arguments`` (by default those of the process) and return the exit code."""
    line, has_gpu = parser(), torch.cuda.is_available()
    options = line.parse_args(arguments)
    if options.list:
        show(registered())
        return 0
    kind = options.device or ("cuda" if has_gpu else "cpu")
    if kind == "cuda" and not has_gpu:
        line.error(f"--device cuda, and torch {torch.__version__} sees no GPU")
    name = f"bench-{kind}-{datetime.datetime.now():%Y-%m-%d-%H%M%S}"
    folder = (options.out or Path("runs") / name).absolute()
    if options.threads:
        return 1 if compare_threads(options.threads, folder, *chosen(options)) else 0
    path = result_path(kind, folder=folder)
    paths, code = run_benchmarks(kind, path, *chosen(options))
    if not paths:
        line.error("nothing of that kind can be measured here")
    results = read(paths)
    show(table(results))
    left_out = missing(results)
    if left_out:
        print("Not measured:\n" + "\n".join(f"  {line}" for line in left_out))
    if any("not installed" in line for line in left_out):
        print("`make bench` makes the environments of those that are not installed.")
    for picture in curves.write(paths, curves_path(path).with_suffix("")) if options.report else ():
        print(f"report: {picture}")
    return 1 if code else 0


if __name__ == "__main__":
    sys.exit(main())
