"""Rows of computed fields on the CPU: sums, codecs, mirroring, normalising, clipping and shifts, row by row."""

# Numba needs the real signatures: no `from __future__ import annotations`.

import math

import numpy as np
from numba import carray

from gpubuf.kernels._jit import OPTIONS, jit
from gpubuf.kernels._pointers import as_i64
from gpubuf.kernels.philox import OFFSET as RANDOM_OFFSET
from gpubuf.kernels.philox import SEED
from gpubuf.kernels.philox._cpu import philox_uniform_f64
from gpubuf.kernels.rows._cpu_table import copy_row, row_address
from gpubuf.kernels.transitions import (
    BATCH,
    BATCH_BYTES,
    ELEMENTS,
    FACTOR,
    FIELD,
    HEIGHT,
    HIGH,
    LOW,
    MEAN,
    NEXT,
    OFFSET,
    PAD,
    PAIR,
    PERMUTATION,
    ROW,
    SCALE,
    SIGN,
    STEPS,
    STORED,
    SUM,
    WIDTH,
)
from gpubuf.kernels.transitions._cpu_convert import (
    BOOL,
    F64,
    I64,
    decode,
    encode,
    encode_integers,
    read_f32,
    read_i32,
)
from gpubuf.kernels.transitions._cpu_window import side_address

# How rows of a batch are mirrored.
NONE, ALL, DRAWN_BY_CHANCE = range(3)


@jit(forceinline=True)
def is_integer(code):  # type: ignore[no-untyped-def]
    return code <= I64 or code == BOOL


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
    scale, offset = float_of(field[SCALE]), float_of(field[OFFSET])
    if scale != 1 or offset != 0:
        factor, addend = number_type(scale), number_type(offset)
        for i in range(n):
            numbers[i] = numbers[i] * factor + addend


@jit
def _summed(field, row, length, capacity, envs, gamma, number_type, numbers, sums):  # type: ignore[no-untyped-def]
    """The discounted sums over a window."""
    n = field[ELEMENTS]
    _decoded(row_address(field, row), field, number_type, numbers)
    for i in range(n):
        sums[i] = numbers[i]
    discount = 1.0
    for _ in range(length - 1):
        discount *= gamma
        row = row + envs if row + envs < capacity else row + envs - capacity
        _decoded(row_address(field, row), field, number_type, numbers)
        for i in range(n):
            sums[i] += discount * numbers[i]
    for i in range(n):
        numbers[i] = sums[i]


@jit
def _shifted(source, field, size, dy, dx, target):  # type: ignore[no-untyped-def]
    """Copy images of elements of ``size`` bytes, each pixel from ``(y + dy, x + dx)``."""
    height, width = field[HEIGHT], field[WIDTH]
    first = min(max(-dx, 0), width)
    behind = max(min(width - dx, width), first)
    line = width * size
    for y in range(field[ELEMENTS] // width):
        top = y - y % height
        origin = source + (top + min(max(y - top + dy, 0), height - 1)) * line
        for x in range(first):
            copy_row(target + x * size, origin + min(max(x + dx, 0), width - 1) * size, size)
        copy_row(target + first * size, origin + (first + dx) * size, (behind - first) * size)
        for x in range(behind, width):
            copy_row(target + x * size, origin + min(max(x + dx, 0), width - 1) * size, size)
        target += line


@jit
def _compute(field, rows, length, n, how, number_type, target, numbers):  # type: ignore[no-untyped-def]
    """Rows of a field to ``target``, in numbers of a type; see :func:`compute_rows`."""
    capacity, envs, gamma, mirroring, seed, offset, draws, moved = how
    elements, stored, batch, row_bytes = field[ELEMENTS], field[STORED], field[BATCH], field[BATCH_BYTES]
    kind, pad = field[ROW], field[PAD]
    other = np.empty(elements if field[PERMUTATION] != 0 else 0, numbers.dtype)
    sums = np.empty(elements if kind == SUM else 0, np.float64)
    integers = np.empty(elements if stored != batch and is_integer(stored) and is_integer(batch) else 0, np.int64)
    unshifted = np.empty(row_bytes if pad != 0 else 0, np.uint8)
    for i in range(n):
        out = target + i * row_bytes
        at = unshifted.ctypes.data if pad != 0 else out
        first_draw = offset + i * draws
        mirrored = mirroring == ALL or (mirroring == DRAWN_BY_CHANCE and philox_uniform_f64(seed, first_draw) < 0.5)
        if kind == STEPS:
            for e in range(elements):
                numbers[e] = length[i]
        elif kind == SUM:
            _summed(field, rows[i], length[i], capacity, envs, gamma, number_type, numbers, sums)
        else:
            address = side_address(field, rows[i]) if kind == NEXT and rows[i] < 0 else row_address(field, rows[i])
            if moved and not mirrored:
                if stored == batch:
                    at = address if pad != 0 else at
                    if pad == 0:
                        copy_row(at, address, row_bytes)
                else:
                    decode(address, stored, elements, integers)
                    encode_integers(integers, elements, batch, at)
            else:
                _decoded(address, field, number_type, numbers)
        if kind >= SUM or mirrored or not moved:
            if mirrored:
                _mirrored(numbers, field, other)
                _processed(other, field, number_type)
                encode(other, elements, batch, at)
            else:
                _processed(numbers, field, number_type)
                encode(numbers, elements, batch, at)
        if pad != 0:
            pair, shifts = first_draw + 1 + 2 * field[PAIR], 2 * pad + 1
            dy = int(philox_uniform_f64(seed, pair) * shifts) - pad
            dx = int(philox_uniform_f64(seed, pair + 1) * shifts) - pad
            _shifted(at, field, row_bytes // elements, dy, dx, out)
    # The address of this memory was used, not the array: it lives on to here.
    return unshifted.size


@jit(
    "int64(int64, int64, int64, int64, int64, int64, float64, int64, int64, int64, int64, int64)",
    **OPTIONS,
)
def compute_rows(  # type: ignore[no-untyped-def]
    field_address,
    rows_address,
    length_address,
    n,
    capacity,
    envs,
    gamma,
    mirroring,
    noise_address,
    ahead,
    draws,
    target,
):
    """Compute ``n`` rows of a field.

    ``rows`` are those that the field reads, or places of next observations; ``length`` has the steps of their windows.
    The random numbers of the first row are ``ahead`` of the offset of the noise.
    """
    field = carray(as_i64(field_address), FIELD)
    rows, length = carray(as_i64(rows_address), n), carray(as_i64(length_address), n)
    seed, offset = 0, 0
    if noise_address != 0:
        noise = carray(as_i64(noise_address), 3)
        seed, offset = noise[SEED], noise[RANDOM_OFFSET] + ahead
    stored, batch = field[STORED], field[BATCH]
    integers = is_integer(stored) and is_integer(batch)
    processed = field[MEAN] != 0 or float_of(field[LOW]) > -math.inf or float_of(field[HIGH]) < math.inf
    coded = float_of(field[SCALE]) != 1 or float_of(field[OFFSET]) != 0
    moved = not processed and not coded and (stored == batch or integers) and field[ROW] < SUM
    mirroring = mirroring if field[PERMUTATION] != 0 else NONE
    elements = field[ELEMENTS]
    how = (capacity, envs, gamma, mirroring, seed, offset, draws, moved)
    if stored == F64 or batch == F64 or (field[ROW] == SUM and is_integer(stored)):
        return _compute(field, rows, length, n, how, np.float64, target, np.empty(elements, np.float64))
    return _compute(field, rows, length, n, how, np.float32, target, np.empty(elements, np.float32))
