"""Buffers whose batches are prepared, and what is."""

import torch
from tensordict import TensorDict

from gpubuf.data import (
    LazyTensorStorage,
    PrioritizedSampler,
    PrioritizedSliceSampler,
    RandomSampler,
    SliceSampler,
    TensorDictReplayBuffer,
    slots,
)

CAPACITY = 256
SAMPLERS = {
    "uniform": RandomSampler,
    "prioritized": lambda: PrioritizedSampler(CAPACITY, 0.6, 0.4),
    "stratified": lambda: PrioritizedSampler(CAPACITY, 0.6, 0.4, stratified=True),
    "slices": lambda: SliceSampler(slice_len=4),
    "prioritized slices": lambda: PrioritizedSliceSampler(CAPACITY, 0.6, 0.4, slice_len=4),
}


def rows(n, start=0):
    """Few keys, for the interpreter takes its time for each."""
    steps = torch.arange(start, start + n)[:, None]
    coming = {"observation": steps + 1.0 + torch.zeros(3), "done": steps % 20 == 19}
    return TensorDict({"observation": steps + torch.zeros(3), "next": coming}, [n])


def buffer_of(kind="uniform", seed=3, device="cpu", **options):
    storage = LazyTensorStorage(CAPACITY, device=device)
    buffer = TensorDictReplayBuffer(storage=storage, sampler=SAMPLERS[kind](), **options)
    buffer.set_rng(torch.Generator().manual_seed(seed))
    buffer.extend(rows(120))
    return buffer


def prepared(buffer):
    """What is prepared for the buffer's batches."""
    batches = buffer.parts.batches
    known = getattr(getattr(batches, "_plain", batches)._draw.__self__, "_known", {})
    return [each for each in known.values() if isinstance(each, slots._Prepared)]


def same(one, other):
    assert sorted(map(str, one.keys(True))) == sorted(map(str, other.keys(True)))
    return all(torch.equal(value, other[key]) for key, value in one.items(True, True))
