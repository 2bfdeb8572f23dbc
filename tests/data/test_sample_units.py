"""A drawn row stands for a window of steps around it: the windows are TorchRL's, and their ends come from the index."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tensordict import TensorDict

from gpubuf.data import (
    LazyTensorStorage,
    MixedReplayBuffer,
    PrioritizedSampler,
    RandomShift,
    SampleUnit,
    Sequence,
    TensorDictReplayBuffer,
    Transition,
)

KEYS = {"validity_mask", "learning_mask", "anchor_index", "sequence_id", "step_in_sequence", "index"}


def rows(n: int, start: int = 0, ends: tuple[int, ...] = ()) -> TensorDict:
    number = torch.arange(start, start + n)
    done = torch.zeros(n, 1, dtype=torch.bool)
    done[[end - start for end in ends]] = True
    return TensorDict({"number": number, "next": {"done": done}}, [n])


def buffer_of(
    unit: Any, sampler: Any = None, capacity: int = 12, ndim: int = 1, share_next: Any = False, **options: Any
) -> TensorDictReplayBuffer:
    generator = torch.Generator().manual_seed(7)
    storage = LazyTensorStorage(capacity, ndim=ndim, share_next=share_next)
    return TensorDictReplayBuffer(
        storage=storage, sampler=sampler, sample_unit=unit, batch_size=4, generator=generator, **options
    )


def test_priorities_are_those_of_anchors():
    sampler = PrioritizedSampler(12, alpha=1.0, beta=1.0)
    buffer = buffer_of(Sequence(3, burn_in=1), sampler)
    index = buffer.extend(rows(12, ends=(3,)))
    buffer.update_priority(index, 1.0)
    batch = buffer.sample()
    assert {*KEYS, "priority_weight", "index_generation", "anchor_generation"} <= set(batch.keys())
    batch["td_error"] = torch.arange(1.0, 17.0)
    windows = [batch[key].view(4, 4) for key in ("td_error", "validity_mask", "anchor_index")]
    due = [1.0] * 12
    for error, valid, anchor in zip(*windows, strict=True):
        place = int(anchor[0])
        due[place] = max(due[place] if due[place] > 1 else 0.0, float(error[valid].max()))
    # Invalid rows don't count.
    batch["td_error"] = torch.where(batch["validity_mask"], batch["td_error"], 99.0)
    late = batch.clone()
    buffer.update_tensordict_priority(batch)
    assert sampler.tree.leaves[:12].tolist() == due
    buffer.extend(rows(12, 20))
    buffer.update_tensordict_priority(late.set("td_error", torch.full((16, 1), 70.0)))
    assert float(sampler.tree.max_priority) < 70


@pytest.mark.parametrize("envs", [1, 3])
@pytest.mark.parametrize("dilation", [1, 2])
@pytest.mark.parametrize("n", [9, 12, 17, 40])
def test_stacks_of_frames_at_every_edge(n, dilation, envs):
    """CASES 79. Each stack and next stack is what the episode's own frames make, at its beginning and at the ring's.

    Frames of an episode begin at a multiple of 100; its length is 5.
    """
    time = torch.arange(n)
    frame = (time // 5 * 100 + time % 5).unsqueeze(0) + 10_000 * torch.arange(envs).unsqueeze(1)
    data = {"frame": frame, "next": {"frame": frame + 1, "done": (time % 5 == 4).expand(envs, n).unsqueeze(-1)}}
    unit = Sequence(1, burn_in=3, dilation=dilation)
    buffer = buffer_of(unit, capacity=12 * envs, ndim=1 + (envs > 1), share_next=["frame"])
    given = TensorDict(data, [envs, n])
    buffer.extend(given if envs > 1 else given[0])
    batch = torch.cat([buffer.sample() for _ in range(100)]).view(400, 4)
    stack = batch["frame"]
    first = stack[:, -1] // 100 * 100
    lags = dilation * torch.arange(3, -1, -1)
    assert torch.equal(stack, torch.maximum(stack[:, -1:] - lags, first.unsqueeze(1)))
    assert torch.equal(batch["next", "frame"][:, -1], stack[:, -1] + 1)
    oldest = max(n - 12, 0)
    drawn = {int(value) for value in stack[:, -1].remainder(10_000)}
    stored = {int(value) for value in frame[0, oldest:]}
    assert drawn == (stored if n < 12 else {int(value) for value in frame[0, oldest + 3 * dilation :]})


@pytest.mark.parametrize("envs", [1, 3])
@pytest.mark.parametrize("n", [9, 13, 17, 40])
def test_stacks_of_what_was_loaded_into_more_room(n, envs, tmp_path):
    """CASES 79. The steps before the oldest one of a ring that was full are not there, wherever its rows go."""
    unit, lags = Sequence(1, burn_in=3, dilation=2), torch.arange(6, -1, -2)

    def steps(first: int, last: int) -> TensorDict:
        time = torch.arange(first, last)
        frame = (time // 8 * 100 + time % 8).unsqueeze(0) + 10_000 * torch.arange(envs).unsqueeze(1)
        data = {"frame": frame, "next": {"done": (time % 8 == 7).expand(envs, last - first).unsqueeze(-1)}}
        given = TensorDict(data, [envs, last - first])
        return given if envs > 1 else given[0]

    def made(capacity: int) -> TensorDictReplayBuffer:
        return buffer_of(unit, capacity=capacity * envs, ndim=1 + (envs > 1))

    def drawn(buffer: TensorDictReplayBuffer) -> set[int]:
        stack = torch.cat([buffer.sample() for _ in range(100)]).view(400, 4)["frame"]
        assert torch.equal(stack, torch.maximum(stack[:, -1:] - lags, stack[:, -1:] // 100 * 100))
        return {int(value) for value in stack[:, -1].remainder(10_000)}

    first = made(12)
    first.extend(steps(0, n))
    second, third = made(20), made(30)
    second.load_state_dict(first.state_dict(), end_trajectories=False)
    assert drawn(second) == drawn(first)
    second.extend(steps(n, n + 2))
    assert {int(value) for value in steps(n, n + 2)["frame"].reshape(-1).remainder(10_000)} <= drawn(second)
    second.save(tmp_path / "saved")
    third.load(tmp_path / "saved", end_trajectories=False)
    assert drawn(third) == drawn(second)
    third.empty()
    third.extend(steps(0, 8))
    assert drawn(third) == set(range(8))


def test_a_unit_of_your_own():
    class Pairs(SampleUnit):
        """Each row, and the one before it."""

        def expand(self, index: Any, info: dict[Any, Any], storage: Any) -> tuple[Any, dict[Any, Any]]:
            pairs = torch.stack((index, (index - 1).clamp(min=0)), 1).reshape(-1)
            return pairs, {"first": torch.tensor([True, False]).repeat(len(index))}

    buffer = buffer_of(Pairs())
    buffer.extend(rows(8))
    batch = buffer.sample()
    assert batch.shape == (8,)
    pairs = batch["number"].view(4, 2)
    assert torch.equal(pairs[:, 1], (pairs[:, 0] - 1).clamp(min=0))
    assert batch["first"].tolist() == [True, False] * 4
    plain = buffer_of(Transition())
    plain.extend(rows(8))
    assert set(plain.sample().keys()) == {"number", "next", "index"}


def test_what_does_not_fit_is_refused():
    """Wrong arguments are among those of all samplers, in tests/contracts/samplers.py."""
    buffer = buffer_of(Sequence(2, done_key="missing"))
    with pytest.raises(KeyError, match="missing"):
        buffer.extend(rows(3))
    units = [buffer_of(Sequence(2)), buffer_of(None)]
    for one in units:
        one.extend(rows(4))
    with pytest.raises(ValueError, match="sample_unit can't be used with RandomShift, which would shift each step"):
        buffer_of(Sequence(2), process=[RandomShift(["pixels"])])
    with pytest.raises(ValueError, match="sample_unit"):
        MixedReplayBuffer(units, batch_size=4).sample()
