"""Writers that TorchRL's buffers take."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torchrl.data import replay_buffers as theirs

from gpubuf import data
from gpubuf.data.samplers.base import Sampler as GpubufSampler
from gpubuf.data.storages.layout import Data
from gpubuf.data.storages.tensor_storage import Storage
from gpubuf.data.storages.tensor_storage import TensorStorage as OwnStorage
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
        super().register_storage(storage)  # type: ignore[misc]
        if isinstance(storage, StorageOfTorchRL):
            storage.bind_samplers()

    def _buffer(self) -> Any:
        """TorchRL's buffer that this is the writer of, or None: gpubuf's buffers don't attach themselves."""
        attached = vars(self._storage).get("_entities", ())
        return next((buffer for buffer in attached if vars(buffer).get("_writer") is self), None)

    def extend(self, data: Data) -> Tensor:
        """Write a batch at the cursor. No host sync.

        Returns:
            Flat positions for a buffer of gpubuf's; for one of TorchRL's, int64 ``[n, ndim]`` above one dimension.
        """
        if "_entities" not in vars(self._storage):
            return super().extend(data)  # type: ignore[misc,no-any-return]
        storage, told = self._storage, self._buffer() is not None
        self.check_writable()  # type: ignore[attr-defined]
        index: Tensor = storage.write_next(data) if told else super().extend(data)  # type: ignore[misc]
        if not told:
            return index
        index = storage.unravel(index)
        for buffer in storage._attached_entities:
            if not isinstance(vars(buffer).get("_sampler"), GpubufSampler):
                buffer.mark_update(index)
        return index

    def add(self, data: Any) -> int | Tensor:
        """Write one row (of one step of all environments above one dimension). Returns its index."""
        cursor = int(self._storage.cursor)
        index = self.extend(data.unsqueeze(0))
        return cursor if int(self._storage.ndim) == 1 else index

    def write_at(self, index: Any, data: Any) -> Tensor:
        """Write rows over stored ones, and tell the buffers of TorchRL's that read them."""
        written: Tensor = super().write_at(index, data)  # type: ignore[misc]
        if "_entities" in vars(self._storage):
            for buffer in self._storage._attached_entities:
                buffer.mark_update(written)
        return written

    @property
    def _write_count(self) -> int:
        return int(self._storage.written)

    def _empty(self, empty_write_count: bool = True) -> None:
        """Nothing: the storage owns the cursor."""


class RoundRobinWriter(WriterOfTorchRL, data.RoundRobinWriter, theirs.RoundRobinWriter):
    """:class:`gpubuf.data.RoundRobinWriter`, which is also TorchRL's."""


class TensorDictRoundRobinWriter(WriterOfTorchRL, data.TensorDictRoundRobinWriter, theirs.TensorDictRoundRobinWriter):
    """:class:`gpubuf.data.TensorDictRoundRobinWriter`, which is also TorchRL's."""


class ImmutableDatasetWriter(WriterOfTorchRL, data.ImmutableDatasetWriter, theirs.ImmutableDatasetWriter):
    """:class:`gpubuf.data.ImmutableDatasetWriter`, which is also TorchRL's."""
