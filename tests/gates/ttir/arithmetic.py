"""What TTIR operations compute, on NumPy arrays.

A tensor is an array of the right number of dimensions, each either whole or 1 (a splat has 1 everywhere); a scalar is a
NumPy scalar. Integers are signed numbers of their width, i1 is bool, pointers are int64, bf16 is its bits in uint16.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from tests.support.floats import bfloat16_to_float32, float32_to_bfloat16

DTYPES: dict[str, np.dtype] = {
    "i1": np.dtype(bool),
    "i8": np.dtype(np.int8),
    "i16": np.dtype(np.int16),
    "i32": np.dtype(np.int32),
    "i64": np.dtype(np.int64),
    "f16": np.dtype(np.float16),
    "bf16": np.dtype(np.uint16),
    "f32": np.dtype(np.float32),
    "f64": np.dtype(np.float64),
}


def dtype_of(elem: str) -> np.dtype:
    return DTYPES["i64"] if elem.startswith("ptr:") else DTYPES[elem]


def whole(x: Any, shape: tuple[int, ...]) -> np.ndarray:
    return x if x.shape == shape else np.broadcast_to(x, shape)


def integer(value: int, elem: str) -> Any:
    """``value`` wrapped to the element's width."""
    if elem == "i1":
        return np.bool_(value)
    bits = int(elem[1:])
    half = 1 << (bits - 1)
    return DTYPES[elem].type(((value + half) & ((1 << bits) - 1)) - half)


def unsigned(x: Any) -> Any:
    return x if x.dtype == bool else x.view(x.dtype.str.replace("i", "u"))


def _amount(a: Any, b: Any) -> tuple[Any, Any]:
    """(distance of a shift of ``a``, where ``b`` is a legal one)."""
    bits = 8 * a.dtype.itemsize
    legal = (b >= 0) & (b < bits)
    return b if legal.all() else np.where(legal, b, bits - 1).astype(b.dtype)[()], legal


def shl(a: Any, b: Any) -> Any:
    amount, legal = _amount(a, b)
    return np.where(legal, a << amount, 0).astype(a.dtype)[()]


def shrs(a: Any, b: Any) -> Any:
    return a >> _amount(a, b)[0]


def shru(a: Any, b: Any) -> Any:
    amount, legal = _amount(a, b)
    return np.where(legal, (unsigned(a) >> unsigned(amount)).view(a.dtype), 0).astype(a.dtype)[()]


def _divisor(b: Any) -> Any:
    return b if b.all() else np.where(b == 0, 1, b).astype(b.dtype)[()]


def divs(a: Any, b: Any) -> Any:
    d = _divisor(b)
    # NumPy rounds down, the hardware to zero.
    return (a // d + (((a % d) != 0) & ((a < 0) != (d < 0)))).astype(a.dtype)


def rems(a: Any, b: Any) -> Any:
    return np.fmod(a, _divisor(b))


def divu(a: Any, b: Any) -> Any:
    return (unsigned(a) // unsigned(_divisor(b))).view(a.dtype)


def remu(a: Any, b: Any) -> Any:
    return (unsigned(a) % unsigned(_divisor(b))).view(a.dtype)


def mulhiu(a: Any, b: Any) -> Any:
    """The upper half of a product of unsigned numbers of 32 or 64 bits."""
    out = a.dtype
    a, b = unsigned(a), unsigned(b)
    half, mask = np.uint64(32), np.uint64(0xFFFFFFFF)
    if out.itemsize == 4:
        return ((a.astype(np.uint64) * b.astype(np.uint64)) >> half).astype(np.uint32).view(out)
    a0, a1, b0, b1 = a & mask, a >> half, b & mask, b >> half
    middle = (a0 * b0 >> half) + (a1 * b0 & mask) + (a0 * b1 & mask)
    return (a1 * b1 + (a1 * b0 >> half) + (a0 * b1 >> half) + (middle >> half)).view(out)


def extsi(a: Any, dtype: np.dtype) -> Any:
    return -a.astype(dtype) if a.dtype == bool else a.astype(dtype)


def extui(a: Any, dtype: np.dtype) -> Any:
    return unsigned(a).astype(dtype)


def trunci(a: Any, dtype: np.dtype) -> Any:
    return (a & 1).astype(bool) if dtype.kind == "b" else a.astype(dtype)


def fptosi(x: Any, dtype: np.dtype) -> Any:
    info = np.iinfo(dtype)
    top = x.dtype.type(-float(info.min))
    good = (x >= -top) & (x < top)
    out = np.where(good, x, x.dtype.type(0)).astype(dtype)
    return np.where(x >= top, info.max, np.where(x < -top, info.min, out)).astype(dtype)[()]


def cast_float(x: Any, source: str, target: str) -> Any:
    if source == "bf16":
        x = bfloat16_to_float32(x)
    return x.astype(DTYPES[target]) if target != "bf16" else float32_to_bfloat16(x)[()]


def rsqrt(x: Any) -> Any:
    return x.dtype.type(1) / np.sqrt(x)


def erf(x: Any) -> Any:
    return np.vectorize(math.erf, otypes=[np.float64])(x).astype(x.dtype)[()]


# Reductions: floats in the order of a tree, more or less as a GPU does it.

Combine = Callable[..., Sequence[np.ndarray]]


def reduce(values: Sequence[np.ndarray], axis: int, combine: Combine) -> list[Any]:
    """Halves, until one is left."""
    n = values[0].shape[axis]
    while n > 1:
        half = n // 2
        low = [np.take(v, range(half), axis) for v in values]
        high = [np.take(v, range(half, 2 * half), axis) for v in values]
        values = combine(*low, *high)
        n = half
    return [np.take(v, 0, axis) for v in values]


def scan(values: Sequence[np.ndarray], axis: int, reverse: bool, combine: Combine) -> list[np.ndarray]:
    """Hillis and Steele: every prefix in an order of its own."""
    values = [np.flip(v, axis) for v in values] if reverse else values
    n, distance = values[0].shape[axis], 1
    while distance < n:
        low = [np.take(v, range(n - distance), axis) for v in values]
        high = [np.take(v, range(distance, n), axis) for v in values]
        head = [np.take(v, range(distance), axis) for v in values]
        values = [np.concatenate([h, o], axis) for h, o in zip(head, combine(*low, *high), strict=True)]
        distance *= 2
    return [np.flip(v, axis) for v in values] if reverse else list(values)


def reduce_ufunc(x: np.ndarray, axis: int, ufunc: np.ufunc) -> Any:
    if x.dtype.kind == "f":
        return reduce([x], axis, lambda a, b: (ufunc(a, b),))[0]
    return ufunc.reduce(x, axis=axis, dtype=x.dtype)


def scan_ufunc(x: np.ndarray, axis: int, reverse: bool, ufunc: np.ufunc) -> np.ndarray:
    if x.dtype.kind == "f":
        return scan([x], axis, reverse, lambda a, b: (ufunc(a, b),))[0]
    if reverse:
        return np.flip(ufunc.accumulate(np.flip(x, axis), axis=axis, dtype=x.dtype), axis)
    return ufunc.accumulate(x, axis=axis, dtype=x.dtype)
