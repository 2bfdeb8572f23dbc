"""Data sets of LeRobot, version 3: Parquet files of many episodes, and videos."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from gpubuf.data.loading.parquet import parquet_table
from gpubuf.data.loading.recording import Column, needed, overlaps, stamps
from gpubuf.data.loading.video import VideoFile

CAMERA = "observation.images."


def feature_key(name: str) -> tuple[str, ...]:
    """Where rows have a feature: ``"observation.images.top"`` is ``("observation", "image", "top")``, as in TorchRL."""
    if name.startswith(CAMERA):
        return "observation", "image", name.removeprefix(CAMERA)
    return tuple(name.split("."))


class LeRobotFolder:
    """A folder of LeRobot's. A frame is a record, an episode ends with ``next.done`` or where another one begins.

    Args:
        folder: which has ``meta/info.json``.

    Raises:
        ImportError: pyarrow is missing.
        ValueError: it is of another version, or its frames are not in the order of their episodes.
    """

    def __init__(self, folder: Path) -> None:
        info = json.loads((folder / "meta" / "info.json").read_text())
        if not str(info["codebase_version"]).startswith("v3"):
            raise ValueError(f"{folder} is of version {info['codebase_version']}, expected v3: LeRobot converts it")
        self._table = parquet_table(sorted(folder.glob("data/*/*.parquet")))
        features: Mapping[str, Any] = info["features"]
        videos = [name for name, feature in features.items() if feature["dtype"] == "video"]
        episodes = _episodes(sorted(folder.glob("meta/episodes/*/*.parquet")), videos)
        starts = np.append(episodes["dataset_from_index"], len(self._table.steps.end))
        if not np.array_equal(np.append(0, episodes["dataset_to_index"]), starts):
            raise ValueError(f"the episodes of {folder} don't follow each other from frame 0 to {starts[-1]}")
        self.steps = self._table.steps
        self.statistics = _statistics(folder / "meta" / "stats.json")
        self.columns = {name: replace(column, key=feature_key(name)) for name, column in self._table.columns.items()}
        self._cameras: dict[str, Camera] = {}
        for name in videos:
            numbers = (episodes[f"videos/{name}/{part}_index"].tolist() for part in ("chunk", "file"))
            paths = [
                folder / info["video_path"].format(video_key=name, chunk_index=chunk, file_index=file)
                for chunk, file in zip(*numbers, strict=True)
            ]
            begins = episodes[f"videos/{name}/from_timestamp"] - 0.5 / info["fps"]  # the nearest frame
            self._cameras[name] = Camera(paths, begins, starts)
            self.columns[name] = Column.of(feature_key(name), (3, *_size(features[name])), np.uint8)
        self.identity: Any = [self._table.identity, stamps(sorted(folder.glob("videos/*/*/*")))]

    def tasks(self, name: str, start: int, stop: int, out: npt.NDArray[Any], /) -> Sequence[Callable[[], None]]:
        return (self._cameras.get(name) or self._table).tasks(name, start, stop, out)


class Camera:
    """The frames of a camera, in the order of the records.

    Args:
        paths: of the file of each episode.
        begins: seconds in its file from which on each has its frames.
        starts: the first record of each, and the number of records.
    """

    def __init__(self, paths: Sequence[Path], begins: npt.NDArray[Any], starts: npt.NDArray[Any]) -> None:
        self._paths, self._begins, self._starts = paths, begins, starts
        self._last: dict[Path, VideoFile] = {}

    def tasks(self, name: str, start: int, stop: int, out: npt.NDArray[Any], /) -> Sequence[Callable[[], None]]:
        runs: list[tuple[VideoFile, int, int]] = []
        for number, records, places in overlaps(self._starts, start, stop):
            path = self._paths[number]
            self._last = {path: self._last.get(path) or VideoFile(path)}
            file = self._last[path]
            # Of the first place, as if the run began there: the same for episodes that follow each other in a file.
            frame = int(np.searchsorted(file.times, self._begins[number])) + records.start - places.start
            if not runs or runs[-1][:2] != (file, frame):
                runs.append((file, frame, places.start))
        ends = [at for _, _, at in runs[1:]] + [stop - start]
        parts = zip(runs, ends, strict=True)
        return [task for (file, frame, at), end in parts for task in file.tasks(frame + at, out[at:end])]


def _episodes(paths: Sequence[Path], videos: Sequence[str]) -> dict[str, npt.NDArray[Any]]:
    """What the files say of episodes, in their order."""
    parts = ("chunk_index", "file_index", "from_timestamp")
    names = [f"dataset_{side}_index" for side in ("from", "to")]
    names += [f"videos/{name}/{part}" for name in videos for part in parts]
    tables = [needed("pyarrow.parquet").read_table(path, columns=names) for path in paths]
    columns = {name: np.concatenate([table.column(name).to_numpy() for table in tables]) for name in names}
    order = np.argsort(columns[names[0]])
    return {name: column[order] for name, column in columns.items()}


def _size(feature: Mapping[str, Any]) -> tuple[int, int]:
    """Height and width of an image, in whatever order its shape has them."""
    shape, names = feature["shape"], list(feature.get("names") or ("height", "width", "channels"))
    return shape[names.index("height")], shape[names.index("width")]


def _statistics(path: Path) -> dict[str, dict[str, Tensor]]:
    found = {}
    for name, stated in json.loads(path.read_text()).items() if path.exists() else ():
        each = {part: np.asarray(stated[part], float).flatten() for part in ("count", "mean", "std", "min", "max")}
        m2, peak = np.square(each["std"]) * each["count"], np.maximum(np.abs(each["min"]), np.abs(each["max"]))
        count = np.broadcast_to(each["count"], m2.shape)
        parts = {"count": count, "mean": each["mean"], "m2": m2, "peak": peak}
        found[name] = {part: torch.tensor(value, device="cpu") for part, value in parts.items()}
    return found
