"""Writes tuned files, and shows the tuning: how far it is, its tables, and whether gpubuf will read a file."""

from __future__ import annotations

import dataclasses
import datetime
import importlib.metadata
import itertools
import json
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

import gpubuf
from gpubuf import serialization
from gpubuf.kernels import _tuned, config
from gpubuf.kernels._tuned import FORMAT, Point, read, slug, stamp
from gpubuf.kernels.config import SPACES
from gpubuf.terminal import ITEMS, can_show, progress_bar
from gpubuf.tuning.operations import Shapes
from gpubuf.tuning.search import Result
from gpubuf.tuning.timing import Timer, copy_bandwidth, launch_seconds


def path_for(folder: Path, device_name: str) -> Path:
    """The tuned file of a device in a folder."""
    return folder / f"{slug(device_name)}.json"


def heading(shapes: Shapes, timer: Timer, device: torch.device) -> dict[str, Any]:
    """When and with what a file was made, and the best that the device can do, for people."""
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "gpubuf": gpubuf.__version__,
        "torch": torch.__version__,
        "triton": importlib.metadata.version("triton"),
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
            others = [other for other in points.get(result.job.operation, ()) if dict(other.sizes) != result.job.point]
            points[result.job.operation] = [*others, Point(result.job.point, result.chosen.config, measured)]
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


HEADING = ("operation", "call", "configuration", "µs", "by rule", "launches")


def table(results: Iterable[Result]) -> list[tuple[str, ...]]:
    """A line for every call that was timed, under a heading."""
    lines: list[tuple[str, ...]] = [HEADING]
    for result in results:
        chosen, by_rule = result.chosen, result.by_rule
        if chosen is None:
            lines.append((result.job.operation, str(result.job), "not tuned", "", "", ""))
            continue
        first = (result.job.operation, describe(chosen.config))
        for name, timing in chosen.timings.items():
            rule = "" if by_rule is None else f"{1e6 * by_rule.timings[name].seconds:.2f}"
            launches = "" if timing.launches is None else f"{timing.launches}"
            lines.append((first[0], name, first[1], f"{1e6 * timing.seconds:.2f}", rule, launches))
            first = ("", "")
    return lines


def notes(results: Iterable[Result]) -> list[str]:
    """The configurations that could not be used or tried, a line for each reason; and used ones that spill."""
    found = []
    for result in results:
        timings = {} if result.chosen is None else result.chosen.timings
        found += [f"{result.job}: spills registers: {timing.spilled}" for timing in timings.values() if timing.spilled]
        reasons: dict[str, list[str]] = {}
        for made, reason in result.rejected:
            reasons.setdefault(reason, []).append(describe(made))
        found += [f"{result.job}: {'; '.join(made)}: {reason}" for reason, made in reasons.items()]
        if result.untried:
            found.append(f"{result.job}: {result.untried} configurations not tried for want of time")
    return found


def describe(made: Any) -> str:
    """A configuration in a few words."""
    return ", ".join(f"{name} {value}" for name, value in dataclasses.asdict(made).items())


@contextmanager
def progress(n_points: int) -> Iterator[Callable[[Result], None]]:
    """Yields the function to call with every result: a bar on a terminal, a line for each point anywhere else.

    Both are on standard error: standard output is for the table.
    """
    counted = itertools.count(1)
    lines = not can_show(sys.stderr)
    with progress_bar("points", n_points, None, columns=ITEMS) as advance:

        def show(result: Result) -> None:
            advance(1)
            chosen = "not tuned" if result.chosen is None else describe(result.chosen.config)
            timed = f"{len(result.trials)} of {len(result.trials) + len(result.rejected) + result.untried} timed"
            if lines:
                print(f"{next(counted)}/{n_points} {result.job}: {chosen} ({timed})", file=sys.stderr, flush=True)

        yield show
