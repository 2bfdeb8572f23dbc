"""The memory of a storage: its layout, its place, and the counters of the ring that the rows form."""

from __future__ import annotations

import math
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor

from gpubuf.data.arguments import check_count
from gpubuf.data.recording import Unfinished
from gpubuf.data.storage.column import Column, address_table, by_key, columns_of, new_columns, record_of, records
from gpubuf.data.storage.end_bits import CONTINUITY, FLAGS, check_ends
from gpubuf.data.storage.fields import NextObservations, field_table, fields_of
from gpubuf.data.storage.followers import Followed
from gpubuf.data.storage.followers import Storage as Storage
from gpubuf.data.storage.host_rows import HostRows
from gpubuf.data.storage.layout import Data, RowLayout, batch_shape, device_of, layout_of
from gpubuf.data.storage.placement import AUTO, IndexBytes, Placement, place, working_device
from gpubuf.data.storage.ring import Ring
from gpubuf.data.storage.schema import Form, Options
from gpubuf.kernels.rows import Field

_compiling = torch.compiler.is_compiling

NOT_INITIALIZED = "the storage is not initialized: write a batch first"


class RowMemory(Followed):
    """The memory of a :class:`TensorStorage`: a column a key, allocated once, where it is to stay."""

    _placement: Placement | None

    def _configure(self, max_size: int, device: torch.device | str, ndim: int, ends: str = FLAGS) -> None:
        if isinstance(max_size, bool) or max_size < 1 or max_size % 1:
            raise ValueError(f"a storage needs room for a whole number of rows, one or more, got max_size={max_size}")
        check_count(ndim, "ndim")
        check_ends(ends)
        self.max_size = int(max_size)
        self.requested_size = self.max_size  # before rounding up to whole steps
        self.ndim = ndim
        self.requested_device = device
        self._layout: RowLayout | None = None
        self._form: Form | None = None
        #: What is kept for each row on the host: data that are not tensors. None: nothing.
        self.host: HostRows | None = None
        #: Whether rows are written and read by :mod:`gpubuf.kernels.rows`: what is written, what is stored and
        #: what a batch has may differ then. Rows of other storages are copied by :mod:`gpubuf.kernels.rows`.
        self.computed = False
        self._options = Options()
        #: The memory of next observations that share a column; None: there are none.
        self.sharing: NextObservations | None = None
        # The tables of fields of a computed storage: of batches, and of rows as they were written.
        self._fields: Tensor | None = None
        self._written_fields: Tensor | None = None
        # That of next observations as they are stored.
        self._raw_fields: Tensor | None = None
        self._columns: list[Column] = []
        self._ring: Ring | None = None
        self._placement = None
        self._laps = 0  # how often the ring went round before the memory was last released
        #: What the sampler is going to take beside the rows. The buffer sets it before the first write, where the
        #: placement depends on what fits.
        self.beside = IndexBytes()
        #: Root keys that are derived and therefore not stored; set by writers that own them.
        self.ignored_keys: frozenset[str] = frozenset()
        #: How many times :meth:`write` overwrote rows in place, or :meth:`free` gave them up, so that a checkpoint
        #: knows whether rows have changed.
        self.overwrites = 0
        #: What an operation is about to change; still there after it if that was interrupted, and mended then by the
        #: next one. See :meth:`gpubuf.ReplayBuffer._mend`.
        self.unfinished: Unfinished | None = None
        self._begin_following(ends == CONTINUITY)

    def __getstate__(self) -> dict[str, Any]:
        """All but addresses. A record goes as a whole: pickle would write its memory once for each of its keys."""
        tables = {"table": None, "_fields": None, "_written_fields": None, "_raw_fields": None, "_followers": None}
        return {**vars(self), **tables, "_columns": self._by_record()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._followers = WeakSet()
        if self._layout is None or self._placement is None:
            return
        leaves = self._layout.leaves
        self._columns = by_key(
            (record, columns_of(column, [leaves[key] for key in record]) if len(record) > 1 else [column])
            for record, column in state["_columns"]
        )
        # Copies of pinned and of mapped memory are neither.
        if self._placement.rows_on_host or not self.relocatable:
            copies, self._columns = self._columns, self._allocate(self._layout, tuple(self._shape), self._placement)
            for column, copied in zip(self._columns, copies, strict=True):
                for start, part in copied.pieces():
                    column.write(start, part)
            if self.sharing is not None:
                self.sharing.renew(self._placement)
        self.table = self._addresses(self._layout, self._device)
        self._make_tables(self._device)
        self._readdress(self.table)

    # Properties

    @property
    def initialized(self) -> bool:
        """Whether the tensors have been allocated."""
        return self._layout is not None

    @property
    def layout(self) -> RowLayout:
        """The keys, shapes and dtypes of a row as it is stored: those of :attr:`columns` and of the table.

        Raises:
            RuntimeError: nothing has been written yet.
        """
        if self._layout is None:
            raise RuntimeError(NOT_INITIALIZED)
        return self._layout

    @property
    def form(self) -> Form:
        """The layouts of what is written, stored and drawn. Raises as :attr:`layout`."""
        if self._form is None:
            raise RuntimeError(NOT_INITIALIZED)
        return self._form

    @property
    def written_layout(self) -> RowLayout:
        """The keys, shapes and dtypes of a row that is written. Raises as :attr:`layout`."""
        if self._form is None:
            raise RuntimeError(NOT_INITIALIZED)
        return self._form.written

    @property
    def batch_layout(self) -> RowLayout:
        """The keys, shapes and dtypes of a row of a batch. Raises as :attr:`layout`."""
        if self._form is None:
            raise RuntimeError(NOT_INITIALIZED)
        return self._form.batch

    @property
    def fields(self) -> list[Field]:
        """How :mod:`gpubuf.kernels.rows` makes batches: a field for each leaf of :attr:`batch_layout`.

        Addresses are those of now. Raises as :attr:`layout`.
        """
        return self._fields_of(self.batch_layout)

    @property
    def device(self) -> torch.device:
        """The device that does the work and holds counters and index, and on which batches come out.

        Raises:
            RuntimeError: it is ``"auto"``, and nothing has been written yet.
        """
        if self._layout is not None:
            return self._device
        if self.requested_device == AUTO:
            raise RuntimeError("device='auto' is decided by the first write")
        return working_device(self.requested_device)

    @property
    def rows_device(self) -> torch.device:
        """The device of the rows, with ``"split"`` of the first ones: the CPU for ``"pinned"``, else :attr:`device`.

        Raises as :attr:`device`.
        """
        return self.device if self._placement is None else self._placement.rows_device

    @property
    def _rows_on_host(self) -> bool:
        return self._placement is not None and self._placement.rows_on_host

    @property
    def placement(self) -> Placement | None:
        """The place of the storage, and the reason; None before the first write."""
        return self._placement

    @property
    def shape(self) -> torch.Size:
        """Shape of the full storage, ``[max_size]`` or ``[T, E]``."""
        return self._shape if self._layout is not None else torch.Size((self.max_size,))

    @property
    def counters(self) -> Ring:
        """The ring's counters.

        Raises:
            RuntimeError: nothing has been written yet.
        """
        if self._ring is None:
            raise RuntimeError(NOT_INITIALIZED)
        return self._ring

    @property
    def ring(self) -> Tensor:
        """The ring's counters on the device, int64 ``[4]``; see :mod:`gpubuf.kernels.rows`."""
        return self.counters.counters

    @property
    def cursor(self) -> int:
        """Position that the next row goes to."""
        return 0 if self._ring is None else self._ring.cursor

    @property
    def written(self) -> int:
        """Number of rows ever written; :meth:`empty` moves it on to a multiple of ``max_size``."""
        return 0 if self._ring is None else self._ring.written

    @property
    def rows_written(self) -> int:
        """Number of rows written, as users count them: from 0 again after ``empty()``."""
        return 0 if self._ring is None else self._ring.written - self._ring.skipped

    def __len__(self) -> int:
        return 0 if self._ring is None else self._ring.size

    def generations(self, index: Tensor) -> Tensor:
        """The write generations of rows: see :meth:`Ring.generations`. Raises RuntimeError before the first write."""
        return self.counters.generations(index)

    @property
    def steps_stored(self) -> int:
        """The number of steps stored: the length of the first dimension."""
        return len(self) // math.prod(self.shape[1:])

    @property
    def table_bytes(self) -> int:
        """Bytes of the kernels' tables.

        Raises:
            RuntimeError: nothing has been written yet.
        """
        if self._fields is None or self._written_fields is None:
            return self.table.nbytes
        others = 0 if self._written_fields is self._fields else self._written_fields.nbytes
        others += 0 if self._raw_fields is None else self._raw_fields.nbytes
        return self.table.nbytes + self._fields.nbytes + others

    @property
    def nbytes(self) -> int:
        """Bytes of row memory, with next observations that lie aside."""
        beside = 0 if self.sharing is None else self.sharing.entry_bytes
        return sum(column.nbytes for column in self._columns) + beside

    # Memory

    def initialize(self, data: Data) -> None:
        """Allocate for rows like those of ``data`` (a batch of ``ndim`` dimensions). Writes nothing."""
        full = self.full_shape(batch_shape(data, self.ndim))
        self._establish(self.form_like(layout_of(data, self.ndim, self.ignored_keys)), full, device_of(data))

    @property
    def converts(self) -> bool:
        """Whether rows are stored in another form than they are written in: ``dtypes``, ``prefixes`` and so on."""
        return bool(self._options)

    def form_like(self, layout: RowLayout) -> Form:
        """The form of rows that are written like those of ``layout``."""
        return Form.of(layout, self._options)

    def _establish(self, form: Form, shape: tuple[int, ...], data_device: torch.device) -> None:
        """Allocate for rows of a form."""
        self.check_rows(form)
        self._placement = placement = self._place(data_device, form, shape)
        try:
            columns = self._allocate(form.stored, shape, placement)
        except BaseException:
            self._placement = None
            raise
        self._adopt(form, columns, shape, placement)

    def full_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of a storage whose first batch has ``shape``: whole steps of all environments.

        Raises:
            ValueError: the batch has no environments.
        """
        per_step = math.prod(shape[1:])
        if per_step == 0:
            raise ValueError(f"can't derive the storage's shape from a batch of shape {shape}")
        return (-(-self.max_size // per_step), *shape[1:])

    def _place(self, data_device: torch.device, form: Form, shape: tuple[int, ...]) -> Placement:
        """The placement of rows of ``shape``, whose first batch is on ``data_device``."""
        rows = math.prod(shape) * form.stored.row_bytes
        beside = self.beside + self.derived_bytes(self.requested_device, shape)
        return place(self.requested_device, rows, beside, shape, data_device)

    def _adopt(self, form: Form, columns: list[Column], shape: tuple[int, ...], placement: Placement) -> None:
        self._columns, self._placement, self._device = columns, placement, placement.device
        self._shape = torch.Size(shape)
        self.max_size = math.prod(shape)
        ring = self._new_ring(placement.device)
        if self._laps:
            ring.set(self._laps * self.max_size, 0)
            ring.skipped = ring.written
        self.table = self._addresses(form.stored, placement.device)
        self._form = form
        self.sharing = self._new_sharing(form, shape, placement, ring)
        self._make_tables(placement.device)
        if form.written.host:
            self.host = HostRows(form.written.host, self.max_size)
        if self.breaks is not None:
            self.breaks.allocate(form, self._shape, self.table, self.sharing)
        if self.end_bits is not None:
            self.end_bits.allocate(form, self._shape, self.table)
        # In one step: from here on the storage is initialised.
        self._ring, self._layout = ring, form.stored
        self._tell_followers()

    def _new_sharing(
        self, form: Form, shape: tuple[int, ...], placement: Placement, ring: Ring
    ) -> NextObservations | None:
        """Memory for next observations that share a column; None: there are none."""
        return None

    def _new_ring(self, device: torch.device) -> Ring:
        return Ring(self.max_size, device)

    def begin(self, what: Unfinished) -> Unfinished | None:
        """Mark what is about to change. Pass the result to :meth:`end`."""
        before = self.unfinished
        # Compiled code runs its operations as a whole.
        if before is None and not _compiling():
            self.unfinished = what
        return before

    def end(self, before: Unfinished | None) -> None:
        """Take the mark of :meth:`begin` away: everything is done."""
        if not _compiling():
            self.unfinished = before

    def _addresses(self, layout: RowLayout, device: torch.device) -> Tensor:
        row_bytes = [leaf.row_bytes for leaf in layout.leaves]
        return address_table(self._columns, row_bytes, math.prod(self._shape[1:]), device)

    def _fields_of(self, batch: RowLayout) -> list[Field]:
        return fields_of(self.form, self._columns, math.prod(self._shape[1:]), self.sharing, batch)

    def _make_tables(self, device: torch.device) -> None:
        """Make the tables of fields of a computed storage, in place on the same device: captured graphs read them."""
        if not self.computed:
            return
        form = self.form
        self._fields = into(self._fields, field_table(self._fields_of(form.batch), device))
        if all(leaf == written for leaf, written in zip(form.batch.leaves, form.written.leaves, strict=True)):
            self._written_fields = self._fields
        else:
            self._written_fields = into(self._written_fields, field_table(self._fields_of(form.written), device))

    def _allocate(self, layout: RowLayout, shape: tuple[int, ...], placement: Placement) -> list[Column]:
        """Uninitialised row memory for each key. Storages elsewhere override it."""
        leaves = layout.leaves
        return by_key(
            (record, new_columns([leaves[key] for key in record], shape, placement)) for record in records(leaves)
        )

    def _by_record(self) -> list[tuple[tuple[int, ...], Column]]:
        """The columns, those of a record as one: the keys of each, and its memory."""
        if self._layout is None:
            return []
        leaves, found = self._layout.leaves, list[tuple[tuple[int, ...], Column]]()
        for record in records(leaves):
            columns = [self._columns[key] for key in record]
            whole = record_of(columns, [leaves[key] for key in record], len(self._shape)) if len(record) > 1 else None
            found += [((key,), self._columns[key]) for key in record] if whole is None else [(record, whole)]
        return found

    @property
    def relocatable(self) -> bool:
        """Whether the rows can be moved and their memory released; False if a subclass has its own."""
        return type(self)._allocate is RowMemory._allocate

    @property
    def columns(self) -> list[Column]:
        """The rows: ``[*shape, ...]`` for each of ``layout.leaves``. Those beyond ``len()`` are uninitialised."""
        return self._columns

    @property
    def row_tensors(self) -> list[Tensor]:
        """The tensors that the rows are in: one a key, or two where rows are in two places."""
        return [part for column in self._columns for part in column.parts]

    def relocated(self, placement: Placement) -> None:
        """Adopt ``placement`` after copies there have replaced all of :attr:`columns`."""
        table = self._addresses(self.layout, placement.device)
        self._make_tables(placement.device)
        if placement.device == self._device:
            # In place: a captured graph reads the addresses from here.
            self.table.copy_(table)
            self._readdress(table)
        else:
            self.table, self._device = table, placement.device
            self.counters.to(placement.device)
            # The shape of the index depends on the device.
            if self.breaks is not None:
                self.breaks.allocate(self.form, self._shape, table, self.sharing)
            if self.end_bits is not None:
                self.end_bits.allocate(self.form, self._shape, table)
            self.rebuild()
        self._placement = placement
        self._tell_followers()

    def _readdress(self, table: Tensor) -> None:
        """Read the ends of trajectories where they are now."""
        if self.breaks is not None:
            self.breaks.readdress(table)
        if self.end_bits is not None:
            self.end_bits.readdress(table)

    def empty(self, recount: bool = False) -> None:
        """Forget every row, in O(1); memory stays allocated. No host sync. ``recount``: as for :meth:`Ring.empty`."""
        if self._ring is not None:
            self._ring.empty(recount)
        if self.host is not None:
            self.host.forget()
        if self.end_bits is not None:
            self.end_bits.clear()

    def free(self) -> None:
        """Forget every row, and release all memory; the next write allocates anew. Synchronises.

        Priorities that return for rows of before are recognised as late, as they are after :meth:`empty`.
        """
        if not self.relocatable:
            raise NotImplementedError(f"a {type(self).__name__} keeps its rows: empty() forgets them")
        if self._layout is None:
            return
        try:
            self.refresh()
        finally:
            self._laps = -(-self.written // self.max_size) + self._most_rewrites()
            self._layout, self._columns, self._ring, self._placement, self.host = None, [], None, None, None
            self._form = self._fields = self._written_fields = self._raw_fields = self.sharing = None
            self.max_size = self.requested_size
            self.overwrites += 1
            del self.table
            if self.breaks is not None:
                self.breaks.free()
            if self.end_bits is not None:
                self.end_bits.free()
            self._tell_followers()

    def _most_rewrites(self) -> int:
        """The largest number of times that a row was overwritten out of turn. Synchronises."""
        rewritten = self.counters.rewritten
        return 0 if rewritten is None else int(rewritten.max())

    def refresh(self) -> None:
        """Bring ``len()`` up to date after the replay of a captured graph. Synchronises. See :meth:`Ring.refresh`."""
        if self._ring is not None:
            self._ring.refresh()


def into(table: Tensor | None, new: Tensor) -> Tensor:
    """A table with new content: the same one, unless it is elsewhere."""
    return new if table is None or table.device != new.device else table.copy_(new)
