"""The next batch, made while the consumer uses this one: gathered from pinned memory, or its pages requested of a disk.

Where a batch is one launch and nothing slower lies behind it, nothing is made ahead: with rows on a CPU none of these
classes is there, and with rows on a GPU only captured steps have a batch ahead.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field, fields
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gpubuf.data.batches import Batch, Batches
from gpubuf.data.pinning import map_tensors, tensors_of
from gpubuf.data.recording import at_replays, capturing, current
from gpubuf.data.samplers.base import Drawn, Sampler
from gpubuf.data.samplers.slices import SliceSampler
from gpubuf.data.storage.host_memory import views_of
from gpubuf.data.storage.memmap import LazyMemmapStorage
from gpubuf.data.storage.placement import PINNED, SPLIT
from gpubuf.data.storage.plan import RowPlan
from gpubuf.data.storage.storage import TensorStorage
from gpubuf.kernels.rows import arena_offsets

_WHY = "the next batch is made ahead, in no graph but gpubuf.capture's, of pinned rows: use a buffer without prefetch"
_ALIKE = (
    "with prefetch, draw before the step's other calls of the buffer, as a replay may have to draw when it begins, and "
    "in batches of the buffer's own batch_size, all of them with info or all without"
)
GRAPH_DEVICES = frozenset({"cuda"})
"""Where rows are of which a branch of a graph makes the batch ahead, and nothing else does."""


class _Chosen(NamedTuple):
    """Rows that were chosen ahead."""

    positions: Tensor
    info: dict[Any, Tensor]
    ran_out: bool

    def drawn(self, reader: RowPlan) -> Drawn:
        """They, gathered now."""
        tensors, generation = reader.gather(self.positions)
        return Drawn(tensors, self.positions, generation, self.info)


class _Ahead(NamedTuple):
    """A batch ahead of its consumer: whether info goes into it, what takes its draw back, it or the rows chosen for it.

    The memory of one that a graph has made is written anew by the next replay.
    """

    include_info: bool
    before: _Before | None
    made: Batch | _Chosen
    memory: Tensor | None = None


@dataclass(eq=False)
class _Line:
    """Holds the batch ahead. It stays where parts of the buffer are replaced, for graphs take batches from here.

    Attributes:
        ahead: the batch.
        in_use: whether the buffer makes batches ahead: graphs that do so are no longer right else.
        layout, memory: of the batch that the last graph keeps. One like it shares the memory: graphs may take turns.
    """

    ahead: _Ahead | None = None
    in_use: bool = True
    layout: list[Any] = field(default_factory=list)
    memory: Tensor | None = None

    def keep(self, batch: Batch) -> tuple[Batch, Tensor, list[Tensor]]:
        """A batch like this one in one piece of memory, that, and what of it is for each of :func:`_bytes`."""
        given = _bytes(batch)
        offsets, n_bytes = arena_offsets([each.nbytes for each in given], 1)
        tensors = tensors_of((batch.data, batch.info))
        layout = [offsets, *((each.shape, each.dtype, each.stride(), each.storage_offset()) for each in tensors)]
        if self.memory is None or self.layout != layout:
            self.layout, self.memory = layout, torch.empty(n_bytes, dtype=torch.uint8, device=given[0].device)
        parts = views_of(self.memory, given, offsets)
        left = iter(parts)
        return _like(batch, lambda _: next(left))[0], self.memory, parts


class _Kept(NamedTuple):
    """What a graph has of the batch ahead: the stream that makes it, and it with the memory that it is in."""

    include_info: bool
    side: torch.cuda.Stream
    batch: Batch
    memory: Tensor
    parts: list[Tensor]


def _like(batch: Batch, memory: Callable[[Tensor], Tensor]) -> tuple[Batch, list[Tensor]]:
    """A batch in other memory, and that: what ``memory`` makes of the bytes, uint8 ``[n]``, that a batch lies in."""
    vectors: dict[int, Tensor] = {}

    def moved(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        vector = vectors.get(storage._cdata)
        if vector is None:
            vector = memory(tensor.as_strided((storage.nbytes() // tensor.itemsize,), (1,), 0).view(torch.uint8))
            vectors[storage._cdata] = vector
        own = vector.view(tensor.dtype)
        return own.as_strided(tensor.shape, tensor.stride(), own.storage_offset() + tensor.storage_offset())

    data, info = map_tensors((batch.data, batch.info), moved)
    return batch._replace(data=data, info=info), [*vectors.values()]


def _bytes(batch: Batch) -> list[Tensor]:
    """What a batch lies in, each uint8 ``[n]``."""
    return _like(batch, lambda vector: vector)[1]


class _Before:
    """What draws change, as it is now: random streams, and how far the sampler has got with an epoch."""

    def __init__(self, sampler: Sampler, noise: Tensor | None) -> None:
        self._sampler = sampler
        random = None if sampler._random is None else sampler._random.state
        self._states = [(stream, stream.clone()) for stream in (random, noise) if stream is not None]
        self._values = self._now()
        self._after: dict[str, Any] | None = None

    def _now(self) -> dict[str, Any]:
        return {name: getattr(self._sampler, name) for name in self._sampler.drawn_state or ()}

    def drawn(self) -> None:
        """The draw that may be taken back is done."""
        self._after = self._now()

    def put_back(self) -> None:
        """Take the draw back, but an epoch that was given up since. No host sync."""
        for state, before in self._states:
            state.copy_(before)
        if self._after is None or all(getattr(self._sampler, name) is value for name, value in self._after.items()):
            vars(self._sampler).update(self._values)


@dataclass(eq=False)
class PrefetchedInGraphs(Batches):
    """Batches of rows on a GPU: a branch of a captured step makes the next one of the constructor's size.

    It has the rows, priorities and statistics of that moment, and is for the next replay. All other draws are those of
    a buffer without prefetch, also in a graph. Random numbers of a batch that is thrown away are not used again.
    """

    line: _Line = field(default_factory=_Line)

    @property
    def ahead(self) -> int:
        return int(self.line.ahead is not None)

    def replaced_by(self, other: Batches) -> None:
        """Others make the buffer's batches from now on. Call :meth:`discard` before."""
        self.line.ahead = None
        if isinstance(other, PrefetchedInGraphs):
            other.line = self.line
        else:
            self.line.in_use = False

    def discard(self) -> None:
        super().discard()
        self._put_back()

    def _put_back(self) -> None:
        ahead, self.line.ahead = self.line.ahead, None
        if ahead is not None and ahead.before is not None:
            ahead.before.put_back()

    def drawn(
        self, n: int, include_info: bool, batches: int | None, whole: bool = True, assembled: bool = True
    ) -> Batch:
        usual = n == self.batch_size and batches is None and whole and assembled
        if usual and self._in_branch(include_info):
            return self._captured(n, include_info)
        return super().drawn(n, include_info, batches, whole, assembled)

    def _in_branch(self, include_info: bool) -> bool:
        """Whether a step is being captured whose replays can draw before all else, and batches like this one."""
        notes = current.recording
        if notes is None:
            return False
        known = notes.kept.get(self.line)
        return notes.begun.count(self.operation) == 1 if known is None else known.include_info is include_info

    def _captured(self, n: int, include_info: bool) -> Batch:
        """The batch that the replay before has left, in the graph; and in a branch the next one, for the next replay.

        A replay that finds none, for there was none or it was thrown away, draws one first.
        """
        notes, device = at_replays(), self.storage.device
        main = torch.cuda.current_stream(device)
        known = notes.kept.get(self.line)
        # Not that of eager batches: other threads may make some meanwhile.
        side = torch.cuda.Stream(device) if known is None else known.side
        side.wait_stream(main)
        with torch.cuda.stream(side):
            before, made = self._next(n, include_info)
        if known is None:
            known = notes.kept[self.line] = _Kept(include_info, side, *self.line.keep(made))
            notes.holds(self.line, "in_use")
            notes.before(self.line, functools.partial(self._bring, known, n))
        batch, _ = _like(known.batch, torch.clone)
        side.wait_stream(main)
        with torch.cuda.stream(side):
            torch._foreach_copy_(known.parts, _bytes(made))
        notes.branches[self.operation] = side
        ahead = _Ahead(include_info, before, known.batch, known.memory)
        notes.after(functools.partial(setattr, self.line, "ahead", ahead))
        return batch

    def _next(self, n: int, include_info: bool) -> tuple[_Before | None, Batch]:
        """The next batch, in a branch of a graph, and what takes its draw back."""
        return None, super().drawn(n, include_info, None)

    def _bring(self, kept: _Kept, n: int) -> None:
        """Before a replay: have the batch ahead where its graph takes it from."""
        ahead = self.line.ahead
        if ahead is None or ahead.memory is not kept.memory:
            batch = self.drawn(n, kept.include_info, None)
            there, found = (list(tensors_of((each.data, each.info))) for each in (kept.batch, batch))
            torch._foreach_copy_(there, found)
        self.line.ahead = None


@dataclass(eq=False)
class Prefetched(PrefetchedInGraphs):
    """Batches of the constructor's size, of which the next is made ahead of its consumer: one at most, by no thread.

    Rows in pinned memory: a stream of its own gathers it, or within a captured step a branch of the graph. It has the
    rows, priorities and statistics of that moment.
    Rows in files: the rows are chosen, and the system is asked to read their pages; they are gathered when the batch is
    asked for. Slices are chosen anew then, with the same random numbers: a write may have cut them.

    Transforms run when the batch is asked for. A draw of another kind, and whatever saves, moves, replaces or forgets
    rows, throws the batch ahead away and takes its draw back: the next draw gets its random numbers.
    """

    _side: torch.cuda.Stream | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        # Makes the batches, each when it is asked for.
        self._plain = Batches(**{each.name: getattr(self, each.name) for each in fields(Batches)})

    def _forget(self) -> None:
        self._plain._forget()

    def kept_bytes(self) -> int:
        return self._plain.kept_bytes()

    def next(self, batch_size: int | None, include_info: bool, batches: int | None = None) -> Batch:
        batch = super().next(batch_size, include_info, batches)
        # Within a caller's operation the streams would be out of order.
        own = batch_size in (None, self.batch_size) and batches is None
        if own and current.recording is None and not self.operation.held:
            device = self.operation.gpu()
            if device is not None and self._side is None:
                self._side = torch.cuda.Stream(device)
            # Operations are ordered: that of the side stream comes after all before it, and the next one after it.
            with nullcontext() if self._side is None else torch.cuda.stream(self._side):
                self.operation.run(self._make, self.batch_size, include_info)
        return batch

    def drawn(
        self, n: int, include_info: bool, batches: int | None, whole: bool = True, assembled: bool = True
    ) -> Batch:
        notes, usual = current.recording, n == self.batch_size and batches is None and whole and assembled
        if notes is not None:
            if isinstance(self.storage, LazyMemmapStorage):
                notes.refuse(_WHY)
            if not (usual and self._in_branch(include_info)):
                notes.refuse(_ALIKE)
            return self._captured(n, include_info)
        if capturing():
            raise RuntimeError(_WHY)
        batch = self._taken(n, include_info) if usual else None
        if batch is None:
            self._put_back()
            batch = self._fresh(n, include_info, batches, whole, assembled)
        return batch

    _draw = drawn

    def _fresh(self, *request: Any) -> Batch:
        """A batch that is drawn now."""
        plain = self._plain
        return (plain._draw if self.reader.launches else plain.drawn)(*request)

    def _taken(self, n: int, include_info: bool) -> Batch | None:
        """The batch ahead, if it is what is asked for."""
        ahead = self.line.ahead
        if ahead is None or ahead.include_info is not include_info:
            return None
        self.line.ahead = None
        self.sampler.ran_out = ahead.made.ran_out
        if isinstance(ahead.made, _Chosen):
            return self._plain.made_of(ahead.made.drawn(self.reader), include_info)
        if ahead.memory is not None:
            return _like(ahead.made, torch.clone)[0]
        on_gpu = (each for each in tensors_of((ahead.made.data, ahead.made.info)) if each.is_cuda)
        for tensor in {each.untyped_storage()._cdata: each for each in on_gpu}.values():
            tensor.record_stream(torch.cuda.current_stream(tensor.device))
        return ahead.made

    # Ahead

    def _before(self) -> _Before:
        processing = self.reader.recipe.processing
        return _Before(self.sampler, None if processing is None else processing.noise)

    def _next(self, n: int, include_info: bool) -> tuple[_Before | None, Batch]:
        before, made = self._before(), self._plain.drawn(n, include_info, None)
        before.drawn()
        return before, made

    def _make(self, n: int, include_info: bool) -> None:
        """Make a batch ahead. One that can't be drawn, for want of rows for example, is drawn when it is asked for."""
        if self.line.ahead is not None:
            return  # another thread was here first
        storage, sampler = self.storage, self.sampler
        ran_out, before = sampler.ran_out, self._before()
        try:
            made: Batch | _Chosen | None
            if isinstance(storage, LazyMemmapStorage):
                made = self._chosen(storage, n)
            else:
                made = self._fresh(n, include_info, None, True, True)
            if made is None:
                before.put_back()
            else:
                before.drawn()
                self.line.ahead = _Ahead(include_info, before, made)
        except BaseException as error:
            self.line.ahead = None
            before.put_back()
            if not isinstance(error, Exception):
                raise
        finally:
            # That of the batch which the consumer has.
            sampler.ran_out = ran_out

    def _chosen(self, storage: LazyMemmapStorage, n: int) -> _Chosen | None:
        """Choose the rows of the next batch and request their pages. None: they are to be chosen anew."""
        sampler = self.sampler
        positions, info = sampler.choose(n)
        envs = storage.rows.envs
        around = [(positions + offset * envs) % storage.max_size for offset in self.reader.recipe.offsets]
        storage.request(torch.cat(around))
        return None if isinstance(sampler, SliceSampler) else _Chosen(positions, info, sampler.ran_out)


def prefetched(storage: TensorStorage, sampler: Sampler) -> type[Batches]:
    """What makes the batches of these parts where the next one is to be made ahead: if that pays, and can be done."""
    place = storage.placement
    if place is None or sampler.drawn_state is None or sampler.shards is not None:
        return Batches
    if place.kind in (PINNED, SPLIT) or (isinstance(storage, LazyMemmapStorage) and storage.has_large_rows):
        return Prefetched
    # Within a graph no draw can be taken back, nor an epoch begin.
    return PrefetchedInGraphs if place.kind in GRAPH_DEVICES and sampler.drawn_state == () else Batches
