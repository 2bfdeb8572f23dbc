"""The address of a row on the CPU, from an entry of the table."""

# Numba needs the real signatures: no `from __future__ import annotations`.

from gpubuf.kernels._jit import jit
from gpubuf.kernels.rows import DEVICE_ROWS, HOST_ROWS, ROW_STRIDE, SPLIT


@jit(forceinline=True)
def row_address(entry, position):  # type: ignore[no-untyped-def]
    """Address of the row at a position: a device row or a host row."""
    return (entry[DEVICE_ROWS] if position < entry[SPLIT] else entry[HOST_ROWS]) + position * entry[ROW_STRIDE]
