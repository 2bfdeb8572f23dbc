"""What the tests of the norms' kernels share: arguments, and values with gradients."""

from __future__ import annotations

import torch

from gpubuf.kernels.norms import LAYER, NONE, RELU, RMS, SILU

KINDS = {LAYER: "layer", RMS: "rms"}
ACTIVATIONS = {NONE: "none", RELU: "relu", SILU: "silu"}
EPS = 1e-3


def inputs(shape, nets, dtype, bias=True):
    """x, weight and bias; ``nets=None`` for a weight without nets."""
    generator = torch.Generator().manual_seed(sum(shape) + 1)
    vector = shape[-1:] if nets is None else (nets, 1, shape[-1])
    x = torch.randn(shape, generator=generator, dtype=torch.float64) * 2 + 0.5
    weight = torch.randn(vector, generator=generator, dtype=torch.float64)
    shift = torch.randn(vector, generator=generator, dtype=torch.float64) if bias else None
    return [None if t is None else t.to(dtype) for t in (x, weight, shift)]


def results(function, x, weight, bias):
    """y and the gradients by x, weight and bias, where there is one, under a fixed incoming gradient."""
    leaves = [t.detach().clone().requires_grad_() for t in (x, weight, bias) if t is not None]
    y = function(*leaves, *([None] if bias is None else []))
    grad = torch.linspace(-1, 2, max(y.numel(), 1), dtype=torch.float64)[: y.numel()].reshape(y.shape).to(y.dtype)
    return [y.detach(), *torch.autograd.grad(y, leaves, grad)]
