"""The sum tree on the GPU: the kernels of updates, marks and refreshes.

Arguments that kernels share are listed in :mod:`gpubuf.kernels.sum_tree._triton` and ``_triton_stages``.
"""

import triton.language as tl

from gpubuf.kernels._launching import jit_for_any_size
from gpubuf.kernels.sum_tree._triton import level_count, level_start, level_up
from gpubuf.kernels.sum_tree._triton_stages import (
    first_level,
    first_two_levels,
    levels_above,
    new_weight,
    run_of,
    stage_claim,
    stage_mark,
    stage_refresh,
    stage_refresh_leaves,
    stage_resolve,
)


@jit_for_any_size("index_ptr", "priority_ptr", "generation_ptr", "weight_ptr")
def sum_tree_claim_kernel(
    leaves_ptr,
    scalars_ptr,
    ring_ptr,
    index_ptr,
    priority_ptr,  # float32 [n]
    generation_ptr,  # int64 [n]; not read without HAS_GENERATION
    weight_ptr,
    n,
    capacity,
    HAS_GENERATION: tl.constexpr,
    BLOCK_ENTRIES: tl.constexpr,
):
    """First launch of an update: tag the leaves, compute weights, count what is refused, move the maximum.

    Grid: (cdiv(n, BLOCK_ENTRIES),).
    """
    i = tl.program_id(0).to(tl.int64) * BLOCK_ENTRIES + tl.arange(0, BLOCK_ENTRIES)
    entries = (index_ptr, priority_ptr, generation_ptr if HAS_GENERATION else None, n)
    _, claims, weight = stage_claim(leaves_ptr, scalars_ptr, ring_ptr, entries, i, capacity.to(tl.int64))
    tl.store(weight_ptr + i, weight, mask=claims)


@jit_for_any_size("index_ptr")
def sum_tree_mark_kernel(
    leaves_ptr,
    nodes_ptr,
    scalars_ptr,
    index_ptr,
    n,
    capacity,
    n_nodes,
    WITHIN_BUFFER: tl.constexpr,
    BLOCK_ENTRIES: tl.constexpr,
):
    """Write the weight of a new row into leaves; reads the root. Grid: (cdiv(n, BLOCK_ENTRIES),)."""
    i = tl.program_id(0).to(tl.int64) * BLOCK_ENTRIES + tl.arange(0, BLOCK_ENTRIES)
    weight = new_weight(nodes_ptr, scalars_ptr, n_nodes.to(tl.int64), WITHIN_BUFFER)
    stage_mark(leaves_ptr, (index_ptr, n), weight, i, capacity.to(tl.int64))


@jit_for_any_size("index_ptr")
def sum_tree_refresh_leaves_kernel(
    leaves_ptr,
    nodes_ptr,
    eligible_ptr,
    weight_ptr,
    index_ptr,  # not read where the whole level is recomputed
    n,
    capacity,
    n_nodes,
    HAS_ELIGIBLE: tl.constexpr,
    HAS_TAGS: tl.constexpr,
    SHIFT: tl.constexpr,
    BLOCK_NODES: tl.constexpr,
):
    """Recompute level 1 above rows ``index``. Grid: (cdiv(min(n, nodes of level 1), BLOCK_NODES),).

    With HAS_TAGS it is the second launch of an update: tags become weights.
    """
    i = tl.program_id(0).to(tl.int64) * BLOCK_NODES + tl.arange(0, BLOCK_NODES)
    leaves = (leaves_ptr, eligible_ptr if HAS_ELIGIBLE else None)
    nodes = (nodes_ptr, n_nodes.to(tl.int64), capacity.to(tl.int64))
    within = (0, level_up(nodes[2], SHIFT))
    stage_refresh_leaves(leaves, nodes, (index_ptr, n), i, within, weight_ptr if HAS_TAGS else None, SHIFT)


@jit_for_any_size("index_ptr")
def sum_tree_refresh_kernel(
    nodes_ptr,
    index_ptr,  # not read where the whole level is recomputed
    n,
    capacity,
    n_nodes,
    level,
    SHIFT: tl.constexpr,
    BLOCK_NODES: tl.constexpr,
):
    """Recompute a wide level from 2 up above rows ``index``. Grid: (cdiv(min(n, nodes of the level), BLOCK_NODES),)."""
    capacity = capacity.to(tl.int64)
    i = tl.program_id(0).to(tl.int64) * BLOCK_NODES + tl.arange(0, BLOCK_NODES)
    below = level_start(capacity, level - 1, SHIFT)
    count = level_count(capacity, level, SHIFT)
    nodes = (nodes_ptr, n_nodes.to(tl.int64), capacity)
    stage_refresh(nodes, (index_ptr, n), i, level, below, count, (0, count), SHIFT)


@jit_for_any_size("index_ptr")
def sum_tree_top_kernel(
    nodes_ptr,
    index_ptr,
    n,
    capacity,
    n_nodes,
    first_level,  # 2 or more
    depth,  # inner levels
    SHIFT: tl.constexpr,
    BLOCK_NODES: tl.constexpr,
):
    """Recompute the narrow levels above rows ``index``, from ``first_level`` up to the root. Grid: (1,)."""
    nodes = (nodes_ptr, n_nodes.to(tl.int64), capacity.to(tl.int64))
    levels_above(nodes, (index_ptr, n), (0, nodes[2] - 1), first_level, depth, SHIFT, BLOCK_NODES)


@jit_for_any_size("index_ptr", "priority_ptr", "generation_ptr")
def sum_tree_update_small_kernel(
    leaves_ptr,
    nodes_ptr,
    eligible_ptr,
    scalars_ptr,
    ring_ptr,
    index_ptr,
    priority_ptr,  # float32 [n]
    generation_ptr,  # int64 [n]; not read without HAS_GENERATION
    n,
    capacity,
    n_nodes,
    depth,  # inner levels
    HAS_ELIGIBLE: tl.constexpr,
    HAS_GENERATION: tl.constexpr,
    SHIFT: tl.constexpr,
    BLOCK_ENTRIES: tl.constexpr,
    BLOCK_NODES: tl.constexpr,
):
    """A whole update by one program. Grid: (1,)."""
    leaves = (leaves_ptr, eligible_ptr if HAS_ELIGIBLE else None)
    nodes = (nodes_ptr, n_nodes.to(tl.int64), capacity.to(tl.int64))
    entries = (index_ptr, priority_ptr, generation_ptr if HAS_GENERATION else None, n)
    lane = tl.arange(0, BLOCK_ENTRIES).to(tl.int64)
    for start in range(0, n, BLOCK_ENTRIES):
        i = start + lane
        row, claims, weight = stage_claim(leaves_ptr, scalars_ptr, ring_ptr, entries, i, nodes[2])
        # All tags of this turn are set, and then all of its weights: a later turn tags what an earlier one has written.
        tl.debug_barrier()
        stage_resolve(leaves_ptr, i, row, claims, weight)
        tl.debug_barrier()
    rows = (index_ptr, n)
    run = (0, nodes[2] - 1)
    level = 2
    if (n <= BLOCK_NODES) & (level_count(nodes[2], 2, SHIFT) > n):
        first_two_levels(leaves, nodes, rows, SHIFT, BLOCK_NODES)
        level = 3
    else:
        first_level(leaves, nodes, rows, run, SHIFT, BLOCK_NODES)
    levels_above(nodes, rows, run, level, depth, SHIFT, BLOCK_NODES)


@jit_for_any_size("index_ptr")
def sum_tree_mark_small_kernel(
    leaves_ptr,
    nodes_ptr,
    eligible_ptr,
    scalars_ptr,
    index_ptr,
    n,
    capacity,
    n_nodes,
    depth,  # inner levels
    HAS_ELIGIBLE: tl.constexpr,
    WITHIN_BUFFER: tl.constexpr,
    SHIFT: tl.constexpr,
    BLOCK_ENTRIES: tl.constexpr,
    BLOCK_NODES: tl.constexpr,
):
    """A whole mark by one program. Grid: (1,)."""
    leaves = (leaves_ptr, eligible_ptr if HAS_ELIGIBLE else None)
    nodes = (nodes_ptr, n_nodes.to(tl.int64), capacity.to(tl.int64))
    rows = (index_ptr, n)
    weight = new_weight(nodes_ptr, scalars_ptr, nodes[1], WITHIN_BUFFER)
    lane = tl.arange(0, BLOCK_ENTRIES).to(tl.int64)
    for start in range(0, n, BLOCK_ENTRIES):
        stage_mark(leaves_ptr, rows, weight, start + lane, nodes[2])
    run = run_of(rows, nodes[2], BLOCK_ENTRIES)
    first_level(leaves, nodes, rows, run, SHIFT, BLOCK_NODES)
    levels_above(nodes, rows, run, 2, depth, SHIFT, BLOCK_NODES)


@jit_for_any_size("index_ptr")
def sum_tree_refresh_small_kernel(
    leaves_ptr,
    nodes_ptr,
    eligible_ptr,
    index_ptr,
    n,
    capacity,
    n_nodes,
    depth,  # inner levels
    HAS_ELIGIBLE: tl.constexpr,
    SHIFT: tl.constexpr,
    BLOCK_ENTRIES: tl.constexpr,
    BLOCK_NODES: tl.constexpr,
):
    """All levels above rows ``index`` by one program. Grid: (1,)."""
    leaves = (leaves_ptr, eligible_ptr if HAS_ELIGIBLE else None)
    nodes = (nodes_ptr, n_nodes.to(tl.int64), capacity.to(tl.int64))
    rows = (index_ptr, n)
    run = run_of(rows, nodes[2], BLOCK_ENTRIES)
    first_level(leaves, nodes, rows, run, SHIFT, BLOCK_NODES)
    levels_above(nodes, rows, run, 2, depth, SHIFT, BLOCK_NODES)
