"""What the tests of prefetching share: buffers, and transforms that wait, count or hold on."""

from __future__ import annotations

import functools
import threading
from collections import deque

import torch
from tensordict import TensorDict

from gpubuf import (
    LazyTensorStorage,
    SamplerWithoutReplacement,
    SliceSamplerWithoutReplacement,
    TensorDictReplayBuffer,
)
from tests.contracts import buffers
from tests.support.transitions import same

WAIT = 30.0  # seconds after which a thread that should have come counts as lost

SAMPLERS = {
    **{name: functools.partial(make, 60) for name, make in buffers.SAMPLERS.items()},
    "in order": lambda: SamplerWithoutReplacement(shuffle=False, drop_last=True),
    "slices in turn": lambda: SliceSamplerWithoutReplacement(slice_len=4),
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
