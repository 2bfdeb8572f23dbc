"""What holds for every sum tree, its bitmaps, and the statistics of what it draws."""

from __future__ import annotations

import math
import struct
from collections.abc import Iterable

import pytest
import torch

from gpubuf.data.samplers.sum_tree import SumTree


def bitmap(eligible: Iterable[bool]) -> torch.Tensor:
    """int64 words: row r is bit r % 64 of word r // 64; the bits after the last row are clear."""
    eligible = list(eligible)
    words = -(-len(eligible) // 64)
    number = sum(1 << row for row, bit in enumerate(eligible) if bit)
    return torch.tensor(struct.unpack(f"<{words}q", number.to_bytes(8 * words, "little")))


def bits_of(words: torch.Tensor, rows: int) -> list[bool]:
    """The first ``rows`` bits of a bitmap, by arithmetic on Python's integers."""
    numbers = words.tolist()
    return [numbers[row // 64] // 2 ** (row % 64) % 2 == 1 for row in range(rows)]


def assert_consistent(tree: SumTree) -> None:
    """Every inner node is the sum, least positive and largest of its eligible children; the root of all such leaves."""
    leaves = tree.leaves.tolist()
    assert min(leaves) >= 0
    assert not any(math.copysign(1.0, leaf) < 0 for leaf in leaves), "a sign bit was left behind"
    assert not any(leaves[tree.capacity :]), "the padding has weight"
    if tree.eligible is not None:
        eligible = bits_of(tree.eligible, tree.capacity)
        leaves = [leaf if row < tree.capacity and eligible[row] else 0.0 for row, leaf in enumerate(leaves)]
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
