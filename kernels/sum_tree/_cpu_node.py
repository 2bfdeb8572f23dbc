"""One node of the sum tree on the CPU: its statistics, and the choice of a child.

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
from typing import Any

import numpy as np
from llvmlite import ir
from numba import carray, types

from gpubuf.kernels._jit import jit
from gpubuf.kernels._primitives import as_f32, as_f64, as_i64, emitted
from gpubuf.kernels.sum_tree import MAXIMUM, MINIMUM, SUM

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
