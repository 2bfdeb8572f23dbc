"""Memory that the columns of a write are copied into, so that the launch finds them at addresses that it knows."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gpubuf.data.recording import capturing
from gpubuf.data.storage import host_memory
from gpubuf.data.storage.layout import RowLayout, as_written
from gpubuf.data.storage.storage import TensorStorage

#: An array a key, by key (``"reward"``, ``("next", "reward")``) or in the order of the storage's keys.
Columns = Mapping[Any, Any] | Sequence[Any]

STAGED_BYTES = 1 << 14
"""Writes of so many bytes are staged. The copy of larger ones takes longer than finding out where they are."""

READ_IN_PLACE = 1 << 12
"""A column of so many bytes, which only a storage on the CPU reads: it is not copied first, if it is contiguous."""

PLACED_BYTES = 1 << 20
"""As :data:`STAGED_BYTES`, where such columns are read in place."""

_array = np.ndarray
# The address of an array, in a tenth of the time of `array.ctypes.data`.
_first_byte: Callable[[Any], Any] = ctypes.c_char.from_buffer
_address_of = ctypes.addressof


def _launch_on_cpu(storage: TensorStorage, sources: list[Tensor], n: int, keeps_index: bool) -> Any:
    """A launch that writes ``n`` rows of ``sources``, on the CPU; None where the storage has another way."""
    # Prefixes are compared when they are written.
    if storage.schema.prefixes:
        return None
    return storage.plans.written.prepared_extend(sources, n, keeps_index)


class PlacedRows:
    """The columns of a write of ``n`` rows that are plain tensors on the CPU: the launch reads them where they are.

    Args:
        storage: where they are written to. Its memory stays where it is as long as this is used.
        lead: batch dimensions of a column.
        keeps_index: as for :class:`StagedRows`.

    Attributes:
        n: number of rows.
        launch: writes the columns that were placed, and returns the index, or None if they are refused.
    """

    def __init__(self, storage: TensorStorage, lead: tuple[int, ...], *, keeps_index: bool) -> None:
        leaves = storage.written_layout.leaves
        self.n = math.prod(lead)
        self._expected = [(leaf.dtype, torch.Size((*lead, *leaf.shape))) for leaf in leaves]
        # Sizes without memory: addresses are those of the columns.
        shapes = [torch.empty((self.n, *leaf.shape), dtype=leaf.dtype, device="meta") for leaf in leaves]
        self.launch = _launch_on_cpu(storage, shapes, self.n, keeps_index)

    @staticmethod
    def of(storage: TensorStorage, lead: tuple[int, ...], *, keeps_index: bool) -> PlacedRows | None:
        """For columns with these batch dimensions; None if the storage has no such launch."""
        if math.prod(lead) == 0 or any(leaf.dtype.is_complex for leaf in storage.written_layout.leaves):
            return None
        placed = PlacedRows(storage, lead, keeps_index=keeps_index)
        return None if placed.launch is None else placed

    def place(self, columns: list[Any]) -> bool:
        """Say where columns are; False if some of them are anything but contiguous tensors that fit.

        They must not change before the launch.
        """
        if len(columns) != len(self._expected):
            return False
        described, slot = self.launch.described, 0
        for value, (dtype, shape) in zip(columns, self._expected, strict=True):
            if (
                type(value) is not Tensor
                or value.dtype is not dtype
                or not value.is_cpu
                or value.shape != shape
                or not value.is_contiguous()
                or value.is_neg()
            ):
                return False
            # Tensors of zeros may have no memory.
            address = value.data_ptr()
            if address == 0:
                return False
            described[slot] = address
            slot += 3
        return True


class StagedRows:
    """The columns of a write of ``n`` rows, in memory of their own on the host.

    Args:
        storage: where they are written to. Its memory stays where it is as long as this is used.
        lead: batch dimensions of a column.
        keeps_index: whether somebody needs the positions of the rows after the next write.

    Attributes:
        n: number of rows.
        sources: a tensor ``[n, ...]`` for each key as it is written.

    Raises:
        TypeError: NumPy has no dtype for one of the keys.
    """

    def __init__(self, storage: TensorStorage, lead: tuple[int, ...], *, keeps_index: bool) -> None:
        layout: RowLayout = storage.written_layout
        self.n = math.prod(lead)
        self._layout = layout
        self._memory = torch.zeros(layout.arena(self.n).n_bytes, dtype=torch.uint8)
        self.sources = layout.cut(self._memory, self.n)
        #: Writes what is in the memory, on the CPU, and returns the index, or None if the rows are refused. It is None
        #: itself where the storage has another way.
        self.launch: Any = _launch_on_cpu(storage, self.sources, self.n, keeps_index)
        self._keys = [as_written(leaf.key) for leaf in layout.leaves]
        # By key: the memory, with dtype and shape of what is copied there, and for a large column where its address is.
        self._targets: list[tuple[np.ndarray, np.dtype, tuple[int, ...], int | None]] = []
        for place, (leaf, source) in enumerate(zip(layout.leaves, self.sources, strict=True)):
            target = source.numpy().reshape((*lead, *leaf.shape))
            large = self.launch is not None and source.nbytes >= READ_IN_PLACE
            self._targets.append((target, target.dtype, target.shape, 3 * place if large else None))
        #: What :meth:`put` has set: the memory of each column, or an array in its place.
        self.values: list[np.ndarray] = [target for target, *_ in self._targets]

    @staticmethod
    def of(storage: TensorStorage, lead: tuple[int, ...], *, keeps_index: bool) -> StagedRows | None:
        """For columns with these batch dimensions; None if they are too large, or NumPy lacks a dtype."""
        n = math.prod(lead)
        most = PLACED_BYTES if storage.table.is_cpu and not storage.schema.prefixes else STAGED_BYTES
        if n == 0 or n * storage.written_layout.row_bytes > most:
            return None
        try:
            return StagedRows(storage, lead, keeps_index=keeps_index)
        except TypeError:
            return None

    def put(self, place: int, value: Any) -> None:
        """Set one column of the next launch; numbers of other dtypes are converted, as NumPy does.

        A large array is read by the launch, which must come before it changes.

        Raises:
            ValueError: it has another shape.
        """
        target, dtype, shape, slot = self._targets[place]
        if slot is None:
            target[...] = value
            return
        if type(value) is _array and value.dtype == dtype and value.shape == shape:
            try:
                self.launch.described[slot] = _address_of(_first_byte(value))
            except (TypeError, ValueError):
                pass
            else:
                self.values[place] = value
                return
        target[...] = value
        self.launch.described[slot], self.values[place] = target.ctypes.data, target

    def fill(self, columns: Columns) -> bool:
        """Copy columns here; False if some of them are anything but NumPy arrays of the right shape and dtype.

        Large ones are read by the launch, which must come before they change.
        """
        if type(columns) is dict:
            values: Sequence[Any] = [columns.get(key) for key in self._keys]
        elif type(columns) is list or type(columns) is tuple:
            values = columns
        else:
            return False
        if len(columns) != len(self._targets):
            return False
        for value, (target, dtype, shape, slot) in zip(values, self._targets, strict=True):
            if type(value) is not _array or value.dtype != dtype or value.shape != shape:
                return False
            if slot is None:
                target[...] = value
                continue
            try:
                self.launch.described[slot] = _address_of(_first_byte(value))
            except (TypeError, ValueError):
                # Not contiguous, or not to be written to.
                target[...] = value
                self.launch.described[slot] = target.ctypes.data
        return True

    def on_device(self, device: torch.device) -> list[Tensor] | None:
        """What is in the memory, on ``device``; None if it must be read where it comes from.

        A captured graph reads the memory of its caller at each replay. No host sync.
        """
        if device.type == "cpu":
            return self.sources
        if device.type != "cuda" or capturing() or not host_memory.cuda_present():
            return None
        # The GPU copies later: from pinned memory that PyTorch gives to nobody else before that.
        pinned = host_memory.staging(self._memory.numel())
        pinned.copy_(self._memory)
        return self._layout.cut(pinned.to(device, non_blocking=True), self.n)
