"""The dtypes of parameters on the CPU: how the step reads and writes blocks of them.

The step is written once, and takes the functions here for each dtype. A block of bfloat16 numbers is worked on in a
float32 copy. A block of another dtype is worked on in its place, and its scratch memory is not used.
"""

# Numba needs the real signatures: no `from __future__ import annotations`.

import numpy as np
from numba import carray

from gpubuf.kernels._elementary import bits_of_f32, f32_of_bits
from gpubuf.kernels._jit import jit
from gpubuf.kernels._pointers import as_f32, as_f64, as_u16


@jit(forceinline=True)
def view_f32(address, n):  # type: ignore[no-untyped-def]
    """float32 ``[n]`` at an address."""
    return carray(as_f32(address), n)


@jit(forceinline=True)
def view_f64(address, n):  # type: ignore[no-untyped-def]
    """float64 ``[n]`` at an address."""
    return carray(as_f64(address), n)


@jit(forceinline=True)
def view_bf16(address, n):  # type: ignore[no-untyped-def]
    """The bits of bfloat16 ``[n]`` at an address."""
    return carray(as_u16(address), n)


@jit(forceinline=True)
def in_place(numbers, first, n, scratch):  # type: ignore[no-untyped-def]
    """The block itself."""
    return numbers[first : first + n]


@jit(forceinline=True)
def kept(numbers, first, n, scratch):  # type: ignore[no-untyped-def]
    """The block was changed in its place."""


@jit(forceinline=True)
def widened(numbers, first, n, scratch):  # type: ignore[no-untyped-def]
    """A block of bfloat16 numbers, as float32 in ``scratch``."""
    block = numbers[first : first + n]
    out = scratch[:n]
    for i in range(n):
        out[i] = f32_of_bits(np.uint32(np.uint32(block[i]) << np.uint32(16)))
    return out


@jit(forceinline=True)
def narrowed(numbers, first, n, scratch):  # type: ignore[no-untyped-def]
    """Write float32 ``scratch`` into a block of bfloat16 numbers, rounded to the nearest, half to even."""
    block = numbers[first : first + n]
    for i in range(n):
        x = scratch[i]
        bits = np.int64(bits_of_f32(x))
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        block[i] = np.uint16(rounded if x == x else 0x7FC0)
