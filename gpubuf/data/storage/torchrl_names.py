"""Names of TorchRL's storages that its users call, and what a buffer asks of a storage about rows in other forms."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from gpubuf.data.storage.checkpointers import SavesItself
from gpubuf.data.storage.indexing import contained, unravel
from gpubuf.data.storage.layout import Data, batch_shape
from gpubuf.data.storage.row_memory import NOT_INITIALIZED
from gpubuf.data.storage.trees import mapped, stacked

_warned: set[str] = set()


def warn_of_no_effect(**options: bool) -> None:
    """Warn once a process of each option that is set: TorchRL's has no counterpart, and programs go on without it."""
    for name, value in options.items():
        if value and name not in _warned:
            _warned.add(name)
            warnings.warn(f"{name}=True has no effect in gpubuf: a storage belongs to one process", stacklevel=4)


class TorchRLNames(SavesItself):
    """Adds to a :class:`TensorStorage` what TorchRL's users read and call beside indexing."""

    def append(self, data: Data) -> Tensor:
        raise NotImplementedError

    def write(self, index: Tensor, data: Data) -> None:
        raise NotImplementedError

    def __setitem__(self, index: Any, data: Data) -> None:
        raise NotImplementedError

    #: Makes a batch of what a draw or an index gives, where the buffer has no ``collate_fn``; None: it is one.
    default_collate: Callable[[Any], Any] | None = None

    # Rows in other forms

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

    # Writing

    def set(self, cursor: Any, data: Data, *, set_cursor: bool = True) -> None:
        """Write rows at positions of your choice, also before the first write and behind the rows stored.

        Rows that are stored are overwritten in place, as by ``storage[cursor] = data``. Rows behind them are added,
        and :meth:`~gpubuf.ReplayBuffer.extend` goes on behind those. A sampler with priorities does not hear of
        either: announce them with ``buffer.mark_update(index)``.

        Args:
            cursor: an int, a slice, a sequence, a tensor, or ``...`` for all rows.
            data: a row for each position, or one row for all of them. Under an int: one row.
            set_cursor: False writes to stored rows only.

        Raises:
            IndexError: rows would be left out: those behind the stored ones must follow them without a gap.
            ValueError: a key, shape or dtype differs from the storage's.
            NotImplementedError: rows are added to a storage of several dimensions. An index on a GPU synchronises.
        """
        size = len(self)
        if not set_cursor and self._layout is None:
            raise RuntimeError(NOT_INITIALIZED)
        if not set_cursor or (size == self.max_size and cursor is not Ellipsis):
            self[cursor] = data
            return
        one = isinstance(cursor, int) or (isinstance(cursor, Tensor) and cursor.ndim == 0)
        rows = self.as_batch(data, 0) if one else data
        if isinstance(rows, list):
            rows = self.batch_of(rows)
        positions = self._chosen_positions(cursor, rows)
        beyond = [number for number, position in enumerate(positions) if position >= size]
        if not beyond:
            self[torch.tensor(positions, dtype=torch.int64)] = rows
            return
        if self.ndim > 1:
            raise NotImplementedError("rows are added to a storage of several dimensions by extend()")
        # Of duplicates the last one counts.
        last = {positions[number]: number for number in beyond}
        if sorted(last) != list(range(size, size + len(last))) or max(last) >= self.max_size:
            raise IndexError(
                f"{size} of {self.max_size} rows are stored: rows are added at {size}, {size + 1} and so on without a "
                f"gap, got {sorted(last)[:8]}"
            )
        new = torch.tensor([last[position] for position in sorted(last)], dtype=torch.int64)
        self.append(mapped(rows, lambda value: value[new.to(value.device or new.device)]))
        self.end(None)
        if len(beyond) < len(positions):
            old = torch.tensor([number for number, position in enumerate(positions) if position < size])
            index = torch.tensor([position for position in positions if position < size])
            self[index] = mapped(rows, lambda value: value[old.to(value.device or old.device)])

    def _chosen_positions(self, cursor: Any, rows: Data) -> list[int]:
        size = len(self)
        if cursor is Ellipsis:
            cursor = slice(None)
        if isinstance(cursor, slice):
            from_zero = cursor.start in (None, 0) and cursor.stop is None
            reach = max(size, _length(rows)) if from_zero else self.max_size
            cursor = range(*cursor.indices(reach))
        index = cursor if isinstance(cursor, Tensor) else torch.as_tensor(cursor)
        if index.dtype is torch.bool:
            index = index.nonzero()
        found: list[int] = [position + size if position < 0 else position for position in index.reshape(-1).tolist()]
        if any(position < 0 for position in found):
            raise IndexError(f"index out of range: {size} rows are stored, got {found[:8]}")
        return found

    # The buffers that read from the storage

    #: Single keys of rows can be written, if they were not overwritten since: by ``update_if_present`` of a buffer.
    supports_conditional_update = True

    def attach(self, buffer: Any) -> None:
        """Nothing, for a buffer of this storage: a write tells its sampler.

        Raises:
            NotImplementedError: it is the buffer of another storage, or something else.
        """
        if getattr(buffer, "storage", None) is not self:
            raise NotImplementedError(
                f"a {type(buffer).__name__} is not told of writes to a storage that it was not made with: call its "
                "mark_update() with the result of extend()"
            )

    # Reading

    @property
    def gives_views(self) -> bool:
        """Whether ints and slices give views of the rows."""
        return not (self._rows_on_host or self.computed or self.host is not None)

    def contains(self, index: int | Tensor) -> bool | Tensor:
        """Whether a row is stored at ``index``; of a tensor, for each. See :func:`~.indexing.contained`."""
        return contained(index, self.shape, len(self))

    @property
    def _len(self) -> int:
        """The number of rows, as programs for TorchRL read it."""
        return len(self)

    @property
    def _storage(self) -> Data:
        """All rows, also those that were not written yet, ``[*shape, ...]``: views, as programs for TorchRL read them.

        None before the first write.

        Raises:
            NotImplementedError: the rows are not in memory as they were written, or in two places.
        """
        if self._layout is None:
            return None
        if self.computed or any(len(column.parts) > 1 for column in self._columns):
            raise NotImplementedError(
                "the rows of this storage are not in memory as they were written: read them by storage[index]"
            )
        tensors = [column.whole for column in self._columns]
        return self.written_layout.assemble(tensors, tuple(self._shape), self.rows_device)

    def _rand_given_ndim(self, batch_size: int) -> Tensor | tuple[Tensor, ...]:
        """An index of rows drawn uniformly, with torch's generator: samplers written for TorchRL call this."""
        flat = torch.randint(len(self), (batch_size,), device=self.device)
        return flat if self.ndim == 1 else unravel(flat, self.shape).unbind(-1)


def _length(rows: Data) -> int:
    return math.prod(batch_shape(rows, 1))
