"""The sum tree on the GPU: the kernels of updates, marks and refreshes.

Arguments that kernels share are listed in :mod:`gpubuf.kernels.sum_tree._triton_stages`.
"""

import triton
import triton.language as tl

from gpubuf.kernels.sum_tree._triton import level_start
from gpubuf.kernels.sum_tree._triton_stages import (
    new_weight,
    stage_claim,
    stage_mark,
    stage_refresh,
    stage_refresh_all,
    stage_refresh_leaves,
    stage_resolve,
)


@triton.jit(
    do_not_specialize=["n", "capacity"],
    do_not_specialize_on_alignment=["index_ptr", "priority_ptr", "generation_ptr"],
)
def sum_tree_claim_kernel(
    leaves_ptr,
    hyper_ptr,
    ring_ptr,
    index_ptr,
    priority_ptr,  # float32 [n]
    generation_ptr,  # int64 [n]; not read without HAS_GENERATION
    n,
    capacity,
    HAS_GENERATION: tl.constexpr,
    BLOCK_ENTRIES: tl.constexpr,
):
    """First launch of an update: tag the leaves, count what is refused, move the maximum.

    Grid: (cdiv(n, BLOCK_ENTRIES),).
    """
    i = tl.program_id(0).to(tl.int64) * BLOCK_ENTRIES + tl.arange(0, BLOCK_ENTRIES)
    stage_claim(
        leaves_ptr,
        hyper_ptr,
        ring_ptr,
        index_ptr,
        priority_ptr,
        generation_ptr,
        i,
        n,
        capacity.to(tl.int64),
        HAS_GENERATION,
    )


@triton.jit(
    do_not_specialize=["n", "capacity"],
    do_not_specialize_on_alignment=["index_ptr", "priority_ptr"],
)
def sum_tree_resolve_kernel(
    leaves_ptr,
    hyper_ptr,
    index_ptr,
    priority_ptr,  # float32 [n]
    n,
    capacity,
    BLOCK_ENTRIES: tl.constexpr,
):
    """Second launch of an update: tags become weights. Grid: (cdiv(n, BLOCK_ENTRIES),)."""
    i = tl.program_id(0).to(tl.int64) * BLOCK_ENTRIES + tl.arange(0, BLOCK_ENTRIES)
    stage_resolve(leaves_ptr, hyper_ptr, index_ptr, priority_ptr, i, n, capacity.to(tl.int64))


@triton.jit(
    do_not_specialize=["n", "capacity", "n_nodes"],
    do_not_specialize_on_alignment=["index_ptr"],
)
def sum_tree_mark_kernel(
    leaves_ptr,
    nodes_ptr,
    hyper_ptr,
    index_ptr,
    n,
    capacity,
    n_nodes,
    WITHIN_BUFFER: tl.constexpr,
    BLOCK_ENTRIES: tl.constexpr,
):
    """Write the weight of a new row into leaves; reads the root. Grid: (cdiv(n, BLOCK_ENTRIES),)."""
    i = tl.program_id(0).to(tl.int64) * BLOCK_ENTRIES + tl.arange(0, BLOCK_ENTRIES)
    weight = new_weight(nodes_ptr, hyper_ptr, n_nodes.to(tl.int64), WITHIN_BUFFER)
    stage_mark(leaves_ptr, index_ptr, weight, i, n, capacity.to(tl.int64))


@triton.jit(
    do_not_specialize=["n", "capacity", "n_nodes"],
    do_not_specialize_on_alignment=["index_ptr"],
)
def sum_tree_refresh_leaves_kernel(
    leaves_ptr,
    nodes_ptr,
    legal_ptr,
    index_ptr,  # not read where the whole level is recomputed
    n,
    capacity,
    n_nodes,
    HAS_LEGAL: tl.constexpr,
    SHIFT: tl.constexpr,
    BLOCK_NODES: tl.constexpr,
):
    """Recompute level 1 above rows ``index``. Grid: (cdiv(min(n, nodes of level 1), BLOCK_NODES),)."""
    i = tl.program_id(0).to(tl.int64) * BLOCK_NODES + tl.arange(0, BLOCK_NODES)
    capacity = capacity.to(tl.int64)
    n_nodes = n_nodes.to(tl.int64)
    stage_refresh_leaves(leaves_ptr, nodes_ptr, legal_ptr, index_ptr, i, n, capacity, n_nodes, HAS_LEGAL, SHIFT)


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
    """Recompute a level from 2 up above rows ``index``. Grid: (cdiv(min(n, nodes of the level), BLOCK_NODES),)."""
    capacity = capacity.to(tl.int64)
    i = tl.program_id(0).to(tl.int64) * BLOCK_NODES + tl.arange(0, BLOCK_NODES)
    below = level_start(capacity, level - 1, SHIFT)
    count = (capacity + ((tl.full((), 1, tl.int64) << (level * SHIFT)) - 1)) >> (level * SHIFT)
    stage_refresh(nodes_ptr, index_ptr, i, n, capacity, n_nodes.to(tl.int64), level, below, count, SHIFT)


@triton.jit(
    do_not_specialize=["n", "capacity", "n_nodes", "depth"],
    do_not_specialize_on_alignment=["index_ptr", "priority_ptr", "generation_ptr"],
)
def sum_tree_update_small_kernel(
    leaves_ptr,
    nodes_ptr,
    legal_ptr,
    hyper_ptr,
    ring_ptr,
    index_ptr,
    priority_ptr,  # float32 [n]
    generation_ptr,  # int64 [n]; not read without HAS_GENERATION
    n,
    capacity,
    n_nodes,
    depth,  # inner levels
    HAS_LEGAL: tl.constexpr,
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
        stage_claim(
            leaves_ptr,
            hyper_ptr,
            ring_ptr,
            index_ptr,
            priority_ptr,
            generation_ptr,
            start + entries,
            n,
            capacity,
            HAS_GENERATION,
        )
    # All tags are set.
    tl.debug_barrier()
    for start in range(0, n, BLOCK_ENTRIES):
        stage_resolve(leaves_ptr, hyper_ptr, index_ptr, priority_ptr, start + entries, n, capacity)
    stage_refresh_all(
        leaves_ptr, nodes_ptr, legal_ptr, index_ptr, n, capacity, n_nodes, depth, HAS_LEGAL, SHIFT, BLOCK_NODES
    )


@triton.jit(
    do_not_specialize=["n", "capacity", "n_nodes", "depth"],
    do_not_specialize_on_alignment=["index_ptr"],
)
def sum_tree_mark_small_kernel(
    leaves_ptr,
    nodes_ptr,
    legal_ptr,
    hyper_ptr,
    index_ptr,
    n,
    capacity,
    n_nodes,
    depth,  # inner levels
    HAS_LEGAL: tl.constexpr,
    WITHIN_BUFFER: tl.constexpr,
    SHIFT: tl.constexpr,
    BLOCK_ENTRIES: tl.constexpr,
    BLOCK_NODES: tl.constexpr,
):
    """A whole mark by one program. Grid: (1,)."""
    capacity = capacity.to(tl.int64)
    n_nodes = n_nodes.to(tl.int64)
    weight = new_weight(nodes_ptr, hyper_ptr, n_nodes, WITHIN_BUFFER)
    entries = tl.arange(0, BLOCK_ENTRIES).to(tl.int64)
    for start in range(0, n, BLOCK_ENTRIES):
        stage_mark(leaves_ptr, index_ptr, weight, start + entries, n, capacity)
    stage_refresh_all(
        leaves_ptr, nodes_ptr, legal_ptr, index_ptr, n, capacity, n_nodes, depth, HAS_LEGAL, SHIFT, BLOCK_NODES
    )


@triton.jit(
    do_not_specialize=["n", "capacity", "n_nodes", "depth"],
    do_not_specialize_on_alignment=["index_ptr"],
)
def sum_tree_refresh_small_kernel(
    leaves_ptr,
    nodes_ptr,
    legal_ptr,
    index_ptr,
    n,
    capacity,
    n_nodes,
    depth,  # inner levels
    HAS_LEGAL: tl.constexpr,
    SHIFT: tl.constexpr,
    BLOCK_NODES: tl.constexpr,
):
    """All levels above rows ``index`` by one program. Grid: (1,)."""
    capacity = capacity.to(tl.int64)
    n_nodes = n_nodes.to(tl.int64)
    stage_refresh_all(
        leaves_ptr, nodes_ptr, legal_ptr, index_ptr, n, capacity, n_nodes, depth, HAS_LEGAL, SHIFT, BLOCK_NODES
    )
