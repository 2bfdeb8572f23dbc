"""Rows of a buffer by their index: read, and overwritten in place, whole or key by key.

Keys of drawn rows are written back, such as latents, values, anything that was computed from a batch, unless the rows
were overwritten since, or have a newer version.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from tensordict import TensorDictBase, is_tensorclass
from torch import Tensor

from gpubuf.data.arguments import as_tensor
from gpubuf.data.recording import DERIVED
from gpubuf.data.samplers.base import Sampler
from gpubuf.data.samplers.sum_tree import vector
from gpubuf.data.storage.indexing import as_positions, plain_index
from gpubuf.data.storage.layout import Data, Key, Leaf, as_key, as_written, batch_shape, is_data, mapped
from gpubuf.data.storage.list_storage import ListStorage
from gpubuf.data.storage.plan import Recipe
from gpubuf.data.storage.schema import NEXT_KEY, Schema, as_numbers, stored_as
from gpubuf.data.storage.storage import TensorStorage
from gpubuf.data.writers import Writer

_T = TypeVar("_T")


@dataclass(frozen=True)
class ConditionalUpdateResult:
    """The fate of each entry of a conditional update.

    Attributes:
        updated: bool ``[n]``: the row was still there, and was written.
        version_rejected: bool ``[n]``: the row was still there, but has a version that is not older, or another entry
            of the update has a higher one. None if no versions were given.
    """

    updated: Tensor
    version_rejected: Tensor | None = None

    @property
    def batch_size(self) -> torch.Size:
        """``[n]``."""
        return self.updated.shape

    @property
    def updated_count(self) -> int:
        """Number of entries that were written. Synchronises."""
        return int(self.updated.sum())

    @property
    def version_rejected_count(self) -> int:
        """Number of entries that lost to a version. Synchronises."""
        return 0 if self.version_rejected is None else int(self.version_rejected.sum())

    @property
    def stale_count(self) -> int:
        """Number of entries whose row had been overwritten. Synchronises."""
        return self.updated.numel() - self.updated_count - self.version_rejected_count


class UnknownKeyError(KeyError, ValueError):
    """A key that is not stored. A KeyError too, as TorchRL raises it."""

    # That of KeyError is the repr of its argument.
    __str__ = ValueError.__str__


def apply_versions(
    storage: TensorStorage,
    positions: Tensor,
    generation: Tensor,
    version_key: Any,
    incoming: Tensor | None,
    newer: bool,
) -> ConditionalUpdateResult:
    """Which entries are to be written. No host sync.

    Args:
        storage: where the rows lie.
        positions: of the entries' rows, int64 ``[n]``.
        generation: that their rows had, int64 ``[n]``.
        version_key: a stored key of one number per row.
        incoming: the entries' versions, ``[n, ...]`` as their key has them; None: no versions.
        newer: whether an entry of the same version as the row loses.
    """
    # Where no row is stored there is no generation to compare.
    live = (storage.generations(positions) == generation) & (generation >= 0)
    if incoming is None:
        return ConditionalUpdateResult(live)
    number = storage.batch_layout.position(as_key(version_key))
    assert number is not None
    incoming, stored = _comparable(incoming), _comparable(storage.gather_key(number, torch.where(live, positions, 0)))
    accepted = live & ((incoming > stored) if newer else (incoming >= stored))
    # Of several entries for a row the one of the highest version wins, and of these the last. Others are alone.
    n = positions.numel()
    own = torch.where(accepted, positions, -1 - torch.arange(n, device=positions.device))
    order = incoming.argsort(stable=True)
    order = order.gather(0, own.gather(0, order).argsort(stable=True))
    groups = own.gather(0, order)
    last = torch.cat((groups[1:] != groups[:-1], groups.new_ones(min(n, 1), dtype=torch.bool)))
    wins = torch.zeros_like(accepted).scatter(0, order, last)
    return ConditionalUpdateResult(accepted & wins, live & ~(accepted & wins))


def versions(storage: TensorStorage, version_key: Any, version: Any, n: int, like: Tensor) -> Tensor:
    """Incoming versions as their key has them, ``[n, ...]`` for ``n`` entries, on the device of ``like``.

    Raises:
        ValueError: there are not as many, or the key is not stored, has several numbers per row, or can't hold one.
    """
    tensor = as_numbers(version)
    if tensor.numel() not in (1, n):
        raise ValueError(f"version must be one number or {n} of them, got the shape {tuple(tensor.shape)}")
    key = as_key(version_key)
    number = storage.written_layout.position(key)
    if number is None:
        hint = ". Dotted-string keys are not nested ones: write a tuple" if "." in key[0] else ""
        raise UnknownKeyError(f"version_key {as_written(key)!r} is not stored{hint}")
    leaf = storage.written_layout.leaves[number]
    if leaf.n_elements != 1:
        raise ValueError(f"version_key {as_written(key)!r} has {leaf.n_elements} numbers per row, not one")
    # Rounded, an older version could pass for a newer one.
    held = stored_as(tensor, leaf.dtype, leaf.name, storage.ring, exact=True)
    return held.reshape(-1).to(like.device).expand(n).reshape(n, *leaf.shape)


def _comparable(version: Tensor) -> Tensor:
    """Numbers ``[n]`` in the same order, of a dtype that can be compared and sorted."""
    numbers = version.reshape(-1)
    if numbers.is_floating_point():
        return numbers
    wide = numbers.to(torch.int64)
    return wide ^ -(2**63) if numbers.dtype is torch.uint64 else wide


#: Root keys of a batch that say which rows it is made of.
_OF_THE_DRAW = frozenset({("index",), ("index_generation",), ("priority_weight",), ("relabelled",)})


@dataclass(frozen=True)
class RowAccess:
    """Reads and changes the rows of a buffer by their index, with the buffer's lock held. The cursor stays.

    Of a storage of two dimensions, ints, slices and keys see the rows as they were written: ``[E, T]``, or ``[T, E]``
    with ``dim_extend=0``. Tensors, sequences and tuples of tensors are positions as samples carry them.

    Attributes:
        storage: holds the rows.
        sampler: is notified of keys that it has derived data from. A sampler of slices indexes all rows anew, which is
            O(capacity).
        writer: may refuse writes.
        recipe: that of the buffer's batches.
        dim_extend: the dimension of a written batch along which time runs.
    """

    storage: TensorStorage
    sampler: Sampler
    writer: Writer
    recipe: Recipe
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
        # The sampler finds anew where trajectories end, if it keeps that.
        if storage.initialized and self.sampler.depends_on(range(len(storage.layout.leaves))):
            self.sampler.rows_changed()
        storage.end(before)

    def write_first(self, data: Data, end: int | None) -> None:
        """Overwrite the first rows, as many as ``data`` has; raises as :meth:`ReplayBuffer.write_all`."""
        shape, held = batch_shape(data, self.storage.ndim), self._written_shape()
        if shape[0] > held[0] or (end is not None and shape[0] != min(end, held[0])):
            wanted = f"{held[0]} are stored" if end is None else f"{min(end, held[0])} are addressed"
            raise ValueError(f"the data has {shape[0]} rows, {wanted}: extend() adds rows")
        if tuple(shape[1:]) != held[1:]:
            raise ValueError(f"the data has the shape {list(shape)}, the buffer {list(held)}")
        if math.prod(shape):
            self.write(slice(shape[0]), data)

    def set_keys(self, values: Mapping[Key, Any], index: Any, *, whole: bool) -> None:
        """Set single keys of the rows at ``index``; raises as :meth:`ReplayBuffer.set_`.

        Args:
            values: by key; a TensorDict or a dict stands for the keys below its own.
            index: as for ``buffer[index]``.
            whole: whether the index is that of all rows; a value then has all of them, or is one number.
        """
        storage = self.storage
        positions, batch = storage.located(index)
        found: dict[Key, Tensor] = {}
        for key, value in (item for path, given in values.items() for item in flat_entries(given, path).items()):
            try:
                leaf = storage.written_layout.leaves[stored_position(storage, key)]
            except UnknownKeyError as error:
                raise KeyError(str(error)) from None
            found[key] = _fitted(value, leaf, batch, whole, storage.ring)
        keys, sources = stored_keys(storage, found, positions.numel())
        self._update(positions, keys, sources, storage.generations(positions))

    def prepare(
        self,
        index: Any,
        data: Any,
        *,
        generation: Tensor | None,
        patch: Any = None,
        version_key: Any = None,
        version: Any = None,
        require_newer: bool = False,
    ) -> tuple[Callable[[], None], ConditionalUpdateResult | None]:
        """:meth:`ReplayBuffer.update_if_present`, up to the point from which on rows change: the rest of it."""
        if (data is None) == (patch is None):
            raise TypeError("update_if_present needs the values to write, as data or as patch, not both")
        if (version_key is None) != (version is None):
            raise ValueError("version_key and version belong together")
        self.writer.check_writable()
        storage = self.storage
        if isinstance(storage, ListStorage):
            raise NotImplementedError("a ListStorage has no conditional updates: its objects have no keys")
        given = data if patch is None else patch
        if not is_data(given) and not (patch is not None and isinstance(patch, Mapping)):
            raise TypeError(f"expected a TensorDict, a tensorclass or a tensor, got {type(given).__name__}")
        found = {key: as_tensor(value) for key, value in flat_entries(given, ()).items()}
        if generation is None:
            generation = found.get(("index_generation",))
        if generation is None:
            raise ValueError(
                "update_if_present needs the generation of the rows, to know those that were overwritten: "
                "info['index_generation'] of the sample; RoundRobinWriter(track_generations=True) adds it"
            )
        positions = as_positions(index, storage.shape, storage.device, lambda: storage.steps_stored, handles=True)
        n, incoming, result = positions.numel(), None, None
        if version_key is not None:
            key = as_key(version_key)
            if key in found:
                raise ValueError(f"version_key {as_written(key)!r} may not appear in patch: version is written")
            incoming = found[key] = versions(storage, key, version, n, positions)
        keys, sources = stored_keys(storage, found, n)
        _check_of_drawn_row(storage.schema, self.recipe, keys)
        generation = vector(generation, torch.int64, positions)
        if patch is not None or incoming is not None:
            if generation.numel() != n:
                raise ValueError(f"{n} rows are addressed, but given are {generation.numel()} generations")
            result = apply_versions(storage, positions, generation, version_key, incoming, require_newer)
            # No row has the generation -1.
            generation = torch.where(result.updated, generation, -1)
        return functools.partial(self._update, positions, keys, sources, generation), result

    def _update(self, positions: Tensor, keys: list[int], sources: list[Tensor], generation: Tensor) -> None:
        """Overwrite single keys of rows that still have their generation, and tell the sampler of what it goes by."""
        if not keys:
            return
        storage = self.storage
        generation = storage.counters.without_rewrites(positions, generation)
        depends = self.sampler.depends_on([storage.schema.columns[key] for key in keys])
        before = storage.begin(DERIVED) if depends else None
        storage.update(positions, keys, sources, generation)
        if depends:
            self.sampler.rows_changed()
            storage.end(before)

    def in_written_order(self, value: Any) -> Any:
        """``[T, E, ...]`` with the dimensions that a written batch has."""
        return value.transpose(0, self.dim_extend) if self.dim_extend else value

    def _coordinates(self, index: Any) -> Tensor:
        """The positions of ``read(index)`` of ints and slices, above one dimension: int64 ``[..., ndim]``."""
        storage = self.storage
        # What the index takes of a tensor without memory: to list all positions would take more than the rows do.
        taken = torch.empty(self._written_shape(), device="meta")[index]
        place = torch.full((), int(taken.storage_offset()), device=storage.device)
        for length, stride in zip(taken.shape, taken.stride(), strict=True):
            place = place.unsqueeze(-1) + torch.arange(length, device=storage.device) * stride
        return torch.stack(swapped(torch.unravel_index(place, self._written_shape()), self.dim_extend), -1)

    def _written_shape(self) -> tuple[int, ...]:
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


def finished_future(
    update: Callable[..., ConditionalUpdateResult | None], **arguments: Any
) -> Future[ConditionalUpdateResult | None]:
    """A future of the result of an update, or of its error."""
    future: Future[ConditionalUpdateResult | None] = Future()
    try:
        future.set_result(update(**arguments))
    except Exception as error:
        future.set_exception(error)
    return future


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
        ValueError: a key is not stored, has another shape or dtype, is a prefix of another, or is shared with "next".
    """
    layout, prefixes = storage.written_layout, dict(storage.schema.prefixes)
    keys: list[int] = []
    sources: list[Tensor] = []
    for key, tensor in found.items():
        if key in _OF_THE_DRAW and layout.position(key) is None:
            continue
        position = stored_position(storage, key)
        leaf = layout.leaves[position]
        if position in prefixes:
            whole = layout.leaves[prefixes[position]]
            raise ValueError(f"key {leaf.name} is stored as the first elements of {whole.name}: write that one")
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
