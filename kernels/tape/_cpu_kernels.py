"""One loop over the records of :mod:`gpubuf.kernels.tape`."""

# Numba needs the real signatures: no `from __future__ import annotations`.

import numpy as np
from numba import carray

from gpubuf.kernels._jit import jit, kernel
from gpubuf.kernels._primitives import as_f32, as_i64, call, copy_bytes, float_of_bits, load_i64
from gpubuf.kernels.tape import (
    A_STRIDES,
    ADD,
    ADD_NUMBER,
    B_STRIDES,
    BETA,
    COLUMNS,
    COPY,
    COUNT,
    FIELDS,
    FILL,
    GROUPS,
    INNER,
    LEADING_A,
    LEADING_B,
    LEADING_OUT,
    MULTIPLY,
    MULTIPLY_BY_NUMBER,
    NUMBER,
    ONE,
    OPERATION,
    OUT,
    OUT_STRIDES,
    PRODUCT,
    PRODUCTS,
    RELU,
    RELU_GRADIENT,
    ROWS,
    SIZES,
    STEPS,
    SUBTRACT,
    SUM,
    TRANSPOSED_A,
    TRANSPOSED_B,
    A,
    B,
)

#: Elements that are worked on at a time, in the first cache.
TILE = 2048


@jit(forceinline=True)
def _one(operation, a, b, number):  # type: ignore[no-untyped-def]
    """An element."""
    zero = np.float32(0)
    if operation == COPY:
        return a
    if operation == FILL:
        return number
    if operation == RELU:
        # NaN and the zero below zero stay, as in PyTorch.
        return zero if a < zero else a
    if operation == RELU_GRADIENT:
        return zero if b <= zero else a
    if operation == ADD:
        return a + b
    if operation == SUBTRACT:
        return a - b
    if operation == MULTIPLY:
        return a * b
    if operation == ADD_NUMBER:
        return a + number
    return a * number


@jit(forceinline=True)
def _row(operation, y, x, z, n, number):  # type: ignore[no-untyped-def]
    """A row whose elements are side by side everywhere."""
    # A choice within the loop would keep LLVM from vectorising it.
    if operation == COPY:
        for j in range(n):
            y[j] = x[j]
    elif operation == FILL:
        for j in range(n):
            y[j] = number
    elif operation == RELU:
        for j in range(n):
            y[j] = _one(RELU, x[j], number, number)
    elif operation == RELU_GRADIENT:
        for j in range(n):
            y[j] = _one(RELU_GRADIENT, x[j], z[j], number)
    elif operation == ADD:
        for j in range(n):
            y[j] = x[j] + z[j]
    elif operation == SUBTRACT:
        for j in range(n):
            y[j] = x[j] - z[j]
    elif operation == MULTIPLY:
        for j in range(n):
            y[j] = x[j] * z[j]
    elif operation == ADD_NUMBER:
        for j in range(n):
            y[j] = x[j] + number
    else:
        for j in range(n):
            y[j] = x[j] * number


@jit(forceinline=True)
def _any_row(operation, y, x, x_stride, z, z_stride, n, number):  # type: ignore[no-untyped-def]
    if x_stride == 1 and z_stride == 1:
        _row(operation, y, x, z, n, number)
    elif x_stride == 1 and z_stride == 0 and operation == ADD:
        _row(ADD_NUMBER, y, x, x, n, z[0])
    elif x_stride == 1 and z_stride == 0 and operation == MULTIPLY:
        _row(MULTIPLY_BY_NUMBER, y, x, x, n, z[0])
    else:
        for j in range(n):
            y[j] = _one(operation, x[j * x_stride], z[j * z_stride], number)


@jit
def _elementwise(at, out, a, b, tile):  # type: ignore[no-untyped-def]
    field = carray(as_i64(at), FIELDS)
    operation, n, number = field[OPERATION], field[SIZES + 2], np.float32(float_of_bits(field[NUMBER]))
    x_stride, z_stride = field[A_STRIDES + 2], field[B_STRIDES + 2]
    for j in range(field[SIZES]):
        for k in range(field[SIZES + 1]):
            to = out + 4 * (j * field[OUT_STRIDES] + k * field[OUT_STRIDES + 1])
            one = a + 4 * (j * field[A_STRIDES] + k * field[A_STRIDES + 1])
            other = b + 4 * (j * field[B_STRIDES] + k * field[B_STRIDES + 1])
            if to != one and to != other:
                x, z = carray(as_f32(one), n * x_stride + 1), carray(as_f32(other), n * z_stride + 1)
                _any_row(operation, carray(as_f32(to), n), x, x_stride, z, z_stride, n, number)
                continue
            for start in range(0, n, TILE):
                count = min(TILE, n - start)
                x = carray(as_f32(one + 4 * start * x_stride), count * x_stride + 1)
                z = carray(as_f32(other + 4 * start * z_stride), count * z_stride + 1)
                # What is written may be what is read: LLVM would not vectorise that.
                _any_row(operation, tile, x, x_stride, z, z_stride, count, number)
                copy_bytes(to + 4 * start, tile.ctypes.data, 4 * count)


@jit
def _sum(at, out, a):  # type: ignore[no-untyped-def]
    """Rows are added as in PyTorch, in sums of sums of at least 16 rows each."""
    field = carray(as_i64(at), FIELDS)
    rows, width = field[SIZES + 1], field[SIZES + 2]
    power = 4
    while 1 << (4 * power + 3) < rows:
        power += 1
    sums = np.empty((4, width), np.float32)
    for j in range(field[SIZES]):
        sums[:] = 0
        for i in range(rows):
            row = carray(as_f32(a + 4 * width * (j * rows + i)), width)
            for k in range(width):
                sums[0, k] += row[k]
            done = i + 1
            if not done & ((1 << power) - 1):
                for level in range(1, 4):
                    for k in range(width):
                        sums[level, k] += sums[level - 1, k]
                        sums[level - 1, k] = 0
                    if done & (((1 << power) - 1) << (level * power)):
                        break
        for level in range(1, 4):
            for k in range(width):
                sums[0, k] += sums[level, k]
        copy_bytes(out + 4 * width * j, sums.ctypes.data, 4 * width)


@jit
def _product(at, out, a, b, sgemm):  # type: ignore[no-untyped-def]
    for j in range(load_i64(at + 8 * COUNT)):
        call(
            sgemm,
            (
                at + 8 * TRANSPOSED_A,
                at + 8 * TRANSPOSED_B,
                at + 8 * ROWS,
                at + 8 * COLUMNS,
                at + 8 * INNER,
                at + 8 * ONE,
                a + j * load_i64(at + 8 * STEPS + 8),
                at + 8 * LEADING_A,
                b + j * load_i64(at + 8 * STEPS + 16),
                at + 8 * LEADING_B,
                at + 8 * BETA,
                out + j * load_i64(at + 8 * STEPS),
                at + 8 * LEADING_OUT,
            ),
        )


@jit
def _products(at, out, a, b, sgemm_batch):  # type: ignore[no-untyped-def]
    count = load_i64(at + 8 * COUNT)
    where = np.empty(3 * count, np.int64)
    for j in range(count):
        where[j] = a + j * load_i64(at + 8 * STEPS + 8)
        where[count + j] = b + j * load_i64(at + 8 * STEPS + 16)
        where[2 * count + j] = out + j * load_i64(at + 8 * STEPS)
    call(
        sgemm_batch,
        (
            at + 8 * TRANSPOSED_A,
            at + 8 * TRANSPOSED_B,
            at + 8 * ROWS,
            at + 8 * COLUMNS,
            at + 8 * INNER,
            at + 8 * ONE,
            where.ctypes.data,
            at + 8 * LEADING_A,
            where[count:].ctypes.data,
            at + 8 * LEADING_B,
            at + 8 * BETA,
            where[2 * count :].ctypes.data,
            at + 8 * LEADING_OUT,
            at + 8 * GROUPS,
            at + 8 * COUNT,
        ),
    )


@kernel
def run(records, first, count, slots, sgemm, sgemm_batch):  # type: ignore[no-untyped-def]
    """Carry out ``count`` records of a table, from ``first`` on. The last two are the addresses of BLAS's functions."""
    tile = np.empty(TILE, np.float32)
    for i in range(first, first + count):
        at = records + 8 * i * FIELDS
        out = load_i64(slots + 8 * load_i64(at + 8 * OUT)) + load_i64(at + 8 * OUT + 8)
        a = load_i64(slots + 8 * load_i64(at + 8 * A)) + load_i64(at + 8 * A + 8)
        b = load_i64(slots + 8 * load_i64(at + 8 * B)) + load_i64(at + 8 * B + 8)
        operation = load_i64(at + 8 * OPERATION)
        if operation == PRODUCT:
            _product(at, out, a, b, sgemm)
        elif operation == PRODUCTS:
            _products(at, out, a, b, sgemm_batch)
        elif operation == SUM:
            _sum(at, out, a)
        else:
            _elementwise(at, out, a, b, tile)
