"""The state of a storage, for checkpoints: its rows, as they are stored, and its counters."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from gpubuf.data.storage import host_memory
from gpubuf.data.storage.host_rows import saved_host
from gpubuf.data.storage.layout import Data, Pieces, RowLayout, batch_shape, device_of, saved_tree, with_tree
from gpubuf.data.storage.schema import Form, Options, check_same, described, written_leaves
from gpubuf.data.storage.shared_rows import SharedRows


class CustomRows(Protocol):
    """Saves and reads the rows of one storage in a form of its own, in place of a checkpoint's."""

    @property
    def name(self) -> str:
        """What a checkpoint says about who has saved its rows."""

    def save(self, folder: Path) -> None:
        """Write the rows into a folder that does not exist yet. Synchronises."""

    def load(self, folder: Path, shape: tuple[int, ...] | None = None) -> tuple[Data, int]:
        """All rows of the storage that was saved, also those never written, and the number of those that were.

        ``shape`` is that of the storage; None: unknown.
        """


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


class SavedRows(SharedRows):
    """Saves and restores the rows of a :class:`TensorStorage`."""

    def state_dict(self) -> dict[str, Any]:
        """Rows (views, not copies), counters and shape. Synchronises with the device, and refreshes ``len()``.

        The rows of a storage in two places are a list of two batches, which follow each other. They are as they are
        stored; that of a computed storage says in ``"form"`` what was written.
        """
        if self._layout is None:
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
        return {**state, "form": described(self.form)} if self.computed else state

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

        A storage of the same capacity continues exactly. One with more room takes the rows oldest first.
        ``state["rows"]`` may be one batch, batches that follow each other, or :class:`Pieces`.

        Returns:
            None, or, where the capacity differs, int64 ``[size]`` on the CPU: the old position of every row, in
            the order in which they now lie from position 0. Samplers put their state in the same order.

        Raises:
            ValueError: the rows have other keys, shapes or dtypes than this storage's, or are stored in another way,
                or don't fit.
        """
        if not state["initialized"]:
            self.empty()
            return None
        pieces = Pieces.of(state["rows"], self.ndim)
        data, size, old_max = pieces.example, state["size"], state["max_size"]
        shape = tuple(state["shape"])
        fresh = self._layout is None
        form = self.form_of(data, state)
        form.stored.collect(data, self.ndim)
        own = self._shape[1:] if not fresh else shape[1:]
        if own != shape[1:]:
            raise ValueError(f"the checkpoint's rows have shape {shape}, the storage's {self._shape}")
        room = -(-self.max_size // math.prod(shape[1:])) * math.prod(shape[1:])
        if size > room:
            raise ValueError(f"the checkpoint holds {size} rows, the storage has room for {room}")
        if fresh:
            self._establish(form, self.full_shape(shape), device_of(data))
        order, first = None, 0
        if self.max_size == old_max:
            self.counters.set(state["written"], size)
            # Older checkpoints have none.
            self.counters.skipped = state.get("skipped", 0)
            rewritten = state.get("rewritten")
            self.counters.rewritten = None if rewritten is None else rewritten.to(self._device, copy=True)
        else:
            first = state["written"] % old_max if size == old_max else 0
            order = (torch.arange(size) + first) % old_max
            self.counters.set(size, size)
        per_step = math.prod(shape[1:])
        if self._rows_on_host:
            # The host is about to write where the GPU may still be reading.
            host_memory.synchronize(self._device)
        if self.host is not None:
            self.host.load(state["host"], order)
        for start, part in pieces.parts:
            # The oldest step comes to lie first: all others turn with it.
            place = (start - first // per_step) % (old_max // per_step)
            for column, source in zip(self._columns, form.stored.collect(part, self.ndim), strict=True):
                before_seam = min(source.shape[0], old_max // per_step - place)
                column.write(place, source[:before_seam])
                column.write(0, source[before_seam:])
        self.rebuild()
        return order

    def form_for(self, state: dict[str, Any]) -> Form:
        """The form of the rows of a state: that of this storage. Raises as :meth:`form_of`."""
        return self.form_of(Pieces.of(state["rows"], self.ndim).example, state)

    def form_of(self, data: Data, state: dict[str, Any]) -> Form:
        """The form of the rows of a state: that of this storage.

        Args:
            data: rows as they are stored.
            state: what says in ``"form"`` what was written, if that is not what is stored, in ``"tree"`` in which
                containers, and in ``"host"`` what is not in tensors. A storage that has rows keeps its own containers.

        Raises:
            ValueError: this storage has, or would have, another one.
        """
        saved, host = state.get("form"), saved_host(state)
        if self._form is not None and self._form.written.host != host:
            own = list(self._form.written.host)
            raise ValueError(f"the state has the keys {list(host)} that are not tensors, the storage has {own}")
        if self._form is not None and not self.computed and saved is None:
            return self._form
        stored = RowLayout(data, self.ndim, self.ignored_keys)
        form = self._form
        if form is None:
            written = stored if saved is None else stored.with_leaves(written_leaves(saved))
            written.host = host
            form = self.form_like(with_tree(written, state.get("tree")))
        if self.computed or saved is not None:
            check_same(form, described(Form.of(stored, Options())) if saved is None else saved)
        return form
