"""Stable-Baselines3's buffers: ours give the batches of theirs, from a record and, where it is installed, beside it."""

import copy
import pickle
import tracemalloc
import warnings
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces

from gpubuf.data import prepared_writes
from gpubuf.integrations import pickled, sb3, stable_buffers
from gpubuf.integrations.stable_buffers import WAITING_STEPS
from tests.contracts.adapters import ENVS, LIMIT, MODES, Seen, program
from tests.support import sb3_buffers
from tests.support.records import read, tensors
from tests.support.sb3_buffers.cases import (
    ACTIONS,
    BOX,
    CASES,
    CUT,
    MEAN,
    REWARD_VARIANCE,
    SPACES,
    STEPS,
    VARIANCE,
    WRITTEN,
    stream,
)

RECORDED = tensors(read(sb3_buffers)["batches"])


class Normalizer:
    """What VecNormalize does to a batch."""

    def normalize_obs(self, obs: Any) -> Any:
        if isinstance(obs, dict):
            return {**obs, "vector": self.normalize_obs(obs["vector"])}
        return np.clip((obs - MEAN) / np.sqrt(VARIANCE + 1e-8), -CUT, CUT).astype(np.float32)

    def normalize_reward(self, reward: np.ndarray) -> np.ndarray:
        return np.clip(reward / np.sqrt(REWARD_VARIANCE + 1e-8), -CUT / 2, CUT / 2).astype(np.float32)


def filled(case: tuple[Any, ...], written: int, **options: Any) -> Any:
    _, kind, space, action, envs, arguments, _ = case
    buffer = getattr(sb3, kind)(
        STEPS * envs, SPACES[space], ACTIONS[action], "cpu", n_envs=envs, **arguments, **options
    )
    for step in stream(space, action, envs, written):
        buffer.add(*step)
    return buffer


@pytest.mark.parametrize("once", [False, True], ids=["plain", "observations once"])
@pytest.mark.parametrize("written", WRITTEN)
@pytest.mark.parametrize("case", CASES, ids=[case[0] for case in CASES])
def test_batches_are_those_of_stable_baselines(case, written, once):
    """Shapes, dtypes, numbers of all rows; also where observations are stored once, and theirs refuses timeouts."""
    options = {"optimize_memory_usage": True, "next_capacity": 2 * STEPS} if once else {}
    buffer = filled(case, written, **options)
    recorded = RECORDED[f"{case[0]}, {written} written"]
    assert (buffer.pos, buffer.full) == (recorded["pos"], recorded["full"])
    np.random.seed(0)
    batch = buffer._get_samples(np.arange(buffer.size()), Normalizer() if case[-1] else None)
    for field, value in batch._asdict().items():
        if value is None:
            assert recorded[field] is None
        else:
            torch.testing.assert_close(value, recorded[field])


@pytest.mark.skipif(sb3._theirs is None, reason="needs stable_baselines3, which is in an environment of its own")
def test_subclasses_of_stable_baselines():
    assert issubclass(sb3.ReplayBuffer, sb3._theirs.ReplayBuffer)
    assert issubclass(sb3.DictReplayBuffer, sb3._theirs.DictReplayBuffer)
    assert type(filled(CASES[0], 7).sample(2)) is sb3._types.ReplayBufferSamples


def test_steps_wait_and_are_written_once(monkeypatch):
    """Steps that wait on the host are seen by every reader, also if the write was interrupted."""
    buffer = filled(CASES[0], 5)
    assert (buffer.size(), buffer.pos, len(buffer.buffer)) == (5, 5, 0)
    write = stable_buffers._extend_columns

    def interrupted(own: Any, columns: Any) -> None:
        write(own, columns)
        raise KeyboardInterrupt

    monkeypatch.setattr(stable_buffers, "_extend_columns", interrupted)
    with pytest.raises(KeyboardInterrupt):
        buffer.sample(2)
    monkeypatch.undo()
    buffer.flush()
    assert (buffer.size(), len(buffer.buffer)) == (5, 15)
    steps = list(stream("box", "box", 3, 5 + 3 * WAITING_STEPS))
    for step in steps[5:]:
        buffer.add(*step)
    assert len(buffer.buffer) == STEPS * 3
    buffer.reset()
    assert (buffer.size(), buffer.pos, buffer.full) == (0, 0, False)
    with pytest.raises(RuntimeError, match="empty"):
        buffer.sample(2)
    buffer.extend(*[np.stack(column) for column in list(zip(*steps[:4], strict=True))[:5]], [s[5] for s in steps[:4]])
    assert buffer.pos == 4


@pytest.mark.parametrize("once", [False, True], ids=["plain", "observations once"])
def test_large_steps_of_every_kind_of_array(once):
    """Arrays that can't be read where they are, and rows that are elsewhere than before."""
    space = spaces.Box(0, 255, (4, 100, 100), np.uint8)
    room = 20 if once else None
    buffer = sb3.ReplayBuffer(40, space, ACTIONS["box"], "cpu", optimize_memory_usage=once, next_capacity=room)
    kinds = [
        lambda image: image,
        lambda image: np.broadcast_to(image, image.shape),
        lambda image: np.asfortranarray(image),
        lambda image: image.astype(np.float64),
        lambda image: image[:, ::-1],
    ]
    for step in range(20):
        images = [np.full((1, 4, 100, 100), step + after, np.uint8) for after in range(2)]
        images = [kinds[(step + place) % len(kinds)](image) for place, image in enumerate(images)]
        ended = np.array([step % 7 == 6])
        buffer.add(*images, np.full((1, 2), step), np.full(1, step), ended, [{"TimeLimit.truncated": step == 13}])
        if step == 8:
            buffer = pickle.loads(pickle.dumps(buffer))
        if step == 12:
            buffer.buffer.load_state_dict(copy.deepcopy(buffer.buffer.state_dict()))
    batch, steps = buffer.samples_at(np.arange(20), np.zeros(20, np.int64)), torch.arange(20)
    assert torch.equal(batch.observations[:, 3, 99, 99].long(), steps)
    assert torch.equal(batch.next_observations[:, 0, 0, 0].long(), steps + 1)
    assert torch.equal(batch.actions, steps.float()[:, None].expand(20, 2))
    assert torch.equal(batch.rewards[:, 0].long(), steps)
    assert batch.dones[:, 0].nonzero().flatten().tolist() == [6]


@pytest.mark.parametrize("protocol", [4, 5])
@pytest.mark.parametrize("once", [False, True], ids=["plain", "observations once"])
def test_pickle_makes_no_copy_of_the_rows(once, protocol, monkeypatch, tmp_path):
    """``save_replay_buffer`` and ``load_replay_buffer`` take a piece at a time, and give the same rows and batches."""
    monkeypatch.setattr(pickled, "PIECE_BYTES", 1 << 18)
    space = spaces.Box(0, 255, (4, 84, 84), np.uint8)
    buffer = sb3.ReplayBuffer(200, space, ACTIONS["box"], "cpu", optimize_memory_usage=once)
    images = np.random.default_rng(0).integers(256, size=(251, 1, 4, 84, 84), dtype=np.uint8)
    for step in range(250):
        ended = np.array([step % 50 == 49])
        buffer.add(images[step], images[step + 1], np.full((1, 2), step), np.full(1, step), ended, [{}])
    taken = []
    for work in (
        lambda file: pickle.dump(buffer, file, protocol),
        lambda file: taken.append(pickle.load(file)),
    ):
        with open(tmp_path / "buffer.pkl", "ab+") as file:
            file.seek(0)
            tracemalloc.start()
            work(file)
            kept, most = tracemalloc.get_traced_memory()
            tracemalloc.stop()
        # A copy of the rows takes 5 or 11 MB. Earlier protocols hold what they write.
        assert protocol == 4 or most - kept < 1_500_000
    (other,) = taken
    for name in ("observations", "next_observations", "rewards"):
        np.testing.assert_array_equal(getattr(other, name), getattr(buffer, name))
    again = copy.deepcopy(buffer)
    for each in (buffer, other, again):
        each.add(images[0], images[1], np.zeros((1, 2)), np.zeros(1), np.array([False]), [{}])
    batches = [each.sample(64) for each in (buffer, other, again)]
    for batch in batches[1:]:
        for ours, theirs in zip(batches[0][:5], batch[:5], strict=True):
            assert torch.equal(ours, theirs)


def test_transforms_that_were_appended_are_pickled():
    buffer = filled(CASES[0], 7)
    buffer.buffer.append_transform(Doubled())
    copies = [pickle.loads(pickle.dumps(buffer)), copy.deepcopy(buffer)]
    due = buffer.sample(9).rewards
    for other in copies:
        assert torch.equal(other.sample(9).rewards, due)
        assert len(other.buffer.transform) == 1


class Doubled(torch.nn.Module):
    def forward(self, data: Any) -> Any:
        return data.set(("next", "reward"), 2 * data["next", "reward"])


def test_a_pickle_of_a_gpu_is_read_without_one(monkeypatch):
    """Tensors are written from the host, and the rows go where this machine has room."""
    buffer = filled(CASES[0], 7)
    state = copy.deepcopy(buffer.__getstate__())
    state["_device"] = torch.device("cuda")
    inner = buffer.buffer.__getstate__()
    inner["made"]["storage"]["device"] = "cuda:0"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    state["buffer"] = object.__new__(pickled.PickledBuffer)
    state["buffer"].__setstate__(pickle.loads(pickle.dumps(inner)))
    other = object.__new__(sb3.ReplayBuffer)
    other.__setstate__(state)
    np.testing.assert_array_equal(other.rewards, buffer.rewards)
    assert other.sample(5).rewards.device.type == "cpu"
    other.device = "cpu"
    assert other.device.type == "cpu"


def test_a_refused_step_is_told_at_each_write():
    """No room for next observations: an error, and no rows but those before."""
    buffer = sb3.ReplayBuffer(200, BOX, ACTIONS["box"], "cpu", optimize_memory_usage=True, next_capacity=1)
    one, zero = np.ones((1, 2), np.float32), np.zeros((1, 2), np.float32)
    for _ in range(12):
        buffer.add(zero, one, zero, np.zeros(1), np.zeros(1, bool), [{}])
    for _ in range(2):
        with pytest.raises(RuntimeError, match="next_capacity"):
            buffer.sample(2)


@pytest.mark.parametrize("once", [False, True], ids=["plain", "observations once"])
@pytest.mark.parametrize("timeouts", [True, False])
@pytest.mark.parametrize("name", ["dones", "timeouts"])
def test_ends_that_are_set(name, timeouts, once):
    """``dones[step] = True`` ends the trajectory, with a termination, as theirs does. Where theirs handles no timeouts,
    with observations stored once, it sets the flag when training begins again, and nothing has terminated."""
    options = {"handle_timeout_termination": timeouts, "optimize_memory_usage": once}
    buffer = filled((*CASES[6][:5], {"n_steps": 3, "gamma": 0.9, **options}, False), 2)
    every = np.array([0, 0, 0]), np.arange(3)
    assert torch.allclose(buffer.samples_at(*every).discounts, torch.tensor(0.9**2))
    getattr(buffer, name)[buffer.pos - 2, :] = True
    batch = buffer.samples_at(*every)
    assert torch.allclose(batch.discounts, torch.tensor(0.9))
    terminated = name == "dones" and not (once and timeouts)
    assert batch.dones.flatten().tolist() == [float(terminated)] * 3
    assert buffer.dones.shape == buffer.timeouts.shape == (STEPS, 3)
    assert buffer.dones[0].tolist() == [1.0] * 3
    assert buffer.timeouts[0].tolist() == [float(not terminated)] * 3
    buffer.timeouts[0, 1] = False
    buffer.dones[0, 2] = False
    assert buffer.dones[0].tolist() == [1, 1, 0]
    assert buffer.timeouts[0].tolist() == [float(not terminated), 0, 0]


def arrays_of(buffer: Any) -> dict[str, np.ndarray]:
    found = {name: getattr(buffer, name) for name in ("actions", "rewards", "dones", "timeouts")}
    for name in ("observations", "next_observations"):
        parts = getattr(buffer, name)
        found |= {f"{name} {key}": part for key, part in (parts if isinstance(parts, dict) else {"": parts}).items()}
    return found


@pytest.mark.parametrize("once", [False, True], ids=["plain", "observations once"])
@pytest.mark.parametrize("written", [0, 31])
@pytest.mark.parametrize("case", [CASES[place] for place in (0, 3, 4, 5, 6)], ids=lambda case: case[0])
def test_arrays_are_those_of_stable_baselines(case, written, once):
    """``observations`` and so on, ``[T, E, ...]``: the dtypes of theirs, zeros where nothing was written."""
    options = {"optimize_memory_usage": True, "next_capacity": 2 * STEPS} if once else {}
    buffer = filled(case, written, **options)
    _, _, space, action, envs, _, _ = case
    found = arrays_of(buffer)
    expected = {name: np.zeros_like(array) for name, array in found.items()}
    for number, (obs, following, act, reward, done, infos) in enumerate(stream(space, action, envs, written)):
        cut = [info.get("TimeLimit.truncated", False) for info in infos]
        step = {"actions": act.reshape(envs, -1), "rewards": reward, "dones": done, "timeouts": np.array(cut)}
        for name, value in (("observations", obs), ("next_observations", following)):
            step |= {f"{name} {key}": part for key, part in (value if isinstance(value, dict) else {"": value}).items()}
        for name, value in step.items():
            expected[name][number % STEPS] = value.reshape(expected[name].shape[1:])
    for name, array in found.items():
        np.testing.assert_array_equal(array, expected[name], name)
        assert array.shape[:2] == (STEPS, envs)
    spaces_of = SPACES["dict"].spaces if space == "dict" else {"": SPACES[space]}
    assert {key: found[f"observations {key}"].dtype for key in spaces_of} == {
        key: part.dtype for key, part in spaces_of.items()
    }


def test_items_of_arrays_are_written():
    """Setting items writes these steps and no others, also where the array is older than they are."""
    buffer = filled(CASES[0], 5)
    rewards = buffer.rewards
    for step in list(stream("box", "box", 3, 6))[5:]:
        buffer.add(*step)
    last = buffer.rewards[5].copy()
    rewards[1:3, 1] = 100
    rewards[rewards == 100] += 1
    buffer.actions[0, 2] = [0.25, 0.5]
    assert buffer.rewards[:, 1].tolist()[1:3] == rewards[:, 1].tolist()[1:3] == [101, 101]
    np.testing.assert_array_equal(buffer.rewards[5], last)
    batch = buffer.samples_at(np.array([1, 0]), np.array([1, 2]))
    assert (batch.rewards[0].item(), batch.actions[1].tolist()) == (101, [0.25, 0.5])
    with pytest.raises(ValueError, match="view of a copy"):
        buffer.rewards[0][1] = 3
    with pytest.raises(IndexError, match="6 steps are stored"):
        buffer.rewards[6] = 3
    assert (buffer.rewards * 2)[5].tolist() == (2 * last).tolist()
    once = filled(CASES[0], 5, optimize_memory_usage=True)
    with pytest.raises(ValueError, match="share_next"):
        once.observations[0] = 1


@pytest.mark.parametrize("once", [False, True], ids=["plain", "observations once"])
@pytest.mark.parametrize(
    ("written", "pos", "full"),
    [(0, 0, True), (7, 7, True), (7, 3, False), (7, 9, False), (31, 2, True), (31, 5, False)],
)
def test_full_and_pos_can_be_set(written, pos, full, once):
    """As in theirs: all steps stay where they are, and steps that were never written are zeros."""
    options = {"optimize_memory_usage": True, "next_capacity": 3 * STEPS} if once else {}
    buffer = filled(CASES[6], written, **options)
    before = {name: np.array(array) for name, array in arrays_of(buffer).items()}
    buffer.full = full
    buffer.pos = pos
    assert (buffer.pos, buffer.full, buffer.size()) == (pos, full, STEPS if full else pos)
    for name, array in arrays_of(buffer).items():
        np.testing.assert_array_equal(array[: buffer.size()], before[name][: buffer.size()], name)
    for step in stream("box", "box", 3, 1):
        buffer.add(*step)
        np.testing.assert_array_equal(buffer.rewards[pos], step[3])
    assert buffer.sample(64).rewards.shape == (64, 1)
    with pytest.raises(ValueError, match=r"0 \.\. 11"):
        buffer.pos = STEPS


@pytest.mark.parametrize("noise", [0.0, 1e-6], ids=["kept", "read anew"])
@pytest.mark.parametrize("mode", MODES)
def test_no_goal_is_of_another_episode(mode, noise):
    """Cases 57, 76, 77. Goals are what the row's own episode achieves, where a time limit ends it."""
    space = spaces.Dict(
        dict.fromkeys(["observation", "achieved_goal", "desired_goal"], spaces.Box(-9, 99, (3,), np.float32))
    )
    buffer = sb3.HerReplayBuffer(
        300, space, spaces.Box(-2, 2, (1,), np.float32), Goals(), "cpu", ENVS, n_sampled_goal=3, autoreset=mode
    )
    seen, random = Seen(ENVS), np.random.default_rng(0)

    def placed(observations: np.ndarray) -> dict[str, np.ndarray]:
        at = np.array([seen.places[row.astype(np.float32).tobytes()] for row in observations], np.float32)
        anew = at + (noise * random.normal(size=at.shape)).astype(np.float32)
        return {"observation": anew, "achieved_goal": at, "desired_goal": np.full_like(at, -1)}

    for step in program(mode, seen):
        told = (step[name] for name in ("actions", "rewards", "terminations", "infos", "truncations"))
        buffer.add(placed(step["obs"]), placed(step["next_obs"]), *told)
    batch = buffer.sample(4000)
    own, goal = batch.observations["achieved_goal"], batch.observations["desired_goal"]
    other = goal[:, 0] >= 0
    assert 0.7 < other.float().mean() < 0.8
    assert torch.equal(goal[other, :2], own[other, :2])
    assert (goal[other, 2] > own[other, 2]).all()
    # From the first step of an episode any later one may be the goal.
    assert set(goal[other & (own[:, 2] == 0), 2].tolist()) == set(range(1, LIMIT + 1))
    assert torch.equal(own[:, :2], batch.next_observations["achieved_goal"][:, :2])


def test_rows_that_only_reset_are_no_transitions():
    """Cases 57, 76. The transition before stands for them, whatever they look like: the mode says it."""

    def one(value: float) -> np.ndarray:
        return np.full((1, 2), value, np.float32)

    yes, no, nought = np.array([True]), np.array([False]), np.array([0.0])
    steps = [
        (one(0), one(1), no, nought),
        (one(1), one(2), yes, nought),
        (one(2), one(5), no, nought),
        (one(5), one(6), no, nought),
        (one(6), one(7), yes, nought),
        (one(8), one(9), no, nought + 1),
        (one(9), one(10), yes, nought),
        (one(10), one(11), no, nought + 1),
    ]
    for mode, first, last in (
        ("next_step", [0, 1, 1, 5, 6, 6, 9, 9], [1, 2, 2, 6, 7, 7, 10, 10]),
        ("disabled", [0, 1, 2, 5, 6, 8, 9, 10], [1, 2, 5, 6, 7, 9, 10, 11]),
    ):
        buffer = sb3.ReplayBuffer(20, BOX, ACTIONS["box"], "cpu", autoreset=mode)
        for obs, following, cut, reward in steps:
            buffer.add(obs, following, one(0), reward, no, {}, cut)
        assert buffer.observations[: len(steps), 0, 0].tolist() == first
        assert buffer.next_observations[: len(steps), 0, 0].tolist() == last
        ends = [0, 1, 1, 0, 1, 1, 1, 1] if mode == "next_step" else [0, 1, 0, 0, 1, 0, 1, 0]
        assert buffer.timeouts[: len(steps), 0].tolist() == ends


def test_what_was_loaded_waits_for_no_reset():
    """Case 78. A program that begins anew after a load has reset its environments; a copy goes on with them."""
    buffer = sb3.ReplayBuffer(20, BOX, ACTIONS["box"], "cpu", n_steps=2, gamma=0.5, autoreset="next_step")
    zero, cut = np.zeros((1, 2), np.float32), np.array([True])
    buffer.add(zero, zero + 1, zero, np.ones(1), ~cut, {}, cut)
    loaded, again = pickle.loads(pickle.dumps(buffer)), copy.deepcopy(buffer)
    for each in (loaded, again):
        each.add(zero + 5, zero + 6, zero, np.zeros(1), ~cut, {}, ~cut)
    assert loaded.observations[:2, 0, 0].tolist() == [0, 5]
    assert again.observations[:2, 0, 0].tolist() == [0, 0]


def test_truncations_beside_infos_of_each_environment():
    """Either tells an end."""
    buffer = sb3.ReplayBuffer(60, BOX, ACTIONS["box"], "cpu", 3)
    zero, both = np.zeros((3, 2), np.float32), np.array([True, True, False])
    infos = [{}, {"TimeLimit.truncated": True}, {}]
    buffer.add(zero, zero, zero, np.ones(3), both, infos, np.array([False, False, True]))
    assert (buffer.dones[0].tolist(), buffer.timeouts[0].tolist()) == ([1, 1, 1], [0, 1, 1])


@pytest.mark.parametrize(
    "options", [{"n_steps": 3, "handle_timeout_termination": False}, {}], ids=["steps", "timeouts"]
)
def test_one_dict_of_infos_needs_truncations(options):
    """Case 57. Gymnasium's infos don't tell where a time limit ends an episode."""
    buffer = sb3.ReplayBuffer(20, BOX, ACTIONS["box"], "cpu", **options)
    zero = np.zeros((1, 2), np.float32)
    with pytest.raises(ValueError, match="truncations"):
        buffer.add(zero, zero, zero, np.zeros(1), np.zeros(1, bool), {})
    assert buffer.size() == 0


class Goals:
    """Environments whose reward is whether a goal is reached."""

    def env_method(
        self, name: str, achieved: np.ndarray, goal: np.ndarray, infos: list[Any], indices: Any
    ) -> list[Any]:
        assert (name, indices, len(infos)) == ("compute_reward", [0], len(goal))
        return [(achieved == goal).all(-1).astype(np.float64) - 1]


@pytest.mark.parametrize("strategy", ["future", "final", "episode"])
def test_goals_are_relabelled(strategy):
    """Goals of other rows are what their episode achieves, later for "future"; rewards are the environments'."""
    space = spaces.Dict(dict.fromkeys(["observation", "achieved_goal", "desired_goal"], BOX))
    buffer = sb3.HerReplayBuffer(
        48, space, ACTIONS["box"], Goals(), "cpu", 2, n_sampled_goal=3, goal_selection_strategy=strategy
    )
    for step in range(30):
        # Steps of an episode of 6 are numbered, and its goal can't be reached.
        here = np.stack([np.full(2, step // 6), np.full(2, step % 6)], -1).astype(np.float32)
        there, goal = here + np.array([0, 1]), np.full((2, 2), -1.0)
        done = np.full(2, step % 6 == 5)
        obs = {"observation": here, "achieved_goal": here, "desired_goal": goal}
        following = {"observation": there, "achieved_goal": there, "desired_goal": goal}
        buffer.add(obs, following, np.zeros((2, 2)), np.full(2, -1.0), done, [{}, {}])
    torch.manual_seed(0)
    batch = buffer.sample(2000)
    own, goal = batch.observations["observation"], batch.observations["desired_goal"]
    other = goal[:, 0] >= 0
    assert 0.7 < other.float().mean() < 0.8
    assert torch.equal(goal, batch.next_observations["desired_goal"])
    assert torch.equal(goal[other, 0], own[other, 0])
    ahead = goal[other, 1] - own[other, 1] - 1
    assert (ahead.min() >= 0) == (strategy != "episode")
    assert (goal[other, 1] == 6).all() == (strategy == "final")
    reached = (goal == batch.next_observations["achieved_goal"]).all(-1, keepdim=True)
    assert torch.equal(batch.rewards, reached.float() - 1)
    loaded = pickle.loads(pickle.dumps(buffer))
    assert loaded.env is None
    with pytest.raises(RuntimeError, match="set_env"):
        loaded.sample(2)
    loaded.set_env(Goals())
    assert loaded.sample(2).rewards.shape == (2, 1)
    with pytest.raises(ValueError, match="already"):
        loaded.set_env(Goals())


def test_episodes_in_progress_are_cut_off_with_a_warning():
    """Theirs tells of it, too."""
    space = spaces.Dict(dict.fromkeys(["observation", "achieved_goal", "desired_goal"], BOX))
    buffer = sb3.HerReplayBuffer(20, space, ACTIONS["box"], Goals(), "cpu", 2)
    buffer.truncate_last_trajectory()
    for step in range(13):
        obs, following = (dict.fromkeys(space.spaces, np.full((2, 2), step + after, np.float32)) for after in range(2))
        done = np.array([step in (3, 12), False])
        buffer.add(obs, following, np.zeros((2, 2)), np.zeros(2), done, [{}, {}])
    with pytest.warns(UserWarning, match="The last trajectory in the replay buffer will be truncated"):
        buffer.truncate_last_trajectory()
    assert buffer.dones[2].tolist() == [1, 1]
    assert buffer.timeouts[2].tolist() == [0, 1]
    buffer.truncate_last_trajectory()


def test_rewards_see_infos():
    """``copy_info_dict``: those of the row, over the seam and after loading. Copies are given away."""

    class Told:
        def env_method(self, name: str, achieved: Any, goal: Any, infos: list[Any], indices: Any) -> list[Any]:
            for info, reached in zip(infos, achieved, strict=True):
                assert info.pop("at") == tuple(reached)
            return [np.ones(len(infos))]

    space = spaces.Dict(dict.fromkeys(["observation", "achieved_goal", "desired_goal"], BOX))
    buffer = sb3.HerReplayBuffer(20, space, ACTIONS["box"], Told(), "cpu", 2, copy_info_dict=True)
    for step in range(14):
        here = np.array([[0, step], [1, step]], np.float32)
        obs, following = (dict.fromkeys(space.spaces, here + np.array([0, after], np.float32)) for after in range(2))
        infos = [{"at": (0, step + 1)}, {"at": (1, step + 1)}]
        buffer.add(obs, following, np.zeros((2, 2)), np.zeros(2), np.zeros(2, bool), infos)
        if step == 11:
            buffer = pickle.loads(pickle.dumps(buffer))
            buffer.set_env(Told())
    for _ in range(2):
        assert 0.7 < buffer.sample(500).rewards.mean() < 0.9
    with pytest.raises(ValueError, match="a dict for each environment"):
        buffer.add(obs, following, np.zeros((2, 2)), np.zeros(2), np.zeros(2, bool), {}, np.zeros(2, bool))


def test_priorities():
    buffer = sb3.PrioritizedReplayBuffer(STEPS * 3, BOX, ACTIONS["box"], "cpu", n_envs=3, alpha=1.0)
    for step in stream("box", "box", 3, STEPS):
        buffer.add(*step)
    batch = buffer.sample(8)
    assert batch.weights.shape == (8, 1)
    buffer.update_priorities(batch, torch.zeros(8, 1))
    again = buffer.sample(200)
    assert not set(again.indices.tolist()) & set(batch.indices.tolist())


@pytest.mark.parametrize("answered", [False, True])
def test_a_program_that_sets_no_priorities_is_told_once(answered):
    """Stable-Baselines3's algorithms set none, so that a prioritized buffer would draw uniformly without a word."""
    buffer = sb3.PrioritizedReplayBuffer(STEPS * 3, BOX, ACTIONS["box"], "cpu", n_envs=3)
    for step in stream("box", "box", 3, STEPS):
        buffer.add(*step)
    if answered:
        buffer.update_priorities(buffer.sample(8), torch.ones(8))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2 * sb3.PATIENCE):
            buffer.sample(8)
    assert [str(each.message)[:42] for each in caught] == ["32 batches were drawn and no priority came"] * (
        not answered
    )


def test_spaces_that_can_not_be_stored():
    with pytest.raises(NotImplementedError, match="can't be stored"):
        sb3.ReplayBuffer(10, spaces.Text(3), ACTIONS["box"])
    with pytest.raises(NotImplementedError, match="dicts of dicts"):
        sb3.ReplayBuffer(10, spaces.Dict({"a": spaces.Dict({"b": BOX})}), ACTIONS["box"])
    with pytest.raises(NotImplementedError, match="actions"):
        sb3.ReplayBuffer(10, BOX, spaces.Text(3))
    made = sb3.ReplayBuffer(10, spaces.MultiDiscrete([3, 4]), spaces.MultiBinary(3))
    assert (made.obs_shape, made.action_dim, made.size()) == ((2,), 3, 0)
    assert sb3.ReplayBuffer(10, BOX, spaces.MultiDiscrete([3, 4])).action_dim == 2


def test_the_device_that_load_sets():
    buffer = filled(CASES[0], 5)
    buffer.device = torch.device("cpu")
    assert buffer.device == torch.device("cpu")
    assert buffer.sample(3).rewards.device.type == "cpu"
    assert "5/12 steps of 3" in repr(buffer)
    if not torch.cuda.is_available():
        # A model of a machine with a GPU that is loaded on one without.
        buffer.device = "cuda"
        assert (buffer.device.type, buffer.sample(3).rewards.device.type) == ("cuda", "cpu")


@pytest.mark.parametrize("space", ["box", "dict"])
def test_a_step_that_waited_is_written_by_a_prepared_launch(space, monkeypatch: pytest.MonkeyPatch):
    """Once the first write has settled the columns, none of them is looked up by its key or made a tensor."""
    buffer = sb3.ReplayBuffer(64, SPACES[space], ACTIONS["box"], "cpu")
    written = list(stream(space, "box", 1, 3))
    for step in written[:2]:
        buffer.add(*step)
        buffer.sample(4)

    def refuse(*arguments: Any) -> None:
        raise AssertionError("the step took the general way")

    monkeypatch.setattr(prepared_writes.Route, "sources", refuse)
    buffer.add(*written[2])
    buffer.sample(4)
    assert buffer.size() == 3
