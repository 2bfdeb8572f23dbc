"""The way of rows into a buffer: batches, lists of rows, or one array per key."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict
from torch import Tensor

from gpubuf.data.prepared_writes import Arrays, Route, numbers_as
from gpubuf.data.processing.pipeline import Pipeline
from gpubuf.data.recording import at_replays, current
from gpubuf.data.samplers.base import Sampler
from gpubuf.data.samplers.row_order import RowOrder
from gpubuf.data.storage.containers import (
    Data,
    batch_of,
    batch_shape,
    is_array,
    is_data,
    mapped,
    of_array,
    shallow,
    tensors_of,
)
from gpubuf.data.storage.layout import Key, as_key
from gpubuf.data.storage.storage import TensorStorage
from gpubuf.data.storage.tree_layout import inside
from gpubuf.data.storage.widening import widen
from gpubuf.data.transforms import Compose
from gpubuf.data.writers import RoundRobinWriter, Writer
from gpubuf.kernels._registry import runs_at_once


@dataclass(eq=False)
class Writes:
    """Writes rows as users give them, within an operation of the buffer.

    Attributes:
        storage: where they are written to.
        writer: says where rows go.
        sampler: may have a use for priorities that come with the rows.
        transform: its inverse changes the rows.
        pipeline: learns from written rows.
        row_order: looks at the order of the rows, or None.
        dim_extend: the dimension of a written batch along which time runs.
        priority_key: where rows carry their priorities; ``()``: nowhere.
    """

    storage: TensorStorage
    writer: Writer
    sampler: Sampler
    transform: Compose
    pipeline: Pipeline
    row_order: RowOrder | None
    dim_extend: int
    priority_key: Any
    _route: Route | None = None

    # Batches and lists of rows

    def extend(self, data: Data, priority: Callable[[Data], Tensor | None] | None) -> Tensor:
        """Write a batch, or a list of rows; returns their index: see :meth:`~gpubuf.data.buffer.ReplayBuffer.extend`.

        ``priority`` finds the priorities that a batch carries, float32 ``[n]``; None: it carries none.
        """
        storage = self.storage
        storage.check_owned()
        rows = self._rows_of(data)
        try:
            index = no_rows(storage) if rows is None else self._write(rows, priority)
        except ValueError:
            # It is refused, perhaps for keys that no row has had.
            before = storage.rows
            if not (storage.initialized and self.writer.in_order and widen(storage, rows)):
                raise
            try:
                index = self._write(rows, priority)
            except ValueError:
                storage.rewire(copy.copy(before))
                raise
        if index.numel() == 0:
            return no_rows(storage)
        found = storage.unravel(index)
        if index.numel() > storage.max_size and self.writer.in_order:
            # Their places hold later rows of this write.
            found[: -storage.max_size] = -1
        return found

    def prepared(self, data: TensorDict | dict[str, Any], one_row: bool = False) -> Tensor | None:
        """Write a TensorDict, or a dict that could be one, in eager mode; or one row, to a storage of one dimension.

        Returns:
            Its index, of which one row has no need. None: it takes the general way; nothing changed.
        """
        route = None if self.transform.stacks else self._current_route()
        values = None if route is None else route.layout.entries_of(data)
        if route is None or values is None or route.step or not runs_at_once(route.ring):
            return None
        if one_row:
            ready = route.one_step
            # A float of Python, with a name of NumPy's.
            values = [float(value) if type(value) is np.float64 else value for value in values]
        else:
            size = data.batch_size if type(data) is TensorDict else getattr(values[0], "shape", ())
            ready = route.of_size(size[0], keeps_index=True) if size else None
        if ready is None or ready.n > self.storage.max_size or not ready.fill(values):
            return None
        index = self.storage.append_prepared(ready.launch, ready.n)
        if index is not None:
            self._end()
        return index

    def as_tensors(self, data: Any) -> Any:
        """Dicts, lists and arrays without NumPy's, where the storage can't have them."""
        return data if self.storage.takes_objects else tensors_of(data)

    def _rows_of(self, data: Any) -> Data | None:
        """A batch with time first, as it is to be stored; None: there is nothing to write."""
        storage = self.storage
        if not is_data(data):
            data = self.as_tensors(data)
        if isinstance(data, list):
            if not data:
                return None
            data = data if storage.takes_objects else batch_of(data)
        if not self.transform.is_empty:
            # Inverse transforms may set keys in place; the caller's TensorDict must not see them.
            data = self.transform.inv(shallow(data))
        if data is None or not (storage.initialized or storage.allocation.describes_rows(data)):
            return None
        if storage.ndim > 1:
            data = mapped(data, self._time_first)
        if storage.initialized and not storage.ring.size and not self._fits(data):
            count = storage.rows_written
            storage.free()
            storage.ring.skipped = -count
        return data

    def _time_first(self, value: Any) -> Any:
        batch_shape(value, self.storage.ndim)
        return value.transpose(0, self.dim_extend) if self.dim_extend else value

    def _fits(self, data: Data) -> bool:
        """Whether rows are like those that were there before all were forgotten, or memory for others can't be had."""
        storage = self.storage
        if storage.takes_objects or storage.marks.by_writers or not storage.allocation.relocatable:
            return True
        try:
            storage.written_layout.collect(data, storage.ndim)
        except ValueError:
            return False
        return batch_shape(data, storage.ndim)[1:] == tuple(storage.shape[1:])

    def _write(self, data: Data, priority: Callable[[Data], Tensor | None] | None) -> Tensor:
        """Write a batch by the writer. Returns the flat positions of its rows."""
        storage, pipeline, in_order = self.storage, self.pipeline, self.writer.in_order
        if not storage.initialized:
            at_replays().refuse("the first write allocates the storage: write before")
        elif priority is not None or pipeline.learns or not in_order:
            # They read the batch again after some of it is written.
            data = storage.rows.apart(data)
        given = None if priority is None else priority(data)
        if pipeline.learns:
            pipeline.check_write(data, storage.ndim)
        storage.followers.priority = given
        try:
            index = self.writer.extend(data)
        finally:
            # Who completes an interrupted write needs them.
            if storage.unfinished is None:
                storage.followers.priority = None
        if index.numel() and pipeline.learns:
            rows = inside(storage.written_layout, data, storage.ndim)
            pipeline.on_write(rows, storage.ndim, None if in_order else index >= 0, storage.marks.streams)
        self._end()
        return index

    def refuse_batch(self, data: Data) -> None:
        """Raise ValueError if ``data``, which is given as one row, is a batch of rows like those that are stored."""
        storage = self.storage
        if not storage.initialized:
            return
        try:
            storage.written_layout.collect(data, storage.ndim)
            shape = batch_shape(data, storage.ndim)
        except ValueError:
            return
        raise ValueError(f"add() writes one row, and got a batch of shape {list(shape)}: use extend()") from None

    def _end(self) -> None:
        """The rows are written: look at their order."""
        if self.row_order is not None:
            self.row_order.look(self.storage)

    # One array per key

    @property
    def keys(self) -> list[Any]:
        """The keys of a row in the order of its columns."""
        return self.storage.written_layout.keys

    def columns(self, columns: Arrays, one_step: bool) -> bool:
        """Write rows, in eager mode. False: they take the general way, as :meth:`as_batch`, and nothing has changed."""
        route = self._current_route()
        stacks = self.transform.stacks
        if route is None or (stacks and not one_step):
            return False
        index = None
        if runs_at_once(route.ring):
            ready = route.one_step if one_step else route.sized(columns)
            values = None if ready is None else route.in_order(columns)
            for stack in stacks or ():
                values = None if values is None else stack.newest_of(values)
            if ready is not None and values is not None and ready.fill(values):
                index = self.storage.append_prepared(ready.launch, ready.n)
        if index is None and (stacks or (isinstance(columns, Mapping) and len(columns) > len(route.layout.leaves))):
            return False
        if index is None:
            sources, n = route.sources(columns, one_step, self.dim_extend)
            if n == 0:
                return True
            self.storage.append_columns(sources, n)
        self._end()
        return True

    def as_batch(self, columns: Arrays, one_step: bool) -> TensorDict:
        """Columns as a TensorDict, which the buffer can transform and write.

        Raises:
            ValueError: there are none, they have different batch dimensions, or their keys are not known yet.
        """
        storage = self.storage
        lead = storage.ndim - 1 if one_step else storage.ndim
        if not isinstance(columns, Mapping):
            if not storage.initialized:
                raise ValueError(
                    "the first write settles keys and their order: expected a dict of arrays by key, got a "
                    f"{type(columns).__name__}"
                )
            columns = dict(zip(self.keys, columns, strict=True))
        leaves = storage.written_layout.leaves if storage.initialized else []
        return tensordict_of(columns, lead, {leaf.key: leaf.dtype for leaf in leaves})

    # How columns are written

    def _current_route(self) -> Route | None:
        """How columns are written now; None if they become a batch that is written in the general way."""
        route = self._route
        if route is None or not route.fits(self.storage):
            route = self._route = self._new_route()
        if route is None or not route.direct or self.transform.stacks is None or current.recording is not None:
            return None
        # The first rows after all were forgotten may be others.
        return route if self.storage.ring.size else None

    def _new_route(self) -> Route | None:
        """How columns are written now; None before the first write."""
        storage = self.storage
        if not storage.initialized:
            return None
        # Priorities that come with the rows, statistics and other writers need the batch as a whole.
        given = self.sampler.has_priorities and storage.written_layout.position(as_key(self.priority_key)) is not None
        plain = type(self.writer).extend is RoundRobinWriter.extend
        direct = plain and storage.owner is None and storage.host is None and not (given or self.pipeline.learns)
        return Route(storage, direct=direct)


def no_rows(storage: TensorStorage) -> Tensor:
    """The index of an empty write."""
    shape = (0,) if storage.ndim == 1 else (0, storage.ndim)
    return torch.empty(shape, dtype=torch.int64, device=storage.device if storage.initialized else None)


def tensordict_of(columns: Mapping[Any, Any], lead: int, dtypes: Mapping[Key, torch.dtype]) -> TensorDict:
    """Columns as a TensorDict with ``lead`` batch dimensions. Lists and numbers take the dtypes given by key.

    Raises:
        ValueError: there are none, or they have different batch dimensions.
    """
    if not columns:
        raise ValueError("there are no columns")
    out: TensorDict | None = None
    for key, value in columns.items():
        if is_array(value):
            value = of_array(value)
        tensor = value if isinstance(value, Tensor) else numbers_as(value, dtypes.get(as_key(key)), str(key))
        if tensor.ndim < lead:
            raise ValueError(
                f"key {key!r} has shape {tuple(tensor.shape)}, a column of this write has {lead} batch dimension(s), "
                "and one fewer for add_columns() than for extend_columns()"
            )
        if out is None:
            out = TensorDict({}, batch_size=tensor.shape[:lead])
        if tensor.shape[:lead] != out.batch_size:
            raise ValueError(
                f"key {key!r} has shape {tuple(tensor.shape)}, but the columns before it have the batch dimensions "
                f"{tuple(out.batch_size)}"
            )
        out.set(as_key(key), tensor)
    assert out is not None
    return out
