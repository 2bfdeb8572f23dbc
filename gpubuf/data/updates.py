"""Writing keys of drawn rows back: latents, values, priorities, anything that was computed from a batch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import torch
from tensordict import TensorDictBase, is_tensorclass
from torch import Tensor

from gpubuf.data.recording import DERIVED
from gpubuf.data.samplers.base import Sampler
from gpubuf.data.samplers.sum_tree import vector
from gpubuf.data.storage.indexing import as_positions
from gpubuf.data.storage.layout import Data, Key, as_key, as_written
from gpubuf.data.storage.list_storage import ListStorage
from gpubuf.data.storage.plan import Recipe
from gpubuf.data.storage.schema import NEXT_KEY, Schema, as_numbers, stored_as
from gpubuf.data.storage.storage import TensorStorage
from gpubuf.data.writers import Writer


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
class Updates:
    """Writes keys of drawn rows back, with the buffer's lock held.

    Attributes:
        storage: holds the rows.
        sampler: is notified of keys that it has derived data from.
        writer: may refuse writes.
        recipe: that of the buffer's batches.
    """

    storage: TensorStorage
    sampler: Sampler
    writer: Writer
    recipe: Recipe

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
        """:meth:`update_if_present` with the lock held, up to the point from which on rows change: the rest of it."""
        if (data is None) == (patch is None):
            raise TypeError("update_if_present needs the values to write, as data or as patch, not both")
        if (version_key is None) != (version is None):
            raise ValueError("version_key and version belong together")
        self.writer.check_writable()
        storage = self.storage
        if isinstance(storage, ListStorage):
            raise NotImplementedError("a ListStorage has no conditional updates: its objects have no keys")
        found = entries(data) if patch is None else _of_patch(patch)
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

        def apply() -> None:
            if keys:
                update_keys(
                    storage,
                    self.sampler,
                    positions,
                    keys,
                    sources,
                    storage.counters.without_rewrites(positions, generation),
                )

        return apply, result


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


def update_keys(
    storage: TensorStorage,
    sampler: Sampler,
    positions: Tensor,
    keys: list[int],
    sources: list[Tensor],
    generation: Tensor,
) -> None:
    """Overwrite single keys of rows in place, and tell the sampler if it has derived anything from them.

    Args:
        storage, positions, keys, sources, generation: as for :meth:`TensorStorage.update`.
        sampler: that of the buffer.
    """
    columns = [storage.schema.columns[key] for key in keys]
    before = storage.begin(DERIVED) if sampler.depends_on(columns) else None
    storage.update(positions, keys, sources, generation)
    if sampler.depends_on(columns):
        sampler.rows_changed()
        storage.end(before)


def _of_patch(patch: Any) -> dict[Key, Tensor]:
    """As :func:`entries`, also of a dict of tensors by key."""
    if not isinstance(patch, Mapping):
        return entries(patch)
    return {as_key(key): torch.as_tensor(value) for key, value in patch.items()}


def entries(data: Data) -> dict[Key, Tensor]:
    """The tensors of a batch by key; that of a batch which is a tensor has the empty key."""
    if isinstance(data, Tensor):
        return {(): data}
    if not isinstance(data, TensorDictBase) and not is_tensorclass(data):
        raise TypeError(f"expected a TensorDict, a tensorclass or a tensor, got {type(data).__name__}")
    found: dict[Key, Tensor] = {}
    for name, value in data.items():
        if isinstance(value, Tensor):
            found[name,] = value
        else:
            found |= {(name, *key): tensor for key, tensor in entries(value).items()}
    return found


def stored_keys(storage: TensorStorage, found: dict[Key, Tensor], n: int) -> tuple[list[int], list[Tensor]]:
    """The positions of keys in the layout of what is written, and ``n`` rows of each.

    Raises:
        ValueError: a key is not stored, has another shape or dtype, is a prefix of another, or is shared with "next".
    """
    layout, prefixes = storage.written_layout, dict(storage.schema.prefixes)
    keys: list[int] = []
    sources: list[Tensor] = []
    for key, tensor in found.items():
        position = layout.position(key)
        if position is None:
            if key in _OF_THE_DRAW:
                continue
            stored = sorted(leaf.name for leaf in layout.leaves)
            raise UnknownKeyError(f"key {as_written(key)!r} is not stored; the storage has {stored}")
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
