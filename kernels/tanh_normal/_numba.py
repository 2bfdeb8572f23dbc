"""The tanh-normal distribution on the CPU.

One kernel serves both precisions: the flag ``wide`` says whether every array is float64 or float32, and the arithmetic
is float64 either way.
"""

# Numba needs the real signatures: no `from __future__ import annotations`.

import math

import torch
from numba import carray
from torch import Tensor

from gpubuf.kernels._differentiable import computing_dtype, dense
from gpubuf.kernels._pointers import OPTIONS, as_f32, as_f64, jit
from gpubuf.kernels.tanh_normal import check_arguments

_LOG_2 = math.log(2)
_HALF_LOG_2_PI = 0.5 * math.log(2 * math.pi)


@jit(inline="always")
def read(address, wide, i):  # type: ignore[no-untyped-def]
    """Element ``i`` of the float64 (``wide``) or float32 array at ``address``, as float64."""
    if wide:
        return carray(as_f64(address), i + 1)[i]
    return float(carray(as_f32(address), i + 1)[i])


@jit(inline="always")
def write(address, wide, i, value):  # type: ignore[no-untyped-def]
    """Set element ``i`` of the float64 (``wide``) or float32 array at ``address``."""
    if wide:
        carray(as_f64(address), i + 1)[i] = value
    else:
        carray(as_f32(address), i + 1)[i] = value


@jit("void(int64, int64, int64, int64, int64, float64, float64, int64, int64, int64, boolean, int64, int64)", **OPTIONS)
def _sample(loc, scale, noise, low, high, low_value, high_value, n, width, last, wide, action, log_prob):  # type: ignore[no-untyped-def]
    lowest, highest = low_value, high_value
    half = (highest - lowest) * 0.5
    log_half = math.log(half)
    i = 0
    for row in range(n):
        total = 0.0
        for _ in range(width):
            deviation, z = read(scale, wide, i), read(noise, wide, i)
            x = read(loc, wide, i) + deviation * z
            if low:
                lowest, highest = read(low, wide, i % last), read(high, wide, i % last)
                half = (highest - lowest) * 0.5
                log_half = math.log(half)
            magnitude = abs(x)
            decay = math.exp(-2 * magnitude)
            tanh = math.copysign((1 - decay) / (1 + decay), x)
            a = (highest + lowest) * 0.5 + half * tanh
            # Rounding may step over a bound; a NaN stays one.
            write(action, wide, i, highest if a > highest else lowest if a < lowest else a)
            log_sech2 = 2 * (_LOG_2 - magnitude - math.log(1 + decay))
            total += -0.5 * z * z - math.log(deviation) - _HALF_LOG_2_PI - log_half - log_sech2
            i += 1
        write(log_prob, wide, row, total)


@jit(
    "void(int64, int64, int64, int64, int64, int64, int64, float64, int64, int64, int64, boolean, int64, int64)",
    **OPTIONS,
)
def _sample_backward(  # type: ignore[no-untyped-def]
    grad_action, grad_log_prob, loc, scale, noise, low, high, half, n, width, last, wide, by_loc, by_scale
):
    i = 0
    for row in range(n):
        by_density = read(grad_log_prob, wide, row) if grad_log_prob else 0.0
        for _ in range(width):
            deviation, z = read(scale, wide, i), read(noise, wide, i)
            x = read(loc, wide, i) + deviation * z
            decay = math.exp(-2 * abs(x))
            slope = by_density * 2 * math.copysign((1 - decay) / (1 + decay), x)
            if grad_action:
                if low:
                    half = (read(high, wide, i % last) - read(low, wide, i % last)) * 0.5
                slope += read(grad_action, wide, i) * half * 4 * decay / ((1 + decay) * (1 + decay))
            write(by_loc, wide, i, slope)
            write(by_scale, wide, i, slope * z - by_density / deviation)
            i += 1


def _address(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


def sample(
    loc: Tensor,
    scale: Tensor,
    noise: Tensor,
    low: Tensor | None,
    high: Tensor | None,
    low_value: float,
    high_value: float,
    event_dims: int,
) -> tuple[Tensor, Tensor]:
    """See :data:`gpubuf.kernels.tanh_normal.sample`."""
    last = check_arguments(loc, scale, noise, low, high, event_dims)
    real = computing_dtype(loc, scale)
    action = torch.empty(loc.shape, dtype=real)
    log_prob = torch.empty(loc.shape[: loc.ndim - event_dims], dtype=real)
    # The copies must outlive the call, hence the names.
    loc_, scale_, noise_ = dense(loc, real), dense(scale, real), dense(noise, real)
    low_, high_ = (None if b is None else dense(b, real) for b in (low, high))
    n = log_prob.numel()
    _sample(
        loc_.data_ptr(),
        scale_.data_ptr(),
        noise_.data_ptr(),
        _address(low_),
        _address(high_),
        low_value,
        high_value,
        n,
        loc.numel() // n if n else 0,
        last,
        real is torch.float64,
        action.data_ptr(),
        log_prob.data_ptr(),
    )
    dtype = torch.promote_types(loc.dtype, scale.dtype)
    return action.to(dtype), log_prob


def sample_backward(
    grad_action: Tensor | None,
    grad_log_prob: Tensor | None,
    loc: Tensor,
    scale: Tensor,
    noise: Tensor,
    low: Tensor | None,
    high: Tensor | None,
    low_value: float,
    high_value: float,
    event_dims: int,
) -> tuple[Tensor, Tensor]:
    """See :data:`gpubuf.kernels.tanh_normal.sample_backward`."""
    last = check_arguments(loc, scale, noise, low, high, event_dims)
    real = computing_dtype(loc, scale)
    by_loc, by_scale = torch.empty(loc.shape, dtype=real), torch.empty(loc.shape, dtype=real)
    loc_, scale_, noise_ = dense(loc, real), dense(scale, real), dense(noise, real)
    optional = [None if t is None else dense(t, real) for t in (grad_action, grad_log_prob, low, high)]
    width = loc.shape[loc.ndim - event_dims :].numel()
    _sample_backward(
        _address(optional[0]),
        _address(optional[1]),
        loc_.data_ptr(),
        scale_.data_ptr(),
        noise_.data_ptr(),
        _address(optional[2]),
        _address(optional[3]),
        (high_value - low_value) * 0.5,
        loc.numel() // width if width else 0,
        width,
        last,
        real is torch.float64,
        by_loc.data_ptr(),
        by_scale.data_ptr(),
    )
    return by_loc.to(loc.dtype), by_scale.to(scale.dtype)
