"""The state of a buffer: saved, and restored."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from gpubuf.data.checkpoints import restore, saving
from gpubuf.data.checkpoints.parts import Parts
from gpubuf.data.checkpoints.torchrl_dumps import is_dump, load_dump
from gpubuf.data.lock import BufferLock
from gpubuf.data.prefetch import Prefetcher
from gpubuf.data.processing.pipeline import Pipeline
from gpubuf.data.samplers.base import Sampler
from gpubuf.data.storage.tensor_storage import TensorStorage
from gpubuf.data.transforms import Compose
from gpubuf.data.writers import Writer


class Stateful:
    """Saves and restores a buffer. A mixin of methods that users call on the buffer."""

    _storage: TensorStorage
    _sampler: Sampler
    _writer: Writer
    _transform: Compose
    _lock: BufferLock
    _prefetcher: Prefetcher
    _pin_memory: bool
    _batch_size: int | None
    _pipeline: Pipeline | None

    def _assemble(self) -> None:
        raise NotImplementedError

    def state_dict(self) -> dict[str, Any]:
        """Everything that is needed to go on with the same batches. Row tensors are views. Synchronises.

        Waits until the batches in preparation are finished; they are part of the state.
        """
        with self._lock, self._prefetcher.quiet():
            state = {
                "_storage": self._storage.state_dict(),
                "_sampler": self._sampler.state_dict(),
                "_writer": self._writer.state_dict(),
                "_transforms": self._transform.state_dict(),
                "_batch_size": self._batch_size,
                "_prefetch": self._prefetcher.state_dict(),
            }
            return state if self._pipeline is None else {**state, "_processing": self._pipeline.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore :meth:`state_dict` into this buffer's own memory: all of it, or nothing. Synchronises.

        If it is interrupted, or a custom transform, sampler or writer raises, the buffer is put back as it was. For
        that the rows that it has are copied to the host beforehand. If they would take more than half of the free
        memory there, nothing is copied, and the buffer is left empty: a note in the error says so.

        Raises:
            ValueError: the state is that of another sampler, or its rows don't fit; the buffer is left as it was.
        """
        with self._lock:
            restore.restore(self._parts(), state)

    def _adopt(self, batch_size: int | None) -> None:
        self._batch_size = batch_size
        self._assemble()

    def _parts(self) -> Parts:
        methods = self.state_dict, self.load_state_dict
        parts = self._storage, self._sampler, self._writer, self._transform, self._prefetcher, self._pin_memory
        return Parts(*parts, *methods, self._batch_size, self._adopt, self._pipeline)

    def register_save_hook(self, hook: Callable[..., Any]) -> None:
        """Have a hook change the rows that :meth:`save` writes: ``hook(rows, path=folder)`` returns others.

        Hooks belong to the storage, and are not part of a checkpoint: register them again before :meth:`load`. See
        :class:`gpubuf.torchrl.checkpointers.StorageCheckpointerBase`.
        """
        storage: Any = self._storage
        storage.register_save_hook(hook)

    def register_load_hook(self, hook: Callable[..., Any]) -> None:
        """Have a hook make rows of what :meth:`load` reads: ``hook(data, out=None)`` returns all rows of a storage."""
        storage: Any = self._storage
        storage.register_load_hook(hook)

    def save(self, path: str | os.PathLike[str], **options: Any) -> saving.Saved:
        """Save everything to a folder, atomically; see :func:`gpubuf.data.checkpoints.saving.save`. Synchronises."""
        return saving.save(self._lock, self._parts, path, **options)

    def load(self, path: str | os.PathLike[str], **options: Any) -> None:
        """Restore what :meth:`save` wrote; see :func:`gpubuf.data.checkpoints.saving.load`. Synchronises.

        A folder that TorchRL's ``dumps`` has written is recognised: its rows, counters and priorities replace those of
        the buffer; see :func:`gpubuf.data.checkpoints.torchrl_dumps.load_dump`.
        """
        folder = Path(path)
        if is_dump(folder):
            with self._lock:
                load_dump(self._lock, self._parts, folder)
            return
        saving.load(self._lock, self._parts, path, **options)

    dump = dumps = save
    loads = load
