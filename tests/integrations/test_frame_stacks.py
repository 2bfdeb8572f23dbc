"""``frame_stack=``: Stable-Baselines3's and CleanRL's programs get the batches of buffers that store whole stacks."""

from __future__ import annotations

import itertools
import pickle
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from gymnasium.wrappers import FrameStackObservation

from gpubuf.data import FrameStack, LazyTensorStorage, ReplayBuffer
from gpubuf.integrations import cleanrl, sb3
from gpubuf.integrations.environment_steps import rows_at

ROOM = 40


class Images(gym.Env[Any, Any]):
    """Random observations of a space, in episodes of random lengths that end or are cut off."""

    def __init__(self, space: spaces.Space[Any], seed: int) -> None:
        self.random = np.random.default_rng(seed)
        self.observation_space, self.action_space = space, spaces.Discrete(2)

    def observation(self) -> Any:
        space = self.observation_space
        if isinstance(space, spaces.Dict):
            return {name: self.numbers(part) for name, part in space.spaces.items()}
        return self.numbers(space)

    def numbers(self, space: Any) -> np.ndarray:
        return self.random.integers(1, 200, size=space.shape).astype(space.dtype)

    def reset(self, **options: Any) -> Any:
        return self.observation(), {}

    def step(self, action: Any) -> Any:
        end = self.random.random()
        return self.observation(), float(self.random.integers(5)), end < 0.1, 0.1 <= end < 0.2, {}


class Stacked:
    """Environments as Stable-Baselines3's VecFrameStack gives them: zeros first, and resets in the step of an end."""

    def __init__(self, space: spaces.Space[Any], dim: int, envs: int) -> None:
        self.envs, self.dim = [Images(space, seed) for seed in range(envs)], dim
        self.now = [self.first(env) for env in self.envs]

    def first(self, env: Images) -> Any:
        return self.each(lambda frame: np.concatenate([np.zeros_like(frame)] * 3 + [frame], self.dim), env.reset()[0])

    def each(self, function: Any, *observations: Any) -> Any:
        if isinstance(observations[0], dict):
            return {name: function(*(each[name] for each in observations)) for name in observations[0]}
        return function(*observations)

    def moved(self, stack: np.ndarray, frame: np.ndarray) -> np.ndarray:
        return np.concatenate([np.split(stack, [frame.shape[self.dim]], self.dim)[1], frame], self.dim)

    def step(self) -> tuple[Any, ...]:
        """The arguments of a buffer's ``add``."""
        before, after, rewards, dones, infos = list(self.now), [], [], [], []
        for i, env in enumerate(self.envs):
            frame, reward, terminated, truncated, _ = env.step(0)
            after.append(self.each(self.moved, before[i], frame))
            self.now[i] = self.first(env) if terminated or truncated else after[i]
            rewards.append(reward)
            dones.append(terminated or truncated)
            infos.append({"TimeLimit.truncated": truncated and not terminated})

        def together(observations: list[Any]) -> Any:
            return self.each(lambda *all_envs: np.stack(all_envs), *observations)

        actions = np.zeros((len(self.envs), 1), np.int64)
        return together(before), together(after), actions, np.array(rewards), np.array(dones), infos


def space_of(shape: tuple[int, ...], dtype: Any = np.uint8, times: int = 1, dim: int = 0) -> spaces.Box:
    found = list(shape)
    found[dim] *= times
    return spaces.Box(0, 255, tuple(found), dtype)


def assert_alike(stacks: Any, whole: Any) -> None:
    """All rows whose older frames are stored are those of the buffer that stores whole stacks, bit for bit."""
    n = stacks.size()
    assert (n, stacks.pos, stacks.full) == (whole.size(), whole.pos, whole.full)
    steps = np.array([(stacks.pos - 1 - back) % ROOM for back in range(n - 3 if n == ROOM else n)])
    where = np.repeat(steps, stacks.n_envs), np.tile(np.arange(stacks.n_envs), len(steps))
    for found, due in zip(stacks.samples_at(*where), whole.samples_at(*where), strict=True):
        for one, two in zip(*map(values, (found, due)), strict=True):
            assert torch.equal(one, two)
            assert one.dtype == two.dtype
    for name in ("observations", "next_observations"):
        for one, two in zip(values(getattr(stacks, name)), values(getattr(whole, name)), strict=True):
            assert np.array_equal(one[steps], two[steps])
    for one in values(stacks.sample(16).observations):
        assert one.shape[0] == 16


def values(given: Any) -> list[Any]:
    return list(given.values()) if isinstance(given, dict) else [] if given is None else [given]


@pytest.mark.parametrize("n_steps", [1, 3])
@pytest.mark.parametrize("envs", [1, 3])
@pytest.mark.parametrize("kind", ["channels first", "channels last", "colours", "vector", "dict"])
def test_batches_are_those_of_whole_stacks(kind, envs, n_steps):
    """Of Stable-Baselines3's stacks; terminal observations, pickles and another start of the program among them."""
    shape, dtype, dim = {
        "channels first": ((1, 9, 9), np.uint8, 0),
        "channels last": ((9, 9, 1), np.uint8, -1),
        "colours": ((3, 20, 20), np.uint8, 0),
        "vector": ((3,), np.float32, -1),
        "dict": ((3,), np.float32, -1),
    }[kind]
    frame, space = space_of(shape, dtype), space_of(shape, dtype, 4, dim)
    if kind == "dict":
        frame, space = (spaces.Dict({"one": each, "two": each}) for each in (frame, space))
    program, action = Stacked(frame, dim, envs), spaces.Discrete(2)
    options: dict[str, Any] = {"n_envs": envs, "n_steps": n_steps, "next_capacity": ROOM * envs}
    stacks = sb3.ReplayBuffer(ROOM * envs, space, action, "cpu", frame_stack=4, **options)
    whole = sb3.ReplayBuffer(ROOM * envs, space, action, "cpu", optimize_memory_usage=True, **options)
    for step in range(100):
        given = program.step()
        stacks.add(*given)
        whole.add(*given)
        if step % 11 == 0 or step < 4:
            assert_alike(stacks, whole)
        if step == 50:
            stacks = pickle.loads(pickle.dumps(stacks))
            stacks.end_trajectories()
            whole.end_trajectories()
            program.now = [program.first(env) for env in program.envs]
    assert whole.buffer.storage.nbytes > 2 * stacks.buffer.storage.nbytes
    rows = stacks.size()
    with pytest.raises(ValueError, match=r"^row 0.*observation"):
        stacks.add(*Stacked(frame, dim, envs).step()[:1] * 2, *given[2:])
    assert stacks.size() == rows


@pytest.mark.parametrize(("envs", "mode"), [(1, "SAME_STEP"), (3, "SAME_STEP"), (1, "NEXT_STEP"), (3, "NEXT_STEP")])
def test_cleanrls_stacks(envs, mode):
    """Gymnasium's own wrapper, whose stacks begin with the first frame again. Steps that only reset are no rows."""
    image = space_of((8, 8))
    made = SyncVectorEnv(
        [lambda seed=seed: FrameStackObservation(Images(image, seed), 4) for seed in range(envs)],
        autoreset_mode=AutoresetMode[mode],
    )
    space, action = made.single_observation_space, made.single_action_space
    options: dict[str, Any] = {"n_envs": envs, "autoreset": made, "n_steps": 3, "next_capacity": ROOM * envs}
    stacks = cleanrl.ReplayBuffer(ROOM * envs, space, action, "cpu", frame_stack=4, **options)
    whole = cleanrl.ReplayBuffer(ROOM * envs, space, action, "cpu", optimize_memory_usage=True, **options)
    obs, _ = made.reset(seed=0)
    resets, over = 0, np.zeros(envs, bool)
    for step in range(100):
        actions = np.zeros(envs, np.int64)
        after, rewards, terminations, truncations, infos = made.step(actions)
        real = after.copy()
        for env in np.flatnonzero(infos.get("_final_obs", [])):
            real[env] = infos["final_obs"][env]
        given = obs.copy(), real, actions, rewards, terminations, infos, truncations
        if over.any() and mode == "NEXT_STEP":
            resets += 1
            if envs > 1:
                with pytest.raises(ValueError, match=r"AutoresetMode\.SAME_STEP"):
                    stacks.add(*given)
                return
            stacks.add(*given)
        else:
            stacks.add(*given)
            whole.add(*given)
        obs, over = after, terminations | truncations
        if step % 11 == 0 and not resets:
            assert_alike(stacks, whole)
    assert resets == 0 or stacks.size() == ROOM
    assert stacks.sample(8).observations.shape == (8, 4, 8, 8)


def test_what_a_space_lacks():
    action = spaces.Discrete(2)
    for space in (spaces.Discrete(4), space_of((9, 9, 3)), space_of((6,))):
        with pytest.raises(ValueError, match="no stacks of frame_stack=4"):
            sb3.ReplayBuffer(40, space, action, "cpu", frame_stack=4)
    mixed = spaces.Dict({"image": space_of((9, 9, 4)), "speed": space_of((3,))})
    stack = FrameStack(("observation", "image"), 4, dim=-1, padding="zero")
    buffer = sb3.DictReplayBuffer(40, mixed, action, "cpu", frame_stack=stack)
    image = np.zeros((1, 9, 9, 4), np.uint8)
    step = {"image": image, "speed": np.ones((1, 3))}
    buffer.add(step, step, np.zeros((1, 1)), np.zeros(1), np.zeros(1, bool), [{}])
    assert buffer.sample(2).next_observations["image"].shape == (2, 9, 9, 4)
    with pytest.raises(NotImplementedError, match="pos and full"):
        buffer.pos = 0


class LazyFrames:
    """A stack that is put together when an array is asked for, as old environments give it."""

    def __init__(self, *frames: np.ndarray) -> None:
        self.frames = frames

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.stack(self.frames).astype(dtype or np.uint8)


def test_lazy_frames():
    frames = [np.full((8, 8), number, np.uint8) for number in range(12)]
    stacks = [LazyFrames(*(frames[max(last - back, 0)] for back in (3, 2, 1, 0))) for last in range(12)]
    adapter = cleanrl.ReplayBuffer(40, space_of((4, 8, 8)), spaces.Discrete(2), "cpu", frame_stack=4)
    plain = ReplayBuffer(LazyTensorStorage(40, share_next=["pixels"]), transform=FrameStack("pixels"))
    for before, after in itertools.pairwise(stacks):
        adapter.add(before, after, np.zeros(1), np.zeros(1), np.zeros(1, bool), [{}])
        plain.add({"pixels": before, "next": {"pixels": after, "done": np.zeros(1, bool)}})
    due = torch.from_numpy(np.stack([np.asarray(stack) for stack in stacks[:-1]]))
    assert torch.equal(adapter.samples_at(np.arange(11), np.zeros(11, np.int64)).observations, due)
    assert torch.equal(rows_at(plain, torch.arange(11))[0]["pixels"], due)


@pytest.mark.skipif(sb3._theirs is None, reason="needs stable_baselines3, which is in an environment of its own")
@pytest.mark.parametrize("envs", [1, 3])
@pytest.mark.parametrize("transposed", [True, False])
def test_beside_stable_baselines(transposed, envs):
    """Its VecFrameStack, and its own buffer, step by step."""
    from stable_baselines3.common.vec_env import DummyVecEnv, VecFrameStack, VecTransposeImage

    image = space_of((36, 36, 1))
    made: Any = VecFrameStack(DummyVecEnv([lambda seed=seed: Images(image, seed) for seed in range(envs)]), 4)
    made = VecTransposeImage(made) if transposed else made
    space, action = made.observation_space, made.action_space
    ours = sb3.ReplayBuffer(ROOM * envs, space, action, "cpu", envs, frame_stack=4, next_capacity=ROOM * envs)
    theirs = sb3._theirs.ReplayBuffer(ROOM * envs, space, action, "cpu", envs)
    obs = made.reset()
    for _ in range(95):
        after, rewards, dones, infos = made.step(actions := np.zeros(envs, np.int64))
        real = after.copy()
        for env in np.flatnonzero(dones):
            real[env] = infos[env]["terminal_observation"]
        for buffer in (ours, theirs):
            buffer.add(obs, real, actions, rewards, dones, infos)
        obs = after
        n = ours.size()
        steps = [(ours.pos - 1 - back) % ROOM for back in range(n - 3 if n == ROOM else n)]
        where = np.repeat(steps, envs), np.tile(np.arange(envs), len(steps))
        batch = ours.samples_at(*where)
        assert np.array_equal(batch.observations.numpy(), theirs.observations[where])
        assert np.array_equal(batch.next_observations.numpy(), theirs.next_observations[where])
        assert np.array_equal(batch.dones[:, 0].numpy(), theirs.dones[where] * (1 - theirs.timeouts[where]))
