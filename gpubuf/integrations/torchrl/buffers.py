"""gpubuf's buffers for code that asks for TorchRL's: collectors, trainers, ensembles. They are as fast as gpubuf's."""

from __future__ import annotations

from typing import Any

from torchrl.data import replay_buffers as theirs
from torchrl.objectives import LossModule

from gpubuf import data, objectives
from gpubuf.integrations.torchrl.parts import (
    ConsumingSampler,
    Joined,
    LazyTensorStorage,
    ListStorage,
    PrioritizedSampler,
    RandomSampler,
    RoundRobinWriter,
    TensorDictRoundRobinWriter,
)


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


class BufferOfTorchRL(Joined, metaclass=_Plain):
    """What TorchRL's collectors, trainers and ensembles ask of a buffer beside what gpubuf's has."""

    shared = False
    _delayed_init = False
    _collate_fn = _CollateFn()

    def _assemble(self) -> None:
        super()._assemble()  # type: ignore[misc]
        # gpubuf's batches take a shorter way without one.
        self._batches.collate_fn = vars(self)["_collate_fn"]  # type: ignore[attr-defined]

    @property
    def _sample_unit(self: Any) -> Any:
        return self._unit

    @property
    def _replay_lock(self: Any) -> Any:
        return self._lock

    _write_lock = _futures_lock = _replay_lock

    def _synchronize_futures_locked(self) -> None:
        """Nothing: batches that are prepared ahead hold the rows of the moment at which they were drawn."""


class ReplayBuffer(BufferOfTorchRL, data.ReplayBuffer, theirs.ReplayBuffer):
    """:class:`gpubuf.data.ReplayBuffer`, which is also a ``torchrl.data.ReplayBuffer``.

    The parts that it makes itself have TorchRL's types too.

    Args:
        **kwargs: as for :class:`gpubuf.data.ReplayBuffer`.
    """

    _default_storage = LazyTensorStorage
    _default_objects = ListStorage
    _default_sampler = RandomSampler
    _default_writer = RoundRobinWriter
    _consuming_sampler = ConsumingSampler


class TensorDictReplayBuffer(ReplayBuffer, data.TensorDictReplayBuffer, theirs.TensorDictReplayBuffer):
    """:class:`gpubuf.data.TensorDictReplayBuffer`, which is also a ``torchrl.data.TensorDictReplayBuffer``.

    Args:
        priority_key: where a batch carries its priorities.
        **kwargs: as for :class:`ReplayBuffer`.
    """

    _default_writer = TensorDictRoundRobinWriter


class PrioritizedReplayBuffer(ReplayBuffer, data.PrioritizedReplayBuffer, theirs.PrioritizedReplayBuffer):
    """:class:`gpubuf.data.PrioritizedReplayBuffer`, which is also a ``torchrl.data.PrioritizedReplayBuffer``.

    Args:
        alpha, beta, eps, dtype, storage, sampler_device, sync: as for :class:`gpubuf.data.PrioritizedReplayBuffer`.
        **kwargs: as for :class:`ReplayBuffer`.
    """

    _prioritized_sampler = PrioritizedSampler


class TensorDictPrioritizedReplayBuffer(
    TensorDictReplayBuffer,
    data.TensorDictPrioritizedReplayBuffer,
    theirs.TensorDictPrioritizedReplayBuffer,
):
    """:class:`gpubuf.data.TensorDictPrioritizedReplayBuffer`, which is also TorchRL's class of that name.

    Args:
        alpha, beta, eps, reduction, priority_key, storage, sampler_device, sync: as for
            :class:`gpubuf.data.TensorDictPrioritizedReplayBuffer`.
        **kwargs: as for :class:`TensorDictReplayBuffer`.
    """

    _prioritized_sampler = PrioritizedSampler


class SampleUnit(Joined, data.SampleUnit, theirs.SampleUnit):
    """:class:`gpubuf.data.SampleUnit`, which is also TorchRL's: the base of units of your own."""


class Transition(Joined, data.Transition, theirs.Transition):
    """:class:`gpubuf.data.Transition`, which is also TorchRL's."""


class Sequence(Joined, data.Sequence, theirs.Sequence):
    """:class:`gpubuf.data.Sequence`, which is also TorchRL's. It needs a storage of this module."""


# TorchRL's base class is an abstract one, which others may be declared instances of.
LossModule.register(objectives.LossModule)
