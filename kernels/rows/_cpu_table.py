"""Where a row lies, by an entry of the table, on the CPU."""

# Numba needs the real signatures: no `from __future__ import annotations`.

from gpubuf.kernels._jit import jit
from gpubuf.kernels.rows import DEVICE_ROWS, HOST_ROWS, ROW_STRIDE, SPLIT


@jit(forceinline=True)
def row_address(entry, position):  # type: ignore[no-untyped-def]
    """Address of the row at a position: the first of a key lie in one memory, the others may lie in another."""
    return (entry[DEVICE_ROWS] if position < entry[SPLIT] else entry[HOST_ROWS]) + position * entry[ROW_STRIDE]
