"""Eligible rows: a bitmap that restricts what the sum tree counts and draws, through both backends."""

from __future__ import annotations

import math

import pytest
import torch

from gpubuf.data.samplers.base import RandomState
from gpubuf.data.samplers.sum_tree import SumTree
from gpubuf.kernels import sum_tree
from gpubuf.kernels.philox.reference import uniforms
from gpubuf.kernels.sum_tree.reference import WeightList
from tests.support.sum_tree_checks import assert_consistent, bitmap, bits_of, chi_square, chi_square_bound


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def random_bits(rows: int, share: float, seed: int) -> list[bool]:
    return (torch.rand(rows, generator=seeded(seed)) < share).tolist()


def restricted(weights, eligible, fan_out: int | None = None, **exponents: float) -> tuple[SumTree, WeightList]:
    """A tree and a model of these weights; ``eligible`` are booleans."""
    weights = torch.as_tensor(weights, dtype=torch.float32)
    tree, model = (
        kind(weights.numel(), **exponents) for kind in (lambda n, **e: SumTree(n, fan_out=fan_out, **e), WeightList)
    )
    tree.leaves[: weights.numel()] = weights
    model.weights, model.eligible = weights.tolist(), list(eligible)
    tree.restrict(bitmap(eligible))
    return tree, model


def assert_built(tree: SumTree) -> None:
    """The nodes are, to the bit, what a build makes, and what they should be."""
    nodes = tree.nodes.clone()
    tree.rebuild()
    assert torch.equal(tree.nodes, nodes)
    assert_consistent(tree)


@pytest.mark.parametrize("fan_out", [2, 16, 32, 128])
@pytest.mark.parametrize("capacity", [1, 15, 17, 63, 64, 65, 130, 300])
def test_every_shape_of_tree(backend, capacity, fan_out):
    """CASES 5: capacities that are no multiple of a word, of a node, or of either; integers have exact sums."""
    weights = torch.randint(1, 6, (capacity,), generator=seeded(capacity)).float()
    eligible = [*random_bits(capacity - 1, 0.6, fan_out), True]
    tree, model = restricted(weights, eligible, fan_out, beta=0.5)
    assert_consistent(tree)
    index = torch.randint(-1, capacity, (9,), generator=seeded(1))
    priority = torch.randint(0, 6, (9,), generator=seeded(2)).float()
    tree.update(index, priority)
    model.update(index.tolist(), priority.tolist())
    assert_built(tree)
    flipped = {0, capacity // 2, capacity - 2} & set(range(capacity - 1))
    for row in flipped:
        eligible[row] = not eligible[row]
    model.eligible = eligible
    tree.eligible.copy_(bitmap(eligible))
    tree.refresh(torch.tensor([-1, *flipped, -1, *flipped]))
    assert_built(tree)
    tree.mark(index.flip(0), within_buffer=True)
    model.mark(index.tolist(), within_buffer=True)
    assert_built(tree)
    assert tree.leaves[:capacity].tolist() == model.weights
    drawn, weight = tree.draw(12, RandomState(7))
    assert drawn.tolist() == model.draw(uniforms(7, 0, 12))
    assert weight.tolist() == pytest.approx([model.importance(row) for row in drawn.tolist()], rel=1e-6)


@pytest.mark.parametrize("fan_out", [2, 16, 64, 128])
@pytest.mark.parametrize("row", [0, 15, 16, 31, 32, 63, 64, 127, 128, 129])
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


@pytest.mark.parametrize("fan_out", [2, 16, 32, 128])
def test_every_unit_of_eligible_weight_is_drawn_once(backend, fan_out):
    """Exact enumeration: as many strata as the eligible rows weigh, each of which holds one unit of one row."""
    weights = torch.randint(0, 4, (170,), generator=seeded(fan_out))
    eligible = torch.tensor(random_bits(170, 0.4, 3))
    tree, _ = restricted(weights, eligible.tolist(), fan_out)
    due = weights * eligible
    index, _ = tree.draw(int(due.sum()), RandomState(4), stratified=True)
    assert torch.equal(torch.bincount(index, minlength=170), due)


def test_distribution_among_eligible_rows(backend):
    """Seeded chi-square, with ineligible rows that outweigh the eligible ones by far."""
    rows, n = (3000, 300_000) if backend == "numba" else (70, 1024)
    eligible = torch.tensor(random_bits(rows, 0.5, 8))
    weights = torch.rand(rows, generator=seeded(9)) + 0.2
    tree, _ = restricted(torch.where(eligible, weights, 1e6), eligible.tolist())
    index, weight = tree.draw(n, RandomState(5))
    assert eligible[index].all()
    probabilities = torch.where(eligible, weights, 0.0).double()
    counts = torch.bincount(index, minlength=rows).tolist()
    statistic = chi_square(counts, (probabilities / probabilities.sum()).tolist())
    degrees = int(eligible.sum()) - 1
    assert chi_square_bound(degrees, -4.0) < statistic < chi_square_bound(degrees)
    # q_min is that of eligible rows, so that no weight exceeds 1.
    assert weight.max() <= 1


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


@pytest.mark.parametrize("fan_out", [4, 16, 64])
def test_rounding_never_carries_a_draw_into_an_ineligible_leaf(backend, fan_out):
    """CASES 4: weights of very different size, the ineligible ones the largest."""
    eligible = torch.tensor(random_bits(500, 0.5, fan_out))
    weights = 10.0 ** (torch.rand(500, generator=seeded(fan_out)) * 14 - 7)
    tree, _ = restricted(torch.where(eligible, weights, 1e30), eligible.tolist(), fan_out)
    index, _ = tree.draw(20_000 if backend == "numba" else 256, RandomState(6))
    assert eligible[index].all()


@pytest.mark.parametrize("n", [3, 200, 1024, 1500, 6000])
@pytest.mark.parametrize("fan_out", [4, 16])
def test_refresh_of_every_size(backend, n, fan_out):
    """One program, one launch a level, and whole levels: equal to a build, to the bit."""
    capacity = 5003
    weights = 10.0 ** (torch.rand(capacity, generator=seeded(n)) * 6)
    eligible = random_bits(capacity, 0.5, n)
    tree, _ = restricted(weights, eligible, fan_out)
    changed = torch.randint(-1, capacity, (n,), generator=seeded(n + 1))
    for row in changed.tolist():
        if row >= 0:
            eligible[row] = row % 3 == 0
    tree.eligible.copy_(bitmap(eligible))
    before = tree.nodes.clone()
    tree.refresh(changed)
    assert not torch.equal(tree.nodes, before)
    assert_built(tree)
    assert torch.equal(tree.leaves[:capacity], weights), "weights are masked by structure, not written"


@pytest.mark.parametrize("n", [1024, 1500])
def test_large_batches(backend, n):
    """Updates and marks of more rows than one program takes."""
    capacity = 5003
    tree, model = restricted(torch.zeros(capacity), random_bits(capacity, 0.5, n))
    index = torch.randint(-1, capacity, (n,), generator=seeded(n))
    priority = torch.rand(n, generator=seeded(n)) + 0.1
    tree.update(index, priority)
    model.update(index.tolist(), priority.tolist())
    assert_built(tree)
    marked = torch.randint(-1, capacity, (n,), generator=seeded(n + 1))
    tree.mark(marked, within_buffer=True)
    model.mark(marked.tolist(), within_buffer=True)
    assert_built(tree)
    assert tree.leaves[:capacity].tolist() == model.weights


def test_refresh_after_leaves_were_written(backend):
    """Without a bitmap as well; any shape and integer type; nothing at all."""
    tree = SumTree(100, fan_out=4)
    tree.leaves[[3, 70]] = torch.tensor([2.0, 5.0])
    tree.refresh(torch.tensor([[3, 70], [-1, 3]], dtype=torch.int32))
    assert_built(tree)
    tree.refresh(torch.empty(0, dtype=torch.int64))
    assert tree.total.item() == 7


@pytest.mark.parametrize("bad", [-2, 98, 2**40])
def test_refresh_out_of_range(backend, bad):
    """An exception on CPU, before anything changes; ignored on a GPU."""
    tree = SumTree(98, fan_out=4)
    tree.leaves[0] = 3.0
    index = torch.tensor([0, bad])
    if backend == "numba":
        with pytest.raises(IndexError, match=f"index {bad}, entry 1, .* 98 rows"):
            tree.refresh(index)
        assert tree.total.item() == 0
    else:
        tree.refresh(index)
        assert_built(tree)


def test_ineligible_rows_keep_their_weights(backend):
    """Priorities of ineligible rows are stored, and count from when the row is eligible."""
    tree = SumTree(20, fan_out=4)
    eligible = bitmap([row % 2 == 0 for row in range(20)])
    tree.restrict(eligible)
    tree.update(torch.arange(6), torch.arange(1.0, 7.0))
    assert tree.leaves[:6].tolist() == [1, 2, 3, 4, 5, 6]
    assert (tree.total.item(), tree.minimum.item(), tree.maximum.item()) == (9, 1, 5)
    assert tree.max_priority.item() == 6
    tree.mark(torch.tensor([7, 8]))
    assert tree.leaves[7:9].tolist() == [6, 6]
    assert (tree.total.item(), tree.maximum.item()) == (15, 6)
    eligible[0] = 0b1010
    tree.refresh(torch.arange(20))
    assert (tree.total.item(), tree.minimum.item(), tree.maximum.item()) == (6, 2, 4)
    # The largest weight in the buffer is that of eligible rows.
    tree.mark(torch.tensor([19]), within_buffer=True)
    assert tree.leaves[19].item() == 4
    assert tree.total.item() == 6
    eligible.zero_()
    tree.rebuild()
    tree.mark(torch.tensor([18]), within_buffer=True)
    assert tree.leaves[18].item() == 1
    tree.restrict(None)
    assert tree.total.item() == 1 + 2 + 3 + 4 + 5 + 6 + 6 + 6 + 1 + 4
    assert_built(tree)


@pytest.mark.parametrize("fan_out", [2, 16, 128])
@pytest.mark.parametrize("capacity", [1, 100])
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


def test_both_backends_draw_alike():
    """Also with weights whose sums are rounded: an uniform would have to fall within 1e-15 of an edge."""
    from gpubuf.kernels._registry import triton_on_cpu

    weights = torch.rand(5000, generator=seeded(1)) ** 4
    eligible = random_bits(5000, 0.3, 2)
    drawn = []
    for through_triton in (False, True):
        with triton_on_cpu(through_triton):
            drawn.append(restricted(weights, eligible, beta=0.4)[0].draw(300, RandomState(11)))
    assert torch.equal(drawn[0][0], drawn[1][0])
    torch.testing.assert_close(drawn[0][1], drawn[1][1], rtol=1e-6, atol=0)
    bits = torch.tensor(bits_of(bitmap(eligible), 5000))
    assert bits[drawn[0][0]].all()


class TestArguments:
    def test_restrict(self):
        """Refused with both sides stated; nothing has changed."""
        tree = SumTree(100)
        tree.update(torch.arange(100), 1.0)
        for eligible, error, message in (
            (torch.zeros(2), TypeError, "eligible must be torch.int64, not torch.float32"),
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

    @pytest.mark.parametrize("name", ["build", "refresh", "update", "mark", "draw"])
    def test_operations(self, backend, name):
        """A bitmap of another length or type does not reach a kernel."""
        tree = SumTree(100, fan_out=128)
        index, shape = torch.tensor([3, -1, 7]), (100, 128)
        arguments = {
            "build": (tree.leaves, tree.nodes, 128),
            "refresh": (tree.leaves, tree.nodes, index, *shape),
            "update": (tree.leaves, tree.nodes, tree.scalars, tree._full_ring, index, torch.ones(3), None, *shape),
            "mark": (tree.leaves, tree.nodes, tree.scalars, index, *shape, False),
            "draw": (tree.leaves, tree.nodes, tree.scalars, RandomState(1).state, 3, *shape, False),
        }[name]
        tree.update(torch.arange(100), 1.0)
        operation = getattr(sum_tree, name)
        words = torch.full((2,), -1)
        operation(*arguments, words)
        with pytest.raises(TypeError, match=r"eligible must be torch\.int64, not torch\.int32"):
            operation(*arguments, words.int())
        for wrong in (torch.zeros(0, dtype=torch.int64), torch.full((3,), -1), torch.full((1, 2), -1)[:, :1]):
            if name == "build" and wrong.numel() == 1:
                # The leaves are padded to 128: they may be those of 64 rows.
                continue
            with pytest.raises(ValueError, match="eligible must"):
                operation(*arguments, wrong)
        with pytest.raises(ValueError, match="eligible must be contiguous"):
            operation(*arguments, torch.full((4,), -1)[::2])
