"""Storages, samplers and writers that TorchRL's buffers take. The constructors of TorchRL's classes don't run."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torchrl.data import replay_buffers as theirs

from gpubuf import data, serialization
from gpubuf.data.samplers.base import Sampler as OwnSampler
from gpubuf.data.storage.layout import Data, batch_shape, layout_of, mapped
from gpubuf.data.storage.storage import Storage
from gpubuf.data.storage.storage import TensorStorage as OwnStorage


class MissingInGpubufError(NotImplementedError, AttributeError):
    """A member of TorchRL's class has no counterpart in gpubuf. ``hasattr`` is False for it."""


class Missing:
    """Stands for a member that only TorchRL's class has. An attribute of the instance goes before it."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __get__(self, instance: object, owner: type | None = None) -> Any:
        kind = (owner or type(instance)).__name__
        raise MissingInGpubufError(
            f"{kind}.{self.name} is TorchRL's, and gpubuf has none: docs/migration.md says what to use instead"
        )


def _set_state(instance: object, state: dict[str, Any]) -> None:
    vars(instance).update(state)


#: Special methods of TorchRL's that are at work on attributes of its constructor: Python's own in their place.
_SPECIAL: dict[str, Any] = {
    "__getstate__": object.__getstate__,
    "__setstate__": _set_state,
    "__repr__": object.__repr__,
}


class Joined:
    """Base of the classes that are gpubuf's and TorchRL's at once. It comes first among their bases."""

    def __init_subclass__(cls, **named: Any) -> None:
        super().__init_subclass__(**named)
        seen: set[str] = set()
        for base in cls.__mro__:
            own = {name for name in vars(base) if not name.startswith(("__", "_abc_")) or name in _SPECIAL}
            if base.__module__.partition(".")[0] == "torchrl":
                for name in own - seen:
                    setattr(cls, name, _SPECIAL.get(name) or Missing(name))
            seen |= own


class SavedInFolder(Joined):
    """Parts that TorchRL's buffer saves each in a folder of its own: one file there, of gpubuf's format."""

    def dumps(self: Any, path: Any) -> None:
        """Write the state into a folder. Synchronises."""
        folder = Path(path)
        folder.mkdir(parents=True, exist_ok=True)
        serialization.save(folder / _FILE, self.state_dict())

    def loads(self: Any, path: Any) -> None:
        """Restore what :meth:`dumps` has written.

        Raises:
            FileNotFoundError: gpubuf has written nothing there. A folder of TorchRL's is read by ``load_torchrl``.
        """
        file = Path(path) / _FILE
        if not file.exists():
            raise FileNotFoundError(f"there is no {file}: read a folder of TorchRL's own with gpubuf.data.load_torchrl")
        self.load_state_dict(serialization.load(file))


_FILE = "gpubuf.safetensors"


_OWN_WRITER = "give the buffer a writer of gpubuf.integrations.torchrl"


class StorageOfTorchRL(Joined):
    """What TorchRL's buffers, samplers and writers ask of a storage beside what gpubuf's has."""

    supports_conditional_update = False
    _rng = None

    # Buffers that read from the storage

    @property
    def _attached_entities(self) -> list[Any]:
        found: list[Any] = vars(self).setdefault("_entities", [])
        return found

    def _attached_entities_iter(self) -> list[Any]:
        return self._attached_entities

    def attach(self, buffer: Any) -> None:
        """Tell ``buffer``, one of TorchRL's, of every write."""
        if not any(buffer is other for other in self._attached_entities):
            self._attached_entities.append(buffer)

    def bind_samplers(self) -> None:
        """Let the samplers of the buffers serve this storage."""
        for sampler in self._samplers():
            sampler._serve(self)  # type: ignore[arg-type]

    def _samplers(self) -> list[OwnSampler]:
        found = [vars(entity).get("_sampler") for entity in self._attached_entities]
        return [sampler for sampler in found if isinstance(sampler, OwnSampler)]

    # Writing

    def write_next(
        self: Any, rows: Data, append: Callable[[Data], Tensor] | None = None, *, in_order: bool = True
    ) -> Tensor:
        """Write a batch, and tell the samplers of TorchRL's buffers.

        Args:
            rows: the batch.
            append: writes it. Default: at the cursor.
            in_order: whether ``append`` lets new rows overwrite the oldest ones.

        Returns:
            Flat positions, int64 ``[n]``: -1 for rows that were not written.

        Raises as :meth:`TensorStorage.append`.
        """
        self.bind_samplers()
        if not self.initialized and not self.holds_nothing(rows):
            layout = layout_of(rows, self.ndim, self.ignored_keys)
            for sampler in self._samplers():
                sampler.check_rows(layout, self.ndim)
        index: Tensor = self.append(rows) if append is None else append(rows)
        if index.numel():
            survivors = index[-self.max_size :] if in_order else index
            for sampler in self._samplers():
                sampler.on_write(survivors, None)
            self.end(None)
        return index

    def set(self: Any, cursor: Any, data: Any, *, set_cursor: bool = True) -> None:
        """Write rows where a writer of TorchRL's says: at the storage's own cursor, or over rows that are there.

        An index on a GPU is read, which synchronises: the writers of this module don't.

        Raises:
            NotImplementedError: rows are to be written somewhere else, or a sampler says where new ones go.
        """
        if any(sampler.consumes for sampler in self._samplers()):
            raise NotImplementedError(f"a ConsumingSampler says where new rows go: {_OWN_WRITER}")
        if isinstance(cursor, int) or (isinstance(cursor, Tensor) and cursor.ndim == 0):
            cursor, data = torch.as_tensor(cursor).reshape(1), self.as_batch(data, 0)
        elif isinstance(data, list):
            data = self.batch_of(data)
        if isinstance(cursor, range | slice | list | tuple):
            steps = range(*cursor.indices(self._max_size_along_dim0())) if isinstance(cursor, slice) else cursor
            cursor = torch.as_tensor(list(steps))
        index = cursor.cpu()
        capacity = self._max_size_along_dim0(batched_data=data)
        first = self.cursor // (self.max_size // capacity)
        if set_cursor and torch.equal(index, (torch.arange(first, first + index.numel())) % capacity):
            self.write_next(data)
        elif index.numel() and int(index.max()) < self.steps_stored:
            envs = math.prod(self.shape[1:])
            flat = (index[:, None] * envs + torch.arange(envs)).reshape(-1)
            if self.ndim > 1:
                data = mapped(data, lambda value: value.flatten(0, self.ndim - 1))
            self.write(flat.to(self.device), data)
        else:
            raise NotImplementedError(
                f"gpubuf's storages write at their own cursor, or over rows that are there: {_OWN_WRITER}"
            )

    def _max_size_along_dim0(self: Any, *, single_data: Any = None, batched_data: Any = None) -> int:
        if self.ndim == 1 or self.initialized:
            return int(self.shape[0])
        if batched_data is not None:
            envs = math.prod(batch_shape(batched_data, self.ndim)[1:])
        else:
            envs = math.prod(batch_shape(single_data, self.ndim - 1))
        return -(-int(self.max_size) // envs)

    def _empty(self: Any) -> None:
        self.empty()
        self._bumps += 1

    # Changes, by which TorchRL's samplers know whether what they keep about trajectories still holds

    _bumps = 0

    @property
    def _mutation_revision(self: Any) -> int:
        ring = self._ring
        changed = 0 if ring is None else ring.updates
        return int(self.written + self.overwrites + changed + self._bumps)

    def _bump_mutation_revision(self: Any) -> None:
        """Rows were changed through views of them."""
        self._bumps += 1
        self.rebuild()

    @property
    def _last_cursor_index(self: Any) -> int | None:
        cursor: int | None = self._last_cursor
        return cursor

    # Reading

    def get(self, index: Any) -> Data:
        """Rows by index. TorchRL's samplers of slices give a tuple of one tensor for one dimension."""
        if isinstance(index, tuple) and len(index) == 1:
            index = index[0]
        return super().get(index)  # type: ignore[misc]

    @property
    def _len_along_dim0(self: Any) -> Any:
        return self.steps_stored

    def _rand_given_ndim(self: Any, batch_size: int) -> Any:
        flat = torch.randint(len(self), (batch_size,), generator=self._rng, device=self.device)
        return flat if self.ndim == 1 else self.unravel(flat).unbind(-1)


class TensorStorage(StorageOfTorchRL, data.TensorStorage, theirs.TensorStorage):
    """:class:`gpubuf.data.TensorStorage`, which is also a ``torchrl.data.TensorStorage``."""


class LazyTensorStorage(StorageOfTorchRL, data.LazyTensorStorage, theirs.LazyTensorStorage):
    """:class:`gpubuf.data.LazyTensorStorage`, which is also a ``torchrl.data.LazyTensorStorage``."""


class LazyMemmapStorage(StorageOfTorchRL, data.LazyMemmapStorage, theirs.LazyMemmapStorage):
    """:class:`gpubuf.data.LazyMemmapStorage`, which is also a ``torchrl.data.LazyMemmapStorage``."""


class ListStorage(StorageOfTorchRL, data.ListStorage, theirs.ListStorage):
    """:class:`gpubuf.data.ListStorage`, which is also a ``torchrl.data.ListStorage``."""


class _Plain(type(theirs.Sampler)):  # type: ignore[misc]
    """TorchRL's metaclass hands ``replacement=False`` to a sampler of its own. These classes choose one of gpubuf's."""

    def __call__(cls, *args: Any, replacement: bool = True, **named: Any) -> Any:
        if not replacement:
            other = {"RandomSampler": SamplerWithoutReplacement, "SliceSampler": SliceSamplerWithoutReplacement}
            if not issubclass(cls, SamplerWithoutReplacement | SliceSamplerWithoutReplacement):
                if cls.__name__ not in other:
                    raise TypeError(f"{cls.__name__} has no form without replacement: leave replacement=False out")
                cls = other[cls.__name__]
        return type.__call__(cls, *args, **named)


class SamplerOfTorchRL(SavedInFolder, metaclass=_Plain):
    """What TorchRL's buffers ask of a sampler beside what gpubuf's has."""

    #: As many as TorchRL's say: prefetching never ends before ``ran_out``.
    _remaining_batches = int(torch.iinfo(torch.int64).max)

    @property
    def _rng(self: Any) -> Any:
        return self._generator

    @_rng.setter
    def _rng(self: Any, generator: torch.Generator | None) -> None:
        # TorchRL's buffers set None when they are made, which begins no new stream.
        if generator is not None:
            self.set_rng(generator)

    def bind(self, storage: Storage, *arguments: Any) -> None:
        """Serve ``storage``.

        Raises:
            TypeError: it is TorchRL's own.
        """
        if not isinstance(storage, OwnStorage):
            raise TypeError(
                f"{type(self).__name__} is gpubuf's, and can't draw from TorchRL's {type(storage).__name__}: use a "
                "storage of gpubuf.integrations.torchrl, such as LazyTensorStorage"
            )
        super().bind(storage, *arguments)  # type: ignore[misc]

    def add(self, index: Any) -> None:
        """Nothing: the storage has told the sampler of the write."""

    def extend(self, index: Any) -> None:
        """Nothing: the storage has told the sampler of the write."""

    def can_sample(self, storage: Storage, batch_size: int) -> bool:
        """Whether anything is stored."""
        return len(storage) > 0  # type: ignore[arg-type]

    def _sampleable_count(self, storage: Storage, batch_size: int) -> int:
        return len(storage)  # type: ignore[arg-type]

    @property
    def default_priority(self) -> Any:
        """Priority of the next new row."""
        return getattr(super(), "default_priority", 1.0)

    def _empty(self: Any) -> None:
        self.empty()


class Sampler(SamplerOfTorchRL, data.Sampler, theirs.Sampler):
    """:class:`gpubuf.data.Sampler`, which is also TorchRL's: the base of samplers of your own."""


class RandomSampler(SamplerOfTorchRL, data.RandomSampler, theirs.RandomSampler):
    """:class:`gpubuf.data.RandomSampler`, which is also TorchRL's."""


class SamplerWithoutReplacement(SamplerOfTorchRL, data.SamplerWithoutReplacement, theirs.SamplerWithoutReplacement):
    """:class:`gpubuf.data.SamplerWithoutReplacement`, which is also TorchRL's.

    TorchRL's buffers draw nothing ahead from it: only a draw knows whether it has ended the epoch. gpubuf's do.
    """

    _remaining_batches = 0


class ConsumingSampler(SamplerOfTorchRL, data.ConsumingSampler, theirs.ConsumingSampler):
    """:class:`gpubuf.data.ConsumingSampler`, which is also TorchRL's.

    In a buffer of TorchRL's it needs a writer of this module, which asks it where new rows go.
    """

    def can_sample(self, storage: Storage, batch_size: int) -> bool:
        """Whether there is a row left. Synchronises."""
        return self._num_sampleable(storage) > 0

    def _num_sampleable(self, storage: Storage | None = None) -> int:
        if storage is not None:
            self._serve(storage)
        return self.available()

    def _sampleable_count(self, storage: Storage, batch_size: int) -> int:
        return self._num_sampleable(storage)

    def _pop_consumed_indices(self, storage: Storage | None = None, max_count: int | None = None) -> Tensor:
        """None: the writer puts new rows in the places of consumed ones."""
        return torch.empty(0, dtype=torch.int64)


class PrioritizedSampler(SamplerOfTorchRL, data.PrioritizedSampler, theirs.PrioritizedSampler):
    """:class:`gpubuf.data.PrioritizedSampler`, which is also TorchRL's.

    TorchRL's ``TensorDictReplayBuffer`` updates the priorities of no other sampler.
    """


class SliceSampler(SamplerOfTorchRL, data.SliceSampler, theirs.SliceSampler):
    """:class:`gpubuf.data.SliceSampler`, which is also TorchRL's."""


class SliceSamplerWithoutReplacement(
    SamplerOfTorchRL, data.SliceSamplerWithoutReplacement, theirs.SliceSamplerWithoutReplacement
):
    """:class:`gpubuf.data.SliceSamplerWithoutReplacement`, which is also TorchRL's.

    TorchRL's buffers draw nothing ahead from it, as from :class:`SamplerWithoutReplacement`.
    """

    _remaining_batches = 0


class PrioritizedSliceSampler(SamplerOfTorchRL, data.PrioritizedSliceSampler, theirs.PrioritizedSliceSampler):
    """:class:`gpubuf.data.PrioritizedSliceSampler`, which is also TorchRL's."""


class WriterOfTorchRL(SavedInFolder):
    """What TorchRL's buffers ask of a writer beside what gpubuf's has."""

    _rng = None
    _storage: Any

    def register_storage(self, storage: Storage) -> None:
        """Write to ``storage``.

        Raises:
            TypeError: it is TorchRL's own.
        """
        if not isinstance(storage, OwnStorage):
            raise TypeError(
                f"{type(self).__name__} is gpubuf's, and can't write to TorchRL's {type(storage).__name__}: use a "
                "storage of gpubuf.integrations.torchrl, such as LazyTensorStorage"
            )
        if isinstance(storage, StorageOfTorchRL):
            for buffer in storage._attached_entities:
                sampler = vars(buffer).get("_sampler")
                if isinstance(sampler, theirs.ConsumingSampler) and not isinstance(sampler, OwnSampler):
                    raise TypeError(
                        "TorchRL's ConsumingSampler can't tell gpubuf's writers where new rows go: give the buffer "
                        "sampler=ConsumingSampler(...) of gpubuf.integrations.torchrl"
                    )
            storage.bind_samplers()
        super().register_storage(storage)  # type: ignore[misc]

    def _buffer(self) -> Any:
        """TorchRL's buffer that this is the writer of, or None: gpubuf's buffers don't attach themselves."""
        attached = vars(self._storage).get("_entities", ())
        return next((buffer for buffer in attached if vars(buffer).get("_writer") is self), None)

    def extend(self, data: Data) -> Tensor:
        """Write a batch at the cursor. No host sync.

        Returns:
            Flat positions for a buffer of gpubuf's; for one of TorchRL's, int64 ``[n, ndim]`` above one dimension.
        """
        append: Callable[[Data], Tensor] = super().extend  # type: ignore[misc]
        if "_entities" not in vars(self._storage) or self._buffer() is None:
            return append(data)
        storage, consuming = self._storage, self._consuming_sampler()
        self.check_writable()  # type: ignore[attr-defined]
        if consuming is not None:
            append = functools.partial(consuming.write, append)
        index: Tensor = storage.write_next(data, append, in_order=self.in_order)  # type: ignore[attr-defined]
        index = storage.unravel(index)
        for buffer in storage._attached_entities:
            if not isinstance(vars(buffer).get("_sampler"), OwnSampler):
                buffer.mark_update(index)
        return index

    def _consuming_sampler(self) -> Any:
        """The sampler that says where new rows go, or None."""
        buffer = self._buffer() if "_entities" in vars(self._storage) else None
        sampler = None if buffer is None else vars(buffer).get("_sampler")
        return sampler if isinstance(sampler, OwnSampler) and sampler.consumes else None

    def add(self: Any, data: Any) -> int | Tensor | None:
        """Write one row (of one step of all environments above one dimension).

        Returns:
            Its index; None if the row was not kept.
        """
        cursor = int(self._storage.cursor)
        index: Tensor = self.extend(self._storage.as_batch(data, 0))
        if int(self._storage.ndim) > 1:
            return index
        in_turn = self.in_order and self._consuming_sampler() is None
        return cursor if in_turn else self.added(index)

    def write_at(self, index: Any, data: Any) -> Tensor:
        """Write rows over stored ones, and tell the buffers of TorchRL's that read them."""
        written: Tensor = super().write_at(index, data)  # type: ignore[misc]
        if "_entities" in vars(self._storage):
            for buffer in self._storage._attached_entities:
                buffer.mark_update(written)
        return written

    @property
    def _write_count(self: Any) -> int:
        return int(self.write_count)

    def _empty(self: Any, empty_write_count: bool = True) -> None:
        self.check_writable()
        self._storage.empty(empty_write_count)
        self.empty(empty_write_count)


class RoundRobinWriter(WriterOfTorchRL, data.RoundRobinWriter, theirs.RoundRobinWriter):
    """:class:`gpubuf.data.RoundRobinWriter`, which is also TorchRL's."""


class TensorDictRoundRobinWriter(WriterOfTorchRL, data.TensorDictRoundRobinWriter, theirs.TensorDictRoundRobinWriter):
    """:class:`gpubuf.data.TensorDictRoundRobinWriter`, which is also TorchRL's."""


class ImmutableDatasetWriter(WriterOfTorchRL, data.ImmutableDatasetWriter, theirs.ImmutableDatasetWriter):
    """:class:`gpubuf.data.ImmutableDatasetWriter`, which is also TorchRL's."""


class TensorDictMaxValueWriter(WriterOfTorchRL, data.TensorDictMaxValueWriter, theirs.TensorDictMaxValueWriter):
    """:class:`gpubuf.data.TensorDictMaxValueWriter`, which is also TorchRL's."""
