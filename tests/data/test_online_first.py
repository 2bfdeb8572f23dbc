"""Windows of steps that no batch has had come first, against a list of them, and then those of another sampler."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from gpubuf.data import (
    LazyTensorStorage,
    OnlineFirst,
    PrioritizedSampler,
    PrioritizedSliceSampler,
    RandomSampler,
    RandomShift,
    SamplerWithoutReplacement,
    SliceSampler,
    SliceSamplerWithoutReplacement,
    TensorDictReplayBuffer,
    Window,
)

APART = 10_000


def steps(start: int, n: int, envs: int) -> TensorDict:
    """Steps ``start`` and after, which say their number and their environment."""
    number = torch.arange(start, start + n) + APART * torch.arange(envs).unsqueeze(1)
    given = TensorDict({"number": number, "next": {"done": (number % 7 == 6).unsqueeze(-1)}}, [envs, n])
    return given if envs > 1 else given[0]


def made(every: int, *, rest: Any = None, room: int = 20, envs: int = 1, before: int = 0, after: int = 4) -> Any:
    windows = Window(-before, after, outside="cross")
    return TensorDictReplayBuffer(
        storage=LazyTensorStorage(room * envs, ndim=1 + (envs > 1)),
        sampler=OnlineFirst(rest or RandomSampler(), every),
        windows=windows,
        generator=torch.Generator().manual_seed(0),
    )


class Queue:
    """Which windows are due, by the words of the docstring."""

    def __init__(self, every: int, room: int, envs: int, before: int, after: int) -> None:
        self.every, self.room, self.envs, self.before, self.after = every, room, envs, before, after
        self.empty(0)

    def empty(self, written: int) -> None:
        self.had, self.begin, self.start = set[tuple[int, int]](), written, -1

    def next(self, n: int, written: int) -> list[int]:
        oldest = max(written - self.room, self.begin)
        if self.start < 0:
            self.start = oldest
        oldest += self.before
        firsts = range(self.start, written - self.after, self.every)
        due = [(first, env) for first in firsts if first >= oldest for env in range(self.envs)]
        due = [window for window in due if window not in self.had][:n]
        # What is older than one that was taken doesn't come any more.
        self.had |= set(due)
        return [first + APART * env for first, env in due]


@pytest.mark.parametrize("seed", range(12))
def test_new_windows_come_once_and_in_order(seed: int):
    chance = random.Random(seed)
    envs, every, room = chance.choice((1, 3)), chance.choice((1, 3, 5)), chance.choice((12, 20))
    before, after = chance.choice((0, 2)), chance.choice((0, 4, 7))
    buffer = made(every, room=room, envs=envs, before=before, after=after)
    queue, written = Queue(every, room, envs, before, after), 0
    for _ in range(60):
        if chance.random() < 0.1:
            buffer.empty()
            queue.empty(written)
        n = chance.choice((1, 2, 5, room + 3))
        buffer.extend(steps(written, n, envs))
        written += n
        for _ in range(chance.choice((0, 1, 2))):
            size = chance.choice((1, 4, 9))
            batch = buffer.sample(size)
            due = queue.next(size, written)
            assert batch["online"].tolist() == [True] * len(due) + [False] * (size - len(due))
            rows = batch["number"][:, before].tolist()
            assert rows[: len(due)] == due
            if due:
                whole = torch.tensor(due).unsqueeze(1) + torch.arange(-before, after + 1)
                assert torch.equal(batch["number"][: len(due)], whole)


def test_windows_of_an_emptied_buffer_begin_with_its_first_step():
    buffer = made(7, room=20, after=2)
    for start in (0, 50):
        buffer.extend(steps(start, 17, 1))
        batch = buffer.sample(3)
        assert batch["online"].tolist() == [True, True, True]
        assert batch["number"][:, 0].tolist() == [start, start + 7, start + 14]
        buffer.empty()


def test_windows_go_on_where_they_were_cut():
    """In a buffer of the same room, and of more."""
    buffer = made(4, room=10)
    buffer.extend(steps(0, 13, 1))
    assert buffer.sample(1)["number"][0, 0] == 3
    for room in (10, 30):
        other = made(4, room=room)
        other.load_state_dict(buffer.state_dict(), end_trajectories=False)
        other.extend(steps(13, 5, 1))
        assert other.sample(3)["number"][:2, 0].tolist()[0] == (11 if room == 10 else 7)


def test_other_rows_are_drawn_and_shifted_as_without_new_ones():
    """By the same random numbers: the launch that draws them leaves those of the shifts to the one that copies."""
    batches, pixels = [], torch.rand(20, 4, 4)
    for new in (False, True):
        rest = RandomSampler()
        buffer = TensorDictReplayBuffer(
            storage=LazyTensorStorage(20),
            sampler=OnlineFirst(rest, 1000) if new else rest,
            # With a step before it no row is the first one of a window.
            windows={"number": Window(-1, 0, outside="cross", rows="rows")},
            process=[RandomShift("pixels", pad=1)],
        )
        torch.manual_seed(0)
        buffer.extend(TensorDict({"pixels": pixels, **steps(0, 20, 1)}, [20]))
        batches += [buffer.sample(9) for _ in range(2)]
    assert not torch.equal(batches[0]["pixels"], batches[1]["pixels"])
    for key in ("index", "pixels", ("rows", "index_generation")):
        for plain, other in zip(batches[:2], batches[2:], strict=True):
            assert torch.equal(other[key], plain[key])


def test_priorities_are_the_other_samplers_and_new_rows_weigh_one():
    rest = PrioritizedSampler(20, alpha=1.0, beta=1.0)
    buffer = made(4, rest=rest, after=3)
    index = buffer.extend(steps(0, 20, 1))
    buffer.update_priority(index, torch.cat((torch.full((19,), 1e-6), torch.ones(1))))
    batch = buffer.sample(8)
    assert batch["online"].tolist() == [True] * 5 + [False] * 3
    assert batch["number"][:, 0].tolist() == [0, 4, 8, 12, 16, 19, 19, 19]
    assert batch["priority_weight"][:5].tolist() == [1.0] * 5
    assert (batch["priority_weight"][5:] < 1e-5).all()
    batch["td_error"] = torch.full((8,), 2.0)
    buffer.update_tensordict_priority(batch)
    assert rest.tree.leaves[:20].gt(1.5).nonzero().flatten().tolist() == [0, 4, 8, 12, 16, 19]


def test_what_is_left_is_saved(tmp_path):
    buffer, other = made(4), made(4)
    buffer.extend(steps(0, 13, 1))
    assert buffer.sample(2)["online"].all()
    buffer.save(tmp_path / "saved")
    other.load(tmp_path / "saved", end_trajectories=False)
    for each in (buffer, other):
        batch = each.sample(3)
        assert batch["online"].tolist() == [True, False, False]
        assert batch["number"][0, 0] == 8
    smaller = made(4, room=30)
    smaller.load_state_dict(buffer.state_dict(), end_trajectories=False)
    smaller.extend(steps(13, 4, 1))
    assert smaller.sample(3)["number"][0, 0] == 12


def test_what_it_takes():
    with pytest.raises(ValueError, match="every"):
        OnlineFirst(RandomSampler(), 0)
    with pytest.raises(TypeError, match="Sampler"):
        OnlineFirst(3, 4)
    buffer = made(4)
    assert not buffer.can_sample(4)
    with pytest.raises(RuntimeError, match="empty"):
        buffer.sample(4)
    buffer.extend(steps(0, 9, 1))
    buffer.empty()
    buffer.extend(steps(0, 5, 1))
    assert buffer.sample(4)["online"].tolist() == [True, False, False, False]
    assert repr(buffer.sampler) == "OnlineFirst(RandomSampler(), every=4)"


@pytest.mark.parametrize("last", [-2, 1, 4])
def test_a_window_counts_when_its_transition_is_stored(last: int):
    """Windows of root keys are around the first row of a transition: its steps and theirs are not added up."""
    n_steps = 3
    buffer = TensorDictReplayBuffer(
        storage=LazyTensorStorage(20),
        sampler=OnlineFirst(RandomSampler(), 1),
        windows={"number": Window(-2, last, outside="cross")},
        n_steps=n_steps,
    )
    number = torch.arange(6)
    after = {"reward": torch.ones(6, 1), "done": torch.zeros(6, 1, dtype=torch.bool)}
    buffer.extend(TensorDict({"row": number, "number": number, "next": after}, [6]))
    batch = buffer.sample(8)
    assert batch["row"][batch["online"]].tolist() == list(range(2, 6 - max(last, n_steps - 1)))
    assert batch["steps_to_next_obs"][batch["online"]].eq(n_steps).all()


def test_windows_that_stay_in_a_trajectory_are_refused():
    with pytest.raises(ValueError, match=r"across the ends of trajectories.*outside='skip' need a RandomSampler"):
        TensorDictReplayBuffer(
            storage=LazyTensorStorage(20),
            sampler=OnlineFirst(RandomSampler(), 1),
            windows={"number": Window(0, 2, outside="skip")},
        )


def test_no_window_tells_under_the_key_of_new_rows():
    buffer = TensorDictReplayBuffer(
        storage=LazyTensorStorage(20),
        sampler=OnlineFirst(RandomSampler(), 1),
        windows={"number": Window(0, 2, mask="online")},
    )
    with pytest.raises(ValueError, match="get a key 'online', which draws have already"):
        buffer.extend(steps(0, 9, 1))


@pytest.mark.parametrize(
    "rest",
    [
        SliceSampler(slice_len=2),
        SliceSamplerWithoutReplacement(slice_len=2),
        PrioritizedSliceSampler(9, 1, 1, slice_len=2),
        SamplerWithoutReplacement(),
        OnlineFirst(RandomSampler(), 1),
    ],
)
def test_the_other_sampler_draws_single_rows(rest: Any):
    with pytest.raises(ValueError, match=f"draws any number of single rows, got {type(rest).__name__}"):
        OnlineFirst(rest, 2)


def test_the_memory_and_the_marks_of_the_other_sampler_count():
    rest = PrioritizedSampler(20, alpha=1.0, beta=1.0)
    buffer = made(400, rest=rest)
    index = buffer.extend(steps(0, 20, 1))
    buffer.update_priority(index, torch.full((20,), 9.0))
    buffer.update_priority(index, torch.ones(20))
    buffer.sample(4)
    assert rest.memory().tree > 0
    assert buffer.sampler.memory().tree == rest.memory().tree
    assert buffer.sampler.random_bytes == rest.random_bytes > 0
    assert buffer.sampler.index_bytes((20,), "cpu") == rest.index_bytes((20,), "cpu")
    buffer.sampler.mark_update(torch.arange(2))
    assert rest.tree.leaves[:3].tolist() == pytest.approx([9.0, 9.0, 1.0])
