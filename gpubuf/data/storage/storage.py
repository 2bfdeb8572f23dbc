"""Storages: the rows, and the counters of the ring that they form.

All rows of a storage are one flat ring of ``max_size`` positions, whatever its dimensions: with ``ndim=2`` a
storage of shape ``[T, E]`` holds row ``t * E + e`` at ``[t, e]``. The counters are a device tensor that the kernels
advance; the host keeps a mirror, so that ``len()`` costs nothing and never synchronises.
"""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch
from tensordict import TensorDictBase
from torch import Tensor

from gpubuf.data.arguments import warn
from gpubuf.data.recording import DERIVED, FREES, Unfinished, at_replays
from gpubuf.data.storage import state as states
from gpubuf.data.storage.allocation import Allocation
from gpubuf.data.storage.column import Columns
from gpubuf.data.storage.containers import Data, batch_shape, first_of, mapped
from gpubuf.data.storage.end_bits import Marks
from gpubuf.data.storage.follower import Followers
from gpubuf.data.storage.host_rows import HostRows
from gpubuf.data.storage.indexing import expanded, index_shape, plain_index, unravel
from gpubuf.data.storage.layout import RowLayout
from gpubuf.data.storage.placement import AUTO, PINNED, SPLIT, Placement, readable, working_device
from gpubuf.data.storage.plans import Plans, Readers
from gpubuf.data.storage.ring import Ring
from gpubuf.data.storage.rows import NO_ROWS, Rows
from gpubuf.data.storage.schema import Schema, keys_told
from gpubuf.data.storage.share_next import Sharing


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
        allocation: how rows are to be stored, and what makes them.
        plans: how rows are written and read.
        marks: the rows that end trajectories whatever their flags say.
        followers: what is kept about the rows: marks, ends and :attr:`host`, :attr:`sharing`, where there are any, and
            the samplers of all buffers with this storage.
        readers: what reads the rows in ways of its own, and where trajectories end.
        ring: how many rows were written; on the CPU until the first write.
        rows: what there is from the first write on. Before it most attributes raise a RuntimeError.
        owner: the process that handed a buffer with these rows to this one, and alone may write; None: this process.

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
        self._begin(Allocation(math.prod(shape), device, ndim))
        self._adopt(self.allocation.rows_of(storage))
        self.ring.set_counters(self.max_size, self.max_size)
        if self.host is not None:
            self.host.put(range(self.max_size), self.host.rows_of(storage, ndim))
        self.followers.rebuild()

    def _begin(self, allocation: Allocation) -> None:
        """Have no rows, but what makes them."""
        self.allocation, self.ndim, self.max_size = allocation, allocation.ndim, allocation.max_size
        # Writes and samples use what it has past the properties.
        self.rows = NO_ROWS
        self.ring = Ring(self.max_size)
        self.owner: int | None = None
        # These stay the same, so that captured graphs find their tables.
        self.plans = Plans(allocation.options)
        self.marks = Marks()
        self.followers = Followers()
        self.readers = Readers(self.plans.batch, self.followers, self.marks)
        #: What an operation is about to change; still there after it if that was interrupted, and mended then by the
        #: next one.
        self.unfinished: Unfinished | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Who has a copy may write to it."""
        return {**vars(self), "owner": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        if not self.initialized:
            return
        # Copies of pinned and of mapped memory are neither.
        if self.rows.placement.rows_on_host or not self.allocation.relocatable:
            self.allocation.renew(self.rows, self.marks)
        self._connect(self.rows, anew=False)

    # Properties

    @property
    def initialized(self) -> bool:
        """Whether the tensors have been allocated."""
        return self.rows is not NO_ROWS

    @property
    def schema(self) -> Schema:
        """The layouts of what is written, stored and drawn.

        Raises:
            RuntimeError: nothing has been written yet.
        """
        return self.rows.schema

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
    def computed(self) -> bool:
        """Whether rows are computed while they are written and read: see :class:`~.plan.RowPlan`."""
        return bool(self.allocation.options)

    @property
    def device(self) -> torch.device:
        """The device that does the work and holds counters and index, and on which batches come out.

        Raises:
            RuntimeError: it is ``"auto"``, and nothing has been written yet.
        """
        if self.initialized:
            return self.rows.device
        if self.allocation.device == AUTO:
            raise RuntimeError("device='auto' is decided by the first write")
        return working_device(self.allocation.device)

    @property
    def rows_device(self) -> torch.device:
        """The device of the rows, with ``"split"`` of the first ones: the CPU for ``"pinned"``, else :attr:`device`.

        Raises as :attr:`device`.
        """
        return self.device if self.placement is None else self.placement.rows_device

    @property
    def placement(self) -> Placement | None:
        """The place of the storage, and the reason; None before the first write."""
        return self.rows.placement

    @property
    def columns(self) -> Columns:
        """The rows, ``[*shape, ...]`` for each of ``layout.leaves``. Those beyond ``len()`` are uninitialised."""
        return self.rows.columns

    @property
    def host(self) -> HostRows | None:
        """What is kept for each row on the host: data that are not tensors. None: nothing."""
        return self.rows.host

    @property
    def sharing(self) -> Sharing | None:
        """The next observations that are stored once; None: all have memory of their own."""
        return self.rows.sharing

    @property
    def shape(self) -> torch.Size:
        """Shape of the full storage, ``[max_size]`` or ``[T, E]``."""
        return self.rows.shape if self.initialized else torch.Size((self.max_size,))

    @property
    def cursor(self) -> int:
        """Position that the next row goes to."""
        return self.ring.cursor

    @property
    def written(self) -> int:
        """Number of rows ever written; :meth:`empty` moves it on to a multiple of ``max_size``."""
        return self.ring.written

    @property
    def rows_written(self) -> int:
        """Number of rows written, as users count them: from 0 again after ``empty()``."""
        return self.ring.written - self.ring.skipped

    def __len__(self) -> int:
        return self.ring.size

    def generations(self, index: Tensor) -> Tensor:
        """The write generations of rows: see :meth:`Ring.generations`. Raises as :attr:`schema`."""
        return self.rows.ring.generations(index)

    @property
    def steps_stored(self) -> int:
        """The number of steps stored: the length of the first dimension. Raises as :attr:`schema`."""
        return self.rows.steps_stored

    @property
    def nbytes(self) -> int:
        """Bytes of row memory, with next observations that lie aside."""
        return self.columns.nbytes + sum(side.nbytes for side in self.rows.sides)

    # Operations that may be interrupted

    def changing(self, action: Callable[..., Any], *args: Any, what: Unfinished = DERIVED, **named: Any) -> None:
        """``action(*args, **named)``, marked as unfinished until it is done; after an error the next one mends."""
        before = self.unfinished
        if before is None:
            self.unfinished = what
        action(*args, **named)
        self.unfinished = before

    # Where trajectories end

    def mark_writers(self) -> None:
        """End trajectories where the rows of another writer follow: several processes write. Takes a byte per row."""
        self.marks.by_writers = True
        if self.initialized:
            self.keep_marks()

    def keep_marks(self) -> None:
        if not self.marks.kept:
            at_replays().refuse("the first call of end_trajectories takes memory: call it once before")
            self.marks.rows = self.allocation.marks(self.max_size, self.device)
        # Also where an interrupt came before this.
        self.followers.keep(marks=self.marks)

    def end_trajectories(self, env: int | None = None) -> None:
        """See :meth:`gpubuf.ReplayBuffer.end_trajectories`. Samplers that know trajectories are to be told."""
        if env is not None and not 0 <= env < self.rows.envs:
            raise IndexError(f"env must be in 0 .. {self.rows.envs - 1}, got {env}")
        self.keep_marks()
        self.readers.end(self.ring, env)

    def end_if_asked(self) -> None:
        """Have the next write begin a trajectory, after rows were restored, where somebody asks for trajectories."""
        if len(self) and (self.readers.end_bits is not None or self.followers.follow_trajectories):
            self.changing(self.end_trajectories)

    # Writing

    def as_batch(self, row: Data, dim: int) -> Data:
        """One row as a batch; ``dim`` is the dimension of its steps.

        Raises:
            TypeError: it is a list.
            ValueError: it has no dimension of environments.
        """
        if isinstance(row, list):
            raise TypeError("a list means several rows, for extend(): a row of several parts is a tuple or a dict")
        if not self.initialized and getattr(row, "batch_dims", 0) > self.ndim - 1:
            warn(
                f"add() writes one row, here a batch of shape {list(row.batch_size)}: write its rows with extend(), "
                "unless every row is to be such a batch",
            )
        return mapped(row, functools.partial(self._as_step, dim=dim))

    def _as_step(self, value: Any, dim: int) -> Any:
        if len(value.shape) < self.ndim - 1:
            shape = list(self.shape[1:]) if self.initialized else "[E]"
            raise ValueError(f"add() writes one step of all environments, {shape}, got the shape {list(value.shape)}")
        return value.unsqueeze(dim)

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
        if self.rows is NO_ROWS:
            self.initialize(data)
        shape = batch_shape(data, self.ndim)
        n = math.prod(shape)
        if n == 0 or self.rows is NO_ROWS:
            return torch.empty(0, dtype=torch.int64, device=self.device if self.initialized else None)
        # Past properties, here and below: every write comes here.
        rows = self.rows
        sources = rows.schema.written.collect(data, self.ndim)
        if self.ndim > 1 and shape[1:] != rows.shape[1:]:
            raise ValueError(f"the storage's shape is {rows.shape}, the batch's {shape}: all but the first must agree")
        local = rows.local(sources, self.ndim)
        if rows.host is not None:
            rows.host.expect(rows.host.rows_of(data, self.ndim))
        return self._append(local, n)

    def append_columns(self, sources: list[Tensor], n: int) -> Tensor:
        """:meth:`append` of ``n >= 1`` rows, ``[n, ...]`` for each of ``written_layout.leaves``: nothing is checked."""
        return self._append(self.rows.local(sources, 1), n)

    def append_prepared(self, launch: Callable[[], Tensor | None], n: int) -> Tensor | None:
        """:meth:`append` of ``n`` rows by a prepared launch, in eager mode; None: it has refused them."""
        return self._write_at_cursor(launch, n, self.ring.note)

    def _append(self, local: list[Tensor], n: int) -> Tensor:
        at_replays().holds(self.followers, "own")
        index = self._write_at_cursor(functools.partial(self.rows.way.extend, local, n), n, self.ring.count)
        assert index is not None
        return index

    def _write_at_cursor(
        self, launch: Callable[[], Tensor | None], n: int, count: Callable[[int], None]
    ) -> Tensor | None:
        """Write ``n`` rows by a launch, count them, and tell all who follow. None: the launch has refused them.

        The mark is set before anything changes, and is taken away when all know of the rows: after an interrupt the
        next operation finds it, and the device's counters say whether there are rows to tell of.
        """
        before = self.unfinished
        if before is None:
            self.unfinished = Unfinished(self.ring.written)
        index = launch()
        if index is not None:
            count(n)
            # Of more rows than the capacity only the newest are there.
            self.followers.on_write(index if n <= self.max_size else index[-self.max_size :])
        self.unfinished = before
        return index

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
        self.changing(self._change, self.rows.overwriting(index, data))

    def _change(self, change: Callable[[], Any]) -> None:
        change()
        self.followers.rebuild()

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
        rows = self.rows
        index, generation = rows.addresses.apart([index, generation])
        update = functools.partial(rows.written.update, rows.local(sources, 1), keys, index, generation)
        changed = {rows.schema.columns[key] for key in keys}
        if self.readers.depends_on(changed) or self.followers.depends_on(changed):
            self.changing(self._change, update)
        else:
            update()

    def check_owned(self) -> None:
        """Raise if another process handed these rows to this one: it would not hear of a write.

        Raises:
            RuntimeError: one did.
        """
        if self.owner is not None:
            raise RuntimeError(
                f"this buffer is a copy of one of process {self.owner}, which would not get rows that are written, "
                "changed or forgotten here: make it there with writers= (or shared=True), and start this process with "
                "it, or with a client() of it. A buffer of this process's own is copy.deepcopy(buffer)"
            )

    # Reading

    def get(self, index: Any) -> Data:
        """Rows by index, as ``storage[index]``: an int, a slice, a sequence, a tensor, or a tuple of tensors.

        Ints and slices give views of the storage, as they do on tensors; all else gives copies. Where rows are in
        pinned host memory there are only copies, on the GPU, for that orders them with what was launched before. Of a
        storage with ``dtypes`` or ``batch_dtypes`` there are only copies too, in the dtypes that were
        written. TensorDicts of a storage that a TensorDict writer writes to carry ``"index"``, as samples do.

        Raises:
            IndexError: an index is beyond the rows written.
        """
        data = self.rows.get(index)
        # TorchRL's writers of TensorDicts store it; here it is known when rows are read.
        if "index" not in self.allocation.ignored_keys or not isinstance(data, TensorDictBase):
            return data
        coordinates = self.rows.coordinates(index)
        return data.set("index", expanded(coordinates, coordinates.dim() - (self.ndim > 1), data.batch_size))

    def unravel(self, flat: Tensor) -> Tensor:
        """``[n]`` flat positions as ``[n, ndim]`` coordinates; ``[n]`` itself for ``ndim=1``."""
        return flat if self.ndim == 1 else unravel(flat, self.shape)

    def __getitem__(self, index: Any) -> Data:
        return self.get(index)

    def __setitem__(self, index: Any, data: Data) -> None:
        self.check_owned()
        index = plain_index(index)
        flat = self.rows.positions(index)
        shape = (1,) if isinstance(index, (int, slice)) else index_shape(index, self.ndim, flat.numel())
        if len(shape) > 1 and getattr(first_of(data), "shape", ())[: len(shape)] == shape:
            data = mapped(data, lambda value: value.reshape(flat.numel(), *value.shape[len(shape) :]))
        self.write(flat, data)

    # Memory

    def initialize(self, data: Data) -> None:
        """Allocate for rows like those of ``data`` (a batch of ``ndim`` dimensions), if it has any. Writes nothing."""
        if self.allocation.describes_rows(data):
            self._adopt(self.allocation.rows_like(data, self.readers))

    def establish(self, schema: Schema, shape: tuple[int, ...], data_device: torch.device) -> None:
        """Allocate for rows of a schema. Arguments and errors are those of :meth:`Allocation.new_rows`."""
        self._adopt(self.allocation.new_rows(schema, shape, data_device, self.readers))

    def _adopt(self, rows: Rows) -> None:
        """Write to these rows from now on."""
        # What an interrupt has left of rows that never were.
        self.plans.forget()
        self.readers.forget()
        self.max_size, self.marks.envs, self.marks.rows = rows.capacity, rows.envs, None
        self._connect(rows, anew=True)
        # Of rows that are forgotten some may count.
        rows.ring.skipped += self.ring.skipped
        # In one step: from here on the storage is initialised.
        self.ring, self.rows = rows.ring, rows

    def _connect(self, rows: Rows, *, anew: bool) -> None:
        """Write and read rows where they are now. ``anew``: it is to be found out where trajectories end."""
        rows.find()
        if self.marks.by_writers and not self.marks.kept:
            self.marks.rows = self.allocation.marks(rows.capacity, rows.device)
        self.plans.place(rows)
        assert self.plans.stored.table is not None
        rows.written, rows.table = self.plans.written, self.plans.stored.table
        self.followers.keep(marks=None if self.marks.rows is None else self.marks, host=rows.host, sharing=rows.sharing)
        self.readers.place(rows, anew=anew)

    def rewire(self, rows: Rows) -> None:
        """Read and write these rows, which are those of now in more or fewer columns."""
        # Another object, for what was captured must not find its own again: tables are new.
        before = copy.copy(self.rows)
        try:
            self._connect(rows, anew=False)
            self.rows = rows
        except BaseException:
            self._connect(before, anew=False)
            self.rows = before
            raise

    def relocated(self, placement: Placement) -> None:
        """Adopt ``placement``, where all records of :attr:`columns` are now."""
        rows = self.rows
        stays = placement.device == rows.device
        if not stays:
            rows.device = placement.device
            rows.ring.to(placement.device)
            if self.marks.kept:
                self.marks.rows = self.marks.memory.to(rows.device)
        # The shape of the index depends on the device.
        self._connect(rows, anew=not stays)
        rows.placement = placement
        if not stays:
            self.followers.rebuild_own()
        self.followers.move()

    def empty(self, recount: bool = False) -> None:
        """Forget every row, in O(1); memory stays allocated. No host sync. ``recount``: as for :meth:`Ring.empty`."""
        self.ring.empty(recount)
        self.followers.clear()

    def free(self) -> None:
        """Forget every row, and release all memory; the next write allocates anew. Synchronises.

        Priorities that return for rows of before are recognised as late, as they are after :meth:`empty`.
        """
        self.check_owned()
        if not self.allocation.relocatable:
            raise NotImplementedError(f"a {type(self).__name__} keeps its rows: empty() forgets them")
        if not self.initialized:
            return
        try:
            self.refresh()
        finally:
            self.changing(self.release, what=FREES)

    def release(self) -> None:
        """:meth:`free`, but for what synchronises. Can be done again after an interrupt."""
        self.followers.free()
        if self.initialized:
            rewritten = self.ring.rewritten
            laps = -(-self.written // self.max_size) + (0 if rewritten is None else int(rewritten.max()))
            # In one step: the memory below is that of a storage without rows.
            self.allocation.laps, self.ring, self.rows = laps, Ring(self.allocation.max_size), NO_ROWS
        self.marks.rows = None
        self.plans.forget()
        self.readers.forget()
        self.max_size = self.allocation.max_size

    def refresh(self) -> None:
        """Bring ``len()`` up to date after the replay of a captured graph. Synchronises. See :meth:`Ring.refresh`."""
        self.ring.refresh()

    # State

    def state_dict(self) -> dict[str, Any]:
        """Rows (views, not copies), counters and shape. Synchronises with the device, and refreshes ``len()``.

        The rows of a storage in two places are a list of two batches, which follow each other. They are as they are
        stored: with options ``"form"`` says what was written. Rows that share their observations lack the next ones
        that are stored once: ``"sharing"`` has those that are not in the next row, and says which these are.
        """
        return states.state_of(self)

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
        return states.load(self, state)

    def check_state(self, state: dict[str, Any]) -> Schema:
        """The schema of the rows of a state, if this storage can take them.

        Raises:
            ValueError: as :meth:`load_state_dict`, but for what shows only when rows are written. Nothing changes.
        """
        return states.incoming(self, state)[1]

    def __repr__(self) -> str:
        device: Any = self.allocation.device
        keys = "not initialized"
        if self.initialized:
            told = {PINNED: f"{self.device}, rows pinned", SPLIT: f"{self.device}, rows split"}
            device = told.get(self.rows.placement.kind, self.device)
            keys = f"{readable(self.nbytes)}, {{{', '.join(keys_told(self.schema))}}}"
        return f"{type(self).__name__}({len(self)}/{self.max_size} rows, device={device}, {keys})"
