"""Storages: the rows, and the counters of the ring that they form.

All rows of a storage are one flat ring of ``max_size`` positions, whatever its dimensions: with ``ndim=2`` a
storage of shape ``[T, E]`` holds row ``t * E + e`` at ``[t, e]``. The counters are a device tensor that the kernels
advance; the host keeps a mirror, so that ``len()`` costs nothing and never synchronises.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from tensordict import TensorDictBase, is_tensorclass
from torch import Tensor

from gpubuf.data.arguments import warn_of_no_effect
from gpubuf.data.recording import DERIVED, Unfinished
from gpubuf.data.storage.column import owned_column
from gpubuf.data.storage.end_bits import FLAGS
from gpubuf.data.storage.indexing import contained, expanded, index_shape, plain_index, stored_positions, unravel
from gpubuf.data.storage.layout import (
    Data,
    TreeLayout,
    batch_shape,
    device_of,
    first_of,
    layout_of,
    mapped,
    rows_in,
    stacked,
)
from gpubuf.data.storage.placement import AUTO, PINNED, SPLIT, IndexBytes, place, readable
from gpubuf.data.storage.row_memory import NOT_INITIALIZED
from gpubuf.data.storage.row_memory import Storage as Storage
from gpubuf.data.storage.saved_rows import CustomRows
from gpubuf.data.storage.schema import Codec, Options, keys_told
from gpubuf.data.storage.shared_states import SharedStates
from gpubuf.data.storage.staging import to_device
from gpubuf.kernels import rows
from gpubuf.kernels._registry import in_memory, lazy, past_dispatcher, without_dispatch
from gpubuf.kernels.rows import arena_offsets

_extend = without_dispatch(rows.extend, given=("sources",))
_gather = without_dispatch(rows.gather, trusted=True, given=("index",))
_sample = without_dispatch(rows.sample, trusted=True)
_write = without_dispatch(rows.write, given=("sources", "index"))
_update = without_dispatch(rows.write, given=("sources", "index", "generation"))
# The CPU's forms of two operations that no schema can describe: they write into tensors of the caller's.
_gather_into = lazy("gpubuf.kernels.rows._cpu:gather_into")
_sample_into = lazy("gpubuf.kernels.rows._cpu:sample_into")


class TensorStorage(SharedStates):
    """Rows in one contiguous tensor per key.

    Args:
        storage: a TensorDict, tensorclass or tensor of shape ``[max_size, ...]`` whose tensors become the storage
            (contiguous ones are used as they are, not copied). The storage is full from the start.
        max_size: checked against ``storage`` when given.
        device: ``"cpu"``, ``"cuda"``, a ``torch.device``, ``"pinned"`` for rows in pinned host memory that the GPU
            reads, or ``"auto"`` for the data's own device: it has been allocated already.
        ndim: number of leading dimensions of ``storage`` that index rows.
        ends: see :class:`LazyTensorStorage`.
        compilable: accepted for compatibility; every operation can be compiled.

    Raises:
        ValueError: ``max_size`` contradicts ``storage``, or there is no ``storage``.
        RuntimeError: there is no such device.
    """

    #: Makes a batch of what a draw or an index gives, where the buffer has no ``collate_fn``; None: it is one.
    default_collate: Callable[[Any], Any] | None = None
    #: Saves and reads the rows in a form of their own; None: checkpoints hold them as they are stored.
    custom_rows: CustomRows | None = None

    def __init__(
        self,
        storage: Data,
        max_size: int | None = None,
        *,
        device: torch.device | str = "cpu",
        ndim: int = 1,
        ends: str = FLAGS,
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
        self._configure(math.prod(shape), device, ndim, ends)
        layout = layout_of(storage, ndim)
        requested = device_of(storage) if device == AUTO else device
        placement = place(requested, self.max_size * layout.row_bytes, IndexBytes(), shape, device_of(storage))
        columns = [owned_column(t.detach(), placement) for t in layout.collect(storage, ndim)]
        self._adopt(self.form_like(layout), columns, shape, placement)
        self.counters.set(self.max_size, self.max_size)
        if self.host is not None:
            self.host.announce(storage, shape, 0)
            self.host.settle(self.max_size)
        self.rebuild()

    # Writing

    def as_batch(self, row: Data, dim: int) -> Data:
        """One row as a batch; ``dim`` is the dimension of its steps.

        Raises:
            TypeError: it is a list.
        """
        if isinstance(row, list):
            raise TypeError("a list means several rows, for extend(): a row of several parts is a tuple or a dict")
        return mapped(row, lambda value: value.unsqueeze(dim))

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
                first one without keys. It is never changed. Its tensors on the host
                may be changed as soon as this returns, whether they are pinned or not.

        Returns:
            int64 ``[n]`` (``[T * E]``) on the storage's device. Of more rows than ``max_size`` the newest stay: the
            others have the positions of those that took their places.

        Raises:
            ValueError: a key, shape or dtype differs from the storage's; nothing is written.

        No host sync, but for large batches in pinned memory; see :func:`gpubuf.data.storage.staging.to_device`.
        """
        shape = batch_shape(data, self.ndim)
        n = math.prod(shape)
        if n == 0 or (self._layout is None and self.holds_nothing(data)):
            device = self._device if self.initialized else None
            return torch.empty(0, dtype=torch.int64, device=device)
        if self._layout is None:
            self.initialize(data)
        sources = self.written_layout.collect(data, self.ndim)
        if self.ndim > 1 and shape[1:] != self._shape[1:]:
            raise ValueError(f"the storage's shape is {self._shape}, the batch's {shape}: all but the first must agree")
        if self.computed:
            sources = self._sources(sources, self.ndim)
        local, host = self._local(sources, self.ndim), self.host
        if host is None:
            return self._append(local, n)
        host.announce(data, shape, self.written)
        index = self._append(local, n)
        host.settle(self.written)
        return index

    def append_columns(self, sources: list[Tensor], n: int) -> Tensor:
        """:meth:`append` of ``n >= 1`` rows, ``[n, ...]`` for each of ``written_layout.leaves``: nothing is checked."""
        if self.computed:
            sources = self._sources(sources, 1)
        return self._append(to_device(sources, self._device), n)

    def append_prepared(self, launch: Callable[[], Tensor | None], n: int) -> Tensor | None:
        """:meth:`append` of ``n`` rows by a prepared launch, in eager mode on the CPU; None: it has refused them."""
        ring = self.counters
        self.unfinished = Unfinished(ring.written)
        index = launch()
        if index is None:
            return None
        ring.note(n)
        if self.breaks is not None:
            self.breaks.write(ring.counters, n // math.prod(self._shape[1:]), index)
        if self.end_bits is not None:
            self.end_bits.write_again(ring.counters, n)
        return index

    def _append(self, local: list[Tensor], n: int) -> Tensor:
        if not torch.compiler.is_compiling():
            # Until the buffer has told its sampler, too.
            self.unfinished = Unfinished(self.written)
        index: Tensor = (
            self._extend_computed(local, n)
            if self.computed
            else _extend(self.table, local, self.ring, n, self.max_size)
        )
        self.counters.count(n)
        if self.breaks is not None:
            self.breaks.write(self.ring, n // math.prod(self._shape[1:]), index)
        if self.end_bits is not None:
            self.end_bits.write(self.ring, n)
        return index

    def holds_nothing(self, data: Data) -> bool:
        """Whether ``data`` has no rows or no keys. As a first batch it does not tell the layout of a row."""
        empty = math.prod(batch_shape(data, self.ndim)) == 0
        return empty or not layout_of(data, self.ndim, self.ignored_keys).leaves

    def write(self, index: Tensor, data: Data) -> None:
        """Overwrite rows in place. Neither the cursor nor any row's write generation moves.

        Args:
            index: int64 ``[n]`` flat positions on the storage's device; of duplicates the last one wins.
            data: ``[n]`` rows, or one row without a batch dimension for all of them.

        Raises:
            ValueError: a key, shape or dtype differs from the storage's.
            IndexError: an index is out of range (on CPU; a GPU skips the row and counts a fault).
        """
        layout = self.written_layout
        if self._is_one_row(data):
            n = index.numel()
            data = mapped(data, lambda row: row.expand(n, *row.shape))
        if batch_shape(data, 1) != (index.numel(),):
            raise ValueError(f"{index.numel()} rows are addressed, the batch has shape {batch_shape(data, 1)}")
        sources = layout.collect(data, 1)
        if self.computed:
            sources = self._sources(sources, 1)
        rows_on_host = None if self.host is None else self.host.rows_of(data, 1)
        self.overwrites += 1
        derived = self.breaks is not None or self.end_bits is not None
        before = self.begin(DERIVED) if derived else None
        if self.computed:
            self._write_computed(self._local(sources, 1), index)
        else:
            _write(self.table, self._local(sources, 1), self.ring, index, self.max_size)
        if rows_on_host is not None and self.host is not None:
            self.host.put(index.tolist(), rows_on_host)
        if derived:
            self._tell_ends_anew(index)
            self.end(before)

    def _tell_ends_anew(self, index: Tensor) -> None:
        """Rows were changed in place, in keys that tell where trajectories end."""
        if self.breaks is not None:
            self.breaks.rewrite(self.ring, index)
        if self.end_bits is not None:
            self.end_bits.rebuild(self.ring)

    def _is_one_row(self, data: Data) -> bool:
        """Whether a batch to be written is one row, without a batch dimension."""
        layout = self.written_layout
        if isinstance(data, TensorDictBase) or is_tensorclass(data):
            return len(data.batch_size) == len(layout.nested_batch)
        if isinstance(data, Tensor):
            return isinstance(layout.root, int) and data.ndim == len(layout.leaves[layout.root].shape)
        return isinstance(layout, TreeLayout) and layout.is_one_row(data)

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
        self.counters.count_update()
        ends = self.end_bits is not None and self.end_bits.depend_on(keys)
        ends |= self.breaks is not None and not self.breaks.positions.isdisjoint(keys)
        before = self.begin(DERIVED) if ends else None
        if self.computed:
            self._update_computed(self._local(sources, 1), keys, index, generation)
        else:
            # Read when the operation runs: a captured graph finds the rows where they are by then.
            table = torch.stack([self.table[key] for key in keys])
            _update(table, self._local(sources, 1), self.ring, index, self.max_size, generation)
        if ends:
            self._tell_ends_anew(index)
            self.end(before)

    def _local(self, sources: list[Tensor], ndim: int) -> list[Tensor]:
        """The sources on the storage's device, with the batch dimensions flattened."""
        local = to_device(sources, self._device)
        # The empty source of a key without a column of its own has one dimension.
        return local if ndim == 1 else [t.flatten(0, ndim - 1) if t.ndim >= ndim else t for t in local]

    # Reading

    @property
    def gives_views(self) -> bool:
        """Whether ints and slices give views of the rows."""
        return not (self._rows_on_host or self.computed or self.host is not None)

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
        if self.computed:
            return self._gather_computed(index)
        layout, n = self.layout, index.numel()
        if past_dispatcher(self.table):
            tensors = layout.allocate(n)
            return tensors, _gather_into(self.table, self.ring, in_memory(index), self.max_size, tensors)
        arena, generation = _gather(self.table, self.ring, index, self.max_size, layout.arena(n).n_bytes)
        return layout.cut(arena, n), generation

    def gather_key(self, key: int, index: Tensor) -> Tensor:
        """Copies of one key of rows, ``[n, ...]`` as in batches. One launch, no host sync.

        Args:
            key: its position in ``batch_layout.leaves``.
            index: int64 ``[n]`` flat positions on the storage's device, contiguous.
        """
        leaf, n = self.batch_layout.leaves[key], index.numel()
        if self.computed:
            return self._gather_key_computed(leaf, key, index)
        table = self.table[key : key + 1]
        if past_dispatcher(table):
            found = torch.empty((n, *leaf.shape), dtype=leaf.dtype)
            _gather_into(table, self.ring, in_memory(index), self.max_size, [found])
            return found
        arena, _ = _gather(table, self.ring, index, self.max_size, arena_offsets([leaf.row_bytes], n)[1])
        return rows_in(arena, leaf, n)

    def sample_uniform(self, rng: Tensor, n: int) -> tuple[list[Tensor], Tensor, Tensor]:
        """``n`` rows drawn uniformly with replacement. One launch, no host sync.

        Args:
            rng: random state as in :mod:`gpubuf.kernels.philox`, on the storage's device.
            n: number of rows.

        Returns:
            One tensor ``[n, ...]`` per key, the flat positions and the write generations, int64 ``[n]`` each.
        """
        if self.computed:
            return self._sample_computed(rng, n)
        layout = self.layout
        if past_dispatcher(self.table):
            tensors = layout.allocate(n)
            return tensors, *_sample_into(self.table, self.ring, rng, n, self.max_size, tensors)
        arena, index, generation = _sample(self.table, self.ring, rng, n, self.max_size, layout.arena(n).n_bytes)
        return layout.cut(arena, n), index, generation

    def assemble(
        self, tensors: list[Tensor], extra: dict[Any, Tensor] | None = None, batch_size: tuple[int, ...] | None = None
    ) -> Data:
        """A batch like those that were written, from the result of :meth:`gather`, with ``extra`` entries.

        ``batch_size`` is the shape of the batch dimensions of ``tensors``; None: the length of the first dimension.
        """
        if batch_size is None:
            batch_size = (tensors[0].shape[0] if tensors else 0,)
        return self.batch_layout.assemble(tensors, batch_size, self._device, extra)

    def get(self, index: Any) -> Data:
        """Rows by index, as ``storage[index]``: an int, a slice, a sequence, a tensor, or a tuple of tensors.

        Ints and slices give views of the storage, as they do on tensors; all else gives copies. Where rows are in
        pinned host memory there are only copies, on the GPU, for that orders them with what was launched before. Of a
        storage with ``dtypes``, ``batch_dtypes`` or ``prefixes`` there are only copies too, in the dtypes that were
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
        return (self._gather_computed(index, written=True) if self.computed else self.gather(index))[0]

    def _positions(self, index: Any) -> Tensor:
        return stored_positions(index, self._shape, len(self), self._device)

    def located(self, index: Any) -> tuple[Tensor, tuple[int, ...]]:
        """The flat positions of ``storage[index]``, int64 ``[n]``, and the batch shape of that data."""
        index = plain_index(index)
        if not isinstance(index, (int, slice)):
            flat = self._positions(index)
            return flat, index_shape(index, self.ndim, flat.numel())
        chosen = torch.arange(self.steps_stored, device=self._device)[index]
        per_step = torch.arange(math.prod(self._shape[1:]), device=self._device)
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
        if self._layout is None:
            raise RuntimeError(NOT_INITIALIZED)
        index = plain_index(index)
        flat = self._positions(index)
        shape = (1,) if isinstance(index, (int, slice)) else index_shape(index, self.ndim, flat.numel())
        if len(shape) > 1 and getattr(first_of(data), "shape", ())[: len(shape)] == shape:
            data = mapped(data, lambda value: value.reshape(flat.numel(), *value.shape[len(shape) :]))
        self.write(flat, data)

    def __repr__(self) -> str:
        device: Any = self.requested_device
        keys = "not initialized"
        if self._layout is not None:
            device = {PINNED: f"{self._device}, rows pinned", SPLIT: f"{self._device}, rows split"}.get(
                self._placement.kind if self._placement else "", self._device
            )
            keys = f"{readable(self.nbytes)}, {{{', '.join(keys_told(self.form))}}}"
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
            does; integers out of range raise ValueError at the write (on a GPU they are cut, and count as faults).
        batch_dtypes: dtypes that keys have in batches, by key; of others it is the dtype that is written.
            ``storage[i]`` always has that one.
        prefixes: keys that hold the first elements of others, such as ``{"observation": "critic_observation"}``. They
            take no memory. The write compares them where both are on the CPU. On a GPU, and in captured or compiled
            code, nothing is compared, and the longer key counts.
        share_next: store observations once: the next observation of a row is that of the row behind it, unless the two
            differ. True for every key that is both at the root and under "next", with one shape and dtype, but for
            flags and rewards; or a list of such keys. Any rows may be written, and come back exactly.
        next_capacity: how many next observations there is room for that are not those of the row behind: the last ones
            of trajectories. Default: an eighth of the rows, at least 256 and one an environment, never more than rows.
            A write that would need more raises RuntimeError on the CPU, and nothing is written; on a GPU such rows
            count as faults, which the next call that synchronises raises. ``storage.sharing.used`` says how many are.
        ends: what ends a trajectory for n-step transitions, slices, sequences, hindsight and queries. ``"flags"``: what
            samplers and buffers read, flags or identifiers. ``"flags+continuity"``: also a row whose next observation
            is not, byte for byte as stored, the observation of the row after it in its environment; of all keys that
            ``share_next=True`` takes. Such a row is the last one of its trajectory, and is not terminated: nothing
            stored changes. Every write compares its rows, without a host sync; see docs/slices.md for what that takes.
        compilable: accepted for compatibility; every operation can be compiled.
        consolidated, shared_init: accepted for compatibility, with one warning: the rows of each key are one piece of
            memory anyway, and a storage belongs to one process.
        cleanup_memmap: accepted for compatibility.

    Keys are given as you write them elsewhere, nested ones as tuples. A root key also means the same key under "next",
    unless that is given itself. With any of these options indexing gives copies.

    Raises:
        ValueError: ``max_size`` or ``ndim`` below 1; a dtype can't be converted; ``ends`` is neither; at the first
            write: an option names a key that the batch doesn't have, or ``"flags+continuity"`` finds nothing to
            compare, or next observations that are stored otherwise than observations.
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
        prefixes: Mapping[Any, Any] | None = None,
        share_next: bool | Sequence[Any] = False,
        next_capacity: int | None = None,
        ends: str = FLAGS,
        compilable: bool = False,
        consolidated: bool = False,
        shared_init: bool = False,
        cleanup_memmap: bool = True,
    ) -> None:
        warn_of_no_effect(consolidated=consolidated, shared_init=shared_init)
        self._configure(max_size, device, ndim, ends)
        self._options = Options.of(dtypes, batch_dtypes, prefixes)
        self.computed = bool(self._options)
        self._share(share_next, next_capacity)
