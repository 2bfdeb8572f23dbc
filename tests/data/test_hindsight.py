"""Goals that are replaced by what was achieved later, beside a plain Python model of the trajectories."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tensordict import TensorDict
from torch import Tensor

from gpubuf import Hindsight
from gpubuf.data import (
    LazyTensorStorage,
    PrioritizedSampler,
    RandomSampler,
    ReplayBuffer,
    SamplerWithoutReplacement,
    SliceSampler,
    TensorDictReplayBuffer,
)

STEPS = 12


def reward(achieved: Tensor, goal: Tensor, batch: TensorDict) -> Tensor:
    """0 where the goal is reached, else -1: of the shape [n]."""
    assert batch.batch_size == achieved.shape[:-1]
    return (achieved == goal).all(-1).float() - 1


def rows(steps: range, ends: set[int], env: int = 0) -> TensorDict:
    """Steps of an environment; each achieves a goal of its own, and wants one that none achieves."""
    n = len(steps)
    number = torch.tensor([[step, env] for step in steps], dtype=torch.float32).view(n, 2)
    return TensorDict(
        {
            "observation": number + 0.5,
            "desired_goal": -number - 1,
            "next": {
                "achieved_goal": number,
                "desired_goal": -number - 1,
                "reward": torch.full((n, 1), 7.0),
                "done": torch.tensor([[step in ends] for step in steps]).view(n, 1),
                "terminated": torch.zeros(n, 1, dtype=torch.bool),
                "truncated": torch.tensor([[step in ends] for step in steps]).view(n, 1),
            },
        },
        [n],
    )


def buffer_of(envs: int = 1, sampler: Any = None, storage: Any = None, **options: Any) -> TensorDictReplayBuffer:
    if storage is None:
        storage = LazyTensorStorage(STEPS * envs, ndim=1 if envs == 1 else 2)
    generator = torch.Generator().manual_seed(1)
    relabel = Hindsight(reward, **options)
    return TensorDictReplayBuffer(storage=storage, sampler=sampler, relabel=relabel, generator=generator)


def fill(buffer: ReplayBuffer, total: int, ends: list[set[int]], at_a_time: int = 3) -> None:
    """Write the steps below ``total`` of as many environments as there are sets of ends."""
    for start in range(0, total, at_a_time):
        steps = range(start, min(start + at_a_time, total))
        of_envs = [rows(steps, own, env) for env, own in enumerate(ends)]
        buffer.extend(of_envs[0] if len(ends) == 1 else torch.stack(of_envs))


def samplers() -> dict[str, Any]:
    return {
        "uniform": RandomSampler(),
        "prioritized": PrioritizedSampler(STEPS, 0.6, 0.4),
        "without replacement": SamplerWithoutReplacement(),
        "slices": SliceSampler(slice_len=2),
        "stacked slices": SliceSampler(slice_len=2, stack=True),
    }


@pytest.mark.parametrize("name", samplers())
def test_with_any_sampler(name):
    buffer = buffer_of(sampler=samplers()[name], ratio=1.0, strategy="final")
    fill(buffer, 16, [{8}])
    for batches in (None, 3):
        batch = buffer.sample(8, include_info=True) if batches is None else buffer.parts.batches.next(8, True, 3).data
        assert batch["relabelled"].all()
        assert batch["relabelled"].shape == batch.batch_size
        step, goal = batch["next", "achieved_goal"][..., 0], batch["desired_goal"][..., 0]
        assert torch.equal(goal, torch.where(step <= 8, 8.0, 15.0))


def test_flags_of_goals_that_end_a_trajectory():
    """Done is what the goal says, or truncated; rows that keep their goal keep their flags."""

    def reached(achieved: Tensor, goal: Tensor, batch: TensorDict) -> Tensor:
        return (achieved == goal).all(-1)

    for sampler in (None, SliceSampler(slice_len=3)):
        buffer = buffer_of(sampler=sampler, ratio=0.5, terminated=reached)
        fill(buffer, 11, [{5}])
        batch = buffer.sample(60)
        hit = (batch["next", "achieved_goal"] == batch["desired_goal"]).all(-1, keepdim=True)
        assert hit.any()
        assert torch.equal(batch["next", "terminated"], hit)
        assert torch.equal(batch["next", "done"], hit | batch["next", "truncated"])


def test_refused():
    """Wrong arguments are among those of all samplers, in tests/contracts/samplers.py."""
    data = rows(range(4), set())
    for missing in ("desired_goal", ("next", "achieved_goal"), ("next", "reward")):
        with pytest.raises(KeyError, match="hindsight needs the key"):
            buffer_of().extend(data.exclude(missing))
    with pytest.raises(ValueError, match="becomes the goal 'desired_goal'"):
        buffer_of().extend(data.clone().set("desired_goal", torch.zeros(4, 3)))
    wrong = TensorDictReplayBuffer(storage=LazyTensorStorage(9), relabel=Hindsight(lambda achieved, goal, td: achieved))
    wrong.extend(data)
    with pytest.raises(ValueError, match="the function gave"):
        wrong.sample(4)


def test_knows_its_storage_before_a_draw():
    """A buffer over rows that are stored already refuses what it can't relabel, and keeps to one kind of ends."""
    storage = LazyTensorStorage(9)
    ReplayBuffer(storage=storage).extend(rows(range(4), set()).exclude("desired_goal"))
    with pytest.raises(KeyError, match="hindsight needs the key"):
        buffer_of(storage=storage)
    storage = LazyTensorStorage(9)
    first, second = buffer_of(storage=storage), buffer_of(storage=storage)
    with pytest.raises(ValueError, match="tells the ends of trajectories by other keys"):
        buffer_of(storage=storage, end_keys=[("next", "done")])
    first.extend(rows(range(4), {3}))
    assert first.storage.readers.end_bits is second.storage.readers.end_bits is not None
