"""Saves that are cut short: by a kill at a random time, and by a failure at every call that touches the disk."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from gpubuf.data.checkpoints import files
from tests.support.checkpoint_crashes import FILE_BYTES, PowerCutError, new_buffer, steps_of_a_save, verify, write

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("kills", [50, pytest.param(200, marks=pytest.mark.slow)])
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


def test_cut_short_before_every_step(tmp_path, monkeypatch):
    """The old checkpoint is there, or, from the moment the manifest is in place, the new one; the next save works."""
    buffer = new_buffer()
    write(buffer, 190)
    buffer.save(tmp_path, file_bytes=FILE_BYTES)
    n, fail_at = None, 0
    outcomes = []
    while n is None or fail_at < n:
        before = buffer.write_count
        write(buffer, 35)
        with monkeypatch.context() as patched:
            calls = steps_of_a_save(patched, fail_at)
            try:
                buffer.save(tmp_path, file_bytes=FILE_BYTES)
            except PowerCutError:
                outcomes.append(verify(str(tmp_path), before) > before)
            else:
                n = calls[0]
        buffer.save(tmp_path, file_bytes=FILE_BYTES)
        assert verify(str(tmp_path), buffer.write_count) == buffer.write_count
        named = {file.name for file in files.read_manifest(tmp_path).files}
        assert {path.name for path in tmp_path.iterdir()} == {*named, "manifest.json"}
        fail_at += 1
    assert len(outcomes) == n > 12
    assert outcomes == sorted(outcomes)
    assert set(outcomes) == {False, True}


def test_what_is_on_the_disk_before_the_manifest_names_it(tmp_path, monkeypatch):
    """Every file is flushed, then the folder, then the manifest, and only then is the manifest replaced."""
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
    buffer = new_buffer()
    write(buffer, 150)
    buffer.save(tmp_path, file_bytes=FILE_BYTES)
    names = {file.name for file in files.read_manifest(tmp_path).files}
    assert set(events[:-4]) == names
    assert events[-4:] == [tmp_path.name, "manifest.json.tmp", "replace", tmp_path.name]


def test_a_save_waits_for_another_of_the_same_folder(tmp_path):
    """A process that has the folder keeps a save of another one out."""
    buffer = new_buffer()
    write(buffer, 10)
    buffer.save(tmp_path)
    code = (
        "import fcntl, os, sys\n"
        "folder = os.open(sys.argv[1], os.O_RDONLY)\n"
        "try:\n    fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)\n"
        "except BlockingIOError:\n    print('held')\n"
    )
    command = [sys.executable, "-c", code, str(tmp_path)]
    for exclusive in (True, False):
        with files.FolderLock(tmp_path, exclusive=exclusive):
            assert subprocess.run(command, capture_output=True, text=True).stdout == "held\n"
    assert subprocess.run(command, capture_output=True, text=True).stdout == ""
