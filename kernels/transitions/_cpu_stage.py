"""Rows to write, as they will be stored, on the CPU: those that must be converted are, before anything is written."""

# Numba needs the real signatures: no `from __future__ import annotations`.

import numpy as np
from numba import carray

from gpubuf.kernels._jit import OPTIONS, jit
from gpubuf.kernels._pointers import as_i64
from gpubuf.kernels.rows._cpu_copy import source_stride
from gpubuf.kernels.transitions import (
    ELEMENTS,
    FIELD,
    NEXT,
    OFFSET,
    ROW,
    ROW_BYTES,
    SCALE,
    STEPS,
    STORED,
    WRITES,
    WRITTEN,
    WRITTEN_AS_STORED,
)
from gpubuf.kernels.transitions._cpu_compute import float_of, is_integer
from gpubuf.kernels.transitions._cpu_convert import (
    BF16,
    BOOL,
    F16,
    F32,
    F64,
    decode,
    encode,
    encode_f32,
    encode_flags,
    encode_integers,
)

# The fields that an operation takes from its sources.
EVERY, NOT_NEXT, NEXT_ALONE = range(3)

# Results of the kernels: all is well, or a :func:`problem`.
DONE = -1
MISFIT, UNFIT, UNLINKED, NO_ROOM, INVALID, NEEDS_STAGING = range(6)

_SIZES = (1, 1, 2, 4, 8, 2, 2, 4, 8, 1)


@jit(forceinline=True)
def problem(kind, place):  # type: ignore[no-untyped-def]
    """The result that says which problem there is, and with which field or row."""
    return kind + 8 * place


@jit(forceinline=True)
def is_taken(field, which):  # type: ignore[no-untyped-def]
    """Whether an operation writes a field."""
    if field[WRITES] == 0 or field[ROW] == STEPS:
        return False
    return which == EVERY or (field[ROW] == NEXT) == (which == NEXT_ALONE)


@jit
def _encode_rows(field, source, stride, n, numbers, number_type, target):  # type: ignore[no-untyped-def]
    elements, written, stored = field[ELEMENTS], field[WRITTEN], field[STORED]
    scale, offset = float_of(field[SCALE]), float_of(field[OFFSET])
    divisor, subtrahend = number_type(scale), number_type(offset)
    coded, misfits = scale != 1 or offset != 0, 0
    if written == F32 and not coded and (stored in (F16, BF16)):
        for i in range(n):
            encode_f32(source + i * stride, elements, stored, target + i * field[ROW_BYTES])
        return 0
    for i in range(n):
        decode(source + i * stride, written, elements, numbers)
        if coded:
            for e in range(elements):
                numbers[e] = (numbers[e] - subtrahend) / divisor
        misfits += encode(numbers, elements, stored, target + i * field[ROW_BYTES])
    return misfits


@jit
def _encode_field(field, source, stride, n, target):  # type: ignore[no-untyped-def]
    """Convert ``n`` rows. Returns how many numbers don't fit."""
    elements, written, stored = field[ELEMENTS], field[WRITTEN], field[STORED]
    coded = float_of(field[SCALE]) != 1 or float_of(field[OFFSET]) != 0
    # Flags of many environments: a loop that goes through no numbers of a row.
    if stored == BOOL and elements == 1 and not coded and encode_flags(source, stride, written, n, target):
        return 0
    if not coded and is_integer(written) and is_integer(stored):
        integers, misfits = np.empty(elements, np.int64), 0
        for i in range(n):
            decode(source + i * stride, written, elements, integers)
            misfits += encode_integers(integers, elements, stored, target + i * field[ROW_BYTES])
        return misfits
    if written == F64 or stored == F64:
        return _encode_rows(field, source, stride, n, np.empty(elements, np.float64), np.float64, target)
    return _encode_rows(field, source, stride, n, np.empty(elements, np.float32), np.float32, target)


@jit(forceinline=True)
def find_sources(fields, n_fields, sources, which, n, skipped, staged):  # type: ignore[no-untyped-def]
    """Set address and stride of the rows of every field that is taken, from row ``skipped`` of ``n`` on.

    Returns DONE, or a problem: a source has rows of another size, or so many bytes of rows must be converted.
    """
    needed = 0
    for f in range(n_fields):
        if is_taken(fields[f], which):
            field = fields[f]
            width = field[ROW_BYTES] if field[WRITTEN_AS_STORED] else field[ELEMENTS] * _SIZES[field[WRITTEN]]
            if sources[3 * f + 2] != n * width:
                return problem(MISFIT, f)
            stride = source_stride(sources, f, width)
            staged[f, 0], staged[f, 1] = sources[3 * f] + skipped * stride, stride
            if not field[WRITTEN_AS_STORED]:
                needed += (n - skipped) * field[ROW_BYTES]
    return problem(NEEDS_STAGING, needed) if needed else DONE


@jit("int64(int64, int64, int64, int64, int64, int64, int64, int64)", **OPTIONS)
def stage(fields_address, n_fields, sources_address, which, n, skipped, scratch, staged_address):  # type: ignore[no-untyped-def]
    """As :func:`find_sources`, where rows must be converted: into ``scratch``, which is large enough.

    Returns DONE, or a problem: a number does not fit.
    """
    fields = carray(as_i64(fields_address), (n_fields, FIELD))
    sources = carray(as_i64(sources_address), 3 * n_fields)
    staged = carray(as_i64(staged_address), (n_fields, 2))
    find_sources(fields, n_fields, sources, which, n, skipped, staged)
    for f in range(n_fields):
        field = fields[f]
        if is_taken(field, which) and not field[WRITTEN_AS_STORED]:
            if _encode_field(field, staged[f, 0], staged[f, 1], n - skipped, scratch) > 0:
                return problem(UNFIT, f)
            staged[f, 0], staged[f, 1] = scratch, field[ROW_BYTES]
            scratch += (n - skipped) * field[ROW_BYTES]
    return DONE
