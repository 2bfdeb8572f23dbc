"""A training step as one CUDA graph: ``step = gpubuf.capture(step)``."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch

from gpubuf.data.recording import CaptureError, Lock, Recording, capture_under_way, recorded, watched
from gpubuf.data.storage.host_memory import cuda_present
from gpubuf.graph_checks import Devices, NoHostWork, host_random_state, refuse_host_random
from gpubuf.graph_values import Arguments, Unchanged, checked_results, devices_of, fresh

__all__ = ["CaptureError", "Captured", "capture"]

GRAPH_DEVICES = frozenset({"cuda"})
"""Types of devices whose work can be captured."""


def capture(step: Callable[..., Any], *, warmup: int = 3, device: torch.device | str | None = None) -> Captured:
    """Capture a step in a CUDA graph on a GPU, and replay it from then on: one launch instead of hundreds.

    The first ``warmup`` calls run ``step`` on a side stream. The next call captures it; that call and all later ones
    replay the graph. n calls are n steps, with the results of n calls of ``step`` itself. Without a GPU, or if the step
    works on the CPU, every call runs ``step``. The results and the rules are the same:

    * Tensors (in TensorDicts, tensorclasses, lists, tuples and dictionaries too) may have other values at each call,
      but not other shapes, dtypes or devices. All other arguments are part of the graph and must not change.
    * The step must not change a tensor that it was given. Containers are passed as copies: nobody else sees entries
      that the step adds to a TensorDict. It returns everything that its caller needs.
    * It returns tensors, or TensorDicts, tuples, lists or dictionaries of them, or None. They have no gradient. A
      replay returns the same tensors every time, with new values: ``clone()`` those that you keep.
    * Its work on the host, apart from launches, happens once, at the capture. Only the work of its buffers (``len()``,
      the order of threads and streams) is repeated at each replay. So the step must not read a value of a tensor (that
      would wait for the GPU), branch on one, or draw random numbers on the CPU.

    Call it from one thread at a time. Only the call that captures synchronises. ``docs/graphs.md`` has a whole training
    step, and a list of what can't be captured.

    Args:
        step: the function. It reaches networks, optimisers and buffers itself, not as arguments.
        warmup: number of calls before the capture, at least 1, so that everything is allocated that a first use needs.
        device: of the step; ``"cpu"`` never captures. None: the device of the arguments, the results and the buffers of
            the first call, or else of all operations of the second one.

    Returns:
        The captured step, to be called as ``step``.

    Raises:
        ValueError: ``warmup`` is less than 1.
        RuntimeError: there is no such device.
    """
    return Captured(step, warmup=warmup, device=device)


class Captured:
    """A step that is captured once it is warm, and then replayed. :func:`capture` makes it."""

    def __init__(self, step: Callable[..., Any], *, warmup: int = 3, device: torch.device | str | None = None) -> None:
        if warmup < 1:
            raise ValueError(f"warmup must be at least 1, got {warmup}: the first call allocates what the graph uses")
        self._requested = None if device is None else torch.device(device)
        if self._requested is not None and self._requested.type == "cuda" and not cuda_present():
            raise RuntimeError(f"device={str(device)!r} was requested, but CUDA is not available")
        self._step = step
        self._warmup = warmup
        self._stream: torch.cuda.Stream | None = None
        self.reset()

    @property
    def captured(self) -> bool:
        """Whether calls replay a graph."""
        return self._graph is not None

    def reset(self) -> None:
        """Drop the graph, and forget the arguments: the next call is the first of a new warm-up."""
        self._graph: torch.cuda.CUDAGraph | None = None
        self._arguments: Arguments | None = None
        self._device: torch.device | None = None
        self._left = self._warmup
        self._results: Any = None
        self._recording = Recording()
        self._locks: list[Lock] = []
        self._kept: Any = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """One step.

        Raises:
            ValueError: an argument is not like that of the first call, or the step breaks the rules of
                :func:`capture`.
            CaptureError: the step can't be captured; nothing has run. Or a buffer was moved since the capture.
        """
        if self._arguments is None:
            return self._first(args, kwargs)
        if self._device is None:
            return self._watched(self._arguments, args, kwargs)
        if self._graph is None:
            if self._left or not self._can_capture:
                return self._eager(self._arguments, args, kwargs)
            self._capture(self._arguments, args, kwargs)
        return self._replay(self._arguments, args, kwargs)

    @property
    def _can_capture(self) -> bool:
        return self._device is not None and self._device.type in GRAPH_DEVICES

    # Before the capture

    def _first(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The first call: it also shows where the step works."""
        arguments = Arguments(args, kwargs)
        unchanged = Unchanged(arguments.tensors(args, kwargs))
        self._locks = []
        with watched(self._locks):
            results = self._eager(arguments, args, kwargs)
        unchanged.check()
        self._arguments = arguments
        of_locks = {lock.device for lock in self._locks if lock.device is not None}
        self._device = self._requested or _graph_device(arguments.devices | devices_of(results) | of_locks)
        if self._device is None and not cuda_present():
            self._device = torch.device("cpu")
        return results

    def _watched(self, arguments: Arguments, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The second call, if the first has not shown where the step works: the devices of all operations tell."""
        # Not the first one, in which code may be compiled.
        with Devices() as seen:
            results = self._eager(arguments, args, kwargs)
        self._device = _graph_device(seen.found) or torch.device("cpu")
        return results

    def _eager(self, arguments: Arguments, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._can_capture:
            # The capture gets the same tensors: kernels are compiled for the alignment of their arguments.
            given, named = arguments.static(args, kwargs)
        else:
            arguments.tensors(args, kwargs)
            given, named = arguments.passed(args, kwargs)
        with self._aside():
            results = checked_results(self._step(*given, **named))
        if self._left:
            self._left -= 1
        return results

    @contextlib.contextmanager
    def _aside(self) -> Iterator[None]:
        """Run on the side stream, in order with the current one, unless nothing will be captured.

        Autograd and libraries keep objects per stream; they are made on the stream that captures.
        """
        device = self._device or self._requested
        if not cuda_present() or (device is not None and device.type not in GRAPH_DEVICES):
            yield
            return
        current = torch.cuda.current_stream(device)
        side = self._side(device)
        side.wait_stream(current)
        with torch.cuda.stream(side):
            yield
        current.wait_stream(side)

    def _side(self, device: torch.device | None) -> torch.cuda.Stream:
        stream = self._stream
        if stream is None or (device is not None and device.index not in (None, stream.device.index)):
            stream = self._stream = torch.cuda.Stream(device)
        return stream

    # The capture

    def _capture(self, arguments: Arguments, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        assert self._device is not None
        stray = [device for device in arguments.devices if device.type != self._device.type]
        if stray:
            raise CaptureError(
                f"a tensor was passed that is on {stray[0]}, but the step works on {self._device}: move it there "
                "before the call, for a graph reads from one place"
            )
        recording, checks, graph = Recording(), NoHostWork(self._device), torch.cuda.CUDAGraph()
        given, named = arguments.static(args, kwargs)
        unchanged = Unchanged(arguments.inputs)
        random_state = host_random_state()
        current, side = torch.cuda.current_stream(self._device), self._side(self._device)
        # Other threads that use these buffers during the capture wait for this stream, not for the capturing one.
        for lock in self._locks:
            lock.joined(current)
        side.wait_stream(current)
        try:
            with recorded(recording), capture_under_way(), _captured_into(graph, side), checks:
                results = checked_results(self._step(*given, **named))
            refuse_host_random(random_state)
            unchanged.check()
        except Exception as error:
            recording.abandon()
            _explain(error)
            raise
        current.wait_stream(side)
        for lock in recording.locks:
            lock.joined(current)
            recording.holds(lock, "storage")
            recording.holds(lock.storage, "table", "_ring")
        self._graph, self._results, self._recording, self._kept = graph, results, recording, checks.kept

    # After it

    def _replay(self, arguments: Arguments, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        assert self._graph is not None
        arguments.fill(args, kwargs)
        self._recording.replay(self._graph.replay)
        return fresh(self._results)

    def __repr__(self) -> str:
        name = getattr(self._step, "__qualname__", repr(self._step))
        state = "captured" if self.captured else f"{self._left} calls before the capture"
        if self._device is not None and not self._can_capture:
            state = f"runs eagerly on {self._device}"
        return f"{type(self).__name__}({name}, {state})"


#: Graphs whose capture CUDA has invalidated. They stay alive: PyTorch's allocator of pinned memory refers to them.
_broken: list[torch.cuda.CUDAGraph] = []


@contextlib.contextmanager
def _captured_into(graph: torch.cuda.CUDAGraph, stream: torch.cuda.Stream) -> Iterator[None]:
    """Capture all launches of the block. Other threads may use CUDA meanwhile.

    A capture that fails leaves everything as it was before. PyTorch alone does not do that: if CUDA invalidates the
    capture, it leaves the stream switched, the allocator in the graph's pool, and its random generator captured.
    """
    pool = torch.cuda.graph_pool_handle()
    with torch.cuda.stream(stream):
        try:
            with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
                yield
        except BaseException:
            try:
                torch._C._cuda_endAllocateToPool(stream.device.index, pool)
            except RuntimeError:
                # The capture has ended in order: the allocator has left the pool by itself.
                pass
            else:
                _broken.append(graph)
                # A capture that succeeds releases the generator at its end.
                with contextlib.suppress(RuntimeError), torch.cuda.graph(torch.cuda.CUDAGraph(), stream=stream):
                    torch.ones((), device=stream.device)
            raise


def _graph_device(found: set[torch.device]) -> torch.device | None:
    """The one device of ``found`` whose work can be captured, if there is one."""
    devices = sorted((device for device in found if device.type in GRAPH_DEVICES), key=str)
    if len(devices) > 1:
        raise ValueError(f"the step works on {' and '.join(map(str, devices))}: give capture() a device")
    return devices[0] if devices else None


def _explain(error: BaseException) -> None:
    """Raise a :class:`CaptureError` if the capture is at fault."""
    # Ending a capture that has failed fails too: the reason is what came before.
    reason: BaseException | None = error
    while reason is not None:
        if isinstance(reason, CaptureError):
            if reason is error:
                return
            raise reason from None
        reason = reason.__context__
    if isinstance(error, RuntimeError) and "captur" in str(error):
        first = error.__context__ if isinstance(error.__context__, RuntimeError) else error
        raise CaptureError(f"the step can't be captured in a CUDA graph: {first}") from error
