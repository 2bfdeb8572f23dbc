"""Buffers with the arguments and calls that only programs for TorchRL use."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar, NamedTuple, Self

import numpy as np
from torch import Tensor

from gpubuf.data import buffer as core
from gpubuf.data import tensordict_buffers
from gpubuf.data.arguments import component
from gpubuf.data.operation import operation
from gpubuf.data.parts import DEFAULT_CAPACITY, storage_of
from gpubuf.data.samplers.base import Sampler
from gpubuf.data.storage.containers import Data, batch_shape, is_container, is_data
from gpubuf.data.storage.layout import as_key
from gpubuf.data.updates import flat_entries, is_key
from gpubuf.integrations.edits import set_keys
from gpubuf.integrations.torchrl import dumps
from gpubuf.integrations.torchrl.list_storage import ListStorage
from gpubuf.integrations.torchrl.samplers import PrioritizedSampler, RandomSampler
from gpubuf.integrations.torchrl.storages import LazyTensorStorage

_HERE = "the buffer works in the process that makes it; with shared=True, those that are started with it write to it"
#: Arguments of TorchRL's that have no counterpart: accepted at TorchRL's default, refused at any other value.
_REFUSED = {
    "checkpointer": "leave it out, for save() and dumps() need no checkpointer",
    "consume_after_n_samples": "SamplerWithoutReplacement draws each row once an epoch",
    "delayed_init": "make the buffer where its parts can be made",
    "service_backend": _HERE,
    "service_backend_options": _HERE,
    "transport": _HERE,
    "transport_options": _HERE,
}

SHARED_WRITERS = 4
"""Places for writers of a buffer that is made with ``shared=True``."""


class Kinds(NamedTuple):
    """The classes of the parts that a buffer makes itself; ``objects`` is that of rows that are no tensors."""

    storage: Any = LazyTensorStorage
    objects: Any = ListStorage
    sampler: Any = RandomSampler
    prioritized: Any = PrioritizedSampler
    writer: Any = None


class _Assigned:
    """A part that TorchRL's users assign, for want of a setter: ``buffer._storage = other`` calls the setter."""

    def __set_name__(self, owner: type, name: str) -> None:
        self._part = name[1:]

    def __get__(self, owner: Any, kind: type) -> Any:
        return self if owner is None else getattr(owner.parts, self._part)

    def __set__(self, owner: Any, part: Any) -> None:
        kept = {"collate_fn": owner.parts.collate_fn} if self._part == "storage" else {}
        getattr(owner, f"set_{self._part}")(part, **kept)


class ReplayBuffer(core.ReplayBuffer):
    """:class:`gpubuf.data.ReplayBuffer`, with the arguments and calls that only programs for TorchRL use.

    A buffer without a storage becomes one of a :class:`ListStorage` if the first write is of other objects than tensors
    and containers of them.

    Args:
        storage, **parts: as for the core's class.
        transform_factory: a function that returns the transform; excludes ``transform``.
        compilable: accepted for compatibility: every operation can be compiled.
        shared: True is ``writers=4``: processes that are started with the buffer may write.

    Raises:
        NotImplementedError: an argument of TorchRL's was set that has no counterpart.
    """

    _kinds: ClassVar[Kinds] = Kinds()
    _storage: Any = _Assigned()
    _sampler: Any = _Assigned()
    _writer: Any = _Assigned()

    def __init__(
        self,
        storage: Any = None,
        *,
        transform_factory: Callable[[], Callable[[Any], Any]] | None = None,
        compilable: bool | None = None,
        shared: bool = False,
        **parts: Any,
    ) -> None:
        for name in _REFUSED.keys() & parts.keys():
            if parts.pop(name) not in (None, False, "direct", "auto"):
                raise NotImplementedError(f"{name} is not supported by gpubuf: {_REFUSED[name]}")
        if shared and parts.get("writers") is None:
            parts["writers"] = SHARED_WRITERS
        if transform_factory is not None:
            if parts.get("transform") is not None:
                raise TypeError("transform and transform_factory exclude each other")
            parts["transform"] = transform_factory()
        parts["sampler"] = component(parts.get("sampler") or self._kinds.sampler, Sampler)
        parts["writer"] = parts.get("writer") or self._kinds.writer
        # Whether the first write decides what the storage is.
        self._is_open = storage is None and parts.get("writers") is None
        super().__init__(self._storage_of(storage, parts["sampler"]), **parts)

    @classmethod
    def _storage_of(cls, given: Any, sampler: Any = None) -> Any:
        if given is None:
            given = getattr(sampler, "max_capacity", DEFAULT_CAPACITY)
        return cls._kinds.storage(given) if type(given) is int else storage_of(given)

    # Writing

    def extend(self, data: Data, *, update_priority: bool | None = None) -> Tensor:
        """As for the core's class."""
        self._choose_storage(data)
        return super().extend(data, update_priority=update_priority)

    def add(self, data: Data) -> int | Tensor | None:
        """As for the core's class."""
        self._choose_storage(data)
        return super().add(data)

    def _choose_storage(self, data: Any) -> None:
        """For a first batch that is no tensors: a storage of any objects, where none was given."""
        if not self._is_open or self.initialized:
            return
        self.parts.storage.check_owned()
        leaves: Any = [data[0]] if isinstance(data, list) and data else [data]
        while leaves and is_container(leaves[0]):
            first = leaves[0]
            leaves = list(first.values()) if isinstance(first, dict) else list(first)
        # A dict is no list of objects: its arrays are columns.
        columns = isinstance(data, dict) and leaves and isinstance(leaves[0], np.ndarray)
        if leaves and not (columns or is_data(leaves[0])):
            self._storage = self._kinds.objects(self.parts.storage.max_size)

    # Rows changed in place

    @operation
    def __setitem__(self, index: Any, data: Any) -> None:
        """As for the core's class. Under a key: that key of all rows, as it is stored."""
        if not is_key(index):
            super().__setitem__(index, data)
            return
        self.set_(index, self.parts.rows.in_written_order(data) if isinstance(data, Tensor) and data.ndim else data)

    def set_(self, key: Any, value: Any) -> Self:
        """Set one key of all rows stored: see :func:`~gpubuf.integrations.edits.set_keys`.

        Args:
            key: a stored key, nested ones as tuples; or one with keys below it, for a TensorDict.
            value: ``[n, ...]`` for the ``n`` rows stored (``[T, E, ...]`` for storages of two dimensions), or a number
                for all. Converted to the key's dtype as ``to()`` of tensors does.
        """
        set_keys(self, {key: value}, slice(None), whole=True)
        return self

    def set_at_(self, key: Any, value: Any, index: Any) -> Self:
        """Set one key of some rows: see :func:`~gpubuf.integrations.edits.set_keys`.

        Args:
            key: as for :meth:`set_`.
            value: a value of the shape of ``buffer[index][key]``, or one that broadcasts to it.
            index: as for ``buffer[index]``. Of duplicates the last one wins.
        """
        set_keys(self, {key: value}, index, whole=False)
        return self

    def update_(
        self, input_dict_or_td: Any, clone: bool = False, *, keys_to_update: Sequence[Any] | None = None
    ) -> Self:
        """Set several keys of all rows stored, as :meth:`set_` does.

        Args:
            input_dict_or_td: a TensorDict, a tensorclass or a dict, nested ones too.
            clone: accepted for compatibility: values are always copied.
            keys_to_update: only these keys, or those below them. Default: all.
        """
        found = flat_entries(input_dict_or_td, ())
        if keys_to_update is not None:
            chosen = [as_key(key) for key in keys_to_update]
            found = {key: value for key, value in found.items() if any(key[: len(one)] == one for one in chosen)}
        set_keys(self, found, slice(None), whole=True)
        return self

    def read_all_in_order(self, end: int | None = None) -> Data:
        """The rows in the order in which they lie, transformed: ``buffer[:end]``.

        Args:
            end: this many rows (of the first dimension, for storages of two); default: all that are stored.
        """
        return self[:] if end is None else self[:end]

    @operation
    def write_all(self, data: Data, end: int | None = None) -> None:
        """Overwrite the first rows, in the order in which they lie, with all their keys. No host sync.

        Inverse transforms apply, as they do in ``extend``. Priorities stay as they are.

        Args:
            data: ``[n]`` rows; for storages of two dimensions as ``buffer[:end]`` gives them.
            end: this many of the first dimension; must agree with the data.

        Raises:
            ValueError: there are more rows than are stored, fewer than ``end``, or a key, shape or dtype differs.
            RuntimeError: the writer refuses writes. In all cases nothing is written.
        """
        data = self.parts.rows.to_write(data)
        if data is None:
            return
        held = self.parts.rows.written_shape()
        shape = tuple(batch_shape(data, self.parts.storage.ndim))
        n = held[0] if end is None else min(end, held[0])
        if shape[0] > n or (end is not None and shape[0] != n):
            wanted = "stored" if end is None else "addressed"
            raise ValueError(f"the data has {shape[0]} rows, {n} are {wanted}: extend() adds rows")
        if shape[1:] != held[1:]:
            raise ValueError(f"the data has the shape {list(shape)}, the buffer {list(held)}")
        if 0 not in shape:
            self.parts.rows.put(slice(shape[0]), data)

    write_all_in_order = write_all

    @operation
    def stats(self) -> dict[str, Any]:
        """The state of the buffer in numbers, for a logger. It changes nothing. No host sync.

        Returns:
            ``"size"``, the rows stored; ``"write_count"``; ``"prefetch_queue_size"``, the batches ahead, 0 or 1;
            ``"initialized"``, whether the storage is allocated; ``"capacity"``; and ``"utilization"``, the size as a
            share of the capacity.
        """
        size, capacity = len(self), self.parts.storage.max_size
        return {
            "size": size,
            "write_count": self.write_count,
            "prefetch_queue_size": self.parts.batches.ahead,
            "initialized": self.parts.storage.initialized,
            "capacity": capacity,
            "utilization": size / capacity,
        }

    # Saving

    def dumps(self, path: Any, **options: Any) -> Any:
        """:meth:`save`, by TorchRL's name."""
        return self.save(path, **options)

    dump = dumps

    def load_state_dict(self, state: dict[str, Any], *, end_trajectories: bool = True) -> None:
        """As :meth:`gpubuf.data.ReplayBuffer.load_state_dict`, and what TorchRL's ``state_dict`` has returned.

        Of that come rows, counters, batch size and priorities; transforms, the random stream and an epoch do not.
        """
        if dumps.is_state(state):
            dumps.load_state(self, state, end_trajectories)
        else:
            super().load_state_dict(state, end_trajectories=end_trajectories)

    def loads(self, path: Any, **options: Any) -> None:
        """:meth:`load`, by TorchRL's name."""
        self.load(path, **options)


class TensorDictReplayBuffer(ReplayBuffer, tensordict_buffers.TensorDictReplayBuffer):
    """:class:`gpubuf.data.TensorDictReplayBuffer`, with what programs for TorchRL ask of it.

    Args:
        **parts: as for the core's class, and as for :class:`ReplayBuffer`.
    """


class PrioritizedReplayBuffer(ReplayBuffer):
    """A :class:`ReplayBuffer` with a :class:`PrioritizedSampler`.

    Args:
        storage, **parts: as for :class:`ReplayBuffer`.
        alpha, beta, eps, reduction: as for :class:`PrioritizedSampler`.
        dtype, sampler_device: accepted for compatibility.
        sync: accepted as True; ``shared=True`` has other processes write.
    """

    def __init__(
        self,
        storage: Any = None,
        *,
        alpha: float,
        beta: float,
        eps: float = 1e-8,
        reduction: str = "max",
        dtype: Any = None,
        sampler_device: Any = None,
        sync: bool = True,
        **parts: Any,
    ) -> None:
        if not sync:
            raise NotImplementedError(
                "sync=False (writers in other processes) is not supported by gpubuf: leave it out, make the buffer "
                "with shared=True, and start processes with it"
            )
        made = self._storage_of(storage)
        sampler = self._kinds.prioritized(made.max_size, alpha, beta, eps, reduction=reduction)
        super().__init__(made, sampler=sampler, **parts)

    @property
    def prioritized_sampler(self) -> Sampler:
        """The sampler, under TorchRL's name."""
        return self.sampler


class TensorDictPrioritizedReplayBuffer(PrioritizedReplayBuffer, TensorDictReplayBuffer):
    """A :class:`TensorDictReplayBuffer` with a :class:`PrioritizedSampler`: arguments as for these two."""
