"""Buffers that tests mix."""

from __future__ import annotations

from typing import Any

import torch

from gpubuf.data import (
    LazyTensorStorage,
    PrioritizedSampler,
    PrioritizedSliceSampler,
    RandomSampler,
    SamplerWithoutReplacement,
    SliceSampler,
    TensorDictReplayBuffer,
)
from tests.support.transitions import transitions


def sampler_of(kind: str, capacity: int) -> Any:
    return {
        "uniform": RandomSampler,
        "prioritized": lambda: PrioritizedSampler(capacity, 0.6, 0.4),
        "slices": lambda: SliceSampler(slice_len=2),
        "prioritized slices": lambda: PrioritizedSliceSampler(capacity, 0.6, 0.4, slice_len=2),
        "without replacement": SamplerWithoutReplacement,
        "stratified": lambda: PrioritizedSampler(capacity, 0.6, 0.4, stratified=True),
    }[kind]()


def part(n: int, start: int, *, capacity: int = 20, kind: str = "uniform", ndim: int = 1, **options: Any) -> Any:
    """A buffer with ``n`` rows, made of the numbers from ``start`` on."""
    storage, device = options.pop("storage", None), options.pop("device", "cpu")
    if storage is None:
        storage = LazyTensorStorage(capacity, ndim=ndim, device=device)
    buffer = TensorDictReplayBuffer(
        storage=storage,
        sampler=sampler_of(kind, capacity),
        generator=torch.Generator().manual_seed(start),
        **options,
    )
    if n:
        data = transitions(n, start)
        buffer.extend(data if ndim == 1 else data.view(2, n // 2))
    return buffer
