"""Observations stored once beside all else: n-step transitions, samplers, prefetch, threads of a buffer's life."""

from __future__ import annotations

import pytest
import torch
from tensordict import TensorDict

from gpubuf import (
    LazyTensorStorage,
    PrioritizedSampler,
    RandomSampler,
    SamplerWithoutReplacement,
    SliceSampler,
    TensorDictReplayBuffer,
)
from gpubuf.data.samplers.trajectory_index import interleaved_environments
from gpubuf.data.writers import RoundRobinWriter
from tests.support.shared_rows import Stream, same_bytes

CAPACITY = 40
SAMPLERS = {
    "uniform": RandomSampler,
    "without replacement": SamplerWithoutReplacement,
    "prioritized": lambda: PrioritizedSampler(CAPACITY, 0.7, 0.5),
    "slices": lambda: SliceSampler(slice_len=3, end_key=("next", "done")),
}


def twins(sampler: str = "uniform", **arguments) -> list[TensorDictReplayBuffer]:
    """A buffer that stores observations once, and one that doesn't, with the same random numbers."""
    found = []
    for share in (True, False):
        storage = LazyTensorStorage(CAPACITY, share_next=share, next_capacity=CAPACITY if share else None)
        buffer = TensorDictReplayBuffer(
            storage=storage,
            sampler=SAMPLERS[sampler](),
            batch_size=12,
            generator=torch.Generator().manual_seed(3),
            **arguments,
        )
        found.append(buffer)
    return found


def test_environments_that_take_turns_are_noticed():
    """Whole rows are read, although next observations are stored nowhere."""
    envs, steps = 3, 12
    values = torch.randn(1, envs, 6) * 10 + torch.arange(steps + 1.0)[:, None, None]
    rows = TensorDict(
        {
            "observation": values[:-1].reshape(-1, 6),
            "next": {
                "observation": values[1:].reshape(-1, 6),
                "done": torch.zeros(envs * steps, 1, dtype=torch.bool),
            },
        },
        [envs * steps],
    )
    for share in (True, False):
        storage = LazyTensorStorage(CAPACITY, share_next=share)
        storage.append(rows)
        assert interleaved_environments(storage) == envs


def test_single_keys_are_not_written_back():
    """The observation of a row is also the next one of the row before."""
    storage = LazyTensorStorage(CAPACITY, share_next=True)
    writer = RoundRobinWriter(track_generations=True)
    buffer = TensorDictReplayBuffer(storage=storage, writer=writer, batch_size=4)
    buffer.extend(Stream(4).steps(20))
    batch, info = buffer.sample(return_info=True)
    for key in ("observation", ("next", "observation")):
        back = batch.select(key)
        with pytest.raises(ValueError, match=r"stored once .*share_next"):
            buffer.update_if_present(info["index"], back, generation=info["index_generation"])
    back = batch.select(("next", "reward"))
    buffer.update_if_present(info["index"], back, generation=info["index_generation"])


def test_compiled_writes_in_place():
    torch._dynamo.reset()
    results = []
    for compiles in (False, True):
        stream, buffers = Stream(4), twins()
        storage = buffers[0].storage
        storage.append(stream.steps(30))
        write = torch.compile(storage.write, fullgraph=True, backend="aot_eager") if compiles else storage.write
        write(torch.tensor([4, 11, 0]), stream.rows_at(3))
        write(torch.tensor([12, 29, 1]), stream.rows_at(3))
        results.append(storage[:])
    assert same_bytes(*results)


def test_what_a_storage_says_of_itself():
    storage = LazyTensorStorage(CAPACITY, share_next=True)
    storage.append(Stream(4).steps(20))
    assert "('next', 'observation'): [6] torch.float32 in 'observation'" in repr(storage)
    assert repr(storage.sharing) == "Sharing(observation, room for 40 aside)"
