"""Storages: the rows, and the counters of the ring that they form.

All rows of a storage are one flat ring of ``max_size`` positions, whatever its dimensions: with ``ndim=2`` a
storage of shape ``[T, E]`` holds row ``t * E + e`` at ``[t, e]``. The counters are a device tensor that the kernels
advance; the host keeps a mirror, so that ``len()`` costs nothing and never synchronises.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple, Protocol
from weakref import WeakSet

import torch
from tensordict import TensorDictBase
from torch import Tensor

from gpubuf.data.arguments import check_count, warn, warn_of_no_effect
from gpubuf.data.recording import DERIVED, Unfinished, current_recording, refuse_in_capture
from gpubuf.data.storage import host_memory
from gpubuf.data.storage.column import (
    Column,
    Record,
    RowAddresses,
    address_table,
    columns_of,
    new_record,
    owned_column,
    records,
    separate,
)
from gpubuf.data.storage.end_bits import OWN, EndBits, Marks, Signal, Streams, bitmap_bytes
from gpubuf.data.storage.host_rows import HostRows, saved_host
from gpubuf.data.storage.indexing import contained, expanded, index_shape, plain_index, stored_positions, unravel
from gpubuf.data.storage.layout import (
    Data,
    Key,
    Pieces,
    RowLayout,
    batch_shape,
    device_of,
    first_of,
    layout_of,
    mapped,
    saved_tree,
    stacked,
    with_tree,
)
from gpubuf.data.storage.placement import (
    AUTO,
    PINNED,
    SPLIT,
    IndexBytes,
    Placement,
    depends_on_room,
    place,
    readable,
    working_device,
)
from gpubuf.data.storage.plan import NOT_INITIALIZED, Recipe, RowPlan, as_stored, field_table, fields_of
from gpubuf.data.storage.ring import Ring
from gpubuf.data.storage.schema import (
    Codec,
    Options,
    Schema,
    check_same,
    described,
    keys_told,
    written_leaves,
)
from gpubuf.data.storage.share_next import (
    CHUNK_BYTES,
    SharedState,
    Sharing,
    entries_of,
    full_state,
    oldest_first,
    oldest_of,
    side_bytes,
)
from gpubuf.kernels.rows import Field, NoRoomError, Reading

#: Rows are stored as they are written.
PLAIN = Options()


class Follower(Protocol):
    """Needs to know something of the rows of a storage, such as where trajectories end."""

    recipe: Recipe

    @property
    def needs_ends(self) -> bool:
        """Whether it has to know where trajectories end."""

    def check_rows(self, schema: Schema) -> None:
        """Raise if rows of ``schema`` lack what it needs."""


def rows_state(rows: Data, ndim: int, size: int, written: int | None = None) -> dict[str, Any]:
    """The state of a storage of ``ndim`` dimensions that consists of ``rows``, ``size`` of which were written.

    ``written`` is the number of rows ever written; None: ``size``.
    """
    shape = tuple(batch_shape(rows, ndim))
    return {
        "initialized": True,
        "max_size": math.prod(shape),
        "shape": list(shape),
        "written": size if written is None else written,
        "size": size,
        "rows": rows[: size // max(math.prod(shape[1:]), 1)],
    }


class Plans(NamedTuple):
    """How a storage writes and reads its rows; the same plan three times where these don't differ.

    Attributes:
        stored: of rows as they are stored.
        written: of rows as they are written.
        batch: of rows as batches have them.
    """

    stored: RowPlan
    written: RowPlan
    batch: RowPlan


class TensorStorage:
    """Rows in one contiguous tensor per key.

    Args:
        storage: a TensorDict, tensorclass or tensor of shape ``[max_size, ...]`` whose tensors become the storage
            (contiguous ones are used as they are, not copied). The storage is full from the start.
        max_size: checked against ``storage`` when given.
        device: ``"cpu"``, ``"cuda"``, a ``torch.device``, ``"pinned"`` for rows in pinned host memory that the GPU
            reads, or ``"auto"`` for the data's own device: it has been allocated already.
        ndim: number of leading dimensions of ``storage`` that index rows.
        compilable: accepted for compatibility; every operation can be compiled.

    Attributes:
        options: how keys are stored and given out.
        host: what is kept for each row on the host: data that are not tensors. None: nothing.
        sharing: the next observations that are stored once; None: all have memory of their own.
        plans: how rows are written and read.
        marks: the rows that end trajectories whatever their flags say.
        end_bits: where trajectories end, if a buffer needs that. None: none does, or nothing is allocated.
        addresses: where the rows are.
        owner: the process that handed a buffer with these rows to this one, and alone may write; None: this process.
        table: the addresses of :attr:`columns`, int64 ``[K, 5]``; see :mod:`gpubuf.kernels.rows`.

    Raises:
        ValueError: ``max_size`` contradicts ``storage``, or there is no ``storage``.
        RuntimeError: there is no such device.
    """

    max_size: int
    ndim: int = 1
    #: Whether rows are objects of any kind, which stay as they are given.
    takes_objects: ClassVar[bool] = False
    #: Makes a batch of what a draw or an index gives, where the buffer has no ``collate_fn``; None: it is one.
    default_collate: Callable[[Any], Any] | None = None

    def __init__(
        self,
        storage: Data,
        max_size: int | None = None,
        *,
        device: torch.device | str = "cpu",
        ndim: int = 1,
        compilable: bool = False,
    ) -> None:
        if storage is None:
            raise ValueError("Expected storage to be non-null: LazyTensorStorage(max_size) begins without rows")
        shape = batch_shape(storage, ndim)
        if max_size is not None and max_size != math.prod(shape):
            raise ValueError(
                f"The max-size and the storage shape mismatch: max_size is {max_size}, the storage has "
                f"{math.prod(shape)} rows (shape {shape})"
            )
        self._configure(math.prod(shape), device, ndim)
        layout = layout_of(storage, ndim)
        requested = device_of(storage) if device == AUTO else device
        placement = place(requested, self.max_size * layout.row_bytes, IndexBytes(), shape, device_of(storage))
        columns = [owned_column(t.detach(), placement) for t in layout.collect(storage, ndim)]
        self._adopt(self.schema_like(layout), separate(columns), shape, placement)
        self.counters.set(self.max_size, self.max_size)
        if self.host is not None:
            self.host.expect(self.host.rows_of(storage, ndim), 0)
            self.host.settle(self.max_size)
        self.rebuild()

    def _configure(self, max_size: int, device: torch.device | str, ndim: int, options: Options = PLAIN) -> None:
        if isinstance(max_size, bool) or max_size < 1 or max_size % 1:
            raise ValueError(f"a storage needs room for a whole number of rows, one or more, got max_size={max_size}")
        check_count(ndim, "ndim")
        self.max_size = int(max_size)
        self.requested_size = self.max_size  # before rounding up to whole steps
        self.ndim = ndim
        self.requested_device = device
        self.options = options
        # What the rows are; None: nothing is allocated.
        self._schema: Schema | None = None
        #: The memory of the rows: see :mod:`~.column`. :attr:`columns` are views of it.
        self.records: list[Record] = []
        self._columns: list[Column] = []
        self.addresses = RowAddresses()
        self._ring: Ring | None = None
        self._placement: Placement | None = None
        self.owner: int | None = None
        # These stay the same, so that captured graphs find their tables.
        stored = RowPlan()
        batch = RowPlan() if options else stored
        self.plans = Plans(stored, RowPlan() if options.batch_dtypes else batch, batch)
        self.host: HostRows | None = None
        self.sharing: Sharing | None = None
        self.marks = Marks()
        #: Whose rows the next writes are. It stays while a write may have to be completed.
        self.streams: Streams = OWN
        self.end_bits: EndBits | None = None
        # Which keys tell the ends of trajectories; None: nobody asks.
        self._ends_by: Recipe | None = None
        # Weak, because they refer to the storage.
        self._followers = WeakSet[Follower]()
        self._laps = 0  # how often the ring went round before the memory was last released
        #: What the sampler is going to take beside the rows. The buffer sets it before the first write, where the
        #: placement depends on what fits.
        self.beside = IndexBytes()
        #: Root keys that are derived and therefore not stored; set by writers that own them.
        self.ignored_keys: frozenset[str] = frozenset()
        #: What an operation is about to change; still there after it if that was interrupted, and mended then by the
        #: next one.
        self.unfinished: Unfinished | None = None
        self._again: Callable[[], None] | None = None

    def __getstate__(self) -> dict[str, Any]:
        """All but addresses, and views of records: pickle would write their memory once for each key.

        Who has a copy may write to it.
        """
        nowhere = {"table": None, "addresses": RowAddresses(), "owner": None}
        return {**vars(self), **nowhere, "_followers": None, "_columns": []}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._followers = WeakSet()
        schema = self._schema
        if schema is None or self._placement is None:
            return
        # Copies of pinned and of mapped memory are neither.
        if self._placement.rows_on_host or not self.relocatable:
            copies, self.records = self.records, self._allocate(schema.stored, tuple(self._shape), self._placement)
            for record, copied in zip(self.records, copies, strict=True):
                for start, part in copied.memory.pieces():
                    record.memory.write(start, part)
            if self.sharing is not None:
                self.sharing.renew(self._placement)
            if self.marks.rows is not None:
                self.marks.move(self._new_marks())
        self._columns = columns_of(self.records, schema.stored.leaves)
        self._connect(schema, self.counters, anew=False)

    # Properties

    @property
    def initialized(self) -> bool:
        """Whether the tensors have been allocated."""
        return self._schema is not None

    @property
    def schema(self) -> Schema:
        """The layouts of what is written, stored and drawn.

        Raises:
            RuntimeError: nothing has been written yet.
        """
        if self._schema is None:
            raise RuntimeError(NOT_INITIALIZED)
        return self._schema

    @property
    def layout(self) -> RowLayout:
        """The keys, shapes and dtypes of a row as it is stored: those of :attr:`columns` and of the table.

        Raises as :attr:`schema`.
        """
        return self.schema.stored

    @property
    def written_layout(self) -> RowLayout:
        """The keys, shapes and dtypes of a row that is written. Raises as :attr:`schema`."""
        return self.schema.written

    @property
    def batch_layout(self) -> RowLayout:
        """The keys, shapes and dtypes of a row of a batch. Raises as :attr:`schema`."""
        return self.schema.batch

    @property
    def computed(self) -> bool:
        """Whether rows are computed while they are written and read: see :class:`~.plan.RowPlan`."""
        return bool(self.options)

    @property
    def device(self) -> torch.device:
        """The device that does the work and holds counters and index, and on which batches come out.

        Raises:
            RuntimeError: it is ``"auto"``, and nothing has been written yet.
        """
        if self._schema is not None:
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
    def placement(self) -> Placement | None:
        """The place of the storage, and the reason; None before the first write."""
        return self._placement

    @property
    def shape(self) -> torch.Size:
        """Shape of the full storage, ``[max_size]`` or ``[T, E]``."""
        return self._shape if self._schema is not None else torch.Size((self.max_size,))

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
        """Bytes of the kernels' tables."""
        tables = [plan.table for plan in self.plans] + ([] if self.sharing is None else [self.sharing.raw.table])
        return sum({id(table): table.nbytes for table in tables if table is not None}.values())

    @property
    def nbytes(self) -> int:
        """Bytes of row memory, with next observations that lie aside."""
        beside = 0 if self.sharing is None else self.sharing.entry_bytes
        return sum(column.nbytes for column in self._columns) + beside

    @property
    def columns(self) -> list[Column]:
        """The rows: ``[*shape, ...]`` for each of ``layout.leaves``. Those beyond ``len()`` are uninitialised."""
        return self._columns

    @property
    def row_tensors(self) -> list[Tensor]:
        """The tensors that the rows are in: one a key, or two where rows are in two places."""
        return [part for column in self._columns for part in column.parts]

    @property
    def relocatable(self) -> bool:
        """Whether the rows can be moved and their memory released; False if a subclass has its own."""
        return type(self)._allocate is TensorStorage._allocate

    # Memory

    def initialize(self, data: Data) -> None:
        """Allocate for rows like those of ``data`` (a batch of ``ndim`` dimensions). Writes nothing."""
        full = self.full_shape(batch_shape(data, self.ndim))
        self._establish(self.schema_like(layout_of(data, self.ndim, self.ignored_keys)), full, device_of(data))

    def schema_like(self, layout: RowLayout) -> Schema:
        """The schema of rows that are written like those of ``layout``."""
        return Schema.of(layout, self.options)

    def check_rows(self, schema: Schema) -> None:
        """Raise if rows of ``schema`` lack what a follower needs.

        Raises:
            KeyError, ValueError: they do.
        """
        for follower in self._followers:
            follower.check_rows(schema)

    def full_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of a storage whose first batch has ``shape``: whole steps of all environments.

        Raises:
            ValueError: the batch has no environments.
        """
        per_step = math.prod(shape[1:])
        if per_step == 0:
            raise ValueError(f"can't derive the storage's shape from a batch of shape {shape}")
        return (-(-self.max_size // per_step), *shape[1:])

    def _establish(self, schema: Schema, shape: tuple[int, ...], data_device: torch.device) -> None:
        """Allocate for rows of a schema.

        Raises:
            MemoryError, torch.OutOfMemoryError: there is no room.
            ValueError: nor is there for rows that are batches themselves.
        """
        self.check_rows(schema)
        try:
            self._placement = placement = self._place(data_device, schema, shape)
            found = self._allocate(schema.stored, shape, placement)
        except BaseException as error:
            self._placement = None
            nested = schema.written.nested_batch
            if nested and isinstance(error, (MemoryError, torch.OutOfMemoryError)):
                raise ValueError(
                    f"each of {self.max_size} rows is a batch {list(nested)} of its own, and there is no room for "
                    f"these: to keep the steps of several environments, give the storage "
                    f"ndim={self.ndim + len(nested)} ({error})"
                ) from error
            raise
        self._adopt(schema, found, shape, placement)

    def _place(self, data_device: torch.device, schema: Schema, shape: tuple[int, ...]) -> Placement:
        """The placement of rows of ``shape``, whose first batch is on ``data_device``."""
        n, aside, links = math.prod(shape), 0, 0
        if schema.shared:
            aside, links = side_bytes(schema, n, math.prod(shape[1:]), self.options.next_capacity)
        beside = self.beside + self.derived_bytes(self.requested_device, shape) + IndexBytes(index=links)
        return place(self.requested_device, n * schema.stored.row_bytes, beside, shape, data_device, aside=aside)

    def derived_bytes(self, requested: torch.device | str, shape: tuple[int, ...]) -> IndexBytes:
        """Bytes that a storage of ``shape`` keeps beside its rows; zero for placements that ignore free memory."""
        if not depends_on_room(requested):
            return IndexBytes()
        index = math.prod(shape) * self.marks.by_writers
        if self._ends_by is not None:
            index += bitmap_bytes(shape, "cuda" if host_memory.cuda_present() else "cpu")
        if self.sharing is not None:
            index += self.sharing.link_bytes
        return IndexBytes(index=index)

    def _allocate(self, layout: RowLayout, shape: tuple[int, ...], placement: Placement) -> list[Record]:
        """Uninitialised row memory. Storages elsewhere override it."""
        leaves = layout.leaves
        return [Record(keys, new_record([leaves[key] for key in keys], shape, placement)) for keys in records(leaves)]

    def _adopt(self, schema: Schema, found: list[Record], shape: tuple[int, ...], placement: Placement) -> None:
        # What an interrupt has left of rows that never were.
        self._forget_plans()
        self._placement, self._device = placement, placement.device
        self.records, self._columns = found, columns_of(found, schema.stored.leaves)
        self._shape = torch.Size(shape)
        self.max_size = math.prod(shape)
        ring = self._new_ring(placement.device)
        if self._laps:
            ring.set(self._laps * self.max_size, 0)
            ring.skipped = ring.written
        if schema.shared:
            slots = entries_of(self.max_size, self._envs, self.options.next_capacity)
            self.sharing = Sharing(schema, slots, shape, placement, ring)
        if schema.written.host:
            self.host = HostRows(schema.written.host, self.max_size)
        if self.marks.by_writers:
            self.marks.rows = self._new_marks()
        self._connect(schema, ring, anew=True)
        # In one step: from here on the storage is initialised.
        self._ring, self._schema = ring, schema

    def _new_ring(self, device: torch.device) -> Ring:
        return Ring(self.max_size, device)

    def _new_marks(self) -> Tensor:
        """Memory for a mark per row: none is set. Storages elsewhere override it."""
        return torch.zeros(self.max_size, dtype=torch.uint8, device=self._device)

    @property
    def _envs(self) -> int:
        return math.prod(self._shape[1:])

    def _connect(self, schema: Schema, ring: Ring, *, anew: bool) -> None:
        """Write and read rows where they are now. Tables stay where they are, as long as the device does.

        ``anew``: it is to be found out where trajectories end.
        """
        device, sharing = self._device, self.sharing
        memory = [] if sharing is None else list(sharing.sides)
        for record in self.records:
            memory += record.memory.parts
        self.addresses = RowAddresses(memory)
        stored, written, batch = self.plans
        row_bytes = [leaf.row_bytes for leaf in schema.stored.leaves]
        table = address_table(self._columns, row_bytes, self._envs, device)
        # Without options it makes batches, too, which have the containers that were written.
        stored.set(schema.stored if self.options else schema.batch, table, ring, self.max_size)
        assert stored.table is not None
        self.table = stored.table
        if sharing is not None:
            sharing.to(device)
            sharing.plan = written
        if self.options:
            links = () if sharing is None else sharing.of_plans
            reading = Reading(links=None if sharing is None else sharing.links, envs=self._envs)
            for plan, layout in {written: schema.written, batch: schema.batch}.items():
                fields = field_table(self._fields_of(schema, layout), device)
                plan.set(layout, fields, ring, self.max_size, links, reading)
            if sharing is not None:
                fields = field_table(as_stored(self._fields_of(schema, schema.written)), device)
                sharing.raw.set(schema.full, fields, ring, self.max_size, links, reading)
        if anew:
            self._keep_ends(schema, ring)
        elif self.end_bits is not None:
            self.end_bits.readdress(self.table)
        for plan in self._readers:
            self._set_reader(plan, schema, ring)

    def _fields_of(self, schema: Schema, batch: RowLayout) -> list[Field]:
        aside = {} if self.sharing is None else self.sharing.aside
        return fields_of(schema, self._columns, self._envs, batch, aside)

    def replace_record(self, number: int, memory: Column) -> None:
        """Keep the rows of one record in other memory, which holds them. See :meth:`relocated`."""
        self.records[number] = Record(self.records[number].keys, memory)
        self._columns = columns_of(self.records, self.layout.leaves)

    def relocated(self, placement: Placement) -> None:
        """Adopt ``placement`` after copies there have replaced all of :attr:`records`."""
        ring, stays = self.counters, placement.device == self._device
        if not stays:
            self._device = placement.device
            ring.to(placement.device)
            if self.marks.rows is not None:
                self.marks.move(self._new_marks())
        # The shape of the index depends on the device.
        self._connect(self.schema, ring, anew=not stays)
        self._placement = placement
        if not stays:
            self.rebuild()

    def empty(self, recount: bool = False) -> None:
        """Forget every row, in O(1); memory stays allocated. No host sync. ``recount``: as for :meth:`Ring.empty`."""
        if self._ring is not None:
            self._ring.empty(recount)
        if self.host is not None:
            self.host.forget()
        self.marks.clear()
        if self.end_bits is not None:
            self.end_bits.clear()

    def free(self) -> None:
        """Forget every row, and release all memory; the next write allocates anew. Synchronises.

        Priorities that return for rows of before are recognised as late, as they are after :meth:`empty`.
        """
        if not self.relocatable:
            raise NotImplementedError(f"a {type(self).__name__} keeps its rows: empty() forgets them")
        if self._schema is None:
            return
        try:
            self.refresh()
        finally:
            rewritten = self.counters.rewritten
            self._laps = -(-self.written // self.max_size) + (0 if rewritten is None else int(rewritten.max()))
            self._schema = self._ring = self._placement = None
            self.host = self.sharing = self.marks.rows = self.end_bits = None
            self.records, self._columns, self.addresses = [], [], RowAddresses()
            self._forget_plans()
            self.max_size = self.requested_size
            del self.table

    def refresh(self) -> None:
        """Bring ``len()`` up to date after the replay of a captured graph. Synchronises. See :meth:`Ring.refresh`."""
        if self._ring is not None:
            self._ring.refresh()

    # Operations that may be interrupted

    def begin(self, what: Unfinished) -> Unfinished | None:
        """Mark what is about to change. Pass the result to :meth:`end`."""
        before = self.unfinished
        if before is None:
            self.unfinished = what
        return before

    def end(self, before: Unfinished | None) -> None:
        """Take the mark of :meth:`begin` away: everything is done."""
        self.unfinished = before

    def redo(self) -> None:
        """Make a change again that was interrupted. One that there was no room for is undone."""
        if self.sharing is not None:
            self.sharing.redo()
        again, self._again = self._again, None
        if again is not None:
            again()

    # Readers, and where trajectories end

    def reader(self, recipe: Recipe) -> RowPlan:
        """Reads rows as a recipe says. It follows the storage, which may be allocated later, moved and freed.

        Raises:
            KeyError: the stored rows lack a key that the recipe needs.
            ValueError: the rows can't be summed, or another reader tells ends by other keys.
        """
        if recipe.is_plain:
            return self.plans.batch
        for plan in self._readers:
            if plan.recipe == recipe:
                return plan
        plan = RowPlan(recipe)
        self.followed_by(plan)
        if self._schema is not None:
            self._set_reader(plan, self._schema, self.counters)
        return plan

    @property
    def _readers(self) -> list[RowPlan]:
        return [follower for follower in self._followers if isinstance(follower, RowPlan)]

    def _forget_plans(self) -> None:
        for plan in (*self.plans, *self._readers):
            plan.forget()

    def _set_reader(self, plan: RowPlan, schema: Schema, ring: Ring) -> None:
        recipe, processing = plan.recipe, plan.recipe.processing
        draws, noise = 0, None
        if processing is not None:
            processing.bind(schema.batch.leaves, self._envs, self._device)
            draws, noise = processing.draws, processing.noise
        fields = recipe.fields(schema, self._fields_of(schema, schema.batch))
        ends = self.end_bits.ends if self.end_bits is not None and recipe.n_steps > 1 else None
        links = None if self.sharing is None else self.sharing.links
        plan.set(
            recipe.layout(schema.batch),
            field_table(fields, self._device),
            ring,
            self.max_size,
            reading=Reading(ends, links, noise, self._envs, recipe.n_steps, recipe.gamma, draws),
        )

    def followed_by(self, follower: Follower) -> None:
        """Serve ``follower`` for as long as it exists: rows that lack what it needs are refused.

        Raises:
            ValueError: another one knows the ends of trajectories by other keys.
            KeyError: the rows lack what it needs.
        """
        if self._schema is not None:
            follower.check_rows(self._schema)
        known, recipe = self._ends_by, follower.recipe
        if follower.needs_ends and (known is None or not recipe.same_ends(known)):
            if any(other.needs_ends for other in self._followers):
                raise ValueError("another buffer with the same storage tells the ends of trajectories by other keys")
            self._ends_by = recipe
            if self._schema is not None:
                self._keep_ends(self._schema, self.counters)
                self.rebuild()
        self._followers.add(follower)

    def _keep_ends(self, schema: Schema, ring: Ring) -> None:
        if self._ends_by is not None:
            positions, by_id = self._ends_by.ends(schema)
            signal = Signal(tuple(schema.columns[position] for position in positions), by_id)
            self.end_bits = EndBits(signal, ring, self._shape, self.table, self.marks)

    def mark_writers(self) -> None:
        """End trajectories where the rows of another writer follow: several processes write. Takes a byte per row."""
        self.marks.by_writers = True
        if self._schema is not None:
            self._keep_marks()

    def _keep_marks(self) -> None:
        if self.marks.rows is None:
            refuse_in_capture("the first call of end_trajectories takes memory: call it once before")
            self.marks.rows = self._new_marks()

    def mark_written(self, index: Tensor) -> None:
        """Rows were written at ``index``, int64 ``[n]``, flat: bring the marks up to date. Can be done again."""
        if self.marks.rows is not None:
            self.marks.write(index, self._envs, self.streams)

    def end_trajectories(self, env: int | None = None) -> None:
        """See :meth:`gpubuf.ReplayBuffer.end_trajectories`. Samplers that know trajectories are to be told."""
        if env is not None and not 0 <= env < self._envs:
            raise IndexError(f"env must be in 0 .. {self._envs - 1}, got {env}")
        self._keep_marks()
        self.marks.end(self.ring, self._envs, env)
        if self.end_bits is not None:
            self.end_bits.write(1)

    def rebuild(self) -> None:
        """Rows were changed in place: compute anew what is known about them. O(capacity). No host sync."""
        if self.end_bits is not None:
            self.end_bits.rebuild()

    # Writing

    def as_batch(self, row: Data, dim: int) -> Data:
        """One row as a batch; ``dim`` is the dimension of its steps.

        Raises:
            TypeError: it is a list.
        """
        if isinstance(row, list):
            raise TypeError("a list means several rows, for extend(): a row of several parts is a tuple or a dict")
        if self._schema is None and getattr(row, "batch_dims", 0) > self.ndim - 1:
            warn(
                f"add() writes one row, here a batch of shape {list(row.batch_size)}: write its rows with extend(), "
                "unless every row is to be such a batch",
            )
        return mapped(row, lambda value: value.unsqueeze(dim))

    def shape_of_rows(self, data: Data) -> tuple[int, ...] | None:
        """The shape of ``data`` as a batch of rows like those that are stored; None if it is none."""
        if self._schema is None:
            return None
        try:
            self.written_layout.collect(data, self.ndim)
            return batch_shape(data, self.ndim)
        except ValueError:
            return None

    def batch_of(self, rows: list[Data]) -> Data:
        """A list of rows as a batch.

        Raises:
            RuntimeError: they have different shapes.
            ValueError: they have different structures.
        """
        try:
            return stacked(rows)
        except RuntimeError as error:
            raise RuntimeError(f"Stacking the elements of the list resulted in an error: {error}") from None

    def append(self, data: Data) -> Tensor:
        """Write a batch at the cursor, over the oldest rows. Returns the flat positions of the new rows.

        Args:
            data: a batch of shape ``[n]`` (or ``[T, E]`` for ``ndim=2``). One without rows changes nothing, nor does a
                first one without keys. It is never changed. It may be a view of the rows stored, and is copied
                then: compiled code does not see that, and nobody sees it of files that are mapped a second time. Its
                tensors on the host may be changed as soon as this returns, whether they are pinned or not.

        Returns:
            int64 ``[n]`` (``[T * E]``) on the storage's device. Of more rows than ``max_size`` the newest stay: the
            others have the positions of those that took their places.

        Raises:
            ValueError: a key, shape or dtype differs from the storage's; nothing is written.

        No host sync, but for large batches in pinned memory; see :func:`gpubuf.data.storage.host_memory.to_device`.
        """
        shape = batch_shape(data, self.ndim)
        n = math.prod(shape)
        if n == 0 or (self._schema is None and self.holds_nothing(data)):
            device = self._device if self.initialized else None
            return torch.empty(0, dtype=torch.int64, device=device)
        if self._schema is None:
            self.initialize(data)
        # Past properties, here and below: every write comes here.
        schema: Any = self._schema
        sources = schema.written.collect(data, self.ndim)
        if self.ndim > 1 and shape[1:] != self._shape[1:]:
            raise ValueError(f"the storage's shape is {self._shape}, the batch's {shape}: all but the first must agree")
        local, host = self._local(sources, self.ndim), self.host
        if host is None:
            return self._append(local, n)
        host.expect(host.rows_of(data, self.ndim), self.written)
        index = self._append(local, n)
        host.settle(self.written)
        return index

    def append_columns(self, sources: list[Tensor], n: int) -> Tensor:
        """:meth:`append` of ``n >= 1`` rows, ``[n, ...]`` for each of ``written_layout.leaves``: nothing is checked."""
        return self._append(self._local(sources, 1), n)

    def append_prepared(self, launch: Callable[[], Tensor | None], n: int) -> Tensor | None:
        """:meth:`append` of ``n`` rows by a prepared launch, in eager mode on the CPU; None: it has refused them."""
        ring = self.counters
        self.unfinished = Unfinished(ring.written)
        index = launch()
        if index is None:
            return None
        ring.note(n)
        if self.marks.rows is not None:
            self.mark_written(index)
        if self.end_bits is not None:
            self.end_bits.write_again(n // self._envs)
        return index

    def _append(self, local: list[Tensor], n: int) -> Tensor:
        ring, sharing = self._ring, self.sharing
        assert ring is not None
        if self.unfinished is None:
            # Until the buffer has told its sampler, too.
            self.unfinished = Unfinished(ring.written)
        index = self.plans.written.extend(local, n) if sharing is None else sharing.extend(local, n)
        ring.count(n)
        recording = current_recording()
        if recording is not None:
            # The first mark, if it comes later, finds a graph that clears none.
            recording.holds(self.marks, "rows")
        self.mark_written(index)
        if self.end_bits is not None:
            self.end_bits.write(n // self._envs)
        return index

    def holds_nothing(self, data: Data) -> bool:
        """Whether ``data`` has no rows or no keys. As a first batch it does not tell the layout of a row."""
        empty = math.prod(batch_shape(data, self.ndim)) == 0
        return empty or not layout_of(data, self.ndim, self.ignored_keys).leaves

    def write(self, index: Tensor, data: Data) -> None:
        """Overwrite rows in place. Neither the cursor nor any row's write generation moves.

        Args:
            index: int64 ``[n]`` flat positions on the storage's device; of duplicates the last one wins.
            data: ``[n]`` rows, or one row without a batch dimension for all of them; may be a view, as for
                :meth:`append`.

        Raises:
            ValueError: a key, shape or dtype differs from the storage's.
            IndexError: an index is out of range (on CPU; a GPU skips the row and counts a fault).
        """
        layout = self.written_layout
        if layout.is_one_row(data):
            n = index.numel()
            data = mapped(data, lambda row: row.expand(n, *row.shape))
        if batch_shape(data, 1) != (index.numel(),):
            raise ValueError(f"{index.numel()} rows are addressed, the batch has shape {batch_shape(data, 1)}")
        sources = layout.collect(data, 1)
        host, local = self.host, self._local(sources, 1)
        rows_on_host = {} if host is None else host.rows_of(data, 1)
        (index,) = self.addresses.apart([index])
        derived = self.end_bits is not None or self.sharing is not None or host is not None
        before = self.begin(DERIVED) if derived else None
        try:
            if host is None:
                self._overwrite(local, index)
            else:
                # In two memories: who is interrupted between them writes both again.
                self._again = functools.partial(self._overwrite_both, local, index, host, rows_on_host)
                self._again()
        except Exception as error:
            self._again = None
            if isinstance(error, NoRoomError):
                # Nothing has changed.
                self.end(before)
            raise
        self._again = None
        if derived:
            self.rebuild()
            self.end(before)

    def _overwrite(self, local: list[Tensor], index: Tensor) -> None:
        if self.sharing is None:
            self.plans.written.write(local, index)
        else:
            self.sharing.write(self.plans.stored, local, index)

    def _overwrite_both(self, local: list[Tensor], index: Tensor, host: HostRows, rows: dict[Key, list[Any]]) -> None:
        self._overwrite(local, index)
        host.put(index.tolist(), rows)

    def update(self, index: Tensor, keys: Sequence[int], sources: list[Tensor], generation: Tensor) -> None:
        """Overwrite single keys of rows in place, of those that were not overwritten since they were drawn.

        Args:
            index: int64 ``[n]`` flat positions on the storage's device; of duplicates the last one wins.
            keys: their positions in ``written_layout.leaves``.
            sources: ``[n, ...]`` for each of the keys.
            generation: int64 ``[n]``, those that the rows had when they were drawn. No host sync.

        Raises:
            IndexError: as :meth:`write`.
        """
        columns = {self.schema.columns[key] for key in keys}
        ends = self.end_bits is not None and self.end_bits.depends_on(columns)
        before = self.begin(DERIVED) if ends else None
        index, generation = self.addresses.apart([index, generation])
        self.plans.written.update(self._local(sources, 1), keys, index, generation)
        if ends:
            self.rebuild()
            self.end(before)

    def _local(self, sources: list[Tensor], ndim: int) -> list[Tensor]:
        """The sources on the storage's device, with the batch dimensions flattened, and copies of views of the rows.

        All writes read their sources after this: by address, while rows change.
        """
        local = host_memory.to_device(sources, self._device)
        if ndim > 1:
            # The empty source of a key without a column of its own has one dimension.
            local = [t.flatten(0, ndim - 1) if t.ndim >= ndim else t for t in local]
        return self.addresses.apart(local)

    def apart(self, data: Data) -> Data:
        """A batch, or a copy of it if it is a view of the rows: for who reads it again after a write.

        Raises as :meth:`append`.
        """
        if not self.addresses.high or math.prod(batch_shape(data, self.ndim)) == 0:
            return data
        found = self.written_layout.collect(data, self.ndim)
        return data if self.addresses.apart(found) is found else mapped(data, lambda value: value.clone())

    def check_owned(self) -> None:
        """Raise if another process handed these rows to this one: it would not hear of a write.

        Raises:
            RuntimeError: one did.
        """
        if self.owner is not None:
            raise RuntimeError(
                f"this buffer is a copy of one of process {self.owner}, which would not get rows that are written, "
                "changed or forgotten here: make it there with writers= (or shared=True), and pass this process a "
                "client() of it. A buffer of this process's own is copy.deepcopy(buffer)"
            )

    # Reading

    @property
    def gives_views(self) -> bool:
        """Whether ints and slices give views of the rows."""
        on_host = self._placement is not None and self._placement.rows_on_host
        return not (on_host or self.computed or self.host is not None)

    def contains(self, index: int | Tensor) -> bool | Tensor:
        """Whether a row is stored at ``index``; of a tensor, for each. See :func:`~.indexing.contained`."""
        return contained(index, self.shape, len(self))

    def gather(self, index: Tensor) -> tuple[list[Tensor], Tensor]:
        """Copies of rows, and their write generations. One launch, no host sync.

        Args:
            index: int64 ``[n]`` flat positions on the storage's device, contiguous.

        Returns:
            One tensor ``[n, ...]`` per key (see :meth:`assemble`), and the generations, int64 ``[n]``.
        """
        return self.plans.batch.gather(index)

    def gather_key(self, key: int, index: Tensor) -> Tensor:
        """Copies of one key of rows, ``[n, ...]`` as in batches. One launch, no host sync.

        Args:
            key: its position in ``batch_layout.leaves``.
            index: int64 ``[n]`` flat positions on the storage's device, contiguous.
        """
        return self.plans.batch.gather_key(key, index)

    def sample_uniform(self, rng: Tensor, n: int) -> tuple[list[Tensor], Tensor, Tensor]:
        """``n`` rows drawn uniformly with replacement. One launch, no host sync.

        Args:
            rng: random state as in :mod:`gpubuf.kernels.philox`, on the storage's device.
            n: number of rows.

        Returns:
            One tensor ``[n, ...]`` per key, the flat positions and the write generations, int64 ``[n]`` each.
        """
        return self.plans.batch.sample_uniform(rng, n)

    def get(self, index: Any) -> Data:
        """Rows by index, as ``storage[index]``: an int, a slice, a sequence, a tensor, or a tuple of tensors.

        Ints and slices give views of the storage, as they do on tensors; all else gives copies. Where rows are in
        pinned host memory there are only copies, on the GPU, for that orders them with what was launched before. Of a
        storage with ``dtypes`` or ``batch_dtypes`` there are only copies too, in the dtypes that were
        written. TensorDicts of a storage that a TensorDict writer writes to carry ``"index"``, as samples do.

        Raises:
            IndexError: an index is beyond the rows written.
        """
        data = self._rows(index)
        # TorchRL's writers of TensorDicts store it; here it is known when rows are read.
        if "index" not in self.ignored_keys or not isinstance(data, TensorDictBase):
            return data
        coordinates = self.coordinates(index)
        return data.set("index", expanded(coordinates, coordinates.dim() - (self.ndim > 1), data.batch_size))

    def _rows(self, index: Any) -> Data:
        layout, index = self.written_layout, plain_index(index)
        if isinstance(index, (int, slice)) and self.gives_views:
            tensors = [column.whole[: self.steps_stored][index] for column in self._columns]
            steps = () if isinstance(index, int) else (len(range(self.steps_stored)[index]),)
            return layout.assemble(tensors, (*steps, *self._shape[1:]), self._device)
        flat, batch = self.located(index)
        tensors = self.as_written(flat)
        if len(batch) != 1:
            tensors = [t.view((*batch, *t.shape[1:])) for t in tensors]
        extra = None if self.host is None else self.host.entries(flat, batch)
        return layout.assemble(tensors, batch, self._device, extra)

    def as_written(self, index: Tensor) -> list[Tensor]:
        """Copies of rows, in the dtypes that were written: one tensor ``[n, ...]`` for each of ``written_layout``.

        Args:
            index: as for :meth:`gather`.
        """
        return self.plans.written.gather(index)[0]

    def _positions(self, index: Any) -> Tensor:
        return stored_positions(index, self._shape, len(self), self._device)

    def located(self, index: Any) -> tuple[Tensor, tuple[int, ...]]:
        """The flat positions of ``storage[index]``, int64 ``[n]``, and the batch shape of that data."""
        index = plain_index(index)
        if not isinstance(index, (int, slice)):
            flat = self._positions(index)
            return flat, index_shape(index, self.ndim, flat.numel())
        chosen = torch.arange(self.steps_stored, device=self._device)[index]
        per_step = torch.arange(self._envs, device=self._device)
        flat = (chosen.reshape(-1, 1) * per_step.numel() + per_step).reshape(-1)
        return flat, (*chosen.shape, *self._shape[1:])

    def coordinates(self, index: Any) -> Tensor:
        """The positions of ``storage[index]``: int64 of that data's batch shape (``[..., ndim]`` if above 1)."""
        flat, batch = self.located(index)
        return self.unravel(flat).reshape((*batch, self.ndim) if self.ndim > 1 else batch)

    def unravel(self, flat: Tensor) -> Tensor:
        """``[n]`` flat positions as ``[n, ndim]`` coordinates; ``[n]`` itself for ``ndim=1``."""
        return flat if self.ndim == 1 else unravel(flat, self._shape)

    def __getitem__(self, index: Any) -> Data:
        return self.get(index)

    def __setitem__(self, index: Any, data: Data) -> None:
        self.check_owned()
        if self._schema is None:
            raise RuntimeError(NOT_INITIALIZED)
        index = plain_index(index)
        flat = self._positions(index)
        shape = (1,) if isinstance(index, (int, slice)) else index_shape(index, self.ndim, flat.numel())
        if len(shape) > 1 and getattr(first_of(data), "shape", ())[: len(shape)] == shape:
            data = mapped(data, lambda value: value.reshape(flat.numel(), *value.shape[len(shape) :]))
        self.write(flat, data)

    # State

    def state_dict(self) -> dict[str, Any]:
        """Rows (views, not copies), counters and shape. Synchronises with the device, and refreshes ``len()``.

        The rows of a storage in two places are a list of two batches, which follow each other. They are as they are
        stored: with options ``"form"`` says what was written. Rows that share their observations lack the next ones
        that are stored once: ``"sharing"`` has those that are not in the next row, and says which these are.
        """
        if self._schema is None:
            return {"initialized": False, "max_size": self.max_size}
        self.refresh()
        parts = [self._filled_part(part) for part in range(len(self._columns[0].parts) if self._columns else 1)]
        state = {
            "initialized": True,
            "max_size": self.max_size,
            "shape": list(self._shape),
            "written": self.written,
            "skipped": self.written - self.rows_written,
            "size": len(self),
            "rewritten": self.counters.rewritten,
            "rows": parts[0] if len(parts) == 1 else parts,
        }
        state |= saved_tree(self.written_layout)
        if self.host is not None:
            state["host"] = self.host.state(len(self))
        if self.marks.rows is not None:
            state["marks"] = self.marks.rows[: len(self)]
        if self.computed:
            state["form"] = described(self.schema)
        if self.sharing is not None:
            state["sharing"] = self.sharing.state_dict()
        return state

    def _filled_part(self, part: int) -> Data:
        """The rows stored in one of the places that the storage is in: views."""
        tensors = [column.parts[part] for column in self._columns]
        before = sum(len(other) for other in self._columns[0].parts[:part]) if self._columns else 0
        filled = max(self.steps_stored - before, 0)
        if tensors:
            filled = min(filled, len(tensors[0]))
        device = self.rows_device if part == 0 else torch.device("cpu")
        return self.layout.assemble([t[:filled] for t in tensors], (filled, *self._shape[1:]), device)

    def load_state_dict(self, state: dict[str, Any]) -> Tensor | None:
        """Restore :meth:`state_dict`, copying into this storage's own memory.

        A storage of the same capacity continues exactly. One with more room takes the rows oldest first. Rows of
        storages that share other keys, or none, or have room for more or fewer next observations, are taken too.
        ``state["rows"]`` may be one batch, batches that follow each other, or :class:`Pieces`. With
        ``state["as_written"]`` they are rows as they are written, not as a storage with options stores them.

        Returns:
            None, or, where the capacity differs, int64 ``[size]`` on the CPU: the old position of every row, in
            the order in which they now lie from position 0. Samplers put their state in the same order.

        Raises:
            ValueError: the rows have other keys, shapes or dtypes than this storage's, or are stored in another way,
                or don't fit; or there is no room for so many next observations that are not in the next row: the
                storage is then empty.
        """
        if not state["initialized"]:
            self.empty()
            return None
        state, schema, shared, layout = self._incoming(state)
        anew = layout is not schema.stored
        pieces = Pieces.of(state["rows"], self.ndim)
        size, old_max, shape = state["size"], state["max_size"], tuple(state["shape"])
        per_step = math.prod(shape[1:])
        if self._schema is None:
            self._establish(schema, self.full_shape(shape), device_of(pieces.example))
        order, first = None, 0
        if self.max_size != old_max:
            first = oldest_of(state)
            order = (torch.arange(size, device="cpu") + first) % old_max
        if self._placement is not None and self._placement.rows_on_host:
            # The host is about to write where the GPU may still be reading.
            host_memory.synchronize(self._device)
        if anew:
            self._write_anew({**state, "rows": pieces}, layout, state["written"] - size if order is None else 0)
        if self.host is not None:
            self.host.load(state["host"], order)
        for start, part in () if anew else pieces.parts():
            # The oldest step comes to lie first: all others turn with it.
            at = (start - first // per_step) % (old_max // per_step)
            for column, source in zip(self._columns, layout.collect(part, self.ndim), strict=True):
                before_seam = min(source.shape[0], old_max // per_step - at)
                column.write(at, source[:before_seam])
                column.write(0, source[before_seam:])
        self._set_counters(state, order)
        if self.sharing is not None and shared is not None:
            self.sharing.restore(shared)
        marks = state.get("marks")
        if marks is not None:
            self._keep_marks()
        self.marks.load(marks if marks is None or order is None else marks[order])
        self.rebuild()
        return order

    def check_state(self, state: dict[str, Any]) -> Schema:
        """The schema of the rows of a state, if this storage can take them.

        Raises:
            ValueError: as :meth:`load_state_dict`, but for what shows only when rows are written. Nothing changes.
        """
        return self._incoming(state)[1]

    def _incoming(self, state: dict[str, Any]) -> tuple[dict[str, Any], Schema, SharedState | None, RowLayout]:
        """A state with rows that are written as they are or anew, their schema, what they share, and their layout."""
        schema = self.schema_for(state)
        shared = SharedState.of(state) if self._continues(state, schema) else None
        layout = schema.stored
        if shared is None:
            state = full_state(state, self.ndim)
            layout = schema.full if schema.shared else layout
        if state.get("as_written") and self.computed:
            layout = schema.written
        layout.collect(Pieces.of(state["rows"], self.ndim).example, self.ndim)
        size, shape = state["size"], tuple(state["shape"])
        if self._schema is not None and self._shape[1:] != shape[1:]:
            raise ValueError(f"the checkpoint's rows have shape {shape}, the storage's {self._shape}")
        per_step = math.prod(shape[1:])
        room = -(-self.max_size // per_step) * per_step
        if size > room:
            raise ValueError(f"the checkpoint holds {size} rows, the storage has room for {room}")
        return state, schema, shared, layout

    def _set_counters(self, state: dict[str, Any], order: Tensor | None) -> None:
        if order is not None:
            self.counters.set(state["size"], state["size"])
            return
        self.counters.set(state["written"], state["size"])
        self.counters.skipped = state.get("skipped", 0)
        rewritten = state.get("rewritten")
        self.counters.rewritten = None if rewritten is None else rewritten.to(self._device, copy=True)

    def _write_anew(self, state: dict[str, Any], layout: RowLayout, written: int) -> None:
        """Write the rows of a state, the oldest ones first: those that are not continued keep what comes next.

        Args:
            state: of rows with all their next observations.
            layout: of these rows.
            written: how many rows were ever written before them.

        Raises:
            ValueError: there is no room for so many next observations. The storage is empty then.
        """
        sharing, ndim, begun = self.sharing, self.ndim, False
        chunk = max(1, CHUNK_BYTES // max(1, layout.row_bytes * self._envs))
        try:
            for rows in oldest_first(state, ndim, chunk):
                if not begun:
                    if sharing is not None:
                        sharing.clear()
                    self.counters.set(written, 0)
                    begun = True
                if state.get("as_written"):
                    self.append(rows)
                else:
                    assert sharing is not None
                    sharing.raw.extend(self._local(layout.collect(rows, ndim), ndim), rows.shape[0] * self._envs)
            # A GPU has counted what it found no room for.
            self.refresh()
        except (NoRoomError, IndexError) as error:
            self.empty()
            raise ValueError(f"{error} (next_capacity={self.options.next_capacity})") from None

    def schema_for(self, state: dict[str, Any]) -> Schema:
        """The schema of the rows of a state: that of this storage.

        Args:
            state: what says in ``"form"`` what was written, if that is not what is stored, in ``"tree"`` in which
                containers, and in ``"host"`` what is not in tensors. A storage that has rows keeps its own containers.

        Raises:
            ValueError: this storage has, or would have, another one.
        """
        saved, host, schema = state.get("form"), saved_host(state), self._schema
        if schema is not None and schema.written.host != host:
            own = list(schema.written.host)
            raise ValueError(f"the state has the keys {list(host)} that are not tensors, the storage has {own}")
        if schema is not None and (state.get("as_written") or (not self.computed and saved is None)):
            return schema
        stored = RowLayout(Pieces.of(state["rows"], self.ndim).example, self.ndim, self.ignored_keys)
        if schema is None:
            written = stored if saved is None else stored.with_leaves(written_leaves(saved))
            written.host = host
            schema = self.schema_like(with_tree(written, state.get("tree")))
        if not state.get("as_written") and (self.computed or saved is not None):
            check_same(schema, described(Schema.of(stored, Options())) if saved is None else saved)
        return schema

    def _continues(self, state: dict[str, Any], schema: Schema) -> bool:
        """Whether links and entries of a state can be taken over as they are."""
        shared = SharedState.of(state)
        if shared is None or tuple(leaf.key for leaf in schema.shared.values()) != shared.keys:
            return False
        shape = tuple(self._shape) if self.initialized else self.full_shape(tuple(state["shape"]))
        slots = entries_of(math.prod(shape), math.prod(shape[1:]), self.options.next_capacity)
        return (shape, slots) == (tuple(state["shape"]), shared.slots)

    def __repr__(self) -> str:
        device: Any = self.requested_device
        keys = "not initialized"
        if self._schema is not None:
            device = {PINNED: f"{self._device}, rows pinned", SPLIT: f"{self._device}, rows split"}.get(
                self._placement.kind if self._placement else "", self._device
            )
            keys = f"{readable(self.nbytes)}, {{{', '.join(keys_told(self.schema))}}}"
        return f"{type(self).__name__}({len(self)}/{self.max_size} rows, device={device}, {keys})"


class LazyTensorStorage(TensorStorage):
    """A :class:`TensorStorage` that allocates at the first write, from the keys, shapes and dtypes found there.

    Rows are TensorDicts, tensorclasses, tensors, or dicts, tuples, lists and named tuples of them, nested: batches have
    the structure of the first write. Text and other data that are not tensors may lie beside the tensors of a
    TensorDict. A list on the host keeps them, so that a draw on a GPU waits for its index.

    Args:
        max_size: capacity in transitions. With ``ndim > 1`` it is rounded up to whole steps of all environments.
        device: ``"cpu"``, ``"cuda"`` or a ``torch.device``; ``"pinned"`` for rows in pinned host memory that the GPU
            gathers from, with counters, tree and index on the GPU; ``"split"`` for as many rows as there is room for on
            the GPU and the others in pinned host memory (``"split:20GiB"``, ``"split:30%"`` for so many); ``"auto"``
            for the first of ``"cuda"``, ``"pinned"`` and ``"split"`` that has room for rows and index, and ``"cpu"`` on
            a machine without CUDA. What it chose, and why, is in :attr:`placement`, and is logged
            (``logging.getLogger("gpubuf")``, level INFO, or WARNING where rows are on the host).
        ndim: number of batch dimensions: 1, or 2 for time-first ``[T, E]`` storage.
        dtypes: how keys are stored, by key: a dtype, or a :class:`Codec`. Numbers are converted as ``to()`` of tensors
            does, but to the nearest integer, half to even. Integers out of range raise ValueError at the write (on a
            GPU they are cut, and count as faults).
        batch_dtypes: dtypes that keys have in batches, by key; of others it is the dtype that is written.
            ``storage[i]`` always has that one.
        share_next: store observations once: the next observation of a row is that of the next row, unless the two
            differ. True for every key that is both at the root and under "next", with one shape and dtype, but for
            flags and rewards; or a list of such keys. Any rows may be written, and come back exactly.
        next_capacity: how many next observations there is room for that are not those of the next row: the last ones
            of trajectories. Default: an eighth of the rows, at least 256 and one an environment, never more than rows.
            A write that would need more raises RuntimeError on the CPU, and nothing is written; on a GPU such rows
            count as faults, which the next call that synchronises raises. ``storage.sharing.used`` says how many are.
        compilable: accepted for compatibility; every operation can be compiled.
        consolidated, shared_init: accepted for compatibility, with one warning: the rows of each key are one piece of
            memory anyway, and a storage belongs to one process.
        cleanup_memmap: accepted for compatibility.

    Keys are given as you write them elsewhere, nested ones as tuples. A root key also means the same key under "next",
    unless that is given itself. With any of these options indexing gives copies.

    Raises:
        ValueError: ``max_size`` or ``ndim`` below 1; a dtype can't be converted; at the first write: an option
            names a key that the batch doesn't have.
        RuntimeError: at the first write: there is no such device, or ``"auto"`` finds room nowhere
            (:class:`gpubuf.data.storage.placement.NothingFitsError`).
    """

    def __init__(
        self,
        max_size: int,
        *,
        device: torch.device | str = "cpu",
        ndim: int = 1,
        dtypes: Mapping[Any, torch.dtype | Codec] | None = None,
        batch_dtypes: Mapping[Any, torch.dtype] | None = None,
        share_next: bool | Sequence[Any] = False,
        next_capacity: int | None = None,
        compilable: bool = False,
        consolidated: bool = False,
        shared_init: bool = False,
        cleanup_memmap: bool = True,
    ) -> None:
        warn_of_no_effect(consolidated=consolidated, shared_init=shared_init)
        options = Options.of(dtypes, batch_dtypes, share_next, next_capacity)
        self._configure(max_size, device, ndim, options)
