"""The learner's end: takes the rows of writers in other processes into the buffer."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import os
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol, cast

import numpy as np
import torch
from tensordict import TensorDict

from gpubuf.data.arguments import warn
from gpubuf.data.ingress.client import WriterClient
from gpubuf.data.ingress.options import MOST_STEPS, QUEUE_BYTES, Writers
from gpubuf.data.ingress.queues import CLOSED, OTHER_ROWS, QueuedRows, Queues, fence, numpy_dtype, of_bits, wait
from gpubuf.data.mending import mend
from gpubuf.data.operation import Operation, operation
from gpubuf.data.processing.pipeline import Pipeline
from gpubuf.data.processing.reward_scale import RewardScale
from gpubuf.data.recording import at_replays, current
from gpubuf.data.samplers.base import Sampler
from gpubuf.data.sequences import SampleUnit, Sequence
from gpubuf.data.storage import host_memory
from gpubuf.data.storage.containers import batch_shape, tensors_of
from gpubuf.data.storage.end_bits import OWN
from gpubuf.data.storage.layout import RowLayout, as_key
from gpubuf.data.storage.schema import Source
from gpubuf.data.storage.storage import TensorStorage
from gpubuf.data.storage.tree_layout import layout_of
from gpubuf.data.transforms import Compose
from gpubuf.data.writers import Writer

JOINED_BYTES = 1 << 20
"""Runs of up to so many bytes in all become one write, by a copy that costs less than a write. Larger ones are written
where they lie. A GPU copies them from there, all in one write."""

_RUN = 64
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


class Target(Protocol):
    """What the intake uses of a buffer."""

    operation: Operation
    priority_key: str | tuple[str, ...]

    @property
    def storage(self) -> TensorStorage:
        """The storage."""

    @property
    def sampler(self) -> Sampler:
        """The sampler."""

    @property
    def transform(self) -> Compose:
        """The transforms."""

    @property
    def dim_extend(self) -> int:
        """The dimension of a written batch along which time runs."""

    def extend(self, data: Any) -> Any:
        """Write a batch."""

    def extend_columns(self, columns: Any) -> None:
        """Write arrays by key."""

    def free(self) -> None:
        """Forget everything; the next write says what a row is."""

    @property
    def writer(self) -> Writer:
        """The writer."""


class _Run(NamedTuple):
    """Steps of one queue: ``steps`` of them, from the ``first`` ever published on."""

    place: int
    first: int
    steps: int


#: A part of the queue of a place that is in one piece: its place, where it begins and where it ends.
_Piece = tuple[int, int, int]


class _Claim(NamedTuple):
    """A write that is under way: how many rows had ever been written, and the runs that it takes."""

    written: int
    runs: list[_Run]


class _NoQueues:
    """The queues of a buffer that has had no client."""

    count, rows = 0, QueuedRows(cast(RowLayout, None), (), 2 * MOST_STEPS)

    def leave(self, process: int, why: int = CLOSED) -> None:
        """No process writes."""

    def set_limit(self, steps: int) -> None:
        """No process writes."""

    def tell(self, rows: int, count: int, is_open: bool) -> None:
        """No process asks."""


class _InPlace:
    """Reads steps where they lie in the queues."""

    done = True

    def columns(self, queues: Queues, pieces: list[_Piece]) -> list[Any]:
        """The steps of pieces, an array per key: where they lie, if that is one piece."""
        if len(pieces) == 1:
            ((place, start, stop),) = pieces
            return [column[start:stop] for column in queues.columns[place]]
        return [
            np.concatenate([queues.columns[place][key][start:stop] for place, start, stop in pieces])
            for key in range(len(queues.rows.layout.leaves))
        ]


_IN_PLACE = _InPlace()


class _BySideCopies:
    """Has a GPU copy steps from where they lie, on a stream of its own.

    Raises:
        RuntimeError: the memory can't be page-locked.
    """

    def __init__(self, queues: Queues, device: torch.device) -> None:
        self._copies = host_memory.SideCopies(np.frombuffer(queues.memory, np.uint8), device)

    @property
    def done(self) -> bool:
        """Whether the GPU has read everything."""
        return self._copies.done

    def columns(self, queues: Queues, pieces: list[_Piece]) -> list[Any]:
        """The steps of pieces, a tensor per key."""
        return self._copies.joined(
            [
                [of_bits(queues.columns[place][key][start:stop], leaf.dtype) for place, start, stop in pieces]
                for key, leaf in enumerate(queues.rows.layout.leaves)
            ]
        )


class Intake:
    """Takes rows out of the queues of a buffer's writers. It is ``buffer.writers``.

    Every operation of the buffer comes here first: rows that have arrived are written as
    :meth:`ReplayBuffer.extend` writes them, in as few launches as possible. Compiled and captured steps take nothing.

    Args:
        buffer: the buffer.
        options: as given to it.

    Attributes:
        options: as given.
        drawn: samples that were drawn since the buffer was empty, with a ``ratio``.
    """

    def __init__(self, buffer: Target, options: Writers) -> None:
        self.options = options
        self.drawn = 0
        self._buffer: Callable[[], Target | None] = weakref.ref(buffer)
        self.operation = buffer.operation
        self._queues: Queues | _NoQueues = _NoQueues()
        # Steps taken of each place, those of them that were dropped, and how often there was a gap in its rows.
        self._taken: list[int] = []
        self._dropped: list[int] = []
        self._gaps: list[int] = []
        # Steps taken that ``ratio`` does not count: those dropped, and those before the buffer was last emptied.
        self._uncounted = 0
        # How many rows the buffer had after the last look.
        self._size = 0
        # Why the first steps that were dropped were; None: none were.
        self._refused: str | None = None
        self._has_reported = False
        # Whether the first row of an empty buffer may be any, and whether no more rows are taken.
        self._is_open = self._is_closed = False
        # How columns are stored that clients check.
        self._integers: dict[int, Source] = {}
        # The layout of the buffer's rows that was last compared with that of the queues.
        self._compared: RowLayout | None = None
        # When writers whose runs are short were last looked for.
        self._looked = 0.0
        self._claim: _Claim | None = None
        # What reads large writes, and the device for which it was made.
        self._reader: _InPlace | _BySideCopies = _IN_PLACE
        self._reads_for = torch.device("cpu")
        self._taking = self._in_order = False
        # How often rows were taken in before an operation.
        self._calls = 0
        self._thread: tuple[threading.Thread, threading.Event] | None = None

    # Writers come and go

    @operation
    def client(self, example: Any = None) -> WriterClient:
        """A client for a writer in another process. See :meth:`gpubuf.ReplayBuffer.client`."""
        buffer = self._target()
        queues = self._queues_for(buffer, example)
        # A place is free once the rows of the writer before have been taken in.
        self.take(everything=True)
        return self._new_client(buffer, queues)

    def share(self) -> None:
        """Before a process is started that gets the buffer: have queues. Without rows its first write may be any."""
        if isinstance(self._queues, Queues):
            # A process may be forked while another thread uses the buffer.
            self._tell(self.operation.storage)
        else:
            with contextlib.suppress(TypeError, RuntimeError):
                self.operation.run(self._share)

    def _share(self) -> None:
        storage = self.operation.storage
        self._is_open = True
        self._queues_for(self._target(), None)
        self._tell(storage)

    def link(self) -> WriterClient | None:
        """What such a process writes with; None: rows are no tensors."""
        queues = self._queues
        return self._new_client(self._target(), queues) if isinstance(queues, Queues) else None

    def _new_client(self, buffer: Target, queues: Queues) -> WriterClient:
        ndim, timeout = buffer.storage.ndim, self.options.timeout
        priority = as_key(buffer.priority_key) if buffer.sampler.has_priorities else ()
        return WriterClient(queues, ndim, buffer.dim_extend, timeout, priority, self._integers)

    def _queues_for(self, buffer: Target, example: Any) -> Queues:
        """The queues, which are made where there are none, or none of the buffer's rows.

        Raises:
            RuntimeError: nothing says what a row is.
            TypeError: rows have data that are not tensors.
            ValueError: the example has other rows than the buffer, or a step of it has no room within ``margin``.
        """
        storage, options, queues = buffer.storage, self.options, self._queues
        if self._is_closed:
            raise RuntimeError("the buffer takes no more rows of writers: writers.close() was called")
        as_stored = not buffer.transform.has_inverse
        if example is not None:
            example = tensors_of(example)
            layout = layout_of(example, storage.ndim, storage.allocation.ignored_keys)
            envs = tuple(batch_shape(example, storage.ndim))
            time_dim = buffer.dim_extend
            envs = envs[:time_dim] + envs[time_dim + 1 :]
            self._is_open = False
            if as_stored and storage.initialized and storage.ring.size:
                storage.written_layout.collect(example, storage.ndim)
        elif isinstance(queues, Queues) and queues.settled and not storage.ring.size:
            return queues
        elif as_stored and storage.initialized:
            layout, envs = storage.written_layout, tuple(storage.shape[1:])
        elif isinstance(queues, Queues):
            return queues
        elif self._is_open:
            layout, envs = RowLayout(TensorDict({}, [1] * storage.ndim), storage.ndim), ()
        else:
            raise RuntimeError(
                "a writer has to know what a row is: write a batch first, or pass client() one as an example"
                + (" (transforms change what is written here)" if storage.initialized else "")
            )
        if isinstance(queues, Queues) and (queues.rows.layout.leaves, queues.rows.envs) == (layout.leaves, envs):
            return queues
        if layout.host:
            raise TypeError(f"writers in other processes pass tensors on, and {list(layout.host)} hold other data")
        rows = QueuedRows(layout, envs, 1)
        rows = dataclasses.replace(rows, steps=options.steps_for(rows.step_bytes))
        sources = storage.allocation.schema_like(layout).sources if as_stored else ()
        if isinstance(queues, Queues):
            self._turn_away(queues)
        # Whoever writes first may say that rows are larger.
        least = QUEUE_BYTES if self._is_open and not storage.ring.size else 0
        made = Queues(rows, options.count, max(rows.offsets[-1], least))
        self._reads_for, self._reader = torch.device("cpu"), _IN_PLACE
        self._queues, self._claim = made, None
        self._taken, self._dropped, self._gaps = ([0] * options.count for _ in range(3))
        self._integers = {
            n: source for n, source in enumerate(sources) if _is_converted(source, layout.leaves[n].dtype)
        }
        self._recount()
        weakref.finalize(self, made.leave, os.getpid())
        return made

    def _turn_away(self, queues: Queues) -> None:
        """The rows of the queues are none that the buffer can take, nor will be."""
        queues.leave(os.getpid(), OTHER_ROWS)
        for place, taken in enumerate(self._taken):
            run = _Run(place, taken, queues.published(place) - taken)
            self._drop(queues, run, "the buffer has rows of other keys, shapes or dtypes")

    def _drop(self, queues: Queues, run: _Run, why: str) -> None:
        """Leave the steps of a run out. What comes after them does not follow what was before."""
        if run.steps:
            self._dropped[run.place] += run.steps
            self._gaps[run.place] += 1
            self._uncounted += run.steps
            self._refused = self._refused or why
            self._set_limit()
            self._release(queues, [run])

    def _report(self) -> None:
        """Say once that steps were dropped."""
        if self._refused is not None and not self._has_reported:
            self._has_reported = True
            warn(
                f"rows of writers were dropped, for the buffer can't take them: {self._refused}. "
                "buffer.writers.counters() says how many; this is said once"
            )

    @property
    def run(self) -> int:
        """Steps of one writer that are taken in together, at least."""
        run = self.options.run
        if run is None:
            buffer = self._target()
            # A next observation that is stored once needs a place of its own where another writer's row follows.
            in_order = self._in_order or bool(buffer.storage.allocation.options.share_next)
            run = _RUN if in_order else 1
        return max(min(run, self._queues.rows.steps // 2), 1)

    def serve(
        self,
        storage: TensorStorage,
        writer: Writer,
        pipeline: Pipeline,
        unit: SampleUnit | None,
        *,
        in_order: bool,
    ) -> None:
        """Called with the buffer's parts when they change.

        Args:
            storage, writer, pipeline, unit: the parts.
            in_order: whether something depends on the order of rows.

        Raises:
            TypeError: the storage holds any objects, or lies in files.
            ValueError: rows are not written in turn, something takes those of all writers for one stream, or there is
                no room for ``min_rows``.
        """
        if self.options.min_rows > storage.max_size:
            raise ValueError(f"min_rows={self.options.min_rows} rows never fit into a buffer of {storage.max_size}")
        if storage.takes_objects or not storage.allocation.relocatable:
            kind = type(storage).__name__
            raise TypeError(
                f"writers in other processes need a LazyTensorStorage: a {kind} can't tell their rows apart"
            )
        if not writer.in_order:
            raise ValueError(f"writers in other processes need rows that are written in turn, not a {writer!r}")
        steps = pipeline.steps
        if any(isinstance(step, RewardScale) and (step.envs or 1) > 1 for step in steps):
            raise ValueError(
                "RewardScale(envs=...) tells environments apart by the turns that they take, and writers take turns, "
                "too: give the buffer a storage with ndim=2"
            )
        if isinstance(unit, Sequence) and not unit.needs_ends:
            raise ValueError(
                "a Sequence that goes on over the ends of trajectories would join the rows of several writers: give it "
                "a done_key, and episode_boundary 'pad' or 'stop'"
            )
        self._in_order = in_order

    def counters(self) -> list[WriterCounters]:
        """The state of every place. No host sync."""
        queues = self._queues
        if isinstance(queues, _NoQueues):
            return [WriterCounters(place, None, 0, 0, 0, 0.0) for place in range(self.options.count)]
        found = []
        for place in range(queues.count):
            written = queues.published(place)
            process, waiting = queues.writer(place), written - self._taken[place]
            found.append(WriterCounters(place, process, written, waiting, self._dropped[place], queues.blocked(place)))
        return found

    # Samples for each row

    def _set_limit(self) -> None:
        """Let writers go on as far as the samples allow."""
        options, queues = self.options, self._queues
        if options.ratio is not None:
            rows = options.min_rows + (self.drawn + self.options.samples_ahead) / options.ratio
            queues.set_limit(self._uncounted + max(math.floor(rows) // queues.rows.step_rows, 1))

    def _recount(self) -> None:
        """Begin to count anew for ``ratio``: the buffer was emptied."""
        self.drawn, self._uncounted = 0, sum(self._taken)
        self._set_limit()

    @property
    def gate(self) -> Callable[[int], None] | None:
        """What a draw waits at; None without a ratio."""
        return None if self.options.ratio is None else self._pass

    def _pass(self, samples: int) -> None:
        """Wait until ``samples`` more may be drawn, and count them.

        Raises:
            TimeoutError: the writers have written too little for the timeout.
            ValueError: the margin has no room for so many samples.
        """
        at_replays().refuse("ratio= counts the samples of eager calls: sample before the captured step")
        margin, per_step = self.options.samples_ahead, (self.options.ratio or 0.0) * self._queues.rows.step_rows
        # Beyond it each side would wait for the other.
        if samples + per_step > 2 * margin:
            raise ValueError(
                f"a batch of {samples} samples is more than twice margin={margin} has room for, beside the {per_step} "
                "samples of a step: raise the margin"
            )
        if not self._may_draw(samples):
            try:
                wait(functools.partial(self._may_draw, samples, True), self.options.timeout)
            except TimeoutError:
                raise TimeoutError(self._why_blocked(samples)) from None
        self.drawn += samples
        self._set_limit()

    def _may_draw(self, samples: int, take: bool = False) -> bool:
        if take:
            self.take(everything=True)
        options, queues = self.options, self._queues
        size, envs = len(self._target().storage), queues.rows.step_rows
        counted = (sum(self._taken) - self._uncounted) * envs
        ahead = self.drawn + samples - (options.ratio or 0.0) * (counted - options.min_rows)
        return size >= options.min_rows and ahead <= self.options.samples_ahead

    def _why_blocked(self, samples: int) -> str:
        alive = [one for one in self.counters() if one.process is not None]
        return (
            f"{samples} samples more than {self.drawn} wait for rows, by ratio={self.options.ratio}: the writers have "
            f"written {sum(self._taken)} steps, and none for {self.options.timeout} s that would do; {len(alive)} of "
            f"{self.options.count} are alive"
        )

    def close(self) -> None:
        """Take in what was acknowledged, and no more: writers get an error at their next write."""
        # Its thread may be within an operation.
        self.stop()
        self.operation.run(self._close)

    def _close(self) -> None:
        self._queues.leave(os.getpid())
        self.take(everything=True)
        self._is_closed = True

    # Rows

    def take(self, everything: bool = False) -> int:
        """Take in the rows that have arrived. The buffer's calls do it by themselves. No host sync.

        Args:
            everything: also runs that are shorter than :attr:`Writers.run`.

        Returns:
            The number of steps that were taken.
        """
        before = sum(self._taken)
        self.operation.run(self._take_unless_taken, everything, self._calls)
        return sum(self._taken) - before

    def _take_unless_taken(self, everything: bool, calls: int) -> None:
        # The beginning of an operation has taken what was ready, unless this is part of one.
        if self._calls == calls or (everything and self.run > 1):
            self._take(everything)

    def at_call(self) -> None:
        """Called at the beginning of an operation of the buffer."""
        if self._taking:
            return
        if self.operation.storage.ring.size < self._size:
            self._recount()
        if self._taken:
            self._calls += 1
            self._take(False)
        self._size = self.operation.storage.ring.size

    def _take(self, everything: bool) -> None:
        queues = self._queues
        if isinstance(queues, _NoQueues) or self._taking or self._is_closed or current.recording is not None:
            return
        try:
            # The writes below are operations of the buffer.
            self._taking = True
            if self._claim is not None:
                self._settle(queues, self._claim)
            runs = self._arrived(queues, everything)
            # After a look at what is published: rows are not settled after that.
            if queues.follow():
                self._integers, self._compared = {}, None
            if queues.left == OTHER_ROWS or self._has_other_rows(queues):
                if self.operation.storage.ring.size or not queues.settled:
                    self._turn_away(queues)
                    runs = []
                elif runs:
                    # The buffer's own rows are gone: the first one of a writer decides.
                    self._target().free()
            if self.operation.launches_at_once():
                if self._reader is not _IN_PLACE:
                    self._give_back(queues)
                buffer = self._target()
                for group in self._groups(buffer, queues, runs) if runs else ():
                    self._write_or_drop(buffer, queues, group)
            self._tell(self.operation.storage)
        finally:
            self._taking = False
        self._report()

    def _has_other_rows(self, queues: Queues) -> bool:
        """Whether the buffer has rows of another layout than the queues."""
        storage, rows = self.operation.storage, queues.rows
        if not storage.initialized or storage.written_layout is self._compared:
            return False
        same = (storage.written_layout.leaves, tuple(storage.shape[1:])) == (rows.layout.leaves, rows.envs)
        if not same and not self._target().transform.has_inverse:
            return True
        self._compared = storage.written_layout
        return False

    def _tell(self, storage: TensorStorage) -> None:
        """Let writers know how many rows there are."""
        ring, self._size = storage.ring, storage.ring.size
        taken = sum(self._taken) * self._queues.rows.step_rows
        self._queues.tell(ring.size - taken, storage.rows_written - taken, self._is_open and not ring.size)

    def _arrived(self, queues: Queues, everything: bool) -> list[_Run]:
        """What is to be taken in now."""
        found, short = list[_Run](), list[_Run]()
        # A first sample finds what was acknowledged.
        everything = everything or not self.operation.storage.ring.size
        for place, taken in enumerate(self._taken):
            count, room = queues.published(place) - taken, queues.rows.steps
            if not 0 <= count <= room:
                queues.take_back(place, taken)
                self._refused = self._refused or f"{count} steps at place {place}, where {room} have room at a time"
            elif count:
                (found if everything or count >= self.run else short).append(_Run(place, taken, count))
        if short:
            look = time.monotonic() - self._looked > _LOOK_EVERY
            self._looked = time.monotonic() if look else self._looked
            found += [one for one in short if self._gets_no_longer(queues, one.place, look)]
        if found:
            fence()
        return found

    @staticmethod
    def _gets_no_longer(queues: Queues, place: int, look: bool) -> bool:
        """Whether a run can't go on before it is taken. ``look``: also look for writers that have ended."""
        return queues.blocks(place) or queues.closed(place) or (look and queues.writer(place) is None)

    def _groups(self, buffer: Target, queues: Queues, runs: list[_Run]) -> list[list[_Run]]:
        """The writes that runs become: small ones together, others alone. None is larger than the storage."""
        storage, total = buffer.storage, sum([run.steps for run in runs])
        steps = -(-storage.max_size // queues.rows.step_rows)
        if total <= steps and storage.initialized and not buffer.transform.has_inverse:
            n_bytes = total * queues.rows.step_bytes
            if n_bytes <= JOINED_BYTES or self._reader_of(storage, queues, n_bytes) is not _IN_PLACE:
                return [runs]
        return [
            [_Run(place, first + at, min(steps, count - at))]
            for place, first, count in runs
            for at in range(0, count, steps)
        ]

    def _write_or_drop(self, buffer: Target, queues: Queues, runs: list[_Run]) -> None:
        """Write runs, without the steps that the buffer refuses: one refusal must not keep all others out."""
        written = buffer.storage.written
        try:
            self._write(buffer, queues, runs)
        except Exception as refused:
            if buffer.storage.written != written or isinstance(refused, (MemoryError, torch.OutOfMemoryError)):
                raise
            self._claim, buffer.storage.marks.streams = None, OWN
            mend(buffer.storage, buffer.writer)
            place, first, n = runs[0]
            if len(runs) > 1:
                parts = [[run] for run in runs]
            elif n > 1:
                parts = [[_Run(place, first, n // 2)], [_Run(place, first + n // 2, n - n // 2)]]
            else:
                parts = []
                self._drop(queues, runs[0], str(refused))
            for part in parts:
                self._write_or_drop(buffer, queues, part)

    def _write(self, buffer: Target, queues: Queues, runs: list[_Run]) -> None:
        """Write runs by one operation of the buffer, and release their places in the queues.

        An interrupt can come between the two: then the next call finds the claim.
        """
        storage = buffer.storage
        self._claim = _Claim(storage.written, runs)
        steps, streams = 0, list[tuple[int, int]]()
        for run in runs:
            streams.append((steps, queues.client(run.place) + (self._gaps[run.place] << 32)))
            steps += run.steps
        storage.marks.streams = streams
        rows = queues.rows
        layout, as_columns = rows.layout, storage.initialized and rows.layout.is_tensordict
        reader = self._reader_of(storage, queues, steps * rows.step_bytes) if as_columns else _IN_PLACE
        pieces = [(run.place, *piece) for run in runs for piece in queues.pieces(run.first, run.steps)]
        columns = reader.columns(queues, pieces)
        turned = buffer.dim_extend if rows.envs else 0
        if turned:
            columns = [column.swapaxes(0, turned) for column in columns]
        if as_columns:
            for place, leaf in enumerate(layout.leaves if reader is _IN_PLACE else ()):
                if numpy_dtype(leaf.dtype) is None:
                    columns[place] = of_bits(columns[place], leaf.dtype)
            buffer.extend_columns(dict(zip(layout.keys, columns, strict=True)))
        else:
            tensors = [of_bits(column, leaf.dtype) for column, leaf in zip(columns, layout.leaves, strict=True)]
            shape = [steps, *rows.envs]
            shape[0], shape[turned] = shape[turned], shape[0]
            buffer.extend(layout.assemble(tensors, tuple(shape), None))
        self._release(queues, runs)
        self._claim, storage.marks.streams = None, OWN

    def _reader_of(self, storage: TensorStorage, queues: Queues, n_bytes: int) -> _InPlace | _BySideCopies:
        """What reads ``n_bytes`` for a storage."""
        device = storage.device
        if n_bytes <= JOINED_BYTES or device.type != "cuda" or not host_memory.cuda_present():
            return _IN_PLACE
        if device != self._reads_for:
            # The memory can be locked once at a time.
            self._reads_for, self._reader = device, _IN_PLACE
            try:
                self._reader = _BySideCopies(queues, device)
            except RuntimeError as refused:
                warn(f"the queues of writers are not page-locked: {refused}")
        return self._reader

    def _release(self, queues: Queues, runs: list[_Run]) -> None:
        for place, first, count in runs:
            # In the mirror first: after an interrupt between the two it is the one that counts.
            self._taken[place] = first + count
        self._give_back(queues)

    def _give_back(self, queues: Queues) -> None:
        """Let writers write again where everything was read that was taken."""
        if self._reader.done:
            for place, taken in enumerate(self._taken):
                if queues.taken(place) != taken:
                    queues.release(place, taken)

    # By a thread

    def start(self, interval: float = 1e-3) -> None:
        """Take rows in by a thread of its own, too, every ``interval`` seconds, until :meth:`stop`.

        When they are taken in then depends on the clock, and so do batches.
        """
        self.stop()
        stopped = threading.Event()
        thread = threading.Thread(
            target=_take_often, args=(weakref.ref(self), stopped, interval), name="gpubuf-writers", daemon=True
        )
        self._thread = thread, stopped
        thread.start()

    def stop(self) -> None:
        """End the thread of :meth:`start`, if there is one."""
        if self._thread is not None:
            thread, stopped = self._thread
            stopped.set()
            thread.join()
            self._thread = None

    def _settle(self, queues: Queues, claim: _Claim) -> None:
        """A write was interrupted: it happened if the buffer has more rows than before."""
        storage = self._target().storage
        if storage.written > claim.written:
            self._release(queues, claim.runs)
        self._claim, storage.marks.streams = None, OWN

    def _target(self) -> Target:
        buffer = self._buffer()
        if buffer is None:
            raise RuntimeError("the buffer of these writers is gone")
        return buffer


def _take_often(intake: Callable[[], Intake | None], stopped: threading.Event, interval: float) -> None:
    """The thread of :meth:`Intake.start`, until the buffer is gone. An error ends it: the next call raises the same."""
    while not stopped.wait(interval):
        found = intake()
        buffer = None if found is None else found._buffer()
        if found is None or buffer is None:
            return
        found.take()
        # Nothing of it is kept between two turns.
        del found, buffer


def _is_converted(source: Source, written: torch.dtype) -> bool:
    """Whether a column becomes integers of another dtype, which hold fewer numbers."""
    stored = source.stored
    return stored is not written and not (stored.is_floating_point or stored.is_complex or stored is torch.bool)
