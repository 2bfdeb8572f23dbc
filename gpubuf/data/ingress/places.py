"""What the learner knows of the places of writers: what was taken out of their queues, and how it is read there."""

from __future__ import annotations

import time
from typing import Any, NamedTuple, cast

import numpy as np
import torch

from gpubuf.data.arguments import warn
from gpubuf.data.ingress.queues import NoQueues, Queues, fence, of_bits
from gpubuf.data.storage import host_memory
from gpubuf.data.storage.containers import numpy_dtype

JOINED_BYTES = 1 << 20
"""Runs of up to so many bytes in all become one write, by a copy that costs less than a write. Larger ones are written
where they lie. A GPU copies them from there, all in one write."""

_LOOK_EVERY = 0.25
"""Seconds between two looks at whether writers with short runs have ended."""


class WriterCounters(NamedTuple):
    """What is known of one place.

    Attributes:
        place: its number.
        process: the writer's process; None: none writes there.
        written: steps that its writers have written since the buffer was made.
        waiting: those of them that were not taken in yet.
        dropped: those of them that the buffer has refused.
        blocked: seconds that they have waited for room, or for ``ratio``.
    """

    place: int
    process: int | None
    written: int
    waiting: int
    dropped: int
    blocked: float


class Run(NamedTuple):
    """Steps of one queue: ``steps`` of them, from the ``first`` ever published on."""

    place: int
    first: int
    steps: int


class Places:
    """The steps that were taken out of the queues of each place.

    Args:
        count: number of places.

    Attributes:
        queues: the queues.
        taken: steps taken of each place.
        uncounted: steps taken that ``ratio`` does not count: those dropped, and those before the buffer was last
            emptied.
        owes: whether writers may not write yet where something was taken.
        refused: why the first steps that were dropped were; None: none were.
    """

    def __init__(self, count: int) -> None:
        self._count = count
        self.refused: str | None = None
        self.begin(cast("Queues", NoQueues()))

    def begin(self, queues: Queues) -> None:
        """Other queues come, of which nothing was taken."""
        self.queues = queues
        # Those of the steps taken that were dropped, and how often there was a gap in the rows of a place.
        self.taken, self._dropped, self._gaps = ([0] * self._count for _ in range(3))
        self.uncounted, self.owes = 0, False
        # When writers whose runs are short were last looked for.
        self._looked = 0.0
        # Copies steps to the GPU for whose rows it was made; None: steps are read where they lie.
        self._copies: host_memory.SideCopies | None = None
        self._copies_for = torch.device("cpu")

    @property
    def exist(self) -> bool:
        """Whether there are queues."""
        return not isinstance(self.queues, NoQueues)

    @property
    def steps(self) -> int:
        """All steps taken."""
        return sum(self.taken)

    @property
    def counters(self) -> list[WriterCounters]:
        """The state of every place."""
        queues = self.queues
        if not self.exist:
            return [WriterCounters(place, None, 0, 0, 0, 0.0) for place in range(self._count)]
        found = []
        for place, (taken, dropped) in enumerate(zip(self.taken, self._dropped, strict=True)):
            written, process = queues.published(place), queues.writer(place)
            found.append(WriterCounters(place, process, written, written - taken, dropped, queues.blocked(place)))
        return found

    # What has arrived

    def arrived(self, least: int) -> list[Run]:
        """The runs of at least so many steps, and shorter ones that get no longer before they are taken."""
        queues, found, short = self.queues, list[Run](), list[Run]()
        for place, taken in enumerate(self.taken):
            count, room = queues.published(place) - taken, queues.rows.steps
            if not 0 <= count <= room:
                queues.take_back(place, taken)
                self.refused = self.refused or f"{count} steps at place {place}, where {room} have room at a time"
            elif count:
                (found if count >= least else short).append(Run(place, taken, count))
        if short:
            # Writers that have ended are looked for now and then.
            look = time.monotonic() - self._looked > _LOOK_EVERY
            self._looked = time.monotonic() if look else self._looked
            for run in short:
                at = run.place
                if queues.blocks(at) or queues.closed(at) or (look and queues.writer(at) is None):
                    found.append(run)
        if found:
            fence()
        return found

    def streams(self, runs: list[Run]) -> list[tuple[int, int]]:
        """The first step of each run in a write of all, and the number of its stream: those with a gap differ."""
        found, first = [], 0
        for run in runs:
            found.append((first, self.queues.client(run.place) + (self._gaps[run.place] << 32)))
            first += run.steps
        return found

    def release(self, runs: list[Run]) -> None:
        """The steps of runs were taken."""
        self.owes = True
        for place, first, count in runs:
            # In the mirror first: after an interrupt between the two it is the one that counts.
            self.taken[place] = first + count
        self.give_back()

    def give_back(self) -> None:
        """Let writers write again where everything was read that was taken."""
        if self._copies is None or self._copies.done:
            for place, taken in enumerate(self.taken):
                if self.queues.taken(place) != taken:
                    self.queues.release(place, taken)
            self.owes = False

    def drop(self, run: Run, why: str) -> None:
        """Leave the steps of a run out. What comes after them does not follow what was before."""
        if run.steps:
            self._dropped[run.place] += run.steps
            self._gaps[run.place] += 1
            self.uncounted += run.steps
            self.refused = self.refused or why
            self.release([run])

    # How it is read

    def copies(self, n_bytes: int, device: torch.device) -> host_memory.SideCopies | None:
        """What has a GPU copy ``n_bytes`` from where they lie, on a stream of its own; None: they are read there."""
        if n_bytes <= JOINED_BYTES or device.type != "cuda" or not host_memory.cuda_present():
            return None
        if device != self._copies_for:
            # The memory can be locked once at a time.
            self._copies_for, self._copies = device, None
            try:
                self._copies = host_memory.SideCopies(np.frombuffer(self.queues.memory, np.uint8), device)
            except RuntimeError as refused:
                warn(f"the queues of writers are not page-locked: {refused}")
        return self._copies

    def joins(self, n_bytes: int, device: torch.device) -> bool:
        """Whether runs of ``n_bytes`` in all become one write."""
        return n_bytes <= JOINED_BYTES or self.copies(n_bytes, device) is not None

    def columns(self, runs: list[Run], copies: host_memory.SideCopies | None) -> list[Any]:
        """The steps of runs, by key: tensors of a GPU, or arrays, and tensors of dtypes that NumPy lacks.

        The steps of one run are read where they lie, if they are in one piece.
        """
        queues = self.queues
        pieces = [(run.place, *piece) for run in runs for piece in queues.pieces(run.first, run.steps)]
        found: list[Any] = []
        for key, leaf in enumerate(queues.rows.layout.leaves):
            parts = [queues.columns[place][key][start:stop] for place, start, stop in pieces]
            if copies is not None:
                found.append([of_bits(part, leaf.dtype) for part in parts])
                continue
            column = parts[0] if len(parts) == 1 else np.concatenate(parts)
            found.append(of_bits(column, leaf.dtype) if numpy_dtype(leaf.dtype) is None else column)
        return found if copies is None else copies.joined(found)
