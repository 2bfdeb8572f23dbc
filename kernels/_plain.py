"""Plain PyTorch as the CPU's functions of operations (:mod:`gpubuf.kernels._operations`), and as their definition."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from gpubuf.kernels._operations import declaration_of, dense, parameters_of, returned
from gpubuf.kernels._registry import pick

#: Arguments that say yes or no of a row. They have any dtype.
FLAGS = {"mask", "terminated", "done"}


def plain(operation: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Makes of a function of tensors the CPU's function of an operation.

    The function takes arguments of the operation and its sizes, by their names: tensors are contiguous and of the
    computing dtype, or bool if they are :data:`FLAGS`. It returns new tensors with the elements of the results, in any
    shape and dtype.
    """
    declaration = declaration_of(operation)

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        taken: list[str] = parameters_of(function)
        places: dict[str, int] = {name: i for i, name in enumerate(declaration.arguments)}
        tensors = [(i, name in FLAGS) for i, name in enumerate(declaration.arguments) if name in declaration.tensors]
        tensors = [each for each in tensors if declaration.arguments[each[0]] in taken]
        given = [name for name in taken if name in places]
        take, sized = pick(declaration.arguments, given), [name for name in taken if name not in places]

        def run(*args: Any) -> Any:
            args = declaration.complete(args)
            sizes, real, values = declaration.sizes(args), declaration.real(args), list(args)
            for i, is_flag in tensors:
                if values[i] is not None:
                    values[i] = dense(values[i], torch.bool if is_flag else real)
            found = function(**dict(zip(given, take(values), strict=True)), **{name: sizes[name] for name in sized})
            found = found if type(found) is tuple else (found,)
            made = []
            for each, (shape, dtype) in zip(found, declaration.result_kinds(args, real), strict=True):
                made.append(dense(each, dtype).reshape(shape))
            return returned(made)

        return run

    return decorate
