"""Rows of a buffer by their index: read, and overwritten in place."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Self, TypeVar

import torch
from tensordict import TensorDictBase
from torch import Tensor

from gpubuf.data.lock import BufferLock
from gpubuf.data.recording import DERIVED
from gpubuf.data.samplers.base import Sampler
from gpubuf.data.storage.indexing import plain_index
from gpubuf.data.storage.layout import Data, mapped, shallow
from gpubuf.data.storage.tensor_storage import TensorStorage
from gpubuf.data.transforms import Compose
from gpubuf.data.writers import Writer

_T = TypeVar("_T")


class RowAccess:
    """Indexes the rows of a buffer. A mixin of methods that users call on the buffer.

    Of a storage of two dimensions, ints, slices and keys see the rows as they were written: ``[E, T]``, or ``[T, E]``
    with ``dim_extend=0``. Tensors, sequences and tuples of tensors are positions as samples carry them.
    """

    _storage: TensorStorage
    _writer: Writer
    _sampler: Sampler
    _transform: Compose
    _lock: BufferLock
    _collate_fn: Callable[[Data], Data] | None

    @property
    def dim_extend(self) -> int:
        raise NotImplementedError

    def set_(self, key: Any, value: Any) -> Self:
        raise NotImplementedError

    def __getitem__(self, index: Any) -> Data:
        """Rows by index, transformed. Ints and slices give views of the storage, all else copies, in the index's shape.

        A key gives one key of all rows: ``buffer["next", "reward"]`` is ``buffer[:]["next", "reward"]``.
        """
        if is_key(index):
            return self[:][index]
        index = plain_index(index)
        with self._lock:
            data = self._read(index)
            collate = self._collate_fn or self._storage.default_collate
            if collate is not None and not isinstance(index, int):
                data = collate(data)
            return self._transform(data) if len(self._transform) else data

    def __setitem__(self, index: Any, data: Data) -> None:
        """Overwrite rows in place, after the inverse transforms. Under a key: that key of all rows, as it is stored.

        Priorities stay as they are: announce the change with :meth:`mark_update`. A sampler of slices indexes all rows
        anew, which is O(capacity).
        """
        with self._lock:
            self._writer.check_writable()
            storage = self._storage
            if is_key(index):
                self.set_(index, self._in_written_order(data) if isinstance(data, Tensor) and data.ndim else data)
                return
            if len(self._transform):
                data = self._transform.inv(shallow(data))
                if data is None:
                    return
            index = plain_index(index)
            before = storage.begin(DERIVED)
            if storage.ndim > 1 and storage.initialized and is_plain(index):
                where = self._coordinates(index)
                lead = where.shape[:-1]
                # Rows of one environment may be those of all, as on a TensorDict.
                few = isinstance(data, TensorDictBase) and data.batch_dims < len(lead)
                data = data.expand(*lead) if few else data
                rows = mapped(data, lambda value: value.reshape(math.prod(lead), *value.shape[len(lead) :]))
                storage[where.reshape(-1, storage.ndim)] = rows
            else:
                storage[index] = data
            self._rows_edited()
            storage.end(before)

    def _rows_edited(self) -> None:
        """Rows were changed in place: the sampler finds anew where trajectories end, if it keeps that."""
        storage = self._storage
        if storage.initialized and self._sampler.depends_on(range(len(storage.layout.leaves))):
            self._sampler.rows_changed()

    def _read(self, index: Any) -> Data:
        storage = self._storage
        if storage.ndim == 1 or not storage.initialized or not is_plain(index):
            return storage[index]
        if storage.gives_views:
            return mapped(storage[:], lambda value: self._in_written_order(value)[index])
        where = self._coordinates(index)
        rows = storage[where.reshape(-1, storage.ndim)]
        return mapped(rows, lambda value: value.reshape(*where.shape[:-1], *value.shape[1:]))

    def _coordinates(self, index: Any) -> Tensor:
        """The positions of ``self[index]``: int64 of that data's batch shape (``[..., ndim]`` if above 1)."""
        storage = self._storage
        if storage.ndim == 1 or not is_plain(index):
            return storage.coordinates(index)
        # Of those asked for alone: a list of all positions would take longer, and more memory than the rows.
        parts = chosen(index, self._written_shape())
        spans = [torch.arange(*_limits(part), device=storage.device) for part in parts]
        places = torch.stack(swapped(torch.meshgrid(*spans, indexing="ij"), self.dim_extend), -1)
        return places.reshape(*(len(part) for part in parts if isinstance(part, range)), storage.ndim)

    def _written_shape(self) -> tuple[int, ...]:
        """The sizes of ``self[:]``."""
        storage = self._storage
        return swapped((storage.steps_stored, *storage.shape[1:]), self.dim_extend)

    def _in_written_order(self, value: Any) -> Any:
        """``[T, E, ...]`` with the dimensions that a written batch has."""
        return value.transpose(0, self.dim_extend) if self.dim_extend else value


def swapped(values: Sequence[_T], dim: int) -> tuple[_T, ...]:
    """The values of each dimension, that of ``dim`` and the first exchanged."""
    out = list(values)
    out[0], out[dim] = out[dim], out[0]
    return tuple(out)


def chosen(index: Any, sizes: Sequence[int]) -> list[int | range]:
    """What a plain index takes of each dimension: a place, or a range of them. IndexError as tensors raise it."""
    given = list(index) if isinstance(index, tuple) else [index]
    if given.count(Ellipsis) > 1 or len(given) - given.count(Ellipsis) > len(sizes):
        raise IndexError(f"too many indices for the {len(sizes)} dimensions of the buffer: {index}")
    at = given.index(Ellipsis) if Ellipsis in given else len(given)
    missing = len(sizes) - (len(given) - given.count(Ellipsis))
    given[at : at + 1] = [slice(None)] * missing
    parts = []
    for dim, (size, part) in enumerate(zip(sizes, given, strict=True)):
        if isinstance(part, int) and not -size <= part < size:
            raise IndexError(f"index {part} is out of bounds for dimension {dim} with size {size}")
        if isinstance(part, slice) and part.step is not None and part.step <= 0:
            raise ValueError(f"the step of a slice must be above 0, not {part.step}")
        parts.append(range(size)[part])
    return parts


def _limits(part: int | range) -> tuple[int, int, int]:
    return (part, part + 1, 1) if isinstance(part, int) else (part.start, max(part.start, part.stop), part.step)


def is_key(index: Any) -> bool:
    """Whether an index is a key: a name, or a tuple of names."""
    return isinstance(index, str) or (isinstance(index, tuple) and index != () and all(map(_is_name, index)))


def is_plain(index: Any) -> bool:
    """Whether an index is made of ints, slices and ``...``, which count rows as they were written."""
    if isinstance(index, tuple):
        return all(map(is_plain, index))
    return index is Ellipsis or isinstance(index, slice) or (isinstance(index, int) and not isinstance(index, bool))


def _is_name(part: Any) -> bool:
    return isinstance(part, str)
