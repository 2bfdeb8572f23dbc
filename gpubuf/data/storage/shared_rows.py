"""Rows that store observations once: allocation, and writes in place that leave the rows before them as they were."""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from gpubuf.data.arguments import check_count
from gpubuf.data.recording import DERIVED, capturing
from gpubuf.data.storage.computed import ComputedRows
from gpubuf.data.storage.fields import field_table
from gpubuf.data.storage.layout import Leaf, RowLayout
from gpubuf.data.storage.placement import IndexBytes, Placement, depends_on_room, place
from gpubuf.data.storage.ring import Ring
from gpubuf.data.storage.row_memory import into
from gpubuf.data.storage.schema import Form
from gpubuf.data.storage.sharing import Sharing, entries_of, side_bytes, with_shared
from gpubuf.kernels import rows
from gpubuf.kernels._registry import in_memory, lazy, past_dispatcher, without_dispatch
from gpubuf.kernels.rows import IN_SUCCESSOR, SIZE, WRITTEN, NoRoomError, arena_offsets

_gather = without_dispatch(rows.gather)
_relink = without_dispatch(rows.relink, given=("sources", "index"))
_write = without_dispatch(rows.write)
_gather_rows = lazy("gpubuf.kernels.rows._cpu:gather_into")
_compiling = torch.compiler.is_compiling


def shared_columns(form: Form) -> dict[int, Leaf]:
    """The columns of a form that hold next observations too, by their positions, as they are stored."""
    found = [number for number, source in zip(form.columns, form.sources or (), strict=False) if source.follows]
    return {number: form.stored.leaves[number] for number in sorted(set(found))}


def _with_advice(refused: NoRoomError, sharing: Sharing) -> NoRoomError:
    """The error of a write that there is no room for, with what to do about it."""
    return NoRoomError(
        f"{refused}. Ways out: more room, next_capacity={sharing.slots} at present; share_next=False, if most rows are "
        "not continued by the row behind; or, if several environments write to the storage in turn, ndim=2"
    )


class SharedRows(ComputedRows):
    """How a storage with ``share_next`` allocates and writes: see :class:`LazyTensorStorage`."""

    sharing: Sharing | None
    _share_next: bool | tuple[Any, ...] = False
    _next_capacity: int | None = None
    #: Makes a change that was interrupted again.
    _redo: Callable[[], None] | None = None

    def _share(self, share_next: bool | Sequence[Any], next_capacity: int | None) -> None:
        """Take the options. Keys are looked for when the first batch shows which there are."""
        if isinstance(share_next, str):
            raise TypeError(f"share_next is True or a list of keys, got {share_next!r}")
        if next_capacity is not None and not share_next:
            raise ValueError("next_capacity is for storages with share_next")
        if next_capacity is not None:
            check_count(next_capacity, "next_capacity")
        self._share_next = share_next if isinstance(share_next, bool) else tuple(share_next)
        self._next_capacity = next_capacity
        self.computed = self.computed or bool(share_next)

    # Memory

    def form_like(self, layout: RowLayout) -> Form:
        return Form.of(layout, with_shared(layout.leaves, self._options, self._share_next))

    def _place(self, data_device: torch.device, form: Form, shape: tuple[int, ...]) -> Placement:
        shared, n = shared_columns(form), math.prod(shape)
        if not shared:
            return super()._place(data_device, form, shape)
        row_bytes = sum(leaf.row_bytes for leaf in shared.values())
        aside, links = side_bytes(row_bytes, n, math.prod(shape[1:]), self._next_capacity)
        index = self.beside + super().derived_bytes(self.requested_device, shape) + IndexBytes(index=links)
        return place(self.requested_device, n * form.stored.row_bytes, index, shape, data_device, aside=aside)

    def derived_bytes(self, requested: torch.device | str, shape: tuple[int, ...]) -> IndexBytes:
        """See :class:`Followed`. Links are beside the rows."""
        links = 0 if self.sharing is None or not depends_on_room(requested) else self.sharing.link_bytes
        return super().derived_bytes(requested, shape) + IndexBytes(index=links)

    def _new_sharing(self, form: Form, shape: tuple[int, ...], placement: Placement, ring: Ring) -> Sharing | None:
        shared = shared_columns(form)
        if not shared:
            return None
        slots = entries_of(math.prod(shape), math.prod(shape[1:]), self._next_capacity)
        return Sharing(shared, slots, shape, placement, ring)

    def _make_tables(self, device: torch.device) -> None:
        super()._make_tables(device)
        if self.sharing is not None:
            self._raw_fields = into(self._raw_fields, field_table(self.sharing.raw_fields(self._columns), device))

    def relocated(self, placement: Placement) -> None:
        """See :class:`RowMemory`."""
        if self.sharing is not None:
            self.sharing.follow(placement.device)
        super().relocated(placement)

    # Writing

    def _extend_computed(self, sources: list[Tensor], n: int) -> Tensor:
        if self.sharing is not None and past_dispatcher(self.table):
            # One call of machine code: it is done or not done.
            try:
                return super()._extend_computed(sources, n)
            except NoRoomError as error:
                raise _with_advice(error, self.sharing) from None
        if self.sharing is None or _compiling() or capturing():
            return super()._extend_computed(sources, n)
        extend = functools.partial(super()._extend_computed, sources, n)
        # Several launches, of which the last one moves the counters. All may be made twice.
        self._redo = functools.partial(self._extend_unless_done, self.written, extend)
        try:
            index = extend()
        except Exception:
            self._redo = None
            raise
        self._redo = None
        return index

    def _extend_unless_done(self, written: int, extend: Callable[[], Tensor]) -> None:
        if int(self.ring[WRITTEN]) == written:
            extend()

    def _write_computed(self, sources: list[Tensor], index: Tensor) -> None:
        sharing = self.sharing
        if sharing is None:
            super()._write_computed(sources, index)
            return
        # The observations that are overwritten were also the next ones of the rows before.
        before = self._before(sharing, index)
        change = functools.partial(self._change, sources, index, before, self._raw_next(sharing, before))
        if _compiling():
            change(None)
            return
        kept = self._stored_rows(index)
        mark = self.begin(DERIVED)
        # If the change is interrupted, the next operation makes it again.
        self._redo = functools.partial(change, kept)
        try:
            self._redo()
        except NoRoomError:
            self._redo = None
            self.end(mark)
            raise
        self._redo = None
        self.end(mark)

    def redo(self) -> None:
        """Make a change again that was interrupted. One that there was no room for is undone."""
        if self._redo is not None:
            with contextlib.suppress(NoRoomError):
                self._redo()
            self._redo = None

    def _change(
        self, sources: list[Tensor], index: Tensor, before: Tensor, coming: list[Tensor], kept: list[Tensor] | None
    ) -> None:
        """Overwrite rows, and give those before them their next observations back.

        Raises:
            NoRoomError: there is no room aside. With ``kept``, what was stored, the rows are what they were.
        """
        try:
            super()._write_computed(sources, index)
            self._relink(self._raw_fields, coming, before)
            self._relink(self._written_fields, sources, index)
        except NoRoomError:
            if kept is not None:
                _write(self.table, kept, self.ring, index, self.max_size)
                # They are continued again: entries that were taken for them come free.
                self._relink(self._raw_fields, coming, before)
            raise

    def _relink(self, fields: Tensor | None, sources: list[Tensor], index: Tensor) -> None:
        sharing = self.sharing
        assert sharing is not None
        try:
            _relink(fields, sources, self.ring, index, self.max_size, self._envs, sharing.links, sharing.owners)
        except NoRoomError as error:
            raise _with_advice(error, sharing) from None

    def _before(self, sharing: Sharing, index: Tensor) -> Tensor:
        """The rows before those of ``index`` whose next observations are the observations of these.

        For each of ``index`` one: in place of others the first of them stands, or the first of ``index``.
        """
        before = torch.remainder(index - self._envs, self.max_size)
        leads_on = (before < self.ring[SIZE]) & (sharing.links[before] == IN_SUCCESSOR)
        first = leads_on.to(torch.uint8).argmax(0, keepdim=True)
        other = torch.where(leads_on[first], before[first], index[first])
        return torch.where(leads_on, before, other)

    def _raw_next(self, sharing: Sharing, index: Tensor) -> list[Tensor]:
        """Next observations as they are stored."""
        n = index.numel()
        leaves = list(sharing.leaves.values())
        offsets, n_bytes = arena_offsets([leaf.row_bytes for leaf in leaves], n)
        reading = None, sharing.links, None, self._envs
        arena = _gather(self._raw_fields, self.ring, index, self.max_size, n_bytes, *reading)[0]
        ends = [offset + n * leaf.row_bytes for offset, leaf in zip(offsets, leaves, strict=True)]
        return [
            arena[offset:end].view(leaf.dtype).view(n, *leaf.shape)
            for offset, end, leaf in zip(offsets, ends, leaves, strict=True)
        ]

    def _stored_rows(self, index: Tensor) -> list[Tensor] | None:
        """Copies of rows as they are stored, where a write can be refused: on the CPU."""
        if not past_dispatcher(self.table):
            return None
        tensors = self.layout.allocate(index.numel())
        _gather_rows(self.table, self.ring, in_memory(index), self.max_size, tensors)
        return tensors
