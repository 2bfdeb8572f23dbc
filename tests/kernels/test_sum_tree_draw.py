"""What the sum tree draws: exact rows for known uniforms, distributions, and the edges."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from gpubuf.data.samplers.base import RandomState
from gpubuf.data.samplers.sum_tree import SumTree
from gpubuf.kernels import config
from gpubuf.kernels.philox.reference import uniforms
from gpubuf.kernels.sum_tree.reference import WeightList
from tests.support.sum_tree_checks import chi_square, chi_square_bound


@pytest.fixture
def wide_programs(monkeypatch):
    """Many draws a program: the interpreter pays by the program."""
    by_rule = config.tree_draw
    monkeypatch.setattr(
        config, "tree_draw", lambda *arguments: dataclasses.replace(by_rule(*arguments), block_draws=2048)
    )


def tree_of(weights, fan_out: int | None = None, **exponents: float) -> SumTree:
    weights = torch.as_tensor(weights, dtype=torch.float32)
    tree = SumTree(weights.numel(), fan_out=fan_out, **exponents)
    tree.leaves[: weights.numel()] = weights
    tree.rebuild()
    return tree


@pytest.mark.parametrize("fan_out", [2, 4, 16, 64])
@pytest.mark.parametrize("stratified", [False, True])
def test_the_very_rows_that_the_uniforms_name(backend, fan_out, stratified):
    """Integer weights, zeros among them, have exact sums: nothing is left to rounding."""
    weights = torch.randint(0, 4, (333,), generator=torch.Generator().manual_seed(fan_out)) ** 3
    model = WeightList(333)
    model.weights = weights.tolist()
    rng = RandomState(7)
    tree = tree_of(weights, fan_out)
    offset = 0
    for n in (1, 45):
        index, weight = tree.draw(n, rng, stratified)
        assert index.tolist() == model.draw(uniforms(7, offset, n), stratified)
        assert weight.tolist() == pytest.approx([1 / model.weights[row] for row in index.tolist()], rel=1e-6)
        offset += n
    assert rng.state.tolist() == [7, offset, 0]


def test_both_backends_draw_alike():
    """Also with weights whose sums are rounded: an uniform would have to fall within 1e-15 of an edge."""
    from gpubuf.kernels._registry import triton_on_cpu

    weights = torch.rand(5000, generator=torch.Generator().manual_seed(1)) ** 4
    drawn = []
    for through_triton in (False, True):
        with triton_on_cpu(through_triton):
            drawn.append(tree_of(weights, beta=0.4).draw(300, RandomState(11)))
    assert torch.equal(drawn[0][0], drawn[1][0])
    torch.testing.assert_close(drawn[0][1], drawn[1][1], rtol=1e-6, atol=0)


@pytest.mark.usefixtures("wide_programs")
@pytest.mark.parametrize("stratified", [False, True])
@pytest.mark.parametrize("alpha", [1.0, 0.6])
def test_skewed_priorities(backend, stratified, alpha):
    """Seeded chi-square: rows come in proportion to (priority + eps) ** alpha."""
    n, rows = (200_000, 300) if backend == "numba" else (4096, 60)
    priority = torch.rand(rows, generator=torch.Generator().manual_seed(3)) ** 6 * 50 + 0.5
    priority[::7] = 0.0
    tree = SumTree(rows + 20, alpha=alpha)
    tree.update(torch.arange(rows), priority)
    index, _ = tree.draw(n, RandomState(5), stratified)
    counts = torch.bincount(index, minlength=rows + 20)
    assert counts[rows:].sum() == 0
    weights = priority.double() ** alpha
    probabilities = (weights / weights.sum()).tolist()
    positive = sum(p > 0 for p in probabilities)
    statistic = chi_square(counts[:rows].tolist(), probabilities)
    assert statistic < chi_square_bound(positive - 1)
    if not stratified:
        # Independent draws scatter; a statistic near zero would mean that they don't.
        assert statistic > chi_square_bound(positive - 1, -4.0)
    assert counts[:rows][priority == 0].sum() == 0


@pytest.mark.parametrize(("beta", "fan_out"), [(0.4, 16), (1.0, 4), (0.0, 16)])
def test_importance_weights_follow_the_formula(backend, beta, fan_out):
    """w = (q / q_min) ** -beta to 1e-6, the largest exactly 1."""
    priority = 10.0 ** torch.linspace(-6, 5, 101, dtype=torch.float64)
    tree = SumTree(128, alpha=0.7, beta=beta, eps=1e-4, fan_out=fan_out)
    tree.update(torch.arange(101), priority)
    index, weight = tree.draw(250, RandomState(2))
    q = (priority.float().double() + 1e-4) ** 0.7
    due = (q[index] / q.min()) ** -beta
    assert weight.dtype is torch.float32
    torch.testing.assert_close(weight.double(), due, rtol=1e-6, atol=0)
    tree.update(torch.arange(1, 101), 0.0)
    tree.update(torch.arange(1, 101), priority[0].item())
    assert tree.draw(5, RandomState(2))[1].tolist() == [1.0] * 5


@pytest.mark.usefixtures("wide_programs")
@pytest.mark.parametrize("fan_out", [4, 16])
@pytest.mark.parametrize("zeros", ["first", "last", "left half", "right half", "all but one", "partly filled", "comb"])
def test_weight_zero_is_never_drawn(backend, zeros, fan_out):
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
    tree = tree_of(weights, fan_out)
    for stratified in (False, True):
        index, weight = tree.draw(30_000 if backend == "numba" else 2048, RandomState(6), stratified)
        assert index.min() >= 0
        assert (weights[index] > 0).all()
        assert set(index.tolist()) == set(weights.nonzero().flatten().tolist())
        assert (weight <= 1).all()


@pytest.mark.usefixtures("wide_programs")
def test_rounding_never_carries_a_draw_into_an_empty_leaf(backend):
    """Weights of very different size, zeros between: prefix sums are rounded, in another order on a GPU."""
    generator = torch.Generator().manual_seed(9)
    weights = 10.0 ** (torch.rand(500, generator=generator) * 14 - 7)
    weights[torch.rand(500, generator=generator) < 0.5] = 0.0
    for scale in (1.0, 1e-30, 1e30):
        tree = tree_of(weights * scale)
        index, _ = tree.draw(20_000 if backend == "numba" else 2048, RandomState(6))
        assert (tree.leaves[index] > 0).all()


@pytest.mark.parametrize("fan_out", [2, 16])
def test_mass_past_the_last_prefix_sum(backend, fan_out):
    """A root that says too much, as after rounding: the last positive child at every level, never an empty one."""
    weights = torch.zeros(40)
    weights[[3, 20, 33]] = 1.0
    tree = tree_of(weights, fan_out)
    tree.nodes[0, -1] = 1e6
    index, _ = tree.draw(32, RandomState(8))
    assert index.tolist().count(33) >= 31


@pytest.mark.usefixtures("wide_programs")
def test_strata(backend):
    """CASES 3: 32 768 strata of 32 leaves: each yields its own leaves, the last one many different ones."""
    strata = 32_768 if backend == "numba" else 4096
    tree = tree_of(torch.ones(strata * 32))
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


def test_a_draw_is_the_callers_to_keep(backend):
    tree = tree_of(torch.ones(50))
    rng = RandomState(1)
    first = tree.draw(8, rng)
    kept = [tensor.clone() for tensor in first]
    tree.draw(8, rng)
    assert all(map(torch.equal, first, kept))
