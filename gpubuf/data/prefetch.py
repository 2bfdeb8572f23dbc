"""The next batch, made while the consumer uses this one: gathered from pinned memory, or its pages requested of a disk.

Where a batch is one launch and nothing slower lies behind it, on a CPU or with rows on the GPU, nothing is made ahead,
and this class is not there.
"""

from __future__ import annotations

import math
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gpubuf.data.batches import Batch, Batches
from gpubuf.data.pinning import tensors_of
from gpubuf.data.recording import at_replays, capturing
from gpubuf.data.samplers.base import Drawn, Sampler
from gpubuf.data.samplers.slices import SliceSampler
from gpubuf.data.sequences import SampleUnit
from gpubuf.data.storage.memmap import LazyMemmapStorage
from gpubuf.data.storage.placement import PINNED, SPLIT
from gpubuf.data.storage.plan import RowPlan
from gpubuf.data.storage.storage import TensorStorage

_WHY = "the next batch is made ahead, and is not the graph's: use a buffer without prefetch"


class _Chosen(SampleUnit):
    """Rows that were chosen ahead, in the place of a draw."""

    def __init__(self, positions: Tensor, info: dict[Any, Tensor], ran_out: bool) -> None:
        self._positions, self._info, self._ran_out = positions, info, ran_out

    def draw(self, sampler: Sampler, reader: RowPlan, n: int, batches: int | None, storage: TensorStorage) -> Drawn:
        """Gather them."""
        tensors, generation = reader.gather(self._positions)
        sampler.ran_out = self._ran_out
        return Drawn(tensors, self._positions, generation, self._info)


class _Ahead(NamedTuple):
    """A batch ahead of its consumer: whether info goes into it, how it was drawn, and it or the rows chosen for it."""

    include_info: bool
    before: _Before
    made: Batch | _Chosen


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

    Rows in pinned memory: a stream of its own gathers it. It has the rows, priorities and statistics of that moment.
    Rows in files: the rows are chosen, and the system is asked to read their pages; they are gathered when the batch is
    asked for. Slices are chosen anew then, with the same random numbers: a write may have cut them.

    Transforms run when the batch is asked for. A draw of another kind, and whatever saves, moves, replaces or forgets
    rows, throws the batch ahead away and takes its draw back: the next draw gets its random numbers.
    """

    _ahead: _Ahead | None = None
    _side: torch.cuda.Stream | None = None

    @staticmethod
    def helps(storage: TensorStorage, sampler: Sampler, unit: SampleUnit | None) -> bool:
        """Whether a batch of these parts is worth making ahead, and can be taken back."""
        place = storage.placement
        if place is None or sampler.drawn_state is None or sampler.shards is not None or unit is not None:
            return False
        return place.kind in (PINNED, SPLIT) or (isinstance(storage, LazyMemmapStorage) and storage.has_large_rows)

    @property
    def ahead(self) -> int:
        return int(self._ahead is not None)

    def discard(self) -> None:
        super().discard()
        self._put_back()

    def _put_back(self) -> None:
        ahead, self._ahead = self._ahead, None
        if ahead is not None:
            ahead.before.put_back()

    def next(self, batch_size: int | None, include_info: bool, batches: int | None = None) -> Batch:
        batch = super().next(batch_size, include_info, batches)
        # Within a caller's operation the streams would be out of order.
        if batch_size in (None, self.batch_size) and batches is None and not self.operation.held:
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
        at_replays().refuse(_WHY)
        if capturing():
            raise RuntimeError(_WHY)
        usual = n == self.batch_size and batches is None and whole and assembled
        batch = self._taken(n, include_info) if usual else None
        if batch is None:
            self._put_back()
            batch = super().drawn(n, include_info, batches, whole, assembled)
        return batch

    def _taken(self, n: int, include_info: bool) -> Batch | None:
        """The batch ahead, if it is what is asked for."""
        ahead = self._ahead
        if ahead is None or ahead.include_info is not include_info:
            return None
        self._ahead = None
        if isinstance(ahead.made, Batch):
            for tensor in tensors_of((ahead.made.data, ahead.made.info)):
                if tensor.is_cuda:
                    tensor.record_stream(torch.cuda.current_stream(tensor.device))
            self.sampler.ran_out = ahead.made.ran_out
            return ahead.made
        # Of a copy: another thread may look at the unit of this object.
        return Batches.drawn(replace(self, unit=ahead.made), n, include_info, None)

    def _make(self, n: int, include_info: bool) -> None:
        """Make a batch ahead. One that can't be drawn, for want of rows for example, is drawn when it is asked for."""
        if self._ahead is not None:
            return  # another thread was here first
        storage, sampler, processing = self.storage, self.sampler, self.reader.recipe.processing
        ran_out, before = sampler.ran_out, _Before(sampler, None if processing is None else processing.noise)
        try:
            made: Batch | _Chosen | None
            if isinstance(storage, LazyMemmapStorage):
                made = self._chosen(storage, n)
            else:
                made = super().drawn(n, include_info, None)
            if made is None:
                before.put_back()
            else:
                before.drawn()
                self._ahead = _Ahead(include_info, before, made)
        except BaseException as error:
            self._ahead = None
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
        # A transition of several steps has its next observation from the last of them.
        steps = (self.reader.recipe.n_steps - 1) * math.prod(storage.shape[1:])
        storage.request(torch.cat((positions, (positions + steps) % storage.max_size)) if steps else positions)
        return None if isinstance(sampler, SliceSampler) else _Chosen(positions, info, sampler.ran_out)
