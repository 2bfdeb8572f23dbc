"""The tables of the adapters, for the pages of docs/integrations."""

from __future__ import annotations

from typing import Any

from benchmarks.measure.figures import OPEN, described, digits, load_before, table
from benchmarks.measure.results import Runs
from benchmarks.studies.adapters.registry import ADAPTERS

#: By contender: ``"bytes"``, and ``"calls"`` with the microseconds of each.
Found = dict[str, dict[str, Any]]

UNITS = (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10))


def size(n_bytes: int) -> str:
    """``153 MiB``."""
    unit, factor = next(((unit, factor) for unit, factor in UNITS if n_bytes >= factor), ("bytes", 1))
    return f"{digits(n_bytes / factor)} {unit}"


def rows_of(title: str, found: Found) -> tuple[list[str], list[list[str]]]:
    """Head and rows of a table; times with their ratios to the first contender's."""
    first = next(iter(found.values()))
    calls = list(dict.fromkeys(name for part in found.values() for name in part["calls"]))
    rows = []
    for contender, part in found.items():
        cells = []
        for call in calls:
            took, before = part["calls"].get(call), first["calls"].get(call)
            ratio = f" ({took / before:.2f}x)" if took and before and part is not first else ""
            cells.append("" if took is None else f"{digits(took)}{ratio}")
        rows.append([contender, *cells, size(part["bytes"])])
    return [title, *(f"{call}, µs" for call in calls), "memory"], rows


def adapters_section(page: str, runs: Runs) -> str:
    """A page of docs/integrations: the tables of its adapters in the newest run."""
    run = runs.get("adapters")
    found: dict[str, Found] = {} if run is None else run.data["adapters"]
    names = [name for name, adapter in ADAPTERS.items() if adapter.page == page and name in found]
    if run is None or not names:
        return f"No run of `python -m benchmarks.studies.adapters` with these buffers is committed: {OPEN}."
    tables = [table(*rows_of(ADAPTERS[name].title, found[name])) for name in names]
    return "\n\n".join([*tables, described(run), load_before(run)])
