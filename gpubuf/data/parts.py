"""The parts of a buffer, how one of them is replaced, and what is made of them: batches, writes, and rows by index."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Protocol

import torch
from torch import Tensor

from gpubuf.data.arguments import check_sizes, component
from gpubuf.data.batches import Batches
from gpubuf.data.hindsight import Hindsight
from gpubuf.data.ingress.intake import Intake
from gpubuf.data.mending import forget, mend
from gpubuf.data.operation import Operation
from gpubuf.data.prefetch import PrefetchedInGraphs, prefetched
from gpubuf.data.processing.pipeline import Pipeline
from gpubuf.data.recording import EMPTIES, REPLAY
from gpubuf.data.samplers.base import Sampler
from gpubuf.data.samplers.row_order import RowOrder
from gpubuf.data.samplers.slices import SliceSampler
from gpubuf.data.samplers.uniform import RandomSampler
from gpubuf.data.storage.containers import Data
from gpubuf.data.storage.lazy import LazyTensorStorage
from gpubuf.data.storage.plan import Recipe, RowPlan
from gpubuf.data.storage.storage import TensorStorage
from gpubuf.data.transforms import Compose, stacks_of, with_stacks, with_statistics, without_multi_steps
from gpubuf.data.updates import RowAccess
from gpubuf.data.writers import RoundRobinWriter, Writer
from gpubuf.data.writing import Writes
from gpubuf.kernels import philox

DEFAULT_CAPACITY = 1_000
"""Rows of a buffer that is given no storage."""

# Between the seeds of two copies.
_APART = 0x9E3779B97F4A7C15
#: Made anew of the other parts. A copy gets its own: they have locks and addresses.
_MADE = ("operation", "batches", "writes", "rows", "row_order", "reader")

#: Every row is a transition.
_TRANSITIONS = Recipe()


class Parts:
    """What a buffer is made of, and what is made of that, anew when a part is replaced.

    Its constructor takes them as that of the buffer does; ``recipe`` and ``process`` say how batches are made, but for
    what ``transform`` adds. Methods that change something are called within an operation.

    Attributes:
        storage, sampler, writer: as the buffer has them.
        transform: the transforms of batches.
        pipeline: what the launch that copies the rows does to keys, and statistics of written rows.
        recipe: how a batch is made of rows.
        relabel: gives rows of a batch other goals; None: they keep theirs.
        collate_fn: applied to gathered batches; None: that of the storage.
        pin_memory: whether batches end in pinned memory.
        prefetch: whether the next batch is made ahead where that pays.
        batch_size: that of the buffer's constructor.
        dim_extend: the dimension of a written batch along which time runs; None: the last of the storage's.
        priority_key: where written rows carry their priorities; ``()``: nowhere.
        intake: takes in the rows of writers in other processes; None: there are none.
        operation: runs what the buffer does.
        batches, writes, rows: make batches, write rows, and read and change rows by their index.
        reader: reads the storage by the recipe.
        row_order: looks at the order of written rows, where something depends on it.
    """

    def __init__(
        self,
        storage: Any,
        sampler: Any = None,
        writer: Any = None,
        recipe: Recipe = _TRANSITIONS,
        process: Any = (),
        transform: Callable[[Data], Data] | None = None,
        *,
        relabel: Hindsight | None = None,
        collate_fn: Callable[[Data], Data] | None = None,
        pin_memory: bool = False,
        prefetch: int | None = None,
        batch_size: int | None = None,
        dim_extend: int | None = None,
        priority_key: str | tuple[str, ...] = (),
    ) -> None:
        check_sizes(prefetch, batch_size)
        self.sampler: Sampler = component(RandomSampler if sampler is None else sampler, Sampler)
        self.storage = storage_of(storage, self.sampler)
        self.writer: Writer = component(RoundRobinWriter if writer is None else writer, Writer)
        self.writer.register_storage(self.storage)
        if dim_extend is not None and not 0 <= dim_extend < self.storage.ndim:
            raise ValueError(f"dim_extend is {dim_extend}, but the storage has {self.storage.ndim} dimension(s)")
        self.pipeline = with_statistics(Pipeline.of(process), transform)
        transform, recipe = without_multi_steps(transform, replace(recipe, processing=self.pipeline or None))
        self.recipe = with_stacks(recipe, transform)
        self.transform = Compose() if transform is None else Compose([transform])
        self.intake: Intake | None = None
        self.relabel = relabel
        self.collate_fn, self.pin_memory, self.batch_size = collate_fn, pin_memory, batch_size
        self.prefetch = bool(prefetch)
        self.dim_extend, self.priority_key = dim_extend, priority_key

    def connect(self) -> None:
        """Make the operation of a new buffer, and what is made of its parts.

        Raises:
            TypeError: the writer can't write where the sampler says.
            ValueError: a part can't be used with another.
        """
        self.operation = Operation(self.storage, self.mend)
        self.sampler.bind(self.storage, self.operation)
        self.assemble()

    def take_in(self, intake: Intake) -> None:
        """Take in the rows of writers in other processes, before each operation."""
        self.storage.mark_writers()
        self.intake, self.operation.intake = intake, weakref.WeakMethod(intake.at_call)
        self.assemble()

    def assemble(self) -> None:
        """Make batches and writes of the parts that there are now. Raises as :meth:`connect`."""
        storage, sampler, writer = self.storage, self.sampler, self.writer
        self.pipeline.attach(self.operation)
        slices = isinstance(sampler, SliceSampler)
        in_order = slices or not self.recipe.takes_single_rows or self.relabel is not None
        self.row_order = RowOrder(self.recipe, self.time_dim, refused=slices) if in_order else None
        self.writes = Writes(
            storage,
            writer,
            sampler,
            self.transform,
            self.pipeline,
            self.row_order,
            dim_extend=self.time_dim,
            priority_key=self.priority_key,
        )
        if self.intake is not None:
            self.intake.serve(self.writes, self.recipe, in_order=in_order)
        reader = self._reader_of(storage)
        for stack in stacks_of(self.transform):
            stack.attach(self.operation, storage, self.recipe, self.time_dim)
        writer.attach(sampler, self.recipe, self.relabel)
        if self.relabel is not None:
            self.relabel.check_recipe(self.recipe, self.pipeline.process)
            storage.readers.serve(self.relabel)
        if sampler.reader is not reader:
            sampler.read_from(reader)
        self.reader = reader
        before = vars(self).get("batches")
        self.batches = (prefetched(storage, sampler) if self.prefetch else Batches)(
            storage,
            reader,
            sampler,
            writer,
            self.transform,
            self.operation,
            collate_fn=self.collate_fn or storage.default_collate,
            pin_memory=self.pin_memory,
            batch_size=self.batch_size,
            relabel=self.relabel,
            gate=None if self.intake is None else self.intake.gate,
        )
        if isinstance(before, PrefetchedInGraphs):
            before.replaced_by(self.batches)
        self.rows = RowAccess(storage, writer, self.transform, self.collate_fn, self.recipe, self.time_dim)

    @property
    def time_dim(self) -> int:
        """The dimension of a written batch along which time runs."""
        return self.storage.ndim - 1 if self.dim_extend is None else self.dim_extend

    def _reader_of(self, storage: TensorStorage) -> RowPlan:
        """Reads ``storage`` by the recipe."""
        if not self.recipe.is_plain:
            self.sampler.check_recipe(self.recipe)
        return storage.readers.of(self.recipe)

    def discard(self) -> None:
        """Before parts or memory are given up: no batch is ahead, and all streams wait for the last operation."""
        self.batches.discard()
        self.operation.settle()

    def mend(self) -> None:
        """Finish an interrupted operation. The next one calls this."""
        mend(self.storage, self.writer)

    def finish_interrupted(self) -> None:
        """Called before the host's mirror of the counters is read. Rows that have arrived count."""
        if self.storage.unfinished is not None or self.intake is not None:
            self.operation.mend()

    # Changing rows

    def write(self, data: Data, priority: Callable[[Data], Tensor | None] | None) -> Tensor:
        """Write a batch: see :meth:`~gpubuf.data.writing.Writes.extend`."""
        is_first = self.prefetch and not self.storage.initialized
        index = self.writes.extend(data, priority)
        if is_first:
            # Where the rows are decides how batches are made.
            self.assemble()
        return index

    def end_trajectories(self, env: int | None) -> None:
        """See :meth:`gpubuf.ReplayBuffer.end_trajectories`."""
        storage = self.storage
        if not self.writer.in_order or storage.takes_objects:
            raise TypeError("the rows of this buffer do not follow each other: there are no trajectories to end")
        storage.check_owned()
        if storage.initialized:
            storage.changing(storage.end_trajectories, env)

    def forget(self, recount: bool) -> None:
        """Forget every row and priority: see :meth:`gpubuf.ReplayBuffer.empty`."""
        self.writer.check_writable()
        self.discard()
        empties = EMPTIES._replace(recounts=recount)
        self.storage.changing(forget, self.storage, self.writer, recount, what=empties)

    # Replacing them

    def insert_transform(self, index: int, transform: Callable[[Data], Data], invert: bool) -> None:
        """See :meth:`gpubuf.ReplayBuffer.insert_transform`."""
        rest, recipe = without_multi_steps(transform, self.recipe)
        recipe = recipe if invert else with_stacks(recipe, rest)
        for stack in [] if invert else stacks_of(rest):
            stack.attach(self.operation, self.storage, recipe, self.time_dim)
        pipeline = self.pipeline if invert else with_statistics(self.pipeline, transform)
        if pipeline is not self.pipeline:
            recipe = replace(recipe, processing=pipeline or None)
            if self.storage.initialized:
                recipe.check_rows(self.storage.schema)
        if recipe is not self.recipe:
            self.batches.discard()
            self._set(pipeline=pipeline, recipe=recipe)
        if rest is not None:
            self.transform.insert(index, rest, invert=invert)

    def set_rng(self, generator: torch.Generator | None) -> None:
        """Start a new random stream, and throw a batch ahead away."""
        if generator is not None and not isinstance(generator, torch.Generator):
            raise TypeError(f"generator must be a torch.Generator or None, got {generator!r}")
        self.discard()
        self.sampler.set_rng(generator)
        self.pipeline.set_rng(generator)

    def set_storage(self, storage: Any, collate_fn: Callable[[Data], Data] | None) -> TensorStorage:
        """Replace the storage. Returns the one before: after an error it stays, with all that is known of its rows."""
        self.discard()
        new: TensorStorage = component(storage, TensorStorage)
        if self.intake is not None:
            new.mark_writers()
        # Raise before anything is replaced.
        self._reader_of(new)
        if self.relabel is not None:
            new.readers.serve(self.relabel)
        before, collate, put_back = self.storage, self.collate_fn, self.sampler.as_bound()
        try:
            # Rows that are there are new to the sampler.
            self.sampler.unbind()
            self.sampler.bind(new, self.operation)
            self._serve(new, collate_fn)
        except BaseException:
            put_back()
            self._serve(before, collate)
            raise
        return before

    def _serve(self, storage: TensorStorage, collate_fn: Callable[[Data], Data] | None) -> None:
        self.writer.register_storage(storage)
        self.storage = self.operation.storage = storage
        self.collate_fn = collate_fn
        self.assemble()

    def set_sampler(self, sampler: Any) -> Sampler:
        """Replace the sampler. Returns the one before, which stays after an error."""
        self.discard()
        before, new = self.sampler, component(sampler, Sampler)
        if new is not before:
            new.check_recipe(self.recipe)
            put_back, put_new_back = before.as_bound(), new.as_bound()
            try:
                new.bind(self.storage, self.operation)
                before.unbind()
                self.sampler = new
                self.assemble()
            except BaseException:
                # The new one may serve another buffer, which goes on.
                put_new_back()
                put_back()
                self._set(sampler=before)
                raise
        return before

    def set_writer(self, writer: Any) -> Writer:
        """Replace the writer. Returns the one before, which stays after an error."""
        self.discard()
        before, new = self.writer, component(writer, Writer)
        new.register_storage(self.storage)
        self._set(writer=new)
        return before

    def _set(self, **parts: Any) -> None:
        before = {name: getattr(self, name) for name in parts}
        try:
            vars(self).update(parts)
            self.assemble()
        except BaseException:
            vars(self).update(before)
            self.assemble()
            raise

    # Copies, which have memory of their own, and forked processes

    def settle(self) -> None:
        """Before a copy is made: what is random is seeded, and no batch is ahead."""
        self.batches.discard()
        if self.storage.initialized:
            # A stream that is seeded only later would not be the same in the copy.
            self.sampler.random_state(self.storage.device)

    def __getstate__(self) -> dict[str, Any]:
        """Without what is made anew. Writers write to the buffer that made their clients."""
        return {name: value for name, value in vars(self).items() if name not in _MADE} | {"intake": None}

    def begin_anew(self, number: int) -> None:
        """In a forked process, copy ``number``: see :mod:`gpubuf.data.passing`."""
        own, storage = self.operation, self.storage
        storage.owner = storage.owner or os.getppid()
        if own.abandon() and storage.initialized:
            storage.unfinished = storage.unfinished or REPLAY
        if own.gpu() is None:
            # A process forked from one that uses CUDA can't use it.
            self.batches.discard()
            self.draw_apart(number)
        self.assemble()

    def draw_apart(self, number: int) -> None:
        """Go on with the random streams of copy ``number``."""
        if self.storage.initialized:
            # Later it would have the same seed in all copies.
            self.sampler.random_state(self.storage.device)
        for random in (self.sampler.random, self.pipeline.random):
            if random is not None:
                # Seeds of any two copies differ, and are not near those that people choose. They wrap at 64 bits.
                random.state[philox.SEED] += (number * _APART + 2**63) % 2**64 - 2**63

    # State

    def state_dict(self) -> dict[str, Any]:
        """See :meth:`gpubuf.ReplayBuffer.state_dict`."""
        if self.intake is not None:
            self.intake.take(everything=True)
        self.batches.discard()
        state = {
            "_storage": self.storage.state_dict(),
            "_sampler": self.sampler.state_dict(),
            "_writer": self.writer.state_dict(),
            "_transforms": self.transform.state_dict(),
            "_batch_size": self.batch_size,
        }
        if self.pipeline:
            state["_processing"] = self.pipeline.state_dict()
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over a state that was checked."""
        self.transform.load_state_dict(state["_transforms"])
        if self.pipeline:
            self.pipeline.load_state_dict(state["_processing"])
        order = self.storage.load_state_dict(state["_storage"])
        self.sampler.load_state_dict(state["_sampler"], order)
        self.writer.load_state_dict(state["_writer"])
        self.batch_size = state["_batch_size"]
        self.assemble()


class Assembled(Protocol):
    """A buffer, to functions elsewhere: its parts, and what runs its operations."""

    parts: Parts
    operation: Operation


def storage_of(given: Any, sampler: Sampler | None = None) -> TensorStorage:
    """The storage that a buffer begins with: see :class:`ReplayBuffer`."""
    if given is None:
        # A sampler may tell of how many rows it has the priorities.
        given = getattr(sampler, "max_capacity", DEFAULT_CAPACITY)
    if type(given) is int:
        return LazyTensorStorage(given)
    storage: TensorStorage = component(given, TensorStorage)
    return storage
