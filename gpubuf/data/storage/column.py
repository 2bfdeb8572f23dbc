"""The memory of one key: in one piece, or the first steps on the GPU and the others on the host.

The rows of a key follow each other, or lie in a record that it shares with other keys. A random row costs a cache miss
on the CPU, and a sector of 32 bytes on a GPU, for every place that a piece of it lies in, however small the piece is.
Small keys of one dtype (done and terminated, say) therefore share one place. Keys of different dtypes don't:
``torch.save`` refuses tensors of several dtypes in one memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from gpubuf.data.storage.layout import Leaf, address
from gpubuf.data.storage.placement import PINNED, SPLIT, Placement, allocate
from gpubuf.kernels._registry import in_memory
from gpubuf.kernels.rows import ENTRY, table_entry


class Column:
    """The rows of one key, ``[steps, ...]``, in one tensor or in two that follow each other.

    Attributes:
        parts: the tensors. They are on the device that does the work, in pinned host memory, or in both. Each row is
            contiguous; between rows lie other keys of the same record.
    """

    def __init__(self, *parts: Tensor) -> None:
        self.parts = parts

    def __len__(self) -> int:
        return sum(len(part) for part in self.parts)

    @property
    def shape(self) -> tuple[int, ...]:
        """``(steps, ...)``, of all parts together."""
        return (len(self), *self.parts[0].shape[1:])

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the elements."""
        return self.parts[0].dtype

    @property
    def nbytes(self) -> int:
        """Bytes of all parts."""
        return sum(part.nbytes for part in self.parts)

    @property
    def whole(self) -> Tensor:
        """The only part.

        Raises:
            ValueError: there are two.
        """
        (part,) = self.parts
        return part

    def _within(self, start: int, stop: int) -> Iterator[tuple[int, Tensor]]:
        """The steps ``start .. stop`` in each part: the step at which a piece begins, and a view of it."""
        first = 0
        for part in self.parts:
            low, high = max(start - first, 0), min(stop - first, len(part))
            if low < high:
                yield first + low - start, part[low:high]
            first += len(part)

    def __getitem__(self, steps: slice) -> Tensor:
        """The steps of a slice without a stride: a view if they are in one part, otherwise a copy on the CPU."""
        start, stop, _ = steps.indices(len(self))
        found = [view for _, view in self._within(start, stop)]
        if len(found) < 2:
            return found[0] if found else self.parts[0][:0]
        return torch.cat([view.cpu() for view in found])

    def pieces(self) -> Iterator[tuple[int, Tensor]]:
        """The parts, and at which step each begins."""
        return self._within(0, len(self))

    def write(self, start: int, data: Tensor) -> None:
        """Copy ``data`` to the steps from ``start`` on. Synchronises where it comes from or goes to another device."""
        for at, view in self._within(start, start + len(data)):
            view.copy_(data[at : at + len(view)])

    def entry(self, row_bytes: int, rows_per_step: int) -> list[int]:
        """The entry of the kernels' table. All parts have the same stride from row to row."""
        near, *far = self.parts
        if row_bytes == 0:
            return table_entry(address(near), 0)
        stride = near.stride(0) * near.itemsize // rows_per_step
        if not far:
            return table_entry(address(near), row_bytes, stride=stride)
        return table_entry(address(near), row_bytes, near.nbytes // row_bytes, address(far[0]), stride=stride)


def address_table(
    columns: Sequence[Column], row_bytes: Sequence[int], rows_per_step: int, device: torch.device
) -> Tensor:
    """The kernels' table of addresses: int64 ``[K, 5]`` on ``device``, see :mod:`gpubuf.kernels.rows`."""
    entries = [column.entry(n_bytes, rows_per_step) for column, n_bytes in zip(columns, row_bytes, strict=True)]
    # Not waited for: CUDA has read memory that is not pinned when the call returns.
    return torch.tensor(entries, dtype=torch.int64, device="cpu").reshape(-1, ENTRY).to(device, non_blocking=True)


def new_column(shape: tuple[int, ...], dtype: torch.dtype, placement: Placement) -> Column:
    """Uninitialised memory for the rows of one key, ``[steps, ...]``, where a placement wants it."""
    if placement.kind != SPLIT:
        return Column(allocate(shape, dtype, placement))
    near = placement.near_steps
    return Column(
        torch.empty((near, *shape[1:]), dtype=dtype, device=placement.device),
        allocate((shape[0] - near, *shape[1:]), dtype, Placement(PINNED, placement.device)),
    )


class Record(NamedTuple):
    """The memory of the keys of one record, by their positions among those of a row: ``[*shape, elements]``.

    That of a key that shares no record is its column.
    """

    keys: tuple[int, ...]
    memory: Column


def new_record(leaves: Sequence[Leaf], shape: tuple[int, ...], placement: Placement) -> Column:
    """Uninitialised memory for keys that share a record, or for one key.

    Args:
        leaves: the keys, of one dtype.
        shape: of the storage.
        placement: where the memory is to be.
    """
    own = leaves[0].shape if len(leaves) == 1 else (sum(leaf.n_elements for leaf in leaves),)
    return new_column((*shape, *own), leaves[0].dtype, placement)


def columns_of(found: Sequence[Record], leaves: Sequence[Leaf]) -> list[Column]:
    """The columns of a row's keys, ``leaves``: views of the memory of records."""
    columns: dict[int, Column] = {}
    for keys, memory in found:
        offset = 0
        for key in keys:
            columns[key] = memory if len(keys) == 1 else Column(*(_cut(p, offset, leaves[key]) for p in memory.parts))
            offset += leaves[key].n_elements
    return [columns[key] for key in range(len(leaves))]


def separate(columns: Sequence[Column]) -> list[Record]:
    """Columns that share no memory, each as a record of its own."""
    return [Record((key,), column) for key, column in enumerate(columns)]


def _cut(part: Tensor, offset: int, leaf: Leaf) -> Tensor:
    # Not a slice: views leave the strides of a dimension of length 1 open.
    return part[..., offset:].as_strided((*part.shape[:-1], *leaf.shape), (*part.stride()[:-1], *leaf.strides))


def owned_column(tensor: Tensor, placement: Placement) -> Column:
    """A contiguous column with the content of ``tensor``, without a copy if the tensor already lies in place."""
    if placement.kind in (PINNED, SPLIT):
        column = new_column(tuple(tensor.shape), tensor.dtype, placement)
        column.write(0, tensor)
        return column
    return Column(in_memory(tensor.to(placement.device)).contiguous())


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
