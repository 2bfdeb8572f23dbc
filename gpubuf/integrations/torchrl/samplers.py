"""Samplers that TorchRL's buffers take. The constructors of TorchRL's samplers don't run, nor are its trees needed."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torchrl.data import replay_buffers as theirs

from gpubuf import data
from gpubuf.data.storage.tensor_storage import Storage
from gpubuf.data.storage.tensor_storage import TensorStorage as OwnStorage
from gpubuf.integrations.torchrl.joining import SavedInFolder


class _Plain(type(theirs.Sampler)):  # type: ignore[misc]
    """TorchRL's metaclass hands ``replacement=False`` to a sampler of its own. These classes choose one of gpubuf's."""

    def __call__(cls, *args: Any, replacement: bool = True, **named: Any) -> Any:
        if not replacement:
            other = {"RandomSampler": SamplerWithoutReplacement, "SliceSampler": SliceSamplerWithoutReplacement}
            if not issubclass(cls, SamplerWithoutReplacement | SliceSamplerWithoutReplacement):
                if cls.__name__ not in other:
                    raise TypeError(f"{cls.__name__} has no form without replacement: leave replacement=False out")
                cls = other[cls.__name__]
        return type.__call__(cls, *args, **named)


class SamplerOfTorchRL(SavedInFolder):
    """What TorchRL's buffers ask of a sampler beside what gpubuf's has."""

    #: As many as TorchRL's say: prefetching never ends before ``ran_out``.
    _remaining_batches = int(torch.iinfo(torch.int64).max)

    @property
    def _rng(self) -> torch.Generator | None:
        return self._generator  # type: ignore[attr-defined,no-any-return]

    @_rng.setter
    def _rng(self, generator: torch.Generator | None) -> None:
        # TorchRL's buffers set None when they are made, which begins no new stream.
        if generator is not None:
            self.set_rng(generator)  # type: ignore[attr-defined]

    def bind(self, storage: Storage, *arguments: Any) -> None:
        """Serve ``storage``.

        Raises:
            TypeError: it is TorchRL's own.
        """
        if not isinstance(storage, OwnStorage):
            raise TypeError(
                f"{type(self).__name__} is gpubuf's, and can't draw from TorchRL's {type(storage).__name__}: use a "
                "storage of gpubuf.integrations.torchrl, such as LazyTensorStorage"
            )
        super().bind(storage, *arguments)  # type: ignore[misc]

    def add(self, index: Any) -> None:
        """Nothing: the storage has told the sampler of the write."""

    def extend(self, index: Any) -> None:
        """Nothing: the storage has told the sampler of the write."""

    def can_sample(self, storage: Storage, batch_size: int) -> bool:
        """Whether anything is stored."""
        return len(storage) > 0  # type: ignore[arg-type]

    def _sampleable_count(self, storage: Storage, batch_size: int) -> int:
        return len(storage)  # type: ignore[arg-type]

    @property
    def default_priority(self) -> Any:
        """Priority of the next new row."""
        return getattr(super(), "default_priority", 1.0)

    def _empty(self) -> None:
        self.empty()  # type: ignore[attr-defined]


class Sampler(SamplerOfTorchRL, data.Sampler, theirs.Sampler, metaclass=_Plain):
    """:class:`gpubuf.data.Sampler`, which is also TorchRL's: the base of samplers of your own."""


class RandomSampler(SamplerOfTorchRL, data.RandomSampler, theirs.RandomSampler, metaclass=_Plain):
    """:class:`gpubuf.data.RandomSampler`, which is also TorchRL's."""


class SamplerWithoutReplacement(
    SamplerOfTorchRL, data.SamplerWithoutReplacement, theirs.SamplerWithoutReplacement, metaclass=_Plain
):
    """:class:`gpubuf.data.SamplerWithoutReplacement`, which is also TorchRL's.

    TorchRL's buffers draw nothing ahead from it: only a draw knows whether it has ended the epoch. gpubuf's do.
    """

    _remaining_batches = 0


class ConsumingSampler(SamplerOfTorchRL, data.ConsumingSampler, theirs.ConsumingSampler, metaclass=_Plain):
    """:class:`gpubuf.data.ConsumingSampler`, which is also TorchRL's.

    In a buffer of TorchRL's it needs a writer of this module, which asks it where new rows go.
    """

    def can_sample(self, storage: Storage, batch_size: int) -> bool:
        """Whether there is a row left. Synchronises."""
        return self._num_sampleable(storage) > 0

    def _num_sampleable(self, storage: Storage | None = None) -> int:
        if storage is not None:
            self._serve(storage)
        return self.available()

    def _sampleable_count(self, storage: Storage, batch_size: int) -> int:
        return self._num_sampleable(storage)

    def _pop_consumed_indices(self, storage: Storage | None = None, max_count: int | None = None) -> Tensor:
        """None: the writer puts new rows in the places of consumed ones."""
        return torch.empty(0, dtype=torch.int64)


class PrioritizedSampler(SamplerOfTorchRL, data.PrioritizedSampler, theirs.PrioritizedSampler, metaclass=_Plain):
    """:class:`gpubuf.data.PrioritizedSampler`, which is also TorchRL's.

    TorchRL's ``TensorDictReplayBuffer`` updates the priorities of no other sampler.
    """


class SliceSampler(SamplerOfTorchRL, data.SliceSampler, theirs.SliceSampler, metaclass=_Plain):
    """:class:`gpubuf.data.SliceSampler`, which is also TorchRL's."""


class SliceSamplerWithoutReplacement(
    SamplerOfTorchRL, data.SliceSamplerWithoutReplacement, theirs.SliceSamplerWithoutReplacement, metaclass=_Plain
):
    """:class:`gpubuf.data.SliceSamplerWithoutReplacement`, which is also TorchRL's.

    TorchRL's buffers draw nothing ahead from it, as from :class:`SamplerWithoutReplacement`.
    """

    _remaining_batches = 0


class PrioritizedSliceSampler(
    SamplerOfTorchRL, data.PrioritizedSliceSampler, theirs.PrioritizedSliceSampler, metaclass=_Plain
):
    """:class:`gpubuf.data.PrioritizedSliceSampler`, which is also TorchRL's."""
