"""Single keys of stored rows, and the first of the rows, overwritten in place, for adapters whose users do that."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tensordict import is_non_tensor
from torch import Tensor

from gpubuf.data.buffer import ReplayBuffer
from gpubuf.data.storage.layout import Key, Leaf, as_key
from gpubuf.data.storage.schema import as_numbers, stored_as
from gpubuf.data.updates import RowAccess, UnknownKeyError, flat_entries, host_entries, stored_keys, stored_position


def set_keys(buffer: ReplayBuffer, values: Mapping[Any, Any], index: Any, *, whole: bool) -> None:
    """Set single keys of the rows at ``index``. No host sync, but for a boolean mask on a GPU.

    No cursor, priority or generation moves. If a key tells where trajectories end, the sampler indexes all rows anew.

    Args:
        buffer: has the rows.
        values: by key; a TensorDict or a dict stands for the keys below its own.
        index: as for ``buffer[index]``.
        whole: whether the index is that of all rows; a value then has all of them, or is one number.

    Raises:
        KeyError: a key is not stored.
        ValueError: a value has another shape, or numbers that its key can't hold; or a key has no memory of its own.
        IndexError: an index is beyond the rows stored (CPU; a GPU skips the row and counts a fault).
        RuntimeError: nothing has been written yet, or the writer refuses writes. In all cases nothing is written.
    """
    buffer.operation.run(_set_keys, buffer._rows, values, index, whole)


def _set_keys(access: RowAccess, values: Mapping[Any, Any], index: Any, whole: bool) -> None:
    access.writer.check_writable()
    storage = access.storage
    positions, batch = storage.located(index)
    found: dict[Key, Tensor] = {}
    text: dict[Key, Any] = {}
    for key, value in (item for path, given in values.items() for item in flat_entries(given, as_key(path)).items()):
        if is_non_tensor(value):
            text[key] = value
            continue
        try:
            leaf = storage.written_layout.leaves[stored_position(storage, key)]
        except UnknownKeyError as error:
            raise KeyError(str(error)) from None
        found[key] = _fitted(value, leaf, batch, whole, storage.ring.counters)
    keys, sources = stored_keys(storage, found, positions.numel())
    host = host_entries(storage, text, positions.numel())
    access.update(positions, keys, sources, storage.generations(positions), host)


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
