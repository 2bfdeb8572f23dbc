"""Launches the trajectory index's kernels.

Grids follow from the number of steps written or of slices asked for. Only the device knows the cursor and the flags.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton.language as tl
from torch import Tensor

from gpubuf.kernels import config
from gpubuf.kernels._launching import all_registers, cdiv, launch
from gpubuf.kernels._registry import check_devices, device_name
from gpubuf.kernels.config import IndexConfig, SliceConfig
from gpubuf.kernels.rows import DTYPES
from gpubuf.kernels.trajectories import (
    Slices,
    bit_levels,
    eligible_words,
    level_sizes,
    new_slices,
    oldest_touched,
    touched_rows,
)
from gpubuf.kernels.trajectories import _triton as readers
from gpubuf.kernels.trajectories import _triton_update as writers
from gpubuf.kernels.trajectories._check import (
    check_bounds,
    check_draw,
    check_eligible,
    check_index,
    check_returns,
    check_signals,
    check_slices,
)

TOP_NODES = 512
"""A level of sums with no more nodes than this is left to the one program that also does the levels above."""

UPDATE_REGISTERS = 128
"""Of a thread of the program that does all stages: it uses 72 to 118, and would spill some of fewer."""

SUMS_WARPS = 4
"""Warps of a program that computes sums, and nothing else."""


class Shape(NamedTuple):
    """Sizes of an index over ``steps`` steps of ``envs`` environments.

    Attributes:
        slots: words of an environment on every level of ``ends``.
        words: words of level 0, all environments.
        depth: levels of ``sums`` above the weights.
        root: the place of the root in ``sums``.
        shift: log2 of the fan-out.
    """

    steps: int
    envs: int
    slots: tuple[int, ...]
    words: int
    depth: int
    root: int
    shift: int

    def nodes(self, level: int) -> int:
        """Nodes of a level of ``sums``."""
        return -(-self.words // (1 << (level * self.shift)))


@functools.lru_cache(maxsize=256)
def shape_of(steps: int, envs: int, fan_out: int) -> Shape:
    """Sizes of an index over ``steps`` steps of ``envs`` environments."""
    sizes = level_sizes(steps, envs, fan_out)
    slots = tuple(words // envs for words in bit_levels(steps, envs))
    return Shape(steps, envs, slots, slots[0] * envs, len(sizes) - 1, sum(sizes) - 1, fan_out.bit_length() - 1)


def run_bounds(n: int, slots: tuple[int, ...]) -> list[int]:
    """For every level of ``ends``, in how many slots ``n`` steps and the one before them can lie, wherever they are.

    Partial ones are the first, the last, and that before the seam.
    """
    bounds, positions = [], n + 1
    for count in slots:
        positions = min(positions, (positions + 125) // 64 + 1, count)
        bounds.append(positions)
    return bounds


def run_bytes(n: int, steps: int) -> int:
    """In how many bytes of an environment the end flags of ``n`` steps can lie."""
    return 8 * -(-steps // 64) if n >= steps else min(n, (n + 13) // 8 + 1, -(-steps // 8))


def _launch_sums(sums: Tensor, shape: Shape, chosen: IndexConfig) -> None:
    """Recompute all sums above the weights: a launch for each wide level, one for all the others."""
    how = {"SHIFT": shape.shift, "BLOCK_NODES": chosen.block_nodes, "num_warps": SUMS_WARPS}
    level = 1
    while level < shape.depth and (nodes := shape.nodes(level)) > TOP_NODES:
        launch(writers.trajectories_sums_kernel, cdiv(nodes, chosen.block_nodes), sums, level, shape.words, **how)
        level += 1
    launch(writers.trajectories_top_kernel, 1, sums, level, shape.depth, shape.words, **how)


def update(ends: Tensor, sums: Tensor | None, ring: Tensor, signals: Tensor, by_id: bool, n: int, *index: int) -> None:
    """See :data:`gpubuf.kernels.trajectories.update`."""
    check_index(ends, sums, ring, *index)
    steps, envs, fan_out, *rule = index
    n_signals = check_signals(signals, by_id, n)
    check_devices(ends, sums, ring, signals)
    if n == 0:
        return
    n = min(n, steps)
    shape = shape_of(steps, envs, fan_out)
    # Weights are those of the oldest steps too.
    words = run_bounds(min(n + rule[5], steps), shape.slots)[0]
    chosen = config.index_update(fan_out, n, words, envs, by_id, device_name(ends.device))
    how = {"BY_ID": by_id, "SPAN": config.index_span(n, by_id)}
    if chosen.block_envs:
        sizes = (n_signals, n, words, shape.depth, steps, envs, *rule[:4], rule[5])
        programs = cdiv(envs, chosen.block_envs)
        how |= {"LEVELS": len(shape.slots), "HAS_SUMS": sums is not None, "BY_TRANSITION": rule[4]}
        how |= {"TOGETHER": programs > 1, "SHIFT": shape.shift}
        for name in ("block_envs", "block_bytes", "block_weights"):
            how[name.upper()] = getattr(chosen, name)
        how.update(num_warps=chosen.num_warps, maxnreg=UPDATE_REGISTERS)
        tensors = ends, ends if sums is None else sums, ring, signals
        launch(writers.trajectories_update_envs_kernel, programs, *tensors, *sizes, **how)
        if n == steps and sums is not None:
            _launch_sums(sums, shape, chosen)
        return
    block, how = chosen.block_bytes, {**how, "num_warps": chosen.num_warps}
    programs = cdiv(run_bytes(n + by_id, steps) * envs, block)
    sizes = (n_signals, n, steps, envs)
    launch(writers.trajectories_bits_kernel, programs, ends, ring, signals, *sizes, **how, BLOCK_BYTES=block)
    del how["SPAN"]
    for level, count in enumerate(run_bounds(n, shape.slots)[:-1], 1):
        programs = cdiv((64 * shape.slots[level] if n == steps else count) * envs, block)
        sizes = (n, level, steps, envs)
        launch(writers.trajectories_bits_above_kernel, programs, ends, ring, *sizes, **how, BLOCK_WORDS=block)
    if sums is not None:
        _launch_weights(ends, sums, ring, n, words, rule, shape, chosen)


def _launch_weights(
    ends: Tensor, sums: Tensor, ring: Tensor, n: int, words: int, rule: Sequence[int], shape: Shape, chosen: IndexConfig
) -> None:
    """Recompute the weights of the newest ``n`` steps, in ``words`` words, and the sums above them."""
    how = {"LEVELS": len(shape.slots), "BY_TRANSITION": rule[4], "SHIFT": shape.shift}
    how.update(BLOCK_WEIGHTS=chosen.block_weights, num_warps=chosen.num_warps)
    sizes = (n, words, shape.depth, shape.steps, shape.envs, *rule[:4], rule[5])
    programs = cdiv((words + (n < shape.steps)) * shape.envs, chosen.block_weights)
    launch(writers.trajectories_weights_kernel, programs, ends, sums, ring, *sizes, **how)
    if n == shape.steps:
        _launch_sums(sums, shape, chosen)


def resum(ends: Tensor, sums: Tensor, ring: Tensor, *index: int) -> None:
    """See :data:`gpubuf.kernels.trajectories.resum`."""
    check_index(ends, sums, ring, *index)
    check_devices(ends, sums, ring)
    steps, envs, fan_out, *rule = index
    shape = shape_of(steps, envs, fan_out)
    words = shape.slots[0]
    chosen = config.index_update(fan_out, steps, words, envs, False, device_name(ends.device))
    _launch_weights(ends, sums, ring, steps, words, rule, shape, chosen)


def draw(ends: Tensor, sums: Tensor, ring: Tensor, rng: Tensor, rank: Tensor | None, n: int, *index: int) -> Slices:
    """See :data:`gpubuf.kernels.trajectories.draw`."""
    check_index(ends, sums, ring, *index)
    check_draw(rng, rank, n)
    check_devices(ends, sums, ring, rng, rank)
    steps, envs, fan_out, *rule, by_transition, past = index
    outputs = new_slices(ends, n, rule[0])
    if n == 0:
        return outputs
    shape = shape_of(steps, envs, fan_out)
    chosen = config.index_draw(fan_out, n, rule[0], device_name(ends.device))
    tensors = (ends, sums, ring, rng, ring if rank is None else rank, *outputs)
    sizes = (n, shape.words, shape.root, shape.depth, steps, envs, *rule, past)
    how = {"LEVELS": len(shape.slots), "HAS_RANK": rank is not None, "BY_TRANSITION": by_transition}
    how |= {"SHIFT": shape.shift, **_blocks(chosen)}
    launch(readers.trajectories_draw_kernel, cdiv(n, chosen.block_slices), *tensors, *sizes, **how)
    return outputs


def _blocks(chosen: SliceConfig) -> dict[str, int]:
    return {"BLOCK_SLICES": chosen.block_slices, "BLOCK_STEPS": chosen.block_steps, "num_warps": chosen.num_warps}


def slices(ends: Tensor, ring: Tensor, start: Tensor, slice_len: int, steps: int, envs: int) -> Slices:
    """See :data:`gpubuf.kernels.trajectories.slices`."""
    n = check_slices(ends, ring, start, slice_len, steps, envs)
    check_devices(ends, ring, start)
    outputs = new_slices(ends, n, slice_len)
    if n:
        chosen = config.index_slices(n, slice_len)
        sizes, how = (n, slice_len, steps, envs), {"LEVELS": len(bit_levels(steps, envs)), **_blocks(chosen)}
        tensors, programs = (ends, ring, start, *outputs), cdiv(n, chosen.block_slices)
        launch(readers.trajectories_slices_kernel, programs, *tensors, *sizes, **how)
    return outputs


BLOCK_ROWS = 128


def bounds(ends: Tensor, ring: Tensor, row: Tensor, steps: int, envs: int) -> Tensor:
    """See :data:`gpubuf.kernels.trajectories.bounds`."""
    n = check_bounds(ends, ring, row, steps, envs)
    check_devices(ends, ring, row)
    out = torch.empty((3, n), dtype=torch.int64, device=ends.device)
    if n:
        arguments = (ends, ring, row, out, n, steps, envs)
        how = {"LEVELS": len(bit_levels(steps, envs)), "BLOCK_ROWS": BLOCK_ROWS, "maxnreg": all_registers(4)}
        launch(readers.trajectories_bounds_kernel, cdiv(n, BLOCK_ROWS), *arguments, **how)
    return out


ELIGIBLE_WORDS = 2
"""Words of the bitmap of eligible starts that a program computes, 64 searches each."""


def update_eligible(
    eligible: Tensor, ends: Tensor, ring: Tensor, n: int, need: int, starts_too: bool, steps: int, envs: int,
    before: int = 0, past: int = 0,
) -> Tensor:  # fmt: skip
    """See :data:`gpubuf.kernels.trajectories.update_eligible`."""
    check_eligible(eligible, ends, ring, n, need, steps, envs, before, past)
    check_devices(eligible, ends, ring)
    n_rows, edge = touched_rows(n, need, steps, envs, before, past), oldest_touched(before, past, steps)
    rows = torch.empty(n_rows, dtype=torch.int64, device=eligible.device)
    # Partial at both ends, and before the seam.
    run = min((n_rows - 1) // 64 + 3, eligible_words(steps * envs))
    sizes = (n_rows, n_rows // envs, edge, need, before, past, run, steps, envs)
    programs = cdiv(run, ELIGIBLE_WORDS)
    how = {"LEVELS": len(bit_levels(steps, envs)), "STARTS_TOO": starts_too, "LOOKS_BACK": before + past > 0}
    # Two searches would spill some, unless a compiler of today is told that they are there.
    registers = all_registers(4) if before + past else None
    launch(
        writers.trajectories_update_eligible_kernel, programs, eligible, ends, ring, rows, *sizes,
        maxnreg=registers, **how, BLOCK_WORDS=ELIGIBLE_WORDS,
    )  # fmt: skip
    return rows


RETURN_STEPS = 128
"""Steps that a program of returns scans at a time, in one warp."""


def update_returns(
    returns: Tensor, ends: Tensor, ring: Tensor, rewards: Tensor, rule: Tensor, dtype: int, n: int, *shape: int
) -> None:
    """See :data:`gpubuf.kernels.trajectories.update_returns`."""
    elements = check_returns(returns, ends, ring, rewards, rule, dtype, n, *shape)
    steps, envs = shape
    slots = tuple(words // envs for words in bit_levels(steps, envs))
    programs = run_bounds(min(n, steps), slots)[0] * envs * elements
    if n == 0 or programs == 0:
        return
    # Booleans are the bytes that they are.
    stored = "uint8" if DTYPES[dtype] is torch.bool else str(DTYPES[dtype]).removeprefix("torch.")
    how = {"LEVELS": len(slots), "DTYPE": getattr(tl, stored), "BLOCK_STEPS": RETURN_STEPS, "num_warps": 1}
    tensors, sizes = (returns, ends, ring, rewards, rule), (min(n, steps), steps, envs, elements)
    launch(writers.trajectories_update_returns_kernel, programs, *tensors, *sizes, **how)
