"""Threads of the CPU kernels: the same bits for any number, one batch at a time, and what forks and errors leave."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from torch import Tensor

from gpubuf.data import LazyTensorStorage
from gpubuf.data.samplers.base import RandomState
from gpubuf.data.samplers.sum_tree import SumTree
from gpubuf.kernels import _threads
from tests.support.threads import together
from tests.support.transitions import transitions

ROOT = Path(__file__).parents[2]
LARGE = 2 * _threads.ROWS_A_THREAD


@pytest.fixture(autouse=True)
def number_of_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def names_of_workers() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name == "gpubuf-kernels"]


def filled(rows: int = 3000) -> tuple[LazyTensorStorage, SumTree]:
    storage, tree = LazyTensorStorage(rows), SumTree(rows, alpha=0.6, beta=0.4)
    storage.append(transitions(rows))
    tree.update(torch.arange(rows), torch.rand(rows, generator=torch.Generator().manual_seed(3)))
    return storage, tree


@pytest.mark.parametrize(("n", "stratified"), [(LARGE - 1, False), (LARGE, True), (3 * LARGE + 37, False)])
def test_any_number_of_threads_draws_the_same(n, stratified):
    """Rows, weights, and what is left of the random stream. tests/kernels/test_rows.py does so for copies."""
    tree = filled()[1]

    def results(threads: int) -> list[Tensor]:
        torch.set_num_threads(threads)
        rng = RandomState(seed=5)
        return [*tree.draw(n, rng, stratified), rng.state]

    one = results(1)
    for threads in (2, 3, 7):
        assert all(map(torch.equal, one, results(threads)))
    assert one[-1][1] == n


def test_a_large_batch_is_one_allocation_and_a_small_one_several():
    """The C library would ask the system for the pages of several large ones anew for every batch."""
    layout = filled(10)[0].layout

    def allocations(n: int) -> int:
        return len({t.untyped_storage().data_ptr() for t in layout.allocate(n)})

    assert allocations(4) == len(layout.leaves)
    assert allocations(2_000_000 // layout.row_bytes) == 1


def test_small_batches_stay_in_the_thread_of_the_caller():
    assert _threads.parts(_threads.ROWS_A_THREAD) == [(0, _threads.ROWS_A_THREAD)]
    torch.set_num_threads(1)
    assert _threads.parts(10 * LARGE) == [(0, 10 * LARGE)]
    torch.set_num_threads(3)
    cut = _threads.parts(10 * LARGE + 1)
    assert len(cut) == 3
    assert sum(length for _, length in cut) == 10 * LARGE + 1
    assert all(first % 64 == 0 for first, _ in cut)


def test_workers_are_kept():
    storage, _ = filled()
    rng = RandomState(seed=1).state
    storage.plans.batch.sample_uniform(rng, LARGE)
    before = names_of_workers()
    assert before
    for _ in range(20):
        storage.plans.batch.sample_uniform(rng, LARGE)
    assert names_of_workers() == before


def test_several_threads_at_once_each_get_their_own_batch():
    storage, _ = filled()
    expected = storage.plans.batch.sample_uniform(RandomState(seed=7).state, LARGE)[0]
    wrong: list[int] = []

    def work() -> None:
        for round_ in range(30):
            found = storage.plans.batch.sample_uniform(RandomState(seed=7).state, LARGE)[0]
            if not all(map(torch.equal, found, expected)):
                wrong.append(round_)

    together(*[work] * 4)
    assert not wrong


def test_a_call_that_fails_waits_for_the_others():
    """What they write to belongs to the caller, who may let go of it."""
    begun, done = threading.Event(), []

    def kernel(first: int, length: int) -> None:
        if first == 0:
            assert begun.wait(60)
            # What an interrupt does to the caller in the middle of its part.
            raise KeyboardInterrupt
        begun.set()
        torch.zeros(2_000_000).sort()
        done.append(first)

    with pytest.raises(KeyboardInterrupt):
        _threads.call_in_parts(kernel, (), LARGE, ())
    assert done == [LARGE // 2]
    # The threads are free again.
    assert _threads.call_in_parts(lambda first, length: first, (), LARGE, ()) == [0, LARGE // 2]


def test_an_interrupt_behind_any_call_leaves_the_workers_free():
    """A signal is handled when a call returns; that of the lock's ``acquire`` is one of them."""
    code = _threads._Workers.call.__code__
    places = 0

    def interrupted_at(place: int) -> bool:
        returned = 0

        def interrupt(frame, event, argument) -> None:
            nonlocal returned
            if event == "c_return" and frame.f_code is code:
                returned += 1
                if returned > place:
                    raise KeyboardInterrupt

        sys.setprofile(interrupt)
        try:
            _threads.call_in_parts(lambda first, length: first, (), LARGE, ())
        except KeyboardInterrupt:
            return True
        finally:
            sys.setprofile(None)
        return False

    while interrupted_at(places):
        assert not _threads._workers._busy.locked()
        places += 1
    assert places


def test_an_error_in_a_worker_reaches_the_caller():
    begun = threading.Event()

    def kernel(first: int, length: int) -> None:
        if first:
            begun.set()
            raise ValueError("in the worker")
        assert begun.wait(60)

    with pytest.raises(ValueError, match="in the worker"):
        _threads.call_in_parts(kernel, (), LARGE, ())


def test_a_part_that_no_worker_has_begun_is_done_by_the_caller():
    done: list[str] = []
    task = _threads._Task(lambda: done.append(threading.current_thread().name), ())
    task.outcome()
    task.perform()
    assert done == [threading.current_thread().name]


def test_a_forked_child_has_threads_of_its_own():
    program = """
import os, torch
torch.set_num_threads(2)
from gpubuf.data.samplers.base import RandomState
from tests.kernels.test_kernel_threads import LARGE, filled, names_of_workers
storage, tree = filled()
expected = storage.plans.batch.sample_uniform(RandomState(seed=7).state, LARGE)[0]
assert names_of_workers() == ["gpubuf-kernels"]
child = os.fork()
if child == 0:
    assert names_of_workers() == []
    found = storage.plans.batch.sample_uniform(RandomState(seed=7).state, LARGE)[0]
    os._exit(0 if all(map(torch.equal, found, expected)) and names_of_workers() else 1)
assert os.waitpid(child, 0)[1] == 0
storage.plans.batch.sample_uniform(RandomState(seed=7).state, LARGE)
"""
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", program], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
