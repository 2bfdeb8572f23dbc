"""Finds what a CUDA graph can't hold while a step is captured, before CUDA fails or passes over it silently.

CUDA refuses to synchronise while it captures, with a message that names neither operation nor reason. It does not
refuse work on the host. That work is done once, and every replay lacks it.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from gpubuf.data.recording import CaptureError

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


def _tensors(values: Any) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from _tensors(value)


def _masks(schema_name: str, args: tuple[Any, ...]) -> bool:
    """Whether an indexing operation has to count the elements that a mask selects."""
    if not any(index.dtype in (torch.bool, torch.uint8) for index in _tensors(args[1])):
        return False
    # With one value for all of them it is a masked_fill_, which counts nothing.
    return schema_name == "aten::index" or args[2].numel() != 1


def _mutated(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[Tensor]:
    for position, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[position] if position < len(args) else kwargs.get(argument.name)
            yield from _tensors((value,))


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
            raise CaptureError(f"the step can't be captured in a CUDA graph: it draws from {name}, {_HOST}")


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
        self.found |= {tensor.device for tensor in _tensors((*args, out))}
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
        given = list(_tensors((*args, *kwargs.values())))
        self._check_before(func, args, kwargs, given)
        self._keep(given)
        out = func(*args, **kwargs)
        results = list(_tensors(out if isinstance(out, list | tuple) else (out,)))
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
