"""Prefetching: what drops the queue, its state, and its thread."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
import weakref

import pytest
import torch

from gpubuf import (
    LazyTensorStorage,
    PrioritizedSampler,
    RoundRobinWriter,
    SamplerWithoutReplacement,
    TensorDictReplayBuffer,
    serialization,
)
from gpubuf.data import moving
from gpubuf.data.prefetch import Prefetcher
from tests.support.prefetch_setup import WAIT, Counter, Gate, identical, new
from tests.support.threads import wait_until
from tests.support.transitions import transitions

# What drops the queue


@pytest.mark.parametrize(
    "what", ["empty", "free", "set_storage", "set_sampler", "set_writer", "set_rng", "load_state_dict"]
)
def test_what_drops_the_queue(what):
    buffer = new("uniform", 3)
    buffer.extend(transitions(50))
    state = new("uniform", None)
    state.extend(transitions(20, 500))
    state = state.state_dict()
    buffer.sample()
    assert len(buffer._prefetcher) == 3
    if what == "set_storage":
        buffer.set_storage(LazyTensorStorage(60))
    elif what == "set_sampler":
        buffer.set_sampler(PrioritizedSampler(60, 1.0, 1.0))
    elif what == "set_writer":
        buffer.set_writer(RoundRobinWriter())
    elif what == "set_rng":
        buffer.set_rng(torch.Generator().manual_seed(5))
    elif what == "load_state_dict":
        buffer.load_state_dict(state)
    else:
        getattr(buffer, what)()
    assert len(buffer._prefetcher) == 0
    if what in ("empty", "free", "set_storage"):
        with pytest.raises(RuntimeError, match="empty"):
            buffer.sample()
        buffer.extend(transitions(50, 500))
    batch = buffer.sample()
    if what == "set_sampler":
        assert "priority_weight" in batch.keys()
    elif what == "set_rng":
        other = new("uniform", None, generator=torch.Generator().manual_seed(5))
        other.extend(transitions(50))
        assert identical(batch, other.sample())
    elif what != "set_writer":
        assert (batch["next", "step"] >= 500).all()


def test_dropping_the_queue_waits_for_the_transform_at_work():
    gate = Gate()
    buffer = new("uniform", 3, transform=gate)
    buffer.extend(transitions(50))
    gate.permits.release()
    buffer.sample()
    thread = threading.Thread(target=buffer.empty)
    thread.start()
    while len(buffer._prefetcher):
        thread.join(0.001)
    gate.permits.release()  # for the one that has begun; those behind it never begin
    thread.join(WAIT)
    assert not thread.is_alive()
    assert len(buffer) == 0
    assert len(buffer._prefetcher) == 0


# State


@pytest.mark.parametrize(
    ("sampler", "depth"), [("prioritized slices", None), ("without replacement", 1), ("uniform", 3)]
)
def test_a_restored_run_goes_on_exactly(sampler, depth, tmp_path):
    """The queue is part of the state; a buffer with a queue of another length, or none, delivers it first."""
    buffer = new(sampler, 3, transform=Counter())
    for i in range(6):
        buffer.extend(transitions(10, 10 * i))
        buffer.sample()
    serialization.save(tmp_path / "state", buffer.state_dict())
    other = new(sampler, depth, transform=Counter(), generator=torch.Generator().manual_seed(9))
    other.extend(transitions(20))
    other.sample()
    other.load_state_dict(serialization.load(tmp_path / "state"))
    for _ in range(9):
        batch, due = other.sample(), buffer.sample()
        assert identical(batch, due)
        assert batch.device == due.device


def test_the_state_is_a_copy_and_so_is_what_is_restored():
    buffer = new("uniform", 2)
    buffer.extend(transitions(50))
    buffer.sample()
    state = buffer.state_dict()
    first, second = new("uniform", 2), new("uniform", None)
    buffer.sample()["action"].zero_()
    first.load_state_dict(state)
    batch = first.sample()
    kept = batch.clone()
    batch.zero_()
    second.load_state_dict(state)
    assert identical(second.sample(), kept)
    assert kept["action"].any()


def test_a_queue_goes_along_when_its_buffer_moves(monkeypatch):
    """Exactly once; and a move to where the buffer is already leaves the queue alone."""
    plain, ahead = new("uniform", None), new("uniform", 2)
    for buffer in (plain, ahead):
        buffer.extend(transitions(50))
    assert identical(ahead.sample(), plain.sample())
    ahead.to("cpu")
    assert identical(ahead.sample(), plain.sample())

    def relocate(*_):
        # stands for another device, which a CPU-only machine doesn't have
        monkeypatch.setattr(Prefetcher, "home", torch.device("cpu"))

    monkeypatch.setattr(Prefetcher, "home", None)
    monkeypatch.setattr(moving, "move", relocate)
    ahead.to("cpu")
    for _ in range(4):
        assert identical(ahead.sample(), plain.sample())


# Threads


def test_two_consumers_share_an_epoch():
    buffer = TensorDictReplayBuffer(
        storage=LazyTensorStorage(400), sampler=SamplerWithoutReplacement(), batch_size=4, prefetch=3
    )
    buffer.extend(transitions(400))
    seen = []

    def consume():
        seen.extend(buffer.sample()["index"] for _ in range(50))

    threads = [threading.Thread(target=consume) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT)
    assert torch.cat(seen).sort().values.tolist() == list(range(400))


def test_the_thread_ends_with_its_buffer():
    """Without the help of the garbage collector, batches in preparation or not."""
    gc.collect()
    gc.disable()
    try:
        buffer = new("prioritized", 3)
        buffer.extend(transitions(50))
        assert buffer._prefetcher._worker is None
        buffer.sample()
        alive, worker = weakref.ref(buffer), buffer._prefetcher._worker[1]
        assert worker() is not None
        del buffer
        wait_until(lambda: worker() is None)
        assert alive() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("fails", ["draw", "transform"])
def test_a_failed_batch_in_the_queue_goes_with_its_buffer(fails):
    """Without the help of the garbage collector; the error still says where it happened when its batch is asked for."""
    n = [0]

    def breaks(batch=None):
        n[0] += 1
        if n[0] > 1:
            local = batch  # noqa: F841
            try:
                raise KeyError("first")
            except KeyError as error:
                raise ValueError("second") from error
        return batch

    gc.collect()
    gc.disable()
    try:
        buffer = new("uniform", 2, transform=breaks if fails == "transform" else None)
        buffer.extend(transitions(50))
        if fails == "draw":
            draw = buffer.sampler.draw
            buffer.sampler.draw = lambda *arguments: (breaks(), draw(*arguments))[1]
        buffer.sample()
        with buffer._lock, buffer._prefetcher.quiet():
            pass
        errors = [slot.outcome for slot in buffer._prefetcher.queue]
        assert [type(error) for error in errors] == [ValueError, ValueError]
        assert errors[0].__traceback__.tb_next is not None
        del errors
        alive = weakref.ref(buffer)
        if fails == "draw":
            del draw, buffer.sampler.draw
        del buffer
        assert alive() is None
    finally:
        gc.enable()


def test_the_interpreter_exits_with_batches_in_preparation():
    program = """
import torch
from tensordict import TensorDict
from gpubuf import LazyTensorStorage, TensorDictReplayBuffer
buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(8), batch_size=4, prefetch=50)
buffer.append_transform(lambda batch: (torch.ones(300, 300) @ torch.ones(300, 300), batch)[1])
buffer.extend(TensorDict({"x": torch.arange(8)}, [8]))
assert buffer.sample()["x"].shape == (4,)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_the_interpreter_exits_after_an_interrupt_that_somebody_keeps():
    """Wherever it struck while the worker was started: its traceback held what told that the worker was there."""
    program = """
import torch
from tensordict import TensorDict
from gpubuf import LazyTensorStorage, TensorDictReplayBuffer
from tests.support.interrupts import interrupted
kept, rows = [], TensorDict({"x": torch.arange(8)}, [8])
while not kept or kept[-1] is not None:
    buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(8), batch_size=4, prefetch=2)
    buffer.extend(rows)
    kept.append(interrupted(buffer._prefetcher._running, len(kept), lines=True))
assert len(kept) > 5
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
