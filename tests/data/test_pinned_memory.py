"""Registered host memory: what is asked of CUDA, what a refusal leaves behind, and when it is given back."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from gpubuf.data import LazyTensorStorage
from gpubuf.data.recording import capture_under_way
from gpubuf.data.storage import host_memory
from tests.support.transitions import transitions

GPU = torch.device("cuda", 1)


class Runtime:
    """CUDA's runtime, as far as it is asked about host memory.

    Attributes:
        calls: what it was asked, in order.
        refuses: error that it answers with; the next launch tells it once more.
        attribute: what the driver says about host pointers.
        capturing: whether this thread's stream is captured.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.refuses, self.sticky, self.attribute, self.capturing = 0, 0, 1, False
        ones = torch.ones

        def launch(*size: Any, device: Any = None) -> torch.Tensor:
            error, self.sticky = self.sticky, 0
            if error:
                raise RuntimeError(f"CUDA error {error}")
            return ones(*size)

        monkeypatch.setattr(torch, "ones", launch)
        cuda = torch.cuda
        monkeypatch.setattr(cuda, "init", lambda: None)
        monkeypatch.setattr(cuda, "is_initialized", lambda: True)
        monkeypatch.setattr(cuda, "is_current_stream_capturing", lambda: self.capturing)
        monkeypatch.setattr(cuda, "get_device_name", lambda device: "Some GPU")
        monkeypatch.setattr(cuda, "synchronize", lambda device: self.calls.append(("wait", device)))
        monkeypatch.setattr(cuda, "cudart", lambda: self)
        driver = SimpleNamespace(cuDeviceGet=self.device_get, cuDeviceGetAttribute=self.get_attribute)
        monkeypatch.setattr(ctypes, "CDLL", lambda name: driver)

    def answer(self) -> int:
        self.sticky = self.refuses
        return self.refuses

    def cudaHostRegister(self, address: int, n_bytes: int, flags: int) -> int:  # noqa: N802
        self.calls.append(("register", n_bytes, flags))
        return self.answer()

    def cudaHostUnregister(self, address: int) -> int:  # noqa: N802
        self.calls.append(("unregister",))
        return self.answer()

    def device_get(self, handle: Any, number: int) -> int:
        handle._obj.value = 40 + number
        return 0

    def get_attribute(self, found: Any, attribute: int, handle: Any) -> int:
        assert (attribute, handle.value) == (91, 41)
        found._obj.value = self.attribute
        return 0


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> Runtime:
    return Runtime(monkeypatch)


def test_memory_is_portable_and_mapped_and_its_own_device_is_waited_for(runtime):
    """Another device than the current one."""
    array = host_memory.pinned(1000, GPU)
    assert runtime.calls == [("register", 1000, 1 | 2)]
    del array
    assert runtime.calls[1:] == [("wait", GPU), ("unregister",)]


def test_a_refusal_is_not_told_again(runtime):
    """CUDA repeats an error at the next launch of anybody in the thread: it is taken away."""
    runtime.refuses = 2
    with pytest.raises(RuntimeError, match=r"refused to pin 1000 bytes of host memory \(error 2\)"):
        host_memory.pinned(1000, GPU)
    runtime.refuses = 0
    torch.ones(3, device=GPU)
    array = host_memory.pinned(1000, GPU)
    runtime.refuses = 713
    del array
    torch.ones(3, device=GPU)


def test_a_device_that_reads_no_host_addresses_is_refused(runtime, monkeypatch):
    """Before anything is pinned: the first gather would end the process's use of the GPU."""
    runtime.attribute = 0
    with pytest.raises(RuntimeError, match=r"Some GPU can't read pinned host memory .* can lie on 'cuda' or 'cpu'"):
        host_memory.pinned(1000, GPU)
    assert not runtime.calls
    assert runtime.sticky == 0
    monkeypatch.setattr(torch.version, "hip", "7.0")
    assert host_memory.reads_host_addresses(GPU)


def test_without_a_driver_to_ask_nothing_is_refused(monkeypatch):
    def absent(name: str) -> None:
        raise OSError(name)

    monkeypatch.setattr(ctypes, "CDLL", absent)
    assert host_memory.reads_host_addresses(GPU)


def test_memory_dropped_during_a_capture_of_this_thread_is_kept_until_later(runtime):
    """Waiting for the device would break the capture."""
    first, second = host_memory.pinned(8, GPU), host_memory.pinned(16, GPU)
    runtime.calls.clear()
    runtime.capturing = True
    del first
    assert not runtime.calls
    runtime.capturing = False
    del second
    assert runtime.calls == [("wait", GPU), ("unregister",)] * 2


def test_memory_dropped_during_a_capture_is_given_back_at_its_end(runtime):
    """By whichever thread."""
    array = host_memory.pinned(8, GPU)
    runtime.calls.clear()
    with capture_under_way():
        del array
        assert not runtime.calls
    assert runtime.calls == [("wait", GPU), ("unregister",)]


def test_a_forked_process_leaves_its_parents_memory_alone(runtime, monkeypatch):
    """CUDA can't be used there; the registration goes on to be the parent's."""
    array = host_memory.pinned(8, GPU)
    runtime.calls.clear()
    monkeypatch.setattr(torch.cuda, "_is_in_bad_fork", lambda: True)
    del array
    assert not runtime.calls


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_refusal_on_a_gpu_is_not_told_again():
    device = torch.device("cuda", torch.cuda.current_device())
    assert host_memory.reads_host_addresses(device)
    array = host_memory.pinned(1 << 20, device)
    # The same pages twice: CUDA refuses.
    with pytest.raises(RuntimeError, match="refused to pin"):
        host_memory.register(array.ctypes.data, array.nbytes, device)
    torch.ones(3, device=device).sum().item()
    storage = LazyTensorStorage(100, device="pinned")
    storage.append(transitions(10))
    storage[:10].cpu()
