"""The memory of the keys of a row.

The rows of a key follow each other, or lie in a record that it shares with other keys. A random row costs a cache miss
on the CPU, and a sector of 32 bytes on a GPU, for every place that a piece of it lies in, however small the piece is.
Small keys of one dtype (done and terminated, say) therefore share one place. Keys of different dtypes don't:
``torch.save`` refuses tensors of several dtypes in one memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from gpubuf.data.storage.layout import Leaf, address
from gpubuf.data.storage.placement import PINNED, Placement, allocate
from gpubuf.kernels._registry import in_memory
from gpubuf.kernels.rows import ENTRY, table_entry


def entry(column: Tensor, row_bytes: int, rows_per_step: int) -> list[int]:
    """The entry of a column, ``[steps, ...]``, in the kernels' table. Each row is contiguous."""
    if row_bytes == 0:
        return table_entry(address(column), 0)
    return table_entry(address(column), row_bytes, stride=column.stride(0) * column.itemsize // rows_per_step)


def address_table(
    columns: Sequence[Tensor], row_bytes: Sequence[int], rows_per_step: int, device: torch.device
) -> Tensor:
    """The kernels' table of addresses: int64 ``[K, 5]`` on ``device``, see :mod:`gpubuf.kernels.rows`."""
    entries = [entry(column, n_bytes, rows_per_step) for column, n_bytes in zip(columns, row_bytes, strict=True)]
    # Not waited for: CUDA has read memory that is not pinned when the call returns.
    return torch.tensor(entries, dtype=torch.int64).reshape(-1, ENTRY).to(device, non_blocking=True)


class Record(NamedTuple):
    """The memory of the keys of one record, by their positions among those of a row: ``[*shape, elements]``.

    That of a key that shares no record is its column.
    """

    keys: tuple[int, ...]
    memory: Tensor


def new_record(leaves: Sequence[Leaf], shape: tuple[int, ...], placement: Placement) -> Tensor:
    """Uninitialised memory for keys that share a record, or for one key.

    Args:
        leaves: the keys, of one dtype.
        shape: of the storage.
        placement: where the memory is to be.
    """
    own = leaves[0].shape if len(leaves) == 1 else (sum(leaf.n_elements for leaf in leaves),)
    return allocate((*shape, *own), leaves[0].dtype, placement)


def columns_of(found: Sequence[Record], leaves: Sequence[Leaf]) -> list[Tensor]:
    """The columns of a row's keys, ``leaves``: views of the memory of records."""
    columns: dict[int, Tensor] = {}
    for keys, memory in found:
        offset = 0
        for key in keys:
            columns[key] = memory if len(keys) == 1 else _cut(memory, offset, leaves[key])
            offset += leaves[key].n_elements
    return [columns[key] for key in range(len(leaves))]


def separate(columns: Sequence[Tensor]) -> list[Record]:
    """Columns that share no memory, each as a record of its own."""
    return [Record((key,), column) for key, column in enumerate(columns)]


def _cut(memory: Tensor, offset: int, leaf: Leaf) -> Tensor:
    # Not a slice: views leave the strides of a dimension of length 1 open.
    return memory[..., offset:].as_strided((*memory.shape[:-1], *leaf.shape), (*memory.stride()[:-1], *leaf.strides))


def owned_column(tensor: Tensor, placement: Placement) -> Tensor:
    """A contiguous column with the content of ``tensor``, without a copy if the tensor already lies in place."""
    if placement.kind == PINNED:
        return allocate(tuple(tensor.shape), tensor.dtype, placement).copy_(tensor)
    return in_memory(tensor.to(placement.device)).contiguous()


SMALL = 16
"""Bytes of a row up to which a key is small."""


def records(leaves: Sequence[Leaf]) -> list[tuple[int, ...]]:
    """The keys of each record, by their positions in ``leaves``; a key that shares no record is alone in one.

    Each is as wide as its keys together: of one dtype, they need no padding.
    """
    found: list[list[int]] = []
    of_dtype: dict[object, list[int]] = {}
    for position, leaf in enumerate(leaves):
        small = 0 < leaf.row_bytes <= SMALL
        if small and leaf.dtype in of_dtype:
            of_dtype[leaf.dtype].append(position)
            continue
        record = [position]
        found.append(record)
        if small:
            of_dtype[leaf.dtype] = record
    return [tuple(record) for record in found]
