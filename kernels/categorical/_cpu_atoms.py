"""Parts of the categorical operations on the CPU: a row of atoms in a buffer that stays in the first cache.

A buffer has float64 numbers in blocks of ``LANES``, and what is behind the last atom counts for nothing. Reductions
keep one number for each place in a block: the compiler vectorises them, and their order depends on nothing else.
"""

# Numba needs the real signatures: no `from __future__ import annotations`.

import math

from numba import carray

from gpubuf.kernels._elementary import exp_below_700, is_positive_normal, log_of_normal
from gpubuf.kernels._jit import jit
from gpubuf.kernels._pointers import as_f32, as_f64

#: Numbers in a block.
LANES = 16


@jit(forceinline=True)
def padded(atoms):  # type: ignore[no-untyped-def]
    """``atoms``, rounded up to whole blocks."""
    return (atoms + LANES - 1) // LANES * LANES


@jit(forceinline=True)
def load_row(address, wide, start, atoms, buffer, behind):  # type: ignore[no-untyped-def]
    """Copy the ``atoms`` numbers from ``start`` on, and put ``behind`` behind them."""
    # Two loops, so that each is vectorised.
    if wide:
        source = carray(as_f64(address), start + atoms)
        for j in range(atoms):
            buffer[j] = source[start + j]
    else:
        narrow = carray(as_f32(address), start + atoms)
        for j in range(atoms):
            buffer[j] = narrow[start + j]
    for j in range(atoms, len(buffer)):
        buffer[j] = behind


@jit(forceinline=True)
def store_row(address, wide, start, atoms, buffer):  # type: ignore[no-untyped-def]
    """Write the first ``atoms`` numbers of ``buffer`` from ``start`` on."""
    if wide:
        target = carray(as_f64(address), start + atoms)
        for j in range(atoms):
            target[start + j] = buffer[j]
    else:
        narrow = carray(as_f32(address), start + atoms)
        for j in range(atoms):
            narrow[start + j] = buffer[j]


@jit(forceinline=True)
def fill_row(address, wide, start, atoms, value):  # type: ignore[no-untyped-def]
    """Write ``value`` to the ``atoms`` places from ``start`` on."""
    if wide:
        target = carray(as_f64(address), start + atoms)
        for j in range(atoms):
            target[start + j] = value
    else:
        narrow = carray(as_f32(address), start + atoms)
        for j in range(atoms):
            narrow[start + j] = value


@jit(forceinline=True)
def _added(lanes):  # type: ignore[no-untyped-def]
    total = 0.0
    for lane in range(LANES):
        total += lanes[lane]
    return total


@jit(forceinline=True)
def largest(buffer, lanes):  # type: ignore[no-untyped-def]
    """The largest number; where one is NaN, either NaN or the largest of the others."""
    for lane in range(LANES):
        lanes[lane] = buffer[lane]
    for start in range(LANES, len(buffer), LANES):
        for lane in range(LANES):
            value = buffer[start + lane]
            lanes[lane] = value if value > lanes[lane] else lanes[lane]
    most = lanes[0]
    for lane in range(1, LANES):
        most = lanes[lane] if lanes[lane] > most else most
    return most


@jit(forceinline=True)
def total_of(buffer, lanes):  # type: ignore[no-untyped-def]
    """The sum of all numbers."""
    for lane in range(LANES):
        lanes[lane] = buffer[lane]
    for start in range(LANES, len(buffer), LANES):
        for lane in range(LANES):
            lanes[lane] += buffer[start + lane]
    return _added(lanes)


@jit(forceinline=True)
def moment_of(buffer, lanes):  # type: ignore[no-untyped-def]
    """The sum of all numbers times their places."""
    for lane in range(LANES):
        lanes[lane] = 0.0
    for start in range(0, len(buffer), LANES):
        for lane in range(LANES):
            lanes[lane] += buffer[start + lane] * (start + lane)
    return _added(lanes)


@jit(forceinline=True)
def exponentials(buffer, top, out):  # type: ignore[no-untyped-def]
    """``out = exp(buffer - top)``; ``top`` is the largest of them. NaN stays, and so does a row without finite top."""
    for j in range(len(buffer)):
        out[j] = exp_below_700(buffer[j] - top)


@jit(forceinline=True)
def entropy_of(mass, lanes, scratch):  # type: ignore[no-untyped-def]
    """``-sum_j mass_j log(mass_j)``. What is not positive adds nothing."""
    for j in range(len(mass)):
        # Numbers below the smallest normal one add less than 1e-304.
        scratch[j] = -mass[j] * log_of_normal(mass[j]) if is_positive_normal(mass[j]) else 0.0
    return total_of(scratch, lanes)


@jit(forceinline=True)
def cross_entropy(logits, top, norm, mass, lanes):  # type: ignore[no-untyped-def]
    """``-sum_j mass_j (logits_j - top - log(norm))``; an atom without mass adds nothing, whatever its logit."""
    shift = top + math.log(norm)
    for lane in range(LANES):
        lanes[lane] = 0.0
    for start in range(0, len(mass), LANES):
        for lane in range(LANES):
            m = mass[start + lane]
            term = m * (shift - logits[start + lane])
            lanes[lane] += term if m != 0 else 0.0
    return _added(lanes)


@jit(forceinline=True)
def project(mass, atoms, first, slope, low, high, below, out):  # type: ignore[no-untyped-def]
    """Share the mass of atom j, at the place ``first + slope * j`` in units of atoms, among the two atoms around.

    ``out`` gets the result. ``low`` and ``high`` are buffers of as many numbers, and ``below`` of integers.
    """
    last = atoms - 1.0
    for j in range(atoms):
        place = first + slope * j
        place = place if place > 0 else 0.0
        place = place if place < last else last
        floor = int(place)
        upper = mass[j] * (place - floor)
        below[j] = floor
        high[j] = upper
        low[j] = mass[j] - upper
    for k in range(len(out)):
        out[k] = 0.0
    # In the order of the atoms. The last atom has no atom behind it, and nothing goes there: its place is whole.
    for j in range(atoms):
        floor = below[j]
        out[floor] += low[j]
        out[floor + 1] += high[j]
