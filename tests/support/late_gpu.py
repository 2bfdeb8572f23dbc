"""A GPU that is late: what it is given is done when the host waits for it, in order, and not before."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from gpubuf.data.storage import host_memory, plan

GPU = torch.device("cuda", 0)


class LateGpu:
    """Copies from pinned memory and writes of rows are queued. Fake "CUDA" tensors are CPU tensors.

    Attributes:
        queue: what has been launched and not been done.
        pinned: addresses of pinned memory.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.queue: list[Callable[[], object]] = []
        self.pinned: set[int] = set()
        self.waits = 0
        extend, to, empty = plan._extend, Tensor.to, torch.empty

        def copy(source: Tensor, device: Any, *args: Any, non_blocking: bool = False, **kwargs: Any) -> Tensor:
            if device != GPU:
                return to(source, device, *args, **kwargs)
            arrived = torch.full_like(source, 0)
            if not (source.is_pinned() and non_blocking):
                self.waits += source.is_pinned()
                return arrived.copy_(source)
            self.queue.append(lambda: arrived.copy_(source))
            return arrived

        def launched(*args: Any) -> Tensor:
            self.queue.append(lambda: extend(*args))
            return torch.arange(args[3])

        def staged(n_bytes: int) -> Tensor:
            arena = empty(n_bytes, dtype=torch.uint8)
            self.pinned.add(arena.untyped_storage().data_ptr())
            return arena

        monkeypatch.setattr(Tensor, "to", copy)
        monkeypatch.setattr(Tensor, "is_pinned", lambda t: t.untyped_storage().data_ptr() in self.pinned)
        monkeypatch.setattr(plan, "_extend", launched)
        monkeypatch.setattr(host_memory, "staging", staged)
        monkeypatch.setattr(host_memory, "cuda_present", lambda: True)
        monkeypatch.setattr(host_memory, "capturing", lambda: False)
        # Its events, and copies to memory that is there already, are those of a real one.
        monkeypatch.setattr(host_memory, "KEPT_BYTES", -1)

    def pin(self, tensor: Tensor) -> Tensor:
        self.pinned.add(tensor.untyped_storage().data_ptr())
        return tensor

    def synchronize(self) -> None:
        for work in self.queue:
            work()
        self.queue.clear()
