"""Writes of rows that come as one array per key: from NumPy or as tensors, without a TensorDict around them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict
from torch import Tensor

from gpubuf.data.processing.pipeline import Pipeline
from gpubuf.data.recording import current
from gpubuf.data.samplers.base import Sampler
from gpubuf.data.samplers.trajectory_index import RowOrder
from gpubuf.data.storage.layout import Key, Leaf, as_key, as_written
from gpubuf.data.storage.schema import as_numbers, stored_as
from gpubuf.data.storage.staged_rows import PLACED_BYTES, Columns, PlacedRows, StagedRows
from gpubuf.data.storage.storage import TensorStorage
from gpubuf.data.transforms import Compose
from gpubuf.data.writers import RoundRobinWriter, Writer
from gpubuf.kernels._registry import eager, past_dispatcher

# Numbers of rows, other than one step, for which memory is kept.
_SIZES = 8


class ArrayWrites:
    """Writes rows that come as one array per key, with the buffer's lock held.

    Args:
        storage: where they are written to.
        writer: moves the cursor.
        sampler: is notified of the write.
        transform: that of the buffer: rows that it changes take the general way.
        pipeline: learns from written rows, or None.
        row_order: looks at the order of the rows, or None.
        dim_extend: the dimension of a written batch along which time runs.
        priority_key: where rows carry their priorities; ``()``: nowhere.
    """

    def __init__(
        self,
        storage: TensorStorage,
        writer: Writer,
        sampler: Sampler,
        transform: Compose,
        pipeline: Pipeline | None,
        row_order: RowOrder | None,
        *,
        dim_extend: int,
        priority_key: Any,
    ) -> None:
        self._storage, self._writer, self._sampler, self._transform = storage, writer, sampler, transform
        self._pipeline, self._row_order = pipeline, row_order
        self._dim_extend, self._priority_key = dim_extend, priority_key
        self._plan: _Plan | None = None

    @property
    def keys(self) -> list[Any]:
        """The keys of a row in the order of its columns."""
        return [as_written(leaf.key) for leaf in self._storage.written_layout.leaves]

    def staged_step(self) -> StagedRows | None:
        """Memory that the columns of one step can be put into; None: there is none."""
        if self._plan is None and self._storage.initialized:
            self._plan = self._new_plan()
        staged = None if self._plan is None else self._plan.one_step
        return None if staged is None or staged.launch is None else staged

    def write(self, columns: Columns | StagedRows, one_step: bool) -> bool:
        """Write rows, in eager mode. False: they take the general way, as :meth:`as_batch`, and nothing has changed."""
        storage, plan = self._storage, self._plan
        if plan is None or storage._schema is not plan.form or storage.table is not plan.table:
            plan = self._plan = self._new_plan() if storage.initialized else None
        if plan is None or not plan.direct or len(self._transform) or current.recording is not None:
            return False
        index, n = None, 0
        if past_dispatcher(plan.table):
            ready = plan.prepared(columns, one_step)
            if ready is not None:
                n = ready.n
                index = storage.append_prepared(ready.launch, n)
        if index is None:
            sources, n = plan.sources(_values_of(columns), one_step, self._dim_extend)
            if n == 0:
                return True
            index = storage.append_columns(sources, n)
        if n > storage.max_size:
            # Of more rows than the capacity only the newest are there.
            index = index[-storage.max_size :]
        if plan.tells:
            self._sampler.on_write(index, None)
        storage.unfinished = None
        if self._row_order is not None:
            self._row_order.look(storage)
        return True

    def as_batch(self, columns: Columns | StagedRows, one_step: bool) -> TensorDict:
        """Columns as a TensorDict, which the buffer can transform and write.

        Raises:
            ValueError: there are none, they have different batch dimensions, or their keys are not known yet.
        """
        columns, storage = _values_of(columns), self._storage
        lead = storage.ndim - 1 if one_step else storage.ndim
        if not isinstance(columns, Mapping):
            if not storage.initialized:
                raise ValueError(
                    "the first write settles keys and their order: expected a dict of arrays by key, got a "
                    f"{type(columns).__name__}"
                )
            columns = dict(zip(self.keys, columns, strict=True))
        leaves = storage.written_layout.leaves if storage.initialized else []
        return _tensordict_of(columns, lead, {leaf.key: leaf.dtype for leaf in leaves})

    def _new_plan(self) -> _Plan:
        storage, sampler, pipeline = self._storage, self._sampler, self._pipeline
        # Priorities that come with the rows, statistics and other writers need the batch as a whole.
        given = sampler.has_priorities and storage.written_layout.position(as_key(self._priority_key)) is not None
        learns = pipeline is not None and pipeline.learns
        plain = type(self._writer).extend is RoundRobinWriter.extend and not sampler.consumes
        return _Plan(storage, sampler, direct=plain and storage.host is None and not (given or learns))


def _tensordict_of(columns: Mapping[Any, Any], lead: int, dtypes: Mapping[Key, torch.dtype]) -> TensorDict:
    """Columns as a TensorDict with ``lead`` batch dimensions. Lists and numbers take the dtypes given by key.

    Raises:
        ValueError: there are none, or they have different batch dimensions.
    """
    if not columns:
        raise ValueError("there are no columns")
    out: TensorDict | None = None
    for key, value in columns.items():
        if isinstance(value, (np.ndarray, np.generic)):
            value = torch.from_numpy(_readable(np.asarray(value)))
        tensor = value if isinstance(value, Tensor) else _of_numbers(value, dtypes.get(as_key(key)), str(key))
        if out is None:
            out = TensorDict({}, batch_size=tensor.shape[:lead])
        if tensor.ndim < lead or tensor.shape[:lead] != out.batch_size:
            raise ValueError(
                f"key {key!r} has shape {tuple(tensor.shape)}, but the columns before it have the batch dimensions "
                f"{tuple(out.batch_size)}"
            )
        out.set(as_key(key), tensor)
    assert out is not None
    return out


def _values_of(columns: Columns | StagedRows) -> Columns:
    return columns.values if isinstance(columns, StagedRows) else columns


def _readable(array: np.ndarray) -> np.ndarray:
    """``array``, or a copy if PyTorch would not take its memory, or would warn that it may be written to."""
    if array.flags.carray or (array.flags.writeable and all(stride >= 0 for stride in array.strides)):
        return array
    return array.copy()


class _Plan:
    """How columns are written to a storage, as long as its form stays.

    Attributes:
        direct: whether columns can be written at all; if not, they become a TensorDict.
        form, table: what the plan was made for.
        tells: whether the sampler is notified of writes.
    """

    def __init__(self, storage: TensorStorage, sampler: Sampler, *, direct: bool) -> None:
        self.direct = direct
        self.form, self.table = storage.schema, storage.table
        self.tells = type(sampler).on_write is not Sampler.on_write
        self._storage = storage
        self._layout = storage.written_layout
        self._keys = [as_written(leaf.key) for leaf in self._layout.leaves]
        self._step = tuple(storage.shape[1:])
        self._expected = [(leaf.dtype, torch.Size((*self._step, *leaf.shape))) for leaf in self._layout.leaves]
        self._staged: dict[int, StagedRows | None] = {}
        self._placed_rows: dict[int, PlacedRows | None] = {}
        # For writes of one step: memory for arrays, and the way of tensors.
        self.one_step = self._new_staged(self._step)
        self._placed = PlacedRows.of(storage, self._step, keeps_index=self.tells) if eager(self.table) else None

    def prepared(self, columns: Columns | StagedRows, one_step: bool) -> PlacedRows | StagedRows | None:
        """The write of these columns on the CPU, ready to launch; None if it takes the general way."""
        if isinstance(columns, StagedRows):
            # Perhaps of another plan.
            return columns if columns is self.one_step and columns.launch is not None else None
        if type(columns) is list and columns and type(columns[0]) is Tensor:
            placed = self._placed if one_step else self._placed_for(columns[0])
            return placed if placed is not None and placed.place(columns) else None
        staged = self.one_step if one_step else self._staged_for(columns)
        return staged if staged is not None and staged.launch is not None and staged.fill(columns) else None

    def _placed_for(self, column: Tensor) -> PlacedRows | None:
        """The way of as many rows as a column has, into a storage of one dimension."""
        n = column.shape[0] if column.ndim and not self._step else 0
        if n == 0 or n * self._layout.row_bytes > PLACED_BYTES:
            return None
        if n not in self._placed_rows:
            if len(self._placed_rows) >= _SIZES:
                self._placed_rows.clear()
            self._placed_rows[n] = PlacedRows.of(self._storage, (n,), keeps_index=self.tells)
        return self._placed_rows[n]

    def _staged_for(self, columns: Columns) -> StagedRows | None:
        """Memory for a write of as many rows as the first of ``columns`` has, of a storage of one dimension."""
        if len(self._step) > 0:
            return None
        value = next(iter(columns.values() if isinstance(columns, Mapping) else columns), None)
        if type(value) is not np.ndarray or value.ndim == 0:
            return None
        n = value.shape[0]
        if n not in self._staged:
            if len(self._staged) >= _SIZES:
                self._staged.clear()
            self._staged[n] = self._new_staged((n,))
        return self._staged[n]

    def _new_staged(self, lead: tuple[int, ...]) -> StagedRows | None:
        # Fake tensors, and modes that change what a function does, take the general way.
        if not eager(self.table):
            return None
        return StagedRows.of(self._storage, lead, keeps_index=self.tells)

    def sources(self, columns: Columns, one_step: bool, dim_extend: int) -> tuple[list[Tensor], int]:
        """Columns as tensors ``[n, ...]``, and the number of rows.

        Raises:
            ValueError: a key is missing or unknown, or has another shape or dtype.
        """
        staged = self.one_step if one_step else self._staged_for(columns)
        if staged is not None and staged.launch is None and eager(self.table) and staged.fill(columns):
            found = staged.on_device(self.table.device)
            if found is not None:
                return found, staged.n
        if one_step and len(self._step) == 1:
            found = self._tensors(columns)
            if found is not None:
                return found, self._step[0]
        elif not one_step and not self._step and type(columns) is list and len(columns) == len(self._keys):
            n = self._rows_of(columns)
            if n:
                return columns, n
        return self._read(columns, one_step, dim_extend)

    def _rows_of(self, columns: list[Any]) -> int:
        """The number of rows of columns of a storage of one dimension, if all are plain tensors that fit; or else 0."""
        n = len(columns[0]) if type(columns[0]) is Tensor and columns[0].ndim else 0
        for value, (dtype, shape) in zip(columns, self._expected, strict=True):
            if type(value) is not Tensor or value.dtype is not dtype or value.shape != (n, *shape):
                return 0
        return n

    def _tensors(self, columns: Columns) -> list[Tensor] | None:
        """The columns of one step, ``[E, ...]``, if they are plain tensors and arrays of the right shape and dtype."""
        values: list[Any]
        if type(columns) is dict and len(columns) == len(self._keys):
            values = [columns.get(key) for key in self._keys]
        elif type(columns) is list and len(columns) == len(self._keys):
            values = columns
        else:
            return None
        found: list[Tensor] = []
        for value, (dtype, shape) in zip(values, self._expected, strict=True):
            if type(value) is np.ndarray and value.flags.carray and value.dtype.isnative and value.dtype.kind != "O":
                value = torch.from_numpy(value)
            if type(value) is not Tensor or value.dtype is not dtype or value.shape != shape:
                return None
            found.append(value)
        return found

    # Read where they are: tensors, and large arrays

    def _read(self, columns: Columns, one_step: bool, dim_extend: int) -> tuple[list[Tensor], int]:
        ndim = self._storage.ndim
        lead = self._step if one_step else None
        sources: list[Tensor] = []
        for leaf, value in zip(self._layout.leaves, self._values(columns), strict=True):
            tensor = value if isinstance(value, Tensor) else _as_tensor(value, leaf)
            if lead is None:
                lead = tuple(tensor.shape[:ndim])
            if tensor.dtype is not leaf.dtype or tensor.shape != (*lead, *leaf.shape) or len(lead) < len(self._step):
                raise ValueError(
                    f"key {leaf.name}: the storage holds rows of shape {leaf.shape} and {leaf.dtype}, so that a column "
                    f"of this write has shape {(*lead, *leaf.shape)}; it has {tuple(tensor.shape)} and {tensor.dtype}"
                )
            sources.append(tensor)
        assert lead is not None
        n = math.prod(lead)
        if one_step:
            return ([t.unsqueeze(0) for t in sources] if ndim == 1 else _flat(sources, ndim - 1)), n
        if ndim == 1 or n == 0:
            return sources, n
        if dim_extend != 0:
            sources = [t.transpose(0, dim_extend) for t in sources]
            lead = (lead[dim_extend], *lead[1:dim_extend], lead[0], *lead[dim_extend + 1 :])
        if lead[1:] != self._step:
            raise ValueError(
                f"the storage's shape is {tuple(self._storage.shape)}, the batch's {lead}: all but the first must agree"
            )
        return _flat(sources, ndim), n

    def _values(self, columns: Columns) -> list[Any]:
        if isinstance(columns, Mapping):
            ignored = self._layout.ignored
            by_key = {as_key(key): value for key, value in columns.items()}
            given = {key: value for key, value in by_key.items() if not (len(key) == 1 and key[0] in ignored)}
            stored = [leaf.key for leaf in self._layout.leaves]
            if given.keys() != set(stored):
                missing = [as_written(key) for key in stored if key not in given]
                extra = [as_written(key) for key in given if key not in stored]
                raise ValueError(f"the columns differ from the storage's keys: missing {missing}, extra {extra}")
            return [given[key] for key in stored]
        if not isinstance(columns, (list, tuple)):
            raise TypeError(f"expected a dict, list or tuple of arrays, got a {type(columns).__name__}")
        if len(columns) != len(self._keys):
            raise ValueError(f"the storage has the {len(self._keys)} columns {self._keys}, got {len(columns)}")
        return list(columns)


def _as_tensor(value: Any, leaf: Leaf) -> Tensor:
    if isinstance(value, (np.ndarray, np.generic)):
        try:
            return torch.from_numpy(_readable(np.asarray(value)))
        except TypeError as error:
            raise ValueError(
                f"key {leaf.name}: the storage holds {leaf.dtype}, the column can't be read: {error}"
            ) from None
    return _of_numbers(value, leaf.dtype, leaf.name)


def _of_numbers(value: Any, dtype: torch.dtype | None, name: str) -> Tensor:
    """Lists and numbers in the dtype of their key, or without one in that of PyTorch."""
    return torch.as_tensor(value) if dtype is None else stored_as(as_numbers(value), dtype, name)


def _flat(sources: list[Tensor], dims: int) -> list[Tensor]:
    return sources if dims == 1 else [t.flatten(0, dims - 1) for t in sources]
