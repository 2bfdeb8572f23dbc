"""The operations of a step on a CPU, noted once and then repeated without what the step did between them."""

from __future__ import annotations

import contextlib
import math
from array import array
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.weak import WeakIdKeyDictionary

from gpubuf.data.recording import CaptureError
from gpubuf.kernels._operations import Addresses, Dense, NotRepeatableError, Number, direct
from gpubuf.kernels._registry import NAMESPACE, cpu_function
from gpubuf.kernels.tape import (
    A_STRIDES,
    ADD,
    ADD_RELU,
    COLUMNS,
    COPY,
    COUNT,
    OPERATION,
    OUT_STRIDES,
    POSITIVE,
    RELU,
    ROWS,
    SIZES,
    TILED_PRODUCT,
)
from gpubuf.kernels.tape._records import Record, blas, copy_of, records_of, room_for, run, table, to_be_changed

_READS = torch.Tag.data_dependent_output

#: Operations that a replay would not follow.
_REFUSED = {
    _READS: "reads a value of a tensor on the host, which would be the same at every replay",
    torch.Tag.dynamic_output_shape: "has a result whose size depends on values; masks and torch.where keep sizes fixed",
    torch.Tag.inplace_view: "gives a tensor another shape in place: use the operation that returns a view",
}

_FROM_NUMBERS = frozenset({torch.tensor, torch.as_tensor, torch.asarray})
_TO_NUMPY = frozenset({Tensor.numpy, Tensor.tolist, Tensor.__array__, Tensor.__dlpack__})

aten = torch.ops.aten

#: They return their argument, as another object.
_ALIASES = frozenset({aten.detach.default, aten.alias.default})

#: The same operations as Python calls them, which takes half as long as calls by their schema.
_CALLS = {
    aten.add.Tensor: torch.add,
    aten.addcmul.default: torch.addcmul,
    aten.exp.default: torch.exp,
    aten.expand.default: Tensor.expand,
    aten.mul.Tensor: torch.mul,
    aten.randn.default: torch.randn,
    aten.randn_like.default: torch.randn_like,
    aten.softplus.default: torch.nn.functional.softplus,
    aten.sum.dim_IntList: torch.sum,
    aten.t.default: torch.t,
    aten.tanh_.default: Tensor.tanh_,
    aten.transpose.int: torch.transpose,
    aten.view.default: Tensor.view,
}


class _Memory:
    """Memory that some tensors of a step share.

    Attributes:
        base: its address while the step was recorded.
        numbers: how many, and of which dtype.
        kept: whether replays have it at one place: it is a constant, or what records and kernels compute.
        place: that place, once it is known.
        owned: whether the place is the tape's.
        slot: in which a replay finds its address, if records need it.
        names: of variables that refer to it, if it is an operation's result, in memory of PyTorch's.
        end: the last operation that uses it.
    """

    def __init__(self, tensor: Tensor, constant: bool = False) -> None:
        self.base = tensor.data_ptr()
        self.numbers = (tensor.untyped_storage().nbytes() // tensor.element_size(), tensor.dtype)
        self.kept = constant
        self.place = tensor if constant else None
        self.owned = False
        self.slot: int | None = None
        self.names: list[str] = []
        self.end = -1


@dataclass(frozen=True, eq=False)
class _Value:
    """A tensor of the step: what part of its memory it is. ``offset`` in bytes."""

    memory: _Memory
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype

    @staticmethod
    def of(tensor: Tensor, memory: _Memory) -> _Value:
        offset = tensor.data_ptr() - memory.base
        return _Value(memory, tuple(tensor.shape), tensor.stride(), offset, tensor.dtype)

    def tensor(self) -> Tensor:
        """It, where replays have it."""
        place = self.memory.place
        assert place is not None
        if not self.memory.owned:
            return place
        return place.view(self.dtype).as_strided(self.size, self.stride, self.offset // self.dtype.itemsize)


@dataclass(eq=False)
class _Operation:
    """An operation of the step, and how replays have it: as records, as calls of kernels, or else as PyTorch's call.

    Attributes:
        run, args, kwargs: the call, with values in the place of tensors.
        results: what it assigns to; None: nothing new.
        uses: all memory that it reads or writes.
        is_view: whether its results are part of what it was given.
        records: the fields of each; the memory, and the bytes from its base, of what it writes and reads.
        kernels: kernels with their arguments; values in the place of tensors.
        is_joined: whether the records of the operation before do it.
    """

    run: Callable[..., Any]
    args: Any
    kwargs: dict[str, Any]
    results: list[_Value | None]
    is_tuple: bool
    uses: set[_Memory]
    is_view: bool = False
    records: list[tuple[dict[int, int], list[tuple[_Memory, int]]]] = field(default_factory=list)
    kernels: list[tuple[Any, list[Any]]] = field(default_factory=list)
    is_joined: bool = False

    def may_overwrite(self, i: int) -> _Memory | None:
        """What the ``i``-th operation reads and nothing needs after it, if its result may be there too."""
        if len(self.records) != 1 or self.results[0] is None:
            return None
        fields, (to, *read) = self.records[0]
        if fields[OPERATION] < COPY:
            return None
        (over, at), (other, _) = read
        strides = [[fields[first + j] for j in range(3)] for first in (OUT_STRIDES, A_STRIDES)]
        same = (
            over.owned and over.end == i and over.numbers == to[0].numbers and strides[0] == strides[1] and at == to[1]
        )
        return over if same and other is not over else None

    def join(self, before: _Operation) -> None:
        """If this is the ReLU, in place, of what the operation before ends with, do both at once."""
        if len(self.records) != 1 or not before.records or self.records[0][0][OPERATION] != RELU:
            return
        (fields, places), (last, last_places) = self.records[0], before.records[-1]
        if last[OPERATION] == TILED_PRODUCT:
            count, both = last[COUNT] * last[ROWS] * last[COLUMNS], {POSITIVE: 1}
        elif last[OPERATION] == ADD and len(before.records) > 1:
            count, both = math.prod(last[SIZES + i] for i in range(3)), {OPERATION: ADD_RELU}
        else:
            return
        same = places[0] == places[1] == last_places[0]
        if same and [fields[SIZES + i] for i in range(3)] == [1, 1, count]:
            before.records[-1] = {**last, **both}, last_places
            self.records, self.is_joined = [], True


class Tape(TorchDispatchMode):
    """Notes the operations of a step, those of its backward too: ``with tape: step()``. :meth:`replay` repeats them.

    An update of small networks spends much of its time between its operations: in modules, TensorDicts, autograd and
    PyTorch's dispatcher. A replay is Python's code. It has a line for each run of operations that are records
    (:mod:`gpubuf.kernels.tape`), for each kernel of ours, and for each other operation. What records and kernels
    compute stays at one place in memory, which later results take over. Results have the same bits as the step's.

    A tensor is the result of an earlier operation, or else a constant, such as a parameter: replays read and write it
    where it is. Views of constants are constants too. Compiled code is noted as the code that it was compiled from.

    Attributes:
        source: the replay, once the step is over.

    Raises:
        CaptureError: within the step, at an operation that can't be repeated.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        # Of results. They are not kept alive: autograd copies gradients that anybody else refers to.
        self._values: Any = WeakIdKeyDictionary()
        self._constants: dict[int, _Value] = {}
        self._operations: list[_Operation] = []

    # The step

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.namespace == "profiler":
            return func(*args, **kwargs)
        if not isinstance(func, torch._ops.OpOverload):
            raise CaptureError(f"the step can't be recorded: {func} calls operations of its own")
        given = list(tensors_in((*args, *kwargs.values())))
        for tag, reason in _REFUSED.items():
            # Indices keep sizes, but for masks.
            if tag in func.tags and not (func is aten.index.Tensor and not any(map(is_mask, given[1:]))):
                raise CaptureError(f"the step can't be recorded: {func.name()} {reason}")
        if not all(tensor.is_cpu for tensor in given):
            raise CaptureError(f"the step can't be recorded: {func.name()} works on another device than the CPU")
        before = to_be_changed(func, args)
        out = func(*args, **kwargs)
        variable = [tensor for tensor in given if tensor in self._values]
        if func in _ALIASES and variable:
            self._values[out] = self._values[variable[0]]
        elif variable or not func.is_view:
            self._note(func, args, kwargs, given, out, before)
        else:
            for tensor in (*given, *tensors_in([out])):
                self._value(tensor)
        return out

    def _note(
        self, func: Any, args: Any, kwargs: dict[str, Any], given: list[Tensor], out: Any, before: Tensor | None
    ) -> None:
        if not (out is None or isinstance(out, Tensor)) and not (
            isinstance(out, tuple | list) and all(part is None or isinstance(part, Tensor) for part in out)
        ):
            raise CaptureError(f"the step can't be recorded: {func.name()} returns {type(out).__name__}, not tensors")
        outs = [out] if out is None or isinstance(out, Tensor) else list(out)
        owners = {tensor.untyped_storage().data_ptr(): self._value(tensor).memory for tensor in given}
        results: list[_Value | None] = []
        parts = 0
        for tensor in outs:
            # What was written in place has a value already, or is a constant.
            if tensor is None or tensor in self._values or id(tensor) in self._constants:
                results.append(None)
                continue
            owner = owners.get(tensor.untyped_storage().data_ptr())
            if owner is None or owner.place is not None or not tensor.numel():
                owner = _Memory(tensor)
            else:
                parts += 1
            value = self._values[tensor] = _Value.of(tensor, owner)
            results.append(value)
        # Some operations return a part of what they were given beside something new.
        is_view = 0 < parts == len(results)
        ours = func.namespace == NAMESPACE
        operation = _Operation(
            direct(func) if ours else _CALLS.get(func, func),
            self._encoded(args),
            self._encoded(kwargs),
            results,
            isinstance(out, tuple | list),
            {self._value(each).memory for each in given} | {value.memory for value in results if value is not None},
            is_view,
        )
        self._operations.append(operation)
        if parts:
            return
        records: list[Record] = []
        noted = getattr(cpu_function(func), "noted", None) if ours else None
        if noted is not None and (out is None or None not in results):
            with contextlib.suppress(NotRepeatableError):
                calls = [(kernel, [self._densely(x, records) for x in taken]) for kernel, taken in noted(args, outs)]
                operation.kernels = [(kernel, self._encoded(taken)) for kernel, taken in calls]
        else:
            records = records_of(func, args, kwargs, out, before)
        places = owners | {each.untyped_storage().data_ptr(): self._value(each).memory for each in tensors_in(outs)}
        for record in records if operation.kernels or not ours else ():
            where = [self._within(each, places) for each in record.tensors]
            operation.records.append((record.fields, where))
        if operation.kernels or operation.records:
            for memory in {value.memory for value in results if value is not None}:
                memory.kept = True

    def _densely(self, argument: Any, records: list[Record]) -> Any:
        """An argument of a kernel; a dense copy that it takes is made by records."""
        if not isinstance(argument, Dense):
            return argument
        copy = torch.empty(argument.tensor.shape, device="cpu")
        records += copy_of(argument.tensor, copy)
        return copy

    def _within(self, tensor: Tensor, places: dict[int, _Memory]) -> tuple[_Memory, int]:
        """The memory of a tensor, or of one that it is a part of, and at how many bytes it is there."""
        memory = places.get(tensor.untyped_storage().data_ptr()) or self._value(tensor).memory
        return memory, tensor.data_ptr() - memory.base

    def _value(self, tensor: Tensor) -> _Value:
        if tensor in self._values:
            found: _Value = self._values[tensor]
            return found
        if id(tensor) not in self._constants:
            # Its memory refers to it, so that nothing else gets this number.
            self._constants[id(tensor)] = _Value.of(tensor, _Memory(tensor, constant=True))
        return self._constants[id(tensor)]

    def _encoded(self, value: Any) -> Any:
        """An argument, with values in the place of tensors."""
        if isinstance(value, Tensor):
            return self._value(value)
        if isinstance(value, dict):
            return {key: self._encoded(each) for key, each in value.items()}
        if isinstance(value, list | tuple):
            parts = [self._encoded(each) for each in value]
            return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
        return value

    # The replay

    def finish(self) -> None:
        """The step is over, and somebody else has what it returned."""
        self._fixed = [each.tensor() for each in self._constants.values()]
        self._addresses = list(map(Tensor.data_ptr, self._fixed))
        leaves = [each for each in self._fixed if each.requires_grad and not each._is_view()]
        graded = [leaf for leaf in leaves if leaf.grad is not None and leaf.grad in self._values]
        gradients = {id(leaf.grad) for leaf in graded}
        external = [each for each in self._values if id(each) not in gradients]
        ends = [[self._values[each] for each in part] for part in (external, [leaf.grad for leaf in graded])]
        replay = _Replay(self._operations, ends)
        self.source = "\n".join(replay.lines)
        exec(self.source, replay.scope)
        self._run: Callable[[], tuple[list[Tensor], list[Tensor]]] = replay.scope["operations"]
        self._external_tensors, self._graded = external, graded

    def replay(self) -> None:
        """Repeat the step. Its results, and what else it has left behind, then refer to the new numbers.

        Raises:
            CaptureError: a tensor has moved that the step reads; nothing has run.
        """
        if list(map(Tensor.data_ptr, self._fixed)) != self._addresses:
            raise CaptureError(
                "a tensor was moved, or given other memory, since the step that uses it was recorded: call reset() on "
                "the recorded step, and it is recorded anew"
            )
        with torch.no_grad():
            found, grads = self._run()
            for tensor, new in zip(self._external_tensors, found, strict=True):
                tensor.set_(new)
        for leaf, grad in zip(self._graded, grads, strict=True):
            leaf.grad = grad


class _Replay:
    """Python's code for some operations, with the memory that it uses.

    Attributes:
        lines: a function ``operations`` that returns lists of tensors.
        scope: the variables that it refers to.
    """

    def __init__(self, operations: list[_Operation], ends: list[list[_Value]]) -> None:
        self.lines = ["def operations():"]
        self._operations = operations
        self._variables: dict[_Value, str] = {}
        self._slots: list[_Memory] = []
        self._needed: set[_Value] = set()
        # Records that have been written, and that come next.
        self._done = self._waiting = 0
        for before, operation in pairwise(operations):
            operation.join(before)
        self._mark(ends)
        self._place()
        records = [each for operation in operations for each in operation.records]
        numbers = table([(fields, [(self._slot(memory), at) for memory, at in where]) for fields, where in records])
        slots = array("q", [0 if m.place is None else m.place.data_ptr() for m in self._slots] or [0])
        room = room_for([fields for fields, _ in records])
        self.scope: dict[str, Any] = {
            **{"run": run, "blas": blas(), "kept": (numbers, room), "slots": slots, "room": room.data_ptr()},
            **{"first_record": numbers.buffer_info()[0], "first_slot": slots.buffer_info()[0]},
        }
        self._write(ends)

    def _slot(self, memory: _Memory) -> int:
        if memory.slot is None:
            memory.slot = len(self._slots)
            self._slots.append(memory)
        return memory.slot

    def _mark(self, ends: list[list[_Value]]) -> None:
        """Find out what uses each memory last, and what Python's code has variables for."""
        for i, operation in enumerate(self._operations):
            for memory in operation.uses:
                memory.end = i
        for value in values_in(ends):
            value.memory.end = len(self._operations)
        self._needed.update(values_in(ends))
        for operation in reversed(self._operations):
            if operation.kernels:
                self._needed.update(values_in([arguments for _, arguments in operation.kernels]))
            elif not operation.records and self._is_called(operation):
                self._needed.update(values_in([operation.args, *operation.kwargs.values()]))

    def _is_called(self, operation: _Operation) -> bool:
        """Views are needed only of what PyTorch's calls return: other memory has its place."""
        return not operation.is_joined and (
            not operation.is_view
            or any(each in self._needed and not each.memory.kept for each in operation.results if each)
        )

    def _place(self) -> None:
        """Give what is kept between replays its memory, which later results take over."""
        free: dict[Any, list[Tensor]] = defaultdict(list)
        for i, operation in enumerate(self._operations):
            computed = operation.records or operation.kernels
            over = operation.may_overwrite(i)
            for memory in [value.memory for value in operation.results if value is not None and computed]:
                if over is not None and over.place is not None:
                    memory.place, over.end = over.place, -1
                elif free[memory.numbers]:
                    memory.place = free[memory.numbers].pop()
                else:
                    count, dtype = memory.numbers
                    memory.place = torch.empty(count, dtype=dtype, device="cpu")
                memory.owned = True
            for memory in operation.uses:
                if memory.end == i and memory.owned and memory.place is not None:
                    free[memory.numbers].append(memory.place)

    def _write(self, ends: list[list[_Value]]) -> None:
        for i, operation in enumerate(self._operations):
            self._waiting += len(operation.records)
            if operation.kernels or (not operation.records and self._is_called(operation)):
                self._run_records()
                self._call(operation)
            gone = [name for memory in operation.uses if memory.end == i for name in memory.names]
            if gone:
                # As soon as nothing needs them: what comes next gets their memory, which is in the cache.
                self._run_records()
                self._line(f"{' = '.join(sorted(gone))} = None")
        self._run_records()
        self._line("return " + ", ".join(map(self._term, ends)))

    def _run_records(self) -> None:
        if self._waiting:
            self._line(f"run(first_record, {self._done}, {self._waiting}, first_slot, room, *blas)")
        self._done, self._waiting = self._done + self._waiting, 0

    def _line(self, text: str) -> None:
        self.lines.append(f"    {text}")

    def _call(self, operation: _Operation) -> None:
        if operation.kernels:
            for kernel, arguments in operation.kernels:
                self._line(f"{self._constant(kernel)}({', '.join(map(self._address, arguments))})")
            return
        terms = [self._term(each) for each in operation.args]
        terms += [f"{key}={self._term(each)}" for key, each in operation.kwargs.items()]
        targets = [self._variable(value) for value in operation.results]
        target = "".join(f"{each}, " for each in targets) if operation.is_tuple else targets[0]
        self._line(f"{target or '_'} = {self._constant(operation.run)}({', '.join(terms)})")
        for name, value in zip(targets, operation.results, strict=True):
            if name != "_" and value is not None and value.memory.slot is not None and not value.offset:
                self._line(f"slots[{value.memory.slot}] = {name}.data_ptr()")

    def _variable(self, value: _Value | None) -> str:
        if value is None or (value.memory.kept and value not in self._needed):
            return "_"
        name = self._variables[value] = f"x{len(self._variables)}"
        value.memory.names.append(name)
        return name

    def _address(self, argument: Any) -> str:
        if isinstance(argument, Number):
            return f"{self._term(argument.tensor)}.item()"
        if isinstance(argument, _Value):
            place = argument.memory.place
            return f"{self._term(argument)}.data_ptr()" if place is None else str(place.data_ptr() + argument.offset)
        if isinstance(argument, Addresses):
            return self._array(argument)
        return repr(argument)

    def _array(self, of: Addresses) -> str:
        """The address of an array, where those that change are set by lines of their own."""
        numbers = array("q", of.plus)
        name = self._constant(numbers)
        for i, each in enumerate(of.tensors):
            term = "0" if each is None else self._address(each)
            if term.isdecimal():
                numbers[i] += int(term)
            else:
                self._line(f"{name}[{i}] = {term} + {of.plus[i]}")
        return str(numbers.buffer_info()[0])

    def _term(self, value: Any) -> str:
        """How an argument is written."""
        if isinstance(value, _Value):
            if value.memory.place is None:
                return self._variables[value]
            return self._constant(value.tensor())
        if isinstance(value, list | tuple):
            return f"[{', '.join(map(self._term, value))}]"
        return repr(value) if value is None or type(value) in (bool, int) else self._constant(value)

    def _constant(self, value: Any) -> str:
        name = f"kept_{id(value)}"
        self.scope[name] = value
        return name


class TensorsAlone(TorchFunctionMode):
    """Refuses what leads from tensors to NumPy and to lists, whose computations a :class:`Tape` does not see.

    Tensors that are made of numbers are copied, which it sees: a step may write into them.

    Raises:
        CaptureError: within the step, at such a call.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _TO_NUMPY:
            raise CaptureError(f"the step can't be recorded: Tensor.{func.__name__}() {_REFUSED[_READS]}")
        out = func(*args, **(kwargs or {}))
        return out.clone() if func in _FROM_NUMBERS and not isinstance(args[0], Tensor) else out


def is_mask(index: Tensor) -> bool:
    """Whether an index selects the elements where it holds."""
    return index.dtype in (torch.bool, torch.uint8)


def tensors_in(values: Iterable[Any]) -> Iterator[Tensor]:
    """The tensors among the arguments or results of an operation, and in lists of them."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from tensors_in(value)


def values_in(values: Any) -> Iterator[_Value]:
    """The values among arguments, and in lists of them."""
    if isinstance(values, _Value):
        yield values
    elif isinstance(values, list | tuple):
        for each in values:
            yield from values_in(each)
