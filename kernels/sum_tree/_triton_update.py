"""The sum tree on the GPU: the kernels of updates, marks and refreshes.

Arguments that kernels share are listed in :mod:`gpubuf.kernels.sum_tree._triton` and ``_triton_stages``.
"""

import triton
import triton.language as tl

from gpubuf.kernels.sum_tree._triton import level_count, level_start, level_up
from gpubuf.kernels.sum_tree._triton_stages import (
    all_levels,
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


@triton.jit(
    do_not_specialize=["n", "capacity"],
    do_not_specialize_on_alignment=["index_ptr", "priority_ptr", "generation_ptr", "weight_ptr"],
)
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
    capacity = capacity.to(tl.int64)
    _, claims, weight = stage_claim(
        leaves_ptr,
        scalars_ptr,
        ring_ptr,
        index_ptr,
        priority_ptr,
        generation_ptr,
        i,
        n,
        capacity,
        HAS_GENERATION,
    )
    tl.store(weight_ptr + i, weight, mask=claims)


@triton.jit(
    do_not_specialize=["n", "capacity", "n_nodes"],
    do_not_specialize_on_alignment=["index_ptr"],
)
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
    stage_mark(leaves_ptr, index_ptr, weight, i, n, capacity.to(tl.int64))


@triton.jit(
    do_not_specialize=["n", "capacity", "n_nodes"],
    do_not_specialize_on_alignment=["index_ptr"],
)
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
    capacity = capacity.to(tl.int64)
    n_nodes = n_nodes.to(tl.int64)
    stage_refresh_leaves(
        leaves_ptr,
        nodes_ptr,
        eligible_ptr,
        weight_ptr,
        index_ptr,
        i,
        n,
        capacity,
        n_nodes,
        0,
        level_up(capacity, SHIFT),
        HAS_ELIGIBLE,
        HAS_TAGS,
        SHIFT,
    )


@triton.jit(
    do_not_specialize=["n", "capacity", "n_nodes", "level"],
    do_not_specialize_on_alignment=["index_ptr"],
)
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
    stage_refresh(nodes_ptr, index_ptr, i, n, capacity, n_nodes.to(tl.int64), level, below, count, 0, count, SHIFT)


@triton.jit(
    do_not_specialize=["n", "capacity", "n_nodes", "first_level", "depth"],
    do_not_specialize_on_alignment=["index_ptr"],
)
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
    capacity = capacity.to(tl.int64)
    n_nodes = n_nodes.to(tl.int64)
    levels_above(nodes_ptr, index_ptr, n, capacity, n_nodes, first_level, depth, 0, capacity - 1, SHIFT, BLOCK_NODES)


@triton.jit(
    do_not_specialize=["n", "capacity", "n_nodes", "depth"],
    do_not_specialize_on_alignment=["index_ptr", "priority_ptr", "generation_ptr"],
)
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
    capacity = capacity.to(tl.int64)
    n_nodes = n_nodes.to(tl.int64)
    entries = tl.arange(0, BLOCK_ENTRIES).to(tl.int64)
    for start in range(0, n, BLOCK_ENTRIES):
        i = start + entries
        row, claims, weight = stage_claim(
            leaves_ptr,
            scalars_ptr,
            ring_ptr,
            index_ptr,
            priority_ptr,
            generation_ptr,
            i,
            n,
            capacity,
            HAS_GENERATION,
        )
        # All tags of this turn are set, and then all of its weights: a later turn tags what an earlier one has written.
        tl.debug_barrier()
        stage_resolve(leaves_ptr, i, row, claims, weight)
        tl.debug_barrier()
    last = capacity - 1
    level = 2
    if (n <= BLOCK_NODES) & (level_count(capacity, 2, SHIFT) > n):
        first_two_levels(
            leaves_ptr, nodes_ptr, eligible_ptr, index_ptr, n, capacity, n_nodes, HAS_ELIGIBLE, SHIFT, BLOCK_NODES
        )
        level = 3
    else:
        first_level(
            leaves_ptr,
            nodes_ptr,
            eligible_ptr,
            index_ptr,
            n,
            capacity,
            n_nodes,
            0,
            last,
            HAS_ELIGIBLE,
            SHIFT,
            BLOCK_NODES,
        )
    levels_above(nodes_ptr, index_ptr, n, capacity, n_nodes, level, depth, 0, last, SHIFT, BLOCK_NODES)


@triton.jit(
    do_not_specialize=["n", "capacity", "n_nodes", "depth"],
    do_not_specialize_on_alignment=["index_ptr"],
)
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
    capacity = capacity.to(tl.int64)
    n_nodes = n_nodes.to(tl.int64)
    weight = new_weight(nodes_ptr, scalars_ptr, n_nodes, WITHIN_BUFFER)
    entries = tl.arange(0, BLOCK_ENTRIES).to(tl.int64)
    for start in range(0, n, BLOCK_ENTRIES):
        stage_mark(leaves_ptr, index_ptr, weight, start + entries, n, capacity)
    first, last = run_of(index_ptr, n, capacity, BLOCK_ENTRIES)
    all_levels(
        leaves_ptr,
        nodes_ptr,
        eligible_ptr,
        index_ptr,
        n,
        capacity,
        n_nodes,
        depth,
        first,
        last,
        HAS_ELIGIBLE,
        SHIFT,
        BLOCK_NODES,
    )


@triton.jit(
    do_not_specialize=["n", "capacity", "n_nodes", "depth"],
    do_not_specialize_on_alignment=["index_ptr"],
)
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
    capacity = capacity.to(tl.int64)
    n_nodes = n_nodes.to(tl.int64)
    first, last = run_of(index_ptr, n, capacity, BLOCK_ENTRIES)
    all_levels(
        leaves_ptr,
        nodes_ptr,
        eligible_ptr,
        index_ptr,
        n,
        capacity,
        n_nodes,
        depth,
        first,
        last,
        HAS_ELIGIBLE,
        SHIFT,
        BLOCK_NODES,
    )
