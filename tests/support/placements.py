"""A machine of any memory, for tests of placement: what it has is said here, and nothing is really pinned."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
import torch

from gpubuf.data.storage import host_memory, placement

GIB = 1 << 30


@dataclass
class Machine:
    """What memory a machine has free, in bytes; ``device=None``: it has no GPU.

    Attributes:
        pinned: number of bytes by address, of what is pinned now.
        ever_pinned: number of bytes of all that ever was. (Fake tensors don't keep the memory that they were made of.)
    """

    host: int = 64 * GIB
    device: int | None = 16 * GIB
    pinned: dict[int, int] = field(default_factory=dict)
    ever_pinned: list[int] = field(default_factory=list)

    def _register(self, address: int, n_bytes: int, device: torch.device) -> None:
        self.pinned[address] = n_bytes
        self.ever_pinned.append(n_bytes)

    def install(self, monkeypatch: pytest.MonkeyPatch, *, work_on_cpu: bool = False) -> Machine:
        """Be the machine that the tests run on. ``work_on_cpu``: a CPU does the GPU's work for pinned rows."""
        monkeypatch.setattr(host_memory, "cuda_present", lambda: self.device is not None)
        monkeypatch.setattr(host_memory, "KEPT_BYTES", -1)
        monkeypatch.setattr(host_memory, "free", lambda device=None: host_memory.Free(self.host, self.device))
        monkeypatch.setattr(host_memory, "register", self._register)
        monkeypatch.setattr(host_memory, "unregister", lambda address, device: self.pinned.pop(address))
        monkeypatch.setattr(host_memory, "synchronize", lambda device=None: None)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: "a GPU that nobody has tuned for")
        if work_on_cpu:
            monkeypatch.setattr(placement, "named", lambda requested: torch.device("cpu"))
        return self
