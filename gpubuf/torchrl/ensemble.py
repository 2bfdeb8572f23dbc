"""TorchRL's interface to batches from several buffers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, Self

import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor

from gpubuf.data.lock import under
from gpubuf.data.mixed import MixedReplayBuffer, checked_owners, positions_in
from gpubuf.data.prefetch import Batch
from gpubuf.data.samplers.base import Sampler
from gpubuf.data.samplers.slices import SliceSampler
from gpubuf.data.samplers.sum_tree import rows_at
from gpubuf.data.storage.layout import Data
from gpubuf.data.storage.list_storage import ListStorage
from gpubuf.data.storage.storage import Storage
from gpubuf.data.trajectories import Predicate, Trajectory
from gpubuf.data.updates import ConditionalUpdateResult, finished_future
from gpubuf.torchrl.buffers import ReplayBuffer, TensorDictReplayBuffer, given_transform, refuse_out_of_scope

_SAMPLEABLE = "sampleable"


class ReplayBufferEnsemble(MixedReplayBuffer):
    """A :class:`MixedReplayBuffer` with the arguments of TorchRL's class of this name.

    Two things differ. Batches are flat, ``[batch_size]``, the rows of one buffer after those of another. And ``p`` are
    the shares of every batch: on average a buffer gives as many rows as TorchRL's draws of whole buffers do. The info
    has ``"buffer_ids"`` as well, which is ``"buffer"``.

    Args:
        *buffers: the buffers.
        storages, samplers, writers: instead of buffers, the parts of one each; samplers and writers may be left out.
        p: the share of each buffer; default: equal ones. ``"sampleable"``: in proportion to the rows that it stores.
        sample_from_all: equal shares; excludes ``p``.
        num_buffer_sampled: from how many buffers a batch is drawn: all of them (None, or their number).
        routing_key: a key of one integer per row: :meth:`extend` and :meth:`add` write it to the buffer of that number.
        routing_dim: a dimension of written batches that is as long as there are buffers; excludes ``routing_key``.
        batch_size, transform, collate_fn, pin_memory, generator: as for :class:`MixedReplayBuffer`.
        transform_factory: a function that returns the transform.
        collate_fns: out of scope at other values than None.

    Raises:
        TypeError: both buffers and storages are given, or neither.
        ValueError: ``p`` and ``sample_from_all`` are given, or there are not as many samplers or writers as storages.
        NotImplementedError: an argument that is out of scope was set.
    """

    def __init__(
        self,
        *buffers: ReplayBuffer,
        storages: Sequence[Storage] | None = None,
        samplers: Sequence[Sampler] | None = None,
        writers: Sequence[Any] | None = None,
        transform: Callable[[Data], Data] | None = None,
        transform_factory: Callable[[], Callable[[Data], Data]] | None = None,
        batch_size: int | None = None,
        collate_fn: Callable[[Data], Data] | None = None,
        collate_fns: Any = None,
        p: Sequence[float] | torch.Tensor | str | None = None,
        sample_from_all: bool = False,
        num_buffer_sampled: int | None = None,
        pin_memory: bool = False,
        generator: torch.Generator | None = None,
        routing_key: Any = None,
        routing_dim: int | None = None,
    ) -> None:
        refuse_out_of_scope(collate_fns=collate_fns)
        if routing_key is not None and routing_dim is not None:
            raise ValueError("routing_key and routing_dim exclude each other")
        if routing_dim is not None and not isinstance(routing_dim, int):
            raise TypeError(f"routing_dim is an int, got a {type(routing_dim).__name__}")
        self._routing_key, self._routing_dim = routing_key, routing_dim
        if isinstance(p, str) and p != _SAMPLEABLE:
            raise ValueError(f"p must be numbers, a tensor or {_SAMPLEABLE!r}, got {p!r}")
        if sample_from_all and p is not None:
            raise ValueError("p and sample_from_all exclude each other")
        if (storages is None) == (not buffers):
            raise TypeError("give either buffers or storages")
        if storages is not None:
            buffers = _made_of(storages, samplers, writers)
        elif samplers is not None or writers is not None:
            raise TypeError("samplers and writers go with storages: buffers have their own")
        if num_buffer_sampled not in (None, len(buffers)):
            raise NotImplementedError(
                f"num_buffer_sampled={num_buffer_sampled} is not supported by gpubuf: leave it out. A batch has rows "
                f"of all {len(buffers)} buffers, on average as many of each as if whole buffers were drawn by p"
            )
        self._by_size = isinstance(p, str)
        if self._by_size and any(isinstance(buffer.sampler, SliceSampler) for buffer in buffers):
            raise NotImplementedError(f"p={_SAMPLEABLE!r} counts rows, not slices: give the shares as numbers")
        super().__init__(
            buffers,
            None if isinstance(p, str) else p,
            batch_size=batch_size,
            collate_fn=collate_fn,
            transform=given_transform(transform, transform_factory),
            pin_memory=pin_memory,
            generator=generator,
        )
        self._buffers: tuple[ReplayBuffer, ...] = tuple(buffers)

    def _draw(self, n: int, batches: int | None) -> Batch:
        rows = tuple([float(len(buffer)) for buffer in self._buffers]) if self._by_size else ()
        # Not anew, or a graph would be refused that they are part of.
        if any(rows) and rows != self._shares:
            self.shares = rows
        batch = super()._draw(n, batches)
        batch.info["buffer_ids"] = batch.info["buffer"]
        return batch

    # Writing

    def extend(self, data: Data, *, buffer: int | None = None, update_priority: bool | None = None) -> Any:
        """Write a batch: each row to its buffer, or all of them to one.

        Args:
            data: a batch. With a routing, and no ``buffer``, a TensorDict of any batch size.
            buffer: the number of the buffer. Default: by the routing, or the first.
            update_priority: as for :meth:`TensorDictReplayBuffer.extend`, with ``buffer`` or without a routing.

        Returns:
            As :meth:`ReplayBuffer.extend`. Of rows that were routed a TensorDict ``[n]`` with their ``"buffer_ids"``,
            their ``"index"`` there, and ``"index_generation"`` if all writers track generations; this synchronises.

        Raises:
            ValueError: as :meth:`ReplayBuffer.extend`; or the routing does not fit the batch. Nothing is written if a
                buffer has not the keys, shapes and dtypes of the rows. What only shows at the write (inverse
                transforms, codecs, ``next_capacity``) leaves the rows of buffers before it written.
        """
        if buffer is not None or not self._routes:
            options = {} if update_priority is None else {"update_priority": update_priority}
            return self._buffers[buffer or 0].extend(data, **options)
        if len(self._transform):
            data = self._transform.inv(data.copy())
        if data is None:
            return self._written(None, torch.empty(0, dtype=torch.int64, device="cpu"))
        owner = self._owners(data)
        return self._written(data.reshape(-1), owner)

    @property
    def _routes(self) -> bool:
        return self._routing_key is not None or self._routing_dim is not None

    def _owners(self, data: Any) -> Tensor:
        """The buffer of each row, int64 ``[n]`` for all batch dimensions in one. Synchronises with a GPU."""
        if not isinstance(data, TensorDictBase):
            raise TypeError(f"rows that are routed are TensorDicts, got a {type(data).__name__}")
        shape, dim, count = data.batch_size, self._routing_dim, len(self._buffers)
        if dim is not None:
            if not shape or shape[dim] != count:
                raise ValueError(f"dimension {dim} of the batch {list(shape)} is not one of {count} buffers")
            others = [*shape]
            del others[dim]
            return torch.arange(count, device=data.device).expand(*others, count).movedim(-1, dim).reshape(-1)
        number = data.get(self._routing_key, None)
        if number is None:
            raise KeyError(f"the batch has no routing_key {self._routing_key!r}")
        if number.numel() != shape.numel():
            raise ValueError(
                f"routing_key {self._routing_key!r} has the shape {list(number.shape)}, the batch {list(shape)}"
            )
        return checked_owners(number.reshape(-1), count)

    def _written(self, rows: Any, owner: Tensor) -> TensorDict:
        """Write each of ``[n]`` rows to its buffer. See :meth:`extend`.

        Of rows that are gone already, because their buffer had room for fewer, index and generation are -1.
        """
        tracked = all(buffer.writer.tracks_generations for buffer in self._buffers)

        def write() -> TensorDict:
            parts = []
            for number, buffer in enumerate(self._buffers):
                where = (owner == number).nonzero().squeeze(-1)
                if where.numel():
                    part = rows[where.to(rows.device or where.device)]
                    if buffer.initialized and not len(buffer.transform) and not isinstance(buffer.storage, ListStorage):
                        buffer.storage.written_layout.collect(part, buffer.storage.ndim)
                    parts.append((buffer, where, part))
            index = torch.empty(0, dtype=torch.int64, device=owner.device)
            generation = torch.empty(owner.numel(), dtype=torch.int64, device=owner.device)
            for buffer, where, part in parts:
                found = buffer.extend(part).to(owner.device)
                if not index.numel():
                    index = index.new_empty((owner.numel(), *found.shape[1:]))
                index[where] = found
                if tracked:
                    generation[where] = buffer.writer.generations_of(found)
            extra = {"index_generation": generation} if tracked else {}
            return TensorDict({"buffer_ids": owner, "index": index, **extra}, [owner.numel()])

        return under(self._locks, write)

    def add(self, data: Data, *, buffer: int | None = None) -> Any:
        """Write one row to its buffer. Returns as :meth:`ReplayBuffer.add`; of a row that was routed a TensorDict.

        Raises:
            RuntimeError: rows are routed by a dimension.
        """
        if buffer is not None or not self._routes:
            return self._buffers[buffer or 0].add(data)
        if self._routing_dim is not None:
            raise RuntimeError("rows that are routed by a dimension are written by extend()")
        return self.extend(data.unsqueeze(0))[0]

    def mark_update(self, index: Any, *, buffer: Tensor | None = None) -> None:
        """Rows were written elsewhere. See :meth:`ReplayBuffer.mark_update`. Synchronises with a GPU.

        Args:
            index: what :meth:`extend` returned of rows that were routed; or the index of rows.
            buffer: the buffer of each, with an index.
        """
        index, owner = handles(index, buffer, len(self._buffers))

        def mark() -> None:
            parts = []
            for number, part in enumerate(self._buffers):
                if part.initialized and bool((owner == number).any()):
                    found = positions_in(part, index)[(owner == number).to(part.storage.device)]
                    parts.append((part, rows_at(found, part.storage)))
            for part, positions in parts:
                part.mark_update(positions)

        under(self._locks, mark)

    def update_if_present(  # type: ignore[override]
        self,
        index: Any,
        data: Any = None,
        *,
        buffer: Tensor | None = None,
        generation: Tensor | None = None,
        patch: Any = None,
        version_key: Any = None,
        version: Any = None,
        require_newer: bool = False,
    ) -> ConditionalUpdateResult | None:
        """Write some keys of drawn rows back, each to its buffer. See :meth:`ReplayBuffer.update_if_present`.

        Args:
            index: ``"index"`` of a batch's info; or a TensorDict of it and ``"buffer_ids"``, as TorchRL has it and
                :meth:`extend` of routed rows returns.
            buffer: ``"buffer"`` of the info, with an index.
            data, generation, patch, version_key, version, require_newer: as for
                :meth:`ReplayBuffer.update_if_present`.

        Returns:
            With ``patch``, a :class:`ConditionalUpdateResult`; otherwise None.
        """
        index, owner = handles(index, buffer, len(self._buffers))
        if isinstance(patch, TensorDictBase):
            patch = patch.reshape(-1)
        versions = {"version_key": version_key, "version": version, "require_newer": require_newer}
        what = {} if patch is None else {"patch": patch, **versions}
        return super().update_if_present(index, data, buffer=owner, generation=generation, **what)

    def submit_update_if_present(self, **arguments: Any) -> Future[ConditionalUpdateResult | None]:
        """:meth:`update_if_present`, with a future of its result. See :meth:`ReplayBuffer.submit_update_if_present`."""
        return finished_future(self.update_if_present, **arguments)

    def end_streams(
        self,
        *,
        end_key: Any = ("next", "done"),
        terminated_key: Any = ("next", "terminated"),
        truncated_key: Any = ("next", "truncated"),
    ) -> None:
        """End the trajectory of the newest row of each buffer, before its producer begins anew. Synchronises.

        Args:
            end_key: a stored flag, which is set.
            terminated_key: a stored flag, which is read; None, or a key that is not stored: no row is terminated.
            truncated_key: a stored flag, which is set where the row neither ended nor terminated; None: none.

        Raises:
            RuntimeError: a storage has several dimensions.
            KeyError: ``end_key`` is not stored.
            TypeError: it is no flag. In all cases nothing is changed.
        """
        edits: list[tuple[ReplayBuffer, Any, Tensor, int]] = []
        for part in self._buffers:
            storage = part.storage
            if storage.ndim > 1:
                raise RuntimeError("end_streams is for storages of one dimension, which hold one stream")
            if not len(storage):
                continue
            newest = (storage.cursor - 1) % storage.max_size
            row = storage[torch.tensor([newest], device="cpu")][0]
            ended, cut = row.get(end_key, None), row.get(truncated_key, None) if truncated_key is not None else None
            if ended is None:
                raise KeyError(f"the end_key {end_key!r} is not stored")
            if ended.dtype is not torch.bool:
                raise TypeError(f"the end_key {end_key!r} is no flag, it has the dtype {ended.dtype}")
            edits.append((part, end_key, torch.ones_like(ended), newest))
            if cut is not None:
                over = row.get(terminated_key, None) if terminated_key is not None else None
                unfinished = ~ended if over is None else ~ended & ~over
                edits.append((part, truncated_key, cut | unfinished, newest))
        for part, key, value, newest in edits:
            part.set_at_(key, value, newest)

    # The parts

    @property
    def initialized(self) -> bool:
        """Whether a storage has been allocated."""
        return any(buffer.initialized for buffer in self._buffers)

    @property
    def write_count(self) -> int:
        """Number of rows written to all the buffers. No host sync."""
        return sum(buffer.write_count for buffer in self._buffers)

    def stats(self) -> dict[str, Any]:
        """The sums of :meth:`ReplayBuffer.stats` of the buffers, and ``"num_buffers"``. No host sync."""
        parts = [buffer.stats() for buffer in self._buffers]
        found = {name: sum(part[name] for part in parts) for name in ("size", "write_count", "prefetch_queue_size")}
        capacity = sum(part["capacity"] for part in parts)
        return {
            **found,
            "initialized": self.initialized,
            "capacity": capacity,
            "utilization": found["size"] / capacity,
            "num_buffers": len(parts),
        }

    def can_sample(self, batch_size: int | None = None) -> bool:
        """Whether :meth:`sample` would give a batch now: some buffer stores rows, and those that do can give theirs.

        Args:
            batch_size: default: that of the constructor.

        Raises:
            RuntimeError: no batch size is known.
        """
        n = self._checked(batch_size)
        filled = [buffer for buffer in self._buffers if len(buffer)]
        return bool(filled) and all(buffer.can_sample(n) for buffer in filled)

    def next(self) -> Any:
        """The next batch of the constructor's ``batch_size``."""
        return next(iter(self), None)

    def append_transform(self, transform: Callable[[Data], Data], *, invert: bool = False) -> Self:
        """Add a transform of batches after the others; ``invert=True`` applies it to routed rows instead."""
        return self.insert_transform(len(self._transform), transform, invert=invert)

    def insert_transform(self, index: int, transform: Callable[[Data], Data], *, invert: bool = False) -> Self:
        """Add a transform of batches before the one at ``index``."""
        self._transform.insert(index, transform, invert=invert)
        return self

    def query(self, predicate: Predicate | None = None, *, trajectory_key: Any = None) -> list[Trajectory]:
        """The trajectories of all the buffers that fulfil a condition, one buffer after the other."""
        return [found for buffer in self._buffers for found in buffer.query(predicate, trajectory_key=trajectory_key)]

    def register_save_hook(self, hook: Callable[..., Any]) -> None:
        """Have a hook change the rows that each buffer saves. See :meth:`ReplayBuffer.register_save_hook`."""
        for buffer in self._buffers:
            buffer.register_save_hook(hook)

    def register_load_hook(self, hook: Callable[..., Any]) -> None:
        """Have a hook make rows of what each buffer reads. See :meth:`ReplayBuffer.register_load_hook`."""
        for buffer in self._buffers:
            buffer.register_load_hook(hook)

    # In this process

    @property
    def service_backend(self) -> str:
        """``"direct"``: the buffers work in this process."""
        return "direct"

    @property
    def is_alive(self) -> bool:
        """Whether no buffer was shut down."""
        return all(buffer.is_alive for buffer in self._buffers)

    def start(self) -> Self:
        """The ensemble itself. Raises RuntimeError if a buffer was shut down."""
        for buffer in self._buffers:
            buffer.start()
        return self

    def client(self) -> Self:
        """The ensemble itself: it is in this process."""
        return self

    def share(self, shared: bool = True) -> Self:
        """Accepted as False. Raises NotImplementedError for True: buffers belong to one process."""
        for buffer in self._buffers:
            buffer.share(shared)
        return self

    def synchronize(self) -> None:
        """Wait until the batches that the buffers prepare are finished."""
        for buffer in self._buffers:
            buffer.synchronize()

    def shutdown(self, timeout: float | None = None) -> None:
        """Shut all the buffers down. See :meth:`ReplayBuffer.shutdown`."""
        for buffer in self._buffers:
            buffer.shutdown(timeout)


def _made_of(
    storages: Sequence[Storage], samplers: Sequence[Sampler] | None, writers: Sequence[Any] | None
) -> tuple[ReplayBuffer, ...]:
    """A buffer for each storage."""
    for name, parts in (("samplers", samplers), ("writers", writers)):
        if parts is not None and len(parts) != len(storages):
            raise ValueError(f"there are {len(storages)} storages and {len(parts)} {name}")
    nothing = [None] * len(storages)
    return tuple(
        TensorDictReplayBuffer(storage=storage, sampler=sampler, writer=writer)
        for storage, sampler, writer in zip(storages, samplers or nothing, writers or nothing, strict=True)
    )


def handles(index: Any, buffer: Tensor | None, n_buffers: int) -> tuple[Any, Tensor]:
    """The index of rows and their buffers, from TorchRL's form: a TensorDict of both, or from two tensors.

    Raises:
        TypeError: it is neither.
    """
    if isinstance(index, (TensorDictBase, dict)):
        return index["index"], checked_owners(index["buffer_ids"].reshape(-1), n_buffers)
    if buffer is None:
        raise TypeError(
            "rows of several buffers are named by a TensorDict with 'index' and 'buffer_ids', or by buffer="
        )
    return index, buffer.reshape(-1)
