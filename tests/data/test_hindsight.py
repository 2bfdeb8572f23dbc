"""Goals that are replaced by what was achieved later, beside a plain Python model of the trajectories."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from torch import Tensor

from gpubuf import Hindsight, MixedReplayBuffer, capture
from gpubuf.data import (
    LazyTensorStorage,
    Normalize,
    PrioritizedSampler,
    RandomSampler,
    ReplayBuffer,
    SamplerWithoutReplacement,
    SliceSampler,
    TensorDictReplayBuffer,
)
from tests.support.fake_cuda import fake_cuda, no_blocking_copies
from tests.support.graph_recorder import RecordedCuda
from tests.support.placements import Machine

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


def later(step: int, total: int, ends: set[int], strategy: str) -> list[int]:
    """The model: which steps a row of this step may have its goal from."""
    oldest = max(total - STEPS, 0)
    last = min((end for end in ends if end >= step and end < total), default=total - 1)
    first = max((end + 1 for end in ends if end < step), default=0)
    return {
        "future": list(range(step, last + 1)),
        "final": [last],
        "episode": list(range(max(first, oldest), last + 1)),
    }[strategy]


ENDS = [{3, 4, 9, 14, 22}, {0, 7, 11, 12, 19}, set()]


@pytest.mark.parametrize("strategy", ["future", "final", "episode"])
@pytest.mark.parametrize("envs", [1, 3])
def test_goals_are_of_the_same_trajectory(backend, envs, strategy):
    """Wrapped rings and others, trajectories in progress, [T, E]: not over ends, the cursor or environments."""
    for total in (5, 12, 16, 25):
        buffer = buffer_of(envs, strategy=strategy, ratio=0.7)
        fill(buffer, total, ENDS[:envs])
        batch, info = buffer.sample(64 if backend == "triton" else 400, return_info=True)
        numbers, goals = batch["next", "achieved_goal"].long(), batch["desired_goal"]
        for i, relabelled in enumerate(info["relabelled"].tolist()):
            step, env = numbers[i].tolist()
            if not relabelled:
                assert torch.equal(goals[i], -numbers[i].float() - 1)
                assert batch["next", "reward"][i] == 7
                continue
            goal_step, goal_env = goals[i].long().tolist()
            assert goal_env == env
            assert goal_step in later(step, total, ENDS[env], strategy)
            assert batch["next", "reward"][i] == (0 if goal_step == step else -1)
        assert torch.equal(batch["next", "desired_goal"], goals)
        assert torch.equal(batch["observation"], numbers.float() + 0.5)
        assert 0.45 < info["relabelled"].float().mean() < 0.95


@pytest.mark.parametrize("strategy", ["future", "episode"])
def test_every_later_step_is_as_likely(strategy):
    """Chi-square for each row: the probability to exceed 40 with up to 8 degrees of freedom is below 1e-5."""
    buffer, total, ends = buffer_of(strategy=strategy, ratio=0.8), 16, {8}
    fill(buffer, total, [ends])
    batch, info = buffer.sample(20_000, return_info=True)
    relabelled = info["relabelled"]
    assert abs(float(relabelled.float().mean()) - 0.8) < 0.02
    step, goal = batch["next", "achieved_goal"][relabelled, 0].long(), batch["desired_goal"][relabelled, 0].long()
    for own in range(4, 16):
        due = later(own, total, ends, strategy)
        found = torch.bincount(goal[step == own], minlength=total)[due].double()
        assert found.sum() == (step == own).sum()
        expected = found.sum() / len(due)
        assert ((found - expected) ** 2 / expected).sum() < 40


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
        batch = buffer.sample(8, include_info=True) if batches is None else buffer._batches.next(8, True, 3).data
        assert batch["relabelled"].all()
        assert batch["relabelled"].shape == batch.batch_size
        step, goal = batch["next", "achieved_goal"][..., 0], batch["desired_goal"][..., 0]
        assert torch.equal(goal, torch.where(step <= 8, 8.0, 15.0))


def test_what_is_stored_stays():
    buffer = buffer_of(ratio=1.0)
    fill(buffer, 10, [set()])
    before = buffer[:]
    buffer.sample(50)
    assert all(torch.equal(before[key], buffer[:][key]) for key in before.keys(True, True))


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


def test_trajectories_told_by_other_keys():
    buffer = buffer_of(ratio=1.0, strategy="final", traj_key="episode")
    buffer.extend(rows(range(8), set()).set("episode", torch.tensor([0, 0, 0, 1, 1, 2, 2, 2])))
    batch = buffer.sample(40)
    assert torch.equal(batch["desired_goal"][:, 0], torch.tensor([2.0, 4.0, 7.0])[batch["episode"]])
    buffer = buffer_of(ratio=1.0, strategy="final", end_keys=[("next", "terminated")])
    fill(buffer, 8, [{3}])
    assert (buffer.sample(10)["desired_goal"][:, 0] == 7).all()


def test_other_dtypes_in_storage():
    """Goals are those of batches: gathered through the storage's codecs."""
    storage = LazyTensorStorage(STEPS, dtypes={("next", "achieved_goal"): torch.int16, "desired_goal": torch.float16})
    buffer = buffer_of(storage=storage, ratio=1.0, strategy="final")
    fill(buffer, 10, [{4}])
    batch = buffer.sample(30)
    step = batch["next", "achieved_goal"][:, 0]
    assert batch["desired_goal"].dtype is torch.float32
    assert torch.equal(batch["desired_goal"][:, 0], torch.where(step <= 4, 4.0, 9.0))


@pytest.mark.parametrize("total", [10, 17])
def test_observations_stored_once(total):
    """What is achieved may be stored once with the row behind, true final ones aside."""
    storage = LazyTensorStorage(STEPS, share_next=["achieved_goal"])
    buffer = buffer_of(storage=storage, ratio=1.0, strategy="final")
    for start in range(0, total, 3):
        data = rows(range(start, min(start + 3, total)), {4, 9})
        data["achieved_goal"] = data["next", "achieved_goal"] - 1
        buffer.extend(data)
    batch = buffer.sample(40)
    step = batch["next", "achieved_goal"][:, 0]
    due = torch.where(step <= 4, 4.0, torch.where(step <= 9, 9.0, total - 1.0))
    assert torch.equal(batch["desired_goal"][:, 0], due)


def test_flags_that_are_written_back_count():
    buffer = buffer_of(sampler=PrioritizedSampler(STEPS, 0.6, 0.4), ratio=1.0, strategy="final")
    fill(buffer, 10, [set()])
    done = TensorDict({"next": {"done": torch.tensor([[True]])}}, [1])
    buffer.update_if_present([6], done, generation=torch.tensor([1]))
    batch = buffer.sample(30)
    step = batch["next", "achieved_goal"][:, 0]
    assert torch.equal(batch["desired_goal"][:, 0], torch.where(step <= 6, 6.0, 9.0))


def test_copies_checkpoints_and_prefetch(tmp_path):
    """All of them go on with the same batches: the random numbers are the sampler's."""
    buffer = buffer_of()
    fill(buffer, 16, [{8}])
    buffer.sample(8)
    buffer.save(tmp_path)
    copied, loaded = copy.deepcopy(buffer), buffer_of()
    loaded.load(tmp_path)
    ahead = TensorDictReplayBuffer(
        storage=LazyTensorStorage(STEPS), relabel=Hindsight(reward), batch_size=8, prefetch=2
    )
    ahead.load(tmp_path)
    for _ in range(3):
        batch = buffer.sample(8)
        for other in (copied.sample(8), loaded.sample(8), ahead.sample(8)):
            assert all(torch.equal(batch[key], other[key]) for key in batch.keys(True, True))


def test_other_storages_and_places(monkeypatch):
    """The ends follow the rows: to other memory, to a storage that replaces the first, and after a new allocation."""
    Machine(device=10_000).install(monkeypatch, work_on_cpu=True)

    def assert_goals(total: int, end: int) -> None:
        batch = buffer.sample(30)
        step = batch["next", "achieved_goal"][:, 0]
        assert torch.equal(batch["desired_goal"][:, 0], torch.where(step <= end, float(end), total - 1.0))

    buffer = buffer_of(storage=LazyTensorStorage(STEPS, device="pinned"), ratio=1.0, strategy="final")
    fill(buffer, 10, [{4}])
    assert_goals(10, 4)
    buffer.to("split:50%")
    assert_goals(10, 4)
    buffer.free()
    fill(buffer, 9, [{2}])
    assert_goals(9, 2)
    buffer.set_storage(LazyTensorStorage(STEPS))
    fill(buffer, 7, [{1}])
    assert_goals(7, 1)
    buffer.empty()
    fill(buffer, 6, [{3}])
    assert_goals(6, 3)


def test_a_part_of_a_mix():
    buffers = [buffer_of(ratio=1.0, strategy="final"), TensorDictReplayBuffer(storage=LazyTensorStorage(STEPS))]
    for buffer in buffers:
        fill(buffer, 10, [{4}])
    batch = MixedReplayBuffer(buffers).sample(20)
    assert ((batch["desired_goal"][:, 0] >= 0) == (batch["buffer"] == 0)).all()


@pytest.mark.parametrize("name", ["uniform", "prioritized"])
def test_captured_and_compiled(name, monkeypatch):
    """A ratio that changes between replays; every replay draws other goals."""
    for way in ("capture", "compile"):
        results = []
        for captures in (False, True):
            ratio = torch.tensor(0.5)
            buffer = buffer_of(sampler=samplers()[name], ratio=ratio)
            fill(buffer, 9, [{8}])
            buffer.sampler.random_state("cpu").manual_seed(5)

            def step(data: TensorDict, buffer: TensorDictReplayBuffer = buffer) -> TensorDict:
                buffer.extend(data)
                return buffer.sample(16)

            run: Any = step
            if captures and way == "capture":
                machine = RecordedCuda().install(monkeypatch)
                machine.memory = buffer.storage.row_tensors
                run = capture(step, warmup=2)
            elif captures:
                torch._dynamo.reset()
                run = torch.compile(step, fullgraph=True, backend="aot_eager")
            found = []
            for turn in range(6):
                found.append(run(rows(range(9 + 3 * turn, 12 + 3 * turn), {13, 20})).clone())
                ratio.copy_(torch.tensor(turn / 5))
            results.append(found)
        for eager, other in zip(*results, strict=True):
            assert all(torch.equal(eager[key], other[key]) for key in eager.keys(True, True))
        assert results[0][-1]["relabelled"].float().mean() > 0.5
        monkeypatch.undo()


def test_no_sync():
    with fake_cuda(), no_blocking_copies():
        buffer = buffer_of(storage=LazyTensorStorage(STEPS, device="cuda"))
        data = TensorDict(
            {
                "desired_goal": torch.zeros(6, 2, device="cuda"),
                "next": {
                    "achieved_goal": torch.zeros(6, 2, device="cuda"),
                    "reward": torch.zeros(6, 1, device="cuda"),
                    "done": torch.zeros(6, 1, dtype=torch.bool, device="cuda"),
                },
            },
            [6],
        )
        buffer.extend(data)
        assert buffer.sample(4)["desired_goal"].shape == (4, 2)


def test_refused():
    with pytest.raises(ValueError, match="strategy must be one of"):
        Hindsight(reward, strategy="random")
    for ratio in (-0.1, 1.5, float("nan")):
        with pytest.raises(ValueError, match="ratio must be in"):
            Hindsight(reward, ratio=ratio)
    with pytest.raises(ValueError, match="n_steps=3"):
        ReplayBuffer(relabel=Hindsight(reward), n_steps=3)
    with pytest.raises(ValueError, match="'desired_goal' is relabelled"):
        ReplayBuffer(relabel=Hindsight(reward), process=[Normalize("desired_goal")])
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
