"""Moving and freeing a buffer while it is in use."""

from __future__ import annotations

import threading
import weakref

import pytest
import torch
from tensordict import TensorDict

from gpubuf.data import (
    LazyMemmapStorage,
    LazyTensorStorage,
    TensorDictReplayBuffer,
    moving,
)
from gpubuf.data.storage import placement
from gpubuf.data.storage.column import records
from gpubuf.kernels import rows
from tests.support.moved_buffers import SAMPLERS, alike, episodes
from tests.support.placements import Machine
from tests.support.transitions import same, transitions


def twin(kind: str, ndim: int = 1, **storage) -> TensorDictReplayBuffer:
    return TensorDictReplayBuffer(
        storage=LazyTensorStorage(60, ndim=ndim, **storage),
        sampler=SAMPLERS[kind](),
        batch_size=8,
        generator=torch.Generator().manual_seed(3),
    )


def write(buffer: TensorDictReplayBuffer, n: int, start: int) -> None:
    data = episodes(n, start)
    buffer.extend(data if buffer.storage.ndim == 1 else data.view(2, n // 2))


@pytest.fixture
def machine(monkeypatch):
    """Pinned memory is memory that says it is pinned; the CPU does the GPU's work."""
    return Machine().install(monkeypatch, work_on_cpu=True)


@pytest.mark.parametrize(("kind", "ndim"), [*((kind, 1) for kind in SAMPLERS), ("prioritized slices", 2)])
def test_batches_go_on_as_if_nothing_had_happened(machine, monkeypatch, kind, ndim):
    monkeypatch.setattr(moving, "CHUNK_BYTES", 64)
    stays, moves = twin(kind, ndim), twin(kind, ndim)
    for start, n in ((0, 40), (40, 30)):
        for buffer in (stays, moves):
            write(buffer, n, start)
        for place in ("pinned", "cpu"):
            assert alike(stays, moves)
            before = [t.data_ptr() for t in moves.storage.row_tensors]
            assert moves.to(place) is moves
            assert all(a != t.data_ptr() for a, t in zip(before, moves.storage.row_tensors, strict=True))
            assert moves.storage.placement.kind == place
            assert sum(machine.pinned.values()) == (moves.storage.nbytes if place == "pinned" else 0)
    for buffer in (stays, moves):
        write(buffer, 30, 70)
    assert alike(stays, moves)
    assert same(stays[:], moves[:])


@pytest.mark.parametrize("kind", SAMPLERS)
def test_to_another_device(monkeypatch, kind):
    """What is not rows is made anew there. The other device is the CPU by another name, "cpu:0"."""
    monkeypatch.setattr(placement, "named", lambda requested: torch.device(requested))
    stays, moves = twin(kind), twin(kind)
    for buffer in (stays, moves):
        write(buffer, 75, 0)
    assert alike(stays, moves)
    parts = {name: part for name in ("_tree", "_index", "_eligible") if (part := getattr(moves.sampler, name, None))}
    counters = moves.storage.ring
    moves.to("cpu:0")
    assert str(moves.storage.device) == str(moves.storage.rows_device) == "cpu:0"
    assert not [name for name, part in parts.items() if getattr(moves.sampler, name) is part]
    assert torch.equal(moves.storage.ring, counters)
    assert alike(stays, moves)
    for buffer in (stays, moves):
        write(buffer, 30, 75)
    assert alike(stays, moves)


@pytest.mark.parametrize("prefetch", [0, 3])
def test_while_another_thread_samples(machine, prefetch):
    """CASES 32: batches are whole, and carry what was written at their index."""
    buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(500), batch_size=64, prefetch=prefetch)
    buffer.extend(transitions(500))
    enough, stop, wrong = threading.Semaphore(0), threading.Event(), []

    def sample():
        while not stop.is_set():
            batch = buffer.sample()
            if not same(batch.exclude("index"), transitions(500)[batch["index"]]):
                wrong.append(batch)
            enough.release()

    thread = threading.Thread(target=sample)
    thread.start()
    try:
        for place in ("pinned", "cpu") * 5:
            assert enough.acquire(timeout=30)
            buffer.to(place)
        for _ in range(20):
            assert enough.acquire(timeout=30)
    finally:
        stop.set()
        thread.join()
    assert not wrong


def test_records_are_released_one_by_one(machine, monkeypatch):
    """No second full copy: when a record is allocated, those before it have left their old place."""
    buffer = twin("uniform", device="pinned")
    write(buffer, 30, 0)
    of_keys = [t.nbytes for t in buffer.storage.row_tensors]
    sizes = [sum(of_keys[key] for key in record) for record in records(buffer.storage.layout.leaves)]
    assert len(sizes) < len(of_keys)
    assert sum(machine.pinned.values()) == sum(sizes)
    allocate, left = moving.new_record, []

    def watched(*arguments):
        left.append(sum(machine.pinned.values()))
        return allocate(*arguments)

    monkeypatch.setattr(moving, "new_record", watched)
    buffer.to("cpu")
    assert left == [sum(sizes[key:]) for key in range(len(sizes))]
    assert machine.pinned == {}


def test_only_rows_that_are_stored_are_copied_in_chunks(machine, monkeypatch, capsys):
    monkeypatch.setattr(moving, "CHUNK_BYTES", 16)
    copied = []
    buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(1000), batch_size=4)
    buffer.extend(TensorDict({"x": torch.arange(10.0), "wide": torch.zeros(10, 9)}, [10]))
    monkeypatch.setattr("gpubuf.terminal.show_nothing", copied.append)
    buffer.to("pinned")
    assert copied == [16, 16, 8, *[36] * 10]
    assert capsys.readouterr().err == ""
    assert buffer[:]["x"].tolist() == list(range(10))


def test_progress(machine, capsys):
    pytest.importorskip("rich")
    buffer = twin("uniform")
    write(buffer, 30, 0)
    buffer.to("pinned", progress=True)
    assert "to pinned" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("kind", "where"), [("slices", "allocation"), ("prioritized", "sampler"), ("prioritized slices", "sampler")]
)
def test_a_move_that_fails_leaves_everything_where_it_was(machine, monkeypatch, kind, where):
    stays, moves = twin(kind), twin(kind)
    for buffer in (stays, moves):
        write(buffer, 75, 0)
    allocate, calls = moving.new_record, []
    move = type(moves.sampler).move

    def scarce(*arguments):
        calls.append(arguments)
        if len(calls) == 4 and where == "allocation":
            raise RuntimeError("out of memory")
        return allocate(*arguments)

    def failing(self):
        move(self)
        if moves.storage.placement.kind == "pinned" and where == "sampler":
            raise RuntimeError("out of memory")

    monkeypatch.setattr(moving, "new_record", scarce)
    monkeypatch.setattr(type(moves.sampler), "move", failing)
    with pytest.raises(RuntimeError, match="out of memory"):
        moves.to("pinned")
    assert moves.storage.placement.kind == "cpu"
    assert machine.pinned == {}
    for buffer in (stays, moves):
        write(buffer, 10, 75)
    assert alike(stays, moves)


def test_before_the_first_write_a_move_is_a_decision(machine):
    buffer = twin("uniform").to("pinned")
    assert not buffer.initialized
    write(buffer, 10, 0)
    assert buffer.storage.placement.kind == "pinned"
    buffer.to("pinned")
    buffer.free()
    write(buffer, 10, 0)
    assert buffer.storage.placement.kind == "pinned"


def test_what_can_not_be_moved(tmp_path):
    buffer = twin("uniform")
    write(buffer, 10, 0)
    with pytest.raises(ValueError, match="'auto' is for new ones"):
        buffer.to("auto")
    if not torch.cuda.is_available():
        with pytest.raises(RuntimeError, match="was asked for"):
            buffer.to("pinned")
    mapped = TensorDictReplayBuffer(storage=LazyMemmapStorage(10, scratch_dir=tmp_path / "rows"))
    mapped.extend(episodes(3))
    with pytest.raises(NotImplementedError, match="stay where they are"):
        mapped.to("cuda")
    with pytest.raises(NotImplementedError, match="keeps its rows"):
        mapped.free()
    assert len(mapped) == 3
    assert mapped.memory().placement == "disk"
    assert "in mapped files" in str(mapped.memory())


# Freeing


@pytest.mark.parametrize("kind", SAMPLERS)
def test_a_freed_buffer_has_no_memory_and_can_be_used_again(kind):
    buffer, fresh = twin(kind), twin(kind)
    assert buffer.memory().total == 0
    assert "nothing is allocated" in str(buffer.memory())
    write(buffer, 75, 0)
    buffer.sample()
    held = [weakref.ref(t) for t in buffer.storage.row_tensors]
    parts = (getattr(buffer.sampler, name, None) for name in ("_tree", "_index"))
    held += [weakref.ref(part) for part in parts if part is not None]
    assert buffer.memory().rows > 0
    overwrites = buffer.storage.overwrites
    buffer.free()
    buffer.free()
    assert buffer.storage.overwrites > overwrites  # an incremental checkpoint sees that
    assert not [ref() for ref in held if ref() is not None]
    assert buffer.memory().total == 0
    assert len(buffer) == 0
    with pytest.raises(RuntimeError):
        buffer.sample()
    # The random stream goes on; set it back to compare.
    buffer.set_rng(torch.Generator().manual_seed(3))
    for each in (buffer, fresh):
        write(each, 35, 100)
    assert alike(buffer, fresh)


def test_faults_of_before_don_t_keep_the_memory():
    buffer = twin("prioritized")
    write(buffer, 75, 0)
    buffer.storage.ring[3] = 2
    with pytest.raises(IndexError, match="2 rows"):
        buffer.free()
    assert buffer.memory().total == 0
    write(buffer, 10, 0)
    assert int((buffer.sampler.tree.leaves > 0).sum()) == 10


def test_other_rows_may_follow():
    buffer = twin("uniform", ndim=2)
    buffer.extend(TensorDict({"x": torch.zeros(7, 2)}, [7, 2]))
    assert buffer.storage.max_size == 63
    buffer.free()
    assert buffer.storage.max_size == 60
    buffer.extend(TensorDict({"y": torch.ones(2, 3, dtype=torch.int64)}, [2, 3]))
    assert tuple(buffer.storage.shape) == (30, 2)
    assert buffer.sample()["y"].tolist() == [1] * 8


def test_priorities_of_before_are_recognised_as_late():
    """CASES 12: the row that a priority was meant for is gone, though another is in its place."""
    buffer = twin("prioritized")
    write(buffer, 75, 0)
    batch, info = buffer.sample(return_info=True)
    buffer.free()
    write(buffer, 60, 100)
    before = buffer.sampler.tree.leaves.clone()
    buffer.update_priority(info["index"], 50.0, generation=info["index_generation"])
    assert torch.equal(buffer.sampler.tree.leaves, before)
    assert batch.numel() == 8


def test_memory_report():
    buffer = twin("prioritized slices")
    write(buffer, 30, 0)
    buffer.sample()
    taken = buffer.memory()
    tree, index = buffer.sampler.tree, buffer.sampler.trajectory_index
    assert taken.tree == tree.nbytes
    assert taken.index == index.nbytes + 8
    assert taken.counters == 32 + 8 * rows.ENTRY * len(buffer.storage.layout.leaves) + 24
    assert str(taken).splitlines()[0] == "rows      3.398 KiB on cpu"
    assert "3.398 KiB" in repr(buffer)
