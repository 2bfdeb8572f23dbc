"""Columns to write, buffers to write them to, and what makes two buffers the same."""

from __future__ import annotations

import numpy as np
import torch
from tensordict import TensorDict

from gpubuf import (
    LazyTensorStorage,
    PrioritizedSampler,
    RandomSampler,
    ReplayBuffer,
    SliceSampler,
    TensorDictReplayBuffer,
)
from tests.support.interrupted_buffers import CAPACITY

SAMPLERS = {
    "uniform": RandomSampler,
    "prioritized": lambda: PrioritizedSampler(CAPACITY, 0.7, 0.5),
    "slices": lambda: SliceSampler(slice_len=2, end_key=("next", "done")),
}
STORAGES = {
    "rows": {},
    "steps": {"ndim": 2},
    "shared": {"ndim": 2, "share_next": True},
    "small": {"dtypes": {"obs": torch.float16}},
}


def rows(shape: tuple[int, ...], start: int) -> dict:
    """NumPy columns of a stream: each next observation is the observation of the step behind, but after an end."""
    steps = start + np.arange(int(np.prod(shape))).reshape(shape)
    obs = np.stack([steps, steps * 2, steps % 5], -1).astype(np.float32)
    following = np.stack([steps + shape[-1], (steps + shape[-1]) * 2, (steps + shape[-1]) % 5], -1).astype(np.float32)
    return {
        "obs": obs,
        "action": (steps % 4).astype(np.int64),
        ("next", "obs"): following,
        ("next", "reward"): (steps * 0.5).astype(np.float32)[..., None],
        ("next", "done"): (steps % 7 == 6)[..., None],
    }


def tensordict(columns: dict, shape: tuple[int, ...]) -> TensorDict:
    data = TensorDict({}, shape)
    for key, value in columns.items():
        data[key] = torch.from_numpy(value)
    return data


def buffer(storage: str, sampler: str = "uniform", **options) -> TensorDictReplayBuffer:
    torch.manual_seed(0)
    made = LazyTensorStorage(CAPACITY, **STORAGES[storage])
    return TensorDictReplayBuffer(storage=made, sampler=SAMPLERS[sampler](), batch_size=4, **options)


def assert_same(one, other) -> None:
    """States are equal, down to each tensor."""
    assert type(one) is type(other)
    if isinstance(one, dict):
        assert one.keys() == other.keys()
        for key in one:
            assert_same(one[key], other[key])
    elif isinstance(one, torch.Tensor):
        torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)
    elif isinstance(one, TensorDict):
        assert_same(one.flatten_keys().to_dict(), other.flatten_keys().to_dict())
    else:
        assert one == other


def assert_same_buffers(one: ReplayBuffer, other: ReplayBuffer) -> None:
    # What was never written is whatever was in the memory.
    for which in (one, other):
        for column in which.storage.columns:
            column.whole[which.storage.steps_stored :] = 0
        which.set_rng(torch.Generator().manual_seed(0))
    assert_same(one.state_dict(), other.state_dict())
    assert_same(one.sample(), other.sample())
