"""Soft actor-critic written out in plain PyTorch, one formula at a time: the truth for the operations and the loss.

It shares no code with the library. In float64 it is the truth; in float32 it is what a user would have instead.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional


def tanh_normal(
    loc: Tensor, scale: Tensor, noise: Tensor, low: Tensor | float, high: Tensor | float, event_dims: int = 1
) -> tuple[Tensor, Tensor]:
    """(action, log-density) of ``low + (high - low) (tanh(x) + 1) / 2``, x = loc + scale * noise."""
    x = loc + scale * noise
    half = (torch.as_tensor(high, dtype=x.dtype) - torch.as_tensor(low, dtype=x.dtype)) / 2
    action = torch.as_tensor(low, dtype=x.dtype) + half * (1 + torch.tanh(x))
    # 1 - tanh(x)^2 = 1 / cosh(x)^2 and cosh(x) = (e^x + e^-x) / 2
    log_slope = -2 * (torch.logaddexp(x, -x) - math.log(2)) + half.log()
    normal = -0.5 * noise**2 - scale.log() - 0.5 * math.log(2 * math.pi)
    each = normal - log_slope
    return action, each.sum(tuple(range(-event_dims, 0))) if event_dims else each


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
