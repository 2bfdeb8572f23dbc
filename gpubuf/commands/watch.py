"""``gpubuf watch``: plays episodes with the policy of a run, in a window or into a video."""

from __future__ import annotations

import argparse
import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gpubuf.commands import check_ending, find_modules_here, whole_number
from gpubuf.train.config import TORCH_PREFIX, TrainConfig, UsageError

#: Endings of files that Pillow writes, and of those that imageio does.
PICTURES = (".gif", ".webp", ".png")
FILMS = (".mp4", ".mkv", ".mov", ".avi", ".webm")


def run(options: dict[str, Any]) -> int:
    folder: Path = options["run"]
    video: Path | None = options["video"]
    check_ending("--video", video, PICTURES + FILMS)
    name: str = options["env"] or TrainConfig.read(folder).env
    if name.startswith(TORCH_PREFIX):
        raise UsageError(
            f"{name} has no picture: name an environment of Gymnasium with the same observations and actions, such as "
            "--env Pendulum-v1"
        )
    needed = ["gymnasium"] if video is None else ["gymnasium", "PIL" if video.suffix in PICTURES else "imageio"]
    if missing := [package for package in needed if importlib.util.find_spec(package) is None]:
        install = {"gymnasium": '"gpubuf[train]"', "PIL": "pillow", "imageio": '"imageio[ffmpeg]"'}[missing[0]]
        raise UsageError(f"{missing[0]} is not installed: pip install {install}")

    import gymnasium
    import numpy as np

    from gpubuf.train.algorithms import load_policy
    from gpubuf.train.gymnasium_environments import make

    find_modules_here()
    try:
        policy = load_policy(folder)
    except (FileNotFoundError, ValueError) as error:
        raise UsageError(str(error)) from None
    try:
        env = make(name, render_mode="human" if video is None else "rgb_array")
    except TypeError as error:  # an environment whose class takes no render_mode
        raise UsageError(f"{name} can't be drawn: {error}") from None
    frames: list[Any] = []
    try:
        for episode in range(options["episodes"]):
            observation, _ = env.reset(seed=options["seed"] + episode)
            total, steps, over = 0.0, 0, False
            while not over:
                if video is not None:
                    frames.append(env.render())
                action = np.asarray(policy(observation.reshape(-1)), dtype=env.action_space.dtype)
                observation, reward, terminated, truncated, _ = env.step(action)
                total, steps, over = total + float(reward), steps + 1, terminated or truncated
            print(f"episode {episode + 1}: return {total:.1f} in {steps} steps", flush=True)
    except gymnasium.error.DependencyNotInstalled as error:
        raise UsageError(f"{name} can't be drawn: {error}") from None
    finally:
        env.close()
    if video is not None:
        write_video(video, frames, float(env.metadata.get("render_fps", 30)))
        print(f"{len(frames)} frames in {video}")
    return 0


def write_video(path: Path, frames: Sequence[Any], rate: float) -> None:
    """Write frames, uint8 ``[H, W, 3]`` each, as a moving picture of ``rate`` frames per second."""
    if path.suffix not in PICTURES:
        import imageio.v3

        imageio.v3.imwrite(path, frames, fps=rate)
        return
    from PIL import Image

    first, *others = map(Image.fromarray, frames)
    first.save(path, save_all=True, append_images=others, duration=1000 / rate, loop=0)


def add(commands: Any) -> None:
    parser = commands.add_parser(
        "watch",
        help="watch the policy of a run, in a window or as a video",
        description="Play episodes with the trained policy of a run, without noise, and print their returns.",
        allow_abbrev=False,
    )
    parser.add_argument("run", type=Path, metavar="RUN", help="the folder of the run")
    parser.add_argument("--episodes", type=_positive, default=1, metavar="N", help="how many (default: 1)")
    parser.add_argument(
        "--video", type=Path, metavar="FILE", help="write a .gif, .webp or .png, or with imageio an .mp4; no window"
    )
    parser.add_argument("--env", metavar="NAME", help="Gymnasium id of the environment (default: that of the run)")
    parser.add_argument("--seed", type=whole_number, default=0, metavar="N", help="of the first episode (default: 0)")


def _positive(text: str) -> int:
    if (number := whole_number(text)) < 1:
        raise argparse.ArgumentTypeError(f"expected 1 or more, got {text}")
    return number
