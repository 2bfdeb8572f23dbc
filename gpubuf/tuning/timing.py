"""Times of operations on a GPU: replays of a CUDA graph between two events, so that the host has no part in them."""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch


@dataclass(frozen=True)
class Timing:
    """The time of a call.

    Attributes:
        seconds: median time.
        launches: of compiled kernels; None if there were none, as in Triton's interpreter.
        spilled: the kernels that spill registers, with the number of registers; "" if none does.
    """

    seconds: float
    launches: int | None = None
    spilled: str = ""


class UnusableError(Exception):
    """A configuration can't be used on this device; the text says why."""


class DeviceError(RuntimeError):
    """The device does not answer any more: nothing can be timed from here on."""


class Timer(Protocol):
    """Times calls that do the same to different inputs."""

    def time(self, calls: Sequence[Callable[[], Any]]) -> Timing:
        """The time of one call. For what it raises see :meth:`GraphTimer.time`."""


class GraphTimer:
    """Times calls by replays of a CUDA graph in which they follow each other.

    Args:
        device: the GPU, the current one.
        seconds: about how long the replays between two events take together.
        repeats: pairs of events; the median counts.
        unroll: least number of calls in a graph: a graph costs a launch itself.
    """

    def __init__(self, device: torch.device, seconds: float = 2e-3, repeats: int = 5, unroll: int = 32) -> None:
        self.device, self.seconds, self.repeats, self.unroll = device, seconds, repeats, unroll

    def time(self, calls: Sequence[Callable[[], Any]]) -> Timing:
        """The time of one call. Synchronises.

        Raises:
            UnusableError: the kernels don't compile, or don't run.
            DeviceError: the device has stopped working.
            torch.OutOfMemoryError: they need more memory than there is.
        """
        passes = -(-self.unroll // len(calls))
        try:
            launches, spilled = self._prepare(calls)
            graph = self._capture(calls, passes)
            graph.replay()
            number = max(1, min(round(self.seconds / max(self._replay(graph, 1), 1e-9)), 10_000))
            times = [self._replay(graph, number) for _ in range(self.repeats)]
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            try:
                torch.cuda.synchronize(self.device)
            except Exception as lost:
                raise DeviceError(f"the GPU does not answer any more: {lost}") from error
            raise UnusableError(f"{type(error).__name__}: {error}".partition("\n")[0]) from error
        return Timing(statistics.median(times) / number / (passes * len(calls)), launches, spilled)

    def _prepare(self, calls: Sequence[Callable[[], Any]]) -> tuple[int | None, str]:
        """Compile and run everything once, on a stream of its own; returns launches of a call, and the spills."""
        stream = torch.cuda.Stream(self.device)
        stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(stream), launched() as kernels:
            for call in calls:
                call()
        stream.synchronize()
        torch.cuda.current_stream(self.device).wait_stream(stream)
        spills = sorted({f"{kernel.name} {n}" for kernel in kernels if (n := getattr(kernel, "n_spills", 0))})
        return len(kernels) // len(calls) if kernels else None, ", ".join(spills)

    def _capture(self, calls: Sequence[Callable[[], Any]], passes: int) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        # Results stay alive for a pass, so that one call does not write where the one before it did.
        kept: deque[Any] = deque(maxlen=len(calls))
        with torch.cuda.graph(graph):
            for _ in range(passes):
                for call in calls:
                    kept.append(call())
        return graph

    def _replay(self, graph: torch.cuda.CUDAGraph, number: int) -> float:
        """Seconds of ``number`` replays."""
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(number):
            graph.replay()
        end.record()
        end.synchronize()
        milliseconds: float = start.elapsed_time(end)
        return milliseconds / 1e3


def copy_bandwidth(timer: Timer, device: torch.device, n_bytes: int = 2**29) -> float:
    """Bytes a second, read and written, of a copy on the device."""
    source = torch.zeros(n_bytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * n_bytes / timer.time([lambda: target.copy_(source), lambda: source.copy_(target)]).seconds


def launch_seconds(timer: Timer, device: torch.device) -> float:
    """Time of a kernel that does nothing, one of many in a graph."""
    from gpubuf.kernels._launching import launch
    from gpubuf.tuning._triton import empty_kernel

    anything = torch.zeros(1, device=device)
    return timer.time([lambda: launch(empty_kernel, 1, anything)] * 256).seconds


@contextmanager
def launched() -> Iterator[list[Any]]:
    """Collects the compiled kernel of every launch; none in Triton's interpreter."""
    import triton

    kernels: list[Any] = []
    run = triton.JITFunction.run

    def recorded(*args: Any, **options: Any) -> Any:
        kernel = run(*args, **options)
        kernels.append(kernel)
        return kernel

    triton.JITFunction.run = recorded
    try:
        yield kernels
    finally:
        triton.JITFunction.run = run
