"""Buffers for a device without kernels here, such as MPS and XPU: rows on the CPU, batches on the device."""

import pytest
import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor

from gpubuf import (
    LazyTensorStorage,
    MixedReplayBuffer,
    PrioritizedSampler,
    RandomSampler,
    ReplayBuffer,
    TensorDictPrioritizedReplayBuffer,
    TensorDictReplayBuffer,
)
from tests.support.stand_in_device import DEVICE, OnDevice, stand_in_device


@pytest.fixture(autouse=True)
def _device():
    with stand_in_device():
        yield


def rows(n: int, start: int = 0) -> TensorDict:
    number = torch.arange(start, start + n)
    return TensorDict({"number": number, "next": {"reward": number[:, None].float()}}, [n])


def on_cpu(batch: TensorDictBase) -> dict:
    """The tensors of a batch, all of which are on the device, on the CPU."""
    found = dict(batch.items(True, True))
    assert all(type(value) is OnDevice and value.device == DEVICE for value in found.values())
    return {key: value.inner for key, value in found.items()}


@pytest.mark.parametrize("sampler", [RandomSampler, lambda: PrioritizedSampler(20, 0.7, 0.5)], ids=["uniform", "tree"])
def test_batches_are_those_of_the_cpu(sampler):
    """The draws, the rows and the info are those of a buffer on the CPU; so are writes from the device."""
    batches = []
    for device in ("mps", "cpu"):
        buffer = TensorDictReplayBuffer(
            storage=LazyTensorStorage(20, device=device), sampler=sampler(), batch_size=6,
            generator=torch.Generator().manual_seed(3),
        )  # fmt: skip
        buffer.extend(rows(15))
        buffer.extend(rows(10, 15).to(device))
        buffer.add(rows(1, 25)[0].to(device))
        batches.append([buffer.sample() for _ in range(3)])
        assert buffer.storage.device == torch.device("cpu")
        assert len(buffer) == 20
    for ours, theirs in zip(*batches, strict=True):
        assert str(ours.device) == "mps"
        ours, theirs = on_cpu(ours), dict(theirs.items(True, True))
        assert ours.keys() == theirs.keys()
        for key, value in theirs.items():
            assert torch.equal(ours[key], value), key


def test_priorities_come_from_the_device():
    """A loss there gives priorities, which a batch of there takes back."""
    buffer = TensorDictPrioritizedReplayBuffer(
        alpha=1.0, beta=1.0, eps=0.0, storage=LazyTensorStorage(8, device="mps"), batch_size=32
    )
    buffer.extend(rows(8))
    batch = buffer.sample()
    batch.set("td_error", OnDevice(2.0 + on_cpu(batch)["number"].float()))
    buffer.update_tensordict_priority(batch)
    drawn = on_cpu(batch)["number"].unique()
    assert torch.equal(buffer.sampler.tree.leaves[drawn], 2.0 + drawn.float())
    buffer.update_priority(OnDevice(torch.arange(8)), OnDevice(torch.full((8,), 5.0)))
    assert torch.equal(buffer.sampler.tree.leaves[:8], torch.full((8,), 5.0))


def test_columns_info_and_transforms_are_there():
    """A transform gets what is on the device; mixed batches are there, too."""
    seen: list[Tensor] = []

    def look(batch: TensorDictBase) -> TensorDictBase:
        seen.append(batch["number"])
        return batch

    buffers = [ReplayBuffer(LazyTensorStorage(8, device="mps"), batch_size=4, transform=look) for _ in range(2)]
    for buffer in buffers:
        buffer.extend(rows(8))
        data, info = buffer.sample(return_info=True)
        assert torch.equal(on_cpu(data)["number"], info["index"].inner)
        assert {type(value) for value in buffer.sample_columns().values()} == {OnDevice}
    mixed = MixedReplayBuffer(buffers, batch_size=6)
    data, info = mixed.sample(return_info=True)
    assert on_cpu(data)["number"].shape == (6,)
    assert info["index"].device == DEVICE
    assert {type(value) for value in seen} == {OnDevice}


def test_a_buffer_moves_there_and_back():
    """The rows stay where they are; batches go to the device from then on."""
    buffer = ReplayBuffer(LazyTensorStorage(8), batch_size=4)
    buffer.extend(rows(8))
    buffer.to("mps")
    on_cpu(buffer.sample())
    buffer.to("cpu")
    assert buffer.sample()["number"].device == torch.device("cpu")


def test_what_the_device_lacks_is_said_at_the_first_write():
    """One sentence, with the key and its dtype; ``batch_dtypes`` helps."""
    data = TensorDict({"x": torch.zeros(2, dtype=torch.float64)}, [2])
    with pytest.raises(RuntimeError, match=r"'x', torch.float64, can't be copied to mps: Cannot convert a MPS Tensor"):
        ReplayBuffer(LazyTensorStorage(4, device="mps")).extend(data)
    buffer = ReplayBuffer(LazyTensorStorage(4, device="mps", batch_dtypes={"x": torch.float32}), batch_size=2)
    buffer.extend(data)
    assert on_cpu(buffer.sample())["x"].dtype is torch.float32
    there = ReplayBuffer(LazyTensorStorage(4))
    there.extend(data)
    with pytest.raises(RuntimeError, match=r"'x', torch\.float64"):
        there.to("mps")
    assert there.storage.device == torch.device("cpu")
    assert len(there) == 2


def test_a_device_that_is_not_there():
    """PyTorch says why."""
    with pytest.raises(RuntimeError, match="can't be copied to xpu: Torch not compiled with XPU enabled"):
        ReplayBuffer(LazyTensorStorage(4, device="xpu")).extend(rows(2))
