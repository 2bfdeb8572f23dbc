"""A training step as one CUDA graph: ``step = gpubuf.capture(step)``."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterable, Iterator
from operator import attrgetter, itemgetter
from sys import getrefcount
from typing import Any, NamedTuple, Never

import numpy as np
import torch
from tensordict import LazyStackedTensorDict, TensorDict, TensorDictBase, is_non_tensor, is_tensorclass
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from gpubuf.data.recording import CaptureError, RecordedOperation, Recording, capture_under_way, recorded, watched
from gpubuf.data.storage.host_memory import cuda_present, views_of
from gpubuf.kernels.config import launches_in_graph
from gpubuf.kernels.rows import arena_offsets

SLOTS = 4
"""Pieces of memory for results: who keeps more of them gets more."""

Map = Callable[[str, Tensor], Tensor]
"""From the place of a tensor, and the tensor, to its replacement."""

Call = tuple[tuple[Any, ...], dict[str, Any]]
"""Positional arguments and keyword arguments."""


class TensorKind(NamedTuple):
    """The properties of a tensor argument that must not change."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    def __str__(self) -> str:
        return f"a tensor of shape {self.shape}, {self.dtype}, on {self.device}"


class Container(NamedTuple):
    """The properties of a container argument that must not change."""

    kind: type
    extent: tuple[Any, ...]

    def __str__(self) -> str:
        return f"a {self.kind.__name__} of {self.extent}"


class Constant:
    """An argument that becomes part of the graph."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Constant) or type(self.value) is not type(other.value):
            return False
        try:
            return self.value is other.value or bool(self.value == other.value)
        except (RuntimeError, ValueError):
            # Comparing arrays gives an array, not one answer.
            return False

    __hash__ = None  # type: ignore[assignment]

    def __str__(self) -> str:
        return repr(self.value)


def _is_tensordict(value: Any) -> bool:
    return isinstance(value, TensorDictBase) or is_tensorclass(value)


def _inside(value: Any) -> list[tuple[Any, Any]] | None:
    """The parts of a container by key, in an order that does not depend on how it was filled; None for no container."""
    if isinstance(value, LazyStackedTensorDict):
        return list(enumerate(value.tensordicts))
    if _is_tensordict(value) and not is_non_tensor(value):
        return sorted(value.items())
    if isinstance(value, dict):
        return sorted(value.items(), key=lambda item: repr(item[0]))
    if isinstance(value, list | tuple):
        return list(enumerate(value))
    return None


def describe(value: Any, path: str, out: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    """Enter the fixed properties of ``value`` into ``out``, and its tensors into ``tensors``, by their places."""
    if isinstance(value, Tensor):
        tensors[path] = value
        out[path] = TensorKind(tuple(value.shape), value.dtype, value.device)
        return
    parts = _inside(value)
    if parts is None:
        out[path] = Constant(value.data if is_non_tensor(value) else value)
        return
    extent = tuple(value.batch_size) if _is_tensordict(value) else tuple(key for key, _ in parts)
    out[path] = Container(type(value), extent)
    for key, part in parts:
        describe(part, f"{path}[{key!r}]", out, tensors)


def mapped(value: Any, of_tensor: Map, path: str) -> Any:
    """``value`` in new containers, with ``of_tensor`` applied to each tensor and its place: see :func:`describe`."""
    if isinstance(value, Tensor):
        return of_tensor(path, value)
    if isinstance(value, LazyStackedTensorDict):
        stacked = [mapped(part, of_tensor, f"{path}[{i}]") for i, part in enumerate(value.tensordicts)]
        return LazyStackedTensorDict(*stacked, stack_dim=value.stack_dim)
    if _is_tensordict(value):
        if is_non_tensor(value):
            return value
        if of_tensor is _same:
            # A fifth of the time, and every call of a step that is not captured comes here.
            return value.copy()

        def entry(key: Any, tensor: Tensor) -> Tensor:
            names = key if isinstance(key, tuple) else (key,)
            return of_tensor(path + "".join(f"[{name!r}]" for name in names), tensor)

        return value.named_apply(entry, nested_keys=True)
    if isinstance(value, dict):
        return {key: mapped(part, of_tensor, f"{path}[{key!r}]") for key, part in value.items()}
    if isinstance(value, list | tuple):
        parts = [mapped(part, of_tensor, f"{path}[{i}]") for i, part in enumerate(value)]
        if isinstance(value, list):
            return parts
        return type(value)(*parts) if hasattr(value, "_fields") else tuple(parts)
    return value


def _same(path: str, tensor: Tensor) -> Tensor:
    return tensor


def _described(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Tensor]]:
    out: dict[str, Any] = {}
    tensors: dict[str, Tensor] = {}
    for i, value in enumerate(args):
        describe(value, f"argument {i}", out, tensors)
    for name, value in kwargs.items():
        describe(value, name, out, tensors)
    return out, tensors


class Arguments:
    """The arguments of a step: their fixed properties at the first call, and the tensors in which a graph reads them.

    Attributes:
        devices: of the tensors among them.
        inputs: the tensors that the graph reads, by their places among the arguments.

    Raises:
        ValueError: a tensor among them requires gradients.
    """

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._kinds, tensors = _described(args, kwargs)
        for path, tensor in tensors.items():
            if tensor.requires_grad:
                raise ValueError(
                    f"{path} requires gradients, which would end at the graph's copy of it: detach it, or let the step "
                    "reach it by itself, as it does its networks"
                )
        self.inputs: dict[str, Tensor] = {}
        self.devices = {tensor.device for tensor in tensors.values()}

    def tensors(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Tensor]:
        """The tensors among the arguments, checked against those of the first call.

        Raises:
            ValueError: an argument has changed; the message states both sides.
        """
        if not args and not kwargs and not self._kinds:
            return {}
        kinds, tensors = _described(args, kwargs)
        if kinds == self._kinds:
            return tensors
        for path in dict.fromkeys((*self._kinds, *kinds)):
            was, now = (found.get(path) for found in (self._kinds, kinds))
            if was != now:
                before, after = ("missing" if kind is None else str(kind) for kind in (was, now))
                fixed = isinstance(was, Constant) or isinstance(now, Constant)
                reason = "; what is no tensor is part of the graph, or reset() the step" if fixed else ""
                raise ValueError(f"{path} was {before} at the first call, now it is {after}{reason}")
        raise AssertionError("two different sets of arguments have a difference")

    def passed(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
        """The arguments as the step gets them: in copied containers, so that only the step sees what it adds."""
        return self._mapped(args, kwargs, _same)

    def static(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
        """The arguments as the graph gets them: their tensors are in :attr:`inputs`, which :meth:`fill` overwrites."""
        if self.inputs:
            self.fill(args, kwargs)
        else:
            for path, tensor in self.tensors(args, kwargs).items():
                self.inputs[path] = tensor.clone(memory_format=torch.contiguous_format)
        return self._mapped(args, kwargs, lambda path, tensor: self.inputs[path])

    @staticmethod
    def _mapped(args: tuple[Any, ...], kwargs: dict[str, Any], of_tensor: Map) -> Call:
        return (
            tuple(mapped(value, of_tensor, f"argument {i}") for i, value in enumerate(args)),
            {name: mapped(value, of_tensor, name) for name, value in kwargs.items()},
        )

    def fill(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Copy the tensors among the arguments to where the graph reads them. No host sync.

        Raises:
            ValueError: as :meth:`tensors`.
        """
        tensors = self.tensors(args, kwargs)
        if tensors:
            torch._foreach_copy_(list(self.inputs.values()), [tensors[path] for path in self.inputs])


class Unchanged:
    """Makes sure that a step does not change its arguments in place: their owner would not see what a replay does."""

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        self._tensors = tensors
        self._versions = {path: tensor._version for path, tensor in tensors.items() if not tensor.is_inference()}

    def check(self) -> None:
        """Call it after the step.

        Raises:
            ValueError: the step has changed a tensor in place.
        """
        for path, version in self._versions.items():
            if self._tensors[path]._version != version:
                raise ValueError(f"the step changes {path} in place, which its caller would not see: return a tensor")


def _result(path: str, tensor: Tensor) -> Tensor:
    return tensor.detach()


def checked_results(value: Any) -> Any:
    """The results of a step, without gradients.

    Raises:
        ValueError: a replay could not bring one of them up to date.
    """
    kinds: dict[str, Any] = {}
    describe(value, "the result", kinds, {})
    for path, kind in kinds.items():
        if isinstance(kind, Constant) and kind.value is not None:
            raise ValueError(
                f"{path} is {kind.value!r}, a {type(kind.value).__name__}, which would be the same at every replay: a "
                "step returns tensors, TensorDicts, tuples, lists or dictionaries of them, or None"
            )
    return mapped(value, _result, "the result")


def maker(value: Any, path: str, places: dict[str, int]) -> Callable[[list[Tensor]], Any]:
    """What makes ``value`` of a list of tensors, in new containers.

    Args:
        value: what is made, at ``path``; see :func:`describe`.
        places: which tensor of the list goes where. Others are those of ``value``.
    """
    if isinstance(value, Tensor):
        place = places.get(path)
        return (lambda tensors: value) if place is None else itemgetter(place)
    if type(value) not in (TensorDict, dict, list, tuple):
        return lambda tensors: mapped(value, lambda at, own: tensors[places[at]] if at in places else own, path)
    entries: Iterable[tuple[Any, Any]] = enumerate(value) if isinstance(value, list | tuple) else value.items()
    parts = [(key, maker(part, f"{path}[{key!r}]", places)) for key, part in entries]
    if type(value) is TensorDict:
        options, new = (value.batch_size, value.device, value.names if any(value.names) else None), value._new_unsafe
        return lambda tensors: new({key: make(tensors) for key, make in parts}, *options, nested=False)
    if type(value) is dict:
        return lambda tensors: {key: make(tensors) for key, make in parts}
    return lambda tensors: type(value)([make(tensors) for _, make in parts])


class _Slot:
    """Memory for results, uint8 ``[n_bytes]``, and views of it."""

    def __init__(self, memory: Tensor, tensors: list[Tensor]) -> None:
        self.memory, self.tensors, self.storage = memory, tensors, memory.untyped_storage()
        self._n_bytes, self._cdata = memory.nbytes, self.storage._cdata
        self._users = self._count()

    def _count(self) -> int:
        """How many hold the memory, tensors as well as variables of Python."""
        return torch._C._storage_Use_Count(self._cdata) + getrefcount(self.storage)

    def take(self) -> bool:
        """Have the memory from the allocator anew, if nobody holds it, nor has a view of it as an array."""
        if self._count() != self._users or not self.storage.resizable():
            return False
        self.storage.resize_(0)
        self.storage.resize_(self._n_bytes)
        return True


class Results:
    """The results of a graph, which each replay writes anew: they are given out as copies, in one piece of memory.

    That is used again when nobody holds a tensor in it: no variable, nothing that autograd has saved. It goes back to
    the allocator and is asked for anew, so that it is reused as that of any tensor is: not before the work of other
    streams that ``record_stream`` has named.

    Args:
        value: what the step returned, while it is captured. The graph's last launches bring it together.
        device: of the graph. Tensors elsewhere are constants.
    """

    def __init__(self, value: Any, device: torch.device) -> None:
        tensors: dict[str, Tensor] = {}
        describe(value, "", {}, tensors)
        self._slots: list[_Slot] = []
        self._models = {path: each for path, each in tensors.items() if each.device.type == device.type}
        self._made_of = maker(value, "", {path: place for place, path in enumerate(self._models)})
        self._offsets, n_bytes = arena_offsets([each.nbytes for each in self._models.values()], 1)
        self._arena = torch.empty(n_bytes, dtype=torch.uint8, device=device)
        if self._models:
            torch._foreach_copy_(self._views(self._arena), list(self._models.values()))

    def _views(self, memory: Tensor) -> list[Tensor]:
        return views_of(memory, list(self._models.values()), self._offsets)

    def copies(self) -> Any:
        """They, as the last replay has left them, in new containers. One copy, no host sync."""
        for slot in self._slots:
            if slot.take():
                break
        else:
            # What is made in inference mode can't be written to outside of it.
            with torch.inference_mode(False):
                memory = torch.empty_like(self._arena)
                slot = _Slot(memory, self._views(memory))
            self._slots = [*self._slots[1 - SLOTS :], slot]
        slot.memory.copy_(self._arena)
        # Each is a tensor of its own: what is done to it is not done to that of another replay.
        return self._made_of([*map(attrgetter("data"), slot.tensors)])


def devices_of(value: Any) -> set[torch.device]:
    """The devices of the tensors in ``value``."""
    tensors: dict[str, Tensor] = {}
    describe(value, "", {}, tensors)
    return {tensor.device for tensor in tensors.values()}


_READS = "reads a value of a tensor on the host (as .item(), float(x) and `if x:` do), which waits for the GPU"
_SIZE = "has a result whose size only the GPU knows; masks and torch.where keep sizes fixed"

SYNCHRONISING = {
    "aten::_local_scalar_dense": _READS,
    "aten::equal": _READS,
    "aten::is_nonzero": _READS,
    "aten::nonzero": _SIZE,
    "aten::masked_select": _SIZE,
    "aten::_unique": _SIZE,
    "aten::_unique2": _SIZE,
    "aten::unique_dim": _SIZE,
    "aten::unique_consecutive": _SIZE,
    "aten::unique_dim_consecutive": _SIZE,
    "aten::bincount": _SIZE,
}
"""Operations that wait for the GPU, and why."""

_INDEXING = frozenset({"aten::index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_"})
_COPIES = frozenset({"aten::copy_", "aten::copy", "aten::_to_copy", "aten::_foreach_copy_"})
_HOST = "which a replay would not do again: work on the GPU, or outside of the step"


def tensors_in(values: Iterable[Any]) -> Iterator[Tensor]:
    """The tensors among the arguments or results of an operation, and in lists of them."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from tensors_in(value)


def _masks(schema_name: str, args: tuple[Any, ...]) -> bool:
    """Whether an indexing operation has to count the elements that a mask selects."""
    if not any(index.dtype in (torch.bool, torch.uint8) for index in tensors_in(args[1])):
        return False
    # With one value for all of them it is a masked_fill_, which counts nothing.
    return schema_name == "aten::index" or args[2].numel() != 1


def _mutated(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[Tensor]:
    for position, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[position] if position < len(args) else kwargs.get(argument.name)
            yield from tensors_in((value,))


def host_random_state() -> dict[str, bytes]:
    """The states of the random generators of the host, by name."""
    return {
        "torch's CPU generator": torch.get_rng_state().numpy().tobytes(),
        "Python's random": repr(random.getstate()).encode(),
        "numpy.random": repr(np.random.get_state()).encode(),
    }


def refuse_host_random(before: dict[str, bytes]) -> None:
    """Raise if the step has drawn random numbers on the host.

    Raises:
        CaptureError: it has.
    """
    for name, state in host_random_state().items():
        if state != before[name]:
            raise CaptureError(f"the step can't be captured: it draws from {name}, {_HOST}")


class _Watch(TorchDispatchMode):
    """A mode that changes neither operations nor compiled code."""

    supports_higher_order_operators = True

    @classmethod
    def is_infra_mode(cls) -> bool:
        """True: compiled code runs under this mode, instead of the Python code that it was compiled from."""
        return True


class Devices(_Watch):
    """Collects the devices of the tensors of all operations.

    Attributes:
        found: those devices.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found: set[torch.device] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.found |= {tensor.device for tensor in tensors_in((*args, out))}
        return out


class NoHostWork(_Watch):
    """Refuses every operation that a graph on ``device`` can't hold, at the line of the step that calls it.

    Attributes:
        kept: memory that the graph uses and that is older than the graph. While it is kept, nobody else gets it.

    Raises:
        CaptureError: an operation waits for the GPU, copies between host and GPU, or works on the host.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._type = device.type
        self.kept: dict[int, Any] = {}
        self._made: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not isinstance(func, torch._ops.OpOverload):
            # An operation that calls others, as compiled code has. Its parts were checked when it was compiled.
            return func(*args, **kwargs)
        given = list(tensors_in((*args, *kwargs.values())))
        self._check_before(func, args, kwargs, given)
        self._keep(given)
        out = func(*args, **kwargs)
        results = list(tensors_in(out if isinstance(out, list | tuple) else (out,)))
        seeded = torch.Tag.nondeterministic_seeded in func.tags
        for tensor in results:
            if self._on_host(tensor) and (tensor.ndim > 0 or seeded):
                # Kernels get numbers as CPU tensors without dimensions. They are constants of the graph.
                self._refuse(func, f"makes a tensor on the CPU, {_HOST}")
        self._note(results)
        return out

    def _check_before(self, func: Any, args: Any, kwargs: dict[str, Any], given: list[Tensor]) -> None:
        name = func._schema.name
        ours = [tensor for tensor in given if tensor.device.type == self._type]
        if ours and name in SYNCHRONISING:
            self._refuse(func, SYNCHRONISING[name])
        if ours and name == "aten::repeat_interleave" and kwargs.get("output_size") is None:
            self._refuse(func, _SIZE)
        if ours and name in _INDEXING and _masks(name, args):
            self._refuse(func, f"is indexed by a mask: it {_SIZE}")
        if name in _COPIES and self._type != "cpu":
            there = kwargs.get("device")
            if len({tensor.device.type for tensor in given} | ({torch.device(there).type} if there else set())) > 1:
                self._refuse(func, "copies between host and GPU: pass the tensor as an argument, on the GPU")
        if any(self._on_host(tensor) for tensor in _mutated(func, args, kwargs)):
            self._refuse(func, f"changes a tensor on the CPU, {_HOST}")

    def _on_host(self, tensor: Tensor) -> bool:
        return self._type != "cpu" and tensor.device.type == "cpu"

    def _refuse(self, func: Any, reason: str) -> None:
        raise CaptureError(f"the step can't be captured in a CUDA graph: {func.name()} {reason}")

    def _keep(self, given: list[Tensor]) -> None:
        for tensor in given:
            memory = self._memory(tensor)
            if memory is not None and memory.data_ptr() not in self._made:
                self.kept[memory.data_ptr()] = memory

    def _note(self, results: list[Tensor]) -> None:
        for tensor in results:
            memory = self._memory(tensor)
            if memory is not None and memory.data_ptr() not in self.kept:
                self._made.add(memory.data_ptr())

    def _memory(self, tensor: Tensor) -> Any:
        # Tensors of other kinds, such as fake ones, may have no memory.
        plain = type(tensor) in (Tensor, torch.nn.Parameter, torch.nn.Buffer)
        return tensor.untyped_storage() if plain and tensor.device.type == self._type else None


__all__ = ["CaptureError", "Captured", "capture"]

GRAPH_DEVICES = frozenset({"cuda"})
"""Types of devices whose work can be captured."""


def capture(
    step: Callable[..., Any],
    *,
    warmup: int = 3,
    device: torch.device | str | None = None,
    **gone: Never,
) -> Captured:
    """Capture a step in a CUDA graph on a GPU, and replay it from then on: one launch instead of hundreds.

    The first ``warmup`` calls run ``step`` on a side stream. The next call captures it; that call and all later ones
    replay the graph. n calls are n steps, with the results of n calls of ``step`` itself; with ``prefetch`` and rows on
    the GPU alone replays have a batch ahead (docs/prefetch.md). Without a GPU, or if the step works on the CPU, every
    call runs ``step``. The results and the rules are the same:

    * Tensors (in TensorDicts, tensorclasses, lists, tuples and dictionaries too) may have other values at each call,
      but not other shapes, dtypes or devices. All other arguments are part of the graph and must not change.
    * The step must not change a tensor that it was given. Containers are passed as copies: nobody else sees entries
      that the step adds to a TensorDict. It returns everything that its caller needs.
    * It returns tensors, or TensorDicts, tuples, lists or dictionaries of them, or None. They have no gradient, and no
      later call changes them.
    * Its work on the host, apart from launches, happens once, at the capture. Only the work of its buffers (``len()``,
      the order of threads and streams) is repeated at each replay. So the step must not read a value of a tensor (that
      would wait for the GPU), branch on one, or draw random numbers on the CPU.

    Call it from one thread at a time. Only the call that captures synchronises. ``docs/graphs.md`` has a whole training
    step, and a list of what can't be captured.

    Args:
        step: the function. It reaches networks, optimisers and buffers itself, not as arguments.
        warmup: number of calls before the capture, at least 1, so that everything is allocated that a first use needs.
        device: of the step; ``"cpu"`` never captures in a CUDA graph. None: the device of the arguments, the results
            and the buffers of the first call, or else of all operations of the second one.

    Returns:
        The captured step, to be called as ``step``.

    Raises:
        ValueError: ``warmup`` is less than 1.
        RuntimeError: there is no such device.
    """
    if gone:
        raise TypeError(f"capture() takes no {', '.join(gone)}: on a CPU every call runs the step")
    return Captured(step, warmup=warmup, device=device)


class Captured:
    """A step that is captured once it is warm, and then replayed. :func:`capture` makes it."""

    def __init__(
        self,
        step: Callable[..., Any],
        *,
        warmup: int = 3,
        device: torch.device | str | None = None,
    ) -> None:
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
        self._operations: list[RecordedOperation] = []
        self._kept: Any = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """One step.

        Raises:
            ValueError: an argument is not like that of the first call, or the step breaks the rules of
                :func:`capture`.
            CaptureError: the step can't be captured; nothing has run. Or a buffer was moved since the capture, or draws
                in another way.
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
        self._operations = []
        with watched(self._operations):
            results = self._eager(arguments, args, kwargs)
        unchanged.check()
        self._arguments = arguments
        of_buffers = {one.device for one in self._operations if one.device is not None}
        self._device = self._requested or _graph_device(arguments.devices | devices_of(results) | of_buffers)
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
        with self._aside(), launches_in_graph():
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
        for one in self._operations:
            one.joined(current)
        side.wait_stream(current)
        try:
            with recorded(recording), capture_under_way(), _captured_into(graph, side), checks, launches_in_graph():
                try:
                    results = Results(checked_results(self._step(*given, **named)), self._device)
                finally:
                    recording.join()
            refuse_host_random(random_state)
            unchanged.check()
        except Exception as error:
            recording.abandon()
            _explain(error)
            raise
        current.wait_stream(side)
        for one in recording.operations:
            one.joined(current)
            recording.holds(one, "storage")
            # Rows that are freed and made anew have another ring.
            recording.holds(one.storage, "ring", "rows", "device")
            recording.holds(one.storage.followers, "listeners")
            for sampler in one.storage.followers.samplers:
                recording.holds(sampler, *sampler.parts, *(sampler.settings or ()))
        self._graph, self._results, self._recording, self._kept = graph, results, recording, checks.kept

    # After it

    def _replay(self, arguments: Arguments, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        assert self._graph is not None
        arguments.fill(args, kwargs)
        self._recording.replay(self._graph.replay)
        return self._results.copies()

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
