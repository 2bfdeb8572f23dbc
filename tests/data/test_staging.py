"""Batches that come from the host: what the caller may do with them while the GPU has not read them yet."""

from __future__ import annotations

from typing import ClassVar

import pytest
import torch
from tensordict import TensorDict

from gpubuf.data import LazyTensorStorage, RandomSampler, TensorDictReplayBuffer
from gpubuf.data.storage import host_memory
from tests.support.late_gpu import GPU, LateGpu
from tests.support.transitions import same, transitions


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> LateGpu:
    return LateGpu(monkeypatch)


def storage_on(rows: TensorDict, capacity: int, ndim: int = 1) -> LazyTensorStorage:
    """A storage that takes its rows from another device than the CPU; the rows themselves are on the CPU."""
    storage = LazyTensorStorage(capacity, ndim=ndim)
    storage.initialize(rows)
    storage.rows.device = GPU
    return storage


def stored(storage: LazyTensorStorage, n: int) -> TensorDict:
    storage.rows.device = torch.device("cpu")
    return storage[:n]


@pytest.mark.parametrize("limit", [0, host_memory.STAGED_BYTES], ids=["one by one", "packed"])
@pytest.mark.parametrize("pinned", [False, True])
def test_a_source_is_reused_before_the_gpu_has_read_it(gpu, monkeypatch, pinned, limit):
    """Case 51: the loop that fills the same pinned tensors again as soon as `extend` returns."""
    monkeypatch.setattr(host_memory, "STAGED_BYTES", limit)
    source = transitions(10).contiguous().apply(gpu.pin if pinned else torch.clone)
    storage = storage_on(source, 40)
    for step in range(4):
        source.update_(transitions(10, 10 * step))
        storage.append(source)
    source.update_(transitions(10, 1000))
    gpu.synchronize()
    assert same(stored(storage, 40), transitions(40))
    # Packed, nothing waits for the GPU.
    assert bool(gpu.waits) == (pinned and limit == 0)


def test_a_batch_is_one_copy(gpu):
    """Instead of one a key, whatever their dtypes, strides and sizes; two batch dimensions too."""
    data = transitions(12).view(4, 3)
    data["empty"] = torch.zeros(4, 3, 0)
    data["strided"] = torch.arange(48.0).view(4, 4, 3).transpose(1, 2)[..., 1]
    storage = storage_on(data, 12, ndim=2)
    storage.append(data)
    assert len(gpu.queue) == 2
    gpu.synchronize()
    assert same(stored(storage, 4), data)


def test_pinned_parts_of_a_batch_that_is_elsewhere_are_waited_for(gpu):
    there = torch.zeros(3, device="meta")  # stands for any other device
    here = gpu.pin(torch.ones(3))
    arrived = host_memory.to_device([here, there], torch.device("meta", 1))
    assert [t.device.type for t in arrived] == ["meta"] * 2
    assert not gpu.queue


def test_gradients_end_where_a_batch_is_packed(gpu):
    """And tensors of inference mode, expanded ones, and ones without elements are packed as others are."""
    with torch.inference_mode():
        inferred = torch.arange(3)
    sources = [torch.ones(3, requires_grad=True), inferred, torch.ones(1, 2).expand(3, 2), torch.zeros(3, 0)]
    arrived = host_memory.to_device(sources, GPU)
    gpu.synchronize()
    assert not any(t.requires_grad for t in arrived)
    assert all(torch.equal(a, b) for a, b in zip(arrived, sources, strict=True))


def test_what_is_there_already_is_left_alone(gpu):
    sources = [torch.ones(3), torch.zeros(2)]
    assert host_memory.to_device(sources, torch.device("cpu")) is sources


class Event:
    """Of a GPU that is late: what was recorded is done when the test says so."""

    late = False
    recorded: ClassVar[list[Event]] = []

    def query(self) -> bool:
        return not (self.late and self in self.recorded)

    def record(self) -> None:
        self.recorded.append(self)


def test_kept_memory_is_not_written_to_before_it_was_read(monkeypatch):
    """Case 51: batches of one form find their memory again, and other memory where the GPU is too late for that."""
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(host_memory, "staging", lambda n_bytes: torch.empty(n_bytes, dtype=torch.uint8))
    monkeypatch.setattr(Event, "recorded", [])
    monkeypatch.setattr(Event, "late", True)
    rows = [torch.arange(6.0).view(3, 2), torch.tensor([True, False, True]), torch.zeros(3, 0)]
    kept = host_memory.KeptMemory(rows, torch.device("cpu"))
    first = kept.copied(rows)
    assert first is not None
    assert all(torch.equal(a, b) for a, b in zip(first, rows, strict=True))
    # Arrived where the first did: on the stream, what read those has been launched before.
    for number in range(1, 4):
        others = [rows[0] + number, ~rows[1], rows[2]]
        arrived = kept.copied(others)
        assert arrived is not None
        assert all(torch.equal(a, b) for a, b in zip(arrived, others, strict=True))
        assert arrived[0].data_ptr() == first[0].data_ptr()
    held = [memory.clone() for memory, _, _ in kept._slots]
    assert kept.copied(rows) is None
    assert all(torch.equal(memory, before) for (memory, _, _), before in zip(kept._slots, held, strict=True))
    del Event.recorded[0]
    arrived = kept.copied(rows)
    assert arrived is not None
    assert torch.equal(arrived[0], rows[0])
    assert kept.copied(rows) is None


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_small_batches_find_their_memory_again_on_a_gpu():
    """From two streams, in inference mode and out of it, behind a GPU that is far behind; nothing waits."""
    storage = LazyTensorStorage(4000, device="cuda")
    buffer = TensorDictReplayBuffer(storage=storage, sampler=RandomSampler(), batch_size=8)
    other = torch.cuda.Stream()
    with torch.inference_mode():
        buffer.extend(transitions(10))
    for step in range(1, 400):
        stream = other if step % 3 == 0 else torch.cuda.current_stream()
        if step == 8:
            torch.cuda._sleep(200_000_000)
            torch.cuda.set_sync_debug_mode("error")
        with torch.cuda.stream(stream):
            buffer.extend(transitions(10, 10 * step))
        torch.cuda.current_stream().wait_stream(other)
        other.wait_stream(torch.cuda.current_stream())
    torch.cuda.set_sync_debug_mode("default")
    assert same(buffer[:].cpu(), transitions(4000))
    assert len(host_memory._kept.by_form) >= 2


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("limit", [0, host_memory.STAGED_BYTES], ids=["one by one", "packed"])
@pytest.mark.parametrize("place", ["cuda", "pinned"])
def test_a_pinned_source_is_reused_on_a_gpu(monkeypatch, place, limit):
    """Case 51, for real: with the GPU far behind, and memory that PyTorch gives out again."""
    monkeypatch.setattr(host_memory, "STAGED_BYTES", limit)
    storage = LazyTensorStorage(4000, device=place)
    buffer = TensorDictReplayBuffer(storage=storage, sampler=RandomSampler(), batch_size=8)
    source = transitions(100).apply(lambda t: t.contiguous().pin_memory())
    source.clear_device_()
    buffer.extend(transitions(100, 3900).to("cuda"))
    buffer.empty()
    torch.cuda._sleep(200_000_000)
    for step in range(40):
        source.update_(transitions(100, 100 * step))
        buffer.extend(source)
    source.update_(transitions(100, 10**6))
    assert same(buffer[:].cpu(), transitions(4000))
