"""Trains SAC of Stable-Baselines3, or of SBX, which is the same in JAX: run by the Python of that peer's environment.

It writes one JSON object: evaluations on the way, and at the end; seconds. The settings are those of ``gpubuf train
--algo sac``, and the evaluations have the same number of episodes.
"""

from __future__ import annotations

import argparse
import importlib
import json
import time
from pathlib import Path
from typing import Any

import gymnasium as gym
import torch
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.evaluation import evaluate_policy
from stable_baselines3.common.monitor import Monitor


class Curve(BaseCallback):
    """Mean returns of five deterministic episodes, every so many steps."""

    def __init__(self, env: Any, every: int) -> None:
        super().__init__()
        self.env, self.every = env, every
        self.points: list[tuple[int, float]] = []

    def _on_step(self) -> bool:
        if self.every and self.num_timesteps % self.every == 0:
            mean, _ = evaluate_policy(self.model, self.env, 5)
            self.points.append((self.num_timesteps, float(mean)))
        return True


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--env", required=True)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--total-steps", type=int, required=True)
    parser.add_argument("--learning-starts", type=int, default=1000)
    parser.add_argument("--eval-every", type=int, required=True)
    parser.add_argument("--eval-episodes", type=int, required=True)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--sbx", action="store_true", help="train by SBX")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    library: Any = importlib.import_module("sbx" if options.sbx else "stable_baselines3")
    model = library.SAC(
        "MlpPolicy",
        Monitor(gym.make(options.env)),
        learning_rate=1e-3,
        learning_starts=options.learning_starts,
        seed=options.seed,
        device="cpu",
    )
    evaluated = Monitor(gym.make(options.env))
    evaluated.reset(seed=options.seed + 1_000_000)
    curve = Curve(evaluated, options.eval_every)
    began = time.monotonic()
    model.learn(options.total_steps, callback=curve)
    seconds = time.monotonic() - began
    returns, _ = evaluate_policy(model, evaluated, options.eval_episodes, return_episode_rewards=True)
    result = {
        "version": library.__version__,
        "steps": options.total_steps,
        "returns": returns,
        "curve": curve.points,
        "seconds": round(seconds, 1),
    }
    beside = options.out.with_suffix(".part")
    beside.write_text(json.dumps(result))
    beside.replace(options.out)


if __name__ == "__main__":
    main()
