"""Watch a trained policy.

Plays episodes with the policy of a run of `gpubuf train`, in a window or into an animated picture:

    gpubuf train --out runs/pendulum
    python examples/watch.py runs/pendulum
    python examples/watch.py runs/pendulum --gif swing.gif

Pendulum and its like are drawn by pygame: `pip install "gymnasium[classic_control]"`. A run on torch/Pendulum has no
picture of its own; `--env Pendulum-v1` shows its policy.
"""

import argparse
from pathlib import Path

import gymnasium as gym
from PIL import Image

from gpubuf.train import TrainConfig, load_policy


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("run", type=Path, help="the folder of the run")
    parser.add_argument("--env", help="Gymnasium id of the environment (default: that of the run)")
    parser.add_argument("--episodes", type=int, default=1, help="(default: %(default)s)")
    parser.add_argument("--gif", type=Path, help="write a .gif, .webp or .png; no window")
    args = parser.parse_args()
    policy = load_policy(args.run)
    env = gym.make(args.env or TrainConfig.read(args.run).env, render_mode="rgb_array" if args.gif else "human")
    env = gym.wrappers.FlattenObservation(env)
    frames = []
    for episode in range(args.episodes):
        observation, _ = env.reset(seed=episode)
        total, over = 0.0, False
        while not over:
            if args.gif:
                frames.append(Image.fromarray(env.render()))
            observation, reward, terminated, truncated, _ = env.step(policy(observation))
            total, over = total + float(reward), terminated or truncated
        print(f"episode {episode + 1}: return {total:.1f}")
    if args.gif:
        duration = 1000 / env.metadata.get("render_fps", 30)
        frames[0].save(args.gif, save_all=True, append_images=frames[1:], duration=duration, loop=0)
    env.close()


if __name__ == "__main__":
    main()
