"""Batch norm with activations on the CPU. See :mod:`gpubuf.kernels.norms._cpu` for precisions and sums.

Threads share the columns of large batches: those from ``first`` to ``last`` of every row are the part of a call.
"""

# Numba needs the real signatures: no `from __future__ import annotations`.

import math

import numpy as np
import torch
from numba import carray
from torch import Tensor

from gpubuf.kernels._differentiable import computing_dtype
from gpubuf.kernels._floats import call_parts
from gpubuf.kernels._jit import OPTIONS, jit
from gpubuf.kernels._pointers import as_f32, as_f64
from gpubuf.kernels.norms import RELU, SILU, check_arguments, check_vectors
from gpubuf.kernels.norms._cpu import ROWS, sigmoid


@jit(forceinline=True)
def _moments_rows(x, mean, var, nets, rows, width, first, last):  # type: ignore[no-untyped-def]
    columns = last - first
    part, total = np.empty(columns, x.dtype), np.empty(columns)
    for net in range(nets):
        own = slice(net * width + first, net * width + last)
        m, v = mean[own], var[own]
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
            m[j] = total[j] / rows
        total[:] = 0
        for start in range(0, rows, ROWS):
            part[:] = 0
            for row in range(net * rows + start, net * rows + min(start + ROWS, rows)):
                here = x[row * width + first : row * width + last]
                for j in range(columns):
                    part[j] += (here[j] - m[j]) * (here[j] - m[j])
            for j in range(columns):
                total[j] += part[j]
        for j in range(columns):
            v[j] = total[j] / rows


@jit(forceinline=True)
def _forward_rows(x, weight, bias, mean, var, y, nets, rows, width, eps, activation, first, last):  # type: ignore[no-untyped-def]
    real = x.dtype.type
    zero, one = real(0), real(1)
    columns = last - first
    scale = np.empty(columns, x.dtype)
    for net in range(nets):
        own = slice(net * width + first, net * width + last)
        m, b = mean[own], bias[own]
        for j in range(columns):
            scale[j] = weight[own][j] / math.sqrt(var[own][j] + eps)
        for row in range(net * rows, (net + 1) * rows):
            here, out = x[row * width + first : row * width + last], y[row * width + first : row * width + last]
            if activation == SILU:
                for j in range(columns):
                    z = (here[j] - m[j]) * scale[j] + b[j]
                    out[j] = z * sigmoid(z, one)
            elif activation == RELU:
                for j in range(columns):
                    z = (here[j] - m[j]) * scale[j] + b[j]
                    out[j] = zero if z < zero else z
            else:
                for j in range(columns):
                    out[j] = (here[j] - m[j]) * scale[j] + b[j]


@jit(forceinline=True)
def _backward_rows(  # type: ignore[no-untyped-def]
    grad,
    x,
    weight,
    bias,
    mean,
    var,
    by_x,
    by_weight,
    by_bias,
    nets,
    rows,
    width,
    eps,
    activation,
    constants,
    first,
    last,
):
    real = x.dtype.type
    zero, one = real(0), real(1)
    columns = last - first
    scale, rstd = np.empty(columns, x.dtype), np.empty(columns, x.dtype)
    part_weight, part_bias = np.zeros(columns, x.dtype), np.zeros(columns, x.dtype)
    sum_weight, sum_bias = np.empty(columns), np.empty(columns)
    first_mean, second_mean = np.zeros(columns, x.dtype), np.zeros(columns, x.dtype)
    for net in range(nets):
        own = slice(net * width + first, net * width + last)
        m, b = mean[own], bias[own]
        for j in range(columns):
            rstd[j] = 1 / math.sqrt(var[own][j] + eps)
            scale[j] = weight[own][j] * rstd[j]
        sum_weight[:] = 0
        sum_bias[:] = 0
        for start in range(0, rows, ROWS):
            for row in range(net * rows + start, net * rows + min(start + ROWS, rows)):
                here = x[row * width + first : row * width + last]
                given = grad[row * width + first : row * width + last]
                # The place of the gradient holds g until all rows are summed.
                g = by_x[row * width + first : row * width + last]
                if activation == SILU:
                    for j in range(columns):
                        z = (here[j] - m[j]) * scale[j] + b[j]
                        s = sigmoid(z, one)
                        g[j] = given[j] * s * (one + z * (one - s))
                elif activation == RELU:
                    for j in range(columns):
                        z = (here[j] - m[j]) * scale[j] + b[j]
                        g[j] = zero if z <= zero else given[j]
                else:
                    for j in range(columns):
                        g[j] = given[j]
                for j in range(columns):
                    part_bias[j] += g[j]
                for j in range(columns):
                    part_weight[j] += g[j] * ((here[j] - m[j]) * rstd[j])
            for j in range(columns):
                sum_weight[j] += part_weight[j]
                sum_bias[j] += part_bias[j]
            part_weight[:] = 0
            part_bias[:] = 0
        for j in range(columns):
            by_weight[own][j] = sum_weight[j]
            by_bias[own][j] = sum_bias[j]
            if not constants:
                first_mean[j] = sum_bias[j] / rows
                second_mean[j] = sum_weight[j] / rows * rstd[j]
        for row in range(net * rows, (net + 1) * rows):
            here, g = x[row * width + first : row * width + last], by_x[row * width + first : row * width + last]
            if constants:
                for j in range(columns):
                    g[j] *= scale[j]
            else:
                for j in range(columns):
                    g[j] = scale[j] * (g[j] - first_mean[j] - (here[j] - m[j]) * second_mean[j])


@jit("void(int64, int64, int64, int64, int64, int64, boolean, int64, int64)", **OPTIONS)
def _moments(x, mean, var, nets, rows, width, wide, first, length):  # type: ignore[no-untyped-def]
    n, m, last = nets * rows * width, nets * width, first + length
    if wide:
        _moments_rows(
            carray(as_f64(x), n), carray(as_f64(mean), m), carray(as_f64(var), m), nets, rows, width, first, last
        )
    else:
        _moments_rows(
            carray(as_f32(x), n), carray(as_f32(mean), m), carray(as_f32(var), m), nets, rows, width, first, last
        )


@jit(
    "void(int64, int64, int64, int64, int64, int64, int64, int64, int64, float64, int64, boolean, int64, int64)",
    **OPTIONS,
)
def _forward(x, weight, bias, mean, var, y, nets, rows, width, eps, activation, wide, first, length):  # type: ignore[no-untyped-def]
    n, m, last = nets * rows * width, nets * width, first + length
    if wide:
        _forward_rows(
            carray(as_f64(x), n), carray(as_f64(weight), m), carray(as_f64(bias), m), carray(as_f64(mean), m),
            carray(as_f64(var), m), carray(as_f64(y), n), nets, rows, width, eps, activation, first, last,
        )  # fmt: skip
    else:
        _forward_rows(
            carray(as_f32(x), n), carray(as_f32(weight), m), carray(as_f32(bias), m), carray(as_f32(mean), m),
            carray(as_f32(var), m), carray(as_f32(y), n), nets, rows, width, eps, activation, first, last,
        )  # fmt: skip


@jit(
    "void(int64, int64, int64, int64, int64, int64, int64, int64, int64, int64, int64, int64, float64, int64, boolean,"
    " boolean, int64, int64)",
    **OPTIONS,
)
def _backward(  # type: ignore[no-untyped-def]
    grad,
    x,
    weight,
    bias,
    mean,
    var,
    by_x,
    by_weight,
    by_bias,
    nets,
    rows,
    width,
    eps,
    activation,
    constants,
    wide,
    first,
    length,
):
    n, m, last = nets * rows * width, nets * width, first + length
    if wide:
        _backward_rows(
            carray(as_f64(grad), n), carray(as_f64(x), n), carray(as_f64(weight), m), carray(as_f64(bias), m),
            carray(as_f64(mean), m), carray(as_f64(var), m), carray(as_f64(by_x), n), carray(as_f64(by_weight), m),
            carray(as_f64(by_bias), m), nets, rows, width, eps, activation, constants, first, last,
        )  # fmt: skip
    else:
        _backward_rows(
            carray(as_f32(grad), n), carray(as_f32(x), n), carray(as_f32(weight), m), carray(as_f32(bias), m),
            carray(as_f32(mean), m), carray(as_f32(var), m), carray(as_f32(by_x), n), carray(as_f32(by_weight), m),
            carray(as_f32(by_bias), m), nets, rows, width, eps, activation, constants, first, last,
        )  # fmt: skip


def _work(rows: int) -> int:
    """How long a column of ``rows`` elements takes, in the measure of :func:`gpubuf.kernels._threads.parts`."""
    return max(rows // 64, 1)


def batch_moments(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """See :data:`gpubuf.kernels.norms.batch_moments`."""
    nets, rows, width = check_arguments(x, weight, None)
    real = computing_dtype(x)
    mean, var = torch.empty(weight.shape, dtype=real), torch.empty(weight.shape, dtype=real)
    given = (x, mean, var, nets, rows, width, real is torch.float64)
    call_parts(_moments, real, given, width, [], _work(nets * rows))
    return mean, var


def batch_norm_activation(
    x: Tensor, weight: Tensor, bias: Tensor, mean: Tensor, var: Tensor, eps: float, activation: int, own: bool
) -> Tensor:
    """See :data:`gpubuf.kernels.norms.batch_norm_activation`."""
    nets, rows, width = check_arguments(x, weight, bias)
    check_vectors(weight, mean=mean, var=var)
    real = computing_dtype(x)
    y = torch.empty(x.shape, dtype=real)
    given = (x, weight, bias, mean, var, y, nets, rows, width, eps, activation, real is torch.float64)
    call_parts(_forward, real, given, width, [], _work(nets * rows))
    return y.to(x.dtype)


def batch_norm_activation_backward(
    grad: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    mean: Tensor,
    var: Tensor,
    eps: float,
    activation: int,
    own: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """See :data:`gpubuf.kernels.norms.batch_norm_activation_backward`."""
    nets, rows, width = check_arguments(x, weight, bias)
    check_vectors(weight, mean=mean, var=var)
    real = computing_dtype(x)
    by_x = torch.empty(x.shape, dtype=real)
    by_weight, by_bias = torch.empty(weight.shape, dtype=real), torch.empty(weight.shape, dtype=real)
    given = (grad, x, weight, bias, mean, var, by_x, by_weight, by_bias, nets, rows, width, eps, activation, not own)
    call_parts(_backward, real, (*given, real is torch.float64), width, [], _work(nets * rows))
    return by_x.to(x.dtype), by_weight.to(weight.dtype), by_bias.to(weight.dtype)
