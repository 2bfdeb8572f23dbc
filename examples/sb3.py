"""Stable-Baselines3 on gpubuf's buffer.

Trains SAC on Pendulum-v1 with several environments, transitions of three steps, and observations stored once:

    pip install stable-baselines3
    python examples/sb3.py

One argument chooses the buffer, ``replay_buffer_class``; everything else is Stable-Baselines3 as you know it. Compare
with its own buffer by ``--buffer theirs``.
"""

import argparse

import torch
from rich.progress import Progress
from stable_baselines3 import SAC
from stable_baselines3.common.buffers import ReplayBuffer as TheirReplayBuffer
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.env_util import make_vec_env

from gpubuf.integrations.sb3 import ReplayBuffer


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--buffer", choices=("gpubuf", "theirs"), default="gpubuf")
    parser.add_argument("--steps", type=int, default=8_000, help="transitions (default: %(default)s)")
    parser.add_argument("--warmup", type=int, default=500, help="random transitions first (default: %(default)s)")
    parser.add_argument("--envs", type=int, default=2, help="environments (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


class Bar(BaseCallback):
    """A progress bar with the mean return of the last episodes."""

    def __init__(self, progress: Progress, steps: int) -> None:
        super().__init__()
        self.progress, self.bar = progress, progress.add_task("warming up", total=steps)

    def _on_step(self) -> bool:
        recent = [episode["r"] for episode in self.model.ep_info_buffer]
        description = f"return {sum(recent) / len(recent):7.1f}" if recent else "warming up"
        self.progress.update(self.bar, completed=self.num_timesteps, description=description)
        return True


def main(args: argparse.Namespace) -> SAC:
    """Trains, and returns the model."""
    if not torch.cuda.is_available():
        torch.set_num_threads(1)  # networks of this size are fastest so
    ours = {"replay_buffer_class": ReplayBuffer, "replay_buffer_kwargs": {"n_steps": 3, "gamma": 0.99}}
    theirs = {"replay_buffer_class": TheirReplayBuffer}
    model = SAC(
        "MlpPolicy",
        make_vec_env("Pendulum-v1", args.envs, seed=args.seed),
        learning_rate=1e-3,
        learning_starts=args.warmup,
        gradient_steps=-1,  # as many updates as transitions
        buffer_size=args.steps,
        optimize_memory_usage=args.buffer == "gpubuf",
        seed=args.seed,
        stats_window_size=10,
        **(ours if args.buffer == "gpubuf" else theirs),
    )
    with Progress() as progress:
        model.learn(args.steps, callback=Bar(progress, args.steps))
    return model


if __name__ == "__main__":
    model = main(parse())
    recent = [episode["r"] for episode in model.ep_info_buffer]
    print(f"mean return of the last {len(recent)} episodes: {sum(recent) / max(1, len(recent)):.1f}")
