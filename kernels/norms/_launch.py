"""Launches the kernels of norms with activations."""

from __future__ import annotations

import math
from dataclasses import dataclass

from gpubuf.kernels import config, norms
from gpubuf.kernels._launching import PartPlan, Prepared, cdiv, launcher, launches
from gpubuf.kernels.norms import _triton as kernels

#: Programs of the backward, about: enough for every multiprocessor to have some, and few sums to add at the end.
PROGRAMS = 512
#: Rows of the backward that are worth a program.
PART_ROWS = 8
#: Rows of a part of batch norm, at least: it reads them twice, the second time from a cache. And parts, at most: a
#: program adds the sums of all of them at once.
BATCH_ROWS, BATCH_PARTS = 256, 128
#: Elements of a row, and sums, that a finishing program adds at a time.
FINISH_BLOCK, FINISH_PARTS = 32, 32


def plan_norm(nets: int, rows: int, width: int, device_name: str | None = None) -> PartPlan:
    """Whole rows; a part, a program of the backward, has as many as leave :data:`PROGRAMS` programs, at least a few."""
    block_width, chosen = config.ceil_power(width), config.norm_rows(rows, width, device_name)
    block_rows = chosen.block
    part_rows = max(cdiv(rows * nets, PROGRAMS), min(PART_ROWS, rows), block_rows)
    part_rows = cdiv(part_rows, block_rows) * block_rows
    blocks, parts = cdiv(rows, block_rows), cdiv(rows, part_rows)
    return PartPlan(block_rows, block_width, blocks, parts, part_rows, chosen.num_warps)


@dataclass(frozen=True)
class BatchPlan:
    """How kernels cover the columns of ``[nets, rows, width]`` elements.

    Attributes:
        block_rows: rows of a program that needs no sums.
        block: columns of a program.
        blocks: of columns.
        row_blocks: programs of a net for each block of columns, where no sums are needed.
        num_warps: of these.
        sum_rows: rows at a time where sums are needed.
        parts: programs of a net for each block of columns, there.
        part_rows: rows of each of these.
        sum_warps: of these.
    """

    block_rows: int
    block: int
    blocks: int
    row_blocks: int
    num_warps: int
    sum_rows: int
    parts: int
    part_rows: int
    sum_warps: int


def plan_batch(rows: int, width: int, device_name: str | None = None) -> BatchPlan:
    """Columns and rows of a program as configured. Where sums are needed, up to twice the rows and the warps."""
    chosen = config.norm_columns(rows, width, device_name)
    block_rows, columns = chosen.block_rows, chosen.block_columns
    sum_rows = min(2 * block_rows, config.ceil_power(rows)) if chosen.num_warps < 8 else block_rows
    part_rows = max(cdiv(rows, BATCH_PARTS), BATCH_ROWS) if rows > 2 * BATCH_ROWS else rows
    part_rows = cdiv(part_rows, sum_rows) * sum_rows
    return BatchPlan(
        block_rows, columns, cdiv(width, columns), cdiv(rows, block_rows), chosen.num_warps,
        sum_rows, cdiv(rows, part_rows), part_rows, chosen.num_warps * sum_rows // block_rows,
    )  # fmt: skip


norm_activation = launcher(
    norms.norm_activation, kernels.norm_activation_kernel, plan_norm, programs=lambda nets, blocks: nets * blocks
)


@launches(norms.norm_activation_backward, plan_norm)
def norm_activation_backward(to: Prepared, plan: PartPlan) -> None:
    programs = to.values["nets"] * plan.parts
    to.values["partial_ptr"] = _sums(to, plan)
    to.launch(kernels.norm_activation_backward_kernel, programs, plan.num_warps)
    _finish_gradients(to)


def _sums(to: Prepared, plan: PartPlan | BatchPlan) -> int:
    """Room for two numbers of each column of each part."""
    return to.sums(2, to.values["nets"] * plan.parts, to.values["width"])


def _finish_gradients(to: Prepared) -> None:
    """Add the sums of all parts."""
    blocks = cdiv(to.values["width"], FINISH_BLOCK)
    how = {"blocks": blocks, "BLOCK_PARTS": FINISH_PARTS, "BLOCK": FINISH_BLOCK}
    to.launch(kernels.finish_norm_gradients_kernel, to.values["nets"] * blocks, 4, **how)


@launches(norms.batch_moments, plan_batch, without_rows=math.nan)
def norm_batch_moments(to: Prepared, plan: BatchPlan) -> None:
    blocks = to.values["nets"] * plan.blocks
    to.values["BLOCK_ROWS"] = plan.sum_rows
    if plan.parts == 1:
        to.launch(kernels.batch_moments_kernel, blocks, plan.sum_warps)
        return
    _sums(to, plan)
    means, variances = to.halves()
    kernel = kernels.batch_moments_kernel
    to.launch(kernel, blocks * plan.parts, plan.sum_warps, mean_ptr=means, var_ptr=variances)
    how = {"means_ptr": means, "vars_ptr": variances, "BLOCK_PARTS": config.ceil_power(plan.parts)}
    to.launch(kernels.finish_batch_moments_kernel, blocks, plan.sum_warps, **how)


batch_norm_activation = launcher(
    norms.batch_norm_activation,
    kernels.batch_norm_activation_kernel,
    plan_batch,
    programs=lambda nets, blocks, row_blocks: nets * blocks * row_blocks,
)


@launches(norms.batch_norm_activation_backward, plan_batch)
def batch_norm_activation_backward(to: Prepared, plan: BatchPlan) -> None:
    programs = to.values["nets"] * plan.blocks * plan.parts
    to.values["BLOCK_ROWS"], to.values["PARTS"] = plan.sum_rows, plan.parts > 1
    kernel = kernels.batch_norm_activation_backward_kernel
    if plan.parts == 1:
        to.launch(kernel, programs, plan.sum_warps)
        return
    partial = _sums(to, plan)
    by_weight, by_bias = to.halves()
    to.launch(kernel, programs, plan.sum_warps, grad_weight_ptr=by_weight, grad_bias_ptr=by_bias)
    if not to.values["own"]:
        to.values["partial_ptr"] = partial
        _finish_gradients(to)
        return
    how = {"by_weight_ptr": by_weight, "by_bias_ptr": by_bias, "BLOCK_PARTS": config.ceil_power(plan.parts)}
    to.launch(kernels.apply_batch_norm_gradients_kernel, programs, plan.sum_warps, **how)
