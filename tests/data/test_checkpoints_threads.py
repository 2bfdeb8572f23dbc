"""Saves in one thread while others use the buffer, and what saves and loads leave in memory."""

from __future__ import annotations

import gc
import threading
from pathlib import Path

import pytest
import torch

from gpubuf import TensorDictReplayBuffer, serialization
from gpubuf.data.checkpoints import save
from tests.support.checkpoint_setup import new, numbers, used
from tests.support.threads import wait_for_line
from tests.support.transitions import same, transitions


def tracked() -> int:
    """Number of objects that the garbage collector knows of, garbage included.

    Not by ``gc.get_objects``: its references to tuples that another thread is still building make that thread fail
    (SystemError from tupleobject.c).
    """
    gc.freeze()
    count = gc.get_freeze_count()
    gc.unfreeze()
    return count


class Meanwhile:
    """Something that another thread does to a buffer when the first file of a save is about to be written."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, buffer: TensorDictReplayBuffer, waits: bool) -> None:
        self.buffer, self.waits = buffer, waits
        self.thread = threading.Thread(target=self.use)
        self.write = serialization.write
        monkeypatch.setattr(serialization, "write", self.first)

    def use(self) -> None:
        self.buffer.extend(transitions(30, start=500))
        self.buffer.update_priority(torch.arange(60), 9.0)
        self.buffer[3:5]["next", "step"].fill_(-1)

    def first(self, *arguments):
        if self.thread.ident is None:
            self.thread.start()
            if self.waits:
                wait_for_line(self.buffer._lock, 1)
            else:
                self.thread.join(30)
                assert not self.thread.is_alive()
        return self.write(*arguments)


def saved_while_used(buffer: TensorDictReplayBuffer, folder: Path, waits: bool) -> TensorDictReplayBuffer:
    """What a save wrote while another thread did something to the buffer."""
    with pytest.MonkeyPatch.context() as patched:
        meanwhile = Meanwhile(patched, buffer, waits)
        buffer.save(folder, file_bytes=300)
        meanwhile.thread.join()
    assert (buffer[3:5]["next", "step"] == -1).all()
    other = new()
    other.load(folder)
    return other


@pytest.mark.parametrize("waits", [False, True])
def test_a_save_is_of_one_moment(waits, tmp_path, monkeypatch):
    """CASES.md 32: while it is written others go on, or, where it is too much to be copied, wait."""
    if waits:
        monkeypatch.setattr(save, "_COPY_BYTES", 0)
    buffer, due = used(), new()
    buffer.save(tmp_path / "due")
    due.load(tmp_path / "due")
    found = saved_while_used(buffer, tmp_path / "c", waits)
    assert numbers(found) == numbers(due)
    for _ in range(3):
        assert same(found.sample(12), due.sample(12))


def test_what_changed_meanwhile_is_in_the_next_save(tmp_path):
    buffer, other = used(), new()
    buffer.save(tmp_path, file_bytes=300)
    buffer.extend(transitions(5, start=85))
    saved_while_used(buffer, tmp_path, False)
    buffer.save(tmp_path, file_bytes=300)
    other.load(tmp_path)
    assert numbers(other) == numbers(buffer)
    assert torch.equal(other.sampler.tree.leaves, buffer.sampler.tree.leaves)


def test_no_garbage_is_left_for_the_collector(tmp_path):
    """What refers to itself would keep copies of rows until somebody collects garbage."""
    buffer, other = used(), new()

    def turn(n: int) -> None:
        buffer.extend(transitions(7, start=7 * n))
        buffer.save(tmp_path, file_bytes=300)
        other.load(tmp_path)

    # The collector no longer tracks tuples that it has looked at: it must not look at those from before, either.
    gc.disable()
    try:
        # A buffer remembers the last few of its checkpoints.
        for n in range(10):
            turn(n)
        before = tracked()
        for n in range(20):
            turn(n)
        assert tracked() - before < 20
    finally:
        gc.enable()
