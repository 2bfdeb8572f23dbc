"""One loop over the records of :mod:`gpubuf.kernels.tape`."""

# Numba needs the real signatures: no `from __future__ import annotations`.

import numpy as np
from numba import carray

from gpubuf.kernels._jit import jit, kernel
from gpubuf.kernels._primitives import as_f32, as_i64, call, copy_bytes, float_of_bits, load_i64, store_i64
from gpubuf.kernels.tape import (
    A_STRIDES,
    ADD,
    ADD_NUMBER,
    ADD_RELU,
    ADDED,
    B_STRIDES,
    BETA,
    COLUMNS,
    COPY,
    COUNT,
    FIELDS,
    FILL,
    FUSED,
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
    PARTS,
    PRODUCT,
    PRODUCTS,
    RELU,
    RELU_GRADIENT,
    ROWS,
    SHORT_PRODUCT,
    SIZES,
    STEPS,
    STRIDES,
    SUBTRACT,
    SUM,
    TILE,
    TILED_PRODUCT,
    TRANSPOSED_A,
    TRANSPOSED_B,
    A,
    B,
)
from gpubuf.kernels.tape._cpu_product import tiled_product


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
    if operation == ADD_RELU:
        return zero if a + b < zero else a + b
    return a * number


@jit
def _dense(operation, out, a, b, n, number):  # type: ignore[no-untyped-def]
    """A row whose elements are side by side everywhere, and not written where they are read."""
    y, x, z = carray(as_f32(out), n), carray(as_f32(a), n), carray(as_f32(b), n)
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
    elif operation == ADD_RELU:
        for j in range(n):
            y[j] = _one(ADD_RELU, y[j], z[j], number)
    else:
        for j in range(n):
            y[j] = x[j] * number


@jit(forceinline=True)
def _strided(operation, out, a, a_stride, b, b_stride, n, number):  # type: ignore[no-untyped-def]
    y = carray(as_f32(out), n)
    x, z = carray(as_f32(a), n * a_stride + 1), carray(as_f32(b), n * b_stride + 1)
    for j in range(n):
        y[j] = _one(operation, x[j * a_stride], z[j * b_stride], number)


@jit
def _elementwise(at, out, a, b, tile):  # type: ignore[no-untyped-def]
    field = carray(as_i64(at), FIELDS)
    operation, n, number = field[OPERATION], field[SIZES + 2], np.float32(float_of_bits(field[NUMBER]))
    a_stride, b_stride = field[A_STRIDES + 2], field[B_STRIDES + 2]
    dense = a_stride == 1 and b_stride == 1
    # One element for a whole row is a number.
    by_number = a_stride == 1 and b_stride == 0 and operation in (ADD, MULTIPLY)
    with_number = ADD_NUMBER if operation == ADD else MULTIPLY_BY_NUMBER
    for j in range(field[SIZES]):
        for k in range(field[SIZES + 1]):
            to = out + 4 * (j * field[OUT_STRIDES] + k * field[OUT_STRIDES + 1])
            x = a + 4 * (j * field[A_STRIDES] + k * field[A_STRIDES + 1])
            z = b + 4 * (j * field[B_STRIDES] + k * field[B_STRIDES + 1])
            # LLVM's vectors need memory that nothing else in the loop refers to: a tile, where that is not so.
            aside = to in (x, z) and operation != ADD_RELU
            start = 0
            while start < n:
                count = min(TILE, n - start) if aside else n
                here, x_here, z_here = to + 4 * start, x + 4 * start * a_stride, z + 4 * start * b_stride
                target = tile if aside else here
                if dense:
                    _dense(operation, target, x_here, z_here, count, number)
                elif by_number:
                    _dense(with_number, target, x_here, x_here, count, carray(as_f32(z), 1)[0])
                else:
                    _strided(operation, target, x_here, a_stride, z_here, b_stride, count, number)
                if aside:
                    copy_bytes(here, tile, 4 * count)
                start += count


@jit
def _add_row(total, row, n):  # type: ignore[no-untyped-def]
    y, x = carray(as_f32(total), n), carray(as_f32(row), n)
    for k in range(n):
        y[k] += x[k]


@jit
def _sum(at, out, a, sums):  # type: ignore[no-untyped-def]
    """Rows are added as in PyTorch, in sums of sums of at least 16 rows each; ``sums`` is room for four of them."""
    field = carray(as_i64(at), FIELDS)
    rows, width, parts = field[SIZES + 1], field[SIZES + 2], field[PARTS]
    # A row of every part is one row here.
    many, wide = rows // parts, parts * width
    power = 4
    while 1 << (4 * power + 3) < many:
        power += 1
    mask = (1 << power) - 1
    for j in range(field[SIZES]):
        first = a + 4 * width * j * rows
        _dense(FILL, sums, sums, sums, 4 * wide, np.float32(0))
        for i in range(1, many + 1):
            _add_row(sums, first + 4 * wide * (i - 1), wide)
            level = 0
            while level < 3 and not i & (mask << (level * power)):
                lower = sums + 4 * wide * level
                _add_row(lower + 4 * wide, lower, wide)
                _dense(FILL, lower, lower, lower, wide, np.float32(0))
                level += 1
        for level in range(1, 4):
            _add_row(sums, sums + 4 * wide * level, wide)
        for i in range(many * parts, rows):
            _add_row(sums, first + 4 * width * i, width)
        for part in range(1, parts):
            _add_row(sums, sums + 4 * width * part, width)
        copy_bytes(out + 4 * width * j, sums, 4 * width)


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
def _products(at, out, a, b, where, sgemm_batch):  # type: ignore[no-untyped-def]
    """``where`` is room for three addresses for each."""
    count = load_i64(at + 8 * COUNT)
    for j in range(count):
        store_i64(where + 8 * j, a + j * load_i64(at + 8 * STEPS + 8))
        store_i64(where + 8 * (count + j), b + j * load_i64(at + 8 * STEPS + 16))
        store_i64(where + 8 * (2 * count + j), out + j * load_i64(at + 8 * STEPS))
    call(
        sgemm_batch,
        (
            at + 8 * TRANSPOSED_A,
            at + 8 * TRANSPOSED_B,
            at + 8 * ROWS,
            at + 8 * COLUMNS,
            at + 8 * INNER,
            at + 8 * ONE,
            where,
            at + 8 * LEADING_A,
            where + 8 * count,
            at + 8 * LEADING_B,
            at + 8 * BETA,
            where + 16 * count,
            at + 8 * LEADING_OUT,
            at + 8 * GROUPS,
            at + 8 * COUNT,
        ),
    )


def _add_four(total, a, right, b, down, n):  # type: ignore[no-untyped-def]
    """Add four rows of B, each times an element of A, in turn."""
    y, s = carray(as_f32(total), n), carray(as_f32(a), 3 * right + 1)
    s0, s1, s2, s3 = s[0], s[right], s[2 * right], s[3 * right]
    x0, x1 = carray(as_f32(b), n), carray(as_f32(b + down), n)
    x2, x3 = carray(as_f32(b + 2 * down), n), carray(as_f32(b + 3 * down), n)
    for j in range(n):
        y[j] = (((y[j] + s0 * x0[j]) + s1 * x1[j]) + s2 * x2[j]) + s3 * x3[j]


def _add_one(total, a, right, b, down, n):  # type: ignore[no-untyped-def]
    """Add a row of B, times an element of A."""
    y, s, x = carray(as_f32(total), n), carray(as_f32(a), 1)[0], carray(as_f32(b), n)
    for j in range(n):
        y[j] = y[j] + s * x[j]


_four, _rest = jit(_add_four), jit(_add_one)
_fused_four, _fused_rest = jit(fastmath={"contract"})(_add_four), jit(fastmath={"contract"})(_add_one)


@jit
def _short_product(at, out, a, b, room):  # type: ignore[no-untyped-def]
    """A row of OUT at a time, in ``room`` where its elements are not side by side."""
    field = carray(as_i64(at), FIELDS)
    inner, columns, right, down = field[INNER], field[COLUMNS], field[STRIDES + 1], 4 * field[STRIDES + 2]
    apart = field[STRIDES + 4]
    for j in range(field[COUNT]):
        rows_of_b = b + j * field[STEPS + 2]
        for i in range(field[ROWS]):
            to = out + j * field[STEPS] + 4 * i * field[STRIDES + 3]
            x = a + j * field[STEPS + 1] + 4 * i * field[STRIDES]
            total = to if apart == 1 else room
            _dense(FILL, total, total, total, columns, np.float32(0))
            fours = inner // 4 * 4
            for k in range(0, fours, 4):
                at_k = total, x + 4 * k * right, right, rows_of_b + k * down, down, columns
                if field[FUSED]:
                    _fused_four(*at_k)
                else:
                    _four(*at_k)
            for k in range(fours, inner):
                at_k = total, x + 4 * k * right, right, rows_of_b + k * down, down, columns
                if field[FUSED]:
                    _fused_rest(*at_k)
                else:
                    _rest(*at_k)
            if apart != 1:
                y, row = carray(as_f32(to), columns * apart), carray(as_f32(room), columns)
                for k in range(columns):
                    y[k * apart] = row[k]


@kernel
def run(records, first, count, slots, room, sgemm, sgemm_batch):  # type: ignore[no-untyped-def]
    """Carry out ``count`` records of a table, from ``first`` on.

    ``room`` is memory beside what the records say, as ``room_for`` of ``_records.py`` gives it. The last two are the
    addresses of BLAS's functions.
    """
    for i in range(first, first + count):
        at = records + 8 * i * FIELDS
        out = load_i64(slots + 8 * load_i64(at + 8 * OUT)) + load_i64(at + 8 * OUT + 8)
        a = load_i64(slots + 8 * load_i64(at + 8 * A)) + load_i64(at + 8 * A + 8)
        b = load_i64(slots + 8 * load_i64(at + 8 * B)) + load_i64(at + 8 * B + 8)
        operation = load_i64(at + 8 * OPERATION)
        if operation == PRODUCT:
            _product(at, out, a, b, sgemm)
        elif operation == PRODUCTS:
            _products(at, out, a, b, room, sgemm_batch)
        elif operation == SHORT_PRODUCT:
            _short_product(at, out, a, b, room)
        elif operation == TILED_PRODUCT:
            added = load_i64(slots + 8 * load_i64(at + 8 * ADDED)) + load_i64(at + 8 * ADDED + 8)
            tiled_product(at, out, a, b, added, room)
        elif operation == SUM:
            _sum(at, out, a, room)
        else:
            _elementwise(at, out, a, b, room)
