"""Runs of benchmarks for the tests of the report, which never took place."""

from __future__ import annotations

from typing import Any

from benchmarks.measure.results import Run
from benchmarks.report.write import rewritten

MACHINE = {
    "device": {"kind": "cpu", "name": "some processor"},
    "versions": {"torch": "2.13.0"},
    "python_version": "3.11.7",
    "threads": 1,
    "cores": 2,
    "load_before": 0.25,
}


def a_run(device: str = "cpu", **subject: Any) -> Run:
    machine = {**MACHINE, "device": {"kind": device, "name": f"some {device}"}}
    return Run("benchmarks/results/x.json", {"datetime": "2026-11-21T00:00:00", "machine_info": machine, **subject})


def block(name: str, found: dict[str, Run]) -> str:
    return rewritten(f"<!-- figures: {name} -->\n<!-- end of figures -->", found, "../")


def line(text: str, start: str) -> list[str]:
    """The cells behind the first one, in the only line of a table that starts so."""
    (found,) = [row for row in text.splitlines() if row.startswith(f"| {start} |")]
    return [cell.strip() for cell in found.strip("|").split("|")][1:]
