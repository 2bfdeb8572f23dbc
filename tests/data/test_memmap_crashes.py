"""Case 59. A process is killed while it writes to mapped files: reopened, every row is whole, in order, or gone.

Rows that were being overwritten by index are named instead.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from gpubuf import LazyMemmapStorage, TensorDictReplayBuffer
from gpubuf.data.storage import memmap_files
from gpubuf.data.storage.memmap_files import COUNTER_WORDS
from tests.support.memmap_crashes import held, noted, opened, stops, transitions

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
    """Whole rows in order: those from before, or with the new ones, or without those whose places the new ones took."""
    stops(tmp_path, which)
    assert capsys.readouterr().out.count(" points") == n


def torn(folder: Path) -> torch.Tensor:
    """A full storage of two environments that nobody has open, in the middle of a write; the words of its counters."""
    buffer = TensorDictReplayBuffer(storage=LazyMemmapStorage(40, ndim=2, scratch_dir=folder), dim_extend=0)
    buffer.extend(transitions(46).reshape(23, 2))
    buffer.storage.allocation.mapped.appending(6)
    for column in buffer.storage.columns:
        column.whole[3:6] = 0
    return torch.from_file(str(folder / "gpubuf.counters"), shared=True, size=COUNTER_WORDS, dtype=torch.int64)


def numbers(folder: Path) -> list[int]:
    return LazyMemmapStorage.open(folder)[:]["number"].flatten().tolist()


def test_two_dimensions(tmp_path: Path):
    torn(tmp_path)
    assert numbers(tmp_path) == list(range(12, 46))
    # The next rows go behind them, and have generations that no row had.
    buffer = TensorDictReplayBuffer(storage=LazyMemmapStorage.open(tmp_path), dim_extend=0)
    index = buffer.extend(transitions(8, 46).reshape(4, 2))
    assert buffer[:]["number"].flatten().tolist() == [52, 53, *range(14, 52)]
    assert buffer.storage.generations(torch.tensor([34])) == 4
    assert index.reshape(-1, 2)[0].tolist() == [17, 0]


def test_rows_that_are_gone_count_as_emptied_ones(tmp_path: Path):
    """No later row has the generation of one that was lost."""
    buffer = TensorDictReplayBuffer(storage=LazyMemmapStorage(40, scratch_dir=tmp_path))
    buffer.extend(transitions(55))
    buffer.storage.allocation.replacing()
    del buffer
    storage = opened(tmp_path)
    assert (storage.written, len(storage)) == (80, 0)


@pytest.mark.parametrize("n", [3, COUNTER_WORDS])
def test_rows_that_were_overwritten_by_index_are_named(tmp_path: Path, n: int):
    """By their places, as far as there is room for them. They stay, and the warning comes once."""
    buffer = TensorDictReplayBuffer(storage=LazyMemmapStorage(100, scratch_dir=tmp_path))
    buffer.extend(transitions(100))
    index = torch.randperm(100)[:n]
    buffer.storage.allocation.mapped.overwriting(index)
    del buffer
    named = str(index[: COUNTER_WORDS - 8].tolist())
    with pytest.warns(UserWarning, match=re.escape(f"{n} rows by index, {named}{' and others' * (n > 56)}: they may")):
        LazyMemmapStorage.open(tmp_path)
    assert numbers(tmp_path) == list(range(100))


@pytest.mark.parametrize("value", [-99, 0, 1 << 62])
@pytest.mark.parametrize("place", range(4, 8))
def test_a_note_that_makes_no_sense(tmp_path: Path, place: int, value: int):
    """After a crash of the machine: no row that may be torn is left."""
    words = torn(tmp_path)
    words[place] = value
    found = numbers(tmp_path)
    if (place, value) != (4, 0):
        assert found == list(range(12, 12 + len(found)))
    assert numbers(tmp_path) == found


def test_while_its_process_lives_an_unfinished_write_is_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(memmap_files, "_PATIENCE", 0.01)
    buffer = TensorDictReplayBuffer(storage=LazyMemmapStorage(40, scratch_dir=tmp_path))
    buffer.extend(transitions(55))
    write = buffer.storage.allocation.mapped.appending(3)
    with pytest.raises(RuntimeError, match="a write is unfinished, and another process"):
        LazyMemmapStorage.open(tmp_path)
    with write:
        pass
    assert len(opened(tmp_path)) == 40


def test_a_write_that_fails_is_none(tmp_path: Path):
    buffer = TensorDictReplayBuffer(storage=LazyMemmapStorage(40, scratch_dir=tmp_path))
    buffer.extend(transitions(55))
    with pytest.raises(IndexError):
        buffer.storage.write(torch.tensor([3, 40]), transitions(2))
    assert noted(tmp_path) == memmap_files.IDLE
    assert held(tmp_path) == [(number, 0) for number in range(15, 55)]
