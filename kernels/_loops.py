"""Compiled loops as the CPU's functions of operations (:mod:`gpubuf.kernels._operations`)."""

from __future__ import annotations

from collections.abc import Callable
from operator import itemgetter
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gpubuf.kernels._jit import kernel
from gpubuf.kernels._operations import (
    Declaration,
    declaration_of,
    dense,
    parameters_of,
    returned,
)
from gpubuf.kernels._threads import call_in_parts

#: Arguments that say yes or no of a row. They have any dtype, and are read as bytes.
FLAGS = {"mask", "terminated", "done"}

#: What a kernel takes that works on a part of a batch: the first row, and how many.
PART = ("first", "length")

#: How a tensor is read of which a kernel takes the value.
NUMBER = object()

Share = Callable[..., tuple[int, int]]
"""A function of sizes, by their names: how much there is to share among threads, and how long each takes
(:func:`gpubuf.kernels._threads.parts`)."""


class _Binding:
    """Where the arguments of a kernel come from.

    Attributes:
        take: those of a kernel, of the values of a call; the part is left out.
        given: places of tensors that are arguments of the operation, with how each is read: as a dtype, None for the
            computing dtype, or :data:`NUMBER`.
        made: places of other tensors.
        before: how many come before the part.
        share: the arguments of a :data:`Share`, of the values of a call.
    """

    def __init__(self, function: Any, values: dict[str, Any], tensors: set[str], share: Share | None) -> None:
        parameters = parameters_of(function)
        wanted = [name for name in parameters if name not in PART]
        kinds: dict[str, Any] = {**dict.fromkeys(FLAGS, torch.bool)}
        kinds.update({name: NUMBER for name, kind in function.__annotations__.items() if kind is float})
        self.take = itemgetter(*wanted)
        self.given = [(i, kinds.get(name)) for i, name in enumerate(wanted) if name in tensors]
        self.made = [i for i, n in enumerate(wanted) if n not in tensors and isinstance(values[n], Tensor)]
        self.before = parameters.index(PART[0]) if PART[0] in parameters else len(parameters)
        self.share = [] if share is None else parameters_of(share)


class Call:
    """A call of an operation: what the parameters of its kernels may name.

    Attributes:
        values: arguments and sizes by their names, results by names that end in ``_out``, and ``wide``.
        real: the computing dtype.
    """

    def __init__(self, values: dict[str, Any], real: torch.dtype, declaration: Declaration) -> None:
        self.values, self.real, self._declaration = values, real, declaration

    def run(self, kernels: Any, share: Share | None = None) -> None:
        """Call a kernel, or that of the computing dtype in a dict, with addresses in the place of tensors.

        Arguments of the operation are read as numbers of the computing dtype, or as flags. Where the kernel annotates a
        parameter as a float, it gets the value of the tensor. ``share`` is for a kernel that takes a :data:`PART`.
        """
        run = kernels[self.real] if type(kernels) is dict else kernels
        bindings, values = self._declaration.bindings, self.values
        binding = bindings.get(id(run))
        if binding is None:
            binding = bindings[id(run)] = _Binding(run.function, values, self._declaration.tensors, share)
        arguments = list(binding.take(values))
        # Copies must outlive the call.
        alive = []
        for place, kind in binding.given:
            argument = arguments[place]
            if argument is None:
                arguments[place] = 0
            elif kind is NUMBER:
                arguments[place] = argument.item()
            else:
                dtype = kind or self.real
                if argument.dtype is not dtype or not argument.is_contiguous():
                    argument = dense(argument, dtype)
                    alive.append(argument)
                arguments[place] = argument.data_ptr()
        for place in binding.made:
            arguments[place] = arguments[place].data_ptr()
        if share is None:
            run(*arguments)
        else:
            count, work = share(*[values[name] for name in binding.share])
            call_in_parts(run, tuple(arguments[: binding.before]), count, tuple(arguments[binding.before :]), work)


def loops(operation: Any) -> Callable[[Callable[[Call], None]], Callable[..., Any]]:
    """Makes of a function that runs kernels, given a :class:`Call`, the CPU's function of an operation.

    Results are dense, and of the computing dtype until the function returns.
    """
    declaration = declaration_of(operation)
    names = declaration.arguments
    outputs = [f"{name}_out" for name in declaration.results]

    def decorate(function: Callable[[Call], None]) -> Callable[..., Any]:
        def run(*args: Any) -> Any:
            args = declaration.complete(args)
            values: dict[str, Any] = declaration.sizes(args)
            real = declaration.real(args)
            results = written = declaration.new_results(args, real)
            for result in results:
                if result.dtype is not real:
                    written = [torch.empty_like(each, dtype=real) for each in results]
                    break
            values.update(zip(names, args, strict=False))
            values.update(zip(outputs, written, strict=False))
            values["wide"] = real is torch.float64
            function(Call(values, real, declaration))
            if written is not results:
                for result, computed in zip(results, written, strict=True):
                    result.copy_(computed)
            return returned(results)

        return run

    return decorate


def for_each_dtype(made: Callable[[Any], Any]) -> dict[torch.dtype, Any]:
    """Kernels of what ``made`` makes of a NumPy dtype, by the computing dtype: those that are called are compiled.

    They have no other variable of ``made`` than numbers and dtypes, or else Numba finds them on disk in no process.
    """
    return {torch.float32: kernel(made(np.float32)), torch.float64: kernel(made(np.float64))}


def loop(operation: Any, share: Share | None = None) -> Callable[[Any], Callable[..., Any]]:
    """:func:`loops` of a single kernel: a function to compile, or a dict of kernels by the computing dtype."""

    def decorate(function: Any) -> Callable[..., Any]:
        kernels = function if isinstance(function, dict) else kernel(function)
        return loops(operation)(lambda call: call.run(kernels, share))

    return decorate
