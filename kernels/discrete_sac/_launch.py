"""Launches the kernels of discrete soft actor-critic."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gpubuf.kernels import config
from gpubuf.kernels._check import device_name
from gpubuf.kernels._differentiable import computing_dtype, dense
from gpubuf.kernels._launching import cdiv, launch
from gpubuf.kernels.discrete_sac import check_actor, check_values
from gpubuf.kernels.discrete_sac._triton import (
    actor_loss_backward_kernel,
    actor_loss_kernel,
    finish_actor_loss_kernel,
    soft_value_kernel,
)
from gpubuf.kernels.td import NONE, check_rows
from gpubuf.kernels.td._launch import FINISH_BLOCK, REAL, optional

MOST_ACTIONS = 128
"""Actions that a program takes at a time, at most."""

MOST_ELEMENTS = 512
"""Rows times actions that a program takes at a time, at most."""


@dataclass(frozen=True)
class TilePlan:
    """How a kernel over rows of actions covers them.

    Attributes:
        rows: rows of one program.
        actions: actions that it takes at a time.
        programs: size of the grid.
        num_warps: warps of a program.
    """

    rows: int
    actions: int
    programs: int
    num_warps: int

    @property
    def single(self) -> bool:
        """Whether one program sees every row, and so finishes a reduction itself."""
        return self.programs == 1


def plan_tiles(n: int, n_actions: int, device_name: str | None = None) -> TilePlan:
    """Tiles of as many elements as a kernel of a loss has rows (see :func:`gpubuf.kernels.config.loss_rows`), at most.

    A lane takes one element: with more, the compiler spills.
    """
    actions = min(config.ceil_power(n_actions), MOST_ACTIONS)
    elements = min(config.loss_rows(n * actions, device_name).block, MOST_ELEMENTS)
    rows = max(elements // actions, 1)
    return TilePlan(rows, actions, max(cdiv(n, rows), 1), max(rows * actions // 32, 1))


def soft_value(next_q: Tensor, logits: Tensor, alpha: Tensor) -> Tensor:
    """See :data:`gpubuf.kernels.discrete_sac.soft_value`."""
    n = check_values(next_q, logits)
    check_rows(1, alpha=alpha)
    real = computing_dtype(next_q, logits)
    value = torch.empty(logits.shape[:-1], dtype=real, device=next_q.device)
    if n:
        plan = plan_tiles(n, logits.shape[-1], device_name(next_q.device))
        launch(
            soft_value_kernel,
            plan.programs,
            dense(next_q),
            dense(logits),
            alpha,
            value,
            n,
            logits.shape[-1],
            logits.numel(),
            next_q.shape[0],
            REAL=REAL[real],
            ROWS=plan.rows,
            ACTIONS=plan.actions,
            num_warps=plan.num_warps,
        )
    return value


def actor_loss(
    q: Tensor, logits: Tensor, alpha: Tensor, weight: Tensor | None, mask: Tensor | None, reduction: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """See :data:`gpubuf.kernels.discrete_sac.actor_loss`."""
    n = check_actor(q, logits, alpha, weight, mask)
    real, rows = computing_dtype(q, logits), logits.shape[:-1]
    plan = plan_tiles(n, logits.shape[-1], device_name(q.device))
    new: dict[str, Any] = {"dtype": real, "device": q.device}
    loss, log_prob = torch.empty(rows if reduction == NONE else (), **new), torch.empty(rows, **new)
    entropy, norm = torch.empty((), **new), torch.empty((), **new)
    if not n:
        return loss.zero_(), log_prob, entropy.zero_(), norm.zero_()
    partial = loss if plan.single else torch.empty(4 * plan.programs, **new)
    launch(
        actor_loss_kernel,
        plan.programs,
        dense(q),
        dense(logits),
        alpha,
        optional(weight, q),
        optional(mask, q),
        loss,
        log_prob,
        entropy,
        norm,
        partial,
        n,
        logits.shape[-1],
        logits.numel(),
        q.shape[0],
        REAL=REAL[real],
        REDUCTION=reduction,
        HAS_WEIGHT=weight is not None,
        HAS_MASK=mask is not None,
        SINGLE=plan.single,
        ROWS=plan.rows,
        ACTIONS=plan.actions,
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
            REAL=REAL[real],
            REDUCTION=reduction,
            BLOCK=FINISH_BLOCK,
            num_warps=2,
        )
    return loss, log_prob, entropy, norm


def actor_loss_backward(
    grad: Tensor,
    q: Tensor,
    logits: Tensor,
    alpha: Tensor,
    weight: Tensor | None,
    mask: Tensor | None,
    norm: Tensor,
    reduction: int,
    with_q: bool,
) -> tuple[Tensor, Tensor]:
    """See :data:`gpubuf.kernels.discrete_sac.actor_loss_backward`."""
    by_logits = torch.empty(logits.shape, dtype=logits.dtype, device=q.device)
    by_q = torch.empty(q.shape if with_q else (0,), dtype=q.dtype, device=q.device)
    n = logits.numel() // logits.shape[-1]
    if n:
        plan = plan_tiles(n, logits.shape[-1], device_name(q.device))
        launch(
            actor_loss_backward_kernel,
            plan.programs,
            dense(grad),
            dense(q),
            dense(logits),
            alpha,
            optional(weight, q),
            optional(mask, q),
            norm,
            by_logits,
            by_q if with_q else by_logits,
            n,
            logits.shape[-1],
            logits.numel(),
            q.shape[0],
            REAL=REAL[computing_dtype(q, logits)],
            REDUCTION=reduction,
            HAS_WEIGHT=weight is not None,
            HAS_MASK=mask is not None,
            WITH_Q=with_q,
            ROWS=plan.rows,
            ACTIONS=plan.actions,
            num_warps=plan.num_warps,
        )
    return by_logits, by_q
