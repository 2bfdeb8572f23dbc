"""Reductions, loss functions and ways to combine critics: names, codes in :mod:`gpubuf.kernels.td`, and plain sums."""

from __future__ import annotations

import torch
from torch import Tensor

from gpubuf.kernels import td
from gpubuf.kernels._differentiable import computing_dtype

REDUCTIONS = {"none": td.NONE, "mean": td.MEAN, "sum": td.SUM}
COMBINATIONS = {"min": td.SMALLEST, "mean": td.AVERAGE}
LOSS_FUNCTIONS = {"l1": td.L1, "l2": td.L2, "smooth_l1": td.SMOOTH_L1, "huber": td.SMOOTH_L1}


def lookup(table: dict[str, int], name: str, argument: str) -> int:
    """The code of ``name``; ValueError if there is none."""
    if name not in table:
        raise ValueError(f"{argument} must be one of {sorted(table)}, got {name!r}")
    return table[name]


def reduced(rows: Tensor, weight: Tensor | None, mask: Tensor | None, reduction: str) -> Tensor:
    """One number (or the weighted rows) of per-row losses, in float32 or float64; see :mod:`gpubuf.kernels.td`.

    In plain operations, for losses without a kernel of their own.
    """
    rows = rows.to(computing_dtype(rows))
    if weight is None and mask is None:
        if reduction == "none":
            return rows
        # The mean of nothing is 0, as in the kernels.
        return rows.mean() if reduction == "mean" and rows.numel() else rows.sum()
    w = torch.ones_like(rows) if weight is None else weight.reshape(rows.shape).to(rows.dtype)
    if mask is not None:
        counts = mask.reshape(rows.shape).bool()
        rows, w = torch.where(counts, rows, 0), torch.where(counts, w, 0)
    if reduction == "none":
        return w * rows
    total = (w * rows).sum()
    if reduction == "sum":
        return total
    mass = w.sum()
    return total / torch.where(mass == 0, 1, mass)
