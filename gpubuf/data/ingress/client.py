"""The writer's end: what a process that collects rows has in place of the buffer."""

from __future__ import annotations

import contextlib
import math
import os
import threading
import time
import weakref
from collections.abc import Mapping
from typing import Any

import numpy as np
from tensordict import TensorDict
from torch import Tensor

from gpubuf.data.ingress.queues import OTHER_ROWS, Queues, as_bits, of_bits, start_of, wait
from gpubuf.data.prepared_writes import Arrays
from gpubuf.data.samplers.priorities import refuse_unusable
from gpubuf.data.storage.containers import batch_shape, mapped, numpy_dtype, stacked, tensors_of
from gpubuf.data.storage.layout import Key, as_key, as_written
from gpubuf.data.storage.schema import Source, stored_as
from gpubuf.data.storage.tree_layout import layout_of
from gpubuf.data.writing import tensordict_of

_CHECK_EVERY = 0.25
"""Seconds between two looks at whether the learner is there."""


class WriterClient:
    """Writes rows to a buffer of another process. :meth:`gpubuf.ReplayBuffer.client` makes it.

    Pass it to a process that is being started, which has it as its own then. A write returns when its rows are in
    shared memory: they are acknowledged. The learner takes them in at its next call, in the order of this writer, each
    exactly once. Rows of different writers are never parts of one trajectory.

    May be used by several threads of one process; each call is one step for them. The first write takes a place of the
    buffer's, which is free again when the process ends or closes the client.

    Args:
        queues: those of the buffer.
        ndim, time_dim: dimensions of a written batch, and the one along which time runs.
        timeout: seconds to wait for room; None: any number.
        priority: the key of the column that has the rows' priorities; ``()``: they bring none.
        integers: how the columns are stored that become integers of another dtype.

    Attributes:
        place: the number of its place; None: it has none yet.
    """

    place: int | None

    def __init__(
        self,
        queues: Queues,
        ndim: int,
        time_dim: int,
        timeout: float | None,
        priority: Key,
        integers: Mapping[int, Source],
    ) -> None:
        self._queues, self._ndim, self._time_dim, self._timeout = queues, ndim, time_dim, timeout
        self._priority, self._integers = priority, integers
        self._connect()

    def _connect(self) -> None:
        self._one_at_a_time = threading.Lock()
        self._process = os.getpid()
        self.place = None
        self._published = 0
        self._has_written = self._closed = False
        self._looked = 0.0
        self._detach: Any = None
        self._know_rows()

    def _know_rows(self) -> None:
        rows = self._queues.rows
        if self._queues.settled:
            # How these are stored shows when the learner has them.
            self._integers = {}
        # For columns that need no conversion: by their keys, the dtype as PyTorch and as NumPy have it, and the shape.
        self._keys = {
            as_written(leaf.key): (leaf.dtype, numpy_dtype(leaf.dtype), (*rows.envs, *leaf.shape))
            for leaf in rows.layout.leaves
        }

    def __getstate__(self) -> dict[str, Any]:
        """As one that was never used."""
        names = ("_queues", "_ndim", "_time_dim", "_timeout", "_priority", "_integers")
        return {name: vars(self)[name] for name in names}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._connect()

    @property
    def column_keys(self) -> list[Any]:
        """The keys of a row in the order of its columns."""
        return list(self._keys)

    @property
    def learner(self) -> int:
        """The process of the buffer."""
        return self._queues.learner[0]

    @property
    def written(self) -> tuple[int, int]:
        """Rows written to the buffer since it was empty, of which the newest are there, and its ``write_count``.

        What writers have written counts as soon as it is acknowledged. No host sync.
        """
        return self._queues.stored

    def extend(self, data: Any) -> int:
        """Write a batch, or a list of rows: as :meth:`ReplayBuffer.extend` takes it, from any device.

        Args:
            data: ``[n]`` rows (for buffers of two dimensions ``[E, T]``, or ``[T, E]`` with ``dim_extend=0``). It is
                never changed, and may be changed once this has returned.

        Returns:
            The number of rows.

        Raises:
            ValueError: a key is missing or unknown, or has another shape or dtype; a priority is NaN, infinite or
                negative; or a number is none that its column can hold (``dtypes``). Nothing is written.
            TimeoutError: the queue was full, or ``ratio=`` held the writer back, for the timeout. Some of the rows may
                be written.
            RuntimeError: the learner has ended, closed the buffer, or has rows of another layout now; processes write
                at all places; or the client is closed. Some of the rows may be written.
        """
        data = tensors_of(data)
        if isinstance(data, list):
            if not data:
                return 0
            data = stacked(data)
        if self._time_dim:
            data = mapped(data, lambda value: value.transpose(0, self._time_dim))
        return self._write_batch(data, plain=False)

    def extend_columns(self, columns: Arrays) -> None:
        """Write rows given as one array per key: as :meth:`ReplayBuffer.extend_columns`.

        Raises:
            ValueError, TimeoutError, RuntimeError: as :meth:`extend`.
        """
        self.write_columns(columns, one_step=False)

    def add_columns(self, columns: Arrays) -> None:
        """Write one row, or one step of all environments: as :meth:`ReplayBuffer.add_columns`.

        Raises:
            ValueError, TimeoutError, RuntimeError: as :meth:`extend`.
        """
        self.write_columns(columns, one_step=True)

    def close(self) -> None:
        """Say that no more rows come: another writer can have the place. What was written stays."""
        self._in_this_process()
        with self._one_at_a_time:
            self._closed = True
            if self._detach is not None:
                self._detach()

    def __enter__(self) -> WriterClient:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"{type(self).__name__}(place={self.place})"

    # Rows as arrays

    def write_columns(self, columns: Arrays, *, one_step: bool) -> None:
        """:meth:`add_columns` or :meth:`extend_columns`."""
        if not isinstance(columns, Mapping):
            if len(columns) != len(self._keys):
                raise ValueError(f"a row has the {len(self._keys)} columns {list(self._keys)}, got {len(columns)}")
            columns = dict(zip(self._keys, columns, strict=True))
        sources = self._as_they_are(columns, one_step)
        if sources is not None and self._write(sources, len(sources[0])):
            return
        leaves = self._queues.rows.layout.leaves
        data = tensordict_of(columns, self._ndim - one_step, {leaf.key: leaf.dtype for leaf in leaves})
        if one_step:
            data = data.unsqueeze(self._time_dim)
        if self._time_dim:
            data = data.transpose(0, self._time_dim)
        missing = [as_written(leaf.key) for leaf in leaves if leaf.key not in map(as_key, data.keys(True, True))]
        if missing and not self._settle(data):
            raise ValueError(f"the columns differ from the buffer's keys: missing {missing}")
        self._write_batch(data, plain=True)

    def _as_they_are(self, columns: Mapping[Any, Any], one_step: bool) -> list[np.ndarray] | None:
        """Columns by time that need no conversion; None: some do, or are not what a row has."""
        if columns.keys() != self._keys.keys():
            return None
        found: list[np.ndarray] = []
        turned = 0 if one_step else self._time_dim
        n: int | None = 1 if one_step else None
        for key, (tensor_dtype, dtype, shape) in self._keys.items():
            value = columns[key]
            if type(value) is Tensor and value.dtype is tensor_dtype:
                value = as_bits(value)
            elif type(value) is not np.ndarray or dtype is None or value.dtype != dtype:
                return None
            if one_step:
                value = value[None]
            elif turned:
                value = value.swapaxes(0, turned) if value.ndim > turned else value
            if n is None:
                n = len(value) if value.ndim else 0
            if value.shape != (n, *shape):
                return None
            found.append(value)
        return found

    # The queue

    def _write_batch(self, data: Any, *, plain: bool) -> int:
        """Write a batch by time, and then environments. Returns the number of rows."""
        while True:
            try:
                tensors, shape = self._collected(data, plain)
            except ValueError:
                if not self._settle(data):
                    raise
            else:
                if self._write([as_bits(tensor) for tensor in tensors], shape[0]):
                    return math.prod(shape)

    def _collected(self, data: Any, plain: bool) -> tuple[list[Tensor], tuple[int, ...]]:
        """The tensors of a batch and its shape; ``plain``: it is a TensorDict, whatever a row is.

        Raises:
            ValueError: it has other keys, shapes or dtypes.
        """
        rows = self._queues.rows
        shape = tuple(batch_shape(data, self._ndim))
        tensors = (rows.layout.plain if plain else rows.layout).collect(data, self._ndim)
        if shape[1:] != rows.envs:
            raise ValueError(f"a step of the buffer is of {rows.envs} environments, the batch of {shape[1:]}")
        return tensors, shape

    def _settle(self, data: Any) -> bool:
        """Say that rows are like those of a batch, if the buffer has none yet. Returns whether they are others now."""
        found = self._queues.follow()
        if not found and type(data) is TensorDict:
            layout = layout_of(data, self._ndim)
            if not (layout.host or layout.nested_batch):
                found = self._queues.settle(layout, tuple(data.batch_size[1 : self._ndim]))
        if found:
            self._know_rows()
        return found

    def _check(self, columns: list[np.ndarray]) -> None:
        """What is acknowledged can't be refused any more, and the learner would have to.

        Raises:
            ValueError: a priority is none, or a number is none that its column can hold.
        """
        layout = self._queues.rows.layout
        leaves, priority = layout.leaves, layout.position(self._priority) if self._priority else None
        if priority is not None:
            refuse_unusable(of_bits(columns[priority], leaves[priority].dtype))
        for position, source in self._integers.items():
            leaf = leaves[position]
            numbers = (of_bits(columns[position], leaf.dtype).double() - source.codec.offset) / source.codec.scale
            stored_as(numbers.round(), source.stored, leaf.name)

    def _write(self, sources: list[np.ndarray], n: int) -> bool:
        """Write steps. False: rows are others than they were; nothing was written."""
        self._check(sources)
        self._in_this_process()
        with self._one_at_a_time:
            queues, start, place = self._queues, 0, self._ready()
            while start < n:
                count = self._room(place, min(n - start, queues.rows.steps))
                # Nobody may say that rows are others once one is published.
                with contextlib.nullcontext() if self._has_written else queues.exclusive():
                    if not self._has_written and queues.follow():
                        self._know_rows()
                        return False
                    queues.fill(place, self._published, sources, start, count)
                    # In the mirror first: steps that an interrupt leaves unpublished are whole, and go with later ones.
                    self._published += count
                    queues.publish(place, self._published)
                    self._has_written = True
                start += count
                # Whoever leaves takes all that it finds then.
                self._check_left()
            return True

    def _in_this_process(self) -> None:
        """A forked process has a copy of the client of its parent: it begins anew."""
        if self._process != os.getpid():
            self._connect()

    def _ready(self) -> int:
        """The place of this client, after a look at whether all is as it should be.

        Raises:
            RuntimeError: it is not.
        """
        if self._closed:
            raise RuntimeError("this client was closed: ask the buffer for a client() anew")
        if self.place is None:
            self._check_learner()
            try:
                wait(self._has_place, self._timeout)
            except TimeoutError:
                raise TimeoutError(
                    f"all free places had rows of writers before for {self._timeout} s: the learner, process "
                    f"{self.learner}, is alive, and made no call on its buffer that took them in"
                ) from None
            assert self.place is not None
            self._published = self._queues.published(self.place)
            # Of a client that was used here: the place of a process that ends is free anyway.
            self._detach = weakref.finalize(self, self._queues.detach, self.place, self._process)
        elif time.monotonic() - self._looked > _CHECK_EVERY:
            self._check_learner()
        self._check_left()
        return self.place

    def _has_place(self) -> bool:
        self.place = self._queues.claim()
        return self.place is not None

    def _check_left(self) -> None:
        left, pid = self._queues.left, self.learner
        if left == OTHER_ROWS:
            raise RuntimeError(
                f"the buffer of process {pid} has rows of other keys, shapes or dtypes now: ask it for a client() anew"
            )
        if left:
            raise RuntimeError(f"the buffer of process {pid} takes no more rows: it was closed, or is gone")

    def _check_learner(self) -> None:
        pid, start = self._queues.learner
        self._check_left()
        if start_of(pid) != start:
            raise RuntimeError(f"the learner, process {pid}, has ended: rows that it had not saved are lost")
        self._looked = time.monotonic()

    def _room(self, place: int, wanted: int) -> int:
        """Wait until steps may be written. Returns their number, up to ``wanted``: fewer if ``ratio`` lets fewer."""
        found = self._fits(place, wanted)
        if found > 0:
            return found

        def again() -> bool:
            nonlocal found
            if time.monotonic() - self._looked > _CHECK_EVERY:
                self._check_learner()
            found = self._fits(place, wanted)
            return found > 0

        try:
            with self._queues.blocking(place):
                wait(again, self._timeout)
        except TimeoutError:
            raise TimeoutError(self._why_blocked(place, wanted)) from None
        return found

    def _fits(self, place: int, wanted: int) -> int:
        return self._queues.allowed(wanted) if self._queues.room(place, self._published) >= wanted else 0

    def _why_blocked(self, place: int, wanted: int) -> str:
        queues, pid = self._queues, self.learner
        room, steps = queues.room(place, self._published), queues.rows.steps
        if room >= wanted:
            return (
                f"ratio= held this writer back for {self._timeout} s: the learner, process {pid}, has drawn too few "
                f"samples for {wanted} steps more"
            )
        return (
            f"the queue of {steps} steps was full for {self._timeout} s: the learner, process {pid}, is alive, and "
            f"made no call on its buffer that took rows in ({steps - room} steps wait, {wanted} are to be written)"
        )
