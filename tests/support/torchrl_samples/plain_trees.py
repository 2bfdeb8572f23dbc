"""Plain trees in place of TorchRL's compiled ones, which may not load in the peer's environment."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class _Sums:
    """A vector with the methods of TorchRL's tree of sums."""

    empty = 0.0

    def __init__(self, size: int) -> None:
        self.size = size
        self.values = torch.full((size,), self.empty)

    def query(self, start: int, stop: int) -> float:
        return float(self.values[start:stop].sum())

    def scan_lower_bound(self, mass: Any) -> Tensor:
        return torch.searchsorted(self.values.double().cumsum(0), torch.as_tensor(mass).double())

    def __getitem__(self, index: Any) -> Tensor:
        return self.values[index]

    def __setitem__(self, index: Any, values: Any) -> None:
        self.values[index] = torch.as_tensor(values, dtype=torch.float32)


class _Minima(_Sums):
    empty = torch.finfo(torch.float32).max

    def query(self, start: int, stop: int) -> float:
        return float(self.values[start:stop].min())


def replace_trees() -> None:
    """Let TorchRL's prioritized samplers work without its compiled extension."""
    from torchrl.data.replay_buffers.samplers import prioritized

    for bits in (32, 64):
        setattr(prioritized, f"SumSegmentTreeFp{bits}", _Sums)
        setattr(prioritized, f"MinSegmentTreeFp{bits}", _Minima)
