"""Storages: where the rows live, and the counters of the ring that they form.

All rows of a storage are one flat ring of ``max_size`` positions, whatever its dimensions: with ``ndim=2`` a
storage of shape ``[T, E]`` holds row ``t * E + e`` at ``[t, e]``. The counters are a device tensor that the kernels
advance; the host keeps a mirror, so that ``len()`` costs nothing and never synchronises.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from gpubuf.data.indexing import stored_positions, unravel
from gpubuf.data.layout import Data, Pieces, RowLayout, batch_shape, device_of
from gpubuf.data.ring import Ring
from gpubuf.kernels import rows
from gpubuf.kernels._registry import without_dispatch

_extend, _gather, _sample = (without_dispatch(op) for op in (rows.extend, rows.gather, rows.sample))

NOT_INITIALIZED = "the storage is not initialized: write a batch first"


class Storage:
    """Base class of storages (the type that buffers accept)."""

    max_size: int
    ndim: int = 1


class TensorStorage(Storage):
    """Rows in one contiguous tensor per key.

    Args:
        storage: a TensorDict, tensorclass or tensor of shape ``[max_size, ...]`` whose tensors become the storage
            (contiguous ones are used as they are, not copied). The storage is full from the start.
        max_size: checked against ``storage`` when given.
        device: ``"cpu"``, ``"cuda"``, a ``torch.device``, or ``"auto"`` for the data's own device.
        ndim: number of leading dimensions of ``storage`` that index rows.
        compilable: accepted for compatibility; every operation can be compiled.

    Raises:
        ValueError: ``max_size`` contradicts ``storage``.
    """

    def __init__(
        self,
        storage: Data,
        max_size: int | None = None,
        *,
        device: torch.device | str = "cpu",
        ndim: int = 1,
        compilable: bool = False,
    ) -> None:
        shape = batch_shape(storage, ndim)
        if max_size is not None and max_size != math.prod(shape):
            raise ValueError(f"max_size is {max_size}, but the storage has {math.prod(shape)} rows (shape {shape})")
        self._configure(math.prod(shape), device, ndim)
        layout = RowLayout(storage, ndim)
        resolved = self._resolve_device(storage)
        tensors = [t.detach().to(resolved).contiguous() for t in layout.collect(storage, ndim)]
        self._adopt(layout, tensors, shape, resolved)
        self.counters.set(self.max_size, self.max_size)

    def _configure(self, max_size: int, device: torch.device | str, ndim: int) -> None:
        if max_size < 1:
            raise ValueError(f"a storage needs room for at least one row, got max_size={max_size}")
        if ndim < 1:
            raise ValueError(f"a storage has at least one dimension, got ndim={ndim}")
        self.max_size = int(max_size)
        self.requested_size = self.max_size  # before rounding up to whole steps
        self.ndim = ndim
        self._requested_device = device
        self._layout: RowLayout | None = None
        self._tensors: list[Tensor] = []
        self._ring: Ring | None = None
        #: Root keys that are derived and therefore not stored; set by writers that own them.
        self.ignored_keys: frozenset[str] = frozenset()
        #: How many times :meth:`write` overwrote rows in place, so that a checkpoint knows whether rows have changed.
        self.overwrites = 0

    def _resolve_device(self, data: Data) -> torch.device:
        if self._requested_device == "auto":
            return device_of(data)
        device = torch.device(self._requested_device)
        # Tensors report an index; a device without one would compare unequal to theirs.
        return torch.empty(0, device=device).device if device.type == "cuda" and device.index is None else device

    def _adopt(self, layout: RowLayout, tensors: list[Tensor], shape: tuple[int, ...], device: torch.device) -> None:
        self._layout, self._tensors, self._device = layout, tensors, device
        self._shape = torch.Size(shape)
        self.max_size = math.prod(shape)
        self._ring = Ring(self.max_size, device)
        self.table = layout.table(tensors, device)

    # Properties

    @property
    def initialized(self) -> bool:
        """Whether the tensors have been allocated."""
        return self._layout is not None

    @property
    def layout(self) -> RowLayout:
        """The keys, shapes and dtypes of a row.

        Raises:
            RuntimeError: nothing has been written yet.
        """
        if self._layout is None:
            raise RuntimeError(NOT_INITIALIZED)
        return self._layout

    @property
    def device(self) -> torch.device:
        """The device of the rows.

        Raises:
            RuntimeError: it is ``"auto"``, and nothing has been written yet.
        """
        if self._layout is not None:
            return self._device
        if self._requested_device == "auto":
            raise RuntimeError("device='auto' is decided by the first write")
        return torch.device(self._requested_device)

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

    def __len__(self) -> int:
        return 0 if self._ring is None else self._ring.size

    @property
    def _steps_filled(self) -> int:
        """How much of the first dimension has been written."""
        return len(self) // math.prod(self.shape[1:])

    @property
    def nbytes(self) -> int:
        """Bytes of row memory."""
        return sum(t.nbytes for t in self._tensors)

    # Writing

    def initialize(self, data: Data) -> None:
        """Allocate for rows like those of ``data`` (a batch of ``ndim`` dimensions). Writes nothing."""
        shape = batch_shape(data, self.ndim)
        per_step = math.prod(shape[1:])
        if per_step == 0:
            raise ValueError(f"can't derive the storage's shape from a batch of shape {shape}")
        layout, device = RowLayout(data, self.ndim, self.ignored_keys), self._resolve_device(data)
        full = (-(-self.max_size // per_step), *shape[1:])
        self._adopt(layout, self._allocate(layout, full, device), full, device)

    def _allocate(self, layout: RowLayout, shape: tuple[int, ...], device: torch.device) -> list[Tensor]:
        """Row memory, uninitialised, one tensor a key; overridden where it lies elsewhere."""
        return layout.allocate(shape, device)

    def append(self, data: Data) -> Tensor:
        """Write a batch at the cursor, the oldest rows first to go; returns the rows' flat positions.

        Args:
            data: a batch of shape ``[n]`` (or ``[T, E]`` for ``ndim=2``). It is never changed.

        Returns:
            int64 ``[n]`` (``[T * E]``) on the storage's device. Of more rows than ``max_size`` the newest stay.

        Raises:
            ValueError: a key, shape or dtype differs from the storage's; nothing is written. No host sync.
        """
        shape = batch_shape(data, self.ndim)
        n = math.prod(shape)
        if n == 0:
            device = self._device if self.initialized else None
            return torch.empty(0, dtype=torch.int64, device=device)
        if self._layout is None:
            self.initialize(data)
        layout = self.layout
        sources = layout.collect(data, self.ndim)
        if self.ndim > 1 and shape[1:] != self._shape[1:]:
            raise ValueError(f"the storage's shape is {self._shape}, the batch's {shape}: all but the first must agree")
        index = _extend(self.table, self._local(sources, self.ndim), self.ring, n, self.max_size)
        self.counters.count(n)
        return index

    def write(self, index: Tensor, data: Data) -> None:
        """Overwrite rows in place. Neither the cursor nor any row's write generation moves.

        Args:
            index: int64 ``[n]`` flat positions on the storage's device; of duplicates the last one wins.
            data: ``[n]`` rows, or one row without a batch dimension for all of them.

        Raises:
            ValueError: a key, shape or dtype differs from the storage's.
            IndexError: an index is out of range (on CPU; a GPU skips the row and counts a fault).
        """
        layout = self.layout
        if not isinstance(data, Tensor) and len(data.batch_size) == 0:
            data = data.expand(index.numel())
        if batch_shape(data, 1) != (index.numel(),):
            raise ValueError(f"{index.numel()} rows are addressed, the batch has shape {batch_shape(data, 1)}")
        self.overwrites += 1
        rows.write(self.table, self._local(layout.collect(data, 1), 1), self.ring, index, self.max_size)

    def _local(self, sources: list[Tensor], ndim: int) -> list[Tensor]:
        """The sources on the storage's device, with the batch dimensions flattened."""
        device = self._device
        local = [t if t.device == device else t.to(device, non_blocking=True) for t in sources]
        return local if ndim == 1 else [t.flatten(0, ndim - 1) for t in local]

    def empty(self) -> None:
        """Forget every row, in O(1); memory stays allocated. No host sync."""
        if self._ring is not None:
            self._ring.empty()

    # Reading

    def gather(self, index: Tensor) -> tuple[list[Tensor], Tensor]:
        """Copies of rows, and their write generations. One launch, no host sync.

        Args:
            index: int64 ``[n]`` flat positions on the storage's device, contiguous.

        Returns:
            One tensor ``[n, ...]`` per key (see :meth:`assemble`), and the generations, int64 ``[n]``.
        """
        layout, n = self.layout, index.numel()
        arena, generation = _gather(self.table, self.ring, index, self.max_size, layout.arena(n).n_bytes)
        return layout.cut(arena, n), generation

    def sample_uniform(self, rng: Tensor, n: int) -> tuple[list[Tensor], Tensor, Tensor]:
        """``n`` rows drawn uniformly with replacement. One launch, no host sync.

        Args:
            rng: random state as in :mod:`gpubuf.kernels.philox`, on the storage's device.
            n: number of rows.

        Returns:
            One tensor ``[n, ...]`` per key, the flat positions and the write generations, int64 ``[n]`` each.
        """
        layout = self.layout
        arena, index, generation = _sample(self.table, self.ring, rng, n, self.max_size, layout.arena(n).n_bytes)
        return layout.cut(arena, n), index, generation

    def assemble(
        self, tensors: list[Tensor], extra: dict[Any, Tensor] | None = None, batch_size: tuple[int, ...] | None = None
    ) -> Data:
        """What :meth:`gather` returned, as a batch like those that were written, with ``extra`` entries.

        ``batch_size`` is the shape of the batch dimensions of ``tensors``; None: the length of the first dimension.
        """
        if batch_size is None:
            batch_size = (tensors[0].shape[0] if tensors else 0,)
        return self.layout.assemble(tensors, batch_size, self._device, extra)

    def get(self, index: Any) -> Data:
        """Rows by index, as ``storage[index]``: an int, a slice, a sequence, a tensor, or a tuple of tensors.

        Ints and slices give views of the storage, as they do on tensors; all else gives copies.

        Raises:
            IndexError: an index is beyond the rows written.
        """
        layout = self.layout
        if isinstance(index, (int, slice)):
            tensors = [t[: self._steps_filled][index] for t in self._tensors]
            steps = () if isinstance(index, int) else (len(range(self._steps_filled)[index]),)
            return layout.assemble(tensors, (*steps, *self._shape[1:]), self._device)
        return self.assemble(self.gather(self._positions(index))[0])

    def _positions(self, index: Any) -> Tensor:
        return stored_positions(index, self._shape, len(self), self._device)

    def coordinates(self, index: Any) -> Tensor:
        """Where the rows of ``storage[index]`` lie: int64 of that data's batch shape (``[..., ndim]`` if above 1)."""
        if not isinstance(index, (int, slice)):
            return self.unravel(self._positions(index))
        steps = torch.arange(self._steps_filled, device=self._device)[index]
        if self.ndim == 1:
            return steps
        rest = [torch.arange(length, device=self._device) for length in self._shape[1:]]
        grid = torch.meshgrid(steps.reshape(-1), *rest, indexing="ij")
        grids = torch.stack(grid, -1)
        return grids[0] if isinstance(index, int) else grids

    def unravel(self, flat: Tensor) -> Tensor:
        """``[n]`` flat positions as ``[n, ndim]`` coordinates; ``[n]`` itself for ``ndim=1``."""
        return flat if self.ndim == 1 else unravel(flat, self._shape)

    def __getitem__(self, index: Any) -> Data:
        return self.get(index)

    def __setitem__(self, index: Any, data: Data) -> None:
        self.write(self._positions(index), data)

    def set(self, cursor: Any, data: Data, *, set_cursor: bool = False) -> None:
        """``storage[cursor] = data``. ``set_cursor`` is refused: the ring's cursor belongs to its writer."""
        if set_cursor:
            raise NotImplementedError("set_cursor=True is not supported: extend() moves the cursor")
        self[cursor] = data

    def contains(self, index: int) -> bool:
        """Whether a row is stored at ``index``."""
        return -len(self) <= index < len(self)

    # State

    def state_dict(self) -> dict[str, Any]:
        """Rows (views, not copies), counters and shape. Synchronises with the device, and refreshes ``len()``."""
        if self._layout is None:
            return {"initialized": False, "max_size": self.max_size}
        self.refresh()
        filled = self._steps_filled
        return {
            "initialized": True,
            "max_size": self.max_size,
            "shape": list(self._shape),
            "written": self.written,
            "size": len(self),
            "rows": self.layout.assemble([t[:filled] for t in self._tensors], (filled, *self._shape[1:]), self._device),
        }

    def load_state_dict(self, state: dict[str, Any]) -> Tensor | None:
        """Restore :meth:`state_dict`, copying into this storage's own memory.

        A storage of the same capacity continues exactly. One with more room takes the rows oldest first.
        ``state["rows"]`` may be :class:`Pieces`.

        Returns:
            None, or, where the capacity differs, int64 ``[size]`` on the CPU: the old position of every row, in
            the order in which they now lie from position 0. Samplers put their state in the same order.

        Raises:
            ValueError: the rows have other keys, shapes or dtypes than this storage's, or don't fit.
        """
        if not state["initialized"]:
            self.empty()
            return None
        pieces = state["rows"] if isinstance(state["rows"], Pieces) else Pieces(state["rows"], [(0, state["rows"])])
        data, size, old_max = pieces.example, state["size"], state["max_size"]
        shape = tuple(state["shape"])
        fresh = self._layout is None
        layout = RowLayout(data, self.ndim, self.ignored_keys) if fresh else self.layout
        layout.collect(data, self.ndim)
        own = self._shape[1:] if not fresh else shape[1:]
        if own != shape[1:]:
            raise ValueError(f"the checkpoint's rows have shape {shape}, the storage's {self._shape}")
        room = -(-self.max_size // math.prod(shape[1:])) * math.prod(shape[1:])
        if size > room:
            raise ValueError(f"the checkpoint holds {size} rows, the storage has room for {room}")
        if fresh:
            self.initialize(data)
        order, first = None, 0
        if self.max_size == old_max:
            self.counters.set(state["written"], size)
        else:
            first = state["written"] % old_max if size == old_max else 0
            order = (torch.arange(size) + first) % old_max
            self.counters.set(size, size)
        per_step = math.prod(shape[1:])
        for start, part in pieces.parts:
            # The oldest step comes to lie first: all others turn with it.
            place = (start - first // per_step) % (old_max // per_step)
            for target, source in zip(self._tensors, self.layout.collect(part, self.ndim), strict=True):
                before_seam = min(source.shape[0], old_max // per_step - place)
                target[place : place + before_seam].copy_(source[:before_seam])
                target[: source.shape[0] - before_seam].copy_(source[before_seam:])
        return order

    def refresh(self) -> None:
        """Bring ``len()`` up to date after the replay of a captured graph. Synchronises. See :meth:`Ring.refresh`."""
        if self._ring is not None:
            self._ring.refresh()

    def __repr__(self) -> str:
        device = self._device if self.initialized else self._requested_device
        keys = (
            ", ".join(f"{leaf.name}: {list(leaf.shape)} {leaf.dtype}" for leaf in self._layout.leaves)
            if (self._layout)
            else "not initialized"
        )
        return f"{type(self).__name__}({len(self)}/{self.max_size} rows, device={device}, {{{keys}}})"


class LazyTensorStorage(TensorStorage):
    """A :class:`TensorStorage` that allocates at the first write, from the keys, shapes and dtypes found there.

    Args:
        max_size: capacity in transitions. With ``ndim > 1`` it is rounded up to whole steps of all environments.
        device: ``"cpu"``, ``"cuda"``, a ``torch.device``, or ``"auto"`` for the device of the first batch.
        ndim: number of batch dimensions: 1, or 2 for time-first ``[T, E]`` storage.
        compilable: accepted for compatibility; every operation can be compiled.
        consolidated, shared_init, cleanup_memmap: accepted at their defaults; process sharing is out of scope.

    Raises:
        ValueError: ``max_size`` or ``ndim`` below 1.
    """

    def __init__(
        self,
        max_size: int,
        *,
        device: torch.device | str = "cpu",
        ndim: int = 1,
        compilable: bool = False,
        consolidated: bool = False,
        shared_init: bool = False,
        cleanup_memmap: bool = True,
    ) -> None:
        if consolidated or shared_init:
            raise NotImplementedError("consolidated and shared_init storages are not supported")
        self._configure(max_size, device, ndim)
