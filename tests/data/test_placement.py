"""Where a buffer goes: the decision on faked figures, the figures themselves, and pinned rows with a faked GPU."""

from __future__ import annotations

import logging

import numpy as np
import pytest
import torch

from gpubuf.data import (
    LazyTensorStorage,
    PrioritizedSampler,
    PrioritizedSliceSampler,
    RandomSampler,
    SamplerWithoutReplacement,
    TensorDictReplayBuffer,
    TensorStorage,
)
from gpubuf.data.storage import host_memory
from gpubuf.data.storage.column import records
from gpubuf.data.storage.host_memory import Free
from gpubuf.data.storage.layout import RowLayout
from gpubuf.data.storage.placement import IndexBytes, NothingFitsError, choose, place, readable
from tests.support.fake_cuda import fake_cuda
from tests.support.placements import GIB, Machine
from tests.support.transitions import transitions

GPU = torch.device("cuda", 0)

# The decision


@pytest.mark.parametrize(
    ("rows", "index", "free", "expected"),
    [
        (9, 1, Free(100, 10), "cuda"),
        (10, 1, Free(100, 10), "pinned"),
        (100, 10, Free(100, 10), "pinned"),
        (101, 1, Free(100, 10), "split"),
        (109, 1, Free(100, 10), "split"),
        (9, 1, Free(0, 10), "cuda"),
        (9, 1, Free(10), "cpu"),
        (0, 0, Free(0, 0), "cuda"),
    ],
)
def test_the_first_place_with_room_is_chosen(rows, index, free, expected):
    kind, why = choose(rows, index, 10, free)
    assert kind == expected
    assert readable(rows) in why
    assert readable(index) in why
    assert ("no CUDA" in why) == (expected == "cpu")


@pytest.mark.parametrize(
    ("rows", "index", "free"),
    [
        (110, 1, Free(100, 10)),  # more than GPU and host have
        (50, 11, Free(100, 10)),  # the index stays on the GPU, where it does not fit
        (10, 1, Free(10)),  # rows and index share the host
    ],
)
def test_nothing_fits(rows, index, free):
    with pytest.raises(NothingFitsError) as caught:
        choose(rows, index, 50, free)
    assert isinstance(caught.value, RuntimeError)
    assert isinstance(caught.value, MemoryError)
    text = str(caught.value)
    for said in (readable(rows), readable(index), readable(free.host), "capacity", "uint8", "LazyMemmapStorage"):
        assert said in text
    assert free.device is None or readable(free.device) in text


def test_nothing_fits_says_how_many_rows_would():
    with pytest.raises(NothingFitsError, match="about 500 rows fit"):
        choose(4000, 10, 1000, Free(2000, 10))
    with pytest.raises(NothingFitsError, match="about 0 rows fit"):
        choose(4000, 20, 1000, Free(2000, 10))


def test_a_machine_with_cuda_never_uses_pageable_memory(monkeypatch):
    """DESIGN.md 4: never pageable memory silently."""
    for host in (0, 10 * GIB, 1000 * GIB):
        machine = Machine(host=host, device=GIB).install(monkeypatch)
        monkeypatch.setattr("gpubuf.data.storage.placement.named", lambda requested: torch.device("cuda", 0))
        assert machine.device is not None
        for rows in (1, GIB // 2, 2 * GIB, 100 * GIB):
            try:
                chosen = place("auto", rows, IndexBytes(), (100,), torch.device("cpu"))
            except NothingFitsError:
                assert rows > machine.host + machine.device
            else:
                assert chosen.kind == ("cuda" if rows <= GIB else "pinned" if rows <= machine.host else "split")
                assert chosen.device.type == "cuda"


def test_the_choice_is_said_once(monkeypatch, caplog):
    Machine(device=None).install(monkeypatch)
    caplog.set_level(logging.INFO, "gpubuf")
    storage = LazyTensorStorage(10, device="auto")
    with pytest.raises(RuntimeError, match="decided by the first write"):
        storage.device  # noqa: B018
    buffer = TensorDictReplayBuffer(storage=storage, batch_size=2)
    for _ in range(3):
        buffer.extend(transitions(4))
        buffer.sample()
    (record,) = caplog.records
    assert record.name == "gpubuf"
    assert "no CUDA device" in record.getMessage()
    assert storage.device == storage.rows_device == torch.device("cpu")
    assert "no CUDA device" in str(storage.placement)


def test_rows_that_do_not_fit_on_the_gpu_are_a_warning(monkeypatch, caplog):
    Machine(device=GIB, host=100 * GIB).install(monkeypatch)
    with fake_cuda():
        chosen = place("auto", 10 * GIB, IndexBytes(), (1000,), torch.device("cpu"))
    assert chosen.kind == "pinned"
    (record,) = caplog.records
    assert record.levelno == logging.WARNING


def test_auto_counts_what_the_sampler_takes(monkeypatch):
    """Rows alone would fit on the GPU; with tree and index they don't."""
    data = transitions(4)
    row_bytes = sum(data[key][0].nbytes for key in data.keys(True, True))
    with fake_cuda():
        for make, kind in ((RandomSampler, "cuda"), (lambda: PrioritizedSampler(1000, 0.6, 0.4), "pinned")):
            machine = Machine(device=1000 * row_bytes).install(monkeypatch)
            buffer = TensorDictReplayBuffer(
                storage=LazyTensorStorage(1000, device="auto"), sampler=make(), batch_size=2
            )
            buffer.extend(transitions(4))
            placement = buffer.storage.placement
            assert (placement.kind, placement.device.type) == (kind, "cuda")
            assert bool(machine.ever_pinned) == (kind == "pinned")


def test_auto_fills_the_gpu_where_neither_has_room(monkeypatch):
    """As many rows as fit beside the index lie on the GPU, the others on the host."""
    data = transitions(4)
    row_bytes = sum(data[key][0].nbytes for key in data.keys(True, True))
    machine = Machine(device=600 * row_bytes, host=600 * row_bytes).install(monkeypatch)
    with fake_cuda():
        buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(1000, device="auto"), batch_size=2)
        buffer.extend(transitions(4))
        assert (buffer.storage.placement.kind, buffer.storage.placement.device.type) == ("split", "cuda")
        # A multiple of SPLIT_STEPS.
        assert buffer.storage.placement.near_steps == 600 // 64 * 64
    assert sum(machine.ever_pinned) >= 400 * row_bytes


def test_nothing_is_left_behind_where_nothing_fits(monkeypatch):
    Machine(host=10, device=None).install(monkeypatch)
    storage = LazyTensorStorage(10, device="auto")
    with pytest.raises(NothingFitsError):
        storage.append(transitions(3))
    assert not storage.initialized
    Machine(device=None).install(monkeypatch)
    storage.append(transitions(3))
    assert len(storage) == 3


@pytest.mark.parametrize("device", ["cuda", "pinned", torch.device("cuda", 0)])
def test_what_was_asked_for_and_is_not_there(device):
    if torch.cuda.is_available():
        pytest.skip("this machine has it")
    with pytest.raises(RuntimeError, match="was asked for, but this machine has no cuda"):
        LazyTensorStorage(10, device=device).append(transitions(3))
    with pytest.raises(RuntimeError, match="was asked for"):
        TensorStorage(transitions(3), device=device)


def test_a_given_tensor_stays_where_it_is_by_auto():
    data = transitions(5)
    storage = TensorStorage(data, device="auto")
    assert storage.placement.kind == "cpu"
    assert storage.row_tensors[0].data_ptr() == data["observation"].data_ptr()


# Memory figures


def machine_files(root, available, groups):
    """``/proc`` and ``/sys`` of a machine under ``root``."""
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/meminfo").write_text(f"MemTotal: 1000 kB\nMemFree: 1 kB\nMemAvailable: {available} kB\n\n")
    memberships = []
    for number, (line, files) in enumerate(groups.items()):
        memberships.append(f"{0 if line.startswith(':') else number + 1}:{line}")
        for name, text in files.items():
            path = root / "sys/fs/cgroup" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
    (root / "proc/self/cgroup").write_text("".join(f"{membership}\n" for membership in memberships))


V2 = {
    "a/memory.max": "max\n",
    "a/memory.current": "5\n",
    "a/memory.stat": "inactive_file 0\n",
    "a/b/memory.max": "409600\n",
    "a/b/memory.current": "204800\n",
    "a/b/memory.stat": "anon 1\ninactive_file 102400\n",
}
V1 = {
    "memory/memory.limit_in_bytes": "102400\n",
    "memory/memory.usage_in_bytes": "2048\n",
    "memory/memory.stat": "total_inactive_file 1024\n",
}


@pytest.mark.parametrize(
    ("available", "groups", "expected"),
    [
        (500, {}, (500 * 1024, 1000 * 1024)),
        (500, {":/a/b": V2}, (300 * 1024, 400 * 1024)),
        (200, {":/a/b": V2}, (200 * 1024, 400 * 1024)),
        (500, {"cpu:/x": {}, "memory:/not/seen/from/inside": V1}, (99 * 1024, 100 * 1024)),
    ],
)
def test_host_memory(tmp_path, available, groups, expected):
    """What a control group leaves counts, not what the machine has: containers are killed at their own limit."""
    machine_files(tmp_path, available, groups)
    assert host_memory.host_memory(tmp_path) == expected


def test_a_tenth_is_left_to_others(monkeypatch):
    monkeypatch.setattr(host_memory, "host_memory", lambda: (500, 1000))
    monkeypatch.setattr(host_memory, "device_memory", lambda device: (50, 600))
    monkeypatch.setattr(host_memory, "cuda_present", lambda: True)
    assert host_memory.free() == Free(400, 0)
    monkeypatch.setattr(host_memory, "cuda_present", lambda: False)
    assert host_memory.free() == Free(400, None)


def test_what_the_allocator_has_cached_is_free(monkeypatch):
    for name, value in {"mem_get_info": (100, 1000), "memory_reserved": 70, "memory_allocated": 50}.items():
        monkeypatch.setattr(torch.cuda, name, lambda device, value=value: value)
    assert host_memory.device_memory() == (120, 1000)


def test_pinned_memory_is_exactly_as_large_as_asked_for_and_released(monkeypatch):
    """PyTorch's own pinned allocator rounds up to a power of two."""
    machine = Machine().install(monkeypatch)
    array = host_memory.pinned(1000, GPU)
    view = torch.from_numpy(array).view(torch.float32)
    assert machine.pinned == {view.data_ptr(): 1000}
    del array
    assert machine.pinned
    del view
    assert machine.pinned == {}
    assert host_memory.pinned(0, GPU).size == 0


# Pinned rows


@pytest.mark.parametrize("kind", ["without replacement", "prioritized slices"])
def test_pinned_rows_under_a_faked_gpu(monkeypatch, kind):
    """CASES 27: rows in host memory, once; all else on the GPU, where batches come out. Nothing synchronises."""
    machine = Machine().install(monkeypatch)
    on_device, on_host, torch_empty, numpy_empty = [], [], torch.empty, np.empty

    def empty(*size, **kwargs):
        tensor = torch_empty(*size, **kwargs)
        on_device.append(tensor.nbytes)
        return tensor

    def host_empty(size, dtype):
        on_host.append(size * np.dtype(dtype).itemsize)
        return numpy_empty(size, dtype)

    with fake_cuda():
        data = transitions(40, device="cuda")
        leaves = RowLayout(data, 1).leaves
        due = sorted(1000 * sum(leaves[position].row_bytes for position in record) for record in records(leaves))
        assert sum(due) == sum(1000 * data[key][0].nbytes for key in data.keys(True, True))
        sampler = SamplerWithoutReplacement()
        if "slices" in kind:
            sampler = PrioritizedSliceSampler(1000, 0.6, 0.4, slice_len=4)
        buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(1000, device="pinned"), sampler=sampler, batch_size=8)
        monkeypatch.setattr(torch, "empty", empty)
        monkeypatch.setattr(np, "empty", host_empty)
        buffer.extend(data)
        assert sorted(on_host) == sorted(machine.ever_pinned) == due
        assert sum(on_device) < sum(due) / 4
        storage = buffer.storage
        assert {t.device.type for t in storage.row_tensors} == {"cpu"}
        assert storage.rows_device.type == "cpu"
        assert storage.device.type == storage.ring.device.type == storage.table.device.type == "cuda"
        for batch in (buffer.sample(), buffer[torch.tensor([1, 2], device="cuda")], buffer[2:5], buffer[3]):
            assert {value.device.type for value in batch.values(True, True)} == {"cuda"}
        assert buffer[2:5].batch_size == (3,)
        assert buffer[3].batch_size == ()
        buffer.extend(transitions(3))
        buffer[torch.tensor([0], device="cuda")] = transitions(1)
        if "prioritized" in kind:
            assert sampler.tree.device.type == "cuda"
            buffer.update_priority(torch.tensor([1], device="cuda"), 2.0)
        if "slices" in kind:
            assert sampler.trajectory_index.ends.device.type == "cuda"
        report = buffer.memory()
        assert (report.placement, report.rows) == ("pinned", sum(due))
        assert "pinned host memory" in str(report)
        assert "rows pinned" in repr(buffer)
        assert "pinned host memory" in str(storage.placement)
