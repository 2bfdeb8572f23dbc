"""Memory-mapped storage: rows as on any other storage, there again after a restart, and refused when damaged."""

import copy
import json
import os
import shutil
import subprocess
import sys
from collections import namedtuple
from pathlib import Path

import pytest
import torch
from tensordict import TensorDict, tensorclass

from gpubuf import (
    LazyMemmapStorage,
    ReplayBuffer,
    TensorDictReplayBuffer,
)
from gpubuf.data import RoundRobinWriter
from gpubuf.data.storage.memmap_files import MARKS_FILE
from tests.support.transitions import same

ROOT = Path(__file__).parents[2]


def transitions(n: int, first: int = 0) -> TensorDict:
    """Rows that say which they are, in every dtype and depth; an episode lasts five steps."""
    step = torch.arange(first, first + n)
    return TensorDict(
        {
            "observation": step[:, None] + torch.tensor([0.0, 0.25, 0.5]),
            "step": step,
            "pixels": step[:, None, None].expand(n, 2, 2).to(torch.uint8),
            "next": {"a/b c": step.bfloat16(), "done": ((step + 1) % 5 == 0)[:, None]},
            "agents": TensorDict(
                {
                    "action": step[:, None, None].expand(n, 2, 1).double(),
                    "body": TensorDict({"joints": step[:, None, None].expand(n, 2, 3).short()}, [n, 2, 3]),
                },
                [n, 2],
            ),
        },
        [n],
    )


def filled(
    folder: Path, n: int = 13, capacity: int = 10, auto_cleanup: bool = False, **kwargs
) -> TensorDictReplayBuffer:
    storage = LazyMemmapStorage(capacity, scratch_dir=folder, auto_cleanup=auto_cleanup)
    buffer = TensorDictReplayBuffer(storage=storage, batch_size=4, **kwargs)
    for first in range(0, n, 4):
        buffer.extend(transitions(min(4, n - first), first))
    return buffer


# The same as in memory


def test_two_dimensions(tmp_path: Path):
    buffer = ReplayBuffer(storage=LazyMemmapStorage(11, scratch_dir=tmp_path / "rows", ndim=2))
    buffer.extend(transitions(10).reshape(2, 5))
    assert buffer.storage.shape == (6, 2)
    again = LazyMemmapStorage.open(tmp_path / "rows")
    assert (again.shape, again.ndim, len(again), again.max_size) == ((6, 2), 2, 10, 12)
    # The capacity was rounded up: the argument of then opens it again.
    assert LazyMemmapStorage(11, scratch_dir=tmp_path / "rows", ndim=2, existsok=True).max_size == 12
    assert again[:]["step"].tolist() == [[0, 5], [1, 6], [2, 7], [3, 8], [4, 9]]


def test_tensors_and_tensorclasses(tmp_path: Path):
    """A plain tensor comes back as one; a tensorclass as a TensorDict, because no class is looked up by name."""
    ReplayBuffer(storage=LazyMemmapStorage(5, scratch_dir=tmp_path / "tensor")).extend(torch.arange(3.0))
    assert LazyMemmapStorage.open(tmp_path / "tensor")[:].tolist() == [0, 1, 2]

    @tensorclass
    class Step:
        x: torch.Tensor

    buffer = ReplayBuffer(storage=LazyMemmapStorage(5, scratch_dir=tmp_path / "class"))
    buffer.extend(Step(x=torch.arange(3), batch_size=[3]))
    assert isinstance(buffer[:], Step)
    again = ReplayBuffer(storage=LazyMemmapStorage.open(tmp_path / "class"))
    again.extend(Step(x=torch.arange(3, 5), batch_size=[2]))
    assert again[:]["x"].tolist() == [0, 1, 2, 3, 4]


# Reopening


def test_tensordict_reads_the_folder(tmp_path: Path):
    buffer = filled(tmp_path / "rows", 6)
    buffer.storage.flush()
    data = TensorDict.load_memmap(tmp_path / "rows")
    assert same(data[:6], buffer[:].exclude("index"))
    assert json.loads((tmp_path / "rows" / "storage_metadata.json").read_text())["len"] == 6


# Files


def test_files_are_sparse(tmp_path: Path):
    """A terabyte of capacity takes the space of what was written."""
    free = shutil.disk_usage(tmp_path).free
    storage = LazyMemmapStorage(max(1, free // 8 - (1 << 20)), scratch_dir=tmp_path / "rows")
    buffer = ReplayBuffer(storage=storage)
    buffer.extend(torch.arange(1000))
    assert storage.nbytes > free - (1 << 24)
    assert sum(path.stat().st_blocks * 512 for path in (tmp_path / "rows").iterdir()) < 1 << 17
    assert buffer.sample(100).max() < 1000


def test_warns_of_a_disk_too_small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(100, 70, 30))
    buffer = ReplayBuffer(storage=LazyMemmapStorage(10, scratch_dir=tmp_path / "rows"))
    with pytest.warns(UserWarning, match="when it is full"):
        buffer.extend(torch.zeros(2))


def test_temporary_files_go_with_the_storage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    storage = LazyMemmapStorage(10)
    storage.append(transitions(4))
    # A copy has files of its own.
    other = copy.deepcopy(storage)
    assert LazyMemmapStorage.open(other.scratch_dir)[:]["step"].tolist() == [0, 1, 2, 3]
    del other
    assert list(tmp_path.iterdir()) == [storage.scratch_dir]
    view = storage[:]
    del storage
    assert list(tmp_path.iterdir()) == []
    assert view["step"].tolist() == [0, 1, 2, 3]


@pytest.mark.slow
def test_temporary_files_go_with_the_process(tmp_path: Path):
    script = """
import torch
from gpubuf import LazyMemmapStorage, ReplayBuffer
buffer = ReplayBuffer(storage=LazyMemmapStorage(10))
buffer.extend(torch.zeros(3))
assert buffer.storage.scratch_dir.exists()
"""
    environment = os.environ | {"PYTHONPATH": str(ROOT), "TMPDIR": str(tmp_path)}
    subprocess.run([sys.executable, "-c", script], check=True, env=environment)
    assert [path for path in tmp_path.iterdir() if path.name.startswith("gpubuf-")] == []


def test_what_a_killed_process_leaves_goes_with_the_next_temporary_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """But nothing of processes that live, of others, or that is not of a storage."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    living = LazyMemmapStorage(10)
    living.append(transitions(4))
    for name in ("left", "noted", "empty"):
        (tmp_path / f"gpubuf-{name}" / "next").mkdir(parents=True)
        for path in ("gpubuf.lock", "gpubuf.json", "meta.json", "next/step.memmap", "next/meta.json.tmp"):
            (tmp_path / f"gpubuf-{name}" / path).touch()
    (tmp_path / "gpubuf-noted" / "next" / "notes.txt").touch()
    # Without a lock it is another's, or kept by its owner.
    (tmp_path / "gpubuf-empty" / "gpubuf.lock").unlink()
    (tmp_path / "gpubuf-link").symlink_to(tmp_path / "gpubuf-empty")
    kept = LazyMemmapStorage(10, auto_cleanup=False)
    kept.append(transitions(4))
    before, opened = {path.relative_to(tmp_path) for path in tmp_path.rglob("*")}, len(os.listdir("/proc/self/fd"))
    gone = {Path("gpubuf-left"), *(path for path in before if path.parts[0] == "gpubuf-left")}
    gone |= {path for path in before if path.parts[0] == "gpubuf-noted" and path.suffix in (".json", ".memmap", ".tmp")}
    new = LazyMemmapStorage(10)
    new.append(transitions(4))
    after = {path.relative_to(tmp_path) for path in tmp_path.rglob("*") if new.scratch_dir not in (path, *path.parents)}
    assert before - after == gone | {Path("gpubuf-noted/gpubuf.lock")}
    assert living[:]["step"].tolist() == [0, 1, 2, 3]
    del new
    assert len(os.listdir("/proc/self/fd")) == opened
    del living
    assert {path.name for path in tmp_path.iterdir()} == {"gpubuf-noted", "gpubuf-empty", "gpubuf-link"} | {
        kept.scratch_dir.name
    }


def test_cleanup_leaves_the_files_of_others(tmp_path: Path):
    keep = LazyMemmapStorage(4, scratch_dir=tmp_path / "keep")
    ReplayBuffer(storage=keep).extend(transitions(2))
    del keep
    assert len(LazyMemmapStorage.open(tmp_path / "keep")) == 2
    drop = LazyMemmapStorage(4, scratch_dir=tmp_path / "drop", auto_cleanup=True)
    buffer = ReplayBuffer(storage=drop)
    buffer.extend(transitions(2))
    buffer.end_trajectories()
    (tmp_path / "drop" / "next" / "notes.txt").write_text("mine")
    drop.cleanup()
    assert [path.name for path in (tmp_path / "drop").rglob("*")] == ["next", "notes.txt"]
    assert drop[1]["step"] == 1


def test_a_forked_child_removes_nothing(tmp_path: Path):
    from gpubuf.data.storage.memmap import _remove

    (tmp_path / "rows").write_text("")
    _remove(tmp_path, [tmp_path / "rows"], os.getpid() + 1, None)
    assert (tmp_path / "rows").exists()


# Links


def linked(path: Path, elsewhere: Path) -> list[bytes]:
    """Move a file or folder away and leave a link to it; what its files hold."""
    path.rename(elsewhere)
    path.symlink_to(elsewhere)
    return contents(elsewhere)


def contents(path: Path) -> list[bytes]:
    return [file.read_bytes() for file in sorted(path.rglob("*")) if file.is_file()] or [path.read_bytes()]


def test_no_file_is_reached_through_a_link(tmp_path: Path):
    """Case 56: opened, a link in the folder would let a write overwrite somebody else's file."""
    filled(tmp_path / "rows")
    below = [path.relative_to(tmp_path / "rows") for path in sorted((tmp_path / "rows").rglob("*"))]
    assert {Path("next"), Path("agents/body"), Path("next/meta.json"), Path("gpubuf.json")} < set(below)
    for number, name in enumerate(below):
        folder = tmp_path / str(number)
        shutil.copytree(tmp_path / "rows", folder)
        before = linked(folder / name, tmp_path / f"{number}-away")
        with pytest.raises(ValueError, match="link"):
            LazyMemmapStorage.open(folder)
        assert contents(tmp_path / f"{number}-away") == before
    # The folder itself is the user's to choose.
    (tmp_path / "short").symlink_to(tmp_path / "rows")
    assert len(LazyMemmapStorage.open(tmp_path / "short")) == 10


def test_no_file_is_made_written_or_removed_through_a_link(tmp_path: Path):
    """Where a link takes the place of a folder later, or waits there before the first write."""
    buffer = filled(tmp_path / "rows", auto_cleanup=True)
    before = linked(tmp_path / "rows" / "next", tmp_path / "away")
    with pytest.raises(ValueError, match="link"):
        buffer.storage.flush()
    buffer.storage.cleanup()
    assert contents(tmp_path / "away") == before
    (tmp_path / "new").mkdir()
    (tmp_path / "new" / "meta.json").write_text("{}")
    (tmp_path / "new" / "next").symlink_to(tmp_path / "away")
    with pytest.raises(ValueError, match="link"):
        LazyMemmapStorage(10, scratch_dir=tmp_path / "new", existsok=True).append(transitions(3))
    assert contents(tmp_path / "away") == before


def test_a_pipe_in_the_place_of_a_file(tmp_path: Path):
    """It is refused, not waited for."""
    filled(tmp_path / "rows")
    (tmp_path / "rows" / "step.memmap").unlink()
    os.mkfifo(tmp_path / "rows" / "step.memmap")
    with pytest.raises(ValueError, match="regular file"):
        LazyMemmapStorage.open(tmp_path / "rows")


# Errors


def test_arguments(tmp_path: Path):
    with pytest.raises(ValueError, match="can't be cuda"):
        LazyMemmapStorage(10, device="cuda")
    with pytest.raises(ValueError, match="a whole number of rows"):
        LazyMemmapStorage(0)
    assert LazyMemmapStorage(10, device="auto").device.type == "cpu"


def test_what_is_there_is_not_overwritten(tmp_path: Path):
    filled(tmp_path / "rows")
    with pytest.raises(RuntimeError, match="existsok"):
        LazyMemmapStorage(10, scratch_dir=tmp_path / "rows")
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "step.memmap").write_text("mine")
    buffer = ReplayBuffer(storage=LazyMemmapStorage(10, scratch_dir=tmp_path / "own", existsok=True))
    with pytest.raises(RuntimeError, match=r"step\.memmap exists"):
        buffer.extend(transitions(2))
    # What had been made before the error is gone.
    assert [path.name for path in (tmp_path / "own").rglob("*") if path.is_file()] == ["step.memmap"]
    assert not buffer.initialized


def test_reserved_names(tmp_path: Path):
    buffer = ReplayBuffer(storage=LazyMemmapStorage(10, scratch_dir=tmp_path))
    with pytest.raises(ValueError, match="'shape' is taken"):
        buffer.extend(TensorDict({"next": {"shape": torch.zeros(2)}}, [2]))


def test_only_the_same_storage_is_opened(tmp_path: Path):
    filled(tmp_path / "rows")
    with pytest.raises(ValueError, match=r"max_size=10, asked for is max_size=11"):
        LazyMemmapStorage(11, scratch_dir=tmp_path / "rows", existsok=True)
    with pytest.raises(ValueError, match=r"ndim=1, asked for is ndim=2"):
        LazyMemmapStorage(10, ndim=2, scratch_dir=tmp_path / "rows", existsok=True)
    again = ReplayBuffer(storage=LazyMemmapStorage.open(tmp_path / "rows"), writer=RoundRobinWriter())
    with pytest.raises(ValueError, match="keys differ"):
        again.extend(transitions(2).exclude("step"))
    assert len(again) == 10
    with pytest.raises(ValueError, match="there is no storage"):
        LazyMemmapStorage.open(tmp_path / "nowhere")
    (tmp_path / "rows" / "gpubuf.json").unlink()
    with pytest.raises(ValueError, match="load_torchrl"):
        LazyMemmapStorage.open(tmp_path / "rows")


def edit(path: Path, **changes) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def counters(folder: Path) -> Path:
    return folder / "gpubuf.counters"


DAMAGES = {
    "truncated rows": (lambda f: os.truncate(f / "step.memmap", 79), "79 bytes, but"),
    "longer rows": (lambda f: os.truncate(f / "step.memmap", 81), "81 bytes, but"),
    "missing rows": (lambda f: (f / "next" / "done.memmap").unlink(), "is missing"),
    "missing level": (lambda f: shutil.rmtree(f / "next"), "is missing"),
    "no metadata": (lambda f: (f / "storage_metadata.json").unlink(), "no storage_metadata"),
    "torn metadata": (lambda f: os.truncate(f / "meta.json", 50), "can't be read"),
    "metadata is no text": (lambda f: (f / "meta.json").write_bytes(b"\xff\xfe\x80"), "can't be read"),
    "metadata is a list": (lambda f: (f / "meta.json").write_text("[1]"), "holds a list"),
    "deep metadata": (lambda f: (f / "meta.json").write_text("[" * 100_000), "can't be read"),
    "another dtype": (lambda f: edit(f / "meta.json", step={"dtype": "torch.os", "shape": [10]}), "unknown dtype"),
    "a smaller dtype": (lambda f: edit(f / "meta.json", step={"dtype": "torch.int8", "shape": [10]}), "80 bytes, but"),
    "another length": (lambda f: edit(f / "meta.json", step={"dtype": "torch.int32", "shape": [20]}), "rows of shape"),
    "a shape of text": (lambda f: edit(f / "meta.json", step={"dtype": "torch.int8", "shape": "10"}), "list of int"),
    "a negative shape": (lambda f: edit(f / "meta.json", shape=[-10]), "list of int"),
    "an endless shape": (lambda f: edit(f / "meta.json", shape=[10, 1 << 70]), "larger than any"),
    "not a tensor": (lambda f: edit(f / "meta.json", step=7), "is not a tensor"),
    "a way out": (lambda f: edit(f / "meta.json", **{"../up": {"type": "TensorDict"}}), r"%2Fup\S* is missing"),
    "a newer tensordict": (lambda f: edit(f / "meta.json", _format_version=99), "format version 99"),
    "another gpubuf": (lambda f: edit(f / "gpubuf.json", version=1), "has version 1, this reads version 2"),
    "not gpubuf's": (lambda f: edit(f / "gpubuf.json", format="x"), "not that of"),
    "more rows than room": (lambda f: edit(f / "gpubuf.json", max_size=11), "less than its 11"),
    "no capacity": (lambda f: edit(f / "gpubuf.json", max_size="10"), "must be an integer"),
    "ignored is no list": (lambda f: edit(f / "gpubuf.json", ignored=5), "must be a list"),
    "torn counters": (lambda f: os.truncate(f / "gpubuf.counters", 8), "8 bytes, but 64 counters"),
    "impossible counters": (lambda f: (f / "gpubuf.counters").write_bytes(b"\xff" * 32 + bytes(480)), "damaged"),
    "more rows than written": (lambda f: counters(f).write_bytes(bytes([3, *[0] * 7, 5, *[0] * 503])), "damaged"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damage_is_an_error(tmp_path: Path, damage: str):
    """What doesn't fit its description is refused before it is mapped."""
    filled(tmp_path / "rows")
    spoil, message = DAMAGES[damage]
    spoil(tmp_path / "rows")
    with pytest.raises(ValueError, match=message):
        LazyMemmapStorage.open(tmp_path / "rows")


def test_marks_that_were_not_finished(tmp_path: Path):
    """Case 54: who was interrupted, or killed, while it made their file does not keep others from marking rows."""
    buffer = ReplayBuffer(LazyMemmapStorage(8, scratch_dir=tmp_path))
    buffer.extend(TensorDict({"number": torch.arange(3)}, [3]))
    (tmp_path / MARKS_FILE).touch()
    buffer.end_trajectories()
    assert buffer.storage.marks.rows.tolist() == [0, 0, 1, 0, 0, 0, 0, 0]
