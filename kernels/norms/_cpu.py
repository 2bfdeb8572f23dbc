"""Norms with activations on the CPU.

There is a kernel for each computing dtype, which every array has. The arithmetic is that of the arrays, so that float32
has all lanes of the processor. Sums over a row are added in as many lanes, and sums over rows go to float64 every 32
rows. Large batches are shared among threads: the rows of layer norm and RMS norm, and the columns of batch norm. The
bits are the same for any number.
"""

# Numba needs the real signatures: no `from __future__ import annotations`.

import math
from typing import Any

import numpy as np
import torch

from gpubuf.kernels import norms
from gpubuf.kernels._jit import jit
from gpubuf.kernels._loops import Call, for_each_dtype, loop, loops
from gpubuf.kernels._primitives import exp_of_negative, view
from gpubuf.kernels.norms import LAYER, RELU, SILU

#: Lets LLVM add the elements of a row in several lanes. Nothing else: NaN and infinity behave as ever.
_SUMS = {"reassoc", "contract"}

#: Rows whose gradients of scale and bias are summed in the precision of the arrays.
ROWS = 32


@jit(forceinline=True)
def _sigmoid(z, one):  # type: ignore[no-untyped-def]
    """1 / (1 + exp(-z)), by an exponential that never overflows."""
    decay = exp_of_negative(-abs(z))
    return (one if z >= 0 else decay) / (one + decay)


# LLVM takes the choice of an activation out of the loops.


@jit(forceinline=True)
def _activated(z, activation, one):  # type: ignore[no-untyped-def]
    """The activation; a NaN stays one."""
    if activation == SILU:
        return z * _sigmoid(z, one)
    if activation == RELU:
        return one - one if z < 0 else z
    return z


@jit(forceinline=True)
def _slope(grad, z, activation, one):  # type: ignore[no-untyped-def]
    """grad * activation'(z)."""
    if activation == SILU:
        s = _sigmoid(z, one)
        return grad * s * (one + z * (one - s))
    if activation == RELU:
        return one - one if z <= 0 else grad
    return grad


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
    one = x.dtype.type(1)
    for j in range(x.shape[0]):
        y[j] = _activated((x[j] - mean) * rstd * weight[j] + bias[j], activation, one)


@jit(forceinline=True)
def _slopes(grad, x, weight, bias, mean, rstd, activation, g):  # type: ignore[no-untyped-def]
    """g = grad * activation'((x - mean) * rstd * weight + bias)."""
    one = x.dtype.type(1)
    for j in range(x.shape[0]):
        g[j] = _slope(grad[j], (x[j] - mean) * rstd * weight[j] + bias[j], activation, one)


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


# --- layer norm and RMS norm ------------------------------------------------------------------------------------------


def _forward_of(real: Any) -> Any:
    def forward(  # type: ignore[no-untyped-def]
        x, weight, bias, eps: float, norm, activation, rows, nets, width, first, length, y_out, statistics_out
    ):
        n, m, zero = nets * rows, nets * width, real(0)
        x, y, statistics = view(x, n * width, zero), view(y_out, n * width, zero), view(statistics_out, 2 * n, zero)
        scale, shift = view(weight, m, zero), view(bias, m, zero) if bias else np.zeros(m, real)
        for row in range(first, first + length):
            own = slice(row // rows * width, (row // rows + 1) * width)
            here = slice(row * width, (row + 1) * width)
            mean, rstd = _statistics(x[here], eps, norm)
            statistics[row], statistics[n + row] = mean, rstd
            _activate(x[here], scale[own], shift[own], mean, rstd, activation, y[here])

    return forward


def _backward_of(real: Any) -> Any:
    def backward(  # type: ignore[no-untyped-def]
        grad, x, weight, bias, statistics, norm, activation, rows, nets, width, first, length, grad_x_out, partial
    ):
        n, m, blocks, zero = nets * rows, nets * width, (rows + ROWS - 1) // ROWS, real(0)
        grad, x, by_x = view(grad, n * width, zero), view(x, n * width, zero), view(grad_x_out, n * width, zero)
        scale, shift = view(weight, m, zero), view(bias, m, zero) if bias else np.zeros(m, real)
        statistics, partial = view(statistics, 2 * n, zero), view(partial, 2 * nets * blocks * width, zero)
        g = np.empty(width, real)
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
                _slopes(grad[here], x[here], scale[own], shift[own], mean, rstd, activation, g)
                _gradients(g, x[here], scale[own], mean, rstd, norm, by_x[here], by_weight, by_bias)

    return backward


def _finish_of(real: Any) -> Any:
    def finish(partial, rows, nets, width, grad_weight_out, grad_bias_out):  # type: ignore[no-untyped-def]
        blocks, zero = (rows + ROWS - 1) // ROWS, real(0)
        partial = view(partial, 2 * nets * blocks * width, zero)
        by_weight, by_bias = view(grad_weight_out, nets * width, zero), view(grad_bias_out, nets * width, zero)
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

    return finish


def _share_rows(rows: int, nets: int, width: int) -> tuple[int, int]:
    return nets * rows, max(width // 32, 1)


def _share_blocks(rows: int, nets: int, width: int) -> tuple[int, int]:
    # Parts begin at whole blocks: at multiples of 64 rows, if each net had a multiple of ROWS.
    return _share_rows(-(-rows // ROWS) * ROWS, nets, width)


norm_activation = loop(norms.norm_activation, _share_rows)(for_each_dtype(_forward_of))
_backward, _finish = for_each_dtype(_backward_of), for_each_dtype(_finish_of)


@loops(norms.norm_activation_backward)
def norm_activation_backward(call: Call) -> None:
    blocks = call.values["nets"] * -(-call.values["rows"] // ROWS)
    call.values["partial"] = torch.empty(2 * blocks * call.values["width"], dtype=call.real, device="cpu")
    call.run(_backward, _share_blocks)
    call.run(_finish)


# --- batch norm -------------------------------------------------------------------------------------------------------


def _moments_of(real: Any) -> Any:
    def moments(x, rows, nets, width, first, length, mean_out, var_out):  # type: ignore[no-untyped-def]
        n, m, zero = nets * rows * width, nets * width, real(0)
        x, mean, var = view(x, n, zero), view(mean_out, m, zero), view(var_out, m, zero)
        columns, last = length, first + length
        part, total = np.empty(columns, real), np.empty(columns)
        for net in range(nets):
            own = slice(net * width + first, net * width + last)
            means, v = mean[own], var[own]
            total[:] = 0
            for start in range(0, rows, ROWS):
                part[:] = 0
                for row in range(net * rows + start, net * rows + min(start + ROWS, rows)):
                    here = x[row * width + first : row * width + last]
                    for j in range(columns):
                        part[j] += here[j]
                for j in range(columns):
                    total[j] += part[j]
            for j in range(columns):
                means[j] = total[j] / rows
            total[:] = 0
            for start in range(0, rows, ROWS):
                part[:] = 0
                for row in range(net * rows + start, net * rows + min(start + ROWS, rows)):
                    here = x[row * width + first : row * width + last]
                    for j in range(columns):
                        part[j] += (here[j] - means[j]) * (here[j] - means[j])
                for j in range(columns):
                    total[j] += part[j]
            for j in range(columns):
                v[j] = total[j] / rows

    return moments


def _apply_of(real: Any) -> Any:
    def apply(  # type: ignore[no-untyped-def]
        x, weight, bias, mean, var, eps: float, activation, rows, nets, width, first, length, y_out
    ):
        n, m, zero, one = nets * rows * width, nets * width, real(0), real(1)
        x, y, weight, bias = view(x, n, zero), view(y_out, n, zero), view(weight, m, zero), view(bias, m, zero)
        mean, var = view(mean, m, zero), view(var, m, zero)
        columns, last = length, first + length
        scale = np.empty(columns, real)
        for net in range(nets):
            own = slice(net * width + first, net * width + last)
            means, b = mean[own], bias[own]
            for j in range(columns):
                scale[j] = weight[own][j] / math.sqrt(var[own][j] + eps)
            for row in range(net * rows, (net + 1) * rows):
                here, out = x[row * width + first : row * width + last], y[row * width + first : row * width + last]
                for j in range(columns):
                    out[j] = _activated((here[j] - means[j]) * scale[j] + b[j], activation, one)

    return apply


def _batch_backward_of(real: Any) -> Any:
    def backward(  # type: ignore[no-untyped-def]
        grad, x, weight, bias, mean, var, eps: float, activation, own: bool, rows, nets, width, first, length,
        grad_x_out, grad_weight_out, grad_bias_out,
    ):  # fmt: skip
        n, m, zero, one = nets * rows * width, nets * width, real(0), real(1)
        grad, x, by_x = view(grad, n, zero), view(x, n, zero), view(grad_x_out, n, zero)
        weight, bias, mean, var = view(weight, m, zero), view(bias, m, zero), view(mean, m, zero), view(var, m, zero)
        by_weight, by_bias = view(grad_weight_out, m, zero), view(grad_bias_out, m, zero)
        columns, last = length, first + length
        scale, rstd = np.empty(columns, real), np.empty(columns, real)
        part_weight, part_bias = np.zeros(columns, real), np.zeros(columns, real)
        sum_weight, sum_bias = np.empty(columns), np.empty(columns)
        first_mean, second_mean = np.zeros(columns, real), np.zeros(columns, real)
        for net in range(nets):
            columns_of = slice(net * width + first, net * width + last)
            means, b = mean[columns_of], bias[columns_of]
            for j in range(columns):
                rstd[j] = 1 / math.sqrt(var[columns_of][j] + eps)
                scale[j] = weight[columns_of][j] * rstd[j]
            sum_weight[:] = 0
            sum_bias[:] = 0
            for start in range(0, rows, ROWS):
                for row in range(net * rows + start, net * rows + min(start + ROWS, rows)):
                    here = x[row * width + first : row * width + last]
                    given = grad[row * width + first : row * width + last]
                    # The place of the gradient holds g until all rows are summed.
                    g = by_x[row * width + first : row * width + last]
                    # Choices that LLVM would leave in the loop.
                    if activation == SILU:
                        for j in range(columns):
                            g[j] = _slope(given[j], (here[j] - means[j]) * scale[j] + b[j], SILU, one)
                    elif activation == RELU:
                        for j in range(columns):
                            g[j] = _slope(given[j], (here[j] - means[j]) * scale[j] + b[j], RELU, one)
                    else:
                        for j in range(columns):
                            g[j] = given[j]
                    for j in range(columns):
                        part_bias[j] += g[j]
                    for j in range(columns):
                        part_weight[j] += g[j] * ((here[j] - means[j]) * rstd[j])
                for j in range(columns):
                    sum_weight[j] += part_weight[j]
                    sum_bias[j] += part_bias[j]
                part_weight[:] = 0
                part_bias[:] = 0
            for j in range(columns):
                by_weight[columns_of][j] = sum_weight[j]
                by_bias[columns_of][j] = sum_bias[j]
                if own:
                    first_mean[j] = sum_bias[j] / rows
                    second_mean[j] = sum_weight[j] / rows * rstd[j]
            for row in range(net * rows, (net + 1) * rows):
                here, g = x[row * width + first : row * width + last], by_x[row * width + first : row * width + last]
                if not own:
                    for j in range(columns):
                        g[j] *= scale[j]
                else:
                    for j in range(columns):
                        g[j] = scale[j] * (g[j] - first_mean[j] - (here[j] - means[j]) * second_mean[j])

    return backward


def _share_columns(rows: int, nets: int, width: int) -> tuple[int, int]:
    return width, max(nets * rows // 64, 1)


norm_batch_moments = loop(norms.batch_moments, _share_columns)(for_each_dtype(_moments_of))
batch_norm_activation = loop(norms.batch_norm_activation, _share_columns)(for_each_dtype(_apply_of))
batch_norm_activation_backward = loop(norms.batch_norm_activation_backward, _share_columns)(
    for_each_dtype(_batch_backward_of)
)
