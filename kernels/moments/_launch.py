"""Launches the kernels of running statistics."""

from __future__ import annotations

import torch
from torch import Tensor

from gpubuf.kernels import config
from gpubuf.kernels._launching import PartPlan, cdiv, launch
from gpubuf.kernels._registry import check_devices, demand_int64
from gpubuf.kernels.config import ceil_power
from gpubuf.kernels.moments import check_returns, check_update, n_tickets
from gpubuf.kernels.moments._triton import moments_returns_kernel, moments_update_kernel

#: Environments and elements of a program of the returns.
_LANES = 128
#: Blocks of rows from which on several programs read them: a merge takes as long as reading a few.
_FEW = 4
#: Programs of an update, about: enough for every multiprocessor to have some. And parts of the rows, at most: the last
#: program holds what is merged.
_PROGRAMS, _PARTS = 512, 128


def plan_update(n: int, elements: int) -> PartPlan:
    """All rows in one program for each block of elements while they are few, then in parts. Blocks are of elements."""
    chosen = config.moments_tile(n, elements)
    rows, width = chosen.block_rows, chosen.block_columns
    tiles, blocks = cdiv(n, rows), cdiv(elements, width)
    parts = min(tiles, _PARTS, max(_PROGRAMS // blocks, 1)) if tiles > _FEW else 1
    part_rows = max(cdiv(tiles, parts), 1) * rows
    return PartPlan(rows, width, blocks, max(cdiv(n, part_rows), 1), part_rows, chosen.num_warps)


def _read(tensor: Tensor) -> Tensor:
    """Contiguous, as a kernel reads it: booleans as the bytes that they are."""
    tensor = tensor.contiguous()
    return tensor.view(torch.uint8) if tensor.dtype is torch.bool else tensor


def update(state: Tensor, source: Tensor, mean: Tensor, factor: Tensor, rule: Tensor, tickets: Tensor) -> None:
    """See :data:`gpubuf.kernels.moments.update`."""
    check_update(state, source, mean, factor, rule)
    n, elements = source.shape
    if not elements:
        return
    plan = plan_update(n, elements)
    check_devices(state, tickets)
    demand_int64("tickets", tickets, (n_tickets(elements),))
    several = plan.parts > 1
    parts = torch.empty((plan.parts, *state.shape), dtype=state.dtype, device=state.device) if several else state
    tensors = (_read(source), state, mean, factor, rule, parts, tickets)
    blocks = {"BLOCK_ROWS": plan.block_rows, "BLOCK_WIDTH": plan.block_width, "BLOCK_PARTS": ceil_power(plan.parts)}
    sizes = (n, elements, plan.blocks, plan.parts, plan.part_rows)
    launch(moments_update_kernel, plan.blocks * plan.parts, *tensors, *sizes, **blocks, num_warps=plan.num_warps)


def returns(before: Tensor, rewards: Tensor, ends: Tensor, rule: Tensor) -> Tensor:
    """See :data:`gpubuf.kernels.moments.returns`."""
    check_returns(before, rewards, ends, rule)
    out = torch.empty(rewards.shape, dtype=torch.float64, device=rewards.device)
    steps, _, elements = rewards.shape
    lanes = before.numel()
    if not out.numel():
        return out
    block = min(_LANES, ceil_power(lanes))
    arguments = (_read(rewards), _read(ends), before, rule, out, steps, lanes, elements)
    launch(moments_returns_kernel, cdiv(lanes, block), *arguments, BLOCK=block, num_warps=max(block // 32, 1))
    return out
