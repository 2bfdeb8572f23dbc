"""Argument checks that several families of operations share. They read no values."""

from __future__ import annotations

import functools

import torch
from torch import Tensor


def demand(name: str, tensor: Tensor, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    """Raise TypeError or ValueError unless ``tensor`` is contiguous, and of that dtype and shape."""
    if tensor.dtype is not dtype:
        raise TypeError(f"{name} must be {str(dtype).removeprefix('torch.')}, not {tensor.dtype}")
    if tensor.shape != shape:
        raise ValueError(f"{name} must have shape {list(shape)}, not {list(tensor.shape)}")
    if not tensor.is_contiguous():
        raise ValueError(f"{name} must be contiguous, but has strides {tensor.stride()}")


def demand_int64(name: str, tensor: Tensor, shape: tuple[int, ...]) -> None:
    """Raise TypeError or ValueError unless ``tensor`` is contiguous, int64 and of that shape."""
    demand(name, tensor, torch.int64, shape)


def demand_words(name: str, tensor: Tensor, count: int) -> None:
    """Raise TypeError or ValueError unless ``tensor`` is contiguous and int64, of ``count`` numbers."""
    # One condition on the hot path; what is wrong is only looked for when something is.
    if tensor.dtype is not torch.int64 or tensor.numel() != count or not tensor.is_contiguous():
        demand_int64(name, tensor, (count,))


def length_of(name: str, vector: Tensor) -> int:
    """Number of entries; raise TypeError or ValueError unless it is a contiguous int64 vector."""
    if vector.dtype is not torch.int64 or vector.dim() != 1 or not vector.is_contiguous():
        demand_int64(name, vector, (vector.numel(),))
    return vector.numel()


def check_devices(first: Tensor, *others: Tensor | None) -> None:
    """Raise ValueError unless all tensors are on one device."""
    device = first.device
    # The set of devices is made for the message alone: it takes longer than the comparisons.
    for tensor in others:
        if tensor is not None and tensor.device != device:
            found = sorted({str(t.device) for t in (first, *others) if t is not None})
            raise ValueError(f"all tensors of an operation must be on one device, not on {found}")


@functools.lru_cache(maxsize=64)
def device_name(device: torch.device) -> str | None:
    """Name under which configurations are tuned; None for CPU tensors, which run through the interpreter."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else None
