"""Data of rows that are not tensors, such as text: lists on the host, which keep up with the ring.

The kernels know nothing of them. A draw reads them by its index, which on a GPU is a wait for it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from tensordict import NonTensorData, NonTensorStack, TensorDictBase, is_non_tensor, is_tensorclass
from torch import Tensor

from gpubuf.data.recording import at_replays
from gpubuf.data.storage.containers import Data
from gpubuf.data.storage.layout import Key, as_written
from gpubuf.data.storage.plan import RowPlan
from gpubuf.data.storage.ring import Ring

_PLAIN = (str, bytes, int, float, bool, type(None))


class _Pending(NamedTuple):
    """Rows of a write that may not have been made yet: how many had ever been written before, and what comes."""

    written: int
    rows: dict[Key, list[Any]]


class HostRows:
    """A list of values for each key that is not a tensor, by position in the storage.

    Args:
        keys: the keys, and the batch dimensions that a row of each has.
        capacity: number of positions.
        ring: counts the rows of the storage.

    Attributes:
        columns: the values at the positions written so far.
        nbytes: 0, for they are in the host's memory.
    """

    nbytes = 0

    def __init__(self, keys: Mapping[Key, tuple[int, ...]], capacity: int, ring: Ring) -> None:
        self.keys = dict(keys)
        self._ring = ring
        self.columns: dict[Key, list[Any]] = {key: [] for key in keys}
        self._capacity = capacity
        self._pending: _Pending | None = None

    # Writing

    def expect(self, rows: dict[Key, list[Any]]) -> None:
        """Rows, the values of each key, are about to be written; :meth:`on_write` puts them in place.

        Raises:
            CaptureError: a graph is being captured.
        """
        at_replays().refuse("data that are not tensors are written by the host: write them outside of the step")
        self._pending = _Pending(self._ring.written, rows)

    def on_write(self, index: Tensor) -> None:
        """Put the expected rows in place, now that they have been written."""
        pending = self._pending
        if pending is not None and self._ring.written > pending.written:
            for key, values in pending.rows.items():
                n = min(len(values), self._capacity)
                self._put_at((pending.written + len(values) - n) % self._capacity, self.columns[key], values[-n:])
        self._pending = None

    def rebuild(self) -> None:
        """Nothing is derived from them."""

    def _put_at(self, start: int, column: list[Any], values: list[Any]) -> None:
        """Write around the seam. The column grows up to the capacity."""
        if len(column) < start:
            column += [None] * (start - len(column))
        before_seam = self._capacity - start
        column[start : start + len(values)] = values[:before_seam]
        column[: max(len(values) - before_seam, 0)] = values[before_seam:]

    def put(self, index: Sequence[int], rows: dict[Key, list[Any]]) -> None:
        """Overwrite rows in place; of duplicates the last one wins."""
        for key, values in rows.items():
            column = self.columns[key]
            column += [None] * (max(index, default=-1) + 1 - len(column))
            for position, value in zip(index, values, strict=True):
                column[position] = value

    def rows_of(self, data: Data, ndim: int) -> dict[Key, list[Any]]:
        """The values of a batch, one for each row: nested lists where rows have batch dimensions.

        Raises:
            ValueError: a key is missing, or its rows have other dimensions.
        """
        found: dict[Key, list[Any]] = {}
        for key, dims in self.keys.items():
            value: Any = data
            for name in key:
                value = _entries(value).get(name)
            if value is None or not is_non_tensor(value):
                raise ValueError(
                    f"the batch's keys differ from the storage's: missing {as_written(key)!r}, not a tensor"
                )
            if tuple(value.batch_size[ndim:]) != dims:
                raise ValueError(
                    f"key {as_written(key)!r}: the storage holds rows of shape {dims}, the batch rows of shape "
                    f"{tuple(value.batch_size[ndim:])}"
                )
            values = value.tolist()
            for _ in range(ndim - 1):
                values = [row for step in values for row in step]
            found[key] = values
        return found

    # Reading

    def entries(self, index: Tensor, shape: tuple[int, ...]) -> dict[Any, Any]:
        """The values of rows, as they go into a batch of ``shape``. Synchronises if ``index`` is on a GPU."""
        positions = index.tolist()
        return {
            key: _batch([column[position] for position in positions], shape, self.keys[key])
            for key, column in self.columns.items()
        }

    def assembled(
        self, reader: RowPlan, tensors: list[Tensor], index: Tensor, shape: tuple[int, ...], info: dict[Any, Any]
    ) -> Data:
        """A batch of ``shape`` with these values in it, and with ``info``."""
        return reader.layout.assemble(tensors, shape, reader.device, {**info, **self.entries(index, shape)})

    # State

    def clear(self) -> None:
        """Drop all values."""
        for column in self.columns.values():
            column.clear()
        self._pending = None

    def state(self, size: int) -> dict[str, Any]:
        """The values of the first ``size`` positions."""
        columns = self.columns.items()
        return {
            "host": [{"key": list(key), "shape": list(self.keys[key]), "rows": rows[:size]} for key, rows in columns]
        }

    def load(self, state: dict[str, Any], order: Tensor | None) -> None:
        """Restore :meth:`state`; ``order``: the old positions of the rows, in the order in which they lie now."""
        self._pending = None
        for entry in state["host"]:
            rows = list(entry["rows"])
            self.columns[tuple(entry["key"])] = rows if order is None else [rows[i] for i in order.tolist()]


def saved_host(state: Mapping[str, Any]) -> dict[Key, tuple[int, ...]]:
    """The keys of the state of a storage that are not tensors, and their batch dimensions.

    Raises:
        ValueError: what it says about them contradicts itself.
    """
    found: dict[Key, tuple[int, ...]] = {}
    try:
        for entry in state.get("host", ()):
            found[tuple(map(str, entry["key"]))] = tuple(map(int, entry["shape"]))
            if not isinstance(entry["rows"], list) or len(entry["rows"]) != state["size"]:
                raise ValueError(f"{entry['key']!r} does not have {state['size']} rows")
    except (LookupError, RuntimeError, TypeError, ValueError) as error:
        raise ValueError(f"the state does not hold the data that are not tensors: {error!r}") from None
    return found


def _entries(data: Any) -> Mapping[str, Any]:
    """The entries of a TensorDict or tensorclass; of anything else none."""
    if is_tensorclass(data):
        data = data._tensordict
    return dict(data.items()) if isinstance(data, TensorDictBase) else {}


def _batch(values: list[Any], shape: tuple[int, ...], dims: tuple[int, ...]) -> Any:
    """Values of rows as an entry of a TensorDict of ``shape``; each is nested lists of ``dims``."""
    n = math.prod(shape)
    if n == 0 or math.prod(dims) == 0:
        return NonTensorData(None, batch_size=(*shape, *dims))
    for length in reversed(shape[1:]):
        values = [values[start : start + length] for start in range(0, len(values), length)]
    return _stack(values if shape else values[0], (*shape, *dims))


def _stack(values: Any, shape: tuple[int, ...]) -> Any:
    if not shape:
        return NonTensorData(values)
    if len(shape) == 1 and all(isinstance(value, _PLAIN) for value in values):
        # A sixth of the time.
        return NonTensorStack.from_list(values)
    return NonTensorStack(*(_stack(value, shape[1:]) for value in values))
