"""Saving and loading a prioritized buffer: seconds and MB/s, against the disk's own time for as many bytes.

``python -m benchmarks.studies.checkpoints`` fills a buffer with the transitions of the other benchmarks, and times a
full save, a save after 1 % of the rows were replaced and a batch of priorities updated, and a load with and without the
files in memory. The disk's own speed is that of one file of the same size, written in pieces of 1 MiB and flushed, or
read.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from tensordict import TensorDict

from benchmarks.measure.machine import describe
from benchmarks.measure.results import write_results
from gpubuf import LazyTensorStorage, TensorDictPrioritizedReplayBuffer

BATCH = 256
PIECE = 1 << 20


def rows(n: int) -> TensorDict:
    """Transitions of 17 + 6 + 17 floats, reward and two flags."""
    flags = {name: torch.zeros(n, 1, dtype=torch.bool) for name in ("done", "terminated")}
    after = {"observation": torch.randn(n, 17), "reward": torch.randn(n, 1), **flags}
    return TensorDict({"observation": torch.randn(n, 17), "action": torch.randn(n, 6), "next": after}, [n])


def new_buffer(n: int, device: str) -> TensorDictPrioritizedReplayBuffer:
    storage = LazyTensorStorage(n, device=device)
    return TensorDictPrioritizedReplayBuffer(alpha=0.7, beta=0.5, storage=storage, batch_size=BATCH)


def change(buffer: TensorDictPrioritizedReplayBuffer, n: int) -> None:
    """Replace ``n`` rows, and give a batch new priorities."""
    buffer.extend(rows(n))
    batch = buffer.sample()
    batch["td_error"] = torch.rand(BATCH, device=batch.device)
    buffer.update_tensordict_priority(batch)


def seconds(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def pieces(n_bytes: int) -> Iterator[int]:
    return iter([PIECE] * (n_bytes // PIECE) + [n_bytes % PIECE])


def write_raw(path: Path, n_bytes: int, data: bytes) -> None:
    with open(path, "wb", buffering=0) as file:
        for size in pieces(n_bytes):
            file.write(data[:size])
        os.fsync(file.fileno())


def read_raw(path: Path) -> None:
    with open(path, "rb", buffering=0) as file:
        while file.read(PIECE):
            pass


def forget(folder: Path) -> None:
    """Ask the system to drop the folder's files from memory, so that they are read from the disk again."""
    for path in folder.iterdir():
        descriptor = os.open(path, os.O_RDONLY)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def measure(n: int, device: str, folder: Path, repeats: int) -> list[dict[str, Any]]:
    """One row per operation: its name, bytes, median, least and most seconds, MB/s at the median."""
    buffer, other = new_buffer(n, device), new_buffer(n, device)
    for stored in range(0, n, 100_000):
        buffer.extend(rows(min(100_000, n - stored)))
    ours, raw = folder / "checkpoint", folder / "raw"
    raw.mkdir()
    times: dict[str, list[float]] = {}
    sizes: dict[str, int] = {}

    def note(name: str, n_bytes: int, took: float) -> None:
        times.setdefault(name, []).append(took)
        sizes[name] = n_bytes

    data = os.urandom(PIECE)
    for _ in range(repeats):
        start = time.perf_counter()
        full = buffer.save(ours, incremental=False)
        note("save", full.bytes_written, time.perf_counter() - start)
        start = time.perf_counter()
        write_raw(raw / "file", full.bytes, data)
        note("disk: write", full.bytes, time.perf_counter() - start)
        change(buffer, n // 100)
        start = time.perf_counter()
        update = buffer.save(ours)
        note("save after 1 %", update.bytes_written, time.perf_counter() - start)
        forget(ours)
        note("load, from the disk", full.bytes, seconds(lambda: other.load(ours)))
        note("load, from memory", full.bytes, seconds(lambda: other.load(ours)))
        if not (buffer.sample() == other.sample()).all():
            raise RuntimeError("the restored buffer draws another batch")
        forget(raw)
        note("disk: read", full.bytes, seconds(lambda: read_raw(raw / "file")))
    return [
        {
            "operation": name,
            "bytes": sizes[name],
            "seconds": statistics.median(took),
            "least": min(took),
            "most": max(took),
            "MB/s": sizes[name] / statistics.median(took) / 1e6,
        }
        for name, took in times.items()
    ]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.studies.checkpoints", description=__doc__.partition("\n")[0]
    )
    parser.add_argument("--rows", type=int, default=1_000_000, help="default: 1 000 000")
    parser.add_argument("--repeats", type=int, default=5, help="default: 5")
    parser.add_argument("--device", default="cpu", help="default: cpu")
    parser.add_argument("--folder", type=Path, help="on the disk to measure; default: the temporary folder")
    parser.add_argument("--out", type=Path, help="default: benchmarks/results/checkpoints-<device>-<date>.json")
    options = parser.parse_args(arguments)
    if options.rows < BATCH or options.repeats < 1:
        parser.error(f"needs at least {BATCH} rows and one repeat")
    machine = describe(torch.device(options.device).type)
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        results = measure(options.rows, options.device, Path(folder), options.repeats)
    print(f"{options.rows:,} prioritized rows on {options.device}, median of {options.repeats}")
    for row in results:
        print(
            f"{row['operation']:20} {row['bytes'] / 1e6:9.1f} MB {row['seconds']:8.3f} s "
            f"({row['least']:.3f} to {row['most']:.3f}) {row['MB/s']:8.0f} MB/s"
        )
    full, update = (next(row for row in results if row["operation"] == name) for name in ("save", "save after 1 %"))
    print(f"1 % changed: {update['bytes'] / full['bytes']:.1%} of the bytes")
    found = {"rows": options.rows, "repeats": options.repeats, "results": results}
    write_results("checkpoints", found, machine, options.out)


if __name__ == "__main__":
    main()
