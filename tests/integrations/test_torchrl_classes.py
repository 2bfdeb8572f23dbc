"""gpubuf's classes with TorchRL's types: gpubuf's behaviour, none of TorchRL's code. TorchRL need not be installed."""

from __future__ import annotations

import copy
import importlib
import pickle
import subprocess
import sys
from typing import Any

import pytest
import torch
from tensordict import TensorDict

import gpubuf.data
from gpubuf.integrations import torchrl as ours
from tests.support import torchrl_stand_in

JOINED = torchrl_stand_in.joined()
BUFFERS = ("ReplayBuffer", "TensorDictReplayBuffer", "PrioritizedReplayBuffer", "TensorDictPrioritizedReplayBuffer")


def batch(n: int, *shape: int) -> TensorDict:
    done = torch.zeros(*shape, n, 1, dtype=torch.bool)
    done[..., -1, :] = True
    rows = {"observation": torch.randn(*shape, n, 3), "next": {"reward": torch.randn(*shape, n, 1), "done": done}}
    return TensorDict(rows, (*shape, n))


def buffer_of(name: str, **options: Any) -> Any:
    if "Prioritized" in name:
        options = {"alpha": 0.6, "beta": 0.4, **options}
    return getattr(JOINED, name)(batch_size=8, **options)


def is_torchrl(instance: Any) -> bool:
    """Whether an instance is one of TorchRL's class of the same name, and of gpubuf's."""
    theirs = [base for base in type(instance).__mro__ if base.__module__.startswith("torchrl")]
    return any(base.__name__ == type(instance).__name__ for base in theirs)


@pytest.mark.parametrize("name", JOINED.__all__)
def test_a_class_is_of_both_libraries(name: str):
    joined = getattr(JOINED, name)
    assert issubclass(joined, getattr(ours, name))
    assert next(base.__name__ for base in joined.__mro__ if base.__module__.startswith("torchrl")) == name


@pytest.mark.parametrize("name", BUFFERS)
def test_a_buffer_and_its_parts_have_torchrls_types(name: str):
    buffer = buffer_of(name)
    assert is_torchrl(buffer)
    assert is_torchrl(buffer.storage)
    assert is_torchrl(buffer.sampler)
    assert is_torchrl(buffer.writer)
    buffer.extend(batch(20))
    batch_of_it = buffer.sample()
    assert batch_of_it.shape == (8,)
    assert ("index" in batch_of_it.keys()) == name.startswith("TensorDict")


def test_no_call_of_the_fast_path_is_added():
    """A call of a joined buffer is that of gpubuf's class: the same function."""
    for name in ("sample", "update_priority", "update_tensordict_priority"):
        assert getattr(JOINED.TensorDictReplayBuffer, name) is getattr(gpubuf.data.TensorDictReplayBuffer, name)
    for name in ("draw", "on_write"):
        assert getattr(JOINED.PrioritizedSampler, name) is getattr(gpubuf.data.PrioritizedSampler, name)
    for name in ("append", "append_columns"):
        assert getattr(JOINED.LazyTensorStorage, name) is getattr(gpubuf.data.LazyTensorStorage, name)
    buffer = buffer_of("TensorDictReplayBuffer")
    # TorchRL's ensemble finds one to call, and batches are made without.
    assert buffer._collate_fn("rows") == "rows"
    assert buffer.parts.batches.collate_fn is None


def test_the_parts_that_a_buffer_makes_later_have_torchrls_types():
    """That of the first write of objects."""
    buffer = buffer_of("ReplayBuffer")
    buffer.extend(["some", "text"])
    assert type(buffer.storage) is JOINED.ListStorage
    assert set(buffer.sample()) <= {"some", "text"}


@pytest.mark.parametrize(
    "copied", [copy.deepcopy, lambda buffer: pickle.loads(pickle.dumps(buffer))], ids=["deep", "pickle"]
)
def test_copies(copied: Any):
    if copied is not copy.deepcopy and not torchrl_stand_in.installed():
        pytest.skip("needs TorchRL: pickle looks the classes up where they were imported")
    buffer = buffer_of("TensorDictPrioritizedReplayBuffer")
    buffer.extend(batch(20))
    other = copied(buffer)
    other.extend(batch(5))
    assert (len(buffer), len(other), type(other)) == (20, 25, type(buffer))
    assert other.sample().shape == (8,)


@pytest.mark.parametrize(
    ("name", "expected"),
    [("RandomSampler", "SamplerWithoutReplacement"), ("SliceSampler", "SliceSamplerWithoutReplacement")],
)
def test_replacement_false_gives_a_joined_sampler(name: str, expected: str):
    options = {"slice_len": 2} if name == "SliceSampler" else {}
    assert type(getattr(JOINED, name)(replacement=False, **options)) is getattr(JOINED, expected)
    assert type(getattr(JOINED, name)(replacement=True, **options)) is getattr(JOINED, name)


def test_replacement_false_of_a_prioritized_sampler():
    with pytest.raises(TypeError, match="PrioritizedSampler has no form without replacement: leave"):
        JOINED.PrioritizedSampler(10, 0.5, 0.5, replacement=False)


def test_a_sampler_of_ones_own():
    class First(JOINED.Sampler):  # type: ignore[misc,name-defined]
        def choose(self, n: int) -> tuple[torch.Tensor, dict[Any, torch.Tensor]]:
            return torch.zeros(n, dtype=torch.int64), {}

    buffer = JOINED.TensorDictReplayBuffer(sampler=First(), batch_size=4)
    buffer.extend(batch(20))
    assert buffer.sample()["index"].tolist() == [0] * 4


# Messages


def test_a_member_that_gpubuf_has_not():
    sampler = JOINED.SliceSampler(slice_len=2)
    with pytest.raises(
        NotImplementedError, match=r"SliceSampler.fragmented is TorchRL's, .* docs/migration-arguments.md says what"
    ):
        assert sampler.fragmented
    assert not hasattr(sampler, "fragmented")


@pytest.mark.parametrize("name", BUFFERS)
def test_a_collector_finds_a_buffer_shared_that_takes_rows_of_its_processes(name: str):
    """Case 69: TorchRL's collectors of several processes share one that is not, which is refused here."""
    assert buffer_of(name, shared=True).shared is True
    assert buffer_of(name).shared is False


def test_torchrl_makes_an_actor_of_a_buffer():
    """Its own code does: see test_ray.py, which needs Ray."""
    if torchrl_stand_in.installed():
        pytest.skip("TorchRL is installed")
    with pytest.raises(AssertionError, match=r"TorchRL's ReplayBuffer.as_remote ran"):
        buffer_of("ReplayBuffer").as_remote()


def test_a_storage_in_a_buffer_of_torchrls():
    """One of TorchRL's attaches itself to its storage."""
    storage = JOINED.LazyTensorStorage(10)
    with pytest.raises(NotImplementedError, match=r"make the buffer of this name in gpubuf\.integrations\.torchrl"):
        storage.attach(type("ReplayBuffer", (), {"storage": storage})())
    storage.attach(JOINED.ReplayBuffer(storage=storage))


def test_without_torchrl():
    """One sentence, and gpubuf itself imports without it."""
    if torchrl_stand_in.installed():
        pytest.skip("TorchRL is installed")
    with pytest.raises(ImportError, match=r"^gpubuf.integrations.torchrl.types needs TorchRL: pip install torchrl$"):
        importlib.import_module(torchrl_stand_in.PACKAGE)
    program = "import gpubuf.integrations.torchrl, sys; assert not [m for m in sys.modules if m.startswith('torchrl')]"
    subprocess.run([sys.executable, "-c", program], check=True)
