"""Parts that the differentiable operations share: the computing dtype, and the registration of gradients."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from gpubuf.kernels._registry import eager, library, without_dispatch


def computing_dtype(*tensors: Tensor) -> torch.dtype:
    """float64 if any of ``tensors`` is float64, else float32: what float16 and bfloat16 are computed in, too."""
    for tensor in tensors:
        if tensor.dtype is torch.float64:
            return torch.float64
    return torch.float32


def direct(op: Any) -> Callable[..., Any]:
    """``op`` without its gradient, called past PyTorch's dispatcher where that has nothing to decide.

    Lazy tensors (:func:`~gpubuf.kernels._registry.is_lazy`) are copied first, as the dispatcher would do. Users may
    pass them, and so may autograd, as gradients.
    """
    return without_dispatch(op, given=None)


def past_functorch(function: type[torch.autograd.Function]) -> Callable[..., Any]:
    """``function.apply`` without its Python, which serves transforms of torch.func: for calls that never are in one."""
    apply: Callable[..., Any] = super(torch.autograd.Function, function).apply  # type: ignore[misc]
    return apply


def _once(name: str, backward: Callable[..., Any]) -> Callable[..., Any]:
    """``backward``, whose gradients refuse to be differentiated: as constants they would give a wrong result."""

    def gradient(ctx: Any, *grads: Tensor | None) -> Any:
        found = backward(ctx, *grads)
        if not torch.is_grad_enabled():
            return found
        # They depend on all of these: autograd skips what no path leads through.
        sources = [each for each in (*grads, *ctx.saved_tensors) if each is not None and each.requires_grad]
        tensors = [each for each in found if each is not None]
        refusing = torch._C._functions.DelayedError(
            f"{name} has no gradient of its gradient: write what you differentiate twice in PyTorch's own operations",
            len(tensors) + len(sources),
        )
        left = iter(refusing(*tensors, *sources) if tensors and sources else tensors)
        return tuple(None if each is None else next(left) for each in found)

    return gradient


def register_autograd(
    op: Any, setup_context: Callable[..., None], backward: Callable[..., Any], *, twice: bool = False
) -> Callable[..., Any]:
    """Register the gradient of ``op``, as ``torch.library.register_autograd`` does, at a third of its cost a call.

    Args:
        op: the overload that :func:`~gpubuf.kernels._registry.define` returned.
        setup_context: ``(ctx, inputs, output)``; saves what the backward needs.
        backward: ``(ctx, *grads)``; one gradient, or None, for each input.
        twice: ``backward`` returns gradients that can be differentiated while gradients are enabled. Otherwise a
            second derivative raises RuntimeError.

    Returns:
        ``op``, called past PyTorch's dispatcher where that has nothing to decide: in eager mode, for plain tensors.
    """
    straight = direct(op)
    backward = backward if twice else _once(op.name(), backward)

    def forward(ctx: Any, *args: Any) -> Any:
        with torch._C._AutoDispatchBelowAutograd():
            output = straight(*args)
        setup_context(ctx, args, output)
        return output

    gradient: Any = type(
        f"{op.name()}_gradient",
        (torch.autograd.Function,),
        {"forward": staticmethod(forward), "backward": staticmethod(backward)},
    )

    apply = past_functorch(gradient)

    def differentiable(*args: Any) -> Any:
        if torch.is_grad_enabled() and any(isinstance(a, Tensor) and a.requires_grad for a in args):
            return gradient.apply(*args)
        with torch._C._AutoDispatchBelowAutograd():
            return op(*args)

    library.impl(op.name().partition("::")[2], differentiable, "Autograd")

    def call(*args: Any) -> Any:
        if not eager(args[0]) or torch._C._are_functorch_transforms_active():
            return op(*args)
        if torch.is_grad_enabled() and any(isinstance(a, Tensor) and a.requires_grad for a in args):
            return apply(*args)
        return straight(*args)

    return call


library.define("snapshot(Tensor x) -> Tensor")
library.impl("snapshot", torch.clone, "CompositeExplicitAutograd")

snapshot = torch.ops.gpubuf.snapshot.default
"""A copy of ``x`` as it is now, without gradient, that a compiled backward reads too.

Inductor computes a plain copy anew in the backward, and there finds what the forward has since written into ``x``.
What no compiler can see into is saved.
"""


@functools.partial(torch.library.register_vmap, "gpubuf::snapshot", lib=library)
def _snapshot_vmap(_: Any, dims: tuple[int | None], x: Tensor) -> tuple[Tensor, int | None]:
    return snapshot(x), dims[0]


def dense(tensor: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """``tensor`` itself if it is contiguous and of ``dtype`` (None: any), else a copy that is."""
    if dtype is not None and tensor.dtype is not dtype:
        tensor = tensor.to(dtype)
    return tensor if tensor.is_contiguous() else tensor.contiguous()
