"""The levels of a sum tree on the CPU: where they are, and the nodes above given rows.

``eligible_address`` is that of the bitmap of eligible rows, or 0 where all rows are eligible.
"""

# Numba needs the real signatures: no `from __future__ import annotations`.

import numpy as np
from numba import carray

from gpubuf.kernels._jit import jit
from gpubuf.kernels._pointers import as_f64, prefetch, prefetch_l2
from gpubuf.kernels.sum_tree import MAXIMUM, MINIMUM, SUM
from gpubuf.kernels.sum_tree._cpu_node import stats_of_leaves, stats_of_nodes


@jit(forceinline=True)
def shift_of(fan_out):  # type: ignore[no-untyped-def]
    shift = 0
    while (1 << shift) < fan_out:
        shift += 1
    return shift


@jit(forceinline=True)
def padded(count, fan_out):  # type: ignore[no-untyped-def]
    """Length of a level of ``count`` nodes; the root alone is not padded."""
    return count if count == 1 else -(-count // fan_out) * fan_out


@jit(forceinline=True)
def root(n_nodes, plane):  # type: ignore[no-untyped-def]
    """Position of the root's number in a plane of the nodes."""
    return (plane + 1) * n_nodes - 1


@jit
def refresh_all(leaves_address, nodes_address, eligible_address, capacity, fan_out, n_nodes):  # type: ignore[no-untyped-def]
    """Recompute every inner node from its children, level by level."""
    count = -(-capacity // fan_out)
    plane_bytes = 8 * n_nodes
    sums = carray(as_f64(nodes_address + SUM * plane_bytes), n_nodes)
    minima = carray(as_f64(nodes_address + MINIMUM * plane_bytes), n_nodes)
    maxima = carray(as_f64(nodes_address + MAXIMUM * plane_bytes), n_nodes)
    for node in range(count):
        sums[node], minima[node], maxima[node] = stats_of_leaves(
            leaves_address, eligible_address, node * fan_out, fan_out
        )
    below, here = 0, padded(count, fan_out)
    while count > 1:
        count = -(-count // fan_out)
        for node in range(count):
            children = nodes_address + 8 * (below + node * fan_out)
            at = here + node
            sums[at], minima[at], maxima[at] = stats_of_nodes(children, plane_bytes, fan_out)
        below, here = here, here + padded(count, fan_out)


@jit
def refresh_above(  # type: ignore[no-untyped-def]
    leaves_address, nodes_address, eligible_address, capacity, fan_out, n_nodes, index, n
):
    """Recompute the nodes above rows ``index`` from their children, level by level.

    A node that follows itself in the list is skipped (a contiguous run of rows costs 1/F of its length), and a
    level with no more nodes than the list is recomputed as a whole, in order.
    """
    shift = shift_of(fan_out)
    plane_bytes = 8 * n_nodes
    sums = carray(as_f64(nodes_address + SUM * plane_bytes), n_nodes)
    minima = carray(as_f64(nodes_address + MINIMUM * plane_bytes), n_nodes)
    maxima = carray(as_f64(nodes_address + MAXIMUM * plane_bytes), n_nodes)
    touched = np.empty(n, np.int64)

    n_touched = 0
    previous = -1
    whole = n >= -(-capacity >> (2 * shift))
    for i in range(n):
        node = index[i] >> shift
        if node >= 0 and node != previous:
            previous = node
            touched[n_touched] = node
            n_touched += 1
            prefetch(leaves_address + 4 * (node << shift))
            if eligible_address != 0:
                prefetch(eligible_address + ((node << shift) >> 3))
            if whole:
                # The next level reads all of this one, in order.
                for plane in range(3):
                    prefetch(nodes_address + 8 * node + plane * plane_bytes)
            else:
                # The siblings, which the next level reads.
                siblings = nodes_address + 8 * ((node >> shift) << shift)
                for plane in range(3):
                    prefetch_l2(siblings + plane * plane_bytes)
                    prefetch_l2(siblings + plane * plane_bytes + 64)

    count = -(-capacity // fan_out)
    if n_touched >= count:
        refresh_all(leaves_address, nodes_address, eligible_address, capacity, fan_out, n_nodes)
        return
    for i in range(n_touched):
        node = touched[i]
        sums[node], minima[node], maxima[node] = stats_of_leaves(
            leaves_address, eligible_address, node << shift, fan_out
        )

    below, here = 0, padded(count, fan_out)
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
        below, here = here, here + padded(count, fan_out)
