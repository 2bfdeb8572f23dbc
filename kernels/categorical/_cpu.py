"""Projected targets of categorical critics, and their expected values, on the CPU.

There is a kernel for each computing dtype, which all float arrays have: logits are vectorised in it, and what there is
one of a row is float64. The address 0 stands for an absent argument. A large batch is worked on in parts
(:mod:`gpubuf.kernels._threads`); every row is computed for itself, so that the parts change nothing.
"""

# Numba needs the real signatures: no `from __future__ import annotations`.

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numba import carray
from torch import Tensor

from gpubuf.kernels._differentiable import computing_dtype
from gpubuf.kernels._floats import call_parts, flags, read, write
from gpubuf.kernels._jit import OPTIONS, jit
from gpubuf.kernels._pointers import as_u8
from gpubuf.kernels.categorical import MIN, MIXTURE, OWN, check_categorical_target, check_logits, check_support
from gpubuf.kernels.categorical._cpu_atoms import (
    copy,
    exponentials,
    fill,
    load_row,
    padded,
    product_of,
    project,
    store_row,
    total_of,
)

INFINITY = float("inf")

#: Atoms of a row that take as long as a row of :data:`gpubuf.kernels._threads.ROWS_A_THREAD`.
ATOMS_OF_WORK = 16


def work_of(nets: int, atoms: int) -> int:
    """How long a row of ``nets`` critics takes, for :func:`gpubuf.kernels._threads.parts`."""
    return max(nets * atoms // ATOMS_OF_WORK, 1)


def for_each_dtype(kernel: Callable[[Any], Any]) -> dict[torch.dtype, Any]:
    """What ``kernel`` makes of a NumPy dtype, by the computing dtype."""
    return {torch.float32: kernel(np.float32), torch.float64: kernel(np.float64)}


def _target_of(real: Any) -> Any:
    wide = real is np.float64

    @jit(
        "void(int64, int64, int64, int64, int64, float64, int64, int64, float64, float64, int64, int64, int64, int64,"
        " int64, int64, int64)",
        **OPTIONS,
    )
    def target(  # type: ignore[no-untyped-def]
        next_logits,
        next_log_prob,
        alpha,
        reward,
        terminated,
        discount,
        steps,
        reward_scale,
        v_min,
        v_max,
        kind,
        n,
        nets,
        atoms,
        first,
        length,
        out_address,
    ):
        temperature = read(alpha, wide, 0) if alpha else 0.0
        scale = read(reward_scale, wide, 0) if reward_scale else 1.0
        spacing = (v_max - v_min) / (atoms - 1)
        ended = carray(as_u8(terminated), n)
        # One place more than atoms, for what `project` puts behind the last.
        width = padded(atoms + 1)
        logits, mass = np.empty(width, real), np.empty(width, real)
        chosen, out = np.empty(width, real), np.empty(width, real)
        low, high, below = np.empty(width, real), np.empty(width, real), np.empty(width, np.int32)
        places = np.arange(width).astype(real)
        share = real(1 / nets)
        for row in range(first, first + length):
            place, slope = (read(reward, wide, row) * scale - v_min) / spacing, 0.0
            if not ended[row]:
                slope = discount ** read(steps, wide, row) if steps else discount
                bonus = temperature * read(next_log_prob, wide, row) if next_log_prob else 0.0
                # In units of atoms, z_j is v_min / spacing + j.
                place += (slope * (v_min - bonus)) / spacing
            smallest = norms = norm = 0.0
            for net in range(nets):
                if ended[row]:
                    # All mass moves to one place, however it is distributed.
                    fill(mass, 0.0)
                    mass[0] = 1.0
                else:
                    load_row(next_logits, (net * n + row) * atoms, atoms, logits, -INFINITY)
                    exponentials(logits, mass)
                    norm = total_of(mass)
                    norms += norm
                    inverse = real(1 / norm)
                    for j in range(width):
                        mass[j] *= inverse
                if kind == MIN:
                    # The order of the expected values is that of the expected places. A NaN is the smallest.
                    value = product_of(mass, places)
                    if net == 0 or value < smallest or (value != value and smallest == smallest):
                        smallest = value
                        copy(mass, chosen)
                elif kind == MIXTURE:
                    for j in range(width):
                        chosen[j] = (chosen[j] if net else real(0)) + mass[j] * share
                else:
                    copy(mass, chosen)
                if kind != OWN and net < nets - 1:
                    continue
                project(chosen, atoms, place, slope, low, high, below, out)
                # NaN at a place or in logits is in all masses that depend on them.
                seen = place + (norm if kind == OWN else norms)
                if seen != seen:
                    fill(out, np.nan)
                store_row(out_address, ((net if kind == OWN else 0) * n + row) * atoms, atoms, out)

    return target


def _expected_value_of(real: Any) -> Any:
    wide = real is np.float64

    @jit("void(int64, float64, float64, int64, int64, int64, int64, int64)", **OPTIONS)
    def expected_value(logits, v_min, v_max, n, atoms, first, length, value):  # type: ignore[no-untyped-def]
        spacing = (v_max - v_min) / (atoms - 1)
        width = padded(atoms)
        buffer, mass = np.empty(width, real), np.empty(width, real)
        places = np.arange(width).astype(real)
        for row in range(first, first + length):
            load_row(logits, row * atoms, atoms, buffer, -INFINITY)
            exponentials(buffer, mass)
            place = product_of(mass, places) / total_of(mass)
            write(value, wide, row, v_min + spacing * place)

    return expected_value


def _expected_value_backward_of(real: Any) -> Any:
    wide = real is np.float64

    @jit("void(int64, int64, int64, float64, float64, int64, int64, int64, int64, int64)", **OPTIONS)
    def expected_value_backward(grad, logits, value, v_min, v_max, n, atoms, first, length, by_logits):  # type: ignore[no-untyped-def]
        spacing = (v_max - v_min) / (atoms - 1)
        width = padded(atoms)
        buffer, mass = np.empty(width, real), np.empty(width, real)
        places = np.arange(width).astype(real)
        for row in range(first, first + length):
            load_row(logits, row * atoms, atoms, buffer, -INFINITY)
            exponentials(buffer, mass)
            factor = read(grad, wide, row) / total_of(mass)
            at_first, step = real(factor * (v_min - read(value, wide, row))), real(factor * spacing)
            for j in range(width):
                mass[j] = mass[j] * (at_first + step * places[j])
            store_row(by_logits, row * atoms, atoms, mass)

    return expected_value_backward


_target, _expected_value, _expected_value_backward = (
    for_each_dtype(kernel) for kernel in (_target_of, _expected_value_of, _expected_value_backward_of)
)


def categorical_target(
    next_logits: Tensor,
    next_log_prob: Tensor | None,
    alpha: Tensor | None,
    reward: Tensor,
    terminated: Tensor,
    gamma: Tensor,
    steps: Tensor | None,
    reward_scale: Tensor | None,
    v_min: float,
    v_max: float,
    target: int,
) -> Tensor:
    """See :data:`gpubuf.kernels.categorical.categorical_target`."""
    nets, atoms = check_categorical_target(
        next_logits, next_log_prob, alpha, reward, terminated, gamma, steps, reward_scale, v_min, v_max, target
    )
    n, real = reward.numel(), computing_dtype(next_logits)
    mass = torch.empty((nets if target == OWN else 1, *next_logits.shape[1:]), dtype=real)
    rows = (next_logits, next_log_prob, alpha, reward, flags(terminated), gamma.item(), steps, reward_scale)
    given = (*rows, v_min, v_max, target, n, nets, atoms)
    call_parts(_target[real], real, given, n, [mass], work_of(nets, atoms))
    return mass


def expected_value(logits: Tensor, v_min: float, v_max: float) -> Tensor:
    """See :data:`gpubuf.kernels.categorical.expected_value`."""
    check_support(v_min, v_max)
    _, atoms = check_logits(logits, logits.shape[1:-1].numel())
    real = computing_dtype(logits)
    value = torch.empty(logits.shape[:-1], dtype=real)
    n = value.numel()
    given = (logits, v_min, v_max, n, atoms)
    call_parts(_expected_value[real], real, given, n, [value], work_of(1, atoms))
    return value


def expected_value_backward(grad: Tensor, logits: Tensor, value: Tensor, v_min: float, v_max: float) -> Tensor:
    """See :data:`gpubuf.kernels.categorical.expected_value_backward`."""
    real, n, atoms = computing_dtype(logits), value.numel(), logits.shape[-1]
    by_logits = torch.empty(logits.shape, dtype=real)
    given = (grad, logits, value, v_min, v_max, n, atoms)
    call_parts(_expected_value_backward[real], real, given, n, [by_logits], work_of(1, atoms))
    return by_logits.to(logits.dtype)
