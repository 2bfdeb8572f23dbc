"""``python -m benchmarks``: measures gpubuf beside other libraries, and prints a table."""

from __future__ import annotations

import argparse
import datetime
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from benchmarks.measure.machine import result_path
from benchmarks.measure.results import Run, write_whole
from benchmarks.report import comparison
from benchmarks.run import measure
from benchmarks.workloads.registry import REGISTRY, TITLES
from gpubuf.terminal import show


def registered() -> list[tuple[str, ...]]:
    """Every workload with its sizes and the libraries that run it."""
    lines: list[tuple[str, ...]] = [("workload", "capacity", "batch", "bytes per row", "libraries")]
    for entry in REGISTRY.values():
        sizes = (f"{size:,}" for size in (entry.capacity, entry.batch, entry.row_bytes))
        lines.append((entry.name, *sizes, " ".join(entry.libraries)))
    return lines


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


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line ``arguments`` (by default those of the process) and return the exit code."""
    line = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description="Measure gpubuf beside other libraries, each in its own environment. `make bench` makes those.",
        epilog="Further options: --quick, --huge, --workload, --library, as of `python -m benchmarks.run`. Exit codes: "
        "0 measured; 1 a check of gpubuf's own results failed; 2 the request can't be met.",
        allow_abbrev=False,
    )
    line.add_argument("--device", choices=("cpu", "cuda"), help="default: cuda where there is a GPU")
    line.add_argument("--out", type=Path, metavar="FOLDER", help="default: runs/bench-DEVICE-TIME")
    line.add_argument("--list", action="store_true", help="list workloads and libraries; measure nothing")
    options, chosen = line.parse_known_args(arguments)
    has_gpu = torch.cuda.is_available()
    if options.list:
        show(registered())
        return 0
    kind = options.device or ("cuda" if has_gpu else "cpu")
    if kind == "cuda" and not has_gpu:
        line.error(f"--device cuda, and torch {torch.__version__} sees no GPU")
    name = f"bench-{kind}-{datetime.datetime.now():%Y-%m-%d-%H%M%S}"
    folder = (options.out or Path("runs") / name).absolute()
    path = result_path(kind, folder=folder)
    data, code = measure(kind, chosen)
    if not data["benchmarks"] and not data.get("skipped"):
        line.error("nothing of that kind can be measured here")
    folder.mkdir(parents=True, exist_ok=True)
    write_whole(path, data)
    run = Run(path.name, data)
    print(f"results: {path}\n{comparison(run, run.workloads)}")
    left_out = missing(run)
    if left_out:
        print("Not measured:\n" + "\n".join(f"  {each}" for each in left_out))
    if any("not installed" in line for line in left_out):
        print("`make bench` makes the environments of those that are not installed.")
    return 1 if code else 0


if __name__ == "__main__":
    sys.exit(main())
