"""The tanh-normal distribution in plain PyTorch."""

from __future__ import annotations

import math

import torch
from torch import Tensor

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
    density = noise.square() * -0.5 - scale.log() - 2 * (LOG_2 - far - (far * -2).exp().log1p())
    if low is None or high is None:
        half, centre = (high_value - low_value) / 2, (high_value + low_value) / 2
        # Rounding may step over a bound; a NaN stays one.
        action = (x.tanh() * half + centre).clamp_(low_value, high_value)
        density -= HALF_LOG_2_PI + math.log(half)
    else:
        halves = (high - low) / 2
        action = torch.addcmul((high + low) / 2, x.tanh(), halves).clamp_(low, high)
        density -= HALF_LOG_2_PI + halves.log()
    return action, density.view(n, width).sum(1)


@plain(tanh_normal.sample_backward)
def sample_backward(
    loc: Tensor, scale: Tensor, noise: Tensor, low: Tensor | None, high: Tensor | None, grad_action: Tensor | None,
    grad_log_prob: Tensor | None, low_value: float, high_value: float, n: int, width: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    x = torch.addcmul(loc, scale, noise)
    slope = torch.zeros_like(x)
    if grad_action is not None:
        half = (high_value - low_value) / 2 if low is None or high is None else (high - low) / 2
        decay = (x.abs() * -2).exp()
        # 1 - tanh(x)^2, which keeps its precision where that is near 0.
        slope = grad_action * (4 * half) * (decay / (1 + decay).square())
    if grad_log_prob is None:
        return slope, slope * noise
    by_density = grad_log_prob.reshape(n, 1).expand(n, width).reshape(x.shape)
    slope = torch.addcmul(slope, by_density, x.tanh(), value=2)
    return slope, torch.addcdiv(slope * noise, by_density, scale, value=-1)
