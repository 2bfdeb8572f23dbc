"""The parts of a buffer, replaced while it is in use."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Self

import torch

from gpubuf.data.components import DEFAULT_CAPACITY, component, consuming
from gpubuf.data.lock import BufferLock
from gpubuf.data.prefetch import Prefetcher
from gpubuf.data.processing.pipeline import Pipeline
from gpubuf.data.samplers.base import Rows, Sampler
from gpubuf.data.samplers.consuming import ConsumingSampler
from gpubuf.data.samplers.uniform import RandomSampler
from gpubuf.data.storage.layout import Data, is_container, is_data
from gpubuf.data.storage.list_storage import ListStorage
from gpubuf.data.storage.recipe import Recipe
from gpubuf.data.storage.tensor_storage import LazyTensorStorage, Storage, TensorStorage
from gpubuf.data.transforms import Compose, without_multi_steps
from gpubuf.data.writers import Writer


class _Assigned:
    """A part that TorchRL's users assign, for want of a setter: ``buffer._storage = other`` calls the setter.

    There is no ``__get__``: reading the attribute costs what it costs anyway.
    """

    def __init__(self, setter: str) -> None:
        self._setter = setter

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __set__(self, buffer: Any, part: Any) -> None:
        if "_batches" in vars(buffer):
            getattr(buffer, self._setter)(part)
        else:
            # The constructor.
            vars(buffer)[self._name] = part


class Composed:
    """Replaces the parts of a buffer. A mixin of methods that users call on the buffer."""

    #: The classes of the parts that a buffer makes itself.
    _default_storage: type[LazyTensorStorage] = LazyTensorStorage
    _default_objects: type[ListStorage] = ListStorage
    _default_sampler: type[Sampler] = RandomSampler
    _default_writer: type[Writer]
    _consuming_sampler: type[ConsumingSampler] = ConsumingSampler
    _storage: TensorStorage = _Assigned("_replace_storage")  # type: ignore[assignment]
    _sampler: Sampler = _Assigned("set_sampler")  # type: ignore[assignment]
    _writer: Writer = _Assigned("set_writer")  # type: ignore[assignment]
    _transform: Compose
    _recipe: Recipe
    _reader: Rows
    _pipeline: Pipeline | None
    _lock: BufferLock
    _prefetcher: Prefetcher
    _collate_fn: Callable[[Data], Data] | None

    def _assemble(self) -> None:
        raise NotImplementedError

    def _reader_of(self, storage: TensorStorage) -> Rows:
        raise NotImplementedError

    @classmethod
    def _new_storage(cls, sampler: Sampler | None = None) -> LazyTensorStorage:
        """The storage of a buffer that was given none: of the capacity that the sampler tells, if it does."""
        return cls._default_storage(getattr(sampler, "max_capacity", DEFAULT_CAPACITY))

    def _first_sampler(self, given: Any, consume_after_n_samples: Any, prefetch: int | None) -> Sampler:
        sampler: Sampler = component(given, Sampler, self._default_sampler)
        uniform = isinstance(sampler, RandomSampler) and type(sampler).choose is RandomSampler.choose
        return consuming(sampler, consume_after_n_samples, prefetch, self._consuming_sampler if uniform else None)

    def append_transform(self, transform: Callable[[Data], Data], *, invert: bool = False) -> Self:
        """Add a transform behind the others; ``invert=True`` applies it to written batches instead.

        Batches that were prefetched stay as they are.
        """
        return self.insert_transform(len(self._transform), transform, invert=invert)

    def insert_transform(self, index: int, transform: Callable[[Data], Data], *, invert: bool = False) -> Self:
        """Add a transform before the one at ``index``. Batches that were prefetched stay as they are."""
        with self._lock, self._prefetcher.quiet():
            rest, recipe = without_multi_steps(transform, self._recipe)
            if rest is not None:
                self._transform.insert(index, rest, invert=invert)
            if recipe is not self._recipe:
                self._recipe = recipe
                self._assemble()
        return self

    def set_rng(self, generator: torch.Generator | None) -> None:
        """Start a new random stream, seeded by ``generator``. Like the setters below, it drops prefetched batches."""
        if generator is not None and not isinstance(generator, torch.Generator):
            raise TypeError(f"generator must be a torch.Generator or None, got {generator!r}")
        with self._lock:
            self._prefetcher.discard()
            self._sampler.set_rng(generator)
            if self._pipeline is not None:
                self._pipeline.set_rng(generator)

    def _storage_for(self, data: Any) -> TensorStorage:
        """The default storage for a first batch like ``data``: one for any objects, if these are no tensors."""
        leaves: Any = [data[0]] if isinstance(data, list) and data else [data]
        while leaves and is_container(leaves[0]):
            first = leaves[0]
            leaves = list(first.values()) if isinstance(first, dict) else list(first)
        if leaves and not is_data(leaves[0]):
            self._replace_storage(self._default_objects(self._storage.max_size))
        return self._storage

    def set_storage(self, storage: Storage, collate_fn: Callable[[Data], Data] | None = None) -> TensorStorage:
        """Replace the storage and the ``collate_fn``; the sampler starts afresh. Returns the storage before.

        Args:
            storage: the new one, or a function that returns it.
            collate_fn: applied to gathered batches. Default: none, whatever the constructor was given.
        """
        with self._lock:
            given, vars(self)["_collate_fn"] = vars(self)["_collate_fn"], collate_fn
            try:
                return self._replace_storage(storage)
            except BaseException:
                vars(self)["_collate_fn"] = given
                raise

    def _replace_storage(self, storage: Storage) -> TensorStorage:
        """Replace the storage alone."""
        with self._lock:
            self._prefetcher.discard()
            before = self._storage
            new: TensorStorage = component(storage, TensorStorage, self._new_storage)
            # Raises before anything is replaced.
            self._reader = self._reader_of(new)
            self._sampler.bind(new, self._lock)
            self._writer.register_storage(new)
            vars(self)["_storage"] = self._lock.storage = new
            self._sampler.empty()
            self._assemble()
            return before

    def set_sampler(self, sampler: Sampler) -> Sampler:
        """Replace the sampler; rows already stored count as new to it. Returns the one before."""
        with self._lock:
            self._prefetcher.discard()
            before = self._sampler
            sampler = component(sampler, Sampler, self._default_sampler)
            if sampler is not self._sampler:
                sampler.check_recipe(self._recipe)
                sampler.bind(self._storage, self._lock)
                self._sampler.unbind()
                vars(self)["_sampler"] = sampler
                self._assemble()
            return before

    def set_writer(self, writer: Writer) -> Writer:
        """Replace the writer. Returns the one before."""
        with self._lock:
            self._prefetcher.discard()
            before = self._writer
            writer = component(writer, Writer, self._default_writer)
            writer.register_storage(self._storage)
            vars(self)["_writer"] = writer
            self._assemble()
            return before
