"""Rows, priorities and generations as the operations of a sum tree want them: contiguous vectors on its device."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from gpubuf.data.storage.indexing import as_positions, check_dense
from gpubuf.data.storage.tensor_storage import TensorStorage
from gpubuf.kernels.rows import SIZE
from gpubuf.kernels.sum_tree import NO_ROW


class CountError(RuntimeError, ValueError):
    """There are not as many priorities or generations as rows."""


def vector(values: Tensor, dtype: torch.dtype, like: Tensor) -> Tensor:
    """``values`` as a contiguous ``[n]`` on the device of ``like``; as they are if they are so already.

    Raises:
        TypeError: rows or generations are not integers.
    """
    if (
        values.dtype is not dtype
        or values.dim() != 1
        or values.requires_grad
        # the number of the device, -1 for the CPU: cheaper to compare than torch.device
        or values.get_device() != like.get_device()
        or values.is_meta
        or values.layout is not torch.strided
    ):
        check_dense("rows, priorities or generations", values)
        if dtype is torch.int64 and (values.is_floating_point() or values.dtype is torch.bool):
            raise TypeError(f"rows and generations are integers, not {values.dtype}")
        values = values.detach().to(like.device, dtype).reshape(-1)
    return values if values.is_contiguous() else values.contiguous()


def any_of_each(flags: Tensor, n: int) -> Tensor:
    """Whether any of the flags of each of ``n`` rows is set, ``[n]``."""
    return flags.reshape(n, flags.numel() // max(n, 1)).any(-1)


def rows_at(index: Any, storage: TensorStorage) -> Tensor:
    """The flat positions of stored rows. Of others on a GPU, and in compiled code, it is ``NO_ROW``, without a sync.

    Raises:
        IndexError: no row is stored there.
    """
    positions = as_positions(index, storage.shape, storage.device, lambda: storage.steps_stored)
    if not storage.initialized or not positions.numel():
        return positions
    if torch.compiler.is_compiling() or not positions.is_cpu or type(positions) is not Tensor:
        return torch.where(positions < storage.ring[SIZE], positions, NO_ROW)
    if int(positions.max()) >= len(storage):
        raise IndexError(f"index {int(positions.max())} is out of range: {len(storage)} rows are stored")
    return positions


def priority_vectors(
    index: Tensor, priority: Any, generation: Tensor | None, like: Tensor
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Rows, and a priority and maybe a generation for each of them, on the device of ``like``.

    One priority stands for all.

    Raises:
        CountError: there are not as many as rows.
    """
    index = vector(index, torch.int64, like)
    n = index.numel()
    if not isinstance(priority, Tensor):
        # Filled on the device itself: a copy from the host can't be captured in a graph.
        number = isinstance(priority, int | float)
        priority = torch.full((n,), priority, device=like.device) if number else torch.as_tensor(priority)
    if priority.numel() == 1 and n != 1:
        priority = priority.reshape(1).expand(n)
    priority = vector(priority, torch.float32, like)
    if generation is not None:
        generation = vector(generation, torch.int64, like)
    if priority.numel() != n or (generation is not None and generation.numel() != n):
        given = {"priorities": priority.numel()}
        if generation is not None:
            given["generations"] = generation.numel()
        raise CountError(f"{n} rows are addressed, but given are {given}")
    return index, priority, generation
