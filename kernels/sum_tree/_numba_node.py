"""One node of the sum tree on the CPU: its statistics, and the choice of a child.

A node has 16 children, which fit into vector registers. LLVM does not put them there by itself: with plain loops an
update of 4096 rows takes 1.7 times as long. So the statistics are in LLVM's own code, without a branch. It fixes the
order of the additions, and every machine gets the bits of the plain definition.
"""

# Numba needs the real signatures: no `from __future__ import annotations`.

from collections.abc import Callable
from typing import Any

import numpy as np
from llvmlite import ir
from numba import carray, types

from gpubuf.kernels._jit import jit
from gpubuf.kernels._primitives import as_f64, as_i64, emitted
from gpubuf.kernels.config import CPU_FAN_OUT

WIDTH = CPU_FAN_OUT

_VECTOR = ir.VectorType(ir.DoubleType(), WIDTH)
_ZERO = ir.Constant(_VECTOR, [0.0] * WIDTH)
_INFINITY = ir.Constant(_VECTOR, [float("inf")] * WIDTH)


def _load(builder: Any, address: Any, kind: Any) -> Any:
    return builder.load(builder.inttoptr(address, ir.VectorType(kind, WIDTH).as_pointer()), align=4)


def _leaves(builder: Any, address: Any, eligible: Any) -> Any:
    """The leaves at an address, in float64; zero where a bit of ``eligible`` is not set, the lowest for the first."""
    mask = builder.bitcast(builder.trunc(eligible, ir.IntType(WIDTH)), ir.VectorType(ir.IntType(1), WIDTH))
    return builder.select(mask, builder.fpext(_load(builder, address, ir.FloatType()), _VECTOR), _ZERO)


def _combined(builder: Any, vector: Any, combine: Callable[[Any, Any], Any]) -> Any:
    """One number of 16: halves are combined until one number is left."""
    for width in (8, 4, 2, 1):
        lanes = [ir.Constant(ir.VectorType(ir.IntType(32), width), list(range(at, at + width))) for at in (0, width)]
        vector = combine(*(builder.shuffle_vector(vector, vector, half) for half in lanes))
    return builder.extract_element(vector, ir.IntType(32)(0))


def _extreme(builder: Any, vector: Any, kind: str) -> Any:
    return _combined(builder, vector, lambda a, b: builder.select(builder.fcmp_ordered(kind, a, b), a, b))


@emitted(types.UniTuple(types.float64, 3)(types.int64, types.int64))
def stats_of_leaves(builder: Any, address: Any, eligible: Any) -> list[Any]:
    """``stats_of_leaves(address, eligible)``: (sum, least positive, maximum) of 16 leaves, as :func:`_leaves`."""
    weight = _leaves(builder, address, eligible)
    positive = builder.select(builder.fcmp_ordered(">", weight, _ZERO), weight, _INFINITY)
    return [_combined(builder, weight, builder.fadd), _extreme(builder, positive, "<"), _extreme(builder, weight, ">")]


@emitted(types.void(types.int64, types.int64, types.int64))
def copy_leaves(builder: Any, address: Any, eligible: Any, target: Any) -> None:
    """``copy_leaves(address, eligible, target)``: 16 leaves to float64 numbers, as :func:`_leaves`."""
    builder.store(_leaves(builder, address, eligible), builder.inttoptr(target, _VECTOR.as_pointer()), align=8)


@emitted(types.float64(types.int64))
def sum_of_nodes(builder: Any, address: Any) -> Any:
    """``sum_of_nodes(address)``: of 16 inner nodes."""
    return _combined(builder, _load(builder, address, ir.DoubleType()), builder.fadd)


@emitted(types.UniTuple(types.float64, 2)(types.int64, types.int64))
def extremes_of_nodes(builder: Any, minima: Any, maxima: Any) -> list[Any]:
    """``extremes_of_nodes(minima, maxima)``: (minimum, maximum) of 16 inner nodes, given their addresses."""
    found = (_load(builder, address, ir.DoubleType()) for address in (minima, maxima))
    return [_extreme(builder, vector, kind) for vector, kind in zip(found, "<>", strict=True)]


@jit(forceinline=True)
def eligible_leaves(eligible_address, first):  # type: ignore[no-untyped-def]
    """The bits of 16 rows, the lowest for row ``first``; all set if there is no bitmap."""
    if eligible_address == 0:
        return -1
    return carray(as_i64(eligible_address), (first >> 6) + 1)[first >> 6] >> (first & 63)


@jit(forceinline=True)
def store_prefixes(address, prefixes):  # type: ignore[no-untyped-def]
    """Store what :func:`choose` needs of nodes with as many children, whose weights are at ``address``.

    The sum of a node's children before each child, or infinity behind the last that weighs anything: that is chosen
    where rounding carries the mass past the last prefix sum.
    """
    weights = carray(as_f64(address), len(prefixes))
    for first in range(0, len(prefixes), WIDTH):
        prefix = 0.0
        for j in range(first, first + WIDTH):
            prefixes[j] = prefix
            prefix += weights[j]
        last = first + WIDTH - 1
        while last > first and weights[last] <= 0.0:
            prefixes[last] = np.inf
            last -= 1


@jit(forceinline=True)
def choose(prefixes_address, mass):  # type: ignore[no-untyped-def]
    """(child, mass left in it): the last of 16 children whose prefix sum the mass reaches. No branch."""
    prefixes, child = carray(as_f64(prefixes_address), WIDTH), 0
    for step in (8, 4, 2, 1):
        child += step if prefixes[child + step] <= mass else 0
    return child, mass - prefixes[child]
