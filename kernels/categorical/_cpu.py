"""Categorical critics on the CPU: projected targets, the cross entropy, and expected values.

There is a kernel for each computing dtype, which all float arrays have: logits are vectorised in it, and what there is
one of a row is float64. The address 0 stands for an absent argument. A large batch is worked on in parts
(:mod:`gpubuf.kernels._threads`); every row is computed for itself, so that the parts change nothing.

A row of atoms is in a *buffer*, which stays in the first cache. It has numbers of one dtype, float32 or float64, and
their count is a multiple of ``BLOCK``; those after the last atom count for nothing. Sums are vectorised: their order
depends on the processor, and on nothing else.
"""

# Numba needs the real signatures: no `from __future__ import annotations`.

import math
from typing import Any

import numpy as np
import torch
from numba import carray, types
from numba.extending import overload

from gpubuf.kernels import categorical
from gpubuf.kernels._jit import jit, kernel
from gpubuf.kernels._loops import Call, for_each_dtype, loop, loops
from gpubuf.kernels._primitives import (
    as_u8,
    bits_of,
    bits_of_f32,
    exp_below_88_f32,
    exp_below_700,
    f32_of_bits,
    float_of_bits,
    is_positive_normal,
    is_positive_normal_f32,
    log_of_normal,
    log_of_normal_f32,
    read,
    view,
    write,
)
from gpubuf.kernels.categorical import DIVERGENCE, MIN, MIXTURE, OWN
from gpubuf.kernels.td import NONE
from gpubuf.kernels.td._cpu_reduce import normaliser, weight_of

#: Numbers of a vector, or of several.
BLOCK = 16

_INLINED: Any = {"forceinline": True}


def _exp(x: Any) -> Any:
    """exp(x) of x up to 0."""


def _x_log_x(x: Any) -> Any:
    """x log(x), 0 where x is not a positive normal number: below those it is next to nothing."""


def _order(x: Any) -> Any:
    """An integer that is larger for larger x. The compiler vectorises the search for the largest integer only."""


def _of_order(order: Any, like: Any) -> Any:
    """The x of an integer that ``_order`` gave, in the dtype of an array."""


@overload(_order, jit_options=_INLINED)
def _order_of_dtype(x):  # type: ignore[no-untyped-def]
    if x == types.float32:
        return lambda x: turn_f32(np.int32(bits_of_f32(x)))
    return lambda x: turn(bits_of(x))


@overload(_of_order, jit_options=_INLINED)
def _of_order_of_dtype(order, like):  # type: ignore[no-untyped-def]
    if like.dtype == types.float32:
        return lambda order, like: f32_of_bits(np.uint32(turn_f32(order)))
    return lambda order, like: float_of_bits(turn(order))


@overload(_exp, jit_options=_INLINED)
def _exp_of_dtype(x):  # type: ignore[no-untyped-def]
    return (lambda x: exp_below_88_f32(x)) if x == types.float32 else (lambda x: exp_below_700(x))


@overload(_x_log_x, jit_options=_INLINED)
def _x_log_x_of_dtype(x):  # type: ignore[no-untyped-def]
    if x == types.float32:
        return lambda x: x * log_of_normal_f32(x) if is_positive_normal_f32(x) else np.float32(0)
    return lambda x: x * log_of_normal(x) if is_positive_normal(x) else 0.0


_NOT_THE_SIGN_32, _SIGN_32 = np.int32(0x7FFFFFFF), np.int32(31)


@jit(forceinline=True)
def turn_f32(bits):  # type: ignore[no-untyped-def]
    """The bits of floats in the order of their values, as integers, and back."""
    return np.int32(bits ^ np.int32(np.int32(bits >> _SIGN_32) & _NOT_THE_SIGN_32))


@jit(forceinline=True)
def turn(bits):  # type: ignore[no-untyped-def]
    """The same of float64."""
    return bits ^ ((bits >> 63) & 0x7FFFFFFFFFFFFFFF)


@jit(forceinline=True)
def padded(atoms):  # type: ignore[no-untyped-def]
    """``atoms``, rounded up to whole blocks: a loop over them leaves no rest that is worked on one by one."""
    return (atoms + BLOCK - 1) // BLOCK * BLOCK


@jit(forceinline=True)
def fill(buffer, value):  # type: ignore[no-untyped-def]
    """Set every number. An assignment to a slice takes Numba a second to compile."""
    for j in range(len(buffer)):
        buffer[j] = value


@jit(forceinline=True)
def copy(source, target):  # type: ignore[no-untyped-def]
    """Copy one buffer to another."""
    for j in range(len(target)):
        target[j] = source[j]


@jit(forceinline=True)
def load_row(address, start, atoms, buffer, behind):  # type: ignore[no-untyped-def]
    """Copy the ``atoms`` numbers from ``start`` on, and put ``behind`` after them."""
    # An index that is a sum might be negative, as far as the compiler knows, and would not be vectorised.
    source = view(address + start * buffer.itemsize, atoms, buffer[0])
    fill(buffer, behind)
    for j in range(atoms):
        buffer[j] = source[j]


@jit(forceinline=True)
def store_row(address, start, atoms, buffer):  # type: ignore[no-untyped-def]
    """Write the first ``atoms`` numbers of ``buffer`` from ``start`` on."""
    target = view(address + start * buffer.itemsize, atoms, buffer[0])
    for j in range(atoms):
        target[j] = buffer[j]


@jit(forceinline=True)
def largest(buffer):  # type: ignore[no-untyped-def]
    """The largest number. A NaN with its sign bit is the smallest, any other the largest."""
    most = _order(buffer[0])
    for j in range(len(buffer)):
        order = _order(buffer[j])
        most = order if order > most else most
    return _of_order(most, buffer)


@jit(forceinline=True, fastmath={"reassoc"})
def total_of(buffer):  # type: ignore[no-untyped-def]
    """The sum of all numbers."""
    total = buffer.dtype.type(0)
    for j in range(len(buffer)):
        total += buffer[j]
    return total


@jit(forceinline=True, fastmath={"reassoc"})
def product_of(a, b):  # type: ignore[no-untyped-def]
    """``sum_j a_j b_j``."""
    total = a.dtype.type(0)
    for j in range(len(a)):
        total += a[j] * b[j]
    return total


@jit(forceinline=True)
def exponentials(buffer, out):  # type: ignore[no-untyped-def]
    """``out = exp(buffer - top)``, and returns top, the largest of them. NaN stays in its place."""
    top = largest(buffer)
    for j in range(len(buffer)):
        out[j] = _exp(buffer[j] - top)
    return top


@jit(forceinline=True, fastmath={"reassoc"})
def entropy_of(mass):  # type: ignore[no-untyped-def]
    """``-sum_j mass_j log(mass_j)``. What is not positive adds nothing."""
    total = mass.dtype.type(0)
    for j in range(len(mass)):
        total += _x_log_x(mass[j])
    return -total


@jit(forceinline=True, fastmath={"reassoc"})
def cross_entropy(logits, top, norm, mass):  # type: ignore[no-untyped-def]
    """``-sum_j mass_j (logits_j - top - log(norm))``; an atom without mass adds nothing, whatever its logit."""
    zero = mass.dtype.type(0)
    shift = mass.dtype.type(math.log(norm))
    total = zero
    for j in range(len(mass)):
        # The difference first: it is small where it counts, while both may be large.
        below = logits[j] - top
        term = mass[j] * (shift - below)
        total += term if mass[j] != zero else zero
    return total


@jit(forceinline=True)
def project(mass, atoms, first, slope, low, high, below, out):  # type: ignore[no-untyped-def]
    """Share the mass of atom j, at the place ``first + slope * j`` in units of atoms, among the two atoms around.

    ``out`` gets the result. ``low`` and ``high`` are buffers of as many numbers, and ``below`` of int32.
    """
    last = atoms - 1.0
    for j in range(atoms):
        place = first + slope * j
        place = place if place > 0 else 0.0
        place = place if place < last else last
        floor = np.int32(place)
        upper = mass[j] * mass.dtype.type(place - floor)
        below[j] = floor
        high[j] = upper
        low[j] = mass[j] - upper
    fill(out, 0.0)
    # In the order of the atoms. The last atom has no atom after it, and nothing goes there: its place is whole.
    for j in range(atoms):
        floor = below[j]
        out[floor] += low[j]
        out[floor + 1] += high[j]


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
    call.values["losses"] = torch.empty(call.values["n"], dtype=torch.float64, device="cpu")
    call.run(_losses, _rows_of_nets)
    # In one thread, and so in a fixed order.
    call.run(_reduced)
