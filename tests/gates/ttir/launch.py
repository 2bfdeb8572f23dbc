"""In the place of Triton's launches: compile to TTIR as the JIT would specialise, then execute that."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from triton._C.libtriton import ir
from triton.backends.compiler import GPUTarget
from triton.compiler.compiler import ASTSource, make_backend
from triton.runtime.jit import JITFunction, compute_cache_key, create_function_from_signature

from tests.gates.ttir import arithmetic
from tests.gates.ttir.aliases import watch_aliases
from tests.gates.ttir.emitter import Program, place_name, translate
from tests.gates.ttir.machine import Bounds, Machine
from tests.gates.ttir.memory import Storages
from tests.gates.ttir.report import Report

TARGET = GPUTarget("cuda", 90, 32)


@dataclass
class Compiled:
    """A specialisation. ``paths`` leads to the arguments that are not constants, through tuples; with their types."""

    program: Any
    paths: list[tuple[tuple[int, ...], str]]


class Executor:
    """Executes launches while it is :meth:`installed`; ``seed`` is that of the order of programs and lanes."""

    def __init__(self, seed: int = 0, target: GPUTarget = TARGET) -> None:
        self.report = Report()
        self.storages = Storages()
        self.target, self._backend = target, make_backend(target)
        self._lock = threading.RLock()
        self._random = np.random.default_rng(seed)
        self._binders: dict[JITFunction, Any] = {}
        self._keys: dict[JITFunction, dict[Any, Any]] = {}
        self._compiled: dict[tuple[JITFunction, str], Compiled] = {}

    @contextlib.contextmanager
    def installed(self) -> Iterator[Executor]:
        """Take the place of Triton's launches of compiled functions."""
        previous = JITFunction.run

        def run(function: JITFunction, *args: Any, grid: Any, warmup: bool, **options: Any) -> Compiled:
            with self._lock:
                compiled, bound = self._specialised(function, args, options)
                if not warmup:
                    grid = grid(bound) if callable(grid) else grid
                    self._execute(compiled, bound, (*grid, 1, 1)[:3])
                return compiled

        JITFunction.run = run
        end_watch = watch_aliases(
            lambda file, line, names: self.report.add("alias", "", names, (where := place_name((file, line)), where))
        )
        try:
            yield self
        finally:
            JITFunction.run = previous
            end_watch()

    def _specialised(self, function: JITFunction, args: Any, options: Any) -> tuple[Compiled, dict[str, Any]]:
        if function not in self._binders:
            binder = create_function_from_signature(function.signature, function.params, self._backend)
            self._binders[function], self._keys[function] = binder, {}
        bound, specialisation, parsed = self._binders[function](*args, **options)
        # The source, of the kernel and of all that it calls, may have changed since: tests plant faults in it.
        key = function, f"{function.cache_key} {compute_cache_key(self._keys[function], specialisation, parsed)}"
        if key not in self._compiled:
            parsed, signature, constants, attributes = function._pack_args(
                self._backend, options, bound, specialisation, parsed
            )
            source = ASTSource(function, signature, constants, attributes)
            try:
                program = self._program(source, parsed)
            except Exception as error:
                self.report.add("compile", function.__name__, f"{type(error).__name__}: {str(error)[:300]}")
                raise
            self._compiled[key] = Compiled(program, list(_paths(list(signature.values()))))
            self.report.specialisations += 1
        return self._compiled[key], bound

    def _program(self, source: ASTSource, options: Any) -> Any:
        """What a launch of a specialisation executes."""
        return translate(str(self._lowered(source, options, "ttir")[0]))

    def _lowered(self, source: ASTSource, options: Any, last: str) -> tuple[Any, dict[str, Any]]:
        """The output of a stage of the compiler, and what the stages have said of it."""
        context = ir.context()
        ir.load_dialects(context)
        self._backend.load_dialects(context)
        implementation = self._backend.get_codegen_implementation(options)
        code = source.make_ir(self.target, options, implementation, self._backend.get_module_map(), context)
        stages: dict[str, Any] = {}
        self._backend.add_stages(stages, options, source.language)
        metadata = {"target": self.target, **options.__dict__}
        for name, stage in stages.items():
            code = stage(code, metadata)
            if name == last:
                break
        return code, metadata

    def _arguments(self, compiled: Compiled, bound: dict[str, Any]) -> Iterator[tuple[str, Any, str]]:
        """Name, value and type of those that are not constants."""
        names, values = list(bound), list(bound.values())
        for path, kind in compiled.paths:
            value: Any = values
            for i in path:
                value = value[i]
            yield names[path[0]], value, kind

    def _execute(self, compiled: Compiled, bound: dict[str, Any], grid: tuple[int, int, int]) -> None:
        program: Program = compiled.program
        arguments: list[Any] = []
        bounds: dict[int, Bounds] = {}
        self.storages.begin_launch()
        given = list(self._arguments(compiled, bound))
        for number, ((argument, value, _), kind) in enumerate(zip(given, program.arg_types, strict=True)):
            if kind.is_pointer:
                bounds[number] = self._bounds(argument, value)
                arguments.append(np.int64(value.data_ptr()))
            elif kind.is_integer:
                arguments.append(arithmetic.integer(int(value), kind.elem))
            else:
                arguments.append(arithmetic.DTYPES[kind.elem].type(value))
        name, count = program.name, grid[0] * grid[1] * grid[2]
        self.report.launched(name, count)
        order = self._random.permutation(count).tolist()
        machine = Machine(program, grid, bounds, self.storages, self.report, self._random)
        with np.errstate(all="ignore"):
            machine.run(arguments, order)

    def _bounds(self, name: str, tensor: torch.Tensor) -> Bounds:
        start, end = self.storages.add(tensor.untyped_storage())
        first = tensor.data_ptr()
        span = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True)) + 1
        return Bounds(name, start, end, first, first + (span * tensor.element_size() if tensor.numel() else 0))


def _paths(kinds: Any, path: tuple[int, ...] = ()) -> Iterator[tuple[tuple[int, ...], str]]:
    """The places and types of a signature's arguments: tuples are flattened, and constants are left out."""
    if isinstance(kinds, (tuple, list)):
        for i, kind in enumerate(kinds):
            yield from _paths(kind, (*path, i))
    elif kinds != "constexpr":
        yield path, kinds
