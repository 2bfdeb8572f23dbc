"""No host synchronisation on the hot path, shown without a GPU: on fake CUDA tensors ``.item()`` and its like raise.

The buffer is made and filled under FakeTensorMode, where tensors have a device and a shape but no data, so that any
step which needs a value on the host fails.
"""

from __future__ import annotations

import contextlib
import functools

import pytest
import torch
from tensordict import TensorDict

from gpubuf.data import (
    EmphasizeRecent,
    Geometric,
    LazyTensorStorage,
    OnlineFirst,
    PrioritizedSampler,
    PrioritizedSliceSampler,
    RandomSampler,
    SliceSampler,
    SliceSamplerWithoutReplacement,
    TensorDictReplayBuffer,
)
from gpubuf.data.storage.windows import Window
from tests.support.fake_cuda import DataDependentOutputException, fake_cuda, no_blocking_copies


def batch(n: int) -> TensorDict:
    device = "cuda"
    return TensorDict(
        {
            "observation": torch.empty(n, 17, device=device),
            "action": torch.empty(n, 6, device=device),
            "next": {
                "observation": torch.empty(n, 17, device=device),
                "reward": torch.empty(n, 1, device=device),
                "done": torch.empty(n, 1, dtype=torch.bool, device=device),
            },
        },
        [n],
    )


@pytest.fixture(autouse=True)
def on_fake_cuda():
    with fake_cuda():
        yield


@pytest.fixture
def no_copies(on_fake_cuda):
    """From the first use on: what is allocated then is filled without waiting."""
    with no_blocking_copies():
        yield


def test_the_method_detects_a_sync():
    with pytest.raises(DataDependentOutputException):
        torch.ones(1, device="cuda").item()


@pytest.mark.parametrize("non_blocking", [False, True])
def test_the_method_detects_a_copy_that_is_waited_for(no_copies, non_blocking):
    x = torch.ones(3)
    with contextlib.nullcontext() if non_blocking else pytest.raises(AssertionError, match="waits for the GPU"):
        x.to("cuda", non_blocking=non_blocking)
    y = torch.zeros(3, device="cuda")
    with contextlib.nullcontext() if non_blocking else pytest.raises(AssertionError, match="waits for the GPU"):
        y.copy_(x, non_blocking=non_blocking)


def test_an_epoch_of_slices_synchronises_once():
    """As documented: the number of eligible trajectories is known to the device alone."""
    buffer = TensorDictReplayBuffer(
        storage=LazyTensorStorage(1000, device="cuda"), sampler=SliceSamplerWithoutReplacement(slice_len=4)
    )
    buffer.extend(batch(100))
    with pytest.raises(DataDependentOutputException):
        buffer.sample(8)


SAMPLERS = {
    "uniform": RandomSampler,
    "geometric": lambda: RandomSampler(law=Geometric(0.9)),
    "emphasis": lambda: RandomSampler(law=EmphasizeRecent()),
    "prioritized": functools.partial(PrioritizedSampler, 1000, 0.6, 0.4),
    "new steps first": lambda: OnlineFirst(PrioritizedSampler(1000, 0.6, 0.4), every=4),
    "slices": functools.partial(SliceSampler, slice_len=4),
    "prioritized slices": functools.partial(PrioritizedSliceSampler, 1000, 0.6, 0.4, slice_len=4),
}


@pytest.mark.parametrize(
    ("name", "outside"), [*((name, "repeat") for name in SAMPLERS), ("uniform", "skip"), ("prioritized", "skip")]
)
def test_windows_choose_rows_without_waiting(no_copies, name, outside):
    """Which rows may be drawn is known to the device alone."""
    buffer = TensorDictReplayBuffer(
        storage=LazyTensorStorage(1000, device="cuda"),
        sampler=SAMPLERS[name](),
        windows={"observation": Window(-3, 0, outside=outside, rows="rows")},
    )
    for _ in range(3):
        buffer.extend(batch(500))
        found = buffer.sample(8)
        assert found["observation"].shape == (8, 4, 17)
        assert found["rows", "index_generation"].shape == (8, 4)
        if buffer.sampler.has_priorities:
            buffer.update_priority(found["index"], found["priority_weight"])
    assert buffer.sampler.choose(8)[0].shape == (8,)


def test_no_stream_is_asked_for_where_there_is_no_gpu(monkeypatch):
    """A PyTorch that is made for CUDA raises then."""

    def no_driver(index):
        raise RuntimeError("no NVIDIA driver")

    monkeypatch.setattr("gpubuf.data.operation._raw_stream", no_driver)
    buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(1000, device="cuda"))
    buffer.extend(batch(100))
    buffer.extend(batch(100))
    assert buffer.sample(8)["observation"].shape == (8, 17)
