"""Buffers that the tests move, beside the same ones that stay."""

from __future__ import annotations

import torch
from tensordict import TensorDict

from gpubuf.data import (
    PrioritizedSampler,
    PrioritizedSliceSampler,
    RandomSampler,
    SliceSampler,
    TensorDictReplayBuffer,
)
from tests.support.transitions import same, transitions

SAMPLERS = {
    "uniform": RandomSampler,
    "prioritized": lambda: PrioritizedSampler(60, 0.6, 0.4),
    "slices": lambda: SliceSampler(slice_len=4),
    "prioritized slices": lambda: PrioritizedSliceSampler(60, 0.6, 0.4, slice_len=4),
}


def episodes(n: int, start: int = 0) -> TensorDict:
    return transitions(n, start).set("episode", torch.arange(start, start + n) // 5)


def alike(a: TensorDictReplayBuffer, b: TensorDictReplayBuffer, times: int = 3) -> bool:
    """Whether two buffers draw the same batches. Priorities are given back on the way."""
    for step in range(times):
        batches = [buffer.sample() for buffer in (a, b)]
        if not same(*(batch.exclude("index_generation") for batch in batches)):
            return False
        for buffer, batch in zip((a, b), batches, strict=True):
            if isinstance(buffer.sampler, PrioritizedSampler):
                buffer.update_tensordict_priority(batch.set("td_error", batch["observation"][:, 0] % 3 + step))
    return True
