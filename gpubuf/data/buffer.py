"""Replay buffers: a storage, a writer and a sampler behind one interface, that of TorchRL."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Self

import torch
from tensordict import TensorDict
from torch import Tensor

from gpubuf.data import datasets, moving, passing
from gpubuf.data.check import Report, check
from gpubuf.data.checkpoints import restore, shards
from gpubuf.data.hindsight import Hindsight
from gpubuf.data.ingress.client import WriterClient
from gpubuf.data.ingress.intake import Intake
from gpubuf.data.ingress.options import Writers
from gpubuf.data.operation import graph_break, operation, writing
from gpubuf.data.parts import Parts
from gpubuf.data.prepared_writes import Arrays
from gpubuf.data.samplers.base import Sampler
from gpubuf.data.storage.containers import Data
from gpubuf.data.storage.indexing import plain_index
from gpubuf.data.storage.plan import Recipe
from gpubuf.data.storage.returns import ReturnsToGo
from gpubuf.data.storage.storage import TensorStorage
from gpubuf.data.storage.windows import Window
from gpubuf.data.transforms import Compose
from gpubuf.data.updates import is_key
from gpubuf.data.writers import Writer


class ReplayBuffer:
    """A replay buffer whose rows, counters and random numbers stay on the storage's device.

    ``extend``, ``sample`` and ``update_priority`` never synchronise with the host. All of them may be called from
    several threads, and on several CUDA streams: each of them is one operation, and waits on its stream for the one
    before it.

    Args:
        storage: where the rows live: a storage, a function that returns one, or a number of rows for a
            :class:`LazyTensorStorage` on the CPU. Default: such a storage, of the ``max_capacity`` of a prioritized
            sampler or of 1000 rows.
        sampler: which rows a batch is made of. Default: :class:`RandomSampler`.
        writer: where new rows go. Default: :class:`RoundRobinWriter`.
        collate_fn: applied to every gathered batch, before the transforms.
        pin_memory: put every CPU tensor of a batch and of its info into pinned memory, after the transforms. Without
            an accelerator this warns once and does nothing.
        prefetch: with 1 and more, the next batch of ``batch_size`` transitions is made ahead where that pays: with rows
            in pinned memory on a stream of its own, or in a branch of the graph of a captured step, there also with
            rows on the GPU, and of mapped files the pages of its rows are requested. It is drawn when the one before it
            is asked for, and has the rows or the choice of that moment.
        transform: a callable on a batch, or a module, also for indexing: :class:`RewardScale`, :class:`Clip`,
            :class:`Mirror`, or one of your own. :class:`MultiStepTransform` sets ``n_steps``.
        batch_size: number of transitions in a batch; :meth:`sample` may override it.
        dim_extend: the dimension of a written batch along which time runs, and which becomes the first; default: the
            last of the storage's.
        generator: seeds the random stream; default: torch's global generator, at the first use.
        n_steps: steps of a transition in a batch, 1 .. 64. With 2 and more a drawn row stands for itself and the rows
            after it, up to the end of its trajectory and the newest row: rewards are summed with discounts, all under
            ``"next"`` is that of the last row, and ``"steps_to_next_obs"``, int64 ``[B, 1]``, says how many steps were
            taken. Every stored row can be drawn. Indexing gives rows as they were written.
        gamma: the discount, in [0, 1].
        reward_keys: keys of the rewards that are summed. Default: ``("next", "reward")``.
        end_keys: flags that end a trajectory. Default: those of ``"done"``, ``"terminated"`` and ``"truncated"`` that
            are stored under ``"next"``, or else at the root.
        traj_key: identifiers of trajectories, whose change ends one; instead of ``end_keys``.
        process: what the launch that copies the rows does to keys: :class:`Normalize` and :class:`RandomShift`. It
            comes before the transforms. Indexing gives rows as they were written.
        relabel: gives rows of a batch other goals, see :class:`Hindsight`.
        windows: the steps around a drawn row that a batch has: a :class:`Window` for all keys, or a mapping of keys to
            Windows, each of which stands for all keys below it. With ``n_steps`` those of a key under ``"next"`` are
            around the last row. Indexing gives rows as they were written. See docs/windows.md.
        returns: gives each row of a batch the discounted sum of the rewards to the end of its trajectory, see
            :class:`ReturnsToGo`. Buffers with one storage have the same.
        writers: places for writers in other processes: a number, or :class:`Writers` with more options. Each gets a
            :meth:`client`. Default: none.

    Raises:
        TypeError: a component has the wrong type.
        ValueError: parts or numbers do not fit together.
    """

    #: Where written rows carry their priorities; ``()``: nowhere.
    priority_key: str | tuple[str, ...] = ()
    #: Whether iteration puts the info of a sample into it.
    _samples_have_info = False
    #: Types of batches whose entries are the keys of rows.
    _entries_are_keys: tuple[type, ...] = (TensorDict,)

    def __init__(
        self,
        storage: TensorStorage | Callable[[], TensorStorage] | int | None = None,
        *,
        sampler: Sampler | Callable[[], Sampler] | None = None,
        writer: Writer | Callable[[], Writer] | None = None,
        collate_fn: Callable[[Data], Data] | None = None,
        pin_memory: bool = False,
        prefetch: int | None = None,
        transform: Callable[[Data], Data] | None = None,
        batch_size: int | None = None,
        dim_extend: int | None = None,
        generator: torch.Generator | None = None,
        n_steps: int = 1,
        gamma: float = 0.99,
        reward_keys: Sequence[Any] | None = None,
        end_keys: Sequence[Any] | None = None,
        traj_key: Any = None,
        windows: Window | Mapping[Any, Window] | None = None,
        returns: ReturnsToGo | None = None,
        process: Sequence[Any] = (),
        relabel: Hindsight | None = None,
        writers: int | Writers | None = None,
    ) -> None:
        self.parts = Parts(
            storage,
            sampler,
            writer,
            Recipe(n_steps, gamma, reward_keys, end_keys, traj_key, windows=windows, returns=returns),
            process,
            transform,
            relabel=relabel,
            collate_fn=collate_fn,
            pin_memory=pin_memory,
            prefetch=prefetch,
            batch_size=batch_size,
            dim_extend=dim_extend,
            priority_key=self.priority_key,
        )
        self.operation = passing.begin(self)
        if generator is not None:
            self.set_rng(generator)
        if writers is not None:
            self.parts.take_in(Intake(self, Writers.of(writers)))

    # The parts

    @property
    def storage(self) -> TensorStorage:
        """The storage."""
        return self.parts.storage

    @property
    def sampler(self) -> Sampler:
        """The sampler."""
        return self.parts.sampler

    @property
    def writer(self) -> Writer:
        """The writer."""
        return self.parts.writer

    @property
    def writers(self) -> Intake | None:
        """What takes in the rows of writers in other processes, with their counters; None: there are none."""
        return self.parts.intake

    @property
    def transform(self) -> Compose:
        """The transforms, in order."""
        return self.parts.transform

    @property
    def batch_size(self) -> int | None:
        """The batch size given to the constructor."""
        return self.parts.batch_size

    @property
    def dim_extend(self) -> int:
        """The dimension of a written batch along which time runs."""
        return self.parts.time_dim

    @property
    def initialized(self) -> bool:
        """Whether the storage has been allocated."""
        return self.parts.storage.initialized

    def append_transform(self, transform: Callable[[Data], Data], *, invert: bool = False) -> Self:
        """Add a transform after the others; ``invert=True`` applies it to written batches instead."""
        return self.insert_transform(len(self.parts.transform), transform, invert=invert)

    @operation
    def insert_transform(self, index: int, transform: Callable[[Data], Data], *, invert: bool = False) -> Self:
        """Add a transform before the one at ``index``."""
        self.parts.insert_transform(index, transform, invert)
        return self

    @operation
    def set_rng(self, generator: torch.Generator | None) -> None:
        """Start a new random stream, seeded by ``generator``. A batch ahead is thrown away."""
        self.parts.set_rng(generator)

    @operation
    def set_storage(self, storage: TensorStorage, collate_fn: Callable[[Data], Data] | None = None) -> TensorStorage:
        """Replace the storage and the ``collate_fn``; the sampler starts afresh. Returns the storage before.

        Args:
            storage: the new one, or a function that returns it.
            collate_fn: applied to gathered batches. Default: none, whatever the constructor was given.
        """
        return self.parts.set_storage(storage, collate_fn)

    @operation
    def set_sampler(self, sampler: Sampler) -> Sampler:
        """Replace the sampler; rows already stored count as new to it. Returns the one before."""
        return self.parts.set_sampler(sampler)

    @operation
    def set_writer(self, writer: Writer) -> Writer:
        """Replace the writer. Returns the one before."""
        return self.parts.set_writer(writer)

    # Writing

    @writing
    def extend(self, data: Data, *, update_priority: bool | None = None) -> Tensor:
        """Write a batch at the cursor; of more rows than the capacity the newest stay. No host sync.

        Args:
            data: ``[n]`` rows (for storages of two dimensions ``[E, T]``, see ``dim_extend``), or a list of rows. It
                is never changed, and may be a view of the rows: see :meth:`TensorStorage.append`. NumPy arrays and
                numbers, and those in dicts, are stored as tensors. An empty list, no rows, or, as the first write, no
                keys: nothing changes.
            update_priority: not for this class (NotImplementedError): see :class:`TensorDictReplayBuffer`.

        A key at the root that no row has had, such as a value that is computed later, is a column from then on, with
        zeros in the rows of before, if the storage can have more (see docs/rows.md).

        Returns:
            The rows' index, int64 ``[n]`` on the storage's device (``[n, ndim]`` for several dimensions): -1 for rows
            that are gone already, because there were more than the capacity.

        Raises:
            ValueError: a key is missing, or can't be one of the rows, or has another shape or dtype; nothing is
                written.
            RuntimeError: another process handed the buffer to this one. So do all methods that add, change or forget
                rows: see docs/writers.md.
        """
        if update_priority is not None:
            raise NotImplementedError("update_priority is for TensorDictReplayBuffer, whose batches carry priorities")
        if type(data) is TensorDict and (index := self.parts.writes.prepared(data)) is not None:
            return index
        return self.parts.write(data, None)

    @writing
    def add(self, data: Data) -> int | Tensor | None:
        """Write one row (of one step of all environments, for storages of several dimensions).

        Returns:
            Its index: an int (None if the writer did not keep it), or int64 ``[n, ndim]`` for storages of several
            dimensions. No host sync.
        """
        cursor = self.parts.storage.cursor
        if type(data) in self._entries_are_keys and self.parts.writes.prepared(data, one_row=True) is not None:
            return cursor
        data = self._row_of(data)
        row = self.parts.storage.as_batch(data, self.dim_extend)
        try:
            index = self.extend(row)
        except ValueError:
            self.parts.writes.refuse_batch(data)
            raise
        if self.parts.storage.ndim > 1 or not index.numel():
            return index
        return cursor if self.parts.writer.in_order else self.parts.writer.added(index)

    def _row_of(self, data: Any) -> Data:
        """One row as it is stored, without a batch dimension."""
        return self.parts.writes.as_tensors(data)

    @property
    def column_keys(self) -> list[Any]:
        """The keys of a row in the order of its columns.

        Raises:
            RuntimeError: nothing has been written yet.
        """
        return self.parts.writes.keys

    @writing
    def extend_columns(self, columns: Arrays) -> None:
        """Write rows given as one array a key: :meth:`extend` without a TensorDict, in less time. No host sync.

        Args:
            columns: NumPy arrays or tensors ``[n, ...]`` by key; for storages of two dimensions ``[E, T, ...]``, see
                ``dim_extend``. After the first write also a list or tuple in the order of :attr:`column_keys`. They
                are read before this returns, and never changed. Lists and Python numbers take the dtype of their key.

        Raises:
            ValueError: a key is missing or none of the rows', has another shape or dtype, or can't hold a number of a
                list; nothing is written.
        """
        if not self.parts.writes.columns(columns, False):
            self.extend(self.parts.writes.as_batch(columns, False))

    @writing
    def add_columns(self, columns: Arrays) -> None:
        """Write one row, given as one array a key, without batch dimensions; or one step of all environments.

        Args:
            columns: as for :meth:`extend_columns`, of the shape of a row; for storages of two dimensions ``[E, ...]``.

        Raises:
            ValueError: as :meth:`extend_columns`. No host sync.
        """
        if not self.parts.writes.columns(columns, True):
            self.add(self.parts.writes.as_batch(columns, True))

    @operation
    def end_trajectories(self, env: int | None = None) -> None:
        """End the trajectories of the newest rows, which nothing stored ends: before the next row begins another one.

        Call it where a program leaves an episode unfinished, as after a restart. The rows stay as they are: windows of
        several steps, slices and hindsight stop there, and values are bootstrapped, as at a truncation. The marks, a
        byte per row from the first call on, are saved, moved and mapped with the rows. No host sync.

        Args:
            env: the environment whose newest row is marked, of a storage of several dimensions. Default: all.

        Raises:
            IndexError: there is no such environment.
            TypeError: rows do not follow each other in this buffer.
        """
        self.parts.end_trajectories(env)

    def client(self, example: Any = None) -> WriterClient:
        """What a writer in another process has in place of the buffer: ``extend``, ``extend_columns``, ``add_columns``.

        Pass it to a process that is started by ``spawn`` or ``forkserver``. Rows that it has written are taken in by
        the next call on this buffer, in its order, exactly once. Rows of different writers are never joined to one
        trajectory. Needs ``writers`` in the constructor.

        Args:
            example: a batch as writers will write it, for a buffer that nothing was written to.

        Returns:
            The client of one writer, who has its place until the process ends or closes it.

        Raises:
            RuntimeError: the buffer has no writers, all places are taken, or nothing tells what a row is.
            TypeError: rows hold other things than tensors. No host sync.
        """
        if self.parts.intake is None:
            self.parts.storage.check_owned()
            raise RuntimeError("this buffer takes rows of its own process alone: make it with writers=, or shared=True")
        return self.parts.intake.client(example)

    @operation
    def empty(self, empty_write_count: bool = True) -> None:
        """Forget every row and priority, in O(1) for the rows; memory stays allocated.

        The next write may have other keys, shapes or dtypes: the memory is then released, and allocated anew. A buffer
        with writers in other processes, or with rows in files, keeps the form of its rows.

        Args:
            empty_write_count: let :attr:`write_count` begin again at 0.
        """
        self.parts.forget(empty_write_count)

    # Reading

    @graph_break
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
        batch = self.parts.batches.next(batch_size, False, batches)
        return (batch.data, batch.info) if return_info else batch.data

    @graph_break
    def sample_columns(self, batch_size: int | None = None) -> dict[Any, Tensor]:
        """A batch as one tensor per key, without a TensorDict, whose making can take as long as the draw.

        Args:
            batch_size: number of transitions, B; default: that of the constructor.

        Returns:
            Tensors ``[B, ...]``, which the caller owns, by keys such as ``"reward"`` and ``("next", "reward")``. With
            them ``"index"``, the flat positions of the rows, and ``"index_generation"``, int64 ``[B]`` each, and what
            the sampler has to say (``"priority_weight"`` of prioritized ones).

        Raises:
            RuntimeError: the buffer is empty, or no batch size is known.
            ValueError: the batch size is below 1; or rows are single tensors, or data that are none. No host sync.
        """
        return self.parts.batches.columns(batch_size)

    @operation
    def check(self) -> Report:
        """Look at all rows for what goes wrong in practice: NaN, ends of episodes, rows that don't follow each other.

        ``print`` shows the report to people. Reads the rows in pieces, as they were written, and synchronises.

        Raises:
            TypeError: the rows are no tensors.
        """
        return check(self.parts.storage)

    def __iter__(self) -> Iterator[Any]:
        """Batches of the constructor's ``batch_size``, until the sampler has run out (one epoch) or for ever."""
        if self.parts.batch_size is None:
            raise RuntimeError(
                "Cannot iterate over the replay buffer. Batch_size was not specified: give the constructor a batch_size"
            )
        while True:
            batch = self.parts.batches.next(None, self._samples_have_info)
            yield batch.data
            if batch.ran_out:
                return

    @graph_break
    def next(self) -> Any:
        """The next batch, or None if the sampler has run out."""
        return next(iter(self), None)

    # Priorities

    @operation
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
        self.parts.storage.changing(self.parts.sampler.update_priority, index, priority, generation=generation)

    def _update_from_batch(self, batch: Any) -> None:
        raise TypeError(
            "update_priority needs the index and the priority of rows: a batch that carries both goes to "
            "update_tensordict_priority of a TensorDictReplayBuffer"
        )

    @operation
    def mark_update(self, index: Any) -> None:
        """Rows were written elsewhere (``buffer[i] = ...``, or through the storage): treat them as new."""
        self.parts.storage.changing(self.parts.storage.followers.mark_update, index)

    # Rows by their index

    @operation
    def __getitem__(self, index: Any) -> Data:
        """Rows by index, transformed. Ints and slices give views of the storage, all else copies, in the index's shape.

        A buffer with transforms or a ``collate_fn`` gives copies only.
        A key gives one key of all rows: ``buffer["next", "reward"]`` is ``buffer[:]["next", "reward"]``. Of a storage
        of two dimensions, ints, slices and keys see the rows as they were written: ``[E, T]``, or ``[T, E]`` with
        ``dim_extend=0``. Tensors, sequences and tuples of tensors are positions as samples carry them.
        """
        if is_key(index):
            return self[:][index]
        return self.parts.rows.read(plain_index(index))

    @operation
    def __setitem__(self, index: Any, data: Data) -> None:
        """Overwrite rows in place, after the inverse transforms.

        Priorities stay as they are: announce the change with :meth:`mark_update`. A sampler of slices indexes all rows
        anew, which is O(capacity).
        """
        self.parts.rows.write(index, data)

    @operation
    def update_if_present(self, index: Any, data: Any, *, generation: Tensor | None = None) -> None:
        """Write some keys of drawn rows back, leaving out rows that were overwritten since. No host sync.

        Of a row that the batch has more than once, the last entry wins. Other keys of the rows stay as they are, and so
        do priorities: update them by ``update_priority``. If a key is written that tells where trajectories end, the
        sampler indexes all rows anew, which is O(capacity). Values are written as they are: no processing is undone.

        An n-step batch has the index of the rows that were drawn. Its keys under "next" and its rewards are those of
        other rows too, and can't be written back.

        Args:
            index: ``info["index"]`` of a sample, in any shape: ``[n]``, ``[K, B]``, ``[..., ndim]`` for storages of
                several dimensions, or a tuple of one tensor per dimension.
            data: a TensorDict with the keys to write, nested ones too, an entry for each row of the index. Of a storage
                of plain tensors: a tensor. It is never changed. ``"index"`` and other info of a sample
                are not written unless they are stored keys.
            generation: ``info["index_generation"]``; default: that in ``data``. Samples of prioritized buffers have it,
                and those of others with ``RoundRobinWriter(track_generations=True)``.

        Raises:
            RuntimeError: nothing has been written yet.
            NotImplementedError: the rows are objects without keys.
            ValueError: there is no generation, or ``data`` has keys that are not stored, that have no memory of their
                own (``share_next``), or that an n-step batch has from other rows; or another shape or
                dtype. Nothing is written.
            IndexError: an index is out of range (CPU; a GPU skips the row and counts a fault). One of -1 (all
                coordinates) is that of a row that is gone.
        """
        self.parts.rows.prepare(index, data, generation=generation)()

    # Questions about the buffer

    @property
    @graph_break
    def write_count(self) -> int:
        """Number of rows written since the buffer was made, or since :meth:`empty`. No host sync."""
        self.parts.finish_interrupted()
        return self.parts.writer.write_count

    @graph_break
    def __len__(self) -> int:
        self.parts.finish_interrupted()
        return len(self.parts.storage)

    @operation
    def can_sample(self, batch_size: int | None = None) -> bool:
        """Whether :meth:`sample` would give a batch now.

        Samplers of slices look for a trajectory that is long enough, which synchronises with a GPU. Others only need
        the number of rows, and don't.

        Args:
            batch_size: default: that of the constructor.

        Raises:
            RuntimeError: no batch size is known, or it is not a multiple of the slices.
        """
        n = self.parts.batch_size if batch_size is None else batch_size
        if n is None:
            raise RuntimeError("batch_size must be given to can_sample() or to the constructor")
        return self.parts.sampler.can_sample(self.parts.storage, n)

    # Data sets

    as_dataset = datasets.as_dataset
    export = datasets.export

    # Memory

    memory = moving.memory
    to = moving.to

    @operation
    def free(self) -> None:
        """Forget everything, and release the memory of rows and index; the next write allocates anew. Synchronises.

        Raises:
            NotImplementedError: the rows lie in files; ``empty()`` forgets them.
            IndexError: a GPU has refused rows out of range before. The memory is released all the same.
        """
        self.parts.discard()
        self.parts.storage.free()

    # State

    @operation
    def state_dict(self) -> dict[str, Any]:
        """Everything that is needed to go on with the same batches. Row tensors are views. Synchronises.

        A random stream that has no seed yet, before the first draw of a buffer without ``generator``, has none after a
        load either.
        """
        return self.parts.state_dict()

    load_state_dict = restore.load_state_dict
    save = shards.save
    load = shards.load

    # Copies, which have memory of their own, and other processes

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        passing.register(cls)
        extends = next(base for base in cls.__mro__ if "extend" in vars(base))
        if not extends.__module__.startswith("gpubuf."):
            # A program's own extend() gets single rows too.
            cls._entries_are_keys = ()

    def __getstate__(self) -> dict[str, Any]:
        return passing.state_of(self)

    __setstate__ = passing.restore

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        other = type(self).__new__(type(self))
        other.__setstate__(self.__getstate__())
        return other

    def __repr__(self) -> str:
        named = f"storage={self.storage!r},\n  sampler={self.sampler!r},\n  batch_size={self.batch_size}"
        return f"{type(self).__name__}(\n  {named})"


passing.register(ReplayBuffer)
