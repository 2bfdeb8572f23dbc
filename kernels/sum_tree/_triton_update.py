"""The sum tree on the GPU: updates, marks, and the nodes above them.

A helper whose name starts with ``_stage`` is what one launch does to one block of entries or nodes. For large
batches every stage is a launch of its own; for small ones a single program runs them all, a barrier between.

Arguments that all kernels share:

* ``leaves_ptr``: float32 [n_leaves], the capacity rounded up to a multiple of the fan-out F = 1 << SHIFT;
* ``nodes_ptr``: float64 [3, n_nodes], planes sum, minimum, maximum; level 1 first, the root last;
* ``hyper_ptr``: float64 [5] = (alpha, beta, eps, max_priority, refused);
* ``legal_ptr``: int64 [cdiv(capacity, 64)], row r is bit r % 64 of word r // 64; not read without HAS_LEGAL;
* ``ring_ptr``: int64 [4] = (written, size, ticket, faults);
* ``index_ptr``: int64 [n], rows; -1 is ignored.
"""

import triton
import triton.language as tl

from gpubuf.kernels.sum_tree._triton import counting, level_start, level_up, weight_of


@triton.jit
def _nodes_above(index_ptr, i, n, capacity, level_shift, count):
    """The node that entry ``i`` has to recompute in a level of ``count`` nodes, and whether it has to.

    An entry leaves a node to the entry right before it if that has the same one. A level with no more nodes
    than there are entries is recomputed as a whole: then ``i`` is the node itself.
    """
    dense = count <= n
    listed = (i < n) & (count > n)
    row = tl.load(index_ptr + i, mask=listed, other=-1)
    row_before = tl.load(index_ptr + i - 1, mask=listed & (i > 0), other=-1)
    node = tl.where((row >= 0) & (row < capacity), row >> level_shift, -1)
    node_before = tl.where((row_before >= 0) & (row_before < capacity), row_before >> level_shift, -1)
    needed = tl.where(dense, i < count, (node >= 0) & (node != node_before))
    return tl.where(dense, i, node), needed


@triton.jit
def _stage_claim(
    leaves_ptr,
    hyper_ptr,
    ring_ptr,
    index_ptr,
    priority_ptr,
    generation_ptr,
    i,
    n,
    capacity,
    HAS_GENERATION: tl.constexpr,
):
    """Every valid entry i tags its leaf with (sign bit | i), by an unsigned maximum: the last one stays.

    Weights are never negative, so that a tag beats every weight, and a later tag an earlier one.
    """
    row = tl.load(index_ptr + i, mask=i < n, other=-1)
    live = (row >= 0) & (row < capacity) & (row < tl.load(ring_ptr + 1))
    if HAS_GENERATION:
        written = tl.load(ring_ptr)
        current = written // capacity + (row < written % capacity).to(tl.int64)
        live = live & (tl.load(generation_ptr + i, mask=i < n, other=0) == current)
    priority = tl.load(priority_ptr + i, mask=live, other=0.0)
    claims = live & (priority >= 0.0) & (priority <= 3.4028234663852886e38)
    bits_ptr = leaves_ptr.to(tl.pointer_type(tl.uint32), bitcast=True)
    tl.atomic_max(bits_ptr + row, i.to(tl.uint32) | 0x80000000, mask=claims)

    refused = (live ^ claims) | (row < -1) | (row >= capacity)
    n_refused = tl.sum(refused.to(tl.int32), axis=0)
    tl.atomic_add(hyper_ptr + 4, n_refused.to(tl.float64), mask=n_refused > 0)
    # Bit patterns of non-negative floats are ordered as the numbers are, above that of the initial -1.0.
    largest = tl.max(tl.where(claims, tl.abs(priority).to(tl.float64), -1.0), axis=0)
    order_ptr = hyper_ptr.to(tl.pointer_type(tl.int64), bitcast=True)
    tl.atomic_max(order_ptr + 3, largest.to(tl.int64, bitcast=True), mask=largest >= 0.0)


@triton.jit
def _stage_resolve(leaves_ptr, hyper_ptr, index_ptr, priority_ptr, i, n, capacity):
    """The entry whose tag has stayed puts its weight in the tag's place; what anyone reads is a tag or a weight."""
    row = tl.load(index_ptr + i, mask=i < n, other=-1)
    in_range = (row >= 0) & (row < capacity)
    bits_ptr = leaves_ptr.to(tl.pointer_type(tl.uint32), bitcast=True)
    # An entry that has lost reads the last one's tag or weight, and neither is its own tag.
    # TTIR race (sum_tree_resolve_kernel): so it does not matter which.
    # TTIR barrier (sum_tree_resolve_kernel, sum_tree_update_small_kernel): so it does not matter which.
    bits = tl.load(bits_ptr + row, mask=in_range, other=0)
    last = in_range & (bits == (i.to(tl.uint32) | 0x80000000))
    priority = tl.load(priority_ptr + i, mask=last, other=0.0)
    weight = weight_of(priority, tl.load(hyper_ptr), tl.load(hyper_ptr + 2))
    tl.store(leaves_ptr + row, weight.to(tl.float32), mask=last)


@triton.jit
def _stage_mark(leaves_ptr, index_ptr, weight, i, n, capacity):
    """Give rows ``index`` one weight; a row named twice gets it twice."""
    row = tl.load(index_ptr + i, mask=i < n, other=-1)
    tl.store(leaves_ptr + row, weight, mask=(row >= 0) & (row < capacity))


@triton.jit
def _stage_refresh_leaves(
    leaves_ptr,
    nodes_ptr,
    legal_ptr,
    index_ptr,
    i,
    n,
    capacity,
    n_nodes,
    HAS_LEGAL: tl.constexpr,
    SHIFT: tl.constexpr,
):
    """Recompute level-1 nodes from their leaves."""
    fan_out: tl.constexpr = 1 << SHIFT
    node, needed = _nodes_above(index_ptr, i, n, capacity, SHIFT, level_up(capacity, SHIFT))
    leaf = (node << SHIFT)[:, None] + tl.arange(0, fan_out)[None, :]
    weight = tl.load(leaves_ptr + leaf, mask=needed[:, None], other=0.0).to(tl.float64)
    if HAS_LEGAL:
        # The bits of the padding, which weighs nothing, may not exist.
        word = tl.load(legal_ptr + (leaf >> 6), mask=needed[:, None] & (leaf < capacity), other=0)
        weight = counting(weight, word, leaf)
    tl.store(nodes_ptr + node, tl.sum(weight, axis=1), mask=needed)
    least = tl.min(tl.where(weight > 0.0, weight, float("inf")), axis=1)
    tl.store(nodes_ptr + n_nodes + node, least, mask=needed)
    tl.store(nodes_ptr + 2 * n_nodes + node, tl.max(weight, axis=1), mask=needed)


@triton.jit
def _stage_refresh(nodes_ptr, index_ptr, i, n, capacity, n_nodes, level, below, count, SHIFT: tl.constexpr):
    """Recompute nodes of ``level`` (2 or more), which has ``count`` of them, from the level that starts ``below``."""
    fan_out: tl.constexpr = 1 << SHIFT
    node, needed = _nodes_above(index_ptr, i, n, capacity, level * SHIFT, count)
    child = nodes_ptr + below + (node << SHIFT)[:, None] + tl.arange(0, fan_out)[None, :]
    target = nodes_ptr + below + (count << SHIFT) + node
    total = tl.load(child, mask=needed[:, None], other=0.0)
    tl.store(target, tl.sum(total, axis=1), mask=needed)
    least = tl.load(child + n_nodes, mask=needed[:, None], other=float("inf"))
    tl.store(target + n_nodes, tl.min(least, axis=1), mask=needed)
    largest = tl.load(child + 2 * n_nodes, mask=needed[:, None], other=0.0)
    tl.store(target + 2 * n_nodes, tl.max(largest, axis=1), mask=needed)


@triton.jit
def _stage_refresh_all(
    leaves_ptr,
    nodes_ptr,
    legal_ptr,
    index_ptr,
    n,
    capacity,
    n_nodes,
    depth,
    HAS_LEGAL: tl.constexpr,
    SHIFT: tl.constexpr,
    BLOCK_NODES: tl.constexpr,
):
    """All levels, by one program, which has written the leaves and has read the old root."""
    block = tl.arange(0, BLOCK_NODES).to(tl.int64)
    count = level_up(capacity, SHIFT)
    tl.debug_barrier()
    for start in range(0, tl.minimum(count, n), BLOCK_NODES):
        _stage_refresh_leaves(
            leaves_ptr, nodes_ptr, legal_ptr, index_ptr, start + block, n, capacity, n_nodes, HAS_LEGAL, SHIFT
        )
    below = capacity * 0
    for level in range(2, depth + 1):
        # The level below is complete.
        tl.debug_barrier()
        count = level_up(count, SHIFT)
        for start in range(0, tl.minimum(count, n), BLOCK_NODES):
            _stage_refresh(nodes_ptr, index_ptr, start + block, n, capacity, n_nodes, level, below, count, SHIFT)
        below += count << SHIFT


@triton.jit
def _new_weight(nodes_ptr, hyper_ptr, n_nodes, WITHIN_BUFFER: tl.constexpr):
    """Weight of a new row, float32: of the running maximum, or as the largest in the tree; else of 1.0."""
    alpha = tl.load(hyper_ptr)
    eps = tl.load(hyper_ptr + 2)
    if WITHIN_BUFFER:
        largest = tl.load(nodes_ptr + 3 * n_nodes - 1)
        weight = tl.where(largest > 0.0, largest, weight_of(largest * 0.0 + 1.0, alpha, eps))
    else:
        given = tl.load(hyper_ptr + 3)
        weight = weight_of(tl.where(given < 0.0, 1.0, given), alpha, eps)
    return weight.to(tl.float32)


@triton.jit(do_not_specialize=["n", "capacity"])
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
    _stage_claim(
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


@triton.jit(do_not_specialize=["n", "capacity"])
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
    _stage_resolve(leaves_ptr, hyper_ptr, index_ptr, priority_ptr, i, n, capacity.to(tl.int64))


@triton.jit(do_not_specialize=["n", "capacity", "n_nodes"])
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
    weight = _new_weight(nodes_ptr, hyper_ptr, n_nodes.to(tl.int64), WITHIN_BUFFER)
    _stage_mark(leaves_ptr, index_ptr, weight, i, n, capacity.to(tl.int64))


@triton.jit(do_not_specialize=["n", "capacity", "n_nodes"])
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
    _stage_refresh_leaves(leaves_ptr, nodes_ptr, legal_ptr, index_ptr, i, n, capacity, n_nodes, HAS_LEGAL, SHIFT)


@triton.jit(do_not_specialize=["n", "capacity", "n_nodes", "level"])
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
    _stage_refresh(nodes_ptr, index_ptr, i, n, capacity, n_nodes.to(tl.int64), level, below, count, SHIFT)


@triton.jit(do_not_specialize=["n", "capacity", "n_nodes", "depth"])
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
        _stage_claim(
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
        _stage_resolve(leaves_ptr, hyper_ptr, index_ptr, priority_ptr, start + entries, n, capacity)
    _stage_refresh_all(
        leaves_ptr, nodes_ptr, legal_ptr, index_ptr, n, capacity, n_nodes, depth, HAS_LEGAL, SHIFT, BLOCK_NODES
    )


@triton.jit(do_not_specialize=["n", "capacity", "n_nodes", "depth"])
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
    weight = _new_weight(nodes_ptr, hyper_ptr, n_nodes, WITHIN_BUFFER)
    entries = tl.arange(0, BLOCK_ENTRIES).to(tl.int64)
    for start in range(0, n, BLOCK_ENTRIES):
        _stage_mark(leaves_ptr, index_ptr, weight, start + entries, n, capacity)
    _stage_refresh_all(
        leaves_ptr, nodes_ptr, legal_ptr, index_ptr, n, capacity, n_nodes, depth, HAS_LEGAL, SHIFT, BLOCK_NODES
    )


@triton.jit(do_not_specialize=["n", "capacity", "n_nodes", "depth"])
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
    _stage_refresh_all(
        leaves_ptr, nodes_ptr, legal_ptr, index_ptr, n, capacity, n_nodes, depth, HAS_LEGAL, SHIFT, BLOCK_NODES
    )
