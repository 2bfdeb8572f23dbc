"""gpubuf's buffers, and their parts, as instances of TorchRL's classes.

Each class derives from gpubuf's class of the same name, which does the work, and from TorchRL's, whose type it has. It
belongs where code asks for TorchRL's types: collectors, trainers, or ``ReplayBufferEnsemble``. Everywhere else
``gpubuf.integrations.torchrl`` is enough.

Importing this also declares gpubuf's losses to be instances of TorchRL's ``LossModule``, for its updates of targets.

TorchRL's constructors don't run, and a member of TorchRL's that gpubuf has no counterpart of raises an error that says
so. docs/integrations/torchrl.md is the manual.
"""

from __future__ import annotations

import types
from typing import TYPE_CHECKING, Any

import torch

try:
    from torchrl.data import replay_buffers as theirs
    from torchrl.objectives import LossModule
except ImportError as error:
    raise ImportError("gpubuf.integrations.torchrl.types needs TorchRL: pip install torchrl") from error

from gpubuf import objectives
from gpubuf.integrations import torchrl as ours
from gpubuf.integrations.torchrl.buffers import Kinds

if TYPE_CHECKING:

    def __getattr__(name: str) -> Any: ...


__all__: list[str] = []

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
            f"{kind}.{self.name} is TorchRL's, and gpubuf has none: docs/migration-arguments.md says what to use"
        )


#: Special methods of TorchRL's that are at work on attributes of its constructor: Python's own in their place.
_SPECIAL: dict[str, Any] = {name: getattr(object, name) for name in ("__getstate__", "__repr__")}
_SPECIAL["__setstate__"] = lambda instance, state: instance.__dict__.update(state)


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
        if getattr(buffer, "storage", None) is not self or not isinstance(buffer, ours.ReplayBuffer):
            raise NotImplementedError(
                f"TorchRL's {type(buffer).__name__} takes TorchRL's storages, samplers and writers: make the buffer of "
                "this name in gpubuf.integrations.torchrl.types, which has TorchRL's type"
            )


class _PlainSampler(type(theirs.Sampler)):  # type: ignore[misc]
    """TorchRL's metaclass hands ``replacement=False`` to a sampler of its own. These classes choose one of gpubuf's."""

    def __call__(cls, *args: Any, replacement: bool = True, **named: Any) -> Any:
        if not replacement and not cls.__name__.endswith("WithoutReplacement"):
            other = {"RandomSampler": "SamplerWithoutReplacement", "SliceSampler": "SliceSamplerWithoutReplacement"}
            if cls.__name__ not in other:
                raise TypeError(f"{cls.__name__} has no form without replacement: leave replacement=False out")
            cls = globals()[other[cls.__name__]]
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


class _PlainBuffer(type(theirs.ReplayBuffer)):  # type: ignore[misc]
    """Makes the buffer in this process, whatever TorchRL's metaclass would choose."""

    def __call__(cls, *args: Any, **named: Any) -> Any:
        return type.__call__(cls, *args, **named)


class BufferOfTorchRL(Joined, metaclass=_PlainBuffer):
    """What TorchRL's collectors, trainers and ensembles ask of a buffer beside what gpubuf's has."""

    _delayed_init = False

    @property
    def shared(self: Any) -> bool:
        """Whether the processes of a collector may write."""
        return self.parts.intake is not None

    @property
    def _collate_fn(self: Any) -> Any:
        # TorchRL's ensembles call it, also where none was given.
        return self.parts.collate_fn or (lambda rows: rows)

    @property
    def _replay_lock(self: Any) -> Any:
        return self.operation.block()

    _write_lock = _futures_lock = _replay_lock

    def _synchronize_futures_locked(self) -> None:
        """Nothing: batches that are prepared ahead hold the rows of the moment at which they were drawn."""


def _join(base: type, *names: str, **attributes: Any) -> None:
    """Make the classes of these names: of ``base``, of gpubuf and of TorchRL."""
    for name in names:
        described = f"gpubuf's class of this name, which is also ``torchrl.data.{name}``."
        body: dict[str, Any] = {"__module__": __name__, "__doc__": described, **attributes}
        bases = base, getattr(ours, name), getattr(theirs, name)
        __all__.append(name)
        globals()[name] = types.prepare_class(name, bases)[0](name, bases, body)


_join(StorageOfTorchRL, "TensorStorage", "LazyTensorStorage", "LazyMemmapStorage", "ListStorage")
_join(SamplerOfTorchRL, "Sampler", "RandomSampler", "SamplerWithoutReplacement", "PrioritizedSampler")
_join(SamplerOfTorchRL, "SliceSampler", "SliceSamplerWithoutReplacement", "PrioritizedSliceSampler")
_join(Joined, "RoundRobinWriter", "TensorDictRoundRobinWriter", "ImmutableDatasetWriter", "TensorDictMaxValueWriter")
_own: Any = globals()
_kinds = Kinds(*(_own[name] for name in ("LazyTensorStorage", "ListStorage", "RandomSampler", "PrioritizedSampler")))
_of_tensordicts = _kinds._replace(writer=_own["TensorDictRoundRobinWriter"])
_join(BufferOfTorchRL, "ReplayBuffer", _kinds=_kinds._replace(writer=_own["RoundRobinWriter"]))
_join(_own["ReplayBuffer"], "PrioritizedReplayBuffer")
_join(_own["ReplayBuffer"], "TensorDictReplayBuffer", _kinds=_of_tensordicts)
_join(_own["TensorDictReplayBuffer"], "TensorDictPrioritizedReplayBuffer")

# TorchRL's base class is an abstract one, which others may be declared instances of.
LossModule.register(objectives.LossModule)
