"""The definition of the rows operations, one row at a time. Slow, and read by tests only.

Where next observations are is in ``reference_ring.py``, what becomes of elements in ``reference_elements.py``.
"""

import torch
from torch import Tensor

from gpubuf.kernels.rows import DRAWN, NEXT, STEPS, SUM
from gpubuf.kernels.rows.reference_elements import ABSENT, Key, computed, discounted, encoded
from gpubuf.kernels.rows.reference_ring import StoredOnce


class Ring(StoredOnce):
    """A storage. ``ends`` are the rows that end a trajectory."""

    ends: set[int]

    def generation(self, row: int) -> int:
        """How often a row has been written."""
        return len(range(row % self.capacity, self.written, self.capacity))

    def sample(self, uniforms: list[float]) -> list[int]:
        """The rows that these uniforms draw."""
        return [min(int(uniform * self.size), self.size - 1) for uniform in uniforms]

    def window(self, row: int, n_steps: int) -> list[int]:
        rows = [row]
        while len(rows) < n_steps and rows[-1] not in self.ends and not self.is_newest(rows[-1]):
            rows.append(self.after(rows[-1]))
        return rows

    def read(self, key: Key, row: int, n_steps: int, gamma: float, mirrored: bool, shift: tuple[int, int]) -> Tensor:
        rows, kind = self.window(row, n_steps), key.field.row
        if kind in (SUM, STEPS):
            wide = torch.float64 in (key.column.dtype, key.batch)
            steps = torch.full((key.field.elements,), len(rows), dtype=torch.float64 if wide else torch.float32)
            numbers = steps if kind == STEPS else discounted(key, rows, gamma)
            return computed(key, ABSENT, numbers, mirrored, shift)
        stored = self.next_of(key, rows[-1]) if kind == NEXT else key.column[row if kind == DRAWN else rows[-1]]
        return computed(key, stored[: key.field.elements], ABSENT, mirrored, shift)

    def extend(self, sources: list[Tensor], n: int) -> list[int]:
        return self.append([*map(encoded, self.keys, sources)], n)

    def write(self, sources: list[Tensor], index: list[int], generation: list[int] | None = None) -> None:
        """Of duplicates the last one wins; rows that were written since are skipped."""
        kept = [i for i, row in enumerate(index) if generation is None or generation[i] == self.generation(row)]
        self.put([*map(encoded, self.keys, sources)], {index[i] % self.capacity: i for i in kept})

    def relink(self, sources: list[Tensor], index: list[int]) -> None:
        self.set_next([*map(encoded, self.keys, sources)], index)
