"""Slice samplers: what they draw, what they say about it, and what they refuse.

Slice samplers: where trajectories are told apart, epochs, state, arguments.
"""

from __future__ import annotations

import inspect
import warnings

import pytest
import torch
from tensordict import TensorDict

from gpubuf import (
    LazyTensorStorage,
    PrioritizedSliceSampler,
    RandomSampler,
    ReplayBuffer,
    SamplerWithoutReplacement,
    SliceSampler,
    SliceSamplerWithoutReplacement,
    TensorDictReplayBuffer,
    TensorStorage,
)
from tests.support.slice_model import SliceModel, episodes, filled, split

# What is drawn


def test_one_long_trajectory_among_a_million_short_ones():
    """CASES 20: still exact, and the error names the longest where there is none."""
    flags = torch.ones(1_000_000, 1, dtype=torch.bool)
    data = TensorDict({"number": torch.arange(1_000_000), "next": {"done": flags}}, [1_000_000])
    flags[543_210:543_219] = False
    buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(1_000_000), sampler=SliceSampler(slice_len=10))
    buffer.extend(data)
    batch = buffer.sample(1000)
    assert set(split(batch)) == {tuple(range(543_210, 543_220))}
    buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(1_000_000), sampler=SliceSampler(slice_len=11))
    buffer.extend(data)
    with pytest.raises(RuntimeError, match=r"11 steps are needed, the longest .* has 10"):
        buffer.sample(11)


# What is said about it


def test_a_plain_buffer_keeps_its_batches_as_stored():
    model = SliceModel(100, 1)
    buffer = ReplayBuffer(storage=LazyTensorStorage(100), sampler=SliceSampler(num_slices=5), batch_size=20)
    buffer.extend(model.write(episodes(6, 5, 8)))
    batch, info = buffer.sample(return_info=True)
    assert set(batch.keys(True, True)) == {"number", "trajectory", "is_init", ("next", "done"), ("next", "terminated")}
    assert torch.equal(batch["next", "done"], buffer.storage[info["index"]]["next", "done"])
    assert info["next", "truncated"].sum() == 5


def test_keys_that_are_not_wanted():
    buffer, _ = filled(SliceSampler(slice_len=2, truncated_key=None, init_key=None), episodes(6, 5))
    batch, info = buffer.sample(8, return_info=True)
    assert set(info) == {"index"}
    assert torch.equal(batch["is_init"], buffer.storage[batch["index"]]["is_init"])
    buffer, _ = filled(SliceSampler(slice_len=2, truncated_key="cut", init_key="first"), episodes(6, 5))
    batch, info = buffer.sample(8, return_info=True)
    assert set(info) == {"index", "cut", "done", "terminated"}
    assert torch.equal(batch["done"], batch["cut"])
    assert not batch["terminated"].any()


def test_flags_of_agents():
    """A done flag of one element per agent keeps its shape, and any agent's ends the trajectory (CASES 29)."""
    done = torch.zeros(12, 3, 1, dtype=torch.bool)
    done[5, 1] = True
    data = TensorDict({"number": torch.arange(12), "next": {"done": done}}, [12])
    buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(12), sampler=SliceSampler(slice_len=6))
    buffer.extend(data)
    batch = buffer.sample(60)
    assert {one[0] for one in batch["number"].view(10, 6).tolist()} <= {0, 6}
    assert batch["next", "done"].shape == batch["next", "truncated"].shape == (60, 3, 1)
    assert batch["next", "truncated"].view(10, 6, 3)[:, -1].all()
    assert not batch["next", "truncated"].view(10, 6, 3)[:, :-1].any()


# Where trajectories are told apart


def test_choice_of_key():
    def data(**more) -> TensorDict:
        done = torch.tensor(episodes(4, 4, 4))
        return TensorDict({"number": torch.arange(12), "next": {"done": done}, **more}, [12])

    ids = torch.arange(12) // 6
    for keys, lengths in (
        ({}, [4, 4, 4]),
        ({"episode": ids}, [6, 6]),
        ({"episode": ids * 0, "collector": TensorDict({"traj_ids": ids}, [12])}, [6, 6]),
    ):
        sampler = SliceSampler(slice_len=2)
        buffer = ReplayBuffer(storage=LazyTensorStorage(12), sampler=sampler)
        buffer.extend(data(**keys))
        assert sampler.trajectories().length.tolist() == lengths
    for options, lengths in (
        ({"end_key": ("next", "done")}, [4, 4, 4]),
        ({"traj_key": "episode"}, [6, 6]),
        ({"ends": torch.arange(12) % 3 == 2}, [3, 3, 3, 3]),
        ({"trajectories": torch.arange(12) // 5, "cache_values": True}, [5, 5, 2]),
    ):
        sampler = SliceSampler(slice_len=2, **options)
        buffer = ReplayBuffer(storage=LazyTensorStorage(12), sampler=sampler)
        buffer.extend(data(episode=ids))
        assert sampler.trajectories().length.tolist() == lengths
    for options, lengths in (({"traj_key": "absent"}, [4, 4, 4]), ({"end_key": "absent"}, [6, 6])):
        sampler = SliceSampler(slice_len=2, **options)
        buffer = ReplayBuffer(storage=LazyTensorStorage(12), sampler=sampler)
        with pytest.warns(UserWarning, match="absent.* is not stored"):
            buffer.extend(data(episode=ids))
        assert sampler.trajectories().length.tolist() == lengths
    buffer = ReplayBuffer(storage=LazyTensorStorage(12), sampler=SliceSampler(slice_len=2))
    with pytest.raises(KeyError, match="nothing tells"):
        buffer.extend(TensorDict({"number": torch.arange(12)}, [12]))
    # Nothing was written: other rows may come.
    assert len(buffer) == 0
    buffer.extend(data())
    assert len(buffer) == 12


def test_a_storage_that_was_full_before():
    """Rows that are there already are indexed, and a change of them is announced."""
    model = SliceModel(12, 1)
    data = model.write(episodes(5, 7))
    sampler = SliceSampler(slice_len=5)
    buffer = TensorDictReplayBuffer(storage=TensorStorage(data), sampler=sampler)
    assert set(split(buffer.sample(500))) == set(model.slices(5))
    data["next", "done"][4] = False
    sampler.rebuild()
    assert sampler.trajectories().length.tolist() == [12]
    data["next", "done"][2] = True
    buffer.mark_update(torch.tensor([2]))
    assert sampler.trajectories().length.tolist() == [3, 9]
    other = SliceSampler(slice_len=3)
    buffer.set_sampler(other)
    assert other.trajectories().length.tolist() == [3, 9]


def interleaved(steps: int, envs: int, **more) -> TensorDict:
    """Steps of ``envs`` environments in turn, one row each."""
    n = steps * envs
    env, t = torch.arange(n) % envs, torch.arange(n) // envs
    observation = (env * 1000 + t).float().unsqueeze(-1)
    done = (t % 10 == 9).unsqueeze(-1)
    extra = {name: value(env, t) for name, value in more.items()}
    return TensorDict(
        {"observation": observation, **extra, "next": {"observation": observation + 1, "done": done}}, [n]
    )


@pytest.mark.parametrize("share_next", [False, True])
def test_interleaved_environments(share_next):
    """CASES 23: a trajectory key separates them, or an error says what to do; they are never mixed silently."""

    def buffer_with(data: TensorDict, **options) -> ReplayBuffer:
        storage = LazyTensorStorage(1000, share_next=share_next)
        buffer = ReplayBuffer(storage=storage, sampler=SliceSampler(slice_len=4, **options))
        for start in range(0, len(data), 8):
            buffer.extend(data[start : start + 8])
        return buffer

    data = interleaved(20, 4)
    with pytest.raises(RuntimeError, match=r"4 environments take turns.*ndim=2"):
        buffer_with(data).sample(8)
    with pytest.warns(UserWarning, match="4 environments take turns"):
        buffer_with(data, end_key=("next", "done")).sample(8)
    with pytest.raises(RuntimeError, match=r"take turns.*ndim=2"):
        buffer_with(interleaved(20, 4, episode=lambda env, t: env * 100 + t // 10)).sample(8)
    # Written one environment after another, the key separates them.
    ordered = interleaved(20, 4, episode=lambda env, t: env * 100 + t // 10)
    ordered = ordered.view(20, 4).transpose(0, 1).reshape(80)
    batch = buffer_with(ordered).sample(80)
    assert (batch["observation"].view(20, 4).diff(dim=1) == 1).all()
    assert (batch["episode"].view(20, 4).diff(dim=1) == 0).all()
    # Neither a single environment nor returns over several steps are taken for several environments.
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        buffer_with(interleaved(80, 1)).sample(8)
        ahead = interleaved(80, 1, steps_to_next_obs=lambda env, t: torch.full_like(t, 3))
        ahead["next", "observation"] += 2
        buffer_with(ahead).sample(8)


def several_steps_ahead(steps: int, ahead: int, length: int, walk: str) -> TensorDict:
    """One environment whose rows have the observation ``ahead`` steps later, or the last one of their episode."""
    seen = {
        "steady": lambda: torch.arange(length + 1.0),
        "random": lambda: torch.randn(length + 1),
        "random walk": lambda: torch.randn(length + 1).cumsum(0),
    }
    t = torch.arange(steps) % length
    episodes = [seen[walk]() for _ in range(-(-steps // length))]
    whole = torch.stack(episodes)[torch.arange(steps) // length]
    observation = whole.gather(1, t.unsqueeze(-1))
    following = whole.gather(1, (t + ahead).clamp(max=length).unsqueeze(-1))
    done = (t + ahead >= length).unsqueeze(-1)
    return TensorDict({"observation": observation, "next": {"observation": following, "done": done}}, [steps])


@pytest.mark.parametrize("walk", ["steady", "random", "random walk"])
@pytest.mark.parametrize("ahead", [2, 4, 5])
@pytest.mark.parametrize("length", [12, 300])
def test_one_environment_that_looks_several_steps_ahead(ahead, length, walk):
    """CASES 23: environments in turn without order and without ends have the same rows, and pass for one."""
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for steps in (10, 100, 400):
            buffer = ReplayBuffer(storage=LazyTensorStorage(1000), sampler=SliceSampler(slice_len=1))
            buffer.extend(several_steps_ahead(steps, ahead, length, walk))
            assert len(buffer.sample(8)) == 8
        # Flags that only the last step of an episode has, and observations that go on.
        buffer = ReplayBuffer(storage=LazyTensorStorage(1000), sampler=SliceSampler(slice_len=4))
        data = interleaved(80, 1)
        data["next", "observation"] += ahead - 1
        buffer.extend(data)
        buffer.sample(8)


@pytest.mark.parametrize("walk", [torch.rand, lambda *shape: torch.randn(*shape).cumsum(0)])
@pytest.mark.parametrize("ends", ["together", "apart", "never"])
def test_environments_in_turn_are_told_from_one_that_looks_ahead(ends, walk):
    """CASES 23: by what their ends are like, and by how near rows are to each other."""
    torch.manual_seed(0)
    steps, envs = 50, 4
    observation = walk(steps + 1, envs, 3) + 100 * torch.arange(envs).view(1, envs, 1) * (ends == "never")
    step, env = torch.arange(steps).view(-1, 1), torch.arange(envs)
    done = {"together": step % 10 == 9 + 0 * env, "apart": (step + 3 * env) % 10 == 9, "never": 0 * (step + env) > 0}
    data = TensorDict(
        {"observation": observation[:-1], "next": {"observation": observation[1:], "done": done[ends].unsqueeze(-1)}},
        [steps, envs],
    )
    buffer = ReplayBuffer(storage=LazyTensorStorage(1000), sampler=SliceSampler(slice_len=4))
    buffer.extend(data.reshape(-1))
    with pytest.raises(RuntimeError, match="4 environments take turns"):
        buffer.sample(8)


# The rest of the interface


def test_signatures():
    """The arguments of TorchRL's samplers, with their defaults; what is ours comes after them."""
    common = {
        "num_slices": None,
        "slice_len": None,
        "end_key": None,
        "end_keys": None,
        "traj_key": None,
        "ends": None,
        "trajectories": None,
        "truncated_key": ("next", "truncated"),
        "init_key": "is_init",
        "strict_length": True,
        "compile": False,
    }
    replaced = {"cache_values": False, "span": False}
    step = {"step_key": "step_count", "fragmented": False, "pad_output": False, "use_gpu": False}
    due = {
        SliceSampler: common | replaced | step,
        SliceSamplerWithoutReplacement: common | {"drop_last": False, "shuffle": True, "use_gpu": False},
        PrioritizedSliceSampler: common
        | replaced
        | {"eps": 1e-8, "dtype": torch.float, "reduction": "max", "max_priority_within_buffer": False},
    }
    for cls, defaults in due.items():
        found = {n: p.default for n, p in inspect.signature(cls).parameters.items() if p.default is not p.empty}
        assert defaults.items() <= found.items()
        assert set(found) - set(defaults) <= {"weighting", "stack", "replacement", "process_group"}


@pytest.mark.parametrize("kind", [SliceSampler, SliceSamplerWithoutReplacement])
def test_the_key_that_was_found(kind):
    """As TorchRL's samplers say it: from the first use on, unless a key was given; of flags there is none."""
    ids, of_collector = torch.arange(12) // 4, ("collector", "traj_ids")
    for given, data, due in (
        (None, {"episode": ids}, "episode"),
        (None, {"episode": ids * 0, of_collector: ids}, of_collector),
        ("episode", {"episode": ids, of_collector: ids * 0}, "episode"),
        (None, {("next", "done"): torch.tensor(episodes(4, 4, 4))}, None),
    ):
        buffer = TensorDictReplayBuffer(
            storage=LazyTensorStorage(12), sampler=kind(num_slices=2, traj_key=given), batch_size=4
        )
        assert buffer.sampler.traj_key == given
        buffer.extend(TensorDict(data, [12]))
        buffer.sample()
        assert buffer.sampler.traj_key == due


def test_what_samplers_say_of_themselves_and_of_rows_they_cannot_slice():
    assert repr(RandomSampler()) == "RandomSampler()"
    assert repr(SamplerWithoutReplacement(True)) == "SamplerWithoutReplacement(drop_last=True, shuffle=True)"
    buffer = ReplayBuffer(storage=LazyTensorStorage(12), sampler=SliceSampler(slice_len=6))
    buffer.extend(TensorDict({"episode": torch.arange(12) // 4}, [12]))
    with pytest.raises(RuntimeError, match="Did not find a single trajectory with sufficient length: 6 steps"):
        buffer.sample(6)


def test_an_epoch_of_trajectories_goes_on_after_a_load():
    """The trajectories that were drawn before the save don't come again."""
    buffers = [
        TensorDictReplayBuffer(
            storage=LazyTensorStorage(40),
            batch_size=4,
            generator=torch.Generator().manual_seed(0),
            sampler=SliceSamplerWithoutReplacement(slice_len=2, traj_key="episode"),
        )
        for _ in range(2)
    ]
    saved, loaded = buffers
    saved.extend(TensorDict({"episode": torch.arange(40) // 2}, [40]))
    drawn = [int(episode) for _ in range(3) for episode in saved.sample()["episode"][::2]]
    loaded.load_state_dict(saved.state_dict())
    for _ in range(7):
        batch = loaded.sample()["episode"]
        assert torch.equal(batch, saved.sample()["episode"])
        drawn += batch[::2].tolist()
    assert sorted(drawn) == list(range(20))
