"""Normalisation of rows with an activation behind it: layer norm and RMS norm, forward and backward, one kernel each.

``x`` is ``[*batch, D]``, each row along its last dimension. Scale and bias belong to one net, ``[D]``, or to each of N
nets of an ensemble, ``[N, 1, D]``; then ``x`` is ``[N, *batch, D]``. D is at most :data:`MAX_WIDTH`.

Arithmetic is float64 where ``x`` is, and float32 otherwise, also for float16 and bfloat16. Outputs and gradients have
the dtype of their arguments. The sums of the gradients of scale and bias over the rows are added in a fixed order:
results repeat to the bit on one kind of device. Nothing synchronises with the host.

References: Ba, Kiros and Hinton, "Layer Normalization", arXiv 1607.06450; Zhang and Sennrich, "Root Mean Square Layer
Normalization", arXiv 1910.07467; Elfwing, Uchibe and Doya, "Sigmoid-weighted linear units", arXiv 1702.03118 (SiLU).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from gpubuf.kernels._differentiable import computing_dtype, register_autograd
from gpubuf.kernels._registry import define

LAYER, RMS = range(2)
"""Norms: of what is left of a row without its mean, and of the row as it is."""

NONE, RELU, SILU = range(3)
"""Activations: z, max(z, 0), and z / (1 + exp(-z))."""

MAX_WIDTH = 2048
"""Elements of a row, at most: a program holds whole rows."""


def composed(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, norm: int, activation: int) -> Tensor:
    """y of :data:`norm_activation`, made of PyTorch's operations: differentiable as often as you like, and in vmap."""
    normalize = functional.layer_norm if norm == LAYER else functional.rms_norm
    computed = x.to(torch.promote_types(x.dtype, computing_dtype(x)))
    if weight.ndim == 3 and x.ndim != 3:
        shape = (weight.shape[0], *[1] * (x.ndim - 2), weight.shape[-1])
        weight, bias = weight.reshape(shape), None if bias is None else bias.reshape(shape)
    y = normalize(computed, x.shape[-1:], eps=eps) * weight.to(computed.dtype)
    if bias is not None:
        y = y + bias.to(computed.dtype)
    if activation != NONE:
        y = functional.silu(y) if activation == SILU else functional.relu(y)
    return y.to(x.dtype)


def check_arguments(x: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[int, int, int]:
    """(nets, rows of a net, D) of the arguments; ValueError unless they fit each other."""
    width = x.shape[-1] if x.ndim else 0
    if not 0 < width <= MAX_WIDTH:
        raise ValueError(f"rows must have 1 to {MAX_WIDTH} elements, got x of shape {list(x.shape)}")
    if weight.ndim == 1:
        nets = 1
        expected: tuple[int, ...] = (width,)
    else:
        nets = x.shape[0] if x.ndim > 1 else 0
        expected = (nets, 1, width)
    if weight.shape != expected or not nets:
        raise ValueError(
            "the weight must be [D] or [N, 1, D] for x of [*batch, D] or [N, *batch, D], got "
            f"{list(weight.shape)} for x of shape {list(x.shape)}"
        )
    if bias is not None and bias.shape != weight.shape:
        raise ValueError(f"the bias must have the shape {list(weight.shape)} of the weight, got {list(bias.shape)}")
    return nets, x.numel() // (nets * width), width


def _forward_fake(
    x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, norm: int, activation: int
) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), x.new_empty((2, *x.shape[:-1]), dtype=computing_dtype(x))


def _backward_fake(grad: Tensor, x: Tensor, weight: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    return x.new_empty(x.shape), weight.new_empty(weight.shape), weight.new_empty(weight.shape)


norm_activation = define(
    "norm_activation(Tensor x, Tensor weight, Tensor? bias, float eps, int norm, int activation) -> (Tensor, Tensor)",
    cpu="gpubuf.kernels.norms._cpu:norm_activation",
    cuda="gpubuf.kernels.norms._launch:norm_activation",
    fake=_forward_fake,
)
"""``(y, statistics)``: y = activation(h * weight + bias), h = (x - mean) * rstd for each row.

For LAYER, mean is that of the row and rstd = 1 / sqrt(mean((x - mean)^2) + eps). For RMS, mean is 0. ``statistics`` is
``[2, *batch]``, mean and rstd in the computing dtype, for the backward. Differentiable in ``x``, ``weight`` and
``bias``, through ``y``.
"""

norm_activation_backward = define(
    "norm_activation_backward(Tensor grad, Tensor x, Tensor weight, Tensor? bias, Tensor statistics, int norm,"
    " int activation) -> (Tensor, Tensor, Tensor)",
    cpu="gpubuf.kernels.norms._cpu:norm_activation_backward",
    cuda="gpubuf.kernels.norms._launch:norm_activation_backward",
    fake=_backward_fake,
)
"""Gradients of :data:`norm_activation` by ``x``, ``weight`` and ``bias``; the last one also where there is no bias.

With z = h * weight + bias and g = grad * activation'(z): by the bias sum(g) over the rows, by the weight sum(g * h),
and by x, for u = g * weight, rstd * (u - mean(u) - h * mean(u * h)) with means over the row; without mean(u) for RMS.
The derivative of ReLU at 0 is 0.
"""


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    x, weight, bias, ctx.eps, ctx.norm, ctx.activation = inputs
    ctx.save_for_backward(x, weight, bias, output[1])
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)


def _gradient(ctx: Any, grad: Tensor | None, _: Any) -> tuple[Any, ...]:
    if grad is None:
        return None, None, None, None, None, None
    x, weight, bias, statistics = ctx.saved_tensors
    if torch.is_grad_enabled():  # Somebody wants a gradient of the gradient.
        given = [t for t in (x, weight, bias) if t is not None and t.requires_grad]
        y = composed(x, weight, bias, ctx.eps, ctx.norm, ctx.activation)
        found = iter(torch.autograd.grad(y, given, grad, create_graph=True))
        by = [next(found) if t is not None and t.requires_grad else None for t in (x, weight, bias)]
        return *by, None, None, None
    by_x, by_weight, by_bias = norm_activation_backward(grad, x, weight, bias, statistics, ctx.norm, ctx.activation)
    return by_x, by_weight, None if bias is None else by_bias, None, None, None


register_autograd(norm_activation, _setup, _gradient)
