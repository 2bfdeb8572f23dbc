"""Launches the kernels of norms with activations."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import triton.language as tl
from torch import Tensor

from gpubuf.kernels import config
from gpubuf.kernels._check import device_name
from gpubuf.kernels._differentiable import computing_dtype, dense
from gpubuf.kernels._launching import cdiv, launch
from gpubuf.kernels.norms import check_arguments, check_vectors, check_width
from gpubuf.kernels.norms._triton import (
    finish_norm_gradients_kernel,
    norm_activation_backward_kernel,
    norm_activation_kernel,
)
from gpubuf.kernels.norms._triton_batch import (
    apply_batch_norm_gradients_kernel,
    batch_moments_kernel,
    batch_norm_activation_backward_kernel,
    batch_norm_activation_kernel,
    finish_batch_moments_kernel,
)

REAL = {torch.float32: tl.float32, torch.float64: tl.float64}

#: Programs of the backward, about: enough for every multiprocessor to have some, and few sums to add at the end.
PROGRAMS = 512
#: Rows of the backward that are worth a program.
PART_ROWS = 8
#: Rows of a part of batch norm, at least: it reads them twice, the second time from a cache. And parts, at most: a
#: program adds the sums of all of them at once.
BATCH_ROWS, BATCH_PARTS = 256, 128
#: Elements of a row, and sums, that a finishing program adds at a time.
FINISH_BLOCK, FINISH_PARTS = 32, 32


@dataclass(frozen=True)
class NormPlan:
    """How kernels cover ``[nets, n_rows, width]`` elements.

    Attributes:
        block_rows: rows at a time.
        block_width: elements of a row at a time, all of them.
        blocks: programs of a net in the forward.
        parts: programs of a net in the backward.
        part_rows: rows of each of these.
        num_warps: of both.
    """

    block_rows: int
    block_width: int
    blocks: int
    parts: int
    part_rows: int
    num_warps: int


def plan_norm(nets: int, n_rows: int, width: int, device_name: str | None = None) -> NormPlan:
    """Whole rows; a program of the backward has as many as leave :data:`PROGRAMS` programs, at least a few."""
    block_width, chosen = config.ceil_power(width), config.norm_rows(n_rows, width, device_name)
    block_rows = chosen.block
    part_rows = max(cdiv(n_rows * nets, PROGRAMS), min(PART_ROWS, n_rows), block_rows)
    part_rows = cdiv(part_rows, block_rows) * block_rows
    blocks, parts = cdiv(n_rows, block_rows), cdiv(n_rows, part_rows)
    return NormPlan(block_rows, block_width, blocks, parts, part_rows, chosen.num_warps)


@dataclass(frozen=True)
class BatchPlan:
    """How kernels cover the columns of ``[nets, n_rows, width]`` elements.

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


def plan_batch(n_rows: int, width: int, device_name: str | None = None) -> BatchPlan:
    """Columns and rows of a program as configured. Where sums are needed, up to twice the rows and the warps."""
    chosen = config.norm_columns(n_rows, width, device_name)
    rows, columns = chosen.block_rows, chosen.block_columns
    sum_rows = min(2 * rows, config.ceil_power(n_rows)) if chosen.num_warps < 8 else rows
    part_rows = max(cdiv(n_rows, BATCH_PARTS), BATCH_ROWS) if n_rows > 2 * BATCH_ROWS else n_rows
    part_rows = cdiv(part_rows, sum_rows) * sum_rows
    return BatchPlan(
        rows, columns, cdiv(width, columns), cdiv(n_rows, rows), chosen.num_warps,
        sum_rows, cdiv(n_rows, part_rows), part_rows, chosen.num_warps * sum_rows // rows,
    )  # fmt: skip


def norm_activation(
    x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, norm: int, activation: int
) -> tuple[Tensor, Tensor]:
    """See :data:`gpubuf.kernels.norms.norm_activation`."""
    nets, rows, width = check_arguments(x, weight, bias)
    check_width(width)
    real = computing_dtype(x)
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    statistics = torch.empty((2, *x.shape[:-1]), dtype=real, device=x.device)
    if not rows:
        return y, statistics
    plan = plan_norm(nets, rows, width, device_name(x.device))
    launch(
        norm_activation_kernel,
        nets * plan.blocks,
        dense(x),
        dense(weight),
        x if bias is None else dense(bias),
        y,
        statistics,
        rows,
        width,
        plan.blocks,
        nets * rows,
        REAL=REAL[real],
        EPS=eps,
        NORM=norm,
        ACTIVATION=activation,
        HAS_BIAS=bias is not None,
        BLOCK_ROWS=plan.block_rows,
        BLOCK_WIDTH=plan.block_width,
        num_warps=plan.num_warps,
    )
    return y, statistics


def norm_activation_backward(
    grad: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, statistics: Tensor, norm: int, activation: int
) -> tuple[Tensor, Tensor, Tensor]:
    """See :data:`gpubuf.kernels.norms.norm_activation_backward`."""
    nets, rows, width = check_arguments(x, weight, bias)
    check_width(width)
    real = computing_dtype(x)
    by_x = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    new: dict[str, Any] = {"dtype": weight.dtype, "device": x.device}
    if not rows:
        return by_x, torch.zeros(weight.shape, **new), torch.zeros(weight.shape, **new)
    by_weight, by_bias = torch.empty(weight.shape, **new), torch.empty(weight.shape, **new)
    plan = plan_norm(nets, rows, width, device_name(x.device))
    partial = torch.empty((2, nets * plan.parts, width), dtype=real, device=x.device)
    launch(
        norm_activation_backward_kernel,
        nets * plan.parts,
        dense(grad),
        dense(x),
        dense(weight),
        x if bias is None else dense(bias),
        dense(statistics),
        by_x,
        partial,
        rows,
        width,
        plan.parts,
        plan.part_rows,
        nets * rows,
        REAL=REAL[real],
        NORM=norm,
        ACTIVATION=activation,
        HAS_BIAS=bias is not None,
        BLOCK_ROWS=plan.block_rows,
        BLOCK_WIDTH=plan.block_width,
        num_warps=plan.num_warps,
    )
    finish_gradients(partial, by_weight, by_bias, nets, plan.parts)
    return by_x, by_weight, by_bias


def finish_gradients(partial: Tensor, by_weight: Tensor, by_bias: Tensor, nets: int, parts: int) -> None:
    """Add the sums ``[2, nets * parts, width]`` of all parts."""
    width = partial.shape[-1]
    blocks = cdiv(width, FINISH_BLOCK)
    launch(
        finish_norm_gradients_kernel,
        nets * blocks,
        partial,
        by_weight,
        by_bias,
        nets,
        width,
        parts,
        blocks,
        REAL=REAL[partial.dtype],
        BLOCK_PARTS=FINISH_PARTS,
        BLOCK=FINISH_BLOCK,
        num_warps=4,
    )


def _partial(nets: int, plan: BatchPlan, width: int, x: Tensor, real: torch.dtype) -> Tensor:
    """Room for two numbers of each column of each part."""
    return torch.empty((2, nets * plan.parts, width), dtype=real, device=x.device)


def batch_moments(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """See :data:`gpubuf.kernels.norms.batch_moments`."""
    nets, rows, width = check_arguments(x, weight, None)
    real = computing_dtype(x)
    mean, var = (torch.empty(weight.shape, dtype=real, device=x.device) for _ in range(2))
    if not rows:
        return mean.fill_(math.nan), var.fill_(math.nan)
    plan = plan_batch(rows, width, device_name(x.device))
    sizes = (rows, width, plan.blocks, plan.parts, plan.part_rows)
    several = plan.parts > 1
    found: Any = _partial(nets, plan, width, x, real) if several else (mean, var)
    launch(
        batch_moments_kernel,
        nets * plan.blocks * plan.parts,
        dense(x),
        *found,
        *sizes,
        REAL=REAL[real],
        BLOCK_ROWS=plan.sum_rows,
        BLOCK=plan.block,
        num_warps=plan.sum_warps,
    )
    if several:
        launch(
            finish_batch_moments_kernel,
            nets * plan.blocks,
            *found,
            mean,
            var,
            *sizes,
            REAL=REAL[real],
            BLOCK_PARTS=config.ceil_power(plan.parts),
            BLOCK=plan.block,
            num_warps=plan.sum_warps,
        )
    return mean, var


def batch_norm_activation(
    x: Tensor, weight: Tensor, bias: Tensor, mean: Tensor, var: Tensor, eps: float, activation: int, own: bool
) -> Tensor:
    """See :data:`gpubuf.kernels.norms.batch_norm_activation`."""
    nets, rows, width = check_arguments(x, weight, bias)
    check_vectors(weight, mean=mean, var=var)
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if not rows:
        return y
    plan = plan_batch(rows, width, device_name(x.device))
    launch(
        batch_norm_activation_kernel,
        nets * plan.blocks * plan.row_blocks,
        dense(x),
        dense(weight),
        dense(bias),
        dense(mean),
        dense(var),
        y,
        rows,
        width,
        plan.blocks,
        plan.row_blocks,
        REAL=REAL[computing_dtype(x)],
        EPS=eps,
        ACTIVATION=activation,
        BLOCK_ROWS=plan.block_rows,
        BLOCK=plan.block,
        num_warps=plan.num_warps,
    )
    return y


def batch_norm_activation_backward(
    grad: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    mean: Tensor,
    var: Tensor,
    eps: float,
    activation: int,
    own: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """See :data:`gpubuf.kernels.norms.batch_norm_activation_backward`."""
    nets, rows, width = check_arguments(x, weight, bias)
    check_vectors(weight, mean=mean, var=var)
    by_x = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    by_weight, by_bias = (torch.empty(weight.shape, dtype=weight.dtype, device=x.device) for _ in range(2))
    if not rows:
        return by_x, by_weight.zero_(), by_bias.zero_()
    plan, real = plan_batch(rows, width, device_name(x.device)), computing_dtype(x)
    several = plan.parts > 1
    arguments = [dense(tensor) for tensor in (grad, x, weight, bias, mean, var)]
    sizes = (rows, width, plan.blocks, plan.parts, plan.part_rows)
    constants: dict[str, Any] = {"REAL": REAL[real], "EPS": eps, "ACTIVATION": activation}
    sums: Any = _partial(nets, plan, width, x, real) if several else (by_weight, by_bias)
    launch(
        batch_norm_activation_backward_kernel,
        nets * plan.blocks * plan.parts,
        *arguments,
        by_x,
        *sums,
        *sizes,
        **constants,
        OWN=own,
        PARTS=several,
        BLOCK_ROWS=plan.sum_rows,
        BLOCK=plan.block,
        num_warps=plan.sum_warps,
    )
    if several and own:
        launch(
            apply_batch_norm_gradients_kernel,
            nets * plan.blocks * plan.parts,
            *arguments,
            *sums,
            by_x,
            by_weight,
            by_bias,
            *sizes,
            **constants,
            BLOCK_PARTS=config.ceil_power(plan.parts),
            BLOCK_ROWS=plan.sum_rows,
            BLOCK=plan.block,
            num_warps=plan.sum_warps,
        )
    elif several:
        finish_gradients(sums, by_weight, by_bias, nets, plan.parts)
    return by_x, by_weight, by_bias
