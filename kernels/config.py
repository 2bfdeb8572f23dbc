"""The choice of launch configurations: an explicit argument, else a tuned file, else a rule.

Everything here is a pure function of its arguments and of the JSON files in ``tuned/``; no device is probed.
A tuned file is named after its device, ``tuned/<slug of the name>.json``, and holds per operation a list of
points that were measured::

    {"device": "NVIDIA H100 80GB HBM3",
     "sum_tree_draw": [{"sizes": {"fan_out": 32, "n": 256}, "config": {"block_draws": 4, "num_warps": 1}}]}

The point nearest in log space is taken. Points on which a rule of correctness depends (see each function) are
only taken where they match exactly.
"""

from __future__ import annotations

import functools
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

TUNED = Path(__file__).parent / "tuned"

CPU_FAN_OUT = 16
GPU_FAN_OUTS = (16, 32, 64)


@dataclass(frozen=True)
class UpdateConfig:
    """How an update or a mark of the sum tree is launched.

    Attributes:
        single_program: one program runs all stages, in one launch.
        block_entries: entries of the batch that a program takes at a time.
        block_nodes: nodes that a program recomputes at a time.
        num_warps: warps of a program.
    """

    single_program: bool
    block_entries: int
    block_nodes: int
    num_warps: int


@dataclass(frozen=True)
class DrawConfig:
    """How a draw from the sum tree is launched.

    Attributes:
        block_draws: draws of one program.
        num_warps: warps of a program.
    """

    block_draws: int
    num_warps: int


@dataclass(frozen=True)
class IndexConfig:
    """How an update of the trajectory index is launched.

    Attributes:
        block_envs: environments of which one program computes all bits and weights; 0: every stage is a launch.
        block_words: words of end flags that a program computes at a time.
        block_weights: weights that a program computes at a time.
        block_nodes: sums that a program recomputes at a time.
        num_warps: warps of a program.
    """

    block_envs: int
    block_words: int
    block_weights: int
    block_nodes: int
    num_warps: int


@dataclass(frozen=True)
class SliceConfig:
    """How slices are launched.

    Attributes:
        block_slices: slices of one program.
        block_steps: steps of them that it writes at a time.
        num_warps: warps of a program.
    """

    block_slices: int
    block_steps: int
    num_warps: int


def slug(device_name: str) -> str:
    """File name, without extension, of a device: lower case, everything but letters and digits as one hyphen."""
    return re.sub(r"[^a-z0-9]+", "-", device_name.lower()).strip("-")


@functools.lru_cache(maxsize=16)
def _load(path: Path) -> Mapping[str, Any]:
    return json.loads(path.read_text()) if path.is_file() else {}


def nearest(points: Sequence[Mapping[str, Any]], sizes: Mapping[str, int]) -> Mapping[str, Any] | None:
    """The point whose ``"sizes"`` lie nearest to ``sizes`` in log space; None where no point names the same sizes.

    A tie goes to the point listed first.
    """

    def distance(point: Mapping[str, Any]) -> float:
        return math.dist(
            [math.log(max(point["sizes"][name], 1)) for name in sizes], [math.log(max(v, 1)) for v in sizes.values()]
        )

    comparable = [point for point in points if point["sizes"].keys() == sizes.keys()]
    return min(comparable, key=distance, default=None)


def tuned(
    operation: str,
    sizes: Mapping[str, int],
    device_name: str | None,
    *,
    exact: Sequence[str] = (),
    directory: Path = TUNED,
) -> Mapping[str, Any] | None:
    """The tuned configuration of an operation on a device, or None.

    Args:
        operation: key in the tuned file.
        sizes: what the configuration depends on.
        device_name: as ``torch.cuda.get_device_name`` gives it; None for the CPU and the interpreter.
        exact: names of the sizes that must agree; the others need only be near.
        directory: where the tuned files are.
    """
    if device_name is None:
        return None
    points = [
        point
        for point in _load(directory / f"{slug(device_name)}.json").get(operation, [])
        if all(point["sizes"].get(name) == sizes[name] for name in exact)
    ]
    point = nearest(points, sizes)
    return None if point is None else point["config"]


def tree_fan_out(
    capacity: int,
    device_type: str,
    device_name: str | None = None,
    explicit: int | None = None,
    directory: Path = TUNED,
    family: str = "sum_tree",
) -> int:
    """Fan-out of a sum tree: children per node, a power of two.

    The rule: 16 on a CPU, one cache line of leaves. On a GPU a level costs a round trip to memory, and a wide
    node costs bytes: the narrowest of :data:`GPU_FAN_OUTS` that is as shallow as the widest.

    Raises:
        ValueError: ``explicit`` is not a power of two of at least 2.
    """
    if explicit is not None:
        if explicit < 2 or explicit & (explicit - 1):
            raise ValueError(f"the fan-out must be a power of two of at least 2, but is {explicit}")
        return explicit
    if device_type == "cpu":
        return CPU_FAN_OUT
    found = tuned(family, {"capacity": capacity}, device_name, directory=directory)
    if found is not None:
        return int(found["fan_out"])

    def depth(fan_out: int) -> int:
        levels, count = 1, -(-capacity // fan_out)
        while count > 1:
            levels, count = levels + 1, -(-count // fan_out)
        return levels

    return next(fan_out for fan_out in GPU_FAN_OUTS if depth(fan_out) == depth(GPU_FAN_OUTS[-1]))


def tree_update(fan_out: int, n: int, device_name: str | None = None, directory: Path = TUNED) -> UpdateConfig:
    """Launch configuration of an update or a mark of ``n`` rows.

    The rule: up to 1024 entries one launch by one program beats the latency of one launch a level; a program
    holds as many children at a time as fit its registers.
    """
    found = tuned("sum_tree_update", {"fan_out": fan_out, "n": n}, device_name, exact=["fan_out"], directory=directory)
    if found is not None:
        return UpdateConfig(**found)
    single = n <= 1024
    return UpdateConfig(
        single_program=single,
        block_entries=256,
        block_nodes=max(1, (2048 if single else 1024) // fan_out),
        num_warps=8 if single else 4,
    )


def tree_draw(fan_out: int, n: int, device_name: str | None = None, directory: Path = TUNED) -> DrawConfig:
    """Launch configuration of ``n`` draws.

    The rule: many small programs while they fit the processor side by side, then up to 512 children a program.
    """
    found = tuned("sum_tree_draw", {"fan_out": fan_out, "n": n}, device_name, exact=["fan_out"], directory=directory)
    if found is not None:
        return DrawConfig(**found)
    block_draws = max(1, min(4 if n <= 512 else 16, 512 // fan_out))
    return DrawConfig(block_draws=block_draws, num_warps=max(1, min(4, block_draws * fan_out // 256)))


def index_fan_out(
    steps: int,
    envs: int,
    device_type: str,
    device_name: str | None = None,
    explicit: int | None = None,
    directory: Path = TUNED,
) -> int:
    """Fan-out of the sums of a trajectory index, over one leaf for 64 steps; see :func:`tree_fan_out`.

    Raises:
        ValueError: ``explicit`` is not a power of two of at least 2.
    """
    words = -(-steps // 64) * envs
    return tree_fan_out(words, device_type, device_name, explicit, directory, family="trajectories")


def _floor_power(number: int) -> int:
    return 1 << (number.bit_length() - 1)


def _ceil_power(number: int) -> int:
    return 1 << (number - 1).bit_length()


def index_span(n: int, steps: int) -> int:
    """Bits of a word that a lane looks at in an update of ``n`` of ``steps`` steps: those of the run, or all 64.

    One step changes two bits at most on every level: its own, and (identifiers) that of the step before it. In a ring
    of one step these are the same.
    """
    return 2 if n == 1 < steps else 64


def index_update(
    fan_out: int,
    n: int,
    run_words: int,
    envs: int,
    by_id: bool = False,
    device_name: str | None = None,
    directory: Path = TUNED,
) -> IndexConfig:
    """Launch configuration of an update of ``n`` steps, which lie in ``run_words`` words of each environment.

    The rule: one program does all stages of some environments, up to 512 words, as long as these environments are
    enough for memory accesses side by side. Tiles have up to 1024 bits, half as many where each takes two loads
    (identifiers), or children; for the few words of a small write of few environments, about as many as these need.
    """
    sizes = {"fan_out": fan_out, "n": n, "envs": envs}
    found = tuned("trajectories_update", sizes, device_name, exact=["fan_out"], directory=directory)
    if found is not None:
        return IndexConfig(**found)
    block_envs = min(_ceil_power(envs), _floor_power(max(512 // run_words, 1)), 32)
    few = (run_words + 1) * _ceil_power(envs) <= (96 if n == 1 else 16)
    if run_words > 512 or block_envs < min(_ceil_power(envs), 32):
        block_envs = 0
    block_nodes = max(1, min(4, 128 // fan_out) if few else (1024 if n == 1 else 512) // fan_out)
    if n == 1:
        block_words, num_warps = (16, 1) if few else (32, 2)
        return IndexConfig(block_envs, block_words, 16 if few else 64, block_nodes, num_warps)
    block_words, num_warps = (8, 2) if by_id else (16, 4)
    return IndexConfig(block_envs, block_words, 32 if few else 32 * num_warps, block_nodes, num_warps)


def index_draw(
    fan_out: int, n: int, slice_len: int, device_name: str | None = None, directory: Path = TUNED
) -> SliceConfig:
    """Launch configuration of ``n`` drawn slices: as :func:`tree_draw`, and up to 64 steps written at a time."""
    sizes = {"fan_out": fan_out, "n": n, "slice_len": slice_len}
    found = tuned("trajectories_draw", sizes, device_name, exact=["fan_out"], directory=directory)
    if found is not None:
        return SliceConfig(**found)
    block_slices = max(1, min(4 if n <= 512 else 16, 512 // fan_out))
    return SliceConfig(
        block_slices=block_slices,
        block_steps=min(64, _ceil_power(max(slice_len, 8))),
        num_warps=max(1, min(4, block_slices * fan_out // 256)),
    )


def index_slices(n: int, slice_len: int) -> SliceConfig:
    """Launch configuration of ``n`` slices from given rows: a warp for up to 32, and up to 512 elements of output."""
    block_steps = min(64, _ceil_power(max(slice_len, 8)))
    return SliceConfig(block_slices=min(32, 512 // block_steps), block_steps=block_steps, num_warps=1)
