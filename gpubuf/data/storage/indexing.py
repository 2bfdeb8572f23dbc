"""Between the indices that users write and flat positions in a storage.

A storage of shape ``[T, E]`` holds row ``t * E + e`` at ``[t, e]``. Rows are filled in this order, so that the rows
written are always the positions ``0 .. size - 1``.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gpubuf.data.arguments import as_tensor
from gpubuf.data.storage.layout import check_dense
from gpubuf.kernels.sum_tree import NO_ROW


def ravel(index: Tensor, shape: tuple[int, ...], steps: int | None = None) -> Tensor:
    """``[n, ndim]`` coordinates as ``[n]`` flat positions. Negative ones count from the end of their own dimension.

    Args:
        index: the coordinates, int64.
        shape: of the storage.
        steps: how much of the first dimension is there to count from the end of; None: all of it. Only known to the
            host: on a GPU it is always all of it.

    Raises:
        IndexError: a coordinate is out of range. On a GPU its position is ``NO_ROW``, which
            reads as zeros, takes no priority, and counts as a fault.
    """
    if not index.is_cpu or type(index) is not Tensor:
        flat, outside = torch.zeros_like(index[..., 0]), torch.zeros_like(index[..., 0], dtype=torch.bool)
        for length, coordinate in zip(shape, index.unbind(-1), strict=True):
            outside = outside | (coordinate != coordinate.clamp(-length, length - 1))
            flat = flat * length + coordinate.remainder(length)
        return torch.where(outside, NO_ROW, flat)
    if index.numel() == 0:
        return index[..., 0]
    lengths = [shape[0] if steps is None else steps, *shape[1:]]
    least, largest = (bound.tolist() for bound in index.reshape(-1, len(shape)).aminmax(dim=0))
    for dim, (low, high) in enumerate(zip(least, largest, strict=True)):
        if low < -lengths[dim] or high >= shape[dim]:
            wrong = low if low < -lengths[dim] else high
            raise IndexError(
                f"coordinate {wrong} is out of range in dimension {dim}: the storage has the shape {list(shape)}, and "
                f"{lengths[0]} of its first dimension are stored"
            )
    if min(least) < 0:
        index = torch.where(index < 0, index + torch.tensor(lengths, device="cpu"), index)
    flat = index[..., 0]
    for dim in range(1, len(shape)):
        flat = flat * shape[dim] + index[..., dim]
    return flat


def unravel(flat: Tensor, shape: tuple[int, ...]) -> Tensor:
    """``[n]`` flat positions as ``[n, ndim]`` coordinates; ``[n]`` itself for one dimension."""
    if len(shape) == 1:
        return flat
    # Into the columns of the result, the last dimension first; a third of the time of torch.unravel_index and stack.
    coordinates = flat.new_empty(*flat.shape, len(shape))
    for dim in range(len(shape) - 1, 0, -1):
        rest = torch.div(flat, shape[dim], rounding_mode="trunc")
        torch.sub(flat, rest, alpha=shape[dim], out=coordinates.select(-1, dim))
        flat = rest
    coordinates.select(-1, 0).copy_(flat)
    return coordinates


def as_positions(
    index: Any,
    shape: tuple[int, ...],
    device: torch.device,
    steps: Callable[[], int] | None = None,
    *,
    handles: bool = False,
) -> Tensor:
    """An integer index as samples carry it, as int64 ``[n]`` flat positions on ``device``, contiguous.

    Accepts an int, a sequence, a tensor ``[n]``; with several dimensions also a tensor ``[n, ndim]`` and a tuple of one
    tensor per dimension. Negative positions stay negative; negative coordinates count from the end of their dimension,
    in the first one from the last of ``steps`` (see :func:`ravel`). With ``handles`` coordinates that are all -1 are
    those of a row that is gone, as a write returns them: the position is -1. No host sync.

    Raises:
        TypeError: the index is not made of integers.
        IndexError: as :func:`ravel`.
    """
    if (
        isinstance(index, Tensor)
        and index.ndim == 1
        and index.dtype is torch.int64
        and index.device == device
        and index.is_contiguous()
    ):
        return index
    if isinstance(index, Tensor):
        check_dense("the index", index)
    if isinstance(index, tuple) and len(index) == len(shape):
        # As samplers of slices give it. A tuple of one int is a sequence.
        one = len(index) == 1
        index = (index[0] if isinstance(index[0], Tensor) else index) if one else _stacked(index)
    if not isinstance(index, Tensor):
        index = _tensor_of(index)
    if index.dtype is torch.bool or index.is_floating_point() or index.is_complex():
        raise TypeError(f"rows are indexed by integers, got {index.dtype}")
    index = index.to(torch.int64)
    several = len(shape) > 1 and index.ndim > 1 and index.shape[-1] == len(shape)
    gone = (index == -1).all(-1) if several and handles else None
    if gone is not None:
        index = torch.where(gone.unsqueeze(-1), 0, index)
    if several and index.is_cpu:
        # Before it goes to a GPU: here it can raise.
        index, several = ravel(index, shape, None if steps is None else steps()), False
    if index.device != device:
        index = index.to(device)
    if several:
        index = ravel(index, shape)
    if gone is not None:
        index = torch.where(gone.to(device), -1, index)
    flat: Tensor = index.reshape(-1).contiguous()
    return flat


def _stacked(index: tuple[Any, ...]) -> Tensor:
    return torch.stack([as_tensor(i) for i in index], -1)


def _tensor_of(index: Any) -> Tensor:
    """An index of Python's or NumPy's as a tensor. Raises TypeError if it is none."""
    if isinstance(index, (list, tuple)) and not index:
        return torch.empty(0, dtype=torch.int64, device="cpu")
    try:
        return as_tensor(index)
    except (RuntimeError, TypeError, ValueError):
        raise TypeError(
            f"rows are indexed by an int, a slice, a mask, a tensor or a sequence of integers, got {index!r}"
        ) from None


def plain_index(index: Any) -> Any:
    """An index in the types that the rest of the package tells apart.

    ``...`` is a slice, a number of NumPy's an int, an array or a list a tensor. All else stays as it is.

    Raises:
        TypeError: the index is one bool.
    """
    if index is Ellipsis:
        return slice(None)
    if isinstance(index, (bool, np.bool_)):
        raise TypeError(f"rows are indexed by integers, got {index!r}: a mask has a flag for each row")
    if isinstance(index, np.ndarray):
        index = torch.as_tensor(np.ascontiguousarray(index), device="cpu") if index.ndim else index[()]
    if isinstance(index, np.integer):
        return int(index)
    return _tensor_of(index) if isinstance(index, list) else index


def index_shape(index: Any, ndim: int, n: int) -> tuple[int, ...]:
    """The batch shape of the ``n`` rows at a plain index that is no int and no slice: its own, but for coordinates."""
    if not isinstance(index, Tensor) or index.dtype is torch.bool:
        return (n,)
    of_coordinates = ndim > 1 and index.ndim > 1 and index.shape[-1] == ndim
    return tuple(index.shape[:-1] if of_coordinates else index.shape)


def stored_positions(index: Any, shape: tuple[int, ...], size: int, device: torch.device) -> Tensor:
    """Any index into ``size`` stored rows, as int64 ``[n]`` flat positions on ``device``.

    Accepts what :func:`as_positions` does, and slices, ranges and boolean masks. Negative indices count from the last
    row stored. Bounds are checked where the index is on the CPU; a mask on a GPU synchronises.

    Raises:
        TypeError: the index is not made of integers.
        IndexError: an index, or a coordinate in its dimension, is beyond the rows stored; or a mask has a flag for
            neither each row stored nor each row of the capacity.
    """
    index = plain_index(index)
    if isinstance(index, slice):
        index = range(*index.indices(size))
    if isinstance(index, range):
        index = torch.arange(index.start, index.stop, index.step, device="cpu")
    if isinstance(index, Tensor) and index.dtype is torch.bool:
        steps = size // math.prod(shape[1:])
        if tuple(index.shape) not in {(size,), (math.prod(shape),), (steps, *shape[1:]), shape}:
            raise IndexError(f"the mask has the shape {list(index.shape)}, the rows stored {[steps, *shape[1:]]}")
        index = index.nonzero().squeeze(-1)
    where = index.device if isinstance(index, Tensor) else torch.device("cpu")
    flat = as_positions(index, shape, where, lambda: size // math.prod(shape[1:]))
    if flat.device.type == "cpu" and flat.numel():
        if int(flat.max()) >= size or int(flat.min()) < -size:
            raise IndexError(f"index out of range: {size} rows are stored, got {flat.tolist()[:8]}")
        flat = torch.where(flat < 0, flat + size, flat)
    return flat.to(device)


def contained(index: int | Tensor, shape: tuple[int, ...], size: int) -> bool | Tensor:
    """Whether rows are stored at an index: of an int a bool, of a tensor a bool for each of its rows.

    With several dimensions an int is a step, and a tensor ``[..., ndim]`` has coordinates. Negative ones count from the
    end of what is stored, as they do on tensors. No host sync.
    """
    steps = size // math.prod(shape[1:])
    if not isinstance(index, Tensor):
        return -steps <= index < steps
    if len(shape) > 1 and index.ndim and index.shape[-1] == len(shape):
        bounds = (steps, *shape[1:])
        return torch.stack([(i >= -n) & (i < n) for i, n in zip(index.unbind(-1), bounds, strict=True)]).all(0)
    return (index >= -steps) & (index < steps)


def expanded(value: Tensor, lead: int, batch_size: tuple[int, ...]) -> Tensor:
    """``[*batch_size[:lead], ...]`` as ``[*batch_size, ...]``, a view."""
    rest = value.shape[lead:]
    ones = (1,) * (len(batch_size) - lead)
    return value.reshape((*value.shape[:lead], *ones, *rest)).expand((*batch_size, *rest))
