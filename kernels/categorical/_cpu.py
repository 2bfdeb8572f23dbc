"""Categorical critics on the CPU: projected targets, the cross entropy, and expected values.

There is a kernel for each computing dtype, which all float arrays have: logits are vectorised in it, and what there is
one of a row is float64. The address 0 stands for an absent argument. A large batch is worked on in parts
(:mod:`gpubuf.kernels._threads`); every row is computed for itself, so that the parts change nothing.
"""

# Numba needs the real signatures: no `from __future__ import annotations`.

from typing import Any

import numpy as np
import torch
from numba import carray

from gpubuf.kernels import categorical
from gpubuf.kernels._floats import read, write
from gpubuf.kernels._jit import kernel
from gpubuf.kernels._loops import Call, for_each_dtype, loop, loops
from gpubuf.kernels._pointers import as_u8
from gpubuf.kernels.categorical import DIVERGENCE, MIN, MIXTURE, OWN
from gpubuf.kernels.categorical._cpu_atoms import (
    copy,
    cross_entropy,
    entropy_of,
    exponentials,
    fill,
    load_row,
    padded,
    product_of,
    project,
    store_row,
    total_of,
)
from gpubuf.kernels.td import NONE
from gpubuf.kernels.td._cpu_reduce import normaliser, weight_of

INFINITY = float("inf")

#: Atoms of a row that take as long as a row of :data:`gpubuf.kernels._threads.ROWS_A_THREAD`.
ATOMS_OF_WORK = 16


def _rows_of_nets(n: int, nets: int, atoms: int) -> tuple[int, int]:
    return n, max(nets * atoms // ATOMS_OF_WORK, 1)


def _rows_of_one(n: int, atoms: int) -> tuple[int, int]:
    return _rows_of_nets(n, 1, atoms)


def _target_of(real: Any) -> Any:
    wide = real is np.float64

    def project_rows(  # type: ignore[no-untyped-def]
        next_logits, next_log_prob, alpha, reward, terminated, gamma: float, steps, reward_scale, v_min: float,
        v_max: float, target, n, nets, atoms, first, length, target_out,
    ):  # fmt: skip
        temperature = read(alpha, wide, 0) if alpha else 0.0
        scale = read(reward_scale, wide, 0) if reward_scale else 1.0
        spacing = (v_max - v_min) / (atoms - 1)
        ended = carray(as_u8(terminated), n)
        # One place more than atoms, for what `project` puts after the last.
        width = padded(atoms + 1)
        logits, mass = np.empty(width, real), np.empty(width, real)
        chosen, out = np.empty(width, real), np.empty(width, real)
        low, high, below = np.empty(width, real), np.empty(width, real), np.empty(width, np.int32)
        places = np.arange(width).astype(real)
        share = real(1 / nets)
        for row in range(first, first + length):
            place, slope = (read(reward, wide, row) * scale - v_min) / spacing, 0.0
            if not ended[row]:
                slope = gamma ** read(steps, wide, row) if steps else gamma
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
                if target == MIN:
                    # The order of the expected values is that of the expected places. A NaN is the smallest.
                    value = product_of(mass, places)
                    if net == 0 or value < smallest or (value != value and smallest == smallest):
                        smallest = value
                        copy(mass, chosen)
                elif target == MIXTURE:
                    for j in range(width):
                        chosen[j] = (chosen[j] if net else real(0)) + mass[j] * share
                else:
                    copy(mass, chosen)
                if target != OWN and net < nets - 1:
                    continue
                project(chosen, atoms, place, slope, low, high, below, out)
                # NaN at a place or in logits is in all masses that depend on them.
                seen = place + (norm if target == OWN else norms)
                if seen != seen:
                    fill(out, np.nan)
                store_row(target_out, ((net if target == OWN else 0) * n + row) * atoms, atoms, out)

    return project_rows


def _expected_value_of(real: Any) -> Any:
    wide = real is np.float64

    def expected_value(logits, v_min: float, v_max: float, atoms, first, length, value_out):  # type: ignore[no-untyped-def]
        spacing = (v_max - v_min) / (atoms - 1)
        width = padded(atoms)
        buffer, mass = np.empty(width, real), np.empty(width, real)
        places = np.arange(width).astype(real)
        for row in range(first, first + length):
            load_row(logits, row * atoms, atoms, buffer, -INFINITY)
            exponentials(buffer, mass)
            place = product_of(mass, places) / total_of(mass)
            write(value_out, wide, row, v_min + spacing * place)

    return expected_value


def _expected_value_backward_of(real: Any) -> Any:
    wide = real is np.float64

    def expected_value_backward(  # type: ignore[no-untyped-def]
        grad, logits, value, v_min: float, v_max: float, atoms, first, length, grad_logits_out
    ):
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
            store_row(grad_logits_out, row * atoms, atoms, mass)

    return expected_value_backward


def _losses_of(real: Any) -> Any:
    wide = real is np.float64

    def rows_of_loss(  # type: ignore[no-untyped-def]
        logits, target, v_min: float, v_max: float, priority, average: bool, n, nets, atoms, shared: bool, first,
        length, losses, priority_out,
    ):  # fmt: skip
        spacing = (v_max - v_min) / (atoms - 1)
        width = padded(atoms)
        buffer, mass, own = np.empty(width, real), np.empty(width, real), np.empty(width, real)
        places = np.arange(width).astype(real)
        known = 0.0
        for row in range(first, first + length):
            loss = most = 0.0
            for net in range(nets):
                if net == 0 or not shared:
                    load_row(target, (net * n + row) * atoms, atoms, mass, 0.0)
                    known = entropy_of(mass) if priority == DIVERGENCE else product_of(mass, places)
                load_row(logits, (net * n + row) * atoms, atoms, buffer, -INFINITY)
                top = exponentials(buffer, own)
                norm = total_of(own)
                each = cross_entropy(buffer, top, norm, mass)
                loss += each
                far = each - known
                if priority != DIVERGENCE:
                    far = abs(product_of(own, places) / norm - known) * spacing
                # By comparisons that a NaN fails, so that it stays one.
                if far > most or far != far:
                    most = far
            write(losses, True, row, loss / nets if average else loss)
            write(priority_out, wide, row, most)

    return rows_of_loss


@kernel
def _reduced(losses, weight, mask, reduction, n, wide: bool, loss_out, norm_out):  # type: ignore[no-untyped-def]
    total = mass = 0.0
    for row in range(n):
        w, counts = weight_of(weight, mask, wide, row)
        product = w * read(losses, True, row) if counts else 0.0
        if reduction == NONE:
            write(loss_out, wide, row, product)
        total += product
        mass += w
    norm = normaliser(mass, reduction)
    write(norm_out, wide, 0, norm)
    if reduction != NONE:
        write(loss_out, wide, 0, total * norm)


def _loss_backward_of(real: Any) -> Any:
    wide = real is np.float64

    def backward(  # type: ignore[no-untyped-def]
        grad, logits, target, weight, mask, norm, average: bool, reduction, n, nets, atoms, shared: bool, first, length,
        grad_logits_out,
    ):  # fmt: skip
        scale = read(norm, wide, 0) / (nets if average else 1)
        width = padded(atoms)
        buffer, mass, own = np.empty(width, real), np.empty(width, real), np.empty(width, real)
        for row in range(first, first + length):
            w, counts = weight_of(weight, mask, wide, row)
            factor = read(grad, wide, row if reduction == NONE else 0) * scale * w
            for net in range(nets):
                start = (net * n + row) * atoms
                if not counts:
                    fill(own, 0.0)
                    store_row(grad_logits_out, start, atoms, own)
                    continue
                if net == 0 or not shared:
                    load_row(target, start, atoms, mass, 0.0)
                load_row(logits, start, atoms, buffer, -INFINITY)
                exponentials(buffer, own)
                by_own, by_mass = real(factor / total_of(own)), real(factor)
                for j in range(width):
                    own[j] = by_own * own[j] - by_mass * mass[j]
                store_row(grad_logits_out, start, atoms, own)

    return backward


target = loop(categorical.categorical_target, _rows_of_nets)(for_each_dtype(_target_of))
expected_value = loop(categorical.expected_value, _rows_of_one)(for_each_dtype(_expected_value_of))
expected_value_backward = loop(categorical.expected_value_backward, _rows_of_one)(
    for_each_dtype(_expected_value_backward_of)
)
loss_backward = loop(categorical.categorical_loss_backward, _rows_of_nets)(for_each_dtype(_loss_backward_of))
_losses = for_each_dtype(_losses_of)


@loops(categorical.categorical_loss)
def loss(call: Call) -> None:
    call.values["losses"] = torch.empty(call.values["n"], dtype=torch.float64)
    call.run(_losses, _rows_of_nets)
    # In one thread, and so in a fixed order.
    call.run(_reduced)
