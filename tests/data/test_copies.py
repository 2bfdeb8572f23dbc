"""Case 55: copies of a buffer (pickle, deepcopy, torch.save, another process), and forks of one in use."""

from __future__ import annotations

import copy
import multiprocessing
import os
import pickle
import threading

import pytest
import torch
import torch.multiprocessing
from tensordict import TensorDict

from gpubuf import LazyTensorStorage, ReplayBuffer, TensorDictReplayBuffer
from gpubuf.data import TensorStorage
from tests.support.interrupted_buffers import CAPACITY, SAMPLERS, check, check_goes_on, steps, written
from tests.support.transitions import same


def used(sampler: str) -> TensorDictReplayBuffer:
    """A buffer that has gone round, and has priorities."""
    torch.manual_seed(0)
    buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(CAPACITY), sampler=SAMPLERS[sampler](), batch_size=8)
    for start in range(0, 90, 30):
        buffer.extend(steps(start, 30))
    batch = buffer.sample()
    buffer.update_tensordict_priority(batch.set("td_error", torch.rand(len(batch))))
    return buffer


def own(buffer: TensorDictReplayBuffer) -> TensorDictReplayBuffer:
    """In a process that was handed a buffer, which may only be read there: one to write to."""
    assert buffer.sample().numel() > 0
    return copy.deepcopy(buffer)


def _spawned(buffer, queue):
    buffer = own(buffer)
    check_goes_on(buffer)
    queue.put(written(buffer))


@pytest.mark.slow
def test_a_spawned_process_gets_a_copy():
    """Case 55: also through ``torch.multiprocessing``, which would share the tensors it is given."""
    buffer = used("prioritized slices")
    context = torch.multiprocessing.get_context("spawn")
    queue = context.SimpleQueue()
    process = context.Process(target=_spawned, args=(buffer, queue))
    process.start()
    assert queue.get() == 99
    process.join()
    assert process.exitcode == 0
    assert written(buffer) == 90
    check_goes_on(buffer)


def in_fork(work) -> object:
    """What ``work`` returns in a forked process."""
    receiver, sender = multiprocessing.Pipe(duplex=False)
    child = os.fork()
    if child == 0:
        try:
            sender.send(work())
        finally:
            os._exit(0)
    sender.close()
    assert receiver.poll(60), "the forked process hangs"
    result = receiver.recv()
    os.waitpid(child, 0)
    return result


def test_forks_go_on_and_draw_batches_of_their_own():
    """Case 55."""
    buffer = used("prioritized")

    def work():
        numbers = buffer.sample()["number"].tolist()
        check_goes_on(own(buffer))
        return numbers

    drawn = {tuple(in_fork(work)) for _ in range(3)}
    assert len(drawn) == 3
    check_goes_on(buffer)


def test_a_fork_during_another_threads_turn_has_a_lock_of_its_own():
    """Case 55."""
    buffer, begun, done = used("prioritized slices"), threading.Event(), threading.Event()

    def hold():
        begun.set()
        done.wait()

    thread = threading.Thread(target=buffer.operation.run, args=(hold,))
    thread.start()
    begun.wait()

    def work():
        mine = own(buffer)
        check_goes_on(mine)
        return written(mine)

    try:
        assert in_fork(work) == 99
    finally:
        done.set()
        thread.join()
    check(buffer)


@pytest.mark.parametrize("given", [False, True])
def test_pickle_writes_every_row_once(given):
    """Rows given to the storage share no record, even where they share memory."""
    both = torch.zeros(2, 4096, 3)
    rows = TensorDict({"a": both[0], "b": both[1]}, [4096])
    buffer = ReplayBuffer(storage=TensorStorage(rows) if given else LazyTensorStorage(4096))
    buffer.empty()
    buffer.extend(rows.apply(lambda key: key + torch.arange(4096.0)[:, None]))
    copied = pickle.dumps(buffer)
    assert len(copied) < (2.5 if given else 1.2) * buffer.storage.nbytes
    other = pickle.loads(copied)
    assert same(other[:], buffer[:])
    assert other.memory() == buffer.memory()
