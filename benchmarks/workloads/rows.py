"""Measures a row of a table: a workload by all libraries that are here, in turn, each checked before it is timed."""

from __future__ import annotations

import traceback
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from pytest_benchmark.stats import Stats

from benchmarks.measure import clocks
from benchmarks.measure.clocks import Call, Clock
from benchmarks.measure.in_turn import alternating
from benchmarks.measure.steady import probe_of, steady
from benchmarks.peers.libraries import UnavailableError
from benchmarks.workloads.registry import LastFilled, environment
from benchmarks.workloads.workload import Workload

#: Seconds that each library is timed for, and those of a quick run. The GPU's clock is exact after fewer rounds.
SECONDS, QUICK_SECONDS = {"cpu": 2.0, "cuda": 0.5}, 0.1
#: Rounds of a row at least, and at most.
FEWEST, MOST = 5, 20_000
#: How the reason begins why there is no time of a library that has failed.
FAILED = "failed: "


def prepared(
    entry: Workload, libraries: Sequence[str], device: str, filled: Mapping[str, LastFilled]
) -> tuple[dict[str, tuple[Call, Clock]], dict[str, str]]:
    """The call of each library and its clock, once its result was checked; and of each other library the reason."""
    ready, reasons = {}, {}
    for library in libraries:
        try:
            buffer = filled[library].get(entry, library, device)
            ready[library] = entry.prepare(buffer, library, device), clocks.of(buffer, device)
        except UnavailableError as reason:
            reasons[library] = str(reason)
        except Exception as error:
            said = " ".join(str(error).split()) or traceback.extract_tb(error.__traceback__)[-1].line
            # A peer that is wrong has no time; that it is wrong is said.
            wrong = isinstance(error, AssertionError) and environment(library) != "gpubuf"
            reasons[library] = f"wrong results: {said[:200]}" if wrong else f"{FAILED}{type(error).__name__}: {said}"
            if not wrong:
                traceback.print_exc()
    return ready, reasons


def row(entry: Workload, ready: Mapping[str, tuple[Call, Clock]], device: str, seconds: float) -> list[dict[str, Any]]:
    """What calls take, each library timed for so many seconds: in pytest-benchmark's form, without single timings."""
    turns = {library: clocks.turn(*each) for library, each in ready.items()}
    calls, timers = {who: many for who, (many, _) in turns.items()}, {who: clock for who, (_, clock) in ready.items()}
    once = sum(map(min, alternating(calls, 3, timers).values()))
    rounds = max(FEWEST, min(MOST, int(seconds * len(ready) / once)))
    # The first rows of a huge buffer come from memory that the machine has to find again.
    warm_up = rounds // (2 if entry.huge else 4)
    took, probe = steady(partial(alternating, calls, rounds, timers, warm_up), probe_of(device))
    found = []
    for library, times in took.items():
        stats = Stats()
        stats.data = times
        extra = {
            "workload": entry.name,
            "library": library,
            "device": device,
            "calls": turns[library][1],
            "clock": timers[library].name,
            "in_turn": list(ready),
            "probe": probe,
            "capacity": entry.capacity,
            "stored": getattr(entry, "stored", entry.capacity),
            "batch": entry.batch,
            "row_bytes": entry.row_bytes,
        }
        named = {"group": entry.name, "name": f"{entry.name}[{library}]", "fullname": f"{entry.name}[{library}]"}
        found.append({**named, "params": None, "extra_info": extra, "stats": {**stats.as_dict(), "iterations": 1}})
    return found
