"""Registration of operations: devices, laziness, and the switch to the interpreter."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from gpubuf.kernels import _registry
from tests.support.dispatched import Dispatched
from tests.support.interpreter import triton_on_cpu, triton_on_cpu_enabled


def given_back(*args):
    return args


@pytest.mark.parametrize(("index", "switches"), [(0, []), (1, [1]), (-1, [])])
def test_kernels_are_launched_on_the_device_of_their_tensors(monkeypatch, index, switches):
    """Triton launches on the current device, which need not be the one that the tensors are on.

    -1 stands for host memory, as in the interpreter: there is nothing to switch to.
    """
    current = []

    @contextlib.contextmanager
    def device(which):
        current.append(which)
        yield

    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "device", device)
    tensor = SimpleNamespace(get_device=lambda: index)
    assert _registry._on_its_device("tests.kernels.test_registry:given_back")(tensor, 3) == (tensor, 3)
    assert current == switches


def whether_trusted(tensor, *, trusted=False):
    return trusted


def test_a_launcher_is_told_that_its_caller_has_looked_at_the_arguments():
    tensor, here = SimpleNamespace(get_device=lambda: -1), "tests.kernels.test_registry"
    assert _registry._on_its_device(f"{here}:whether_trusted", trusted=True)(tensor) is True
    assert _registry._on_its_device(f"{here}:whether_trusted")(tensor) is False
    # One that has no checks to leave out is called as it is.
    assert _registry._on_its_device(f"{here}:given_back", trusted=True)(tensor, 3) == (tensor, 3)


def test_a_trusted_launch_looks_at_the_device_of_what_is_not_the_tree_s():
    from gpubuf.kernels import sum_tree
    from gpubuf.kernels.sum_tree import _launch

    tree, entries = sum_tree.new_tree(3, 16, "cpu"), torch.zeros(2, dtype=torch.int64)
    with FakeTensorMode():
        ring, rng = (torch.zeros(n, dtype=torch.int64, device="cuda") for n in (4, 3))
    with pytest.raises(ValueError, match="on one device"):
        _launch.update(*tree, ring, entries, torch.zeros(2), None, trusted=True)
    with pytest.raises(ValueError, match="on one device"):
        _launch.draw(*tree, rng, 2, False, trusted=True)


def test_the_switch_is_restored_after_an_error():
    assert not triton_on_cpu_enabled()

    def fail():
        with triton_on_cpu():
            assert triton_on_cpu_enabled()
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert not triton_on_cpu_enabled()


def test_the_switch_needs_the_interpreter(monkeypatch):
    import triton

    monkeypatch.setattr(triton.knobs.runtime, "interpret", False)
    with pytest.raises(RuntimeError, match="TRITON_INTERPRET"), triton_on_cpu():
        pass


def on_cpu(x: torch.Tensor, n: int) -> torch.Tensor:
    return x + n


def on_triton(x: torch.Tensor, n: int) -> torch.Tensor:
    return x - n


def test_without_dispatch():
    """The dispatcher is passed by where it has nothing to decide, and only there."""
    operation = _registry.define(
        "test_shift(Tensor x, int n) -> Tensor",
        cpu="tests.kernels.test_registry:on_cpu",
        cuda="tests.kernels.test_registry:on_triton",
        fake=lambda x, n: x.new_empty(x.shape),
    )
    call = _registry.without_dispatch(operation)
    x = torch.arange(3)
    with torch.profiler.profile(acc_events=True) as profile:
        assert call(x, 2).tolist() == [2, 3, 4]
    assert "gpubuf::test_shift" not in {event.key for event in profile.key_averages()}
    with Dispatched() as noted:
        assert call(x, 2).tolist() == [2, 3, 4]
    assert noted.calls[0][0].name() == "gpubuf::test_shift"
    with triton_on_cpu(), torch.profiler.profile(acc_events=True) as profile:
        assert call(x, 2).tolist() == [-2, -1, 0]
    assert "gpubuf::test_shift" not in {event.key for event in profile.key_averages()}
    with FakeTensorMode() as mode:
        assert call(mode.from_tensor(x), 2).shape == (3,)
        assert call(torch.empty(5, device="cuda"), 2).device.type == "cuda"
    with torch.device("meta"):
        assert call(x, 2).tolist() == [2, 3, 4]
    assert call(x.to("meta"), 2).device.type == "meta"
    compiled = torch.compile(call, fullgraph=True, backend="eager")
    assert compiled(x, 2).tolist() == [2, 3, 4]
