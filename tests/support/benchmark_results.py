"""Files of results of runs that never took place."""

from __future__ import annotations

from typing import Any

from benchmarks.measure.results import Run
from benchmarks.workloads.registry import REGISTRY

ROOFLINE = {"copy_bytes_per_second": 1e10, "launch_seconds": 2e-6}
GPU_ROOFLINE = {**ROOFLINE, "bus_bytes_per_second": 5e10, "graph_launch_seconds": 1e-6}


def entry(workload: str, library: str, seconds: float) -> dict[str, Any]:
    known = REGISTRY[workload]
    extra: dict[str, Any] = {"workload": workload, "library": library, "calls": 10, "title": known.title}
    extra["batch"] = known.sizes.batch
    extra |= {"axis": known.axis, "value": known.value} if known.axis else {}
    if known.traffic is not None:
        traffic = known.traffic(library, "cpu")
        extra |= {"bytes": traffic.bytes, "launches": traffic.launches, "bus": traffic.bus}
    stats = {"median": 10 * seconds, "iqr": seconds, "min": 9 * seconds}
    return {"extra_info": extra, "stats": stats}


def a_run(benchmarks: list[dict[str, Any]], skipped: list[dict[str, str]], kind: str = "cpu") -> Run:
    machine = {
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
        "roofline": GPU_ROOFLINE if kind == "cuda" else ROOFLINE,
    }
    data = {"machine_info": machine, "datetime": "2026-11-21T10:20:30", "benchmarks": benchmarks, "skipped": skipped}
    return Run("x.json", data)


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
