"""Brings batches from the host to the GPU: packs them into memory of its own, and copies that in one piece.

A copy from pinned memory is made by the GPU when its stream comes to it. The caller, who may write the next batch into
the same memory as soon as the call returns, must not be what it reads. Its tensors are therefore packed first, by the
host, into pinned memory that PyTorch gives to nobody else until the copy is done.
"""

from __future__ import annotations

import torch
from torch import Tensor

from gpubuf.data.recording import capturing
from gpubuf.data.storage import host_memory
from gpubuf.kernels.rows import arena_offsets

STAGED_BYTES = 1 << 25
"""Batches up to this size are packed. PyTorch keeps pinned memory, and a large copy outweighs the wait for it."""


def to_device(sources: list[Tensor], device: torch.device) -> list[Tensor]:
    """The sources on ``device``. You may change those on the host as soon as this returns.

    Waits for the GPU only where pinned memory is copied as it is: batches above :data:`STAGED_BYTES`, batches of which
    a part is on another device, and compiled code. While a CUDA graph is captured the copy from pinned memory becomes
    part of the graph: replays read what is there then.
    """
    for tensor in sources:
        if tensor.device != device:
            break
    else:
        return sources
    if torch.compiler.is_compiling():
        return [t.to(device) for t in sources]
    if device.type != "cuda" or not host_memory.cuda_present():
        return [t.to(device) for t in sources]
    captured = capturing()
    if not captured and _packable(sources):
        return _packed(sources, device)
    # From memory that is not pinned CUDA has read by the time at which the call returns.
    return [t.to(device, non_blocking=captured or not (t.device.type == "cpu" and t.is_pinned())) for t in sources]


def _packable(sources: list[Tensor]) -> bool:
    return all(t.device.type == "cpu" for t in sources) and sum(t.nbytes for t in sources) <= STAGED_BYTES


def _packed(sources: list[Tensor], device: torch.device) -> list[Tensor]:
    offsets, n_bytes = arena_offsets([t.nbytes for t in sources], 1)
    arena = host_memory.staging(n_bytes)
    with torch.no_grad():
        torch._foreach_copy_(_views(arena, sources, offsets), sources)
    # PyTorch notes the copy, and does not give the arena's memory out again before it is done.
    return _views(arena.to(device, non_blocking=True), sources, offsets)


def _views(arena: Tensor, sources: list[Tensor], offsets: list[int]) -> list[Tensor]:
    """Contiguous views of an arena, uint8 ``[n_bytes]``, shaped as the sources."""
    return [
        arena[offset : offset + t.nbytes].view(t.dtype).view(t.shape)
        for t, offset in zip(sources, offsets, strict=True)
    ]
