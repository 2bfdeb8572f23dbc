"""Prefetched batches: the same ones in the same order, as of the moment at which they were asked for."""

from __future__ import annotations

import functools
import gc
import threading
import traceback
import weakref
from collections import deque

import pytest
import torch
from tensordict import TensorDict

from gpubuf import (
    LazyTensorStorage,
    PrioritizedSampler,
    ReplayBuffer,
    RoundRobinWriter,
    SamplerWithoutReplacement,
    SliceSamplerWithoutReplacement,
    TensorDictReplayBuffer,
)
from gpubuf.data import moving
from gpubuf.data.prefetch import Prefetcher
from tests.contracts import buffers, first_quick
from tests.support.threads import wait_until
from tests.support.transitions import same, transitions
from tests.support.written_rows import FORKED

WAIT = 30.0  # seconds after which a thread that should have come counts as lost

SAMPLERS = {
    **{name: functools.partial(make, 60) for name, make in buffers.SAMPLERS.items()},
    "in order": lambda: SamplerWithoutReplacement(shuffle=False, drop_last=True),
    "slices in turn": lambda: SliceSamplerWithoutReplacement(slice_len=4),
}


def new(sampler: str, prefetch: int | None, **options) -> TensorDictReplayBuffer:
    options = {"batch_size": 8, "generator": torch.Generator().manual_seed(1), **options}
    return TensorDictReplayBuffer(
        storage=LazyTensorStorage(60), sampler=SAMPLERS[sampler](), prefetch=prefetch, **options
    )


def identical(a: TensorDict, b: TensorDict) -> bool:
    """As ``same``, and the index too."""
    return same(a, b) and torch.equal(a["index"], b["index"])


class Gate:
    """A transform that lets one batch through for every permit."""

    def __init__(self) -> None:
        self.permits = threading.Semaphore(0)

    def __call__(self, batch: TensorDict) -> TensorDict:
        assert self.permits.acquire(timeout=WAIT)
        return batch


class Reference:
    """What prefetching is to do, without threads: a batch is drawn when it is asked for."""

    def __init__(self, buffer: TensorDictReplayBuffer, depth: int) -> None:
        self.buffer, self.depth, self.queue = buffer, depth, deque()

    def sample(self) -> TensorDict:
        while len(self.queue) < 1 + self.depth:
            self.queue.append(self.buffer.sample())
        return self.queue.popleft()


@pytest.mark.parametrize("slow", [False, True])
@pytest.mark.parametrize("sampler", ["uniform", "in order", "prioritized", "slices in turn", "prioritized slices"])
def test_a_batch_is_drawn_when_it_is_asked_for(sampler, slow):
    """Whatever the worker's pace: where it is behind, a write makes the draws that are due before itself."""
    gate = Gate()
    reference, ahead = Reference(new(sampler, None), 3), new(sampler, 3, transform=gate)
    if not slow:
        gate.permits.release(1000)
    for i in range(25):
        for buffer in (reference.buffer, ahead):
            buffer.extend(transitions(9, 20 * i))
            if i % 3 == 0 and "prioritized" in sampler and i:
                buffer.update_priority(torch.arange(i % 20), 0.1 + i)
        if i == 12:
            reference.queue.clear()
            gate.permits.release(10)  # the batch in the transform is waited for
            for buffer in (reference.buffer, ahead):
                buffer.set_rng(torch.Generator().manual_seed(3))
            while slow and gate.permits.acquire(blocking=False):
                pass
        if slow:
            # Enough for this batch: those ahead wait in the transform, or before their draw.
            gate.permits.release()
        assert identical(ahead.sample(), reference.sample())
    gate.permits.release(1000)


@pytest.mark.parametrize("sampler", ["without replacement", "in order", "slices in turn"])
def test_epochs_end_at_the_same_batch(sampler):
    plain, ahead = new(sampler, None), new(sampler, 3)
    for buffer in (plain, ahead):
        buffer.extend(transitions(50))
    for _ in range(3):
        due, batches = list(plain), list(ahead)
        assert len(batches) == len(due) > 1
        assert all(map(identical, batches, due))
    assert identical(ahead.next(), plain.next())


def test_other_batch_sizes_are_drawn_behind_the_queue():
    plain, ahead = new("prioritized", None), new("prioritized", 2)
    for buffer in (plain, ahead):
        buffer.extend(transitions(50))
    due = [plain.sample() for _ in range(3)]
    with pytest.warns(UserWarning, match="batch_size=5"):
        other_due = plain.sample(5)
    assert identical(ahead.sample(), due[0])
    with pytest.warns(UserWarning, match="batch_size=5"):
        other = ahead.sample(5)
    assert identical(other, other_due)
    for batch in (due[1], due[2], plain.sample()):
        assert identical(ahead.sample(8), batch)


def test_info_is_in_the_batch_where_it_is_wanted():
    buffer = new("prioritized", 2)
    buffer.extend(transitions(50))
    assert "index" not in buffer.sample(include_info=False).keys()
    assert {"index", "priority_weight", "index_generation"} <= set(buffer.sample().keys())
    plain = ReplayBuffer(storage=LazyTensorStorage(60), batch_size=4, prefetch=2, collate_fn=lambda td: td["action"])
    plain.extend(transitions(50))
    batch, info = plain.sample(return_info=True)
    assert torch.equal(batch[:, 0].long(), info["index"])


def test_late_priorities_of_overwritten_rows_are_dropped():
    """CASES 12, with batches that were drawn ahead of the write."""
    buffer = new("prioritized", 2)
    buffer.extend(transitions(60))
    buffer.sample()
    buffer.extend(transitions(60, 60))
    batch = buffer.sample()
    assert (batch["next", "step"] < 60).all()
    before = buffer.sampler.tree.state_dict()["leaves"].clone()
    buffer.update_tensordict_priority(batch.set("td_error", torch.full((8,), 9.0)))
    assert torch.equal(buffer.sampler.tree.state_dict()["leaves"], before)


def test_hyperparameters_apply_to_batches_asked_for_later():
    """Also where the worker is behind: setting one makes the draws that are due first."""
    gate = Gate()
    reference, ahead = Reference(new("prioritized", None), 3), new("prioritized", 3, transform=gate)
    for i in range(8):
        for buffer in (reference.buffer, ahead):
            if i == 0:
                buffer.extend(transitions(60))
                buffer.update_priority(torch.arange(60), torch.arange(60.0))
            buffer.sampler.beta = 0.1 * i
            buffer.sampler.alpha = 0.5 + 0.1 * i
        gate.permits.release()
        batch, due = ahead.sample(), reference.sample()
        assert identical(batch, due)
        assert torch.equal(batch["priority_weight"], due["priority_weight"])
    gate.permits.release(100)


def test_preparation_runs_beside_the_consumer():
    """The next batch is being transformed while the consumer has this one."""
    entered = threading.Semaphore(0)
    threads = set()

    def transform(batch):
        threads.add(threading.get_ident())
        entered.release()
        return batch

    buffer = new("uniform", 2, transform=transform)
    buffer.extend(transitions(50))
    for i in range(5):
        buffer.sample()
        for _ in range(3 if i == 0 else 1):
            assert entered.acquire(timeout=WAIT)
    assert threads
    assert threading.get_ident() not in threads
    assert len(threads) == 1


# Errors


def test_errors_of_transforms_come_with_their_batch_and_traceback():
    seen = []

    def breaks_at_three(batch):
        seen.append(batch["next", "step"])
        if len(seen) == 3:
            raise KeyError("third")
        return batch

    plain, ahead = new("uniform", None), new("uniform", 3, transform=breaks_at_three)
    for buffer in (plain, ahead):
        buffer.extend(transitions(50))
    due = [plain.sample() for _ in range(6)]
    for i in (0, 1):
        assert identical(ahead.sample(), due[i])
    with pytest.raises(KeyError, match="third") as caught:
        ahead.sample()
    assert "breaks_at_three" in "".join(traceback.format_tb(caught.value.__traceback__))
    for i in (3, 4, 5):
        assert identical(ahead.sample(), due[i])


def test_a_failed_draw_ahead_of_time_is_forgotten():
    plain, ahead = new("in order", None, batch_size=20), new("in order", 3, batch_size=20)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="empty"):
            ahead.sample()
    for n in (10, 30):
        for buffer in (plain, ahead):
            buffer.extend(transitions(n))
        if n == 10:
            for buffer in (plain, ahead):
                with pytest.raises(ValueError, match=r"batch size \(20\) is greater than .* in use, 10 rows"):
                    buffer.sample()
    for _ in range(4):
        assert identical(ahead.sample(), plain.sample())


def test_transforms_may_read_the_buffer_but_not_wait_for_it():
    """A transform that samples gets a batch of its own; one that saves would wait for itself."""
    buffer = new("uniform", 2)
    buffer.extend(transitions(50))
    buffer.append_transform(lambda batch: batch.set("first", buffer.storage[torch.zeros(8, dtype=torch.int64)]))
    buffer.sample()
    assert len(buffer.state_dict()["_prefetch"]) == 2
    depth = threading.local()

    def samples(batch):
        if not getattr(depth, "inside", False):
            depth.inside = True
            batch = batch.set("other", buffer.sample()["action"])
            depth.inside = False
        return batch

    buffer.append_transform(samples)
    buffer.empty()
    buffer.extend(transitions(50))
    assert "other" in buffer.sample().keys()
    buffer.append_transform(lambda batch: buffer.state_dict())
    buffer.empty()
    buffer.extend(transitions(50))
    with pytest.raises(RuntimeError, match="wait for its own batch"):
        buffer.sample()


def test_transforms_run_in_the_grad_mode_of_the_consumer():
    weight = torch.ones(1, requires_grad=True)
    buffer = new("uniform", 1, transform=lambda batch: batch.set("y", batch["observation"] * weight))
    buffer.extend(transitions(50))
    with torch.no_grad():
        assert not buffer.sample()["y"].requires_grad
        assert not buffer.sample()["y"].requires_grad
    buffer.sample()  # asked for under no_grad
    assert buffer.sample()["y"].requires_grad


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


BEGIN = """
import ctypes, os, torch
from tensordict import TensorDict
from gpubuf import LazyTensorStorage, TensorDictReplayBuffer
for descriptor in (1, 2):
    os.dup2(os.open(OUTPUT, os.O_WRONLY | os.O_CREAT | os.O_APPEND), descriptor)
rows = TensorDict({"x": torch.arange(8)}, [8])
"""
PREPARES = """
buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(8), batch_size=4, prefetch=50)
buffer.append_transform(lambda batch: (torch.ones(300, 300) @ torch.ones(300, 300), batch)[1])
buffer.extend(rows)
assert buffer.sample()["x"].shape == (4,)
"""
#: Wherever the interrupt struck while the worker was started: its traceback held what told that the worker was there.
INTERRUPTED = """
from tests.support.interrupts import interrupted
kept = []
while not kept or kept[-1] is not None:
    buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(8), batch_size=4, prefetch=2)
    buffer.extend(rows)
    kept.append(interrupted(buffer._prefetcher._running, len(kept), lines=True))
assert len(kept) > 5
"""


@pytest.mark.parametrize("program", first_quick([INTERRUPTED, PREPARES]), ids=["interrupted", "prepares"])
def test_the_interpreter_exits(program, tmp_path):
    """With batches in preparation, and after an interrupt that somebody keeps: in a process that shuts Python down."""
    names = {"OUTPUT": str(tmp_path / "output")}
    process = FORKED.Process(target=exec, args=(f"{BEGIN}{program}\nctypes.pythonapi.Py_Exit(17)", names))
    process.start()
    process.join(120)
    try:
        assert (process.exitcode, (tmp_path / "output").read_text()) == (17, "")
    finally:
        process.kill()
