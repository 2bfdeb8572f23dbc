"""Times of operations on a GPU: replays of a CUDA graph between two events, so that the host has no part in them."""

from __future__ import annotations

import statistics
import sys
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch


@dataclass(frozen=True)
class Timing:
    """What a call takes.

    Attributes:
        seconds: median time.
        launches: of kernels of ours; None where this Triton does not tell.
        spilled: which kernels spill registers, and how many; "" where none does, or Triton does not tell.
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
        """The time of one call.

        Raises:
            UnusableError: the kernels don't compile, or don't run.
            DeviceError: the device has stopped working.
        """


class GraphTimer:
    """Times calls by replays of a CUDA graph in which they follow each other.

    Args:
        device: the GPU, the current one.
        seconds: how long the replays between two events take together, about.
        repeats: pairs of events, of which the median counts.
        unroll: calls in a graph, at least: a graph costs a launch itself.
    """

    def __init__(self, device: torch.device, seconds: float = 2e-3, repeats: int = 5, unroll: int = 32) -> None:
        self.device, self.seconds, self.repeats, self.unroll = device, seconds, repeats, unroll

    def time(self, calls: Sequence[Callable[[], Any]]) -> Timing:
        """See :class:`Timer`. Synchronises."""
        launches, spilled = self._prepare(calls)
        passes = -(-self.unroll // len(calls))
        try:
            graph = self._capture(calls, passes)
            graph.replay()
            number = max(1, min(round(self.seconds / max(self._replay(graph, 1), 1e-9)), 10_000))
            times = [self._replay(graph, number) for _ in range(self.repeats)]
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            raise self._unusable(error) from error
        return Timing(statistics.median(times) / number / (passes * len(calls)), launches, spilled)

    def _prepare(self, calls: Sequence[Callable[[], Any]]) -> tuple[int | None, str]:
        """Compile and run everything once, on a stream of its own; returns launches of a call, and what spills."""
        stream = torch.cuda.Stream(self.device)
        stream.wait_stream(torch.cuda.current_stream(self.device))
        try:
            with torch.cuda.stream(stream), launches() as seen:
                for call in calls:
                    call()
            stream.synchronize()
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            raise self._unusable(error) from error
        torch.cuda.current_stream(self.device).wait_stream(stream)
        spills = spills_of({handle for _, handle in seen})
        spilled = ", ".join(f"{name} {number}" for name, number in spills.items() if number)
        return len(seen) // len(calls) if seen else None, spilled

    def _unusable(self, error: Exception) -> Exception:
        """What an error of a candidate means: a sticky one ends the session."""
        try:
            torch.cuda.synchronize(self.device)
        except Exception as lost:
            return DeviceError(f"the GPU does not answer any more: {lost}")
        return UnusableError(f"{type(error).__name__}: {error}".partition("\n")[0])

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
        """Seconds of so many replays."""
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
    from gpubuf.tuning._triton import empty_kernel

    anything = torch.zeros(1, device=device)
    return timer.time([lambda: empty_kernel[(1,)](anything)] * 256).seconds


# What Triton tells about the kernels that were launched. Where another version doesn't, nothing is known.


@contextmanager
def launches() -> Iterator[list[tuple[str, Any]]]:
    """Collects (name, handle) of every launch of a compiled kernel."""
    import triton

    seen: list[tuple[str, Any]] = []

    def note(metadata: Any) -> None:
        found = metadata.get() if hasattr(metadata, "get") else {}
        seen.append((found.get("name", ""), found.get("function")))

    chain: Any = getattr(getattr(triton.knobs, "runtime", None), "launch_enter_hook", None)
    if not hasattr(chain, "add") or not hasattr(chain, "remove"):
        yield seen
        return
    chain.add(note)
    try:
        yield seen
    finally:
        chain.remove(note)


def spills_of(handles: set[Any]) -> dict[str, int]:
    """Spilled registers of the compiled kernels with these handles, by name; none where nothing is known."""
    import triton

    modules = [module for name, module in list(sys.modules.items()) if name.startswith("gpubuf.")]
    functions = {
        id(value): value
        for module in modules
        for value in vars(module).values()
        if isinstance(value, triton.JITFunction)
    }
    found: dict[str, int] = {}
    for function in functions.values():
        for cache in getattr(function, "device_caches", {}).values():
            compiled = cache[0] if isinstance(cache, tuple) else cache
            for kernel in compiled.values() if isinstance(compiled, dict) else ():
                if getattr(kernel, "function", None) in handles:
                    found[kernel.name] = max(found.get(kernel.name, 0), getattr(kernel, "n_spills", None) or 0)
    return found
