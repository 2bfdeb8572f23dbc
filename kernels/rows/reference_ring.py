"""The rows of a ring, and observations that are stored once, one row at a time. Slow, and read by tests only."""

from typing import Any

import torch
from torch import Tensor

from gpubuf.kernels.rows import IN_SUCCESSOR, LOST, NEXT, STEPS


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

    def is_newest(self, row: int) -> bool:
        return row // self.envs == (self.written // self.envs - 1) % (self.capacity // self.envs)

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
            if key.field.writes and key.field.row not in (NEXT, STEPS):
                for row, i in rows.items():
                    key.column[row] = source[i]

    def _set_next(self, number: int, stored: list[Tensor], i: int, live: int) -> None:
        """Row ``i`` of what is stored has the next observations of a row: pending, where they are already, or aside."""
        row = number % self.capacity
        keys = [f for f, key in enumerate(self.keys) if key.field.row == NEXT and key.field.writes]
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
