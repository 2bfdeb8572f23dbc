"""The sum tree on the CPU: breadth-first over the batch, so that the loads of many draws overlap."""

# Numba needs the real signatures: no `from __future__ import annotations`.

from typing import Never

import numpy as np
import torch
from numba import carray
from torch import Tensor

from gpubuf.kernels._elementary import exp_of_negative, is_positive_normal, log_of_normal
from gpubuf.kernels._pointers import OPTIONS, as_f32, as_f64, as_i64, jit, prefetch
from gpubuf.kernels.philox import check_request
from gpubuf.kernels.philox._numba import philox_uniform_f64
from gpubuf.kernels.rows import SIZE, WRITTEN
from gpubuf.kernels.sum_tree import ALPHA, BETA, EPS, MAX_PRIORITY
from gpubuf.kernels.sum_tree._check import check_hyper, check_index, check_tree, check_update, tree_shape
from gpubuf.kernels.sum_tree._node import choose_leaf, choose_node, stats_of_leaves, stats_of_nodes

_LARGEST = float(np.finfo(np.float32).max)

# Draws that go down the tree together: enough to hide the latency of memory, few enough to stay in the L1 cache.
_TOGETHER = 512


@jit(inline="always")
def _shift_of(fan_out):  # type: ignore[no-untyped-def]
    shift = 0
    while (1 << shift) < fan_out:
        shift += 1
    return shift


@jit(inline="always")
def _padded(count, fan_out):  # type: ignore[no-untyped-def]
    """Length of a level of ``count`` nodes; the root alone is not padded."""
    return count if count == 1 else -(-count // fan_out) * fan_out


@jit(inline="always")
def _weight_of(priority, alpha, eps):  # type: ignore[no-untyped-def]
    """(priority + eps) ** alpha in float64, to be rounded once; not beyond the range of float32. No branch, no call."""
    base = priority + eps
    exponent = alpha * log_of_normal(base)
    inverse = exp_of_negative(-abs(exponent))
    weight = (1.0 / inverse if exponent > 0.0 else inverse) if is_positive_normal(base) else 0.0
    weight = base if alpha == 1.0 else (1.0 if alpha == 0.0 else weight)
    # abs: a priority of -0.0 must not leave its sign bit in a leaf, which the GPU reads as a tag.
    return abs(weight if weight < _LARGEST else _LARGEST)


@jit
def _refresh_all(leaves_address, nodes_address, capacity, fan_out, n_nodes):  # type: ignore[no-untyped-def]
    """Recompute every inner node from its children, level by level."""
    count = -(-capacity // fan_out)
    sums = carray(as_f64(nodes_address), n_nodes)
    minima = carray(as_f64(nodes_address + 8 * n_nodes), n_nodes)
    maxima = carray(as_f64(nodes_address + 16 * n_nodes), n_nodes)
    for node in range(count):
        sums[node], minima[node], maxima[node] = stats_of_leaves(leaves_address + 4 * node * fan_out, fan_out)
    below, here = 0, _padded(count, fan_out)
    while count > 1:
        count = -(-count // fan_out)
        for node in range(count):
            children = nodes_address + 8 * (below + node * fan_out)
            at = here + node
            sums[at], minima[at], maxima[at] = stats_of_nodes(children, 8 * n_nodes, fan_out)
        below, here = here, here + _padded(count, fan_out)


@jit
def _refresh_above(leaves_address, nodes_address, capacity, fan_out, n_nodes, index, n):  # type: ignore[no-untyped-def]
    """Recompute the nodes above rows ``index`` from their children, level by level.

    A node that follows itself in the list is skipped (a contiguous run of rows costs 1/F of its length), and a
    level with no more nodes than the list is recomputed as a whole, in order.
    """
    shift = _shift_of(fan_out)
    plane_bytes = 8 * n_nodes
    sums = carray(as_f64(nodes_address), n_nodes)
    minima = carray(as_f64(nodes_address + plane_bytes), n_nodes)
    maxima = carray(as_f64(nodes_address + 2 * plane_bytes), n_nodes)
    touched = np.empty(n, np.int64)

    n_touched = 0
    previous = -1
    for i in range(n):
        node = index[i] >> shift
        if node >= 0 and node != previous:
            previous = node
            touched[n_touched] = node
            n_touched += 1
            # The siblings, which the next level reads.
            siblings = nodes_address + 8 * ((node >> shift) << shift)
            for plane in range(3):
                prefetch(siblings + plane * plane_bytes)
                prefetch(siblings + plane * plane_bytes + 64)

    count = -(-capacity // fan_out)
    if n_touched >= count:
        _refresh_all(leaves_address, nodes_address, capacity, fan_out, n_nodes)
        return
    for i in range(n_touched):
        node = touched[i]
        sums[node], minima[node], maxima[node] = stats_of_leaves(leaves_address + 4 * (node << shift), fan_out)

    below, here = 0, _padded(count, fan_out)
    while count > 1:
        count = -(-count // fan_out)
        n_below, n_touched = n_touched, 0
        previous = -1
        for i in range(n_below):
            node = touched[i] >> shift
            if node != previous:
                previous = node
                touched[n_touched] = node
                n_touched += 1
        if n_touched >= count:
            n_touched = count
            for i in range(count):
                touched[i] = i
        for i in range(n_touched):
            children = nodes_address + 8 * (below + (touched[i] << shift))
            at = here + touched[i]
            sums[at], minima[at], maxima[at] = stats_of_nodes(children, plane_bytes, fan_out)
        below, here = here, here + _padded(count, fan_out)


@jit("void(int64, int64, int64, int64, int64)", **OPTIONS)
def _build(leaves_address, nodes_address, capacity, fan_out, n_nodes):  # type: ignore[no-untyped-def]
    _refresh_all(leaves_address, nodes_address, capacity, fan_out, n_nodes)


@jit(
    "int64(int64, int64, int64, int64, int64, int64, int64, int64, int64, int64, int64)",
    **OPTIONS,
)
def _update(  # type: ignore[no-untyped-def]
    leaves_address,
    nodes_address,
    hyper_address,
    ring_address,
    index_address,
    priority_address,
    generation_address,
    n,
    capacity,
    fan_out,
    n_nodes,
):
    """0, or position + 1 of the first refused priority, or minus (position + 1) of the first index out of range.

    ``generation_address`` is 0 where there are no generations.
    """
    leaves = carray(as_f32(leaves_address), capacity)
    hyper = carray(as_f64(hyper_address), 5)
    ring = carray(as_i64(ring_address), 4)
    index = carray(as_i64(index_address), n)
    priority = carray(as_f32(priority_address), n)
    generation = carray(as_i64(generation_address), n)
    has_generation = generation_address != 0
    size = ring[SIZE]
    # (written - row + capacity - 1) // capacity, without a division for every row.
    laps, cursor = ring[WRITTEN] // capacity, ring[WRITTEN] % capacity

    # Everything is looked at before anything is changed.
    for i in range(n):
        row = index[i]
        if row < -1 or row >= capacity:
            return -(i + 1)
        prefetch(leaves_address + 4 * row)
        stale = has_generation and generation[i] != laps + (row < cursor)
        if row >= 0 and row < size and not stale and not (priority[i] >= 0.0 and priority[i] <= _LARGEST):
            return i + 1

    alpha, eps = hyper[ALPHA], hyper[EPS]
    # All of them in a loop of their own, which is vectorised: a power a time takes five times as long.
    weight = np.empty(n, np.float32)
    for i in range(n):
        weight[i] = np.float32(_weight_of(np.float64(priority[i]), alpha, eps))
    largest = hyper[MAX_PRIORITY]
    for i in range(n):
        row = index[i]
        stale = has_generation and generation[i] != laps + (row < cursor)
        if row >= 0 and row < size and not stale:
            leaves[row] = weight[i]
            largest = max(largest, abs(np.float64(priority[i])))
    hyper[MAX_PRIORITY] = largest
    _refresh_above(leaves_address, nodes_address, capacity, fan_out, n_nodes, index, n)
    return 0


@jit("int64(int64, int64, int64, int64, int64, int64, int64, int64, boolean)", **OPTIONS)
def _mark(  # type: ignore[no-untyped-def]
    leaves_address, nodes_address, hyper_address, index_address, n, capacity, fan_out, n_nodes, within_buffer
):
    """0, or minus (position + 1) of the first index out of range."""
    leaves = carray(as_f32(leaves_address), capacity)
    hyper = carray(as_f64(hyper_address), 5)
    index = carray(as_i64(index_address), n)
    for i in range(n):
        if index[i] < -1 or index[i] >= capacity:
            return -(i + 1)
    largest_weight = carray(as_f64(nodes_address), 3 * n_nodes)[3 * n_nodes - 1]
    given = hyper[MAX_PRIORITY]
    if within_buffer and largest_weight > 0.0:
        weight = largest_weight
    else:
        weight = _weight_of(1.0 if within_buffer or given < 0.0 else given, hyper[ALPHA], hyper[EPS])
    for i in range(n):
        if index[i] >= 0:
            leaves[index[i]] = np.float32(weight)
    _refresh_above(leaves_address, nodes_address, capacity, fan_out, n_nodes, index, n)
    return 0


@jit("int64(int64, int64, int64, int64, int64, int64, int64, int64, int64, int64, boolean)", **OPTIONS)
def _draw(  # type: ignore[no-untyped-def]
    leaves_address,
    nodes_address,
    hyper_address,
    rng_address,
    index_address,
    weight_address,
    n,
    capacity,
    fan_out,
    n_nodes,
    stratified,
):
    """0, or 1 where there is nothing to draw from."""
    leaves = carray(as_f32(leaves_address), capacity)
    nodes = carray(as_f64(nodes_address), 3 * n_nodes)
    rng = carray(as_i64(rng_address), 3)
    index = carray(as_i64(index_address), n)
    weight = carray(as_f32(weight_address), n)
    beta = carray(as_f64(hyper_address), 5)[BETA]
    total, least = nodes[n_nodes - 1], nodes[2 * n_nodes - 1]
    if not total > 0.0:
        return 1

    shift = _shift_of(fan_out)
    level_start = np.empty(64, np.int64)
    count, start, depth = -(-capacity // fan_out), 0, 0
    level_start[0] = 0
    while count > 1:
        start += _padded(count, fan_out)
        depth += 1
        level_start[depth] = start
        count = -(-count // fan_out)

    seed, offset = rng[0], rng[1]
    left = np.empty(min(n, _TOGETHER))
    for first in range(0, n, _TOGETHER):
        together = min(_TOGETHER, n - first)
        for i in range(together):
            uniform = philox_uniform_f64(seed, offset + first + i)
            left[i] = (first + i + uniform) / n * total if stratified else uniform * total
            index[first + i] = 0
        # Down to level 1: node ``index`` of a level becomes one of its children, one level below.
        for level in range(depth - 1, -1, -1):
            here = nodes_address + 8 * level_start[level]
            next_address = nodes_address + 8 * level_start[level - 1] if level > 0 else leaves_address
            width = 8 if level > 0 else 4
            for i in range(together):
                first_child = index[first + i] << shift
                child, left[i] = choose_node(here + 8 * first_child, left[i], fan_out)
                node = first_child + child
                index[first + i] = node
                prefetch(next_address + (node << shift) * width)
                prefetch(next_address + (node << shift) * width + 64)
        for i in range(together):
            first_child = index[first + i] << shift
            row = first_child + choose_leaf(leaves_address + 4 * first_child, left[i], fan_out)
            index[first + i] = row
            left[i] = np.float64(leaves[row]) / least
        # A loop of its own, without calls, so that it is vectorised: (q / q_min) ** -beta, of ratios of at least 1.
        for i in range(together):
            weight[first + i] = np.float32(exp_of_negative(-beta * log_of_normal(left[i])))
    rng[1] = offset + n
    return 0


def build(leaves: Tensor, nodes: Tensor, fan_out: int) -> None:
    """See :data:`gpubuf.kernels.sum_tree.build`."""
    # The padding weighs nothing, so that the number of leaves serves as the capacity.
    capacity = leaves.numel()
    check_tree(leaves, nodes, capacity, fan_out)
    _build(leaves.data_ptr(), nodes.data_ptr(), capacity, fan_out, nodes.numel() // 3)


def update(
    leaves: Tensor,
    nodes: Tensor,
    hyper: Tensor,
    ring: Tensor,
    index: Tensor,
    priority: Tensor,
    generation: Tensor | None,
    capacity: int,
    fan_out: int,
) -> None:
    """See :data:`gpubuf.kernels.sum_tree.update`."""
    check_tree(leaves, nodes, capacity, fan_out)
    check_hyper(hyper)
    n = check_update(ring, index, priority, generation)
    code = _update(
        leaves.data_ptr(),
        nodes.data_ptr(),
        hyper.data_ptr(),
        ring.data_ptr(),
        index.data_ptr(),
        priority.data_ptr(),
        0 if generation is None else generation.data_ptr(),
        n,
        capacity,
        fan_out,
        tree_shape(capacity, fan_out)[1],
    )
    if code < 0:
        _raise_index(index, -code - 1, capacity)
    if code > 0:
        raise ValueError(
            f"priorities must be finite and not negative, but entry {code - 1}, for row {index[code - 1].item()}, "
            f"is {priority[code - 1].item()}; no priority has been changed"
        )


def mark(
    leaves: Tensor, nodes: Tensor, hyper: Tensor, index: Tensor, capacity: int, fan_out: int, within_buffer: bool
) -> None:
    """See :data:`gpubuf.kernels.sum_tree.mark`."""
    check_tree(leaves, nodes, capacity, fan_out)
    check_hyper(hyper)
    code = _mark(
        leaves.data_ptr(),
        nodes.data_ptr(),
        hyper.data_ptr(),
        index.data_ptr(),
        check_index(index),
        capacity,
        fan_out,
        tree_shape(capacity, fan_out)[1],
        within_buffer,
    )
    if code:
        _raise_index(index, -code - 1, capacity)


def draw(
    leaves: Tensor,
    nodes: Tensor,
    hyper: Tensor,
    rng: Tensor,
    n: int,
    capacity: int,
    fan_out: int,
    stratified: bool,
) -> tuple[Tensor, Tensor]:
    """See :data:`gpubuf.kernels.sum_tree.draw`."""
    check_tree(leaves, nodes, capacity, fan_out)
    check_hyper(hyper)
    check_request(rng, n)
    index, weight = torch.empty(n, dtype=torch.int64), torch.empty(n, dtype=torch.float32)
    if n and _draw(
        leaves.data_ptr(),
        nodes.data_ptr(),
        hyper.data_ptr(),
        rng.data_ptr(),
        index.data_ptr(),
        weight.data_ptr(),
        n,
        capacity,
        fan_out,
        tree_shape(capacity, fan_out)[1],
        stratified,
    ):
        raise RuntimeError("nothing can be drawn: every row of the sum tree has weight zero")
    return index, weight


def _raise_index(index: Tensor, position: int, capacity: int) -> Never:
    raise IndexError(
        f"index {index[position].item()}, entry {position}, is out of range for a sum tree of {capacity} rows"
    )
