"""Buffers that tests mix."""

from __future__ import annotations

from typing import Any

import torch

from gpubuf.data import (
    LazyTensorStorage,
    TensorDictReplayBuffer,
)
from tests.contracts.buffers import SAMPLERS
from tests.support.transitions import transitions


def part(n: int, start: int, *, capacity: int = 20, kind: str = "uniform", ndim: int = 1, **options: Any) -> Any:
    """A buffer with ``n`` rows, made of the numbers from ``start`` on."""
    storage, device = options.pop("storage", None), options.pop("device", "cpu")
    if storage is None:
        storage = LazyTensorStorage(capacity, ndim=ndim, device=device)
    buffer = TensorDictReplayBuffer(
        storage=storage,
        sampler=SAMPLERS[kind](capacity),
        generator=torch.Generator().manual_seed(start),
        **options,
    )
    if n:
        data = transitions(n, start)
        buffer.extend(data if ndim == 1 else data.view(2, n // 2))
    return buffer
