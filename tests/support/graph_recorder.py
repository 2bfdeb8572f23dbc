"""CUDA graphs played on the CPU: what a step dispatches is recorded once, and done again in order on the same memory.

What the host decided at the capture (a cursor that is a Python int, a beta that is a float, a shape that depends on
data) then goes wrong as it does in a CUDA graph. As on a GPU, what is captured is not run: the recorder undoes it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
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
    stream: Any = None


class Wait(NamedTuple):
    stream: Any
    other: Any


def ordered(entries: Iterable[Call | Wait], main: Any, late: bool) -> list[Call]:
    """The calls in an order in which a GPU may run them: those of other streams as early or late as waits let them.

    Raises:
        RuntimeError: ``main`` does not wait for all of them.
    """
    number, begun = 0, dict[Any, int]()
    waiting: dict[Any, list[tuple[int, int, Call]]] = {}
    found: list[tuple[int, int, Call]] = []
    for entry in entries:
        if isinstance(entry, Call):
            if entry.stream is main:
                number += 1
                found.append((number, 0, entry))
            else:
                waiting.setdefault(entry.stream, []).append((begun[entry.stream], 1, entry))
        elif entry.stream is main:
            found += [(number if late else early, 1, call) for early, _, call in waiting.pop(entry.other, [])]
        elif entry.other is main:
            begun[entry.stream] = number
        else:
            # Whoever waits for this stream waits for the other one, too.
            waiting[entry.stream] = waiting.pop(entry.other, []) + waiting.get(entry.stream, [])
    if waiting:
        raise RuntimeError("capturing stream has unjoined work")
    return [call for _, _, call in sorted(found, key=lambda each: each[:2])]


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
        current: gives the stream of the next call.

    Attributes:
        entries: calls, and waits of streams for others.
    """

    def __init__(self, memory: list[Tensor] | None = None, current: Callable[[], Any] = lambda: None) -> None:
        super().__init__()
        self.entries: list[Call | Wait] = []
        self._current = current
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
        if name.startswith("aten::empty"):
            # The step runs, unlike on a GPU, and may read what only a replay has written.
            out.zero_()
        elif written or results:
            self.entries.append(Call(func, args, kwargs, results, self._current()))
        return out

    @property
    def calls(self) -> list[Call]:
        return [entry for entry in self.entries if isinstance(entry, Call)]

    def undo(self) -> None:
        """Leave everything as it was before the capture."""
        with torch.no_grad():
            for tensor, value in reversed(self._before):
                tensor.copy_(value)
        self._before.clear()
        torch.set_rng_state(self._random)

    @torch.no_grad()
    def replay(self, calls: list[Call] | None = None) -> None:
        # What an operation does on the host (counting rows, in compiled code) is not part of a CUDA graph: it is lost.
        with recording.recorded(recording.Recording()):
            for operation, args, kwargs, results, _ in self.calls if calls is None else calls:
                made = _made(operation, operation(*args, **kwargs))
                for result, value in zip(results, made, strict=True):
                    assert result.shape == value.shape, f"{operation.name()} has another shape than at the capture"
                    result.copy_(value)


@contextlib.contextmanager
def recorded(memory: list[Tensor] | None = None, current: Callable[[], Any] = lambda: None) -> Iterator[GraphRecorder]:
    """Record a step without running it, as ``torch.cuda.graph`` does."""
    recorder = GraphRecorder(memory, current)
    try:
        with recorder:
            yield recorder
    finally:
        recorder.undo()


class _Stream:
    """A stream that notes what it waited for."""

    def __init__(self, machine: RecordedCuda, name: str = "side") -> None:
        self.device, self.name, self._machine = torch.device("cpu"), name, machine

    def wait_stream(self, other: _Stream) -> None:
        self._machine.log.append(f"{self.name} waits for {other.name}")
        if self._machine.recorder is not None:
            self._machine.recorder.entries.append(Wait(self, other))


class RecordedCuda:
    """A machine whose GPU is the CPU, and whose CUDA graphs are recordings.

    Attributes:
        log: what was asked of streams and graphs, in order.
        memory: of what a capture must leave alone although it is reached by address.
        capture_error_modes: how strict each capture was to be about other threads.
        invalidated: whether the capture under way could not be ended.
        late: whether replays run branches as late as they may, rather than as early.
        recorder: of the capture under way.
    """

    def __init__(self) -> None:
        self.log: list[str] = []
        self.memory: list[Tensor] = []
        self.capture_error_modes: list[str] = []
        self.invalidated = self.late = False
        self.recorder: GraphRecorder | None = None
        self._current = _Stream(self, "main")

    def _end_allocation(self, device: int | None, pool: object) -> None:
        if not self.invalidated:
            raise RuntimeError("not currently recording to the pool")
        self.invalidated = False
        self.log.append("allocation leaves the pool")

    def install(self, monkeypatch: pytest.MonkeyPatch) -> RecordedCuda:
        machine = self
        # The recorder is a mode, which a CUDA graph is not: what looks for modes finds none.
        monkeypatch.setattr("gpubuf.learner._modes", lambda: 0)

        class Graph:
            recorder: GraphRecorder | None = None
            orders: dict[bool, list[Call]]

            def replay(self) -> None:
                machine.log.append("replay")
                assert self.recorder is not None, "nothing was captured"
                self.recorder.replay(self.orders[machine.late])

        @contextlib.contextmanager
        def graph(into: Graph, *, stream: _Stream, pool: object = None, capture_error_mode: str = "") -> Iterator[None]:
            machine.log.append(f"capture on {stream.name}")
            machine.capture_error_modes.append(capture_error_mode)
            with recorded(machine.memory, lambda: machine._current) as machine.recorder:
                try:
                    yield
                finally:
                    into.recorder, machine.recorder = machine.recorder, None
            into.orders = {late: ordered(into.recorder.entries, stream, late) for late in (False, True)}

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
            "Stream": lambda device=None: _Stream(machine),
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
