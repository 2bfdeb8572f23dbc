"""The definition of the tanh-normal operation, one formula at a time. Slow, and read by tests only.

In float64 it is the truth; in float32 it is what a user would write instead. Autograd gives the gradients.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


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
