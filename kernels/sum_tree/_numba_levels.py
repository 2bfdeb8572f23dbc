"""The levels of a sum tree on the CPU: their layout, and the nodes above given rows.

The functions of the CPU backend count inner levels from 0, which is the level of the leaves' parents. The contract and
the GPU's kernels call that one level 1.

A ``tree`` is a tuple: the addresses of ``leaves``, of ``nodes`` and of ``eligible`` (0 if all rows are eligible), and
the capacity. The fan-out is 16.
"""

# Numba needs the real signatures: no `from __future__ import annotations`.

import numpy as np
from numba import carray

from gpubuf.kernels._jit import jit
from gpubuf.kernels._primitives import as_f64, prefetch, prefetch_l2
from gpubuf.kernels.sum_tree import MAXIMUM, MINIMUM, SUM
from gpubuf.kernels.sum_tree._numba_node import eligible_leaves, extremes_of_nodes, stats_of_leaves, sum_of_nodes

#: Children of a node, as a shift.
SHIFT = 4

# Nodes between a prefetch and its use.
_AHEAD = 16


@jit(forceinline=True)
def parents_of(count):  # type: ignore[no-untyped-def]
    """How many nodes so many children have."""
    return -(-count >> SHIFT)


@jit(forceinline=True)
def store_level_starts(capacity, starts):  # type: ignore[no-untyped-def]
    """Store the position of each level's first node, that above the leaves first; returns the root's level.

    Levels are as long as all their parents' children; the root alone has no parent.
    """
    starts[0] = 0
    count, level = parents_of(capacity), 0
    while count > 1:
        count = parents_of(count)
        starts[level + 1] = starts[level] + (count << SHIFT)
        level += 1
    return level


@jit(forceinline=True)
def planes_of(tree):  # type: ignore[no-untyped-def]
    """The nodes, ``[3, n_nodes]``; the root is the last of each plane."""
    _, nodes, _, capacity = tree
    count, n_nodes = parents_of(capacity), 1
    while count > 1:
        count = parents_of(count)
        n_nodes += count << SHIFT
    return carray(as_f64(nodes), (3, n_nodes))


@jit(forceinline=True)
def prefetch_children(address, eligible_address, level, first):  # type: ignore[no-untyped-def]
    """Ask for the children from ``first`` on of a node of a level: 128 bytes of sums, or 64 of leaves."""
    if level > 0:
        prefetch(address + 8 * first)
        prefetch(address + 8 * first + 64)
    else:
        prefetch(address + 4 * first)
        if eligible_address != 0:
            prefetch(eligible_address + (first >> 3))


@jit(forceinline=True)
def _stats_of_parent(tree, node):  # type: ignore[no-untyped-def]
    """(sum, least positive, maximum) of the leaves of a node."""
    leaves, _, eligible, _ = tree
    return stats_of_leaves(leaves + 4 * (node << SHIFT), eligible_leaves(eligible, node << SHIFT))


@jit(forceinline=True)
def _extremes_of_children(planes, first):  # type: ignore[no-untyped-def]
    """(minimum, maximum) of the children from ``first`` on."""
    return extremes_of_nodes(planes[MINIMUM, first:].ctypes.data, planes[MAXIMUM, first:].ctypes.data)


@jit
def refresh_all(tree):  # type: ignore[no-untyped-def]
    """Recompute every inner node from its children, level by level."""
    _, nodes, _, capacity = tree
    planes = planes_of(tree)
    count = parents_of(capacity)
    for node in range(count):
        planes[SUM, node], planes[MINIMUM, node], planes[MAXIMUM, node] = _stats_of_parent(tree, node)
    here = 0
    while count > 1:
        count = parents_of(count)
        below, here = here, here + (count << SHIFT)
        for node in range(count):
            first = below + (node << SHIFT)
            planes[SUM, here + node] = sum_of_nodes(nodes + 8 * first)
            planes[MINIMUM, here + node], planes[MAXIMUM, here + node] = _extremes_of_children(planes, first)


@jit(forceinline=True)
def _to_parents(nodes, n, count):  # type: ignore[no-untyped-def]
    """Replace ``n`` nodes by their parents, of which a level has ``count``; returns how many they are."""
    n_parents = 0
    previous = -1
    for i in range(n):
        node = nodes[i] >> SHIFT
        nodes[n_parents] = node
        n_parents += node != previous
        previous = node
    if n_parents < count:
        return n_parents
    for node in range(count):
        nodes[node] = node
    return count


@jit
def refresh_above(tree, index, n):  # type: ignore[no-untyped-def]
    """Recompute the nodes above rows ``index`` from their children, level by level; -1 is ignored.

    A node that follows itself in the list is skipped (a contiguous run of rows costs 1/16 of its length), and a
    level with no more nodes than the list is recomputed as a whole, in order.

    Of an inner node only the sum is recomputed, unless an extreme of one of its children has changed: few updates
    change one, and sums alone are a third of the memory.
    """
    leaves, nodes, eligible, capacity = tree
    planes = planes_of(tree)
    plane_bytes = 8 * planes.shape[1]
    touched, changed = np.empty(n, np.int64), np.empty(n, np.int64)

    n_touched = 0
    previous = -1
    for i in range(n):
        node = index[i] >> SHIFT
        touched[n_touched] = node
        n_touched += (node >= 0) & (node != previous)
        previous = node

    count = parents_of(capacity)
    if n_touched >= count:
        refresh_all(tree)
        return
    n_changed = 0
    for i in range(n_touched):
        coming = touched[min(i + _AHEAD, n_touched - 1)]
        prefetch(leaves + 4 * (coming << SHIFT))
        if eligible != 0:
            prefetch(eligible + ((coming << SHIFT) >> 3))
        for plane in range(3):
            prefetch_l2(nodes + 8 * coming + plane * plane_bytes)
        node = touched[i]
        total, minimum, maximum = _stats_of_parent(tree, node)
        changed[n_changed] = node
        n_changed += (minimum != planes[MINIMUM, node]) | (maximum != planes[MAXIMUM, node])
        planes[SUM, node], planes[MINIMUM, node], planes[MAXIMUM, node] = total, minimum, maximum

    here = 0
    while count > 1:
        count = parents_of(count)
        below, here = here, here + (count << SHIFT)
        n_touched = _to_parents(touched, n_touched, count)
        for i in range(n_touched):
            planes[SUM, here + touched[i]] = sum_of_nodes(nodes + 8 * (below + (touched[i] << SHIFT)))
        n_candidates, n_changed = _to_parents(changed, n_changed, count), 0
        for i in range(n_candidates):
            node = changed[i]
            at = here + node
            minimum, maximum = _extremes_of_children(planes, below + (node << SHIFT))
            changed[n_changed] = node
            n_changed += (minimum != planes[MINIMUM, at]) | (maximum != planes[MAXIMUM, at])
            planes[MINIMUM, at], planes[MAXIMUM, at] = minimum, maximum
