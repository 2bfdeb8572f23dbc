"""Files of results of runs that never took place, and what the report makes of them."""

from __future__ import annotations

from typing import Any

from benchmarks.measure.results import Run
from benchmarks.report import rewritten
from benchmarks.workloads.registry import REGISTRY

#: What a row says whose probes have agreed, on a fast and on a slow host, and one whose probes have not.
SLOW = {"before": 5.1, "after": 5.0, "agreed": True, "tries": 1}
STEADY = {"before": 3.0, "after": 3.1, "agreed": True, "tries": 1}
UNSTEADY = {"before": 3.0, "after": 5.1, "agreed": False, "tries": 4}


def entry(workload: str, library: str, seconds: float, **more: Any) -> dict[str, Any]:
    """What ten calls of so many seconds each give, with a tenth of that as spread, and the half as minimum."""
    extra: dict[str, Any] = {"workload": workload, "library": library, "calls": 10, **more}
    return {"extra_info": extra, "stats": {"median": 10 * seconds, "iqr": seconds, "min": 5 * seconds}}


def machine(kind: str = "cpu") -> dict[str, Any]:
    return {
        "device": {"kind": kind, "name": f"some {kind}"},
        "versions": {"torch": "2.13.0", "numpy": "2.4.6"},
        "environments": {
            "gpubuf": {"torch": "2.13.0", "numpy": "2.4.6"},
            "flashbax": {"torch": "2.13.0", "numpy": "2.4.6", "flashbax": "0.1.3"},
        },
        "python_version": "3.11.7",
        "threads": 1,
        "cores": 2,
        "load_before": 0.25,
    }


def run_of(kind: str = "cpu", **subject: Any) -> Run:
    """A run about any subject."""
    return Run(
        "benchmarks/results/x.json", {"datetime": "2026-11-21T10:20:30", "machine_info": machine(kind), **subject}
    )


def a_run(benchmarks: list[dict[str, Any]], skipped: list[dict[str, str]] | None = None, kind: str = "cpu") -> Run:
    """A run of benchmarks."""
    return run_of(kind, benchmarks=benchmarks, skipped=skipped or [])


def a_full_run(without: str = "", reason: str = "not today") -> Run:
    """Every workload by everybody who is asked, but for one library."""
    benchmarks, skipped = [], []
    for name, known in REGISTRY.items():
        if "cpu" not in known.devices:
            continue
        for i, library in enumerate(known.libraries):
            if library in (without, "gpubuf-graph"):
                skipped.append({"workload": name, "library": library, "reason": reason})
            else:
                benchmarks.append(entry(name, library, 20e-6 * (i + 1)))
    return a_run(benchmarks, skipped)


def block(name: str, found: dict[str, Run]) -> str:
    """A page of nothing but these figures."""
    return rewritten(f"<!-- figures: {name} -->\n<!-- end of figures -->", found, "../")


def line(text: str, start: str) -> list[str]:
    """The cells after the first one, in the only line of a table that starts so."""
    (found,) = [row for row in text.splitlines() if row.startswith(f"| {start} |")]
    return [cell.strip() for cell in found.strip("|").split("|")][1:]
