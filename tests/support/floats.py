"""bfloat16, TF32 and what ``tl.dot`` computes of them, on NumPy arrays: for the interpreter and the gates."""

from __future__ import annotations

from typing import Any

import numpy as np

_KEPT = np.uint32(0xFFFFE000)
"""The bits of a float32 that TF32 has: sign, exponent, 10 bits of mantissa."""


def bfloat16_to_float32(bits: Any) -> Any:
    return (bits.astype("u4") << np.uint32(16)).view("f4")


def float32_to_bfloat16(value: Any) -> Any:
    """To the nearest, as a GPU converts."""
    bits = np.ascontiguousarray(value, "f4").view("u4")
    rounded = (bits + ((bits >> np.uint32(16)) & np.uint32(1)) + np.uint32(0x7FFF)) >> np.uint32(16)
    return np.where(np.isnan(value), np.uint16(0x7FFF), rounded.astype("u2"))


def truncated(x: Any) -> Any:
    """float32 as tensor cores read it for TF32: ``mma`` looks at the upper 19 bits, and nothing rounds before it."""
    return (np.ascontiguousarray(x).view("u4") & _KEPT).view("f4")


def rounded(x: Any) -> Any:
    """``cvt.rna.tf32.f32``: to the nearest TF32, away from zero where two are as near."""
    near = ((np.ascontiguousarray(x).view("u4") + np.uint32(0x1000)) & _KEPT).view("f4")
    return np.where(np.isfinite(x), near, x)


def product(a: Any, b: Any, add: Any, precision: str = "ieee") -> Any:
    """``a @ b + add`` in the dtype of ``add``; of float32 with a precision of Triton's, of all else exactly.

    ``tf32x3`` is what Triton makes of it: three products of TF32, of which the two small ones come first.
    """
    a, b = a.astype(add.dtype, copy=False), b.astype(add.dtype, copy=False)
    if precision == "ieee" or add.dtype != np.float32:
        return np.matmul(a, b) + add
    if precision == "tf32":
        return np.matmul(truncated(a), truncated(b)) + add
    if precision != "tf32x3":
        raise NotImplementedError(f"a product with precision {precision}")
    large_a, large_b = rounded(a), rounded(b)
    small = np.matmul(truncated(a - large_a), large_b) + np.matmul(large_a, truncated(b - large_b))
    return np.matmul(large_a, large_b) + np.where(np.isnan(small), np.float32(0), small) + add
