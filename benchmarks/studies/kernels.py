"""What the calls of a training step launch, and what they take on a GPU.

``python -m benchmarks.studies.kernels`` needs no GPU: it makes the calls with tests/gates/ptx in the place of one,
which executes the PTX for sm_90 on the CPU and counts: the launches of a call, and of each its programs, warp
instructions, bytes and dependent trips to memory. Tests hold the kernels to these counts.

``python -m benchmarks.studies.kernels cuda`` times the calls on full buffers, in replayed graphs of :data:`REPEATS`
calls each, so that the host takes no part: once as they are, with all of it in the second level of cache that fits
there, and once with a memset larger than that cache before every call, whose own time is taken off. It also measures
what a launch costs the host, and how fast a kernel copies. With ``--profiled`` it makes some calls once, for ncu. A
stage of ``make gpu`` does both, :mod:`benchmarks.stages`.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

import gpubuf
from benchmarks.measure import clocks
from benchmarks.measure.elsewhere import found_by
from benchmarks.measure.machine import describe
from benchmarks.measure.results import write_results
from benchmarks.measure.steady import probe_of, steady
from benchmarks.peers.sources import transitions

CAPACITY, STORED = 1_000_000, 20_000
"""Rows of a buffer, and how many are there where launches are counted: those don't depend on it."""

SIZES = {
    "uniform": (256, 4096, 32768),
    "observations once": (256, 4096),
    "prioritized": (256, 1024, 4096),
    "slices": (256, 4096),
    "prioritized slices": (256,),
}
"""Rows of a batch, by the kind of sampler. Slices have :data:`SLICE` rows."""

SLICE = 8

BATCH = 256
"""Rows of the pieces of a SAC loss."""


def episodes(n: int) -> Any:
    """``n`` transitions of episodes of a hundred steps: the next observation is that of the next row inside of one."""
    data = transitions(n)
    data["next", "observation"][:-1] = data["observation"][1:]
    ends = slice(99, None, 100)
    data["next", "done"][ends] = True
    data["next", "observation"][ends] = 0
    return data


def filled_buffer(kind: str, device: str = "cpu", stored: int = STORED) -> Any:
    """A buffer with room for a million transitions, so many of them written."""
    from gpubuf.data import (
        LazyTensorStorage,
        PrioritizedSampler,
        PrioritizedSliceSampler,
        RandomSampler,
        SliceSampler,
        TensorDictReplayBuffer,
    )

    samplers: dict[str, Callable[[], Any]] = {
        "uniform": RandomSampler,
        "observations once": RandomSampler,
        "prioritized": lambda: PrioritizedSampler(CAPACITY, 0.6, 0.4),
        "slices": lambda: SliceSampler(slice_len=SLICE),
        "prioritized slices": lambda: PrioritizedSliceSampler(CAPACITY, 0.6, 0.4, slice_len=SLICE),
    }
    storage = LazyTensorStorage(CAPACITY, device=device, share_next=kind == "observations once")
    buffer = TensorDictReplayBuffer(storage=storage, sampler=samplers[kind]())
    buffer.extend(episodes(stored))
    if "prioritized" in kind:
        buffer.update_priority(torch.arange(stored), torch.rand(stored) + 0.1)
    return buffer


def calls(
    kind: str, sizes: Sequence[int], device: str = "cpu", stored: int = STORED
) -> Iterator[tuple[str, Callable[[], object]]]:
    """The calls of a training step on one kind of buffer, with their names."""
    buffer = filled_buffer(kind, device, stored)
    for n in sizes:
        data, index, priority = (
            each.to(device) for each in (episodes(n), torch.randint(stored, (n,)), torch.rand(n) + 0.1)
        )
        yield f"{kind}: sample, {n}", functools.partial(buffer.sample, n)
        if kind == "uniform":
            yield f"{kind}: gather, {n}", functools.partial(buffer.__getitem__, index)
        yield f"{kind}: extend, {n}", functools.partial(buffer.extend, data)
        if "prioritized" in kind:
            yield f"{kind}: priority update, {n}", functools.partial(buffer.update_priority, index, priority)


LAW_TASKS = tuple(task for task in range(10) for _ in range(1 + task % 3 * 2))
"""Of 28 environments: as many as 1, 3 or 5 of a task."""


def law_calls(device: str = "cpu", stored: int = STORED) -> Iterator[tuple[str, Callable[[], object]]]:
    """Draws by every law, beside which a uniform one stands: of the same rows."""
    from gpubuf.data import (
        Balanced,
        EmphasizeRecent,
        Geometric,
        LazyTensorStorage,
        Linear,
        Newest,
        RandomSampler,
        TensorDictReplayBuffer,
    )

    envs = len(LAW_TASKS)
    sampler = RandomSampler()
    storage = LazyTensorStorage(CAPACITY // envs * envs, device=device, ndim=2)
    buffer = TensorDictReplayBuffer(storage=storage, sampler=sampler)
    buffer.extend(episodes(stored // envs * envs).reshape(envs, -1))

    def draw(law: Any) -> object:
        sampler.law = law
        return buffer.sample(BATCH)

    laws = (Geometric(1 - 1e-5), Linear(), Newest(STORED // 2), EmphasizeRecent(), Balanced(LAW_TASKS))
    for law in (None, *laws):
        name = "no law" if law is None else type(law).__name__
        yield f"{name}: sample, {BATCH}", functools.partial(draw, law)


def other_calls(device: str = "cpu") -> Iterator[tuple[str, Callable[[], object]]]:
    """Statistics of a normalised write, and the fused pieces of a SAC loss, without their gradients."""
    from gpubuf.kernels import moments, sac, tanh_normal, td

    rule = torch.tensor(moments.Rule(1e-8), dtype=torch.float64, device=device)
    for n, elements in ((256, 48), (4096, 48)):
        state, mean, factor, tickets = moments.new_state(elements, device)
        source = torch.randn(n, elements, device=device)
        update = functools.partial(moments.update, state, source, mean, factor, rule, tickets)
        yield f"statistics of {elements} elements, {n}", update

    def zeros(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype, device=device)

    q, column, zero = zeros(2, BATCH), zeros(BATCH), zeros()
    flag = zeros(BATCH, dtype=torch.bool)
    loc, scale, noise = zeros(BATCH, 6), zeros(BATCH, 6) + 1, zeros(BATCH, 6)
    pieces: dict[str, Callable[[], object]] = {
        "tanh-normal sample": lambda: tanh_normal.sample(loc, scale, noise, None, None, -1.0, 1.0, 1),
        "soft TD target": lambda: td.soft_td_target(q, column, zero, column, flag, zero, None),
        "TD loss": lambda: td.td_loss(q, column, None, None, 1, 1),
        "actor loss": lambda: sac.actor_loss(q, column, zero, None, None, 1),
        "temperature loss": lambda: sac.temperature_loss(zero, column, zero, None, None, 1),
    }
    for name, call in pieces.items():
        yield f"{name}, {BATCH}", call


def counted_in_subprocess(*options: str) -> list[dict[str, Any]]:
    """What every call launches and executes, from a process whose kernels are compiled, whatever those here are."""
    found: list[dict[str, Any]]
    found = found_by(sys.executable, "tests.gates.ptx.counts", *options, env={"TRITON_INTERPRET": ""})
    return found


WARM_UP = 5
REPEATS = 20
"""Calls in a graph."""

REPLAYS, ROUNDS = 10, 5
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
    return statistics.median(clocks.runs(replay, clock, ROUNDS, REPLAYS)) / REPEATS * 1e6


COPIED = 1 << 30
"""Bytes that are copied: many times the second level of cache."""

COPIES = [(programs, block, warps) for programs in (4, 8, 16) for block, warps in ((2048, 4), (4096, 8), (8192, 8))]
"""Programs per multiprocessor, elements and warps per program of the copies that are tried."""


def copy_bandwidth(device: str, n_bytes: int = COPIED, processors: int = 0) -> float:
    """Bytes a second, read and written, of the fastest copy of random data by a kernel."""
    from benchmarks.measure._triton import copy_kernel
    from gpubuf.kernels._launching import launch

    # Of zeros a GPU moves more, or less, than of data.
    source = torch.randint(-(2**31), 2**31, (n_bytes // 4,), dtype=torch.int32, device=device)
    target, took = torch.empty_like(source), []
    processors = processors or torch.cuda.get_device_properties(device).multi_processor_count
    for programs, block, warps in COPIES:
        target.zero_()
        given = (copy_kernel, programs * processors, target, source, source.numel() // block)
        copy = functools.partial(launch, *given, num_warps=warps, BLOCK=block)
        took.append(microseconds(copy, device))
        if not torch.equal(target, source):
            raise RuntimeError(f"a copy by {programs} programs of {block} elements differs from what it copies")
    return 2 * n_bytes / min(took) * 1e6


PROFILED = (
    *("uniform: sample, 256", "uniform: extend, 256", "prioritized: sample, 256", "prioritized: priority update, 256"),
    *("slices: sample, 256", "slices: extend, 256"),
)
"""What ncu looks at: the kernels that all others are like."""


def profiled(device: str, stored: int) -> None:
    """Make each of :data:`PROFILED` twice, the second time between the marks that a profiler begins and ends at."""
    for name, call in itertools.chain(*(calls(kind, (256,), device, stored) for kind in SIZES)):
        if name in PROFILED:
            call()
            with torch.cuda.profiler.profile():
                call()


def timed(device: str, stored: int) -> list[dict[str, object]]:
    """``warm`` and ``cold`` microseconds of every call, the ``probe`` of the host, and how many rows are ``stored``."""
    memory = torch.empty(FLUSHED if device == "cuda" else 1, dtype=torch.uint8, device=device)
    flush = microseconds(memory.zero_, device)
    found: list[dict[str, Any]] = []

    def flushed(call: Callable[[], object]) -> None:
        memory.zero_()
        call()

    def both(call: Callable[[], object]) -> dict[str, float]:
        cold = microseconds(functools.partial(flushed, call), device) - flush
        return {"warm": microseconds(call, device), "cold": cold}

    of_buffers = (calls(kind, sizes, device, stored) for kind, sizes in SIZES.items())
    for name, call in itertools.chain(*of_buffers, law_calls(device, stored), other_calls(device)):
        took, probe = steady(functools.partial(both, call), probe_of(device))
        found.append({"call": name, **took, "stored": stored, "probe": probe})
        print("{call:44} {warm:7.2f} µs, cold {cold:7.2f} µs".format(**found[-1]), flush=True)
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.studies.kernels", description=__doc__.partition("\n")[0]
    )
    parser.add_argument("device", choices=("cuda", "cpu"), nargs="?", help="time the calls there; cpu: a rehearsal")
    parser.add_argument("--profiled", action="store_true", help="time nothing; make some calls for a profiler")
    parser.add_argument("--out", type=Path, help="default: benchmarks/results/<kernels or calls>-<device>-<date>.json")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    stored = CAPACITY if options.device == "cuda" else STORED
    if options.profiled:
        profiled(options.device, stored)
        return
    machine = describe(options.device or "cpu")
    if options.device:
        if options.device == "cuda":
            machine["launch_us"] = round(probe_of("cuda")(), 3)
            machine["copy_bytes_per_second"] = round(copy_bandwidth("cuda"))
        write_results("calls", timed(options.device, stored), machine, options.out)
        return
    found = {"launches": counted_in_subprocess(), "windows": counted_in_subprocess("--windows")}
    for each in itertools.chain(*found.values()):
        print(f"{each['total']:3} {each['call']}: {', '.join(each['kernels'])}")
    write_results("kernels", found, machine, options.out)


if __name__ == "__main__":
    main()
