"""Rows on the CPU, one at a time: the address of one, from an entry of the table, the copy, and the comparison."""

# Numba needs the real signatures: no `from __future__ import annotations`.

from numba import carray

from gpubuf.kernels._jit import jit
from gpubuf.kernels._pointers import as_u8, copy_bytes, load_i64
from gpubuf.kernels.rows import DEVICE_ROWS, HOST_ROWS, ROW_STRIDE, SPLIT


@jit(forceinline=True)
def row_address(entry, position):  # type: ignore[no-untyped-def]
    """Address of the row at a position: a device row or a host row."""
    return (entry[DEVICE_ROWS] if position < entry[SPLIT] else entry[HOST_ROWS]) + position * entry[ROW_STRIDE]


@jit(forceinline=True)
def differ(a, b, row_bytes):  # type: ignore[no-untyped-def]
    """Whether the rows at two addresses have different bytes."""
    if row_bytes == 8:
        return load_i64(a) != load_i64(b)
    found = 0
    for i in range(row_bytes >> 3):
        found |= load_i64(a + 8 * i) ^ load_i64(b + 8 * i)
    view_a, view_b = carray(as_u8(a), row_bytes), carray(as_u8(b), row_bytes)
    for i in range(row_bytes & ~7, row_bytes):
        found |= view_a[i] ^ view_b[i]
    return found != 0


@jit(forceinline=True)
def copy_row(target, source, row_bytes):  # type: ignore[no-untyped-def]
    """memcpy without the call for rows of up to 128 bytes: two copies of a constant size, which may overlap."""
    if row_bytes == 4:
        copy_bytes(target, source, 4)
    elif row_bytes == 1:
        copy_bytes(target, source, 1)
    elif row_bytes == 8:
        copy_bytes(target, source, 8)
    elif row_bytes > 128:
        copy_bytes(target, source, row_bytes)
    elif row_bytes >= 64:
        copy_bytes(target, source, 64)
        copy_bytes(target + row_bytes - 64, source + row_bytes - 64, 64)
    elif row_bytes >= 32:
        copy_bytes(target, source, 32)
        copy_bytes(target + row_bytes - 32, source + row_bytes - 32, 32)
    elif row_bytes >= 16:
        copy_bytes(target, source, 16)
        copy_bytes(target + row_bytes - 16, source + row_bytes - 16, 16)
    elif row_bytes >= 8:
        copy_bytes(target, source, 8)
        copy_bytes(target + row_bytes - 8, source + row_bytes - 8, 8)
    elif row_bytes >= 4:
        copy_bytes(target, source, 4)
        copy_bytes(target + row_bytes - 4, source + row_bytes - 4, 4)
    else:
        for i in range(row_bytes):
            copy_bytes(target + i, source + i, 1)
