"""The next batch, made while the consumer uses this one: gathered from pinned memory, or its pages requested of a disk.

Where a batch is one launch and nothing slower lies behind it, on a CPU or with rows on the GPU, nothing is made ahead,
and this class is not there.
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
from gpubuf.data.recording import Recording, capturing, current
from gpubuf.data.samplers.base import Drawn, Sampler
from gpubuf.data.samplers.slices import SliceSampler
from gpubuf.data.storage.memmap import LazyMemmapStorage
from gpubuf.data.storage.placement import PINNED, SPLIT
from gpubuf.data.storage.plan import RowPlan
from gpubuf.data.storage.storage import TensorStorage

_WHY = "the next batch is made ahead, in no graph but gpubuf.capture's, of pinned rows: use a buffer without prefetch"
_KIND = "with prefetch, draw batches of the buffer's own batch_size, all of them with info or all without"
_FIRST = "with prefetch, draw before the step's other calls of the buffer: a replay may have to draw when it begins"


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
    """A batch ahead of its consumer: whether info goes into it, how it was drawn, and it or the rows chosen for it.

    The memory of one that a graph has made is written anew by the next replay.
    """

    include_info: bool
    before: _Before
    made: Batch | _Chosen
    of_graph: bool = False


@dataclass(eq=False)
class _Line:
    """Holds the batch ahead. It stays where parts of the buffer are replaced, for graphs take batches from here.

    Attributes:
        ahead: the batch.
        in_use: whether the buffer makes batches ahead: graphs that do so are no longer right else.
    """

    ahead: _Ahead | None = None
    in_use: bool = True


class _Kept(NamedTuple):
    """What a graph has of the batch ahead: the stream that makes it, and it with the memory that it is in."""

    include_info: bool
    side: torch.cuda.Stream
    batch: Batch
    memory: list[Tensor]


def _like(batch: Batch, memory: Callable[[Tensor], Tensor]) -> tuple[Batch, list[Tensor]]:
    """A batch in other memory, and that: what ``memory`` makes of the vectors that a batch lies in."""
    vectors: dict[int, Tensor] = {}

    def moved(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        vector = vectors.get(storage._cdata)
        if vector is None:
            vector = memory(tensor.as_strided((storage.nbytes() // tensor.itemsize,), (1,), 0))
            vectors[storage._cdata] = vector
        return vector.view(tensor.dtype).as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())

    data, info = map_tensors((batch.data, batch.info), moved)
    return batch._replace(data=data, info=info), [*vectors.values()]


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
class Prefetched(Batches):
    """Batches of the constructor's size, of which the next is made ahead of its consumer: one at most, by no thread.

    Rows in pinned memory: a stream of its own gathers it, or within a captured step a branch of the graph. It has the
    rows, priorities and statistics of that moment.
    Rows in files: the rows are chosen, and the system is asked to read their pages; they are gathered when the batch is
    asked for. Slices are chosen anew then, with the same random numbers: a write may have cut them.

    Transforms run when the batch is asked for. A draw of another kind, and whatever saves, moves, replaces or forgets
    rows, throws the batch ahead away and takes its draw back: the next draw gets its random numbers.
    """

    line: _Line = field(default_factory=_Line)
    _side: torch.cuda.Stream | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        # Makes the batches, each when it is asked for.
        self._plain = Batches(**{each.name: getattr(self, each.name) for each in fields(Batches)})

    @staticmethod
    def helps(storage: TensorStorage, sampler: Sampler) -> bool:
        """Whether a batch of these parts is worth making ahead, and can be taken back."""
        place = storage.placement
        if place is None or sampler.drawn_state is None or sampler.shards is not None:
            return False
        return place.kind in (PINNED, SPLIT) or (isinstance(storage, LazyMemmapStorage) and storage.has_large_rows)

    @property
    def ahead(self) -> int:
        return int(self.line.ahead is not None)

    def replaced_by(self, other: Batches) -> None:
        """Others make the buffer's batches from now on. Call :meth:`discard` before."""
        self.line.ahead = None
        if isinstance(other, Prefetched):
            other.line = self.line
        else:
            self.line.in_use = False

    def discard(self) -> None:
        super().discard()
        self._put_back()

    def _forget(self) -> None:
        self._plain._forget()

    def kept_bytes(self) -> int:
        return self._plain.kept_bytes()

    def _put_back(self) -> None:
        ahead, self.line.ahead = self.line.ahead, None
        if ahead is not None:
            ahead.before.put_back()

    def next(self, batch_size: int | None, include_info: bool, batches: int | None = None) -> Batch:
        notes = current.recording
        if notes is not None and self.operation in notes.operations and self.line not in notes.kept:
            notes.refuse(_FIRST)
        batch = super().next(batch_size, include_info, batches)
        # Within a caller's operation the streams would be out of order.
        if notes is None and batch_size in (None, self.batch_size) and batches is None and not self.operation.held:
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
            known = notes.kept.get(self.line)
            if not usual or (known is not None and known.include_info is not include_info):
                notes.refuse(_KIND)
            return self._captured(notes, n, include_info)
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
        if ahead.of_graph:
            return _like(ahead.made, torch.clone)[0]
        on_gpu = (each for each in tensors_of((ahead.made.data, ahead.made.info)) if each.is_cuda)
        for tensor in {each.untyped_storage()._cdata: each for each in on_gpu}.values():
            tensor.record_stream(torch.cuda.current_stream(tensor.device))
        return ahead.made

    # In a graph

    def _captured(self, notes: Recording, n: int, include_info: bool) -> Batch:
        """The batch that the replay before has left, in the graph; and in a branch the next one, for the next replay.

        A replay that finds none, for there was none or it was thrown away, draws one first.
        """
        device = self.storage.device
        main = torch.cuda.current_stream(device)
        known = notes.kept.get(self.line)
        # Not that of eager batches: other threads may make some meanwhile.
        side = torch.cuda.Stream(device) if known is None else known.side
        side.wait_stream(main)
        with torch.cuda.stream(side):
            before, made = self._before(), self._plain.drawn(n, include_info, None)
        before.drawn()
        if known is None:
            known = notes.kept[self.line] = _Kept(include_info, side, *_like(made, torch.empty_like))
            notes.holds(self.line, "in_use")
            notes.before(self.line, functools.partial(self._bring, known.batch, n, include_info))
        batch, _ = _like(known.batch, torch.clone)
        side.wait_stream(main)
        with torch.cuda.stream(side):
            for to, vector in zip(known.memory, _like(made, lambda vector: vector)[1], strict=True):
                to.copy_(vector)
        notes.branches[self.operation] = side
        notes.after(functools.partial(setattr, self.line, "ahead", _Ahead(include_info, before, known.batch, True)))
        return batch

    def _bring(self, kept: Batch, n: int, include_info: bool) -> None:
        """Before a replay: have the batch ahead where its graph takes it from."""
        ahead = self.line.ahead
        if ahead is None or ahead.made is not kept:
            batch = self.drawn(n, include_info, None)
            there, found = (list(tensors_of((each.data, each.info))) for each in (kept, batch))
            torch._foreach_copy_(there, found)
        self.line.ahead = None

    # Ahead

    def _before(self) -> _Before:
        processing = self.reader.recipe.processing
        return _Before(self.sampler, None if processing is None else processing.noise)

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
