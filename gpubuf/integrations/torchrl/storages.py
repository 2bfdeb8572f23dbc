"""Storages with the names and comforts of TorchRL's."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tensordict import MemoryMappedTensor
from torch import Tensor

from gpubuf import serialization
from gpubuf.data.recording import Unfinished
from gpubuf.data.storage import lazy, memmap
from gpubuf.data.storage import memmap_files as files
from gpubuf.data.storage import storage as core
from gpubuf.data.storage.containers import Data, batch_of, batch_shape, mapped
from gpubuf.data.storage.indexing import contained, unravel
from gpubuf.data.storage.plan import NOT_INITIALIZED
from gpubuf.data.storage.state import rows_state

_OWN_FILE = "gpubuf.safetensors"


class TensorStorage(core.TensorStorage):
    __doc__ = core.TensorStorage.__doc__

    # Writing

    def __setitem__(self, index: Any, data: Data) -> None:
        if not self.initialized:
            self.set(index, data)
        else:
            super().__setitem__(index, data)

    def set(self, cursor: Any, data: Data, *, set_cursor: bool = True) -> None:
        """Write rows at positions of your choice, also before the first write and after the rows stored.

        Rows that are stored are overwritten in place, as by ``storage[cursor] = data``. Rows after them are added,
        and :meth:`~gpubuf.ReplayBuffer.extend` goes on after those. A sampler with priorities does not hear of
        either: announce them with ``buffer.mark_update(index)``.

        Args:
            cursor: an int, a slice, a sequence, a tensor, or ``...`` for all rows.
            data: a row for each position, or one row for all of them. Under an int: one row.
            set_cursor: False writes to stored rows only.

        Raises:
            IndexError: rows would be left out: those after the stored ones must follow them without a gap.
            ValueError: a key, shape or dtype differs from the storage's.
            NotImplementedError: rows are added to a storage of several dimensions. An index on a GPU synchronises.
        """
        self.check_owned()
        size = len(self)
        if not set_cursor and not self.initialized:
            raise RuntimeError(NOT_INITIALIZED)
        if not set_cursor or (size == self.max_size and cursor is not Ellipsis):
            self[cursor] = data
            return
        rows = self._given_rows(data, is_int(cursor))
        n = len(rows) if isinstance(rows, list) else math.prod(batch_shape(rows, 1))
        positions = self._chosen_positions(cursor, n, bounded=not isinstance(rows, list))
        # Of duplicates the last one counts.
        last = {position: number for number, position in enumerate(positions)}
        new, old = (sorted(position for position in last if (position >= size) is beyond) for beyond in (True, False))
        if not new:
            self[torch.tensor(positions, dtype=torch.int64, device="cpu")] = rows
            return
        if self.ndim > 1:
            raise NotImplementedError("rows are added to a storage of several dimensions by extend()")
        if n != len(positions):
            raise ValueError(f"{len(positions)} rows are addressed, {n} given")
        if new != list(range(size, size + len(new))) or new[-1] >= self.max_size:
            raise IndexError(
                f"{size} of {self.max_size} rows are stored: rows are added at {size}, {size + 1} and so on without a "
                f"gap, got {new[:8]}"
            )
        self.append(_picked(rows, [last[position] for position in new]))
        if old:
            self[torch.tensor(old, device="cpu")] = _picked(rows, [last[position] for position in old])

    def _given_rows(self, data: Any, one: bool) -> Data:
        rows = self.as_batch(data, 0) if one else data
        return batch_of(rows) if isinstance(rows, list) else rows

    def _chosen_positions(self, cursor: Any, n: int, *, bounded: bool) -> list[int]:
        size = len(self)
        if cursor is Ellipsis:
            cursor = slice(None)
        if isinstance(cursor, slice):
            as_many = cursor.stop is None and (cursor.start in (None, 0) or not bounded)
            cursor = range(*cursor.indices(max(size, n) if as_many else self.max_size))
        index = cursor if isinstance(cursor, Tensor) else torch.as_tensor(cursor, device="cpu")
        if index.dtype is torch.bool:
            index = index.nonzero()
        found: list[int] = [position + size if position < 0 else position for position in index.reshape(-1).tolist()]
        if any(position < 0 for position in found):
            raise IndexError(f"index out of range: {size} rows are stored, got {found[:8]}")
        return found

    #: Single keys of rows can be written, if they were not overwritten since: by ``update_if_present`` of a buffer.
    supports_conditional_update = True

    # Reading

    def contains(self, index: int | Tensor) -> bool | Tensor:
        """Whether a row is stored at ``index``; of a tensor, for each. See :func:`~.indexing.contained`."""
        return contained(index, self.shape, len(self))

    @property
    def _len(self) -> int:
        """The number of rows, as programs for TorchRL read it."""
        return len(self)

    @property
    def _storage(self) -> Data:
        """All rows, also those that were not written yet, ``[*shape, ...]``: views, as programs for TorchRL read them.

        None before the first write.

        Raises:
            NotImplementedError: the rows are not in memory as they were written, or in two places.
        """
        if not self.initialized:
            return None
        if self.computed or any(len(column.parts) > 1 for column in self.columns):
            raise NotImplementedError(
                "the rows of this storage are not in memory as they were written: read them by storage[index]"
            )
        tensors = [column.whole for column in self.columns]
        return self.written_layout.assemble(tensors, tuple(self.shape), self.rows_device)

    def _rand_given_ndim(self, batch_size: int) -> Tensor | tuple[Tensor, ...]:
        """An index of rows drawn uniformly, with torch's generator: samplers written for TorchRL call this."""
        flat = torch.randint(len(self), (batch_size,), device=self.device)
        return flat if self.ndim == 1 else unravel(flat, self.shape).unbind(-1)

    # Saving

    def dumps(self, path: Any) -> None:
        """Write the rows into a folder. A buffer saves all of itself: :meth:`gpubuf.ReplayBuffer.dumps`. Synchronises.

        Raises:
            RuntimeError: nothing was ever written.
        """
        if not self.initialized:
            raise RuntimeError(NOT_INITIALIZED)
        folder = Path(path)
        folder.mkdir(parents=True, exist_ok=True)
        serialization.save(folder / _OWN_FILE, self.state_dict())
        # Of a storage of TorchRL's.
        (folder / files.STORAGE_FILE).unlink(missing_ok=True)

    def loads(self, path: Any) -> None:
        """Replace all rows by those of a folder that :meth:`dumps`, or that of TorchRL's storages, has written.

        To the sampler of a buffer all of them are new. Synchronises.

        Raises:
            FileNotFoundError: there is no such folder.
            ValueError: it holds no rows, is damaged, or its rows don't fit.
        """
        folder = Path(path)
        if not folder.is_dir():
            raise FileNotFoundError(f"there is no folder {folder}")
        if (folder / _OWN_FILE).exists() and not (folder / files.STORAGE_FILE).exists():
            state = serialization.load(folder / _OWN_FILE)
        else:
            rows, size = files.read_rows(folder, writable=False)
            state = rows_state(rows, self.ndim, size)
        self.load_state_dict(state)
        self.unfinished = Unfinished(written=0)

    save = dump = dumps
    load = loads


def is_int(index: Any) -> bool:
    """Whether an index is one int, of Python's, NumPy's or torch's."""
    scalar = isinstance(index, (Tensor, np.ndarray)) and index.ndim == 0 and index.dtype not in (torch.bool, np.bool_)
    return scalar or (isinstance(index, (int, np.integer)) and not isinstance(index, bool))


def _picked(rows: Data, numbers: list[int]) -> Data:
    """Rows of a batch, by their numbers."""
    if isinstance(rows, list):
        return [rows[number] for number in numbers]
    index = torch.tensor(numbers, dtype=torch.int64, device="cpu")
    return mapped(rows, lambda value: value[index.to(value.device or index.device)])


class LazyTensorStorage(TensorStorage, lazy.LazyTensorStorage):
    __doc__ = lazy.LazyTensorStorage.__doc__


class LazyMemmapStorage(LazyTensorStorage, memmap.LazyMemmapStorage):
    __doc__ = memmap.LazyMemmapStorage.__doc__

    @property
    def _storage(self) -> Data:
        """All rows, as programs for TorchRL read them: tensors that know their files, by ``filename``."""
        if not self.initialized or self.scratch_dir is None:
            return super()._storage
        folder = self.scratch_dir
        for leaf in self.layout.leaves:
            files.refuse_links(files.tensor_file(folder, leaf.key), folder)
        tensors = [
            MemoryMappedTensor.from_filename(
                filename=files.tensor_file(folder, leaf.key), dtype=leaf.dtype, shape=(*self.shape, *leaf.shape)
            )
            for leaf in self.layout.leaves
        ]
        return self.written_layout.assemble(tensors, tuple(self.shape), self.rows_device)


#: What buffers, samplers and writers take.
Storage = TensorStorage
