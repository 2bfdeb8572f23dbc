"""gpubuf's buffers for code that asks for TorchRL's: collectors, trainers, ensembles. They are as fast as gpubuf's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Self

import torch
from torchrl.data import replay_buffers as theirs

from gpubuf import data
from gpubuf.data.buffers.components import DEFAULT_CAPACITY, component
from gpubuf.data.buffers.tensordict_buffers import require_sync
from gpubuf.integrations.torchrl.joining import Joined
from gpubuf.integrations.torchrl.samplers import PrioritizedSampler, RandomSampler
from gpubuf.integrations.torchrl.storages import LazyTensorStorage
from gpubuf.integrations.torchrl.writers import RoundRobinWriter, TensorDictRoundRobinWriter


class _Plain(type(theirs.ReplayBuffer)):  # type: ignore[misc]
    """Makes the buffer in this process, whatever TorchRL's metaclass would choose."""

    def __call__(cls, *args: Any, **named: Any) -> Any:
        return type.__call__(cls, *args, **named)


def _as_it_is(rows: Any) -> Any:
    return rows


class _CollateFn:
    """TorchRL's ensemble calls the ``collate_fn`` of each of its buffers, so there is one where none was given."""

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        given = None if instance is None else vars(instance).get("_collate_fn")
        return _as_it_is if given is None else given

    def __set__(self, instance: Any, value: Any) -> None:
        vars(instance)["_collate_fn"] = value


class BufferOfTorchRL(Joined):
    """What TorchRL's collectors, trainers and ensembles ask of a buffer beside what gpubuf's has."""

    shared = False
    is_alive = True
    service_backend = "direct"
    _delayed_init = False
    _sample_unit = None
    _collate_fn = _CollateFn()

    def _assemble(self) -> None:
        super()._assemble()  # type: ignore[misc]
        # gpubuf's batches take a shorter way without one.
        self._batches._collate_fn = vars(self)["_collate_fn"]  # type: ignore[attr-defined]

    @property
    def _replay_lock(self) -> Any:
        return self._lock  # type: ignore[attr-defined]

    _write_lock = _futures_lock = _replay_lock

    def _synchronize_futures_locked(self) -> None:
        """Nothing: batches that are prepared ahead hold the rows of the moment at which they were drawn."""

    def can_sample(self, batch_size: int | None = None) -> bool:
        """Whether anything is stored."""
        return len(self) > 0  # type: ignore[arg-type]

    def share(self, shared: bool = True) -> Self:
        """Accepted as False.

        Raises:
            NotImplementedError: ``shared`` is True.
        """
        if shared:
            raise NotImplementedError(
                "gpubuf's buffers stay in one process: write in the process that owns the buffer, and send it the rows"
            )
        return self

    def start(self) -> Self:
        """The buffer itself, which needs no start."""
        return self

    def client(self) -> Self:
        """The buffer itself: it is in this process."""
        return self


class ReplayBuffer(BufferOfTorchRL, data.ReplayBuffer, theirs.ReplayBuffer, metaclass=_Plain):
    """:class:`gpubuf.data.ReplayBuffer`, which is also a ``torchrl.data.ReplayBuffer``.

    Args:
        storage, sampler: as for :class:`gpubuf.data.ReplayBuffer`; the default ones have TorchRL's types too.
        **kwargs: as for :class:`gpubuf.data.ReplayBuffer`.
    """

    _default_writer = RoundRobinWriter

    def __init__(self, *, storage: Any = None, sampler: Any = None, **kwargs: Any) -> None:
        if storage is None:
            storage = LazyTensorStorage(DEFAULT_CAPACITY)
        super().__init__(storage=storage, sampler=RandomSampler() if sampler is None else sampler, **kwargs)


class TensorDictReplayBuffer(
    ReplayBuffer, data.TensorDictReplayBuffer, theirs.TensorDictReplayBuffer, metaclass=_Plain
):
    """:class:`gpubuf.data.TensorDictReplayBuffer`, which is also a ``torchrl.data.TensorDictReplayBuffer``.

    Args:
        priority_key: where a batch carries its priorities.
        **kwargs: as for :class:`ReplayBuffer`.
    """

    _default_writer = TensorDictRoundRobinWriter


def _prioritized(
    storage: Any, alpha: float, beta: float, eps: float, reduction: str
) -> tuple[LazyTensorStorage, PrioritizedSampler]:
    storage = component(storage, data.Storage, lambda: LazyTensorStorage(DEFAULT_CAPACITY))
    return storage, PrioritizedSampler(storage.max_size, alpha, beta, eps, reduction=reduction)


class PrioritizedReplayBuffer(ReplayBuffer, theirs.PrioritizedReplayBuffer, metaclass=_Plain):
    """A :class:`ReplayBuffer` with a :class:`PrioritizedSampler`, which is also TorchRL's.

    Args:
        alpha, beta, eps, dtype, storage, sampler_device, sync: as for :class:`gpubuf.data.PrioritizedReplayBuffer`.
        **kwargs: as for :class:`ReplayBuffer`.
    """

    def __init__(
        self,
        *,
        alpha: float,
        beta: float,
        eps: float = 1e-8,
        dtype: torch.dtype = torch.float,
        storage: Any | Callable[[], Any] = None,
        sampler_device: torch.device | str | None = None,
        sync: bool = True,
        **kwargs: Any,
    ) -> None:
        require_sync(sync)
        storage, sampler = _prioritized(storage, alpha, beta, eps, "max")
        super().__init__(storage=storage, sampler=sampler, **kwargs)


class TensorDictPrioritizedReplayBuffer(
    TensorDictReplayBuffer, theirs.TensorDictPrioritizedReplayBuffer, metaclass=_Plain
):
    """A :class:`TensorDictReplayBuffer` with a :class:`PrioritizedSampler`, which is also TorchRL's.

    Args:
        alpha, beta, eps, reduction, priority_key, storage, sampler_device, sync: as for
            :class:`gpubuf.data.TensorDictPrioritizedReplayBuffer`.
        **kwargs: as for :class:`TensorDictReplayBuffer`.
    """

    def __init__(
        self,
        *,
        alpha: float,
        beta: float,
        eps: float = 1e-8,
        storage: Any | Callable[[], Any] = None,
        sampler_device: torch.device | str | None = None,
        sync: bool = True,
        reduction: str = "max",
        **kwargs: Any,
    ) -> None:
        require_sync(sync)
        storage, sampler = _prioritized(storage, alpha, beta, eps, reduction)
        super().__init__(storage=storage, sampler=sampler, **kwargs)
