"""Which configurations are tried: the rule's, and those around it. Pure functions of the sizes."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator
from typing import Any

from gpubuf.kernels import config
from gpubuf.kernels._spaces import SPACES, FanOut
from gpubuf.kernels._tuned import invalid
from gpubuf.kernels.trajectories._launch import run_bounds

THREAD_ELEMENTS = 64
"""Elements of a tile that a thread may hold in a candidate: with more, the registers can't suffice."""


@config.by_rule()
def rule(operation: str, sizes: dict[str, int], steps: int = 0) -> Any:
    """What is chosen where nothing else is said.

    Args:
        operation: a name of :data:`gpubuf.kernels._spaces.SPACES`.
        sizes: what its configuration depends on.
        steps: steps of the ring, for the trajectory index.
    """
    if operation == "rows_copy":
        return config.rows_copy(sizes["n_bytes"])
    if operation == "sum_tree":
        return FanOut(config.tree_fan_out(sizes["capacity"], "cuda"))
    if operation == "trajectories":
        return FanOut(config.tree_fan_out(sizes["words"], "cuda"))
    if operation == "sum_tree_update":
        return config.tree_update(sizes["fan_out"], sizes["n"])
    if operation == "sum_tree_draw":
        return config.tree_draw(sizes["fan_out"], sizes["n"])
    if operation == "trajectories_update":
        run_words = run_bounds(sizes["n"], (config.index_words(steps, 1),))[0]
        return config.index_update(sizes["fan_out"], sizes["n"], run_words, sizes["envs"], bool(sizes["by_id"]))
    if operation == "trajectories_draw":
        return config.index_draw(sizes["fan_out"], sizes["n"], sizes["slice_len"])
    if operation == "tanh_normal_sample":
        return config.tanh_normal_sample(sizes["n"], sizes["width"])
    if operation == "tanh_normal_backward":
        return config.tanh_normal_backward(sizes["n"])
    if operation == "loss_rows":
        return config.loss_rows(sizes["n"])
    raise ValueError(f"there is no operation {operation!r}: there are {sorted(SPACES)}")


def candidates(operation: str, sizes: dict[str, int], steps: int = 0, thorough: bool = False) -> list[Any]:
    """Configurations to try at these sizes, each once, the rule's first.

    Quick: one field is half or twice the rule's. Thorough: up to two fields are, or are a quarter or four times. All
    of them are among those that a tuned file may hold.
    """
    first = rule(operation, sizes, steps)
    found = [first]
    for base in (first, *_other_regimes(operation, sizes)):
        found.append(base)
        found += _around(base, sizes, 2 if thorough else 1, 2 if thorough or operation in _FAN_OUTS else 1)
    return [first, *(made for made in dict.fromkeys(found) if made != first and _worth_trying(operation, sizes, made))]


_FAN_OUTS = ("sum_tree", "trajectories")


def _other_regimes(operation: str, sizes: dict[str, int]) -> Iterator[Any]:
    """What the rule says about batches of another kind: where the border lies depends on the device."""
    if operation == "sum_tree_update" and sizes["n"] <= 16 * 1024:
        single = config.tree_update(sizes["fan_out"], sizes["n"]).single_program
        yield config.tree_update(sizes["fan_out"], 2**20 if single else 1)


def _around(base: Any, sizes: dict[str, int], changes: int, doublings: int) -> Iterator[Any]:
    """``base`` with up to ``changes`` of its fields changed by up to ``doublings`` factors of two."""
    names = [field.name for field in dataclasses.fields(base)]
    others = {name: list(_other_values(name, getattr(base, name), sizes, doublings)) for name in names}
    for number in range(1, changes + 1):
        for changed in itertools.combinations(names, number):
            for values in itertools.product(*(others[name] for name in changed)):
                yield dataclasses.replace(base, **dict(zip(changed, values, strict=True)))


def _other_values(name: str, value: int, sizes: dict[str, int], doublings: int) -> Iterator[int]:
    # Whether one program runs all stages belongs to the regimes: the other fields follow from it.
    if name == "single_program":
        return
    if name == "block_envs":
        # 0 is a launch a stage; nothing lies halfway to it.
        envs = min(config.ceil_power(sizes["envs"]), 64)
        yield from sorted({0, min(envs, 8), envs} - {value})
        return
    for power in range(1, doublings + 1):
        yield value << power
        if value >> power:
            yield value >> power


def _worth_trying(operation: str, sizes: dict[str, int], made: Any) -> bool:
    space = SPACES[operation]
    own = {name: sizes[name] for name in space.sizes}
    if invalid(space, own, dataclasses.asdict(made)):
        return False
    threads = 32 * getattr(made, "num_warps", 16)
    return space.tile(own, made) <= THREAD_ELEMENTS * threads
