"""rsl_rl trains SAC, FastSAC, FlashSAC or FastTD3 on pendulums that live on the device.

    python examples/rsl_rl_pendulum.py
    python examples/rsl_rl_pendulum.py --algorithm SAC --iterations 20
    python examples/rsl_rl_pendulum.py --algorithm PPO --iterations 300

The last one is rsl_rl's own, with networks of the same size.

The environments are as rsl_rl asks for them. The policy sees the pendulum through a sensor; the critics know its state.
"""

import argparse
from typing import Any

import torch
from rsl_rl.env import VecEnv
from rsl_rl.runners import OnPolicyRunner
from tensordict import TensorDict

from gpubuf.integrations.rsl_rl import OffPolicyRunner
from gpubuf.train.torch_environments import Pendulum

# Sizes for a CPU. docs/integrations/rsl_rl.md has those of the papers.
CONFIGS: dict[str, dict[str, Any]] = {
    "SAC": {"tau": 0.01},
    "FastSAC": {"policy_every": 2, "weight_decay": 0.0, "v_min": -10.0, "v_max": 10.0, "scale_rewards": True},
    "FlashSAC": {"gamma": 0.97, "n_steps": 1, "policy_every": 1},
    "FastTD3": {"learning_rate": 1e-3, "weight_decay": 0.0, "policy_noise": 0.1, "scale_rewards": True},
}


class PendulumEnv(VecEnv):
    """Pendulums with two groups of observations, "policy" and "privileged"."""

    def __init__(self, num_envs: int, device: str = "cpu", seed: int = 0) -> None:
        self._envs = Pendulum(num_envs, seed, device)
        self.num_envs, self.num_actions, self.device, self.cfg = num_envs, 1, device, {}
        self.max_episode_length = self._envs.time_limit
        self._observation = self._envs.reset()

    @property
    def episode_length_buf(self) -> torch.Tensor:
        return self._envs._lengths

    @episode_length_buf.setter
    def episode_length_buf(self, value: torch.Tensor) -> None:
        self._envs._lengths.copy_(value)

    def get_observations(self) -> TensorDict:
        return self._groups(self._observation)

    def step(self, actions: torch.Tensor) -> tuple[TensorDict, torch.Tensor, torch.Tensor, dict[str, Any]]:
        steps = self._envs.step(actions.clamp(-1, 1))
        self._observation = steps.observation
        time_outs = steps.truncated.squeeze(1)
        dones = (steps.terminated | steps.truncated).squeeze(1).long()
        # The last observations of episodes are known here. An environment may leave them out.
        extras = {"time_outs": time_outs, "time_outs_obs": self._groups(steps.next_observation)}
        return self._groups(steps.observation), steps.reward.squeeze(1), dones, extras

    def _groups(self, observation: torch.Tensor) -> TensorDict:
        angle = torch.atan2(observation[:, 1:2], observation[:, :1])
        return TensorDict({"policy": observation, "privileged": angle}, [self.num_envs])


def config(algorithm: str) -> dict[str, Any]:
    """A configuration of rsl_rl."""
    sizes = {"batch_size": 256, "updates_per_step": 8, "buffer_steps": 500, "learning_rate": 2e-3, "tau": 0.05}
    # One residual block, or two layers.
    network = {"hidden_dims": [64] if algorithm == "FlashSAC" else [64, 64]}
    return {
        "num_steps_per_env": 20,
        "save_interval": 10,
        "obs_groups": {"actor": ["policy"], "critic": ["policy", "privileged"]},
        "actor": network,
        "critic": network,
        "algorithm": {"class_name": f"gpubuf.integrations.rsl_rl:{algorithm}", **sizes, **CONFIGS[algorithm]},
    }


def config_of_ppo() -> dict[str, Any]:
    """The same networks, with rsl_rl's own algorithm."""
    off_policy = config("SAC")
    noise = {"class_name": "GaussianDistribution", "init_std": 1.0, "std_type": "scalar"}
    model = {"class_name": "MLPModel", "activation": "elu", "obs_normalization": True, **off_policy["actor"]}
    return {
        **off_policy,
        "actor": {**model, "distribution_cfg": noise},
        "critic": model,
        "algorithm": {"class_name": "PPO", "entropy_coef": 0.0},
    }


def make_runner(algorithm: str, env: VecEnv, log_dir: str | None = None, device: str = "cpu") -> OnPolicyRunner:
    if algorithm == "PPO":
        return OnPolicyRunner(env, config_of_ppo(), log_dir, device)
    return OffPolicyRunner(env, config(algorithm), log_dir, device)


def mean_return(runner: OnPolicyRunner, env: PendulumEnv) -> float:
    """Of one episode in each environment, by the best actions."""
    policy = runner.get_inference_policy()
    total = 0.0
    with torch.no_grad():
        for _ in range(env.max_episode_length):
            total += env.step(policy(env.get_observations()))[1].mean().item()
    return total


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--algorithm", choices=("PPO", *CONFIGS), default="FastSAC")
    parser.add_argument("--iterations", type=int, default=30)
    parser.add_argument("--envs", type=int, default=64)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--log-dir")
    args = parser.parse_args()
    torch.manual_seed(0)
    runner = make_runner(args.algorithm, PendulumEnv(args.envs, args.device), args.log_dir, args.device)
    runner.learn(args.iterations, init_at_random_ep_len=True)
    print(f"{args.algorithm}: mean return {mean_return(runner, PendulumEnv(args.envs, args.device, seed=1)):.0f}")


if __name__ == "__main__":
    main()
