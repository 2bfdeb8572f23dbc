"""What the differentiable operations share: their computing dtype, and registration of their gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from gpubuf.kernels._registry import NAMESPACE, library


def computing_dtype(*tensors: Tensor) -> torch.dtype:
    """float64 if any of ``tensors`` is float64, else float32: what float16 and bfloat16 are computed in, too."""
    for tensor in tensors:
        if tensor.dtype is torch.float64:
            return torch.float64
    return torch.float32


def register_autograd(name: str, setup_context: Callable[..., None], backward: Callable[..., Any]) -> None:
    """Register the gradient of ``gpubuf::<name>``; see ``torch.library.register_autograd``."""
    torch.library.register_autograd(f"{NAMESPACE}::{name}", backward, setup_context=setup_context, lib=library)


def dense(tensor: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """``tensor`` itself if it is contiguous and of ``dtype`` (None: any), else a copy that is."""
    if dtype is not None and tensor.dtype is not dtype:
        tensor = tensor.to(dtype)
    return tensor if tensor.is_contiguous() else tensor.contiguous()
