"""Elements of float arrays given by address, for Numba kernels that serve float32 and float64 alike.

:func:`read` and :func:`write` ask for the dtype at each element, which keeps LLVM from vectorising the loop around
them. Where time counts, a kernel goes through its rows tile by tile: it loads a tile into float64 buffers, which stay
in the first cache, and each loop over a buffer is vectorised.
"""

# Numba needs the real signatures: no `from __future__ import annotations`.

from typing import Any

from numba import carray, types
from numba.extending import overload

from gpubuf.kernels._jit import jit
from gpubuf.kernels._pointers import as_f32, as_f64


@jit(forceinline=True)
def read(address, wide, i):  # type: ignore[no-untyped-def]
    """Element ``i`` of the float64 (``wide``) or float32 array at ``address``, as float64."""
    if wide:
        return carray(as_f64(address), i + 1)[i]
    return float(carray(as_f32(address), i + 1)[i])


@jit(forceinline=True)
def write(address, wide, i, value):  # type: ignore[no-untyped-def]
    """Set element ``i`` of the float64 (``wide``) or float32 array at ``address``."""
    if wide:
        carray(as_f64(address), i + 1)[i] = value
    else:
        carray(as_f32(address), i + 1)[i] = value


@jit(forceinline=True)
def load(source, wide, first, count, target):  # type: ignore[no-untyped-def]
    """Copy elements of the float64 (``wide``) or float32 array at ``source``."""
    if wide:
        doubles = carray(as_f64(source), first + count)
        for j in range(count):
            target[j] = doubles[first + j]
    else:
        floats = carray(as_f32(source), first + count)
        for j in range(count):
            target[j] = floats[first + j]


@jit(forceinline=True)
def store(source, target, wide, first, count):  # type: ignore[no-untyped-def]
    """The reverse of :func:`load`."""
    if wide:
        doubles = carray(as_f64(target), first + count)
        for j in range(count):
            doubles[first + j] = source[j]
    else:
        floats = carray(as_f32(target), first + count)
        for j in range(count):
            floats[first + j] = source[j]


@jit(forceinline=True, fastmath={"reassoc"})
def total_of(buffer, count):  # type: ignore[no-untyped-def]
    """The sum of the first elements. It is vectorised: its order depends on the processor, and on nothing else."""
    total = 0.0
    for j in range(count):
        total += buffer[j]
    return total


def view(address: Any, count: Any, like: Any) -> Any:
    """The array of the first numbers at an address, float32 or float64 as another number is, for compiled kernels."""


@overload(view, jit_options={"forceinline": True})
def _view_of_dtype(address, count, like):  # type: ignore[no-untyped-def]
    if like == types.float32:
        return lambda address, count, like: carray(as_f32(address), count)
    return lambda address, count, like: carray(as_f64(address), count)
