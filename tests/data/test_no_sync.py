"""No host synchronisation on the hot path, shown without a GPU: on fake CUDA tensors ``.item()`` and its like raise.

The buffer is made and filled under FakeTensorMode, where tensors have a device and a shape but no data, so that any
step which needs a value on the host fails.
"""

from __future__ import annotations

import contextlib

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from gpubuf.data import (
    LazyTensorStorage,
    SliceSamplerWithoutReplacement,
    TensorDictReplayBuffer,
)
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


def test_storage_is_allocated_once_and_on_its_own_device(monkeypatch):
    """CASES 27: the full CPU buffer first allocated on the GPU (TorchRL 2187)."""
    allocated = []
    torch_empty, numpy_empty = torch.empty, np.empty

    def on_device(*size, **kwargs):
        tensor = torch_empty(*size, **kwargs)
        if tensor.numel() >= 1000:
            allocated.append((tensor.device.type, tensor.nbytes))
        return tensor

    def on_host(size, dtype):
        allocated.append(("cpu", size * np.dtype(dtype).itemsize))
        return numpy_empty(size, dtype)

    monkeypatch.setattr(torch, "empty", on_device)
    monkeypatch.setattr(np, "empty", on_host)
    data = batch(4)
    due = sorted(1000 * data[key][0].nbytes for key in data.keys(True, True))
    for device in ("cpu", "cuda"):
        allocated.clear()
        TensorDictReplayBuffer(storage=LazyTensorStorage(1000, device=device), batch_size=8).extend(data)
        assert sorted(allocated) == [(device, n_bytes) for n_bytes in due]
