"""What a storage has before its first write, and how it makes its rows from that."""

from __future__ import annotations

import math
from typing import ClassVar

import torch
from tensordict import TensorDictBase
from torch import Tensor

from gpubuf.data.arguments import check_count
from gpubuf.data.storage.column import Columns, owned_column
from gpubuf.data.storage.containers import Data, batch_shape, device_of
from gpubuf.data.storage.end_bits import Marks
from gpubuf.data.storage.host_rows import HostRows
from gpubuf.data.storage.layout import RowLayout, as_key, as_written
from gpubuf.data.storage.placement import AUTO, IndexBytes, Placement, batch_device, place
from gpubuf.data.storage.plans import Readers
from gpubuf.data.storage.ring import Ring
from gpubuf.data.storage.rows import Rows
from gpubuf.data.storage.schema import Options, Schema, refuse_rounding
from gpubuf.data.storage.share_next import Again, Sharing, entries_of, side_bytes
from gpubuf.data.storage.tree_layout import layout_of

#: Rows are stored as they are written.
PLAIN = Options()


class Allocation:
    """Makes rows like those of the first batch.

    Args:
        max_size: capacity, before it is rounded up to whole steps.
        device: where rows are to be: see :class:`LazyTensorStorage`.
        ndim: number of batch dimensions.
        options: how keys are stored and given out.

    Attributes:
        max_size, device, ndim, options: as given.
        ignored_keys: root keys that are derived and therefore not stored; set by writers that own them.
        laps: how often the ring went round before the memory was last released.

    Raises:
        TypeError: ``ndim`` is no number.
        ValueError: ``max_size`` or ``ndim`` is no whole number, or below 1.
    """

    #: Whether rows can be moved, and their memory released.
    relocatable: ClassVar[bool] = True
    #: Keeps data that are not tensors.
    host_rows: ClassVar[type[HostRows]] = HostRows

    def __init__(self, max_size: int, device: torch.device | str, ndim: int, options: Options = PLAIN) -> None:
        if isinstance(max_size, bool) or max_size < 1 or max_size % 1:
            raise ValueError(f"a storage needs room for a whole number of rows, one or more, got max_size={max_size}")
        check_count(ndim, "ndim")
        self.max_size, self.device, self.ndim, self.options = int(max_size), device, ndim, options
        self.ignored_keys: frozenset[str] = frozenset()
        self.laps = 0
        self._again = Again()

    # What a batch says

    def describes_rows(self, data: Data) -> bool:
        """Whether a first batch says what a row is: it has rows and keys.

        Raises:
            TypeError: no key of its rows is a tensor.
        """
        if math.prod(batch_shape(data, self.ndim)) == 0:
            return False
        if not isinstance(data, TensorDictBase):
            return True
        entries = data.items(True, True)
        if [key for key, value in entries if isinstance(value, Tensor) and as_key(key)[0] not in self.ignored_keys]:
            return True
        layout = layout_of(data, self.ndim, self.ignored_keys)
        if layout.host and not layout.leaves:
            raise TypeError(f"no key of the rows is a tensor: {list(map(as_written, layout.host))} are not")
        return bool(layout.leaves)

    def schema_like(self, layout: RowLayout) -> Schema:
        """The schema of rows that are written like those of ``layout``."""
        return Schema.of(layout, self.options)

    def full_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of a storage whose first batch has ``shape``: whole steps of all environments.

        Raises:
            ValueError: the batch has no environments.
        """
        per_step = math.prod(shape[1:])
        if per_step == 0:
            raise ValueError(f"can't derive the storage's shape from a batch of shape {shape}")
        return (-(-self.max_size // per_step), *shape[1:])

    # Rows

    def rows_like(self, data: Data, readers: Readers) -> Rows:
        """:meth:`new_rows` for rows like those of ``data``, which describes them.

        Raises:
            ValueError: an option can't be met, or would round all that a key says; or as :meth:`new_rows`.
        """
        schema = self.schema_like(layout_of(data, self.ndim, self.ignored_keys))
        check_batches(self.device, schema)
        if self.options.dtypes:
            refuse_rounding(schema, schema.written.collect(data, self.ndim))
        shape, device = batch_shape(data, self.ndim), device_of(data)
        return self.new_rows(schema, shape, device, readers)

    def new_rows(self, schema: Schema, shape: tuple[int, ...], data_device: torch.device, readers: Readers) -> Rows:
        """Rows of a schema in new memory, of which a batch of ``shape`` comes first.

        Args:
            schema: of the rows.
            shape, data_device: of the batch.
            readers: of the storage.

        Raises:
            KeyError, RuntimeError: the rows lack what a sampler or another reader needs.
            MemoryError, torch.OutOfMemoryError: there is no room.
            ValueError: nor is there for rows that are batches themselves; or they lack what a reader needs.
        """
        shape = self.full_shape(shape)
        readers.check_rows(schema, self.ndim)
        beside, aside = readers.derived_bytes(self.device, shape), 0
        if schema.shared:
            aside, links = side_bytes(schema, math.prod(shape), math.prod(shape[1:]), self.options.next_capacity)
            beside += IndexBytes(index=links)
        # Files need none.
        n_bytes = math.prod(shape) * schema.stored.row_bytes if self.relocatable else 0
        try:
            placement = place(self.device, n_bytes, beside, shape, data_device, aside=aside)
            columns = self.memory(schema, shape, placement)
        except (MemoryError, torch.OutOfMemoryError) as error:
            nested = schema.written.nested_batch
            if not nested:
                raise
            raise ValueError(
                f"each of {self.max_size} rows is a batch {list(nested)} of its own, and there is no room for "
                f"these: to keep the steps of several environments, give the storage "
                f"ndim={self.ndim + len(nested)} ({error})"
            ) from error
        return self.rows_in(columns, schema, shape, placement)

    def rows_of(self, data: Data) -> Rows:
        """Rows with the content of ``data``: in its memory, where that is contiguous and in place, else in a copy."""
        shape, device = batch_shape(data, self.ndim), device_of(data)
        layout = layout_of(data, self.ndim)
        check_batches(self.device, self.schema_like(layout))
        requested = device if self.device == AUTO else self.device
        placement = place(requested, self.max_size * layout.row_bytes, IndexBytes(), shape, device)
        columns = [owned_column(t.detach(), placement) for t in layout.collect(data, self.ndim)]
        return self.rows_in(Columns.separate(columns, layout.leaves), self.schema_like(layout), shape, placement)

    def rows_in(self, columns: Columns, schema: Schema, shape: tuple[int, ...], placement: Placement) -> Rows:
        """Rows in the memory of columns."""
        capacity, envs = math.prod(shape), math.prod(shape[1:])
        ring = self.ring(capacity, placement.device)
        if self.laps:
            # An even number of them: no row is lost.
            ring.set_counters((self.laps + self.laps % 2) * capacity, 0)
            ring.skipped = ring.written
        host = self.host_rows(schema.written.host, capacity, ring) if schema.written.host else None
        sharing = None
        if schema.shared:
            slots = entries_of(capacity, envs, self.options.next_capacity)
            sharing = Sharing(schema, slots, shape, placement, ring, self._again)
        return Rows(schema, shape, placement, columns, ring, host, sharing, self._again)

    def renew(self, rows: Rows, marks: Marks) -> None:
        """Copy rows into other memory of their placement."""
        rows.renew(self.memory(rows.schema, rows.shape, rows.placement))
        rows.ring.counters = self.ring(rows.capacity, rows.device).counters.copy_(rows.ring.counters)
        if marks.kept:
            marks.rows = self.marks(rows.capacity, rows.device).copy_(marks.memory)

    # Memory. Storages elsewhere override these.

    def memory(self, schema: Schema, shape: tuple[int, ...], placement: Placement) -> Columns:
        """Uninitialised memory of rows."""
        return Columns.new(schema.stored.leaves, shape, placement)

    def ring(self, capacity: int, device: torch.device) -> Ring:
        """Counts rows: none is written."""
        return Ring(capacity, device)

    def marks(self, capacity: int, device: torch.device) -> Tensor:
        """Memory for a mark per row, uint8 ``[capacity]``: none is set."""
        return torch.zeros(capacity, dtype=torch.uint8, device=device)


def check_batches(requested: torch.device | str, schema: Schema) -> None:
    """Check that batches can be copied to the device that they are asked for on.

    Raises:
        RuntimeError: there is no such device, or it lacks the dtype of a key.
    """
    device = batch_device(requested)
    for leaf in schema.batch.leaves if device else ():
        try:
            torch.empty(1, dtype=leaf.dtype, device="cpu").to(device)
        except (AssertionError, ImportError, RuntimeError, TypeError) as error:
            raise RuntimeError(
                f"{as_written(leaf.key)!r}, {leaf.dtype}, can't be copied to {device}: {error}"
            ) from error
