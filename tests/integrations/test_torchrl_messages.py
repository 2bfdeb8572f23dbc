"""What a program on TorchRL is told when it mixes parts, or uses what gpubuf has not: one sentence on what to do.

A storage of gpubuf's in a buffer of TorchRL's is in test_torchrl_classes.py.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest

import gpubuf
import gpubuf.data
import gpubuf.objectives
from gpubuf import missing_names
from gpubuf.integrations.torchrl import (
    PrioritizedReplayBuffer,
    ReplayBuffer,
    TensorDictPrioritizedReplayBuffer,
    TensorDictReplayBuffer,
)


def theirs(name: str) -> Any:
    """An instance of a class that TorchRL might have."""
    return type(name, (), {"__module__": "torchrl.data.replay_buffers"})()


BUFFERS = (ReplayBuffer, TensorDictReplayBuffer)


@pytest.mark.parametrize("buffer", BUFFERS)
@pytest.mark.parametrize(
    ("part", "name"),
    [("storage", "LazyTensorStorage"), ("sampler", "RandomSampler"), ("writer", "RoundRobinWriter")],
)
def test_a_part_of_torchrls(buffer: type, part: str, name: str):
    message = f"got TorchRL's {name}: take gpubuf.integrations.torchrl's class of that name"
    for given in (theirs(name), lambda: theirs(name)):
        with pytest.raises(TypeError, match=f"^expected a .* or a function that returns one, {message}$"):
            buffer(**{part: given})
    setter = getattr(buffer(), f"set_{part}")
    with pytest.raises(TypeError, match=message):
        setter(theirs(name))


def test_a_storage_of_torchrls_for_a_sampler_or_a_writer():
    needs = "need a TensorStorage, got TorchRL's LazyTensorStorage: take"
    with pytest.raises(TypeError, match=f"^gpubuf's samplers {needs}"):
        gpubuf.data.RandomSampler().bind(theirs("LazyTensorStorage"))
    with pytest.raises(TypeError, match=f"^gpubuf's writers {needs}"):
        gpubuf.data.RoundRobinWriter().register_storage(theirs("LazyTensorStorage"))


def test_a_part_of_nobodys():
    with pytest.raises(TypeError, match=r"^expected a TensorStorage or a function that returns one, got float$"):
        ReplayBuffer(storage=3.0)


def refusals(module: Any, names: Iterable[str]) -> dict[str, str]:
    """The sentence of each name that ``module`` lacks, and then looks like any module without it."""
    found = {}
    for name in names:
        assert name not in module.__all__
        assert not hasattr(module, name)
        with pytest.raises(AttributeError) as refusal:
            getattr(module, name)
        found[name] = str(refusal.value)
        with pytest.raises(ImportError, match=f"^cannot import name '{name}' from '{module.__name__}'"):
            exec(f"from {module.__name__} import {name}", {})
    return found


@pytest.mark.parametrize("module", [gpubuf, gpubuf.data])
def test_names_that_are_missing(module: Any):
    known = {name: said for name, said in missing_names.DATA.items() if name not in module.__all__}
    expected = {name: f"{module.__name__} has no {name}: {known[name]}" for name in known}
    assert refusals(module, known) == expected
    assert {"CatFrames", "MinariExperienceReplay"} <= set(known)


@pytest.mark.parametrize("module", [gpubuf, gpubuf.objectives])
def test_a_loss_that_is_missing(module: Any):
    (said,) = refusals(module, ["PPOLoss"]).values()
    assert said == f"{module.__name__} has no PPOLoss as TorchRL may do: {missing_names.OBJECTIVES}"


@pytest.mark.parametrize("module", [gpubuf.data, gpubuf.objectives])
def test_a_name_that_nobody_has(module: Any):
    with pytest.raises(AttributeError, match=r"^module 'gpubuf\.\w+' has no attribute 'Nothing'$"):
        _ = module.Nothing
    assert not hasattr(module, "nothing")


@pytest.mark.parametrize("buffer", [PrioritizedReplayBuffer, TensorDictPrioritizedReplayBuffer])
def test_writers_in_other_processes(buffer: Any):
    with pytest.raises(NotImplementedError, match="leave it out, make the buffer with shared=True"):
        buffer(alpha=0.6, beta=0.4, sync=False)


def test_buffers_in_other_processes():
    for argument in ("service_backend", "service_backend_options", "transport", "transport_options"):
        with pytest.raises(NotImplementedError, match=rf"^{argument} is not supported.*: .*process"):
            ReplayBuffer(**{argument: {"a": 1}})
