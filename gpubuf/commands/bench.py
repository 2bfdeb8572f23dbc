"""``gpubuf bench``: the benchmarks of the source tree."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from pathlib import Path
from typing import Any

from gpubuf.train.config import UsageError

#: What the benchmarks need beside the library.
NEEDS = ("pytest", "pytest_benchmark")


def run(options: dict[str, Any]) -> int:
    root = Path(__file__).absolute().parents[2]
    if not (root / "benchmarks" / "run.py").exists():
        raise UsageError(
            "the benchmarks are in the source tree, and not in the installed package: run this in a clone of the "
            f"repository (looked for {root / 'benchmarks'})"
        )
    missing = [name for name in NEEDS if importlib.util.find_spec(name) is None]
    if missing and not options["draw"] and not options["list"]:
        raise UsageError(f"the benchmarks need {' and '.join(missing)}: pip install -e '.[train,test]'")
    sys.path.insert(0, str(root))
    return importlib.import_module("benchmarks.command").run(options)


def add(commands: Any) -> None:
    parser = commands.add_parser(
        "bench",
        help="measure this library beside others",
        description="Measure this library beside others, each in its own environment, and against the floor of bytes "
        "and launches. In a clone of the repository; `make bench` makes the environments of the others.",
        epilog="Exit codes: 0 measured, what others can't do left out; 1 a check of gpubuf's own results failed; "
        "2 what was asked for can't be done.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--workload",
        action="append",
        metavar="PATTERN",
        help="only workloads of such a name, as 'uniform*' or 'capacity/*'; several times for several",
    )
    parser.add_argument("--library", action="append", metavar="NAME", help="only this one; several times for several")
    parser.add_argument("--device", choices=("cpu", "cuda"), help="default: cuda where there is a GPU")
    parser.add_argument("--quick", action="store_true", help="fewer workloads, less time for each: about a minute")
    parser.add_argument("--huge", action="store_true", help="also tables that take gigabytes and minutes")
    parser.add_argument(
        "--report",
        action="store_true",
        help="also measure latency over capacity, batch and row, and draw it as pictures and one HTML page",
    )
    parser.add_argument(
        "--draw", action="append", metavar="FILE", help="measure nothing, and draw these files of results instead"
    )
    parser.add_argument("--out", metavar="FOLDER", help="where the results go (default: runs/bench-DEVICE-TIME)")
    parser.add_argument("--list", action="store_true", help="list workloads and libraries, and measure nothing")
