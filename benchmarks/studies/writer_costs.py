"""What writers in other processes cost the learner: µs of its process, per write and per row that it takes in.

``python -m benchmarks.studies.writer_costs`` fills the queues of 1 and of 4 writers by clients in this process, which
is not timed, and times the learner's ``take``. Beside it: the same rows by the buffer's own ``extend_columns``, in one
write and in as many as the writers made, and what a write costs the writer.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict

from benchmarks.measure.machine import describe
from gpubuf import LazyTensorStorage, ReplayBuffer, Writers

CAPACITY_BYTES = 1 << 26


def columns(row_bytes: int, n: int) -> dict[Any, np.ndarray]:
    """Transitions of about so many bytes: observations, action, reward and two flags."""
    width = (row_bytes - 30) // 8
    return {
        "observation": np.ones((n, width), np.float32),
        "action": np.ones((n, 6), np.float32),
        ("next", "observation"): np.ones((n, width), np.float32),
        ("next", "reward"): np.ones((n, 1), np.float32),
        ("next", "done"): np.zeros((n, 1), bool),
        ("next", "terminated"): np.zeros((n, 1), bool),
    }


def microseconds(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return (time.perf_counter() - start) * 1e6


def measure(row_bytes: int, writers: int, writes: int, rows: int, repeats: int, device: str) -> dict[str, float]:
    """Medians, in µs, of one take of ``writes`` writes of ``rows`` rows from each writer."""
    capacity = CAPACITY_BYTES // row_bytes
    ours, plain = (
        ReplayBuffer(LazyTensorStorage(capacity, device=device), batch_size=256, writers=given)
        for given in (Writers(writers, queue_steps=max(2 * writes * rows, 64)), None)
    )
    whole = columns(row_bytes, writers * writes * rows)
    part = {key: value[:rows] for key, value in whole.items()}
    example = TensorDict({}, [1])
    for key, value in part.items():
        example.set(key, torch.as_tensor(value[:1]))
    clients = [ours.client(example) for _ in range(writers)]
    # Memory that was never written costs more.
    for _ in range(-(-capacity // (writers * writes * rows)) if row_bytes > 1000 else 1):
        ours.extend_columns(whole)
        plain.extend_columns(whole)
    before = ours.write_count
    found: dict[str, list[float]] = {"take": [], "one write": [], "all writes": [], "writer": []}
    for _ in range(repeats):
        for client in clients:
            found["writer"] += [microseconds(lambda: client.extend_columns(part)) for _ in range(writes)]  # noqa: B023
        found["take"].append(microseconds(lambda: ours.writers.take(everything=True)))
        found["one write"].append(microseconds(lambda: plain.extend_columns(whole)))
        took = sum(microseconds(lambda: plain.extend_columns(part)) for _ in range(writers * writes))
        found["all writes"].append(took)
    if ours.write_count - before != repeats * writers * writes * rows:
        raise RuntimeError(f"{ours.write_count - before} rows have arrived")
    return {name: statistics.median(took) for name, took in found.items()}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=200)
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    print(describe(torch.device(options.device).type))
    head = ("row bytes", "writers", "writes each", "rows a write", "take", "per write", "per row")
    print(*(f"{name:>13}" for name in (*head, "one extend", "all extends", "client's write")))
    for row_bytes in (180, 28_000):
        for writers in (1, 4):
            for writes, rows in ((1, 1), (16, 1), (1, 64), (4, 64)):
                found = measure(row_bytes, writers, writes, rows, options.repeats, options.device)
                n = writers * writes
                figures = (found["take"], found["take"] / n, found["take"] / n / rows)
                rest = (found["one write"], found["all writes"], found["writer"])
                numbers = (f"{number:13d}" for number in (row_bytes, writers, writes, rows))
                print(*numbers, *(f"{figure:13.2f}" for figure in (*figures, *rest)))


if __name__ == "__main__":
    main()
