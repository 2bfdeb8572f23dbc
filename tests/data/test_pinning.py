"""Pinned batches: every tensor, after all transforms, whatever device a TensorDict claims.

Registered host memory: what is asked of CUDA, what a refusal leaves behind, and when it is given back.
"""

from __future__ import annotations

import ctypes
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from tensordict import TensorDict, tensorclass
from torch import Tensor

from gpubuf import (
    LazyTensorStorage,
    PrioritizedSampler,
    ReplayBuffer,
    TensorDictReplayBuffer,
)
from gpubuf.data import pinning
from gpubuf.data.pinning import pin, tensors_of
from gpubuf.data.recording import capture_under_way
from gpubuf.data.storage import host_memory
from tests.support.transitions import same, transitions


class Pair(NamedTuple):
    a: Tensor
    b: Tensor


@tensorclass
class Step:
    observation: Tensor
    reward: Tensor


@pytest.fixture
def accelerator(monkeypatch):
    """A machine with an accelerator, on which pinning copies and is remembered. Returns the count of copies."""
    pinned: dict[int, Tensor] = {}  # alive, so that no other tensor gets the same id

    def pin_memory(self):
        copy = self.clone()
        pinned[id(copy)] = copy
        return copy

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(Tensor, "pin_memory", pin_memory)
    monkeypatch.setattr(Tensor, "is_pinned", lambda self: id(self) in pinned)
    return pinned


def all_pinned(*data) -> bool:
    return all(tensor.is_pinned() for tensor in tensors_of(data))


def rebuilt(batch: TensorDict) -> TensorDict:
    """A transform that builds a TensorDict without a device, out of tensors of its own."""
    return TensorDict({"x": batch["observation"] * 2, "deep": {"er": batch["next", "observation"] + 1}}, [len(batch)])


@pytest.mark.parametrize("transform", [None, rebuilt, lambda batch: batch], ids=["none", "rebuilt", "identity"])
def test_every_tensor_is_pinned_after_the_transforms(accelerator, transform):
    """CASES 26: a transform that builds a TensorDict without a device; index and weights are pinned too."""
    storage = LazyTensorStorage(20)
    buffer = TensorDictReplayBuffer(
        storage=storage,
        sampler=PrioritizedSampler(20, 0.5, 0.5),
        pin_memory=True,
        batch_size=6,
        transform=transform,
    )
    buffer.extend(transitions(10))
    seen = []
    buffer.append_transform(lambda batch: (seen.append(all_pinned(batch)), batch)[1])
    for include_info in (True, False):
        batch, info = buffer.sample(return_info=True, include_info=include_info)
        assert all_pinned(batch, info)
        assert {"index", "priority_weight", "index_generation"} <= set(info)
        assert ("index" in batch.keys()) == include_info
        if transform is rebuilt:
            assert batch.device is None
            assert torch.equal(batch["x"][:, 0].long(), 2 * info["index"])
            assert torch.equal(batch["deep", "er"][:, 0].long(), info["index"] + 2)
        if include_info:
            assert batch["index"] is info["index"]
    assert not any(seen)


def test_plain_buffers_and_collated_batches(accelerator):
    buffer = ReplayBuffer(
        storage=LazyTensorStorage(20),
        pin_memory=True,
        batch_size=4,
        collate_fn=lambda td: Pair(td["observation"], td["action"]),
    )
    buffer.extend(transitions(10))
    batch, info = buffer.sample(return_info=True)
    assert isinstance(batch, Pair)
    assert all_pinned(batch, info)
    assert torch.equal(batch.a[:, 0].long(), info["index"])


def test_structures_keep_their_types(accelerator):
    shared = torch.arange(3)
    step = Step(observation=torch.ones(3, 2), reward=torch.zeros(3), batch_size=[3])
    named = TensorDict({"x": torch.ones(3), "name": "text"}, [3], device="cpu")
    data = [step, (shared, {"again": shared}), Pair(torch.ones(1), torch.ones(1)), named, "text", 3]
    out = pin(data)
    assert isinstance(out[0], Step)
    assert isinstance(out[2], Pair)
    assert out[1][0] is out[1][1]["again"]
    assert out[3]["name"] == "text"
    assert out[3].device == torch.device("cpu")
    assert out[4:] == ["text", 3]
    assert all_pinned(out)
    assert not any(t.is_pinned() for t in tensors_of(data))
    assert len(list(tensors_of(out))) == 7


def test_tensors_on_a_gpu_stay(accelerator):
    meta = torch.empty(3, device="meta")  # stands for any other device
    assert pin(TensorDict({"x": meta}, [3]))["x"] is meta
    assert not accelerator


def test_without_an_accelerator_one_warning(monkeypatch):
    monkeypatch.setattr(pinning, "_warned", False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(4), pin_memory=True)
    buffer.extend(transitions(4))
    with pytest.warns(UserWarning, match="accelerator"):
        batch = buffer.sample(2)
    assert same(batch, transitions(4)[batch["index"]])
    buffer.sample(2)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_a_gpu():
    """CASES 26, for real."""
    buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(20), pin_memory=True, batch_size=6, transform=rebuilt)
    buffer.extend(transitions(10))
    for _ in range(4):
        batch, info = buffer.sample(return_info=True)
        assert all_pinned(batch, info)
        assert batch["x"].is_pinned()
        assert torch.equal(batch["x"][:, 0].long(), 2 * info["index"])


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
