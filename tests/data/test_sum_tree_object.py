"""SumTree: what it accepts, its exponents, its state, and no host synchronisation."""

from __future__ import annotations

import math

import pytest
import torch

from gpubuf.data.samplers.base import RandomState
from gpubuf.data.samplers.sum_tree import SumTree
from tests.support.sum_tree_checks import assert_consistent


def weights_of(tree: SumTree) -> list[float]:
    return tree.leaves[: tree.capacity].tolist()


def filled(rows: int = 5, **arguments: float) -> SumTree:
    """A tree of 12 rows, the first of which have priorities 1, 2, 3 ..."""
    tree = SumTree(12, **arguments)
    tree.update(torch.arange(rows), torch.arange(1.0, rows + 1))
    return tree


class TestArguments:
    @pytest.mark.parametrize(
        "priority",
        [
            torch.tensor([1, 2, 3]),
            torch.tensor([1, 2, 3], dtype=torch.uint8),
            torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64),
            torch.tensor([1.0, 2.0, 3.0], dtype=torch.float16),
            torch.tensor([[1.0], [2.0], [3.0]]),
            torch.tensor([1.0, 9.0, 2.0, 9.0, 3.0, 9.0])[::2],
            torch.tensor([1.0, 2.0, 3.0], requires_grad=True),
        ],
        ids=["int64", "uint8", "float64", "float16", "[B, 1]", "strided", "requires grad"],
    )
    def test_priorities_of_any_kind(self, priority):
        """CASES 9: integer or float64 priorities, priorities shaped [B, 1]; index -1 is ignored."""
        tree = SumTree(4)
        tree.update(torch.tensor([2, -1, 0]), priority)
        assert weights_of(tree) == [3, 0, 1, 0]

    def test_indices_of_any_kind(self):
        tree = SumTree(6)
        tree.update(torch.tensor([[0, 1], [2, 3]], dtype=torch.int32), torch.tensor([[1.0, 2.0], [3.0, 4.0]]))
        tree.mark(torch.tensor([4, 9, 5, 9])[::2])
        assert weights_of(tree) == [1, 2, 3, 4, 4, 4]
        for wrong in (torch.tensor([1.0]), torch.tensor([True])):
            with pytest.raises(TypeError, match="integers"):
                tree.mark(wrong)

    def test_numbers_of_elements(self):
        tree = filled()
        with pytest.raises(ValueError, match=r"3 rows are addressed, but given are \{'priorities': 2\}"):
            tree.update(torch.arange(3), torch.ones(2))
        with pytest.raises(ValueError, match="'generations': 1"):
            tree.update(torch.arange(3), torch.ones(3), generation=torch.ones(1, dtype=torch.int64))
        assert weights_of(tree)[:3] == [1, 2, 3]

    def test_shape(self):
        with pytest.raises(ValueError, match="capacity must be at least 1, but is 0"):
            SumTree(0)
        for wrong in (0, 1, 12, -4):
            with pytest.raises(ValueError, match=f"power of two of at least 2, but is {wrong}"):
                SumTree(3, fan_out=wrong)


class TestAlpha:
    def test_change(self):
        """CASES 14: alpha changed later: the weights are those of a tree that had it from the start."""
        tree = filled(alpha=0.5, eps=0.25)
        tree.set_alpha(1.5)
        due = [(p + 0.25) ** 1.5 for p in (1, 2, 3, 4, 5)]
        assert weights_of(tree) == pytest.approx([*due, *[0.0] * 7], rel=1e-6)
        assert_consistent(tree)
        tree.mark(torch.tensor([11]))
        assert weights_of(tree)[11] == pytest.approx(due[-1], rel=1e-6)
        tree.update(torch.tensor([10]), 4.0)
        assert weights_of(tree)[10] == pytest.approx(due[3], rel=1e-6)
        assert tree.alpha == 1.5

    def test_through_zero(self):
        """CASES 14: with alpha = 0 the priorities are lost, which a warning says."""
        tree = filled()
        tree.set_alpha(0.0)
        assert weights_of(tree) == [1] * 5 + [0] * 7
        with pytest.warns(UserWarning, match="alpha = 0"):
            tree.set_alpha(2.0)
        assert weights_of(tree) == [1] * 5 + [0] * 7
        tree.update(torch.tensor([0]), 3.0)
        assert weights_of(tree)[0] == 9
        assert_consistent(tree)

    def test_beyond_float32(self):
        tree = SumTree(2)
        tree.update(torch.tensor([0, 1]), torch.tensor([1e30, 1e-30]))
        with pytest.warns(UserWarning, match="out of float32's range"):
            tree.set_alpha(2.0)
        assert weights_of(tree) == [torch.finfo(torch.float32).max, torch.finfo(torch.float32).tiny]

    def test_out_of_range_is_said_once(self):
        tree = SumTree(4, alpha=3.0)
        tree.update(torch.arange(2), torch.tensor([1e-12, 1e12]))
        with pytest.warns(UserWarning, match="alpha = 3 and eps = 0 .* out of float32's range"):
            tree.update(torch.arange(2), torch.tensor([1.0, 1e-13]))
        tree.update(torch.arange(2), torch.tensor([1e13, 1e-14]))
        tree.mark(torch.arange(4))


class TestState:
    @pytest.mark.parametrize("fan_out", [2, 16, 64])
    def test_round_trip(self, fan_out):
        """CASES 10: the maximum priority is part of the state; the fan-out is not."""
        tree = SumTree(70, alpha=0.6, beta=0.4, eps=1e-3)
        tree.update(torch.arange(60), torch.rand(60, generator=torch.Generator().manual_seed(0)) * 9)
        tree.update(torch.arange(60), torch.rand(60, generator=torch.Generator().manual_seed(1)))
        state = tree.state_dict()
        tree.update(torch.arange(70), 0.0)
        other = SumTree(70, fan_out=fan_out)
        tensors = (other.leaves, other.nodes, other.scalars)
        other.load_state_dict(state)
        assert all(a is b for a, b in zip(tensors, (other.leaves, other.nodes, other.scalars), strict=True))
        assert torch.equal(other.leaves[:70], state["leaves"])
        assert (other.alpha, other.beta.item()) == (0.6, 0.4)
        assert other.max_priority.item() > 5
        assert_consistent(other)
        tree.load_state_dict(state)
        assert torch.equal(tree.draw(20, RandomState(1))[0], other.draw(20, RandomState(1))[0])

    @pytest.mark.parametrize(
        ("change", "error", "message"),
        [
            ({"capacity": 24}, ValueError, "of a tree of 24 rows, this tree has 12"),
            ({"leaves": torch.ones(24)}, ValueError, r"leaves must have shape \[12\], not \[24\]"),
            ({"leaves": torch.ones(12).double()}, TypeError, "leaves must be torch.float32, not torch.float64"),
            ({"leaves": torch.full((12,), math.nan)}, ValueError, "finite and not negative"),
            ({"leaves": torch.full((12,), math.inf)}, ValueError, "finite and not negative"),
            ({"leaves": torch.full((12,), -1.0)}, ValueError, "finite and not negative"),
            ({"hyper": torch.ones(4).double()}, ValueError, r"hyper must have shape \[5\], not \[4\]"),
            ({"hyper": torch.tensor([-1.0, 1, 0, 1, 0]).double()}, ValueError, "alpha must be"),
            ({"hyper": torch.tensor([1, math.nan, 0, 1, 0]).double()}, ValueError, "beta must be"),
            ({"hyper": torch.tensor([1, 1, 0, math.inf, 0]).double()}, ValueError, "largest priority"),
        ],
    )
    def test_a_bad_state_changes_nothing(self, change, error, message):
        """CASES 10: restored into a tree of another size: refused with both sizes."""
        tree = filled(alpha=0.5)
        before = [tensor.clone() for tensor in (tree.leaves, tree.nodes, tree.scalars)]
        state = SumTree(12).state_dict() | change
        with pytest.raises(error, match=message):
            tree.load_state_dict(state)
        assert all(map(torch.equal, before, (tree.leaves, tree.nodes, tree.scalars)))
        assert tree.alpha == 0.5
        with pytest.raises(KeyError, match="leaves"):
            tree.load_state_dict({"capacity": 12, "hyper": tree.scalars})

    def test_negative_zero_does_not_get_in(self):
        """A GPU would take the sign bit of a leaf for a tag."""
        tree = SumTree(4)
        tree.load_state_dict(tree.state_dict() | {"leaves": torch.tensor([-0.0, 1, 2, -0.0])})
        assert_consistent(tree)
