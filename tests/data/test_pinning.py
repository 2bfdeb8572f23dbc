"""Pinned batches: every tensor, after all transforms, whatever device a TensorDict claims."""

from __future__ import annotations

import _thread
import threading
from typing import NamedTuple

import pytest
import torch
from tensordict import TensorDict, tensorclass
from torch import Tensor

from gpubuf import (
    LazyTensorStorage,
    PrioritizedSampler,
    ReplayBuffer,
    TensorDictReplayBuffer,
)
from gpubuf.data import prefetch
from gpubuf.data.prefetch import copied, map_tensors, pin, tensors_of
from tests.support.transitions import same, transitions


class Pair(NamedTuple):
    a: Tensor
    b: Tensor


@tensorclass
class Step:
    observation: Tensor
    reward: Tensor


@pytest.fixture
def accelerator(monkeypatch):
    """A machine with an accelerator, on which pinning copies and is remembered. Returns the count of copies."""
    pinned: dict[int, Tensor] = {}  # alive, so that no other tensor gets the same id
    # Buffers of the test before may still be preparing batches. No thread that is there already counts but this one.
    own, start = threading.local(), _thread.start_new_thread
    own.here = True

    def start_own(function, arguments):
        def run():
            own.here = True
            function(*arguments)

        return start(run, ())

    def pin_memory(self):
        copy = self.clone()
        if hasattr(own, "here"):
            pinned[id(copy)] = copy
        return copy

    monkeypatch.setattr(_thread, "start_new_thread", start_own)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(Tensor, "pin_memory", pin_memory)
    monkeypatch.setattr(Tensor, "is_pinned", lambda self: id(self) in pinned)
    return pinned


def all_pinned(*data) -> bool:
    return all(tensor.is_pinned() for tensor in tensors_of(data))


def rebuilt(batch: TensorDict) -> TensorDict:
    """A transform that builds a TensorDict without a device, out of tensors of its own."""
    return TensorDict({"x": batch["observation"] * 2, "deep": {"er": batch["next", "observation"] + 1}}, [len(batch)])


@pytest.mark.parametrize("transform", [None, rebuilt, lambda batch: batch], ids=["none", "rebuilt", "identity"])
@pytest.mark.parametrize("prefetch", [None, 2])
def test_every_tensor_is_pinned_after_the_transforms(accelerator, transform, prefetch):
    """CASES 26: a transform that builds a TensorDict without a device; index and weights are pinned too."""
    storage = LazyTensorStorage(20)
    buffer = TensorDictReplayBuffer(
        storage=storage,
        sampler=PrioritizedSampler(20, 0.5, 0.5),
        pin_memory=True,
        batch_size=6,
        prefetch=prefetch,
        transform=transform,
    )
    buffer.extend(transitions(10))
    seen = []
    buffer.append_transform(lambda batch: (seen.append(all_pinned(batch)), batch)[1])
    for include_info in (True, False):
        batch, info = buffer.sample(return_info=True, include_info=include_info)
        assert all_pinned(batch, info)
        assert {"index", "priority_weight", "index_generation"} <= set(info)
        assert ("index" in batch.keys()) == include_info
        if transform is rebuilt:
            assert batch.device is None
            assert torch.equal(batch["x"][:, 0].long(), 2 * info["index"])
            assert torch.equal(batch["deep", "er"][:, 0].long(), info["index"] + 2)
        if include_info:
            assert batch["index"] is info["index"]
    assert not any(seen)


def test_plain_buffers_and_collated_batches(accelerator):
    buffer = ReplayBuffer(
        storage=LazyTensorStorage(20),
        pin_memory=True,
        batch_size=4,
        collate_fn=lambda td: Pair(td["observation"], td["action"]),
    )
    buffer.extend(transitions(10))
    batch, info = buffer.sample(return_info=True)
    assert isinstance(batch, Pair)
    assert all_pinned(batch, info)
    assert torch.equal(batch.a[:, 0].long(), info["index"])


def test_structures_keep_their_types(accelerator):
    shared = torch.arange(3)
    step = Step(observation=torch.ones(3, 2), reward=torch.zeros(3), batch_size=[3])
    named = TensorDict({"x": torch.ones(3), "name": "text"}, [3], device="cpu")
    data = [step, (shared, {"again": shared}), Pair(torch.ones(1), torch.ones(1)), named, "text", 3]
    out = pin(data)
    assert isinstance(out[0], Step)
    assert isinstance(out[2], Pair)
    assert out[1][0] is out[1][1]["again"]
    assert out[3]["name"] == "text"
    assert out[3].device == torch.device("cpu")
    assert out[4:] == ["text", 3]
    assert all_pinned(out)
    assert not any(t.is_pinned() for t in tensors_of(data))
    assert len(list(tensors_of(out))) == 7


def test_tensors_on_a_gpu_stay(accelerator):
    meta = torch.empty(3, device="meta")  # stands for any other device
    assert pin(TensorDict({"x": meta}, [3]))["x"] is meta
    assert not accelerator


def test_without_an_accelerator_one_warning(monkeypatch):
    monkeypatch.setattr(prefetch, "_warned", False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(4), pin_memory=True)
    buffer.extend(transitions(4))
    with pytest.warns(UserWarning, match="accelerator"):
        batch = buffer.sample(2)
    assert same(batch, transitions(4)[batch["index"]])
    buffer.sample(2)


def test_copies_claim_a_device_where_asked():
    data = TensorDict({"x": torch.ones(2)}, [2])
    assert copied(data, None).device is None
    assert copied(data, "cpu", claim=True).device == torch.device("cpu")
    assert copied(data, "cpu")["x"] is not data["x"]
    assert map_tensors(None, torch.clone) is None


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("prefetch", [None, 2])
def test_on_a_gpu(prefetch):
    """CASES 26, for real."""
    buffer = TensorDictReplayBuffer(
        storage=LazyTensorStorage(20), pin_memory=True, batch_size=6, prefetch=prefetch, transform=rebuilt
    )
    buffer.extend(transitions(10))
    for _ in range(4):
        batch, info = buffer.sample(return_info=True)
        assert all_pinned(batch, info)
        assert batch["x"].is_pinned()
        assert torch.equal(batch["x"][:, 0].long(), 2 * info["index"])
