"""The definition of the sum tree's operations: a list of weights, and no tree. Slow, and read by tests only."""

from bisect import bisect_right
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import numpy as np

from gpubuf.kernels.sum_tree import LARGEST, SMALLEST


@dataclass
class WeightList:
    capacity: int
    alpha: float = 1.0
    beta: float = 1.0
    eps: float = 0.0
    weights: list[float] = field(default_factory=list)
    eligible: list[bool] | None = None
    max_priority: float | None = None

    def __post_init__(self) -> None:
        self.weights = [0.0] * self.capacity

    @property
    def counting(self) -> list[float]:
        """The weights of eligible rows, 0 elsewhere."""
        return [w if self.eligible is None or self.eligible[row] else 0.0 for row, w in enumerate(self.weights)]

    def weight(self, priority: float) -> float:
        base = np.float64(priority) + self.eps
        with np.errstate(over="ignore"):
            power = base**self.alpha
        return float(np.float32(np.clip(power, SMALLEST, LARGEST) if base > 0 else power))

    def update(self, index: Any, priority: Any, generation: Any = None, written: Any = None, size: Any = None) -> None:
        """``written`` and ``size`` are those of the ring; None: every row was written once."""
        for i, row in enumerate(index):
            times_written = 1 if written is None else len(range(row, written, self.capacity))
            overwritten = generation is not None and generation[i] != times_written
            if row != -1 and not overwritten and (size is None or row < size):
                given = float(np.float32(priority[i]))
                self.weights[row] = self.weight(given)
                self.max_priority = max(given, self.max_priority or 0.0)

    def mark(self, index: list[int], within_buffer: bool = False) -> None:
        weight = self.weight(1.0 if within_buffer or self.max_priority is None else self.max_priority)
        weight = max(self.counting) if within_buffer and max(self.counting) > 0 else weight
        for row in set(index) - {-1}:
            self.weights[row] = weight

    def draw(self, uniforms: list[float], stratified: bool = False) -> list[int]:
        prefix, n = list(accumulate(self.counting)), len(uniforms)
        last = max(row for row, weight in enumerate(self.counting) if weight > 0)
        parts = [(i + u) / n if stratified else u for i, u in enumerate(uniforms)]
        return [min(bisect_right(prefix, part * prefix[-1]), last) for part in parts]

    def importance(self, row: int) -> float:
        return float((self.weights[row] / min(w for w in self.counting if w > 0)) ** -self.beta)
