"""Launches the kernels of categorical critics."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gpubuf.kernels import config
from gpubuf.kernels._check import device_name
from gpubuf.kernels._differentiable import computing_dtype, dense
from gpubuf.kernels._launching import cdiv, launch
from gpubuf.kernels.categorical import OWN, check_categorical_target, check_logits, check_loss, check_support
from gpubuf.kernels.categorical._triton import (
    categorical_target_kernel,
    expected_value_backward_kernel,
    expected_value_kernel,
)
from gpubuf.kernels.categorical._triton_loss import categorical_loss_backward_kernel, categorical_loss_kernel
from gpubuf.kernels.td import NONE
from gpubuf.kernels.td._launch import REAL, finish_loss, optional


@dataclass(frozen=True)
class AtomPlan:
    """How kernels cover ``n`` rows of atoms.

    Attributes:
        width: atoms, rounded up to a power of two.
        block: rows of a program that has several.
        programs: that many blocks.
        num_warps: of a program that has ``block`` rows.
        row_warps: of a program that has one row.
    """

    width: int
    block: int
    programs: int
    num_warps: int
    row_warps: int

    @property
    def single(self) -> bool:
        """Whether one program sees every row, and so finishes a reduction itself."""
        return self.programs == 1


def plan_atoms(n: int, atoms: int, device_name: str | None = None) -> AtomPlan:
    """Tiles as configured, in as few programs as ``n`` rows need, at least one."""
    width, chosen = config.ceil_power(atoms), config.atom_rows(n, atoms, device_name)
    programs = max(cdiv(n, chosen.block), 1)
    return AtomPlan(width, chosen.block, programs, chosen.num_warps, min(max(width // 128, 1), 8))


def _support(v_min: float, v_max: float) -> dict[str, Any]:
    """Bounds as compile-time arguments. A launch can't be looked up by a float that is zero, but by an integer."""
    return {"V_MIN": v_min or 0, "V_MAX": v_max or 0}


def categorical_target(
    next_logits: Tensor,
    next_log_prob: Tensor | None,
    alpha: Tensor | None,
    reward: Tensor,
    terminated: Tensor,
    gamma: Tensor,
    steps: Tensor | None,
    reward_scale: Tensor | None,
    v_min: float,
    v_max: float,
    target: int,
) -> Tensor:
    """See :data:`gpubuf.kernels.categorical.categorical_target`."""
    nets, atoms = check_categorical_target(
        next_logits, next_log_prob, alpha, reward, terminated, gamma, steps, reward_scale, v_min, v_max, target
    )
    n, real, targets = reward.numel(), computing_dtype(next_logits), nets if target == OWN else 1
    mass = torch.empty((targets, *next_logits.shape[1:]), dtype=real, device=next_logits.device)
    if n:
        plan = plan_atoms(n, atoms, device_name(next_logits.device))
        launch(
            categorical_target_kernel,
            targets * n,
            dense(next_logits),
            optional(next_log_prob, next_logits),
            optional(alpha, next_logits),
            dense(reward),
            dense(terminated),
            gamma,
            optional(steps, next_logits),
            optional(reward_scale, next_logits),
            mass,
            n,
            nets,
            REAL=REAL[real],
            TARGET=target,
            HAS_LOG_PROB=next_log_prob is not None,
            HAS_STEPS=steps is not None,
            HAS_SCALE=reward_scale is not None,
            **_support(v_min, v_max),
            ATOMS=atoms,
            WIDTH=plan.width,
            num_warps=plan.row_warps,
        )
    return mass


def categorical_loss(
    logits: Tensor,
    target: Tensor,
    weight: Tensor | None,
    mask: Tensor | None,
    v_min: float,
    v_max: float,
    priority: int,
    average: bool,
    reduction: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """See :data:`gpubuf.kernels.categorical.categorical_loss`."""
    n, nets, atoms = check_loss(logits, target, weight, mask, v_min, v_max)
    rows, real = logits.shape[1:-1], computing_dtype(logits)
    plan = plan_atoms(n, atoms, device_name(logits.device))
    new: dict[str, Any] = {"dtype": real, "device": logits.device}
    loss = torch.empty(rows if reduction == NONE else (), **new)
    far, norm = torch.empty(rows, **new), torch.empty((), **new)
    if not n:
        return loss.zero_(), far, norm.zero_()
    partial = loss if plan.single else torch.empty(2 * plan.programs, **new)
    launch(
        categorical_loss_kernel,
        plan.programs,
        dense(logits),
        dense(target),
        optional(weight, logits),
        optional(mask, logits),
        loss,
        far,
        norm,
        partial,
        n,
        nets,
        REAL=REAL[real],
        PRIORITY=priority,
        AVERAGE=average,
        REDUCTION=reduction,
        SHARED=target.numel() == n * atoms,
        HAS_WEIGHT=weight is not None,
        HAS_MASK=mask is not None,
        SINGLE=plan.single,
        **_support(v_min, v_max),
        ATOMS=atoms,
        WIDTH=plan.width,
        BLOCK=plan.block,
        num_warps=plan.num_warps,
    )
    if reduction != NONE and not plan.single:
        finish_loss(partial, loss, norm, plan.programs, reduction)
    return loss, far, norm


def categorical_loss_backward(
    grad: Tensor,
    logits: Tensor,
    target: Tensor,
    weight: Tensor | None,
    mask: Tensor | None,
    norm: Tensor,
    average: bool,
    reduction: int,
) -> Tensor:
    """See :data:`gpubuf.kernels.categorical.categorical_loss_backward`."""
    n, nets, atoms = logits.shape[1:-1].numel(), logits.shape[0], logits.shape[-1]
    by_logits = torch.empty(logits.shape, dtype=logits.dtype, device=logits.device)
    if n:
        plan = plan_atoms(n, atoms, device_name(logits.device))
        launch(
            categorical_loss_backward_kernel,
            nets * plan.programs,
            dense(grad),
            dense(logits),
            dense(target),
            optional(weight, logits),
            optional(mask, logits),
            norm,
            by_logits,
            n,
            nets,
            REAL=REAL[computing_dtype(logits)],
            AVERAGE=average,
            REDUCTION=reduction,
            SHARED=target.numel() == n * atoms,
            HAS_WEIGHT=weight is not None,
            HAS_MASK=mask is not None,
            ATOMS=atoms,
            WIDTH=plan.width,
            BLOCK=plan.block,
            num_warps=plan.num_warps,
        )
    return by_logits


def expected_value(logits: Tensor, v_min: float, v_max: float) -> Tensor:
    """See :data:`gpubuf.kernels.categorical.expected_value`."""
    check_support(v_min, v_max)
    _, atoms = check_logits(logits, logits.shape[1:-1].numel())
    real = computing_dtype(logits)
    value = torch.empty(logits.shape[:-1], dtype=real, device=logits.device)
    n = value.numel()
    if n:
        plan = plan_atoms(n, atoms, device_name(logits.device))
        launch(
            expected_value_kernel,
            plan.programs,
            dense(logits),
            value,
            n,
            REAL=REAL[real],
            **_support(v_min, v_max),
            ATOMS=atoms,
            WIDTH=plan.width,
            BLOCK=plan.block,
            num_warps=plan.num_warps,
        )
    return value


def expected_value_backward(grad: Tensor, logits: Tensor, value: Tensor, v_min: float, v_max: float) -> Tensor:
    """See :data:`gpubuf.kernels.categorical.expected_value_backward`."""
    real, n, atoms = computing_dtype(logits), value.numel(), logits.shape[-1]
    by_logits = torch.empty(logits.shape, dtype=logits.dtype, device=logits.device)
    if n:
        plan = plan_atoms(n, atoms, device_name(logits.device))
        launch(
            expected_value_backward_kernel,
            plan.programs,
            dense(grad),
            dense(logits),
            dense(value),
            by_logits,
            n,
            REAL=REAL[real],
            **_support(v_min, v_max),
            ATOMS=atoms,
            WIDTH=plan.width,
            BLOCK=plan.block,
            num_warps=plan.num_warps,
        )
    return by_logits
