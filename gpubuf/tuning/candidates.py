"""The configurations to try: the rule's, and those around it. Pure functions of the sizes."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator
from typing import Any

from gpubuf.kernels import config
from gpubuf.kernels._spaces import SPACES, FanOut
from gpubuf.kernels._tuned import invalid
from gpubuf.kernels.trajectories._launch import run_bounds

THREAD_ELEMENTS = 64
"""Elements of a tile that a thread may hold in a candidate: with more, the registers can't suffice."""


def _index_update(sizes: dict[str, int], steps: int) -> Any:
    run_words = run_bounds(sizes["n"], (config.index_words(steps, 1),))[0]
    return config.index_update(sizes["fan_out"], sizes["n"], run_words, sizes["envs"], bool(sizes["by_id"]))


_RULES: dict[str, Callable[[dict[str, int], int], Any]] = {
    "rows_copy": lambda sizes, _: config.rows_copy(sizes["n_bytes"]),
    "sum_tree": lambda sizes, _: FanOut(config.tree_fan_out(sizes["capacity"], "cuda")),
    "trajectories": lambda sizes, _: FanOut(config.tree_fan_out(sizes["words"], "cuda")),
    "sum_tree_update": lambda sizes, _: config.tree_update(sizes["fan_out"], sizes["n"]),
    "sum_tree_draw": lambda sizes, _: config.tree_draw(sizes["fan_out"], sizes["n"]),
    "trajectories_update": _index_update,
    "trajectories_draw": lambda sizes, _: config.index_draw(sizes["fan_out"], sizes["n"], sizes["slice_len"]),
    "tanh_normal_sample": lambda sizes, _: config.tanh_normal_sample(sizes["n"], sizes["width"]),
    "tanh_normal_backward": lambda sizes, _: config.tanh_normal_backward(sizes["n"]),
    "loss_rows": lambda sizes, _: config.loss_rows(sizes["n"]),
}


@config.by_rule()
def rule(operation: str, sizes: dict[str, int], steps: int = 0) -> Any:
    """The configuration without a tuned file.

    Args:
        operation: a name of :data:`gpubuf.kernels._spaces.SPACES`.
        sizes: the sizes that its configuration depends on.
        steps: steps of the ring, for the trajectory index.
    """
    return _RULES[operation](sizes, steps)


def candidates(operation: str, sizes: dict[str, int], steps: int = 0, thorough: bool = False) -> list[Any]:
    """Configurations to try at these sizes, each once, the rule's first.

    Quick: one field is half or twice the rule's. Thorough: up to two fields are, or are a quarter or four times. A
    tuned file may hold any of them.
    """
    first = rule(operation, sizes, steps)
    bases = [first]
    if operation == "sum_tree_update" and sizes["n"] <= 16 * 1024:
        # One program for all stages, or a launch for each: where the border lies depends on the device.
        bases.append(config.tree_update(sizes["fan_out"], 2**20 if first.single_program else 1))
    found = []
    for base in bases:
        found += [base, *_around(base, sizes, 2 if thorough else 1, 2 if thorough or isinstance(base, FanOut) else 1)]
    return [first, *(made for made in dict.fromkeys(found) if made != first and _worth_trying(operation, sizes, made))]


def _around(base: Any, sizes: dict[str, int], changes: int, doublings: int) -> Iterator[Any]:
    """``base`` with up to ``changes`` of its fields changed by up to ``doublings`` factors of two."""
    values = {name: _other_values(name, value, sizes, doublings) for name, value in dataclasses.asdict(base).items()}
    for number in range(1, changes + 1):
        for changed in itertools.combinations(values, number):
            for chosen in itertools.product(*(values[name] for name in changed)):
                yield dataclasses.replace(base, **dict(zip(changed, chosen, strict=True)))


def _other_values(name: str, value: int, sizes: dict[str, int], doublings: int) -> list[int]:
    if name == "single_program":
        # The other fields follow from it: see the bases above.
        return []
    if name == "block_envs":
        # 0 is a launch a stage; nothing lies halfway to it.
        envs = min(config.ceil_power(sizes["envs"]), 64)
        return sorted({0, min(envs, 8), envs} - {value})
    powers = range(1, doublings + 1)
    return [made for power in powers for made in (value << power, value >> power) if made]


def _worth_trying(operation: str, sizes: dict[str, int], made: Any) -> bool:
    space = SPACES[operation]
    threads = 32 * getattr(made, "num_warps", 16)
    return not invalid(space, sizes, dataclasses.asdict(made)) and space.tile(sizes, made) <= THREAD_ELEMENTS * threads
