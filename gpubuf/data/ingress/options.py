"""How processes write to a buffer."""

from __future__ import annotations

import math
from dataclasses import dataclass

from gpubuf.data.arguments import check_count

QUEUE_BYTES = 1 << 23
"""Default of the bytes of a queue, within these bounds:"""
LEAST_STEPS, MOST_STEPS = 64, 4096

_MARGIN_ROWS = 1000


@dataclass(frozen=True)
class Writers:
    """How processes write to a buffer: ``ReplayBuffer(..., writers=Writers(4))``, or ``writers=4`` for the defaults.

    Args:
        count: places, for as many writers at a time.
        queue_steps: steps (rows, for buffers of one dimension) that wait in a writer's queue at most. Default: as many
            as fit into 8 MiB, within 64 and 4096.
        run: steps of one writer that are taken in together, at least, unless it has closed, has ended or waits for
            room, or the buffer is saved. Where another writer's rows come next, a trajectory is cut. Default: 64 where
            batches have rows of several steps (``n_steps``, slices, sequences, hindsight) or observations are stored
            once (``share_next``), but no more than half the queue; else 1.
        timeout: seconds that a writer waits for room, or a learner for rows with ``ratio``; None: any number.
        ratio: samples drawn for each row written. Writers and learner wait for each other. Default: they don't.
        margin: samples by which either may be ahead of ``ratio``. Default: those of 1000 rows. A batch, and the samples
            of one write, must fit into it twice.
        min_rows: with ``ratio``: rows that are written before the first sample, at the least.

    Raises:
        ValueError: a number makes no sense, or ``margin`` or ``min_rows`` come without ``ratio``.
    """

    count: int
    queue_steps: int | None = None
    run: int | None = None
    timeout: float | None = 60.0
    ratio: float | None = None
    margin: float | None = None
    min_rows: int = 1

    def __post_init__(self) -> None:
        check_count(self.count, "count")
        for name in ("queue_steps", "run"):
            if getattr(self, name) is not None:
                check_count(getattr(self, name), name)
        check_count(self.min_rows, "min_rows")
        if self.timeout is not None and not self.timeout > 0:
            raise ValueError(f"timeout must be above 0 seconds, got {self.timeout}")
        if self.ratio is None and (self.margin is not None or self.min_rows != 1):
            raise ValueError("margin and min_rows are those of a ratio: give ratio, too")
        if (self.ratio is not None and not 0 < self.ratio < math.inf) or (self.margin is not None and self.margin <= 0):
            raise ValueError(f"ratio and margin must be above 0, got {self.ratio} and {self.margin}")

    @staticmethod
    def of(given: int | Writers) -> Writers:
        """``writers=`` of a buffer: the options, or a number of places."""
        return given if isinstance(given, Writers) else Writers(given)

    def steps_for(self, step_bytes: int) -> int:
        """Steps of a queue."""
        if self.queue_steps is not None:
            return self.queue_steps
        return min(max(QUEUE_BYTES // max(step_bytes, 1), LEAST_STEPS), MOST_STEPS)

    def step_limit(self, drawn: int, step_rows: int) -> int:
        """How many steps may be written, by ``ratio``, where so many samples were drawn."""
        rows = self.min_rows + (drawn + self.samples_ahead) / (self.ratio or math.inf)
        return max(math.floor(rows) // step_rows, 1)

    def allows(self, samples: int, rows: int) -> bool:
        """Whether so many samples may be drawn, by ``ratio``, where so many rows were written."""
        return samples - (self.ratio or 0.0) * (rows - self.min_rows) <= self.samples_ahead

    @property
    def samples_ahead(self) -> float:
        """``margin``, or its default."""
        return _MARGIN_ROWS * (self.ratio or 0.0) if self.margin is None else self.margin
