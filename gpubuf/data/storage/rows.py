"""The rows of a storage, where they are, and how they are read by their index."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from typing import Any, cast

import torch
from torch import Tensor

from gpubuf.data.arguments import Missing
from gpubuf.data.storage import host_memory
from gpubuf.data.storage.column import Columns, RowAddresses
from gpubuf.data.storage.containers import Data, batch_shape, mapped
from gpubuf.data.storage.host_rows import HostRows
from gpubuf.data.storage.indexing import index_shape, plain_index, stored_positions, unravel
from gpubuf.data.storage.layout import RowLayout
from gpubuf.data.storage.placement import Placement
from gpubuf.data.storage.plan import NOT_INITIALIZED, RowPlan, fields_of
from gpubuf.data.storage.ring import Ring
from gpubuf.data.storage.schema import Schema
from gpubuf.data.storage.share_next import Again, Sharing
from gpubuf.kernels.rows import Field


class Rows:
    """What a storage has from its first write until its memory is released.

    Attributes:
        schema: what the rows are.
        shape: of the storage, ``[capacity]`` or ``[T, E]``.
        placement: where the rows are.
        device: does the work.
        columns: their memory, in the order of ``schema.stored``.
        ring: counts them.
        host: keeps data that are not tensors; None: there are none.
        sharing: next observations that are stored once; None: all have memory of their own.
        capacity, envs: how many there is room for, and rows per step.
        addresses: where the memory is.
        again: makes changes in several memories.
        written: reads and writes rows as they are written.
        way: writes rows: :attr:`sharing`, where there is one, or :attr:`written`.
        table: the addresses of :attr:`columns`, int64 ``[K, 5]``; see :mod:`gpubuf.kernels.rows`.
    """

    addresses: RowAddresses
    table: Tensor
    written: RowPlan
    way: RowPlan | Sharing

    def __init__(
        self,
        schema: Schema,
        shape: tuple[int, ...],
        placement: Placement,
        columns: Columns,
        ring: Ring,
        host: HostRows | None,
        sharing: Sharing | None,
        again: Again,
    ) -> None:
        self.schema, self.shape, self.placement, self.device = schema, torch.Size(shape), placement, placement.device
        self.columns, self.ring, self.host, self.sharing, self.again = columns, ring, host, sharing, again
        self.capacity, self.envs = math.prod(shape), math.prod(shape[1:])

    def __getstate__(self) -> dict[str, Any]:
        """Without addresses."""
        return {**vars(self), "addresses": None, "table": None}

    @property
    def steps_stored(self) -> int:
        """The number of steps stored: the length of the first dimension."""
        return self.ring.size // self.envs

    @property
    def sides(self) -> list[Tensor]:
        """The memory of next observations that are not those of the next row."""
        return [] if self.sharing is None else self.sharing.sides

    def find(self) -> None:
        """Find out where the memory is now."""
        if self.sharing is not None:
            self.sharing.to(self.device)
        self.addresses = RowAddresses([*self.sides, *self.columns.memory])

    def renew(self, columns: Columns) -> None:
        """Copy the rows into other memory of their placement."""
        # By columns: rows that were moved, or got later keys, have other records than new memory has.
        for column, copied in zip(columns, self.columns, strict=True):
            for start, part in copied.pieces():
                column.write(start, part)
        self.columns = columns
        if self.sharing is not None:
            self.sharing.renew(self.placement)

    def fields(self, layout: RowLayout) -> list[Field]:
        """The fields of batches of ``layout``."""
        aside: Mapping[int, tuple[int, int, int]] = {} if self.sharing is None else self.sharing.aside
        return fields_of(self.schema, self.columns, self.envs, layout, aside)

    # What is about to be written

    def local(self, sources: list[Tensor], ndim: int) -> list[Tensor]:
        """The sources on the storage's device, with the batch dimensions flattened, and copies of views of the rows.

        All writes read their sources after this: by address, while rows change.
        """
        local = host_memory.to_device(sources, self.device)
        if ndim > 1:
            # The empty source of a key without a column of its own has one dimension.
            local = [t.flatten(0, ndim - 1) if t.ndim >= ndim else t for t in local]
        return self.addresses.apart(local)

    def apart(self, data: Data) -> Data:
        """A batch, or a copy of it if it is a view of the rows: for who reads it again after a write.

        Raises:
            ValueError: a key, shape or dtype differs from those of the rows.
        """
        ndim = len(self.shape)
        if not self.addresses.high or math.prod(batch_shape(data, ndim)) == 0:
            return data
        found = self.schema.written.collect(data, ndim)
        return data if self.addresses.apart(found) is found else mapped(data, lambda value: value.clone())

    def overwriting(self, index: Tensor, data: Data) -> Callable[[], None]:
        """What overwrites rows in place: see :meth:`TensorStorage.write`. Everything is checked before."""
        layout, n = self.schema.written, index.numel()
        if layout.is_one_row(data):
            data = mapped(data, lambda row: row.expand(n, *row.shape))
        if batch_shape(data, 1) != (n,):
            raise ValueError(f"{n} rows are addressed, the batch has shape {batch_shape(data, 1)}")
        local = self.local(layout.collect(data, 1), 1)
        (index,) = self.addresses.apart([index])
        write = functools.partial(self.way.write, local, index)
        if self.host is None:
            return write
        # In two memories: who is interrupted between them writes both again.
        put = functools.partial(self.host.put, index.tolist(), self.host.rows_of(data, 1))
        return functools.partial(self.again.make, lambda: (write(), put()))

    # Reading by index

    @property
    def gives_views(self) -> bool:
        """Whether ints and slices give views of the rows."""
        return not (self.placement.rows_on_host or self.schema.computed or self.host is not None)

    def get(self, index: Any) -> Data:
        """Rows by index. See :meth:`TensorStorage.get`."""
        layout, index = self.schema.written, plain_index(index)
        if isinstance(index, (int, slice)) and self.gives_views:
            tensors = [column.whole[: self.steps_stored][index] for column in self.columns]
            steps = () if isinstance(index, int) else (len(range(self.steps_stored)[index]),)
            return layout.assemble(tensors, (*steps, *self.shape[1:]), self.device)
        flat, batch = self.located(index)
        tensors = self.as_written(flat)
        if len(batch) != 1:
            tensors = [t.view((*batch, *t.shape[1:])) for t in tensors]
        extra = None if self.host is None else self.host.entries(flat, batch)
        return layout.assemble(tensors, batch, self.device, extra)

    def as_written(self, index: Tensor) -> list[Tensor]:
        """Copies of rows at flat positions, int64 ``[n]``: a tensor ``[n, ...]`` for each leaf that is written."""
        return self.written.gather(index)[0]

    def positions(self, index: Any) -> Tensor:
        """The flat positions of any index, int64 ``[n]``. See :func:`~.indexing.stored_positions`."""
        return stored_positions(index, self.shape, self.ring.size, self.device)

    def located(self, index: Any) -> tuple[Tensor, tuple[int, ...]]:
        """The flat positions of ``storage[index]``, int64 ``[n]``, and the batch shape of that data."""
        index = plain_index(index)
        if not isinstance(index, (int, slice)):
            flat = self.positions(index)
            return flat, index_shape(index, len(self.shape), flat.numel())
        chosen = torch.arange(self.steps_stored, device=self.device)[index]
        per_step = torch.arange(self.envs, device=self.device)
        flat = (chosen.reshape(-1, 1) * per_step.numel() + per_step).reshape(-1)
        return flat, (*chosen.shape, *self.shape[1:])

    def coordinates(self, index: Any) -> Tensor:
        """The positions of ``storage[index]``: int64 of that data's batch shape (``[..., ndim]`` if above 1)."""
        flat, batch = self.located(index)
        ndim = len(self.shape)
        return unravel(flat, self.shape).reshape((*batch, ndim) if ndim > 1 else batch)


class _NoRows(Missing):
    """What a storage has before its first write."""

    def __init__(self) -> None:
        super().__init__(NOT_INITIALIZED)
        self.columns = Columns()
        self.sides: list[Tensor] = []
        self.placement = self.host = self.sharing = None

    def __reduce__(self) -> str:
        """Copies are it."""
        return "NO_ROWS"


NO_ROWS = cast("Rows", _NoRows())
