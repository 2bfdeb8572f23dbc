"""The learner's end: takes the rows of writers in other processes into the buffer."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import threading
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import torch
from tensordict import TensorDict

from gpubuf.data.arguments import as_tensor, warn
from gpubuf.data.ingress.client import WriterClient
from gpubuf.data.ingress.options import QUEUE_BYTES, Writers
from gpubuf.data.ingress.places import Places, Run, WriterCounters
from gpubuf.data.ingress.queues import OTHER_ROWS, QueuedRows, Queues, wait
from gpubuf.data.mending import mend
from gpubuf.data.operation import Operation, operation
from gpubuf.data.processing.reward_scale import RewardScale
from gpubuf.data.recording import at_replays, current
from gpubuf.data.storage.containers import batch_shape, tensors_of
from gpubuf.data.storage.end_bits import OWN
from gpubuf.data.storage.layout import RowLayout, as_key
from gpubuf.data.storage.plan import Recipe
from gpubuf.data.storage.schema import Source
from gpubuf.data.storage.tree_layout import layout_of
from gpubuf.data.writing import Writes

_RUN = 64


class Target(Protocol):
    """What the intake uses of a buffer."""

    operation: Operation

    def extend(self, data: Any) -> Any:
        """Write a batch."""

    def extend_columns(self, columns: Any) -> None:
        """Write arrays by key."""

    def free(self) -> None:
        """Forget everything; the next write says what a row is."""


class _Claim(NamedTuple):
    """A write that is under way: how many rows had ever been written, and the runs that it takes."""

    written: int
    runs: list[Run]


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
        self._places = Places(options.count)
        # How many rows the buffer had after the last look.
        self._size = 0
        self._has_reported = False
        # Whether the first row of an empty buffer may be any, and whether no more rows are taken.
        self._is_open = self._is_closed = False
        # How columns are stored that clients check.
        self._integers: dict[int, Source] = {}
        # The layout of the buffer's rows that was last compared with that of the queues.
        self._compared: RowLayout | None = None
        self._claim: _Claim | None = None
        self._taking = self._in_order = False
        # How often rows were taken in before an operation.
        self._calls = 0
        self._thread: tuple[threading.Thread, threading.Event] | None = None

    # Writers come and go

    @operation
    def client(self, example: Any = None) -> WriterClient:
        """A client for a writer in another process. See :meth:`gpubuf.ReplayBuffer.client`."""
        self._target()
        queues = self._queues_for(example)
        # A place is free once the rows of the writer before have been taken in.
        self.take(everything=True)
        return self._new_client(queues)

    def share(self) -> None:
        """Before a process is started that gets the buffer: have queues. Without rows its first write may be any."""
        if self._places.exist:
            # A process may be forked while another thread uses the buffer.
            self._tell()
        else:
            with contextlib.suppress(TypeError, RuntimeError):
                self.operation.run(self._share)

    def _share(self) -> None:
        self._is_open = True
        self._queues_for(None)
        self._tell()

    def link(self) -> WriterClient | None:
        """What such a process writes with; None: rows are no tensors."""
        return self._new_client(self._places.queues) if self._places.exist else None

    def _new_client(self, queues: Queues) -> WriterClient:
        own, timeout = self._writes, self.options.timeout
        priority = as_key(own.priority_key) if own.sampler.has_priorities else ()
        return WriterClient(queues, own.storage.ndim, own.dim_extend, timeout, priority, self._integers)

    def _queues_for(self, example: Any) -> Queues:
        """The queues, which are made where there are none, or none of the buffer's rows.

        Raises:
            RuntimeError: nothing says what a row is.
            TypeError: rows have data that are not tensors.
            ValueError: the example has other rows than the buffer, or a step of it has no room within ``margin``.
        """
        if self._is_closed:
            raise RuntimeError("the buffer takes no more rows of writers: writers.close() was called")
        places, storage, options = self._places, self._writes.storage, self.options
        said = self._rows_said(example)
        if said is None or (places.exist and places.queues.rows.are(*said)):
            return places.queues
        layout, envs = said
        if layout.host:
            raise TypeError(f"writers in other processes pass tensors on, and {list(layout.host)} hold other data")
        rows = QueuedRows(layout, envs, 1)
        rows = dataclasses.replace(rows, steps=options.steps_for(rows.step_bytes))
        as_stored = not self._writes.transform.has_inverse
        sources = storage.allocation.schema_like(layout).sources if as_stored else ()
        if places.exist:
            self._turn_away()
        # Whoever writes first may say that rows are larger.
        least = QUEUE_BYTES if self._is_open and not storage.ring.size else 0
        made = Queues(rows, options.count, max(rows.offsets[-1], least))
        places.begin(made)
        self._claim = None
        self._integers = {
            n: source for n, source in enumerate(sources) if _is_converted(source, layout.leaves[n].dtype)
        }
        self._recount()
        weakref.finalize(self, made.leave, os.getpid())
        return made

    def _rows_said(self, example: Any) -> tuple[RowLayout, tuple[int, ...]] | None:
        """The layout of rows and the environments of a step, by the example or the buffer; None: by the queues."""
        own, storage, places = self._writes, self._writes.storage, self._places
        as_stored = storage.initialized and not own.transform.has_inverse
        if example is not None:
            example = tensors_of(example)
            layout = layout_of(example, storage.ndim, storage.allocation.ignored_keys)
            envs = tuple(batch_shape(example, storage.ndim))
            self._is_open = False
            if as_stored and storage.ring.size:
                storage.written_layout.collect(example, storage.ndim)
            return layout, envs[: own.dim_extend] + envs[own.dim_extend + 1 :]
        if places.exist and places.queues.settled and not storage.ring.size:
            return None
        if as_stored:
            return storage.written_layout, tuple(storage.shape[1:])
        if places.exist:
            return None
        if self._is_open:
            return RowLayout(TensorDict({}, [1] * storage.ndim), storage.ndim), ()
        raise RuntimeError(
            "a writer has to know what a row is: write a batch first, or pass client() one as an example"
            + (" (transforms change what is written here)" if storage.initialized else "")
        )

    def _turn_away(self) -> None:
        """The rows of the queues are none that the buffer can take, nor will be."""
        queues = self._places.queues
        queues.leave(os.getpid(), OTHER_ROWS)
        for place, taken in enumerate(self._places.taken):
            run = Run(place, taken, queues.published(place) - taken)
            self._places.drop(run, "the buffer has rows of other keys, shapes or dtypes")
        self._set_limit()

    def _report(self) -> None:
        """Say once that steps were dropped."""
        refused = self._places.refused
        if refused is not None and not self._has_reported:
            self._has_reported = True
            warn(
                f"rows of writers were dropped, for the buffer can't take them: {refused}. "
                "buffer.writers.counters() says how many; this is said once"
            )

    @property
    def run(self) -> int:
        """Steps of one writer that are taken in together, at least."""
        # A next observation that is stored once needs a place of its own where another writer's row follows.
        in_order = self._in_order or bool(self._writes.storage.allocation.options.share_next)
        run = self.options.run or (_RUN if in_order else 1)
        return max(min(run, self._places.queues.rows.steps // 2), 1)

    def serve(self, writes: Writes, recipe: Recipe, *, in_order: bool) -> None:
        """Called with what writes the rows, and with how batches are made of them, when these change.

        Args:
            writes: writes rows to the buffer.
            recipe: of the buffer.
            in_order: whether something depends on the order of rows.

        Raises:
            TypeError: the storage holds any objects, or lies in files.
            ValueError: rows are not written in turn, something takes those of all writers for one stream, or there is
                no room for ``min_rows``.
        """
        storage, writer = writes.storage, writes.writer
        if self.options.min_rows > storage.max_size:
            raise ValueError(f"min_rows={self.options.min_rows} rows never fit into a buffer of {storage.max_size}")
        if storage.takes_objects or not storage.allocation.relocatable:
            kind = type(storage).__name__
            raise TypeError(
                f"writers in other processes need a LazyTensorStorage: a {kind} can't tell their rows apart"
            )
        if not writer.in_order:
            raise ValueError(f"writers in other processes need rows that are written in turn, not a {writer!r}")
        if any(isinstance(step, RewardScale) and (step.envs or 1) > 1 for step in writes.pipeline.steps):
            raise ValueError(
                "RewardScale(envs=...) tells environments apart by the turns that they take, and writers take turns, "
                "too: give the buffer a storage with ndim=2"
            )
        if not all(window.needs_ends for _, window in recipe.windows):
            raise ValueError(
                "a Window that crosses the ends of trajectories would join the rows of several writers: give it "
                "is_first, a key that tells where the next trajectory begins"
            )
        self._writes, self._in_order = writes, in_order

    def counters(self) -> list[WriterCounters]:
        """The state of every place. No host sync."""
        return self._places.counters

    # Samples for each row

    def _set_limit(self) -> None:
        """Let writers go on as far as the samples allow."""
        if self.options.ratio is not None:
            queues = self._places.queues
            queues.set_limit(self._places.uncounted + self.options.step_limit(self.drawn, queues.rows.step_rows))

    def _recount(self) -> None:
        """Begin to count anew for ``ratio``: the buffer was emptied."""
        self.drawn, self._places.uncounted = 0, self._places.steps
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
        margin, per_step = self.options.samples_ahead, (self.options.ratio or 0.0) * self._places.queues.rows.step_rows
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
        size, places = self._writes.storage.ring.size, self._places
        rows = (places.steps - places.uncounted) * places.queues.rows.step_rows
        return size >= self.options.min_rows and self.options.allows(self.drawn + samples, rows)

    def _why_blocked(self, samples: int) -> str:
        alive = [one for one in self.counters() if one.process is not None]
        return (
            f"{samples} samples more than {self.drawn} wait for rows, by ratio={self.options.ratio}: the writers have "
            f"written {self._places.steps} steps, and none for {self.options.timeout} s that would do; {len(alive)} of "
            f"{self.options.count} are alive"
        )

    def close(self) -> None:
        """Take in what was acknowledged, and no more: writers get an error at their next write."""
        # Its thread may be within an operation.
        self.stop()
        self.operation.run(self._close)

    def _close(self) -> None:
        self._places.queues.leave(os.getpid())
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
        before = self._places.steps
        self.operation.run(self._take_unless_taken, everything, self._calls)
        return self._places.steps - before

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
        if self._places.exist:
            self._calls += 1
            self._take(False)
        self._size = self.operation.storage.ring.size

    def _take(self, everything: bool) -> None:
        places, queues, ring = self._places, self._places.queues, self.operation.storage.ring
        if not places.exist or self._taking or self._is_closed or current.recording is not None:
            return
        try:
            # The writes below are operations of the buffer.
            self._taking = True
            if self._claim is not None:
                self._settle(self._claim)
            # A first sample finds what was acknowledged.
            runs = places.arrived(self.run if ring.size and not everything else 1)
            # After a look at what is published: rows are not settled after that.
            if queues.follow():
                self._integers, self._compared = {}, None
            if queues.left == OTHER_ROWS or self._has_other_rows():
                if ring.size or not queues.settled:
                    self._turn_away()
                    runs = []
                elif runs:
                    # The buffer's own rows are gone: the first one of a writer decides.
                    self._target().free()
            if self.operation.launches_at_once():
                if places.owes:
                    places.give_back()
                for group in self._groups(runs) if runs else ():
                    self._write_or_drop(group)
            self._tell()
        finally:
            self._taking = False
        self._report()

    def _has_other_rows(self) -> bool:
        """Whether the buffer has rows of another layout than the queues."""
        storage, rows = self.operation.storage, self._places.queues.rows
        if not storage.initialized or storage.written_layout is self._compared:
            return False
        same = rows.are(storage.written_layout, tuple(storage.shape[1:]))
        if not same and not self._writes.transform.has_inverse:
            return True
        self._compared = storage.written_layout
        return False

    def _tell(self) -> None:
        """Let writers know how many rows there are."""
        storage, queues = self.operation.storage, self._places.queues
        self._size, taken = storage.ring.size, self._places.steps * queues.rows.step_rows
        queues.tell(self._size - taken, storage.rows_written - taken, self._is_open and not self._size)

    def _groups(self, runs: list[Run]) -> list[list[Run]]:
        """The writes that runs become: small ones together, others alone. None is larger than the storage."""
        storage, rows, total = self._writes.storage, self._places.queues.rows, sum([run.steps for run in runs])
        steps = -(-storage.max_size // rows.step_rows)
        may_join = total <= steps and storage.initialized and not self._writes.transform.has_inverse
        if may_join and self._places.joins(total * rows.step_bytes, storage.device):
            return [runs]
        return [
            [Run(place, first + at, min(steps, count - at))]
            for place, first, count in runs
            for at in range(0, count, steps)
        ]

    def _write_or_drop(self, runs: list[Run]) -> None:
        """Write runs, without the steps that the buffer refuses: one refusal must not keep all others out."""
        storage = self._writes.storage
        written = storage.written
        try:
            self._write(runs)
        except Exception as refused:
            if storage.written != written or isinstance(refused, (MemoryError, torch.OutOfMemoryError)):
                raise
            self._claim, storage.marks.streams = None, OWN
            mend(storage, self._writes.writer)
            place, first, n = runs[0]
            if len(runs) > 1:
                parts = [[run] for run in runs]
            elif n > 1:
                parts = [[Run(place, first, n // 2)], [Run(place, first + n // 2, n - n // 2)]]
            else:
                parts = []
                self._places.drop(runs[0], str(refused))
                self._set_limit()
            for part in parts:
                self._write_or_drop(part)

    def _write(self, runs: list[Run]) -> None:
        """Write runs by one operation of the buffer, and release their places in the queues.

        An interrupt can come between the two: then the next call finds the claim.
        """
        storage, rows, places = self._writes.storage, self._places.queues.rows, self._places
        steps = sum([run.steps for run in runs])
        self._claim = _Claim(storage.written, runs)
        storage.marks.streams = places.streams(runs)
        as_columns = storage.initialized and rows.layout.is_tensordict
        copies = places.copies(steps * rows.step_bytes, storage.device) if as_columns else None
        columns = places.columns(runs, copies)
        turned = self._writes.dim_extend if rows.envs else 0
        if turned:
            columns = [column.swapaxes(0, turned) for column in columns]
        if as_columns:
            self._target().extend_columns(dict(zip(rows.layout.keys, columns, strict=True)))
        else:
            shape = [steps, *rows.envs]
            shape[0], shape[turned] = shape[turned], shape[0]
            self._target().extend(rows.layout.assemble(list(map(as_tensor, columns)), tuple(shape), None))
        places.release(runs)
        self._claim, storage.marks.streams = None, OWN

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

    def _settle(self, claim: _Claim) -> None:
        """A write was interrupted: it happened if the buffer has more rows than before."""
        storage = self._writes.storage
        if storage.written > claim.written:
            self._places.release(claim.runs)
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
