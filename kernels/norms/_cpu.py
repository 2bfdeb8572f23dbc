"""Norms with activations in plain PyTorch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import repeat
from typing import Any

import torch
from torch import Tensor

from gpubuf.kernels import norms
from gpubuf.kernels._plain import plain
from gpubuf.kernels.norms import LAYER, NONE, SILU, activated

aten = torch.ops.aten


def slopes(grad: Tensor, z: Tensor, activation: int) -> Tensor:
    """``grad * activation'(z)``."""
    if activation == NONE:
        return grad
    found: Tensor = aten.silu_backward(grad, z) if activation == SILU else aten.threshold_backward(grad, z, 0)
    return found


def _each_net(x: Tensor, vectors: Sequence[Tensor | None], sizes: tuple[int, int, int]) -> Iterator[tuple[Any, ...]]:
    """``x`` of each net, ``[rows, D]``, and its vectors ``[D]``."""
    found = (repeat(None) if each is None else each.view(sizes[0], sizes[2]) for each in vectors)
    return zip(x.view(sizes), *found, strict=False)


@plain(norms.norm_activation)
def norm_activation(
    x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, norm: int, activation: int, nets: int, rows: int,
    width: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    sizes = nets, rows, width
    if norm == LAYER:
        parts = _each_net(x, (weight, bias), sizes)
        found = [torch.native_layer_norm(y, [width], w, b, eps) for y, w, b in parts]
        z, mean, rstd = map(torch.stack, zip(*found, strict=True))
    else:
        x = x.view(sizes)
        rstd = x.square().mean(-1, keepdim=True).add_(eps).rsqrt_()
        mean = torch.zeros_like(rstd)
        z = _scaled(x * rstd, weight, bias)
    return activated(z, activation), torch.stack((mean, rstd))


def _scaled(h: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return h * weight if bias is None else torch.addcmul(bias, h, weight)


@plain(norms.norm_activation_backward)
def norm_activation_backward(
    grad: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, statistics: Tensor, norm: int, activation: int,
    nets: int, rows: int, width: int,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    sizes = nets, rows, width
    grad, x, (mean, rstd) = grad.view(sizes), x.view(sizes), statistics.view(2, nets, rows, 1)
    if norm != LAYER:
        h = x * rstd
        g = slopes(grad, _scaled(h, weight, bias), activation)
        gh = g * h
        by_x = torch.addcmul(g * weight, h, (gh * weight).mean(-1, keepdim=True), value=-1) * rstd
        return by_x, gh.sum(1), g.sum(1)
    g = slopes(grad, _scaled((x - mean).mul_(rstd), weight, bias), activation)
    found = []
    for i, (y, w) in enumerate(_each_net(x, (weight,), sizes)):
        # Of a bias it needs the shape alone.
        found.append(aten.native_layer_norm_backward(g[i], y, [width], mean[i], rstd[i], w, w, [True, True, True]))
    by_x, by_weight, by_bias = map(torch.stack, zip(*found, strict=True))
    return by_x, by_weight, by_bias


# --- batch norm ------------------------------------------------------------------------------------------------------


@plain(norms.batch_moments)
def norm_batch_moments(x: Tensor, rows: int, nets: int, width: int) -> tuple[Tensor, Tensor]:
    x = x.view(nets, rows, width)
    mean = x.mean(1, keepdim=True)
    return mean, (x - mean).square_().mean(1)


def _normalised(x: Tensor, mean: Tensor, rstd: Tensor, sizes: tuple[int, int, int]) -> Tensor:
    return (x.view(sizes) - mean.view(sizes[0], 1, sizes[2])) * rstd


@plain(norms.batch_norm_activation)
def batch_norm_activation(
    x: Tensor, weight: Tensor, bias: Tensor, mean: Tensor, var: Tensor, eps: float, activation: int, rows: int,
    nets: int, width: int,
) -> Tensor:  # fmt: skip
    h = _normalised(x, mean, (var + eps).rsqrt(), (nets, rows, width))
    return activated(torch.addcmul(bias, h, weight), activation)


@plain(norms.batch_norm_activation_backward)
def batch_norm_activation_backward(
    grad: Tensor, x: Tensor, weight: Tensor, bias: Tensor, mean: Tensor, var: Tensor, eps: float, activation: int,
    own: bool, rows: int, nets: int, width: int,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    rstd = (var + eps).rsqrt()
    h = _normalised(x, mean, rstd, (nets, rows, width))
    g = slopes(grad.view(h.shape), torch.addcmul(bias, h, weight), activation)
    by_bias, by_weight = g.sum(1, keepdim=True), (g * h).sum(1, keepdim=True)
    by_x = g if not own else torch.addcmul(g - by_bias / rows, h, by_weight, value=-1 / max(rows, 1))
    return by_x * (weight * rstd), by_weight, by_bias
