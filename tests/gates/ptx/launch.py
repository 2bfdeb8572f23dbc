"""In the place of Triton's launches: compile to PTX as the JIT would, execute that, and count what is executed."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import triton
from triton._C.libtriton import get_cache_invalidating_env_vars
from triton.backends.compiler import GPUTarget
from triton.compiler.compiler import ASTSource
from triton.runtime.cache import get_cache_manager

from tests.gates.ptx.emitter import Program, translate
from tests.gates.ptx.machine import Machine, PtxFaultError
from tests.gates.ptx.parse import parse
from tests.gates.ttir.launch import Compiled
from tests.gates.ttir.launch import Executor as TtirExecutor

ORDERS = ("lockstep", "warps")
"""Of warps: all go on together, or a random part of them runs ahead to the next barrier."""

TARGETS = ("sm_90", "sm_80", "sm_120")
"""GPUs whose code is executed. That for sm_90 multiplies blocks of 64 rows and more in a way that only a device has."""

LANES = 4096
"""As many threads of programs are executed at once."""

_FLOATS = {"fp32": np.float32, "fp64": np.float64}


@dataclass
class Lowered:
    """What a specialisation executes."""

    program: Program
    shared_bytes: int


@dataclass
class Launch:
    """What one launch cost. An instruction counts once for every warp in which any thread executes it.

    Attributes:
        warps: of one program.
        instructions: warp instructions of all programs.
        most_instructions: those of the program that has most.
        bytes_loaded: from global memory; what neighbours in a warp ask for at one address is loaded once.
        bytes_stored: to global memory, likewise.
        barriers: that one warp passes, at most.
        atomics: of all threads.
        products: ``mma``, of all warps.
        flops: what these compute, by the type of their operands: ``tf32``, ``bf16``, ``f16``, ``f64``.
        trips: how often a warp waits for global memory one after the other, at most; see
            :class:`~tests.gates.ptx.trips.Trips`.
    """

    kernel: str
    grid: tuple[int, int, int]
    warps: int
    instructions: int = 0
    most_instructions: int = 0
    bytes_loaded: int = 0
    bytes_stored: int = 0
    barriers: int = 0
    atomics: int = 0
    products: int = 0
    flops: Counter[str] = field(default_factory=Counter)
    trips: int = 0
    _places: list[Counter[str]] = field(default_factory=list, repr=False, compare=False)
    _executed: Any = field(default=0, repr=False, compare=False)

    @property
    def programs(self) -> int:
        """How many there are."""
        return self.grid[0] * self.grid[1] * self.grid[2]

    @property
    def by_line(self) -> Counter[str]:
        """Warp instructions of all programs, by line of source (``rows/_triton.py:150``), innermost if inlined."""
        lines: Counter[str] = Counter()
        for places, executed in zip(self._places, self._executed, strict=True):
            for place, count in places.items():
                lines[place] += count * int(executed)
        return +lines

    def add(self, machine: Machine) -> None:
        """Count a group of programs that have been executed."""
        blocks = machine.program.kernel.blocks
        lengths = np.array([len(block) for block in blocks])
        barriers = np.array([block[0].is_barrier for block in blocks])
        programs = (lengths @ machine.executed).reshape(-1, self.warps).sum(axis=1)
        self._places = machine.program.places
        self._executed = self._executed + machine.executed.sum(axis=1)
        self.instructions += int(programs.sum())
        self.most_instructions = max(self.most_instructions, int(programs.max()))
        self.barriers = max(self.barriers, int((barriers @ machine.executed).max()))
        self.bytes_loaded += machine.loaded
        self.bytes_stored += machine.stored
        self.atomics += machine.atomics
        for block, count in zip(blocks, machine.executed.sum(axis=1).tolist(), strict=True):
            for instruction in block if count else ():
                if instruction.flops:
                    self.products += count
                    self.flops[instruction.parts[7]] += count * instruction.flops
        self.trips = max(self.trips, int(machine.trips.max()))


class Executor(TtirExecutor):
    """Executes launches from PTX while it is :meth:`installed`. ``launches`` has what each of them cost.

    ``ptx`` is what was compiled last.

    Args:
        seed: of the order of programs, of atomics and of warps.
        order: one of :data:`ORDERS`.
        fusion: whether products and sums may become one instruction, as on a device, with one rounding less.
        target: such as ``"sm_80"``.
    """

    def __init__(self, seed: int = 0, order: str = "lockstep", fusion: bool = True, target: str = TARGETS[0]) -> None:
        super().__init__(seed, GPUTarget("cuda", int(target.removeprefix("sm_")), 32))
        self.order, self.fusion = order, fusion
        self.launches: list[Launch] = []
        self.ptx = ""

    def lowered(self, ptx: str, shared_bytes: int) -> Lowered:
        """Translate PTX. A test may override this to plant a fault in the text."""
        return Lowered(translate(parse(ptx)), shared_bytes)

    def _program(self, source: ASTSource, options: Any) -> Lowered:
        if not self.fusion:
            options = replace(options, enable_fp_fusion=False)
        self.ptx, shared_bytes = self._ptx(source, options)
        return self.lowered(self.ptx, shared_bytes)

    def _ptx(self, source: ASTSource, options: Any) -> tuple[str, int]:
        """The PTX of a specialisation and its bytes of shared memory.

        Triton takes seconds for a large kernel, so both stay in Triton's cache for later processes. What was compiled
        with a finding is not kept: the next process is to find it too.
        """
        key = triton.__version__, self.target, source.hash(), options.hash(), get_cache_invalidating_env_vars()
        cache = get_cache_manager(hashlib.sha256(repr(key).encode()).hexdigest())
        name = f"{source.name[:100]}.ptx.json"
        path = cache.get_file(name)
        if path is None:
            before = self.report.total
            ptx, metadata = self._lowered(source, options, "ptx")
            if self.report.total == before:
                cache.put(json.dumps([ptx, metadata["shared"]]), name)
            return ptx, metadata["shared"]
        ptx, shared_bytes = json.loads(Path(path).read_text())
        return ptx, shared_bytes

    def _execute(self, compiled: Compiled, bound: dict[str, Any], grid: tuple[int, int, int]) -> None:
        lowered: Lowered = compiled.program
        kernel = lowered.program.kernel
        self.storages.begin_launch()
        arguments = [self._bits(*argument) for argument in self._arguments(compiled, bound)]
        count = grid[0] * grid[1] * grid[2]
        self.report.launched(kernel.name, count)
        launch = Launch(kernel.name, grid, kernel.threads // 32)
        order = self._random.permutation(count)
        at_once = max(1, LANES // kernel.threads)
        for first in range(0, count, at_once):
            programs = order[first : first + at_once]
            machine = Machine(
                lowered.program,
                arguments,
                grid,
                programs,
                lowered.shared_bytes,
                self.storages,
                self._random,
                self.order == "lockstep",
            )
            try:
                with np.errstate(all="ignore"):
                    machine.run()
            except PtxFaultError as fault:
                self.report.add(fault.kind, kernel.name, fault.message, (fault.place, fault.place))
                raise
            launch.add(machine)
        self.launches.append(launch)

    def _bits(self, name: str, value: Any, kind: str) -> np.uint64:
        """What the kernel reads of an argument."""
        if kind[0] == "*":
            self._bounds(name, value)
            return np.uint64(value.data_ptr())
        if kind in _FLOATS:
            number = np.asarray(value, _FLOATS[kind])
            return np.uint64(number.view(f"u{number.itemsize}"))
        return np.uint64(int(value) & 0xFFFFFFFFFFFFFFFF)
