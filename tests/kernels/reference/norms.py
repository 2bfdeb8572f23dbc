"""The definition of a norm with an activation, one formula at a time. Slow, and read by tests only.

In float64 it is the truth; in float32 it is what a user would write instead. Autograd gives the gradients.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional


def activate(z: Tensor, activation: str) -> Tensor:
    """z, max(z, 0) or z / (1 + exp(-z))."""
    if activation == "none":
        return z
    return functional.relu(z) if activation == "relu" else z * torch.sigmoid(z)


def norm_activation(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, norm: str, activation: str) -> Tensor:
    """``activation(h * weight + bias)`` with ``h`` the rows of x at mean 0 ("layer") and mean square 1."""
    centred = x - x.mean(-1, keepdim=True) if norm == "layer" else x
    h = centred / torch.sqrt(centred.square().mean(-1, keepdim=True) + eps)
    if weight.ndim == 3:  # of each net, for any number of batch dimensions
        shape = (weight.shape[0], *[1] * (x.ndim - 2), weight.shape[-1])
        weight, bias = weight.reshape(shape), None if bias is None else bias.reshape(shape)
    z = h * weight if bias is None else h * weight + bias
    return activate(z, activation)


def batch_norm_activation(
    x: Tensor, weight: Tensor, bias: Tensor, eps: float, activation: str, statistics: tuple[Tensor, Tensor] | None
) -> Tensor:
    """``activation(h * weight + bias)`` with ``h`` each column of x at mean 0 and mean square 1, for x [N, rows, D].

    With ``statistics``, mean and variance are these.
    """
    mean = x.mean(1, keepdim=True) if statistics is None else statistics[0]
    var = (x - mean).square().mean(1, keepdim=True) if statistics is None else statistics[1]
    return activate((x - mean) / torch.sqrt(var + eps) * weight + bias, activation)
