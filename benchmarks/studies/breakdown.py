"""The time of each part of a uniform sample on the CPU, and the number of operations that a loss dispatches.

``python -m benchmarks.studies.breakdown`` times every part on its own, and writes the medians into one file of results.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.measure.figures import microseconds
from benchmarks.measure.machine import describe
from benchmarks.measure.results import write_results
from benchmarks.studies.checkpoints import rows as transitions
from benchmarks.workloads.plain_sac import ACTION, OBSERVATION, PlainSAC, forward_backward, make_batch
from gpubuf import SACLoss
from gpubuf.data import LazyTensorStorage, TensorDictReplayBuffer
from gpubuf.kernels import rows
from gpubuf.kernels._registry import past_dispatcher
from gpubuf.kernels.rows import _cpu
from gpubuf.modules import make_sac_actor, make_sac_critic

CAPACITY, BATCH = 1_000_000, 256
#: So few rows that all of them stay in the cache.
CACHED = 1_000


def median(call: Callable[[], object], repeats: int) -> float:
    """Median time of a call in seconds, after a warm-up."""
    for _ in range(min(200, repeats)):
        call()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def filled_buffer(capacity: int) -> TensorDictReplayBuffer:
    """A full buffer of the benchmarks' transitions."""
    buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(capacity), batch_size=BATCH)
    block = transitions(min(capacity, 100_000))
    while len(buffer) < capacity:
        buffer.extend(block[: capacity - len(buffer)])
    return buffer


def kernel_of(buffer: TensorDictReplayBuffer) -> Callable[[], object]:
    """The compiled code that draws and copies a batch, with nothing around it."""
    storage, rng = buffer.storage, buffer.sampler.random_state("cpu").state
    table, ring, tensors = storage.table, storage.ring, storage.layout.allocate(BATCH)
    targets = _cpu.addresses(tensors)
    index, generation = _cpu.sample_into(table, ring, rng, BATCH, storage.max_size, tensors)
    rows_of_all = (0, BATCH, BATCH, storage.max_size)
    written = (targets.buffer_info()[0], index.data_ptr(), generation.data_ptr())

    # The batch is an argument only so that it stays alive: the kernel gets addresses.
    def call(owners: object = (tensors, targets, index, generation)) -> object:
        return _cpu._sample(table.data_ptr(), len(tensors), ring.data_ptr(), rng.data_ptr(), *rows_of_all, *written)

    return call


def sampling_parts(capacity: int = CAPACITY, repeats: int = 5_000) -> dict[str, Any]:
    """Seconds of every part of a uniform sample, and of the whole."""
    buffer = filled_buffer(capacity)
    buffer.sample()
    storage, rng = buffer.storage, buffer.sampler.random_state("cpu").state
    table, ring, layout = storage.table, storage.ring, storage.layout
    n_bytes = layout.arena(BATCH).n_bytes
    tensors = layout.allocate(BATCH)
    index, _ = _cpu.sample_into(table, ring, rng, BATCH, capacity, tensors)

    def timed(call: Callable[[], object]) -> float:
        return median(call, repeats)

    kernel = timed(kernel_of(buffer))
    launcher = timed(lambda: _cpu.sample_into(table, ring, rng, BATCH, capacity, tensors))
    arena = timed(lambda: _cpu.sample(table, ring, rng, BATCH, capacity, n_bytes))
    dispatched = timed(lambda: rows.sample(table, ring, rng, BATCH, capacity, n_bytes))
    allocate = timed(lambda: layout.allocate(BATCH))
    direct = timed(lambda: past_dispatcher(table))
    assemble = timed(lambda: storage.assemble(tensors, {"index": index}))
    whole = timed(buffer.sample)
    parts = {
        "finding out that PyTorch's dispatcher is not needed": direct,
        "six tensors of the batch": allocate,
        "two more for index and generations, and all addresses": launcher - kernel,
        "the kernel: drawing, and six cache-missing reads a row": kernel,
        "the nested TensorDict": assemble,
        "everything else: lock, layout, info, random state": whole - launcher - allocate - direct - assemble,
    }
    return {
        "capacity": capacity,
        "batch": BATCH,
        "parts": parts,
        "whole": whole,
        "dispatcher": dispatched - arena,
        "kernel_cached": timed(kernel_of(filled_buffer(CACHED))),
    }


class Counted(TorchDispatchMode):
    """Counts the operations that reach the dispatcher."""

    def __init__(self) -> None:
        super().__init__()
        self.operations = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.operations += 1
        return func(*args, **(kwargs or {}))


def operations() -> dict[str, int]:
    """Operations of forward and backward of the soft actor-critic losses, two critics, 256 rows."""
    actor, critics = make_sac_actor(OBSERVATION, ACTION), make_sac_critic(OBSERVATION, ACTION)
    losses: dict[str, nn.Module] = {
        "gpubuf": SACLoss(actor, critics, target_entropy=-float(ACTION)),
        "plain": PlainSAC(),
    }
    found, batch = {}, make_batch(256)
    for name, loss in losses.items():
        forward_backward(loss, batch)
        loss.zero_grad()
        with Counted() as counted:
            forward_backward(loss, batch)
        found[name] = counted.operations
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.studies.breakdown", description=__doc__.partition("\n")[0]
    )
    parser.add_argument("--capacity", type=int, default=CAPACITY, help=f"default: {CAPACITY}")
    parser.add_argument("--repeats", type=int, default=5_000, help="calls of each part; default: 5000")
    parser.add_argument("--out", type=Path, help="default: benchmarks/results/breakdown-<device>-<date>.json")
    options = parser.parse_args(arguments)
    if options.capacity < 1 or options.repeats < 1:
        parser.error("needs room for at least one row, and one call")
    torch.set_num_threads(1)
    machine = describe("cpu")
    found = {**sampling_parts(options.capacity, options.repeats), "operations": operations()}
    for name, seconds in [*found["parts"].items(), ("buffer.sample()", found["whole"])]:
        print(f"{microseconds(seconds):>8} µs  {name}")
    write_results("breakdown", found, machine, options.out)


if __name__ == "__main__":
    main()
