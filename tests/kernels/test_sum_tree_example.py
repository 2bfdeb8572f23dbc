"""The worked example that kernels/sum_tree opens with."""

from __future__ import annotations

import doctest
import re
from pathlib import Path

import torch

from gpubuf.data.samplers.base import RandomState
from gpubuf.data.samplers.sum_tree import SumTree
from gpubuf.kernels import philox, sum_tree
from gpubuf.kernels.philox.reference import uniforms
from gpubuf.kernels.sum_tree._cpu_node import choose_leaf, choose_node
from gpubuf.kernels.sum_tree.reference import WeightList

WEIGHTS = [2.0, 0.0, 1.0, 5.0, 3.0, 1.0]
ROOT = Path(__file__).parents[2]


def tree_of_six() -> SumTree:
    tree = SumTree(6, fan_out=4, beta=0.5)
    tree.leaves[:6] = torch.tensor(WEIGHTS)
    tree.rebuild()
    return tree


def test_the_code_of_the_example(backend):
    """Also the picture: the numbers of level 1 and of the root are what ``nodes`` prints."""
    example = doctest.DocTestFinder(recurse=False).find(sum_tree, "sum_tree")[0]
    assert len(example.examples) >= 8
    assert doctest.DocTestRunner().run(example).failed == 0


def test_mass_8_4_lands_on_row_4():
    """Step by step, as the text goes."""
    tree = tree_of_six()
    mass = 0.7 * tree.total.item()
    assert round(mass, 12) == 8.4
    child, left = choose_node(tree.nodes.data_ptr(), mass, 4)
    assert (child, round(left, 12)) == (1, 0.4)
    assert 4 * child + choose_leaf(tree.leaves.data_ptr(), 0, 4 * child, left, 4) == 4
    plain = WeightList(6, beta=0.5)
    plain.weights = WEIGHTS
    assert plain.draw([0.7]) == [4]
    assert plain.importance(4) == 3**-0.5


def test_a_draw_of_mass_8_4(backend):
    """By the operation itself, with a random stream whose next uniform is next to 0.7."""
    drawn = uniforms(0, 0, 4000)
    offset = min(range(4000), key=lambda i: abs(drawn[i] - 0.7))
    assert abs(drawn[offset] - 0.7) < 0.001
    rng = RandomState(0)
    rng.state[philox.OFFSET] = offset
    index, weight = tree_of_six().draw(1, rng)
    assert index.tolist() == [4]
    assert abs(weight.item() - 3**-0.5) < 1e-6


def test_the_chances_of_the_rows():
    plain = WeightList(6)
    plain.weights = WEIGHTS
    rows = plain.draw([(i + 0.5) / 12 for i in range(12)])
    assert [rows.count(row) for row in range(6)] == WEIGHTS


def test_the_functions_that_assert_the_invariants_exist():
    names = set(re.findall(r"``(assert_\w+|test_\w+)``", sum_tree.__doc__ or ""))
    assert len(names) >= 8
    sources = [path.read_text() for folder in ("kernels", "support") for path in (ROOT / "tests" / folder).glob("*.py")]
    assert not [name for name in names if not any(f"def {name}(" in source for source in sources)]
