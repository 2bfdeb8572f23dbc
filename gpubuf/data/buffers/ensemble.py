"""TorchRL's interface to batches from several buffers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from gpubuf.data.buffers.components import refuse_out_of_scope
from gpubuf.data.buffers.mixed import MixedReplayBuffer
from gpubuf.data.buffers.replay_buffer import ReplayBuffer
from gpubuf.data.buffers.tensordict_buffers import TensorDictReplayBuffer
from gpubuf.data.concurrency.prefetch import Batch
from gpubuf.data.samplers.base import Sampler
from gpubuf.data.storages.layout import Data
from gpubuf.data.storages.tensor_storage import Storage


class ReplayBufferEnsemble(MixedReplayBuffer):
    """A :class:`MixedReplayBuffer` with the arguments of TorchRL's class of this name.

    Two things differ. Batches are flat, ``[batch_size]``, the rows of one buffer behind those of another. And ``p`` are
    the shares of every batch: a buffer gives as many rows as TorchRL's draws of whole buffers give on average. The info
    has ``"buffer_ids"`` as well, which is ``"buffer"``.

    Args:
        *buffers: the buffers.
        storages, samplers, writers: instead of buffers, the parts of one each; samplers and writers may be left out.
        p: the share of each buffer; default: equal ones.
        sample_from_all: equal shares; excludes ``p``.
        num_buffer_sampled: from how many buffers a batch is drawn: all of them (None, or their number).
        batch_size, transform, collate_fn, pin_memory, generator: as for :class:`MixedReplayBuffer`.
        collate_fns, routing_key, routing_dim: out of scope at other values than these.

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
        batch_size: int | None = None,
        collate_fn: Callable[[Data], Data] | None = None,
        collate_fns: Any = None,
        p: Sequence[float] | torch.Tensor | str | None = None,
        sample_from_all: bool = False,
        num_buffer_sampled: int | None = None,
        pin_memory: bool = False,
        generator: torch.Generator | None = None,
        routing_key: Any = None,
        routing_dim: Any = None,
    ) -> None:
        refuse_out_of_scope(collate_fns=collate_fns, routing_key=routing_key, routing_dim=routing_dim)
        if isinstance(p, str):
            raise NotImplementedError(f"p={p!r} is not supported by gpubuf: give the shares as numbers or as a tensor")
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
                f"num_buffer_sampled={num_buffer_sampled} is not supported by gpubuf: every batch has rows of all "
                f"{len(buffers)} buffers"
            )
        super().__init__(
            buffers,
            p,
            batch_size=batch_size,
            collate_fn=collate_fn,
            transform=transform,
            pin_memory=pin_memory,
            generator=generator,
        )

    def _draw(self, n: int, batches: int | None) -> Batch:
        batch = super()._draw(n, batches)
        batch.info["buffer_ids"] = batch.info["buffer"]
        return batch


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
