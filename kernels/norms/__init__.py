"""Layer norm, RMS norm and batch norm followed by an activation, forward and backward, one kernel each.

``x`` is ``[*batch, D]``, each row along its last dimension. Scale and bias belong to one net, ``[D]``, or to each of N
nets of an ensemble, ``[N, 1, D]``; then ``x`` is ``[N, *batch, D]``. Rows of layer norm and RMS norm have at most
:data:`MAX_WIDTH` elements.

Arithmetic is float64 where ``x`` is, and float32 otherwise, also for float16 and bfloat16. Outputs and gradients have
the dtype of their arguments. The sums of the gradients of scale and bias over the rows are added in a fixed order:
results repeat to the bit on one kind of device. Nothing synchronises with the host.

References: Ba, Kiros and Hinton, "Layer Normalization", arXiv 1607.06450; Zhang and Sennrich, "Root Mean Square Layer
Normalization", arXiv 1910.07467; Ioffe and Szegedy, "Batch Normalization", arXiv 1502.03167; Elfwing, Uchibe and Doya,
"Sigmoid-weighted linear units", arXiv 1702.03118 (SiLU).
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from gpubuf.kernels._operations import computing_dtype, declare, differentiable, direct

LAYER, RMS = range(2)
"""Norms: of what is left of a row without its mean, and of the row as it is."""

NONE, RELU, SILU = range(3)
"""Activations: z, max(z, 0), and z / (1 + exp(-z))."""

MAX_WIDTH = 2048
"""Elements of a row, at most: a program holds whole rows."""


def activated(z: Tensor, activation: int) -> Tensor:
    """The activation, by PyTorch."""
    if activation == NONE:
        return z
    return functional.silu(z) if activation == SILU else functional.relu(z)


def _for_batch(vector: Tensor, x: Tensor) -> Tensor:
    """A vector of each net with as many dimensions as ``x``."""
    if vector.ndim == 1 or x.ndim == 3:
        return vector
    return vector.reshape(vector.shape[0], *[1] * (x.ndim - 2), vector.shape[-1])


def composed(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, norm: int, activation: int) -> Tensor:
    """y of :data:`norm_activation`, made of PyTorch's operations: differentiable as often as you like, and in vmap."""
    computed = x.to(torch.promote_types(x.dtype, computing_dtype(x)))
    if norm == LAYER:
        normal = functional.layer_norm(computed, x.shape[-1:], eps=eps)
    elif torch._C._get_tracing_state() is not None:
        # The ONNX exporter of traces has no rms_norm.
        normal = computed * (computed.square().mean(-1, keepdim=True) + eps).rsqrt()
    else:
        normal = functional.rms_norm(computed, x.shape[-1:], eps=eps)
    y = normal * _for_batch(weight, x).to(computed.dtype)
    if bias is not None:
        y = y + _for_batch(bias, x).to(computed.dtype)
    return activated(y, activation).to(x.dtype)


def _check_shapes(x: Tensor, weight: Tensor) -> None:
    width = x.shape[-1] if x.ndim else 0
    if not width:
        raise ValueError(f"rows must have at least one element, got x of shape {list(x.shape)}")
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


def _sizes(x: Tensor, weight: Tensor) -> dict[str, int]:
    nets, width = 1 if weight.ndim == 1 else weight.shape[0], x.shape[-1]
    total = x.numel() // width
    return {"rows": total // nets, "nets": nets, "width": width, "total": total}


def _check_vectors(weight: Tensor, **vectors: Tensor | None) -> None:
    for name, vector in vectors.items():
        if vector is not None and vector.shape != weight.shape:
            raise ValueError(f"{name} must have the shape {list(weight.shape)} of the weight, got {list(vector.shape)}")


# --- layer norm and RMS norm ------------------------------------------------------------------------------------------


def _check_norm(x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    _check_vectors(weight, bias=bias)
    if x.shape[-1] > MAX_WIDTH:
        raise ValueError(f"rows must have 1 to {MAX_WIDTH} elements, got {x.shape[-1]}")


norm_activation = declare(
    "norm_activation(Tensor x, Tensor weight, Tensor? bias, float eps, int norm, int activation)"
    " -> (Tensor y, Tensor statistics)",
    __name__,
    checks=[_check_shapes, _check_norm],
    sizes=_sizes,
    results=lambda x: (x, (2, *x.shape[:-1])),
    real="x",
)
"""``(y, statistics)``: y = activation(h * weight + bias), h = (x - mean) * rstd for each row.

For LAYER, mean is that of the row and rstd = 1 / sqrt(mean((x - mean)^2) + eps). For RMS, mean is 0. ``statistics`` is
``[2, *batch]``, mean and rstd in the computing dtype, for the backward. Differentiable in ``x``, ``weight`` and
``bias``, through ``y``.
"""

norm_activation_backward = declare(
    "norm_activation_backward(Tensor grad, Tensor x, Tensor weight, Tensor? bias, Tensor statistics, int norm,"
    " int activation) -> (Tensor grad_x, Tensor grad_weight, Tensor grad_bias)",
    __name__,
    checks=[_check_shapes, _check_norm],
    sizes=_sizes,
    results=lambda x, weight: (x, weight, weight),
    real="x",
)
"""Gradients of :data:`norm_activation` by ``x``, ``weight`` and ``bias``; the last one also where there is no bias.

With z = h * weight + bias and g = grad * activation'(z): by the bias sum(g) over the rows, by the weight sum(g * h),
and by x, for u = g * weight, rstd * (u - mean(u) - h * mean(u * h)) with means over the row; without mean(u) for RMS.
The derivative of ReLU at 0 is 0.
"""


norm_activation_direct = differentiable(norm_activation, norm_activation_backward, composed)


# --- batch norm -------------------------------------------------------------------------------------------------------


def composed_batch(
    x: Tensor, weight: Tensor, bias: Tensor, mean: Tensor, var: Tensor, eps: float, activation: int, own: bool
) -> Tensor:
    """:data:`batch_norm_activation` made of PyTorch's operations."""
    computed = x.to(torch.promote_types(x.dtype, computing_dtype(x)))
    if own:
        dims = tuple(range(x.ndim - 1)) if weight.ndim == 1 else tuple(range(1, x.ndim - 1))
        v, m = torch.var_mean(computed, dims, correction=0, keepdim=True)
    else:
        v, m = (_for_batch(vector, x).to(computed.dtype) for vector in (var, mean))
    w, b = (_for_batch(vector, x).to(computed.dtype) for vector in (weight, bias))
    return activated(torch.addcmul(b, (computed - m) * (v + eps).rsqrt(), w), activation).to(x.dtype)


batch_moments = declare(
    "norm_batch_moments(Tensor x, Tensor weight) -> (Tensor mean, Tensor var)",
    __name__,
    checks=[_check_shapes],
    sizes=_sizes,
    results=lambda weight: (weight.shape, weight.shape),
    real="x",
)
"""``(mean, var)`` of every element of a row over the rows of a net, shaped as ``weight``, in the computing dtype.

``var`` is the biased one, the mean of (x - mean)^2. Not differentiable: the gradient of
:data:`batch_norm_activation` knows where they come from. Without rows they are NaN. ``weight`` gives the shape.
"""


def _check_batch(weight: Tensor, bias: Tensor, mean: Tensor, var: Tensor) -> None:
    _check_vectors(weight, bias=bias, mean=mean, var=var)


batch_norm_activation = declare(
    "batch_norm_activation(Tensor x, Tensor weight, Tensor bias, Tensor mean, Tensor var, float eps, int activation,"
    " bool own) -> Tensor y",
    __name__,
    checks=[_check_shapes, _check_batch],
    sizes=_sizes,
    results=lambda x: (x,),
    real="x",
)
"""activation(h * weight + bias), h = (x - mean) / sqrt(var + eps). Differentiable in ``x``, ``weight`` and ``bias``.

``own`` says that mean and variance are those of ``x``, by :data:`batch_moments`: the gradient then takes into account
that they change with it. Otherwise they are constants. All vectors have the shape of ``weight``.
"""

batch_norm_activation_backward = declare(
    "batch_norm_activation_backward(Tensor grad, Tensor x, Tensor weight, Tensor bias, Tensor mean, Tensor var,"
    " float eps, int activation, bool own) -> (Tensor grad_x, Tensor grad_weight, Tensor grad_bias)",
    __name__,
    checks=[_check_shapes, _check_batch],
    sizes=_sizes,
    real="x",
)
"""Gradients of :data:`batch_norm_activation` by ``x``, ``weight`` and ``bias``.

With z = h * weight + bias and g = grad * activation'(z): by the bias sum(g) over the rows, by the weight sum(g * h),
and by x, weight / sqrt(var + eps) * (g - mean(g) - h * mean(g * h)) with means over the rows; without them unless
``own``.
"""

batch_moments_direct = direct(batch_moments)
batch_norm_activation_direct = differentiable(batch_norm_activation, batch_norm_activation_backward, composed_batch)
