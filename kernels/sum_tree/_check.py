"""Argument checks of the sum tree's operations, shared by both backends. They are cheap, and read no values."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from gpubuf.kernels._registry import demand_dense
from gpubuf.kernels.sum_tree import eligible_words, level_sizes


@lru_cache(maxsize=256)
def tree_shape(capacity: int, fan_out: int) -> tuple[int, int, int]:
    """``(n_leaves, n_nodes, depth)`` of a tree; depth counts the inner levels.

    Raises:
        ValueError: the capacity is not positive, or the fan-out is not a power of two of at least 2.
    """
    if capacity < 1:
        raise ValueError(f"the capacity must be at least 1, but is {capacity}")
    if fan_out < 2 or fan_out & (fan_out - 1):
        raise ValueError(f"the fan-out must be a power of two of at least 2, but is {fan_out}")
    sizes = level_sizes(capacity, fan_out)
    return -(-capacity // fan_out) * fan_out, sum(sizes), len(sizes)


def check_tree(
    leaves: Tensor, nodes: Tensor, scalars: Tensor, eligible: Tensor | None, capacity: int, fan_out: int
) -> None:
    """Raise TypeError or ValueError unless these are a :class:`gpubuf.kernels.sum_tree.Tree`."""
    n_leaves, n_nodes, _ = tree_shape(capacity, fan_out)
    demand_dense("leaves", leaves, torch.float32, n_leaves)
    demand_dense("nodes", nodes, torch.float64, 3, n_nodes)
    demand_dense("scalars", scalars, torch.float64, 5)
    if eligible is not None:
        check_eligible(eligible, capacity)


def check_eligible(eligible: Tensor, capacity: int) -> None:
    """Raise TypeError or ValueError unless ``eligible`` is a bitmap of that many rows."""
    demand_dense("eligible", eligible, torch.int64, eligible_words(capacity))


def check_index(index: Tensor) -> None:
    """Raise TypeError or ValueError unless ``index`` is a contiguous int64 vector."""
    demand_dense("index", index, torch.int64, index.numel())


def check_update(ring: Tensor, index: Tensor, priority: Tensor, generation: Tensor | None) -> None:
    """Raise TypeError or ValueError unless the tensors of an update fit together."""
    check_index(index)
    demand_dense("ring", ring, torch.int64, 4)
    demand_dense("priority", priority, torch.float32, index.numel())
    if generation is not None:
        demand_dense("generation", generation, torch.int64, index.numel())


def outside(index: Tensor, place: int, capacity: int) -> IndexError:
    """That an entry of ``index`` is neither a row nor -1."""
    return IndexError(f"index {index[place].item()}, entry {place}, is out of range for a sum tree of {capacity} rows")


def refused(index: Tensor, priority: Tensor, place: int) -> ValueError:
    """That an entry of ``priority`` is none."""
    return ValueError(
        f"priorities must be finite and not negative, but entry {place}, for row {index[place].item()}, is "
        f"{priority[place].item()}; no priority has been changed"
    )


def nothing_to_draw(eligible: Tensor | None) -> RuntimeError:
    """That the total weight is zero."""
    ineligible = "" if eligible is None else " or is ineligible"
    return RuntimeError(f"nothing can be drawn: every row of the sum tree has weight zero{ineligible}")
