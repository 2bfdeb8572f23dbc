"""What a sum tree should hold and draw, in plain Python: lists, and exact sums."""

from __future__ import annotations

import bisect
import itertools
import math
import struct
from collections.abc import Iterable
from dataclasses import dataclass, field

import pytest
import torch

from gpubuf.data.samplers.sum_tree import SumTree
from gpubuf.kernels.sum_tree import LARGEST, SMALLEST


def float32(value: float) -> float:
    return struct.unpack("f", struct.pack("f", value))[0]


def bitmap(legal: Iterable[bool]) -> torch.Tensor:
    """int64 words: row r is bit r % 64 of word r // 64; the bits after the last row are clear."""
    legal = list(legal)
    words = -(-len(legal) // 64)
    number = sum(1 << row for row, bit in enumerate(legal) if bit)
    return torch.tensor(struct.unpack(f"<{words}q", number.to_bytes(8 * words, "little")))


def bits_of(words: torch.Tensor, rows: int) -> list[bool]:
    """The first ``rows`` bits of a bitmap, by arithmetic on Python's integers."""
    numbers = words.tolist()
    return [numbers[row // 64] // 2 ** (row % 64) % 2 == 1 for row in range(rows)]


@dataclass
class Model:
    """The documented semantics of a sum tree, one row at a time."""

    capacity: int
    alpha: float = 1.0
    beta: float = 1.0
    eps: float = 0.0
    weights: list[float] = field(default_factory=list)
    given: float | None = None
    legal: list[bool] | None = None

    def __post_init__(self) -> None:
        self.weights = [0.0] * self.capacity

    @property
    def counting(self) -> list[float]:
        """The weights of legal rows, zero elsewhere."""
        if self.legal is None:
            return self.weights
        return [weight if legal else 0.0 for weight, legal in zip(self.weights, self.legal, strict=True)]

    def weight(self, priority: float) -> float:
        base = priority + self.eps
        try:
            weight = base**self.alpha
        except OverflowError:
            weight = math.inf
        return float32(min(max(weight, SMALLEST), LARGEST)) if base > 0 else weight

    def update(self, index, priority, generation=None, written=None, size=None) -> None:
        """``written`` and ``size`` are those of a ring; by default all rows are valid and were written once."""
        size = self.capacity if size is None else size
        written = self.capacity if written is None else written
        for i, (row, value) in enumerate(zip(index, priority, strict=True)):
            if row == -1 or row >= size:
                continue
            times_written = len(range(row, written, self.capacity))
            if generation is not None and generation[i] != times_written:
                continue
            self.weights[row] = self.weight(float32(value))
            self.given = max(float32(value), self.given if self.given is not None else 0.0)

    def mark(self, index, within_buffer=False) -> None:
        weight = self.weight(1.0 if self.given is None or within_buffer else self.given)
        if within_buffer and max(self.counting) > 0:
            weight = max(self.counting)
        for row in index:
            if row != -1:
                self.weights[row] = weight

    def importance(self, row: int) -> float:
        return (self.weights[row] / min(w for w in self.counting if w > 0)) ** -self.beta

    def drawn(self, uniforms, stratified=False) -> list[int]:
        """Rows that these uniforms draw. Exact where the weights are integers."""
        prefix = list(itertools.accumulate(self.counting))
        last = max(i for i, w in enumerate(self.counting) if w > 0)
        n = len(uniforms)
        parts = [(i + u) / n if stratified else u for i, u in enumerate(uniforms)]
        return [min(bisect.bisect_right(prefix, part * prefix[-1]), last) for part in parts]


def assert_consistent(tree: SumTree) -> None:
    """Every inner node is the sum, least positive and largest of its legal children, the root of all legal leaves."""
    leaves = tree.leaves.tolist()
    assert min(leaves) >= 0
    assert not any(math.copysign(1.0, leaf) < 0 for leaf in leaves), "a sign bit was left behind"
    assert not any(leaves[tree.capacity :]), "the padding has weight"
    if tree.legal is not None:
        legal = bits_of(tree.legal, tree.capacity)
        leaves = [leaf if row < tree.capacity and legal[row] else 0.0 for row, leaf in enumerate(leaves)]
    sums, minima, maxima = tree.nodes.tolist()
    below = (leaves, [leaf or math.inf for leaf in leaves], leaves)
    start, count = 0, tree.capacity
    while True:
        count = -(-count // tree.fan_out)
        length = 1 if count == 1 else -(-count // tree.fan_out) * tree.fan_out
        here = tuple(plane[start : start + length] for plane in (sums, minima, maxima))
        for node in range(count):
            children = slice(node * tree.fan_out, (node + 1) * tree.fan_out)
            assert here[0][node] == pytest.approx(math.fsum(below[0][children]), rel=1e-12, abs=0)
            assert here[1][node] == min(below[1][children])
            assert here[2][node] == max(below[2][children])
        for node in range(count, length):
            assert [plane[node] for plane in here] == [0, math.inf, 0], "the padding was written to"
        below, start = here, start + length
        if count == 1:
            break
    assert start == tree.nodes.shape[1]
    assert tree.total.item() == pytest.approx(math.fsum(leaves), rel=1e-12, abs=0)


def chi_square_bound(degrees: int, deviations: float = 4.0) -> float:
    """Value that a chi-square statistic exceeds as rarely as a normal variate so many standard deviations.

    Wilson and Hilferty, "The Distribution of Chi-Square", PNAS 1931.
    """
    spread = 2 / (9 * degrees)
    return degrees * (1 - spread + deviations * math.sqrt(spread)) ** 3


def chi_square(counts, probabilities) -> float:
    total = sum(counts)
    return sum((c - total * p) ** 2 / (total * p) for c, p in zip(counts, probabilities, strict=True) if p > 0)
