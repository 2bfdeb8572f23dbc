"""``python -m benchmarks.studies.adapters``: see the package."""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from benchmarks.measure.elsewhere import PEER_ENVIRONMENTS, found_by, peer_python
from benchmarks.measure.figures import table
from benchmarks.measure.machine import describe
from benchmarks.measure.results import write_results
from benchmarks.studies.adapters.registry import ADAPTERS
from benchmarks.studies.adapters.section import Found, rows_of

#: Seconds of one call of one contender in one round.
SLICE_OF_TIME = 0.05


def timed(call: Callable[[], object]) -> float:
    """Microseconds of a call: the mean over a slice of time, so that what is done now and then counts too."""
    count, start = 0, time.perf_counter()
    until = start + SLICE_OF_TIME
    while (now := time.perf_counter()) < until or count < 3:
        for _ in range(10):
            call()
        count += 10
    return (now - start) / count * 1e6


def measure(name: str, rounds: int) -> Found:
    """The medians over rounds, in each of which every contender had its turn."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    contenders = ADAPTERS[name].make()
    calls = {(who, what): call for who, made in contenders.items() for what, call in made.calls.items()}
    for call in calls.values():
        timed(call)
    took: dict[tuple[str, str], list[float]] = {place: [] for place in calls}
    for _ in range(rounds):
        for place, call in calls.items():
            took[place].append(timed(call))
    return {
        who: {
            "bytes": made.n_bytes,
            "calls": {what: statistics.median(took[who, what]) for what in made.calls},
        }
        for who, made in contenders.items()
    }


def measure_elsewhere(name: str, rounds: int, peers: Path) -> Found | None:
    """:func:`measure` in a process of the peer's environment; None if the peer is not installed."""
    python, arguments = peer_python(ADAPTERS[name].peer, peers), ("--one", name, "--rounds", str(rounds))
    try:
        found: Found = found_by(
            python, "benchmarks.studies.adapters", *arguments, path=os.environ.get("PYTHONPATH", "")
        )
    except subprocess.CalledProcessError:
        print(f"{name}: can't be measured here", file=sys.stderr)
        return None
    return found


def main(given: Sequence[str] | None = None) -> None:
    """Measure and write the results."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.studies.adapters")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--adapters", nargs="+", choices=ADAPTERS, default=list(ADAPTERS))
    parser.add_argument("--peers", type=Path, default=PEER_ENVIRONMENTS, help="the folder of the peers' environments")
    parser.add_argument("--out", type=Path, help="default: benchmarks/results/adapters-<device>-<date>.json")
    parser.add_argument("--one", choices=ADAPTERS, help=argparse.SUPPRESS)
    arguments = parser.parse_args(given)
    if arguments.one:
        print(json.dumps(measure(arguments.one, arguments.rounds)))
        return
    machine = {**describe("cpu"), "threads": 1}
    found: dict[str, Found] = {}
    for name in arguments.adapters:
        part = measure_elsewhere(name, arguments.rounds, arguments.peers)
        if part is not None:
            found[name] = part
            print(table(*rows_of(ADAPTERS[name].title, part)), flush=True)
    write_results("adapters", found, machine, arguments.out)


if __name__ == "__main__":
    main()
