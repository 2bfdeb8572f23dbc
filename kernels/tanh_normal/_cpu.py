"""The tanh-normal distribution in plain PyTorch."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn.functional import softplus

from gpubuf.kernels import tanh_normal
from gpubuf.kernels._plain import plain
from gpubuf.kernels.tanh_normal import HALF_LOG_2_PI, LOG_2


@plain(tanh_normal.sample)
def sample(
    loc: Tensor, scale: Tensor, noise: Tensor, low: Tensor | None, high: Tensor | None, low_value: float,
    high_value: float, n: int, width: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    x = torch.addcmul(loc, scale, noise)
    far = x.abs()
    # |x| + log(1 + exp(-2|x|))
    far -= 2 * softplus(far, -2)
    density = torch.addcmul(scale.log(), noise, noise, value=0.5).sub_(far, alpha=2)
    action, constant = x.tanh_(), HALF_LOG_2_PI + 2 * LOG_2
    if low is None or high is None:
        half, centre = (high_value - low_value) / 2, (high_value + low_value) / 2
        if (half, centre) != (1, 0):
            # Rounding may step over a bound; a NaN stays one.
            action.mul_(half).add_(centre).clamp_(low_value, high_value)
        constant += math.log(half)
    else:
        halves = (high - low) / 2
        action = torch.addcmul((high + low) / 2, action, halves).clamp_(low, high)
        density += halves.log()
    return action, density.view(n, width).sum(1).add_(constant * width).neg_()


@plain(tanh_normal.sample_backward)
def sample_backward(
    loc: Tensor, scale: Tensor, noise: Tensor, low: Tensor | None, high: Tensor | None, grad_action: Tensor | None,
    grad_log_prob: Tensor | None, low_value: float, high_value: float, n: int, width: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    x = torch.addcmul(loc, scale, noise)
    if grad_action is None:
        slope = torch.zeros_like(x)
    else:
        half = (high_value - low_value) / 2 if low is None or high is None else (high - low) / 2
        decay = (x.abs() * -2).exp()
        # 1 - tanh(x)^2, which keeps its precision where that is near 0.
        slope = grad_action * (4 * half) * (decay / (1 + decay).square())
    if grad_log_prob is None:
        return slope, slope * noise
    by_density = grad_log_prob.reshape(n, 1).expand(n, width).reshape(x.shape)
    slope = torch.addcmul(slope, by_density, x.tanh(), value=2)
    return slope, torch.addcdiv(slope * noise, by_density, scale, value=-1)
