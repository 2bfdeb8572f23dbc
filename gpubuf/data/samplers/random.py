"""Uniform sampling, with replacement."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from gpubuf.data.samplers.base import UNBOUND, Drawn, Sampler
from gpubuf.data.samplers.without_replacement import SamplerWithoutReplacement
from gpubuf.kernels.rows import SIZE


class RandomSampler(Sampler):
    """Rows drawn uniformly, with replacement, in the launch that copies them.

    Args:
        replacement: False makes a :class:`SamplerWithoutReplacement` of the other arguments.
    """

    without_replacement = SamplerWithoutReplacement

    def __init__(self, *, replacement: bool = True) -> None:
        super().__init__()
        self.require_replacement(replacement)

    def choose(self, n: int) -> tuple[Tensor, dict[Any, Tensor]]:
        """Uniform positions. No host sync."""
        storage = self.storage
        uniform = self.random_state(storage.device).uniform(n)
        # The device's count: in a CUDA graph the host's would stay that of the capture.
        size = storage.ring[SIZE]
        return torch.minimum((uniform * size).to(torch.int64), size - 1), {}

    def draw(self, n: int) -> Drawn:
        """Choose and gather in one launch. No host sync."""
        reader = self.reader
        if reader is None:
            raise RuntimeError(UNBOUND)
        tensors, index, generation = reader.sample_uniform(self.random_state(reader.device).state, n)
        return Drawn(tensors, index, generation, {})
