"""Launches the kernels of soft actor-critic's own losses."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from gpubuf.kernels._check import device_name
from gpubuf.kernels._differentiable import computing_dtype, dense
from gpubuf.kernels._launching import launch
from gpubuf.kernels.sac._triton import (
    actor_loss_backward_kernel,
    actor_loss_kernel,
    finish_actor_loss_kernel,
    finish_temperature_kernel,
    temperature_loss_kernel,
)
from gpubuf.kernels.td import NONE, SMALLEST, check_critics, check_rows
from gpubuf.kernels.td._launch import FINISH_BLOCK, REAL, optional, plan_rows


def actor_loss(
    q: Tensor,
    log_prob: Tensor,
    alpha: Tensor,
    weight: Tensor | None,
    mask: Tensor | None,
    reduction: int,
    combine: int = SMALLEST,
) -> tuple[Tensor, Tensor, Tensor]:
    """See :data:`gpubuf.kernels.sac.actor_loss`."""
    n = log_prob.numel()
    check_critics(q, n, combine)
    check_rows(n, weight=weight, mask=mask)
    check_rows(1, alpha=alpha)
    real, plan = computing_dtype(q), plan_rows(n, device_name(q.device))
    new: dict[str, Any] = {"dtype": real, "device": q.device}
    loss = torch.empty(log_prob.shape if reduction == NONE else (), **new)
    entropy, norm = torch.empty((), **new), torch.empty((), **new)
    if not n:
        return loss.zero_(), entropy.zero_(), norm.zero_()
    partial = loss if plan.single else torch.empty(3 * plan.programs, **new)
    launch(
        actor_loss_kernel,
        plan.programs,
        dense(q),
        dense(log_prob),
        alpha,
        optional(weight, q),
        optional(mask, q),
        loss,
        entropy,
        norm,
        partial,
        n,
        q.shape[0],
        REAL=REAL[real],
        REDUCTION=reduction,
        COMBINE=combine,
        HAS_WEIGHT=weight is not None,
        HAS_MASK=mask is not None,
        SINGLE=plan.single,
        BLOCK=plan.block,
        num_warps=plan.num_warps,
    )
    if not plan.single:
        launch(
            finish_actor_loss_kernel,
            1,
            partial,
            loss,
            norm,
            entropy,
            plan.programs,
            n,
            REAL=REAL[real],
            REDUCTION=reduction,
            BLOCK=FINISH_BLOCK,
            num_warps=2,
        )
    return loss, entropy, norm


def actor_loss_backward(
    grad: Tensor,
    q: Tensor,
    log_prob: Tensor,
    alpha: Tensor,
    weight: Tensor | None,
    mask: Tensor | None,
    norm: Tensor,
    reduction: int,
    combine: int = SMALLEST,
) -> tuple[Tensor, Tensor]:
    """See :data:`gpubuf.kernels.sac.actor_loss_backward`."""
    n = log_prob.numel()
    by_q = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    by_log_prob = torch.empty(log_prob.shape, dtype=log_prob.dtype, device=q.device)
    if n:
        plan = plan_rows(n, device_name(q.device))
        launch(
            actor_loss_backward_kernel,
            plan.programs,
            dense(grad),
            dense(q),
            alpha,
            optional(weight, q),
            optional(mask, q),
            norm,
            by_q,
            by_log_prob,
            n,
            q.shape[0],
            REAL=REAL[computing_dtype(q)],
            REDUCTION=reduction,
            COMBINE=combine,
            HAS_WEIGHT=weight is not None,
            HAS_MASK=mask is not None,
            BLOCK=plan.block,
            num_warps=plan.num_warps,
        )
    return by_q, by_log_prob


def temperature_loss(
    log_alpha: Tensor,
    log_prob: Tensor,
    target_entropy: Tensor,
    weight: Tensor | None,
    mask: Tensor | None,
    reduction: int,
) -> tuple[Tensor, Tensor]:
    """See :data:`gpubuf.kernels.sac.temperature_loss`."""
    n = log_prob.numel()
    check_rows(n, weight=weight, mask=mask)
    check_rows(1, log_alpha=log_alpha, target_entropy=target_entropy)
    real, plan = computing_dtype(log_prob), plan_rows(n, device_name(log_prob.device))
    new: dict[str, Any] = {"dtype": real, "device": log_prob.device}
    shape = log_prob.shape if reduction == NONE else torch.Size()
    loss, slope = torch.empty(shape, **new), torch.empty(shape, **new)
    if not n:
        return loss.zero_(), slope.zero_()
    partial = loss if plan.single else torch.empty(2 * plan.programs, **new)
    launch(
        temperature_loss_kernel,
        plan.programs,
        log_alpha,
        dense(log_prob),
        target_entropy,
        optional(weight, log_prob),
        optional(mask, log_prob),
        loss,
        slope,
        partial,
        n,
        REAL=REAL[real],
        REDUCTION=reduction,
        HAS_WEIGHT=weight is not None,
        HAS_MASK=mask is not None,
        SINGLE=plan.single,
        BLOCK=plan.block,
        num_warps=plan.num_warps,
    )
    if reduction != NONE and not plan.single:
        launch(
            finish_temperature_kernel,
            1,
            partial,
            log_alpha,
            loss,
            slope,
            plan.programs,
            REAL=REAL[real],
            REDUCTION=reduction,
            BLOCK=FINISH_BLOCK,
            num_warps=2,
        )
    return loss, slope
