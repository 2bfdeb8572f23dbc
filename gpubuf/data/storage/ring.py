"""The counters of a ring of rows: a device tensor that the kernels advance, and the host's mirror of it."""

from __future__ import annotations

import torch
from torch import Tensor

from gpubuf.data.recording import each_run
from gpubuf.kernels import rows


class Ring:
    """How many rows were ever written to ``capacity`` positions, and how many are valid.

    The mirror makes ``len()`` free of synchronisation. Replays of a step captured by :func:`gpubuf.capture` count too.
    Those of other CUDA graphs move the device's counters alone; :meth:`refresh` then brings the mirror up to date.

    Args:
        capacity: number of positions.
        device: where the counters live.

    Attributes:
        counters: int64 ``[4]``; see :mod:`gpubuf.kernels.rows`.
        written: number of rows ever written (mirror). :meth:`empty` moves it on to a multiple of twice the capacity,
            and rows that another ring has lost count as a round: see :func:`gpubuf.kernels.rows.has_lost`.
        skipped: how far ``written`` is ahead of the number of rows that users count.
        size: number of valid rows, at positions ``0 .. size - 1`` (mirror).
        replaced: how often the counters were set, for all rows were replaced.
        rewritten: how many times each row was overwritten out of turn, int64 ``[capacity]``; None: none ever was.
    """

    def __init__(self, capacity: int, device: torch.device | str = "cpu") -> None:
        self.capacity = capacity
        self.counters: Tensor = rows.new_ring(torch.device(device))
        self.written = 0
        self.skipped = 0
        self.size = 0
        self.replaced = 0
        self.rewritten: Tensor | None = None

    @property
    def cursor(self) -> int:
        """Position that the next row goes to."""
        return self.written % self.capacity

    def count(self, n: int) -> None:
        """Note in the mirror that an operation has written ``n`` rows: now, and at each replay of a captured step."""
        each_run(self.counters, self.note, n)

    def note(self, n: int) -> None:
        """:meth:`count` in eager mode, where nothing is recorded or captured."""
        self.written += n
        size = self.size + n
        self.size = size if size < self.capacity else self.capacity

    def set_counters(self, written: int, size: int) -> None:
        """Set mirror and counters."""
        self.written, self.size, self.skipped = written, size, 0
        self.replaced += 1
        self.counters.copy_(torch.tensor([written, size, 0, 0], device="cpu"), non_blocking=True)

    def empty(self, recount: bool = False) -> None:
        """Forget every row. Generations go on, so that priorities still under way are dropped. No host sync.

        ``recount``: the count of rows written begins again at 0.
        """
        # On the device too by arithmetic, not from the mirror: that is behind after the replay of a captured graph.
        # In one step, for an interrupt between several would leave rows behind that were never written.
        lap = 2 * self.capacity
        laps = (self.counters[rows.WRITTEN] + (lap - 1)).div(lap, rounding_mode="floor")
        self.counters[: rows.SIZE + 1].copy_(torch.stack([laps * lap, torch.zeros_like(laps)]))
        each_run(self.counters, self._empty_mirror, recount)

    def _empty_mirror(self, recount: bool) -> None:
        lap_end = -(-self.written // (2 * self.capacity)) * 2 * self.capacity
        self.skipped = lap_end if recount else self.skipped + lap_end - self.written
        self.written = lap_end
        self.size = 0

    # Rows that are not written at the cursor

    def fill(self, n: int) -> None:
        """Count ``n`` rows that were written after the others, or fewer if there was less room. No host sync."""
        size = self.counters[rows.SIZE]
        self.counters[: rows.SIZE + 1].add_((size + n).clamp(max=self.capacity) - size)
        each_run(self.counters, self._fill_mirror, n)

    def _fill_mirror(self, n: int) -> None:
        added = min(self.size + n, self.capacity) - self.size
        self.written, self.size = self.written + added, self.size + added

    def rewrite(self, index: Tensor, happened: Tensor | None = None) -> None:
        """Count rows that were overwritten out of turn: their generations move on. No host sync.

        Args:
            index: int64 ``[n]``, positions of the ring.
            happened: bool ``[n]``: leave out the others.
        """
        if self.rewritten is None:
            self.rewritten = torch.zeros(self.capacity, dtype=torch.int64, device=self.counters.device)
        ones = torch.ones_like(index) if happened is None else happened.to(torch.int64)
        self.rewritten.index_add_(0, index, ones)

    def laps(self, index: Tensor) -> Tensor:
        """How often the ring has been written over positions, int64 ``[n]``. No host sync."""
        return (self.counters[rows.WRITTEN] - index + (self.capacity - 1)).div(self.capacity, rounding_mode="floor")

    def generations(self, index: Tensor) -> Tensor:
        """The write generations of rows, int64 ``[n]``: -1 where none is stored. No host sync.

        ``index`` is int64 ``[n]`` on the counters' device.
        """
        found = self.with_rewrites(index, self.laps(index))
        return torch.where((index >= 0) & (index < self.counters[rows.SIZE]), found, -1)

    def with_rewrites(self, index: Tensor, generation: Tensor) -> Tensor:
        """The generations of rows, from those that the kernels know, which count laps."""
        return generation if self.rewritten is None else generation + self._rewrites(index)

    def without_rewrites(self, index: Tensor, generation: Tensor) -> Tensor:
        """What the kernels have to find for a row that is still the one of ``generation``."""
        return generation if self.rewritten is None else generation - self._rewrites(index)

    def _rewrites(self, index: Tensor) -> Tensor:
        assert self.rewritten is not None
        # Other indices than those of rows are told by the kernels.
        return self.rewritten.gather(0, index.clamp(0, self.capacity - 1))

    def to(self, device: torch.device) -> None:
        """Move the counters."""
        self.counters = self.counters.to(device)
        if self.rewritten is not None:
            self.rewritten = self.rewritten.to(device)

    def refresh(self) -> None:
        """Read the device's counters into the mirror. Synchronises.

        Raises:
            IndexError: since the last call a GPU, which can't raise without a sync, has refused to read or write rows
                out of range (they read as zeros). The mirror is up to date all the same.
        """
        counters = self.counters.tolist()
        self.written, self.size = counters[rows.WRITTEN], counters[rows.SIZE]
        if counters[rows.FAULTS]:
            self.counters[rows.FAULTS].zero_()
            raise IndexError(
                f"{counters[rows.FAULTS]} rows that were read or written are out of range, hold numbers "
                "that their dtype has no room for, found no room for their next observation (next_capacity), or are no "
                "stacks (FrameStack)"
            )
