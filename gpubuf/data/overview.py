"""Questions about a buffer: how full it is, how much was written, whether it can give a batch."""

from __future__ import annotations

from typing import Any

from gpubuf.data.lock import BufferLock
from gpubuf.data.prefetch import Prefetcher
from gpubuf.data.samplers.base import Sampler
from gpubuf.data.storage.tensor_storage import TensorStorage
from gpubuf.data.writers import Writer


class Overview:
    """Answers questions about a buffer. A mixin of methods that users call on the buffer."""

    _storage: TensorStorage
    _sampler: Sampler
    _writer: Writer
    _lock: BufferLock
    _prefetcher: Prefetcher
    _batch_size: int | None

    def _finish_what_was_interrupted(self) -> None:
        raise NotImplementedError

    @property
    def write_count(self) -> int:
        """Number of rows written since the buffer was made, or since :meth:`empty`. No host sync."""
        self._finish_what_was_interrupted()
        return self._writer.write_count

    def __len__(self) -> int:
        self._finish_what_was_interrupted()
        return self._sampler.available() if self._sampler.consumes else len(self._storage)

    def stats(self) -> dict[str, Any]:
        """The state of the buffer in numbers, for a logger. It changes nothing. No host sync.

        Returns:
            ``"size"``, the rows stored; ``"write_count"``; ``"prefetch_queue_size"``, the batches in preparation;
            ``"initialized"``, whether the storage is allocated; ``"capacity"``; and ``"utilization"``, the size as a
            share of the capacity.
        """
        with self._lock:
            size, capacity = len(self), self._storage.max_size
            return {
                "size": size,
                "write_count": self.write_count,
                "prefetch_queue_size": len(self._prefetcher.queue),
                "initialized": self._storage.initialized,
                "capacity": capacity,
                "utilization": size / capacity,
            }

    def can_sample(self, batch_size: int | None = None) -> bool:
        """Whether :meth:`sample` would give a batch now.

        Samplers of slices look for a trajectory that is long enough, which synchronises with a GPU. Others only need
        the number of rows, and don't.

        Args:
            batch_size: default: that of the constructor.

        Raises:
            RuntimeError: no batch size is known, or it is not a multiple of the slices.
        """
        n = self._batch_size if batch_size is None else batch_size
        if n is None:
            raise RuntimeError("batch_size must be given to can_sample() or to the constructor")
        with self._lock:
            return self._sampler.can_sample(self._storage, n)
