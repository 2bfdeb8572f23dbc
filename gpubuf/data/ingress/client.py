"""The writer's end: what a process that collects rows has in place of the buffer."""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections.abc import Mapping
from typing import Any

import numpy as np
from torch import Tensor

from gpubuf.data.ingress.queues import Queues, as_bits, numpy_dtype, of_bits, start_of, wait
from gpubuf.data.prepared_writes import Arrays
from gpubuf.data.samplers.priorities import refuse_unusable
from gpubuf.data.storage.containers import batch_shape, mapped, tensors_of
from gpubuf.data.storage.layout import RowLayout, as_key, as_written
from gpubuf.data.writing import tensordict_of

_CHECK_EVERY = 0.25
"""Seconds between two looks at whether the learner is there."""


class WriterClient:
    """Writes rows to a buffer of another process. :meth:`gpubuf.ReplayBuffer.client` makes it.

    Pass it to a process that is being spawned. A write returns when its rows are in shared memory: they are
    acknowledged. The learner takes them in at its next call, in the order of this writer, each exactly once. Rows of
    different writers are never parts of one trajectory.

    May be used by several threads of one process; each call is one step for them.

    Args:
        queues: those of the buffer.
        place: the number of its queue.
        number: of this client; the buffer gives each another one.
        learner: the process of the buffer, and when it began.
        time_dim: the dimension of a written batch along which time runs.
        timeout: seconds to wait for room; None: any number.
        priority: the place of the column that has the rows' priorities; None: they bring none.

    Attributes:
        place: the number of its queue.
    """

    def __init__(
        self,
        queues: Queues,
        place: int,
        number: int,
        learner: tuple[int, int],
        time_dim: int,
        timeout: float | None,
        priority: int | None,
    ) -> None:
        self.place = place
        self._queues, self._number, self._learner = queues, number, learner
        self._time_dim, self._timeout, self._priority = time_dim, timeout, priority
        self._connect()

    def _connect(self) -> None:
        rows = self._queues.rows
        self._one_at_a_time = threading.Lock()
        self._process = os.getpid()
        self._published: int | None = None
        self._closed = False
        self._looked = 0.0
        self._detach: Any = None
        # For columns that need no conversion: by their keys, the dtype as PyTorch and as NumPy have it, and the shape.
        self._keys = {
            as_written(leaf.key): (leaf.dtype, numpy_dtype(leaf.dtype), (*rows.envs, *leaf.shape))
            for leaf in rows.layout.leaves
        }

    def __getstate__(self) -> dict[str, Any]:
        if self._published is not None or self._closed:
            raise RuntimeError("this client was used here: ask the buffer for another one for another process")
        names = ("place", "_queues", "_number", "_learner", "_time_dim", "_timeout", "_priority")
        return {name: vars(self)[name] for name in names}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._connect()

    @property
    def column_keys(self) -> list[Any]:
        """The keys of a row in the order of its columns."""
        return list(self._keys)

    def extend(self, data: Any) -> None:
        """Write a batch: as :meth:`ReplayBuffer.extend` takes it, a list of rows excepted, from any device.

        Args:
            data: ``[n]`` rows (for buffers of two dimensions ``[E, T]``, or ``[T, E]`` with ``dim_extend=0``). It is
                never changed, and may be changed once this has returned.

        Raises:
            ValueError: a key is missing or unknown, or has another shape or dtype, or a priority is NaN, infinite or
                negative. Nothing is written.
            TimeoutError: the queue was full for the timeout. Rows of a batch larger than the queue may be written.
            RuntimeError: the learner has ended or closed the buffer, the process was forked, or the client is closed.
        """
        envs, layout = self._queues.rows.envs, self._queues.rows.layout
        data = tensors_of(data)
        if envs and self._time_dim:
            data = mapped(data, lambda value: value.transpose(0, self._time_dim))
        self._write_batch(data, layout)

    def extend_columns(self, columns: Arrays) -> None:
        """Write rows given as one array per key: as :meth:`ReplayBuffer.extend_columns`.

        Raises:
            ValueError, TimeoutError, RuntimeError: as :meth:`extend`.
        """
        self._write_columns(columns, one_step=False)

    def add_columns(self, columns: Arrays) -> None:
        """Write one row, or one step of all environments: as :meth:`ReplayBuffer.add_columns`.

        Raises:
            ValueError, TimeoutError, RuntimeError: as :meth:`extend`.
        """
        self._write_columns(columns, one_step=True)

    def close(self) -> None:
        """Say that no more rows come: another writer can have the place. What was written stays."""
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

    def _write_columns(self, columns: Arrays, *, one_step: bool) -> None:
        if not isinstance(columns, Mapping):
            if len(columns) != len(self._keys):
                raise ValueError(f"a row has the {len(self._keys)} columns {list(self._keys)}, got {len(columns)}")
            columns = dict(zip(self._keys, columns, strict=True))
        sources = self._as_they_are(columns, one_step)
        if sources is not None:
            self._write(sources, len(sources[0]))
            return
        envs, leaves = self._queues.rows.envs, self._queues.rows.layout.leaves
        lead = len(envs) + (0 if one_step else 1)
        data = tensordict_of(columns, lead, {leaf.key: leaf.dtype for leaf in leaves})
        if one_step:
            data = data.unsqueeze(self._time_dim if envs else 0)
        missing = [as_written(leaf.key) for leaf in leaves if leaf.key not in map(as_key, data.keys(True, True))]
        if missing:
            raise ValueError(f"the columns differ from the buffer's keys: missing {missing}")
        if envs and self._time_dim:
            data = data.transpose(0, self._time_dim)
        self._write_batch(data, self._queues.rows.layout.plain)

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

    def _write_batch(self, data: Any, layout: RowLayout) -> None:
        """Write a batch by time, and then environments, of a layout's keys."""
        envs = self._queues.rows.envs
        shape = tuple(batch_shape(data, 1 + len(envs)))
        tensors = layout.collect(data, 1 + len(envs))
        if shape[1:] != envs:
            raise ValueError(f"a step of the buffer is of {envs} environments, the batch of {shape[1:]}")
        self._write([as_bits(tensor) for tensor in tensors], shape[0])

    def _write(self, sources: list[np.ndarray], n: int) -> None:
        if self._priority is not None:
            # What is acknowledged can't be refused any more, and the learner would have to.
            dtype = self._queues.rows.layout.leaves[self._priority].dtype
            refuse_unusable(of_bits(sources[self._priority], dtype))
        with self._one_at_a_time:
            published = self._ready()
            queues, start = self._queues, 0
            while start < n:
                count = self._room(published, min(n - start, queues.rows.steps))
                queues.fill(self.place, published, sources, start, count)
                published, start = published + count, start + count
                queues.publish(self.place, published)
                self._published = published

    def _ready(self) -> int:
        """The number of steps published, after a look at whether all is as it should be.

        Raises:
            RuntimeError: it is not.
        """
        if self._closed:
            raise RuntimeError("this client was closed: ask the buffer for a client() anew")
        if self._process != os.getpid():
            raise RuntimeError(
                "a forked process has the client of its parent, whose writes and its own would mix: start it by "
                "multiprocessing's 'spawn' or 'forkserver', and pass it a client() of its own"
            )
        if self._published is None:
            self._check_learner()
            self._queues.attach(self.place, self._number)
            self._published = self._queues.published(self.place)
            # Of a client that was used here: the place of a process that ends is free anyway.
            self._detach = weakref.finalize(self, self._queues.detach, self.place, self._process)
        elif time.monotonic() - self._looked > _CHECK_EVERY:
            self._check_learner()
        return self._published

    def _check_learner(self) -> None:
        pid, start = self._learner
        if self._queues.left:
            raise RuntimeError(f"the buffer of process {pid} takes no more rows: it was closed, or is gone")
        if start_of(pid) != start:
            raise RuntimeError(f"the learner, process {pid}, has ended: rows that it had not saved are lost")
        self._queues.check_given(self.place, self._number)
        self._looked = time.monotonic()

    def _room(self, published: int, wanted: int) -> int:
        """Wait until ``wanted`` steps may be written. Returns their number."""
        if self._fits(published, wanted):
            return wanted

        def again() -> bool:
            if time.monotonic() - self._looked > _CHECK_EVERY:
                self._check_learner()
            return self._fits(published, wanted)

        try:
            with self._queues.blocking(self.place):
                wait(again, self._timeout)
        except TimeoutError:
            raise TimeoutError(self._why_blocked(published, wanted)) from None
        return wanted

    def _fits(self, published: int, wanted: int) -> bool:
        return self._queues.room(self.place, published) >= wanted and self._queues.allows(wanted)

    def _why_blocked(self, published: int, wanted: int) -> str:
        queues, pid = self._queues, self._learner[0]
        room, steps = queues.room(self.place, published), queues.rows.steps
        if room >= wanted:
            return (
                f"ratio= held this writer back for {self._timeout} s: the learner, process {pid}, has drawn too few "
                f"samples for {wanted} steps more"
            )
        return (
            f"the queue of {steps} steps was full for {self._timeout} s: the learner, process {pid}, is alive, and "
            f"made no call on its buffer that took rows in ({steps - room} steps wait, {wanted} are to be written)"
        )
