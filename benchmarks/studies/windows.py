"""Stacks of frames, chunks of actions and sequences beside other libraries: ``python -m benchmarks.studies.windows``.

Every library is measured in its own environment, with gpubuf's windows beside it: the same rows, bytes that are held,
and the median microseconds of batches in turn. All batches are checked before. One thread, on a CPU. What gpubuf's
batches launch on a GPU is counted by :mod:`benchmarks.studies.kernels`, as what a world model's update launches.
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
from tensordict import TensorDict

from benchmarks.measure.elsewhere import by_part
from benchmarks.measure.in_turn import Contender, in_turn
from benchmarks.measure.machine import describe, versions
from benchmarks.measure.results import write_results
from benchmarks.measure.steady import probe_of
from benchmarks.peers.libraries import UnavailableError
from benchmarks.workloads.windows import OURS, SEQUENCE, WORKLOADS, Episodes, check, held
from gpubuf import OnlineFirst, RandomSampler
from gpubuf.data import LazyTensorStorage, TensorDictReplayBuffer, Window
from gpubuf.data.samplers.base import Sampler

#: Rows where launches are counted: those don't depend on it.
COUNTED = 2_000
#: Sequences of a world model's batch, and its recurrent state and classes as a DreamerV3 of the smallest size has them.
SEQUENCES, STATE = 16, {"deter": (512,), "stoch": (32, 32)}
#: What is measured in a process of its own: a workload, and the environment of a peer.
PARTS = {f"{name} {peer or OURS}": (name, peer) for name, entry in WORKLOADS.items() for peer in entry.others}


def calls() -> Iterator[tuple[str, Callable[[], object]]]:
    """Batches of gpubuf's windows, with their names: see :mod:`tests.gates.ptx.counts`."""
    for entry in WORKLOADS.values():
        filled = entry.ours(entry.data(COUNTED))
        for n in entry.batches:
            yield f"{entry.title}, {n}", functools.partial(filled.sample, n)
    said = " and ".join("x".join(map(str, shape)) for shape in STATE.values())
    for dtype, sampler, name in (
        (torch.float32, RandomSampler(), "float32"),
        (torch.bfloat16, RandomSampler(), "bfloat16"),
        (torch.float32, OnlineFirst(RandomSampler(), every=SEQUENCE), "float32, new steps first"),
    ):
        yield f"such sequences, and states of {said} written back, {name}, {SEQUENCES}", world_model(dtype, sampler)


def world_model(dtype: torch.dtype, sampler: Sampler) -> Callable[[], None]:
    """What a world model's update asks of a buffer: sequences with the state where each begins, and new states back."""
    data = Episodes(COUNTED, WORKLOADS["sequences"].data(1).frames.shape[1:])
    # The drawn row is the last of its sequence.
    sequence = functools.partial(Window, 1 - SEQUENCE, outside="cross")
    windows: dict[Any, Window] = {
        "pixels": sequence(0, is_first="is_first", rows="rows"),
        **{("next", key): sequence(0) for key in ("reward", "done")},
        **{key: sequence(1 - SEQUENCE) for key in STATE},
    }
    buffer = TensorDictReplayBuffer(
        storage=LazyTensorStorage(data.rows), sampler=sampler, windows=windows, batch_size=SEQUENCES
    )
    for rows in data.writes():
        rows.update({key: torch.zeros(*rows.shape, *shape, dtype=dtype) for key, shape in STATE.items()})
        buffer.extend(rows)
    lead = (SEQUENCES, SEQUENCE)
    new = TensorDict({key: torch.ones(*lead, *shape, dtype=dtype) for key, shape in STATE.items()}, lead)

    def update() -> None:
        rows = buffer.sample()["rows"]
        buffer.update_if_present(rows["index"], new, generation=rows["index_generation"])

    return update


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
    """Measure every part in its peer's environment, and write one file of results."""
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
    write_results("windows", {"rows": options.rows, "parts": parts}, machine, options.out)


if __name__ == "__main__":
    main()
