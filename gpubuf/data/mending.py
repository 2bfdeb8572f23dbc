"""Finishing an interrupted operation."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from gpubuf.data.samplers.base import Sampler
from gpubuf.data.storage.tensor_storage import TensorStorage
from gpubuf.data.writers import Writer


class Mending:
    """Finishes an operation of the buffer that was interrupted.

    A mixin, because an object of its own would have to refer to the buffer, to know its present storage and sampler.
    The buffer refers to that object too: such a cycle stays in memory until garbage is collected.
    """

    _lock: Any
    _storage: TensorStorage
    _sampler: Sampler
    _writer: Writer

    def _tell_sampler(self, survivors: Tensor) -> None:
        raise NotImplementedError

    def _finish_what_was_interrupted(self) -> None:
        """Called before the host's mirror of the counters is read without the lock."""
        if self._storage.unfinished is not None:
            self._lock.mend()

    def _mend(self) -> None:
        """Finish an interrupted operation. The next one calls this, with the lock held.

        The device's counters say whether the rows of a write have been written. If so, the write is completed;
        otherwise there was none. Data derived from rows and priorities is computed anew: O(capacity). Synchronises
        after a write.
        """
        storage, sampler = self._storage, self._sampler
        left = storage.unfinished
        if left is None or not storage.initialized:
            storage.end(None)
            return
        storage.redo()
        if left.empties:
            storage.empty()
            sampler.empty()
            self._writer.empty()
        elif left.written is None or self._complete_write(left.written) or not self._writer.in_order:
            if not left.counted:
                storage.refresh()
            storage.rebuild()
            sampler.mend()
            self._writer.mend()
        storage.end(None)

    def _complete_write(self, written: int) -> bool:
        """Whether an interrupted write has written rows; the sampler knows of them then."""
        storage = self._storage
        storage.refresh()
        if storage.host is not None:
            storage.host.settle(storage.written)
        n = min(storage.written - written, storage.max_size)
        if n > 0:
            first = storage.written - n
            self._tell_sampler((first + torch.arange(n, device=storage.device)) % storage.max_size)
        return n > 0
