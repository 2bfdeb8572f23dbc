"""What rows in pinned memory cost a captured step: ``python -m benchmarks.studies.pinned``, on a GPU.

A step draws a batch and multiplies matrices for about as long as an update of SAC takes. It is timed with the rows on
the GPU, with pinned rows, and with pinned rows and ``prefetch``, so that a branch of the graph gathers the next batch;
the last two by how many bytes the programs of a launch read at a time.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterator
from typing import NamedTuple

import torch
from tensordict import TensorDict

import gpubuf
from benchmarks.measure.clocks import Clock, by_events, runs
from benchmarks.measure.steady import probe_of, steady
from benchmarks.peers.sources import transitions
from gpubuf.kernels import config
from gpubuf.kernels.rows import _launch

READ_AT_A_TIME = (1 << 16, 1 << 17, 1 << 18, 1 << 20, 1 << 30)
"""Bytes; with the last one there are as many programs as on the GPU's own memory."""

CALLS, REPEATS = 100, 5


class Case(NamedTuple):
    """Rows, their number in a buffer and in a batch, where they are, and whether the next batch is made ahead."""

    rows: str
    stored: int
    batch: int
    device: str
    prefetch: int | None


def cases(stored: int = 100_000) -> Iterator[Case]:
    """Short rows of 170 bytes in two sizes of a batch, and images of 28 KB."""
    for rows, batch, share in (("short", 256, 1), ("short", 4096, 1), ("images", 256, 10)):
        for device, prefetch in (("cuda", None), ("pinned", None), ("pinned", 1)):
            yield Case(rows, stored // share, batch, device, prefetch)


def step_of(case: Case, work: int) -> gpubuf.graphs.Captured:
    """The step, captured."""
    storage = gpubuf.LazyTensorStorage(case.stored, device=case.device)
    buffer = gpubuf.TensorDictReplayBuffer(storage=storage, batch_size=case.batch, prefetch=case.prefetch)
    for _ in range(0, case.stored, 1000):
        images = {"pixels": torch.randint(256, (1000, 4, 84, 84), dtype=torch.uint8)}
        buffer.extend(transitions(1000) if case.rows == "short" else TensorDict(images, [1000]))
    x = torch.randn(1024, 1024, device=storage.device)

    def step() -> torch.Tensor:
        first = next(iter(buffer.sample().values(True, True)))
        out = x
        for _ in range(work):
            out = out @ x / 32
        return first.sum() + out.sum()

    captured = gpubuf.capture(step)
    for _ in range(5):
        captured()
    return captured


def times(case: Case, clock: Clock, work: int) -> dict[int, float]:
    """Microseconds of a step by the bytes that are read at a time."""
    found, before = {}, _launch.HOST_BYTES
    try:
        for _launch.HOST_BYTES in READ_AT_A_TIME if case.device == "pinned" else (before,):
            # Launches are prepared by it.
            with config.using():
                step = step_of(case, work)
            found[_launch.HOST_BYTES] = statistics.median(runs(step, clock, REPEATS, CALLS)) * 1e6
    finally:
        _launch.HOST_BYTES = before
    return found


def main() -> None:
    """Print a line of JSON per case: what was timed, microseconds, and the probes of the machine around it."""
    clock, probe = Clock("events", by_events, queues=True), probe_of("cuda")
    for case in cases():
        found, probes = steady(lambda case=case: times(case, clock, work=40), probe)
        print(json.dumps({**case._asdict(), "us": found, **probes}), flush=True)


if __name__ == "__main__":
    main()
