"""Elements of float arrays given by address, for Numba kernels that serve float32 and float64 alike."""

# Numba needs the real signatures: no `from __future__ import annotations`.

from numba import carray

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
