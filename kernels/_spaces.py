"""What can be configured about the launches: a dataclass for each kind, and what of it the kernels can run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from gpubuf.kernels._tuned import Space

LARGEST_TILE = 2**14
"""Elements that a program may hold at a time: beyond, a kernel spills, and takes minutes to compile."""

LARGEST_WARPS = 16
"""Warps of a program: a block has 1024 threads at most, and a warp 64 of them on some GPUs."""


@dataclass(frozen=True)
class RowsConfig:
    """How a copy of rows is cut up.

    Attributes:
        span: bytes that one program copies; a multiple of 16.
        tile: elements that a program copies at a time, and rows of which it writes the index.
        num_warps: warps of a program.
    """

    span: int
    tile: int
    num_warps: int


@dataclass(frozen=True)
class FanOut:
    """The shape of a tree.

    Attributes:
        fan_out: children of a node.
    """

    fan_out: int


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


@dataclass(frozen=True)
class BlockConfig:
    """How a kernel over a list of elements, or of rows, is launched.

    Attributes:
        block: elements, or rows, of one program.
        num_warps: warps of a program.
    """

    block: int
    num_warps: int


# What can be tuned


def _refusal(largest: Callable[[Mapping[str, int], Any], int]) -> Callable[[Mapping[str, int], Any], str]:
    """Refuses configurations whose largest tile, in elements, is too large."""

    def refusal(sizes: Mapping[str, int], config: Any) -> str:
        # A file may name any fan-out.
        if not 1 <= sizes.get("fan_out", 1) <= LARGEST_TILE:
            return f"there is no fan-out {sizes['fan_out']}"
        if getattr(config, "num_warps", 1) > LARGEST_WARPS:
            return f"num_warps may be {LARGEST_WARPS} at most, not {config.num_warps}"
        elements = largest(sizes, config)
        return f"its tiles have {elements} elements, at most {LARGEST_TILE} are allowed" * (elements > LARGEST_TILE)

    return refusal


def _rows_refusal(sizes: Mapping[str, int], config: RowsConfig) -> str:
    if config.span < 16 or config.span % 16 or config.span > 2**24:
        return f"span must be a multiple of 16 up to 2**24, not {config.span}"
    return _refusal(lambda sizes, config: config.tile)(sizes, config)


def _index_refusal(sizes: Mapping[str, int], config: IndexConfig) -> str:
    if config.block_envs and (config.block_envs < 0 or config.block_envs & (config.block_envs - 1)):
        return f"block_envs must be 0 or a power of two, not {config.block_envs}"
    tiles = (64 * config.block_words, config.block_weights, config.block_envs, sizes["fan_out"] * config.block_nodes)
    return _refusal(lambda sizes, config: max(tiles))(sizes, config)


def _fan_out_refusal(sizes: Mapping[str, int], config: FanOut) -> str:
    return "" if 2 <= config.fan_out <= 1024 else f"the fan-out must be in 2 .. 1024, not {config.fan_out}"


_block_refusal = _refusal(lambda sizes, config: config.block)

SPACES: dict[str, Space] = {
    "rows_copy": Space("rows", ("n_bytes",), RowsConfig, refusal=_rows_refusal, free=("span",)),
    "sum_tree": Space("sum_tree", ("capacity",), FanOut, refusal=_fan_out_refusal),
    "sum_tree_update": Space(
        "sum_tree",
        ("fan_out", "n"),
        UpdateConfig,
        exact=("fan_out",),
        refusal=_refusal(lambda sizes, config: max(config.block_entries, config.block_nodes * sizes["fan_out"])),
    ),
    "sum_tree_draw": Space(
        "sum_tree",
        ("fan_out", "n"),
        DrawConfig,
        exact=("fan_out",),
        refusal=_refusal(lambda sizes, config: config.block_draws * sizes["fan_out"]),
    ),
    "trajectories": Space("trajectories", ("words",), FanOut, refusal=_fan_out_refusal),
    "trajectories_update": Space(
        "trajectories",
        ("fan_out", "n", "envs", "by_id"),
        IndexConfig,
        exact=("fan_out", "by_id"),
        refusal=_index_refusal,
        free=("block_envs",),
    ),
    "trajectories_draw": Space(
        "trajectories",
        ("fan_out", "n", "slice_len"),
        SliceConfig,
        exact=("fan_out",),
        refusal=_refusal(lambda sizes, config: config.block_slices * max(config.block_steps, sizes["fan_out"])),
    ),
    "tanh_normal_sample": Space("tanh_normal", ("n", "width"), BlockConfig, refusal=_block_refusal),
    "tanh_normal_backward": Space("tanh_normal", ("n",), BlockConfig, refusal=_block_refusal),
    "sac_rows": Space("sac", ("n",), BlockConfig, refusal=_block_refusal),
}
"""What can be tuned, by the name under which it stands in tuned files."""
