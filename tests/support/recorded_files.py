"""Files of recorded episodes, in the formats that others have, written with h5py, pyarrow, NumPy and PyAV.

Minari writes its own in tests/data/test_loading.py, LeRobot in tests/integrations/test_lerobot_dataset.py.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

FPS = 30


@dataclass
class Episode:
    """What happened: one observation more than actions, and how it ended."""

    observations: np.ndarray
    actions: np.ndarray
    rewards: np.ndarray
    terminated: bool

    def __len__(self) -> int:
        return len(self.actions)

    def flags(self, terminated: bool) -> np.ndarray:
        """True at the last step, if the episode ended this way."""
        found = np.zeros(len(self), bool)
        found[-1] = self.terminated is terminated
        return found


def episodes(seed: int, longest: int = 6, count: int = 12) -> list[Episode]:
    """Random ones. No two observations are equal."""
    rng = np.random.default_rng(seed)
    found, at = [], 0
    for _ in range(count):
        n = int(rng.integers(1, longest + 1))
        observations = np.arange(at, at + n + 1, dtype=np.float32)[:, None] + np.array([0, 0.25, 0.5], np.float32)
        at += n + 1
        found.append(Episode(observations, rng.normal(size=(n, 2)), rng.normal(size=n), bool(rng.integers(2))))
    return found


def rows_of(recorded: list[Episode], knows_next: bool, says_terminated: bool = True, keep_last: bool = False) -> list:
    """The transitions, by the rules that the documentation states: (observation, action, reward, next, done, ...)."""
    rows = []
    for episode in recorded:
        known = len(episode)
        terminated = episode.terminated and says_terminated
        if not knows_next and not terminated and not keep_last:
            known -= 1
        for step in range(known):
            is_last, is_final = step == known - 1, step == len(episode) - 1
            following = episode.observations[step + 1 if knows_next or not is_final else step]
            row = episode.observations[step], episode.actions[step], episode.rewards[step], following
            rows.append((*row, is_last, is_last and terminated, is_last and not terminated))
    return rows


def table(recorded: list[Episode], with_next: bool = False) -> dict[str, np.ndarray]:
    """Columns as D4RL has them."""
    columns = {
        "observations": [each.observations[:-1] for each in recorded],
        "actions": [each.actions for each in recorded],
        "rewards": [each.rewards for each in recorded],
        "terminals": [each.flags(True) for each in recorded],
        "timeouts": [each.flags(False) for each in recorded],
    }
    if with_next:
        columns["next_observations"] = [each.observations[1:] for each in recorded]
    return {name: np.concatenate(parts) for name, parts in columns.items()}


def write_npz(path: Path, recorded: list[Episode], with_next: bool = False) -> None:
    np.savez_compressed(path, **table(recorded, with_next), note=np.array("text"))


def write_ogbench(path: Path, recorded: list[Episode], compact: bool = False) -> None:
    """All observations, the last ones with an action that nobody took; ``terminals`` as OGBench sets them."""
    columns: dict[str, list[np.ndarray]] = {"observations": [], "actions": [], "terminals": [], "valids": []}
    for each in recorded:
        last = np.zeros(len(each) + 1, np.float32)
        last[-1] = 1
        columns["observations"].append(each.observations)
        columns["actions"].append(np.concatenate([each.actions, np.full((1, 2), 7.0)]))
        columns["valids"].append(1 - last)
        if compact:
            last[-2] = 1
        columns["terminals"].append(last)
    if not compact:
        del columns["valids"]
    np.savez(path, **{name: np.concatenate(parts) for name, parts in columns.items()})


def write_d4rl(path: Path, recorded: list[Episode], with_next: bool = False) -> None:
    import h5py

    with h5py.File(path, "w") as file:
        for name, column in table(recorded, with_next).items():
            file.create_dataset(name, data=column, compression="gzip")
        file["metadata/algorithm"] = "text"
        file["infos/qpos"] = np.zeros((len(column), 2))


def write_robomimic(path: Path, recorded: list[Episode], with_next: bool = True) -> None:
    """More than ten demonstrations: their names are not in the order of their numbers."""
    import h5py

    with h5py.File(path, "w") as file:
        for number, each in enumerate(recorded):
            demo = file.create_group(f"data/demo_{number}")
            demo.attrs["num_samples"] = len(each)
            demo["obs/eef_pos"] = each.observations[:-1]
            if with_next:
                demo["next_obs/eef_pos"] = each.observations[1:]
            demo["actions"], demo["rewards"], demo["dones"] = each.actions, each.rewards, each.flags(True).astype(int)
        file["mask/train"] = np.array([b"demo_10", b"demo_2"])


def write_minari(folder: Path, recorded: list[Episode]) -> None:
    import h5py

    (folder / "data").mkdir(parents=True)
    (folder / "data" / "metadata.json").write_text(json.dumps({"data_format": "hdf5"}))
    with h5py.File(folder / "data" / "main_data.hdf5", "w") as file:
        for number, each in enumerate(recorded):
            group = file.create_group(f"episode_{number}")
            group["observations"], group["actions"], group["rewards"] = each.observations, each.actions, each.rewards
            group["terminations"], group["truncations"] = each.flags(True), each.flags(False)


def write_parquet(path: Path, recorded: list[Episode], row_group_size: int = 7) -> None:
    import pyarrow
    from pyarrow import parquet

    parts = list(enumerate(recorded))
    columns = {
        "observation": [row.tolist() for _, each in parts for row in each.observations[:-1]],
        "action": [row.tolist() for _, each in parts for row in each.actions],
        "next.reward": np.concatenate([each.rewards for each in recorded]),
        "terminated": np.concatenate([each.flags(True) for each in recorded]),
        "episode_index": np.concatenate([np.full(len(each), number) for number, each in parts]),
        "task": ["text"] * sum(map(len, recorded)),
    }
    parquet.write_table(pyarrow.table(columns), path, row_group_size=row_group_size)


def write_video(path: Path, frames: np.ndarray, gop: int, options: dict[str, str] | None = None) -> None:
    """H.264 by PyAV; ``frames`` are uint8 ``[n, H, W, 3]``."""
    import av

    with av.open(str(path), "w") as container:
        stream = container.add_stream("libx264", rate=FPS)
        stream.height, stream.width, stream.pix_fmt = *frames.shape[1:3], "yuv420p"
        stream.gop_size, stream.options = gop, {"crf": "30", **(options or {})}
        for frame in frames:
            container.mux(stream.encode(av.VideoFrame.from_ndarray(frame, format="rgb24")))
        container.mux(stream.encode(None))


def read_video(path: Path) -> np.ndarray:
    """All frames, one after the other, uint8 ``[n, 3, H, W]``."""
    import av

    with av.open(str(path)) as container:
        images = [frame.reformat(format="gbrp").to_ndarray() for frame in container.decode(video=0)]
    return np.stack(images).transpose(0, 3, 1, 2)


def write_lerobot(
    folder: Path, recorded: list[Episode], gop: int = 2, done: bool = False, size: tuple[int, int] = (32, 48)
) -> None:
    """Two data files, two videos. After every second episode a video has a frame of an episode that was deleted."""
    import pyarrow
    from pyarrow import parquet

    rng = np.random.default_rng(0)
    half, camera = len(recorded) // 2, "observation.images.top"
    for name in ("meta/episodes/chunk-000", "data/chunk-000", f"videos/{camera}/chunk-000"):
        (folder / name).mkdir(parents=True)
    rows: list[dict[str, Any]] = []
    at = 0
    for file, (first, part) in enumerate(((0, recorded[:half]), (half, recorded[half:]))):
        columns: dict[str, Any] = {"observation.state": [], "action": [], "next.reward": [], "episode_index": []}
        columns |= {"next.done": []} if done else {}
        in_video = 0
        for number, each in enumerate(part, first):
            columns["observation.state"] += [row.tolist() for row in each.observations[:-1]]
            columns["action"] += [row.tolist() for row in each.actions.astype(np.float32)]
            columns["next.reward"] += each.rewards.tolist()
            columns["episode_index"] += [number] * len(each)
            if done:
                columns["next.done"] += each.flags(True).tolist()
            video = {"chunk_index": 0, "file_index": file, "from_timestamp": in_video / FPS}
            row = {"episode_index": number, "dataset_from_index": at, "dataset_to_index": at + len(each)}
            rows.append(row | {f"videos/{camera}/{name}": value for name, value in video.items()})
            at, in_video = at + len(each), in_video + len(each) + number % 2
        parquet.write_table(pyarrow.table(columns), folder / f"data/chunk-000/file-00{file}.parquet")
        frames = rng.integers(0, 256, (in_video, *size, 3), dtype=np.uint8)
        write_video(folder / f"videos/{camera}/chunk-000/file-00{file}.mp4", frames, gop)
    parquet.write_table(pyarrow.Table.from_pylist(rows), folder / "meta/episodes/chunk-000/file-000.parquet")
    names = ["height", "width", "channels"]
    features = {
        "observation.state": {"dtype": "float32", "shape": [3], "names": None},
        camera: {"dtype": "video", "shape": [*size, 3], "names": names},
        "action": {"dtype": "float32", "shape": [2], "names": None},
    }
    path = "videos/{video_key}/chunk-{chunk_index:03d}/file-{file_index:03d}.mp4"
    info = {"codebase_version": "v3.0", "fps": FPS, "features": features, "video_path": path}
    (folder / "meta/info.json").write_text(json.dumps(info))
    states = np.concatenate([each.observations[:-1] for each in recorded]).astype(np.float64)
    numbers = {name: getattr(states, name)(axis=0).tolist() for name in ("mean", "std", "min", "max")}
    (folder / "meta/stats.json").write_text(json.dumps({"observation.state": {**numbers, "count": [len(states)]}}))
