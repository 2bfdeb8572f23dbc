"""The configurations of launches: a dataclass for each kind, and the values that the kernels can run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from gpubuf.kernels._tuned import Space


@dataclass(frozen=True)
class RowsConfig:
    """How a copy of rows is cut up.

    Attributes:
        tile: elements of 1 to 16 bytes that a program copies at a time, and rows of which it writes the index.
        num_warps: warps of a program.
    """

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
        block_bytes: bytes of end flags, of eight steps each, that a program computes at a time.
        block_weights: weights that a program computes at a time.
        block_nodes: sums that a program recomputes at a time.
        num_warps: warps of a program.
    """

    block_envs: int
    block_bytes: int
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


@dataclass(frozen=True)
class TileConfig:
    """How a kernel over a matrix is launched.

    Attributes:
        block_rows: rows that a program holds at a time.
        block_columns: columns of one program.
        num_warps: warps of a program.
    """

    block_rows: int
    block_columns: int
    num_warps: int


# Spaces


def _rows_refusal(config: RowsConfig) -> str:
    return "" if config.tile >= 16 else f"a tile has at least 16 elements, not {config.tile}"


def _index_refusal(config: IndexConfig) -> str:
    fits = config.block_envs >= 0 and config.block_envs & (config.block_envs - 1) == 0
    return "" if fits else f"block_envs must be 0 or a power of two, not {config.block_envs}"


def _fan_out_refusal(config: FanOut) -> str:
    return "" if 2 <= config.fan_out <= 1024 else f"the fan-out must be in 2 .. 1024, not {config.fan_out}"


def _index_tile(sizes: Mapping[str, int], config: IndexConfig) -> int:
    # A thread reads the flags of a byte side by side; of a single step one, but a point for it counts for a few too.
    return max(8 * config.block_bytes, config.block_weights, config.block_envs, sizes["fan_out"] * config.block_nodes)


def _slices_tile(sizes: Mapping[str, int], config: SliceConfig) -> int:
    return config.block_slices * max(config.block_steps, sizes["fan_out"])


def _block_tile(sizes: Mapping[str, int], config: BlockConfig) -> int:
    return config.block


def _rows_tile(name: str) -> Callable[[Mapping[str, int], BlockConfig], int]:
    """The elements of whole rows, as wide as the size called ``name``, rounded up to a power of two."""
    return lambda sizes, config: config.block << max(sizes[name] - 1, 0).bit_length()


SPACES: dict[str, Space] = {
    "rows_copy": Space(
        ("rows",),
        ("n_bytes",),
        RowsConfig,
        tile=lambda sizes, config: config.tile,
        refusal=_rows_refusal,
    ),
    "sum_tree": Space(
        ("sum_tree",), ("capacity",), FanOut, tile=lambda sizes, config: config.fan_out, refusal=_fan_out_refusal
    ),
    "sum_tree_update": Space(
        ("sum_tree",),
        ("fan_out", "n"),
        UpdateConfig,
        tile=lambda sizes, config: max(config.block_entries, config.block_nodes * sizes["fan_out"]),
        exact=("fan_out",),
    ),
    "sum_tree_draw": Space(
        ("sum_tree",),
        ("fan_out", "n"),
        DrawConfig,
        tile=lambda sizes, config: config.block_draws * sizes["fan_out"],
        exact=("fan_out",),
    ),
    "trajectories": Space(
        ("trajectories",), ("words",), FanOut, tile=lambda sizes, config: config.fan_out, refusal=_fan_out_refusal
    ),
    "trajectories_update": Space(
        ("trajectories",),
        ("fan_out", "n", "envs", "by_id"),
        IndexConfig,
        tile=_index_tile,
        exact=("fan_out", "by_id"),
        free=("block_envs",),
        refusal=_index_refusal,
    ),
    "trajectories_draw": Space(
        ("trajectories",), ("fan_out", "n", "slice_len"), SliceConfig, tile=_slices_tile, exact=("fan_out",)
    ),
    "tanh_normal_sample": Space(("tanh_normal",), ("n", "width"), BlockConfig, tile=_block_tile),
    "tanh_normal_backward": Space(("tanh_normal",), ("n",), BlockConfig, tile=_block_tile),
    "loss_rows": Space(("td", "sac", "discrete_sac"), ("n",), BlockConfig, tile=_block_tile),
    "atom_rows": Space(("categorical",), ("n", "atoms"), BlockConfig, tile=_rows_tile("atoms")),
    "norm_rows": Space(("norms",), ("n", "width"), BlockConfig, tile=_rows_tile("width")),
    "norm_columns": Space(
        ("norms",),
        ("n", "width"),
        TileConfig,
        tile=lambda sizes, config: config.block_rows * config.block_columns,
    ),
}
"""Every operation that can be tuned, by its name in tuned files."""
