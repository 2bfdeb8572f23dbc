"""Buffers that the tests interrupt, and what must hold in them afterwards."""

from __future__ import annotations

import functools
from concurrent.futures import ThreadPoolExecutor

import torch
from tensordict import TensorDict

from gpubuf import SliceSamplerWithoutReplacement, TensorDictReplayBuffer
from gpubuf.data import Sampler
from gpubuf.kernels.rows import SIZE, WRITTEN
from tests.contracts import buffers

CAPACITY = 50


SAMPLERS = {name: functools.partial(make, CAPACITY) for name, make in buffers.SAMPLERS.items()}
SAMPLERS["slices in turn"] = functools.partial(SliceSamplerWithoutReplacement, slice_len=2)


def steps(start: int, n: int, priority: float = 1.0) -> TensorDict:
    """Rows that are numbered from ``start``; an episode ends after every seventh."""
    number = torch.arange(start, start + n)
    done = (number % 7 == 6).unsqueeze(-1)
    return TensorDict({"number": number, "td_error": torch.full((n,), priority), "next": {"done": done}}, [n])


def written(buffer: TensorDictReplayBuffer) -> int:
    return int(buffer.storage.ring.counters[WRITTEN]) if buffer.initialized else 0


def is_free(buffer: TensorDictReplayBuffer) -> bool:
    """Whether another thread can begin an operation."""

    def try_lock() -> bool:
        lock = buffer.operation.lock
        if not lock.acquire(timeout=60):
            return False
        lock.release()
        return buffer.operation.run(lambda: True)

    with ThreadPoolExecutor(1) as other:
        return other.submit(try_lock).result()


def check(buffer: TensorDictReplayBuffer) -> None:
    """Host and device agree, and so do rows, priorities and index."""
    assert is_free(buffer)
    n = len(buffer)
    storage, sampler = buffer.storage, buffer.sampler
    if not storage.initialized:
        return
    assert [storage.written, n] == storage.ring.counters[[WRITTEN, SIZE]].tolist()
    newest = buffer.operation.run(lambda: storage.written)
    if n:
        position = torch.arange(n)
        rows = storage[:]
        expected = newest - 1 - (newest - 1 - position) % CAPACITY
        assert torch.equal(rows["number"], expected - expected[0] + rows["number"][0])
    tree = getattr(sampler, "_tree", None)
    if tree is not None:
        assert (tree.leaves[:n] > 0).all()
        assert (tree.leaves[n:] == 0).all()
    check_derived(sampler)


def check_derived(sampler: Sampler) -> None:
    """Sums of priorities, the index and the ends of trajectories are what they are when they are made anew."""
    bits = sampler.storage.readers.end_bits
    if bits is not None:
        ends = bits.ends.clone()
        sampler.storage.followers.rebuild()
        assert torch.equal(ends, bits.ends)
    tree = getattr(sampler, "_tree", None)
    if tree is not None:
        nodes = tree.nodes.clone()
        tree.rebuild()
        assert torch.equal(nodes, tree.nodes)
    index = getattr(sampler, "_index", None)
    if index is not None:
        ends, sums = index.ends.clone(), index.sums.clone()
        sampler.rebuild()
        assert torch.equal(sums, index.sums)
        assert torch.equal(ends, index.ends)


def check_goes_on(buffer: TensorDictReplayBuffer) -> None:
    before = written(buffer)
    buffer.extend(steps(before, 9))
    assert written(buffer) == before + 9
    for _ in range(9):
        assert buffer.sample().numel() > 0
    check(buffer)
