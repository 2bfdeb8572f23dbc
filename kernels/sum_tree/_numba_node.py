"""One node of the sum tree on the CPU: its statistics, and the choice of a child.

Arguments that the functions on leaves share: ``leaves_address``; ``eligible_address``, that of the bitmap of eligible
rows, or 0 where all rows are eligible; ``first``, the row of the node's first leaf. An ineligible leaf counts as one of
weight zero.
"""

# Numba needs the real signatures: no `from __future__ import annotations`.

import numpy as np
from numba import carray

from gpubuf.kernels._jit import jit
from gpubuf.kernels._primitives import as_f32, as_f64, as_i64
from gpubuf.kernels.sum_tree import MAXIMUM, MINIMUM, SUM


@jit(forceinline=True)
def _counts(weight, eligible_address, row):  # type: ignore[no-untyped-def]
    """Whether a leaf counts. Padding weighs nothing and may have no bits: none are read for it."""
    if eligible_address == 0 or not weight > 0.0:
        return weight > 0.0
    return (carray(as_i64(eligible_address), (row >> 6) + 1)[row >> 6] >> (row & 63)) & 1 == 1


@jit
def stats_of_leaves(leaves_address, eligible_address, first, fan_out):  # type: ignore[no-untyped-def]
    """(sum, least positive, maximum) of ``fan_out`` leaves."""
    weights = carray(as_f32(leaves_address + 4 * first), fan_out)
    total, minimum, maximum = 0.0, np.inf, 0.0
    for j in range(fan_out):
        counts = eligible_address == 0 or _counts(weights[j], eligible_address, first + j)
        weight = np.float64(weights[j]) if counts else 0.0
        total += weight
        minimum = min(minimum, weight if weight > 0.0 else np.inf)
        maximum = max(maximum, weight)
    return total, minimum, maximum


@jit
def sum_of_nodes(address, fan_out):  # type: ignore[no-untyped-def]
    """Sum over ``fan_out`` inner nodes, whose sums are at ``address``."""
    sums = carray(as_f64(address), fan_out)
    total = 0.0
    for j in range(fan_out):
        total += sums[j]
    return total


@jit
def extremes_of_nodes(address, plane_bytes, fan_out):  # type: ignore[no-untyped-def]
    """(minimum, maximum) over ``fan_out`` inner nodes, whose sums are at ``address``."""
    at_minimum = address + (MINIMUM - SUM) * plane_bytes
    at_maximum = address + (MAXIMUM - SUM) * plane_bytes
    minima, maxima = carray(as_f64(at_minimum), fan_out), carray(as_f64(at_maximum), fan_out)
    minimum, maximum = np.inf, 0.0
    for j in range(fan_out):
        minimum = min(minimum, minima[j])
        maximum = max(maximum, maxima[j])
    return minimum, maximum


@jit(forceinline=True)
def _scan(weights, mass, fan_out):  # type: ignore[no-untyped-def]
    """First child of positive weight whose inclusive prefix sum exceeds ``mass``, and the prefix before it."""
    prefix, child, before = 0.0, 0, 0.0
    # No branch on the mass, which would be mispredicted; a prefix sum is never below the one before.
    for j in range(fan_out):
        prefix += weights[j]
        passed = prefix <= mass
        child += passed
        before = prefix if passed else before
    return child, before


@jit(forceinline=True)
def _last_positive(weights, fan_out):  # type: ignore[no-untyped-def]
    j = fan_out - 1
    while j > 0 and weights[j] <= 0.0:
        j -= 1
    return j


@jit(forceinline=True)
def choose_node(address, mass, fan_out):  # type: ignore[no-untyped-def]
    """(child, mass left in it) among ``fan_out`` inner nodes whose sums are at ``address``.

    The last child of positive weight where rounding has carried the mass past the last prefix sum.
    """
    sums = carray(as_f64(address), fan_out)
    child, before = _scan(sums, mass, fan_out)
    if child == fan_out:
        child = _last_positive(sums, fan_out)
        before = np.sum(sums[:child])
    return child, max(mass - before, 0.0)


@jit(forceinline=True)
def store_prefixes(address, prefixes, fan_out):  # type: ignore[no-untyped-def]
    """Store the inclusive prefix sums, among the children of each node, of the nodes whose sums are at ``address``."""
    sums = carray(as_f64(address), len(prefixes))
    for first in range(0, len(prefixes), fan_out):
        prefix = 0.0
        for j in range(first, first + fan_out):
            prefix += sums[j]
            prefixes[j] = prefix


@jit(forceinline=True)
def choose_by_table(address, prefixes, at, mass, fan_out):  # type: ignore[no-untyped-def]
    """:func:`choose_node`, whose prefix sums are ``prefixes[at : at + fan_out]``: the same to the bit."""
    child = 0
    # Without a dependence from one to the next: it is vectorised.
    for j in range(fan_out):
        child += prefixes[at + j] <= mass
    if child == fan_out:
        return choose_node(address, mass, fan_out)
    return child, max(mass - (prefixes[at + child - 1] if child > 0 else 0.0), 0.0)


@jit(forceinline=True)
def choose_leaf(leaves_address, eligible_address, first, mass, fan_out):  # type: ignore[no-untyped-def]
    """Child among ``fan_out`` leaves, as in :func:`choose_node`."""
    weights = carray(as_f32(leaves_address + 4 * first), fan_out)
    if eligible_address == 0:
        child, _ = _scan(weights, mass, fan_out)
        if child < fan_out:
            return child
    prefix, last = 0.0, 0
    for j in range(fan_out):
        if _counts(weights[j], eligible_address, first + j):
            prefix += weights[j]
            if prefix > mass:
                return j
            last = j
    return last
