"""Launches the tanh-normal kernels."""

from __future__ import annotations

from dataclasses import dataclass

from gpubuf.kernels import config, tanh_normal
from gpubuf.kernels._launching import BlockPlan, cdiv, launcher
from gpubuf.kernels.tanh_normal import _triton as kernels


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


def _plan_elements(total: int, device_name: str | None) -> BlockPlan:
    chosen = config.tanh_normal_backward(total, device_name)
    return BlockPlan(chosen.block, cdiv(total, chosen.block), chosen.num_warps)


sample = launcher(tanh_normal.sample, kernels.tanh_normal_sample_kernel, plan_sample)
sample_backward = launcher(tanh_normal.sample_backward, kernels.tanh_normal_sample_backward_kernel, _plan_elements)
