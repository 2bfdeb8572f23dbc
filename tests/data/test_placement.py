"""Where a buffer goes: the decision on faked figures, the figures themselves, and pinned rows with a faked GPU.

Moving and freeing a buffer while it is in use.
"""

from __future__ import annotations

import copy
import itertools
import logging
import threading

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from gpubuf.data import (
    LazyMemmapStorage,
    LazyTensorStorage,
    PrioritizedSampler,
    PrioritizedSliceSampler,
    RandomSampler,
    ReplayBuffer,
    SamplerWithoutReplacement,
    TensorDictReplayBuffer,
    TensorStorage,
    Window,
    moving,
)
from gpubuf.data.storage import column, host_memory
from gpubuf.data.storage.column import records
from gpubuf.data.storage.host_memory import Free
from gpubuf.data.storage.placement import IndexBytes, NothingFitsError, choose, near_steps, place, readable
from tests.support.fake_cuda import fake_cuda
from tests.support.moved_buffers import SAMPLERS, alike, episodes
from tests.support.placements import GIB, Machine
from tests.support.transitions import same, transitions

GPU = torch.device("cuda", 0)

# The decision


@pytest.mark.parametrize("gpu", [None, 0, 10, 21])
def test_where_a_buffer_goes(gpu):
    """DESIGN.md 4: the first place with room, never pageable memory where there is CUDA; or what would have fitted."""
    for rows, index, host in itertools.product((0, 9, 10, 11, 99, 100, 101, 109, 110), (0, 1, 10, 11), (0, 10, 100)):
        beside = gpu is not None and index <= gpu
        places = {
            "cuda": beside and rows + index <= gpu,
            "pinned": beside and rows <= host,
            "split": beside and rows + index <= gpu + host,
            "cpu": gpu is None and rows + index <= host,
        }
        said = [readable(rows), readable(index)]
        if any(places.values()):
            kind, text = choose(rows, index, 50, Free(host, gpu))
            assert kind == next(place for place, fits in places.items() if fits)
            assert ("no CUDA" in text) == (kind == "cpu")
        else:
            with pytest.raises(NothingFitsError) as caught:
                choose(rows, index, 50, Free(host, gpu))
            assert {MemoryError, RuntimeError} <= {*type(caught.value).__mro__}
            text, room = str(caught.value), host - index + (gpu or 0) if beside or gpu is None else 0
            fitting = min(max(room, 0) * 50 // max(rows, 1), 50)
            said += [f"about {fitting} rows fit", readable(host), "uint8", "LazyMemmapStorage"]
            said += [] if gpu is None else [readable(gpu)]
        assert all(words in text for words in said), (rows, index, host)


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
    (record,) = [each for each in caplog.records if "replay buffer of" in each.getMessage()]
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


def test_what_the_host_has_no_memory_for_is_refused_before_it_is_touched(monkeypatch, tmp_path):
    """Linux gives out more memory than there is, and kills the process when it is used."""
    monkeypatch.setattr(host_memory, "host_memory", lambda: (1 << 33, 1 << 34))
    data = TensorDict({"a": torch.zeros(4, 1 << 20)}, [4])
    buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(1 << 12), batch_size=2)
    with pytest.raises(NothingFitsError, match=r"4096 rows for device='cpu' takes 16 GiB, there are 8 GiB free"):
        buffer.extend(data)
    assert not buffer.initialized
    # Rows in files are not in memory.
    mapped = TensorDictReplayBuffer(storage=LazyMemmapStorage(1 << 12, scratch_dir=tmp_path), batch_size=2)
    mapped.extend(data)
    small = TensorDictReplayBuffer(storage=LazyTensorStorage(8))
    small.extend(data)
    for n, batches in [(1 << 17, None), (1 << 17, 2), (1 << 10, 1 << 8)]:
        with pytest.raises(NothingFitsError, match=f"a batch of {n * (batches or 1)} rows takes"):
            small.sample(n, batches=batches)
    assert len(small.sample(2)) == 2
    # Positions and random numbers take more than narrow rows, and a window is of many.
    monkeypatch.setattr(host_memory, "host_memory", lambda: (1 << 22, 1 << 34))
    for n, windows in [(1 << 17, None), (1 << 14, Window(0, 100, outside="cross"))]:
        narrow = ReplayBuffer(storage=LazyTensorStorage(8), windows=windows)
        narrow.extend(TensorDict({"a": torch.zeros(4)}, [4]))
        with pytest.raises(NothingFitsError, match=f"a batch of {n} rows takes"):
            narrow.sample(n)
        assert len(narrow.sample(2)) == 2


@pytest.mark.parametrize("device", ["cuda", "pinned", torch.device("cuda", 0)])
def test_what_was_asked_for_and_is_not_there(device):
    if torch.cuda.is_available():
        pytest.skip("this machine has it")
    with pytest.raises(RuntimeError, match="was asked for, but this machine has no cuda"):
        LazyTensorStorage(10, device=device).append(transitions(3))
    with pytest.raises(RuntimeError, match="was asked for"):
        TensorStorage(transitions(3), device=device)


def test_a_given_tensor_stays_where_it_is_by_auto(machine):
    data = transitions(5)
    storage = TensorStorage(data, device="auto")
    assert storage.placement.kind == "cpu"
    assert storage.columns.parts[0].data_ptr() == data["observation"].data_ptr()
    for device in ("pinned", "split:50%"):
        assert same(TensorStorage(transitions(200), device=device)[:], transitions(200))


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
@pytest.mark.parametrize(("device", "near"), [("cpu", 0), ("cuda", 1000), ("pinned", 0), ("split:30%", 256)])
def test_memory_is_taken_once(monkeypatch, device, near, kind):
    """CASES 27: rows where they belong, once; all else on the GPU, where batches come out. Nothing synchronises."""
    machine = Machine().install(monkeypatch)
    taken, torch_empty, numpy_empty = {"cuda": [], "cpu": [], "meta": []}, torch.empty, np.empty

    def empty(*size, **kwargs):
        tensor = torch_empty(*size, **kwargs)
        if tensor.device.type == "cuda" or tensor.numel() >= 1000:
            taken[tensor.device.type].append(tensor.nbytes)
        return tensor

    def host_empty(size, dtype):
        taken["cpu"].append(size * np.dtype(dtype).itemsize)
        return numpy_empty(size, dtype)

    # What an earlier test has had computed comes from FakeTensor's cache, without torch.empty.
    with torch._dynamo.config.patch(fake_tensor_cache_enabled=False), fake_cuda():
        data = transitions(40, device="cuda")
        row_bytes = sum(data[key][0].nbytes for key in data.keys(True, True))
        due, far = 1000 * row_bytes, (1000 - near) * row_bytes
        sampler = SamplerWithoutReplacement()
        if "slices" in kind:
            sampler = PrioritizedSliceSampler(1000, 0.6, 0.4, slice_len=4)
        buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(1000, device=device), sampler=sampler, batch_size=8)
        monkeypatch.setattr(torch, "empty", empty)
        monkeypatch.setattr(np, "empty", host_empty)
        buffer.extend(data)
        if device == "cpu":
            assert sum(taken["cpu"]) in (due, due + 8 * 1000)
            return
        assert sum(taken["cpu"]) == far
        assert due - far <= sum(taken["cuda"]) < due - far + due / 4
        storage = buffer.storage
        assert {t.device.type for t in storage.columns.parts} == ({"cuda"} if near else set()) | (
            {"cpu"} if far else set()
        )
        assert storage.device.type == storage.ring.counters.device.type == storage.rows.table.device.type == "cuda"
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
        report, place = buffer.memory(), device.partition(":")[0]
        assert (report.placement, report.rows) == (place, due)
        if far:
            assert sum(machine.ever_pinned) == far
            assert report.rows_on_host == (far if near else 0)
            assert "pinned host memory" in str(report)
            assert f"rows {place}" in repr(buffer)
            assert ("pinned host memory" if place == "pinned" else f"{near} steps on cuda") in str(storage.placement)


def twin(kind: str, ndim: int = 1, capacity: int = 60, **storage) -> TensorDictReplayBuffer:
    return TensorDictReplayBuffer(
        storage=LazyTensorStorage(capacity, ndim=ndim, **storage),
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
    of_keys = [t.nbytes for t in buffer.storage.columns.parts]
    sizes = [sum(of_keys[key] for key in record) for record in records(buffer.storage.layout.leaves, on_host=True)]
    assert len(sizes) < len(of_keys)
    assert sum(machine.pinned.values()) == sum(sizes)
    allocate, left = column.new_record, []

    def watched(*arguments):
        left.append(sum(machine.pinned.values()))
        return allocate(*arguments)

    monkeypatch.setattr(column, "new_record", watched)
    buffer.to("cpu")
    assert left == [sum(sizes[key:]) for key in range(len(sizes))]
    assert machine.pinned == {}


def control_rows(n: int, start: int = 0) -> TensorDict:
    """Keys of 68, 24, 68, 4 and 1 bytes, of 64 and of 5 (both alone), told apart by their values."""
    row = torch.arange(start, start + n)[:, None]
    coming = {"observation": row + torch.arange(17) / 64 + 0.5, "reward": row.float(), "done": row % 7 == 6}
    wide = {"aligned": (row + torch.arange(16)).float(), "bytes": (row + torch.arange(5)).byte()}
    now = {"observation": row + torch.arange(17) / 64, "action": -row - torch.arange(6) / 8}
    return TensorDict({**now, **wide, "next": {**coming, "terminated": row % 7 == 5}}, [n])


def test_short_rows_on_the_host_share_a_record(machine):
    """A row then lies in fewer sectors that cross the bus; what fills them, or has small elements, lies alone."""
    buffers = [TensorDictReplayBuffer(storage=LazyTensorStorage(30, device=where)) for where in ("pinned", "cpu")]
    for buffer in buffers:
        buffer.extend(control_rows(20))
        buffer.extend(control_rows(20, 20))
    names = [leaf.name for leaf in buffers[0].storage.layout.leaves]
    shared, alone = ([sorted(names[i] for i in each.keys) for each in b.storage.columns.records] for b in buffers)
    assert sorted(map(len, shared)) == [1, 1, 2, 4]
    assert sorted(map(len, alone)) == [1, 1, 1, 1, 1, 1, 2]
    assert buffers[0].memory().rows == buffers[1].memory().rows == 30 * (68 + 24 + 68 + 4 + 2 + 64 + 5)
    index = torch.arange(30)
    assert same(buffers[0][index], buffers[1][index])
    buffers[0][3:5] = buffers[1][3:5] = control_rows(2, 90)
    assert same(buffers[0][index], buffers[1][index])


@pytest.mark.parametrize("later", [False, True])
def test_copies_of_rows_in_other_records(machine, later):
    """Rows that moved to the host, or got a key later, lie in other records than new memory there has."""
    buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(30))
    buffer.extend(control_rows(20))
    if later:
        buffer.extend(control_rows(5, 20).set("flag", torch.ones(5, 1, dtype=torch.bool)))
    buffer.to("pinned")
    copied, index = copy.deepcopy(buffer), torch.arange(len(buffer))
    assert same(copied[index], buffer[index])
    copied.extend(copied[index[:3]])
    assert len(copied) == len(buffer) + 3


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
    allocate, calls = column.new_record, []
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

    monkeypatch.setattr(column, "new_record", scarce)
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


def test_faults_of_before_don_t_keep_the_memory():
    buffer = twin("prioritized")
    write(buffer, 75, 0)
    buffer.storage.ring.counters[3] = 2
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


CAPACITY = 200
ROW_BYTES = 58  # of `episodes`


@pytest.fixture
def full_gpu(monkeypatch):
    """With room for 128 of the rows on the GPU, and nothing else there."""
    return Machine(device=128 * ROW_BYTES + 20).install(monkeypatch, work_on_cpu=True)


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


def test_all_or_nothing_is_no_split(full_gpu):
    for room, kind in ((10_000, "cpu"), (639, "pinned"), (5000, "split")):
        full_gpu.device = room + 7
        # The stand-in for the GPU is a CPU; with a GPU the first would be "cuda".
        chosen = place("split", 10_000, IndexBytes(7), (1000,), torch.device("cpu"))
        assert chosen.kind == kind


# Moving


def test_what_the_rows_take_on_the_gpu_is_room_for_them(monkeypatch):
    """On a GPU that is full of this buffer: it moves to a split that leaves half of it there."""
    Machine(device=GIB).install(monkeypatch)
    with fake_cuda():
        buffer = twin("uniform", capacity=CAPACITY, device="cuda")
        buffer.extend(transitions(CAPACITY, device="cuda"))
        Machine(device=0).install(monkeypatch)
        seen = []
        monkeypatch.setattr(moving, "_move", lambda storage, before, target, progress: seen.append(target))
        buffer.to("split:64%")
        assert (seen[0].kind, seen[0].near_steps) == ("split", 128)


# States and checkpoints


@pytest.mark.parametrize(
    ("source", "target", "by"), [("split", "cpu", "state"), ("cpu", "split", "files"), ("split", "split", "files")]
)
def test_a_state_goes_from_one_placement_to_another(full_gpu, tmp_path, source, target, by):
    for n in (40, 150, 330):
        saved, loaded = (
            twin("slices", capacity=CAPACITY, device=source),
            twin("slices", capacity=CAPACITY, device=target),
        )
        write(saved, n, 0)
        saved.sample()
        if by == "state":
            loaded.load_state_dict(saved.state_dict())
        else:
            saved.save(tmp_path)
            loaded.load(tmp_path)
        assert same(saved[:], loaded[:])
        assert alike(saved, loaded)
        assert loaded.storage.placement.kind == target
