"""Kernels of the sum tree on the CPU: breadth-first over the batch, so that the loads of many draws overlap.

The first four numbers that a kernel takes are a tree, as ``_numba_levels.py`` has it. A kernel that can refuse its
arguments returns whether it has not: otherwise it has changed nothing.
"""

# Numba needs the real signatures: no `from __future__ import annotations`.

import numpy as np
from numba import carray

from gpubuf.kernels._jit import jit, kernel
from gpubuf.kernels._primitives import (
    as_f32,
    as_f64,
    as_i64,
    as_u32,
    exp_below_700,
    f32_of_bits,
    is_positive_normal,
    log_of_normal,
    prefetch,
)
from gpubuf.kernels.philox import OFFSET, SEED
from gpubuf.kernels.philox._numba_kernels import philox_uniform_f64
from gpubuf.kernels.rows import SIZE, WRITTEN
from gpubuf.kernels.sum_tree import ALPHA, BETA, EPS, LARGEST, MAX_PRIORITY, MAXIMUM, MINIMUM, SMALLEST, SUM
from gpubuf.kernels.sum_tree._numba_levels import (
    SHIFT,
    planes_of,
    prefetch_children,
    refresh_above,
    refresh_all,
    store_level_starts,
)
from gpubuf.kernels.sum_tree._numba_node import WIDTH, choose, copy_leaves, eligible_leaves, store_prefixes

# Draws that go down the tree together: enough to hide the latency of memory, few enough to stay in the L1 cache.
_TOGETHER = 512

# A level gets a table of prefix sums if its nodes have so many draws each on average.
_DRAWS_A_PARENT = 4

# Leaves between a prefetch and its write.
_AHEAD = 32


@jit(forceinline=True)
def _weight_of(priority, alpha, eps):  # type: ignore[no-untyped-def]
    """(priority + eps) ** alpha in float64, to be rounded once; 0 or a normal float32. No branch, no call."""
    base = priority + eps
    # e^100 is above the largest float32.
    weight = exp_below_700(min(alpha * log_of_normal(base), 100.0)) if is_positive_normal(base) else 0.0
    weight = base if alpha == 1.0 else (1.0 if alpha == 0.0 else weight)
    weight = SMALLEST if base > 0.0 and weight < SMALLEST else weight
    # abs: a priority of -0.0 must not leave its sign bit in a leaf, which the GPU reads as a tag.
    return abs(weight if weight < LARGEST else LARGEST)


@jit(forceinline=True)
def _refused(priority):  # type: ignore[no-untyped-def]
    return not ((priority >= 0.0) & (priority <= LARGEST))


@jit(forceinline=True)
def _all_rows(index, n, capacity):  # type: ignore[no-untyped-def]
    """Whether all indices are rows or -1."""
    outside = 0
    for i in range(n):
        outside += (index[i] < -1) | (index[i] >= capacity)
    return outside == 0


@kernel
def build(leaves, nodes, eligible, capacity):  # type: ignore[no-untyped-def]
    refresh_all((leaves, nodes, eligible, capacity))


@kernel
def refresh(leaves, nodes, eligible, capacity, index_address, n):  # type: ignore[no-untyped-def]
    index = carray(as_i64(index_address), n)
    if not _all_rows(index, n, capacity):
        return False
    refresh_above((leaves, nodes, eligible, capacity), index, n)
    return True


@kernel
def update(  # type: ignore[no-untyped-def]
    leaves, nodes, eligible, capacity, scalars_address, ring_address, index_address, priority_address,
    generation_address, n,
):  # fmt: skip
    """``generation_address`` is 0 where there are no generations."""
    leaf = carray(as_f32(leaves), capacity)
    scalars = carray(as_f64(scalars_address), 5)
    ring = carray(as_i64(ring_address), 4)
    index = carray(as_i64(index_address), n)
    priority = carray(as_f32(priority_address), n)
    bits = carray(as_u32(priority_address), n)
    generation = carray(as_i64(generation_address), n)
    has_generation = generation_address != 0
    size = ring[SIZE]
    # (written - row + capacity - 1) // capacity, without a division for every row.
    laps, cursor = ring[WRITTEN] // capacity, ring[WRITTEN] % capacity

    # Everything is looked at before anything is changed.
    rows = np.empty(n, np.int64)
    faults, n_kept, largest = 0, 0, np.uint32(0)
    for i in range(n):
        row = index[i]
        kept = (row >= 0) & (row < size)
        if has_generation:
            kept &= generation[i] == laps + (row < cursor)
        faults += (row < -1) | (row >= capacity) | (kept & _refused(priority[i]))
        rows[i] = row if kept else -1
        n_kept += kept
        # Without their sign, floats are in the order of their bits, and a maximum of integers is vectorised.
        magnitude = bits[i] & np.uint32(0x7FFFFFFF)
        largest = max(largest, magnitude if kept else np.uint32(0))
    if faults > 0:
        return False

    alpha, eps = scalars[ALPHA], scalars[EPS]
    # All of them in a loop of their own, which is vectorised: a power a time takes five times as long.
    weight = np.empty(n, np.float32)
    for i in range(n):
        weight[i] = np.float32(_weight_of(np.float64(priority[i]), alpha, eps))
    for i in range(n):
        prefetch(leaves + 4 * rows[min(i + _AHEAD, n - 1)])
        if rows[i] >= 0:
            leaf[rows[i]] = weight[i]
    if n_kept > 0:
        scalars[MAX_PRIORITY] = max(scalars[MAX_PRIORITY], np.float64(f32_of_bits(largest)))
    refresh_above((leaves, nodes, eligible, capacity), rows, n)
    return True


@kernel
def mark(  # type: ignore[no-untyped-def]
    leaves, nodes, eligible, capacity, scalars_address, index_address, n, within_buffer: bool
):
    tree = (leaves, nodes, eligible, capacity)
    leaf = carray(as_f32(leaves), capacity)
    scalars = carray(as_f64(scalars_address), 5)
    index = carray(as_i64(index_address), n)
    if not _all_rows(index, n, capacity):
        return False
    largest_weight = planes_of(tree)[MAXIMUM, -1]
    given = scalars[MAX_PRIORITY]
    if within_buffer and largest_weight > 0.0:
        weight = largest_weight
    else:
        weight = _weight_of(1.0 if within_buffer or given < 0.0 else given, scalars[ALPHA], scalars[EPS])
    for i in range(n):
        if index[i] >= 0:
            leaf[index[i]] = np.float32(weight)
    refresh_above(tree, index, n)
    return True


@kernel
def draw(  # type: ignore[no-untyped-def]
    leaves, nodes, eligible, capacity, scalars_address, rng_address, index_address, weight_address,
    begin, n, of, stratified: bool,
):  # fmt: skip
    """Makes draws ``begin .. begin + n - 1`` of ``of``. Advances the random stream only if these are all of them."""
    leaf, planes = carray(as_f32(leaves), capacity), planes_of((leaves, nodes, eligible, capacity))
    rng = carray(as_i64(rng_address), 3)
    index = carray(as_i64(index_address + 8 * begin), n)
    weight = carray(as_f32(weight_address + 4 * begin), n)
    beta = carray(as_f64(scalars_address), 5)[BETA]
    total, least = planes[SUM, -1], planes[MINIMUM, -1]
    if not total > 0.0:
        return False

    level_start = np.empty(64, np.int64)
    depth = store_level_starts(capacity, level_start)

    # Of levels with far fewer nodes than there are draws, prefix sums are worked out once a node, not once a draw.
    first_table = depth
    while first_table > 0 and _DRAWS_A_PARENT * (level_start[depth] - level_start[first_table - 1]) <= n << SHIFT:
        first_table -= 1
    prefixes = np.empty(level_start[depth] - level_start[first_table])
    store_prefixes(nodes + 8 * level_start[first_table], prefixes)

    seed, offset = rng[SEED], rng[OFFSET] + begin
    left, children, of_node = np.empty(min(n, _TOGETHER)), np.empty(WIDTH), np.empty(WIDTH)
    for first in range(0, n, _TOGETHER):
        together = min(_TOGETHER, n - first)
        for i in range(together):
            uniform = philox_uniform_f64(seed, offset + first + i)
            left[i] = (begin + first + i + uniform) / of * total if stratified else uniform * total
            index[first + i] = 0
        # Down to the parents of the leaves, level 0: ``index`` is a node, then one of its children, a level below.
        for level in range(depth - 1, -1, -1):
            here = nodes + 8 * level_start[level]
            below = nodes + 8 * level_start[level - 1] if level > 0 else leaves
            table = prefixes.ctypes.data + 8 * (level_start[level] - level_start[first_table])
            for i in range(together):
                first_child = index[first + i] << SHIFT
                if level >= first_table:
                    child, left[i] = choose(table + 8 * first_child, left[i])
                else:
                    store_prefixes(here + 8 * first_child, of_node)
                    child, left[i] = choose(of_node.ctypes.data, left[i])
                index[first + i] = first_child + child
                if level <= first_table:
                    prefetch_children(below, eligible, level, (first_child + child) << SHIFT)
        for i in range(together):
            first_child = index[first + i] << SHIFT
            copy_leaves(leaves + 4 * first_child, eligible_leaves(eligible, first_child), children.ctypes.data)
            store_prefixes(children.ctypes.data, of_node)
            index[first + i] = first_child + choose(of_node.ctypes.data, left[i])[0]
        for i in range(together):
            left[i] = np.float64(leaf[index[first + i]]) / least
        # A loop of its own, without calls, so that it is vectorised: (q / q_min) ** -beta, of ratios of at least 1.
        for i in range(together):
            weight[first + i] = np.float32(exp_below_700(-beta * log_of_normal(left[i])))
    if n == of:
        rng[OFFSET] = offset + n
    return True
