"""Soft actor-critic written out in plain PyTorch, one formula at a time: the truth for the operations and the loss.

It shares no code with the library. In float64 it is the truth; in float32 it is what a user would have instead.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional


def distance(a: Tensor, b: Tensor, loss_function: str) -> Tensor:
    if loss_function == "l1":
        return functional.l1_loss(a, b, reduction="none")
    if loss_function == "l2":
        return functional.mse_loss(a, b, reduction="none")
    return functional.smooth_l1_loss(a, b, reduction="none")


def reduce(rows: Tensor, weight: Tensor | None, mask: Tensor | None, reduction: str) -> Tensor:
    """One number (or the weighted rows) of per-row losses."""
    w = torch.ones_like(rows) if weight is None else weight.to(rows.dtype).reshape(rows.shape)
    if mask is not None:
        m = mask.reshape(rows.shape)
        rows, w = torch.where(m, rows, 0.0), torch.where(m, w, 0.0)
    if reduction == "none":
        return w * rows
    total = (w * rows).sum()
    return total if reduction == "sum" else total / w.sum()


def td_target(
    next_q: Tensor,
    next_log_prob: Tensor,
    alpha: Tensor | float,
    reward: Tensor,
    terminated: Tensor,
    gamma: float,
    steps: Tensor | None = None,
) -> Tensor:
    """Of ``next_q`` [N, *S] and rows of shape S."""
    value = next_q.min(0).values - alpha * next_log_prob
    discount = gamma if steps is None else gamma ** steps.to(value.dtype)
    return reward + torch.where(terminated, 0.0, discount * value)


def assert_no_worse(ours: Tensor, plain: Tensor, truth: Tensor, tolerance: float) -> None:
    """``ours`` is not further from the truth than ``plain``, PyTorch's in the same dtype, plus a tolerance."""
    assert ours.shape == truth.shape
    if truth.numel() == 0:
        return
    size = float(truth.abs().max()) + 1
    error = float((ours.double() - truth).abs().max())
    allowed = float((plain.double() - truth).abs().max()) + tolerance * size
    assert error <= allowed, f"{error} > {allowed}"
