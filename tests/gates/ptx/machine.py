"""Runs programs of a launch side by side, a NumPy lane per thread, and checks what they do."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from tests.gates.ptx.arithmetic import matrix_product, take
from tests.gates.ptx.emitter import DONE, EXCHANGES, Program, bits_of
from tests.gates.ttir.memory import Storages, gather, scatter

_WAITING = 1 << 20
"""Added to the block of a lane that waits at a barrier."""

_STEPS = 200_000
_POISON = np.uint64(0xDBDBDBDBDBDBDBDB)
"""In registers and shared memory before anyone writes to them. Triton computes with it in lanes that nobody reads."""

_SWITCH = 0.15
"""How likely another part of the warps is held back, at each block."""

_ATOMICS: dict[str, Callable[[Any, Any], Any]] = {
    "add": np.add,
    "min": np.minimum,
    "max": np.maximum,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
    "exch": lambda old, new: new,
}
_SOURCES: dict[tuple[str, int, int], np.ndarray] = {}
"""The lane that each lane of a warp takes the value of, by what a shuffle says to all of them."""

_REDUCTIONS: dict[str, Any] = {name: _ATOMICS[name] for name in ("add", "min", "max", "and", "or", "xor")}


class PtxFaultError(Exception):
    """What no device does, or not twice alike. ``kind`` is one of :data:`tests.gates.ttir.report.HIGH`."""

    def __init__(self, kind: str, message: str, place: str) -> None:
        super().__init__(f"{kind}: {message}, {place}")
        self.kind, self.message, self.place = kind, message, place


@dataclass
class Copy:
    """Of a ``cp.async``, what has not arrived: lanes, the group of each, places in shared memory, addresses, bytes."""

    lanes: np.ndarray
    groups: np.ndarray
    places: np.ndarray
    addresses: np.ndarray
    counts: np.ndarray
    size: int

    def of(self, chosen: np.ndarray) -> Copy:
        fields = (self.lanes, self.groups, self.places, self.addresses, self.counts)
        lanes, groups, places, addresses, counts = (field[chosen] for field in fields)
        return Copy(lanes, groups, places, addresses, counts, self.size)


class Machine:
    """A group of programs of a launch, at the beginning.

    Args:
        arguments: the bits of the kernel's.
        programs: the numbers of the programs.
        shared_bytes: shared memory of each.
        random: the order of atomics of one instruction, and of warps.
        lockstep: whether all warps go on together, or a random part of them runs ahead.
    """

    def __init__(
        self,
        program: Program,
        arguments: list[np.uint64],
        grid: tuple[int, int, int],
        programs: np.ndarray,
        shared_bytes: int,
        storages: Storages,
        random: np.random.Generator,
        lockstep: bool = True,
    ) -> None:
        self.program, self.arguments, self.grid, self.storages = program, arguments, grid, storages
        self.random, self.lockstep = random, lockstep
        threads = program.kernel.threads
        self.threads, self.lanes, self.count = threads, threads * programs.size, threads * programs.size
        self._thread = np.tile(np.arange(threads, dtype="u4"), programs.size)
        numbers = np.repeat(programs.astype("u4"), threads)
        width, height = np.uint32(grid[0]), np.uint32(grid[1])
        self._program = [numbers % width, numbers // width % height, numbers // (width * height)]
        self._shared_size = shared_bytes
        self._stride = -(-shared_bytes // 16) * 16
        self._start = np.repeat(np.arange(programs.size) * self._stride, threads)
        self._shared = np.full(self._stride * programs.size, 0xDB, "u1")
        self._everyone = np.arange(self.lanes)
        self.registers: list[Any] = [_POISON.astype(bits_of(name)) for name in program.registers]
        #: Which registers are arrays that nothing else refers to.
        self._own = [False] * len(self.registers)
        self.executed = np.zeros((len(program.blocks), self.lanes // 32), np.int64)
        self.loaded = self.stored = self.atomics = 0
        self._copies: list[Copy] = []
        #: Groups of copies that each lane has closed.
        self._groups = np.zeros(self.lanes, np.int64)
        self.trips, self._pending = np.zeros((2, self.lanes // 32), np.int64)
        #: Whether the lanes of the block are those of whole warps, and whether some may wait at a barrier.
        self._whole, self._waiting = True, False

    def run(self) -> None:
        """Run the programs to their ends."""
        blocks = self.program.blocks
        # The block of all lanes, of each warp, or of each lane if some warps have parted.
        at: Any = 0 if self.lockstep else np.zeros(self.lanes // 32, np.int64)
        held: np.ndarray | None = None
        for _ in range(_STEPS):
            lanes: np.ndarray | None = None
            warps: Any = slice(None)
            if isinstance(at, int):
                first = at
            else:
                if self._waiting:
                    self._release(at)
                if not self.lockstep:
                    held = self._held(at, held)
                first, here = self._next(at, held)
                if np.count_nonzero(here) < here.size:
                    warps = np.logical_or.reduce(here.reshape(self.lanes // 32, -1), axis=1).nonzero()[0]
                    lanes = self._everyone.reshape(here.size, -1)[here].ravel()
            if first == DONE:
                return
            self._whole = lanes is None or at.size < self.lanes
            self.executed[first, warps] += 1
            self.program.trips.count(first, self.trips, self._pending, warps)
            block = blocks[first]
            self.count = self.lanes if lanes is None else lanes.size
            if block is not None:
                after = block(self, lanes)
            elif lanes is None:
                self._meet(slice(None))
                after = first + 1
            else:
                after, self._waiting = first + _WAITING, True
            at = self._moved(at, lanes, warps, after)
        raise PtxFaultError("endless", f"more than {_STEPS} blocks", self._place(first))

    def _moved(self, at: Any, lanes: np.ndarray | None, warps: Any, after: Any) -> Any:
        """Where all are once some lanes, of some warps, have gone on: by warp, if the lanes of each are together."""
        if lanes is None:
            if isinstance(after, int):
                return after if self.lockstep else np.full(self.lanes // 32, after)
            at = after
        elif isinstance(after, int) and self._whole:
            at[warps] = after
            return at
        else:
            at = np.repeat(at, self.lanes // at.size)
            at[lanes] = after
        of_warps = at.reshape(-1, 32)
        return of_warps[:, 0].copy() if (of_warps == of_warps[:, :1]).all() else at

    def _next(self, at: np.ndarray, held: np.ndarray | None) -> tuple[int, np.ndarray]:
        """The first block that lanes may run now, and which. Those of ``held`` warps may not."""
        if held is not None:
            at = np.where(np.repeat(held, at.size // held.size), DONE, at)
        early: int | None = None
        while True:
            first = int(at.min())
            here = at == first
            if first >= _WAITING and early is not None:
                where = self.program.kernel.blocks[early]
                place = next(i.place for i in where if i.op in EXCHANGES)
                raise PtxFaultError("shuffle", "lanes of a warp wait for others that never come", place)
            if first not in self.program.exchanges or at.size < self.lanes:
                return first, here
            whole = np.repeat(here.reshape(-1, 32).all(axis=1), 32)
            if whole.any():
                return first, whole
            early, at = first, np.where(here, DONE, at)

    def _release(self, at: np.ndarray) -> None:
        """Let lanes go on from a barrier that all lanes of their programs have reached."""
        waiting = (at >= _WAITING) & (at < DONE)
        self._waiting = bool(waiting.any())
        groups = at.reshape(self.lanes // self.threads, -1)
        ready = (waiting | (at == DONE)).reshape(groups.shape).all(axis=1) & waiting.reshape(groups.shape).any(axis=1)
        if ready.any():
            blocks = np.where(groups == DONE, groups.min(axis=1, keepdims=True), groups)[ready]
            if (blocks != blocks[:, :1]).any():
                raise PtxFaultError("barrier", "warps wait at different barriers", self._place(int(blocks.min())))
            self._meet(ready)
            released = np.repeat(ready, groups.shape[1]) & waiting
            at[released] -= _WAITING - 1

    def _meet(self, programs: Any) -> None:
        """The warps of these programs have waited for each other."""
        trips = self.trips.reshape(-1, self.threads // 32)
        trips[programs] = trips[programs].max(axis=1, keepdims=True)

    def _held(self, at: np.ndarray, held: np.ndarray | None) -> np.ndarray:
        """The warps that are not to run now: some at random, and never all that could."""
        able = at < _WAITING
        if at.size == self.lanes:
            able = np.logical_or.reduce(able.reshape(-1, 32), axis=1)
        while held is None or self.random.random() < _SWITCH or (able.any() and not (able & ~held).any()):
            held = self.random.random(able.size) < self.random.random()
        return held

    def _place(self, number: int) -> str:
        return self.program.kernel.blocks[number % _WAITING][0].place

    # What blocks call

    def tid(self, axis: int, lanes: np.ndarray | None) -> Any:
        return take(self._thread, lanes) if axis == 0 else np.uint32(0)

    def ntid(self, axis: int, lanes: np.ndarray | None) -> Any:
        return np.uint32(1 if axis else self.threads)

    def ctaid(self, axis: int, lanes: np.ndarray | None) -> Any:
        return take(self._program[axis], lanes)

    def nctaid(self, axis: int, lanes: np.ndarray | None) -> Any:
        return np.uint32(self.grid[axis])

    def parameter(self, number: Any, dtype: str) -> Any:
        # Triton adds pointers to scratch memory, which no kernel here has.
        bits = np.array([*self.arguments, 0, 0, 0, 0], "u8")[number]
        return bits.astype(f"u{dtype[1:]}").view(dtype)

    def read(self, number: int, lanes: np.ndarray | None) -> Any:
        """A register in some lanes."""
        value = self.registers[number]
        if lanes is None or not value.ndim:
            self._own[number] = False
            return value
        return value.take(lanes)

    def keep(self, number: int, lanes: np.ndarray | None, value: Any) -> None:
        """Let some lanes set a register."""
        if lanes is None:
            self.registers[number], self._own[number] = value, False
            return
        if not self._own[number]:
            before, self._own[number] = self.registers[number], True
            self.registers[number] = before.copy() if before.ndim else np.full(self.lanes, before)
        self.registers[number][lanes] = value

    def branch(self, taken: Any, target: int, otherwise: int) -> Any:
        if not taken.ndim:
            return target if taken else otherwise
        count = np.count_nonzero(taken)
        if count in (0, taken.size):
            return target if count else otherwise
        return np.where(taken, target, otherwise)

    def choose(self, targets: list[int], which: Any) -> Any:
        chosen = np.array(targets)[which]
        return chosen if chosen.ndim else int(chosen)

    def unset(self, name: str, place: str) -> None:
        raise PtxFaultError("register", f"{name} is read, and nothing is written to it before", place)

    def _chosen(self, lanes: np.ndarray | None, guard: Any, address: Any) -> tuple[Any, np.ndarray]:
        """Which of a block's lanes make an access, as an index, and their addresses."""
        address = self._all(address)
        if guard is None:
            return slice(None), address
        chosen = self._all(guard).nonzero()[0]
        return (slice(None), address) if chosen.size == self.count else (chosen, address.take(chosen))

    def _all(self, value: Any) -> np.ndarray:
        """A value in each lane of the block."""
        return value if value.shape == (self.count,) else np.full(self.count, value)

    def _spread(self, chosen: Any, values: list[np.ndarray], dtype: str) -> list[np.ndarray]:
        if isinstance(chosen, slice):
            return [value.view(dtype) for value in values]
        spread = []
        for value in values:
            spread.append(np.zeros(self.count, dtype))
            spread[-1][chosen] = value.view(dtype)
        return spread

    def _check(self, address: np.ndarray, size: int, unit: int, place: str, what: str) -> None:
        """``size`` bytes at once, of a type of ``unit`` bytes, in global memory."""
        if not address.size:
            return
        self._aligned(address, size, place, what)
        low, high = int(address.min()), int(address.max())
        if not self.storages.within(low, high + size):
            bad = self.storages.outside(address, size)
            if bad.any():
                where = f"{what} of {size} bytes at {int(address[bad][0]):#x}"
                raise PtxFaultError("out-of-bounds", where, place)

    def _aligned(self, address: np.ndarray, size: int, place: str, what: str) -> None:
        if int(np.bitwise_or.reduce(address, initial=0)) & (size - 1):
            where = f"{what} of {size} bytes at {int(address[(address & (size - 1)) != 0][0]):#x}"
            raise PtxFaultError("misaligned", where, place)

    def _moved_bytes(self, lanes: np.ndarray | None, chosen: Any, address: np.ndarray, size: int) -> int:
        """Of an access: what neighbours in a warp ask for at one address is moved once."""
        if not address.size:
            return 0
        warp = take(self._everyone, lanes)[: self.count][chosen] // 32
        changes = np.count_nonzero((warp[1:] != warp[:-1]) | (address[1:] != address[:-1]))
        return size * (1 + int(changes))

    def load_global(
        self, lanes: np.ndarray | None, address: Any, guard: Any, dtype: str, count: int, place: str
    ) -> list[np.ndarray]:
        size = int(dtype[1:])
        chosen, address = self._chosen(lanes, guard, address)
        self._check(address, size * count, size, place, "load")
        self.loaded += self._moved_bytes(lanes, chosen, address, size * count)
        return self._spread(chosen, [gather(address + k * size, size) for k in range(count)], dtype)

    def store_global(
        self, lanes: np.ndarray | None, address: Any, guard: Any, size: int, values: list[Any], place: str
    ) -> None:
        chosen, address = self._chosen(lanes, guard, address)
        self._check(address, size * len(values), size, place, "store")
        self.stored += self._moved_bytes(lanes, chosen, address, size * len(values))
        for k, value in enumerate(values):
            scatter(address + k * size, size, self._all(value)[chosen])

    def _in_shared(
        self, lanes: np.ndarray | None, chosen: Any, address: np.ndarray, size: int, place: str, what: str
    ) -> np.ndarray:
        """Places in the memory of all programs here, of addresses in the shared memory of one."""
        if address.size and (int(address.min()) < 0 or int(address.max()) + size > self._shared_size):
            bad = (address < 0) | (address + size > self._shared_size)
            where = f"{what} of {size} bytes at {int(address[bad][0])} of {self._shared_size}"
            raise PtxFaultError("shared-bounds", where, place)
        self._aligned(address, size, place, what)
        places: np.ndarray = address + take(self._start, lanes)[chosen]
        return places

    def load_shared(
        self, lanes: np.ndarray | None, address: Any, guard: Any, dtype: str, count: int, place: str
    ) -> list[np.ndarray]:
        size = int(dtype[1:])
        chosen, address = self._chosen(lanes, guard, address)
        first = self._in_shared(lanes, chosen, address, size * count, place, "load") // size
        memory = self._shared.view(f"u{size}")
        return self._spread(chosen, [memory[first + k] for k in range(count)], dtype)

    def store_shared(
        self, lanes: np.ndarray | None, address: Any, guard: Any, size: int, values: list[Any], place: str
    ) -> None:
        chosen, address = self._chosen(lanes, guard, address)
        first = self._in_shared(lanes, chosen, address, size * len(values), place, "store") // size
        memory = self._shared.view(f"u{size}")
        for k, value in enumerate(values):
            memory[first + k] = self._all(value)[chosen]

    def atomic(
        self, lanes: np.ndarray | None, address: Any, guard: Any, action: str, values: list[Any], dtype: str, place: str
    ) -> np.ndarray:
        """Apply an operation of all lanes, in random order. What was there before is returned."""
        size = int(dtype[1:])
        chosen, address = self._chosen(lanes, guard, address)
        self._check(address, size, size, place, "atomic")
        self.atomics += address.size
        operands = [self._all(value)[chosen] for value in values]
        before = np.zeros(address.size, dtype)
        order = self.random.permutation(address.size)
        while order.size:
            _, firsts = np.unique(address[order], return_index=True)
            now = order[firsts]  # each place once
            old = before[now] = gather(address[now], size).view(dtype)
            if action == "cas":
                new = np.where(old == operands[0][now], operands[1][now], old)
            else:
                new = _ATOMICS[action](old, operands[0][now])
            scatter(address[now], size, np.ascontiguousarray(new).view(f"u{size}"))
            order = np.delete(order, firsts)
        return self._spread(chosen, [before], dtype)[0]

    def _whole_warps(self, lanes: np.ndarray | None, guard: Any, mask: Any, place: str) -> None:
        """Lanes that exchange values are of whole warps, as all masks of Triton say."""
        if guard is not None or not self._whole:
            active = self._everyone if lanes is None else lanes
            if guard is not None:
                active = active[self._all(guard)]
            if active.size % 32 or (active.reshape(-1, 32)[:, 0] + 31 != active.reshape(-1, 32)[:, 31]).any():
                raise PtxFaultError("shuffle", "lanes of a warp exchange values with some that are not there", place)
        if not np.all(mask == np.uint32(0xFFFFFFFF)):
            raise NotImplementedError("an exchange among some lanes of a warp")

    def shuffle(
        self, lanes: np.ndarray | None, value: Any, mode: str, b: Any, c: Any, mask: Any, guard: Any, place: str
    ) -> Any:
        self._whole_warps(lanes, guard, mask, place)
        if not (b.ndim or c.ndim):
            key = mode, int(b), int(c)
            if key not in _SOURCES:
                _SOURCES[key] = self._source(np.arange(32), *key)
            return self._all(value).reshape(-1, 32).take(_SOURCES[key], axis=1).ravel()
        lane = self._everyone[: self.count]
        return self._all(value)[lane - (lane & 31) + self._source(lane & 31, mode, b, c)]

    @staticmethod
    def _source(lane: np.ndarray, mode: str, b: Any, c: Any) -> np.ndarray:
        """Which lane of its warp each of some lanes takes the value of."""
        segment, clamp = (c >> 8) & 31, c & 31
        first = lane & segment
        last = first | (clamp & ~segment)
        if mode == "bfly":
            other = lane ^ b
        elif mode == "idx":
            other = first | (b & ~segment)
        else:
            other = lane + b if mode == "down" else lane - b
        kept = other < last if mode == "up" else other > last
        return np.where(kept, lane, other)

    def reduce(
        self, lanes: np.ndarray | None, value: Any, action: str, mask: Any, guard: Any, place: str
    ) -> np.ndarray:
        self._whole_warps(lanes, guard, mask, place)
        whole = self._all(value).reshape(-1, 32)
        return np.repeat(_REDUCTIONS[action].reduce(whole, axis=1, dtype=whole.dtype), 32)

    def vote(self, lanes: np.ndarray | None, value: Any, action: str, mask: Any, guard: Any, place: str) -> np.ndarray:
        self._whole_warps(lanes, guard, mask, place)
        whole = self._all(value).reshape(-1, 32)
        if action == "ballot":
            return np.repeat(np.packbits(whole, axis=1, bitorder="little").view("u4")[:, 0], 32)
        return np.repeat(whole.any(axis=1) if action == "any" else whole.all(axis=1), 32)

    def _rows(self, lanes: np.ndarray | None, address: Any, count: int, place: str) -> list[np.ndarray]:
        """Places of what each lane has of matrices of 8 by 8 halves, whose rows the lanes of a warp point to."""
        self._whole_warps(lanes, None, np.uint32(0xFFFFFFFF), place)
        every = slice(None)
        rows = self._in_shared(lanes, every, self._all(address), 16, place, "matrix").reshape(-1, 32)
        lane = np.arange(32)
        return [(rows[:, 8 * k + lane // 4] + 4 * (lane % 4)).reshape(-1) // 4 for k in range(count)]

    def load_matrix(
        self, lanes: np.ndarray | None, address: Any, count: int, turned: bool, place: str
    ) -> list[np.ndarray]:
        rows = self._rows(lanes, address, count, place)
        if not turned:
            return [self._shared.view("u4")[row] for row in rows]
        halves = [self._shared.view("u2").reshape(-1, 2)[row].reshape(-1, 8, 8) for row in rows]
        return [np.ascontiguousarray(half.transpose(0, 2, 1)).view("u4").ravel() for half in halves]

    def store_matrix(self, lanes: np.ndarray | None, address: Any, values: list[Any], place: str) -> None:
        for row, value in zip(self._rows(lanes, address, len(values), place), values, strict=True):
            self._shared.view("u4")[row] = self._all(value)

    def multiply(
        self,
        lanes: np.ndarray | None,
        a: list[Any],
        b: list[Any],
        c: list[Any],
        kind: str,
        guard: Any,
        place: str,
    ) -> list[Any]:
        """A product of matrices that the lanes of a warp have together."""
        self._whole_warps(lanes, guard, np.uint32(0xFFFFFFFF), place)
        return matrix_product(kind, *([*map(self._all, registers)] for registers in (a, b, c)))

    # Copies from global to shared memory. They arrive when a lane waits for them, as late as they may; where warps run
    # ahead, some at once.

    def copy(
        self, lanes: np.ndarray | None, target: Any, source: Any, guard: Any, size: int, count: Any, place: str
    ) -> None:
        """Begin to copy ``count`` bytes; what is missing to ``size`` becomes zero."""
        chosen, target = self._chosen(lanes, guard, target)
        counts = self._all(count)[chosen].astype(np.int64)
        sources = self._all(source)[chosen]
        self._check(sources[counts > 0], size, size, place, "copy")
        places = self._in_shared(lanes, chosen, target, size, place, "copy")
        self.loaded += int(counts.sum())
        active = (self._everyone if lanes is None else lanes)[chosen]
        copy = Copy(active, self._groups[active], places, sources, counts, size)
        if self.lockstep or self.random.random() < 0.5:
            self._copies.append(copy)
        else:
            self._land(copy)

    def commit(self, lanes: np.ndarray | None) -> None:
        """Close the group of copies that some lanes have begun."""
        self._groups[slice(None) if lanes is None else lanes] += 1

    def arrive(self, lanes: np.ndarray | None, newest: int) -> None:
        """Let all copies of some lanes arrive but for the ``newest`` groups and, unless that is -1, of no group."""
        waiting = np.zeros(self.lanes, bool)
        waiting[slice(None) if lanes is None else lanes] = True
        under_way: list[Copy] = []
        for copy in self._copies:
            here = waiting[copy.lanes] & (copy.groups < self._groups[copy.lanes] - newest)
            self._land(copy.of(here))
            if not here.all():
                under_way.append(copy.of(~here))
        self._copies = under_way

    def _land(self, copy: Copy) -> None:
        for k in range(0, copy.size, 4):
            words = np.zeros(copy.places.size, "u4")
            read = copy.counts > k
            words[read] = gather(copy.addresses[read] + k, 4)
            self._shared.view("u4")[(copy.places + k) // 4] = words
