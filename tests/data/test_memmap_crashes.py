"""Case 59. A process is killed while it writes to mapped files: reopened, every row is whole, in order, or gone."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from gpubuf import LazyMemmapStorage, TensorDictReplayBuffer
from gpubuf.data.storage import memmap_files
from gpubuf.kernels.rows import JOURNAL_CHECK, JOURNAL_KEYS, JOURNAL_ROWS, JOURNAL_WORDS
from tests.support.memmap_crashes import held, opened, stops, transitions

ROOT = Path(__file__).parents[2]


def run(*arguments: str) -> str:
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    environment.pop("TRITON_INTERPRET", None)
    command = [sys.executable, "-m", "tests.support.memmap_crashes", *arguments]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize(
    "kills", [pytest.param(9, marks=pytest.mark.slow), pytest.param(300, marks=pytest.mark.nightly)]
)
def test_killed_while_writing(kills: int, tmp_path: Path):
    """Small and large rows, full and not, writes at the cursor and in place."""
    within = re.search(rf"{kills} kills, (\d+) of them within a write", run(str(tmp_path), str(kills), "0"))
    assert within is not None
    # Otherwise the test would show nothing.
    assert int(within[1]) >= kills // 2


@pytest.mark.parametrize(("which", "n"), [("few", 5), pytest.param("all", 14, marks=pytest.mark.slow)])
def test_stopped_at_every_point_of_every_write(which: str, n: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """A write is there as a whole, or not at all; so is a state that is loaded, but then the old rows may be gone."""
    stops(tmp_path, which)
    assert capsys.readouterr().out.count(" points") == n


def torn(folder: Path) -> torch.Tensor:
    """A full storage of two environments that nobody has open, in the middle of a write; the words of its journal."""
    buffer = TensorDictReplayBuffer(storage=LazyMemmapStorage(40, ndim=2, scratch_dir=folder), dim_extend=0)
    buffer.extend(transitions(46).reshape(23, 2))
    storage = buffer.storage
    storage._kept(6)
    for column in storage.columns:
        column.whole[:7] = 0
    return torch.from_file(str(folder / "gpubuf.journal"), shared=True, size=64, dtype=torch.int64)


def numbers(folder: Path) -> list[int]:
    return LazyMemmapStorage.open(folder)[:]["number"].flatten().tolist()


def test_two_dimensions(tmp_path: Path):
    torn(tmp_path)
    # The rows at the cursor are back. The others were not of the write.
    assert numbers(tmp_path) == [*[0] * 6, *range(6, 12), 0, 0, *range(14, 40)]


def test_rows_that_are_gone_count_as_emptied_ones(tmp_path: Path):
    """No later row has the generation of one that was lost."""
    buffer = TensorDictReplayBuffer(storage=LazyMemmapStorage(40, scratch_dir=tmp_path))
    buffer.extend(transitions(55))
    buffer.storage._journal.void()
    del buffer
    storage = opened(tmp_path)
    assert (storage.written, len(storage)) == (80, 0)


def spoil(words: torch.Tensor, place: int, value: int, sums: bool) -> None:
    words[JOURNAL_CHECK] += (value - words[place]) if sums else 0
    words[place] = value


@pytest.mark.parametrize("sums", [False, True])
@pytest.mark.parametrize("value", [-99, 1 << 62])
@pytest.mark.parametrize("place", [JOURNAL_ROWS, JOURNAL_KEYS, JOURNAL_WORDS, JOURNAL_WORDS + 8])
def test_a_damaged_journal_is_left_alone(tmp_path: Path, place: int, value: int, sums: bool):
    """After a crash of the machine, with or without the right sum: no row but those of the write changes."""
    words = torn(tmp_path)
    spoil(words, place, value, sums)
    found = numbers(tmp_path)
    assert found[14:] == list(range(14, 40))
    assert numbers(tmp_path) == found


def test_while_its_process_lives_an_unfinished_write_is_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(memmap_files, "_PATIENCE", 0.01)
    buffer = TensorDictReplayBuffer(storage=LazyMemmapStorage(40, scratch_dir=tmp_path))
    buffer.extend(transitions(55))
    write = buffer.storage._kept(3)
    with pytest.raises(RuntimeError, match="a write is unfinished, and another process"):
        LazyMemmapStorage.open(tmp_path)
    with write:
        pass
    assert len(opened(tmp_path)) == 40


def test_storages_without_a_journal(tmp_path: Path):
    """Those of older versions."""
    buffer = TensorDictReplayBuffer(storage=LazyMemmapStorage(40, scratch_dir=tmp_path))
    buffer.extend(transitions(55))
    del buffer
    (tmp_path / "gpubuf.journal").unlink()
    TensorDictReplayBuffer(storage=LazyMemmapStorage.open(tmp_path)).extend(transitions(3, 55))
    assert held(tmp_path) == [(number, 0) for number in range(18, 58)]


def test_the_journal_of_a_large_write_does_not_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(memmap_files, "_MOST_BYTES", 1 << 16)
    buffer = TensorDictReplayBuffer(storage=LazyMemmapStorage(400, scratch_dir=tmp_path))
    buffer.extend(transitions(800, width=100))
    sizes = []
    monkeypatch.setattr(os, "posix_fallocate", lambda file, start, n: (sizes.append(n), os.truncate(file, n)))
    buffer.extend(transitions(300, 800, width=100))
    assert max(sizes) > 300 * 100 * 8
    assert (tmp_path / "gpubuf.journal").stat().st_size == 1 << 16


def test_without_room_for_the_journal_nothing_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    buffer = TensorDictReplayBuffer(storage=LazyMemmapStorage(400, scratch_dir=tmp_path))
    buffer.extend(transitions(800, width=100))

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(os, "posix_fallocate", full)
        with pytest.raises(OSError, match="No space"):
            buffer.extend(transitions(300, 800, width=100))
    assert buffer.write_count == 800
    buffer.extend(transitions(300, 800, width=100))
    assert buffer[:]["number"].sort().values.tolist() == list(range(700, 1100))
