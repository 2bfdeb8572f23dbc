"""The tanh-normal distribution on the CPU.

One kernel serves both precisions: the flag ``wide`` says whether every array is float64 or float32, and the arithmetic
is float64 either way.
"""

# Numba needs the real signatures: no `from __future__ import annotations`.

import math

import numpy as np

from gpubuf.kernels import tanh_normal
from gpubuf.kernels._loops import loop
from gpubuf.kernels._primitives import (
    exp_below_700,
    is_positive_normal,
    load,
    log1p_of_fraction,
    log_of_normal,
    read,
    store,
    write,
)
from gpubuf.kernels.tanh_normal import HALF_LOG_2_PI, LOG_2

#: Elements that are worked on at a time, in buffers that stay in the first cache.
_CHUNK = 256


@loop(tanh_normal.sample)
def sample(  # type: ignore[no-untyped-def]
    loc, scale, noise, low, high, low_value: float, high_value: float, n, width, last, wide: bool, action_out,
    log_prob_out,
):  # fmt: skip
    lows, highs, constants = np.empty(last), np.empty(last), np.empty(last)
    for i in range(last):
        lows[i] = read(low, wide, i) if low else low_value
        highs[i] = read(high, wide, i) if low else high_value
        constants[i] = -HALF_LOG_2_PI - math.log((highs[i] - lows[i]) * 0.5)
    mean, deviation, z = np.empty(_CHUNK), np.empty(_CHUNK), np.empty(_CHUNK)
    density, tanh = np.empty(_CHUNK), np.empty(_CHUNK)
    total, row, column, bound = 0.0, 0, 0, 0
    for start in range(0, n * width, _CHUNK):
        count = min(_CHUNK, n * width - start)
        load(loc, wide, start, count, mean)
        load(scale, wide, start, count, deviation)
        load(noise, wide, start, count, z)
        for j in range(count):
            x = mean[j] + deviation[j] * z[j]
            decay = exp_below_700(-2 * abs(x))
            tanh[j] = math.copysign((1 - decay) / (1 + decay), x)
            log_sech2 = 2 * (LOG_2 - abs(x) - log1p_of_fraction(decay))
            density[j] = -0.5 * z[j] * z[j] - log_of_normal(deviation[j]) - log_sech2
        for j in range(count):
            if not is_positive_normal(deviation[j]):
                density[j] += log_of_normal(deviation[j]) - math.log(deviation[j])
            lowest, highest = lows[bound], highs[bound]
            a = (highest + lowest) * 0.5 + (highest - lowest) * 0.5 * tanh[j]
            # Rounding may step over a bound; a NaN stays one.
            tanh[j] = highest if a > highest else lowest if a < lowest else a
            total += density[j] + constants[bound]
            bound += 1
            if bound == last:
                bound = 0
            column += 1
            if column == width:
                write(log_prob_out, wide, row, total)
                total, column, row = 0.0, 0, row + 1
        store(tanh, action_out, wide, start, count)
    if not width:
        for i in range(n):
            write(log_prob_out, wide, i, 0.0)


@loop(tanh_normal.sample_backward)
def sample_backward(  # type: ignore[no-untyped-def]
    loc, scale, noise, low, high, grad_action, grad_log_prob, low_value: float, high_value: float, n, width, last,
    wide: bool, grad_loc_out, grad_scale_out,
):  # fmt: skip
    halves = np.empty(last)
    for i in range(last):
        halves[i] = (read(high, wide, i) - read(low, wide, i)) * 0.5 if low else (high_value - low_value) * 0.5
    mean, deviation, z = np.empty(_CHUNK), np.empty(_CHUNK), np.empty(_CHUNK)
    by_action, by_density = np.zeros(_CHUNK), np.zeros(_CHUNK)
    row, column, bound = 0, 0, 0
    for start in range(0, n * width, _CHUNK):
        count = min(_CHUNK, n * width - start)
        load(loc, wide, start, count, mean)
        load(scale, wide, start, count, deviation)
        load(noise, wide, start, count, z)
        if grad_action:
            load(grad_action, wide, start, count, by_action)
            for j in range(count):
                by_action[j] *= halves[bound]
                bound += 1
                if bound == last:
                    bound = 0
        if grad_log_prob:
            for j in range(count):
                by_density[j] = read(grad_log_prob, wide, row)
                column += 1
                if column == width:
                    column, row = 0, row + 1
        for j in range(count):
            x = mean[j] + deviation[j] * z[j]
            decay = exp_below_700(-2 * abs(x))
            inverse = 1 / (1 + decay)
            tanh = math.copysign((1 - decay) * inverse, x)
            slope = by_density[j] * 2 * tanh + by_action[j] * 4 * decay * inverse * inverse
            mean[j] = slope
            deviation[j] = slope * z[j] - by_density[j] / deviation[j]
        store(mean, grad_loc_out, wide, start, count)
        store(deviation, grad_scale_out, wide, start, count)
