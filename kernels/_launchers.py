"""Triton kernels as the GPU's functions of operations (:mod:`gpubuf.kernels._operations`)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from operator import itemgetter
from typing import Any

import torch
import triton.language as tl
from torch import Tensor

from gpubuf.kernels._check import device_name
from gpubuf.kernels._differentiable import dense
from gpubuf.kernels._launching import launch
from gpubuf.kernels._operations import declaration_of, parameters_of

REAL = {torch.float32: tl.float32, torch.float64: tl.float64}

FINISH_BLOCK = 256
"""Partial sums that the finishing kernel of a loss adds at a time."""


class Call:
    """A call of an operation: what the parameters of its kernels may name.

    Attributes:
        values: tensors by names that end in ``_ptr``; arguments, sizes and the plan's attributes by their names; and
            ``HAS_`` with the name of an optional argument in capitals.
        places: by the kernel, what takes its arguments out of the values: the same for every call.
        names: of values, by those parameters that are called otherwise.
    """

    def __init__(self, values: dict[str, Any], places: dict[int, Any], names: Mapping[str, str]) -> None:
        self.values, self._places, self._names = values, places, names

    def launch(self, kernel: Any, programs: int, num_warps: int, **more: Any) -> None:
        """Launch a kernel on so many programs, with ``more`` values."""
        values = self.values | more if more else self.values
        found = self._places.get(id(kernel))
        if found is None:
            found = self._places[id(kernel)] = self._find(kernel, values)
        take, parameters, take_constants = found
        constants = dict(zip(parameters, take_constants(values), strict=True))
        launch(kernel, programs, *take(values), num_warps=num_warps, **constants)

    def _find(self, kernel: Any, values: Mapping[str, Any]) -> tuple[Any, list[str], Any]:
        """What takes the arguments out of the values; the names of the constexprs, and what takes those."""
        given, constants = [], {}
        for parameter in parameters_of(kernel.fn):
            name = self._names.get(parameter, parameter)
            tried = (name, name.lower(), name.removeprefix("n_"))
            name = next((each for each in tried if each in values), "")
            if not name:
                raise TypeError(
                    f"nothing is called {parameter}, as a parameter of {kernel.fn.__name__}: {list(values)}"
                )
            if kernel.fn.__annotations__.get(parameter) is tl.constexpr:
                constants[parameter] = name
            else:
                given.append(name)
        # No kernel has a single argument, nor a single constexpr: of one name an itemgetter gives no tuple.
        return itemgetter(*given), list(constants), itemgetter(*constants.values())


@dataclass(frozen=True)
class Finish:
    """A kernel that adds the sums of all programs, where there are several.

    Attributes:
        kernel: its ``partial_ptr`` is where each program has left its sums, and ``count`` the number of programs.
        sums: of a program.
        always: whether there are sums also of rows that are not reduced.
    """

    kernel: Any
    sums: int
    always: bool = False


def launcher(
    operation: Any,
    kernel: Any,
    plan: Callable[..., Any],
    *,
    programs: Callable[..., int] | None = None,
    warps: str = "num_warps",
    finish: Finish | None = None,
    names: Mapping[str, str] | None = None,
) -> Callable[..., Any]:
    """The GPU's function of an operation: one launch, and one more to finish a reduction over several programs.

    Args:
        operation: what :func:`gpubuf.kernels._operations.declare` returned.
        kernel: the Triton kernel.
        plan: as of :func:`launches`.
        programs: a function of values by their names that returns the size of the grid; None: that of the plan.
        warps: which attribute of the plan says how many warps a program has.
        finish: what adds the sums of programs.
        names: as of :func:`launches`.
    """

    of_programs = [] if programs is None else parameters_of(programs)

    def run(call: Call, chosen: Any, results: tuple[Tensor, ...]) -> None:
        values = call.values
        count = chosen.programs if programs is None else programs(*[values[name] for name in of_programs])
        if not count:
            return
        values["single"] = count == 1
        if finish is not None:
            size = finish.sums * count
            values["partial_ptr"] = results[0] if count == 1 else results[0].new_empty(size, dtype=values["dtype"])
        call.launch(kernel, count, getattr(chosen, warps))
        # Rows that are not reduced have the number 0.
        if finish is not None and count > 1 and (finish.always or values["reduction"]):
            call.launch(finish.kernel, 1, 2, count=count, BLOCK=FINISH_BLOCK)

    return launches(operation, plan, names)(run)


def launches(
    operation: Any, plan: Callable[..., Any], names: Mapping[str, str] | None = None, without_rows: float = 0.0
) -> Callable[[Callable[[Call, Any, tuple[Tensor, ...]], None]], Callable[..., Any]]:
    """Decorates a function that launches kernels, given a :class:`Call`, its plan and its results.

    Args:
        operation: what :func:`gpubuf.kernels._operations.declare` returned.
        plan: a function of sizes, by their names, and the name of the device; returns a dataclass.
        names: of values, by those parameters of kernels that are called otherwise.
        without_rows: what results are then: nothing is launched.
    """
    declaration = declaration_of(operation)
    keys = [f"{name}_ptr" if name in declaration.tensors else name for name in declaration.arguments]
    outputs = [f"{name}_ptr" for name in declaration.results]
    tensors = [place for place, name in enumerate(declaration.arguments) if name in declaration.tensors]
    optional = [
        (f"HAS_{a.name.upper()}", i)
        for i, a in enumerate(operation._schema.arguments)
        if isinstance(a.type, torch.OptionalType)
    ]
    floats = [a.name for a in operation._schema.arguments if isinstance(a.type, torch.FloatType)]
    of_plan = parameters_of(plan)[:-1]

    def decorate(function: Callable[[Call, Any, tuple[Tensor, ...]], None]) -> Callable[..., Any]:
        def run(*args: Any) -> Any:
            args = declaration.complete(args)
            sizes = declaration.sizes(args)
            results = declaration.new_results(args)
            found = results if type(results) is tuple else (results,)
            if not next(iter(sizes.values())):
                for result in found:
                    result.fill_(without_rows)
                return results
            device = found[0].device
            chosen = plan(*[sizes[name] for name in of_plan], device_name(device))
            real = declaration.real(args)
            for place in tensors:
                if args[place] is not None and not args[place].is_contiguous():
                    args = tuple(dense(each) if isinstance(each, Tensor) else each for each in args)
                    break
            values = {**dict(zip(keys, args, strict=True)), **sizes, **vars(chosen), "REAL": REAL[real], "dtype": real}
            values.update(zip(outputs, found, strict=True))
            for name, place in optional:
                values[name] = args[place] is not None
                if args[place] is None:
                    values[keys[place]] = declaration.principal(args)
            for name in floats:
                # A launch can't be looked up by a float that is zero, but by an integer.
                values[name] = values[name] or 0
            function(Call(values, declaration.bindings, names or {}), chosen, found)
            return results

        return run

    return decorate
