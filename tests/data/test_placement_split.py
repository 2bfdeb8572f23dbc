"""Rows of which the first are on the GPU and the others in pinned host memory. Here a CPU does the GPU's work."""

from __future__ import annotations

import pytest
import torch

import gpubuf
from gpubuf.data import LazyTensorStorage, PrioritizedSampler, Sampler, TensorDictReplayBuffer, moving
from gpubuf.data.storage.column import Column
from gpubuf.data.storage.placement import IndexBytes, near_steps, place
from tests.support.fake_cuda import fake_cuda
from tests.support.moved_buffers import SAMPLERS as SMALL
from tests.support.moved_buffers import alike, episodes
from tests.support.placements import GIB, Machine
from tests.support.transitions import same, transitions

CAPACITY = 200
ROW_BYTES = 58  # of `episodes`

SAMPLERS = SMALL | {
    "prioritized": lambda: PrioritizedSampler(CAPACITY, 0.6, 0.4),
    "fixed": lambda: gpubuf.SliceSampler(slice_len=4, ends=torch.arange(CAPACITY) % 7 == 6),
    "prioritized slices": lambda: gpubuf.PrioritizedSliceSampler(CAPACITY, 0.6, 0.4, slice_len=4),
}


@pytest.fixture
def machine(monkeypatch):
    """With room for 128 of the rows on the GPU, and nothing else there."""
    return Machine(device=128 * ROW_BYTES + 20).install(monkeypatch, work_on_cpu=True)


def twin(kind: str, device: str, ndim: int = 1) -> TensorDictReplayBuffer:
    sampler: Sampler = SAMPLERS[kind]()
    return TensorDictReplayBuffer(
        storage=LazyTensorStorage(CAPACITY, device=device, ndim=ndim),
        sampler=sampler,
        batch_size=8,
        generator=torch.Generator().manual_seed(3),
    )


def write(buffer: TensorDictReplayBuffer, n: int, start: int) -> None:
    data = episodes(n, start)
    buffer.extend(data if buffer.storage.ndim == 1 else data.view(2, n // 2))


# How many steps


@pytest.mark.parametrize(
    ("requested", "room", "expected"),
    [
        ("split", 10_000, 1000),
        ("split", 9_999, 960),  # 999 steps would fit
        ("split", 640, 64),
        ("split", 639, 0),
        ("split", -5, 0),
        ("split:3000", 9_999, 256),
        ("split:3KiB", 9_999, 256),
        ("split:1GB", 10_000, 1000),
        ("split:50%", 9_999, 448),
        ("split:0%", 9_999, 0),
        ("split:100%", 10_000, 1000),
    ],
)
def test_how_many_steps_are_on_the_gpu(requested, room, expected):
    assert near_steps(requested, 10_000, 1000, room) == expected


@pytest.mark.parametrize("requested", ["split:", "split:half", "split:101%", "split:-3", "split:x%", "split:1e3%"])
def test_sizes_of_no_known_form(requested):
    if requested == "split:":
        assert near_steps(requested, 10_000, 1000, 640) == 64
        return
    with pytest.raises(ValueError, match=r"expected a (share|number)"):
        near_steps(requested, 10_000, 1000, 10_000)


def test_less_room_than_was_asked_for():
    with pytest.raises(RuntimeError, match=r"puts 2.93 KiB of rows on the GPU, there is room for 2.441 KiB"):
        near_steps("split:3000", 10_000, 1000, 2500)


def test_all_or_nothing_is_no_split(machine):
    for room, kind in ((10_000, "cpu"), (639, "pinned"), (5000, "split")):
        machine.device = room + 7
        # The stand-in for the GPU is a CPU; with a GPU the first would be "cuda".
        chosen = place("split", 10_000, IndexBytes(7), (1000,), torch.device("cpu"))
        assert chosen.kind == kind


# Content


@pytest.mark.parametrize(("kind", "ndim"), [*((kind, 1) for kind in SAMPLERS), ("prioritized slices", 2)])
def test_batches_are_those_of_rows_in_one_place(machine, backend, kind, ndim):
    """Issue 4, split mode: by every sampler, while the ring fills and wraps, on both backends."""
    if backend == "triton" and (ndim == 2 or kind != "prioritized slices"):
        pytest.skip("the interpreter is slow")
    machine.device = GIB
    plain, split = twin(kind, "cpu", ndim), twin(kind, "split:65%", ndim)
    for start, n in ((0, 90), (90, 100), (190, 70)):
        for buffer in (plain, split):
            write(buffer, n, start)
        assert alike(plain, split)
    storage = split.storage
    assert storage.placement.kind == "split"
    assert storage.placement.near_steps == (128 if ndim == 1 else 64)
    assert [len(part) for part in storage.columns[0].parts] == ([128, 72] if ndim == 1 else [64, 36])
    assert sum(machine.pinned.values()) == sum(c.parts[1].nbytes for c in storage.columns)
    for index in (0, -1, slice(120, 140), slice(None), torch.tensor([0, 99, 64]) if ndim == 1 else (0, 1)):
        if ndim == 1 or not isinstance(index, tuple):
            assert same(plain[index], split[index])


# Moving


@pytest.mark.parametrize("kind", ["by identifier", "prioritized slices"])
def test_batches_go_on_while_rows_move(machine, monkeypatch, kind):
    monkeypatch.setattr(moving, "CHUNK_BYTES", 64)
    machine.device = GIB
    stays, moves = twin(kind, "cpu"), twin(kind, "cpu")
    for number, requested in enumerate(("split:40%", "pinned", "split:70%", "split:40%", "cpu")):
        for buffer in (stays, moves):
            write(buffer, 70, 70 * number)
        moves.to(requested)
        assert moves.storage.placement.kind == requested.partition(":")[0]
        assert alike(stays, moves)
        on_host = sum(c.parts[-1].nbytes for c in moves.storage.columns) if requested != "cpu" else 0
        assert sum(machine.pinned.values()) == on_host
    assert same(stays[:], moves[:])


def test_what_the_rows_take_on_the_gpu_is_room_for_them(monkeypatch):
    """On a GPU that is full of this buffer: it moves to a split that leaves half of it there."""
    Machine(device=GIB).install(monkeypatch)
    with fake_cuda():
        buffer = twin("uniform", "cuda")
        buffer.extend(transitions(CAPACITY, device="cuda"))
        Machine(device=0).install(monkeypatch)
        seen = []
        monkeypatch.setattr(moving, "_move", lambda storage, sampler, before, target, progress: seen.append(target))
        buffer.to("split:64%")
        assert (seen[0].kind, seen[0].near_steps) == ("split", 128)


# Memory


def test_memory_is_taken_once(monkeypatch):
    """On fake tensors: the first rows on the GPU, the others pinned, neither of them anywhere else."""
    machine = Machine(device=GIB).install(monkeypatch)
    torch_empty, on_device = torch.empty, []

    def empty(*size, **kwargs):
        tensor = torch_empty(*size, **kwargs)
        on_device.append(tensor.nbytes)
        return tensor

    with fake_cuda():
        storage = LazyTensorStorage(10_000, device="split:30%")
        buffer = TensorDictReplayBuffer(storage=storage, batch_size=8)
        data = transitions(40, device="cuda")
        monkeypatch.setattr(torch, "empty", empty)
        buffer.extend(data)
        near = 3000 // 64 * 64
        assert sum(machine.ever_pinned) == (10_000 - near) * 50
        assert near * 50 <= sum(on_device) < near * 50 + 1000
        assert storage.ring.device.type == storage.table.device.type == storage.device.type == "cuda"
        assert {t.device.type for t in storage.row_tensors} == {"cuda", "cpu"}
        for batch in (buffer.sample(), buffer[2:5], buffer[3]):
            assert {value.device.type for value in batch.values(True, True)} == {"cuda"}
        report = buffer.memory()
        assert (report.placement, report.rows, report.rows_on_host) == ("split", 500_000, (10_000 - near) * 50)
        assert "in pinned host memory" in str(report)
        assert "rows split" in repr(buffer)
        assert f"{near} steps on cuda" in str(storage.placement)


# States and checkpoints


@pytest.mark.parametrize(
    ("source", "target", "by"), [("split", "cpu", "state"), ("cpu", "split", "files"), ("split", "split", "files")]
)
def test_a_state_goes_from_one_placement_to_another(machine, tmp_path, source, target, by):
    for n in (40, 150, 330):
        saved, loaded = twin("slices", source), twin("slices", target)
        write(saved, n, 0)
        saved.sample()
        if by == "state":
            loaded.load_state_dict(saved.state_dict())
        else:
            saved.save(tmp_path, file_bytes=1000)
            loaded.load(tmp_path)
        assert same(saved[:], loaded[:])
        assert alike(saved, loaded)
        assert loaded.storage.placement.kind == target


def test_only_what_changed_is_saved_again(machine, tmp_path):
    buffer = twin("uniform", "split")
    write(buffer, 200, 0)
    full = buffer.save(tmp_path, file_bytes=20 * ROW_BYTES)
    write(buffer, 1, 200)
    assert buffer.save(tmp_path, file_bytes=20 * ROW_BYTES).files_written == 3  # rows, state and manifest
    buffer.storage.columns[0].parts[1].add_(1)  # rows on the host, in place: PyTorch counts it
    assert buffer.save(tmp_path, file_bytes=20 * ROW_BYTES).files_written > 3
    assert full.files_written == 12


# A column


def test_a_column_in_two_parts_is_one():
    whole = torch.arange(30.0).view(10, 3)
    column = Column(whole[:4].clone(), whole[4:].clone())
    assert (len(column), column.shape, column.dtype, column.nbytes) == (10, (10, 3), torch.float32, 120)
    for start in range(11):
        for stop in range(start, 11):
            assert torch.equal(column[start:stop], whole[start:stop])
            other = Column(torch.zeros(4, 3), torch.zeros(6, 3))
            other.write(start, whole[start:stop])
            expected = torch.zeros(10, 3)
            expected[start:stop] = whole[start:stop]
            assert torch.equal(other[0:10], expected)
    assert column[1:3].data_ptr() == column.parts[0][1:].data_ptr()
    assert column[5:9].data_ptr() == column.parts[1][1:].data_ptr()
    with pytest.raises(ValueError, match="unpack"):
        column.whole  # noqa: B018
