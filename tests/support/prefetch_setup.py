"""What the tests of prefetching share: buffers, and transforms that wait, count or hold on."""

from __future__ import annotations

import threading
from collections import deque

import torch
from tensordict import TensorDict

from gpubuf import (
    LazyTensorStorage,
    PrioritizedSampler,
    PrioritizedSliceSampler,
    RandomSampler,
    SamplerWithoutReplacement,
    SliceSampler,
    SliceSamplerWithoutReplacement,
    TensorDictReplayBuffer,
)
from tests.support.transitions import same

WAIT = 30.0  # seconds after which a thread that should have come counts as lost

SAMPLERS = {
    "uniform": RandomSampler,
    "without replacement": SamplerWithoutReplacement,
    "in order": lambda: SamplerWithoutReplacement(shuffle=False, drop_last=True),
    "prioritized": lambda: PrioritizedSampler(60, 0.7, 0.5),
    "slices": lambda: SliceSampler(slice_len=4),
    "slices in turn": lambda: SliceSamplerWithoutReplacement(slice_len=4),
    "prioritized slices": lambda: PrioritizedSliceSampler(60, 0.7, 0.5, slice_len=4),
}


def new(sampler: str, prefetch: int | None, **options) -> TensorDictReplayBuffer:
    options = {"batch_size": 8, "generator": torch.Generator().manual_seed(1), **options}
    return TensorDictReplayBuffer(
        storage=LazyTensorStorage(60), sampler=SAMPLERS[sampler](), prefetch=prefetch, **options
    )


def identical(a: TensorDict, b: TensorDict) -> bool:
    """As ``same``, and the index too."""
    return same(a, b) and torch.equal(a["index"], b["index"])


class Gate:
    """A transform that lets one batch through for every permit."""

    def __init__(self) -> None:
        self.permits = threading.Semaphore(0)

    def __call__(self, batch: TensorDict) -> TensorDict:
        assert self.permits.acquire(timeout=WAIT)
        return batch


class Reference:
    """What prefetching is to do, without threads: a batch is drawn when it is asked for."""

    def __init__(self, buffer: TensorDictReplayBuffer, depth: int) -> None:
        self.buffer, self.depth, self.queue = buffer, depth, deque()

    def sample(self) -> TensorDict:
        while len(self.queue) < 1 + self.depth:
            self.queue.append(self.buffer.sample())
        return self.queue.popleft()
