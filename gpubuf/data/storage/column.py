"""The memory of one key: in one piece, or the first steps on the GPU and the others on the host.

The rows of a key follow each other, or lie in a record that it shares with other keys. A random row costs a cache miss
on the CPU, and a sector of 32 bytes on a GPU, for every place that a piece of it lies in, however small the piece is.
Small keys of one dtype (done and terminated, say) therefore share one place. Keys of different dtypes don't:
``torch.save`` refuses tensors of several dtypes in one memory.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from gpubuf.data.storage import host_memory
from gpubuf.data.storage.layout import Leaf, address
from gpubuf.data.storage.placement import PINNED, SPLIT, Placement
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


def allocate(shape: tuple[int, ...], dtype: torch.dtype, placement: Placement) -> Tensor:
    """Uninitialised row memory of one key, exactly as large as its rows."""
    n_bytes = math.prod(shape) * dtype.itemsize
    if n_bytes == 0:
        return torch.empty(shape, dtype=dtype, device=placement.rows_device)
    if placement.kind == PINNED:
        return torch.from_numpy(host_memory.pinned(n_bytes, placement.device)).view(dtype).view(shape)
    if placement.kind != "cpu":
        return torch.empty(shape, dtype=dtype, device=placement.device)
    # Unlike PyTorch, NumPy asks Linux for huge pages: random rows of a large storage then miss the TLB less.
    return torch.from_numpy(np.empty(n_bytes, np.uint8)).view(dtype).view(shape)


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


class Columns(Sequence[Column]):
    """The memory of the rows of a storage: a column for each key, ``[*shape, ...]``, all views of records.

    Args:
        records: the memory, which covers all keys.
        leaves: the keys of a row.
    """

    def __init__(self, records: Iterable[Record] = (), leaves: Sequence[Leaf] = ()) -> None:
        self.records = list(records)
        self._leaves = list(leaves)
        found: dict[int, Column] = {}
        for keys, memory in self.records:
            offset = 0
            for key in keys:
                parts = memory.parts if len(keys) == 1 else [_cut(p, offset, leaves[key]) for p in memory.parts]
                found[key] = Column(*parts)
                offset += leaves[key].n_elements
        self._columns = [found[key] for key in range(len(leaves))]

    @classmethod
    def new(cls, leaves: Sequence[Leaf], shape: tuple[int, ...], placement: Placement) -> Columns:
        """Uninitialised memory for a storage of ``shape``: small keys share records."""
        shared = records(leaves, placement.rows_on_host)
        found = [(keys, new_record([leaves[key] for key in keys], shape, placement)) for keys in shared]
        return cls(map(Record._make, found), leaves)

    @classmethod
    def separate(cls, columns: Iterable[Column], leaves: Sequence[Leaf]) -> Columns:
        """Columns that share no memory: each is a record of its own."""
        return cls([Record((key,), column) for key, column in enumerate(columns)], leaves)

    def __reduce__(self) -> tuple[Any, ...]:
        """Without views: pickle would write the memory of a record once for each key."""
        return Columns, (self.records, self._leaves)

    def __len__(self) -> int:
        return len(self._columns)

    def __getitem__(self, key: Any) -> Any:
        return self._columns[key]

    @property
    def nbytes(self) -> int:
        """Bytes of all rows."""
        return sum(column.nbytes for column in self._columns)

    @property
    def parts(self) -> list[Tensor]:
        """The tensors that rows are in: one a key, or two where rows are in two places."""
        return [part for column in self._columns for part in column.parts]

    @property
    def memory(self) -> list[Tensor]:
        """The tensors that own the memory of the rows."""
        return [part for record in self.records for part in record.memory.parts]

    def allocate(self, number: int, shape: tuple[int, ...], placement: Placement) -> Column:
        """Uninitialised memory for one record of a storage of ``shape``."""
        return new_record([self._leaves[key] for key in self.records[number].keys], shape, placement)

    def replace(self, number: int, memory: Column) -> Columns:
        """These columns, with other memory for one record."""
        records = list(self.records)
        records[number] = Record(records[number].keys, memory)
        return Columns(records, self._leaves)


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


def extent(tensor: Tensor) -> tuple[int, int]:
    """The address of a tensor's first byte, and that after its last one."""
    first = tensor.data_ptr()
    if tensor.is_contiguous():
        return first, first + tensor.nbytes
    last = sum((length - 1) * stride for length, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return first, first + (last + 1) * tensor.itemsize


_FURTHEST = 1 << 44
"""Bytes that no tensor spans. Small tensors are in the heap, and further than that from the large ones of rows."""


class RowAddresses:
    """The addresses at which a storage has its rows. They tell a batch that is a view of them from any other.

    Args:
        memory: all tensors that rows are in, contiguous ones, on any devices: addresses of GPUs are none of the host's.

    Attributes:
        low, high: all rows lie between these, which lets most batches pass by two comparisons.
    """

    def __init__(self, memory: Iterable[Tensor] = ()) -> None:
        self._starts: list[int] = []
        self._ends: list[int] = []
        found: list[tuple[int, int]] = []
        for tensor in memory:
            # Fake ones have no address.
            if type(tensor) is Tensor and tensor.nbytes:
                insort(found, (tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes))
        for start, end in found:
            # Tensors of users may overlap each other.
            if self._ends and start <= self._ends[-1]:
                self._ends[-1] = max(end, self._ends[-1])
            else:
                self._starts.append(start)
                self._ends.append(end)
        self.low, self.high = (self._starts[0], self._ends[-1]) if self._starts else (0, 0)

    def meet(self, start: int, end: int) -> bool:
        """Whether any row has a byte from ``start`` on, before ``end``."""
        place = bisect_left(self._starts, end)
        return place > 0 and self._ends[place - 1] > start

    def apart(self, tensors: list[Tensor]) -> list[Tensor]:
        """The tensors, with copies of those that overlap rows. No host sync.

        Returns:
            ``tensors`` itself, if none does.
        """
        if not self.high:
            return tensors
        near, high = self.low - _FURTHEST, self.high
        for place, tensor in enumerate(tensors):
            if near < tensor.data_ptr() < high and self.meet(*extent(tensor)):
                copies = [t.detach().clone() if self.meet(*extent(t)) else t for t in tensors[place:]]
                return [*tensors[:place], *copies]
        return tensors


SMALL, SMALL_ON_BUS = 16, 128
"""Bytes of a row up to which a key is small; and up to which it is where a bus brings it to the GPU."""

_SECTOR = 32


def _shares(leaf: Leaf, on_host: bool) -> bool:
    """Whether a key shares a record: the pieces of a row then lie in fewer sectors.

    Rows that fill sectors gain nothing, and elements of less than 4 bytes would be copied one by one.
    """
    straddles = on_host and leaf.row_bytes % _SECTOR > 0 and leaf.dtype.itemsize >= 4
    return 0 < leaf.row_bytes <= (SMALL_ON_BUS if straddles else SMALL)


def records(leaves: Sequence[Leaf], on_host: bool = False) -> list[tuple[int, ...]]:
    """The keys of each record, by their positions in ``leaves``; a key that shares no record is alone in one.

    Each is as wide as its keys together: of one dtype, they need no padding. ``on_host``: a GPU reads them over a bus.
    """
    found: list[list[int]] = []
    of_dtype: dict[object, list[int]] = {}
    for position, leaf in enumerate(leaves):
        small = _shares(leaf, on_host)
        if small and leaf.dtype in of_dtype:
            of_dtype[leaf.dtype].append(position)
            continue
        record = [position]
        found.append(record)
        if small:
            of_dtype[leaf.dtype] = record
    return [tuple(record) for record in found]
