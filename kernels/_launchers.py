"""Triton kernels as the GPU's functions of operations (:mod:`gpubuf.kernels._operations`)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from operator import itemgetter
from types import NoneType
from typing import Any

import torch
import triton.language as tl
from torch import Tensor

from gpubuf.kernels import config
from gpubuf.kernels._check import device_name
from gpubuf.kernels._differentiable import dense
from gpubuf.kernels._launching import Variant, variant_of
from gpubuf.kernels._operations import declaration_of, parameters_of, returned
from gpubuf.kernels._registry import pick

REAL = {torch.float32: tl.float32, torch.float64: tl.float64}

FINISH_BLOCK = 256
"""Partial sums that the finishing kernel of a loss adds at a time."""


class Prepared:
    """The launches of an operation, prepared once for all calls that differ in their tensors alone.

    Attributes:
        values: what the parameters of kernels may name: numbers, sizes and the plan's attributes by their names; by
            names that end in ``_ptr`` the places of tensors among arguments and results; and ``HAS_`` with the name of
            an optional argument in capitals.
    """

    def __init__(self, values: dict[str, Any], real: torch.dtype, names: Mapping[str, str]) -> None:
        self.values, self._real, self._names = values, real, names
        self._sums: tuple[int, ...] = ()
        self._halved = False
        self._launches: list[tuple[Variant, int, Any, list[int]]] = []

    def sums(self, *shape: int) -> int:
        """Have a new tensor of the computing dtype at each call, for sums of programs. Returns its place."""
        self._sums = shape
        return -1

    def halves(self) -> tuple[int, int]:
        """The places of both halves of that tensor, ``[2, ...]``."""
        self._halved = True
        return -3, -2

    def launch(self, kernel: Any, programs: int, num_warps: int, **more: Any) -> None:
        """Have a kernel launched on so many programs, with ``more`` values. Its pointers come before its numbers."""
        values = self.values | more
        places: list[int] = []
        numbers: list[int] = []
        constants: dict[str, Any] = {}
        for parameter in parameters_of(kernel.fn):
            name = self._names.get(parameter, parameter)
            for known in (name, name.lower(), name.removeprefix("n_")):
                if known in values:
                    break
            else:
                raise TypeError(
                    f"nothing is called {parameter}, as a parameter of {kernel.fn.__name__}: {list(values)}"
                )
            if kernel.fn.__annotations__.get(parameter) is tl.constexpr:
                constants[parameter] = values[known]
            else:
                (places if parameter.endswith("_ptr") else numbers).append(values[known])
        # No kernel has a single pointer: of one place an itemgetter gives no tuple.
        variant = variant_of(kernel, num_warps, None, constants)
        self._launches.append((variant, programs, itemgetter(*places), numbers))

    def run(self, tensors: tuple[Any, ...]) -> bool:
        """Launch with these arguments and results of the operation. Returns whether there was anything to launch."""
        if self._sums:
            sums = tensors[-1].new_empty(self._sums, dtype=self._real)
            tensors += (*sums, sums) if self._halved else (sums,)
        for variant, programs, take, numbers in self._launches:
            variant.launch(programs, (*take(tensors), *numbers))
        return bool(self._launches)


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
    first_result = f"{declaration_of(operation).results[0]}_ptr"

    def prepare(to: Prepared, chosen: Any) -> None:
        values = to.values
        count = chosen.programs if programs is None else programs(*[values[name] for name in of_programs])
        if not count:
            return
        values["single"] = count == 1
        if finish is not None:
            values["partial_ptr"] = values[first_result] if count == 1 else to.sums(finish.sums * count)
        to.launch(kernel, count, getattr(chosen, warps))
        # Rows that are not reduced have the number 0.
        if finish is not None and count > 1 and (finish.always or values["reduction"]):
            to.launch(finish.kernel, 1, 2, count=count, BLOCK=FINISH_BLOCK)

    return launches(operation, plan, names)(prepare)


def launches(
    operation: Any, plan: Callable[..., Any], names: Mapping[str, str] | None = None, without_rows: float = 0.0
) -> Callable[[Callable[[Prepared, Any], None]], Callable[..., Any]]:
    """Decorates a function that prepares the launches of an operation, given a :class:`Prepared` and its plan.

    Args:
        operation: what :func:`gpubuf.kernels._operations.declare` returned.
        plan: a function of sizes, by their names, and the name of the device; returns a dataclass.
        names: of values, by those parameters of kernels that are called otherwise.
        without_rows: what results are then: nothing is launched.
    """
    declaration, schema = declaration_of(operation), operation._schema.arguments
    inputs = declaration.arguments
    tensors = [place for place, name in enumerate(inputs) if name in declaration.tensors]
    numbers = [name for name in inputs if name not in declaration.tensors]
    take_numbers = pick(inputs, numbers)
    # No kernel asks for the pointer of a number. A result may have the name of one, and comes later.
    places = {f"{name}_ptr": place for place, name in enumerate([*inputs, *declaration.results])}
    optional = [(a.name, place) for place, a in enumerate(schema) if isinstance(a.type, torch.OptionalType)]
    floats = [a.name for a in schema if isinstance(a.type, torch.FloatType)]
    of_plan = parameters_of(plan)[:-1]

    def decorate(function: Callable[[Prepared, Any], None]) -> Callable[..., Any]:
        @config.remembered
        def prepared(
            kinds: tuple[type, ...],
            given: tuple[Any, ...],
            sizes: tuple[tuple[str, int], ...],
            real: torch.dtype,
            device: torch.device,
        ) -> Prepared:
            values = {**places, **dict(zip(numbers, given, strict=True)), **dict(sizes), "REAL": REAL[real]}
            for name in floats:
                # A launch can't be looked up by a float that is zero, but by an integer.
                values[name] = values[name] or 0
            for name, place in optional:
                values[f"HAS_{name.upper()}"] = kinds[place] is not NoneType
                if kinds[place] is NoneType:
                    values[f"{name}_ptr"] = declaration.principal
            found = Prepared(values, real, names or {})
            if sizes[0][1]:
                chosen = plan(*[values[name] for name in of_plan], device_name(device))
                values.update(vars(chosen))
                function(found, chosen)
            return found

        def run(*args: Any) -> Any:
            args = declaration.complete(args)
            sizes = declaration.sizes(args)
            real = declaration.real(args)
            results = declaration.new_results(args, real)
            kinds = tuple(map(type, args))
            known = prepared(kinds, take_numbers(args), tuple(sizes.items()), real, results[0].device)
            for place in tensors:
                if args[place] is not None and not args[place].is_contiguous():
                    args = tuple(dense(each) if isinstance(each, Tensor) else each for each in args)
                    break
            if not known.run((*args, *results)):
                for result in results:
                    result.fill_(without_rows)
            return returned(results)

        return run

    return decorate
