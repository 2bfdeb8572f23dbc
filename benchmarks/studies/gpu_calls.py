"""What the calls of a training step take on a GPU, beside what :mod:`benchmarks.studies.predict` says of them.

``python -m benchmarks.studies.gpu_calls cuda`` replays graphs of :data:`REPEATS` calls each, so that the host takes no
part: once as they are, with all that a call reads in the second level of cache, and once with a memset larger than that
cache before every call, whose own time is taken off. ``--profile`` makes the calls of the headline figures once each,
for a profiler of NVIDIA's that ``ncu --profile-from-start off`` has told to wait for them: buffers are filled, and
kernels compiled, before it looks. A stage of ``make gpu`` runs both, see :mod:`benchmarks.stages`.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

import gpubuf
from benchmarks.measure import clocks
from benchmarks.measure.machine import describe
from benchmarks.measure.results import write_results
from benchmarks.studies.kernels import all_calls

HEADLINES = (
    "uniform: sample, 256",
    "uniform: sample, 32768",
    "prioritized: sample, 256",
    "prioritized: priority update, 256",
    "slices: sample, 256",
    "slices: extend, 256",
    "statistics of 48 elements, 4096",
)
"""The calls that a profiler looks at."""

WARM_UP = 5
REPEATS = 20
"""Calls in a graph."""

REPLAYS, ROUNDS = 5, 5
FLUSHED = 1 << 28
"""Bytes of the memset: several times the second level of cache."""


def microseconds(call: Callable[[], object], device: str) -> float:
    """Of one call in a graph of many; median over rounds. Synchronises."""

    def many() -> None:
        for _ in range(REPEATS):
            call()

    replay = gpubuf.capture(many, device=device)
    clock = clocks.of(None, device)
    for _ in range(WARM_UP):
        replay()
    rounds = []
    for _ in range(ROUNDS):
        begun = clock.timer()
        for _ in range(REPLAYS):
            replay()
        rounds.append((clock.timer() - begun) / (REPLAYS * REPEATS) * 1e6)
    return statistics.median(rounds)


def timed(device: str) -> list[dict[str, object]]:
    """``warm`` and ``cold`` microseconds of every call."""
    memory = torch.empty(FLUSHED if device == "cuda" else 1, dtype=torch.uint8, device=device)
    flush = microseconds(memory.zero_, device)
    found: list[dict[str, object]] = []
    for name, call in all_calls(device):

        def flushed(call: Callable[[], object] = call) -> None:
            memory.zero_()
            call()

        found.append({"call": name, "warm": microseconds(call, device), "cold": microseconds(flushed, device) - flush})
        print("{call:44} {warm:7.2f} µs, cold {cold:7.2f} µs".format(**found[-1]), flush=True)
    return found


def profile(device: str) -> None:
    """Make each of the headline calls once, with the profiler on."""
    for name, call in all_calls(device):
        if name not in HEADLINES:
            continue
        for _ in range(WARM_UP):
            call()
        print(name, flush=True)
        if device == "cuda":
            torch.cuda.synchronize()
            torch.cuda.profiler.start()
        call()
        if device == "cuda":
            torch.cuda.synchronize()
            torch.cuda.profiler.stop()


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.studies.gpu_calls", description=__doc__.partition("\n")[0]
    )
    parser.add_argument("device", choices=("cuda", "cpu"), help="cpu: a rehearsal")
    parser.add_argument("--profile", action="store_true", help="for ncu: the headline calls, once")
    parser.add_argument("--out", type=Path, help="default: benchmarks/results/calls-<device>-<date>.json")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    if options.profile:
        profile(options.device)
        return
    machine = describe(options.device)
    write_results("calls", timed(options.device), machine, options.out)


if __name__ == "__main__":
    main()
