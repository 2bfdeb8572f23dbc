"""Writers, samplers and savers in several threads, and on several CUDA streams.

The lock of a buffer: who gets it, in which order, and that nobody keeps it by mistake.
"""

from __future__ import annotations

import os
import signal
import threading
import zlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from tensordict import TensorDict

from gpubuf import (
    LazyTensorStorage,
    PrioritizedSampler,
    PrioritizedSliceSampler,
    SliceSampler,
    TensorDictReplayBuffer,
    capture,
)
from gpubuf.data.operation import Operation
from tests.support.threads import together, wait_for_line
from tests.support.transitions import transitions

CAPACITY = 2000
EPISODE = 13
SLICE = 5
gpu = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


def steps(start: int, n: int, device: str = "cpu") -> TensorDict:
    """Row i is made of the number ``start + i`` in several keys; an episode ends after every 13 rows."""
    i = torch.arange(start, start + n, device=device)
    column = i.unsqueeze(-1)
    return TensorDict(
        {
            "number": i,
            "wide": column.to(torch.float64).expand(n, 40),
            "next": {"number": i + 1, "done": column % EPISODE == EPISODE - 1, "bytes": (column % 251).to(torch.uint8)},
        },
        [n],
    )


def check_rows(batch: TensorDict) -> None:
    """Every row is whole, and it is the one that its index and generation say."""
    number = batch["number"]
    assert (batch["wide"] == number.unsqueeze(-1)).all()
    assert torch.equal(batch["next", "number"], number + 1)
    assert torch.equal(batch["next", "bytes"].squeeze(-1).long(), number % 251)
    assert torch.equal(batch["index"], number % CAPACITY)


def check_slices(batch: TensorDict) -> None:
    number = batch["number"].view(-1, SLICE)
    assert torch.equal(number, number[:, :1] + torch.arange(SLICE, device=number.device))
    assert (number[:, 0] // EPISODE == number[:, -1] // EPISODE).all()


def check_state(state: dict) -> None:
    """A state is that of one moment: as many rows as its counters say, the newest ones, all of them whole."""
    storage = state["_storage"]
    rows, written, size = storage["rows"], storage["written"], storage["size"]
    assert size == min(written, CAPACITY)
    position = torch.arange(size)
    newest = written - 1 - (written - 1 - position) % CAPACITY
    assert torch.equal(rows["number"], newest)
    assert (rows["wide"][:, -1] == newest).all()


SAMPLERS: dict[str, tuple[Callable, bool]] = {
    "prioritized": (lambda: PrioritizedSampler(CAPACITY, 0.7, 0.5), False),
    "slices": (lambda: SliceSampler(slice_len=SLICE), True),
    "prioritized slices": (lambda: PrioritizedSliceSampler(CAPACITY, 0.7, 0.5, slice_len=SLICE), True),
}


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_writer_sampler_and_saver(sampler):
    """CASES 32: rows are whole, slices stay in their episode, sums fit the leaves, a state is of one moment."""
    make, by_slices = SAMPLERS[sampler]
    buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(CAPACITY), sampler=make(), batch_size=60)
    buffer.extend(steps(0, 300))
    writing = threading.Event()
    writing.set()

    def write():
        start = 300
        sizes = torch.randint(0, 40, (250,), generator=torch.Generator().manual_seed(0)).tolist()
        try:
            for n in [*sizes, CAPACITY + 7, *sizes]:
                buffer.extend(steps(start, n))
                start += n
        finally:
            writing.clear()

    def sample():
        generator = torch.Generator().manual_seed(1)
        n = 0
        while writing.is_set() or n < 50:
            n += 1
            batch = buffer.sample()
            check_rows(batch)
            if by_slices:
                check_slices(batch)
            if "prioritized" in sampler:
                batch["td_error"] = torch.rand(60, generator=generator) * 10.0 ** (n % 7 - 3)
                buffer.update_tensordict_priority(batch)

    def save():
        n = 0
        while writing.is_set() or n < 5:
            n += 1
            # As saving to a file does: the rows of a state are views.
            buffer.operation.run(lambda: check_state(buffer.state_dict()))

    together(write, sample, sample, save)
    check_state(buffer.state_dict())
    if "prioritized" in sampler:
        leaves = buffer.sampler.tree.state_dict()["leaves"].double()
        assert (leaves[: len(buffer)] > 0).all()
        total, due = float(buffer.sampler.tree.total), float(leaves.sum())
        if by_slices:
            # Only eligible starts count: which these are is found anew, and with it every sum.
            buffer.sampler.rebuild()
            assert 0 < total < due
            due = float(buffer.sampler.tree.total)
        assert abs(total - due) <= 1e-12 * total


# Streams, on a GPU


def new_on_gpu(sampler: str, device: str = "cuda", prefetch: int | None = None) -> TensorDictReplayBuffer:
    storage = LazyTensorStorage(CAPACITY, device=device)
    return TensorDictReplayBuffer(storage=storage, sampler=SAMPLERS[sampler][0](), batch_size=60, prefetch=prefetch)


@pytest.mark.parametrize("sampler", [pytest.param(s, marks=gpu) for s in SAMPLERS])
def test_two_streams_on_a_gpu(sampler):
    """CASES 32: a write that is late on its stream is complete in the sample on another, and the other way round."""
    buffer = new_on_gpu(sampler)
    writer, reader = torch.cuda.Stream(), torch.cuda.Stream()
    batches = []
    torch.cuda.set_sync_debug_mode("error")
    try:
        start = 0
        for n in (300, 7, 64, CAPACITY, 1, 500) * 4:
            with torch.cuda.stream(writer):
                data = steps(start, n, "cuda")
                torch.cuda._sleep(2_000_000)
                buffer.extend(data)
            with torch.cuda.stream(reader):
                batch = buffer.sample()
                batches.append((start + n, batch))
                torch.cuda._sleep(2_000_000)
                if "prioritized" in sampler:
                    batch["td_error"] = torch.rand(60, device="cuda")
                    buffer.update_tensordict_priority(batch)
            start += n
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()
    for written, batch in batches:
        check_rows(batch)
        assert (batch["number"] < written).all()
        assert (batch["number"] >= written - CAPACITY).all()
        if SAMPLERS[sampler][1]:
            check_slices(batch)


@pytest.mark.parametrize("sampler", [pytest.param(s, marks=gpu) for s in SAMPLERS])
def test_prefetch_on_a_gpu(sampler):
    """Batches of pinned rows, each drawn when the one before is asked for, with writes in between; no host sync."""
    plain, ahead = new_on_gpu(sampler, "pinned"), new_on_gpu(sampler, "pinned", prefetch=2)
    for buffer in (plain, ahead):
        buffer.set_rng(torch.Generator().manual_seed(0))
        buffer.append_transform(lambda batch: (torch.cuda._sleep(500_000), batch.set("double", batch["number"] * 2))[1])
    queue: list[TensorDict] = []
    pairs = []
    torch.cuda.set_sync_debug_mode("error")
    try:
        for i in range(12):
            for buffer in (plain, ahead):
                buffer.extend(steps(300 * i, 300, "cuda"))
            while len(queue) < 2:
                queue.append(plain.sample())
            pairs.append((queue.pop(0), ahead.sample()))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()
    for due, batch in pairs:
        check_rows(batch)
        assert torch.equal(batch["number"], due["number"])
        assert torch.equal(batch["double"], 2 * batch["number"])


@pytest.mark.parametrize("sampler", [pytest.param(s, marks=gpu) for s in SAMPLERS])
def test_a_buffer_dropped_before_its_draws_on_a_gpu(sampler):
    """A draw that is still due moves the random state on: that memory must not be somebody else's by then."""
    buffer = new_on_gpu(sampler, "pinned", prefetch=2)
    buffer.extend(steps(0, 300, "cuda"))
    torch.cuda._sleep(100_000_000)
    buffer.sample()
    assert buffer.parts.batches.ahead == 1
    del buffer
    others = [torch.zeros(3, dtype=torch.int64, device="cuda") for _ in range(500)]
    torch.cuda.synchronize()
    assert not torch.stack(others).any()


@pytest.mark.parametrize("sampler", [pytest.param("prioritized", marks=gpu)])
def test_another_thread_uses_cuda_during_a_capture(sampler):
    """It allocates, and writes to the buffer of the step: neither fails, and the replay comes after the write."""
    buffer = new_on_gpu(sampler)
    data = steps(CAPACITY, CAPACITY, "cuda")
    buffer.extend(steps(0, CAPACITY, "cuda"))
    # All is compiled and allocated before.
    buffer.extend(steps(0, CAPACITY, "cuda"))
    captures, written = threading.Event(), threading.Event()

    def step() -> TensorDict:
        batch = buffer.sample()
        if torch.cuda.is_current_stream_capturing():
            captures.set()
            assert written.wait(60)
        return batch

    def other() -> None:
        assert captures.wait(60)
        try:
            with torch.cuda.stream(torch.cuda.Stream()):
                torch.empty(1 << 28, dtype=torch.uint8, device="cuda")
                torch.cuda._sleep(50_000_000)
                buffer.extend(data)
        finally:
            written.set()

    run, found = capture(step, warmup=1), []
    together(lambda: found.extend(run()["number"].clone() for _ in range(3)), other)
    assert run.captured
    assert all(number < CAPACITY for number in found[0].tolist())
    assert all(number >= CAPACITY for number in torch.cat(found[1:]).tolist())


@pytest.mark.parametrize("sampler", [pytest.param("prioritized", marks=gpu)])
def test_a_captured_sample_on_a_prefetching_buffer(sampler):
    """With rows on the GPU none is ahead, and the graph draws it. One of pinned rows would not be the graph's."""
    pinned = new_on_gpu(sampler, "pinned", prefetch=2)
    pinned.extend(steps(0, 300, "cuda"))
    pinned.sample()
    with pytest.raises(RuntimeError, match="without prefetch"), torch.cuda.graph(torch.cuda.CUDAGraph()):
        pinned.sample()
    buffer = new_on_gpu(sampler, prefetch=2)
    buffer.extend(steps(0, 300, "cuda"))
    buffer.sample()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        batch = buffer.sample()
    drawn = set()
    for _ in range(5):
        graph.replay()
        check_rows(batch)
        drawn.add(tuple(batch["index"].tolist()))
    assert len(drawn) == 5


def is_free(operation: Operation) -> bool:
    """Whether another thread can begin an operation now."""
    with ThreadPoolExecutor(1) as other:
        return not operation.line and other.submit(operation.lock.acquire, False).result()


def test_threads_get_the_lock_in_the_order_in_which_they_asked():
    """Also before the thread that has just released it and asks again at once."""
    operation, order = Operation(LazyTensorStorage(4)), []
    threads = [threading.Thread(target=operation.run, args=(order.append, number)) for number in range(5)]

    def begin():
        for n, thread in enumerate(threads):
            thread.start()
            wait_for_line(operation, n + 1)

    operation.run(begin)
    operation.run(order.append, "again")
    for thread in threads:
        thread.join()
    assert order == [0, 1, 2, 3, 4, "again"]
    assert is_free(operation)


def test_a_tight_writer_and_a_tight_sampler_have_equal_shares():
    """CASES.md 32: neither gets it twice while the other waits, as the thread would that has just released it."""
    operation, written, before, done = Operation(LazyTensorStorage(4)), [0], [], threading.Event()
    work = bytes(1 << 16)  # enough for zlib to let other threads run

    def count():
        zlib.crc32(work)
        written[0] += 1

    def look():
        zlib.crc32(work)
        before.append(written[0])

    def write():
        while not done.is_set():
            operation.run(count)

    def sample():
        try:
            for _ in range(300):
                operation.run(look)
        finally:
            done.set()

    together(write, sample)
    shares = torch.tensor(before).diff()
    # Not all of them: the interpreter may halt a thread between two of its rounds.
    assert (shares == 1).float().mean() > 0.8


def test_a_wait_that_is_interrupted_gives_up_its_place():
    operation, waiting = Operation(LazyTensorStorage(4)), threading.Event()
    main = threading.get_ident()

    class StoppedError(Exception):
        pass

    def stop(*_):
        if not stopped.is_set():
            stopped.set()
            raise StoppedError

    def hold():
        waiting.set()
        wait_for_line(operation, 1)
        # Not once: a signal that comes just before Python waits for a lock does not end that wait.
        while not stopped.is_set():
            signal.pthread_kill(main, signal.SIGUSR1)
            stopped.wait(0.01)
        released.wait()

    stopped, released, before = threading.Event(), threading.Event(), signal.signal(signal.SIGUSR1, stop)
    holder = threading.Thread(target=operation.run, args=(hold,))
    try:
        holder.start()
        waiting.wait()
        with pytest.raises(StoppedError):
            operation.run(pytest.fail, "the operation began")
        assert not operation.line
    finally:
        released.set()
        holder.join()
        signal.signal(signal.SIGUSR1, before)
    assert is_free(operation)


def test_an_error_at_the_beginning_leaves_the_lock_free():
    operation = Operation(LazyTensorStorage(4))

    def interrupted():
        raise KeyboardInterrupt

    operation.intake = lambda: interrupted
    with pytest.raises(KeyboardInterrupt):
        operation.run(pytest.fail, "the operation began")
    operation.intake = None
    assert is_free(operation)


@pytest.mark.parametrize("method", ["rebuild", "trajectories"])
def test_methods_of_a_sampler_are_operations(method):
    """CASES.md 32: nothing is indexed anew while a row is being written."""
    buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(40), sampler=SliceSampler(slice_len=2))
    buffer.extend(transitions(30))
    operation, thread = buffer.operation, threading.Thread(target=getattr(buffer.sampler, method))

    def wait():
        thread.start()
        while thread.is_alive() and not operation.line:
            os.sched_yield()
        assert len(operation.line) == 1

    operation.run(wait)
    thread.join()
    assert is_free(operation)


def test_a_block_is_one_operation():
    """As TorchRL's programs write it, ``with buffer._replay_lock:``. It begins and ends as an operation does."""
    operation, begun = Operation(LazyTensorStorage(4)), []
    operation.intake = lambda: lambda: begun.append(operation.held)
    with operation.block():
        assert operation.run(lambda: operation.held)
        with operation.block():
            pass
        assert begun == [True]
        with ThreadPoolExecutor(1) as other:
            assert not other.submit(operation.lock.acquire, False).result()
    operation.intake = None
    assert is_free(operation)
