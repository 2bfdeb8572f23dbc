"""Changing rows that are stored: single keys, or all rows, read and written in the order in which they lie."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Self

import torch
from tensordict import TensorDictBase, is_tensorclass
from torch import Tensor

from gpubuf.data.recording import DERIVED
from gpubuf.data.row_access import RowAccess
from gpubuf.data.storage.indexing import as_positions
from gpubuf.data.storage.layout import Data, Key, Leaf, as_key, as_written, batch_shape, mapped
from gpubuf.data.storage.schema import as_numbers, stored_as
from gpubuf.data.updates import stored_keys, update_keys


class Edits(RowAccess):
    """Changes rows that are stored. A mixin of methods that users call on the buffer.

    None of them moves the cursor, a priority or a row's generation. If a key is written that tells where trajectories
    end, the sampler indexes all rows anew, which is O(capacity). Batches that were prefetched stay as they are.
    """

    def set_(self, key: Any, value: Any) -> Self:
        """Set one key of all rows stored. No host sync.

        Args:
            key: a stored key, nested ones as tuples; or one with keys below it, for a TensorDict.
            value: ``[n, ...]`` for the ``n`` rows stored (``[T, E, ...]`` for storages of two dimensions), or a number
                for all. Converted to the key's dtype as ``to()`` of tensors does.

        Returns:
            The buffer.

        Raises:
            KeyError: the key is not stored.
            ValueError: the value has another shape, or numbers that the key can't hold, such as 300 or NaN in uint8 (a
                GPU cuts them to the range and counts a fault); or the key has no memory of its own (``share_next``,
                ``prefixes``).
            RuntimeError: nothing has been written yet, or the writer refuses writes. In all cases nothing is written.
        """
        return self._edit({as_key(key): value}, slice(None), whole=True)

    def set_at_(self, key: Any, value: Any, index: Any) -> Self:
        """Set one key of some rows. No host sync, but for a boolean mask on a GPU.

        Args:
            key: as for :meth:`set_`.
            value: a value of the shape of ``buffer[index][key]``, or one that broadcasts to it.
            index: as for ``buffer[index]``: an int, a slice, a sequence, a mask, or a tensor of positions, of any
                shape. For storages of several dimensions: an int or a slice of steps, ``[..., ndim]`` coordinates as
                samples carry them, or a tuple of one tensor per dimension. Of duplicates the last one wins.

        Returns:
            The buffer.

        Raises:
            IndexError: an index is beyond the rows stored (CPU; a GPU skips the row and counts a fault).
            KeyError, RuntimeError, ValueError: as :meth:`set_`.
        """
        return self._edit({as_key(key): value}, index, whole=False)

    def update_(
        self, input_dict_or_td: Any, clone: bool = False, *, keys_to_update: Sequence[Any] | None = None
    ) -> Self:
        """Set several keys of all rows stored, as :meth:`set_` does. No host sync.

        Args:
            input_dict_or_td: a TensorDict, a tensorclass or a dict, nested ones too.
            clone: accepted for compatibility: values are always copied.
            keys_to_update: only these keys, or those below them. Default: all.

        Returns:
            The buffer.

        Raises:
            KeyError, RuntimeError, ValueError: as :meth:`set_`.
        """
        found = _flat(input_dict_or_td, ())
        if keys_to_update is not None:
            chosen = [as_key(key) for key in keys_to_update]
            found = {key: value for key, value in found.items() if any(key[: len(one)] == one for one in chosen)}
        return self._edit(found, slice(None), whole=True)

    def _edit(self, values: Mapping[Key, Any], index: Any, *, whole: bool) -> Self:
        with self._lock:
            self._writer.check_writable()
            storage = self._storage
            leaves = storage.written_layout.leaves
            positions, batch = storage.located(index)
            found: dict[Key, Tensor] = {}
            for key, value in (item for path, given in values.items() for item in _flat(given, path).items()):
                position = storage.written_layout.position(key)
                if position is None:
                    stored = sorted(leaf.name for leaf in leaves)
                    raise KeyError(f"key {as_written(key)!r} is not stored; the storage has {stored}")
                found[key] = _fitted(value, leaves[position], batch, whole, storage.ring)
            keys, sources = stored_keys(storage, found, positions.numel())
            if keys:
                generation = storage.counters.without_rewrites(positions, storage.generations(positions))
                update_keys(storage, self._sampler, positions, keys, sources, generation)
        return self

    def read_all_in_order(self, end: int | None = None) -> Data:
        """The rows in the order in which they lie, transformed: ``buffer[:end]``.

        Args:
            end: this many rows (of the first dimension, for storages of two); default: all that are stored.
        """
        return self[:] if end is None else self[:end]

    def write_all(self, data: Data, end: int | None = None) -> None:
        """Overwrite the first rows, in the order in which they lie, with all their keys. No host sync.

        Inverse transforms apply, as they do in ``extend``. Priorities stay as they are.

        Args:
            data: ``[n]`` rows; for storages of two dimensions as ``buffer[:end]`` gives them.
            end: this many of the first dimension; must agree with the data.

        Raises:
            ValueError: there are more rows than are stored, fewer than ``end``, or a key, shape or dtype differs.
            RuntimeError: the writer refuses writes. In all cases nothing is written.
        """
        with self._lock:
            self._writer.check_writable()
            storage = self._storage
            if len(self._transform):
                transformed = self._transform.inv(data if isinstance(data, Tensor) else data.copy())
                if transformed is None:
                    return
                data = transformed
            shape = batch_shape(data, storage.ndim)
            held = self._written_shape()
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
                where = as_positions(
                    self._coordinates(slice(shape[0])).reshape(n, storage.ndim), storage.shape, storage.device
                )
            before = storage.begin(DERIVED)
            storage.write(where, data)
            self._rows_edited()
            storage.end(before)

    write_all_in_order = write_all


def _flat(value: Any, path: Key) -> dict[Key, Any]:
    """The values under ``path``, by key."""
    if not isinstance(value, (Mapping, TensorDictBase)) and not is_tensorclass(value):
        return {path: value}
    found: dict[Key, Any] = {}
    for name, item in value.items():
        found |= _flat(item, (*path, *as_key(name)))
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
