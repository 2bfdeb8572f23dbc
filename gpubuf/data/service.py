"""TorchRL's calls around a buffer in a process of its own, on a buffer that works in the process that made it."""

from __future__ import annotations

from typing import Self

from gpubuf.data.lock import BufferLock
from gpubuf.data.prefetch import Prefetcher


class Service:
    """Starts, finishes and closes a buffer. A mixin of methods that users call on the buffer."""

    _lock: BufferLock
    _prefetcher: Prefetcher
    _is_shut = False

    @property
    def service_backend(self) -> str:
        """``"direct"``: the buffer works in this process."""
        return "direct"

    @property
    def is_alive(self) -> bool:
        """Whether the buffer was not shut down."""
        return not self._is_shut

    def start(self) -> Self:
        """The buffer itself, which needs no start.

        Raises:
            RuntimeError: it was shut down.
        """
        if self._is_shut:
            raise RuntimeError("a buffer that was shut down can't be started again: make a new one")
        return self

    def client(self) -> Self:
        """The buffer itself: it is in this process."""
        return self

    def share(self, shared: bool = True) -> Self:
        """Accepted as False.

        Raises:
            NotImplementedError: ``shared`` is True.
        """
        if shared:
            raise NotImplementedError(
                "a buffer belongs to one process: send batches to that process, and write and sample there"
            )
        return self

    def synchronize(self) -> None:
        """Wait until the batches in preparation are finished; the next samples get them. Others need no waiting."""
        with self._lock, self._prefetcher.quiet():
            pass

    def shutdown(self, timeout: float | None = None) -> None:
        """Finish the batches in preparation. A buffer that is dropped ends its thread and gives its memory back.

        Args:
            timeout: accepted for compatibility.
        """
        self.synchronize()
        self._is_shut = True
