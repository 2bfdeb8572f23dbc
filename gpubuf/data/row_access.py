"""Rows of a buffer by their index: read, and overwritten in place, whole or key by key."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from tensordict import TensorDictBase, is_tensorclass
from torch import Tensor

from gpubuf.data.recording import DERIVED
from gpubuf.data.samplers.base import Sampler
from gpubuf.data.storage.indexing import as_positions, plain_index
from gpubuf.data.storage.layout import Data, Key, Leaf, as_key, as_written, batch_shape, mapped
from gpubuf.data.storage.schema import as_numbers, stored_as
from gpubuf.data.storage.storage import TensorStorage
from gpubuf.data.updates import stored_keys, update_keys

_T = TypeVar("_T")


@dataclass(frozen=True)
class RowAccess:
    """Reads and changes the rows of a buffer, with the buffer's lock held. No cursor, priority or generation moves.

    Of a storage of two dimensions, ints, slices and keys see the rows as they were written: ``[E, T]``, or ``[T, E]``
    with ``dim_extend=0``. Tensors, sequences and tuples of tensors are positions as samples carry them.

    Attributes:
        storage: holds the rows.
        sampler: is notified of keys that it has derived data from. A sampler of slices indexes all rows anew, which is
            O(capacity).
        dim_extend: the dimension of a written batch along which time runs.
    """

    storage: TensorStorage
    sampler: Sampler
    dim_extend: int

    def read(self, index: Any) -> Data:
        """The rows at ``index``: views for ints and slices where the storage gives views, and copies otherwise."""
        storage = self.storage
        if storage.ndim == 1 or not storage.initialized or not is_plain(index):
            return storage[index]
        if storage.gives_views:
            return mapped(storage[:], lambda value: self.in_written_order(value)[index])
        where = self._coordinates(index)
        rows = storage[where.reshape(-1, storage.ndim)]
        return mapped(rows, lambda value: value.reshape(*where.shape[:-1], *value.shape[1:]))

    def write(self, index: Any, data: Data) -> None:
        """Overwrite the rows at ``index``."""
        storage = self.storage
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
        self._rows_changed()
        storage.end(before)

    def write_first(self, data: Data, end: int | None) -> None:
        """Overwrite the first rows, as many as ``data`` has; raises as :meth:`ReplayBuffer.write_all`."""
        storage = self.storage
        shape, held = batch_shape(data, storage.ndim), self._written_shape()
        if shape[0] > held[0] or (end is not None and shape[0] != min(end, held[0])):
            wanted = f"{held[0]} are stored" if end is None else f"{min(end, held[0])} are addressed"
            raise ValueError(f"the data has {shape[0]} rows, {wanted}: extend() adds rows")
        if tuple(shape[1:]) != held[1:]:
            raise ValueError(f"the data has the shape {list(shape)}, the buffer {list(held)}")
        n = math.prod(shape)
        if n == 0:
            return
        if storage.ndim == 1:
            where = torch.arange(n, device=storage.device)
        else:
            data = mapped(data, lambda value: value.flatten(0, storage.ndim - 1))
            coordinates = self._coordinates(slice(shape[0])).reshape(n, storage.ndim)
            where = as_positions(coordinates, storage.shape, storage.device)
        before = storage.begin(DERIVED)
        storage.write(where, data)
        self._rows_changed()
        storage.end(before)

    def set_keys(self, values: Mapping[Key, Any], index: Any, *, whole: bool) -> None:
        """Set single keys of the rows at ``index``; raises as :meth:`ReplayBuffer.set_`.

        Args:
            values: by key; a TensorDict or a dict stands for the keys below its own.
            index: as for ``buffer[index]``.
            whole: whether the index is that of all rows; a value then has all of them, or is one number.
        """
        storage = self.storage
        leaves = storage.written_layout.leaves
        positions, batch = storage.located(index)
        found: dict[Key, Tensor] = {}
        for key, value in (item for path, given in values.items() for item in flat_entries(given, path).items()):
            position = storage.written_layout.position(key)
            if position is None:
                stored = sorted(leaf.name for leaf in leaves)
                raise KeyError(f"key {as_written(key)!r} is not stored; the storage has {stored}")
            found[key] = _fitted(value, leaves[position], batch, whole, storage.ring)
        keys, sources = stored_keys(storage, found, positions.numel())
        if keys:
            generation = storage.counters.without_rewrites(positions, storage.generations(positions))
            update_keys(storage, self.sampler, positions, keys, sources, generation)

    def in_written_order(self, value: Any) -> Any:
        """``[T, E, ...]`` with the dimensions that a written batch has."""
        return value.transpose(0, self.dim_extend) if self.dim_extend else value

    def _rows_changed(self) -> None:
        """The sampler finds anew where trajectories end, if it keeps that."""
        storage = self.storage
        if storage.initialized and self.sampler.depends_on(range(len(storage.layout.leaves))):
            self.sampler.rows_changed()

    def _coordinates(self, index: Any) -> Tensor:
        """The positions of ``read(index)``: int64 of that data's batch shape (``[..., ndim]`` if above 1)."""
        storage = self.storage
        if storage.ndim == 1 or not is_plain(index):
            return storage.coordinates(index)
        # Of those asked for alone: a list of all positions would take longer, and more memory than the rows.
        parts = chosen(index, self._written_shape())
        spans = [torch.arange(*_limits(part), device=storage.device) for part in parts]
        places = torch.stack(swapped(torch.meshgrid(*spans, indexing="ij"), self.dim_extend), -1)
        return places.reshape(*(len(part) for part in parts if isinstance(part, range)), storage.ndim)

    def _written_shape(self) -> tuple[int, ...]:
        """The sizes of all rows, as they were written."""
        storage = self.storage
        return swapped((storage.steps_stored, *storage.shape[1:]), self.dim_extend)


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


def flat_entries(value: Any, path: Key) -> dict[Key, Any]:
    """The values under ``path``, by key."""
    if not isinstance(value, (Mapping, TensorDictBase)) and not is_tensorclass(value):
        return {path: value}
    found: dict[Key, Any] = {}
    for name, item in value.items():
        found |= flat_entries(item, (*path, *as_key(name)))
    return found


def _fitted(value: Any, leaf: Leaf, batch: tuple[int, ...], whole: bool, ring: Tensor) -> Tensor:
    """A value as ``[*batch, ...]`` of a key's dtype.

    Raises:
        ValueError: it has another shape, or numbers that the key can't hold.
    """
    tensor = stored_as(as_numbers(value), leaf.dtype, leaf.name, ring)
    target = (*batch, *leaf.shape)
    if tensor.shape == target:
        return tensor
    if tuple(tensor.shape) == batch and leaf.n_elements == 1:
        return tensor.reshape(target)
    # All rows at once are given row by row, or by one number: anything between would hide a mistake.
    if tensor.dim() == 0 or not whole:
        try:
            return tensor.expand(target)
        except RuntimeError:
            pass
    raise ValueError(f"key {leaf.name}: expected the shape {target}, got {tuple(tensor.shape)}")
