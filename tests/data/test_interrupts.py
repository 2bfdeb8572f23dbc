"""Case 54: an operation that is interrupted is either done or not done, and nobody waits for it for ever."""

from __future__ import annotations

import functools
import random
import signal
import threading
import warnings

import pytest
import torch

from gpubuf import (
    LazyTensorStorage,
    TensorDictReplayBuffer,
)
from tests.support.interrupted_buffers import CAPACITY, SAMPLERS, check, check_goes_on, steps, written
from tests.support.interrupts import interrupted


def new_buffer(sampler: str, n: int, prefetch: int | None = None) -> TensorDictReplayBuffer:
    torch.manual_seed(0)
    buffer = TensorDictReplayBuffer(
        storage=LazyTensorStorage(CAPACITY), sampler=SAMPLERS[sampler](), batch_size=8, prefetch=prefetch
    )
    if n:
        buffer.extend(steps(0, n))
        buffer.sample()
    return buffer


#: Every third of the places; all of them at full length.
pace = pytest.mark.parametrize("pace", [3, pytest.param(1, marks=pytest.mark.slow)])

#: Operations, and how many rows they write.
WRITES = {
    "extend": (lambda buffer, start: buffer.extend(steps(start, 11), update_priority=False), 11),
    "extend with priorities": (lambda buffer, start: buffer.extend(steps(start, 11, 3.0)), 11),
    "add": (lambda buffer, start: buffer.add(steps(start, 1)[0]), 1),
}


@pace
@pytest.mark.parametrize(("filled", "stride"), [(0, 11), (45, 2)], ids=["first write", "over the seam"])
@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("sampler", SAMPLERS)
def test_a_write_that_is_interrupted_anywhere(sampler, write, filled, stride, pace):
    """Case 54: all of a write, or nothing of it; the sampler knows of all rows that are there."""
    if write == "extend with priorities" and "prioritized" not in sampler:
        pytest.skip("this sampler has no priorities")
    operation, grows = WRITES[write]
    place, outcomes = 0, set()
    while interrupted(functools.partial(operation, buffer := new_buffer(sampler, filled), filled), place):
        outcomes.add(written(buffer))
        check(buffer)
        tree = getattr(buffer.sampler, "_tree", None)
        if write == "extend with priorities" and tree is not None and written(buffer) > filled:
            rows = torch.arange(filled, filled + grows) % CAPACITY
            torch.testing.assert_close(tree.leaves[rows], torch.full((grows,), 3.0**0.7))
        check_goes_on(buffer)
        place += stride * pace
    assert place > 100
    assert outcomes == {filled, filled + grows}


@pace
@pytest.mark.parametrize("prefetch", [None, 2])
@pytest.mark.parametrize("sampler", SAMPLERS)
def test_a_sample_that_is_interrupted_anywhere(sampler, prefetch, pace):
    """Case 54: also where the slices of another length are asked for, and where batches are prepared ahead."""

    def operation(buffer):
        for size in (8, 4):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                buffer.sample(size if prefetch is None else None)

    place = 0
    while interrupted(functools.partial(operation, buffer := new_buffer(sampler, 45, prefetch)), place):
        check_goes_on(buffer)
        place += 3 * pace
    assert place > 50


@pace
@pytest.mark.parametrize("name", ["update_priority", "empty", "load_state_dict", "mark_update"])
@pytest.mark.parametrize("sampler", ["uniform", "prioritized", "slices", "prioritized slices"])
def test_what_changes_rows_or_priorities_is_interrupted_anywhere(sampler, name, pace):
    """Case 54: the buffer is consistent afterwards, and its rows are all there, or none is, or those of the state."""
    if name in ("update_priority", "mark_update") and "prioritized" not in sampler:
        pytest.skip("this sampler has no priorities")
    state = new_buffer(sampler, 20).state_dict()
    operations = {
        "update_priority": lambda buffer: buffer.update_priority(
            torch.tensor([0, 3, 44]), torch.tensor([5.0, 6.0, 7.0])
        ),
        "empty": lambda buffer: buffer.empty(),
        "load_state_dict": lambda buffer: buffer.load_state_dict(state),
        "mark_update": lambda buffer: buffer.mark_update(torch.tensor([0, 3])),
    }
    sizes = {"empty": {45, 0}, "load_state_dict": {45, 20, 0}}.get(name, {45})
    place = 0
    while interrupted(functools.partial(operations[name], buffer := new_buffer(sampler, 45)), place):
        assert len(buffer) in sizes
        check(buffer)
        check_goes_on(buffer)
        place += pace * (9 if name == "load_state_dict" else 2)
    assert place > 10


@pytest.mark.parametrize("rounds", [1000, pytest.param(4000, marks=pytest.mark.slow)])
def test_signals_at_random_times(rounds):
    """Case 54: many real ones, in a loop that writes, samples and sets priorities, beside a second thread."""
    buffer = new_buffer("prioritized slices", 45)
    generator, interrupts, stop = random.Random(0), 0, threading.Event()

    def strike(*_):
        raise KeyboardInterrupt

    def read():
        while not stop.is_set():
            buffer.sample()

    before = signal.signal(signal.SIGALRM, strike)
    reader = threading.Thread(target=read)
    reader.start()
    try:
        for _ in range(rounds):
            start = written(buffer)
            try:
                signal.setitimer(signal.ITIMER_REAL, generator.uniform(1e-6, 6e-4))
                buffer.extend(steps(start, 3, 2.0))
                batch = buffer.sample()
                buffer.update_tensordict_priority(batch.set("td_error", torch.ones(8)))
                signal.setitimer(signal.ITIMER_REAL, 0)
            except KeyboardInterrupt:
                interrupts += 1
                assert buffer.write_count == written(buffer)
                assert written(buffer) in (start, start + 3)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        stop.set()
        reader.join()
    assert interrupts > rounds // 4
    check(buffer)
    check_goes_on(buffer)
