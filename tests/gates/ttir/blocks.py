"""Launches of many small programs, whatever the sizes, so that tests of ordinary size see several of every kernel."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from unittest import mock

BLOCKS = ("default", "stages", "envs")
"""What to launch with: the rules of the library; small blocks, with an update of a trajectory index in a launch a
stage; small blocks, with two environments a program."""


@contextlib.contextmanager
def blocks(which: str) -> Iterator[None]:
    """Launch with one of :data:`BLOCKS`."""
    from gpubuf.kernels import config
    from gpubuf.kernels.config import BlockConfig, DrawConfig, IndexConfig, RowsConfig, SliceConfig, UpdateConfig
    from gpubuf.kernels.rows import _launch as rows_launch
    from gpubuf.kernels.sum_tree import _launch as sum_tree_launch
    from gpubuf.kernels.trajectories import _launch

    if which == "default":
        yield
        return
    with (
        mock.patch.object(rows_launch, "SPREAD", 1),
        mock.patch.object(rows_launch, "WIDE_KEY", 0),
        mock.patch.object(_launch, "ELIGIBLE_WORDS", 1),
        mock.patch.object(_launch, "BLOCK_ROWS", 8),
        mock.patch.object(_launch, "RETURN_STEPS", 4),
        mock.patch.object(sum_tree_launch, "TOP_NODES", 2),
        mock.patch.object(config, "index_slices", return_value=SliceConfig(8, 8, 1)),
        config.using(
            rows_copy=RowsConfig(16, 1),
            sum_tree_update=UpdateConfig(single_program=False, block_entries=8, block_nodes=1, num_warps=1),
            sum_tree_draw=DrawConfig(4, 1),
            trajectories_update=IndexConfig(2 if which == "envs" else 0, 2, 2, 1, 1),
            trajectories_draw=SliceConfig(8, 8, 1),
            loss_rows=BlockConfig(32, 1),
            tanh_normal_backward=BlockConfig(32, 1),
        ),
    ):
        yield
