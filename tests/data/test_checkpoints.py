"""Checkpoints of buffers: what is saved comes back, into which buffers, and when.

``test_checkpoint_contract.py`` has what holds for every kind of buffer.
"""

from __future__ import annotations

import gc
import os
import re
import subprocess
import sys
import threading
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict, tensorclass
from torch import nn

from gpubuf import serialization, system
from gpubuf.data.checkpoints import files
from gpubuf.integrations.torchrl import (
    LazyMemmapStorage,
    LazyTensorStorage,
    ListStorage,
    PrioritizedSampler,
    RandomSampler,
    ReplayBuffer,
    SliceSampler,
    TensorDictReplayBuffer,
    TensorStorage,
)
from gpubuf.train.metrics import JsonLines
from tests.support.threads import wait_for_line
from tests.support.transitions import same, transitions

CAPACITY = 60


SAMPLERS: dict[str, Callable[[], object]] = {
    "random": RandomSampler,
    "prioritized": lambda: PrioritizedSampler(CAPACITY, 0.7, 0.5),
}


def new(sampler: str = "prioritized", capacity: int = CAPACITY, **arguments) -> TensorDictReplayBuffer:
    made = SAMPLERS[sampler]()
    if capacity != CAPACITY:
        made = PrioritizedSampler(capacity, 0.7, 0.5)
    return TensorDictReplayBuffer(storage=LazyTensorStorage(capacity), sampler=made, **arguments)


def used(sampler: str = "prioritized", n: int = 85) -> TensorDictReplayBuffer:
    """A buffer that has gone round, with priorities, in the middle of an epoch."""
    buffer = new(sampler)
    buffer.extend(transitions(n))
    batch = buffer.sample(12)
    if "prioritized" in sampler:
        buffer.update_priority(batch["index"], torch.rand(len(batch)) * 5)
    return buffer


def numbers(buffer: ReplayBuffer) -> list[int]:
    return buffer[:]["next", "step"].tolist()


def restored(folder: Path, sampler: str = "prioritized") -> TensorDictReplayBuffer:
    """A new buffer with what is in a folder."""
    buffer = new(sampler)
    buffer.load(folder)
    return buffer


ROOT = Path(__file__).parents[2]

# Exactly as it was


def test_no_view_of_old_tensors_is_left_behind(tmp_path):
    """CASES.md 34: memory stays where it is, so that views and captured graphs see what was loaded."""
    buffer, other = used(n=40), used(n=85)
    buffer.save(tmp_path)

    def addresses() -> list[int]:
        sampler = other.sampler
        watched = [
            other.storage.ring.counters,
            sampler.tree.leaves,
            sampler.tree.scalars,
            sampler.random_state("cpu").state,
        ]
        return [tensor.data_ptr() for tensor in (*other.storage.columns.parts, *watched)]

    view, before = other[:]["next", "step"], addresses()
    other.load(tmp_path)
    assert addresses() == before
    assert view[:40].tolist() == list(range(40))
    held = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    other.extend(transitions(60, start=500))
    other.update_priority(torch.arange(60), 3.0)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == held


# Kinds of rows


@pytest.mark.parametrize(("storage", "keys"), [(LazyTensorStorage, "some"), (LazyMemmapStorage, "all")])
def test_keys_of_no_width(storage, keys, backend, tmp_path):
    """Keys whose rows have no elements are stored, sampled, overwritten and saved, also where all keys are so."""

    def rows(n: int, start: int = 0) -> TensorDict:
        found = TensorDict({"none": torch.zeros(n, 0), "inner": torch.zeros(n, 3, 0, 2, dtype=torch.int64)}, [n])
        return found.set("number", torch.arange(start, start + n)) if keys == "some" else found

    buffer, other = (ReplayBuffer(storage=storage(10), batch_size=4) for _ in range(2))
    buffer.extend(rows(7))
    buffer.extend(rows(6, start=7))
    buffer[2:4] = rows(2, start=100)
    buffer.save(tmp_path)
    other.load(tmp_path)
    found = [(buffer.sample(), 4), (other.sample(), 4), (other[:], 10), (other[[1, 2]], 2)]
    if storage is LazyMemmapStorage:
        found.append((LazyMemmapStorage.open(buffer.storage.scratch_dir)[:], 10))
    for batch, n in found:
        assert (batch["none"].shape, batch["inner"].shape) == ((n, 0), (n, 3, 0, 2))
    assert (len(other), other.write_count) == (10, 13)
    if keys == "some":
        assert other[:]["number"].tolist() == [10, 11, 100, 101, 4, 5, 6, 7, 8, 9]


@tensorclass
class Pair:
    a: torch.Tensor
    b: TensorDict


def test_forms_of_rows(tmp_path):
    """Nested batch dimensions, tensorclasses, keys in another order."""
    buffer, knows, empty = (ReplayBuffer(storage=LazyTensorStorage(10)) for _ in range(3))
    pair = Pair(a=torch.rand(6, 2), b=TensorDict({"obs": torch.rand(6, 3, 2)}, [6, 3]), batch_size=[6])
    buffer.extend(pair)
    buffer.save(tmp_path)
    knows.extend(pair[:1])
    for other in (knows, empty):
        other.load(tmp_path)
    assert isinstance(knows[:], Pair)
    assert torch.equal(knows[:].a, pair.a)
    assert isinstance(empty[:], TensorDict)
    assert empty[:]["b"].batch_size == (6, 3)
    assert torch.equal(empty[:]["b", "obs"], pair.b["obs"])
    buffer, other = (ReplayBuffer(storage=LazyTensorStorage(4)) for _ in range(2))
    buffer.extend(TensorDict({"a": torch.zeros(3), "b": torch.ones(3)}, [3]))
    other.extend(TensorDict({"b": torch.rand(1), "a": torch.rand(1)}, [1]))
    buffer.save(tmp_path)
    other.load(tmp_path)
    assert (other[:]["a"].tolist(), other[:]["b"].tolist()) == ([0, 0, 0], [1, 1, 1])


class Normalise(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(3))
        self.extra: Any = 0

    def forward(self, data):
        return data

    def get_extra_state(self):
        return self.extra

    def set_extra_state(self, state):
        self.extra = state


def test_state_of_transforms(tmp_path):
    buffer, other = (ReplayBuffer(storage=LazyTensorStorage(4), transform=Normalise()) for _ in range(2))
    buffer.extend(transitions(2))
    own, others = (one.transform.steps[0].transform for one in (buffer, other))
    own.mean.fill_(3.0)
    own.extra = 4
    buffer.save(tmp_path)
    at = others.mean.data_ptr()
    other.load(tmp_path)
    assert (others.mean.tolist(), others.extra, others.mean.data_ptr()) == ([3.0] * 3, 4, at)
    without = ReplayBuffer(storage=LazyTensorStorage(4))
    with pytest.raises(ValueError, match="transforms have the entries"):
        without.load(tmp_path)
    assert not without.initialized


# Other buffers


def test_what_does_not_fit_is_refused_and_changes_nothing(tmp_path):
    buffer = used()
    buffer.save(tmp_path)
    keys, dtypes = new(), new()
    keys.extend(transitions(5).exclude("action").set("reward", torch.rand(5)))
    dtypes.extend(transitions(5).float())
    two = ReplayBuffer(storage=LazyTensorStorage(60, ndim=2), sampler=PrioritizedSampler(60, 0.7, 0.5))
    slices = ReplayBuffer(storage=LazyTensorStorage(60), sampler=SliceSampler(slice_len=2, end_key="missing"))
    for other, text in (
        (keys, r"missing \[\('reward',\)\], extra \[\('action',\)\]"),
        (dtypes, r"float32.*float64"),
        (new("random"), "PrioritizedSampler, this buffer has a RandomSampler"),
        (new(capacity=59), "60 rows, the storage has room for 59"),
        (two, r"rows have shape \(60,\), the storage has 2 dimension"),
    ):
        before = None if not other.initialized else other[:].clone()
        with pytest.raises(ValueError, match=text):
            other.load(tmp_path)
        assert not other.initialized if before is None else same(other[:], before)
    state = slices.state_dict() | {"_storage": buffer.state_dict()["_storage"]}
    with pytest.raises(ValueError, match="can't serve the rows"):
        slices.load_state_dict(state)
    assert not slices.initialized


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_between_devices(tmp_path):
    def make(device: str) -> TensorDictReplayBuffer:
        sampler = PrioritizedSampler(CAPACITY, 0.7, 0.5)
        return TensorDictReplayBuffer(storage=LazyTensorStorage(CAPACITY, device=device), sampler=sampler)

    for source, target in (("cuda", "cpu"), ("cpu", "cuda"), ("cuda", "cuda")):
        buffer, other = make(source), make(target)
        buffer.extend(transitions(85, device=source))
        buffer.update_priority(torch.arange(10, device=source), 3.0)
        buffer.save(tmp_path / source)
        other.load(tmp_path / source)
        assert numbers(other) == numbers(buffer)
        assert torch.equal(buffer.sample(20)["index"].cpu(), other.sample(20)["index"].cpu())


# The folder


def test_files_of_others_stay(tmp_path):
    for name in ("notes.txt", "rows-1.safetensors", "model.safetensors"):
        (tmp_path / name).write_text("mine")
    buffer = used()
    left = [tmp_path / f"{kind}-00003-0123456789abcdef.safetensors" for kind in ("rows", "state")]
    for path in left:
        path.write_text("left by a killed save, or by version 1")
    for _ in range(3):
        buffer.extend(transitions(20))
        buffer.save(tmp_path)
    assert not any(path.exists() for path in left)
    assert len(list(tmp_path.iterdir())) == 3 + 2
    assert (tmp_path / "notes.txt").read_text() == "mine"


def test_only_a_manifest_of_another_program_is_not_replaced(tmp_path):
    buffer = used()
    (tmp_path / "manifest.json").write_text('{"name": "a web app"}')
    with pytest.raises(ValueError, match="would be overwritten"):
        buffer.save(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["manifest.json"]
    (tmp_path / "manifest.json").unlink()
    buffer.save(tmp_path)
    (tmp_path / "manifest.json").write_bytes((tmp_path / "manifest.json").read_bytes()[:-40])
    buffer.save(tmp_path)
    assert numbers(restored(tmp_path)) == numbers(buffer)


def test_a_missing_checkpoint(tmp_path):
    for path in (tmp_path, tmp_path / "none"):
        with pytest.raises(FileNotFoundError, match="there is no checkpoint"):
            new().load(path)
    assert not (tmp_path / "none").exists()


def test_what_cannot_be_saved_leaves_the_previous_checkpoint(tmp_path):
    buffer, odd = used("random"), Normalise()
    buffer.save(tmp_path)
    odd.extra = {"set": set()}
    buffer.append_transform(odd)
    buffer.extend(transitions(10))
    with pytest.raises(TypeError, match="set"):
        buffer.save(tmp_path)
    assert restored(tmp_path, "random").write_count == 85
    for gone in ({"incremental": False}, {"file_bytes": 1}):
        with pytest.raises(TypeError, match="each save writes everything"):
            buffer.save(tmp_path, **gone)
    new().save(tmp_path / "none")
    assert len(restored(tmp_path / "none")) == 0


def test_progress(tmp_path, capsys, monkeypatch):
    """A bar where it is asked for; by default for large ones on a terminal."""
    buffer = used()
    buffer.save(tmp_path, progress=True)
    assert "saving" in capsys.readouterr().err
    buffer.load(tmp_path, progress=True)
    captured = capsys.readouterr()
    assert "loading" in captured.err
    assert not captured.out
    buffer.save(tmp_path)
    assert not capsys.readouterr().err
    shown = []
    monkeypatch.setattr("gpubuf.terminal.has_rich", lambda: shown.append(True))
    with pytest.raises(ImportError, match="pip install rich"):
        buffer.save(tmp_path, progress=True)
    monkeypatch.setattr(files, "BAR_BYTES", 100)
    buffer.save(tmp_path)
    assert len(shown) == 1
    monkeypatch.setattr(sys, "stderr", types.SimpleNamespace(isatty=lambda: True))
    buffer.save(tmp_path)
    assert len(shown) == 2


# What others have put there


@pytest.mark.parametrize("name", ["manifest.json.tmp", "manifest.json"])
def test_a_planted_link_is_replaced_and_not_followed(tmp_path, name):
    """Case 56: the file that it points to stays as it is, also where it does not exist yet."""
    buffer, folder = used(), tmp_path / "checkpoint"
    folder.mkdir()
    precious = tmp_path / "precious"
    if name.endswith(".tmp"):
        precious.write_text("precious")
    (folder / name).symlink_to(precious)
    buffer.save(folder)
    assert not (folder / files.MANIFEST).is_symlink()
    assert not precious.exists() or precious.read_text() == "precious"
    assert numbers(restored(folder)) == numbers(buffer)


def test_folders_in_the_way(tmp_path):
    """Case 56: a save that has succeeded says so; one that fails leaves the previous checkpoint."""
    buffer = used()
    folder = tmp_path / f"rows-00000-{'0' * 16}.safetensors"
    folder.mkdir()
    link = tmp_path / f"rows-00000-{'1' * 16}.safetensors"
    link.symlink_to(folder)
    buffer.save(tmp_path)
    assert folder.is_dir()
    assert not link.is_symlink()
    before = numbers(buffer)
    (tmp_path / "manifest.json.tmp").mkdir()
    buffer.extend(transitions(3))
    with pytest.raises(OSError, match=r"manifest\.json\.tmp"):
        buffer.save(tmp_path)
    assert numbers(restored(tmp_path)) == before


def test_a_state_and_a_mapped_storage_do_not_follow_links(tmp_path):
    """Case 56: nor do the files of training and of memory-mapped storages."""
    precious = tmp_path / "precious"
    precious.write_text("precious")
    (tmp_path / "state.tmp").symlink_to(precious)
    serialization.save(tmp_path / "state", {"x": torch.ones(3)})
    folder = tmp_path / "mapped"
    folder.mkdir()
    (folder / "gpubuf.json.tmp").symlink_to(precious)
    ReplayBuffer(storage=LazyMemmapStorage(8, scratch_dir=folder)).extend(transitions(3))
    with pytest.raises(FileExistsError):
        serialization.write(tmp_path / "precious", [b"x"])
    metrics = tmp_path / "metrics.jsonl"
    metrics.symlink_to(precious)
    with pytest.raises(OSError, match="symbolic link"):
        JsonLines(metrics)
    assert precious.read_text() == "precious"


# Saves that others stop, or come between


@pytest.mark.parametrize(
    "kills", [pytest.param(10, marks=pytest.mark.slow), pytest.param(200, marks=pytest.mark.nightly)]
)
def test_killed_while_saving_in_a_loop(kills, tmp_path):
    """Each time the newest complete checkpoint loads, and nothing that was reported saved is lost."""
    command = [sys.executable, "-m", "tests.support.checkpoint_crashes", str(tmp_path), str(kills), "0"]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    environment.pop("TRITON_INTERPRET", None)
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    within = re.search(rf"{kills} kills, (\d+) of them within a save", done.stdout)
    assert within is not None
    # Otherwise the test would show nothing.
    assert int(within[1]) > kills // 10


def test_what_is_on_the_disk_before_the_manifest_names_it(tmp_path, monkeypatch):
    """The file is flushed, then the folder, then the manifest, and only then is the manifest replaced."""
    events = []
    replace, fsync = os.replace, os.fsync

    def note_fsync(descriptor):
        events.append(Path(os.readlink(f"/proc/self/fd/{descriptor}")).name)
        fsync(descriptor)

    def note_replace(source, target):
        events.append("replace")
        replace(source, target)

    monkeypatch.setattr(os, "fsync", note_fsync)
    monkeypatch.setattr(os, "replace", note_replace)
    used().save(tmp_path)
    (file,) = files.read_manifest(tmp_path, files.BUFFER).files
    assert events == [file.name, tmp_path.name, "manifest.json.tmp", "replace", tmp_path.name]


def test_a_save_waits_for_another_of_the_same_folder(tmp_path):
    """A process that has the folder keeps a save of another one out."""
    code = (
        "import fcntl, os, sys\n"
        "folder = os.open(sys.argv[1], os.O_RDONLY)\n"
        "try:\n    fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)\n"
        "except BlockingIOError:\n    print('held')\n"
    )
    command = [sys.executable, "-c", code, str(tmp_path)]
    for exclusive in (True, False):
        with system.locked(tmp_path, exclusive=exclusive):
            assert subprocess.run(command, capture_output=True, text=True).stdout == "held\n"
    assert subprocess.run(command, capture_output=True, text=True).stdout == ""


def saved_while_used(buffer: TensorDictReplayBuffer, folder: Path, waits: bool) -> TensorDictReplayBuffer:
    """What a save wrote while another thread used the buffer, from the moment at which its first file is written."""
    write = serialization.write

    def use() -> None:
        buffer.extend(transitions(30, start=500))
        buffer.update_priority(torch.arange(60), 9.0)
        buffer[3:5]["next", "step"].fill_(-1)

    thread = threading.Thread(target=use)

    def first(*arguments):
        if thread.ident is None:
            thread.start()
            if waits:
                wait_for_line(buffer.operation, 1)
            else:
                thread.join(30)
                assert not thread.is_alive()
        return write(*arguments)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(serialization, "write", first)
        buffer.save(folder)
        thread.join()
    assert (buffer[3:5]["next", "step"] == -1).all()
    return restored(folder)


@pytest.mark.parametrize("waits", [False, True])
def test_a_save_is_of_one_moment(waits, tmp_path, monkeypatch):
    """CASES.md 32: while it is written others go on, or, where it is too much to be copied, wait.

    What has changed meanwhile is in the next save.
    """
    if waits:
        monkeypatch.setattr(files, "_COPY_BYTES", 0)
    buffer = used()
    buffer.save(tmp_path / "due")
    due, found = restored(tmp_path / "due"), saved_while_used(buffer, tmp_path / "c", waits)
    assert numbers(found) == numbers(due)
    for _ in range(3):
        assert same(found.sample(12), due.sample(12))
    buffer.save(tmp_path / "c")
    other = restored(tmp_path / "c")
    assert numbers(other) == numbers(buffer)
    assert torch.equal(other.sampler.tree.leaves, buffer.sampler.tree.leaves)


def tracked() -> int:
    """Number of objects that the garbage collector knows of, garbage included.

    Not by ``gc.get_objects``: its references to tuples that another thread is still building make that thread fail
    (SystemError from tupleobject.c).
    """
    gc.freeze()
    count = gc.get_freeze_count()
    gc.unfreeze()
    return count


def test_no_garbage_is_left_for_the_collector(tmp_path):
    """What refers to itself would keep copies of rows until somebody collects garbage."""
    buffer, other = used(), new()

    def turn(n: int) -> None:
        buffer.extend(transitions(7, start=7 * n))
        buffer.save(tmp_path)
        other.load(tmp_path)

    # The collector no longer tracks tuples that it has looked at: it must not look at those from before, either.
    gc.disable()
    try:
        for n in range(10):
            turn(n)
        before = tracked()
        for n in range(20):
            turn(n)
        assert tracked() - before < 20
    finally:
        gc.enable()


STORAGES = {
    "plain": lambda: LazyTensorStorage(8),
    "two dimensions": lambda: LazyTensorStorage(8, ndim=2),
    "other dtypes": lambda: LazyTensorStorage(8, dtypes={"observation": torch.float16}),
    "shared": lambda: LazyTensorStorage(8, share_next=True),
}


@pytest.mark.parametrize("kind", STORAGES)
@pytest.mark.parametrize("n", [4, 12])
def test_a_storage_alone(tmp_path, kind, n):
    first, other = (ReplayBuffer(storage=STORAGES[kind](), batch_size=4) for _ in range(2))
    for start in range(0, n, 4):
        data = transitions(4, start)
        first.extend(data.view(2, 2) if kind == "two dimensions" else data)
    first.storage.dumps(tmp_path / "new" / "storage")
    other.storage.loads(tmp_path / "new" / "storage")
    assert same(other[:], first[:])
    assert len(other) == len(first)
    assert other.storage.cursor == first.storage.cursor
    first.storage.save(tmp_path / "new" / "storage")
    other.sample()


@pytest.mark.parametrize("to_given", [True, False])
def test_rows_that_a_storage_was_given_and_others(to_given, tmp_path):
    """Small keys share a record, but for those of tensors that are there already: a state goes either way."""
    given, made = (
        ReplayBuffer(storage=storage)
        for storage in (TensorStorage(transitions(40).apply(torch.zeros_like)), LazyTensorStorage(40))
    )
    given.empty()
    source, target = (made, given) if to_given else (given, made)
    source.extend(transitions(30))
    source.extend(transitions(30, 30))
    source.save(tmp_path)
    target.load(tmp_path)
    assert same(target[:], source[:])


def test_objects_text_and_containers(tmp_path):
    for make, data in (
        (lambda: ListStorage(4), ["a", "b", "c"]),
        (lambda: LazyTensorStorage(4), {"x": torch.arange(3.0), "y": (torch.ones(3, 2),)}),
        (lambda: LazyTensorStorage(4), torch.arange(3.0)),
    ):
        first, other = (ReplayBuffer(storage=make()) for _ in range(2))
        first.extend(data)
        first.storage.dumps(tmp_path)
        other.storage.loads(tmp_path)
        assert str(other[:]) == str(first[:])


def test_samplers_hear_of_rows_that_were_loaded(tmp_path, backend):
    done = torch.tensor([0, 0, 1, 0, 0, 1], dtype=torch.bool).unsqueeze(-1)
    data = TensorDict({"a": torch.arange(6), "next": {"done": done}}, [6])
    TensorStorage(data).dumps(tmp_path)
    slices = ReplayBuffer(storage=LazyTensorStorage(6), sampler=SliceSampler(slice_len=3), batch_size=3)
    prioritized = ReplayBuffer(storage=LazyTensorStorage(6), sampler=PrioritizedSampler(6, 1.0, 1.0))
    for buffer in (slices, prioritized):
        buffer.extend(data[:1].clone())
        buffer.storage.loads(tmp_path)
    assert {tuple(slices.sample()["a"].tolist()) for _ in range(12)} == {(0, 1, 2), (3, 4, 5)}
    assert set(prioritized.sample(300)["a"].tolist()) == set(range(6))


def test_the_folder_of_a_storage(tmp_path):
    """Mapped files are rows that any storage loads; a dump goes into mapped files; what is damaged changes nothing."""
    rows = TensorDict({"a": torch.arange(4)}, [4])
    storage, mapped = LazyTensorStorage(6), LazyMemmapStorage(6, scratch_dir=tmp_path / "rows")
    mapped.append(rows)
    mapped.flush()
    storage.loads(tmp_path / "rows")
    assert storage[:]["a"].tolist() == [0, 1, 2, 3]
    storage.dumps(tmp_path / "dump")
    other = LazyMemmapStorage(6, scratch_dir=tmp_path / "other")
    other.loads(tmp_path / "dump")
    assert other[:]["a"].tolist() == [0, 1, 2, 3]
    with pytest.raises(FileNotFoundError):
        storage.loads(tmp_path / "nothing")
    with pytest.raises(RuntimeError, match="not initialized"):
        LazyTensorStorage(4).dumps(tmp_path / "never")
    (tmp_path / "dump" / "gpubuf.safetensors").write_bytes(b"")
    with pytest.raises(ValueError, match="damaged"):
        storage.loads(tmp_path / "dump")
    assert storage[:]["a"].tolist() == [0, 1, 2, 3]
    assert isinstance(storage[:], TensorDict)
