"""Helpers of the losses on the CPU: weights, masks, the factor of a reduction, the smallest critic."""

# Numba needs the real signatures: no `from __future__ import annotations`.

import torch
from numba import carray
from torch import Tensor

from gpubuf.kernels._differentiable import dense
from gpubuf.kernels._floats import read
from gpubuf.kernels._jit import jit
from gpubuf.kernels._pointers import as_u8
from gpubuf.kernels.td import AVERAGE, MEAN


@jit(forceinline=True)
def weight_of(weight, mask, wide, row):  # type: ignore[no-untyped-def]
    """(weight of the row, whether it counts)."""
    if mask and not carray(as_u8(mask), row + 1)[row]:
        return 0.0, False
    return (read(weight, wide, row) if weight else 1.0), True


@jit(forceinline=True)
def normaliser(total, reduction):  # type: ignore[no-untyped-def]
    """The factor of a reduction, by the sum of the weights."""
    if reduction != MEAN:
        return 1.0
    return 1 / total if total else 0.0


@jit(forceinline=True)
def smallest_critic(q, wide, n, nets, row):  # type: ignore[no-untyped-def]
    """(min_k q[k, row], the first k that attains it); a NaN is the smallest, so that it is seen."""
    smallest, which = read(q, wide, row), 0
    for net in range(1, nets):
        value = read(q, wide, net * n + row)
        if value < smallest or (value != value and smallest == smallest):
            smallest, which = value, net
    return smallest, which


@jit(forceinline=True)
def one_critic(q, wide, n, nets, row, combine):  # type: ignore[no-untyped-def]
    """(the smallest critic or the mean of all of them, the first k that attains the minimum)."""
    if combine != AVERAGE:
        return smallest_critic(q, wide, n, nets, row)
    total = 0.0
    for net in range(nets):
        total += read(q, wide, net * n + row)
    return total / nets, 0


def address(tensor: Tensor | None) -> int:
    """The address of the tensor, 0 if it is absent."""
    return 0 if tensor is None else tensor.data_ptr()


def weighting(weight: Tensor | None, mask: Tensor | None, real: torch.dtype) -> tuple[Tensor | None, Tensor | None]:
    """Both as the kernels read them. The caller keeps them alive while a kernel uses their addresses."""
    return None if weight is None else dense(weight, real), None if mask is None else dense(mask, torch.bool)
