"""Writers: where the next rows go. Most write round-robin, the oldest rows first to be overwritten."""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor

from gpubuf.data.runtime.foreign import told
from gpubuf.data.storages.layout import Data
from gpubuf.data.storages.tensor_storage import Storage, TensorStorage

#: Root keys that a TensorDict writer derives at sampling time instead of storing them.
DERIVED_KEYS = frozenset({"index", "index_generation"})


class Writer:
    """Base class of writers (the type that buffers accept)."""

    _storage: TensorStorage

    def register_storage(self, storage: Storage) -> None:
        """Tell the writer which storage it writes to.

        Raises:
            TypeError: the storage is not tensor-backed.
        """
        if not isinstance(storage, TensorStorage):
            raise TypeError(f"gpubuf's writers need a TensorStorage, got {told(storage)}")
        self._storage = storage

    def extend(self, data: Data) -> Tensor:
        """Write a batch; returns the rows' flat positions, int64 ``[n]``."""
        raise NotImplementedError

    def check_writable(self) -> None:
        """Called before rows are changed, added or forgotten: raise if the writer allows none of that."""

    @property
    def write_count(self) -> int:
        """Number of rows written since the buffer was made, or since ``empty()``."""
        return self._storage.rows_written

    def state_dict(self) -> dict[str, Any]:
        """Everything that the writer needs to go on."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore :meth:`state_dict`."""


class RoundRobinWriter(Writer):
    """Writes at the cursor and moves it, modulo the capacity. The cursor itself is the storage's device counter.

    Args:
        compilable: accepted for compatibility; every operation can be compiled.
        track_generations: whether uniform samples carry ``"index_generation"`` in their info. Prioritized ones
            always do, since a priority that returns late is recognised by it.
    """

    def __init__(self, compilable: bool = False, *, track_generations: bool = False) -> None:
        self.track_generations = track_generations

    def extend(self, data: Data) -> Tensor:
        """Write a batch at the cursor. No host sync. See :meth:`TensorStorage.append`."""
        return self._storage.append(data)

    @property
    def _cursor(self) -> int:
        """The step that the next rows go to, as programs for TorchRL read it."""
        return self._storage.cursor // math.prod(self._storage.shape[1:])


class TensorDictRoundRobinWriter(RoundRobinWriter):
    """A :class:`RoundRobinWriter` for buffers whose samples carry ``"index"``.

    The position of a row is known when it is read, so that an ``"index"`` in the data (that of a batch sampled
    before, say) is not stored.
    """

    def register_storage(self, storage: Storage) -> None:
        super().register_storage(storage)
        self._storage.ignored_keys = DERIVED_KEYS


class ImmutableDatasetWriter(Writer):
    """A writer for data that stay as they are: whatever adds, changes or forgets rows raises a RuntimeError.

    The rows are those of a :class:`TensorStorage` that was given its tensors, or of a checkpoint. Priorities can be
    set. ``buffer.storage`` is not protected: it belongs to whoever made it.
    """

    def check_writable(self) -> None:
        """Raise.

        Raises:
            RuntimeError: always.
        """
        raise RuntimeError(
            "the rows of this buffer can't be changed: it has an ImmutableDatasetWriter; set_writer() gives it another"
        )

    def extend(self, data: Data) -> Tensor:
        """Raise as :meth:`check_writable`."""
        self.check_writable()
        raise AssertionError
