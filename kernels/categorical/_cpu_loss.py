"""The cross entropy of categorical critics on the CPU. Arithmetic and parts as in ``_cpu.py``."""

# Numba needs the real signatures: no `from __future__ import annotations`.

from typing import Any

import numpy as np
import torch
from torch import Tensor

from gpubuf.kernels._differentiable import computing_dtype
from gpubuf.kernels._floats import call, call_parts, flags, read, write
from gpubuf.kernels._jit import OPTIONS, jit
from gpubuf.kernels.categorical import DIVERGENCE, check_loss
from gpubuf.kernels.categorical._cpu import INFINITY, for_each_dtype, work_of
from gpubuf.kernels.categorical._cpu_atoms import (
    cross_entropy,
    entropy_of,
    exponentials,
    fill,
    load_row,
    padded,
    product_of,
    store_row,
    total_of,
)
from gpubuf.kernels.td import NONE
from gpubuf.kernels.td._cpu_reduce import normaliser, weight_of


def _losses_of(real: Any) -> Any:
    wide = real is np.float64

    @jit(
        "void(int64, int64, float64, int64, boolean, int64, int64, int64, boolean, int64, int64, int64, int64)",
        **OPTIONS,
    )
    def losses(logits, target, spacing, priority, average, n, nets, atoms, shared, first, length, rows_out, far_out):  # type: ignore[no-untyped-def]
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
            write(rows_out, True, row, loss / nets if average else loss)
            write(far_out, wide, row, most)

    return losses


@jit("void(int64, int64, int64, int64, int64, boolean, int64, int64)", **OPTIONS)
def _reduced(losses, weight, mask, reduction, n, wide, loss_out, norm_out):  # type: ignore[no-untyped-def]
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

    @jit(
        "void(int64, int64, int64, int64, int64, int64, boolean, int64, int64, int64, int64, boolean, int64, int64,"
        " int64)",
        **OPTIONS,
    )
    def backward(  # type: ignore[no-untyped-def]
        grad,
        logits,
        target,
        weight,
        mask,
        norm,
        average,
        reduction,
        n,
        nets,
        atoms,
        shared,
        first,
        length,
        by_logits,
    ):
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
                    store_row(by_logits, start, atoms, own)
                    continue
                if net == 0 or not shared:
                    load_row(target, start, atoms, mass, 0.0)
                load_row(logits, start, atoms, buffer, -INFINITY)
                exponentials(buffer, own)
                by_own, by_mass = real(factor / total_of(own)), real(factor)
                for j in range(width):
                    own[j] = by_own * own[j] - by_mass * mass[j]
                store_row(by_logits, start, atoms, own)

    return backward


_losses, _loss_backward = for_each_dtype(_losses_of), for_each_dtype(_loss_backward_of)


def categorical_loss(
    logits: Tensor,
    target: Tensor,
    weight: Tensor | None,
    mask: Tensor | None,
    v_min: float,
    v_max: float,
    priority: int,
    average: bool,
    reduction: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """See :data:`gpubuf.kernels.categorical.categorical_loss`."""
    n, nets, atoms = check_loss(logits, target, weight, mask, v_min, v_max)
    rows, real = logits.shape[1:-1], computing_dtype(logits)
    loss = torch.empty(rows if reduction == NONE else (), dtype=real)
    far, norm = torch.empty(rows, dtype=real), torch.empty((), dtype=real)
    losses = torch.empty(n, dtype=torch.float64)
    numbers = ((v_max - v_min) / (atoms - 1), priority, average, n, nets, atoms, target.numel() == n * atoms)
    call_parts(_losses[real], real, (logits, target, *numbers), n, [losses, far], work_of(nets, atoms))
    # In one thread, and so in a fixed order.
    wide = real is torch.float64
    call(_reduced, real, losses.data_ptr(), weight, flags(mask), reduction, n, wide, loss, norm)
    return loss, far, norm


def categorical_loss_backward(
    grad: Tensor,
    logits: Tensor,
    target: Tensor,
    weight: Tensor | None,
    mask: Tensor | None,
    norm: Tensor,
    average: bool,
    reduction: int,
) -> Tensor:
    """See :data:`gpubuf.kernels.categorical.categorical_loss_backward`."""
    n, nets, atoms = logits.shape[1:-1].numel(), logits.shape[0], logits.shape[-1]
    real = computing_dtype(logits)
    by_logits = torch.empty(logits.shape, dtype=real)
    numbers = (average, reduction, n, nets, atoms, target.numel() == n * atoms)
    given = (grad, logits, target, weight, flags(mask), norm, *numbers)
    call_parts(_loss_backward[real], real, given, n, [by_logits], work_of(nets, atoms))
    return by_logits.to(logits.dtype)
