"""The step of the optimiser in plain PyTorch, one parameter at a time: its definition, and the oracle of the tests."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass
class Rule:
    """The hyperparameters of a group."""

    lr: float = 1e-3
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    weight_decay: float = 0.01
    tau: float = 0.005
    max_norm: float = float("inf")


@dataclass
class Entry:
    """A parameter, or a tensor that is only the source of a target."""

    param: Tensor
    exp_avg: Tensor | None = None
    exp_avg_sq: Tensor | None = None
    target: Tensor | None = None
    unit_dim: int | None = None
    norm: float = 1.0
    step: int = 0


def adamw(entry: Entry, rule: Rule, grad: Tensor | None, average: bool, norm: float | None = None) -> None:
    """One step, in the dtype of the moments."""
    p = entry.param if entry.exp_avg is None else entry.param.to(entry.exp_avg.dtype)
    if grad is not None and entry.exp_avg is not None and entry.exp_avg_sq is not None:
        entry.step += 1
        g = grad.to(p.dtype)
        if norm is not None:
            g = g * min(1.0, rule.max_norm / (norm + 1e-6))
        entry.exp_avg = rule.beta1 * entry.exp_avg + (1 - rule.beta1) * g
        entry.exp_avg_sq = rule.beta2 * entry.exp_avg_sq + (1 - rule.beta2) * g * g
        mean = entry.exp_avg / (1 - rule.beta1**entry.step)
        variance = entry.exp_avg_sq / (1 - rule.beta2**entry.step)
        p = p * (1 - rule.lr * rule.weight_decay) - rule.lr * mean / (variance.sqrt() + rule.eps)
        if entry.unit_dim is not None:
            p = p * entry.norm / torch.linalg.vector_norm(p, dim=entry.unit_dim, keepdim=True).clamp_min(1e-12)
        entry.param = p.to(entry.param.dtype)
    if average and entry.target is not None:
        source = entry.param.to(p.dtype)
        target = entry.target.to(p.dtype)
        entry.target = (target + rule.tau * (source - target)).to(entry.target.dtype)
