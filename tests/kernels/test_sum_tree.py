"""The sum tree's operations, through both backends, against a model in plain Python."""

from __future__ import annotations

import math

import pytest
import torch

from gpubuf.data.samplers.base import RandomState
from gpubuf.data.samplers.sum_tree import SumTree
from gpubuf.kernels import config, rows, sum_tree
from gpubuf.kernels._registry import triton_on_cpu
from gpubuf.kernels.config import UpdateConfig
from gpubuf.kernels.sum_tree.reference import WeightList
from tests.support.sum_tree_checks import assert_consistent


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


@pytest.mark.parametrize("fan_out", [2, 4, 16, 32])
@pytest.mark.parametrize("shape", ["one", "F - 1", "F", "F + 1", "F^2", "odd"])
def test_every_shape_of_tree(backend, fan_out, shape):
    """CASES 5: capacity 1, not a power of two, exactly full, and the edges of a node."""
    capacity = {
        "one": 1,
        "F - 1": fan_out - 1,
        "F": fan_out,
        "F + 1": fan_out + 1,
        "F^2": fan_out**2,
        "odd": 3 * fan_out + 7,
    }[shape]
    tree, model = matching(capacity, fan_out, alpha=0.6, eps=1e-3)
    assert_same(tree, model)
    everything = torch.arange(capacity)
    tree.mark(everything)
    model.mark(everything.tolist())
    assert_same(tree, model)
    for seed in range(2):
        index = torch.randint(-1, capacity, (9,), generator=torch.Generator().manual_seed(seed))
        priority = random_priorities(9, seed)
        tree.update(index, priority)
        model.update(index.tolist(), priority.tolist())
        assert_same(tree, model)
    tree.rebuild()
    assert_same(tree, model)
    drawn, weight = tree.draw(20, RandomState(1))
    assert drawn.min() >= 0
    assert drawn.max() < capacity
    assert weight.tolist() == pytest.approx([model.importance(row) for row in drawn.tolist()], rel=1e-6)


@pytest.mark.parametrize("n", [1, 255, 256, 257, 1024, 1500])
def test_batches_of_every_size(backend, n):
    """Below and above what one program does at once, with duplicates, against the model."""
    tree, model = matching(700, alpha=0.7, eps=1e-6)
    tree.mark(torch.arange(700))
    model.mark(range(700))
    index = torch.randint(-1, 700, (n,), generator=torch.Generator().manual_seed(n))
    priority = random_priorities(n, n)
    tree.update(index, priority)
    model.update(index.tolist(), priority.tolist())
    assert_same(tree, model)
    marked = torch.randint(-1, 700, (n,), generator=torch.Generator().manual_seed(n + 1))
    tree.mark(marked)
    model.mark(marked.tolist())
    assert_same(tree, model)


def test_contiguous_runs(backend):
    """Rows of one write share parents: an entry leaves a node to the one before it, which may be invalid."""
    tree, model = matching(5000, 4)
    run = [*range(3, 40), -1, *range(40, 90), 4999, 0]
    tree.mark(torch.tensor(run))
    model.mark(run)
    assert_same(tree, model)
    run = [-1, 8, -1, 9, 10, -1, 11, 4000]
    tree.update(torch.tensor(run), torch.arange(8.0))
    model.update(run, range(8))
    assert_same(tree, model)


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


@pytest.mark.parametrize("rows", RUNS)
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


def test_a_million_rows_in_one_mark():
    tree = SumTree(1_000_003)
    tree.update(torch.tensor([5]), 3.0)
    tree.mark(torch.arange(1_000_000))
    assert tree.total.item() == 3e6
    tree.update(torch.arange(1_000_003), torch.arange(1_000_003).remainder(8))
    assert tree.total.item() == torch.arange(1_000_003).remainder(8).sum().item()


def test_empty_batches_change_nothing(backend):
    tree, model = matching(10)
    nothing = torch.empty(0, dtype=torch.int64)
    tree.update(nothing, torch.empty(0))
    tree.update(nothing, 1.0)
    tree.mark(nothing)
    assert_same(tree, model)
    index, weight = tree.draw(0, RandomState(1))
    assert (index.shape, weight.shape) == ((0,), (0,))


@pytest.mark.parametrize("fan_out", [4, 16])
def test_no_drift(backend, fan_out):
    """CASES 1: after priorities fall by 1e5 the root still equals the sum of the leaves to 1e-12 relative."""
    tree = SumTree(200, fan_out=fan_out)
    generator = torch.Generator().manual_seed(0)
    for step in range(60 if backend == "numba" else 12):
        scale = 1e2 * 10 ** (-5 * min(1.0, step / 10))
        index = torch.randint(0, 200, (64,), generator=generator)
        tree.update(index, scale * torch.rand(64, generator=generator))
        total = math.fsum(tree.leaves.tolist())
        assert tree.total.item() == pytest.approx(total, rel=1e-12, abs=0)
    assert_consistent(tree)


def test_build_and_update_agree_to_the_bit(backend):
    """A restored tree is rebuilt, and has to go on as the original does."""
    tree = SumTree(3000)
    for seed in range(4):
        index = torch.randint(0, 3000, (700,), generator=torch.Generator().manual_seed(seed))
        tree.update(index, random_priorities(700, seed))
    updated = tree.nodes.clone()
    tree.rebuild()
    assert torch.equal(tree.nodes, updated)


def test_the_transformation_is_applied_once(backend):
    """CASES 6: one tree update per write, alpha once: not (p ** alpha) ** alpha for a new row."""
    tree = SumTree(10, alpha=0.5, eps=1.0)
    tree.update(torch.tensor([0]), torch.tensor([15.0]))
    assert tree.leaves[0].item() == 4.0
    tree.mark(torch.tensor([1]))
    assert tree.leaves[1].item() == 4.0
    tree.mark(torch.tensor([2]), within_buffer=True)
    assert tree.leaves[2].item() == 4.0
    assert tree.max_priority.item() == 15.0


def test_weight_of_new_rows(backend):
    tree, model = matching(20, alpha=2.0)
    for step in ("empty", "low", "high", "fallen"):
        for within_buffer, row in ((False, 0), (True, 1)):
            tree.mark(torch.tensor([row]), within_buffer)
            model.mark([row], within_buffer)
            assert_same(tree, model)
        priority = {"empty": 0.25, "low": 3.0, "high": 0.5, "fallen": 0.0}[step]
        tree.update(torch.tensor([0, 1, 2]), torch.full((3,), priority))
        model.update([0, 1, 2], [priority] * 3)
    assert tree.max_priority.item() == 3.0


def test_the_maximum_falls_below_one_once_a_priority_was_given(backend):
    """1.0 is what a new row gets before the first priority, not a floor (TorchRL 2210)."""
    tree = SumTree(4)
    assert tree.max_priority.item() == 1.0
    tree.update(torch.tensor([0, 1]), torch.tensor([0.25, 0.125]))
    assert tree.max_priority.item() == 0.25
    tree.update(torch.tensor([-1]), torch.tensor([7.0]))
    assert tree.max_priority.item() == 0.25


def test_minimum_over_written_rows_only(backend):
    """CASES 7: rows never written, and rows of weight zero, don't count; without any the minimum is +inf."""
    tree = SumTree(50, fan_out=4)
    assert tree.minimum.item() == math.inf
    tree.update(torch.tensor([3, 40]), torch.tensor([0.5, 0.0]))
    assert tree.minimum.item() == 0.5
    _, weight = tree.draw(5, RandomState(1))
    assert weight.tolist() == [1.0] * 5
    tree.update(torch.tensor([3]), torch.tensor([0.0]))
    assert tree.minimum.item() == math.inf


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


@pytest.mark.parametrize("alpha", [0.0, 0.5, 1.0, 3.0, 150.0])
@pytest.mark.parametrize("eps", [0.0, 1e-8])
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


@pytest.mark.parametrize("bad", [-2, 10, 2**40])
def test_indices_out_of_range(backend, bad):
    tree = SumTree(10)
    index = torch.tensor([1, bad])
    if backend == "numba":
        for act in (lambda: tree.update(index, 1.0), lambda: tree.mark(index)):
            with pytest.raises(IndexError, match=f"index {bad}, entry 1, .* 10 rows"):
                act()
        assert tree.total.item() == 0
        return
    tree.mark(index)
    tree.update(index, 2.0)
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


@pytest.mark.parametrize("n", [40, 1300])
def test_the_last_duplicate_wins_every_time(backend, n):
    """CASES 11: 100 runs alike, on both backends."""
    generator = torch.Generator().manual_seed(n)
    index = torch.randint(0, 25, (n,), generator=generator)
    priority = torch.rand(n, generator=generator) + 1.0
    due = WeightList(30)
    due.update(index.tolist(), priority.tolist())
    for _ in range(100 if n < 100 or backend == "numba" else 3):
        tree = SumTree(30)
        tree.update(index, priority)
        assert tree.leaves[:30].tolist() == due.weights


@pytest.mark.parametrize("fan_out", [4, 16])
def test_entries_that_lie_apart_share_a_node(backend, fan_out):
    """More nodes than entries, so that they are listed: one node from several programs, and a row twice in it."""
    tree, model = matching(50 * fan_out, fan_out)
    index = [0, 9 * fan_out, 1, 9 * fan_out + 1, 2, 0, 20 * fan_out, 1, -1, 9 * fan_out + 3, 3, 40 * fan_out]
    priority = [float(i + 1) for i in range(len(index))]
    tree.update(torch.tensor(index), torch.tensor(priority))
    model.update(index, priority)
    assert_same(tree, model)


@pytest.mark.parametrize("written", [0, 3, 10, 11, 20, 37, 2**33 + 5])
def test_a_priority_that_returns_too_late_is_dropped(backend, written):
    """CASES 12: rows overwritten since they were sampled, and rows that are not in the buffer, are left alone."""
    capacity = 10
    ring = ring_of(written, min(written, capacity))
    times_written = torch.tensor([(written - row + capacity - 1) // capacity for row in range(capacity)])
    for behind in (0, 1, 2):
        tree, model = matching(capacity)
        index = torch.arange(capacity).flip(0)
        generation = times_written.flip(0) - torch.arange(capacity).remainder(2) * behind
        priority = torch.arange(1.0, 11.0)
        tree.update(index, priority, ring=ring, generation=generation)
        if written < 100:
            model.update(index.tolist(), priority.tolist(), generation.tolist(), written, min(written, capacity))
        else:
            late = generation != times_written.flip(0)
            model.update(index[~late].tolist(), priority[~late].tolist())
        assert_same(tree, model)


def test_alpha_zero_weighs_every_row_alike(backend):
    """CASES 14: alpha = 0, also for a priority of zero."""
    tree = SumTree(6, alpha=0.0)
    tree.update(torch.tensor([0, 1, 2]), torch.tensor([0.0, 5.0, 1e-9]))
    tree.mark(torch.tensor([4]))
    assert tree.leaves[:6].tolist() == [1, 1, 1, 0, 1, 0]


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


def test_all_weights_zero(backend):
    """Nothing to draw: an exception on CPU, no row and weight 0 on a GPU."""
    rng = RandomState(1)
    for tree in (SumTree(1), SumTree(300, fan_out=4)):
        if backend == "numba":
            with pytest.raises(RuntimeError, match="every row of the sum tree has weight zero"):
                tree.draw(3, rng)
        else:
            index, weight = tree.draw(3, rng)
            assert (index.tolist(), weight.tolist()) == ([sum_tree.NO_ROW] * 3, [0.0] * 3)


class TestArguments:
    """Wrong tensors are refused by name before a kernel sees their addresses."""

    def arguments(self) -> dict[str, torch.Tensor | int | None]:
        tree = SumTree(20, fan_out=4)
        return {
            "leaves": tree.leaves,
            "nodes": tree.nodes,
            "scalars": tree.scalars,
            "ring": ring_of(20, 20),
            "index": torch.arange(3),
            "priority": torch.ones(3),
            "generation": torch.ones(3, dtype=torch.int64),
            "capacity": 20,
            "fan_out": 4,
        }

    def test_the_arguments_are_fine(self, backend):
        sum_tree.update(*self.arguments().values())

    @pytest.mark.parametrize("name", ["leaves", "nodes", "scalars", "ring", "index", "priority", "generation"])
    def test_tensors(self, backend, name):
        arguments = self.arguments()
        good = arguments[name]
        with pytest.raises(TypeError, match=f"{name} must be"):
            sum_tree.update(*(arguments | {name: good.to(torch.float16)}).values())
        with pytest.raises(ValueError, match="must have shape"):
            sum_tree.update(*(arguments | {name: torch.cat([good, good], -1)}).values())
        strided = torch.stack([good, good], -1)[..., 0]
        with pytest.raises(ValueError, match=f"{name} must be contiguous"):
            sum_tree.update(*(arguments | {name: strided}).values())

    def test_numbers(self, backend):
        arguments = self.arguments()
        with pytest.raises(ValueError, match="power of two of at least 2, but is 3"):
            sum_tree.update(*(arguments | {"fan_out": 3}).values())
        with pytest.raises(ValueError, match="at least 1, but is 0"):
            sum_tree.update(*(arguments | {"capacity": 0}).values())
        with pytest.raises(ValueError, match="leaves must have shape"):
            sum_tree.update(*(arguments | {"capacity": 21}).values())
        with pytest.raises(ValueError, match="not be negative, but is -1"):
            SumTree(3).draw(-1, RandomState(1))

    def test_devices(self, backend):
        from gpubuf.kernels._check import check_devices

        with pytest.raises(ValueError, match=r"on one device, not on \['cpu', 'meta'\]"):
            check_devices(torch.empty(1), None, torch.empty(1, device="meta"))


def test_opcheck(backend):
    """Schema, fake implementation, dispatch: of every operation."""
    tree = SumTree(40, fan_out=4)
    tree.update(torch.arange(40), torch.arange(1.0, 41.0))
    rng = RandomState(1).state
    index, eligible = torch.tensor([3, -1, 7]), torch.tensor([0xFFF0])
    restricted = SumTree(40, fan_out=4)
    restricted.update(torch.arange(40), torch.arange(1.0, 41.0))
    restricted.restrict(eligible)
    shape = (tree.capacity, tree.fan_out)
    state, masked = ((of.leaves, of.nodes, of.scalars) for of in (tree, restricted))
    operations = torch.ops.gpubuf
    for operation, arguments in (
        (operations.sum_tree_build, (*state[:2], tree.fan_out)),
        (operations.sum_tree_update, (*state, ring_of(40, 40), index, torch.ones(3), None, *shape)),
        (operations.sum_tree_update, (*state, ring_of(40, 40), index, torch.ones(3), index, *shape)),
        (operations.sum_tree_mark, (*state, index, *shape, False)),
        (operations.sum_tree_draw, (*state, rng, 5, *shape, False)),
        (operations.sum_tree_refresh, (*state[:2], index, *shape)),
        (operations.sum_tree_build, (*masked[:2], tree.fan_out, eligible)),
        (operations.sum_tree_update, (*masked, ring_of(40, 40), index, torch.ones(3), None, *shape, eligible)),
        (operations.sum_tree_mark, (*masked, index, *shape, False, eligible)),
        (operations.sum_tree_draw, (*masked, rng, 5, *shape, False, eligible)),
        (operations.sum_tree_refresh, (*masked[:2], index, *shape, eligible)),
    ):
        torch.library.opcheck(operation.default, arguments)
