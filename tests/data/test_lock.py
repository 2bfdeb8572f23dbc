"""The lock of a buffer: who gets it, in which order, and that nobody keeps it by mistake."""

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
    SliceSampler,
    TensorDictReplayBuffer,
)
from gpubuf.data.lock import BufferLock
from tests.support.threads import together, wait_for_line
from tests.support.transitions import transitions


def test_the_lock_is_reentrant_and_gives_way():
    lock = BufferLock(LazyTensorStorage(4))
    made = []

    class Asked:
        def __init__(self, name):
            self.name = name

        def perform(self):
            made.append(self.name)

    def take_it():
        with lock:
            made.append("other")

    lock.pending.extend([Asked("first"), Asked("second")])
    with lock, lock:
        assert made == ["first", "second"]
        other = threading.Thread(target=take_it)
        other.start()
        lock.outside(lambda: other.join(30))
        assert made == ["first", "second", "other"]
    assert not lock.pending


def is_free(lock: BufferLock) -> bool:
    """Whether another thread can take the lock now."""
    with ThreadPoolExecutor(1) as other:
        return not lock._waiting and other.submit(lock._lock.acquire, False).result()


def test_threads_get_the_lock_in_the_order_in_which_they_asked():
    """Also before the thread that has just released it and asks again at once."""
    lock, order = BufferLock(LazyTensorStorage(4)), []

    def wait(number):
        with lock:
            order.append(number)

    threads = [threading.Thread(target=wait, args=(number,)) for number in range(5)]
    with lock:
        for n, thread in enumerate(threads):
            thread.start()
            wait_for_line(lock, n + 1)
    with lock:
        assert order == [0, 1, 2, 3, 4]
        order.append("again")
    for thread in threads:
        thread.join()
    assert order == [0, 1, 2, 3, 4, "again"]
    assert is_free(lock)


def test_a_tight_writer_and_a_tight_sampler_have_equal_shares():
    """CASES.md 32: neither gets it twice while the other waits, as the thread would that has just released it."""
    lock, written, before, done = BufferLock(LazyTensorStorage(4)), [0], [], threading.Event()
    work = bytes(1 << 16)  # enough for zlib to let other threads run

    def write():
        while not done.is_set():
            with lock:
                zlib.crc32(work)
                written[0] += 1

    def sample():
        try:
            for _ in range(300):
                with lock:
                    zlib.crc32(work)
                    before.append(written[0])
        finally:
            done.set()

    together(write, sample)
    shares = torch.tensor(before).diff()
    # Not all of them: the interpreter may halt a thread between two of its rounds.
    assert (shares == 1).float().mean() > 0.8


def test_a_wait_that_is_interrupted_gives_up_its_place():
    lock, waiting = BufferLock(LazyTensorStorage(4)), threading.Event()
    main = threading.get_ident()

    class StoppedError(Exception):
        pass

    def stop(*_):
        if not stopped.is_set():
            stopped.set()
            raise StoppedError

    def hold():
        with lock:
            waiting.set()
            wait_for_line(lock, 1)
            # Not once: a signal that comes just before Python waits for a lock does not end that wait.
            while not stopped.is_set():
                signal.pthread_kill(main, signal.SIGUSR1)
                stopped.wait(0.01)
            released.wait()

    stopped, released, before = threading.Event(), threading.Event(), signal.signal(signal.SIGUSR1, stop)
    holder = threading.Thread(target=hold)
    try:
        holder.start()
        waiting.wait()
        with pytest.raises(StoppedError), lock:
            pytest.fail("the lock was taken")
        assert not lock._waiting
    finally:
        released.set()
        holder.join()
        signal.signal(signal.SIGUSR1, before)
    assert is_free(lock)


def test_an_error_before_the_lock_is_taken_leaves_it_free():
    lock = BufferLock(LazyTensorStorage(4))

    class Interrupted:
        def perform(self):
            raise KeyboardInterrupt

    lock.pending.append(Interrupted())
    with pytest.raises(KeyboardInterrupt), lock:
        pytest.fail("the lock was taken")
    lock.pending.clear()
    assert is_free(lock)


@pytest.mark.parametrize("method", ["rebuild", "trajectories"])
def test_methods_of_a_sampler_take_the_lock(method):
    """CASES.md 32: nothing is indexed anew while a row is being written."""
    buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(40), sampler=SliceSampler(slice_len=2))
    buffer.extend(transitions(30))
    lock = buffer._lock
    thread = threading.Thread(target=getattr(buffer.sampler, method))
    with lock:
        thread.start()
        while thread.is_alive() and not lock._waiting:
            os.sched_yield()
        assert len(lock._waiting) == 1
    thread.join()
    assert is_free(lock)
