"""Writes tuned files, and says whether they will be read."""

from __future__ import annotations

import dataclasses
import json
import os
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from gpubuf.kernels import _tuned, config
from gpubuf.kernels._spaces import SPACES
from gpubuf.kernels._tuned import FORMAT, Point, read, slug, stamp
from gpubuf.tuning.search import Result


def path_for(folder: Path, device_name: str) -> Path:
    """The tuned file of a device in a folder."""
    return folder / f"{slug(device_name)}.json"


def save(folder: Path, device_name: str, results: Iterable[Result], made: Mapping[str, Any]) -> Path:
    """Write what was tuned; points of the file that is there stay, where they are for other sizes and still usable.

    Args:
        folder: where; made if need be.
        device_name: as ``torch.cuda.get_device_name`` gives it.
        results: what was tuned.
        made: when and with what, for people.

    Returns:
        The file. It is replaced as a whole, or not at all.

    Raises:
        OSError: it can't be written.
    """
    path = path_for(folder, device_name)
    points: dict[str, list[dict[str, Any]]] = {
        operation: [_entry(point) for point in kept]
        for operation, kept in read(path, SPACES, device_name).points.items()
    }
    for result in results:
        if result.chosen is not None:
            entry = _entry(Point(result.sizes, result.chosen.config, _measured(result)))
            others = points.setdefault(result.job.operation, [])
            others[:] = [other for other in others if other["sizes"] != entry["sizes"]] + [entry]
    content = {
        "format": FORMAT,
        "device": device_name,
        "made": dict(made),
        "kernels": {family: stamp(family) for family in sorted({SPACES[name].family for name in points})},
        "points": points,
    }
    folder.mkdir(parents=True, exist_ok=True)
    _replace(path, json.dumps(content, indent=1) + "\n")
    config.forget()
    return path


def _replace(path: Path, text: str) -> None:
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "w") as file:
            file.write(text)
        os.chmod(name, 0o644)
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise


def _entry(point: Point) -> dict[str, Any]:
    return {
        "sizes": dict(point.sizes),
        "config": dataclasses.asdict(point.config),
        "measured": dict(point.measured),
    }


def _measured(result: Result) -> dict[str, Any]:
    """Microseconds a call of every workload: chosen, and by rule."""
    assert result.chosen is not None
    by_rule = result.by_rule
    return {
        name: {
            "us": round(1e6 * timing.seconds, 3),
            "us_by_rule": None if by_rule is None else round(1e6 * by_rule.timings[name].seconds, 3),
            "bytes": result.n_bytes[name],
            "launches": timing.launches,
        }
        for name, timing in result.chosen.timings.items()
    }


def caveat(path: Path) -> str:
    """Why a file that was written will not be read, or not first; "" where it will."""
    folders = _tuned.folders()
    if path.parent.resolve() not in [folder.resolve() for folder in folders]:
        return f"gpubuf reads tuned files from {' and '.join(map(str, folders))} only"
    before = folders[0] / path.name
    if path.parent.resolve() != folders[0].resolve() and before.exists():
        return f"{before} comes first: delete it to use what ships"
    return ""
