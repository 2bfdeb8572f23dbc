"""Runs the programs of a launch one after another and logs what they access."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from tests.gates.ttir import arithmetic as ar
from tests.gates.ttir.emitter import MemoryOp, Program, place_name
from tests.gates.ttir.memory import Storages, gather, scatter
from tests.gates.ttir.report import Report

POISON = 0xDB
"""The byte that memory is filled with before anyone writes it."""

_POISONED = {size: np.frombuffer(bytes([POISON]) * size, f"<u{size}")[0] for size in (2, 4, 8)}

_ATOMICS: dict[str, Callable[[Any, Any], Any]] = {
    "add": np.add,
    "fadd": np.add,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
    "max": np.maximum,
    "min": np.minimum,
    "umax": lambda old, new: np.maximum(ar.unsigned(old), ar.unsigned(new)).view(old.dtype),
    "umin": lambda old, new: np.minimum(ar.unsigned(old), ar.unsigned(new)).view(old.dtype),
    "exch": lambda old, new: new,
}


def _poison(op: MemoryOp) -> Any:
    return np.frombuffer(bytes([POISON]) * op.size, op.dtype)[0].astype(ar.dtype_of(op.elem))


class MemoryFaultError(Exception):
    """An access that is out of bounds or misaligned."""


@dataclass(frozen=True)
class Bounds:
    """Addresses of a pointer argument: of its storage, and of the tensor within it."""

    name: str
    start: int
    end: int
    view_start: int
    view_end: int


@dataclass(eq=False)
class Access:
    """One execution of a memory operation by one program, of the lanes that are not masked."""

    op: MemoryOp
    program: int
    step: int
    addresses: np.ndarray
    lanes: np.ndarray | None
    bits: np.ndarray | None = None  # what a store puts there
    silent: np.ndarray | None = None  # whether it was there before

    @property
    def is_load(self) -> bool:
        return self.op.kind == "load"

    @property
    def is_store(self) -> bool:
        return self.op.kind == "store"

    @property
    def is_atomic(self) -> bool:
        return self.op.kind == "atomic"

    def lane_of(self, i: int) -> int:
        return i if self.lanes is None else int(self.lanes[i])


@dataclass(frozen=True)
class OneAtomic:
    """An atomic of one thread that orders others; ``barrier`` is the step of the last barrier before it.

    It is a scalar, or a block of which one lane is active: what that lane does next comes after it, used or not.
    """

    program: int
    step: int
    address: int
    barrier: int
    ordering: str
    used: bool


def described(op: MemoryOp) -> tuple[str, str]:
    """(text, line of the statement) of an access, for a finding."""
    words = [op.kind, op.action, "scalar" if op.scalar else "", op.where]
    return " ".join(filter(None, words)), place_name(op.places[0]) if op.places else "?"


class Machine:
    """One launch.

    Args:
        bounds: by the number of every pointer argument.
        rng: shuffles the lanes of stores and atomics, among which nobody promises an order.
    """

    def __init__(
        self,
        program: Program,
        grid: tuple[int, int, int],
        bounds: dict[int, Bounds],
        storages: Storages,
        report: Report,
        rng: np.random.Generator,
    ) -> None:
        self.program, self.grid, self.bounds = program, grid, bounds
        self.storages, self.report, self.rng = storages, report, rng
        self.current = 0  # program
        self.now = 0  # step of it
        self.last_barrier = 0
        self.accesses: list[Access] = []
        self.interval: list[Access] = []  # since the last barrier
        self.atomics: list[OneAtomic] = []

    def run(self, args: list[Any], order: list[int]) -> None:
        """All programs in an order, then the search for races between them."""
        from tests.gates.ttir.detect import within_launch

        width, height, _ = self.grid
        for number in order:
            self.current, self.now, self.last_barrier = number, 0, 0
            pid = (number % width, number // width % height, number // (width * height))
            self.program.run(self, pid, self.grid, *args)
            self._end_interval()
        within_launch(self)

    def _end_interval(self) -> None:
        from tests.gates.ttir.detect import within_interval

        if any(not access.is_load for access in self.interval):
            within_interval(self, self.interval)
        self.interval = []

    def find(self, kind: str, message: str, *ops: MemoryOp) -> None:
        self.report.add(kind, self.program.name, message, *map(described, ops))

    # What follows is called by translated code.

    def range(self, low: Any, high: Any, step: Any) -> Any:
        if step <= 0:
            raise ValueError("scf.for with a step that is not positive")
        kind = type(low)
        return map(kind, range(int(low), int(high), int(step)))

    def hint(self, pointers: Any, divisor: int, op: MemoryOp) -> None:
        if (pointers % divisor).any():
            self.find("hint", f"a pointer is no multiple of {divisor}", op)

    def barrier(self) -> None:
        self.now += 1
        self._end_interval()
        self.last_barrier = self.now

    def load(self, op: MemoryOp, pointer: Any, mask: Any, other: Any) -> Any:
        self.now += 1
        addresses, lanes = self._selected(op, pointer, mask)
        # Without a default, what is masked is undefined: something that nobody takes for a sensible number.
        out = np.array(ar.whole(_poison(op) if other is None else other, op.shape))
        if addresses.size:
            self._check(op, addresses)
            bits = gather(addresses, op.size)
            if op.size > 1 and (bits == _POISONED[op.size]).any():
                self.find("uninitialised", "reads what nothing has written", op)
            self._log(op, addresses, lanes)
            out.reshape(-1)[slice(None) if lanes is None else lanes] = bits.view(op.dtype)
        return out[()]

    def store(self, op: MemoryOp, pointer: Any, value: Any, mask: Any) -> None:
        self.now += 1
        addresses, lanes = self._selected(op, pointer, mask)
        if addresses.size == 0:
            return
        self._check(op, addresses)
        bits = self._values(op, value, lanes).view(f"<u{op.size}")
        access = self._log(op, addresses, lanes)
        access.bits, access.silent = bits.astype(np.uint64), gather(addresses, op.size) == bits
        order = self.rng.permutation(addresses.size)
        scatter(addresses[order], op.size, bits[order])

    def atomic(self, op: MemoryOp, pointer: Any, value: Any, mask: Any) -> Any:
        self.now += 1
        addresses, lanes = self._selected(op, pointer, mask)
        out = np.zeros(op.shape, op.dtype)
        if addresses.size:
            self._check(op, addresses)
            values = self._values(op, value, lanes)
            old = np.zeros(values.shape, op.dtype)
            for i in self.rng.permutation(addresses.size):
                where = addresses[i : i + 1]
                old[i : i + 1] = gather(where, op.size).view(op.dtype)
                new = _ATOMICS[op.action](old[i : i + 1], values[i : i + 1])
                scatter(where, op.size, new.view(f"<u{op.size}"))
            self._log(op, addresses, lanes)
            out.reshape(-1)[slice(None) if lanes is None else lanes] = old
            if addresses.size == 1 and op.ordering != "relaxed":
                used = op.used or not op.scalar
                self.atomics.append(
                    OneAtomic(self.current, self.now, int(addresses[0]), self.last_barrier, op.ordering, used)
                )
        return out[()]

    # Helpers of these

    def _selected(self, op: MemoryOp, pointer: Any, mask: Any) -> tuple[np.ndarray, np.ndarray | None]:
        """(addresses of the lanes that are not masked, their numbers; None for all)."""
        addresses = np.broadcast_to(pointer, op.shape).ravel()
        if mask is None:
            return addresses, None
        lanes = np.broadcast_to(mask, op.shape).ravel().nonzero()[0]
        return (addresses, None) if lanes.size == addresses.size else (addresses[lanes], lanes)

    def _values(self, op: MemoryOp, value: Any, lanes: np.ndarray | None) -> np.ndarray:
        values = np.broadcast_to(value, op.shape).ravel()
        return np.ascontiguousarray((values if lanes is None else values[lanes]).astype(op.dtype, copy=False))

    def _log(self, op: MemoryOp, addresses: np.ndarray, lanes: np.ndarray | None) -> Access:
        access = Access(op, self.current, self.now, addresses, lanes)
        self.interval.append(access)
        self.accesses.append(access)
        return access

    def _check(self, op: MemoryOp, addresses: np.ndarray) -> None:
        """Alignment and bounds."""
        uneven = addresses % op.size != 0
        if uneven.any():
            self._fault("misaligned", op, int(addresses[uneven][0]), "misaligned")
        if op.roots is None:
            outside = self.storages.outside(addresses, op.size)
            if outside.any():
                self._fault("out-of-bounds", op, int(addresses[outside][0]), "in no live storage")
            return
        low, high = int(addresses.min()), int(addresses.max()) + op.size
        for root in op.roots:
            bounds = self.bounds[root]
            if bounds.start <= low and high <= bounds.end:
                if low < bounds.view_start or bounds.view_end < high:
                    self.find("beyond-view", f"outside the tensor {bounds.name}, though within its storage", op)
                return
        bounds = self.bounds[min(op.roots)]
        bad = low if low < bounds.start else high - op.size
        self._fault("out-of-bounds", op, bad, f"{bounds.name} has {bounds.start:#x} .. {bounds.end:#x}")

    def _fault(self, kind: str, op: MemoryOp, address: int, more: str) -> None:
        message = f"{op.kind} of {op.size} bytes at {address:#x}: {more} (program {self.current} of {self.grid})"
        self.find(kind, message, op)
        raise MemoryFaultError(f"{self.program.name}: {message}, {op.where}")
