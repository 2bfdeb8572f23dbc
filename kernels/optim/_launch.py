"""Launches the optimiser's step: one launch for a bucket."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import torch
import triton.language as tl
from torch import Tensor

from gpubuf.kernels._launching import encode_arguments, launch
from gpubuf.kernels._registry import check_devices
from gpubuf.kernels.optim import ROW_TILE, STRIDED_TILE, TILE
from gpubuf.kernels.optim._check import check_step
from gpubuf.kernels.optim._triton import optim_adamw_kernel

_DTYPES = {torch.float32: tl.float32, torch.float64: tl.float64, torch.bfloat16: tl.bfloat16}
_REALS = {torch.float32: tl.float32, torch.float64: tl.float64, torch.bfloat16: tl.float32}


def gradient_codes(grads: Sequence[Tensor | None], averages: Sequence[bool]) -> array[int]:
    """For each entry the address of its gradient, or 0, plus 1 if its target moves.

    Addresses are even, as no parameter has elements of one byte. An empty tensor has address 0: it has no elements to
    update, but its steps count, and 2 is no address.
    """
    return array(
        "q",
        [
            average if grad is None else (grad.data_ptr() or 2) | average
            for grad, average in zip(grads, averages, strict=True)
        ],
    )


def adamw(
    table: Tensor, tiles: Tensor, hyper: Tensor, grads: Sequence[Tensor | None], averages: Sequence[bool],
    norm: Tensor | None, steps: Tensor, ticket: Tensor, params: Sequence[Tensor], moments: Sequence[Tensor],
    targets: Sequence[Tensor], aligned: bool, unit_rows: bool, *, trusted: bool = False,
) -> None:  # fmt: skip
    """See :data:`gpubuf.kernels.optim.adamw`. A trusted call comes from an optimiser, which owns all but gradients."""
    if not trusted:
        check_step(table, hyper, grads, averages, steps, params)
        check_devices(table, tiles, hyper, norm, steps, ticket, params[0])
    dtype = params[0].dtype
    codes = gradient_codes(grads, averages)
    # The lowest bit says whether a target moves, and the code of an empty tensor is 2: neither is an address.
    fits = aligned and not any(code & 14 for code in codes if code > 3)
    tensors = (table, tiles, hyper, encode_arguments(codes), hyper if norm is None else norm, steps, ticket)
    flags = {"HAS_NORM": norm is not None, "HAS_ROWS": unit_rows, "ALIGNED": fits}
    blocks = {"TILE": TILE, "ROWS": ROW_TILE[0], "COLUMNS": ROW_TILE[1], "LINES": STRIDED_TILE[0]}
    how = {"DTYPE": _DTYPES[dtype], "REAL": _REALS[dtype], **flags, **blocks, "WIDTH": STRIDED_TILE[1]}
    # Eight elements per thread, and four where they are float64.
    num_warps = 8 if dtype is torch.float64 else 4
    launch(optim_adamw_kernel, tiles.shape[0], *tensors, len(params), **how, num_warps=num_warps)
