"""The normal distribution squashed by tanh: a sample and its log-density, forward and backward, one kernel each.

``A`` is the number of action components. Arithmetic is float64 where ``loc`` or ``scale`` is, and float32 otherwise,
also for float16 and bfloat16; the log-density comes out in that *computing dtype*, actions and gradients in the dtype
of their arguments. Nothing here synchronises with the host.

Reference: Haarnoja et al., "Soft Actor-Critic", ICML 2018, appendix C.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from gpubuf.kernels._operations import declare, differentiable

LOG_2 = math.log(2)
HALF_LOG_2_PI = 0.5 * math.log(2 * math.pi)


def _check(loc: Tensor, scale: Tensor, noise: Tensor, low: Tensor | None, high: Tensor | None, event_dims: int) -> None:
    if not loc.shape == scale.shape == noise.shape:
        raise ValueError(
            f"loc, scale and noise must have the same shape, got {list(loc.shape)}, {list(scale.shape)} and "
            f"{list(noise.shape)}"
        )
    if not 0 <= event_dims <= loc.ndim:
        raise ValueError(f"event_dims must be in [0, {loc.ndim}] for loc of shape {list(loc.shape)}, got {event_dims}")
    if low is None or high is None:
        if low is not high:
            raise ValueError("low and high must both be tensors, or both None")
        return
    last = loc.shape[-1] if loc.ndim else 1
    if low.shape != (last,) or high.shape != (last,):
        raise ValueError(
            f"bounds must have the shape [{last}] of the last dimension of loc, got {list(low.shape)} and "
            f"{list(high.shape)}"
        )


def _sizes(loc: Tensor, low: Tensor | None, event_dims: int) -> dict[str, int]:
    """``last`` is how many components have their own bounds."""
    split, last = loc.ndim - event_dims, 1 if low is None else low.numel()
    return {"n": loc.shape[:split].numel(), "width": loc.shape[split:].numel(), "last": last, "total": loc.numel()}


def _sample_results(loc: Tensor, scale: Tensor, event_dims: int) -> tuple[Tensor, torch.Size]:
    action = loc if loc.dtype is scale.dtype else loc.to(torch.promote_types(loc.dtype, scale.dtype))
    return action, loc.shape[: loc.ndim - event_dims]


sample = declare(
    "tanh_normal_sample(Tensor loc, Tensor scale, Tensor noise, Tensor? low, Tensor? high, float low_value,"
    " float high_value, int event_dims) -> (Tensor action, Tensor log_prob)",
    __name__,
    checks=[_check],
    sizes=_sizes,
    results=_sample_results,
    real="loc scale",
)
"""``(action, log_prob)`` of a normal squashed by tanh: x = loc + scale * noise, action = centre + half * tanh(x).

``loc``, ``scale`` and ``noise`` have the same shape ``[*batch, A]``; ``noise`` is standard normal and a constant to
autograd. The bounds are the tensors ``low`` and ``high``, both ``[M]`` with M the last dimension of ``loc``, or the
numbers where the tensors are None; half = (high - low) / 2. ``log_prob`` is summed over the last ``event_dims``
dimensions:

    -noise^2/2 - log(scale) - log(2 pi)/2 - log(half) - 2 * (log 2 - |x| - log(1 + exp(-2|x|)))

whose last term is log(1 - tanh(x)^2) without overflow or cancellation. Differentiable in ``loc`` and ``scale``.
"""

sample_backward = declare(
    "tanh_normal_sample_backward(Tensor loc, Tensor scale, Tensor noise, Tensor? low, Tensor? high,"
    " Tensor? grad_action, Tensor? grad_log_prob, float low_value, float high_value, int event_dims)"
    " -> (Tensor grad_loc, Tensor grad_scale)",
    __name__,
    checks=[_check],
    sizes=_sizes,
    real="loc scale",
)
"""Gradients of :data:`sample` by ``loc`` and ``scale``; a gradient that is None counts as zero.

By x: grad_action * half * sech(x)^2 + grad_log_prob * 2 tanh(x), with sech(x)^2 = 4 e / (1 + e)^2, e = exp(-2|x|),
which keeps its relative precision where 1 - tanh(x)^2 would round to zero.
"""

sample_direct = differentiable(sample, sample_backward)
