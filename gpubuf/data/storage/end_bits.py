"""Where trajectories end: a bitmap, one bit per row, what tells these ends, and the ends that nothing stored tells."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gpubuf.data.recording import refuse_in_capture
from gpubuf.data.storage.layout import Leaf, address, as_written
from gpubuf.data.storage.placement import device_name
from gpubuf.data.storage.ring import Ring
from gpubuf.data.storage.schema import NEXT_KEY, Schema, Source, continued_keys
from gpubuf.kernels import config, rows, trajectories
from gpubuf.kernels._registry import lazy, past_dispatcher, without_dispatch
from gpubuf.kernels.rows import SIZE, table_entry
from gpubuf.kernels.trajectories import Rule

FLAGS, CONTINUITY = "flags", "flags+continuity"
"""What ends a trajectory: values of the option ``ends`` of storages."""

_compare = without_dispatch(trajectories.compare, given=("index",))
_publish = without_dispatch(rows.write)
_update = without_dispatch(trajectories.update)
# Skips the sums, the bulk of an update.
_prepared_ends = lazy("gpubuf.kernels.trajectories._cpu:prepared_ends")
_bounds = without_dispatch(trajectories.bounds, given=("row",))


def check_ends(ends: str) -> None:
    """Raise ValueError unless ``ends`` is a value of that option."""
    if ends not in (FLAGS, CONTINUITY):
        raise ValueError(f"ends must be {FLAGS!r} or {CONTINUITY!r}, got {ends!r}")


def compared_keys(leaves: Sequence[Leaf], sources: Sequence[Source]) -> list[tuple[int, int]]:
    """The keys whose rows are compared: a next observation and the observation it should be, by their positions.

    Args:
        leaves: the keys that are written.
        sources: what each of them is read from.

    Raises:
        ValueError: there are none, or the two are not stored alike.
    """
    positions = {leaf.key: position for position, leaf in enumerate(leaves)}
    found = list[tuple[int, int]]()
    for key in continued_keys(leaves):
        root, coming = positions[key], positions[NEXT_KEY, *key]
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


#: The streams that a write is of: the first step and the number of each, in order.
Streams = Sequence[tuple[int, int]]

#: What the process of the buffer writes itself. Other writers have numbers above 0.
OWN: Streams = ((0, 0),)


class Breaks:
    """Where the row after a row does not continue it, as far as no stored flag tells: kept by a storage.

    With ``compares``: where a row's next observation is not the observation of the row after it, a byte per row. Rows
    are told apart by the bytes that are stored. With ``cuts``: where the row after it is of another stream, that is of
    another writer, a byte per row, too.

    Samplers and :class:`EndBits` read :attr:`entries` as they read stored flags; what moves has its addresses changed
    in place, since a captured graph reads them.

    Args:
        schema: of the storage.
        shape: of the storage.
        table: its addresses, on the device that does the work.
        links: of observations that are stored once; None: none are.
        compares: whether next observations are compared.
        before: what a storage had on another device, whose cuts go on; None: nothing.
        cut: whether streams are kept apart.

    Attributes:
        rows: uint8 ``[capacity]``, the flags; None if none are compared, or all observations are stored once.
        cuts: uint8 ``[capacity]``, 1 where another stream follows; None: streams are not kept apart.
        entries: int64 ``[K, 5]``, entries of a table of :mod:`gpubuf.kernels.rows`: flags that end trajectories. The
            links of observations stored once are such flags.
        columns: the keys that are compared, by their positions among those that are stored.

    Raises:
        ValueError: as :func:`compared_keys`.
    """

    def __init__(
        self,
        schema: Schema,
        shape: Sequence[int],
        table: Tensor,
        links: Tensor | None,
        *,
        compares: bool = True,
        cut: bool = False,
        before: Breaks | None = None,
    ) -> None:
        # An observation stored once has one column for both: its links tell where the next row does not continue it.
        keys = compared_keys(schema.written.leaves, schema.sources) if compares else []
        found = [(schema.columns[coming], schema.columns[root]) for coming, root in keys]
        self.columns = frozenset(column for pair in found for column in pair)
        self._places = [column for pair in found if pair[0] != pair[1] for column in pair]
        self._steps, self._envs = shape[0], math.prod(shape[1:])
        self.rows: Tensor | None = None
        self._pairs: Tensor | None = None
        if self._places:
            self.rows = torch.zeros(self._steps * self._envs, dtype=torch.uint8, device=table.device)
            self._pairs = torch.stack([table[place] for place in self._places])
        self.cuts: Tensor | None = None
        # The stream of the newest row; None: unknown.
        self._stream: int | None = None
        # The streams of the last write, and the one before it.
        self._last: tuple[Streams, int | None] = OWN, None
        if cut:
            n = self._steps * self._envs
            self.cuts = torch.zeros(n, dtype=torch.uint8, device=table.device)
            if before is not None and before.cuts is not None:
                self.cuts.copy_(before.cuts)
                self._stream = before._stream
        self._flags = [flags for flags in (self.rows, links if compares else None, self.cuts) if flags is not None]
        self.entries = self._addresses().to(table.device, non_blocking=True)

    @property
    def nbytes(self) -> int:
        """Bytes that are taken."""
        return sum(flags.nbytes for flags in (self.rows, self.cuts) if flags is not None)

    def _addresses(self) -> Tensor:
        return torch.tensor([table_entry(address(flags), flags.element_size()) for flags in self._flags], device="cpu")

    @property
    def found(self) -> Tensor:
        """Whether each row is not continued, bool ``[capacity]``. The newest step has no next one, and is."""
        return torch.stack([flags != 0 for flags in self._flags]).any(0)

    def readdress(self, table: Tensor) -> None:
        """Read observations and flags where they are now."""
        if self._pairs is not None:
            self._pairs.copy_(torch.stack([table[place] for place in self._places]))
        self.entries.copy_(self._addresses(), non_blocking=True)

    def write(self, ring: Tensor, steps: int, index: Tensor, streams: Streams = OWN) -> None:
        """The newest ``steps`` steps were written, at ``index`` (int64 ``[n]``, flat). No host sync."""
        self._compare(ring, None, steps)
        if self.cuts is not None:
            self.cut(index, streams)
        if torch.compiler.is_compiling():
            self._publish(ring, index)

    def cut(self, index: Tensor, streams: Streams) -> None:
        """Rows were written at ``index`` (int64 ``[n]``, flat): cut them where the stream changes. No host sync.

        Does the same if it is done again with the same object, as after an interrupt.

        Raises:
            RuntimeError: in compiled code, which can't know the stream of the rows before.
            CaptureError: in a step that is being captured, which can't either.
        """
        assert self.cuts is not None
        if torch.compiler.is_compiling():
            raise RuntimeError("a buffer with writers is written in eager mode: call extend outside of compiled code")
        refuse_in_capture("a buffer with writers is written in eager mode: call extend before the captured step")
        # On the host NumPy takes a fraction of the time.
        here = index.is_cpu
        rows: Any = (index.numpy() if here else index).reshape(-1, self._envs)
        if streams is OWN or streams is not self._last[0]:
            self._last = streams, self._stream
        before, cut = self._last[1], list[Any]()
        for step, stream in streams:
            if stream != before and step > 0:
                cut.append(rows[step - 1])
            elif stream != before and len(rows) < self._steps:
                cut.append((rows[0] - self._envs) % self.cuts.numel())
            before = stream
        if here:
            flags = self.cuts.numpy()
            flags[rows] = 0
            for ended in cut:
                flags[ended] = 1
        else:
            self.cuts.index_fill_(0, index, 0)
            if cut:
                self.cuts.index_fill_(0, torch.cat(cut), 1)
        self._stream = before

    def load_cuts(self, saved: Tensor | None) -> None:
        """Take over where streams were cut, uint8 ``[size]`` from position 0 on; None: nowhere.

        What comes next is of another stream than the newest row.
        """
        if self.cuts is None:
            return
        self.cuts.zero_()
        self._stream = None
        if saved is not None:
            self.cuts[: len(saved)] = saved.to(self.cuts.device)

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

    def rebuild(self, ring: Tensor, index: Tensor | None = None) -> None:
        """Compare rows anew that were changed in place: those of ``index`` (int64 ``[n]``, flat), or all, O(capacity).

        No host sync.
        """
        self._compare(ring, index, self._steps if index is None else 0)
        if index is not None and torch.compiler.is_compiling():
            self._publish(ring, index)


def bitmap_bytes(shape: Sequence[int], device_type: str) -> int:
    """Bytes of a bitmap of ends and the sums above it, for a storage of ``shape`` on the current device of a type."""
    steps, envs = shape[0], math.prod(shape[1:])
    fan_out = config.index_fan_out(steps, envs, device_type, device_name(device_type))
    return 8 * (sum(trajectories.bit_levels(steps, envs)) + sum(trajectories.level_sizes(steps, envs, fan_out)))


@dataclass(frozen=True)
class Signal:
    """Tells where the trajectories of a storage end.

    Attributes:
        columns: the stored keys that tell, by their positions.
        by_id: they are identifiers, whose change ends a trajectory, instead of flags.
        assumed: the flags were chosen by default, not by the user.
        fixed: a tensor ``[max_size]`` on the storage's device that tells in place of stored keys.
    """

    columns: tuple[int, ...]
    by_id: bool
    assumed: bool = False
    fixed: Tensor | None = None

    def entries(self, table: Tensor) -> Tensor:
        """Where to read it, by the ``table`` of the storage: int64 ``[K, 5]``, see :mod:`gpubuf.kernels.rows`."""
        if self.fixed is None:
            return torch.stack([table[column] for column in self.columns])
        entry = torch.tensor([table_entry(address(self.fixed), self.fixed.element_size())], device="cpu")
        return entry.to(table.device, non_blocking=True)

    def to(self, device: torch.device) -> Signal:
        """The same signal on another device."""
        return self if self.fixed is None else dataclasses.replace(self, fixed=self.fixed.to(device))


class EndBits:
    """The bitmap of :mod:`gpubuf.kernels.trajectories` with the levels above it, kept up to date with the rows.

    It does not refer to the storage: that keeps one for n-step transitions, sequences, hindsight. No host sync.

    Args:
        signal: tells where trajectories end.
        ring: counts the rows of the storage.
        shape: of the storage.
        table: its addresses, on the device that does the work.
        breaks: of the storage, which end trajectories too; None: the signal alone does.

    Attributes:
        ends: the bitmap, int64.
        sums: weights of its words, and their sums.
        signal: as given.
        table: where the signal is read, and the breaks. It changes in place: captured graphs read it.
        steps: steps of the ring, the first dimension of the storage.
        envs: environments, the product of its other dimensions.
    """

    def __init__(
        self, signal: Signal, ring: Ring, shape: Sequence[int], table: Tensor, breaks: Breaks | None = None
    ) -> None:
        self.signal = signal
        self._ring, self._breaks = ring, breaks
        self.steps, self.envs = shape[0], math.prod(shape[1:])
        device = table.device
        self.fan_out = config.index_fan_out(self.steps, self.envs, device.type, device_name(device))
        self.ends, self.sums = trajectories.new_index(self.steps, self.envs, self.fan_out, device)
        self.table = self._addresses(table)
        # Every trajectory counts, as long as nothing else is said.
        self.rule = Rule(1)
        # The last arguments of the operations, put together once.
        self._shape_and_rule = (self.steps, self.envs, self.fan_out, *self.rule)
        # The last update that was prepared: for which memory and number of steps, and what makes it.
        self._prepared: tuple[Any, ...] = (None, None, None, 0, None)

    def __getstate__(self) -> dict[str, Any]:
        """Without addresses."""
        return {**vars(self), "table": None, "_prepared": (None, None, None, 0, None)}

    @property
    def nbytes(self) -> int:
        """Bytes that are taken."""
        fixed = self.signal.fixed
        return self.ends.nbytes + self.sums.nbytes + (0 if fixed is None else fixed.nbytes)

    def depends_on(self, columns: Iterable[int]) -> bool:
        """Whether one of these stored keys tells the ends."""
        told = self.signal.columns if self._breaks is None else {*self.signal.columns, *self._breaks.columns}
        return not set(told).isdisjoint(columns)

    def _addresses(self, table: Tensor) -> Tensor:
        own = self.signal.entries(table)
        return own if self._breaks is None else torch.cat([own, self._breaks.entries])

    def readdress(self, table: Tensor) -> None:
        """Read the signal where it is now."""
        found = self._addresses(table)
        self.table = found if self.table is None else self.table.copy_(found)

    # Writing

    def write(self, n: int) -> None:
        """The newest ``n`` steps were written."""
        if past_dispatcher(self.ends):
            _prepared_ends(self.ends, *self._written(n), self.steps, self.envs)()
        else:
            self._update(n)

    def _update(self, n: int) -> None:
        """Index the newest ``n`` steps, and sum the weights by the rule."""
        _update(self.ends, self.sums, *self._written(n), *self._shape_and_rule)

    def _written(self, n: int) -> tuple[Any, ...]:
        # Where rows are compared with the next ones, the step before the write is followed now.
        return self._ring.counters, self.table, self.signal.by_id, n + (self._breaks is not None)

    def write_again(self, n: int) -> None:
        """:meth:`write` in eager mode on the CPU, in less time for who writes as many steps each time."""
        ends, counters, table, known, update = self._prepared
        if ends is not self.ends or counters is not self._ring.counters or table is not self.table or n != known:
            update = _prepared_ends(self.ends, *self._written(n), self.steps, self.envs)
            self._prepared = self.ends, self._ring.counters, self.table, n, update
        update()

    def rebuild(self) -> None:
        """Index all rows anew, after they were changed by others. O(capacity)."""
        self.write(self.steps)

    def clear(self) -> None:
        """Forget every end."""
        self.ends.zero_()
        self.sums.zero_()

    # Reading

    def bounds(self, row: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """First row, last row and length of the trajectories that rows belong to.

        Args:
            row: int64 ``[n]``, flat, on the storage's device.

        Raises:
            IndexError: a row is not stored (CPU; on a GPU its rows are ``NO_ROW``, and its length 0).
        """
        first, last, length = _bounds(self.ends, self._ring.counters, row, self.steps, self.envs)
        return first, last, length
