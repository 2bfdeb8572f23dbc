"""Finishing what an interrupted operation has left."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from gpubuf.data.samplers.base import Sampler
from gpubuf.data.storages.tensor_storage import TensorStorage


class Mending:
    """What a buffer does about an operation that was interrupted.

    A mixin: an object would have to ask the buffer which storage and sampler it has by now, and what it was about to
    tell the sampler. It would refer to the buffer, which refers to it, and keep it until garbage is collected.
    """

    _lock: Any
    _storage: TensorStorage
    _sampler: Sampler

    def _tell_sampler(self, survivors: Tensor) -> None:
        raise NotImplementedError

    def _finish_what_was_interrupted(self) -> None:
        """Before the host's mirror of the counters is read outside of a turn."""
        if self._storage.unfinished is not None:
            self._lock.mend()

    def _mend(self) -> None:
        """Finish what an interrupted operation has left, in the turn of the next one.

        The device's counters say whether the rows of a write have been written. If so, the write is completed;
        otherwise there was none. What is derived from rows and priorities is computed anew: O(capacity). Synchronises
        after a write.
        """
        storage, sampler = self._storage, self._sampler
        left = storage.unfinished
        if left is None or not storage.initialized:
            storage.end(None)
            return
        if left.empties:
            storage.empty()
            sampler.empty()
        elif left.written is None or self._complete_write(left.written):
            if not left.counted:
                storage.refresh()
            sampler.mend()
        storage.end(None)

    def _complete_write(self, written: int) -> bool:
        """Whether an interrupted write has written rows; the sampler knows of them then."""
        storage = self._storage
        storage.refresh()
        n = min(storage.written - written, storage.max_size)
        if n > 0:
            first = storage.written - n
            self._tell_sampler((first + torch.arange(n, device=storage.device)) % storage.max_size)
        return n > 0
