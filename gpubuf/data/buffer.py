"""Replay buffers: a storage, a writer and a sampler behind one interface, that of TorchRL."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from gpubuf.data.array_writes import ColumnWrites
from gpubuf.data.batches import Batches
from gpubuf.data.checkpoints import restore, save
from gpubuf.data.checkpoints.save import Saved
from gpubuf.data.components import (
    check_sizes,
    component,
    fit_together,
    given_transform,
    no_rows,
    refuse_out_of_scope,
)
from gpubuf.data.composition import Composed
from gpubuf.data.copying import Copyable
from gpubuf.data.delayed import may_be_delayed
from gpubuf.data.edits import Edits
from gpubuf.data.hindsight import Hindsight
from gpubuf.data.lock import unless_compiling
from gpubuf.data.moving import Movable
from gpubuf.data.overview import Overview
from gpubuf.data.processing.pipeline import Pipeline
from gpubuf.data.recording import DERIVED, Unfinished, refuse_in_capture
from gpubuf.data.samplers.base import Sampler
from gpubuf.data.samplers.slices import SliceSampler
from gpubuf.data.samplers.sum_tree import vector
from gpubuf.data.samplers.trajectory_index import RowOrder
from gpubuf.data.sequences import SampleUnit, checked_unit
from gpubuf.data.service import Service
from gpubuf.data.storage.indexing import as_positions
from gpubuf.data.storage.layout import Data, batch_shape, inside, layout_of, mapped, shallow
from gpubuf.data.storage.reader import Reader
from gpubuf.data.storage.recipe import Recipe
from gpubuf.data.storage.tensor_storage import Storage, TensorStorage
from gpubuf.data.trajectories import Queries
from gpubuf.data.transforms import Compose, without_multi_steps
from gpubuf.data.updates import WriteBack
from gpubuf.data.writers import RoundRobinWriter, Writer

_compiling = torch.compiler.is_compiling
# Traced code takes no lock. When it runs, its operations are ordered by the data that they read and write.
_no_lock = nullcontext()


class ReplayBuffer(ColumnWrites, Composed, Copyable, Edits, Movable, Overview, Queries, Service, WriteBack):
    """A replay buffer whose rows, counters and random numbers stay on the storage's device.

    ``extend``, ``sample`` and ``update_priority`` never synchronise with the host. All of them may be called from
    several threads, and on several CUDA streams: a lock makes each of them one step, and each waits on its stream for
    the one before it.

    Args:
        storage: where the rows live: a storage or a function that returns one. Default: a
            :class:`LazyTensorStorage` on the CPU, or a :class:`ListStorage` if the first write is of other objects than
            tensors and containers of them, of the ``max_capacity`` of a prioritized sampler, or of 1000 rows.
        sampler: which rows a batch is made of. Default: :class:`RandomSampler`.
        writer: where new rows go. Default: :class:`RoundRobinWriter`.
        collate_fn: applied to every gathered batch, before the transforms.
        pin_memory: put every CPU tensor of a batch and of its info into pinned memory, after the transforms. Without
            an accelerator this warns once and does nothing.
        prefetch: number of batches, of ``batch_size`` transitions, that are prepared while the consumer has one: by a
            thread, or, with the rows on a GPU, on a stream of its own. Their order is the same as if each were drawn
            when it was asked for; a batch asked for ahead holds the rows of that moment.
        transform: a callable on a batch, or a module, also for indexing. :class:`MultiStepTransform` sets ``n_steps``.
        transform_factory: a function that returns one; excludes ``transform``.
        batch_size: number of transitions in a batch; :meth:`sample` may override it.
        dim_extend: the dimension of a written batch along which time runs, and which becomes the first; default: the
            last of the storage's.
        generator: seeds the random stream; default: torch's global generator, at the first use.
        n_steps: steps of a transition in a batch, 1 .. 64. With 2 and more a drawn row stands for itself and the rows
            behind it, up to the end of its trajectory and the newest row: rewards are summed with discounts, all under
            ``"next"`` is that of the last row, and ``"steps_to_next_obs"``, int64 ``[B, 1]``, says how many steps were
            taken. Every stored row can be drawn. Indexing gives rows as they were written.
        gamma: the discount, in [0, 1].
        reward_keys: keys of the rewards that are summed. Default: ``("next", "reward")``.
        end_keys: flags that end a trajectory. Default: those of ``"done"``, ``"terminated"`` and ``"truncated"`` that
            are stored under ``"next"``, or else at the root.
        traj_key: identifiers of trajectories, whose change ends one; instead of ``end_keys``.
        process: what happens to keys on their way out: :class:`Normalize`, :class:`RewardScale`, :class:`Clip`,
            :class:`Mirror` and :class:`RandomShift`. Indexing gives rows as they were written.
        relabel: gives rows of a batch other goals, see :class:`Hindsight`.
        consume_after_n_samples: rows leave after they were drawn so many times, see :class:`ConsumingSampler`.
        sample_unit: what a drawn row stands for: a :class:`Sequence` of steps around it. Default: itself.
        compilable: accepted for compatibility.
        delayed_init: make the parts at the first use of the buffer, and call functions that return parts only then.
            Default: True with a ``transform_factory``. Errors in the arguments are then raised at the first use.
        checkpointer: writes and reads the rows where the buffer is saved: an object with ``dumps(storage, path)`` and
            ``loads(storage, path)``, such as TorchRL's checkpointers of tensor storages. Default: gpubuf's own form.
        shared, service_backend*, transport*: accepted at their defaults; out of scope.

    Raises:
        TypeError: a component has the wrong type.
        NotImplementedError: an argument that is out of scope was set.
    """

    _default_writer: type[Writer] = RoundRobinWriter
    #: Whether iteration puts the info of a sample into it.
    _samples_have_info = False

    @may_be_delayed
    def __init__(
        self,
        *,
        storage: Storage | Callable[[], Storage] | None = None,
        sampler: Sampler | Callable[[], Sampler] | None = None,
        sample_unit: SampleUnit | None = None,
        writer: Writer | Callable[[], Writer] | None = None,
        collate_fn: Callable[[Data], Data] | None = None,
        pin_memory: bool = False,
        prefetch: int | None = None,
        transform: Callable[[Data], Data] | None = None,
        transform_factory: Callable[[], Callable[[Data], Data]] | None = None,
        batch_size: int | None = None,
        dim_extend: int | None = None,
        checkpointer: Any = None,
        generator: torch.Generator | None = None,
        n_steps: int = 1,
        gamma: float = 0.99,
        reward_keys: Sequence[Any] | None = None,
        end_keys: Sequence[Any] | None = None,
        traj_key: Any = None,
        process: Sequence[Any] = (),
        relabel: Hindsight | None = None,
        consume_after_n_samples: int | None = None,
        shared: bool = False,
        compilable: bool | None = None,
        delayed_init: bool | None = None,
        service_backend: str = "direct",
        service_backend_options: Any = None,
        transport: str = "auto",
        transport_options: Any = None,
    ) -> None:
        refuse_out_of_scope(
            shared=shared,
            service_backend=None if service_backend == "direct" else service_backend,
            service_backend_options=service_backend_options,
            transport=None if transport == "auto" else transport,
            transport_options=transport_options,
        )
        check_sizes(prefetch, batch_size)
        transform = given_transform(transform, transform_factory)
        self._has_default_storage = storage is None and checkpointer is None
        self._sampler = self._first_sampler(sampler, consume_after_n_samples, prefetch)
        self._storage: TensorStorage = component(storage, Storage, lambda: self._new_storage(self._sampler))
        if checkpointer is not None:
            saved: Any = self._storage
            saved.checkpointer = checkpointer
        self._writer: Writer = component(writer, Writer, self._default_writer)
        self._writer.register_storage(self._storage)
        if dim_extend is not None and not 0 <= dim_extend < self._storage.ndim:
            raise ValueError(f"dim_extend is {dim_extend}, but the storage has {self._storage.ndim} dimension(s)")
        self._dim_extend = dim_extend
        self._collate_fn = collate_fn
        self._pin_memory = pin_memory
        self._batch_size = batch_size
        self._transform = Compose()
        self._pipeline = Pipeline.of(process)
        self._recipe = Recipe.of(n_steps, gamma, reward_keys, end_keys, traj_key, self._pipeline)
        transform, self._recipe = without_multi_steps(transform, self._recipe)
        if transform is not None:
            self._transform.append(transform)
        self._relabel = relabel
        self._unit = checked_unit(sample_unit)
        self._reader: TensorStorage | Reader = self._storage
        # The priorities of the write that is under way.
        self._given: Tensor | None = None
        self._connect(prefetch or 0)
        if generator is not None:
            self.set_rng(generator)

    def _assemble(self) -> None:
        """Make batches of the parts that the buffer has now."""
        reader = self._reader_of(self._storage)
        fit_together(self._storage, self._sampler, self._writer, self._recipe, self._relabel, self._unit)
        if self._relabel is not None:
            self._relabel.check_recipe(self._recipe, () if self._pipeline is None else self._pipeline.steps)
            self._storage.followed_by(self._relabel)
        if self._sampler.reader is not reader:
            self._sampler.read_from(reader)
        slices = isinstance(self._sampler, SliceSampler)
        windows = slices or self._recipe.n_steps > 1 or self._relabel is not None or self._unit is not None
        self._row_order = RowOrder(self._recipe, self.dim_extend, refused=slices) if windows else None
        self._reader = reader
        self._batches = Batches(
            self._storage,
            reader,
            self._sampler,
            self._writer,
            self._transform,
            self._lock,
            self._prefetcher,
            collate_fn=self._collate_fn or self._storage.default_collate,
            pin_memory=self._pin_memory,
            batch_size=self._batch_size,
            relabel=self._relabel,
            unit=self._unit,
        )

    def _reader_of(self, storage: TensorStorage) -> TensorStorage | Reader:
        """Reads ``storage`` by the buffer's recipe: itself where batches are copies of rows."""
        recipe, reader = self._recipe, self._reader
        if recipe.is_plain:
            return storage
        if isinstance(reader, Reader) and reader.storage is storage and reader.recipe == recipe:
            return reader
        self._sampler.check_recipe(recipe)
        return Reader(storage, recipe)

    # Properties

    @property
    def storage(self) -> TensorStorage:
        """The storage."""
        return self._storage

    @property
    def sampler(self) -> Sampler:
        """The sampler."""
        return self._sampler

    @property
    def writer(self) -> Writer:
        """The writer."""
        return self._writer

    @property
    def transform(self) -> Compose:
        """The transforms, in order."""
        return self._transform

    @property
    def batch_size(self) -> int | None:
        """The batch size given to the constructor."""
        return self._batch_size

    @property
    def dim_extend(self) -> int:
        """The dimension of a written batch along which time runs."""
        return self._storage.ndim - 1 if self._dim_extend is None else self._dim_extend

    @property
    def initialized(self) -> bool:
        """Whether the storage has been allocated."""
        return self._storage.initialized

    # Writing

    def extend(self, data: Data, *, update_priority: bool | None = None) -> Tensor:
        """Write a batch at the cursor; of more rows than the capacity the newest stay. No host sync.

        Args:
            data: ``[n]`` rows (for storages of two dimensions ``[E, T]``, see ``dim_extend``), or a list of rows. It
                is never changed. An empty list, no rows, or, as the first write, no keys: nothing changes.
            update_priority: not for this class (NotImplementedError): see :class:`TensorDictReplayBuffer`.

        Returns:
            The rows' index, int64 ``[n]`` on the storage's device (``[n, ndim]`` for several dimensions): -1 for rows
            that are gone already, because there were more than the capacity.

        Raises:
            ValueError: a key is missing or unknown, or has another shape or dtype; nothing is written.
        """
        if update_priority is not None:
            raise NotImplementedError("update_priority is for TensorDictReplayBuffer, whose batches carry priorities")
        with _no_lock if _compiling() else self._lock:
            return self._extend(data, None)

    def _extend(self, data: Data, priority: Callable[[Data], Tensor | None] | None) -> Tensor:
        storage = self._storage
        if storage._layout is None and self._has_default_storage:
            storage = self._storage_for(data)
        if isinstance(data, list):
            if not data:
                return no_rows(storage)
            data = storage.batch_of(data)
        if len(self._transform):
            # Inverse transforms may set keys in place; the caller's TensorDict must not see them.
            data = self._transform.inv(shallow(data))
            if data is None:
                return no_rows(storage)
        if not storage.initialized and storage.holds_nothing(data):
            return no_rows(storage)
        if storage.ndim > 1 and self.dim_extend != 0:
            data = mapped(data, lambda value: value.transpose(0, self.dim_extend))
        given = priority(data) if priority is not None else None
        if not storage.initialized:
            refuse_in_capture("the first write allocates the storage: write before")
            self._sampler.check_rows(layout_of(data, storage.ndim, storage.ignored_keys), storage.ndim)
            full = storage.full_shape(batch_shape(data, storage.ndim))
            storage.beside = self._sampler.index_beside(storage.requested_device, full)
        pipeline = self._pipeline
        if pipeline is not None:
            pipeline.check_write(data, storage.ndim)
        self._given = given
        append = self._writer.extend
        index = self._sampler.write(append, data) if self._sampler.consumes else append(data)
        if index.numel() == 0:
            return no_rows(storage)
        # Of more rows than the capacity only the newest are there.
        newest = index.numel() > storage.max_size and self._writer.in_order
        self._tell_sampler(index[-storage.max_size :] if newest else index)
        if pipeline is not None:
            rows = inside(storage.written_layout, data, storage.ndim)
            pipeline.on_write(rows, storage.ndim, None if self._writer.in_order else index >= 0)
        storage.end(None)
        self._given = None
        if self._row_order is not None and not _compiling():
            self._row_order.look(storage)
        found = storage.unravel(index)
        if newest:
            # Their places hold later rows of this write.
            found[: -storage.max_size] = -1
        return found

    def _tell_sampler(self, survivors: Tensor) -> None:
        given = self._given
        if given is not None:
            given = given[-survivors.numel() :]
        self._sampler.on_write(survivors, given)

    def add(self, data: Data) -> int | Tensor | None:
        """Write one row (of one step of all environments, for storages of several dimensions).

        Returns:
            Its index: an int (None if the writer did not keep it), or int64 ``[n, ndim]`` for storages of several
            dimensions. No host sync.
        """
        with self._lock:
            if self._storage._layout is None and self._has_default_storage:
                self._storage_for(data)
            cursor = self._storage.cursor
            index = self.extend(self._storage.as_batch(data, self.dim_extend))
            if self._storage.ndim > 1 or not index.numel():
                return index
            in_turn = self._writer.in_order and not self._sampler.consumes
            return cursor if in_turn else self._writer.added(index)

    def empty(self, empty_write_count: bool = True) -> None:
        """Forget every row, priority and prefetched batch, in O(1) for the rows; memory stays allocated.

        Args:
            empty_write_count: let :attr:`write_count` begin again at 0.
        """
        with self._lock:
            self._writer.check_writable()
            self._prefetcher.discard()
            before = self._storage.begin(Unfinished(empties=True))
            self._storage.empty(empty_write_count)
            self._writer.empty(empty_write_count)
            self._sampler.empty()
            self._storage.end(before)

    # Reading

    def sample(self, batch_size: int | None = None, return_info: bool = False, *, batches: int | None = None) -> Any:
        """A batch of transitions.

        Args:
            batch_size: number of transitions; default: that of the constructor.
            return_info: also return the info dict.
            batches: draw so many batches at once: every tensor of batch and info is ``[batches, batch_size, ...]``.

        Returns:
            The batch, which the caller owns; or the batch and a dict with ``"index"`` and what the sampler has to
            say (``"priority_weight"`` and ``"index_generation"`` of prioritized ones).

        Raises:
            RuntimeError: the buffer is empty, or no batch size is known.
            ValueError: a number is below 1, or the sampler can't draw several batches of one size. No host sync.
        """
        batch = self._batches.next(batch_size, False, batches)
        return (batch.data, batch.info) if return_info else batch.data

    def __iter__(self) -> Iterator[Any]:
        """Batches of the constructor's ``batch_size``, until the sampler has run out (one epoch) or for ever."""
        if self._batch_size is None:
            raise RuntimeError(
                "Cannot iterate over the replay buffer. Batch_size was not specified: give the constructor a batch_size"
            )
        ran_out = False
        while not ran_out:
            batch = self._batches.next(None, self._samples_have_info)
            ran_out = batch.ran_out
            yield batch.data

    def next(self) -> Any:
        """The next batch, or None if the sampler has run out."""
        return next(iter(self), None)

    # Priorities

    def update_priority(self, index: Any, priority: Any = None, *, generation: Tensor | None = None) -> None:
        """Set the priorities of rows. See :meth:`PrioritizedSampler.update_priority`. No host sync.

        Args:
            index: ``info["index"]`` of a sample. Or a sampled batch and nothing else, as for
                :meth:`TensorDictReplayBuffer.update_tensordict_priority`.
            priority: ``[n]``, or a number for all.
            generation: ``info["index_generation"]``; rows overwritten since the sample are then left alone.

        Raises:
            TypeError: there is no ``priority``, and no batch that has some.
        """
        if priority is None:
            return self._update_from_batch(index)
        with _no_lock if _compiling() else self._lock:
            ring = self._storage._ring
            if generation is not None and ring is not None and ring.rewritten is not None:
                index = as_positions(index, self._storage.shape, self._storage.device)
                generation = ring.without_rewrites(index, vector(generation, torch.int64, index))
            before = self._storage.begin(DERIVED)
            self._sampler.update_priority(index, priority, generation=generation)
            self._storage.end(before)

    def _update_from_batch(self, batch: Any) -> None:
        raise TypeError(
            "update_priority needs the index and the priority of rows: a batch that carries both goes to "
            "update_tensordict_priority of a TensorDictReplayBuffer"
        )

    def mark_update(self, index: Any) -> None:
        """Rows were written elsewhere (``buffer[i] = ...``, or through the storage): treat them as new."""
        with unless_compiling(self._lock):
            before = self._storage.begin(DERIVED)
            self._storage.rebuild()
            self._sampler.mark_update(index)
            self._storage.end(before)

    # Saving

    def state_dict(self) -> dict[str, Any]:
        """Everything that is needed to go on with the same batches. Row tensors are views. Synchronises.

        Waits until the batches in preparation are finished; they are part of the state.
        """
        return save.state_of(self)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore :meth:`state_dict` into this buffer's own memory: all of it, or nothing. Synchronises.

        If it is interrupted, or a custom transform, sampler or writer raises, the buffer is put back as it was. For
        that the rows that it has are copied to the host beforehand. If they would take more than half of the free
        memory there, nothing is copied, and the buffer is left empty: a note in the error says so.

        Raises:
            ValueError: the state is that of another sampler, or its rows don't fit; the buffer is left as it was.
        """
        restore.load_state(self, state)

    def save(self, path: str | os.PathLike[str], **options: Any) -> Saved:
        """Save everything to a folder, atomically; see :func:`gpubuf.data.checkpoints.save.save`. Synchronises."""
        return save.save(self, path, **options)

    def load(self, path: str | os.PathLike[str], **options: Any) -> None:
        """Restore what :meth:`save` wrote; see :func:`gpubuf.data.checkpoints.restore.load`. Synchronises.

        A folder that TorchRL's ``dumps`` has written is recognised: its rows, counters and priorities replace those of
        the buffer; see :func:`gpubuf.torchrl.dumps.load_dump`.
        """
        restore.load(self, path, **options)

    dump = dumps = save
    loads = load

    def register_save_hook(self, hook: Callable[..., Any]) -> None:
        """Have a hook change the rows that :meth:`save` writes: ``hook(rows, path=folder)`` returns others.

        Hooks belong to the storage, and are not part of a checkpoint: register them again before :meth:`load`. See
        :class:`gpubuf.torchrl.checkpointers.StorageCheckpointerBase`.
        """
        storage: Any = self._storage
        storage.register_save_hook(hook)

    def register_load_hook(self, hook: Callable[..., Any]) -> None:
        """Have a hook make rows of what :meth:`load` reads: ``hook(data, out=None)`` returns all rows of a storage."""
        storage: Any = self._storage
        storage.register_load_hook(hook)

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}(\n  storage={self._storage!r},\n  sampler={self._sampler!r},\n"
            f"  batch_size={self._batch_size})"
        )
