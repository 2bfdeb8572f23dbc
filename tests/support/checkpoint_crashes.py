"""Kill saves, and look at what they leave behind. Run by tests/data/test_checkpoints.py.

``python -m tests.support.checkpoint_crashes FOLDER KILLS SEED`` kills processes that save in a loop. Every process is a
fork of this one, which spares it the seconds of the imports. It goes on from the checkpoint that the killed one before
it left, reports each save that has returned, and is killed a random time after its first report. Then the checkpoint
must load, hold what was reported, and hold just what the number of rows written says: no mixture of two saves.
"""

from __future__ import annotations

import os
import random
import select
import signal
import sys
import time
from pathlib import Path

import torch

from gpubuf import LazyTensorStorage, PrioritizedSampler, TensorDictReplayBuffer
from gpubuf.data.checkpoints.files import BUFFER, MANIFEST, read_manifest
from tests.support.memmap_crashes import forked
from tests.support.transitions import transitions

CAPACITY = 200


def new_buffer() -> TensorDictReplayBuffer:
    sampler = PrioritizedSampler(CAPACITY, 1.0, 0.5, eps=0.0)
    return TensorDictReplayBuffer(storage=LazyTensorStorage(CAPACITY), sampler=sampler)


def priority(number: torch.Tensor) -> torch.Tensor:
    return (number % 97 + 1).float()


def write(buffer: TensorDictReplayBuffer, n: int) -> None:
    """Write the next ``n`` rows, with the priorities that their numbers say."""
    start = buffer.write_count
    index = buffer.extend(transitions(n, start=start))
    buffer.update_priority(index, priority(torch.arange(start, start + n)))


def save_for_ever(folder: str, report: int) -> None:
    """In the process that is to be killed."""
    buffer = new_buffer()
    buffer.load(folder)
    while True:
        write(buffer, 1 + buffer.write_count * 7 % 40)
        buffer.save(folder)
        os.write(report, buffer.write_count.to_bytes(8, "little"))


def killed(folder: str, seconds: float) -> int:
    """Start a process, kill it ``seconds`` after its first report; returns the last number of rows that it reported."""
    reports, report = os.pipe()
    process = forked(lambda: save_for_ever(folder, report))
    os.close(report)
    select.select([reports], [], [])
    time.sleep(seconds)
    os.kill(process, signal.SIGKILL)
    _, status = os.waitpid(process, 0)
    assert os.WIFSIGNALED(status), "the process ended by itself"
    said = b""
    while chunk := os.read(reports, 1 << 16):
        said += chunk
    os.close(reports)
    assert said
    return int.from_bytes(said[-8:], "little")


def verify(folder: str, reported: int) -> int:
    """The checkpoint loads, and is one that was saved, no older than ``reported``; returns its number of rows."""
    buffer = new_buffer()
    buffer.load(folder)
    written = buffer.write_count
    assert written >= reported, f"{reported} rows were reported saved, {written} are there"
    numbers = torch.arange(max(0, written - CAPACITY), written)
    due = transitions(CAPACITY, start=int(numbers[0]))[: len(numbers)]
    position = numbers % CAPACITY
    assert len(buffer) == len(numbers)
    for key in due.keys(True, True):
        assert torch.equal(buffer.storage[position][key], due[key]), key
    assert torch.equal(buffer.sampler._tree.leaves[position], priority(numbers))
    return written


def main(folder: str, kills: int, seed: int) -> None:
    torch.set_num_threads(1)
    generator = random.Random(seed)
    buffer = new_buffer()
    write(buffer, 150)
    buffer.sample(8)
    buffer.save(folder)
    within, last = 0, buffer.write_count
    for _ in range(kills):
        reported = killed(folder, generator.uniform(0, 0.02))
        within += bool(not_in_checkpoint(folder))
        written = verify(folder, reported)
        assert written > last, "the run makes no progress"
        last = written
    buffer = new_buffer()
    buffer.load(folder)
    buffer.save(folder)
    left = not_in_checkpoint(folder)
    assert not left, f"the next save leaves {left}"
    print(f"{kills} kills, {within} of them within a save, {last} rows written")


def not_in_checkpoint(folder: str) -> set[str]:
    """What a save that was cut short has left behind."""
    named = {file.name for file in read_manifest(Path(folder), BUFFER).files}
    return set(os.listdir(folder)) - named - {MANIFEST}


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
