"""Storages that TorchRL's buffers take."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torchrl.data import replay_buffers as theirs

from gpubuf import data
from gpubuf.data.samplers.base import Sampler
from gpubuf.data.storage.layout import Data, batch_shape
from gpubuf.data.storage.trees import layout_of, mapped
from gpubuf.integrations.torchrl.joining import Joined

_OWN_WRITER = "give the buffer a writer of gpubuf.integrations.torchrl"


class StorageOfTorchRL(Joined):
    """What TorchRL's buffers, samplers and writers ask of a storage beside what gpubuf's has."""

    supports_conditional_update = False
    _rng = None

    # Buffers that read from the storage

    @property
    def _attached_entities(self) -> list[Any]:
        found: list[Any] = vars(self).setdefault("_entities", [])
        return found

    def _attached_entities_iter(self) -> list[Any]:
        return self._attached_entities

    def attach(self, buffer: Any) -> None:
        """Tell ``buffer``, one of TorchRL's, of every write."""
        if not any(buffer is other for other in self._attached_entities):
            self._attached_entities.append(buffer)

    def bind_samplers(self) -> None:
        """Let the samplers of the buffers serve this storage."""
        for sampler in self._samplers():
            sampler._serve(self)  # type: ignore[arg-type]

    def _samplers(self) -> list[Sampler]:
        found = [vars(entity).get("_sampler") for entity in self._attached_entities]
        return [sampler for sampler in found if isinstance(sampler, Sampler)]

    # Writing

    def write_next(
        self, rows: Data, append: Callable[[Data], Tensor] | None = None, *, in_order: bool = True
    ) -> Tensor:
        """Write a batch, and tell the samplers of TorchRL's buffers.

        Args:
            rows: the batch.
            append: writes it. Default: at the cursor.
            in_order: whether ``append`` lets new rows overwrite the oldest ones.

        Returns:
            Flat positions, int64 ``[n]``: -1 for rows that were not written.

        Raises as :meth:`TensorStorage.append`.
        """
        storage: Any = self
        self.bind_samplers()
        if not storage.initialized and not storage.holds_nothing(rows):
            layout = layout_of(rows, storage.ndim, storage.ignored_keys)
            for sampler in self._samplers():
                sampler.check_rows(layout, storage.ndim)
        index: Tensor = storage.append(rows) if append is None else append(rows)
        if index.numel():
            survivors = index[-storage.max_size :] if in_order else index
            for sampler in self._samplers():
                sampler.on_write(survivors, None)
            storage.end(None)
        return index

    def set(self, cursor: Any, data: Any, *, set_cursor: bool = True) -> None:
        """Write rows where a writer of TorchRL's says: at the storage's own cursor, or over rows that are there.

        An index on a GPU is read, which synchronises: the writers of this module don't.

        Raises:
            NotImplementedError: rows are to be written somewhere else, or a sampler says where new ones go.
        """
        storage: Any = self
        if any(sampler.consumes for sampler in self._samplers()):
            raise NotImplementedError(f"a ConsumingSampler says where new rows go: {_OWN_WRITER}")
        if isinstance(cursor, int) or (isinstance(cursor, Tensor) and cursor.ndim == 0):
            cursor, data = torch.as_tensor(cursor).reshape(1), storage.as_batch(data, 0)
        elif isinstance(data, list):
            data = storage.batch_of(data)
        if isinstance(cursor, range | slice | list | tuple):
            steps = range(*cursor.indices(self._max_size_along_dim0())) if isinstance(cursor, slice) else cursor
            cursor = torch.as_tensor(list(steps))
        index = cursor.cpu()
        capacity = self._max_size_along_dim0(batched_data=data)
        first = storage.cursor // (storage.max_size // capacity)
        if set_cursor and torch.equal(index, (torch.arange(first, first + index.numel())) % capacity):
            self.write_next(data)
        elif index.numel() and int(index.max()) < storage.steps_stored:
            envs = math.prod(storage.shape[1:])
            flat = (index[:, None] * envs + torch.arange(envs)).reshape(-1)
            if storage.ndim > 1:
                data = mapped(data, lambda value: value.flatten(0, storage.ndim - 1))
            storage.write(flat.to(storage.device), data)
        else:
            raise NotImplementedError(
                f"gpubuf's storages write at their own cursor, or over rows that are there: {_OWN_WRITER}"
            )

    def _max_size_along_dim0(self, *, single_data: Any = None, batched_data: Any = None) -> int:
        storage: Any = self
        if storage.ndim == 1 or storage.initialized:
            return int(storage.shape[0])
        if batched_data is not None:
            envs = math.prod(batch_shape(batched_data, storage.ndim)[1:])
        else:
            envs = math.prod(batch_shape(single_data, storage.ndim - 1))
        return -(-int(storage.max_size) // envs)

    def _empty(self) -> None:
        storage: Any = self
        storage.empty()
        self._bumps += 1

    # Changes, by which TorchRL's samplers know whether what they keep about trajectories still holds

    _bumps = 0

    @property
    def _mutation_revision(self) -> int:
        storage: Any = self
        ring = storage._ring
        changed = 0 if ring is None else ring.updates
        return int(storage.written + storage.overwrites + changed + self._bumps)

    def _bump_mutation_revision(self) -> None:
        """Rows were changed through views of them."""
        storage: Any = self
        self._bumps += 1
        storage.rebuild()

    @property
    def _last_cursor_index(self) -> int | None:
        storage: Any = self
        cursor: int | None = storage._last_cursor
        return cursor

    # Reading

    def get(self, index: Any) -> Data:
        """Rows by index. TorchRL's samplers of slices give a tuple of one tensor for one dimension."""
        if isinstance(index, tuple) and len(index) == 1:
            index = index[0]
        return super().get(index)  # type: ignore[misc]

    @property
    def _len_along_dim0(self) -> int:
        return self.steps_stored  # type: ignore[attr-defined,no-any-return]

    def _rand_given_ndim(self, batch_size: int) -> Any:
        storage: Any = self
        flat = torch.randint(len(storage), (batch_size,), generator=self._rng, device=storage.device)
        return flat if storage.ndim == 1 else storage.unravel(flat).unbind(-1)


class TensorStorage(StorageOfTorchRL, data.TensorStorage, theirs.TensorStorage):
    """:class:`gpubuf.data.TensorStorage`, which is also a ``torchrl.data.TensorStorage``."""


class LazyTensorStorage(StorageOfTorchRL, data.LazyTensorStorage, theirs.LazyTensorStorage):
    """:class:`gpubuf.data.LazyTensorStorage`, which is also a ``torchrl.data.LazyTensorStorage``."""


class LazyMemmapStorage(StorageOfTorchRL, data.LazyMemmapStorage, theirs.LazyMemmapStorage):
    """:class:`gpubuf.data.LazyMemmapStorage`, which is also a ``torchrl.data.LazyMemmapStorage``."""


class ListStorage(StorageOfTorchRL, data.ListStorage, theirs.ListStorage):
    """:class:`gpubuf.data.ListStorage`, which is also a ``torchrl.data.ListStorage``."""
