"""Records batches of Stable-Baselines3's buffers, and learns with ours: ``python -m tests.support.sb3_buffers.record``.

Run it in an environment with Stable-Baselines3 (``.peers/sb3/bin/python``), from the root of the repository.
"""

from __future__ import annotations

import tempfile
from typing import Any

import gymnasium
import numpy as np
import stable_baselines3
import torch
from stable_baselines3 import DQN, SAC
from stable_baselines3.common import buffers
from stable_baselines3.common.envs import BitFlippingEnv
from stable_baselines3.common.running_mean_std import RunningMeanStd
from stable_baselines3.common.vec_env import DummyVecEnv, VecNormalize

from gpubuf.integrations import sb3
from tests.support.records import write
from tests.support.sb3_buffers.cases import (
    ACTIONS,
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


class Still(gymnasium.Env):
    """Has spaces and does nothing."""

    action_space = ACTIONS["box"]

    def __init__(self, space: str) -> None:
        self.observation_space = SPACES[space]


def normalizer(space: str) -> VecNormalize:
    """VecNormalize with statistics that are given."""
    keys = ["vector"] if space == "dict" else None
    env = VecNormalize(
        DummyVecEnv([lambda: Still(space)]), norm_obs_keys=keys, clip_obs=CUT, clip_reward=CUT / 2, epsilon=1e-8
    )
    own = RunningMeanStd(shape=(2,))
    own.mean, own.var = MEAN, VARIANCE
    env.obs_rms = {"vector": own} if space == "dict" else own
    env.ret_rms.var = np.array(REWARD_VARIANCE)
    return env


def recorded() -> dict[str, Any]:
    """All steps of each buffer, of environments that NumPy draws."""
    found: dict[str, Any] = {}
    for name, kind, space, action, envs, arguments, normalised in CASES:
        for written in WRITTEN:
            buffer = getattr(buffers, kind)(
                STEPS * envs, SPACES[space], ACTIONS[action], "cpu", n_envs=envs, **arguments
            )
            for step in stream(space, action, envs, written):
                buffer.add(*step)
            np.random.seed(0)
            batch = buffer._get_samples(np.arange(buffer.size()), normalizer(space) if normalised else None)
            found[f"{name}, {written} written"] = {
                "pos": buffer.pos,
                "full": buffer.full,
                **batch._asdict(),
            }
    return found


def learnt() -> dict[str, Any]:
    """Learn with our buffers in Stable-Baselines3's algorithms, save them and go on."""
    torch.set_num_threads(1)
    found: dict[str, Any] = {}
    runs: dict[str, tuple[Any, str, dict[str, Any]]] = {
        "SAC": (SAC, "Pendulum-v1", {}),
        "SAC, observations stored once": (SAC, "Pendulum-v1", {"optimize_memory_usage": True}),
        "SAC, n-step": (SAC, "Pendulum-v1", {"replay_buffer_kwargs": {"n_steps": 3}}),
        "DQN": (DQN, "CartPole-v1", {}),
        "DQN, HER": (DQN, "", {"replay_buffer_class": sb3.HerReplayBuffer}),
    }
    for name, (algorithm, title, given) in runs.items():
        env: Any = gymnasium.make(title) if title else BitFlippingEnv(n_bits=4, continuous=False, max_steps=4)
        arguments = {"replay_buffer_class": sb3.ReplayBuffer, **given}
        model = algorithm(
            "MlpPolicy" if title else "MultiInputPolicy",
            env,
            learning_starts=100,
            seed=0,
            device="cpu",
            **arguments,
        )
        model.learn(500)
        before = {part: tensor.clone() for part, tensor in model.policy.state_dict().items()}
        with tempfile.TemporaryDirectory() as folder:
            model.save(f"{folder}/model")
            model.save_replay_buffer(f"{folder}/rows")
            again = algorithm.load(f"{folder}/model", env=env, device="cpu")
            again.load_replay_buffer(f"{folder}/rows", truncate_last_traj=False)
        same = all(torch.equal(before[part], tensor) for part, tensor in again.policy.state_dict().items())
        rows, written = model.replay_buffer.buffer, again.replay_buffer.size()
        equal = all(
            torch.equal(value, rows[:].flatten_keys()[key])
            for key, value in again.replay_buffer.buffer[:].flatten_keys().items()
        )
        again.learn(200, reset_num_timesteps=False)
        found[name] = {
            "transitions": written,
            "policy restored": same,
            "rows restored": equal,
            "transitions after more": again.replay_buffer.size(),
            "finite": all(bool(tensor.isfinite().all()) for tensor in again.policy.state_dict().values()),
        }
    return found


if __name__ == "__main__":
    good = {"policy restored": True, "rows restored": True, "finite": True}
    for name, run in learnt().items():
        assert run == {"transitions": 500, "transitions after more": 700, **good}, name
    write(__file__, {"stable_baselines3": stable_baselines3.__version__, "batches": recorded()})
