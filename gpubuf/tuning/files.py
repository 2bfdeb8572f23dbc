"""Writes tuned files, and says whether gpubuf will read them."""

from __future__ import annotations

import dataclasses
import datetime
import importlib.metadata
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

import gpubuf
from gpubuf import serialization
from gpubuf.kernels import _tuned, config
from gpubuf.kernels._spaces import SPACES
from gpubuf.kernels._tuned import FORMAT, Point, read, slug, stamp
from gpubuf.tuning.search import Result
from gpubuf.tuning.shapes import Shapes
from gpubuf.tuning.timing import Timer, copy_bandwidth, launch_seconds


def path_for(folder: Path, device_name: str) -> Path:
    """The tuned file of a device in a folder."""
    return folder / f"{slug(device_name)}.json"


def heading(shapes: Shapes, thorough: bool, timer: Timer, device: torch.device) -> dict[str, Any]:
    """When and with what a file was made, and the best that the device can do, for people."""
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "gpubuf": gpubuf.__version__,
        "torch": torch.__version__,
        "triton": importlib.metadata.version("triton"),
        "mode": "thorough" if thorough else "quick",
        "shapes": shapes.describe(),
        "copy_bytes_per_second": round(copy_bandwidth(timer, device)),
        "launch_seconds": launch_seconds(timer, device),
    }


def save(folder: Path, device_name: str, results: Iterable[Result], made: Mapping[str, Any]) -> Path:
    """Write tuned points. Points of the existing file stay if they are for other sizes and still usable.

    Args:
        folder: where; made if need be.
        device_name: as ``torch.cuda.get_device_name`` gives it.
        results: the points.
        made: when and with what; see :func:`heading`.

    Returns:
        The file. It is replaced as a whole, or not at all.

    Raises:
        OSError: it can't be written.
    """
    path = path_for(folder, device_name)
    points = {name: list(kept) for name, kept in read(path, SPACES, device_name).points.items()}
    for result in results:
        if result.chosen is not None:
            measured = {
                name: {
                    "us": round(1e6 * timing.seconds, 3),
                    "us_by_rule": result.by_rule and round(1e6 * result.by_rule.timings[name].seconds, 3),
                    "launches": timing.launches,
                }
                for name, timing in result.chosen.timings.items()
            }
            others = [other for other in points.get(result.job.operation, ()) if dict(other.sizes) != result.sizes]
            points[result.job.operation] = [*others, Point(result.sizes, result.chosen.config, measured)]
    content = {
        "format": FORMAT,
        "device": device_name,
        "made": dict(made),
        "kernels": {family: stamp(family) for name in points for family in SPACES[name].families},
        "points": {name: [dataclasses.asdict(point) for point in some] for name, some in points.items()},
    }
    folder.mkdir(parents=True, exist_ok=True)
    serialization.replace(path, [(json.dumps(content, indent=1) + "\n").encode()])
    config.forget()
    return path


def caveat(path: Path) -> str:
    """Why gpubuf will not read a file that was written, or not first; "" if it will."""
    folders = _tuned.folders()
    if path.parent.resolve() not in [folder.resolve() for folder in folders]:
        return f"gpubuf reads tuned files from {' and '.join(map(str, folders))} only"
    before = folders[0] / path.name
    if path.parent.resolve() != folders[0].resolve() and before.exists():
        return f"{before} comes first: delete it to use what ships"
    return ""
