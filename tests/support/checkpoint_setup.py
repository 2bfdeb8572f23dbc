"""Buffers that the tests of checkpoints save and compare."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch

from gpubuf import (
    LazyTensorStorage,
    PrioritizedSampler,
    RandomSampler,
    ReplayBuffer,
    TensorDictReplayBuffer,
)
from tests.support.transitions import transitions

CAPACITY = 60


SAMPLERS: dict[str, Callable[[], object]] = {
    "random": RandomSampler,
    "prioritized": lambda: PrioritizedSampler(CAPACITY, 0.7, 0.5),
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


def restored(folder: Path, sampler: str = "prioritized") -> TensorDictReplayBuffer:
    """A new buffer with what is in a folder."""
    buffer = new(sampler)
    buffer.load(folder)
    return buffer
