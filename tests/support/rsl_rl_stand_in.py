"""As much of rsl_rl 5 as its off-policy algorithms meet, for where it is not installed: the loop, without a log.

Written by its protocol: the order of the calls, their arguments, inference mode during a rollout, names and keys of
checkpoints and exports.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

OURS = "gpubuf.integrations.rsl_rl"


def resolve_callable(name: Any) -> Any:
    if callable(name):
        return name
    module, _, attribute = name.partition(":")
    return getattr(importlib.import_module(module), attribute)


def resolve_obs_groups(obs: Any, obs_groups: dict[str, list[str]], default_sets: list[str]) -> dict[str, list[str]]:
    for groups in obs_groups.values():
        if missing := [group for group in groups if group not in obs]:
            raise ValueError(f"{missing} not found in the observations")
    return {**{name: [name if name in obs else "policy"] for name in default_sets}, **obs_groups}


class OnPolicyRunner:
    def __init__(self, env: Any, train_cfg: dict[str, Any], log_dir: str | None = None, device: str = "cpu") -> None:
        self.env, self.cfg, self.device, self.log_dir = env, train_cfg, device, log_dir
        self.cfg["multi_gpu"] = None
        algorithm = resolve_callable(train_cfg["algorithm"]["class_name"])
        self.alg = algorithm.construct_algorithm(env.get_observations(), env, train_cfg, device)
        self.current_learning_iteration = 0
        # As up to 5.4. Later versions do without the key.
        assert not train_cfg["algorithm"]["rnd_cfg"]

    def learn(self, num_learning_iterations: int, init_at_random_ep_len: bool = False) -> None:
        if init_at_random_ep_len:
            lengths = self.env.episode_length_buf
            self.env.episode_length_buf = torch.randint_like(lengths, high=int(self.env.max_episode_length))
        obs = self.env.get_observations()
        self.alg.train_mode()
        start = self.current_learning_iteration
        for iteration in range(start, start + num_learning_iterations):
            with torch.inference_mode():
                for _ in range(self.cfg["num_steps_per_env"]):
                    obs, rewards, dones, extras = self.env.step(self.alg.act(obs))
                    self.alg.process_env_step(obs, rewards, dones, extras)
                self.alg.compute_returns(obs)
            self.losses = self.alg.update()
            self.current_learning_iteration = iteration
            assert self.alg.learning_rate > 0
            assert self.alg.get_policy().output_std.mean().item() >= 0
            if self.log_dir is not None and iteration % self.cfg["save_interval"] == 0:
                self.save(str(Path(self.log_dir, f"model_{iteration}.pt")))

    def save(self, path: str, infos: dict[str, Any] | None = None) -> None:
        torch.save({**self.alg.save(), "iter": self.current_learning_iteration, "infos": infos}, path)

    def load(
        self, path: str, load_cfg: dict[str, Any] | None = None, strict: bool = True, map_location: str | None = None
    ) -> Any:
        loaded = torch.load(path, weights_only=False, map_location=map_location)
        if self.alg.load(loaded, load_cfg, strict):
            self.current_learning_iteration = loaded["iter"]
        return loaded["infos"]

    def get_inference_policy(self, device: str | None = None) -> Any:
        self.alg.eval_mode()
        return self.alg.get_policy().to(device)

    def export_policy_to_jit(self, path: str, filename: str = "policy.pt") -> None:
        torch.jit.script(self.alg.get_policy().as_jit().to("cpu")).save(str(Path(path, filename)))


def _modules() -> dict[str, types.ModuleType]:
    contents: dict[str, dict[str, Any]] = {
        "rsl_rl": {"__path__": []},
        "rsl_rl.env": {"VecEnv": type("VecEnv", (), {})},
        "rsl_rl.runners": {"OnPolicyRunner": OnPolicyRunner},
        "rsl_rl.utils": {"resolve_callable": resolve_callable, "resolve_obs_groups": resolve_obs_groups},
    }
    made = {name: types.ModuleType(name) for name in contents}
    for name, module in made.items():
        vars(module).update(contents[name])
    return made


@contextlib.contextmanager
def installed() -> Iterator[bool]:
    """rsl_rl can be imported within, its own or this one. Yields whether it is its own."""
    if importlib.util.find_spec("rsl_rl") is not None:
        yield True
        return
    made = _modules()
    sys.modules.update(made)
    try:
        yield False
    finally:
        # Ours derive from these classes.
        for name in (*made, f"{OURS}.algorithms", f"{OURS}.runner"):
            sys.modules.pop(name, None)
