"""Argument checks of the optimiser's step, shared by both backends. They are cheap, and read no values."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from gpubuf.kernels.optim import DTYPES, ENTRY, HYPER, MAX_ENTRIES


def check_step(
    table: Tensor,
    hyper: Tensor,
    grads: Sequence[Tensor | None],
    averages: Sequence[bool],
    steps: Tensor,
    params: Sequence[Tensor],
) -> torch.dtype:
    """The dtype of the parameters; raise TypeError or ValueError unless the arguments describe a bucket."""
    n = len(params)
    if not (len(grads) == len(averages) == steps.numel() == n) or not 1 <= n <= MAX_ENTRIES:
        raise ValueError(
            f"a bucket of {n} entries (1 to {MAX_ENTRIES}) got {len(grads)} gradients, {len(averages)} flags and "
            f"{steps.numel()} steps"
        )
    if table.dtype is not torch.int64 or table.numel() != n * ENTRY or hyper.dtype is not torch.float64:
        raise ValueError(f"expected an int64 table of {n} x {ENTRY} and float64 hyperparameters")
    if hyper.shape[-1] != HYPER or steps.dtype is not torch.float32:
        raise ValueError(f"expected hyperparameters [G, {HYPER}] and float32 steps")
    dtype, device = params[0].dtype, params[0].device
    if dtype not in DTYPES:
        raise TypeError(f"parameters must be of one of {DTYPES}, got {dtype}")
    for param, grad in zip(params, grads, strict=True):
        if grad is not None and (grad.dtype is not dtype or grad.device != device or grad.numel() != param.numel()):
            raise ValueError(
                f"the gradient of a parameter of {param.numel()} elements, {dtype} on {device}, has {grad.numel()} "
                f"elements, {grad.dtype} on {grad.device}"
            )
    return dtype
