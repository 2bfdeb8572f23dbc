"""Norms with activations on the CPU.

One kernel serves both precisions: the flag ``wide`` says whether every array is float64 or float32. The arithmetic is
that of the arrays, so that float32 has all lanes of the processor. Sums over a row are added in as many lanes, and sums
over rows go to float64 every 32 rows.
"""

# Numba needs the real signatures: no `from __future__ import annotations`.

import math

import numpy as np
import torch
from numba import carray
from torch import Tensor

from gpubuf.kernels._differentiable import computing_dtype, dense
from gpubuf.kernels._elementary import exp_of_negative
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
def _forward_rows(x, weight, bias, statistics, y, nets, rows, width, eps, norm, activation):  # type: ignore[no-untyped-def]
    for net in range(nets):
        own = slice(net * width, (net + 1) * width)
        for row in range(net * rows, (net + 1) * rows):
            here = x[row * width : (row + 1) * width]
            mean, rstd = _statistics(here, eps, norm)
            statistics[row], statistics[nets * rows + row] = mean, rstd
            _activate(here, weight[own], bias[own], mean, rstd, activation, y[row * width : (row + 1) * width])


@jit(forceinline=True)
def _backward_rows(  # type: ignore[no-untyped-def]
    grad, x, weight, bias, statistics, by_x, by_weight, by_bias, nets, rows, width, norm, activation
):
    g = np.empty(width, x.dtype)
    part_weight, part_bias = np.zeros(width, x.dtype), np.zeros(width, x.dtype)
    sum_weight, sum_bias = np.zeros(width), np.zeros(width)
    for net in range(nets):
        own = slice(net * width, (net + 1) * width)
        sum_weight[:] = 0
        sum_bias[:] = 0
        for first in range(0, rows, ROWS):
            for row in range(net * rows + first, net * rows + min(first + ROWS, rows)):
                here = slice(row * width, (row + 1) * width)
                mean, rstd = statistics[row], statistics[nets * rows + row]
                _slopes(grad[here], x[here], weight[own], bias[own], mean, rstd, activation, g)
                _gradients(g, x[here], weight[own], mean, rstd, norm, by_x[here], part_weight, part_bias)
            for j in range(width):
                sum_weight[j] += part_weight[j]
                sum_bias[j] += part_bias[j]
            part_weight[:] = 0
            part_bias[:] = 0
        for j in range(width):
            by_weight[net * width + j] = sum_weight[j]
            by_bias[net * width + j] = sum_bias[j]


@jit("void(int64, int64, int64, int64, int64, int64, int64, int64, float64, int64, int64, boolean)", **OPTIONS)
def _forward(x, weight, bias, statistics, y, nets, rows, width, eps, norm, activation, wide):  # type: ignore[no-untyped-def]
    n, m = nets * rows, nets * width
    if wide:
        shift = carray(as_f64(bias), m) if bias else np.zeros(m)
        _forward_rows(
            carray(as_f64(x), n * width), carray(as_f64(weight), m), shift, carray(as_f64(statistics), 2 * n),
            carray(as_f64(y), n * width), nets, rows, width, eps, norm, activation,
        )  # fmt: skip
    else:
        narrow_shift = carray(as_f32(bias), m) if bias else np.zeros(m, np.float32)
        _forward_rows(
            carray(as_f32(x), n * width), carray(as_f32(weight), m), narrow_shift, carray(as_f32(statistics), 2 * n),
            carray(as_f32(y), n * width), nets, rows, width, eps, norm, activation,
        )  # fmt: skip


@jit(
    "void(int64, int64, int64, int64, int64, int64, int64, int64, int64, int64, int64, int64, int64, boolean)",
    **OPTIONS,
)
def _backward(  # type: ignore[no-untyped-def]
    grad, x, weight, bias, statistics, by_x, by_weight, by_bias, nets, rows, width, norm, activation, wide
):
    n, m = nets * rows, nets * width
    if wide:
        shift = carray(as_f64(bias), m) if bias else np.zeros(m)
        _backward_rows(
            carray(as_f64(grad), n * width), carray(as_f64(x), n * width), carray(as_f64(weight), m), shift,
            carray(as_f64(statistics), 2 * n), carray(as_f64(by_x), n * width), carray(as_f64(by_weight), m),
            carray(as_f64(by_bias), m), nets, rows, width, norm, activation,
        )  # fmt: skip
    else:
        narrow_shift = carray(as_f32(bias), m) if bias else np.zeros(m, np.float32)
        _backward_rows(
            carray(as_f32(grad), n * width), carray(as_f32(x), n * width), carray(as_f32(weight), m), narrow_shift,
            carray(as_f32(statistics), 2 * n), carray(as_f32(by_x), n * width), carray(as_f32(by_weight), m),
            carray(as_f32(by_bias), m), nets, rows, width, norm, activation,
        )  # fmt: skip


def norm_activation(
    x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, norm: int, activation: int
) -> tuple[Tensor, Tensor]:
    """See :data:`gpubuf.kernels.norms.norm_activation`."""
    nets, rows, width = check_arguments(x, weight, bias)
    check_width(width)
    real = computing_dtype(x)
    y, statistics = torch.empty(x.shape, dtype=real), torch.empty((2, *x.shape[:-1]), dtype=real)
    # The copies must outlive the call, hence the names.
    x_, weight_, bias_ = dense(x, real), dense(weight, real), None if bias is None else dense(bias, real)
    _forward(
        x_.data_ptr(),
        weight_.data_ptr(),
        0 if bias_ is None else bias_.data_ptr(),
        statistics.data_ptr(),
        y.data_ptr(),
        nets,
        rows,
        width,
        eps,
        norm,
        activation,
        real is torch.float64,
    )
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
    grad_, x_, weight_, statistics_ = dense(grad, real), dense(x, real), dense(weight, real), dense(statistics, real)
    bias_ = None if bias is None else dense(bias, real)
    _backward(
        grad_.data_ptr(),
        x_.data_ptr(),
        weight_.data_ptr(),
        0 if bias_ is None else bias_.data_ptr(),
        statistics_.data_ptr(),
        by_x.data_ptr(),
        by_weight.data_ptr(),
        by_bias.data_ptr(),
        nets,
        rows,
        width,
        norm,
        activation,
        real is torch.float64,
    )
    return by_x.to(x.dtype), by_weight.to(weight.dtype), by_bias.to(weight.dtype)
