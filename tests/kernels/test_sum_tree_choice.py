"""The choice of a child inside one node, at the very edges, where no uniform can be relied on to fall."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
import triton
import triton.language as tl

from gpubuf.kernels.sum_tree._cpu_node import choose_leaf, choose_node
from gpubuf.kernels.sum_tree._triton import choose_child
from tests.support.sum_tree_checks import bitmap


@triton.jit
def probe(weight_ptr, mass_ptr, child_ptr, left_ptr, n_masses: tl.constexpr, fan_out: tl.constexpr):
    """One node, many masses."""
    lane, row = tl.arange(0, fan_out), tl.arange(0, n_masses)
    weight = tl.load(weight_ptr + lane[None, :] + row[:, None] * 0)
    child, left = choose_child(weight, tl.load(mass_ptr + row), lane, fan_out)
    tl.store(child_ptr + row, child)
    tl.store(left_ptr + row, left)


def by_triton(weights: list[float], masses: list[float]) -> list[tuple[int, float]]:
    n = triton.next_power_of_2(len(masses))
    padded = torch.tensor(masses + [0.0] * (n - len(masses)), dtype=torch.float64)
    child, left = torch.empty(n, dtype=torch.int64), torch.empty(n, dtype=torch.float64)
    probe[(1,)](torch.tensor(weights, dtype=torch.float64), padded, child, left, n_masses=n, fan_out=len(weights))
    return list(zip(child.tolist(), left.tolist(), strict=True))[: len(masses)]


def by_numba(weights: list[float], masses: list[float]) -> list[tuple[int, float]]:
    nodes, leaves = torch.tensor(weights, dtype=torch.float64), torch.tensor(weights, dtype=torch.float32)
    exact_as_leaves = leaves.double().equal(nodes)
    masked, eligible = torch.where(leaves > 0, leaves, 7.0), bitmap(weight > 0 for weight in weights)
    chosen = []
    for mass in masses:
        child, left = choose_node(nodes.data_ptr(), mass, len(weights))
        if exact_as_leaves:
            assert choose_leaf(leaves.data_ptr(), 0, 0, mass, len(weights)) == child
            # Ineligible children count as empty ones, whatever they weigh.
            assert choose_leaf(masked.data_ptr(), eligible.data_ptr(), 0, mass, len(weights)) == child
        chosen.append((child, left))
    return chosen


def edges(weights: list[float]) -> list[float]:
    """Every prefix sum, its neighbours among the floats, and the middles between."""
    prefix = [0.0, *itertools.accumulate(weights)]
    middles = [(a + b) / 2 for a, b in itertools.pairwise(prefix)]
    beside = [math.nextafter(p, direction) for p in prefix for direction in (-math.inf, math.inf)]
    return [mass for mass in (*prefix, *middles, *beside, 2 * prefix[-1]) if mass >= 0]


@pytest.mark.parametrize("choose", [by_numba, by_triton])
@pytest.mark.parametrize(
    "weights",
    [
        [1, 2],
        [0, 3],
        [3, 0],
        [0, 0, 1, 0],
        [2, 0, 0, 5],
        [1] * 16,
        [0, 0, 4, 0, 1, 1, 0, 0, 7, 0, 0, 0, 2, 9, 0, 0],
        [0] * 15 + [1],
        [1] + [0] * 15,
        [5, 0] * 16,
    ],
    ids=str,
)
def test_exactly_at_the_edges(choose, weights):
    """CASES 4: strictly more than the mass: a mass on an edge belongs to the next child that weighs anything."""
    prefix = list(itertools.accumulate(weights))
    last = max(j for j, w in enumerate(weights) if w)
    masses = edges(weights)
    for mass, (child, left) in zip(masses, choose([float(w) for w in weights], masses), strict=True):
        due = next((j for j, p in enumerate(prefix) if p > mass), last)
        assert child == due
        assert left == mass - (prefix[due - 1] if due else 0)


@pytest.mark.parametrize("choose", [by_numba, by_triton])
@pytest.mark.parametrize("fan_out", [4, 16, 64])
def test_rounding_never_leads_into_an_empty_child(choose, fan_out):
    """CASES 4: a scan rounds every prefix sum in another order, so that an empty child may seem to add something."""
    generator = torch.Generator().manual_seed(fan_out)
    for _ in range(30 if choose is by_numba else 8):
        weights = 10.0 ** (torch.rand(fan_out, generator=generator, dtype=torch.float64) * 6)
        weights[torch.rand(fan_out, generator=generator) < 0.6] = 0.0
        weights[0] = 0.1
        masses = edges(weights.tolist())
        for mass, (child, left) in zip(masses, choose(weights.tolist(), masses), strict=True):
            assert weights[child] > 0
            before = math.fsum(weights[:child].tolist())
            assert left >= 0
            assert left == pytest.approx(max(mass - before, 0.0), abs=1e-9 * mass)
            assert mass <= (before + weights[child]) * (1 + 1e-12) or child == weights.nonzero().max()
