"""``python -m benchmarks``: measures gpubuf beside other libraries, prints a table and draws curves."""

from __future__ import annotations

import argparse
import datetime
import fnmatch
import importlib.util
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.measure.machine import result_path
from benchmarks.report import curves
from benchmarks.report.comparison import missing, read, table
from benchmarks.run import compare_threads, curves_path, run_benchmarks
from benchmarks.workloads.registry import REGISTRY, TITLES
from gpubuf.terminal import show
from gpubuf.train.config import UsageError

#: Packages that the benchmarks need beside the library's own.
NEEDS = ("pytest", "pytest_benchmark")


def registered() -> list[tuple[str, ...]]:
    """Every workload with its sizes and the libraries that run it."""
    lines: list[tuple[str, ...]] = [("workload", "capacity", "batch", "bytes per row", "libraries")]
    for entry in REGISTRY.values():
        sizes = (f"{size:,}" for size in (entry.capacity, entry.batch, entry.row_bytes))
        lines.append((entry.name, *sizes, " ".join(entry.libraries)))
    return lines


def chosen_device(asked: str | None) -> str:
    """The kind of device to measure on.

    Raises:
        UsageError: a GPU was asked for, and there is none.
    """
    present = torch.cuda.is_available()
    if asked == "cuda" and not present:
        raise UsageError(f"--device cuda, and torch {torch.__version__} sees no GPU")
    return asked or ("cuda" if present else "cpu")


def arguments(options: dict[str, Any]) -> list[str]:
    """The options of benchmarks/conftest.py that make the same choice.

    Raises:
        UsageError: there is no such workload or library.
    """
    given = []
    for pattern in options["workload"] or ():
        if not any(fnmatch.fnmatch(name, pattern) for name in REGISTRY):
            raise UsageError(f"no workload is called {pattern!r}; python -m benchmarks --list names them")
        given.append(f"--workload={pattern}")
    for library in options["library"] or ():
        if library not in TITLES:
            raise UsageError(f"no library is called {library!r}; there are {', '.join(TITLES)}")
        given.append(f"--library={library}")
    # A pattern that names points of curves asks for curves, as --report does.
    points = any(REGISTRY[n].axis for p in options["workload"] or () for n in fnmatch.filter(REGISTRY, p))
    switches = {"--quick": options["quick"], "--huge": options["huge"], "--curves": options["report"] or points}
    return given + [switch for switch, wanted in switches.items() if wanted]


def drawn(paths: Sequence[Path], out: Path) -> int:
    """Draw files of results, one picture for each axis; ``out`` is their path without ``-<axis>.png``.

    Raises:
        UsageError: a file is missing, or they don't belong together.
    """
    for path in paths:
        if not path.exists():
            raise UsageError(f"there is no file {path}")
    try:
        written = curves.write(paths, out)
    except (ValueError, KeyError) as error:
        raise UsageError(f"can't draw {', '.join(map(str, paths))}: {error}") from error
    for path in written:
        print(f"report: {path}")
    if not written:
        print("report: these results have no curves")
    return 0


def measured(options: dict[str, Any]) -> int:
    """Measure the chosen workloads, print a table, and draw curves with --report."""
    kind = chosen_device(options["device"])
    given = arguments(options)
    name = f"bench-{kind}-{datetime.datetime.now():%Y-%m-%d-%H%M%S}"
    folder = (Path(options["out"]) if options["out"] else Path("runs") / name).absolute()
    if options["threads"]:
        return 1 if compare_threads(options["threads"], folder, *given) else 0
    path = result_path(kind, folder=folder)
    code = run_benchmarks(kind, path, *given)
    paths = [each for each in (path, curves_path(path)) if each.exists()]
    if not paths:
        raise UsageError("nothing of that kind can be measured here")
    results = read(paths)
    if results.workloads:
        show(table(results))
    left_out = missing(results)
    if left_out:
        print("Not measured:\n" + "\n".join(f"  {line}" for line in left_out))
    if any("not installed" in line for line in left_out):
        print("`make bench` makes the environments of those that are not installed.")
    if options["report"]:
        drawn(paths, curves_path(path).with_suffix(""))
    return 1 if code else 0


def run(options: dict[str, Any]) -> int:
    """See ``python -m benchmarks --help``; returns the exit code."""
    missing_tools = [name for name in NEEDS if importlib.util.find_spec(name) is None]
    if options["list"]:
        show(registered())
        return 0
    if options["draw"]:
        paths = [Path(path) for path in options["draw"]]
        folder = Path(options["out"]) if options["out"] else paths[0].parent
        return drawn(paths, folder / paths[0].stem)
    if missing_tools:
        raise UsageError(f"the benchmarks need {' and '.join(missing_tools)}: pip install -e '.[train,test]'")
    return measured(options)


def parse(arguments: Sequence[str] | None) -> dict[str, Any]:
    """The options of the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description="Measure gpubuf beside other libraries, each in its own environment, and against the roofline of "
        "bytes and launches. `make bench` makes the environments of the others.",
        epilog="Exit codes: 0 measured, with a reason for everything left out; 1 a check of gpubuf's own results "
        "failed; 2 the request can't be met.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--workload",
        action="append",
        metavar="PATTERN",
        help="only workloads whose name matches, such as 'uniform*' or 'capacity/*'; repeat for several",
    )
    parser.add_argument("--library", action="append", metavar="NAME", help="only this library; repeat for several")
    parser.add_argument("--device", choices=("cpu", "cuda"), help="default: cuda where there is a GPU")
    parser.add_argument("--quick", action="store_true", help="fewer workloads, less time for each: about a minute")
    parser.add_argument("--huge", action="store_true", help="also tables that take gigabytes and minutes")
    parser.add_argument(
        "--report", action="store_true", help="also measure latency over capacity, batch and row, and draw it as PNG"
    )
    parser.add_argument(
        "--threads", type=int, nargs="+", metavar="N", help="compare these numbers of threads, on calls of many rows"
    )
    parser.add_argument("--draw", action="append", metavar="FILE", help="draw these files of results; measure nothing")
    parser.add_argument("--out", metavar="FOLDER", help="where the results go (default: runs/bench-DEVICE-TIME)")
    parser.add_argument("--list", action="store_true", help="list workloads and libraries; measure nothing")
    return vars(parser.parse_args(arguments))


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line ``arguments`` (by default those of the process) and return the exit code."""
    try:
        return run(parse(arguments))
    except UsageError as error:
        print(f"python -m benchmarks: error: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        print(f"python -m benchmarks: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("python -m benchmarks: stopped", file=sys.stderr)
        return 128 + signal.SIGINT


if __name__ == "__main__":
    sys.exit(main())
