"""The definition of the rows operations, one row at a time. Slow, and read by tests only.

First what becomes of elements, then where rows and next observations are, then the operations.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gpubuf.kernels.rows import (
    CROSS,
    DRAWN,
    GENERATION,
    IN_SUCCESSOR,
    IS_FIRST,
    LOST,
    NEXT,
    OPAQUE,
    PADDED,
    POSITION,
    STEPS,
    SUM,
    ZERO,
    Field,
    dtype_code,
)

#: In place of memory that a field does not have.
ABSENT = torch.empty(0)


@dataclass
class Key:
    """A field and its memory: ``column``, ``entries`` and ``pending`` have rows of elements."""

    field: Field
    column: Tensor
    written: torch.dtype
    batch: torch.dtype
    mean: Tensor = ABSENT
    factor: Tensor = ABSENT
    entries: Tensor = ABSENT
    pending: Tensor = ABSENT


def is_integer(dtype: torch.dtype) -> bool:
    return not dtype.is_floating_point and dtype_code(dtype) != OPAQUE


def cut(numbers: Tensor, dtype: torch.dtype) -> Tensor:
    """Numbers as elements. Those of integers are rounded, half to even, and cut to the range."""
    if not is_integer(dtype) or dtype is torch.bool or numbers.dtype is dtype:
        return numbers.to(dtype)
    low, high = torch.iinfo(dtype).min, torch.iinfo(dtype).max
    return torch.tensor([0 if math.isnan(x) else min(max(x, low), high) for x in rounded(numbers)], dtype=dtype)


def rounded(numbers: Tensor) -> list[Any]:
    return [round(x) if math.isfinite(x) else x for x in numbers.reshape(-1).tolist()]


def has_codec(key: Key) -> bool:
    return (key.field.scale, key.field.offset) != (1, 0)


def encoded(key: Key, source: Tensor) -> Tensor:
    """Written rows as they are stored."""
    dtype = key.column.dtype
    if not source.numel() or (key.written is dtype and not has_codec(key)):
        return source
    numbers = source
    if has_codec(key) or not (is_integer(source.dtype) and is_integer(dtype)):
        numbers = source.to(torch.float64 if torch.float64 in (source.dtype, dtype) else torch.float32)
    if has_codec(key):
        numbers = (numbers - numbers.new_tensor(key.field.offset)) / numbers.new_tensor(key.field.scale)
    if is_integer(dtype) and dtype is not torch.bool:
        fits = [x == x and torch.iinfo(dtype).min <= x <= torch.iinfo(dtype).max for x in rounded(numbers)]
        if not all(fits):
            raise ValueError(f"a number does not fit {dtype}")
    return cut(numbers.reshape(-1), dtype).view(source.shape)


def numbers_of(key: Key, stored: Tensor) -> Tensor:
    summed = key.field.kind == SUM and is_integer(stored.dtype)
    wide = summed or torch.float64 in (stored.dtype, key.batch)
    numbers = stored.to(torch.float64 if wide else torch.float32)
    if not has_codec(key):
        return numbers
    return numbers * numbers.new_tensor(key.field.scale) + numbers.new_tensor(key.field.offset)


def discounted(key: Key, rows: list[int], gamma: float) -> Tensor:
    terms = [numbers_of(key, key.column[row]) for row in rows]
    total, discount = terms[0].double(), 1.0
    for term in terms[1:]:
        discount *= gamma
        total = total + discount * term.double()
    return total.to(terms[0].dtype)


def shifted(elements: Tensor, field: Field, down: int, right: int) -> Tensor:
    image = elements.view(-1, field.height, field.width)
    rows = [min(max(y + down, 0), field.height - 1) for y in range(field.height)]
    columns = [min(max(x + right, 0), field.width - 1) for x in range(field.width)]
    # Pixel by pixel: PyTorch before 2.9 has no index of some dtypes.
    return torch.stack([image[:, y, x] for y in rows for x in columns], 1).reshape(-1)


def computed(key: Key, stored: Tensor, summed: Tensor, shift: tuple[int, int]) -> Tensor:
    """A row of the batch from a stored row, or from numbers if those are given instead."""
    field = key.field
    as_integers = is_integer(stored.dtype) and is_integer(key.batch)
    moved = summed is ABSENT and (stored.dtype is key.batch or as_integers)
    if moved and not has_codec(key) and key.mean is ABSENT:
        result = cut(stored, key.batch)
    else:
        numbers = numbers_of(key, stored) if summed is ABSENT else summed
        if key.mean is not ABSENT:
            numbers = (numbers - key.mean.to(numbers.dtype)) * key.factor.to(numbers.dtype)
            low, high = numbers.new_tensor([field.low, field.high])
            numbers = torch.where(numbers < low, low, numbers)
            numbers = torch.where(numbers > high, high, numbers)
        result = cut(numbers, key.batch)
    return shifted(result, field, *shift) if field.pad else result


class StoredOnce:
    """``keys`` are fields and their memory. ``written`` rows were written, of which ``size`` are there.

    ``refuses``: as the CPU does if there is no room aside. All rows are given as they are stored.
    """

    def __init__(self, keys: list[Any], capacity: int, envs: int, written: int = 0, refuses: bool = True) -> None:
        self.keys, self.capacity, self.envs, self.refuses = keys, capacity, envs, refuses
        self.written, self.size, self.faults = written, min(written, capacity), 0
        self.links, self.owners = [IN_SUCCESSOR] * capacity, [0]

    def after(self, row: int) -> int:
        return (row + self.envs) % self.capacity

    def before(self, row: int) -> int:
        return (row - self.envs) % self.capacity

    def age(self, row: int) -> int:
        """Steps from a row to the newest one."""
        return ((self.written - 1) // self.envs - row // self.envs) % (self.capacity // self.envs)

    def is_newest(self, row: int) -> bool:
        return self.age(row) == 0

    def next_of(self, key: Any, row: int) -> Tensor:
        if self.is_newest(row):
            pending: Tensor = key.pending[row % self.envs]
            return pending
        if self.links[row] == LOST:
            raise IndexError(f"the next observation of row {row} is lost")
        found: Tensor = key.entries[self.links[row] - 1] if self.links[row] else key.column[self.after(row)]
        return found

    def append(self, stored: list[Tensor], n: int) -> list[int]:
        before, after, had_rows = self.written, self.written + n, self.size > 0
        live, first = max(before - self.size, after - self.capacity), max(before, after - self.capacity)
        pending = [key.pending.clone() for key in self.keys]
        self.put(stored, {number % self.capacity: number - before for number in range(first, after)})
        self.written, self.size = after, min(self.size + n, self.capacity)
        for number in range(max(before - had_rows * self.envs, after - self.capacity), after):
            old = number < before
            self._set_next(number, pending if old else stored, number % self.envs if old else number - before, live)
        return [number % self.capacity for number in range(before, after)]

    def set_next(self, stored: list[Tensor], index: list[int]) -> None:
        last = {row % self.capacity: i for i, row in enumerate(index)}
        for row in last:
            if self.links[row] > 0:
                self.owners[self.links[row] - 1] = -1
        for row, i in sorted(last.items(), key=lambda item: item[1]):
            number = self.written - 1 - (self.written - 1 - row) % self.capacity
            self._set_next(number, stored, i, self.written - self.size)

    def put(self, stored: list[Tensor], rows: dict[int, int]) -> None:
        for key, source in zip(self.keys, stored, strict=True):
            if key.field.writes and key.field.kind not in (NEXT, STEPS):
                for row, i in rows.items():
                    key.column[row] = source[i]

    def _set_next(self, number: int, stored: list[Tensor], i: int, live: int) -> None:
        """Row ``i`` of what is stored has the next observations of a row: pending, where they are already, or aside."""
        row = number % self.capacity
        keys = [f for f, key in enumerate(self.keys) if key.field.kind == NEXT and key.field.writes]
        shared = [(self.keys[f], stored[f][i]) for f in keys]
        self.links[row] = IN_SUCCESSOR
        if self.is_newest(row):
            for key, found in shared:
                key.pending[row % self.envs] = found
        elif not all(same_bytes(found, key.column[self.after(row)]) for key, found in shared):
            slots, turn = len(self.owners) - 1, self.owners[-1]
            free = [place for place in range(turn, turn + slots) if self.owners[place % slots] < live]
            if not free:
                if self.refuses:
                    raise RuntimeError("no room aside")
                self.links[row], self.faults = LOST, self.faults + 1
                return
            entry = free[0] % slots
            self.owners[entry], self.owners[-1], self.links[row] = number, free[0] + 1, entry + 1
            for key, found in shared:
                key.entries[entry] = found


def same_bytes(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


class Ring(StoredOnce):
    """A storage. ``ends`` are the rows that end a trajectory."""

    ends: set[int]

    def generation(self, row: int) -> int:
        """How often a row has been written."""
        return len(range(row % self.capacity, self.written, self.capacity))

    def sample(self, uniforms: list[float], past: int = 0) -> list[int]:
        """The rows that these uniforms draw: in the order of their places, or by age if some are left out."""
        rows = list(range(self.size))
        if past and self.has_lost:
            rows = [number % self.capacity for number in range(self.written - self.size, self.written)]
            rows = rows[min(past * self.envs, self.size - self.envs) :]
        return [rows[min(int(uniform * len(rows)), len(rows) - 1)] for uniform in uniforms]

    def transition(self, row: int, n_steps: int) -> list[int]:
        rows = [row]
        while len(rows) < n_steps and rows[-1] not in self.ends and not self.is_newest(rows[-1]):
            rows.append(self.after(rows[-1]))
        return rows

    def read(self, key: Key, row: int, n_steps: int, gamma: float, shift: tuple[int, int]) -> Tensor:
        rows, kind = self.transition(row, n_steps), key.field.kind
        if kind in (SUM, STEPS):
            wide = torch.float64 in (key.column.dtype, key.batch)
            steps = torch.full((key.field.elements,), len(rows), dtype=torch.float64 if wide else torch.float32)
            numbers = steps if kind == STEPS else discounted(key, rows, gamma)
            return computed(key, ABSENT, numbers, shift)
        field, base = key.field, row if kind == DRAWN or kind >= PADDED else rows[-1]
        return torch.cat([self.slot(key, base, field.first + w * field.step, shift) for w in range(field.window)])

    def slot(self, key: Key, row: int, offset: int, shift: tuple[int, int]) -> Tensor:
        """What stands so many steps after a row in a window."""
        kind, (row, left) = key.field.kind, self.walk(row, offset, key.field.outside == CROSS)
        if kind == PADDED:
            return torch.tensor([left != 0]).to(key.batch)
        if kind == POSITION:
            return torch.tensor([-1 if left else row]).to(key.batch)
        if kind == GENERATION:
            return torch.tensor([-1 if left else self.generation(row)]).to(key.batch)
        if kind == IS_FIRST:
            return torch.tensor([self.is_first(row)]).to(key.batch)
        if kind == NEXT and left < 0:
            # Before the first next observation there is one more: that of the row itself.
            stored, left = key.column[row], left + 1
        else:
            stored = self.next_of(key, row) if kind == NEXT else key.column[row]
        result = computed(key, stored[: key.field.elements], ABSENT, shift)
        return torch.zeros_like(result) if left and key.field.outside == ZERO else result

    def walk(self, row: int, by: int, crosses: bool) -> tuple[int, int]:
        """The row so many steps after another, or before it, as far as rows go; and the steps that are left then."""
        while by > 0 and not self.is_newest(row) and (crosses or row not in self.ends):
            row, by = self.after(row), by - 1
        while by < 0 and self.age(row) + 1 < self.size // self.envs and (crosses or self.before(row) not in self.ends):
            row, by = self.before(row), by + 1
        return row, by

    def is_first(self, row: int) -> bool:
        if self.age(row) + 1 == self.size // self.envs:
            return not self.has_lost
        return self.before(row) in self.ends

    @property
    def has_lost(self) -> bool:
        return self.written > self.size and (
            self.size == self.capacity or (self.written - self.size) % (2 * self.capacity) != 0
        )

    def extend(self, sources: list[Tensor], n: int) -> list[int]:
        return self.append([*map(encoded, self.keys, sources)], n)

    def write(self, sources: list[Tensor], index: list[int], generation: list[int] | None = None) -> None:
        """Of duplicates the last one wins; rows that were written since are skipped."""
        kept = [i for i, row in enumerate(index) if generation is None or generation[i] == self.generation(row)]
        self.put([*map(encoded, self.keys, sources)], {index[i] % self.capacity: i for i in kept})

    def relink(self, sources: list[Tensor], index: list[int]) -> None:
        self.set_next([*map(encoded, self.keys, sources)], index)
