"""Plain PyTorch as the CPU's functions of operations (:mod:`gpubuf.kernels._operations`), and as their definition."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from gpubuf.kernels._operations import declaration_of, dense, parameters_of
from gpubuf.kernels._registry import pick

#: Arguments that say yes or no of a row. They have any dtype.
FLAGS = {"mask", "terminated", "done"}

#: Forms of calls that an operation remembers.
FORMS = 64


def plain(operation: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Makes of a function of tensors the CPU's function of an operation.

    The function takes arguments of the operation, and then some of its sizes, by their names: tensors are contiguous
    and of the computing dtype, or bool if they are :data:`FLAGS`. It returns new tensors with the elements of the
    results, in any shape and dtype. What the decorator returns has it as ``__wrapped__``.
    """
    declaration = declaration_of(operation)

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        taken: list[str] = parameters_of(function)
        arguments = declaration.arguments
        given = [name for name in taken if name in arguments]
        take = pick(arguments, given)
        read = [(i, name in FLAGS) for i, name in enumerate(arguments) if name in declaration.tensors]
        count, numbers = len(arguments), pick(arguments, declaration.numbers)
        one = len(declaration.results) == 1
        forms: dict[Any, tuple[Any, ...]] = {}

        def prepared(args: tuple[Any, ...]) -> tuple[Any, ...]:
            """(dtypes of the tensors that are not as the function takes them, the function, results) of such a call."""
            sizes, real = declaration.sizes(args), declaration.real(args)
            casts = []
            for i, is_flag in read:
                each, dtype = args[i], torch.bool if is_flag else real
                if each is not None and arguments[i] in taken and (each.dtype, each.is_contiguous()) != (dtype, True):
                    casts.append((i, dtype))
            named = {name: sizes[name] for name in taken if name not in given}
            return casts, functools.partial(function, **named), declaration.result_kinds(args, real)

        @functools.wraps(function)
        def run(*args: Any) -> Any:
            if len(args) < count:
                args = declaration.complete(args)
            # What was checked of a call holds for all that have the same shapes, dtypes and numbers.
            form = [*numbers(args)]
            for i, _ in read:
                each = args[i]
                form += (None,) if each is None else (each.shape, each.dtype, each.is_contiguous())
            key = (*form,)
            known = forms.get(key)
            if known is None:
                if len(forms) >= FORMS:
                    forms.clear()
                known = forms[key] = prepared(args)
            casts, call, kinds = known
            if casts:
                values = list(args)
                for i, dtype in casts:
                    values[i] = dense(values[i], dtype)
                args = (*values,)
            found = call(*take(args))
            made = []
            for each, (shape, dtype) in zip((found,) if one else found, kinds, strict=True):
                if each.dtype is not dtype or each.shape != shape or not each.is_contiguous():
                    each = dense(each, dtype).reshape(shape)
                made.append(each)
            return made[0] if one else (*made,)

        return run

    return decorate
