"""Buffers whose samples carry their index, generation and weight, and buffers with priorities."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, cast, overload

import torch
from tensordict import TensorDict, TensorDictBase, is_tensorclass
from torch import Tensor

from gpubuf.data.batches import collapsed
from gpubuf.data.buffer import ReplayBuffer
from gpubuf.data.operation import graph_break, writing
from gpubuf.data.parts import storage_of
from gpubuf.data.samplers.priorities import masks_in, masks_of, rows_of
from gpubuf.data.samplers.prioritized import PrioritizedSampler
from gpubuf.data.storage.containers import Data, batch_shape, check_entries, first_of, is_data, tensors_of
from gpubuf.data.storage.indexing import as_positions
from gpubuf.data.storage.layout import MASK_KEY, as_key, priority_mask_key
from gpubuf.data.storage.storage import TensorStorage
from gpubuf.data.writers import TensorDictRoundRobinWriter, Writer


class TensorDictReplayBuffer(ReplayBuffer):
    """A :class:`ReplayBuffer` of TensorDicts. It writes the info of a sample into the sample.

    Args:
        priority_key: where a batch carries its priorities.
        storage, writer, **kwargs: as for :class:`ReplayBuffer`.
    """

    _samples_have_info = True
    _entries_are_keys = (TensorDict, dict)

    def __init__(
        self,
        storage: TensorStorage | Callable[[], TensorStorage] | int | None = None,
        *,
        priority_key: str | tuple[str, ...] = "td_error",
        writer: Writer | Callable[[], Writer] | None = None,
        **kwargs: Any,
    ) -> None:
        self.priority_key = priority_key
        super().__init__(storage, writer=TensorDictRoundRobinWriter if writer is None else writer, **kwargs)

    @writing
    def extend(self, data: Data, *, update_priority: bool | None = None) -> Tensor:
        """Write a batch, with the priorities found under ``priority_key`` if the sampler has any use for them.

        Args:
            data: a TensorDict or tensorclass, or a dict of tensors or NumPy arrays that is stored as one; or a list of
                them.
            update_priority: False ignores the priorities in the batch.

        Returns:
            As :meth:`ReplayBuffer.extend`.

        Raises:
            TypeError: ``data`` is something else.
            ValueError: as :meth:`ReplayBuffer.extend`, or a priority is NaN, infinite or negative (CPU).
        """
        if type(data) is TensorDict or type(data) is dict:
            # Whatever comes with priorities is written in the general way.
            index = self.parts.writes.prepared(data)
            if index is not None:
                return index
        if type(data) is not TensorDict:
            if isinstance(data, (dict, list)):
                data = self._as_tensordicts(data, self.parts.storage.ndim)
            first = data[0] if isinstance(data, list) and data else data
            # An empty list is an empty write.
            if not isinstance(first, TensorDictBase | list) and not is_tensorclass(first):
                raise TypeError(f"{type(self).__name__} stores TensorDicts, got a {type(first).__name__}")
        wanted = update_priority is not False and self.parts.sampler.has_priorities
        return self.parts.write(data, self._given_priority if wanted else None)

    def _as_tensordicts(self, data: Any, ndim: int) -> Any:
        """A dict of tensors or arrays, or a list of such rows, as TensorDicts of ``ndim`` batch dimensions."""
        if isinstance(data, dict):
            data = tensors_of(data)
            try:
                check_entries(data)
                first = first_of(data)
                # Of too few dimensions, whoever writes it says what to do.
                return TensorDict(data, first.shape[:ndim] if is_data(first) else batch_shape(data, ndim))
            except (TypeError, ValueError) as error:
                message = f"{type(self).__name__} stores TensorDicts, and this dict can't be one: {error}"
                raise TypeError(message) from None
            except RuntimeError:
                rows: dict[tuple[int, ...], list[str]] = {}
                for key, value in TensorDict(data).items(True, True):
                    rows.setdefault(tuple(value.shape[:ndim]), []).append(".".join(as_key(key)))
                each = "; ".join(f"{', '.join(keys)}: {list(shape)}" for shape, keys in rows.items())
                due = f"the keys of a batch must have the same rows, of {ndim} dimension(s)"
                raise ValueError(f"{due}, got {each}") from None
        if isinstance(data, list) and data and isinstance(data[0], dict):
            return [self._as_tensordicts(row, ndim - 1) for row in data]
        return data

    def _row_of(self, data: Any) -> Data:
        """A dict of tensors, arrays and numbers is stored as a TensorDict."""
        return super()._row_of(self._as_tensordicts(data, self.parts.storage.ndim - 1))

    def _given_priority(self, data: Any) -> Tensor | None:
        if isinstance(data, list):
            # Rows of a storage of objects.
            found = [row.get(self.priority_key, None) for row in data]
            priority = None if any(entry is None for entry in found) else torch.stack(found)
        else:
            priority = data.get(self.priority_key, None)
        if priority is None:
            return None
        n = len(data) if isinstance(data, list) else data.batch_size[: self.parts.storage.ndim].numel()
        priority = self.parts.sampler.reduce(priority.detach(), n).float()
        self.parts.sampler.check_priority(priority)
        return priority

    @overload  # type: ignore[override]
    def sample(
        self,
        batch_size: int | None = ...,
        return_info: Literal[False] = ...,
        include_info: bool | None = ...,
        *,
        batches: int | None = ...,
    ) -> TensorDict: ...

    @overload
    def sample(
        self,
        batch_size: int | None = ...,
        *,
        return_info: Literal[True],
        include_info: bool | None = ...,
        batches: int | None = ...,
    ) -> tuple[TensorDict, dict[str, Any]]: ...

    @graph_break
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
        batch = self.parts.batches.next(batch_size, include_info is not False, batches)
        return (batch.data, batch.info) if return_info else batch.data

    @graph_break
    def update_tensordict_priority(self, data: TensorDictBase) -> None:
        """Take over the priorities that a sampled batch carries under ``priority_key``. No host sync.

        Rows that were overwritten since the sample are left alone. So are those that have none: a loss says so at
        ``priority_key`` with ``"_mask"`` appended, true for the rows that have one, and ``("collector", "mask")`` is
        false for rows that are no steps. Of windows it is a number for each step: those that the mask of a window of
        this length calls padded don't count, and the others make one number by the sampler's ``reduction``.

        Raises:
            KeyError: the batch has no priorities, or no ``"index"``.
        """
        sampler = self.parts.sampler
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
        told = get(f"{self.priority_key}_mask" if plain else priority_mask_key(self.priority_key), None)
        collected, n = get(MASK_KEY[0], None), data.numel()
        masks = [] if told is None and collected is None else masks_of(told, collected)
        # Past a call: most batches have none.
        if padded := self.parts.recipe.masks:
            masks += masks_in(data, padded, priority)
        if priority.dim() != 1 or priority.numel() != n or (index.dim() != 1 and self.parts.storage.ndim == 1):
            index, priority, generation = self._by_row(data, index, priority, generation, masks)
        if masks:
            positions = as_positions(index, self.parts.storage.shape, self.parts.storage.device)
            # A position of -1 is ignored.
            index = torch.where(rows_of(masks, positions.numel()).to(positions.device), positions, -1)
        self.update_priority(index, priority, generation=generation)

    def _by_row(
        self, data: TensorDictBase, index: Tensor, priority: Tensor, generation: Tensor | None, masks: list[Tensor]
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Index, priority and generation of a batch with one entry for each row."""
        storage, lead = self.parts.storage, data.batch_dims
        coordinates = int(storage.ndim > 1)
        if not storage.initialized or index.dim() - coordinates < lead:
            # The batch has dimensions that its index does not have.
            lead = index.dim() - coordinates
        elif (own := storage.schema.batch.nested_batch) and lead > len(own) and data.batch_size[-len(own) :] == own:
            lead -= len(own)
        index = collapsed(index, lead, index.dim() - coordinates - lead)
        if generation is not None:
            generation = collapsed(generation, lead, generation.dim() - lead)
        return index, self.parts.sampler.reduce(priority, data.batch_size[:lead].numel(), masks), generation

    def _update_from_batch(self, batch: Any) -> None:
        if not isinstance(batch, TensorDictBase):
            super()._update_from_batch(batch)
        self.update_tensordict_priority(batch)


class PrioritizedReplayBuffer(ReplayBuffer):
    """A :class:`ReplayBuffer` with a :class:`PrioritizedSampler`.

    Args:
        alpha, beta, eps, reduction: as for :class:`PrioritizedSampler`.
        storage, **kwargs: as for :class:`ReplayBuffer`.
    """

    def __init__(
        self,
        storage: TensorStorage | Callable[[], TensorStorage] | int | None = None,
        *,
        alpha: float,
        beta: float,
        eps: float = 1e-8,
        reduction: str = "max",
        **kwargs: Any,
    ) -> None:
        made = storage_of(storage)
        sampler = PrioritizedSampler(made.max_size, alpha, beta, eps, reduction=reduction)
        super().__init__(storage=made, sampler=sampler, **kwargs)

    @property
    def sampler(self) -> PrioritizedSampler:
        """The sampler."""
        return cast(PrioritizedSampler, self.parts.sampler)


class TensorDictPrioritizedReplayBuffer(PrioritizedReplayBuffer, TensorDictReplayBuffer):
    """A :class:`TensorDictReplayBuffer` with a :class:`PrioritizedSampler`.

    Args:
        alpha, beta, eps, reduction: as for :class:`PrioritizedSampler`.
        storage, **kwargs: as for :class:`TensorDictReplayBuffer`.
    """
