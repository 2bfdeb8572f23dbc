"""Stacks of frames, chunks of actions and sequences beside other libraries: ``python -m benchmarks.studies.windows``.

Every library is measured in its own environment, with gpubuf's windows beside it: the same rows, bytes that are held,
and the median microseconds of batches in turn. All batches are checked before. One thread, on a CPU. What gpubuf's
batches launch on a GPU, and the bytes that these move, are counted without one.
"""

from __future__ import annotations

import argparse
import functools
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.measure.elsewhere import by_part
from benchmarks.measure.in_turn import Contender, in_turn
from benchmarks.measure.machine import describe, versions
from benchmarks.measure.results import write_results
from benchmarks.measure.steady import probe_of
from benchmarks.peers.libraries import UnavailableError
from benchmarks.studies.kernels import counted_in_subprocess
from benchmarks.workloads.windows import OURS, WORKLOADS, check, held

#: Rows where launches are counted: those don't depend on it.
COUNTED = 2_000
#: What is measured in a process of its own: a workload, and the environment of a peer.
PARTS = {f"{name} {peer or OURS}": (name, peer) for name, entry in WORKLOADS.items() for peer in entry.others}


def calls() -> Iterator[tuple[str, Callable[[], object]]]:
    """Batches of gpubuf's windows, with their names: see :mod:`tests.gates.ptx.counts`."""
    for entry in WORKLOADS.values():
        filled = entry.ours(entry.data(COUNTED))
        for n in entry.batches:
            yield f"{entry.title}, {n}", functools.partial(filled.sample, n)


def measured(part: str, rows: int, rounds: int) -> dict[str, dict[str, Any]]:
    """By contender of a part: ``bytes`` for a million rows, and what calls in turn have found, by size of the batch."""
    name, peer = PARTS[part]
    entry = WORKLOADS[name]
    data, contenders, takes = entry.data(rows), dict[str, Contender](), dict[str, float]()
    for who, fill in {OURS: entry.ours, **entry.others[peer]}.items():
        try:
            filled = fill(data)
        except UnavailableError as reason:
            print(f"{part}: {reason}", file=sys.stderr)
            continue
        # Before there are batches, which a buffer may keep.
        takes[who] = (held(filled.buffer) if filled.held is None else filled.held) / rows * 1e6
        for n in entry.batches:
            check(entry, data, filled, n)
        contenders[who] = Contender({str(n): functools.partial(filled.sample, n) for n in entry.batches})
    if len(contenders) < 2:
        return {}
    return {who: {"bytes": takes[who], **took} for who, took in in_turn(contenders, rounds, probe_of("cpu")).items()}


def main(given: Sequence[str] | None = None) -> None:
    """Measure every part in its peer's environment, count launches, and write one file of results."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.studies.windows", description=__doc__.partition("\n")[0]
    )
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=[*PARTS], help="default: all", metavar="PART")
    parser.add_argument("--rows", type=int, default=100_000)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--out", type=Path, help="default: benchmarks/results/windows-<device>-<date>.json")
    parser.add_argument("--one", choices=PARTS, help=argparse.SUPPRESS)
    options = parser.parse_args(given)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    if options.one:
        found = measured(options.one, options.rows, options.rounds)
        print(json.dumps({"found": found, "versions": versions()}))
        return
    machine, asked = describe("cpu"), {part: PARTS[part][1] or OURS for part in options.parts}
    words = ("--rows", str(options.rows), "--rounds", str(options.rounds))
    parts = by_part("benchmarks.studies.windows", asked, machine, *words)
    results = {"rows": options.rows, "parts": parts, "launches": counted_in_subprocess("--windows")}
    write_results("windows", results, machine, options.out)


if __name__ == "__main__":
    main()
