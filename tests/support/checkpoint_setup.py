"""Buffers that the tests of checkpoints save and compare."""

from __future__ import annotations

from collections.abc import Callable

import torch

from gpubuf import (
    LazyTensorStorage,
    PrioritizedSampler,
    PrioritizedSliceSampler,
    RandomSampler,
    ReplayBuffer,
    SamplerWithoutReplacement,
    SliceSampler,
    SliceSamplerWithoutReplacement,
    TensorDictReplayBuffer,
    serialization,
)
from tests.support.transitions import transitions

CAPACITY = 60


SAMPLERS: dict[str, Callable[[], object]] = {
    "random": RandomSampler,
    "without replacement": SamplerWithoutReplacement,
    "prioritized": lambda: PrioritizedSampler(CAPACITY, 0.7, 0.5),
    "slices": lambda: SliceSampler(slice_len=3),
    "slices without replacement": lambda: SliceSamplerWithoutReplacement(slice_len=3),
    "prioritized slices": lambda: PrioritizedSliceSampler(CAPACITY, 0.7, 0.5, slice_len=3),
}


def new(sampler: str = "prioritized", capacity: int = CAPACITY, **arguments) -> TensorDictReplayBuffer:
    made = SAMPLERS[sampler]()
    if capacity != CAPACITY:
        made = PrioritizedSampler(capacity, 0.7, 0.5)
    return TensorDictReplayBuffer(storage=LazyTensorStorage(capacity), sampler=made, **arguments)


def used(sampler: str = "prioritized", n: int = 85) -> TensorDictReplayBuffer:
    """A buffer that has gone round, with priorities, in the middle of an epoch."""
    buffer = new(sampler)
    buffer.extend(transitions(n))
    batch = buffer.sample(12)
    if "prioritized" in sampler:
        buffer.update_priority(batch["index"], torch.rand(len(batch)) * 5)
    return buffer


def numbers(buffer: ReplayBuffer) -> list[int]:
    return buffer[:]["next", "step"].tolist()


def contents(buffer: TensorDictReplayBuffer) -> list[bytes]:
    """Everything in a buffer that a load can change."""
    state = buffer.state_dict()
    out = [t.contiguous().view(torch.uint8).numpy().tobytes() for t in buffer.storage.row_tensors]
    out.append(bytes(buffer.storage.ring.tolist().__repr__(), "utf8"))
    del state["_storage"]["rows"]
    return [*out, b"".join(bytes(piece) for piece in serialization.contents(state))]
