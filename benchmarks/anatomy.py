"""Where the time of a uniform sample goes on the CPU: every part timed on its own.

``python -m benchmarks.anatomy`` prints a table of medians; the last row is the whole call.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch
from tensordict import TensorDict

from gpubuf.data import LazyTensorStorage, TensorDictReplayBuffer
from gpubuf.kernels import rows
from gpubuf.kernels._registry import without_dispatch
from gpubuf.kernels.rows import _numba

CAPACITY, BATCH = 1_000_000, 256


def median_us(call: Callable[[], object], repeats: int = 5_000) -> float:
    """Median time of a call in microseconds, after a warm-up."""
    for _ in range(200):
        call()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return statistics.median(times) * 1e6


def filled_buffer() -> TensorDictReplayBuffer:
    """A full buffer of the benchmarks' transitions."""
    buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(CAPACITY), batch_size=BATCH)
    n = CAPACITY // 10
    after = {"observation": torch.randn(n, 17), "reward": torch.randn(n, 1)}
    flags = {name: torch.zeros(n, 1, dtype=torch.bool) for name in ("done", "terminated")}
    data = {"observation": torch.randn(n, 17), "action": torch.randn(n, 6), "next": {**after, **flags}}
    for _ in range(10):
        buffer.extend(TensorDict(data, [n]))
    return buffer


def main() -> None:
    torch.set_num_threads(1)
    buffer = filled_buffer()
    buffer.sample()
    storage, rng = buffer.storage, buffer.sampler.random_state("cpu").state
    table, ring, layout = storage.table, storage.ring, storage.layout
    n_bytes = layout.arena(BATCH).n_bytes
    arena, index, generation = rows.sample(table, ring, rng, BATCH, CAPACITY, n_bytes)
    tensors = layout.cut(arena, BATCH)
    addresses = (arena.data_ptr(), n_bytes, index.data_ptr(), generation.data_ptr())
    kernel = median_us(
        lambda: _numba._sample(
            table.data_ptr(), len(layout.leaves), ring.data_ptr(), rng.data_ptr(), BATCH, CAPACITY, *addresses
        )
    )
    launcher = median_us(lambda: _numba.sample(table, ring, rng, BATCH, CAPACITY, n_bytes))
    direct = without_dispatch(rows.sample)
    operation = median_us(lambda: direct(table, ring, rng, BATCH, CAPACITY, n_bytes))
    dispatched = median_us(lambda: rows.sample(table, ring, rng, BATCH, CAPACITY, n_bytes))
    cut = median_us(lambda: layout.cut(arena, BATCH))
    assemble = median_us(lambda: storage.assemble(tensors, {"index": index}))
    whole = median_us(buffer.sample)
    parts = {
        "finding out that PyTorch's dispatcher is not needed": operation - launcher,
        "three allocations, argument checks, addresses": launcher - kernel,
        "the kernel: drawing, and six cache-missing reads a row": kernel,
        "six tensors with version counters of their own, over one allocation": cut,
        "the nested TensorDict": assemble,
        "everything else: lock, layout, info, random state": whole - operation - cut - assemble,
        "`buffer.sample()`": whole,
    }
    print("| part | µs |\n| --- | ---: |")
    for name, value in parts.items():
        print(f"| {name} | {value:.1f} |")
    print(f"\nThrough the dispatcher it would be {dispatched - operation:.1f} µs more.")


if __name__ == "__main__":
    main()
