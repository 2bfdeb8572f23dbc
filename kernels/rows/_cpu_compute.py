"""Rows of computed fields on the CPU: sums, codecs, mirroring, normalising, clipping and shifts, row by row."""

# Numba needs the real signatures: no `from __future__ import annotations`.

import math

import numpy as np
from numba import carray

from gpubuf.kernels._jit import jit, kernel
from gpubuf.kernels._pointers import as_f32, as_i64, prefetch_l2
from gpubuf.kernels.philox import OFFSET, SEED
from gpubuf.kernels.philox._cpu import philox_uniform_f64
from gpubuf.kernels.rows import (
    BATCH,
    BATCH_BYTES,
    CODEC_OFFSET,
    DEVICE_ROWS,
    ELEMENTS,
    FACTOR,
    FIELD,
    HEIGHT,
    HIGH,
    LOW,
    MEAN,
    NEXT,
    PAD,
    PAIR,
    PERMUTATION,
    ROW,
    ROW_BYTES,
    ROW_STRIDE,
    SCALE,
    SIGN,
    SPLIT,
    STEPS,
    STORED,
    SUM,
    WIDTH,
)
from gpubuf.kernels.rows._cpu_copy import AHEAD, copy_row, row_address, side_address
from gpubuf.kernels.rows._cpu_numbers import (
    BOOL,
    F32,
    F64,
    I64,
    decode,
    decode_f32,
    encode,
    encode_integers,
    normalise_f32,
    read_f32,
    read_i32,
)

# Bytes that rows to compute are asked for ahead: 8 rows of 310 float32 take 1.4 times as long as to copy them, 32 rows
# 2.2 times.
_BYTES_AHEAD = 10_240

# How rows of a batch are mirrored.
NONE, ALL, DRAWN_BY_CHANCE = range(3)


@jit(forceinline=True)
def is_integer(code):  # type: ignore[no-untyped-def]
    return code <= I64 or code == BOOL


@jit(forceinline=True)
def is_wide(field):  # type: ignore[no-untyped-def]
    """Whether a field is computed in float64."""
    summed = field[ROW] == SUM and is_integer(field[STORED])
    return field[STORED] == F64 or field[BATCH] == F64 or summed


@jit(forceinline=True)
def is_moved(field):  # type: ignore[no-untyped-def]
    """Whether elements are those of rows, or the same integers of another dtype, unless they are mirrored."""
    stored, batch = field[STORED], field[BATCH]
    processed = field[MEAN] != 0 or float_of(field[LOW]) > -math.inf or float_of(field[HIGH]) < math.inf
    coded = float_of(field[SCALE]) != 1 or float_of(field[CODEC_OFFSET]) != 0
    same = stored == batch or (is_integer(stored) and is_integer(batch))
    return same and not processed and not coded and field[ROW] < SUM


@jit(forceinline=True)
def float_of(bits):  # type: ignore[no-untyped-def]
    """The float64 that an entry of ``fields`` has the bits of."""
    return np.int64(bits).view(np.float64)


@jit
def _mirrored(numbers, field, mirrored):  # type: ignore[no-untyped-def]
    sign, permutation = field[SIGN], field[PERMUTATION]
    for i in range(field[ELEMENTS]):
        mirrored[i] = numbers[read_i32(permutation, i)] * read_f32(sign, i)


@jit
def _processed(numbers, field, number_type):  # type: ignore[no-untyped-def]
    """Normalise and clip numbers in place."""
    n = field[ELEMENTS]
    mean, factor = field[MEAN], field[FACTOR]
    if mean != 0:
        for i in range(n):
            numbers[i] = (numbers[i] - number_type(read_f32(mean, i))) * number_type(read_f32(factor, i))
    low, high = float_of(field[LOW]), float_of(field[HIGH])
    if low > -math.inf or high < math.inf:
        bottom, top = number_type(low), number_type(high)
        for i in range(n):
            number = numbers[i]
            number = bottom if number < bottom else number
            numbers[i] = top if number > top else number


@jit
def _decoded(address, field, number_type, numbers):  # type: ignore[no-untyped-def]
    """The numbers that a stored row stands for."""
    n = field[ELEMENTS]
    decode(address, field[STORED], n, numbers)
    scale, offset = float_of(field[SCALE]), float_of(field[CODEC_OFFSET])
    if scale != 1 or offset != 0:
        factor, addend = number_type(scale), number_type(offset)
        for i in range(n):
            numbers[i] = numbers[i] * factor + addend


@jit
def _shifted(source, field, size, dy, dx, target):  # type: ignore[no-untyped-def]
    """Copy images of elements of ``size`` bytes, each pixel from ``(y + dy, x + dx)``."""
    height, width = field[HEIGHT], field[WIDTH]
    first = min(max(-dx, 0), width)
    end = max(min(width - dx, width), first)
    line = width * size
    for y in range(field[ELEMENTS] // width):
        top = y - y % height
        origin = source + (top + min(max(y - top + dy, 0), height - 1)) * line
        for x in range(first):
            copy_row(target + x * size, origin + min(max(x + dx, 0), width - 1) * size, size)
        copy_row(target + first * size, origin + (first + dx) * size, (end - first) * size)
        for x in range(end, width):
            copy_row(target + x * size, origin + min(max(x + dx, 0), width - 1) * size, size)
        target += line


@jit(forceinline=True)
def _address(field, row):  # type: ignore[no-untyped-def]
    return side_address(field, row) if row < 0 else row_address(field, row)


@jit(forceinline=True)
def _prefetch(address, row_bytes):  # type: ignore[no-untyped-def]
    """Ask for a row, up to a page of it. To compute takes so many instructions that the processor looks less far ahead
    than in a copy, and the hardware begins too late with what follows the first lines."""
    prefetch_l2(address)
    for i in range(64, min(row_bytes, 4096), 64):
        prefetch_l2(address + i)
    # a row that starts in the middle of a line ends in one more
    prefetch_l2(address + min(row_bytes, 4096) - 1)


@jit(forceinline=True)
def _rows_ahead(row_bytes):  # type: ignore[no-untyped-def]
    """Rows between a prefetch and its use: of large ones few, for the processor waits if it has asked for too much."""
    return min(AHEAD, max(_BYTES_AHEAD // max(row_bytes, 1), 4))


@jit
def _convert(field, rows, n, capacity, target, numbers):  # type: ignore[no-untyped-def]
    """Rows of float32 to ``target``, of fields that are neither sums nor mirrored nor shifted."""
    # What is read once here would be read for every row: the compiler can't know that no row lies in the field.
    elements, stored, row_bytes, width = field[ELEMENTS], field[STORED], field[ROW_BYTES], field[BATCH_BYTES]
    mean, factor = field[MEAN], field[FACTOR]
    scale, offset = np.float32(float_of(field[SCALE])), np.float32(float_of(field[CODEC_OFFSET]))
    low, high = np.float32(float_of(field[LOW])), np.float32(float_of(field[HIGH]))
    coded = float_of(field[SCALE]) != 1 or float_of(field[CODEC_OFFSET]) != 0
    clipped = low > -math.inf or high < math.inf
    base, stride, elsewhere = field[DEVICE_ROWS], field[ROW_STRIDE], field[SPLIT] < capacity or field[ROW] == NEXT
    scratch, ahead = np.int64(numbers.ctypes.data), _rows_ahead(row_bytes)
    for i in range(n):
        row, coming = rows[i], rows[min(i + ahead, n - 1)]
        source, out = base + row * stride, target + i * width
        if elsewhere:
            source = _address(field, row)
            _prefetch(_address(field, coming), row_bytes)
        else:
            _prefetch(base + coming * stride, row_bytes)
        if stored != F32 or coded:
            origin, source = source, scratch if mean != 0 else out
            if not decode_f32(origin, stored, elements, source):
                decode(origin, stored, elements, carray(as_f32(source), elements))
            if coded:
                made = carray(as_f32(source), elements)
                for e in range(elements):
                    made[e] = made[e] * scale + offset
        if mean != 0:
            normalise_f32(source, mean, factor, low, high, elements, out)
        elif source != out:
            copy_row(out, source, width)
        if clipped and mean == 0:
            made = carray(as_f32(out), elements)
            for e in range(elements):
                number = low if made[e] < low else made[e]
                made[e] = high if number > high else number


@jit
def _compute(field, rows, length, n, how, number_type, target, numbers):  # type: ignore[no-untyped-def]
    """Rows of a field to ``target``, in numbers of a type; see :func:`compute_narrow`."""
    capacity, envs, gamma, mirroring, noise, ahead, draws = how
    seed, offset = 0, 0
    if noise != 0:
        state = carray(as_i64(noise), 3)
        seed, offset = state[SEED], state[OFFSET] + ahead
    elements, stored, batch, row_bytes = field[ELEMENTS], field[STORED], field[BATCH], field[BATCH_BYTES]
    kind, pad = field[ROW], field[PAD]
    moved = is_moved(field)
    mirroring = mirroring if field[PERMUTATION] != 0 else NONE
    mirrored_numbers = np.empty_like(numbers) if field[PERMUTATION] != 0 else numbers
    sums = np.empty(elements if kind == SUM else 0, np.float64)
    integers = np.empty(elements if moved and stored != batch else 0, np.int64)
    unshifted = np.empty(row_bytes if pad != 0 else 0, np.uint8)
    rows_ahead = _rows_ahead(field[ROW_BYTES])
    for i in range(n):
        out = target + i * row_bytes
        at = np.int64(unshifted.ctypes.data) if pad != 0 else out
        draw = offset + i * draws
        mirrored = mirroring == ALL or (mirroring == DRAWN_BY_CHANCE and philox_uniform_f64(seed, draw) < 0.5)
        row = rows[i]
        address = 0
        if kind != STEPS:
            coming = rows[min(i + rows_ahead, n - 1)]
            _prefetch(_address(field, coming), field[ROW_BYTES])
            address = _address(field, row)
        if not moved or mirrored:
            discount = 1.0
            for step in range(length[i] if kind == SUM else 1):
                if kind == STEPS:
                    numbers[:] = length[i]
                else:
                    _decoded(address, field, number_type, numbers)
                if kind == SUM:
                    for e in range(elements):
                        sums[e] = numbers[e] if step == 0 else sums[e] + discount * numbers[e]
                    discount *= gamma
                    row = row + envs if row + envs < capacity else row + envs - capacity
                    address = row_address(field, row)
            if kind == SUM:
                for e in range(elements):
                    numbers[e] = sums[e]
            if mirrored:
                _mirrored(numbers, field, mirrored_numbers)
            result = mirrored_numbers if mirrored else numbers
            _processed(result, field, number_type)
            encode(result, elements, batch, at)
        elif stored != batch:
            decode(address, stored, elements, integers)
            encode_integers(integers, elements, batch, at)
        elif pad != 0:
            at = address
        else:
            copy_row(at, address, row_bytes)
        if pad != 0:
            pair, shifts = draw + 1 + 2 * field[PAIR], 2 * pad + 1
            dy = int(philox_uniform_f64(seed, pair) * shifts) - pad
            dx = int(philox_uniform_f64(seed, pair + 1) * shifts) - pad
            _shifted(at, field, row_bytes // elements, dy, dx, out)
    return n


# Two kernels, of which most storages need one at most.
@kernel(no_cfunc_wrapper=False)  # type: ignore[untyped-decorator]
def compute_narrow(  # type: ignore[no-untyped-def]
    field_address, rows_address, length_address, n, capacity, envs, gamma: float, mirroring, noise, ahead, draws, target
):
    """Compute ``n`` rows of a field, in float32 or between integers.

    ``rows`` are those that the field reads, or places of next observations; ``length`` has the steps of their windows.
    The random numbers of the first row are ``ahead`` of the offset of the noise, whose address is 0 if there is none.
    """
    field = carray(as_i64(field_address), FIELD)
    rows, length = carray(as_i64(rows_address), n), carray(as_i64(length_address), n)
    numbers = np.empty(field[ELEMENTS], np.float32)
    mirrored = mirroring != NONE and field[PERMUTATION] != 0
    if field[BATCH] == F32 and field[ROW] < SUM and field[PAD] == 0 and not mirrored:
        _convert(field, rows, n, capacity, target, numbers)
        return n
    how = (capacity, envs, gamma, mirroring, noise, ahead, draws)
    return _compute(field, rows, length, n, how, np.float32, target, numbers)


@kernel(no_cfunc_wrapper=False)  # type: ignore[untyped-decorator]
def compute_wide(  # type: ignore[no-untyped-def]
    field_address, rows_address, length_address, n, capacity, envs, gamma: float, mirroring, noise, ahead, draws, target
):
    """As :func:`compute_narrow`, in float64."""
    field = carray(as_i64(field_address), FIELD)
    rows, length = carray(as_i64(rows_address), n), carray(as_i64(length_address), n)
    how = (capacity, envs, gamma, mirroring, noise, ahead, draws)
    return _compute(field, rows, length, n, how, np.float64, target, np.empty(field[ELEMENTS], np.float64))
