"""Launches the tanh-normal kernels."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton.language as tl
from torch import Tensor

from gpubuf.kernels import config
from gpubuf.kernels._check import device_name
from gpubuf.kernels._differentiable import computing_dtype, dense
from gpubuf.kernels._launching import cdiv, launch
from gpubuf.kernels.tanh_normal import check_arguments
from gpubuf.kernels.tanh_normal._triton import tanh_normal_sample_backward_kernel, tanh_normal_sample_kernel

REAL = {torch.float32: tl.float32, torch.float64: tl.float64}


@dataclass(frozen=True)
class SamplePlan:
    """How the forward kernel covers ``[n, width]`` elements."""

    block_rows: int
    block_width: int
    programs: int
    num_warps: int


def plan_sample(n: int, width: int, device_name: str | None = None) -> SamplePlan:
    """Whole rows in every program, as many as its configuration has elements for."""
    chosen = config.tanh_normal_sample(n, width, device_name)
    block_width = config.ceil_power(width)
    block_rows = max(chosen.block // block_width, 1)
    return SamplePlan(block_rows, block_width, cdiv(n, block_rows), chosen.num_warps)


def sample(
    loc: Tensor,
    scale: Tensor,
    noise: Tensor,
    low: Tensor | None,
    high: Tensor | None,
    low_value: float,
    high_value: float,
    event_dims: int,
) -> tuple[Tensor, Tensor]:
    """See :data:`gpubuf.kernels.tanh_normal.sample`."""
    last = check_arguments(loc, scale, noise, low, high, event_dims)
    real = computing_dtype(loc, scale)
    action = torch.empty(loc.shape, dtype=torch.promote_types(loc.dtype, scale.dtype), device=loc.device)
    log_prob = torch.empty(loc.shape[: loc.ndim - event_dims], dtype=real, device=loc.device)
    n = log_prob.numel()
    if not n:
        return action, log_prob
    width = loc.numel() // n
    plan = plan_sample(n, width, device_name(loc.device))
    launch(
        tanh_normal_sample_kernel,
        plan.programs,
        dense(loc),
        dense(scale),
        dense(noise),
        loc if low is None else dense(low),
        loc if high is None else dense(high),
        action,
        log_prob,
        n,
        width,
        last,
        REAL=REAL[real],
        HAS_BOUNDS=low is not None,
        LOW=low_value,
        HIGH=high_value,
        BLOCK_ROWS=plan.block_rows,
        BLOCK_WIDTH=plan.block_width,
        num_warps=plan.num_warps,
    )
    return action, log_prob


def sample_backward(
    loc: Tensor,
    scale: Tensor,
    noise: Tensor,
    low: Tensor | None,
    high: Tensor | None,
    grad_action: Tensor | None,
    grad_log_prob: Tensor | None,
    low_value: float,
    high_value: float,
    event_dims: int,
) -> tuple[Tensor, Tensor]:
    """See :data:`gpubuf.kernels.tanh_normal.sample_backward`."""
    last = check_arguments(loc, scale, noise, low, high, event_dims)
    by_loc = torch.empty(loc.shape, dtype=loc.dtype, device=loc.device)
    by_scale = torch.empty(scale.shape, dtype=scale.dtype, device=loc.device)
    total = loc.numel()
    if not total:
        return by_loc, by_scale
    chosen = config.tanh_normal_backward(total, device_name(loc.device))
    launch(
        tanh_normal_sample_backward_kernel,
        cdiv(total, chosen.block),
        loc if grad_action is None else dense(grad_action),
        loc if grad_log_prob is None else dense(grad_log_prob),
        dense(loc),
        dense(scale),
        dense(noise),
        loc if low is None else dense(low),
        loc if high is None else dense(high),
        by_loc,
        by_scale,
        total,
        loc.shape[loc.ndim - event_dims :].numel(),
        last,
        REAL=REAL[computing_dtype(loc, scale)],
        HAS_GRAD_ACTION=grad_action is not None,
        HAS_GRAD_LOG_PROB=grad_log_prob is not None,
        HAS_BOUNDS=low is not None,
        LOW=low_value,
        HIGH=high_value,
        BLOCK=chosen.block,
        num_warps=chosen.num_warps,
    )
    return by_loc, by_scale
