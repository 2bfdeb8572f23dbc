"""Where trajectories end: a bitmap, one bit per row, the stored keys that tell these ends, and marks of others."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gpubuf.data.recording import at_replays
from gpubuf.data.storage.layout import address
from gpubuf.data.storage.placement import device_name
from gpubuf.data.storage.ring import Ring
from gpubuf.kernels import config, trajectories
from gpubuf.kernels._registry import Backend, past_dispatcher, without_dispatch
from gpubuf.kernels.rows import WRITTEN, table_entry
from gpubuf.kernels.trajectories import Demand, Rule

_update = without_dispatch(trajectories.update)
_update_eligible = without_dispatch(trajectories.update_eligible)
_update_returns = without_dispatch(trajectories.update_returns)
_cpu = Backend("gpubuf.kernels.trajectories._cpu")
_bounds = without_dispatch(trajectories.bounds, given=("row",))


#: The bits of a word.
_BITS = np.left_shift(1, np.arange(64))

#: The streams that a write is of: the first step and the number of each, in order.
Streams = Sequence[tuple[int, int]]

#: What the process of the buffer writes itself. Other writers have numbers above 0.
OWN: Streams = ((0, 0),)


class Marks:
    """The rows that end trajectories whatever their flags say, as ``end_trajectories()`` marks them.

    With :attr:`by_writers` a row whose next one is of another stream, that is of another writer, is marked, too. A
    write clears the marks of the rows that it overwrites. A follower of a storage as soon as they are :attr:`kept`.

    Attributes:
        rows: uint8 ``[capacity]``, 1 for a mark, on the device that does the work; None: no row was ever marked.
        envs: environments of the storage.
        by_writers: whether several processes write.
        streams: whose rows the next writes are. It stays while a write may have to be completed.
    """

    def __init__(self) -> None:
        self.rows: Tensor | None = None
        self.envs = 1
        self.by_writers = False
        self.streams: Streams = OWN
        # The stream of the newest row; None: unknown.
        self._stream: int | None = OWN[0][1]
        # The streams of the last write, and the one before it.
        self._last: tuple[Streams, int | None] = OWN, None

    @property
    def kept(self) -> bool:
        """Whether there is memory for marks."""
        return self.rows is not None

    @property
    def memory(self) -> Tensor:
        """:attr:`rows`, of marks that are kept."""
        assert self.rows is not None
        return self.rows

    @property
    def nbytes(self) -> int:
        """Bytes that are taken."""
        return self.memory.nbytes

    def end(self, ring: Tensor, env: int | None) -> None:
        """Mark the newest row of each environment, or of one."""
        marks, envs = self.memory, self.envs
        which = torch.arange(envs, device=marks.device) if env is None else env
        newest = torch.remainder(ring[WRITTEN] - envs + which, marks.numel())
        marks.index_fill_(0, newest.reshape(-1), 1)

    def on_write(self, index: Tensor) -> None:
        """Rows were written at ``index`` (int64 ``[n]``, flat): none of them is an end, unless the stream changes.

        Does the same if it is done again for the same streams, as after an interrupt.

        Raises:
            CaptureError: in a step that is being captured, where writers can't be told apart.
        """
        marks, envs, streams = self.memory, self.envs, self.streams
        marks.index_fill_(0, index, 0)
        if not self.by_writers:
            return
        at_replays().refuse("a buffer with writers is written in eager mode: call extend before the captured step")
        steps = index.reshape(-1, envs)
        if streams is OWN or streams is not self._last[0]:
            self._last = streams, self._stream
        before, ended = self._last[1], list[Tensor]()
        for step, stream in streams:
            if stream != before and step > 0:
                ended.append(steps[step - 1])
            elif stream != before and index.numel() < marks.numel():
                ended.append(torch.remainder(steps[0] - envs, marks.numel()))
            before = stream
        if ended:
            marks.index_fill_(0, torch.cat(ended), 1)
        self._stream = before

    def rebuild(self) -> None:
        """Marks stay as they are, whatever the rows hold."""

    def clear(self) -> None:
        """Forget all marks."""
        self.memory.zero_()

    def state(self, size: int) -> dict[str, Any]:
        """The marks of the first ``size`` rows."""
        return {"marks": self.memory[:size]}

    def load(self, state: dict[str, Any], order: Tensor | None) -> None:
        """Take over the marks of a state, if it has any."""
        self._stream = None
        saved = state.get("marks", self.memory[:0])
        saved = (saved if order is None else saved[order]).to(self.memory.device)
        # It may be a view of these marks.
        self.memory[: len(saved)] = saved
        self.memory[len(saved) :] = 0


def bitmap_bytes(shape: Sequence[int], device_type: str) -> int:
    """Bytes of a bitmap of ends and the sums above it, for a storage of ``shape`` on the current device of a type."""
    steps, envs = shape[0], math.prod(shape[1:])
    fan_out = config.index_fan_out(steps, envs, device_type, device_name(device_type))
    return 8 * (sum(trajectories.bit_levels(steps, envs)) + sum(trajectories.level_sizes(steps, envs, fan_out)))


def entry_of(flags: Tensor, device: torch.device) -> Tensor:
    """Where to read a value per row, ``[capacity]``: int64 ``[1, 5]``, see :mod:`gpubuf.kernels.rows`."""
    entry = torch.tensor([table_entry(address(flags), flags.element_size())], device="cpu")
    return entry.to(device, non_blocking=True)


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
        return entry_of(self.fixed, table.device)

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
        marks: of the storage, which end trajectories too.

    Attributes:
        ends: the bitmap, int64.
        sums: weights of its words, and their sums; as they were made, unless :attr:`weighted`.
        weighted: whether writes keep them up to date.
        signal: as given.
        table: where the signal is read, and marks, if there are any. It changes in place: captured graphs read it.
        steps: steps of the ring, the first dimension of the storage.
        envs: environments, the product of its other dimensions.
    """

    def __init__(
        self, signal: Signal, ring: Ring, shape: Sequence[int], table: Tensor, marks: Marks, weighted: bool = False
    ) -> None:
        self.signal, self.weighted = signal, weighted
        self._ring, self._marks, self._reads_marks = ring, marks, marks.kept
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
        return not set(self.signal.columns).isdisjoint(columns)

    def _addresses(self, table: Tensor) -> Tensor:
        own = self.signal.entries(table)
        return torch.cat([own, entry_of(self._marks.memory, table.device)]) if self._reads_marks else own

    def readdress(self, table: Tensor) -> None:
        """Read the signal where it is now."""
        found = self._addresses(table)
        self.table = found if self.table is None else self.table.copy_(found)

    # Writing

    def on_write(self, index: Tensor) -> None:
        """Rows were written at ``index``: so many of the newest ones."""
        self.write(index.numel() // self.envs)

    def write(self, n: int) -> None:
        """The newest ``n`` steps were written."""
        if not past_dispatcher(self.ends):
            self._update(n)
            return
        # Prepared for who writes as many steps each time.
        ends, counters, table, known, update = self._prepared
        same = ends is self.ends and counters is self._ring.counters and table is self.table and n == known
        if not same or self._marks.kept is not self._reads_marks:
            # Skips the sums, the bulk of an update.
            update = _cpu.prepared_ends(self.ends, *self._written(n), self.steps, self.envs)
            self._prepared = self.ends, self._ring.counters, self.table, n, update
        update()

    def _update(self, n: int) -> None:
        """Index the newest ``n`` steps, and sum the weights by the rule."""
        sums = self.sums if self.weighted else None
        _update(self.ends, sums, *self._written(n), *self._shape_and_rule)

    def _written(self, n: int) -> tuple[Any, ...]:
        marks = self._marks
        if marks.kept and not self._reads_marks:
            # The first mark.
            self.table, self._reads_marks = torch.cat([self.table, entry_of(marks.memory, self.table.device)]), True
        # The step before the write may be of another writer.
        return self._ring.counters, self.table, self.signal.by_id, n + marks.by_writers

    def rebuild(self) -> None:
        """Index all rows anew, after they were changed by others. O(capacity)."""
        self.write(self.steps)

    def clear(self) -> None:
        """Forget every end."""
        self.ends.zero_()
        self.sums.zero_()

    def state(self, size: int) -> dict[str, Any]:
        """Nothing: it is derived from the rows."""
        return {}

    def load(self, state: dict[str, Any], order: Tensor | None) -> None:
        """Index the rows that were loaded."""
        self.rebuild()

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

    def at(self, step: int) -> Any:
        """Which environments have an end at a step, on the CPU: a NumPy array ``[E]``, not 0 where there is one."""
        word, bit = divmod(step, 64)
        return self.ends.numpy()[word * self.envs : (word + 1) * self.envs] & _BITS[bit]

    def update_eligible(self, eligible: Tensor, n: int, demand: Demand) -> Tensor:
        """Bits of rows that may be drawn: see :data:`gpubuf.kernels.trajectories.update_eligible`."""
        need, starts_too, *back = demand
        tensors, shape = (eligible, self.ends, self._ring.counters), (self.steps, self.envs)
        changed: Tensor = _update_eligible(*tensors, n, need, starts_too, *shape, *back)
        return changed

    def update_returns(self, returns: Tensor, rewards: Tensor, rule: Tensor, dtype: int, n: int) -> None:
        """Returns of what ends with the newest ``n`` steps: see :data:`gpubuf.kernels.trajectories.update_returns`."""
        # The step before the write has got a next one, which may be of another trajectory or writer.
        n += self.signal.by_id + self._marks.by_writers
        _update_returns(returns, self.ends, self._ring.counters, rewards, rule, dtype, n, self.steps, self.envs)
