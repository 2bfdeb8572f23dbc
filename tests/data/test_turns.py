"""Turns: whose it is, in which order, and that nobody keeps one that is not his."""

from __future__ import annotations

import os
import signal
import threading
import zlib
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from gpubuf import (
    LazyTensorStorage,
    PrioritizedSliceSampler,
    SliceSampler,
    SliceSamplerWithoutReplacement,
    TensorDictReplayBuffer,
)
from gpubuf.data.concurrency.locking import BufferLock
from tests.support.threads import together, wait_for_line
from tests.support.transitions import transitions


def test_turns_are_reentrant_and_give_way():
    turn = BufferLock(LazyTensorStorage(4))
    made = []

    class Asked:
        def __init__(self, name):
            self.name = name

        def perform(self):
            made.append(self.name)

    def have_a_turn():
        with turn:
            made.append("other")

    turn.pending.extend([Asked("first"), Asked("second")])
    with turn, turn:
        assert made == ["first", "second"]
        other = threading.Thread(target=have_a_turn)
        other.start()
        turn.outside(lambda: other.join(30))
        assert made == ["first", "second", "other"]
    assert not turn.pending


def is_free(turn: BufferLock) -> bool:
    """Whether another thread can have its turn now."""
    with ThreadPoolExecutor(1) as other:
        return not turn._waiting and other.submit(turn._lock.acquire, False).result()


def test_turns_come_in_the_order_in_which_they_were_asked_for():
    """Also before the thread that has just had one and asks again at once."""
    turn, order = BufferLock(LazyTensorStorage(4)), []

    def wait(number):
        with turn:
            order.append(number)

    threads = [threading.Thread(target=wait, args=(number,)) for number in range(5)]
    with turn:
        for n, thread in enumerate(threads):
            thread.start()
            wait_for_line(turn, n + 1)
    with turn:
        assert order == [0, 1, 2, 3, 4]
        order.append("again")
    for thread in threads:
        thread.join()
    assert order == [0, 1, 2, 3, 4, "again"]
    assert is_free(turn)


def test_a_tight_writer_and_a_tight_sampler_have_equal_shares():
    """CASES.md 32: neither has a second turn while the other one waits, as the one would that has just had the lock."""
    turn, written, before, done = BufferLock(LazyTensorStorage(4)), [0], [], threading.Event()
    work = bytes(1 << 16)  # enough for zlib to let other threads run

    def write():
        while not done.is_set():
            with turn:
                zlib.crc32(work)
                written[0] += 1

    def sample():
        try:
            for _ in range(300):
                with turn:
                    zlib.crc32(work)
                    before.append(written[0])
        finally:
            done.set()

    together(write, sample)
    shares = torch.tensor(before).diff()
    # Not all of them: the interpreter may halt a thread between two of its turns.
    assert (shares == 1).float().mean() > 0.8


def test_a_wait_that_is_interrupted_gives_up_its_place():
    turn, waiting = BufferLock(LazyTensorStorage(4)), threading.Event()
    main = threading.get_ident()

    class StoppedError(Exception):
        pass

    def stop(*_):
        raise StoppedError

    def hold():
        with turn:
            waiting.set()
            wait_for_line(turn, 1)
            signal.pthread_kill(main, signal.SIGUSR1)
            released.wait()

    released, before = threading.Event(), signal.signal(signal.SIGUSR1, stop)
    holder = threading.Thread(target=hold)
    try:
        holder.start()
        waiting.wait()
        with pytest.raises(StoppedError), turn:
            pytest.fail("the turn began")
        assert not turn._waiting
    finally:
        signal.signal(signal.SIGUSR1, before)
        released.set()
        holder.join()
    together(lambda: turn.__enter__() and None)


def test_an_error_before_a_turn_leaves_it_free():
    turn = BufferLock(LazyTensorStorage(4))

    class Interrupted:
        def perform(self):
            raise KeyboardInterrupt

    turn.pending.append(Interrupted())
    with pytest.raises(KeyboardInterrupt), turn:
        pytest.fail("the turn began")
    turn.pending.clear()
    together(lambda: turn.__enter__() and None)


SLICE_SAMPLERS = {
    "slices": lambda: SliceSampler(slice_len=2),
    "slices in turn": lambda: SliceSamplerWithoutReplacement(slice_len=2),
    "prioritized slices": lambda: PrioritizedSliceSampler(40, 0.7, 0.5, slice_len=2),
}


@pytest.mark.parametrize("method", ["rebuild", "trajectories"])
@pytest.mark.parametrize("sampler", SLICE_SAMPLERS)
def test_what_is_called_on_a_sampler_takes_its_turn(sampler, method):
    """CASES.md 32: nothing is indexed anew while a row is being written."""
    buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(40), sampler=SLICE_SAMPLERS[sampler]())
    buffer.extend(transitions(30))
    turn = buffer._lock
    thread = threading.Thread(target=getattr(buffer.sampler, method))
    with turn:
        thread.start()
        while thread.is_alive() and not turn._waiting:
            os.sched_yield()
        assert len(turn._waiting) == 1
    thread.join()
    assert is_free(turn)
