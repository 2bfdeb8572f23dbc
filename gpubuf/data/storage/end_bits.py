"""Bitmap of trajectory ends, one bit per row, and the ends that no flag tells."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from gpubuf.data.storage.layout import Leaf, address, as_written
from gpubuf.data.storage.placement import device_name
from gpubuf.data.storage.plan import Recipe
from gpubuf.data.storage.schema import NEXT_KEY, Schema, Source, continued_keys
from gpubuf.kernels import config, rows, trajectories
from gpubuf.kernels._registry import lazy, past_dispatcher, without_dispatch
from gpubuf.kernels.rows import ENTRY, SIZE, table_entry
from gpubuf.kernels.trajectories import Rule

FLAGS, CONTINUITY = "flags", "flags+continuity"
"""What ends a trajectory: values of the option ``ends`` of storages."""

_compare = without_dispatch(trajectories.compare, given=("index",))
_publish = without_dispatch(rows.write)
_update = without_dispatch(trajectories.update)
# Skips the sums, the bulk of an update.
_update_ends = lazy("gpubuf.kernels.trajectories._cpu:update_ends")
_prepared_ends = lazy("gpubuf.kernels.trajectories._cpu:prepared_ends")
# Every trajectory counts. Nothing is drawn by this rule: the bits alone are read.
_RULE = Rule(1)


def check_ends(ends: str) -> None:
    """Raise ValueError unless ``ends`` is a value of that option."""
    if ends not in (FLAGS, CONTINUITY):
        raise ValueError(f"ends must be {FLAGS!r} or {CONTINUITY!r}, got {ends!r}")


def compared_keys(leaves: Sequence[Leaf], sources: Sequence[Source] | None) -> list[tuple[int, int]]:
    """The keys whose rows are compared: a next observation and the observation it should be, by their positions.

    Args:
        leaves: the keys that are written.
        sources: what each of them is read from; None: from a column of its own.

    Raises:
        ValueError: there are none, or the two are not stored alike.
    """
    positions = {leaf.key: position for position, leaf in enumerate(leaves)}
    found = list[tuple[int, int]]()
    for key in continued_keys(leaves):
        root, coming = positions[key], positions[NEXT_KEY, *key]
        if sources is not None:
            one, other = sources[root], sources[coming]
            if one.whole is not None or other.whole is not None:
                # The longer key is compared.
                continue
            stored = [(source.stored, source.scale, source.offset) for source in (one, other)]
            if stored[0] != stored[1]:
                raise ValueError(
                    f"ends={CONTINUITY!r} compares the bytes of {as_written(key)!r} with those under 'next', but they "
                    f"are stored with (dtype, scale, offset) = {stored[0]} and {stored[1]}: store them alike"
                )
        found.append((coming, root))
    if not found:
        raise ValueError(
            f"ends={CONTINUITY!r} finds nothing to compare: it takes keys at the root and under 'next', of one shape "
            f"and dtype, but for flags and rewards; there are {[as_written(leaf.key) for leaf in leaves]}"
        )
    return found


class Breaks:
    """Where a row's next observation is not the observation of the row after it: a byte per row, kept by a storage.

    Rows are told apart by the bytes that are stored. Samplers and :class:`EndBits` read :attr:`entries` as they read
    stored flags; what moves has its addresses changed in place, since a captured graph reads them.

    Attributes:
        rows: uint8 ``[capacity]``, the flags; None while the storage is not allocated, or if all observations are
            stored once.
        entries: int64 ``[K, 5]``, entries of a table of :mod:`gpubuf.kernels.rows`: flags that end trajectories. The
            links of observations stored once are such flags.
        positions: the keys that are compared, by their positions among those that are written.
        columns: and among those that are stored.
    """

    def __init__(self) -> None:
        self.rows: Tensor | None = None
        self.entries = torch.empty((0, ENTRY), dtype=torch.int64)
        self.positions: frozenset[int] = frozenset()
        self.columns: frozenset[int] = frozenset()
        self._pairs: Tensor | None = None
        self._places: list[int] = []
        self._flags: list[Tensor] = []
        self._steps, self._envs = 0, 1

    @property
    def nbytes(self) -> int:
        """Bytes that are taken."""
        return 0 if self.rows is None else self.rows.nbytes

    def allocate(self, schema: Schema, shape: Sequence[int], table: Tensor, links: Tensor | None) -> None:
        """Begin anew for a storage of ``shape``, on the device of its ``table`` of addresses.

        Raises:
            ValueError: as :func:`compared_keys`.
        """
        # An observation stored once has one column for both: its links tell where the next row does not continue it.
        keys = compared_keys(schema.written.leaves, schema.sources)
        found = [(schema.columns[coming], schema.columns[root]) for coming, root in keys]
        self.columns = frozenset(column for pair in found for column in pair)
        self.positions = frozenset(i for i, column in enumerate(schema.columns) if column in self.columns)
        self._places = [column for pair in found if pair[0] != pair[1] for column in pair]
        self._steps, self._envs = shape[0], math.prod(shape[1:])
        self.rows = self._pairs = None
        if self._places:
            self.rows = torch.zeros(self._steps * self._envs, dtype=torch.uint8, device=table.device)
            self._pairs = torch.stack([table[place] for place in self._places])
        self._flags = [flags for flags in (self.rows, links) if flags is not None]
        self.entries = self._addresses().to(table.device, non_blocking=True)

    def _addresses(self) -> Tensor:
        return torch.tensor([table_entry(address(flags), flags.element_size()) for flags in self._flags])

    @property
    def found(self) -> Tensor:
        """Whether each row is not continued, bool ``[capacity]``. The newest step has no next one, and is."""
        return torch.stack([flags != 0 for flags in self._flags]).any(0)

    def readdress(self, table: Tensor) -> None:
        """Read observations and flags where they are now."""
        if self._pairs is not None:
            self._pairs.copy_(torch.stack([table[place] for place in self._places]))
        self.entries.copy_(self._addresses(), non_blocking=True)

    def write(self, ring: Tensor, steps: int, index: Tensor) -> None:
        """The newest ``steps`` steps were written, at ``index`` (int64 ``[n]``, flat). No host sync."""
        self._compare(ring, None, steps)
        if torch.compiler.is_compiling():
            self._publish(ring, index)

    def rewrite(self, ring: Tensor, index: Tensor) -> None:
        """Rows of ``index`` (int64 ``[n]``, flat) were changed in place. No host sync."""
        self._compare(ring, index, 0)
        if torch.compiler.is_compiling():
            self._publish(ring, index)

    def _compare(self, ring: Tensor, index: Tensor | None, steps: int) -> None:
        if self.rows is not None:
            _compare(self.rows, ring, self._pairs, index, steps, self._steps, self._envs)

    def _publish(self, ring: Tensor, index: Tensor) -> None:
        """Bring the flags of ``index`` and of the steps before to where :attr:`entries` say.

        Compiled code may hold a tensor that an operation changes in a copy, and would put it back in the end; the
        bitmap of ends reads flags by address before that.
        """
        capacity = self._steps * self._envs
        index = torch.remainder(torch.cat([index, index - self._envs]), capacity)
        # Row 0 in place of rows that are not stored.
        index = torch.where(index < ring[SIZE], index, 0)
        _publish(self.entries, [flags[index] for flags in self._flags], ring, index, capacity)

    def rebuild(self, ring: Tensor) -> None:
        """Compare all rows anew, O(capacity). No host sync."""
        self._compare(ring, None, self._steps)

    def free(self) -> None:
        """Release the memory."""
        self.__init__()  # type: ignore[misc]


def bitmap_bytes(shape: Sequence[int], device_type: str) -> int:
    """Bytes of a bitmap of ends and the sums above it, for a storage of ``shape`` on the current device of a type."""
    steps, envs = shape[0], math.prod(shape[1:])
    fan_out = config.index_fan_out(steps, envs, device_type, device_name(device_type))
    return 8 * (sum(trajectories.bit_levels(steps, envs)) + sum(trajectories.level_sizes(steps, envs, fan_out)))


class EndBits:
    """Level 0 and above of the bitmap of :mod:`gpubuf.kernels.trajectories`, kept by a storage with its rows.

    It does not refer to the storage, which refers to it: such a cycle would keep both in memory.

    Args:
        recipe: says which keys tell the ends.
        breaks: of the storage, which end trajectories too; None: flags alone do.

    Attributes:
        words: the bitmap; None while the storage is not allocated.
    """

    def __init__(self, recipe: Recipe, breaks: Breaks | None = None) -> None:
        self._recipe, self._breaks = recipe, breaks
        self.words: Tensor | None = None
        self._sums: Tensor | None = None
        self._signals: Tensor | None = None
        # Which keys tell the ends: as they are written, and their columns.
        self._positions: tuple[int, ...] = ()
        self._columns: tuple[int, ...] = ()
        self._by_id = False
        self._steps, self._envs, self._fan_out = 0, 1, 2
        # The last update that was prepared: for which memory and number of rows, and what makes it.
        self._prepared: tuple[Any, ...] = (None, None, None, 0, None)

    def __getstate__(self) -> dict[str, Any]:
        """Without addresses."""
        return {**vars(self), "_signals": None, "_prepared": (None, None, None, 0, None)}

    def serves(self, recipe: Recipe) -> bool:
        """Whether these are the ends that ``recipe`` asks for."""
        return (recipe.end_keys, recipe.traj_key) == (self._recipe.end_keys, self._recipe.traj_key)

    def depend_on(self, keys: Sequence[int]) -> bool:
        """Whether one of these keys (positions in the layout of rows as they are written) tells the ends."""
        return not set(keys).isdisjoint(self._positions)

    @property
    def nbytes(self) -> int:
        """Bytes that are taken."""
        return 0 if self.words is None or self._sums is None else self.words.nbytes + self._sums.nbytes

    def allocate(self, schema: Schema, shape: Sequence[int], table: Tensor) -> None:
        """Begin anew for a storage of ``shape`` without any rows, on the device of its ``table`` of addresses."""
        device = table.device
        self._positions, self._by_id = self._recipe.ends(schema)
        self._columns = tuple(schema.columns[position] for position in self._positions)
        self._steps, self._envs = shape[0], math.prod(shape[1:])
        self._fan_out = config.index_fan_out(self._steps, self._envs, device.type, device_name(device))
        words, self._sums = trajectories.new_index(self._steps, self._envs, self._fan_out, device)
        self._signals = self._addresses(table)
        self.words = words

    def _addresses(self, table: Tensor) -> Tensor:
        flags = torch.stack([table[position] for position in self._columns])
        return flags if self._breaks is None else torch.cat([flags, self._breaks.entries])

    def readdress(self, table: Tensor) -> None:
        """Read the flags where they are now; in place, since a captured graph reads the addresses from there."""
        if self._signals is None:
            self._signals = self._addresses(table)
        else:
            self._signals.copy_(self._addresses(table))

    def write(self, ring: Tensor, rows: int) -> None:
        """The newest ``rows`` rows were written. No host sync."""
        words, written = self.words, (self._touched(rows), self._steps, self._envs)
        if past_dispatcher(words):  # type: ignore[arg-type]
            _update_ends(words, ring, self._signals, self._by_id, *written)
        else:
            _update(words, self._sums, ring, self._signals, self._by_id, *written, self._fan_out, *_RULE)

    def _touched(self, rows: int) -> int:
        """The steps that a write of ``rows`` rows may have made ends of: the one before is followed now."""
        return rows // self._envs + (self._breaks is not None)

    def write_again(self, ring: Tensor, rows: int) -> None:
        """:meth:`write` in eager mode on the CPU, in less time for who writes as many rows each time."""
        words, counters, signals, n, update = self._prepared
        if words is not self.words or counters is not ring or signals is not self._signals or n != rows:
            written = self._touched(rows), self._steps, self._envs
            update = _prepared_ends(self.words, ring, self._signals, self._by_id, *written)
            self._prepared = self.words, ring, self._signals, rows, update
        update()

    def rebuild(self, ring: Tensor) -> None:
        """Rows were changed in place: index all of them anew, O(capacity). No host sync."""
        self.write(ring, self._steps * self._envs)

    def clear(self) -> None:
        """Forget every end."""
        if self.words is not None and self._sums is not None:
            self.words.zero_()
            self._sums.zero_()

    def free(self) -> None:
        """Release the memory."""
        self.words = self._sums = self._signals = None
