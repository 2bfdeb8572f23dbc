"""Tuned files: where they are, how they are read, and which of their points count.

``gpubuf tune`` writes one file for each kind of device, ``<slug of its name>.json``. The file holds the points that
were measured, by operation::

    {"format": 1, "device": "NVIDIA H100 80GB HBM3", "made": {"date": "2026-11-21", ...},
     "kernels": {"sum_tree": "0d1f5a...", ...},
     "points": {"sum_tree_draw": [{"sizes": {"fan_out": 32, "n": 256}, "config": {"block_draws": 4, "num_warps": 1}}]}}

Nothing in a file leads to an error or to a wrong result. One that is damaged, or has a point that the kernels can't
run, does not count, nor do the points of kernels that have changed since. :func:`said` logs that once for each file.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import logging
import math
import os
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FORMAT = 1
"""Version of the files. It rises when old timings would mislead, even if every configuration still runs."""

REACH = 16
"""A point counts for sizes up to this many times larger or smaller than its own. Beyond, the rule knows better."""

logger = logging.getLogger("gpubuf")


LARGEST_TILE = 2**14
"""Elements that a program may hold at a time: beyond, a kernel spills, and takes minutes to compile."""

LARGEST_WARPS = 16
"""Warps of a program: a block has 1024 threads at most, and a warp 64 of them on some GPUs."""


@dataclass(frozen=True)
class Space:
    """The configurations that an operation can be tuned over.

    Attributes:
        families: the packages whose kernels the configuration launches.
        sizes: names of the sizes that the configuration depends on.
        config: the frozen dataclass that holds it. Its fields are powers of two, or booleans.
        tile: elements of the largest tile that a program holds, by sizes and configuration.
        exact: sizes that must be equal for a point to count; the others need only be near.
        free: fields that need not be powers of two; ``refusal`` checks them.
        refusal: why the kernels can't run a configuration, for reasons that no other attribute covers; "" if they can.
    """

    families: tuple[str, ...]
    sizes: tuple[str, ...]
    config: type
    tile: Callable[[Mapping[str, int], Any], int]
    exact: tuple[str, ...] = ()
    free: tuple[str, ...] = ()
    refusal: Callable[[Any], str] = lambda config: ""


@dataclass(frozen=True)
class Point:
    """A configuration, the sizes that it is for, and the measurement, for people to read."""

    sizes: Mapping[str, int]
    config: Any
    measured: Mapping[str, Any] = dataclasses.field(default_factory=dict)


@dataclass(frozen=True)
class TunedFile:
    """The usable part of a file.

    Attributes:
        path: where it is.
        device: the device that it names; "" if the file can't be read.
        made: when it was made, and with what, as the file says.
        points: the usable points, by operation.
        problems: the rest, and why; empty if every point is usable.
    """

    path: Path
    device: str = ""
    made: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    points: Mapping[str, tuple[Point, ...]] = dataclasses.field(default_factory=dict)
    problems: tuple[str, ...] = ()

    @property
    def n_points(self) -> int:
        """Number of usable points."""
        return sum(map(len, self.points.values()))


def slug(device_name: str) -> str:
    """File name, without extension, of a device: lower case, everything but letters and digits as one hyphen."""
    return re.sub(r"[^a-z0-9]+", "-", device_name.lower()).strip("-")


def user_folder() -> Path | None:
    """The folder of a user's own tuned files, ``$XDG_CACHE_HOME/gpubuf/tuned``; None if there is no home.

    It is below ``~/.cache`` unless ``XDG_CACHE_HOME`` is an absolute path.
    """
    cache = Path(os.environ.get("XDG_CACHE_HOME", ""))
    if not cache.is_absolute():
        try:
            cache = Path.home() / ".cache"
        except RuntimeError:
            return None
    return cache / "gpubuf" / "tuned"


@functools.cache
def stamp(family: str) -> str:
    """Identifies what can be configured about the kernels of a family: their names and compile-time arguments."""
    parameters = []
    for path in sorted((Path(__file__).parent / family).glob("_triton*.py")):
        kernel = ""
        for function, constant in re.findall(r"^def (\w+)\(|^    (\w+): tl\.constexpr", path.read_text(), re.MULTILINE):
            kernel = function or kernel
            if kernel.endswith("_kernel"):
                parameters.append(function or constant)
    return hashlib.sha256(" ".join(parameters).encode()).hexdigest()[:12]


def invalid(space: Space, sizes: Mapping[str, Any], config: Mapping[str, Any]) -> str:
    """Why a point can't be used; "" if it can."""
    fields = {field.name: field.type for field in dataclasses.fields(space.config)}
    if sizes.keys() != set(space.sizes) or config.keys() != fields.keys():
        return f"its sizes must be {list(space.sizes)}, and its configuration must give {list(fields)}"
    if not all(type(value) is int and 0 <= value < 2**63 for value in sizes.values()):
        return "its sizes must be whole numbers in 0 .. 2**63 - 1"
    for name, value in config.items():
        kind = bool if fields[name] == "bool" else int
        if type(value) is not kind:
            return f"{name} must be of type {kind.__name__}, not {value!r}"
        if kind is int and name not in space.free and (value < 1 or value & (value - 1)):
            return f"{name} must be a power of two, not {value}"
    if config.get("num_warps", 1) > LARGEST_WARPS:
        return f"num_warps may be {LARGEST_WARPS} at most, not {config['num_warps']}"
    fan_out = sizes.get("fan_out", 2)
    if fan_out < 2 or fan_out & (fan_out - 1):
        return f"there is no fan-out {fan_out}"
    made = space.config(**config)
    elements = space.tile(sizes, made)
    if elements > LARGEST_TILE:
        return f"a program would hold {elements} elements, and may hold {LARGEST_TILE}"
    return space.refusal(made)


def read(path: Path, spaces: Mapping[str, Space], device_name: str | None = None) -> TunedFile:
    """The usable part of a file. Never raises; a missing file is empty.

    Args:
        path: where it is.
        spaces: what can be tuned, by operation.
        device_name: the device that the file must be for; None takes any.
    """
    points: dict[str, tuple[Point, ...]] = {}
    stale: list[str] = []
    try:
        content = json.loads(path.read_text())
        device, stamps = content["device"], content["kernels"]
        if device_name not in (None, device):
            raise ValueError(f"it is for {device!r}, not for {device_name!r}")
        if content["format"] != FORMAT:
            raise ValueError(f"its format is {content['format']!r}, that of this version {FORMAT}")
        for operation, entries in content["points"].items():
            space = spaces.get(operation)
            if space is None or any(stamps.get(family) != stamp(family) for family in space.families):
                stale.append(f"{operation}: stale, it was tuned for other kernels")
            else:
                points[operation] = tuple(_point(space, **entry) for entry in entries)
        return TunedFile(path, device, dict(content.get("made", {})), points, tuple(stale))
    except FileNotFoundError:
        return TunedFile(path)
    # A damaged file holds anything.
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        return TunedFile(path, problems=(f"it can't be used: {type(error).__name__}: {error}",))


def _point(space: Space, sizes: Any, config: Any, measured: Any = None) -> Point:
    if reason := invalid(space, sizes, config):
        raise ValueError(f"of a point {sizes}, {reason}")
    return Point(sizes, space.config(**config), measured or {})


def nearest(points: Iterable[Point], sizes: Mapping[str, int], exact: Iterable[str] = ()) -> Point | None:
    """The point whose sizes lie nearest to ``sizes`` in log space; None where none is within :data:`REACH`.

    Sizes named in ``exact`` must be equal. A tie goes to the point listed first.
    """

    def steps(point: Point) -> list[float]:
        return [abs(math.log(max(point.sizes[name], 1) / max(size, 1))) for name, size in sizes.items()]

    def counts(point: Point) -> bool:
        # A hair more, for sizes that are exactly REACH times as large.
        near = max(steps(point), default=0.0) <= math.log(REACH) * (1 + 1e-12)
        return near and all(point.sizes[name] == sizes[name] for name in exact)

    return min(filter(counts, points), key=lambda point: math.hypot(*steps(point)), default=None)


def said(file: TunedFile) -> TunedFile:
    """The file, after one message where something in it is not used."""
    if file.problems:
        more = f" (and {len(file.problems) - 1} more)" if len(file.problems) > 1 else ""
        logger.warning(
            "not all of the tuned file %s is used: %s%s; `gpubuf tune` makes a new one",
            file.path,
            file.problems[0],
            more,
        )
    return file
