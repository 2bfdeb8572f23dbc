"""Running statistics on the CPU."""

# Numba needs the real signatures: no `from __future__ import annotations`.

import math

import numpy as np
import torch
from numba import carray
from torch import Tensor

from gpubuf.kernels._jit import jit, kernel
from gpubuf.kernels._primitives import as_f32, as_f64, as_u8
from gpubuf.kernels.moments import (
    ACTIVE,
    COUNT,
    EPS,
    GAMMA,
    M2,
    MEAN,
    PEAK,
    PEAK_AT,
    UNTIL,
    Rule,
    check_returns,
    check_update,
)

_RULE = len(Rule._fields)
#: Elements that are worked on at a time: their sums stay in the first cache.
_CHUNK = 512


@jit(forceinline=True)
def _sum_up(source, n, elements, first, width, total, peak):  # type: ignore[no-untyped-def]
    """Sum and largest magnitude of some elements. Returns whether all numbers are finite; if not, both are wrong."""
    for j in range(width):
        total[j] = peak[j] = 0.0
    for i in range(n):
        row = source[i * elements + first : i * elements + first + width]
        for j in range(width):
            x = np.float64(row[j])
            total[j] += x
            magnitude = abs(x)
            peak[j] = magnitude if magnitude > peak[j] else peak[j]
    wrong = 0
    for j in range(width):
        wrong += not abs(total[j]) < math.inf
    return wrong == 0


@jit(forceinline=True)
def _sum_up_finite(source, n, elements, first, width, count, total, peak):  # type: ignore[no-untyped-def]
    """As :func:`_sum_up`, and the count, of the finite numbers alone."""
    for j in range(width):
        count[j] = total[j] = peak[j] = 0.0
    for i in range(n):
        row = source[i * elements + first : i * elements + first + width]
        for j in range(width):
            x = np.float64(row[j])
            finite = abs(x) < math.inf
            count[j] += 1.0 if finite else 0.0
            total[j] += x if finite else 0.0
            magnitude = abs(x) if finite else 0.0
            peak[j] = magnitude if magnitude > peak[j] else peak[j]


@jit(forceinline=True)
def _deviate(source, n, elements, first, width, mean, m2):  # type: ignore[no-untyped-def]
    """Sum of squared deviations of the finite numbers."""
    for j in range(width):
        m2[j] = 0.0
    for i in range(n):
        row = source[i * elements + first : i * elements + first + width]
        for j in range(width):
            x = np.float64(row[j])
            d = x - mean[j] if abs(x) < math.inf else 0.0
            m2[j] += d * d


@jit(forceinline=True)
def _moments(source, n, elements, first, width, count, mean, m2, peak):  # type: ignore[no-untyped-def]
    """Count, mean, M2 and largest magnitude of some elements of a batch."""
    if _sum_up(source, n, elements, first, width, mean, peak):
        for j in range(width):
            count[j] = float(n)
    else:
        _sum_up_finite(source, n, elements, first, width, count, mean, peak)
    for j in range(width):
        mean[j] = mean[j] / count[j] if count[j] else 0.0
    _deviate(source, n, elements, first, width, mean, m2)


@kernel
def _update(source, wide: bool, n, elements, state_address, mean_address, factor_address, rule_address):  # type: ignore[no-untyped-def]
    state = carray(as_f64(state_address), (4, elements))
    rule = carray(as_f64(rule_address), _RULE)
    factor = carray(as_f32(factor_address), elements)
    count, mean, m2, peak = np.empty(_CHUNK), np.empty(_CHUNK), np.empty(_CHUNK), np.empty(_CHUNK)
    for first in range(0, elements, _CHUNK):
        width = min(_CHUNK, elements - first)
        # Two calls, so that the loops of each are vectorised.
        if wide:
            _moments(carray(as_f64(source), n * elements), n, elements, first, width, count, mean, m2, peak)
        else:
            _moments(carray(as_f32(source), n * elements), n, elements, first, width, count, mean, m2, peak)
        for j in range(width):
            e = first + j
            before = state[COUNT, e]
            if count[j] and rule[ACTIVE] and before < rule[UNTIL]:
                now = before + count[j]
                share, step = count[j] / now, mean[j] - state[MEAN, e]
                state[COUNT, e] = now
                state[MEAN, e] += step * share
                state[M2, e] += m2[j] + step * step * before * share
                state[PEAK, e] = max(state[PEAK, e], peak[j])
            if state[COUNT, e]:
                scale = max(math.sqrt(state[M2, e] / state[COUNT, e] + rule[EPS]), state[PEAK, e] / rule[PEAK_AT])
                factor[e] = 1.0 / scale
            else:
                factor[e] = 1.0
    if mean_address:
        means = carray(as_f32(mean_address), elements)
        for e in range(elements):
            means[e] = state[MEAN, e]


def update(state: Tensor, source: Tensor, mean: Tensor | None, factor: Tensor, rule: Tensor, tickets: Tensor) -> None:
    """See :data:`gpubuf.kernels.moments.update`."""
    check_update(state, source, mean, factor, rule)
    wide = source.dtype is not torch.float32
    if wide and source.dtype is not torch.float64:
        source = source.double()
    source = source.contiguous()
    n, elements = source.shape
    mean_address = 0 if mean is None else mean.data_ptr()
    _update(
        source.data_ptr(), wide, n, elements, state.data_ptr(), mean_address, factor.data_ptr(), rule.data_ptr()
    )  # fmt: skip


@kernel
def _returns(rewards_address, ends_address, before_address, rule_address, out_address, steps, envs, elements):  # type: ignore[no-untyped-def]
    per_step = envs * elements
    rewards, out = carray(as_f64(rewards_address), steps * per_step), carray(as_f64(out_address), steps * per_step)
    ends, before = carray(as_u8(ends_address), steps * envs), carray(as_f64(before_address), per_step)
    gamma = carray(as_f64(rule_address), _RULE)[GAMMA]
    for t in range(steps):
        for e in range(envs):
            kept = 0.0 if ends[t * envs + e] else gamma
            for j in range(e * elements, (e + 1) * elements):
                reward = rewards[t * per_step + j]
                total = before[j] + (reward if abs(reward) < math.inf else 0.0)
                out[t * per_step + j] = total
                before[j] = kept * total if kept else 0.0


def returns(before: Tensor, rewards: Tensor, ends: Tensor, rule: Tensor) -> Tensor:
    """See :data:`gpubuf.kernels.moments.returns`."""
    check_returns(before, rewards, ends, rule)
    wide, flags = rewards.double().contiguous(), ends.contiguous()
    out = torch.empty(rewards.shape, dtype=torch.float64, device="cpu")
    addresses = (tensor.data_ptr() for tensor in (wide, flags, before, rule, out))
    _returns(*addresses, *rewards.shape)
    return out
