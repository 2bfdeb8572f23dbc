"""Launches the kernels of soft actor-critic."""

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
from gpubuf.kernels.sac import NONE, check_critics, check_rows
from gpubuf.kernels.sac._triton import (
    actor_loss_backward_kernel,
    actor_loss_kernel,
    finish_loss_kernel,
    finish_temperature_kernel,
    soft_td_target_kernel,
    td_loss_backward_kernel,
    td_loss_kernel,
    temperature_loss_kernel,
)

REAL = {torch.float32: tl.float32, torch.float64: tl.float64}

FINISH_BLOCK = 256
"""Partial sums that the finishing kernel adds at a time."""


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
    chosen = config.sac_rows(n, device_name)
    return RowPlan(chosen.block, max(cdiv(n, chosen.block), 1), chosen.num_warps)


def _optional(tensor: Tensor | None, stand_in: Tensor) -> Tensor:
    """A kernel does not read an absent argument, but needs some pointer for it."""
    return stand_in if tensor is None else dense(tensor)


def soft_td_target(
    next_q: Tensor,
    next_log_prob: Tensor,
    alpha: Tensor,
    reward: Tensor,
    terminated: Tensor,
    gamma: Tensor,
    steps: Tensor | None,
) -> Tensor:
    """See :data:`gpubuf.kernels.sac.soft_td_target`."""
    n = next_log_prob.numel()
    check_critics(next_q, n)
    check_rows(n, reward=reward, terminated=terminated, steps=steps)
    check_rows(1, alpha=alpha, gamma=gamma)
    real = computing_dtype(next_q)
    target = torch.empty(next_log_prob.shape, dtype=real, device=next_q.device)
    if n:
        plan = plan_rows(n, device_name(next_q.device))
        launch(
            soft_td_target_kernel,
            plan.programs,
            dense(next_q),
            dense(next_log_prob),
            alpha,
            dense(reward),
            dense(terminated),
            gamma,
            _optional(steps, next_q),
            target,
            n,
            next_q.shape[0],
            REAL=REAL[real],
            HAS_STEPS=steps is not None,
            BLOCK=plan.block,
            num_warps=plan.num_warps,
        )
    return target


def td_loss(
    q: Tensor, target: Tensor, weight: Tensor | None, mask: Tensor | None, loss_function: int, reduction: int
) -> tuple[Tensor, Tensor, Tensor]:
    """See :data:`gpubuf.kernels.sac.td_loss`."""
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
        _optional(weight, q),
        _optional(mask, q),
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
        _finish(partial, loss, norm, None, plan.programs, n, real, reduction)
    return loss, td_error, norm


def _finish(
    partial: Tensor,
    loss: Tensor,
    norm: Tensor,
    entropy: Tensor | None,
    count: int,
    n: int,
    real: torch.dtype,
    reduction: int,
) -> None:
    if reduction == NONE and entropy is None:
        # The rows are the result: nothing is left to add.
        return
    launch(
        finish_loss_kernel,
        1,
        partial,
        loss,
        norm,
        _optional(entropy, norm),
        count,
        n,
        REAL=REAL[real],
        REDUCTION=reduction,
        HAS_ENTROPY=entropy is not None,
        BLOCK=FINISH_BLOCK,
        num_warps=2,
    )


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
    """See :data:`gpubuf.kernels.sac.td_loss_backward`."""
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
            _optional(weight, q),
            _optional(mask, q),
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


def actor_loss(
    q: Tensor, log_prob: Tensor, alpha: Tensor, weight: Tensor | None, mask: Tensor | None, reduction: int
) -> tuple[Tensor, Tensor, Tensor]:
    """See :data:`gpubuf.kernels.sac.actor_loss`."""
    n = log_prob.numel()
    check_critics(q, n)
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
        _optional(weight, q),
        _optional(mask, q),
        loss,
        entropy,
        norm,
        partial,
        n,
        q.shape[0],
        REAL=REAL[real],
        REDUCTION=reduction,
        HAS_WEIGHT=weight is not None,
        HAS_MASK=mask is not None,
        SINGLE=plan.single,
        BLOCK=plan.block,
        num_warps=plan.num_warps,
    )
    if not plan.single:
        _finish(partial, loss, norm, entropy, plan.programs, n, real, reduction)
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
            _optional(weight, q),
            _optional(mask, q),
            norm,
            by_q,
            by_log_prob,
            n,
            q.shape[0],
            REAL=REAL[computing_dtype(q)],
            REDUCTION=reduction,
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
        _optional(weight, log_prob),
        _optional(mask, log_prob),
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
