"""PTX operations that NumPy has no function for, of arrays or scalars."""

from __future__ import annotations

from typing import Any

import numpy as np

from tests.support.floats import bfloat16_to_float32, float32_to_bfloat16, truncated


def take(value: Any, lanes: np.ndarray | None) -> Any:
    """A value in some lanes, None for all."""
    return value if lanes is None or not value.ndim else value[lanes]


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


def packed(function: Any, kind: str, *operands: Any) -> Any:
    """An operation on bfloat16, which is computed as float32, or on the parts of a register, such as ``f16x2``."""
    kind = kind.removesuffix("x2")
    given = "u2" if kind == "bf16" else f"{kind[0]}{int(kind[1:]) // 8}"
    parts = [np.ascontiguousarray(operand)[..., None].view(given) for operand in operands]
    if kind == "bf16":
        found = float32_to_bfloat16(function(*map(bfloat16_to_float32, parts)))
    else:
        found = np.ascontiguousarray(function(*parts))
    return found.view(operands[0].dtype)[..., 0]


def half(value: Any, place: int, kind: str) -> Any:
    """The lower or the upper half of a register, as a number."""
    bits = (value >> np.uint32(16 * place)).astype("u2")
    return bfloat16_to_float32(bits) if kind == "bf16x2" else bits.view("f2")


def matrix_product(kind: str, a: list[Any], b: list[Any], c: list[Any]) -> list[Any]:
    """``mma``, of all warps: the registers of ``a @ b + c``, of those of the operands, with an element per lane.

    Of each 8 by 4 elements of an operand, or that many pairs of 16 bits, a lane has one; columns come in fours, rows in
    eights, of which two take turns. TF32 is truncated. Sums are those of float32, or of float64; a device rounds the
    terms of float32 otherwise.
    """
    outer = np.dtype(np.float64 if kind == "f64" else np.float32)

    def lanes(registers: list[Any]) -> Any:
        """[register, warp, row or column of 8, place of 4, element of the register]."""
        found = np.stack(registers).reshape(len(registers), -1, 8, 4)[..., None]
        if kind in ("f64", "tf32"):
            return found.view("f8") if kind == "f64" else truncated(found)
        return bfloat16_to_float32(found.view("u2")) if kind == "bf16" else found.view("f2").astype(outer)

    first, second = lanes(a), lanes(b)
    _, warps, *_, pack = second.shape
    depth = 4 * pack * second.shape[0]
    height = 8 * len(a) * 4 * pack // depth
    first = first.reshape(-1, height // 8, warps, 8, 4, pack).transpose(2, 1, 3, 0, 4, 5).reshape(warps, height, depth)
    second = second.transpose(1, 0, 3, 4, 2).reshape(warps, depth, 8)
    # The sum has two columns in a lane: in registers of their own, or as a pair of float16.
    of_halves = len(c) < height // 4
    third = np.stack(c).view("f2" if of_halves else outer).reshape(height // 8, -1, warps, 8, 4, 1 + of_halves)
    third = third.transpose(2, 0, 3, 4, 1, 5).reshape(warps, height, 8).astype(outer)
    found = (np.matmul(first, second) + third).reshape(warps, height // 8, 8, 4, 2 - of_halves, 1 + of_halves)
    found = found.transpose(1, 4, 0, 2, 3, 5).astype("f2" if of_halves else outer)
    return list(np.ascontiguousarray(found).view(c[0].dtype).reshape(len(c), -1))
