"""Launches the kernels of temporal-difference learning."""

from __future__ import annotations

from gpubuf.kernels import config, td
from gpubuf.kernels._launching import BlockPlan, Finish, cdiv, launcher
from gpubuf.kernels.td import _triton as kernels

SEQUENCES = 32
"""Sequences of a program, one a lane of its only warp: each step waits for the one before, so spread them widely."""


def plan_rows(n: int, device_name: str | None = None) -> BlockPlan:
    """As many programs as the configuration for ``n`` rows needs, at least one."""
    chosen = config.loss_rows(n, device_name)
    return BlockPlan(chosen.block, max(cdiv(n, chosen.block), 1), chosen.num_warps)


def _plan_sequences(n_sequences: int, device_name: str | None) -> BlockPlan:
    return BlockPlan(SEQUENCES, cdiv(n_sequences, SEQUENCES), 1)


soft_td_target = launcher(td.soft_td_target, kernels.soft_td_target_kernel, plan_rows)
soft_lambda_return = launcher(td.soft_lambda_return, kernels.soft_lambda_return_kernel, _plan_sequences)
finish_loss = Finish(kernels.finish_loss_kernel, 2)
loss = launcher(td.td_loss, kernels.td_loss_kernel, plan_rows, finish=finish_loss)
loss_backward = launcher(td.td_loss_backward, kernels.td_loss_backward_kernel, plan_rows)
