"""Buffers whose samples carry their index, generation and weight, and buffers with priorities."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase, is_tensorclass
from torch import Tensor

from gpubuf.data.batches import collapsed
from gpubuf.data.buffer import ReplayBuffer
from gpubuf.data.components import component
from gpubuf.data.lock import unless_compiling
from gpubuf.data.samplers.base import Sampler
from gpubuf.data.samplers.prioritized import PrioritizedSampler
from gpubuf.data.samplers.sum_tree import any_of_each
from gpubuf.data.sequences import by_anchor
from gpubuf.data.storage.indexing import as_positions
from gpubuf.data.storage.layout import Data, priority_mask_key
from gpubuf.data.storage.tensor_storage import Storage, TensorStorage
from gpubuf.data.writers import TensorDictRoundRobinWriter


class TensorDictReplayBuffer(ReplayBuffer):
    """A :class:`ReplayBuffer` of TensorDicts. It writes the info of a sample into the sample.

    Args:
        priority_key: where a batch carries its priorities.
        **kwargs: as for :class:`ReplayBuffer`.
    """

    _default_writer = TensorDictRoundRobinWriter
    _samples_have_info = True

    def __init__(self, *, priority_key: str | tuple[str, ...] = "td_error", **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.priority_key = priority_key

    def extend(self, data: Data, *, update_priority: bool | None = None) -> Tensor:
        """Write a batch, with the priorities found under ``priority_key`` if the sampler has any use for them.

        Args:
            data: a TensorDict or tensorclass, or a list of them.
            update_priority: False ignores the priorities in the batch.

        Returns:
            As :meth:`ReplayBuffer.extend`.

        Raises:
            TypeError: ``data`` is something else.
            ValueError: as :meth:`ReplayBuffer.extend`, or a priority is NaN, infinite or negative (CPU).
        """
        first = data[0] if isinstance(data, list) and data else data
        # An empty list is an empty write.
        if not isinstance(first, TensorDictBase | list) and not is_tensorclass(first):
            raise TypeError(f"{type(self).__name__} stores TensorDicts, got a {type(first).__name__}")
        wanted = update_priority is not False and self._sampler.has_priorities
        with unless_compiling(self._lock):
            return self._extend(data, self._given_priority if wanted else None)

    def _given_priority(self, data: Any) -> Tensor | None:
        if isinstance(data, list):
            # The rows of a ListStorage.
            found = [row.get(self.priority_key, None) for row in data]
            priority = None if any(entry is None for entry in found) else torch.stack(found)
        else:
            priority = data.get(self.priority_key, None)
        if priority is None:
            return None
        n = len(data) if isinstance(data, list) else data.batch_size[: self._storage.ndim].numel()
        priority = self._sampler.reduce(priority.detach(), n).float()
        self._sampler.check_priority(priority)
        return priority

    def sample(
        self,
        batch_size: int | None = None,
        return_info: bool = False,
        include_info: bool | None = None,
        *,
        batches: int | None = None,
    ) -> Any:
        """A batch of transitions that carries its ``"index"`` and the sampler's other info.

        Args:
            batch_size: number of transitions; default: that of the constructor.
            return_info: also return the info dict.
            include_info: False leaves the info out of the batch.
            batches: as for :meth:`ReplayBuffer.sample`.

        Returns:
            As :meth:`ReplayBuffer.sample`; the caller owns the batch. No host sync.
        """
        batch = self._batches.next(batch_size, include_info is not False, batches)
        return (batch.data, batch.info) if return_info else batch.data

    def update_tensordict_priority(self, data: TensorDictBase) -> None:
        """Take over the priorities that a sampled batch carries under ``priority_key``. No host sync.

        Rows that were overwritten since the sample are left alone. So are those that have none: a loss with
        ``skip_done_states`` says so at ``priority_key`` with ``"_mask"`` appended, true for the rows that have one.

        Raises:
            KeyError: the batch has no priorities, or no ``"index"``.
        """
        sampler = self._sampler
        if not sampler.has_priorities:
            return
        # The entries of a plain TensorDict are looked up in a tenth of the time that its own method takes.
        plain = type(data) is TensorDict and isinstance(self.priority_key, str)
        get: Callable[..., Any] = data._tensordict.get if plain else data.get
        priority, index = get(self.priority_key, None), get("index", None)
        if priority is None or index is None:
            missing = self.priority_key if priority is None else "index"
            raise KeyError(f"the batch has no {missing!r}; its keys are {sorted(map(str, data.keys(True, True)))}")
        generation = get("index_generation", None)
        mask, n = (
            get(f"{self.priority_key}_mask" if plain else priority_mask_key(self.priority_key), None),
            data.numel(),
        )
        if self._unit is not None and (anchor := get("anchor_index", None)) is not None:
            valid, generation = get("validity_mask", None), get("anchor_generation", None)
            if mask is not None:
                mask = any_of_each(mask, n)
                valid = mask if valid is None else valid.reshape(n) & mask
            found = by_anchor(self._storage, anchor, sampler.reduce(priority, n), valid, generation)
            self.update_priority(*found[:2], generation=found[2])
            return
        if priority.dim() != 1 or priority.numel() != n or (index.dim() != 1 and self._storage.ndim == 1):
            index, priority, generation = self._by_row(data, index, priority, generation)
        if mask is not None:
            positions = as_positions(index, self._storage.shape, self._storage.device)
            # A position of -1 is ignored.
            index = torch.where(any_of_each(mask, positions.numel()).to(positions.device), positions, -1)
        self.update_priority(index, priority, generation=generation)

    def _by_row(
        self, data: TensorDictBase, index: Tensor, priority: Tensor, generation: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Index, priority and generation of a batch with one entry for each row."""
        storage, lead = self._storage, data.batch_dims
        coordinates = int(storage.ndim > 1)
        if not storage.initialized or index.dim() - coordinates < lead:
            # The batch has dimensions that its index does not have.
            lead = index.dim() - coordinates
        elif (own := storage.batch_layout.nested_batch) and lead > len(own) and data.batch_size[-len(own) :] == own:
            lead -= len(own)
        index = collapsed(index, lead, index.dim() - coordinates - lead)
        if generation is not None:
            generation = collapsed(generation, lead, generation.dim() - lead)
        return index, self._sampler.reduce(priority, data.batch_size[:lead].numel()), generation

    def _update_from_batch(self, batch: Any) -> None:
        if not isinstance(batch, TensorDictBase):
            super()._update_from_batch(batch)
        self.update_tensordict_priority(batch)


class Prioritized(ReplayBuffer):
    """Base of the buffers with priorities."""

    _prioritized_sampler: type[PrioritizedSampler] = PrioritizedSampler

    @property
    def prioritized_sampler(self) -> Sampler:
        """The sampler, under TorchRL's name."""
        return self._sampler

    def _prioritized(
        self, storage: Any, alpha: float, beta: float, eps: float, reduction: str = "max"
    ) -> tuple[Callable[[], TensorStorage], Callable[[], PrioritizedSampler]]:
        # Functions, for a buffer may make its parts at its first use.
        made = functools.cache(functools.partial(component, storage, Storage, self._new_storage))
        return made, lambda: self._prioritized_sampler(made().max_size, alpha, beta, eps, reduction=reduction)


class PrioritizedReplayBuffer(Prioritized):
    """A :class:`ReplayBuffer` with a :class:`PrioritizedSampler`.

    Args:
        alpha, beta, eps, dtype, sampler_device: as for :class:`PrioritizedSampler`.
        sync: accepted as True; process sharing is out of scope.
        storage, **kwargs: as for :class:`ReplayBuffer`.
    """

    def __init__(
        self,
        *,
        alpha: float,
        beta: float,
        eps: float = 1e-8,
        dtype: torch.dtype = torch.float,
        storage: Storage | Callable[[], Storage] | None = None,
        sampler_device: torch.device | str | None = None,
        sync: bool = True,
        **kwargs: Any,
    ) -> None:
        require_sync(sync)
        storage, sampler = self._prioritized(storage, alpha, beta, eps)
        super().__init__(storage=storage, sampler=sampler, **kwargs)


class TensorDictPrioritizedReplayBuffer(TensorDictReplayBuffer, Prioritized):
    """A :class:`TensorDictReplayBuffer` with a :class:`PrioritizedSampler`.

    Args:
        alpha, beta, eps, reduction, sampler_device: as for :class:`PrioritizedSampler`.
        priority_key: where a batch carries its priorities.
        sync: accepted as True; process sharing is out of scope.
        storage, **kwargs: as for :class:`ReplayBuffer`.
    """

    def __init__(
        self,
        *,
        alpha: float,
        beta: float,
        priority_key: str | tuple[str, ...] = "td_error",
        eps: float = 1e-8,
        storage: Storage | Callable[[], Storage] | None = None,
        sampler_device: torch.device | str | None = None,
        sync: bool = True,
        reduction: str = "max",
        **kwargs: Any,
    ) -> None:
        require_sync(sync)
        storage, sampler = self._prioritized(storage, alpha, beta, eps, reduction)
        super().__init__(priority_key=priority_key, storage=storage, sampler=sampler, **kwargs)


def require_sync(sync: bool) -> None:
    """Raise NotImplementedError for TorchRL's ``sync=False``."""
    if not sync:
        raise NotImplementedError(
            "sync=False (writers in other processes) is not supported by gpubuf: leave it out, and send the rows to "
            "the process that has the buffer"
        )
