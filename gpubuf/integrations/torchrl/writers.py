"""Writers that TorchRL's buffers take."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch import Tensor
from torchrl.data import replay_buffers as theirs

from gpubuf import data
from gpubuf.data.samplers.base import Sampler as GpubufSampler
from gpubuf.data.storage.layout import Data
from gpubuf.data.storage.tensor_storage import Storage
from gpubuf.data.storage.tensor_storage import TensorStorage as OwnStorage
from gpubuf.integrations.torchrl.joining import SavedInFolder
from gpubuf.integrations.torchrl.storages import StorageOfTorchRL


class WriterOfTorchRL(SavedInFolder):
    """What TorchRL's buffers ask of a writer beside what gpubuf's has."""

    _rng = None
    _storage: Any

    def register_storage(self, storage: Storage) -> None:
        """Write to ``storage``.

        Raises:
            TypeError: it is TorchRL's own.
        """
        if not isinstance(storage, OwnStorage):
            raise TypeError(
                f"{type(self).__name__} is gpubuf's, and can't write to TorchRL's {type(storage).__name__}: use a "
                "storage of gpubuf.integrations.torchrl, such as LazyTensorStorage"
            )
        if isinstance(storage, StorageOfTorchRL):
            for buffer in storage._attached_entities:
                sampler = vars(buffer).get("_sampler")
                if isinstance(sampler, theirs.ConsumingSampler) and not isinstance(sampler, GpubufSampler):
                    raise TypeError(
                        "TorchRL's ConsumingSampler can't tell gpubuf's writers where new rows go: give the buffer "
                        "sampler=ConsumingSampler(...) of gpubuf.integrations.torchrl"
                    )
            storage.bind_samplers()
        super().register_storage(storage)  # type: ignore[misc]

    def _buffer(self) -> Any:
        """TorchRL's buffer that this is the writer of, or None: gpubuf's buffers don't attach themselves."""
        attached = vars(self._storage).get("_entities", ())
        return next((buffer for buffer in attached if vars(buffer).get("_writer") is self), None)

    def extend(self, data: Data) -> Tensor:
        """Write a batch at the cursor. No host sync.

        Returns:
            Flat positions for a buffer of gpubuf's; for one of TorchRL's, int64 ``[n, ndim]`` above one dimension.
        """
        append: Callable[[Data], Tensor] = super().extend  # type: ignore[misc]
        if "_entities" not in vars(self._storage) or self._buffer() is None:
            return append(data)
        storage, consuming = self._storage, self._consuming_sampler()
        self.check_writable()  # type: ignore[attr-defined]
        if consuming is not None:
            append = functools.partial(consuming.write, append)
        index: Tensor = storage.write_next(data, append, in_order=self.in_order)  # type: ignore[attr-defined]
        index = storage.unravel(index)
        for buffer in storage._attached_entities:
            if not isinstance(vars(buffer).get("_sampler"), GpubufSampler):
                buffer.mark_update(index)
        return index

    def _consuming_sampler(self) -> Any:
        """The sampler that says where new rows go, or None."""
        buffer = self._buffer() if "_entities" in vars(self._storage) else None
        sampler = None if buffer is None else vars(buffer).get("_sampler")
        return sampler if isinstance(sampler, GpubufSampler) and sampler.consumes else None

    def add(self, data: Any) -> int | Tensor | None:
        """Write one row (of one step of all environments above one dimension).

        Returns:
            Its index; None if the row was not kept.
        """
        cursor = int(self._storage.cursor)
        index = self.extend(self._storage.as_batch(data, 0))
        if int(self._storage.ndim) > 1:
            return index
        in_turn = self.in_order and self._consuming_sampler() is None  # type: ignore[attr-defined]
        return cursor if in_turn else self.added(index)  # type: ignore[attr-defined]

    def write_at(self, index: Any, data: Any) -> Tensor:
        """Write rows over stored ones, and tell the buffers of TorchRL's that read them."""
        written: Tensor = super().write_at(index, data)  # type: ignore[misc]
        if "_entities" in vars(self._storage):
            for buffer in self._storage._attached_entities:
                buffer.mark_update(written)
        return written

    @property
    def _write_count(self) -> int:
        return int(self.write_count)  # type: ignore[attr-defined]

    def _empty(self, empty_write_count: bool = True) -> None:
        self.check_writable()  # type: ignore[attr-defined]
        self._storage.empty(empty_write_count)
        self.empty(empty_write_count)  # type: ignore[attr-defined]


class RoundRobinWriter(WriterOfTorchRL, data.RoundRobinWriter, theirs.RoundRobinWriter):
    """:class:`gpubuf.data.RoundRobinWriter`, which is also TorchRL's."""


class TensorDictRoundRobinWriter(WriterOfTorchRL, data.TensorDictRoundRobinWriter, theirs.TensorDictRoundRobinWriter):
    """:class:`gpubuf.data.TensorDictRoundRobinWriter`, which is also TorchRL's."""


class ImmutableDatasetWriter(WriterOfTorchRL, data.ImmutableDatasetWriter, theirs.ImmutableDatasetWriter):
    """:class:`gpubuf.data.ImmutableDatasetWriter`, which is also TorchRL's."""


class TensorDictMaxValueWriter(WriterOfTorchRL, data.TensorDictMaxValueWriter, theirs.TensorDictMaxValueWriter):
    """:class:`gpubuf.data.TensorDictMaxValueWriter`, which is also TorchRL's."""
