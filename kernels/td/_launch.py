"""Launches the kernels of temporal-difference learning."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton.language as tl
from torch import Tensor

from gpubuf.kernels import config
from gpubuf.kernels._check import device_name
from gpubuf.kernels._differentiable import computing_dtype, dense
from gpubuf.kernels._launching import cdiv, launch
from gpubuf.kernels.td import NONE, SMALLEST, check_critics, check_return, check_rows, check_target
from gpubuf.kernels.td._triton import (
    finish_loss_kernel,
    soft_td_target_kernel,
    td_loss_backward_kernel,
    td_loss_kernel,
)
from gpubuf.kernels.td._triton_returns import soft_lambda_return_kernel

REAL = {torch.float32: tl.float32, torch.float64: tl.float64}

FINISH_BLOCK = 256
"""Partial sums that the finishing kernel adds at a time."""


SEQUENCES = 32
"""Sequences of a program, one a lane of its only warp: each step waits for the one before, so spread them widely."""


@dataclass(frozen=True)
class RowPlan:
    """How a kernel over rows covers ``n`` of them."""

    block: int
    programs: int
    num_warps: int

    @property
    def single(self) -> bool:
        """Whether one program sees every row, and so finishes a reduction itself."""
        return self.programs == 1


def plan_rows(n: int, device_name: str | None = None) -> RowPlan:
    """As many programs as the configuration for ``n`` rows needs, at least one."""
    chosen = config.loss_rows(n, device_name)
    return RowPlan(chosen.block, max(cdiv(n, chosen.block), 1), chosen.num_warps)


def optional(tensor: Tensor | None, stand_in: Tensor) -> Tensor:
    """A kernel does not read an absent argument, but needs some pointer for it."""
    return stand_in if tensor is None else dense(tensor)


def soft_td_target(
    next_q: Tensor,
    next_log_prob: Tensor | None,
    alpha: Tensor | None,
    reward: Tensor,
    terminated: Tensor,
    gamma: Tensor,
    steps: Tensor | None,
    combine: int = SMALLEST,
) -> Tensor:
    """See :data:`gpubuf.kernels.td.soft_td_target`."""
    rows = check_target(next_q, next_log_prob, alpha, reward, terminated, gamma, steps, combine)
    n, real = rows.numel(), computing_dtype(next_q)
    target = torch.empty(rows, dtype=real, device=next_q.device)
    if n:
        plan = plan_rows(n, device_name(next_q.device))
        launch(
            soft_td_target_kernel,
            plan.programs,
            dense(next_q),
            optional(next_log_prob, next_q),
            optional(alpha, next_q),
            dense(reward),
            dense(terminated),
            gamma,
            optional(steps, next_q),
            target,
            n,
            next_q.shape[0],
            REAL=REAL[real],
            HAS_LOG_PROB=next_log_prob is not None,
            HAS_STEPS=steps is not None,
            COMBINE=combine,
            BLOCK=plan.block,
            num_warps=plan.num_warps,
        )
    return target


def soft_lambda_return(
    next_q: Tensor,
    next_log_prob: Tensor | None,
    alpha: Tensor | None,
    reward: Tensor,
    terminated: Tensor,
    done: Tensor,
    mask: Tensor | None,
    gamma: Tensor,
    lmbda: Tensor,
    steps: Tensor | None,
    length: int,
    inner: int,
    combine: int = SMALLEST,
) -> Tensor:
    """See :data:`gpubuf.kernels.td.soft_lambda_return`."""
    shape = check_target(next_q, next_log_prob, alpha, reward, terminated, gamma, steps, combine)
    real = computing_dtype(next_q)
    target = torch.empty(shape, dtype=real, device=next_q.device)
    n_sequences, n = check_return(target, done, mask, lmbda, length, inner)
    if n:
        launch(
            soft_lambda_return_kernel,
            cdiv(n_sequences, SEQUENCES),
            dense(next_q),
            optional(next_log_prob, next_q),
            optional(alpha, next_q),
            dense(reward),
            dense(terminated),
            dense(done),
            optional(mask, next_q),
            gamma,
            lmbda,
            optional(steps, next_q),
            target,
            n,
            n_sequences,
            length,
            inner,
            next_q.shape[0],
            REAL=REAL[real],
            HAS_LOG_PROB=next_log_prob is not None,
            HAS_STEPS=steps is not None,
            HAS_MASK=mask is not None,
            COMBINE=combine,
            BLOCK=SEQUENCES,
            num_warps=1,
        )
    return target


def finish_loss(partial: Tensor, loss: Tensor, norm: Tensor, programs: int, reduction: int) -> None:
    """Add the sums that so many programs have left in ``partial``, and write the reduced ``loss`` and its factor."""
    launch(
        finish_loss_kernel,
        1,
        partial,
        loss,
        norm,
        programs,
        REAL=REAL[loss.dtype],
        REDUCTION=reduction,
        BLOCK=FINISH_BLOCK,
        num_warps=2,
    )


def td_loss(
    q: Tensor, target: Tensor, weight: Tensor | None, mask: Tensor | None, loss_function: int, reduction: int
) -> tuple[Tensor, Tensor, Tensor]:
    """See :data:`gpubuf.kernels.td.td_loss`."""
    n = target.numel()
    check_critics(q, n)
    check_rows(n, weight=weight, mask=mask)
    real, plan = computing_dtype(q), plan_rows(n, device_name(q.device))
    new: dict[str, Any] = {"dtype": real, "device": q.device}
    loss = torch.empty(target.shape if reduction == NONE else (), **new)
    td_error, norm = torch.empty(target.shape, **new), torch.empty((), **new)
    if not n:
        return loss.zero_(), td_error, norm.zero_()
    partial = loss if plan.single else torch.empty(2 * plan.programs, **new)
    launch(
        td_loss_kernel,
        plan.programs,
        dense(q),
        dense(target),
        optional(weight, q),
        optional(mask, q),
        loss,
        td_error,
        norm,
        partial,
        n,
        q.shape[0],
        REAL=REAL[real],
        LOSS=loss_function,
        REDUCTION=reduction,
        HAS_WEIGHT=weight is not None,
        HAS_MASK=mask is not None,
        SINGLE=plan.single,
        BLOCK=plan.block,
        num_warps=plan.num_warps,
    )
    if reduction != NONE and not plan.single:
        finish_loss(partial, loss, norm, plan.programs, reduction)
    return loss, td_error, norm


def td_loss_backward(
    grad: Tensor,
    q: Tensor,
    target: Tensor,
    weight: Tensor | None,
    mask: Tensor | None,
    norm: Tensor,
    loss_function: int,
    reduction: int,
) -> Tensor:
    """See :data:`gpubuf.kernels.td.td_loss_backward`."""
    n = target.numel()
    by_q = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    if n:
        plan = plan_rows(n, device_name(q.device))
        launch(
            td_loss_backward_kernel,
            plan.programs,
            dense(grad),
            dense(q),
            dense(target),
            optional(weight, q),
            optional(mask, q),
            norm,
            by_q,
            n,
            q.shape[0],
            REAL=REAL[computing_dtype(q)],
            LOSS=loss_function,
            REDUCTION=reduction,
            HAS_WEIGHT=weight is not None,
            HAS_MASK=mask is not None,
            BLOCK=plan.block,
            num_warps=plan.num_warps,
        )
    return by_q
