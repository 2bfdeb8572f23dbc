"""Tuned files for tests: whole ones, and their points."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from gpubuf.kernels import _tuned, config
from gpubuf.kernels.config import SPACES

DEVICE = "NVIDIA H100 80GB HBM3"
FILE = "nvidia-h100-80gb-hbm3.json"


def content(points: Any, **changes: Any) -> dict[str, Any]:
    """A whole file."""
    stamps = {family: _tuned.stamp(family) for space in SPACES.values() for family in space.families}
    return {"format": _tuned.FORMAT, "device": DEVICE, "kernels": stamps, "points": points, **changes}


def point(configuration: dict[str, Any], **sizes: int) -> dict[str, Any]:
    return {"sizes": sizes, "config": configuration}


def draw(block_draws: Any, num_warps: Any = 1, fan_out: int = 32, n: int = 256) -> dict[str, Any]:
    return point({"block_draws": block_draws, "num_warps": num_warps}, fan_out=fan_out, n=n)


def write_file(folder: Path, points: Any, **changes: Any) -> Path:
    """Put the tuned file into a folder, which is returned; files read before are forgotten."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / FILE).write_text(json.dumps(content(points, **changes)))
    config.forget()
    return folder
