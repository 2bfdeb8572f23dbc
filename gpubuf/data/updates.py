"""Rows of a buffer by their index: read, and overwritten in place, whole or key by key.

Keys of drawn rows are written back, such as latents, values, anything that was computed from a batch, unless the rows
were overwritten since.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from tensordict import TensorDictBase, is_non_tensor, is_tensorclass
from torch import Tensor

from gpubuf.data.arguments import as_tensor
from gpubuf.data.recording import at_replays
from gpubuf.data.samplers.priorities import vector
from gpubuf.data.storage.containers import Data, first_of, is_data, mapped, shallow, without_wrapper
from gpubuf.data.storage.indexing import as_positions, plain_index
from gpubuf.data.storage.layout import OF_A_DRAW, Key, as_key, as_written
from gpubuf.data.storage.plan import Recipe
from gpubuf.data.storage.schema import NEXT_KEY, Schema
from gpubuf.data.storage.storage import TensorStorage
from gpubuf.data.transforms import Compose, stacks_of
from gpubuf.data.writers import Writer

_T = TypeVar("_T")


class UnknownKeyError(KeyError, ValueError):
    """A key that is not stored. A KeyError too, as TorchRL raises it."""

    # That of KeyError is the repr of its argument.
    __str__ = ValueError.__str__


@dataclass(frozen=True)
class RowAccess:
    """Reads and changes the rows of a buffer by their index, within an operation of the buffer. The cursor stays.

    Of a storage of two dimensions, ints, slices and keys see the rows as they were written: ``[E, T]``, or ``[T, E]``
    with ``dim_extend=0``. Tensors, sequences and tuples of tensors are positions as samples carry them.

    Attributes:
        storage: holds the rows.
        writer: may refuse writes.
        transform: the transforms, applied to what is read, and their inverses to what is written.
        collate_fn: applied to what is read, but for single rows; None: that of the storage.
        recipe: that of the buffer's batches.
        dim_extend: the dimension of a written batch along which time runs.
    """

    storage: TensorStorage
    writer: Writer
    transform: Compose
    collate_fn: Callable[[Data], Data] | None
    recipe: Recipe
    dim_extend: int

    def read(self, index: Any) -> Data:
        """The rows at a plain ``index``, transformed: views for ints and slices where the storage gives views.

        What is collated or transformed is a copy: both may change it in place.
        """
        data, storage = self._stored(index), self.storage
        collate = None if isinstance(index, int) else self.collate_fn or storage.default_collate
        if collate is None and self.transform.is_empty:
            return data
        views = storage.rows.gives_views and is_plain(index)
        if views or (storage.takes_objects and is_data(data)):
            data = mapped(data, lambda value: value.clone())
        if collate is not None:
            data = collate(data)
        return self.transform(data)

    def _stored(self, index: Any) -> Data:
        storage = self.storage
        if storage.ndim == 1 or not storage.initialized or not is_plain(index):
            return storage[index]
        if storage.rows.gives_views:
            return mapped(storage[:], lambda value: self.in_written_order(value)[index])
        where = self._coordinates(index)
        rows = storage[where.reshape(-1, storage.ndim)]
        return mapped(rows, lambda value: value.reshape(*where.shape[:-1], *value.shape[1:]))

    def write(self, index: Any, data: Data) -> None:
        """Overwrite the rows at ``index``, after the inverse transforms."""
        rows = self.to_write(data)
        if rows is not None:
            self.put(index, rows)

    def to_write(self, data: Data) -> Data | None:
        """What is to be written of a batch of the user's; None: nothing. Raises if the writer refuses writes.

        Raises:
            TypeError: the rows have frames of others' stacks.
        """
        self.writer.check_writable()
        if stacks_of(self.transform):
            raise TypeError("a frame is part of the stacks of several rows: rows of a FrameStack can't be overwritten")
        return self.transform.inv(shallow(data)) if len(self.transform) else data

    def put(self, index: Any, rows: Data) -> None:
        """Overwrite the rows at ``index`` by others as they are stored."""
        self.storage.changing(self._write, plain_index(index), rows)

    def _write(self, index: Any, data: Data) -> None:
        storage = self.storage
        if storage.ndim > 1 and storage.initialized and is_plain(index):
            where = self._coordinates(index)
            lead = where.shape[:-1]
            # Rows of one environment may be those of all, as on a TensorDict.
            few = isinstance(data, TensorDictBase) and data.batch_dims < len(lead)
            data = data.expand(*lead) if few else data
            given = tuple(first_of(data).shape[: len(lead)])
            if math.prod(given) != math.prod(lead):
                raise ValueError(f"rows of shape {tuple(lead)} are addressed, the batch has shape {given}")
            rows = mapped(data, lambda value: value.reshape(math.prod(lead), *value.shape[len(lead) :]))
            storage[where.reshape(-1, storage.ndim)] = rows
        else:
            storage[index] = data

    def prepare(self, index: Any, data: Any, *, generation: Tensor | None) -> Callable[[], None]:
        """:meth:`ReplayBuffer.update_if_present`, up to the point from which on rows change: the rest of it."""
        self.writer.check_writable()
        storage = self.storage
        if storage.takes_objects:
            raise NotImplementedError(
                f"a {type(storage).__name__} has no conditional updates: its objects have no keys"
            )
        if not is_data(data):
            raise TypeError(f"expected a TensorDict, a tensorclass or a tensor, got {type(data).__name__}")
        entries = {key: without_wrapper(value) for key, value in flat_entries(data, ()).items()}
        found = {key: as_tensor(value) for key, value in entries.items() if not is_non_tensor(value)}
        if generation is None:
            generation = found.get(("index_generation",))
        if generation is None:
            raise ValueError(
                "update_if_present needs the generation of the rows, to know those that were overwritten: "
                "info['index_generation'] of the sample; RoundRobinWriter(track_generations=True) adds it"
            )
        positions = as_positions(index, storage.shape, storage.device, lambda: storage.steps_stored, handles=True)
        keys, sources = stored_keys(storage, found, positions.numel())
        _check_of_drawn_row(storage.schema, self.recipe, keys)
        text = host_entries(storage, {key: entries[key] for key in entries.keys() - found.keys()}, positions.numel())
        if text and bool((positions >= storage.max_size).any()):
            raise IndexError(f"an index is out of range: the storage has {storage.max_size} rows")
        due = vector(generation, torch.int64, positions)
        return functools.partial(self.update, positions, keys, sources, due, text)

    def update(
        self,
        positions: Tensor,
        keys: list[int],
        sources: list[Tensor],
        generation: Tensor,
        text: Mapping[Key, list[Any]] | None = None,
    ) -> None:
        """Overwrite single keys of rows that still have their generation; with ``text`` it waits for a GPU."""
        storage = self.storage
        generation = storage.ring.without_rewrites(positions, generation)
        update = functools.partial(storage.update, positions, keys, sources, generation) if keys else None
        if text:
            at_replays().refuse("data that are not tensors are written by the host: write them outside of the step")
            # In two memories: who is interrupted between them writes both again.
            both = functools.partial(self._update_with_text, update, positions, generation, text)
            storage.changing(storage.rows.again.make, both)
        elif update is not None:
            storage.changing(update)

    def _update_with_text(
        self,
        update: Callable[[], None] | None,
        positions: Tensor,
        generation: Tensor,
        text: Mapping[Key, list[Any]],
    ) -> None:
        storage = self.storage
        assert storage.host is not None
        if update is not None:
            update()
        kept = (storage.generations(positions) == generation).nonzero().flatten().tolist()
        rows = positions.tolist()
        storage.host.put([rows[i] for i in kept], {key: [column[i] for i in kept] for key, column in text.items()})

    def in_written_order(self, value: Any) -> Any:
        """``[T, E, ...]`` with the dimensions that a written batch has."""
        return value.transpose(0, self.dim_extend) if self.dim_extend else value

    def _coordinates(self, index: Any) -> Tensor:
        """The positions of ``read(index)`` of ints and slices, above one dimension: int64 ``[..., ndim]``."""
        storage = self.storage
        # What the index takes of a tensor without memory: to list all positions would take more than the rows do.
        taken = torch.empty(self.written_shape(), device="meta")[index]
        place = torch.full((), int(taken.storage_offset()), device=storage.device)
        for length, stride in zip(taken.shape, taken.stride(), strict=True):
            place = place.unsqueeze(-1) + torch.arange(length, device=storage.device) * stride
        return torch.stack(swapped(torch.unravel_index(place, self.written_shape()), self.dim_extend), -1)

    def written_shape(self) -> tuple[int, ...]:
        """The sizes of all rows, as they were written."""
        storage = self.storage
        return swapped((storage.steps_stored, *storage.shape[1:]), self.dim_extend)


def swapped(values: Sequence[_T], dim: int) -> tuple[_T, ...]:
    """The values of each dimension, that of ``dim`` and the first exchanged."""
    out = list(values)
    out[0], out[dim] = out[dim], out[0]
    return tuple(out)


def is_key(index: Any) -> bool:
    """Whether an index is a key: a name, or a tuple of names."""
    names = index if isinstance(index, tuple) else (index,)
    return names != () and all(isinstance(name, str) for name in names)


def is_plain(index: Any) -> bool:
    """Whether an index is made of ints, slices and ``...``, which count rows as they were written."""
    if isinstance(index, tuple):
        return all(map(is_plain, index))
    return index is Ellipsis or isinstance(index, slice) or (isinstance(index, int) and not isinstance(index, bool))


def flat_entries(value: Any, path: Key) -> dict[Key, Any]:
    """The values under ``path``, by key."""
    if is_non_tensor(value):
        return {path: value}
    if not isinstance(value, (Mapping, TensorDictBase)) and not is_tensorclass(value):
        return {path: value}
    found: dict[Key, Any] = {}
    for name, item in value.items():
        found |= flat_entries(item, (*path, *as_key(name)))
    return found


def stored_position(storage: TensorStorage, key: Key) -> int:
    """The position of a key in the layout of what is written.

    Raises:
        UnknownKeyError: it is not stored.
    """
    position = storage.written_layout.position(key)
    if position is None:
        stored = sorted(leaf.name for leaf in storage.written_layout.leaves)
        raise UnknownKeyError(f"key {as_written(key)!r} is not stored; the storage has {stored}")
    return position


def stored_keys(storage: TensorStorage, found: dict[Key, Tensor], n: int) -> tuple[list[int], list[Tensor]]:
    """The positions of keys in the layout of what is written, and ``n`` rows of each.

    Raises:
        ValueError: a key is not stored, has another shape or dtype, or is shared with "next".
    """
    layout = storage.written_layout
    keys: list[int] = []
    sources: list[Tensor] = []
    for key, tensor in found.items():
        if key in OF_A_DRAW and layout.position(key) is None:
            continue
        position = stored_position(storage, key)
        leaf = layout.leaves[position]
        if storage.schema.columns[position] in storage.schema.shared:
            raise ValueError(
                f"key {leaf.name} is stored once for two rows (share_next): write whole rows, by buffer[index] = ..."
            )
        rows = tensor.shape[: tensor.dim() - len(leaf.shape)]
        if tensor.dtype is not leaf.dtype or (*rows, *leaf.shape) != tensor.shape or rows.numel() != n:
            raise ValueError(
                f"key {leaf.name}: {n} rows of shape {leaf.shape} and {leaf.dtype} are addressed, "
                f"the batch has shape {tuple(tensor.shape)} and {tensor.dtype}"
            )
        keys.append(position)
        sources.append(tensor.detach().reshape(n, *leaf.shape))
    return keys, sources


def host_entries(storage: TensorStorage, found: dict[Key, Any], n: int) -> dict[Key, list[Any]]:
    """``n`` values of each key that is not a tensor.

    Raises:
        ValueError: a key is not stored as such, or has other dimensions.
    """
    dims = {} if storage.host is None else storage.host.keys
    for key, value in found.items():
        if key not in dims:
            raise ValueError(f"key {as_written(key)!r} is not a tensor, and none of the storage's that are not")
        if value.numel() != n * math.prod(dims[key]):
            raise ValueError(f"key {as_written(key)!r}: {n} rows are addressed, the batch has {list(value.batch_size)}")
    return {key: value.reshape(n, *dims[key]).tolist() for key, value in found.items()}


def _check_of_drawn_row(schema: Schema, recipe: Recipe, keys: Sequence[int]) -> None:
    """Raise for keys that n-step batches have from other rows than the drawn one.

    Raises:
        ValueError: there are some.
    """
    if recipe.n_steps == 1:
        return
    rewards = recipe.rewards(schema)
    for key in keys:
        leaf = schema.written.leaves[key]
        if leaf.key[0] == NEXT_KEY or key in rewards:
            raise ValueError(f"{leaf.name} is aggregated over n_steps={recipe.n_steps} and cannot be written back")
