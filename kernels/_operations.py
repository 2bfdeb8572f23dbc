"""Operations that are one kernel: their declarations, and how each backend runs them.

Losses, norms and distributions compute some tensors from others. What such an operation takes, checks and returns is
said once, by :func:`declare`, in the ``__init__.py`` of its family. A backend then adds a kernel: ``_cpu.py`` a
compiled loop (``loop`` of ``_loops.py``), ``_launch.py`` a Triton kernel and how it is cut into programs (``launcher``
of ``_launchers.py``).

A kernel's parameters get what has their name:

* the arguments of the operation, and its results, by the names in the schema;
* its ``sizes``;
* the attributes of the plan, on a GPU: ``block``, ``num_warps`` and so on.

Of a Triton kernel ``x_ptr`` is the tensor ``x``, a compile-time ``WIDTH`` is ``width``, ``HAS_X`` says whether ``x`` is
given, and ``REAL`` is the computing dtype. Of a compiled loop ``x`` is the address of the tensor ``x``, 0 for None;
``x_out`` that of the result ``x``; ``wide`` says whether the computing dtype is float64. An absent argument of a Triton
kernel is some other tensor, which the kernel does not read.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from gpubuf.kernels._registry import define, is_tensor, pick


@functools.cache
def parameters_of(function: Callable[..., Any]) -> list[str]:
    return list(inspect.signature(function).parameters)


@functools.lru_cache(maxsize=128)
def vector(n: int, dtype: torch.dtype) -> Tensor:
    """A tensor ``[n]`` without memory: a model for ``torch.empty_like``, which takes half the time of ``torch.empty``.

    Between the updates of networks it takes much less: storages allocate batches so, and its code is in the caches.
    """
    model = torch.empty(n, dtype=dtype)
    model.untyped_storage().resize_(0)
    return model


def returned(results: list[Tensor]) -> Any:
    """Results as an operation returns them."""
    return tuple(results) if len(results) > 1 else results[0]


class Declaration:
    """What is said once about an operation.

    Attributes:
        arguments, results: names, as the schema has them.
        tensors: the arguments that are tensors, or may be.
        principal: the place of the first argument that decides on the computing dtype.
        bindings: where the arguments of its kernels come from, which a backend keeps here.
    """

    def __init__(
        self,
        schema: Any,
        checks: Sequence[Callable[..., None]],
        sizes: Callable[..., dict[str, int]],
        results: Callable[..., Sequence[Any]] | None,
        real: Sequence[str],
    ) -> None:
        self.arguments = [argument.name for argument in schema.arguments]
        self.results = [result.name for result in schema.returns]
        self.tensors = {argument.name for argument in schema.arguments if is_tensor(argument)}
        self.bindings: dict[int, Any] = {}
        self._defaults = tuple(argument.default_value for argument in schema.arguments)
        self._checks = [(check, pick(self.arguments, parameters_of(check))) for check in checks]
        self._sizes, self._sizes_of = sizes, pick(self.arguments, parameters_of(sizes))
        like = [name.removeprefix("grad_") for name in self.results]
        self._results, self._results_of = results, pick(self.arguments, parameters_of(results) if results else like)
        self._real_of, self.principal = pick(self.arguments, real), self.arguments.index(real[0])

    def new_results(self, args: tuple[Any, ...], real: torch.dtype) -> list[Tensor]:
        """Results without values, of all arguments and the computing dtype."""
        principal, found, made = args[self.principal], self._results_of(args), []
        for each in self._results(*found) if self._results else found:
            if isinstance(each, Tensor):
                made.append(torch.empty_like(each, memory_format=torch.contiguous_format))
            else:
                # PyTorch takes in a tuple faster than a torch.Size.
                made.append(principal.new_empty((*each,), dtype=real))
        return made

    def fake(self, *args: Any) -> Any:
        """What the operation is to a compiler."""
        args = self.complete(args)
        return returned(self.new_results(args, self.real(args)))

    def complete(self, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """All arguments: a dispatcher leaves out what has its default value."""
        return args if len(args) == len(self._defaults) else args + self._defaults[len(args) :]

    def sizes(self, args: tuple[Any, ...]) -> dict[str, int]:
        """The sizes that all arguments say, the number of rows first; ValueError unless they fit each other."""
        for check, taken in self._checks:
            check(*taken(args))
        return self._sizes(*self._sizes_of(args))

    def real(self, args: tuple[Any, ...]) -> torch.dtype:
        """The computing dtype."""
        # As computing_dtype, which takes longer to call.
        tensors: tuple[Tensor, ...] = self._real_of(args)
        for tensor in tensors:
            if tensor.dtype is torch.float64:
                return torch.float64
        return torch.float32


_declared: dict[Any, Declaration] = {}


def declare(
    schema: str,
    family: str,
    *,
    checks: Sequence[Callable[..., None]] = (),
    sizes: Callable[..., dict[str, int]],
    results: Callable[..., Sequence[Any]] | None = None,
    real: str,
) -> Any:
    """:func:`gpubuf.kernels._registry.define` of an operation that is one kernel.

    Args:
        schema: its results have names.
        family: ``__name__`` of the package that has the backends.
        checks: functions that take arguments of the operation by their names, and raise ValueError unless these fit
            each other.
        sizes: takes arguments by their names. Returns the sizes that kernels take, the number of rows first.
        results: takes arguments by their names. Returns for every result its shape in the computing dtype, or a tensor
            of the same shape and dtype. None: the results are gradients, each like its argument.
        real: names of the arguments that decide on the computing dtype, with spaces between them.
    """
    parsed = torch._C.parse_schema(f"gpubuf::{schema}")
    declaration = Declaration(parsed, checks, sizes, results, real.split())
    operation = define(schema, family, fake=declaration.fake)
    _declared[operation] = declaration
    return operation


def declaration_of(operation: Any) -> Declaration:
    """What :func:`declare` was told."""
    return _declared[operation]
