"""Registration of operations: devices, laziness, and the switch to the interpreter."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace

import pytest
import torch

from gpubuf.kernels import _registry


@pytest.mark.parametrize(("index", "switches"), [(0, []), (1, [1])])
def test_kernels_are_launched_on_the_device_of_their_tensors(monkeypatch, index, switches):
    """Triton launches on the current device, which need not be the one that the tensors are on."""
    current = []

    @contextlib.contextmanager
    def device(which):
        current.append(which.index)
        yield

    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "device", device)
    tensor = SimpleNamespace(device=torch.device("cuda", index))
    assert _registry._on_its_device(lambda x, n: (x, n))(tensor, 3) == (tensor, 3)
    assert current == switches


def test_the_switch_is_restored_after_an_error():
    assert not _registry.triton_on_cpu_enabled()

    def fail():
        with _registry.triton_on_cpu():
            assert _registry.triton_on_cpu_enabled()
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert not _registry.triton_on_cpu_enabled()


def test_the_switch_needs_the_interpreter(monkeypatch):
    import triton

    monkeypatch.setattr(triton.knobs.runtime, "interpret", False)
    with pytest.raises(RuntimeError, match="TRITON_INTERPRET"), _registry.triton_on_cpu():
        pass
