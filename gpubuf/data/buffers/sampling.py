"""From a request to a batch: draw, gather, collate, transform, pin; at once, or ahead of time."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any

from torch import Tensor

from gpubuf.data.buffers.transforms import Compose
from gpubuf.data.buffers.writers import Writer
from gpubuf.data.concurrency.locking import Turn, turn_of
from gpubuf.data.concurrency.pinning import pin
from gpubuf.data.concurrency.prefetch import Batch, Prefetcher
from gpubuf.data.runtime.recording import refuse
from gpubuf.data.samplers.base import Drawn, Sampler, require_rows
from gpubuf.data.storages.layout import Data
from gpubuf.data.storages.tensor_storage import TensorStorage


class Sampling:
    """How a buffer makes its batches."""

    _storage: TensorStorage
    _sampler: Sampler
    _writer: Writer
    _transform: Compose
    _collate_fn: Callable[[Data], Data] | None
    _pin_memory: bool
    _batch_size: int | None
    _warned_batch_size: bool
    _lock: Turn
    _ahead: Prefetcher
    _samples_have_info = False

    def _resolve_batch_size(self, batch_size: int | None) -> int:
        own = self._batch_size
        if batch_size is None:
            if own is None:
                raise RuntimeError("batch_size must be given to sample() or to the constructor")
            return own
        if own is not None and own != batch_size and not self._warned_batch_size:
            self._warned_batch_size = True
            warnings.warn(
                f"sample() got batch_size={batch_size}, the constructor {own}; the first is used", stacklevel=4
            )
        if batch_size < 1:
            raise ValueError(f"batch_size must be at least 1, got {batch_size}")
        return batch_size

    def _next(self, batch_size: int | None, include_info: bool) -> Batch:
        """The next batch, from the queue where there is one; with its info in it if that is wanted."""
        n = self._resolve_batch_size(batch_size)
        batch, ahead = None, self._ahead
        if ahead.active:
            refuse("batches are prepared ahead: use a buffer without prefetch")
            # The queue holds batches without their info, so that it serves those who want it and those who don't.
            take = ahead.take if n == self._batch_size else ahead.take_other
            # Not a lambda: the traceback of a failed draw would keep its closure, and with it the buffer.
            batch = take(functools.partial(self._draw, n, False), self._finish)
        if batch is None:
            batch = self._finish(self._draw(n, include_info))
        if include_info and not batch.has_info:
            for key, value in batch.info.items():
                batch.data.set(key, value)
        return batch

    def _draw(self, n: int, include_info: bool) -> Batch:
        """Draw and gather, in one turn. Info goes into the batch here if nothing else is to change it."""
        sampler, storage = self._sampler, self._storage
        with turn_of(self._lock):
            if sampler.ran_out:
                sampler.ran_out = False
            require_rows(storage)
            draw = sampler.draw(n)
            info = self._info(draw)
            direct = (
                include_info and self._collate_fn is None and not len(self._transform) and storage.layout.is_tensordict
            )
            data = storage.assemble(draw.tensors, info if direct else None, draw.batch_size)
            return Batch(data, info, sampler.ran_out, direct)

    def _info(self, draw: Drawn) -> dict[Any, Tensor]:
        index, generation, shape = self._storage.unravel(draw.positions), draw.generation, draw.batch_size
        if shape is not None:
            index, generation = index.view(*shape, *index.shape[1:]), generation.view(shape)
        info = {"index": index, **draw.info}
        if self._sampler.has_priorities or getattr(self._writer, "track_generations", False):
            info["index_generation"] = generation
        return info

    def _finish(self, batch: Batch) -> Batch:
        """Collate, transform and pin."""
        if self._collate_fn is None and not self._pin_memory and not len(self._transform):
            return batch
        data, info, ran_out, has_info = batch
        if self._collate_fn is not None:
            data = self._collate_fn(data)
        if len(self._transform):
            data = self._transform(data)
        if self._pin_memory:
            refuse("pin_memory=True puts batches into the host's memory")
            data, info = pin((data, info))
        return Batch(data, info, ran_out, has_info)
