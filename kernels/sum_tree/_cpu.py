"""The sum tree on the CPU: its nodes, its levels and its operations, breadth-first over the batch.

So the loads of many draws overlap. The functions here count inner levels from 0, which is the level of the leaves'
parents. The contract and the GPU's kernels call that one level 1. A ``tree`` is a tuple: the addresses of ``leaves``,
of ``nodes`` and of ``eligible`` (0 if all rows are eligible), the capacity and the fan-out. The first five numbers that
a kernel takes are a tree.

The CPU's fan-out is 16. Such a node is handled in vector registers, without a branch. LLVM does not find this form by
itself: with plain loops an update takes 2.3 times as long and a draw 1.6 times. The shuffles below fix the order of the
additions, so that every machine, and build and update alike, get the same bits. Other fan-outs, which only trees made
for a GPU have, take plain loops.

Arguments that the functions on leaves share: ``leaves_address``; ``eligible_address``, that of the bitmap of eligible
rows, or 0 where all rows are eligible; ``first``, the row of the node's first leaf. An ineligible leaf counts as one of
weight zero.
"""

# Numba needs the real signatures: no `from __future__ import annotations`.

from collections.abc import Callable
from typing import Any, Never

import numpy as np
import torch
from llvmlite import ir
from numba import carray, types
from torch import Tensor

from gpubuf.kernels._jit import jit, kernel
from gpubuf.kernels._primitives import (
    as_f32,
    as_f64,
    as_i64,
    as_u32,
    emitted,
    exp_below_700,
    f32_of_bits,
    is_positive_normal,
    log_of_normal,
    prefetch,
    prefetch_l2,
    vector,
)
from gpubuf.kernels._threads import call_in_parts
from gpubuf.kernels.philox import OFFSET, SEED, check_request
from gpubuf.kernels.philox._cpu import philox_uniform_f64
from gpubuf.kernels.rows import SIZE, WRITTEN
from gpubuf.kernels.sum_tree import ALPHA, BETA, EPS, LARGEST, MAX_PRIORITY, MAXIMUM, MINIMUM, SMALLEST, SUM
from gpubuf.kernels.sum_tree._check import check_index, check_tree, check_update

WIDTH = 16

_F32, _F64, _I1, _I32, _I64 = ir.FloatType(), ir.DoubleType(), ir.IntType(1), ir.IntType(32), ir.IntType(64)
_BITS = ir.IntType(WIDTH)
_VECTOR = ir.VectorType(_F64, WIDTH)
_ZERO = ir.Constant(_VECTOR, [0.0] * WIDTH)
_MINUS_ONE = ir.Constant(_VECTOR, [-1.0] * WIDTH)
_INFINITY = ir.Constant(_VECTOR, [float("inf")] * WIDTH)


def _lanes(numbers: Any) -> ir.Constant:
    numbers = list(numbers)
    return ir.Constant(ir.VectorType(_I32, len(numbers)), numbers)


def _load_f64(builder: Any, address: Any) -> Any:
    return builder.load(builder.inttoptr(address, _VECTOR.as_pointer()), align=8)


def _load_eligible_f32(builder: Any, address: Any, eligible: Any) -> Any:
    """The leaves at ``address`` whose bit in ``eligible`` is set, zero elsewhere. If all are set, nothing is masked."""
    narrow = builder.load(builder.inttoptr(address, ir.VectorType(_F32, WIDTH).as_pointer()), align=4)
    mask = builder.bitcast(builder.trunc(eligible, _BITS), ir.VectorType(_I1, WIDTH))
    return builder.select(mask, builder.fpext(narrow, _VECTOR), _ZERO)


def _reduce(builder: Any, vector: Any, combine: Callable[[Any, Any], Any]) -> Any:
    width = WIDTH
    while width > 1:
        width //= 2
        lower = builder.shuffle_vector(vector, vector, _lanes(range(width)))
        upper = builder.shuffle_vector(vector, vector, _lanes(range(width, 2 * width)))
        vector = combine(lower, upper)
    return builder.extract_element(vector, _I32(0))


def _minimum(builder: Any) -> Callable[[Any, Any], Any]:
    return lambda a, b: builder.select(builder.fcmp_ordered("<", a, b), a, b)


def _maximum(builder: Any) -> Callable[[Any, Any], Any]:
    return lambda a, b: builder.select(builder.fcmp_ordered(">", a, b), a, b)


@emitted(types.int64(types.int64))
def _bits_at(builder: Any, address: Any) -> Any:
    """The eligible bits of 16 rows, which are one aligned piece of a word; the lowest is that of the first row."""
    return builder.zext(builder.load(builder.inttoptr(address, _BITS.as_pointer()), align=2), _I64)


@emitted(types.UniTuple(types.float64, 3)(types.int64, types.int64))
def _stats_of_leaves(builder: Any, address: Any, eligible: Any) -> list[Any]:
    weight = _load_eligible_f32(builder, address, eligible)
    positive = builder.select(builder.fcmp_ordered(">", weight, _ZERO), weight, _INFINITY)
    return [
        _reduce(builder, weight, builder.fadd),
        _reduce(builder, positive, _minimum(builder)),
        _reduce(builder, weight, _maximum(builder)),
    ]


@emitted(types.float64(types.int64))
def _sum_of_nodes(builder: Any, address: Any) -> Any:
    return _reduce(builder, _load_f64(builder, address), builder.fadd)


@emitted(types.UniTuple(types.float64, 2)(types.int64, types.int64))
def _extremes_of_nodes(builder: Any, at_minimum: Any, at_maximum: Any) -> list[Any]:
    return [
        _reduce(builder, _load_f64(builder, at_minimum), _minimum(builder)),
        _reduce(builder, _load_f64(builder, at_maximum), _maximum(builder)),
    ]


def shifted(builder: Any, vector: Any, by: int) -> Any:
    """Every element of a vector of 16 moved up by ``by`` lanes, zeros below."""
    zero = ir.Constant(vector.type, [0] * WIDTH)
    return builder.shuffle_vector(vector, zero, _lanes((j - by) % (2 * WIDTH) for j in range(WIDTH)))


def prefix_sums(builder: Any, vector: Any, add: Callable[[Any, Any], Any]) -> Any:
    """Of a vector of 16; inclusive."""
    for by in (1, 2, 4, 8):
        vector = add(vector, shifted(builder, vector, by))
    return vector


def everywhere(builder: Any, number: Any) -> Any:
    """A vector of 16 times a number."""
    vector = ir.Constant(ir.VectorType(number.type, WIDTH), ir.Undefined)
    vector = builder.insert_element(vector, number, _I32(0))
    return builder.shuffle_vector(vector, vector, _lanes([0] * WIDTH))


def chosen(builder: Any, prefix: Any, candidates: Any) -> list[Any]:
    """(number of the first of 16 candidates, or 16; the prefix sum before it)."""
    first = builder.zext(builder.cttz(builder.bitcast(candidates, _BITS), _I1(0)), _I64)
    place = builder.trunc(builder.and_(first, _I64(WIDTH - 1)), _I32)
    return [first, builder.extract_element(shifted(builder, prefix, 1), place)]


def _choose(builder: Any, weight: Any, mass: Any) -> list[Any]:
    """(first child of positive weight whose inclusive prefix sum exceeds ``mass``, or 16; the prefix before it)."""
    prefix = prefix_sums(builder, weight, builder.fadd)
    beyond = builder.fcmp_ordered(">", prefix, everywhere(builder, mass))
    # Prefix sums are rounded in different orders, so that only the weight itself tells whether a child is empty.
    return chosen(builder, prefix, builder.and_(beyond, builder.fcmp_ordered(">", weight, _ZERO)))


_CHOICE = types.Tuple((types.int64, types.float64))


@emitted(_CHOICE(types.int64, types.int64, types.float64))
def _choose_leaf(builder: Any, address: Any, eligible: Any, mass: Any) -> list[Any]:
    return _choose(builder, _load_eligible_f32(builder, address, eligible), mass)


@emitted(_CHOICE(types.int64, types.float64))
def _choose_node(builder: Any, address: Any, mass: Any) -> list[Any]:
    return _choose(builder, _load_f64(builder, address), mass)


def _store(builder: Any, vector: Any, address: Any) -> None:
    builder.store(vector, builder.inttoptr(address, _VECTOR.as_pointer()), align=8)


@emitted(types.void(types.int64, types.int64, types.int64))
def _store_prefixes(builder: Any, address: Any, above: Any, before: Any) -> None:
    weight = _load_f64(builder, address)
    prefix = prefix_sums(builder, weight, builder.fadd)
    # -1 exceeds no mass, so that an empty child is never chosen.
    _store(builder, builder.select(builder.fcmp_ordered(">", weight, _ZERO), prefix, _MINUS_ONE), above)
    _store(builder, shifted(builder, prefix, 1), before)


@emitted(types.int64(types.int64, types.float64))
def _first_above(builder: Any, address: Any, mass: Any) -> Any:
    """The first of 16 numbers that exceeds ``mass``, or 16."""
    found = builder.fcmp_ordered(">", _load_f64(builder, address), everywhere(builder, mass))
    return builder.zext(builder.cttz(builder.bitcast(found, _BITS), _I1(0)), _I64)


@jit(forceinline=True)
def _counts(weight, eligible_address, row):  # type: ignore[no-untyped-def]
    """Whether a leaf counts. Padding weighs nothing and may have no bits: none are read for it."""
    if eligible_address == 0 or not weight > 0.0:
        return weight > 0.0
    return (carray(as_i64(eligible_address), (row >> 6) + 1)[row >> 6] >> (row & 63)) & 1 == 1


@jit
def stats_of_leaves(leaves_address, eligible_address, first, fan_out):  # type: ignore[no-untyped-def]
    """(sum, least positive, maximum) of ``fan_out`` leaves."""
    address = leaves_address + 4 * first
    if fan_out == WIDTH:
        if eligible_address == 0:
            return _stats_of_leaves(address, -1)
        return _stats_of_leaves(address, _bits_at(eligible_address + (first >> 3)))
    weights = carray(as_f32(address), fan_out)
    total, minimum, maximum = 0.0, np.inf, 0.0
    for j in range(fan_out):
        weight = np.float64(weights[j])
        if _counts(weight, eligible_address, first + j):
            total += weight
            minimum = min(minimum, weight)
            maximum = max(maximum, weight)
    return total, minimum, maximum


@jit
def sum_of_nodes(address, fan_out):  # type: ignore[no-untyped-def]
    """Sum over ``fan_out`` inner nodes, whose sums are at ``address``."""
    if fan_out == WIDTH:
        return _sum_of_nodes(address)
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
    if fan_out == WIDTH:
        return _extremes_of_nodes(at_minimum, at_maximum)
    minima, maxima = carray(as_f64(at_minimum), fan_out), carray(as_f64(at_maximum), fan_out)
    minimum, maximum = np.inf, 0.0
    for j in range(fan_out):
        minimum = min(minimum, minima[j])
        maximum = max(maximum, maxima[j])
    return minimum, maximum


@jit(forceinline=True)
def _scan(weights, mass, fan_out):  # type: ignore[no-untyped-def]
    """First child of positive weight whose inclusive prefix sum exceeds ``mass``, and the prefix before it."""
    prefix = 0.0
    for j in range(fan_out):
        before = prefix
        prefix += weights[j]
        if prefix > mass:
            return j, before
    return fan_out, prefix


@jit(forceinline=True)
def _last_positive(weights, fan_out):  # type: ignore[no-untyped-def]
    j = fan_out - 1
    while j > 0 and weights[j] <= 0.0:
        j -= 1
    return j


@jit
def choose_node(address, mass, fan_out):  # type: ignore[no-untyped-def]
    """(child, mass left in it) among ``fan_out`` inner nodes whose sums are at ``address``.

    The last child of positive weight where rounding has carried the mass past the last prefix sum.
    """
    sums = carray(as_f64(address), fan_out)
    if fan_out == WIDTH:
        child, before = _choose_node(address, mass)
    else:
        child, before = _scan(sums, mass, fan_out)
    if child == fan_out:
        child = _last_positive(sums, fan_out)
        before = np.sum(sums[:child])
    return child, max(mass - before, 0.0)


@jit(forceinline=True)
def store_prefixes(address, n_parents, tables, at):  # type: ignore[no-untyped-def]
    """Store what :func:`choose_by_table` needs of a level, whose sums are at ``address``, from ``tables[at]`` on.

    32 numbers for each parent of 16: the inclusive prefix sums of its children's sums, or -1 where a child weighs
    nothing; and the prefix sums before each child.
    """
    for parent in range(n_parents):
        table = tables.ctypes.data + 8 * (at + 2 * WIDTH * parent)
        _store_prefixes(address + 8 * WIDTH * parent, table, table + 8 * WIDTH)


@jit(forceinline=True)
def choose_by_table(address, tables, at, mass):  # type: ignore[no-untyped-def]
    """:func:`choose_node` among the 16 nodes whose prefix sums are at ``tables[at]``: the same to the bit."""
    child = _first_above(tables.ctypes.data + 8 * at, mass)
    if child == WIDTH:
        return choose_node(address, mass, WIDTH)
    return child, max(mass - tables[at + WIDTH + child], 0.0)


@jit
def choose_leaf(leaves_address, eligible_address, first, mass, fan_out):  # type: ignore[no-untyped-def]
    """Child among ``fan_out`` leaves, as in :func:`choose_node`."""
    address = leaves_address + 4 * first
    if fan_out == WIDTH:
        if eligible_address == 0:
            child, _ = _choose_leaf(address, -1, mass)
        else:
            child, _ = _choose_leaf(address, _bits_at(eligible_address + (first >> 3)), mass)
        if child < fan_out:
            return child
    weights = carray(as_f32(address), fan_out)
    prefix, last = 0.0, 0
    for j in range(fan_out):
        if _counts(weights[j], eligible_address, first + j):
            prefix += weights[j]
            if prefix > mass:
                return j
            last = j
    return last


# Nodes between a prefetch and its use.
_NODES_AHEAD = 16


@jit(forceinline=True)
def shift_of(fan_out):  # type: ignore[no-untyped-def]
    shift = 0
    while (1 << shift) < fan_out:
        shift += 1
    return shift


@jit(forceinline=True)
def store_level_starts(capacity, fan_out, starts):  # type: ignore[no-untyped-def]
    """Store the position of each level's first node, that above the leaves first; returns the root's level.

    Levels are as long as all their parents' children; the root alone has no parent.
    """
    starts[0] = 0
    count, level = -(-capacity // fan_out), 0
    while count > 1:
        count = -(-count // fan_out)
        starts[level + 1] = starts[level] + count * fan_out
        level += 1
    return level


@jit(forceinline=True)
def planes_of(tree):  # type: ignore[no-untyped-def]
    """The nodes, ``[3, n_nodes]``; the root is the last of each plane."""
    _, nodes, _, capacity, fan_out = tree
    shift = shift_of(fan_out)
    # By shifts: a call can take less time than these divisions would.
    count, n_nodes = -(-capacity >> shift), 1
    while count > 1:
        count = -(-count >> shift)
        n_nodes += count << shift
    return carray(as_f64(nodes), (3, n_nodes))


@jit(forceinline=True)
def parents(capacity, shift, level):  # type: ignore[no-untyped-def]
    """Number of nodes above those of a level; level 0 is that above the leaves."""
    return -(-capacity >> (shift * (level + 2)))


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


@jit
def refresh_all(tree):  # type: ignore[no-untyped-def]
    """Recompute every inner node from its children, level by level."""
    leaves, nodes, eligible, capacity, fan_out = tree
    planes = planes_of(tree)
    count = -(-capacity // fan_out)
    for node in range(count):
        total, minimum, maximum = stats_of_leaves(leaves, eligible, node * fan_out, fan_out)
        planes[SUM, node], planes[MINIMUM, node], planes[MAXIMUM, node] = total, minimum, maximum
    here = 0
    while count > 1:
        count = -(-count // fan_out)
        below, here = here, here + count * fan_out
        for node in range(count):
            children = nodes + 8 * (below + node * fan_out)
            at = here + node
            planes[SUM, at] = sum_of_nodes(children, fan_out)
            minimum, maximum = extremes_of_nodes(children, 8 * planes.shape[1], fan_out)
            planes[MINIMUM, at], planes[MAXIMUM, at] = minimum, maximum


@jit(forceinline=True)
def _to_parents(nodes, n, shift, count):  # type: ignore[no-untyped-def]
    """Replace ``n`` nodes by their parents, of which a level has ``count``; returns how many they are."""
    n_parents = 0
    previous = -1
    for i in range(n):
        node = nodes[i] >> shift
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

    A node that follows itself in the list is skipped (a contiguous run of rows costs 1/F of its length), and a
    level with no more nodes than the list is recomputed as a whole, in order.

    Of an inner node only the sum is recomputed, unless an extreme of one of its children has changed: few updates
    change one, and sums alone are a third of the memory.
    """
    leaves, nodes, eligible, capacity, fan_out = tree
    planes, shift = planes_of(tree), shift_of(fan_out)
    plane_bytes = 8 * planes.shape[1]
    touched, changed = np.empty(n, np.int64), np.empty(n, np.int64)

    n_touched = 0
    previous = -1
    for i in range(n):
        node = index[i] >> shift
        touched[n_touched] = node
        n_touched += (node >= 0) & (node != previous)
        previous = node

    count = -(-capacity // fan_out)
    if n_touched >= count:
        refresh_all(tree)
        return
    n_changed = 0
    for i in range(n_touched):
        coming = touched[min(i + _NODES_AHEAD, n_touched - 1)]
        prefetch(leaves + 4 * (coming << shift))
        if eligible != 0:
            prefetch(eligible + ((coming << shift) >> 3))
        for plane in range(3):
            prefetch_l2(nodes + 8 * coming + plane * plane_bytes)
        node = touched[i]
        total, minimum, maximum = stats_of_leaves(leaves, eligible, node << shift, fan_out)
        changed[n_changed] = node
        n_changed += (minimum != planes[MINIMUM, node]) | (maximum != planes[MAXIMUM, node])
        planes[SUM, node], planes[MINIMUM, node], planes[MAXIMUM, node] = total, minimum, maximum

    here = 0
    while count > 1:
        count = -(-count // fan_out)
        below, here = here, here + count * fan_out
        n_touched = _to_parents(touched, n_touched, shift, count)
        for i in range(n_touched):
            planes[SUM, here + touched[i]] = sum_of_nodes(nodes + 8 * (below + (touched[i] << shift)), fan_out)
        n_candidates, n_changed = _to_parents(changed, n_changed, shift, count), 0
        for i in range(n_candidates):
            node = changed[i]
            at = here + node
            minimum, maximum = extremes_of_nodes(nodes + 8 * (below + (node << shift)), plane_bytes, fan_out)
            changed[n_changed] = node
            n_changed += (minimum != planes[MINIMUM, at]) | (maximum != planes[MAXIMUM, at])
            planes[MINIMUM, at], planes[MAXIMUM, at] = minimum, maximum


# Draws that go down the tree together: enough to hide the latency of memory, few enough to stay in the L1 cache.
_TOGETHER = 512

# A level gets a table of prefix sums if its parents have so many draws each on average: measured, with room to spare.
_DRAWS_A_PARENT = 4

# Leaves between a prefetch and its write.
_LEAVES_AHEAD = 32


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
def _outside(index, n, capacity):  # type: ignore[no-untyped-def]
    """0, or minus (position + 1) of the first index that is neither a row nor -1."""
    # Counting first is a loop that the compiler vectorises; looking for the place is not.
    outside = 0
    for i in range(n):
        outside += (index[i] < -1) | (index[i] >= capacity)
    if outside == 0:
        return 0
    for i in range(n):
        if index[i] < -1 or index[i] >= capacity:
            return -(i + 1)
    return 0


@kernel
def _build(leaves, nodes, eligible, capacity, fan_out):  # type: ignore[no-untyped-def]
    refresh_all((leaves, nodes, eligible, capacity, fan_out))


@kernel
def _refresh(leaves, nodes, eligible, capacity, fan_out, index_address, n):  # type: ignore[no-untyped-def]
    """0, or minus (position + 1) of the first index out of range."""
    index = carray(as_i64(index_address), n)
    outside = _outside(index, n, capacity)
    if outside == 0:
        refresh_above((leaves, nodes, eligible, capacity, fan_out), index, n)
    return outside


@kernel
def _update(  # type: ignore[no-untyped-def]
    leaves, nodes, eligible, capacity, fan_out, scalars_address, ring_address, index_address, priority_address,
    generation_address, n,
):  # fmt: skip
    """0, or position + 1 of the first refused priority, or minus (position + 1) of the first index out of range.

    ``generation_address`` is 0 where there are no generations.
    """
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

    # Everything is looked at before anything is changed: first whether there are faults, and then where.
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
        for i in range(n):
            if index[i] < -1 or index[i] >= capacity:
                return -(i + 1)
            if rows[i] >= 0 and _refused(priority[i]):
                return i + 1

    alpha, eps = scalars[ALPHA], scalars[EPS]
    # All of them in a loop of their own, which is vectorised: a power a time takes five times as long.
    weight = np.empty(n, np.float32)
    for i in range(n):
        weight[i] = np.float32(_weight_of(np.float64(priority[i]), alpha, eps))
    for i in range(n):
        prefetch(leaves + 4 * rows[min(i + _LEAVES_AHEAD, n - 1)])
        if rows[i] >= 0:
            leaf[rows[i]] = weight[i]
    if n_kept > 0:
        scalars[MAX_PRIORITY] = max(scalars[MAX_PRIORITY], np.float64(f32_of_bits(largest)))
    refresh_above((leaves, nodes, eligible, capacity, fan_out), rows, n)
    return 0


@kernel
def _mark(  # type: ignore[no-untyped-def]
    leaves, nodes, eligible, capacity, fan_out, scalars_address, index_address, n, within_buffer: bool
):
    """0, or minus (position + 1) of the first index out of range."""
    tree = (leaves, nodes, eligible, capacity, fan_out)
    leaf = carray(as_f32(leaves), capacity)
    scalars = carray(as_f64(scalars_address), 5)
    index = carray(as_i64(index_address), n)
    outside = _outside(index, n, capacity)
    if outside != 0:
        return outside
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
    return 0


@kernel
def _draw(  # type: ignore[no-untyped-def]
    leaves, nodes, eligible, capacity, fan_out, scalars_address, rng_address, index_address, weight_address,
    begin, n, of, stratified: bool,
):  # fmt: skip
    """0, or 1 where there is nothing to draw from.

    Makes draws ``begin .. begin + n - 1`` of ``of``. Advances the random stream only if these are all of them.
    """
    leaf, planes = carray(as_f32(leaves), capacity), planes_of((leaves, nodes, eligible, capacity, fan_out))
    rng = carray(as_i64(rng_address), 3)
    index = carray(as_i64(index_address + 8 * begin), n)
    weight = carray(as_f32(weight_address + 4 * begin), n)
    beta = carray(as_f64(scalars_address), 5)[BETA]
    total, least = planes[SUM, -1], planes[MINIMUM, -1]
    if not total > 0.0:
        return 1

    shift = shift_of(fan_out)
    level_start = np.empty(64, np.int64)
    depth = store_level_starts(capacity, fan_out, level_start)

    # Of levels with far fewer parents than there are draws, prefix sums are worked out once a parent, not once a draw.
    table_start, n_tables, level = np.empty(64, np.int64), 0, depth - 1
    while fan_out == WIDTH and level >= 0 and _DRAWS_A_PARENT * parents(capacity, shift, level) <= n:
        table_start[level] = n_tables
        n_tables += 2 * WIDTH * parents(capacity, shift, level)
        level -= 1
    first_untabled = level
    tables = np.empty(n_tables)
    for level in range(first_untabled + 1, depth):
        sums = nodes + 8 * level_start[level]
        store_prefixes(sums, parents(capacity, shift, level), tables, table_start[level])

    seed, offset = rng[SEED], rng[OFFSET] + begin
    left = np.empty(min(n, _TOGETHER))
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
            if level > first_untabled:
                for i in range(together):
                    first_child = index[first + i] << shift
                    table = table_start[level] + 2 * first_child
                    child, left[i] = choose_by_table(here + 8 * first_child, tables, table, left[i])
                    index[first + i] = first_child + child
                if level == first_untabled + 1:
                    for i in range(together):
                        prefetch_children(below, eligible, level, index[first + i] << shift)
            else:
                for i in range(together):
                    first_child = index[first + i] << shift
                    child, left[i] = choose_node(here + 8 * first_child, left[i], fan_out)
                    index[first + i] = first_child + child
                    prefetch_children(below, eligible, level, (first_child + child) << shift)
        for i in range(together):
            first_child = index[first + i] << shift
            row = first_child + choose_leaf(leaves, eligible, first_child, left[i], fan_out)
            index[first + i] = row
            left[i] = np.float64(leaf[row]) / least
        # A loop of its own, without calls, so that it is vectorised: (q / q_min) ** -beta, of ratios of at least 1.
        for i in range(together):
            weight[first + i] = np.float32(exp_below_700(-beta * log_of_normal(left[i])))
    if n == of:
        rng[OFFSET] = offset + n
    return 0


def build(
    leaves: Tensor, nodes: Tensor, scalars: Tensor, eligible: Tensor | None, capacity: int, fan_out: int,
) -> None:  # fmt: skip
    """See :data:`gpubuf.kernels.sum_tree.build`."""
    check_tree(leaves, nodes, scalars, eligible, capacity, fan_out)
    _build(leaves.data_ptr(), nodes.data_ptr(), 0 if eligible is None else eligible.data_ptr(), capacity, fan_out)


def refresh(
    leaves: Tensor, nodes: Tensor, scalars: Tensor, eligible: Tensor | None, capacity: int, fan_out: int,
    index: Tensor, *, trusted: bool = False,
) -> None:  # fmt: skip
    """See :data:`gpubuf.kernels.sum_tree.refresh`."""
    if not trusted:
        check_tree(leaves, nodes, scalars, eligible, capacity, fan_out)
        check_index(index)
    tree = leaves.data_ptr(), nodes.data_ptr(), 0 if eligible is None else eligible.data_ptr(), capacity, fan_out
    code = _refresh(*tree, index.data_ptr(), index.numel())
    if code:
        _raise_index(index, -code - 1, capacity)


def update(
    leaves: Tensor, nodes: Tensor, scalars: Tensor, eligible: Tensor | None, capacity: int, fan_out: int,
    ring: Tensor, index: Tensor, priority: Tensor, generation: Tensor | None, *, trusted: bool = False,
) -> None:  # fmt: skip
    """See :data:`gpubuf.kernels.sum_tree.update`."""
    if not trusted:
        check_tree(leaves, nodes, scalars, eligible, capacity, fan_out)
        check_update(ring, index, priority, generation)
    tree = leaves.data_ptr(), nodes.data_ptr(), 0 if eligible is None else eligible.data_ptr(), capacity, fan_out
    told = index.data_ptr(), priority.data_ptr(), 0 if generation is None else generation.data_ptr(), index.numel()
    code = _update(*tree, scalars.data_ptr(), ring.data_ptr(), *told)
    if code < 0:
        _raise_index(index, -code - 1, capacity)
    if code > 0:
        raise ValueError(
            f"priorities must be finite and not negative, but entry {code - 1}, for row {index[code - 1].item()}, "
            f"is {priority[code - 1].item()}; no priority has been changed"
        )


def mark(
    leaves: Tensor, nodes: Tensor, scalars: Tensor, eligible: Tensor | None, capacity: int, fan_out: int,
    index: Tensor, within_buffer: bool, *, trusted: bool = False,
) -> None:  # fmt: skip
    """See :data:`gpubuf.kernels.sum_tree.mark`."""
    if not trusted:
        check_tree(leaves, nodes, scalars, eligible, capacity, fan_out)
        check_index(index)
    tree = leaves.data_ptr(), nodes.data_ptr(), 0 if eligible is None else eligible.data_ptr(), capacity, fan_out
    code = _mark(*tree, scalars.data_ptr(), index.data_ptr(), index.numel(), within_buffer)
    if code:
        _raise_index(index, -code - 1, capacity)


def draw(
    leaves: Tensor, nodes: Tensor, scalars: Tensor, eligible: Tensor | None, capacity: int, fan_out: int,
    rng: Tensor, n: int, stratified: bool, *, trusted: bool = False,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """See :data:`gpubuf.kernels.sum_tree.draw`."""
    if not trusted:
        check_tree(leaves, nodes, scalars, eligible, capacity, fan_out)
    check_request(rng, n)
    index, weight = torch.empty_like(vector(n, torch.int64)), torch.empty_like(vector(n, torch.float32))
    if n == 0:
        return index, weight
    tree = leaves.data_ptr(), nodes.data_ptr(), 0 if eligible is None else eligible.data_ptr(), capacity, fan_out
    others = scalars.data_ptr(), rng.data_ptr(), index.data_ptr(), weight.data_ptr()
    results = call_in_parts(_draw, (*tree, *others), n, (n, stratified))
    if any(results):
        ineligible = "" if eligible is None else " or is ineligible"
        raise RuntimeError(f"nothing can be drawn: every row of the sum tree has weight zero{ineligible}")
    if len(results) > 1:
        rng[OFFSET] += n
    return index, weight


def _raise_index(index: Tensor, position: int, capacity: int) -> Never:
    raise IndexError(
        f"index {index[position].item()}, entry {position}, is out of range for a sum tree of {capacity} rows"
    )
