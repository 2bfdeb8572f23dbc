"""CUDA graphs played on the CPU: what a step dispatches is recorded once, and done again in order on the same memory.

What the host decided at the capture (a cursor that is a Python int, a beta that is a float, a shape that depends on
data) then goes wrong as it does in a CUDA graph. As on a GPU, what is captured is not run: the recorder undoes it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from gpubuf import graphs
from gpubuf.data import recording


def tensors_in(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for part in value:
            yield from tensors_in(part)


def _as_called(value: Any) -> Any:
    """The arguments of a call, safe from changes of the caller's lists."""
    return [_as_called(part) for part in value] if isinstance(value, list) else value


class Call(NamedTuple):
    operation: Any
    args: Any
    kwargs: dict[str, Any]
    results: list[Tensor]  # those whose memory the operation allocated


def _written(operation: Any, args: Any, kwargs: dict[str, Any]) -> list[Tensor]:
    """The tensors that a call changes."""
    # Operations that call others, in compiled code, have no schema, and are functional.
    arguments = operation._schema.arguments if isinstance(operation, torch._ops.OpOverload) else []
    changed: list[Tensor] = []
    for position, argument in enumerate(arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            changed += tensors_in(args[position] if position < len(args) else kwargs.get(argument.name))
    return changed


def _made(operation: Any, out: Any) -> list[Tensor]:
    """The tensors in what a call returned that have memory of their own."""
    if not isinstance(operation, torch._ops.OpOverload):
        return list(tensors_in(out))
    returned = out if isinstance(out, tuple) else (out,)
    described = zip(returned, operation._schema.returns, strict=False)
    return [tensor for value, kind in described if not kind.alias_info for tensor in tensors_in(value)]


class GraphRecorder(TorchDispatchMode):
    """Records the operations of one call of a step.

    Args:
        memory: tensors that operations reach by address (a storage's rows), which the capture must leave as they were.
    """

    def __init__(self, memory: list[Tensor] | None = None) -> None:
        super().__init__()
        self.calls: list[Call] = []
        self._before = [(tensor, tensor.clone()) for tensor in memory or []]
        self._random = torch.get_rng_state()

    supports_higher_order_operators = True

    @classmethod
    def is_infra_mode(cls) -> bool:
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func.name()
        written = _written(func, args, kwargs)
        if name.partition(".")[0] not in ("aten::set_", "aten::resize_"):
            self._before += [(tensor, tensor.detach().clone()) for tensor in written]
        args = tuple(_as_called(argument) for argument in args)
        out = func(*args, **kwargs)
        results = _made(func, out)
        if (written or results) and not name.startswith("aten::empty"):
            self.calls.append(Call(func, args, kwargs, results))
        return out

    def undo(self) -> None:
        """Leave everything as it was before the capture."""
        with torch.no_grad():
            for tensor, value in reversed(self._before):
                tensor.copy_(value)
        self._before.clear()
        torch.set_rng_state(self._random)

    @torch.no_grad()
    def replay(self) -> None:
        # What an operation does on the host (counting rows, in compiled code) is not part of a CUDA graph: it is lost.
        with recording.recorded(recording.Recording()):
            for operation, args, kwargs, results in self.calls:
                made = _made(operation, operation(*args, **kwargs))
                for result, value in zip(results, made, strict=True):
                    assert result.shape == value.shape, f"{operation.name()} has another shape than at the capture"
                    result.copy_(value)


@contextlib.contextmanager
def recorded(memory: list[Tensor] | None = None) -> Iterator[GraphRecorder]:
    """Record a step without running it, as ``torch.cuda.graph`` does."""
    recorder = GraphRecorder(memory)
    try:
        with recorder:
            yield recorder
    finally:
        recorder.undo()


class _Stream:
    """A stream that notes what it waited for."""

    def __init__(self, device: Any = None, name: str = "side", log: list[str] | None = None) -> None:
        self.device, self.name, self._log = torch.device("cpu"), name, log if log is not None else []

    def wait_stream(self, other: _Stream) -> None:
        self._log.append(f"{self.name} waits for {other.name}")


class RecordedCuda:
    """A machine whose GPU is the CPU, and whose CUDA graphs are recordings.

    Attributes:
        log: what was asked of streams and graphs, in order.
        memory: of what a capture must leave alone although it is reached by address.
        capture_error_modes: how strict each capture was to be about other threads.
        invalidated: whether the capture under way could not be ended.
    """

    def __init__(self) -> None:
        self.log: list[str] = []
        self.memory: list[Tensor] = []
        self.capture_error_modes: list[str] = []
        self.invalidated = False
        self._current = _Stream(name="main", log=self.log)

    def _end_allocation(self, device: int | None, pool: object) -> None:
        if not self.invalidated:
            raise RuntimeError("not currently recording to the pool")
        self.invalidated = False
        self.log.append("allocation leaves the pool")

    def install(self, monkeypatch: pytest.MonkeyPatch) -> RecordedCuda:
        machine = self

        class Graph:
            recorder: GraphRecorder | None = None

            def replay(self) -> None:
                machine.log.append("replay")
                assert self.recorder is not None, "nothing was captured"
                self.recorder.replay()

        @contextlib.contextmanager
        def graph(into: Graph, *, stream: _Stream, pool: object = None, capture_error_mode: str = "") -> Iterator[None]:
            machine.log.append(f"capture on {stream.name}")
            machine.capture_error_modes.append(capture_error_mode)
            with recorded(machine.memory) as into.recorder:
                yield

        @contextlib.contextmanager
        def on(stream: _Stream) -> Iterator[None]:
            previous, machine._current = machine._current, stream
            try:
                yield
            finally:
                machine._current = previous

        replacements: dict[str, Callable[..., Any]] = {
            "CUDAGraph": Graph,
            "graph": graph,
            "Stream": lambda device=None: _Stream(device, log=machine.log),
            "stream": on,
            "graph_pool_handle": lambda: (0, 1),
            "current_stream": lambda device=None: machine._current,
        }
        for name, replacement in replacements.items():
            monkeypatch.setattr(torch.cuda, name, replacement)
        monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", self._end_allocation, raising=False)
        monkeypatch.setattr(graphs, "GRAPH_DEVICES", frozenset({"cpu"}))
        monkeypatch.setattr(graphs, "cuda_present", lambda: True)
        return self
