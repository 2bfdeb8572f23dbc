"""What ``gpubuf bench`` does: chooses, measures, prints a table, draws."""

from __future__ import annotations

import datetime
import fnmatch
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.measure.machine import result_path
from benchmarks.report import page
from benchmarks.report.comparison import missing, names, placements, table
from benchmarks.run import curves_path, run_benchmarks
from benchmarks.workloads.registry import REGISTRY, TITLES
from benchmarks.workloads.sweeps import AXES
from gpubuf.tables import show
from gpubuf.train.config import UsageError


def registered() -> list[tuple[str, ...]]:
    """All workloads with who is asked to do them."""
    lines: list[tuple[str, ...]] = [("workload", "capacity", "batch", "bytes a row", "libraries")]
    for entry in REGISTRY.values():
        sizes = (f"{size:,}" for size in (entry.sizes.capacity, entry.sizes.batch, entry.sizes.row_bytes))
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
    """The same choice for benchmarks/conftest.py.

    Raises:
        UsageError: there is no such workload or library.
    """
    given = []
    for pattern in options["workload"] or ():
        if not any(fnmatch.fnmatch(name, pattern) for name in REGISTRY):
            raise UsageError(f"no workload is called {pattern!r}; gpubuf bench --list names them")
        given.append(f"--workload={pattern}")
    for library in options["library"] or ():
        if library not in TITLES:
            raise UsageError(f"no library is called {library!r}; there are {', '.join(TITLES)}")
        given.append(f"--library={library}")
    # A pattern that asks for points of curves says it as well as --report does.
    points = any(REGISTRY[n].axis for p in options["workload"] or () for n in fnmatch.filter(REGISTRY, p))
    switches = {"--quick": options["quick"], "--huge": options["huge"], "--curves": options["report"] or points}
    return given + [switch for switch, wanted in switches.items() if wanted]


def drawn(paths: Sequence[Path], out: Path) -> int:
    """Draw files of results.

    Raises:
        UsageError: a file is missing, or they don't belong together.
    """
    for path in paths:
        if not path.exists():
            raise UsageError(f"there is no file {path}")
    try:
        written = page.write(paths, out)
    except (ValueError, KeyError) as error:
        raise UsageError(f"can't draw {', '.join(map(str, paths))}: {error}") from error
    for path in written:
        print(f"report: {path}")
    return 0


def run_name(kind: str) -> str:
    """``bench-cpu-2026-11-21-101530``."""
    return f"bench-{kind}-{datetime.datetime.now():%Y-%m-%d-%H%M%S}"


def measured(options: dict[str, Any]) -> int:
    """Measure what was chosen, print it, draw it where that was asked for."""
    kind = chosen_device(options["device"])
    given = arguments(options)
    folder = Path(options["out"]) if options["out"] else Path("runs") / run_name(kind)
    path = result_path(kind, folder=folder.absolute())
    code = run_benchmarks(kind, path, *given)
    paths = [each for each in (path, curves_path(path)) if each.exists()]
    if not paths:
        raise UsageError("nothing of that kind can be measured here")
    results = page.read(paths)
    workloads = [name for axis in (None, *(axis.name for axis in AXES)) for name in names(results, axis)]
    if workloads:
        show(table(results, workloads))
    placed = placements(results)
    if placed:
        show(placed)
    left_out = missing(results)
    if left_out:
        print("Not measured:\n" + "\n".join(f"  {line}" for line in left_out))
    if any("not installed" in line for line in left_out):
        print("`make bench` makes the environments of those that are not installed.")
    if options["report"]:
        drawn(paths, curves_path(path).with_suffix(".html"))
    return 1 if code else 0


def run(options: dict[str, Any]) -> int:
    """See ``gpubuf bench --help``; returns the exit code."""
    if options["list"]:
        show(registered())
        return 0
    if options["draw"]:
        paths = [Path(path) for path in options["draw"]]
        folder = Path(options["out"]) if options["out"] else paths[0].parent
        return drawn(paths, folder / paths[0].with_suffix(".html").name)
    return measured(options)
