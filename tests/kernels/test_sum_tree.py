"""The sum tree's operations, through both backends, against a model in plain Python."""

from __future__ import annotations

import dataclasses
import doctest
import itertools
import math
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("triton")
import triton
import triton.language as tl

from gpubuf.data.samplers.base import RandomState
from gpubuf.data.samplers.sum_tree import SumTree
from gpubuf.kernels import config, rows, sum_tree
from gpubuf.kernels._registry import check_devices
from gpubuf.kernels.config import UpdateConfig
from gpubuf.kernels.sum_tree._triton import choose_child
from tests.contracts import on_both
from tests.kernels.reference.philox import uniforms
from tests.kernels.reference.sum_tree import WeightList
from tests.support.fuzzing import examples
from tests.support.interpreter import triton_on_cpu
from tests.support.sum_tree_checks import assert_consistent, bitmap, bits_of, chi_square, chi_square_bound

ROOT = Path(__file__).parents[2]


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


# The contract


def matching(capacity: int, fan_out: int | None = None, **exponents: float) -> tuple[SumTree, WeightList]:
    return SumTree(capacity, fan_out=fan_out, **exponents), WeightList(capacity, **exponents)


def assert_same(tree: SumTree, model: WeightList) -> None:
    assert_consistent(tree)
    # Equal but for the last bit of float32: log2 and exp2 are not rounded correctly.
    assert tree.leaves[: tree.capacity].tolist() == pytest.approx(model.weights, rel=2e-7, abs=0)
    assert tree.max_priority.item() == (1.0 if model.max_priority is None else model.max_priority)


def ring_of(written: int, size: int) -> torch.Tensor:
    ring = rows.new_ring("cpu")
    ring[rows.WRITTEN], ring[rows.SIZE] = written, size
    return ring


def random_priorities(n: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(n, generator=generator) * 10.0 ** torch.randint(-3, 4, (n,), generator=generator)


def random_bits(rows: int, share: float, seed: int) -> list[bool]:
    return (torch.rand(rows, generator=seeded(seed)) < share).tolist()


def restricted(weights, eligible=None, fan_out: int | None = None, **exponents: float) -> tuple[SumTree, WeightList]:
    """A tree and a model of these weights; ``eligible`` are booleans, None: every row is."""
    weights = torch.as_tensor(weights, dtype=torch.float32)
    tree, model = matching(weights.numel(), fan_out, **exponents)
    tree.leaves[: weights.numel()] = weights
    model.weights, model.eligible = weights.tolist(), None if eligible is None else list(eligible)
    tree.restrict(None if eligible is None else bitmap(eligible))
    tree.rebuild()
    return tree, model


def run(capacity: int, fan_out: int | None, operations, **exponents: float) -> None:
    """Do the same with a tree and with a model: they agree after each operation.

    Where draws are compared priorities are small integers, so that every sum is exact.
    """
    tree, model = matching(capacity, fan_out, **exponents)
    rng, offset = RandomState(17), 0
    for name, *arguments in operations:
        if name.startswith("update"):
            entries, written = arguments
            index, priority, generation = ([entry[column] for entry in entries] for column in range(3))
            tensors = torch.tensor(index, dtype=torch.int64), torch.tensor(priority, dtype=torch.float32)
            of_ring = (written, None if written is None else min(written, capacity))
            ring = None if written is None else ring_of(*of_ring)
            if name == "update by generation":
                tree.update(*tensors, ring=ring, generation=torch.tensor(generation, dtype=torch.int64))
                model.update(index, priority, generation, *of_ring)
            else:
                tree.update(*tensors, ring=ring)
                model.update(index, priority, None, *of_ring)
        elif name == "mark":
            tree.mark(torch.tensor(arguments[0], dtype=torch.int64), arguments[1])
            model.mark(*arguments)
        elif name == "restrict":
            model.eligible = None if arguments[0] is None else [*arguments[0]]
            tree.restrict(None if model.eligible is None else bitmap(model.eligible))
        elif name == "flip" and model.eligible is not None:
            for row in set(arguments[0]) - {-1}:
                model.eligible[row] = not model.eligible[row]
            assert tree.eligible is not None
            tree.eligible.copy_(bitmap(model.eligible))
            tree.refresh(torch.tensor(arguments[0], dtype=torch.int64))
        elif name == "draw" and any(model.counting):
            n, stratified = arguments
            index, weight = tree.draw(n, rng, stratified)
            assert index.tolist() == model.draw(uniforms(17, offset, n), stratified)
            assert weight.tolist() == pytest.approx([model.importance(row) for row in index.tolist()], rel=1e-6)
            offset += n
        elif name == "clear":
            tree.clear()
            model.weights = [0.0] * capacity
        assert_same(tree, model)
        assert "alpha" in exponents or tree.leaves[:capacity].tolist() == model.weights
        # To the bit, what a build makes.
        nodes = tree.nodes.clone()
        tree.rebuild()
        assert torch.equal(tree.nodes, nodes)
    assert rng.state.tolist() == [17, offset, 0]


def entries_of(index: torch.Tensor, priority: torch.Tensor) -> list[tuple[int, float, int]]:
    return list(zip(index.tolist(), priority.tolist(), [1] * len(index), strict=True))


@pytest.mark.parametrize("limited", [False, True])
@pytest.mark.parametrize(
    ("capacity", "fan_out"),
    [(1, 2), (15, 16), (16, 16), pytest.param(17, 16, marks=pytest.mark.gate), (63, 2), (64, 32), (130, 128),
     pytest.param(300, 4, marks=pytest.mark.gate), (1024, 32)],
)  # fmt: skip
def test_every_shape_of_tree(backend, capacity, fan_out, limited):
    """CASES 5: capacity 1, exactly full, no multiple of a word, of a node, or of either."""
    if backend == "triton" and (capacity, limited) in {(15, True), (16, False), (63, True), (1024, True)}:
        pytest.skip("the interpreter is slow")
    index = [torch.randint(-1, capacity, (9,), generator=seeded(seed)) for seed in range(2)]
    priority = [torch.randint(seed, 6, (9,), generator=seeded(seed)).float() for seed in range(2)]
    looked_at = [row for row in (0, capacity // 2, capacity - 2) if 0 <= row < capacity - 1]
    operations = [
        ("mark", list(range(capacity)), False),
        ("restrict", [*random_bits(capacity - 1, 0.6, fan_out), True] if limited else None),
        *(("update", entries_of(*given), None) for given in zip(index, priority, strict=True)),
        ("flip", [-1, *looked_at, -1, *looked_at]),
        ("mark", index[1].flip(0).tolist(), True),
        ("draw", 12, False),
        ("draw", 12, True),
    ]
    run(capacity, fan_out, operations, beta=0.5)


@pytest.mark.parametrize("limited", [False, True])
@pytest.mark.parametrize("n", [1, 257, 1024, 1500])
def test_batches_of_every_size(backend, n, limited):
    """Below and above what one program does at once, with duplicates; one launch a level, and whole levels."""
    capacity = 700
    index, marked = (torch.randint(-1, capacity, (n,), generator=seeded(n + turn)) for turn in range(2))
    operations = [
        ("mark", list(range(capacity)), False),
        ("restrict", random_bits(capacity, 0.5, n) if limited else None),
        ("update", entries_of(index, random_priorities(n, n)), None),
        ("mark", marked.tolist(), limited),
        ("flip", [*marked.tolist(), capacity - 1]),
    ]
    run(capacity, None, operations, alpha=0.7, eps=1e-6)


SMALL = (2000, 4, 50)


@pytest.mark.parametrize(
    ("backend", "capacity", "fan_out", "n"),
    on_both([SMALL, (4000, 8, 50), (16_000, 16, 62)], lambda case: case == SMALL, [SMALL]),
    indirect=["backend"],
)
def test_minima_and_maxima_follow_an_update_of_few_rows(backend, capacity, fan_out, n):
    """Fewer than level 2 has nodes: weights rise, fall, tie and vanish; rows share nodes, and are named twice."""
    generator, given = seeded(n), torch.tensor([0.0, 0.5, 1.0, 2.0, 3.0])
    operations = [("restrict", random_bits(capacity, 0.5, n))]
    for turn in range(8):
        places = torch.randint(5, (n,), generator=generator) * (capacity // 5) + turn % 3
        index = places + torch.randint(2 * fan_out, (n,), generator=generator)
        operations.append(("update", entries_of(index, given[torch.randint(5, (n,), generator=generator)]), None))
    run(capacity, fan_out, operations)


@st.composite
def sequences(draw, max_operations: int):
    """(capacity, fan-out, operations)"""
    capacity = draw(st.integers(1, 70))
    row = st.integers(-1, capacity - 1)
    priority = st.integers(0, 50)
    batch = st.lists(st.tuples(row, priority, st.integers(0, 3)), max_size=12)
    written = st.integers(0, 3 * capacity)
    rows = st.lists(row, max_size=12)
    first_and_length = st.tuples(st.integers(0, capacity - 1), st.integers(1, capacity))
    run_of_rows = first_and_length.map(lambda run: [(run[0] + i) % capacity for i in range(run[1])])
    bits = st.lists(st.booleans(), min_size=capacity, max_size=capacity)
    operation = st.one_of(
        st.tuples(st.just("update"), batch, st.none()),
        st.tuples(st.just("update in ring"), batch, written),
        st.tuples(st.just("update by generation"), batch, written),
        st.tuples(st.just("mark"), rows, st.booleans()),
        st.tuples(st.just("mark"), run_of_rows, st.just(False)),
        st.tuples(st.just("draw"), st.integers(1, 8), st.booleans()),
        st.tuples(st.just("restrict"), st.one_of(st.none(), bits)),
        st.tuples(st.just("flip"), rows),
        st.tuples(st.just("clear")),
    )
    return capacity, draw(st.sampled_from([2, 4, 16])), draw(st.lists(operation, min_size=1, max_size=max_operations))


@examples(80)
@given(sequences(max_operations=25))
def test_random_sequences(sequence):
    run(*sequence)


@pytest.mark.slow
@examples(20)
@given(sequences(max_operations=6))
def test_random_sequences_of_triton(sequence):
    with triton_on_cpu():
        run(*sequence)


# Updates


RUNS = {
    "run": range(1030, 1330),
    "around the end": [*range(4800, 5000), *range(100)],
    "whole ring": [*range(37, 800), *range(37)],
    "one row": [7],
    "with gaps": [40, -1, 45, -1, 44, 60],
    "backwards": [21, 20],
    "not between its ends": [100, 4000, 130],
    "invalid ends": [-1, 9, 10, 5000],
    "two runs": [*range(90, 120), *range(2000, 2030)],
}


OF_THE_GATES = ("run", "with gaps")


@pytest.mark.parametrize(
    ("backend", "rows"), on_both(RUNS, lambda rows: rows in OF_THE_GATES, OF_THE_GATES), indirect=["backend"]
)
def test_marks_and_refreshes_of_runs(backend, rows):
    """One program looks whether rows follow each other: then it recomputes the nodes above them as they lie."""
    tree = SumTree(800 if rows == "whole ring" else 5000, fan_out=4)
    tree.update(torch.arange(tree.capacity), random_priorities(tree.capacity, 0))
    index = torch.tensor([*RUNS[rows]])
    if backend == "numba":
        index = index[index < tree.capacity]
    tree.mark(index)
    marked = tree.nodes.clone()
    tree.rebuild()
    assert marked.equal(tree.nodes)
    named = index[(index >= 0) & (index < tree.capacity)]
    tree.leaves[named] = 1 + torch.arange(len(named), dtype=torch.float32)
    tree.refresh(index)
    refreshed = tree.nodes.clone()
    tree.rebuild()
    assert refreshed.equal(tree.nodes)


@pytest.mark.parametrize("rows", ["run", "around the end"])
def test_a_run_touches_only_the_nodes_above_it(rows):
    """In one program, also on levels with fewer nodes than the run has rows, which other batches recompute whole."""
    with triton_on_cpu(), config.using(sum_tree_update=UpdateConfig(True, 256, 64, 8)):
        tree = SumTree(5000, fan_out=4)
        index = torch.tensor([*RUNS[rows]])
        start, above = 0, set()
        for level, size in enumerate(sum_tree.level_sizes(5000, 4), 1):
            above |= {start + row // 4**level for row in index.tolist()}
            start += size
        others = torch.tensor([node for node in range(start) if node not in above])
        tree.nodes[:, others] = 0.25
        tree.mark(index)
        assert (tree.nodes[:, others] == 0.25).all()


@pytest.mark.parametrize("single", [True, False])
def test_a_mark_refreshes_rows_whose_eligibility_has_changed(backend, single):
    """What two operations would do, by one program and by several."""
    bits = torch.full((sum_tree.eligible_words(5000),), -1, dtype=torch.int64)
    tree = SumTree(5000, fan_out=16)
    tree.update(torch.arange(5000), random_priorities(5000, 0))
    tree.restrict(bits)
    bits[:3], bits[-1] = 0, 0
    touched = torch.cat([torch.arange(4990, 5000), torch.arange(180)])
    with config.using(sum_tree_update=UpdateConfig(single, 64, 16, 4)):
        tree.mark(touched[5:90], touched=touched)
    found = tree.nodes.clone()
    tree.rebuild()
    assert found.equal(tree.nodes)
    assert (tree.leaves[touched[5:90]] == tree.max_priority.float()).all()


def test_no_drift(backend):
    """CASES 1: after priorities fall by 1e5 the root still equals the sum of the leaves to 1e-12 relative."""
    tree = SumTree(200, fan_out=4)
    generator = torch.Generator().manual_seed(0)
    for step in range(60 if backend == "numba" else 11):
        scale = 1e2 * 10 ** (-5 * min(1.0, step / 10))
        index = torch.randint(0, 200, (64,), generator=generator)
        tree.update(index, scale * torch.rand(64, generator=generator))
        total = math.fsum(tree.leaves.tolist())
        assert tree.total.item() == pytest.approx(total, rel=1e-12, abs=0)
    assert_consistent(tree)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, -1.0, -1e-30, 1e39])
def test_bad_priorities_are_refused(backend, bad):
    """CASES 8: NaN, infinite (in float32), negative: an exception on CPU, the old priority and a count on a GPU."""
    tree = SumTree(10)
    tree.update(torch.tensor([2, 3]), torch.tensor([1.5, 2.5]))
    index = torch.tensor([1, 2, 2, 3])
    priority = torch.tensor([5.0, 6.0, bad, bad], dtype=torch.float64)
    if backend == "numba":
        before = (tree.leaves.clone(), tree.nodes.clone(), tree.scalars.clone())
        with pytest.raises(ValueError, match="entry 2, for row 2, is"):
            tree.update(index, priority)
        assert all(torch.equal(a, b) for a, b in zip(before, (tree.leaves, tree.nodes, tree.scalars), strict=True))
        return
    tree.update(index, priority)
    assert tree.leaves[1:4].tolist() == [5.0, 6.0, 2.5]
    assert tree.refused.item() == 2
    assert tree.max_priority.item() == 6.0
    assert_consistent(tree)


def test_a_bad_priority_of_a_dropped_entry_does_not_matter(backend):
    tree, model = matching(10)
    arguments = ([-1, 1, 9, 2], [math.nan, 2.0, math.nan, -1.0])
    tree.update(
        torch.tensor(arguments[0]),
        torch.tensor(arguments[1]),
        ring=ring_of(9, 9),
        generation=torch.tensor([1, 1, 1, 0]),
    )
    model.update([1], [2.0])
    assert_same(tree, model)
    assert tree.refused.item() == 0


def test_extreme_priorities(backend):
    """Zero of either sign, denormal and the largest; a weight beyond float32 is clamped to its normal range."""
    largest, smallest = torch.finfo(torch.float32).max, torch.finfo(torch.float32).tiny
    tree = SumTree(8)
    with pytest.warns(UserWarning, match="out of float32's range"):
        tree.update(torch.arange(4), torch.tensor([-0.0, 0.0, 1e-44, largest]))
    assert tree.leaves[:4].tolist() == [0.0, 0.0, smallest, largest]
    assert_consistent(tree)
    tree = SumTree(8, alpha=2.0)
    with pytest.warns(UserWarning, match="alpha = 2 and eps = 0 .* count as 1.18e-38 or 3.4e.38"):
        tree.update(torch.arange(3), torch.tensor([-0.0, 1e-30, largest]))
    assert tree.leaves[:3].tolist() == [0.0, smallest, largest]
    assert_consistent(tree)
    assert tree.draw(3, RandomState(0))[0].tolist() == [2, 2, 2]
    tree = SumTree(8, eps=-0.0)
    tree.update(torch.arange(2), torch.tensor([-0.0, 1.0]))
    assert_consistent(tree)


@pytest.mark.parametrize(("alpha", "eps"), [(0.0, 1e-8), (0.5, 0.0), (1.0, 0.0), (150.0, 1e-8)])
@pytest.mark.filterwarnings("ignore:with alpha")
def test_weights_of_positive_priorities_are_positive_and_finite(backend, alpha, eps):
    priority = 10.0 ** torch.arange(-44, 39)
    tree, model = SumTree(100, alpha=alpha, eps=eps), WeightList(100, alpha=alpha, eps=eps)
    rows = torch.arange(priority.numel())
    tree.update(rows, priority)
    model.update(rows.tolist(), priority.tolist())
    assert torch.isfinite(tree.leaves).all()
    assert (tree.leaves[: rows.numel()] >= torch.finfo(torch.float32).tiny).all()
    assert tree.leaves[:100].tolist() == pytest.approx(model.weights, rel=1e-6, abs=0)
    assert_consistent(tree)


@pytest.mark.parametrize("bad", [pytest.param(10, marks=pytest.mark.gate), -2, 2**40])
def test_indices_out_of_range(backend, bad):
    tree = SumTree(10)
    index = torch.tensor([1, bad])
    if backend == "numba":
        for act in (lambda: tree.update(index, 1.0), lambda: tree.mark(index), lambda: tree.refresh(index)):
            with pytest.raises(IndexError, match=f"index {bad}, entry 1, .* 10 rows"):
                act()
        assert tree.total.item() == 0
        return
    tree.mark(index)
    tree.update(index, 2.0)
    tree.refresh(index)
    assert tree.refused.item() == 1
    assert tree.leaves.tolist() == [0, 2] + [0] * 14
    assert_consistent(tree)


def test_an_index_out_of_range_does_not_speak_for_its_neighbour():
    """The padding of the leaves shares a parent with the last rows."""
    tree, model = matching(98, 4)
    with triton_on_cpu():
        tree.update(torch.tensor([98, 97]), 3.0)
        tree.mark(torch.tensor([99, 96]))
    model.update([97], [3.0])
    model.mark([96])
    assert_same(tree, model)


@pytest.mark.parametrize("n", [pytest.param(40, marks=pytest.mark.gate), 1300])
def test_the_last_duplicate_wins_every_time(backend, n):
    """CASES 11: many runs alike, on both backends."""
    generator = torch.Generator().manual_seed(n)
    index = torch.randint(0, 25, (n,), generator=generator)
    priority = torch.rand(n, generator=generator) + 1.0
    due = WeightList(30)
    due.update(index.tolist(), priority.tolist())
    for _ in range(50 if backend == "numba" else 3):
        tree = SumTree(30)
        tree.update(index, priority)
        assert tree.leaves[:30].tolist() == due.weights


@pytest.mark.parametrize("written", [0, 3, 10, 37, 2**33 + 5])
def test_a_priority_that_returns_too_late_is_dropped(backend, written):
    """CASES 12: rows overwritten since they were sampled, and rows that are not in the buffer, are left alone."""
    capacity = 10
    for behind in (0, 1, 2):
        times_written = [len(range(row, written, capacity)) for row in range(capacity)]
        entries = [(row, 10.0 - row, times_written[row] - (9 - row) % 2 * behind) for row in reversed(range(capacity))]
        run(capacity, None, [("update by generation", entries, written)])


def test_a_captured_graph_would_see_new_exponents(backend):
    """CASES 14: the operations read alpha and beta from the tensor; beta is annealed in place."""
    tree = SumTree(4)
    tree.update(torch.arange(2), torch.tensor([1.0, 4.0]))
    rng = RandomState(2)
    for beta in (0.0, 0.5, torch.tensor(1.0), torch.tensor([2.0])):
        tree.set_beta(beta)
        index, weight = tree.draw(12, rng)
        due = torch.tensor([1.0, 4.0])[index].double() ** -float(beta)
        assert weight.tolist() == due.float().tolist()
        assert set(index.tolist()) == {0, 1}


# Draws


@pytest.fixture
def wide_programs(monkeypatch, request):
    """Many draws a program: the interpreter pays by the program. Compiled ones have those of the rule: see --ptx."""
    by_rule = config.tree_draw
    if not request.config.getoption("--ptx", ()):
        monkeypatch.setattr(
            config, "tree_draw", lambda *arguments: dataclasses.replace(by_rule(*arguments), block_draws=2048)
        )


def test_both_backends_draw_alike():
    """Also with weights whose sums are rounded: an uniform would have to fall within 1e-15 of an edge."""
    weights, eligible = torch.rand(5000, generator=seeded(1)) ** 4, random_bits(5000, 0.3, 2)
    drawn = []
    for through_triton in (False, True):
        with triton_on_cpu(through_triton):
            drawn.append(restricted(weights, eligible, beta=0.4)[0].draw(300, RandomState(11)))
    assert torch.equal(drawn[0][0], drawn[1][0])
    torch.testing.assert_close(drawn[0][1], drawn[1][1], rtol=1e-6, atol=0)
    bits = torch.tensor(bits_of(bitmap(eligible), 5000))
    assert bits[drawn[0][0]].all()


@pytest.mark.usefixtures("wide_programs")
@pytest.mark.parametrize("zeros", ["first", "last", "left half", "right half", "all but one", "partly filled", "comb"])
def test_weight_zero_is_never_drawn(backend, zeros):
    """CASES 4: a leaf of weight zero at either edge, in runs, and rows never written."""
    rows = 100
    weights = torch.rand(rows, generator=torch.Generator().manual_seed(4)) * 1e-3 + 0.1
    nothing = {
        "first": slice(0, 1),
        "last": slice(rows - 1, rows),
        "left half": slice(0, rows // 2),
        "right half": slice(rows // 2, rows),
        "all but one": torch.arange(rows) != 37,
        "partly filled": slice(23, rows),
        "comb": slice(0, rows, 2),
    }[zeros]
    weights[nothing] = 0.0
    tree, _ = restricted(weights, fan_out=4)
    for stratified in (False, True):
        index, weight = tree.draw(30_000 if backend == "numba" else 2048, RandomState(6), stratified)
        assert index.min() >= 0
        assert (weights[index] > 0).all()
        assert set(index.tolist()) == set(weights.nonzero().flatten().tolist())
        assert (weight <= 1).all()


@pytest.mark.usefixtures("wide_programs")
@pytest.mark.parametrize("fan_out", [4, 16, 64])
def test_rounding_never_carries_a_draw_into_an_ineligible_leaf(backend, fan_out):
    """CASES 4: weights of very different size, zeros between, the ineligible ones the largest."""
    eligible = torch.tensor(random_bits(500, 0.5, fan_out))
    weights = 10.0 ** (torch.rand(500, generator=seeded(fan_out)) * 14 - 7)
    weights[torch.rand(500, generator=seeded(9)) < 0.3] = 0.0
    for scale, least in ((1.0, 1e30), (1e-30, 1.0), (1e30, 0.0)):
        tree, _ = restricted(torch.where(eligible, weights * scale, least), eligible.tolist(), fan_out)
        index, _ = tree.draw(20_000 if backend == "numba" else 512, RandomState(6))
        assert eligible[index].all()
        assert (tree.leaves[index] > 0).all()


@pytest.mark.parametrize("fan_out", [2, 16, 32])
def test_mass_past_the_last_prefix_sum(backend, fan_out):
    """CASES 4: where rounding carries the mass too far, the last eligible row of positive weight, not the last row."""
    eligible = [row in (3, 20, 33, 35) for row in range(40)]
    weights = torch.ones(40)
    weights[35] = 0.0
    tree, _ = restricted(weights, eligible, fan_out)
    tree.nodes[0, -1] = 1e6
    index, weight = tree.draw(32, RandomState(8))
    assert index.tolist().count(33) >= 31
    assert weight.tolist() == [1.0] * 32


@pytest.mark.usefixtures("wide_programs")
def test_strata(backend):
    """CASES 3: 32 768 strata of 32 leaves: each yields its own leaves, the last one many different ones."""
    strata = 32_768 if backend == "numba" else 4096
    tree, _ = restricted(torch.ones(strata * 32))
    rng = RandomState(10)
    last = []
    for call in range(40 if backend == "numba" else 2):
        index, _ = tree.draw(strata, rng, stratified=True)
        assert torch.equal(index // 32, torch.arange(strata))
        (uniform,) = uniforms(10, (call + 1) * strata - 1, 1)
        assert index[-1] == 32 * (strata - 1) + int(32 * uniform)
        last.append(index[-1].item())
    assert len(set(last)) > 15 or backend == "triton"


def test_every_one_of_two_to_the_25_leaves_is_reachable():
    """CASES 2: a float32 uniform, of 24 bits, would reach only every other leaf."""
    leaves = 1 << 25
    tree = SumTree(leaves)
    tree.leaves.fill_(1.0)
    tree.rebuild()
    index, _ = tree.draw(1 << 20, RandomState(12))
    lowest_bits = torch.bincount(index & 7, minlength=8)
    assert chi_square(lowest_bits.tolist(), [1 / 8] * 8) < chi_square_bound(7)
    # One stratum a leaf: each in its turn.
    index, _ = tree.draw(leaves, RandomState(12), stratified=True)
    assert torch.equal(index, torch.arange(leaves))


# Eligible rows


@pytest.mark.parametrize(
    ("row", "fan_out"), [(0, 2), (15, 16), (16, 128), (31, 64), (32, 2), (63, 16), (64, 64), (129, 128)]
)
def test_one_eligible_row_at_the_edges_of_words(backend, fan_out, row):
    """The sign bit of a word, its first bit, and those of a node: only this row, and then all but this row."""
    weights = torch.arange(1.0, 131.0)
    tree, _ = restricted(weights, [r == row for r in range(130)], fan_out)
    assert (tree.total.item(), tree.minimum.item(), tree.maximum.item()) == (row + 1, row + 1, row + 1)
    index, weight = tree.draw(4, RandomState(1))
    assert (index.tolist(), weight.tolist()) == ([row] * 4, [1.0] * 4)
    # Bits behind the last row mean nothing.
    tree.eligible.bitwise_not_()
    tree.rebuild()
    assert tree.total.item() == 130 * 131 / 2 - (row + 1)
    assert (tree.minimum.item(), tree.maximum.item()) == (1 + (row == 0), 130 - (row == 129))
    assert tree.draw(8, RandomState(1))[0].max() < 130


@pytest.mark.parametrize(("capacity", "fan_out"), [(1, 2), (100, 128)])
def test_no_eligible_row(backend, capacity, fan_out):
    """CASES 25: an exception on CPU, no row and weight 0 on a GPU, never row 0."""
    tree, _ = restricted(torch.ones(capacity), [False] * capacity, fan_out)
    assert (tree.total.item(), tree.minimum.item(), tree.maximum.item()) == (0, math.inf, 0)
    rng = RandomState(1)
    if backend == "numba":
        with pytest.raises(RuntimeError, match="every row of the sum tree has weight zero or is ineligible"):
            tree.draw(3, rng)
    else:
        index, weight = tree.draw(3, rng)
        assert (index.tolist(), weight.tolist()) == ([sum_tree.NO_ROW] * 3, [0.0] * 3)
    tree.restrict(None)
    assert tree.draw(3, rng)[0].min() >= 0
    assert [part.shape for part in tree.draw(0, rng)] == [(0,), (0,)]
    empty = SumTree(capacity)
    if backend == "numba":
        with pytest.raises(RuntimeError, match="every row of the sum tree has weight zero"):
            empty.draw(3, rng)
    else:
        assert empty.draw(3, rng)[0].tolist() == [sum_tree.NO_ROW] * 3


def test_what_else_recomputes_the_nodes_keeps_the_restriction(backend):
    tree, _ = restricted([1, 2, 3, 4, 5], [True, False, True, False, True])
    tree.set_alpha(2.0)
    assert tree.total.item() == 1 + 9 + 25
    state = tree.state_dict()
    assert set(state) == {"capacity", "leaves", "hyper"}
    tree.clear()
    assert (tree.total.item(), tree.eligible.tolist()) == (0, [0b10101])
    tree.load_state_dict(state)
    assert tree.total.item() == 1 + 9 + 25
    other = SumTree(5)
    other.load_state_dict(state)
    assert (other.eligible, other.total.item()) == (None, 55)


# The choice of a child inside one node, at the very edges, where no uniform can be relied on to fall


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
    numba = pytest.importorskip("numba")
    if len(weights) > 16:
        pytest.skip("a node of Numba's has 16 children")
    from gpubuf.kernels.sum_tree._numba_node import choose, store_prefixes

    @numba.njit
    def chosen(weights, masses, prefixes):
        store_prefixes(weights.ctypes.data, prefixes)
        return [choose(prefixes.ctypes.data, mass) for mass in masses]

    return chosen(np.array(weights + [0.0] * (16 - len(weights))), np.array(masses), np.empty(16))


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
        [0, 3],
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


# One order of summation: a node is the same to the bit, whatever kernel and launch computed it


GEOMETRIES = {
    "one program": UpdateConfig(True, 1024, 256, 16),
    "one program, few nodes": UpdateConfig(True, 256, 64, 8),
    "a launch a stage": UpdateConfig(False, 256, 1024, 4),
    "a launch a stage, many nodes": UpdateConfig(False, 4096, 4096, 8),
}


def written_order(children: np.ndarray) -> np.ndarray:
    """The sum of each row [R, F]: parts of 8 (F / 4 where F is above 32) one after the other, then halves."""
    fan_out = children.shape[1]
    parts = children.reshape(len(children), -1, min(fan_out, max(8, fan_out // 4)))
    total = parts[:, 0]
    for part in range(1, parts.shape[1]):
        total = total + parts[:, part]
    while total.shape[1] > 1:
        half = total.shape[1] // 2
        total = total[:, :half] + total[:, half:]
    return total[:, 0]


def sums_of(leaves: torch.Tensor, fan_out: int) -> np.ndarray:
    """All sums of a tree, level by level, with the padding."""
    below, levels = leaves.double().numpy(), []
    for length in sum_tree.level_sizes(len(leaves), fan_out):
        below = written_order(below.reshape(-1, fan_out))
        below = np.pad(below, (0, length - len(below)))
        levels.append(below)
    return np.concatenate(levels)


@pytest.mark.parametrize(
    ("capacity", "fan_out", "geometry"),
    [
        (70_000, 64, "a launch a stage, many nodes"),
        (40_000, 32, "one program"),
        pytest.param(3000, 16, "a launch a stage", marks=pytest.mark.gate),
        (700, 128, "one program, few nodes"),
        pytest.param(100, 4, "one program", marks=pytest.mark.gate),
        (50, 2, "a launch a stage"),
    ],
)
def test_build_update_mark_and_refresh_agree_to_the_bit(capacity, fan_out, geometry):
    """Finding 8 of the review of the compiled kernels: two orders of summation gave two roots."""
    tree = sum_tree.new_tree(capacity, fan_out, "cpu")
    tree.scalars[sum_tree.MAX_PRIORITY] = 3.0
    tree.leaves[:capacity] = random_priorities(capacity, 0)
    index = torch.randint(capacity, (500,), generator=torch.Generator().manual_seed(1))

    def check() -> None:
        assert tree.nodes[sum_tree.SUM].numpy().tobytes() == sums_of(tree.leaves, fan_out).tobytes()

    with triton_on_cpu(), config.using(sum_tree_update=GEOMETRIES[geometry]):
        sum_tree.build(*tree)
        check()
        sum_tree.update(*tree, ring_of(capacity, capacity), index, random_priorities(len(index), 2), None)
        check()
        sum_tree.mark(*tree, index[:70].flip(0), False)
        check()
        tree.leaves[index] = random_priorities(len(index), 3)
        sum_tree.refresh(*tree, index)
        check()


# The worked example that kernels/sum_tree opens with


def test_the_code_of_the_example(backend):
    """Also the picture: the numbers of level 1 and of the root are what ``nodes`` prints."""
    example = doctest.DocTestFinder(recurse=False).find(sum_tree, "sum_tree")[0]
    assert len(example.examples) >= 8
    assert doctest.DocTestRunner().run(example).failed == 0


def test_the_functions_that_assert_the_invariants_exist():
    names = set(re.findall(r"``(assert_\w+|test_\w+)``", sum_tree.__doc__ or ""))
    assert len(names) >= 8
    sources = [path.read_text() for folder in ("kernels", "support") for path in (ROOT / "tests" / folder).glob("*.py")]
    assert not [name for name in names if not any(f"def {name}(" in source for source in sources)]


# What is refused


class TestArguments:
    """Wrong tensors are refused by name before a kernel sees their addresses."""

    def arguments(self) -> dict[str, torch.Tensor | int | None]:
        return {
            **sum_tree.new_tree(20, 4, "cpu")._replace(eligible=torch.full((1,), -1))._asdict(),
            "ring": ring_of(20, 20),
            "index": torch.arange(3),
            "priority": torch.ones(3),
            "generation": torch.ones(3, dtype=torch.int64),
        }

    def test_tensors(self, backend):
        arguments = self.arguments()
        sum_tree.update(*arguments.values())
        for name in ("leaves", "nodes", "scalars", "ring", "index", "priority", "generation", "eligible"):
            good = arguments[name]
            for wrong, error, message in (
                (good.to(torch.float16), TypeError, f"{name} must be"),
                (torch.cat([good, good], -1), ValueError, "must have shape"),
                (torch.cat([good, good], -1)[..., ::2], ValueError, f"{name} must be contiguous"),
            ):
                if name == "eligible" and "contiguous" in message:
                    continue  # a tree of 20 rows has one word
                with pytest.raises(error, match=message):
                    sum_tree.update(*(arguments | {name: wrong}).values())

    def test_numbers(self, backend):
        arguments = self.arguments()
        for changed, message in (
            ({"fan_out": 3}, "power of two of at least 2, but is 3"),
            ({"capacity": 0}, "at least 1, but is 0"),
            ({"capacity": 21}, "leaves must have shape"),
        ):
            with pytest.raises(ValueError, match=message):
                sum_tree.update(*(arguments | changed).values())
        with pytest.raises(ValueError, match="not be negative, but is -1"):
            SumTree(3).draw(-1, RandomState(1))
        with pytest.raises(ValueError, match=r"on one device, not on \['cpu', 'meta'\]"):
            check_devices(torch.empty(1), None, torch.empty(1, device="meta"))

    def test_restrict(self):
        """Refused with both sides stated; nothing has changed."""
        tree = SumTree(100)
        tree.update(torch.arange(100), 1.0)
        for eligible, error, message in (
            (torch.zeros(2), TypeError, "eligible must be int64, not torch.float32"),
            (torch.zeros(100, dtype=torch.bool), TypeError, "not torch.bool"),
            (torch.zeros(3, dtype=torch.int64), ValueError, r"have shape \[2\], not \[3\]"),
            (torch.zeros(4, dtype=torch.int64)[::2], ValueError, r"contiguous, but has strides \(2,\)"),
            (
                torch.zeros(2, dtype=torch.int64, device="meta"),
                ValueError,
                "must be on cpu, as the tree is, not on meta",
            ),
        ):
            with pytest.raises(error, match=message):
                tree.restrict(eligible)
        assert (tree.eligible, tree.total.item()) == (None, 100)


def test_opcheck():
    """Schema, fake implementation, dispatch: of every operation."""
    rng, ring, index = RandomState(1).state, ring_of(40, 40), torch.tensor([3, -1, 7])
    for eligible in (None, torch.tensor([0xFFF0])):
        tree = sum_tree.new_tree(40, 4, "cpu")._replace(eligible=eligible)
        sum_tree.update(*tree, ring, torch.arange(40), torch.arange(1.0, 41.0), None)
        for operation, *arguments in (
            (sum_tree.build,),
            (sum_tree.update, ring, index, torch.ones(3), None),
            (sum_tree.update, ring, index, torch.ones(3), index),
            (sum_tree.mark, index, False),
            (sum_tree.draw, rng, 5, False),
            (sum_tree.refresh, index),
        ):
            torch.library.opcheck(operation, (*tree, *arguments))
