"""PTX operations that NumPy has no function for, of arrays or scalars."""

from __future__ import annotations

from typing import Any

import numpy as np


def take(value: Any, lanes: np.ndarray | None) -> Any:
    """A value in some lanes, None for all."""
    return value if lanes is None or not value.ndim else value[lanes]


def bfloat16_to_float32(bits: Any) -> Any:
    return (bits.astype("u4") << np.uint32(16)).view("f4")


def float32_to_bfloat16(value: Any) -> Any:
    bits = np.ascontiguousarray(value, "f4").view("u4")
    rounded = (bits + ((bits >> np.uint32(16)) & np.uint32(1)) + np.uint32(0x7FFF)) >> np.uint32(16)
    return np.where(np.isnan(value), np.uint16(0x7FFF), rounded.astype("u2"))


def divide(a: Any, b: Any) -> Any:
    """The quotient of integers, rounded toward zero; all bits set where ``b`` is 0."""
    zero = b == 0
    if a.dtype.kind == "u":
        return np.where(zero, ~np.zeros_like(b), a // np.where(zero, np.ones_like(b), b))
    overflow = b == -1
    safe = np.where(zero | overflow, np.ones_like(b), b)
    quotient = a // safe
    quotient = quotient + ((quotient * safe != a) & ((a < 0) != (safe < 0)))
    return np.where(zero, ~np.zeros_like(b), np.where(overflow, -a, quotient.astype(b.dtype)))


def remainder(a: Any, b: Any) -> Any:
    return np.where(b == 0, ~np.zeros_like(b), a - divide(a, b) * b)


def multiply_high(a: Any, b: Any) -> Any:
    """The upper half of a product of integers."""
    kind, bits = a.dtype.kind, 8 * a.dtype.itemsize
    if bits < 64:
        wide = np.dtype(f"{kind}{bits // 4}")
        return ((a.astype(wide) * b.astype(wide)) >> wide.type(bits)).astype(a.dtype)
    if kind == "i":
        high = multiply_high(a.view("u8"), b.view("u8")).view("i8")
        return high - np.where(a < 0, b, np.int64(0)) - np.where(b < 0, a, np.int64(0))
    low, half = np.uint64(0xFFFFFFFF), np.uint64(32)
    middle = (a >> half) * (b & low) + (((a & low) * (b & low)) >> half)
    return (a >> half) * (b >> half) + (middle >> half) + (((middle & low) + (a & low) * (b >> half)) >> half)


def shift_left(value: Any, count: Any) -> Any:
    bits = 8 * value.dtype.itemsize
    return np.where(count < bits, value << np.minimum(count, bits - 1).astype(value.dtype), value.dtype.type(0))


def shift_right(value: Any, count: Any) -> Any:
    bits = 8 * value.dtype.itemsize
    shifted = value >> np.minimum(count, bits - 1).astype(value.dtype)
    return shifted if value.dtype.kind == "i" else np.where(count < bits, shifted, value.dtype.type(0))


def extract(value: Any, position: Any, length: Any) -> Any:
    """``length`` bits from ``position`` on, extended by the sign if the value is signed."""
    bits = 8 * value.dtype.itemsize
    position, length = position & np.uint32(255), np.minimum(length & np.uint32(255), np.uint32(bits))
    unused = np.uint32(bits) - length
    return shift_right(shift_left(shift_right(value, position), unused), unused)


def permute(a: Any, b: Any, selector: Any) -> Any:
    """``prmt.b32``: four bytes of the eight in ``a`` and ``b``, by the four nibbles of ``selector``."""
    both = a.astype("u8") | (b.astype("u8") << np.uint64(32))
    out: Any = np.uint32(0)
    for k in range(4):
        nibble = selector >> np.uint32(4 * k)
        byte = ((both >> ((nibble & np.uint32(7)) * np.uint32(8)).astype("u8")) & np.uint64(255)).astype("u4")
        sign = np.where(byte >> np.uint32(7), np.uint32(255), np.uint32(0))
        out = out | (np.where(nibble & np.uint32(8), sign, byte) << np.uint32(8 * k))
    return out


def float_to_integer(value: Any, rounding: Any, dtype: str) -> Any:
    """Rounded and saturated; NaN becomes 0."""
    info = np.iinfo(dtype)
    rounded = rounding(value.astype("f8"))
    inside = (rounded > float(info.min)) & (rounded < float(info.max))
    out = np.where(inside, rounded, 0.0).astype(dtype)
    out = np.where(rounded >= float(info.max), info.dtype.type(info.max), out)
    return np.where(rounded <= float(info.min), info.dtype.type(info.min), out)


def _sum(a: Any, b: Any) -> tuple[Any, Any]:
    """A sum, and what rounding took from it."""
    total = a + b
    part = total - a
    return total, (a - (total - part)) + (b - part)


def _product(a: Any, b: Any) -> tuple[Any, Any]:
    """A product, and what rounding took from it."""
    product = a * b
    (a_high, a_low), (b_high, b_low) = ((high := x * 134217729.0 - (x * 134217729.0 - x), x - high) for x in (a, b))
    return product, ((a_high * b_high - product) + a_high * b_low + a_low * b_high) + a_low * b_low


def _odd(total: Any, lost: Any) -> Any:
    """A sum rounded to odd, so that it may be rounded again."""
    bits = np.asarray(total).view("i8")
    wrong = (lost != 0) & ((bits & 1) == 0)
    return np.where(wrong, bits + np.where((lost > 0) == (total > 0), 1, -1), bits).view("f8")


def fused(a: Any, b: Any, c: Any) -> Any:
    """``fma``, rounded once (Boldo and Melquiond, Emulation of FMA and correctly rounded sums)."""
    if a.dtype.itemsize < 8:
        return np.where(np.isfinite(a * b + c), _odd(*_sum(a.astype("f8") * b, c.astype("f8"))), a * b + c).astype("f4")
    high, low = _product(a, b)
    upper, lower = _sum(c, low)
    total, rest = _sum(high, upper)
    exact = total + _odd(*_sum(lower, rest))
    return np.where(np.isfinite(exact), exact, a * b + c)


def reciprocal_of_high_half(value: Any) -> Any:
    """``rcp.approx.ftz.f64`` gives the upper 32 bits only."""
    return ((np.float64(1) / value).view("u8") & np.uint64(0xFFFFFFFF00000000)).view("f8")


def packed(function: Any, a: Any, b: Any, dtype: str) -> Any:
    """An operation on the two halves of 32 bits."""
    halves = function(np.atleast_1d(a).view(dtype), np.atleast_1d(b).view(dtype))
    return np.ascontiguousarray(halves).view("u4")
