"""Norms with activations on the CPU.

One kernel serves both precisions: the flag ``wide`` says whether every array is float64 or float32. The arithmetic is
that of the arrays, so that float32 has all lanes of the processor. Sums over a row are added in as many lanes, and sums
over rows go to float64 every 32 rows. Large batches are shared among threads; the bits are the same for any number.
"""

# Numba needs the real signatures: no `from __future__ import annotations`.

import math

import numpy as np
import torch
from numba import carray
from torch import Tensor

from gpubuf.kernels._differentiable import computing_dtype
from gpubuf.kernels._elementary import exp_of_negative
from gpubuf.kernels._floats import call, call_parts
from gpubuf.kernels._jit import OPTIONS, jit
from gpubuf.kernels._pointers import as_f32, as_f64
from gpubuf.kernels.norms import LAYER, RELU, SILU, check_arguments, check_width

#: Lets LLVM add the elements of a row in several lanes. Nothing else: NaN and infinity behave as ever.
_SUMS = {"reassoc", "contract"}

#: Rows whose gradients of scale and bias are summed in the precision of the arrays.
ROWS = 32


@jit(forceinline=True)
def sigmoid(z, one):  # type: ignore[no-untyped-def]
    """1 / (1 + exp(-z)), by an exponential that never overflows."""
    decay = exp_of_negative(-abs(z))
    return (one if z >= 0 else decay) / (one + decay)


@jit(forceinline=True, fastmath=_SUMS)
def _statistics(x, eps, norm):  # type: ignore[no-untyped-def]
    """(mean, rstd) of a row."""
    width = x.shape[0]
    real = x.dtype.type
    mean = real(0)
    if norm == LAYER:
        for j in range(width):
            mean += x[j]
        mean /= real(width)
    square = real(0)
    for j in range(width):
        square += (x[j] - mean) * (x[j] - mean)
    return mean, real(1 / math.sqrt(square / width + eps))


@jit(forceinline=True)
def _activate(x, weight, bias, mean, rstd, activation, y):  # type: ignore[no-untyped-def]
    """y = activation((x - mean) * rstd * weight + bias)."""
    real = x.dtype.type
    zero, one = real(0), real(1)
    if activation == SILU:
        for j in range(x.shape[0]):
            z = (x[j] - mean) * rstd * weight[j] + bias[j]
            y[j] = z * sigmoid(z, one)
    elif activation == RELU:
        for j in range(x.shape[0]):
            z = (x[j] - mean) * rstd * weight[j] + bias[j]
            y[j] = zero if z < zero else z
    else:
        for j in range(x.shape[0]):
            y[j] = (x[j] - mean) * rstd * weight[j] + bias[j]


@jit(forceinline=True)
def _slopes(grad, x, weight, bias, mean, rstd, activation, g):  # type: ignore[no-untyped-def]
    """g = grad * activation'((x - mean) * rstd * weight + bias)."""
    real = x.dtype.type
    zero, one = real(0), real(1)
    if activation == SILU:
        for j in range(x.shape[0]):
            z = (x[j] - mean) * rstd * weight[j] + bias[j]
            s = sigmoid(z, one)
            g[j] = grad[j] * s * (one + z * (one - s))
    elif activation == RELU:
        for j in range(x.shape[0]):
            z = (x[j] - mean) * rstd * weight[j] + bias[j]
            g[j] = zero if z <= zero else grad[j]
    else:
        for j in range(x.shape[0]):
            g[j] = grad[j]


@jit(forceinline=True, fastmath=_SUMS)
def _gradients(g, x, weight, mean, rstd, norm, by_x, by_weight, by_bias):  # type: ignore[no-untyped-def]
    """The gradient by the row; adds to those by weight and bias."""
    real = x.dtype.type
    width = x.shape[0]
    first, second = real(0), real(0)
    for j in range(width):
        u = g[j] * weight[j]
        first += u
        second += u * ((x[j] - mean) * rstd)
    first, second = first / real(width), second / real(width)
    if norm != LAYER:
        first = real(0)
    for j in range(width):
        by_x[j] = rstd * (g[j] * weight[j] - first - (x[j] - mean) * rstd * second)
    for j in range(width):
        by_weight[j] += g[j] * ((x[j] - mean) * rstd)
        by_bias[j] += g[j]


@jit(forceinline=True)
def _forward_rows(x, weight, bias, statistics, y, n, rows, width, eps, norm, activation, first, length):  # type: ignore[no-untyped-def]
    for row in range(first, first + length):
        own = slice(row // rows * width, (row // rows + 1) * width)
        here = x[row * width : (row + 1) * width]
        mean, rstd = _statistics(here, eps, norm)
        statistics[row], statistics[n + row] = mean, rstd
        _activate(here, weight[own], bias[own], mean, rstd, activation, y[row * width : (row + 1) * width])


@jit(forceinline=True)
def _backward_rows(  # type: ignore[no-untyped-def]
    grad, x, weight, bias, statistics, by_x, partial, n, rows, width, norm, activation, first, length
):
    g = np.empty(width, x.dtype)
    blocks = (rows + ROWS - 1) // ROWS
    for block in range(first // ROWS, (first + length) // ROWS):
        net, start = block // blocks, block % blocks * ROWS
        own = slice(net * width, (net + 1) * width)
        by_weight = partial[2 * block * width : (2 * block + 1) * width]
        by_bias = partial[(2 * block + 1) * width : (2 * block + 2) * width]
        by_weight[:] = 0
        by_bias[:] = 0
        for row in range(net * rows + start, net * rows + min(start + ROWS, rows)):
            here = slice(row * width, (row + 1) * width)
            mean, rstd = statistics[row], statistics[n + row]
            _slopes(grad[here], x[here], weight[own], bias[own], mean, rstd, activation, g)
            _gradients(g, x[here], weight[own], mean, rstd, norm, by_x[here], by_weight, by_bias)


@jit(forceinline=True)
def _finish_sums(partial, by_weight, by_bias, nets, blocks, width):  # type: ignore[no-untyped-def]
    sum_weight, sum_bias = np.empty(width), np.empty(width)
    for net in range(nets):
        sum_weight[:] = 0
        sum_bias[:] = 0
        for block in range(net * blocks, (net + 1) * blocks):
            for j in range(width):
                sum_weight[j] += partial[2 * block * width + j]
            for j in range(width):
                sum_bias[j] += partial[(2 * block + 1) * width + j]
        for j in range(width):
            by_weight[net * width + j] = sum_weight[j]
            by_bias[net * width + j] = sum_bias[j]


@jit(
    "void(int64, int64, int64, int64, int64, int64, int64, int64, float64, int64, int64, boolean, int64, int64)",
    **OPTIONS,
)
def _forward(  # type: ignore[no-untyped-def]
    x, weight, bias, statistics, y, nets, rows, width, eps, norm, activation, wide, first, length
):
    n, m = nets * rows, nets * width
    if wide:
        shift = carray(as_f64(bias), m) if bias else np.zeros(m)
        _forward_rows(
            carray(as_f64(x), n * width), carray(as_f64(weight), m), shift, carray(as_f64(statistics), 2 * n),
            carray(as_f64(y), n * width), n, rows, width, eps, norm, activation, first, length,
        )  # fmt: skip
    else:
        narrow_shift = carray(as_f32(bias), m) if bias else np.zeros(m, np.float32)
        _forward_rows(
            carray(as_f32(x), n * width), carray(as_f32(weight), m), narrow_shift, carray(as_f32(statistics), 2 * n),
            carray(as_f32(y), n * width), n, rows, width, eps, norm, activation, first, length,
        )  # fmt: skip


@jit(
    "void(int64, int64, int64, int64, int64, int64, int64, int64, int64, int64, int64, int64, boolean, int64, int64)",
    **OPTIONS,
)
def _backward(  # type: ignore[no-untyped-def]
    grad, x, weight, bias, statistics, by_x, partial, nets, rows, width, norm, activation, wide, first, length
):
    n, m = nets * rows, nets * width
    sums = 2 * nets * ((rows + ROWS - 1) // ROWS) * width
    if wide:
        shift = carray(as_f64(bias), m) if bias else np.zeros(m)
        _backward_rows(
            carray(as_f64(grad), n * width), carray(as_f64(x), n * width), carray(as_f64(weight), m), shift,
            carray(as_f64(statistics), 2 * n), carray(as_f64(by_x), n * width), carray(as_f64(partial), sums),
            n, rows, width, norm, activation, first, length,
        )  # fmt: skip
    else:
        narrow_shift = carray(as_f32(bias), m) if bias else np.zeros(m, np.float32)
        _backward_rows(
            carray(as_f32(grad), n * width), carray(as_f32(x), n * width), carray(as_f32(weight), m), narrow_shift,
            carray(as_f32(statistics), 2 * n), carray(as_f32(by_x), n * width), carray(as_f32(partial), sums),
            n, rows, width, norm, activation, first, length,
        )  # fmt: skip


@jit("void(int64, int64, int64, int64, int64, int64, boolean)", **OPTIONS)
def _finish(partial, by_weight, by_bias, nets, blocks, width, wide):  # type: ignore[no-untyped-def]
    sums, m = 2 * nets * blocks * width, nets * width
    if wide:
        _finish_sums(
            carray(as_f64(partial), sums), carray(as_f64(by_weight), m), carray(as_f64(by_bias), m), nets, blocks, width
        )
    else:
        _finish_sums(
            carray(as_f32(partial), sums), carray(as_f32(by_weight), m), carray(as_f32(by_bias), m), nets, blocks, width
        )


def _work(width: int) -> int:
    """How long a row of ``width`` elements takes, in the measure of :func:`gpubuf.kernels._threads.parts`."""
    return max(width // 32, 1)


def norm_activation(
    x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, norm: int, activation: int
) -> tuple[Tensor, Tensor]:
    """See :data:`gpubuf.kernels.norms.norm_activation`."""
    nets, rows, width = check_arguments(x, weight, bias)
    check_width(width)
    real = computing_dtype(x)
    y, statistics = torch.empty(x.shape, dtype=real), torch.empty((2, *x.shape[:-1]), dtype=real)
    sizes, wide = (nets, rows, width), real is torch.float64
    given = (x, weight, bias, statistics, y, *sizes, eps, norm, activation, wide)
    call_parts(_forward, real, given, nets * rows, [], _work(width))
    return y.to(x.dtype), statistics


def norm_activation_backward(
    grad: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, statistics: Tensor, norm: int, activation: int
) -> tuple[Tensor, Tensor, Tensor]:
    """See :data:`gpubuf.kernels.norms.norm_activation_backward`."""
    nets, rows, width = check_arguments(x, weight, bias)
    check_width(width)
    real = computing_dtype(x)
    by_x = torch.empty(x.shape, dtype=real)
    by_weight, by_bias = torch.empty(weight.shape, dtype=real), torch.empty(weight.shape, dtype=real)
    blocks, wide = -(-rows // ROWS), real is torch.float64
    partial = torch.empty(2 * nets * blocks * width, dtype=real)
    given = (grad, x, weight, bias, statistics, by_x, partial, nets, rows, width, norm, activation, wide)
    # Parts begin at whole blocks: at multiples of 64 rows, if each net had a multiple of ROWS.
    call_parts(_backward, real, given, nets * blocks * ROWS, [], _work(width))
    call(_finish, real, partial, by_weight, by_bias, nets, blocks, width, wide)
    return by_x.to(x.dtype), by_weight.to(weight.dtype), by_bias.to(weight.dtype)
