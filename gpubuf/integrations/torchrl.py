"""gpubuf's buffers, and their parts, as instances of TorchRL's classes.

Each class derives from gpubuf's class of the same name, which does the work, and from TorchRL's, whose type it has. It
belongs where code asks for TorchRL's types: collectors, trainers, or ``ReplayBufferEnsemble``. Everywhere else
``gpubuf.data`` is enough.

Importing this also declares gpubuf's losses to be instances of TorchRL's ``LossModule``, for its updates of targets.

TorchRL's constructors don't run, and a member of TorchRL's that gpubuf has no counterpart of raises an error that says
so. docs/integrations/torchrl.md is the manual.
"""

from __future__ import annotations

from typing import Any

import torch

try:
    from torchrl.data import replay_buffers as theirs
    from torchrl.objectives import LossModule
except ImportError as error:
    raise ImportError("gpubuf.integrations.torchrl needs TorchRL: pip install torchrl") from error

from gpubuf import data, objectives

__all__ = [
    "ImmutableDatasetWriter",
    "LazyMemmapStorage",
    "LazyTensorStorage",
    "ListStorage",
    "PrioritizedReplayBuffer",
    "PrioritizedSampler",
    "PrioritizedSliceSampler",
    "RandomSampler",
    "ReplayBuffer",
    "RoundRobinWriter",
    "SampleUnit",
    "Sampler",
    "SamplerWithoutReplacement",
    "Sequence",
    "SliceSampler",
    "SliceSamplerWithoutReplacement",
    "TensorDictMaxValueWriter",
    "TensorDictPrioritizedReplayBuffer",
    "TensorDictReplayBuffer",
    "TensorDictRoundRobinWriter",
    "TensorStorage",
    "Transition",
]


# Parts of a buffer


class MissingInGpubufError(NotImplementedError, AttributeError):
    """A member of TorchRL's class has no counterpart in gpubuf. ``hasattr`` is False for it."""


class Missing:
    """Stands for a member that only TorchRL's class has. An attribute of the instance goes before it."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __get__(self, instance: object, owner: type | None = None) -> Any:
        kind = (owner or type(instance)).__name__
        raise MissingInGpubufError(
            f"{kind}.{self.name} is TorchRL's, and gpubuf has none: docs/migration.md says what to use instead"
        )


def _set_state(instance: object, state: dict[str, Any]) -> None:
    vars(instance).update(state)


#: Special methods of TorchRL's that are at work on attributes of its constructor: Python's own in their place.
_SPECIAL: dict[str, Any] = {
    "__getstate__": object.__getstate__,
    "__setstate__": _set_state,
    "__repr__": object.__repr__,
}


#: Members of TorchRL's that work on any buffer: those by which its ``RayReplayBuffer`` makes an actor of one.
_WORK_ALIKE = {"as_remote", "_getattr", "_setattr"}


class Joined:
    """Base of the classes that are gpubuf's and TorchRL's at once. It comes first among their bases."""

    #: TorchRL's ensembles set it on the parts of a buffer.
    _rng: Any = None

    def __init_subclass__(cls, **named: Any) -> None:
        super().__init_subclass__(**named)
        seen: set[str] = set()
        for base in cls.__mro__:
            own = {name for name in vars(base) if not name.startswith(("__", "_abc_")) or name in _SPECIAL}
            if base.__module__.partition(".")[0] == "torchrl":
                for name in own - seen - _WORK_ALIKE:
                    setattr(cls, name, _SPECIAL.get(name) or Missing(name))
            seen |= own


class StorageOfTorchRL(Joined):
    """Storages: a buffer of TorchRL's would attach itself to one."""

    def attach(self, buffer: Any) -> None:
        """Nothing, for a buffer of this storage.

        Raises:
            NotImplementedError: it is one of TorchRL's.
        """
        if getattr(buffer, "storage", None) is not self or not isinstance(buffer, data.ReplayBuffer):
            raise NotImplementedError(
                f"TorchRL's {type(buffer).__name__} takes TorchRL's storages, samplers and writers: make the buffer of "
                "this name in gpubuf.integrations.torchrl, which has TorchRL's type"
            )


class TensorStorage(StorageOfTorchRL, data.TensorStorage, theirs.TensorStorage):
    """:class:`gpubuf.data.TensorStorage`, which is also a ``torchrl.data.TensorStorage``."""


class LazyTensorStorage(StorageOfTorchRL, data.LazyTensorStorage, theirs.LazyTensorStorage):
    """:class:`gpubuf.data.LazyTensorStorage`, which is also a ``torchrl.data.LazyTensorStorage``."""


class LazyMemmapStorage(StorageOfTorchRL, data.LazyMemmapStorage, theirs.LazyMemmapStorage):
    """:class:`gpubuf.data.LazyMemmapStorage`, which is also a ``torchrl.data.LazyMemmapStorage``."""


class ListStorage(StorageOfTorchRL, data.ListStorage, theirs.ListStorage):
    """:class:`gpubuf.data.ListStorage`, which is also a ``torchrl.data.ListStorage``."""


class _PlainSampler(type(theirs.Sampler)):  # type: ignore[misc]
    """TorchRL's metaclass hands ``replacement=False`` to a sampler of its own. These classes choose one of gpubuf's."""

    def __call__(cls, *args: Any, replacement: bool = True, **named: Any) -> Any:
        if not replacement:
            other = {"RandomSampler": SamplerWithoutReplacement, "SliceSampler": SliceSamplerWithoutReplacement}
            if not issubclass(cls, SamplerWithoutReplacement | SliceSamplerWithoutReplacement):
                if cls.__name__ not in other:
                    raise TypeError(f"{cls.__name__} has no form without replacement: leave replacement=False out")
                cls = other[cls.__name__]
        return type.__call__(cls, *args, **named)


class SamplerOfTorchRL(Joined, metaclass=_PlainSampler):
    """Samplers, whose generator TorchRL's ensembles set."""

    @property
    def _rng(self: Any) -> Any:
        return self._generator

    @_rng.setter
    def _rng(self: Any, generator: torch.Generator | None) -> None:
        # TorchRL's ensembles set None when they are made, which begins no new stream.
        if generator is not None:
            self.set_rng(generator)


class Sampler(SamplerOfTorchRL, data.Sampler, theirs.Sampler):
    """:class:`gpubuf.data.Sampler`, which is also TorchRL's: the base of samplers of your own."""


class RandomSampler(SamplerOfTorchRL, data.RandomSampler, theirs.RandomSampler):
    """:class:`gpubuf.data.RandomSampler`, which is also TorchRL's."""


class SamplerWithoutReplacement(SamplerOfTorchRL, data.SamplerWithoutReplacement, theirs.SamplerWithoutReplacement):
    """:class:`gpubuf.data.SamplerWithoutReplacement`, which is also TorchRL's."""


class PrioritizedSampler(SamplerOfTorchRL, data.PrioritizedSampler, theirs.PrioritizedSampler):
    """:class:`gpubuf.data.PrioritizedSampler`, which is also TorchRL's."""


class SliceSampler(SamplerOfTorchRL, data.SliceSampler, theirs.SliceSampler):
    """:class:`gpubuf.data.SliceSampler`, which is also TorchRL's."""


class SliceSamplerWithoutReplacement(
    SamplerOfTorchRL, data.SliceSamplerWithoutReplacement, theirs.SliceSamplerWithoutReplacement
):
    """:class:`gpubuf.data.SliceSamplerWithoutReplacement`, which is also TorchRL's."""


class PrioritizedSliceSampler(SamplerOfTorchRL, data.PrioritizedSliceSampler, theirs.PrioritizedSliceSampler):
    """:class:`gpubuf.data.PrioritizedSliceSampler`, which is also TorchRL's."""


class RoundRobinWriter(Joined, data.RoundRobinWriter, theirs.RoundRobinWriter):
    """:class:`gpubuf.data.RoundRobinWriter`, which is also TorchRL's."""


class TensorDictRoundRobinWriter(Joined, data.TensorDictRoundRobinWriter, theirs.TensorDictRoundRobinWriter):
    """:class:`gpubuf.data.TensorDictRoundRobinWriter`, which is also TorchRL's."""


class ImmutableDatasetWriter(Joined, data.ImmutableDatasetWriter, theirs.ImmutableDatasetWriter):
    """:class:`gpubuf.data.ImmutableDatasetWriter`, which is also TorchRL's."""


class TensorDictMaxValueWriter(Joined, data.TensorDictMaxValueWriter, theirs.TensorDictMaxValueWriter):
    """:class:`gpubuf.data.TensorDictMaxValueWriter`, which is also TorchRL's."""


# Buffers


class _PlainBuffer(type(theirs.ReplayBuffer)):  # type: ignore[misc]
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


class BufferOfTorchRL(Joined, metaclass=_PlainBuffer):
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
    _prioritized_sampler = PrioritizedSampler


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


class SampleUnit(Joined, data.SampleUnit, theirs.SampleUnit):
    """:class:`gpubuf.data.SampleUnit`, which is also TorchRL's: the base of units of your own."""


class Transition(Joined, data.Transition, theirs.Transition):
    """:class:`gpubuf.data.Transition`, which is also TorchRL's."""


class Sequence(Joined, data.Sequence, theirs.Sequence):
    """:class:`gpubuf.data.Sequence`, which is also TorchRL's. It needs a storage of this module."""


# TorchRL's base class is an abstract one, which others may be declared instances of.
LossModule.register(objectives.LossModule)
