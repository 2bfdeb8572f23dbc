"""Argument checks of the sum tree's operations, shared by both backends. They are cheap, and read no values."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from gpubuf.kernels.sum_tree import ROWS_PER_WORD, eligible_words, level_sizes


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


def check_tree(leaves: Tensor, nodes: Tensor, capacity: int, fan_out: int) -> None:
    """Raise TypeError or ValueError unless ``leaves`` and ``nodes`` hold a tree of that shape."""
    n_leaves, n_nodes, _ = tree_shape(capacity, fan_out)
    # One condition on the hot path; what is wrong is only looked for when something is.
    if (
        leaves.dtype is torch.float32
        and nodes.dtype is torch.float64
        and leaves.numel() == n_leaves
        and nodes.numel() == 3 * n_nodes
        and leaves.is_contiguous()
        and nodes.is_contiguous()
    ):
        return
    _demand("leaves", leaves, torch.float32, (n_leaves,))
    _demand("nodes", nodes, torch.float64, (3, n_nodes))


def check_scalars(scalars: Tensor) -> None:
    """Raise TypeError or ValueError unless ``scalars`` is float64 ``[5]``."""
    _check_vector("scalars", scalars, torch.float64, 5)


def check_index(index: Tensor) -> int:
    """Number of entries of ``index``; raise TypeError or ValueError unless it is a contiguous int64 vector."""
    if index.dtype is not torch.int64 or not index.is_contiguous():
        _demand("index", index, torch.int64, (index.numel(),))
    return index.numel()


def check_update(ring: Tensor, index: Tensor, priority: Tensor, generation: Tensor | None) -> int:
    """Number of entries of an update; raise TypeError or ValueError unless its tensors fit together."""
    n = index.numel()
    # As in check_tree: one condition, and the reasons only when it fails. A contiguous tensor of n elements is read
    # alike whatever its shape.
    if not (
        index.dtype is torch.int64
        and ring.dtype is torch.int64
        and priority.dtype is torch.float32
        and ring.numel() == 4
        and priority.numel() == n
        and index.is_contiguous()
        and ring.is_contiguous()
        and priority.is_contiguous()
    ):
        _demand("index", index, torch.int64, (n,))
        _demand("ring", ring, torch.int64, (4,))
        _demand("priority", priority, torch.float32, (n,))
    if generation is not None:
        _check_vector("generation", generation, torch.int64, n)
    return n


def check_eligible(eligible: Tensor, capacity: int) -> None:
    """Raise TypeError or ValueError unless ``eligible`` is a bitmap of that many rows."""
    _check_vector("eligible", eligible, torch.int64, eligible_words(capacity))


def rows_to_build(leaves: Tensor, fan_out: int, eligible: Tensor | None) -> int:
    """A capacity for a build, which is not told: any that the leaves fit, and the bitmap covers.

    The padding of the leaves weighs nothing, so that without a bitmap the number of leaves serves.

    Raises:
        TypeError, ValueError: ``eligible`` is not a bitmap of as many rows as the leaves are for.
    """
    n_leaves = leaves.numel()
    if eligible is None:
        return n_leaves
    capacity = min(n_leaves, ROWS_PER_WORD * eligible.numel())
    if capacity <= n_leaves - fan_out:
        capacity = n_leaves
    check_eligible(eligible, capacity)
    return capacity


def _check_vector(name: str, tensor: Tensor, dtype: torch.dtype, n: int) -> None:
    if tensor.dtype is not dtype or tensor.numel() != n or not tensor.is_contiguous():
        _demand(name, tensor, dtype, (n,))


def _demand(name: str, tensor: Tensor, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    if tensor.dtype is not dtype:
        raise TypeError(f"{name} must be {dtype}, not {tensor.dtype}")
    if tensor.shape != shape:
        raise ValueError(f"{name} must have shape {list(shape)}, not {list(tensor.shape)}")
    if not tensor.is_contiguous():
        raise ValueError(f"{name} must be contiguous, but has strides {tensor.stride()}")
