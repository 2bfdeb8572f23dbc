"""TTIR to Python source: one function that runs one program of the grid.

Operations are translated by handlers, which the modules :mod:`.emit_values`, :mod:`.emit_memory` and
:mod:`.emit_control` register by the operations' names.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from tests.gates.ttir import arithmetic
from tests.gates.ttir.ir import Function, Locations, Op, Place, Region, Type, parse
from tests.support.floats import product


class UnsupportedError(Exception):
    """An operation that the executor does not know."""


@dataclass
class MemoryOp:
    """A load, a store or an atomic of the IR; what the machine is told about it."""

    number: int
    kind: str  # load, store, atomic
    shape: tuple[int, ...]
    scalar: bool
    elem: str
    dtype: np.dtype
    roots: frozenset[int] | None  # arguments that the pointer comes from; None: from an integer, or from many
    places: tuple[Place, ...]  # innermost call first
    action: str = ""  # of an atomic
    ordering: str = ""  # of an atomic: relaxed, acquire, release, acq_rel
    used: bool = True  # whether anything depends on the result
    leader_only: bool = False  # a scalar load that only scalar stores and atomics have a use for

    @property
    def size(self) -> int:
        return self.dtype.itemsize

    @property
    def where(self) -> str:
        own = [place_name(place) for place in self.places if "/triton/" not in place[0] and place[1]]
        return " < ".join(dict.fromkeys(own)) or "?"


def place_name(place: Place) -> str:
    """``rows/_triton.py:150``."""
    return f"{place[0].rpartition('/kernels/')[2]}:{place[1]}"


@dataclass
class Program:
    """A translated kernel. ``run(machine, program id, grid, *args)`` runs one program.

    Where it ``has_products``, blocks of one shape may have several layouts: a lane of them is not always one thread.
    """

    name: str
    run: Callable[..., None]
    arg_types: list[Type]
    source: str
    has_products: bool


Handler = Callable[["Emitter", Op], None]
HANDLERS: dict[str, Handler] = {}


def handles(*names: str) -> Callable[[Handler], Handler]:
    """Register a function for operations of these names."""

    def register(handler: Handler) -> Handler:
        HANDLERS.update(dict.fromkeys(names, handler))
        return handler

    return register


class Emitter:
    """Writes the Python function of one kernel."""

    def __init__(self, function: Function, locations: Locations) -> None:
        self.function, self.locations = function, locations
        self.lines: list[str] = []
        self.indent = 1
        self.types: dict[str, Type] = {}
        self.roots: dict[str, frozenset[int] | None] = {}
        self.constants: dict[str, Any] = {}
        self.memory_ops: list[MemoryOp] = []
        self.has_products = False
        self.combining = False  # in the function of a reduction, where scalars stand for arrays
        self._names: dict[str, str] = {}
        self._users: dict[str, list[Op]] = {}
        self._find_users(function.body)

    def _find_users(self, region: Region) -> None:
        for op in region.ops:
            for ssa in set(op.mentioned):
                self._users.setdefault(ssa.partition("#")[0], []).append(op)
            for inner in op.regions:
                self._find_users(inner)

    def users(self, ssa: str) -> list[Op]:
        """Operations that mention a value."""
        return self._users.get(ssa.partition("#")[0], [])

    def emit(self, line: str) -> None:
        self.lines.append("    " * self.indent + line)

    def name(self, ssa: str) -> str:
        """The Python name of a value."""
        if ssa not in self._names:
            self._names[ssa] = f"v{len(self._names)}_" + re.sub(r"\W", "_", ssa[1:])
        return self._names[ssa]

    def names(self, values: list[str]) -> list[str]:
        return [self.name(value) for value in values]

    def define(self, ssa: str, kind: Type, roots: frozenset[int] | None = None) -> str:
        """Note a value's type, and the arguments that a pointer comes from. Returns its Python name."""
        self.types[ssa] = kind
        self.roots[ssa] = roots
        return self.name(ssa)

    def result(self, op: Op, text: str, kind: Type | None = None, roots: frozenset[int] | None = None) -> None:
        """Assign the one result of ``op``, of its signature's type where none is given."""
        self.emit(f"{self.define(op.results[0], kind or op.type, roots)} = {text}")

    def constant(self, value: Any) -> str:
        name = f"K{len(self.constants)}"
        self.constants[name] = value
        return name

    def dtype(self, elem: str) -> str:
        return self.constant(arithmetic.dtype_of(elem))

    def region(self, region: Region) -> None:
        for op in region.ops:
            handler = HANDLERS.get(op.name)
            if handler is None:
                raise UnsupportedError(f"{op.name} {op.text}")
            handler(self, op)

    def program(self) -> Program:
        """The whole function, compiled by Python."""
        args = [
            self.define(ssa, kind, frozenset([number]) if kind.is_pointer else None)
            for number, (ssa, kind) in enumerate(self.function.args)
        ]
        self.region(self.function.body)
        head = f"def program(m, pid, grid{''.join(', ' + a for a in args)}):\n"
        source = head + "\n".join(self.lines or ["    pass"]) + "\n"
        space: dict[str, Any] = {
            "np": np,
            "ar": arithmetic,
            "product": product,
            "OPS": self.memory_ops,
            **self.constants,
        }
        exec(compile(source, f"<ttir {self.function.name}>", "exec"), space)
        kinds = [kind for _, kind in self.function.args]
        return Program(self.function.name, space["program"], kinds, source, self.has_products)


def translate(text: str) -> Program:
    """A module's one function, as Python."""
    # They register their handlers.
    from tests.gates.ttir import emit_control, emit_memory, emit_values  # noqa: F401

    return Emitter(*parse(text)).program()
