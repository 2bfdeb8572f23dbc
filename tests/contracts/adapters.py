"""What every adapter of a program's buffer must do, whatever the program calls it.

A program's loop steps real environments that end by their time limit alone, and reset in one of Gymnasium's three ways.
Every observation that they give is remembered with its episode, so that a test knows where one that comes back in a
batch belongs, and what the n-step return from there is.
"""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import gymnasium as gym
import numpy as np
import torch
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from tensordict import TensorDict
from torch import Tensor

from gpubuf.integrations import cleanrl, fasttd3, flashsac, holosoma, lerobot, rsl_rl, sb3

LIMIT, ENVS, STEPS, N_STEPS, GAMMA = 6, 3, 64, 3, 0.9
#: Steps that a buffer has room for: the ring wraps.
ROOM = 40
MODES = {mode.name.lower(): mode for mode in AutoresetMode}

SHORT = "gpubuf-tests/ShortPendulum-v1"
if SHORT not in gym.registry:
    gym.register(SHORT, "gymnasium.envs.classic_control:PendulumEnv", max_episode_steps=LIMIT)
SPACES = gym.make(SHORT).observation_space, gym.make(SHORT).action_space


class Batch(NamedTuple):
    """What all programs' batches have. ``discount`` is None where a program's batches have none."""

    observation: Tensor
    action: Tensor
    reward: Tensor
    following: Tensor
    terminated: Tensor
    discount: Tensor | None = None


class Seen:
    """The place of each observation, (environment, number of its episode, of its step there), and what was done there.

    Attributes:
        places: by the bytes of the observation.
        taken: action and reward, by place.
        last: the last step of each (environment, episode).
    """

    def __init__(self, envs: int) -> None:
        self.places: dict[bytes, tuple[int, int, int]] = {}
        self.taken: dict[tuple[int, int, int], tuple[float, float]] = {}
        self.last: dict[tuple[int, int], int] = {}
        self.now = [(env, -1, 0) for env in range(envs)]

    def first(self, env: int, observation: np.ndarray) -> None:
        """An episode begins."""
        self._put((env, self.now[env][1] + 1, 0), observation)

    def next(self, env: int, observation: np.ndarray, action: Any = 0.0, reward: Any = 0.0) -> None:
        """It goes on."""
        env, episode, step = self.now[env]
        self.taken[env, episode, step] = float(action), float(reward)
        self._put((env, episode, step + 1), observation)

    def _put(self, place: tuple[int, int, int], observation: np.ndarray) -> None:
        self.now[place[0]] = place
        self.last[place[:2]] = place[2]
        self.places[np.asarray(observation, np.float32).tobytes()] = place

    def anew(self, observations: np.ndarray, noise: np.ndarray) -> np.ndarray:
        """Observations that a program reads a second time, with noise: they have the same places."""
        found = observations + noise.astype(np.float32)
        for one, other in zip(observations, found, strict=True):
            self.places[other.tobytes()] = self.places[one.tobytes()]
        return found

    def of(self, observation: Tensor) -> tuple[int, int, int]:
        return self.places[observation.numpy().tobytes()]

    def assert_windows(self, observations: Tensor, following: Tensor, most: int) -> list[int]:
        """Each window goes on in its episode for ``most`` steps, or up to the end of what is known of it."""
        lengths = []
        for one, other in zip(observations, following, strict=True):
            env, episode, step = self.of(one)
            end = min(step + most, self.last[env, episode])
            assert self.of(other) == (env, episode, end)
            lengths.append(end - step)
        assert set(lengths) == set(range(1, most + 1))
        return lengths

    def assert_batch(self, batch: Batch, most: int) -> None:
        """Rows are the actions, n-step returns and discounts of their windows; nothing has terminated."""
        lengths = self.assert_windows(batch.observation, batch.following, most)
        for row, length in enumerate(lengths):
            env, episode, step = self.of(batch.observation[row])
            taken = [self.taken[env, episode, step + k] for k in range(length)]
            assert abs(float(batch.action[row]) - taken[0][0]) < 1e-6
            due = sum(GAMMA**k * reward for k, (_, reward) in enumerate(taken))
            assert abs(float(batch.reward[row]) - due) < 1e-4
        assert not batch.terminated.any()
        if batch.discount is not None:
            torch.testing.assert_close(batch.discount.reshape(-1), GAMMA ** torch.tensor(lengths).float())


def program(
    mode: str, seen: Seen, envs: int = ENVS, steps: int = STEPS, noise: float = 0.0
) -> Iterator[dict[str, Any]]:
    """The steps of a program's loop, ``next_obs`` being the last one of an episode that has ended.

    With ``noise`` an observation to act on differs by about so much from the one that the step before gave.
    """
    random = np.random.default_rng(0)
    made = SyncVectorEnv([lambda: gym.make(SHORT)] * envs, autoreset_mode=MODES[mode])
    made.action_space.seed(0)
    obs, _ = made.reset(seed=1)
    for env in range(envs):
        seen.first(env, obs[env])
    ended = np.zeros(envs, bool)
    for _ in range(steps):
        actions = made.action_space.sample()
        next_obs, rewards, terminations, truncations, infos = made.step(actions)
        real_next_obs = next_obs.copy()
        for env in range(envs):
            done = actions[env, 0], rewards[env]
            if mode == "next_step" and ended[env]:
                seen.first(env, next_obs[env])
            elif mode == "same_step" and truncations[env]:
                real_next_obs[env] = infos["final_obs"][env]
                seen.next(env, real_next_obs[env], *done)
                seen.first(env, next_obs[env])
            else:
                seen.next(env, next_obs[env], *done)
        yield {
            "obs": seen.anew(obs, noise * random.normal(size=obs.shape)) if noise else obs,
            "next_obs": real_next_obs,
            "actions": actions,
            "rewards": rewards.astype(np.float32),
            "terminations": terminations,
            "truncations": truncations,
            "infos": infos,
        }
        ended = terminations | truncations
        obs = next_obs
        if mode == "disabled" and ended.any():
            obs, _ = made.reset(options={"reset_mask": ended})
            for env in np.flatnonzero(ended):
                seen.first(env, obs[env])
    made.close()


@dataclass(frozen=True)
class Adapter:
    """One adapter, as its program uses it.

    Attributes:
        make: an empty buffer of :data:`ROOM` steps, of (the kind of reset, whether observations are stored once).
        add: writes a step of :func:`program`, as it may have been changed.
        sample: a batch of about so many rows.
        copy: saves the buffer, and loads it into a new one; of (buffer, new one, folder).
        n_steps, envs, modes: what there is of them.
    """

    make: Callable[[str, bool], Any]
    add: Callable[[Any, dict[str, Any]], None]
    sample: Callable[[Any, int], Batch]
    copy: Callable[[Any, Any, Path], Any]
    n_steps: int = N_STEPS
    envs: int = ENVS
    modes: tuple[str, ...] = tuple(MODES)


# Stable-Baselines3 and CleanRL


def stable(kind: Any, add: Callable[[Any, dict[str, Any]], None], modes: tuple[str, ...], **options: Any) -> Adapter:
    def make(mode: str, once: bool) -> Any:
        return kind(
            *(ROOM * ENVS, *SPACES, "cpu", ENVS, once),
            **{"n_steps": N_STEPS, "gamma": GAMMA, "next_capacity": ROOM * ENVS if once else None},
            **{"autoreset": mode, **options},
        )

    def sample(buffer: Any, n: int) -> Batch:
        data = buffer.sample(n)
        return Batch(data.observations, data.actions, data.rewards, data.next_observations, data.dones, data.discounts)

    return Adapter(make, add, sample, lambda buffer, new, folder: pickle.loads(pickle.dumps(buffer)), modes=modes)


def add_told(buffer: Any, step: dict[str, Any]) -> None:
    names = ("obs", "next_obs", "actions", "rewards", "terminations", "infos", "truncations")
    buffer.add(*(step[name] for name in names))


def add_with_infos(buffer: Any, step: dict[str, Any]) -> None:
    """As Stable-Baselines3's own environments tell it."""
    infos = [{"TimeLimit.truncated": True, "terminal_observation": 0} if cut else {} for cut in step["truncations"]]
    done = step["terminations"] | step["truncations"]
    buffer.add(step["obs"], step["next_obs"], step["actions"], step["rewards"], done, infos)


# FastTD3 and holosoma


def ring(kind: Any) -> Adapter:
    def make(mode: str, once: bool) -> Any:
        shared = {"share_next": True, "next_capacity": ROOM * ENVS} if once else {}
        return kind(ENVS, ROOM, 3, 1, 3, n_steps=N_STEPS, gamma=GAMMA, autoreset=mode, **shared)

    def add(buffer: Any, step: dict[str, Any]) -> None:
        given = {name: torch.as_tensor(value) for name, value in step.items() if name != "infos"}
        obs, coming = given["obs"], given["next_obs"]
        following = {
            "observations": coming,
            "critic_observations": coming,
            "rewards": given["rewards"],
            "dones": (given["terminations"] | given["truncations"]).long(),
            "truncations": given["truncations"].long(),
        }
        rows = {"observations": obs, "critic_observations": obs, "actions": given["actions"], "next": following}
        buffer.extend(TensorDict(rows, [len(obs)]))

    def sample(buffer: Any, n: int) -> Batch:
        data = buffer.sample(n // ENVS)
        coming = data["next"]
        terminated = coming["dones"] - coming["truncations"]
        discount = GAMMA ** coming["effective_n_steps"]
        return Batch(
            data["observations"], data["actions"], coming["rewards"], coming["observations"], terminated, discount
        )

    def loaded(buffer: Any, new: Any, folder: Path) -> Any:
        new.load_state_dict(buffer.state_dict())
        return new

    return Adapter(make, add, sample, loaded)


# FlashSAC and rsl_rl_flashsac


def uniform(module: Any, groups: bool) -> Adapter:
    def make(mode: str, once: bool) -> Any:
        kind = getattr(module, "MemoryEfficientTorchUniformBuffer" if once else "TorchUniformBuffer")
        options = {"n_step": N_STEPS, "gamma": GAMMA, "max_length": ROOM * ENVS, "min_length": 1, "discounts": True}
        options |= {"sample_batch_size": 600, "autoreset": mode} | ({"next_capacity": ROOM * ENVS} if once else {})
        if groups:
            return kind(TensorDict({"policy": torch.zeros(ENVS, 3)}, [ENVS]), 1, device="cpu", **options)
        return kind(*SPACES, device_type="cpu", **options)

    def add(buffer: Any, step: dict[str, Any]) -> None:
        obs, coming = ({"policy": step[name]} if groups else step[name] for name in ("obs", "next_obs"))
        flags = {f"{name}ed": step[f"{name}ions"].astype(np.float32) for name in ("terminat", "truncat")}
        own = {"observation": obs, "action": step["actions"], "reward": step["rewards"]}
        buffer.add({**own, **flags, "next_observation": coming})

    def sample(buffer: Any, n: int) -> Batch:
        data = buffer.sample()
        obs, coming = (data[name]["policy"] if groups else data[name] for name in ("observation", "next_observation"))
        return Batch(obs, data["action"], data["reward"], coming, data["terminated"], data["discount"])

    def loaded(buffer: Any, new: Any, folder: Path) -> Any:
        buffer.save(folder / "there" / "buffer.pt")
        new.load(folder / "there" / "buffer.pt")
        return new

    return Adapter(make, add, sample, loaded)


# LeRobot: one robot, whose buffer makes no windows


def robot() -> Adapter:
    def make(mode: str, once: bool) -> Any:
        return lerobot.ReplayBuffer(ROOM, "cpu", use_drq=False, optimize_memory=once)

    def add(buffer: Any, step: dict[str, Any]) -> None:
        obs, coming, action = (torch.as_tensor(step[name]) for name in ("obs", "next_obs", "actions"))
        flags = bool(step["terminations"][0]), bool(step["truncations"][0])
        buffer.add({"at": obs}, action, float(step["rewards"][0]), {"at": coming}, *flags)

    def sample(buffer: Any, n: int) -> Batch:
        parts = [buffer.sample(n) for _ in range(n // ROOM)] if len(buffer) else [buffer.sample(n)]
        found = {name: torch.cat([part[name] for part in parts]) for name in ("action", "reward", "done")}
        obs, coming = (torch.cat([part[name]["at"] for part in parts]) for name in ("state", "next_state"))
        return Batch(obs, found["action"], found["reward"], coming, found["done"])

    only = ("same_step", "disabled")
    return Adapter(make, add, sample, lambda buffer, new, folder: copy.deepcopy(buffer), 1, 1, only)


ADAPTERS = {
    "cleanrl": stable(cleanrl.ReplayBuffer, add_told, tuple(MODES), handle_timeout_termination=False),
    "sb3": stable(sb3.ReplayBuffer, add_with_infos, ("same_step",)),
    "fasttd3": ring(fasttd3.SimpleReplayBuffer),
    "holosoma": ring(holosoma.SimpleReplayBuffer),
    "flashsac": uniform(flashsac, groups=False),
    "rsl_rl": uniform(rsl_rl, groups=True),
    "lerobot": robot(),
}
