"""The operations of a step on a CPU, noted once and then repeated without what the step did between them."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.weak import WeakIdKeyDictionary

from gpubuf.data.recording import CaptureError
from gpubuf.kernels._operations import direct
from gpubuf.kernels._registry import NAMESPACE

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
    aten.addmm.default: torch.addmm,
    aten.baddbmm.default: torch.baddbmm,
    aten.bmm.default: torch.bmm,
    aten.cat.default: torch.cat,
    aten.expand.default: Tensor.expand,
    aten.mm.default: torch.mm,
    aten.mul.Tensor: torch.mul,
    aten.relu_.default: torch.relu_,
    aten.stack.default: torch.stack,
    aten.sum.dim_IntList: torch.sum,
    aten.t.default: torch.t,
    aten.transpose.int: torch.transpose,
    aten.view.default: Tensor.view,
}


class Tape(TorchDispatchMode):
    """Notes the operations of a step, those of its backward too: ``with tape: step()``. :meth:`replay` repeats them.

    An update of small networks spends much of its time between its operations: in modules, TensorDicts and
    autograd. A replay is Python's code with a line for each operation. Its results have the same bits.

    A tensor is the result of an earlier operation, or else a constant, such as a parameter: replays read and write it
    where it is. Views of constants are constants too. Compiled code is noted as the code that it was compiled from.

    Attributes:
        source: the replay, once the step is over.

    Raises:
        CaptureError: within the step, at an operation that can't be repeated.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._numbers = itertools.count()
        # Of results. They are not kept alive: autograd copies gradients that anybody else refers to.
        self._names: Any = WeakIdKeyDictionary()
        self._constants: dict[int, Tensor] = {}
        self._scope: dict[str, Any] = {}
        # What is written of each operation, and the names that it reads.
        self._lines: list[tuple[str, set[str]]] = []

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
        out = func(*args, **kwargs)
        variable = [tensor for tensor in given if tensor in self._names]
        if func in _ALIASES and variable:
            self._names[out] = self._names[variable[0]]
        elif variable or not func.is_view:
            self._note(func, args, kwargs, out)
        else:
            self._constants.update((id(tensor), tensor) for tensor in (*given, *tensors_in([out])))
        return out

    def _note(self, func: Any, args: Any, kwargs: dict[str, Any], out: Any) -> None:
        uses: set[str] = set()
        terms = [self._term(value, uses) for value in args]
        terms += [f"{key}={self._term(value, uses)}" for key, value in kwargs.items()]
        run = self._kept(direct(func) if func.namespace == NAMESPACE else _CALLS.get(func, func))
        self._lines.append((f"{self._target(func, out)} = {run}({', '.join(terms)})", uses))

    def _term(self, value: Any, uses: set[str]) -> str:
        """An argument as it is written; names of results go into ``uses``."""
        if isinstance(value, Tensor):
            if value in self._names:
                uses.add(self._names[value])
                return str(self._names[value])
            self._constants[id(value)] = value
        if isinstance(value, list | tuple):
            return f"[{', '.join(self._term(each, uses) for each in value)}]"
        return repr(value) if value is None or type(value) in (bool, int) else self._kept(value)

    def _kept(self, value: Any) -> str:
        name = f"kept_{id(value)}"
        self._scope[name] = value
        return name

    def _target(self, func: Any, out: Any) -> str:
        """What the results of an operation are assigned to."""
        if out is None or isinstance(out, Tensor):
            return self._result(out)
        if isinstance(out, tuple | list) and all(part is None or isinstance(part, Tensor) for part in out):
            return "".join(f"{self._result(part)}, " for part in out) or "_"
        raise CaptureError(f"the step can't be recorded: {func.name()} returns {type(out).__name__}, not tensors")

    def _result(self, tensor: Tensor | None) -> str:
        # What was written in place has a name already, or is a constant.
        if tensor is None or tensor in self._names or id(tensor) in self._constants:
            return "_"
        name = self._names[tensor] = f"x{next(self._numbers)}"
        return name

    def finish(self) -> None:
        """The step is over, and somebody else has what it returned."""
        leaves = [each for each in self._constants.values() if each.requires_grad and not each._is_view()]
        graded = [leaf for leaf in leaves if leaf.grad is not None and leaf.grad in self._names]
        gradients = {id(leaf.grad) for leaf in graded}
        external = [each for each in self._names if id(each) not in gradients]
        found: set[str] = set()
        ends = [", ".join(self._term(each, found) for each in part) for part in (external, [g.grad for g in graded])]
        lines, later = [f"    return [{ends[0]}], [{ends[1]}]"], found
        for line, uses in reversed(self._lines):
            # Dropped as soon as nothing needs it: what comes next gets its memory, which is in the cache.
            lines.append(f"    {line}" + "".join(f"; {name} = None" for name in sorted(uses - later)))
            later = later | uses
        self.source = "\n".join(["def operations():", *reversed(lines)])
        exec(self.source, self._scope)
        self._run: Callable[[], tuple[list[Tensor], list[Tensor]]] = self._scope["operations"]
        self._external_tensors, self._graded = external, graded
        self._fixed = list(self._constants.values())
        self._addresses = list(map(Tensor.data_ptr, self._fixed))

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
