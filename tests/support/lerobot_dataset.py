"""Writes a data set with LeRobot's own writer, and what LeRobot itself reads of it, frame by frame.

Run it by the interpreter of LeRobot's environment, from the root of the repository:
``.peers/lerobot/bin/python -m tests.support.lerobot_dataset FOLDER READ.npz CODEC``.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

#: Of the episodes, by codec. Odd ones end within a group of pictures. Of one frame LeRobot writes no H.264.
LENGTHS = {"libsvtav1": (7, 1, 12, 40, 1, 33), "h264": (7, 3, 12, 40, 5, 33)}
SIZE = (64, 96)
CAMERAS = ("observation.images.top", "observation.images.wrist")


def written(python: Path, folder: Path, codec: str) -> dict[str, Any]:
    """Have an interpreter write a data set, and give the columns that LeRobot reads of it."""
    links, read = folder.parent / "links", folder.parent / "read.npz"
    place = _ffmpeg(links)
    search = os.pathsep.join([str(links), str(place), os.environ.get("LD_LIBRARY_PATH", "")])
    command = [str(python), "-m", __spec__.name, str(folder), str(read), codec]
    environment = {**os.environ, "LD_LIBRARY_PATH": search, "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(done.stderr)
    return dict(np.load(read))


def _ffmpeg(links: Path) -> Path:
    """TorchCodec brings no FFmpeg. PyAV's wheels do, under names that have a hash: links have them without."""
    import av

    place = Path(av.__file__).parent.parent / "av.libs"
    links.mkdir()
    for path in place.glob("*.so.*"):
        name = re.sub(r"-[0-9a-f]{8}(\.so\.\d+).*", r"\1", path.name)
        (links / name).symlink_to(path)
    return place


def write(folder: Path, codec: str) -> Any:
    """Two cameras and tasks in turn; videos and rows in several files. Gives the data set, opened."""
    import datasets  # noqa: F401

    # LeRobot imports it for images and its own PyAV reader, and uses neither here.
    missing: Any = ModuleType("torchvision")
    missing.transforms = None
    sys.modules.setdefault("torchvision", missing)
    from lerobot.datasets.lerobot_dataset import LeRobotDataset

    numbers = {"observation.state": 3, "action": 2}
    features: dict[str, Any] = {name: {"dtype": "float32", "shape": (n,), "names": None} for name, n in numbers.items()}
    names = ["height", "width", "channels"]
    features |= {name: {"dtype": "video", "shape": (*SIZE, 3), "names": names} for name in CAMERAS}
    where: dict[str, Any] = {"repo_id": "tests/frames", "root": folder}
    made = LeRobotDataset.create(**where, fps=30, features=features, vcodec=codec)
    made.meta.update_chunk_settings(data_files_size_in_mb=0.002, video_files_size_in_mb=0.01)
    rng = np.random.default_rng(0)
    for episode, length in enumerate(LENGTHS[codec]):
        for _ in range(length):
            frame = {name: rng.normal(size=n).astype(np.float32) for name, n in numbers.items()}
            # Smooth and in colour: no two frames are alike, and little is lost.
            images = {name: _image(rng) for name in CAMERAS}
            made.add_frame({**frame, **images, "task": f"task {episode % 3}"})
        made.save_episode()
    made.finalize()
    return LeRobotDataset(**where)


def _image(rng: np.random.Generator) -> np.ndarray:
    coarse = rng.integers(0, 256, (4, 6, 3))
    return np.kron(coarse, np.ones((SIZE[0] // 4, SIZE[1] // 6, 1))).astype(np.uint8)


def main(folder: str, read: str, codec: str) -> None:
    dataset = write(Path(folder), codec)
    frames = [dataset[number] for number in range(len(dataset))]
    names = [*CAMERAS, "observation.state", "action", "episode_index", "task_index"]
    columns = {name: np.stack([frame[name].numpy() for frame in frames]) for name in names}
    for name in CAMERAS:
        columns[name] = (columns[name] * 255).round().astype(np.uint8)
    np.savez(read, **columns)


if __name__ == "__main__":
    main(*sys.argv[1:])
