"""The laws of drawing rows, through every backend: ranks by their formulas from uniforms, and what is refused."""

from __future__ import annotations

import itertools
import math
from fractions import Fraction

import pytest
import torch

pytest.importorskip("triton")

from gpubuf.kernels import philox, rows
from gpubuf.kernels.rows import BALANCED, GEOMETRIC, LINEAR, RECENT, UNIFORM, Reading, _cpu
from tests.kernels.reference.philox import uniforms

CAPACITY, SEED = 24, 5
LAWS = {
    "uniform": (UNIFORM, None),
    "geometric": (GEOMETRIC, [math.log(0.9), 0.0]),
    "steep": (GEOMETRIC, [-50.0, 0.0]),
    "nearly uniform": (GEOMETRIC, [-1e-13, 0.0]),
    "linear": (LINEAR, None),
    "emphasis": (RECENT, [-0.5, 3.0]),
    "newest": (RECENT, [-math.inf, 7.0]),
    "one": (RECENT, [-math.inf, 0.0]),
    "all": (RECENT, [0.0, 1e30]),
    # Two tasks: of environments 0, 2 and 3, and of 1.
    "balanced": (BALANCED, [2.0, 0.0, 3.0, 4.0, 0.0, 2.0, 3.0, 1.0]),
    "three tasks": (BALANCED, [3.0, 0.0, 1.0, 2.0, 4.0, 3.0, 2.0, 1.0, 0.0]),
}


def rank(law, numbers, u, m):
    """By the definition: the first rank at which the running sum of the parts exceeds the uniform's part of all."""
    if law == RECENT:
        among = min(max(math.floor(min(max(math.exp(numbers[0]) * m, numbers[1]), m)), 1), m)
        return min(int(u * among), among - 1)
    if law == LINEAR:
        unit = min(int(u * (m * (m + 1) // 2)), m * (m + 1) // 2 - 1)
        return m - 1 - next(p for p in range(m) if unit < (p + 1) * (p + 2) // 2)
    if law == UNIFORM:
        return m - 1 - min(int(u * m), m - 1)
    if law == BALANCED:
        tasks = int(numbers[0])
        bounds, envs = [list(map(int, part)) for part in (numbers[1 : tasks + 2], numbers[tasks + 2 :])]
        # Every row has its share of [0, 1), task by task, environment by environment, from the oldest on.
        shares = [
            (Fraction(len(envs), tasks * (end - begin) * m), step * len(envs) + env)
            for begin, end in itertools.pairwise(bounds)
            for env in envs[begin:end]
            for step in range(m // len(envs))
        ]
        reached = itertools.accumulate(share for share, _ in shares)
        return next(m - 1 - row for end, (_, row) in zip(reached, shares, strict=True) if Fraction(u) < end)
    running = itertools.accumulate(math.exp(numbers[0] * r) for r in range(m))
    total = math.fsum(math.exp(numbers[0] * r) for r in range(m))
    return next((r for r, reached in enumerate(running) if u * total < reached), m - 1)


def reading_of(name, **others):
    law, numbers = LAWS[name]
    given = None if numbers is None else torch.tensor(numbers, dtype=torch.float64)
    return Reading(law=law, numbers=given, **others)


def arena_bytes(n):
    return rows.arena_offsets([8], n)[1]


class Stored:
    """Rows that are their own number, copied as columns or computed as fields, of four environments."""

    def __init__(self, fields):
        self.key = torch.arange(CAPACITY, dtype=torch.int64)
        self.envs, self.past = (4, 2) if fields else (1, 0)
        entry = rows.table_entry(self.key.data_ptr(), 8)
        code = rows.dtype_code(torch.int64)
        field = rows.Field(*entry, kind=rows.DRAWN, stored=code, written=code, batch=code, elements=1)
        self.table = torch.tensor([field.encoded() if fields else entry])

    def draw(self, name, written, size, n):
        """The arena, index and generations."""
        ring, rng = torch.tensor([written, size, 0, 0]), philox.new_state(SEED, "cpu")
        how = reading_of(name, envs=self.envs, past=self.past)
        arena, index, generation = rows.sample(self.table, ring, rng, n, CAPACITY, arena_bytes(n), *how)
        assert rng.tolist() == [SEED, n, 0]
        assert ring.tolist() == [written, size, 0, 0]
        return arena[: 8 * n].view(torch.int64), index, generation


@pytest.mark.gate
@pytest.mark.parametrize("fields", [False, True])
@pytest.mark.parametrize("name", LAWS)
def test_ranks_by_the_formula(backend, name, fields):
    """Of a ring with room, a full one, and one that has lost rows, of which the oldest steps may be left out."""
    n, stored = 300 if backend == "numba" else 70, Stored(fields)
    law, numbers = LAWS[name]
    for written, size in ((4, 4), (12, 12), (CAPACITY, CAPACITY), (CAPACITY + 8, CAPACITY), (5 * CAPACITY, CAPACITY)):
        arena, index, generation = stored.draw(name, written, size, n)
        left_out = stored.past * stored.envs if written > size else 0
        ranks = [rank(law, numbers, u, size - left_out) for u in uniforms(SEED, 0, n)]
        if law == UNIFORM and not left_out:
            # A uniform draw need not know the oldest row.
            expected = [size - 1 - each for each in ranks]
        else:
            expected = [(written - 1 - each) % CAPACITY for each in ranks]
        assert index.tolist() == arena.tolist() == expected
        assert generation.tolist() == [(written - row + CAPACITY - 1) // CAPACITY for row in expected]


@pytest.mark.parametrize("name", LAWS)
def test_the_plain_definition_draws_the_same_positions(name):
    how = reading_of(name, envs=4, past=2)
    for written, size in ((8, 8), (CAPACITY + 8, CAPACITY)):
        drawn = _cpu.drawn_rows(
            torch.tensor(uniforms(SEED, 0, 50), dtype=torch.float64), torch.tensor([written, size, 0, 0]), CAPACITY, how
        )
        assert drawn.tolist() == Stored(True).draw(name, written, size, 50)[1].tolist()


def test_many_rows_have_exact_ranks():
    """Of more rows than float32 counts each unit of a linear draw belongs to one row."""
    m = 3 * 10**9
    ring = torch.tensor([m, m, 0, 0])
    u = torch.tensor([0.0, 1e-18, 0.1, 0.5, 0.999999, 1 - 2**-53], dtype=torch.float64)
    drawn = _cpu.drawn_rows(u, ring, m, Reading(law=LINEAR)).tolist()
    total = m * (m + 1) // 2
    for uniform, row in zip(u.tolist(), drawn, strict=True):
        unit = min(int(uniform * float(total)), total - 1)
        assert row * (row + 1) // 2 <= unit < (row + 1) * (row + 2) // 2


def test_laws_that_can_not_be(backend):
    stored, ring, rng = Stored(False), torch.tensor([4, 4, 0, 0]), philox.new_state(SEED, "cpu")
    for how, error, text in (
        (Reading(law=5), ValueError, r"law must be in 0 \.\. 4, not 5"),
        (Reading(law=RECENT), TypeError, "law 3 needs numbers"),
        (Reading(law=BALANCED, numbers=torch.zeros(3, dtype=torch.float64)), ValueError, r"must have shape \[4\]"),
        (Reading(law=GEOMETRIC, numbers=torch.zeros(2)), TypeError, "numbers must be"),
        (
            Reading(law=GEOMETRIC, numbers=torch.zeros(3, dtype=torch.float64)),
            ValueError,
            r"numbers must have shape \[2\]",
        ),
    ):
        with pytest.raises(error, match=text):
            rows.sample(stored.table, ring, rng, 4, CAPACITY, arena_bytes(4), *how)
