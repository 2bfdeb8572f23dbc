"""The roofline: the least time that any implementation needs for the bytes and the launches of a call.

Rows, indices, priorities and weights are counted, each where it is read and where it is written. Inner nodes of trees
are not, because every library has others; nor are whole cache lines, nor latency. Each run measures the bandwidths and
the time of a launch on its own machine. On a CPU a launch is the call of an operation of gpubuf that finds nothing to
do.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from gpubuf.kernels import config, sum_tree
from gpubuf.kernels._registry import without_dispatch

#: Bytes of an index, and of a priority or weight.
INDEX, PRIORITY = 8, 4
#: Bytes that are copied to find out the bandwidth: more than any cache holds.
COPIED = 1 << 28


@dataclass(frozen=True)
class Traffic:
    """The work of one call.

    Attributes:
        bytes: read and written, in the memory of the device.
        launches: of kernels on a GPU, of operations on a CPU.
        bus: bytes over the bus between host and GPU.
    """

    bytes: int
    launches: int
    bus: int = 0

    def __add__(self, other: Traffic) -> Traffic:
        return Traffic(self.bytes + other.bytes, self.launches + other.launches, self.bus + other.bus)


def seconds(traffic: Traffic, measured: dict[str, float], launch: str = "launch_seconds") -> float:
    """The least time of a call, in seconds.

    Args:
        traffic: the work of the call.
        measured: the speeds from :func:`measure`.
        launch: ``"launch_seconds"``, or ``"graph_launch_seconds"`` inside a CUDA graph.
    """
    bus = traffic.bus / measured["bus_bytes_per_second"] if traffic.bus else 0.0
    return traffic.bytes / measured["copy_bytes_per_second"] + bus + traffic.launches * measured[launch]


# Counting


def gather(batch: int, row_bytes: int) -> Traffic:
    """Draw and copy: rows are read and written, the index is written. One launch."""
    return Traffic(batch * (2 * row_bytes + INDEX), 1)


def write(batch: int, row_bytes: int) -> Traffic:
    """Rows are read and written. One launch."""
    return Traffic(batch * 2 * row_bytes, 1)


def draw(batch: int) -> Traffic:
    """The priorities of the rows drawn are read, index and weight written. One launch."""
    return Traffic(batch * (INDEX + 2 * PRIORITY), 1)


def set_priorities(batch: int, capacity: int, device: str) -> Traffic:
    """Index and priorities are read, leaves written. On a CPU one call.

    On a GPU one launch for a small batch; else one that writes the leaves, and one for each level above them.
    """
    fan_out = config.tree_fan_out(capacity, device)
    one = device == "cpu" or config.tree_update(fan_out, batch).single_program
    return Traffic(batch * (INDEX + 2 * PRIORITY), 1 if one else len(sum_tree.level_sizes(capacity, fan_out)) + 1)


# Measuring


def best_of(call: Callable[[], object], repeats: int, calls: int = 1) -> float:
    """Seconds a call of the fastest of some runs of ``calls`` calls, on the host's clock."""
    best = float("inf")
    for _ in range(repeats):
        start = time.perf_counter()
        for _ in range(calls):
            call()
        best = min(best, (time.perf_counter() - start) / calls)
    return best


def best_on_gpu(call: Callable[[], object], repeats: int, calls: int = 1) -> float:
    """The same on the GPU's clock, between two events around the calls."""
    call()
    best = float("inf")
    for _ in range(repeats):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        start.record()
        for _ in range(calls):
            call()
        end.record()
        end.synchronize()
        best = min(best, start.elapsed_time(end) / 1e3 / calls)
    return best


def measure(device: str) -> dict[str, float]:
    """Bandwidths in bytes per second and times of a launch in seconds, of this machine now. Takes some seconds."""
    if device != "cuda":
        return _measure_cpu()
    measured = _measure_gpu()
    # The memory is for the benchmarks, which run in processes of their own.
    torch.cuda.empty_cache()
    return measured


def _measure_cpu() -> dict[str, float]:
    target = torch.zeros(COPIED, dtype=torch.uint8)
    source = torch.ones_like(target)
    copy = best_of(lambda: target.copy_(source), 8)
    tree = sum_tree.new_tree(16, 16, "cpu")
    nothing = torch.empty(0, dtype=torch.int64)
    refresh = without_dispatch(sum_tree.refresh)
    call = best_of(lambda: refresh(*tree, nothing), 50, 100)
    return {"copy_bytes_per_second": 2 * target.nbytes / copy, "launch_seconds": call}


def _measure_gpu() -> dict[str, float]:
    from gpubuf.tuning._triton import empty_kernel
    from gpubuf.tuning.timing import GraphTimer, copy_bandwidth, launch_seconds

    device = torch.device("cuda", torch.cuda.current_device())
    timer = GraphTimer(device)
    host = torch.zeros(COPIED, dtype=torch.uint8, pin_memory=True)
    target = torch.empty_like(host, device=device)
    anything = torch.zeros(1, device=device)
    return {
        "copy_bytes_per_second": copy_bandwidth(timer, device),
        "bus_bytes_per_second": host.nbytes / best_on_gpu(lambda: target.copy_(host, non_blocking=True), 8, 2),
        "launch_seconds": best_on_gpu(lambda: empty_kernel[(1,)](anything), 20, 200),
        "graph_launch_seconds": launch_seconds(timer, device),
    }


def describe(measured: dict[str, Any]) -> str:
    """The measured speeds, for people."""
    parts = [f"copies at {measured['copy_bytes_per_second'] / 1e9:.1f} GB/s"]
    if "bus_bytes_per_second" in measured:
        parts.append(f"pinned memory to the GPU at {measured['bus_bytes_per_second'] / 1e9:.1f} GB/s")
    parts.append(f"{measured['launch_seconds'] * 1e6:.2f} µs per launch")
    if "graph_launch_seconds" in measured:
        parts.append(f"{measured['graph_launch_seconds'] * 1e6:.2f} µs inside a graph")
    return ", ".join(parts)
