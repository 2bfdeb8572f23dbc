"""Files of checkpoints: which of them a save writes again, and what it leaves alone."""

import json
import sys
import types

import pytest
import torch
from torch import nn

from benchmarks.studies import checkpoints as benchmark
from gpubuf import (
    LazyMemmapStorage,
    LazyTensorStorage,
    ReplayBuffer,
    TensorStorage,
    serialization,
)
from gpubuf.data.checkpoints import files
from gpubuf.data.checkpoints import save as saving
from gpubuf.train.metrics import JsonLines
from tests.support.checkpoint_setup import CAPACITY, new, numbers, used
from tests.support.transitions import same, transitions

# How little is written


def test_only_changed_rows_are_written(tmp_path):
    """1 % of the rows are new: less than 5 % of the bytes are written."""
    buffer = new(capacity=20_000)
    for start in range(0, 20_000, 5_000):
        buffer.extend(transitions(5_000, start=start))
    full = buffer.save(tmp_path, file_bytes=10_000)
    assert full.bytes == full.bytes_written == sum(path.stat().st_size for path in tmp_path.iterdir())
    assert full.files == full.files_written == len(list(tmp_path.iterdir()))
    buffer.extend(transitions(200, start=20_000))
    update = buffer.save(tmp_path, file_bytes=10_000)
    assert update.bytes_written < 0.05 * full.bytes_written
    assert update.bytes == sum(path.stat().st_size for path in tmp_path.iterdir())
    other = new(capacity=20_000)
    other.load(tmp_path)
    assert numbers(other) == numbers(buffer)
    other.extend(transitions(200, start=20_200))
    assert other.save(tmp_path, file_bytes=10_000).bytes_written < 0.05 * full.bytes_written


@pytest.mark.parametrize("seed", range(12))
def test_increments_hold_whatever_happened_in_between(seed, tmp_path):
    """Writes of every size, in place and through views, empties, loads: the checkpoint is the buffer every time."""
    generator = torch.Generator().manual_seed(seed)

    def draw(n: int) -> int:
        return int(torch.randint(n, (), generator=generator))

    buffer, other, number = new(), new(), 0
    for turn in range(14):
        for _ in range(draw(4)):
            n = draw(75) if draw(3) == 0 else draw(9)
            buffer.extend(transitions(n, start=number))
            number += n
            kind = draw(9)
            if kind == 0:
                buffer.empty()
            if len(buffer) == 0:
                continue
            position = draw(len(buffer))
            if kind == 1:
                buffer[[position, 0]] = transitions(2, start=number + 1000)
            elif kind == 2:
                buffer[position : position + 3]["next", "step"].add_(10_000)
            elif kind == 3:
                buffer.update_priority(torch.tensor([position]), draw(10) + 0.5)
            elif kind == 4 and turn > 0:
                buffer.load(tmp_path)
        buffer.save(tmp_path, file_bytes=300)
        other.load(tmp_path)
        assert other.write_count == buffer.write_count
        if buffer.initialized and len(buffer):
            assert same(other[:], buffer[:])
            assert torch.equal(other.sampler._tree.leaves, buffer.sampler._tree.leaves)


def test_a_lost_or_shortened_file_is_written_again(tmp_path):
    buffer, other = used(), new()
    buffer.save(tmp_path, file_bytes=300)
    first, second, *_ = sorted(tmp_path.glob("rows-*"))
    first.unlink()
    second.write_bytes(second.read_bytes()[:-1])
    assert buffer.save(tmp_path, file_bytes=300).files_written == 4
    other.load(tmp_path)
    assert numbers(other) == numbers(buffer)


def test_the_checkpoint_of_another_buffer_is_no_base(tmp_path):
    """Two buffers that have written as many rows each take turns in one folder."""
    first, second, other = new(), new(), new()
    first.extend(transitions(50))
    second.extend(transitions(50, start=500))
    for _ in range(2):
        for buffer in (first, second):
            saved = buffer.save(tmp_path, file_bytes=300)
            assert saved.bytes_written == saved.bytes
            other.load(tmp_path)
            assert numbers(other) == numbers(buffer)


def test_several_folders_at_a_time(tmp_path):
    buffer, other = new(), new()
    for turn in range(4):
        buffer.extend(transitions(7, start=7 * turn))
        buffer.save(tmp_path / str(turn % 2), file_bytes=300)
        other.load(tmp_path / str(turn % 2))
        assert numbers(other) == numbers(buffer)


def test_changes_that_leave_no_trace_need_a_full_save(tmp_path):
    buffer, other = used(), new()
    buffer.save(tmp_path)
    buffer[3:4]["next", "step"].numpy()[:] = -1
    buffer.save(tmp_path, incremental=False)
    other.load(tmp_path)
    assert other[3]["next", "step"] == -1


def test_the_users_own_tensors(tmp_path):
    """Changed in place by their owner."""
    data = transitions(10)
    buffer, other = ReplayBuffer(storage=TensorStorage(data)), ReplayBuffer(storage=LazyTensorStorage(10))
    buffer.save(tmp_path)
    data["action"].zero_()
    buffer.save(tmp_path)
    other.load(tmp_path)
    assert other[:]["action"].tolist() == [[0.0]] * 10


def test_large_tensors_beside_the_rows_lie_in_files_of_their_own(tmp_path):
    buffer, other = used(), new()
    buffer.save(tmp_path, file_bytes=64)
    assert len(list(tmp_path.glob("tensor-*"))) == 4
    other.load(tmp_path)
    assert same(buffer.sample(30), other.sample(30))
    buffer.update_priority(torch.tensor([2]), 7.0)
    buffer.save(tmp_path, file_bytes=64)
    other.load(tmp_path)
    assert torch.equal(other.sampler._tree.leaves, buffer.sampler._tree.leaves)


# The folder


def test_files_of_others_stay(tmp_path):
    for name in ("notes.txt", "rows-1.safetensors", "model.safetensors"):
        (tmp_path / name).write_text("mine")
    buffer = used()
    left = tmp_path / files.file_name("rows", [3], "0123456789abcdef")
    left.write_text("left by a killed save")
    for _ in range(3):
        buffer.extend(transitions(20))
        buffer.save(tmp_path)
    assert not left.exists()
    assert len(list(tmp_path.iterdir())) == 3 + 3
    assert (tmp_path / "notes.txt").read_text() == "mine"


def test_a_manifest_of_another_program_is_not_replaced(tmp_path):
    (tmp_path / "manifest.json").write_text('{"name": "a web app"}')
    with pytest.raises(ValueError, match="would be overwritten"):
        used().save(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["manifest.json"]


def test_a_damaged_checkpoint_is_replaced(tmp_path):
    buffer, other = used(), new()
    buffer.save(tmp_path)
    (tmp_path / "manifest.json").write_bytes((tmp_path / "manifest.json").read_bytes()[:-40])
    buffer.save(tmp_path)
    other.load(tmp_path)
    assert numbers(other) == numbers(buffer)


def test_a_missing_checkpoint(tmp_path):
    for path in (tmp_path, tmp_path / "none"):
        with pytest.raises(FileNotFoundError, match="there is no checkpoint"):
            new().load(path)
    assert not (tmp_path / "none").exists()


def test_what_cannot_be_saved_leaves_the_previous_checkpoint(tmp_path):
    class Odd(nn.Module):
        def forward(self, data):
            return data

        def get_extra_state(self):
            return {"set": set()}

    buffer, other = used("random"), new("random")
    buffer.save(tmp_path)
    buffer.append_transform(Odd())
    buffer.extend(transitions(10))
    with pytest.raises(TypeError, match="set"):
        buffer.save(tmp_path)
    other.load(tmp_path)
    assert other.write_count == 85


@pytest.mark.parametrize("file_bytes", [0, -1])
def test_sizes_of_files_are_checked(file_bytes, tmp_path):
    with pytest.raises(ValueError, match="at least 1"):
        used().save(tmp_path, file_bytes=file_bytes)


def test_torchrl_names(tmp_path):
    buffer = used()
    for number, save in enumerate([buffer.dump, buffer.dumps]):
        other = new()
        save(tmp_path / str(number))
        other.loads(str(tmp_path / str(number)))
        assert numbers(other) == numbers(buffer)


def test_progress(tmp_path, capsys, monkeypatch):
    buffer = used()
    buffer.save(tmp_path, progress=True)
    assert "saving" in capsys.readouterr().err
    buffer.load(tmp_path, progress=True)
    captured = capsys.readouterr()
    assert "loading" in captured.err
    assert not captured.out
    buffer.save(tmp_path)
    assert not capsys.readouterr().err
    monkeypatch.setattr("gpubuf.terminal.has_rich", lambda: False)
    with pytest.raises(ImportError, match="pip install rich"):
        buffer.save(tmp_path, progress=True)


def test_a_bar_by_default_for_large_ones_on_a_terminal(tmp_path, monkeypatch):
    shown = []
    monkeypatch.setattr(saving, "BAR_BYTES", 100)
    monkeypatch.setattr("gpubuf.terminal.has_rich", lambda: shown.append(True))
    buffer = used()
    buffer.save(tmp_path)
    assert not shown
    monkeypatch.setattr(sys, "stderr", types.SimpleNamespace(isatty=lambda: True))
    buffer.save(tmp_path)
    assert shown


@pytest.mark.parametrize(
    ("length", "capacity", "item", "file_bytes", "pieces"),
    [
        (0, 10, 4, None, 0),
        (10, 10, 4, None, 1),
        (10, 10, 4, 1, 10),
        (10, 10, 0, None, 1),
        (1_000_000, 1_000_000, 166, None, 128),
        (500_000, 1_000_000, 166, None, 64),
        (1_000_000, 1_000_000, 4, None, 4),
        (1_000_000, 1_000_000, 16_000, None, 239),
    ],
)
def test_how_rows_are_cut(length, capacity, item, file_bytes, pieces):
    spans = saving.spans(length, capacity, item, file_bytes)
    assert abs(len(spans) - pieces) <= pieces // 50
    assert [0, *(stop for _, stop in spans)] == [*(start for start, _ in spans), length]


def test_the_benchmark_runs(tmp_path, capsys):
    benchmark.main(["--rows", "2000", "--repeats", "1", "--folder", str(tmp_path), "--out", str(tmp_path / "out.json")])
    out = capsys.readouterr().out
    assert "1 % changed: " in out
    names = [row["operation"] for row in json.loads((tmp_path / "out.json").read_text())["checkpoints"]["results"]]
    assert names == ["save", "disk: write", "save after 1 %", "load, from the disk", "load, from memory", "disk: read"]
    assert [path.name for path in tmp_path.iterdir()] == ["out.json"]


def test_memory_mapped_rows(tmp_path):
    def make(name: str) -> ReplayBuffer:
        return ReplayBuffer(storage=LazyMemmapStorage(CAPACITY, scratch_dir=str(tmp_path / name)))

    buffer, other = make("a"), make("b")
    for start in (0, 50):
        buffer.extend(transitions(50, start=start))
        buffer.save(tmp_path / "c", file_bytes=300)
        other.load(tmp_path / "c")
        assert numbers(other) == numbers(buffer)
        assert same(buffer.sample(8), other.sample(8))


def test_saving_goes_on_after_a_buffer_was_freed(tmp_path):
    buffer, other = used(), new()
    buffer.save(tmp_path, file_bytes=300)
    buffer.free()
    buffer.extend(transitions(60, start=300))
    buffer.save(tmp_path, file_bytes=300)
    other.load(tmp_path)
    assert numbers(other) == list(range(300, 360))
    other.free()
    other.load(tmp_path)
    assert numbers(other) == list(range(300, 360))


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
    other = new()
    other.load(folder)
    assert numbers(other) == numbers(buffer)


def test_a_folder_with_the_name_of_a_row_file_stays(tmp_path):
    """Case 56: a save that has succeeded says so."""
    buffer = used()
    folder = tmp_path / f"rows-00000-{'0' * 16}.safetensors"
    folder.mkdir()
    link = tmp_path / f"rows-00000-{'1' * 16}.safetensors"
    link.symlink_to(folder)
    buffer.save(tmp_path)
    assert folder.is_dir()
    assert not link.is_symlink()


def test_a_folder_in_the_way_of_the_manifest_leaves_the_previous_checkpoint(tmp_path):
    """Case 56."""
    buffer = used()
    buffer.save(tmp_path)
    before = numbers(buffer)
    (tmp_path / "manifest.json.tmp").mkdir()
    buffer.extend(transitions(3))
    with pytest.raises(OSError, match=r"manifest\.json\.tmp"):
        buffer.save(tmp_path)
    other = new()
    other.load(tmp_path)
    assert numbers(other) == before


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
