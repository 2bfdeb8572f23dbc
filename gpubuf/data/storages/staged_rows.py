"""Memory that the columns of a write are copied into, so that the launch finds them at addresses that it knows."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gpubuf.data.runtime.recording import capturing
from gpubuf.data.storages import host_memory
from gpubuf.data.storages.layout import RowLayout, as_written
from gpubuf.data.storages.tensor_storage import TensorStorage
from gpubuf.kernels._registry import lazy

#: An array a key, by key (``"reward"``, ``("next", "reward")``) or in the order of the storage's keys.
Columns = Mapping[Any, Any] | Sequence[Any]

STAGED_BYTES = 1 << 16
"""Writes of so many bytes are staged. The copy of larger ones takes longer than finding out where they are."""

_prepared = lazy("gpubuf.kernels.rows._cpu:prepared_extend")
_array = np.ndarray


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
        self._targets: list[tuple[Any, np.ndarray, np.dtype, tuple[int, ...]]] = []
        for leaf, source in zip(layout.leaves, self.sources, strict=True):
            target = source.numpy().reshape((*lead, *leaf.shape))
            self._targets.append((as_written(leaf.key), target, target.dtype, target.shape))
        self._columns = [(target, dtype, shape) for _, target, dtype, shape in self._targets]
        #: Writes what is in the memory, on the CPU, and returns the index. None: the storage has another way.
        self.launch: Callable[[], Tensor] | None = None
        if storage.table.is_cpu and not storage.computed:
            self.launch = _prepared(storage.table, self.sources, storage.ring, self.n, storage.max_size, keeps_index)

    @staticmethod
    def of(storage: TensorStorage, lead: tuple[int, ...], *, keeps_index: bool) -> StagedRows | None:
        """For columns with these batch dimensions; None if they are too large, or NumPy lacks a dtype."""
        n = math.prod(lead)
        if n == 0 or n * storage.written_layout.row_bytes > STAGED_BYTES:
            return None
        try:
            return StagedRows(storage, lead, keeps_index=keeps_index)
        except TypeError:
            return None

    def fill(self, columns: Columns) -> bool:
        """Copy columns here; False if some of them are anything but NumPy arrays of the right shape and dtype."""
        if type(columns) is dict:
            try:
                for key, target, dtype, shape in self._targets:
                    value = columns[key]
                    if type(value) is not _array or value.dtype != dtype or value.shape != shape:
                        return False
                    target[...] = value
            except KeyError:
                return False
            return len(columns) == len(self._targets)
        if not isinstance(columns, (list, tuple)) or len(columns) != len(self._columns):
            return False
        for value, (target, dtype, shape) in zip(columns, self._columns, strict=True):
            if type(value) is not _array or value.dtype != dtype or value.shape != shape:
                return False
            target[...] = value
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
