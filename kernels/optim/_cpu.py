"""The optimiser's step on the CPU: one compiled call for a bucket.

Elements are taken in blocks that stay in the first-level cache: a target is averaged while its parameter is still
there. The loops have neither calls nor branches, so that LLVM vectorises them. The step is written once, and takes
functions that read and write blocks for each dtype of parameters. A block of bfloat16 numbers is worked on in a float32
copy. A block of another dtype is worked on in its place, and its scratch memory is not used.
"""

# Numba needs the real signatures: no `from __future__ import annotations`.

import math
from collections.abc import Sequence

import numpy as np
import torch
from numba import carray
from torch import Tensor

from gpubuf.kernels._jit import jit, kernel
from gpubuf.kernels._operations import dense
from gpubuf.kernels._primitives import as_f32, as_f64, as_i64, as_u16, bits_of_f32, f32_of_bits, float_of_bits
from gpubuf.kernels._threads import call_in_parts
from gpubuf.kernels.optim import (
    BETA1,
    BETA2,
    ENTRY,
    EPS,
    EXP_AVG,
    EXP_AVG_SQ,
    GROUP,
    HYPER,
    INNER,
    LENGTH,
    LR,
    MAX_NORM,
    NORM,
    NUMEL,
    PARAM,
    SMALLEST_NORM,
    TARGET,
    TAU,
    WEIGHT_DECAY,
)
from gpubuf.kernels.optim._check import check_step, gradient_codes


@jit(forceinline=True)
def view_f32(address, n):  # type: ignore[no-untyped-def]
    """float32 ``[n]`` at an address."""
    return carray(as_f32(address), n)


@jit(forceinline=True)
def view_f64(address, n):  # type: ignore[no-untyped-def]
    """float64 ``[n]`` at an address."""
    return carray(as_f64(address), n)


@jit(forceinline=True)
def view_bf16(address, n):  # type: ignore[no-untyped-def]
    """The bits of bfloat16 ``[n]`` at an address."""
    return carray(as_u16(address), n)


@jit(forceinline=True)
def in_place(numbers, first, n, scratch):  # type: ignore[no-untyped-def]
    """The block itself."""
    return numbers[first : first + n]


@jit(forceinline=True)
def kept(numbers, first, n, scratch):  # type: ignore[no-untyped-def]
    """The block was changed in its place."""


@jit(forceinline=True)
def widened(numbers, first, n, scratch):  # type: ignore[no-untyped-def]
    """A block of bfloat16 numbers, as float32 in ``scratch``."""
    block = numbers[first : first + n]
    out = scratch[:n]
    for i in range(n):
        out[i] = f32_of_bits(np.uint32(np.uint32(block[i]) << np.uint32(16)))
    return out


@jit(forceinline=True)
def narrowed(numbers, first, n, scratch):  # type: ignore[no-untyped-def]
    """Write float32 ``scratch`` into a block of bfloat16 numbers, rounded to the nearest, half to even."""
    block = numbers[first : first + n]
    for i in range(n):
        x = scratch[i]
        bits = np.int64(bits_of_f32(x))
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        block[i] = np.uint16(rounded if x == x else 0x7FC0)


#: Elements of a block.
_BLOCK = 1024
#: Elements that count as one row where a step is cut up for threads: one takes a tenth as long as a gathered row.
_UNIT = 8


@jit(forceinline=True)
def _coefficients(rule, step, norm_address, real):  # type: ignore[no-untyped-def]
    """(clip, keep, 1 - beta1, beta2, 1 - beta2, size of a step, scale of a root, eps, tiny) of a parameter's step."""
    bias1, bias2 = 1.0 - rule[BETA1] ** step, 1.0 - rule[BETA2] ** step
    clip = 1.0
    if norm_address:
        clip = rule[MAX_NORM] / (carray(as_f64(norm_address), 1)[0] + 1e-6)
        # By a comparison that a NaN fails, so that it stays one.
        clip = 1.0 if clip > 1.0 else clip
    return (
        real(clip),
        real(1.0 - rule[LR] * rule[WEIGHT_DECAY]),
        real(1.0 - rule[BETA1]),
        real(rule[BETA2]),
        real(1.0 - rule[BETA2]),
        real(rule[LR] / bias1),
        real(1.0 / math.sqrt(bias2)),
        real(rule[EPS]),
        real(np.finfo(real).tiny),
    )


@jit(forceinline=True)
def _update(p, g, m, v, coefficients):  # type: ignore[no-untyped-def]
    """AdamW on blocks of as many elements as ``p`` has.

    Moments below the normal numbers become 0. Those of units without gradients shrink until rounding keeps them at a
    few times the smallest number there is, and Intel's processors take many times as long for each of these.
    """
    clip, keep, weight1, beta2, weight2, size, scale, eps, tiny = coefficients
    for i in range(p.size):
        x = g[i] * clip
        first = m[i] + weight1 * (x - m[i])
        second = beta2 * v[i] + weight2 * x * x
        m[i] = first - first if abs(first) < tiny else first
        v[i] = second - second if second < tiny else second
        p[i] = p[i] * keep - size * (first / (math.sqrt(second) * scale + eps))


@jit(forceinline=True)
def _average(t, p, tau):  # type: ignore[no-untyped-def]
    """t += tau * (p - t), from the nearer end, as ``torch.lerp``."""
    weight, rest, near = tau
    if near:
        for i in range(p.size):
            t[i] = t[i] + weight * (p[i] - t[i])
    else:
        for i in range(p.size):
            t[i] = p[i] - rest * (p[i] - t[i])


@jit(forceinline=True, fastmath={"reassoc"})
def _sum_of_squares(p):  # type: ignore[no-untyped-def]
    total = p[0] * p[0]
    for i in range(1, p.size):
        total += p[i] * p[i]
    return total


@jit(forceinline=True)
def _add_squares(total, p, inner):  # type: ignore[no-untyped-def]
    """Add the squares of whole lines of ``inner`` elements to ``total``."""
    for line in range(p.size // inner):
        row = p[line * inner : (line + 1) * inner]
        for i in range(inner):
            total[i] += row[i] * row[i]


@jit(forceinline=True)
def _times(p, factor, inner):  # type: ignore[no-untyped-def]
    for line in range(p.size // inner):
        row = p[line * inner : (line + 1) * inner]
        for i in range(inner):
            row[i] *= factor[i]


@jit(forceinline=True)
def _towards_norm(square, norm):  # type: ignore[no-untyped-def]
    length = math.sqrt(square)
    return norm / (SMALLEST_NORM if length < SMALLEST_NORM else length)


@jit(forceinline=True)
def _step_elements(entry, begin, end, updates, averages, coefficients, tau, load, store, scratch):  # type: ignore[no-untyped-def]
    """The step on some elements of an entry whose rows are free."""
    p, g, m, v, t = entry
    for a in range(begin, end, _BLOCK):
        n = min(_BLOCK, end - a)
        here = load(p, a, n, scratch[0])
        if updates:
            _update(here, load(g, a, n, scratch[1]), m[a : a + n], v[a : a + n], coefficients)
            store(p, a, n, scratch[0])
        if averages:
            _average(load(t, a, n, scratch[1]), here, tau)
            store(t, a, n, scratch[1])


@jit(forceinline=True)
def _step_rows(entry, begin, inner, length, norm, averages, coefficients, tau, load, store, scratch):  # type: ignore[no-untyped-def]
    """The step on the ``inner`` rows of ``length`` elements that begin at ``begin``: update, then divide by the norms.

    The elements of a row are ``inner`` apart.
    """
    p, g, m, v, t = entry
    end = begin + length * inner
    chunk = _BLOCK if inner == 1 else max(_BLOCK // inner, 1) * inner
    squares = scratch[2]
    squares[:inner] = 0.0
    for a in range(begin, end, chunk):
        n = min(chunk, end - a)
        here = load(p, a, n, scratch[0])
        _update(here, load(g, a, n, scratch[1]), m[a : a + n], v[a : a + n], coefficients)
        if inner == 1:
            squares[0] += _sum_of_squares(here)
        else:
            _add_squares(squares, here, inner)
        store(p, a, n, scratch[0])
    for i in range(inner):
        squares[i] = _towards_norm(squares[i], norm)
    factor = squares[0]
    for a in range(begin, end, chunk):
        n = min(chunk, end - a)
        here = load(p, a, n, scratch[0])
        if inner == 1:
            for i in range(n):
                here[i] *= factor
        else:
            _times(here, squares, inner)
        store(p, a, n, scratch[0])
        if averages:
            # The target moves to the parameter as it is stored.
            here = load(p, a, n, scratch[0])
            _average(load(t, a, n, scratch[1]), here, tau)
            store(t, a, n, scratch[1])


@jit(forceinline=True)
def _width(table, n_entries):  # type: ignore[no-untyped-def]
    """Elements of a scratch block."""
    width = _BLOCK
    for e in range(n_entries):
        width = max(width, table[e, INNER])
    return width


@jit(forceinline=True)
def _step(view, view_moments, real, load, store, table, hyper, grads, clip_norm, steps, n_entries, first, count):  # type: ignore[no-untyped-def]
    """The step on a part of all entries' elements, one after the other, and on whole rows only."""
    table = carray(as_i64(table), (n_entries, ENTRY))
    grads, steps = carray(as_i64(grads), n_entries), carray(as_f32(steps), n_entries)
    scratch = np.empty((3, _width(table, n_entries)), real)
    begin, end = first * _UNIT, (first + count) * _UNIT
    at = 0
    for e in range(table.shape[0]):
        numel, length, inner = table[e, NUMEL], table[e, LENGTH], table[e, INNER]
        a, b = max(begin - at, 0), min(end - at, numel)
        at += numel
        updates, averages = grads[e] > 1, (grads[e] & 1) != 0 and table[e, TARGET] != 0
        if a >= b or not (updates or averages):
            continue
        rule = carray(as_f64(hyper + table[e, GROUP] * HYPER * 8), HYPER)
        moments = view_moments(table[e, EXP_AVG], numel), view_moments(table[e, EXP_AVG_SQ], numel)
        entry = (view(table[e, PARAM], numel), view(grads[e] & ~1, numel), *moments, view(table[e, TARGET], numel))
        coefficients = _coefficients(rule, np.float64(steps[e]) + 1.0, clip_norm, real)
        tau = (real(rule[TAU]), real(1.0 - rule[TAU]), rule[TAU] < 0.5)
        if updates and length > 0:
            # Those slabs of whole rows that begin in this part.
            slab, row_norm = length * inner, float_of_bits(table[e, NORM])
            for start in range((a + slab - 1) // slab * slab, (b + slab - 1) // slab * slab, slab):
                _step_rows(entry, start, inner, length, row_norm, averages, coefficients, tau, load, store, scratch)
        else:
            _step_elements(entry, a, b, updates, averages, coefficients, tau, load, store, scratch)


@kernel
def _step_f32(table, hyper, grads, norm, steps, n, first, length):  # type: ignore[no-untyped-def]
    _step(view_f32, view_f32, np.float32, in_place, kept, table, hyper, grads, norm, steps, n, first, length)


@kernel
def _step_f64(table, hyper, grads, norm, steps, n, first, length):  # type: ignore[no-untyped-def]
    _step(view_f64, view_f64, np.float64, in_place, kept, table, hyper, grads, norm, steps, n, first, length)


@kernel
def _step_bf16(table, hyper, grads, norm, steps, n, first, length):  # type: ignore[no-untyped-def]
    _step(view_bf16, view_f32, np.float32, widened, narrowed, table, hyper, grads, norm, steps, n, first, length)


@kernel
def _count(steps_address, grads_address, n_entries):  # type: ignore[no-untyped-def]
    steps, grads = carray(as_f32(steps_address), n_entries), carray(as_i64(grads_address), n_entries)
    for e in range(n_entries):
        if grads[e] > 1:
            steps[e] += np.float32(1.0)


_KERNELS = {torch.float32: _step_f32, torch.float64: _step_f64, torch.bfloat16: _step_bf16}


def adamw(
    table: Tensor, tiles: Tensor, hyper: Tensor, grads: Sequence[Tensor | None], averages: Sequence[bool],
    norm: Tensor | None, steps: Tensor, ticket: Tensor, params: Sequence[Tensor], moments: Sequence[Tensor],
    targets: Sequence[Tensor], aligned: bool, unit_rows: bool, *, trusted: bool = False,
) -> None:  # fmt: skip
    """See :data:`gpubuf.kernels.optim.adamw`. A trusted call comes from an optimiser, which owns all but gradients."""
    dtype = params[0].dtype if trusted else check_step(table, hyper, grads, averages, steps, params)
    codes = gradient_codes(grads, averages)
    address, n_entries = codes.buffer_info()
    norm = None if norm is None else dense(norm, torch.float64)
    clip_norm = 0 if norm is None else norm.data_ptr()
    before = table.data_ptr(), hyper.data_ptr(), address, clip_norm, steps.data_ptr(), n_entries
    call_in_parts(_KERNELS[dtype], before, -(-sum(map(Tensor.numel, params)) // _UNIT), ())
    _count(steps.data_ptr(), address, n_entries)
