"""Argument checks of the rows operations, shared by both backends. They are cheap, and read no values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gpubuf.kernels._check import demand_int64
from gpubuf.kernels.rows import ENTRY


def check_storage(table: Tensor, ring: Tensor, capacity: int) -> int:
    """Number of keys in ``table``; raise TypeError or ValueError unless the arguments describe a storage."""
    # One condition on the hot path; what is wrong is only looked for when something is.
    if (
        table.dtype is not torch.int64
        or ring.dtype is not torch.int64
        or ring.numel() != 4
        or capacity < 1
        or not table.is_contiguous()
        or not ring.is_contiguous()
        or table.dim() != 2
        or table.shape[1] != ENTRY
    ):
        if capacity < 1:
            raise ValueError(f"the capacity must be at least 1, but is {capacity}")
        demand_int64("table", table, (table.numel() // ENTRY, ENTRY))
        demand_int64("ring", ring, (4,))
    return table.numel() // ENTRY


def check_index(index: Tensor) -> int:
    """Number of entries of ``index``; raise TypeError or ValueError unless it is a contiguous int64 vector."""
    if index.dtype is not torch.int64 or index.dim() != 1 or not index.is_contiguous():
        demand_int64("index", index, (index.numel(),))
    return index.numel()


def check_generation(generation: Tensor | None, n: int) -> None:
    """Raise TypeError or ValueError unless ``generation`` is None or has ``n`` entries."""
    if generation is not None:
        demand_int64("generation", generation, (n,))


def check_count(n: int) -> None:
    """Raise ValueError unless there can be ``n`` rows."""
    if n < 0:
        raise ValueError(f"the number of rows must not be negative, but is {n}")


def check_devices(table: Tensor, tensors: Sequence[Tensor]) -> None:
    """Raise ValueError unless ``tensors`` are on the table's device."""
    device = table.device
    for tensor in tensors:
        if tensor.device != device:
            raise ValueError(f"the table is on {table.device}, another tensor of the operation on {tensor.device}")


@dataclass(frozen=True)
class Source:
    """The rows of one key, as bytes. ``rows`` keeps the memory alive; row ``i`` starts ``i * stride`` bytes on."""

    rows: Tensor
    stride: int
    row_bytes: int


def strided_source(source: Tensor, n: int) -> Source:
    """``source`` as rows that are each contiguous: itself where they are, else a copy.

    Raises:
        ValueError: it does not hold ``n`` rows. ``n`` is at least 1.
    """
    if source.dim() == 0 or source.shape[0] != n:
        raise ValueError(f"a source of {n} rows must have shape [{n}, ...], but has {list(source.shape)}")
    if not source.is_contiguous() and not source[0].is_contiguous():
        source = source.contiguous()
    row_bytes = source.nbytes // n
    return Source(source, source.stride(0) * source.itemsize if n > 1 else row_bytes, row_bytes)


def check_source_count(sources: Sequence[Tensor], n_keys: int) -> None:
    """Raise ValueError unless there is one source for each key."""
    if len(sources) != n_keys:
        raise ValueError(f"the storage has {n_keys} keys, but there are {len(sources)} sources")
