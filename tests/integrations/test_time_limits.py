"""Case 57: programs that use an adapter as written, on a real environment with a time limit, in both kinds of reset.

Every observation that the environments give is remembered with its episode, so that a test knows where one that comes
back in a batch belongs: no window may lead from one episode into the next.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from tensordict import TensorDict

from gpubuf.integrations import cleanrl, fasttd3, flashsac, holosoma, rsl_rl
from gpubuf.train import TrainConfig
from gpubuf.train.trainer import Trainer

LIMIT, ENVS, STEPS, N_STEPS, GAMMA = 6, 3, 80, 3, 0.9
MODES = {"next_step": AutoresetMode.NEXT_STEP, "same_step": AutoresetMode.SAME_STEP}

SHORT = "gpubuf-tests/ShortPendulum-v1"
if SHORT not in gym.registry:
    gym.register(SHORT, "gymnasium.envs.classic_control:PendulumEnv", max_episode_steps=LIMIT)


class Seen:
    """The place of each observation: its environment, the number of its episode there, and of its step."""

    def __init__(self, envs: int) -> None:
        self.places: dict[bytes, tuple[int, int, int]] = {}
        self.now = [(-1, 0)] * envs

    def first(self, env: int, observation: np.ndarray) -> None:
        """An episode begins."""
        self._put(env, (self.now[env][0] + 1, 0), observation)

    def next(self, env: int, observation: np.ndarray) -> None:
        """It goes on."""
        self._put(env, (self.now[env][0], self.now[env][1] + 1), observation)

    def _put(self, env: int, place: tuple[int, int], observation: np.ndarray) -> None:
        self.now[env] = place
        self.places[np.asarray(observation, np.float32).tobytes()] = (env, *place)

    def of(self, observation: Any) -> tuple[int, int, int]:
        return self.places[observation.numpy().tobytes()]

    def assert_windows(self, observations: Any, following: Any, most: int) -> None:
        """Each window goes on in its episode for one to ``most`` steps; most of them for all."""
        lengths = []
        for one, other in zip(observations, following, strict=True):
            (env, episode, step), (end_env, end_episode, end) = self.of(one), self.of(other)
            assert (env, episode) == (end_env, end_episode)
            lengths.append(end - step)
        assert set(lengths) == set(range(1, most + 1))


def program(mode: str, seen: Seen) -> Iterator[dict[str, Any]]:
    """The steps of a program's loop, ``next_obs`` being the last one of an episode that has ended."""
    envs = SyncVectorEnv([lambda: gym.make(SHORT)] * ENVS, autoreset_mode=MODES[mode])
    envs.action_space.seed(0)
    obs, _ = envs.reset(seed=1)
    for env in range(ENVS):
        seen.first(env, obs[env])
    ended = np.zeros(ENVS, bool)
    for _ in range(STEPS):
        actions = envs.action_space.sample()
        next_obs, rewards, terminations, truncations, infos = envs.step(actions)
        real_next_obs = next_obs.copy()
        for env in range(ENVS):
            if mode == "next_step" and ended[env]:
                seen.first(env, next_obs[env])
            elif mode == "same_step" and truncations[env]:
                real_next_obs[env] = infos["final_obs"][env]
                seen.next(env, real_next_obs[env])
                seen.first(env, next_obs[env])
            else:
                seen.next(env, next_obs[env])
        yield {
            "obs": obs,
            "next_obs": real_next_obs,
            "actions": actions,
            "rewards": rewards.astype(np.float32),
            "terminations": terminations,
            "truncations": truncations,
            "infos": infos,
        }
        ended = terminations | truncations
        obs = next_obs
    assert ended.shape == (ENVS,)
    envs.close()


@pytest.mark.parametrize("once", [False, True])
@pytest.mark.parametrize("mode", MODES)
def test_cleanrl(mode, once):
    seen, space = Seen(ENVS), gym.make(SHORT)
    rb = cleanrl.ReplayBuffer(
        120,
        space.observation_space,
        space.action_space,
        torch.device("cpu"),
        n_envs=ENVS,
        handle_timeout_termination=False,
        optimize_memory_usage=once,
        n_steps=N_STEPS,
        gamma=GAMMA,
    )
    for step in program(mode, seen):
        rb.add(
            step["obs"],
            step["next_obs"],
            step["actions"],
            step["rewards"],
            step["terminations"],
            step["infos"],
            step["truncations"],
        )
    data = rb.sample(600)
    assert not data.dones.any()
    seen.assert_windows(data.observations, data.next_observations, N_STEPS)


@pytest.mark.parametrize("once", [False, True])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("adapter", ["fasttd3", "holosoma"])
def test_fasttd3_and_holosoma(adapter, mode, once):
    seen, module = Seen(ENVS), {"fasttd3": fasttd3, "holosoma": holosoma}[adapter]
    rb: Any = module.SimpleReplayBuffer(
        ENVS, 40, 3, 1, 3, n_steps=N_STEPS, gamma=GAMMA, share_next=once, next_capacity=60 if once else None,
        autoreset=mode,
    )  # fmt: skip
    for step in program(mode, seen):
        obs, coming = torch.from_numpy(step["obs"].copy()), torch.from_numpy(step["next_obs"])
        rb.extend(
            TensorDict(
                {
                    "observations": obs,
                    "critic_observations": obs,
                    "actions": torch.from_numpy(step["actions"]),
                    "next": {
                        "observations": coming,
                        "critic_observations": coming,
                        "rewards": torch.from_numpy(step["rewards"]),
                        "dones": torch.from_numpy(step["terminations"] | step["truncations"]).long(),
                        "truncations": torch.from_numpy(step["truncations"]).long(),
                    },
                },
                [ENVS],
            )
        )
    data = rb.sample(200)
    seen.assert_windows(data["observations"], data["next", "observations"], N_STEPS)


@pytest.mark.parametrize("n_step", [1, N_STEPS])
@pytest.mark.parametrize("kind", ["TorchUniformBuffer", "MemoryEfficientTorchUniformBuffer"])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("adapter", ["flashsac", "rsl_rl"])
def test_flashsac_and_rsl_rl(adapter, mode, kind, n_step):
    seen, space = Seen(ENVS), gym.make(SHORT)
    options: dict[str, Any] = {"n_step": n_step, "gamma": GAMMA, "max_length": 120, "min_length": 1}
    options |= {"sample_batch_size": 600, "discounts": True, "autoreset": mode, "next_capacity": 60}
    if "Efficient" not in kind:
        del options["next_capacity"]
    groups = adapter == "rsl_rl"
    if groups:
        example = TensorDict({"policy": torch.zeros(ENVS, 3)}, [ENVS])
        rb: Any = getattr(rsl_rl, kind)(example, 1, device="cpu", **options)
    else:
        rb = getattr(flashsac, kind)(space.observation_space, space.action_space, device_type="cpu", **options)
    for step in program(mode, seen):
        obs, coming = ({"policy": step[name]} if groups else step[name] for name in ("obs", "next_obs"))
        rb.add(
            {
                "observation": obs,
                "action": step["actions"],
                "reward": step["rewards"],
                "terminated": step["terminations"].astype(np.float32),
                "truncated": step["truncations"].astype(np.float32),
                "next_observation": coming,
            }
        )
    batch = rb.sample()
    one, other = batch["observation"], batch["next_observation"]
    seen.assert_windows(one["policy"] if groups else one, other["policy"] if groups else other, n_step)


def test_resets_must_be_told_by_their_names():
    with pytest.raises(ValueError, match="autoreset must be 'same_step' or 'next_step', got 'disabled'"):
        fasttd3.SimpleReplayBuffer(2, 10, 3, 1, 3, autoreset="disabled")


def spied(trainer: Trainer, seen: Seen) -> None:
    """Let ``seen`` know what the trainer's environments give."""
    step = trainer._environments.step

    def seeing(action: torch.Tensor) -> Any:
        found = step(action)
        ended = (found.terminated | found.truncated).reshape(-1).tolist()
        for env, end in enumerate(ended):
            seen.next(env, found.next_observation[env].numpy())
            if end:
                seen.first(env, found.observation[env].numpy())
        return found

    trainer._environments.step = seeing  # type: ignore[method-assign]
    for env, observation in enumerate(trainer._observation):
        seen.first(env, observation.numpy())


@pytest.mark.parametrize("share_next", [False, True])
@pytest.mark.parametrize("num_envs", [1, 2])
def test_the_trainer(num_envs, share_next):
    """Also where a run goes on with other episodes than it left: nothing has ended those."""
    config = TrainConfig(
        env=SHORT, num_envs=num_envs, n_steps=N_STEPS, share_next=share_next, total_steps=400,
        learning_starts=200, batch_size=600, hidden=(8,), eval_every=0, prioritized=False,
    )  # fmt: skip
    seen = Seen(num_envs)
    trainer = Trainer(config, torch.device("cpu"), lambda record: None)
    spied(trainer, seen)
    while trainer.step < 92:
        trainer.advance()
    state = trainer.state_dict()
    # Episodes of before can't be played again.
    for episode in state["environments"]["episodes"]:
        episode["observation"] = episode["observation"] + 1
    resumed = Trainer(config, torch.device("cpu"), lambda record: None)
    assert resumed.load_state_dict(state) == list(range(num_envs))
    spied(resumed, seen)
    while resumed.step < 184:
        resumed.advance()
    batch = resumed.buffer.sample()
    seen.assert_windows(batch["observation"], batch["next", "observation"], N_STEPS)
    trainer.close()
    resumed.close()
