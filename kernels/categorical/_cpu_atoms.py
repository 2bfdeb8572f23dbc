"""Parts of the categorical operations on the CPU: a row of atoms in a buffer that stays in the first cache.

A buffer has numbers of one dtype, float32 or float64, and their count is a multiple of ``BLOCK``; those after the last
atom count for nothing. Every function serves both dtypes. Sums are vectorised: their order depends on the processor,
and on nothing else.
"""

# Numba needs the real signatures: no `from __future__ import annotations`.

import math
from typing import Any

import numpy as np
from numba import types
from numba.extending import overload

from gpubuf.kernels._elementary import (
    bits_of,
    bits_of_f32,
    exp_below_88_f32,
    exp_below_700,
    f32_of_bits,
    float_of_bits,
    is_positive_normal,
    is_positive_normal_f32,
    log_of_normal,
    log_of_normal_f32,
)
from gpubuf.kernels._floats import view
from gpubuf.kernels._jit import jit

#: Numbers of a vector, or of several.
BLOCK = 16

_INLINED: Any = {"forceinline": True}


def _exp(x: Any) -> Any:
    """exp(x) of x up to 0."""


def _x_log_x(x: Any) -> Any:
    """x log(x), 0 where x is not a positive normal number: below those it is next to nothing."""


def _order(x: Any) -> Any:
    """An integer that is larger for larger x. The compiler vectorises the search for the largest integer only."""


def _of_order(order: Any, like: Any) -> Any:
    """The x of an integer that ``_order`` gave, in the dtype of an array."""


@overload(_order, jit_options=_INLINED)
def _order_of_dtype(x):  # type: ignore[no-untyped-def]
    if x == types.float32:
        return lambda x: turn_f32(np.int32(bits_of_f32(x)))
    return lambda x: turn(bits_of(x))


@overload(_of_order, jit_options=_INLINED)
def _of_order_of_dtype(order, like):  # type: ignore[no-untyped-def]
    if like.dtype == types.float32:
        return lambda order, like: f32_of_bits(np.uint32(turn_f32(order)))
    return lambda order, like: float_of_bits(turn(order))


@overload(_exp, jit_options=_INLINED)
def _exp_of_dtype(x):  # type: ignore[no-untyped-def]
    return (lambda x: exp_below_88_f32(x)) if x == types.float32 else (lambda x: exp_below_700(x))


@overload(_x_log_x, jit_options=_INLINED)
def _x_log_x_of_dtype(x):  # type: ignore[no-untyped-def]
    if x == types.float32:
        return lambda x: x * log_of_normal_f32(x) if is_positive_normal_f32(x) else np.float32(0)
    return lambda x: x * log_of_normal(x) if is_positive_normal(x) else 0.0


_NOT_THE_SIGN_32, _SIGN_32 = np.int32(0x7FFFFFFF), np.int32(31)


@jit(forceinline=True)
def turn_f32(bits):  # type: ignore[no-untyped-def]
    """The bits of floats in the order of their values, as integers, and back."""
    return np.int32(bits ^ np.int32(np.int32(bits >> _SIGN_32) & _NOT_THE_SIGN_32))


@jit(forceinline=True)
def turn(bits):  # type: ignore[no-untyped-def]
    """The same of float64."""
    return bits ^ ((bits >> 63) & 0x7FFFFFFFFFFFFFFF)


@jit(forceinline=True)
def padded(atoms):  # type: ignore[no-untyped-def]
    """``atoms``, rounded up to whole blocks: a loop over them leaves no rest that is worked on one by one."""
    return (atoms + BLOCK - 1) // BLOCK * BLOCK


@jit(forceinline=True)
def fill(buffer, value):  # type: ignore[no-untyped-def]
    """Set every number. An assignment to a slice takes Numba a second to compile."""
    for j in range(len(buffer)):
        buffer[j] = value


@jit(forceinline=True)
def copy(source, target):  # type: ignore[no-untyped-def]
    """Copy one buffer to another."""
    for j in range(len(target)):
        target[j] = source[j]


@jit(forceinline=True)
def load_row(address, start, atoms, buffer, behind):  # type: ignore[no-untyped-def]
    """Copy the ``atoms`` numbers from ``start`` on, and put ``behind`` after them."""
    # An index that is a sum might be negative, as far as the compiler knows, and would not be vectorised.
    source = view(address + start * buffer.itemsize, atoms, buffer[0])
    fill(buffer, behind)
    for j in range(atoms):
        buffer[j] = source[j]


@jit(forceinline=True)
def store_row(address, start, atoms, buffer):  # type: ignore[no-untyped-def]
    """Write the first ``atoms`` numbers of ``buffer`` from ``start`` on."""
    target = view(address + start * buffer.itemsize, atoms, buffer[0])
    for j in range(atoms):
        target[j] = buffer[j]


@jit(forceinline=True)
def largest(buffer):  # type: ignore[no-untyped-def]
    """The largest number. A NaN with its sign bit is the smallest, any other the largest."""
    most = _order(buffer[0])
    for j in range(len(buffer)):
        order = _order(buffer[j])
        most = order if order > most else most
    return _of_order(most, buffer)


@jit(forceinline=True, fastmath={"reassoc"})
def total_of(buffer):  # type: ignore[no-untyped-def]
    """The sum of all numbers."""
    total = buffer.dtype.type(0)
    for j in range(len(buffer)):
        total += buffer[j]
    return total


@jit(forceinline=True, fastmath={"reassoc"})
def product_of(a, b):  # type: ignore[no-untyped-def]
    """``sum_j a_j b_j``."""
    total = a.dtype.type(0)
    for j in range(len(a)):
        total += a[j] * b[j]
    return total


@jit(forceinline=True)
def exponentials(buffer, out):  # type: ignore[no-untyped-def]
    """``out = exp(buffer - top)``, and returns top, the largest of them. NaN stays in its place."""
    top = largest(buffer)
    for j in range(len(buffer)):
        out[j] = _exp(buffer[j] - top)
    return top


@jit(forceinline=True, fastmath={"reassoc"})
def entropy_of(mass):  # type: ignore[no-untyped-def]
    """``-sum_j mass_j log(mass_j)``. What is not positive adds nothing."""
    total = mass.dtype.type(0)
    for j in range(len(mass)):
        total += _x_log_x(mass[j])
    return -total


@jit(forceinline=True, fastmath={"reassoc"})
def cross_entropy(logits, top, norm, mass):  # type: ignore[no-untyped-def]
    """``-sum_j mass_j (logits_j - top - log(norm))``; an atom without mass adds nothing, whatever its logit."""
    zero = mass.dtype.type(0)
    shift = mass.dtype.type(math.log(norm))
    total = zero
    for j in range(len(mass)):
        # The difference first: it is small where it counts, while both may be large.
        below = logits[j] - top
        term = mass[j] * (shift - below)
        total += term if mass[j] != zero else zero
    return total


@jit(forceinline=True)
def project(mass, atoms, first, slope, low, high, below, out):  # type: ignore[no-untyped-def]
    """Share the mass of atom j, at the place ``first + slope * j`` in units of atoms, among the two atoms around.

    ``out`` gets the result. ``low`` and ``high`` are buffers of as many numbers, and ``below`` of int32.
    """
    last = atoms - 1.0
    for j in range(atoms):
        place = first + slope * j
        place = place if place > 0 else 0.0
        place = place if place < last else last
        floor = np.int32(place)
        upper = mass[j] * mass.dtype.type(place - floor)
        below[j] = floor
        high[j] = upper
        low[j] = mass[j] - upper
    fill(out, 0.0)
    # In the order of the atoms. The last atom has no atom after it, and nothing goes there: its place is whole.
    for j in range(atoms):
        floor = below[j]
        out[floor] += low[j]
        out[floor + 1] += high[j]
