"""Launches the kernels of running statistics."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from gpubuf.kernels._launching import cdiv, launch
from gpubuf.kernels.config import ceil_power
from gpubuf.kernels.moments import check_returns, check_update
from gpubuf.kernels.moments._triton import moments_returns_kernel, moments_update_kernel

#: Numbers that a program reads at a time.
_TILE = 1024
#: Elements of a program. Rows of so many float32 numbers are read a whole line of the cache at a time.
_WIDTH = 32
#: Environments and elements of a program of the returns.
_LANES = 128


@dataclass(frozen=True)
class UpdatePlan:
    """How the update covers ``[n, elements]`` numbers."""

    block_rows: int
    block_width: int
    programs: int
    num_warps: int


def plan_update(n: int, elements: int) -> UpdatePlan:
    """A program for every 32 elements, over all rows."""
    block_width = min(_WIDTH, ceil_power(elements))
    block_rows = min(_TILE // block_width, ceil_power(n))
    return UpdatePlan(
        block_rows, block_width, cdiv(elements, block_width), min(max(block_rows * block_width // 128, 1), 8)
    )


def _read(tensor: Tensor) -> Tensor:
    """Contiguous, as a kernel reads it: booleans as the bytes that they are."""
    tensor = tensor.contiguous()
    return tensor.view(torch.uint8) if tensor.dtype is torch.bool else tensor


def update(state: Tensor, source: Tensor, mean: Tensor | None, factor: Tensor, rule: Tensor) -> None:
    """See :data:`gpubuf.kernels.moments.update`."""
    check_update(state, source, mean, factor, rule)
    n, elements = source.shape
    if not elements:
        return
    plan = plan_update(n, elements)
    launch(
        moments_update_kernel,
        plan.programs,
        _read(source),
        state,
        factor if mean is None else mean,
        factor,
        rule,
        n,
        elements,
        HAS_MEAN=mean is not None,
        BLOCK_ROWS=plan.block_rows,
        BLOCK_WIDTH=plan.block_width,
        num_warps=plan.num_warps,
    )


def returns(before: Tensor, rewards: Tensor, ends: Tensor, rule: Tensor) -> Tensor:
    """See :data:`gpubuf.kernels.moments.returns`."""
    check_returns(before, rewards, ends, rule)
    out = torch.empty(rewards.shape, dtype=torch.float64, device=rewards.device)
    steps, _, elements = rewards.shape
    lanes = before.numel()
    if not out.numel():
        return out
    block = min(_LANES, ceil_power(lanes))
    launch(
        moments_returns_kernel,
        cdiv(lanes, block),
        _read(rewards),
        _read(ends),
        before,
        rule,
        out,
        steps,
        lanes,
        elements,
        BLOCK=block,
        num_warps=max(block // 32, 1),
    )
    return out
