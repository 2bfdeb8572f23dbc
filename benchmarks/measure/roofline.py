"""The roofline: the least time that any implementation needs for the bytes and the launches of a call.

Rows, indices, priorities and weights are counted, each where it is read and where it is written. Inner nodes of trees
are not, because every library has others; nor are whole cache lines, nor latency. Each run measures the bandwidths and
the time of a launch on its own machine. On a CPU a launch is the call of an operation of gpubuf that finds nothing to
do.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from benchmarks.measure import clocks
from benchmarks.measure.clocks import Clock
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


def counted(parts: Sequence[str], batch: int, row_bytes: int = 0, capacity: int = 1, device: str = "cpu") -> Traffic:
    """The work of a call on ``batch`` rows that has these parts.

    * ``gather``: rows are read and written, their index is written. One launch.
    * ``draw``: the priorities of the rows drawn are read, index and weight written. One launch.
    * ``update``: index and priorities are read, leaves written. One launch for a small batch on a GPU, else one that
      writes the leaves, and one for each level above them; on a CPU one call.
    * ``write``: rows are read and written. One launch.
    * ``upload``: rows cross the bus. One launch.
    * ``trajectories``: the index of trajectories is read or written. One launch.
    """
    fan_out = config.tree_fan_out(capacity, device)
    one = device == "cpu" or config.tree_update(fan_out, batch).single_program
    priorities = batch * (INDEX + 2 * PRIORITY)
    work = {
        "gather": Traffic(batch * (2 * row_bytes + INDEX), 1),
        "draw": Traffic(priorities, 1),
        "update": Traffic(priorities, 1 if one else len(sum_tree.level_sizes(capacity, fan_out)) + 1),
        "write": Traffic(batch * 2 * row_bytes, 1),
        "upload": Traffic(0, 1, batch * row_bytes),
        "trajectories": Traffic(0, 1),
    }
    return sum((work[part] for part in parts), Traffic(0, 0))


# Measuring


def best_of(call: Callable[[], object], clock: Clock, repeats: int, calls: int = 1) -> float:
    """Seconds per call of the fastest of some runs of ``calls`` calls."""
    call()
    return min(clocks.runs(call, clock, repeats, calls))


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
    clock = clocks.of(None, "cpu")
    copy = best_of(lambda: target.copy_(source), clock, 8)
    tree = sum_tree.new_tree(16, 16, "cpu")
    nothing = torch.empty(0, dtype=torch.int64)
    refresh = without_dispatch(sum_tree.refresh)
    call = best_of(lambda: refresh(*tree, nothing), clock, 50, 100)
    return {"copy_bytes_per_second": 2 * target.nbytes / copy, "launch_seconds": call}


def _measure_gpu() -> dict[str, float]:
    from benchmarks.measure._triton import empty_kernel
    from gpubuf.kernels._launching import launch
    from gpubuf.tuning.search import seconds_of

    device = torch.device("cuda", torch.cuda.current_device())
    clock = clocks.of(None, "cuda")
    host = torch.zeros(COPIED, dtype=torch.uint8, pin_memory=True)
    target = torch.empty_like(host, device=device)
    source, anything = torch.zeros_like(target), torch.zeros(1, device=device)
    copy = seconds_of([lambda: target.copy_(source), lambda: source.copy_(target)])
    return {
        "copy_bytes_per_second": 2 * target.nbytes / copy,
        "bus_bytes_per_second": host.nbytes / best_of(lambda: target.copy_(host, non_blocking=True), clock, 8, 2),
        "launch_seconds": best_of(lambda: empty_kernel[(1,)](anything), clock, 20, 200),
        "graph_launch_seconds": seconds_of([lambda: launch(empty_kernel, 1, anything)]),
    }


def describe(measured: dict[str, float]) -> str:
    """The measured speeds, for people."""
    return ", ".join(f"{speed:.3g} {name.replace('_', ' ')}" for name, speed in measured.items())
