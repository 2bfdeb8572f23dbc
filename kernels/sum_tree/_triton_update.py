"""The sum tree on the GPU: the kernels of updates, marks and refreshes, and the stages that they are made of.

A helper whose name starts with ``stage`` does the work of one launch on one block of entries or nodes. For a large
batch every stage is a launch of its own. For a small one a single program runs them all, with a barrier between.

A node is summed in one order, whatever the launch: its children come in parts of ``1 << columns``, the parts are added
one after the other, and ``add_halves`` adds up the result. Neighbours in memory are read together, and no thread holds
a whole node.

The atomics of these kernels are relaxed. Launches and barriers order the stages, and a fence would wait for all of a
program's memory accesses.

Arguments that kernels of updates share, beside those in :mod:`gpubuf.kernels.sum_tree._triton`:

* ``ring_ptr``: int64 [4] = (written, size, ticket, faults);
* ``index_ptr``: int64 [n], rows; -1 is ignored;
* ``weight_ptr``: float32 [n], scratch: the weights of the entries that have tagged a leaf; not read without HAS_TAGS.

Helpers take these as tuples, with None for what is not read:

* ``leaves``: (leaves_ptr, eligible_ptr); ``nodes``: (nodes_ptr, n_nodes, capacity), whose sizes are int64;
* ``rows``: (index_ptr, n), and ``entries``: (index_ptr, priority_ptr, generation_ptr, n);
* ``run``: (first, last), rows between which all others lie, around the end of the ring where ``last`` is below
  ``first``; ``within``: (start, length), the nodes of a level above a run.
"""

import triton
import triton.language as tl

from gpubuf.kernels._launching import constexpr_function, jit_for_any_size
from gpubuf.kernels.rows._triton_tiles import SIZE, WRITTEN
from gpubuf.kernels.sum_tree._triton import (
    ALPHA,
    EPS,
    LARGEST,
    MAX_PRIORITY,
    MAXIMUM,
    MINIMUM,
    REFUSED,
    SUM,
    add_halves,
    counting,
    level_count,
    level_start,
    level_up,
    root,
    weight_of,
)

# The sign bit of a leaf's bits: with it the leaf is a tag, whose other bits are the number of an entry.
TAG = tl.constexpr(0x80000000)
ENTRY_OF_TAG = tl.constexpr(0x7FFFFFFF)


@constexpr_function
def columns_of(shift):
    """Binary logarithm of the children of a node, ``1 << shift`` in all, that are read together."""
    return shift if shift < 3 else 3 if shift < 6 else shift - 2


@constexpr_function
def few_nodes(columns, block_nodes):
    """Nodes that a single program recomputes in one short turn, with a child for each thread of eight warps."""
    return min(block_nodes, max(256 >> columns, 1))


@triton.jit
def in_level(run, level_shift, count):
    """(start, length) of the nodes above a run in a level of ``count`` nodes."""
    first, last = run
    start = first >> level_shift
    length = (last >> level_shift) - start + 1
    return start, tl.minimum(tl.where(last < first, length + count, length), count)


@triton.jit
def _load_rows(rows, i):
    """The rows of entries ``i``, and those of the entries right before them; -1 of an entry that does not exist."""
    index_ptr, n = rows
    row = tl.load(index_ptr + i, mask=i < n, other=-1)
    return row, tl.load(index_ptr + i - 1, mask=(i < n) & (i > 0), other=-1)


@triton.jit
def _own_nodes(pair, capacity, level_shift):
    """The node above the first of two rows, else 0, and whether that has to be recomputed.

    An entry leaves a node to the entry right before it if that has the same one. If entries farther apart have the same
    node, all of them recompute it, to the same bits.
    """
    row, row_before = pair
    node = tl.where((row >= 0) & (row < capacity), row >> level_shift, -1)
    node_before = tl.where((row_before >= 0) & (row_before < capacity), row_before >> level_shift, -1)
    needed = (node >= 0) & (node != node_before)
    return tl.where(needed, node, 0), needed


@triton.jit
def _nodes_above(rows, i, capacity, level_shift, count, within):
    """The node that entry ``i`` has to recompute in a level of ``count`` nodes, else 0, and whether it has to.

    If there are no more nodes ``within`` than entries, all are recomputed, and ``i`` counts them.
    """
    start, length = within
    if length <= rows[1]:
        node = start + i.to(tl.int64)
        node = tl.where(node < count, node, node - count)
        needed = i < length
        node = tl.where(needed, node, 0)
    else:
        node, needed = _own_nodes(_load_rows(rows, i), capacity, level_shift)
    return node, needed


@triton.jit
def stage_claim(leaves_ptr, scalars_ptr, ring_ptr, entries, i, capacity):
    """Every valid entry i tags its leaf with (sign bit | i), by an unsigned maximum: the last one stays.

    Weights are never negative, so that a tag beats every weight, and a later tag an earlier one. Returns the rows,
    which of them have valid entries, and the weights of these. No load waits for another.
    """
    index_ptr, priority_ptr, generation_ptr, n = entries
    row = tl.load(index_ptr + i, mask=i < n, other=-1)
    priority = tl.load(priority_ptr + i, mask=i < n, other=0.0)
    size = tl.load(ring_ptr + SIZE)
    alpha = tl.load(scalars_ptr + ALPHA)
    eps = tl.load(scalars_ptr + EPS)
    # TTIR race (sum_tree_claim_kernel): an older maximum only lets more entries try to raise it.
    # TTIR barrier (sum_tree_claim_kernel, sum_tree_update_small_kernel): likewise.
    largest = tl.load(scalars_ptr + MAX_PRIORITY)
    live = (row >= 0) & (row < capacity) & (row < size)
    if generation_ptr is not None:
        generation = tl.load(generation_ptr + i, mask=i < n, other=0)
        written = tl.load(ring_ptr + WRITTEN)
        # A row written so often has row + (generation - 1) * capacity < written <= row + generation * capacity.
        ahead = row + generation * capacity - written
        live = live & (generation >= 0) & (generation <= written) & (ahead >= 0) & (ahead < capacity)
    claims = live & (priority >= 0.0) & (priority <= LARGEST)
    bits_ptr = leaves_ptr.to(tl.pointer_type(tl.uint32), bitcast=True)
    tl.atomic_max(bits_ptr + row, i.to(tl.uint32) | TAG, mask=claims, sem="relaxed")

    # Few entries, if any, are refused or raise the maximum, so that they are not gathered first.
    refused = (live ^ claims) | (row < -1) | (row >= capacity)
    scalar = row * 0
    tl.atomic_add(scalars_ptr + REFUSED + scalar, scalar.to(tl.float64) + 1.0, mask=refused, sem="relaxed")
    # The bits of floats from 0 up, as integers, are ordered as the floats are. Those of the initial -1.0 are below
    # them.
    given = tl.abs(priority).to(tl.float64)
    maximum_ptr = scalars_ptr.to(tl.pointer_type(tl.int64), bitcast=True) + MAX_PRIORITY + scalar
    tl.atomic_max(maximum_ptr, given.to(tl.int64, bitcast=True), mask=claims & (given > largest), sem="relaxed")
    return row, claims, weight_of(priority, alpha, eps).to(tl.float32)


@triton.jit
def stage_resolve(leaves_ptr, i, row, claims, weight):
    """The entry whose tag has stayed puts its weight in the tag's place. The others read a tag or a weight."""
    bits_ptr = leaves_ptr.to(tl.pointer_type(tl.uint32), bitcast=True)
    # An entry that has lost reads the last one's tag or weight, and neither is its own tag.
    # TTIR barrier (sum_tree_update_small_kernel): so it does not matter which.
    bits = tl.load(bits_ptr + row, mask=claims, other=0)
    tl.store(leaves_ptr + row, weight, mask=claims & (bits == (i.to(tl.uint32) | TAG)))


@triton.jit
def stage_mark(leaves_ptr, rows, weight, i, capacity):
    """Give rows one weight; a row named twice gets it twice. Returns the rows."""
    index_ptr, n = rows
    row = tl.load(index_ptr + i, mask=i < n, other=-1)
    tl.store(leaves_ptr + row, weight, mask=(row >= 0) & (row < capacity))
    return row


@triton.jit
def ends_of(rows):
    """The first and the last of the rows."""
    index_ptr, n = rows
    return tl.load(index_ptr), tl.load(index_ptr + n - 1)


@triton.jit
def run_of(rows, ends, capacity, leaves_ptr, weight, BLOCK_ENTRIES: tl.constexpr):
    """The run of the first and the last of the rows if all lie between these, as after a write; else the whole ring.

    Marks the rows on the way, unless ``leaves_ptr`` is None.
    """
    index_ptr, n = rows
    first, last = ends
    length = tl.where(last < first, last - first + capacity, last - first)
    lane = tl.arange(0, BLOCK_ENTRIES).to(tl.int64)
    outside = (lane < 0).to(tl.int32)
    for start in range(0, n, BLOCK_ENTRIES):
        i = start + lane
        if leaves_ptr is not None:
            row = stage_mark(leaves_ptr, rows, weight, i, capacity)
        else:
            row = tl.load(index_ptr + i, mask=i < n, other=-1)
        place = tl.where(row < first, row - first + capacity, row - first)
        outside |= ((row >= 0) & (row < capacity) & (place > length)).to(tl.int32)
    inside = (tl.max(outside, axis=0) == 0) & (first >= 0) & (first < capacity) & (last >= 0) & (last < capacity)
    return tl.where(inside, first, 0), tl.where(inside, last, capacity - 1)


@triton.jit
def _extremes(nodes_ptr, n_nodes, node):
    """Addresses [R, 2] of the minima and maxima of nodes: side by side, they are one access, not two."""
    return nodes_ptr + node[:, None] + n_nodes * (tl.arange(0, 2) + MINIMUM)[None, :]


@triton.jit
def stage_refresh_leaves(leaves, nodes, node, needed, weight_ptr, SHIFT: tl.constexpr):
    """Recompute level-1 nodes from their leaves, those that are ``needed``.

    With ``weight_ptr`` leaves may hold tags, and the weights of the entries replace them. Two programs may have the
    same node, so that one reads a leaf while the other stores it. It then finds the tag or the weight that the tag
    stands for: both programs compute and store the same.

    Returns of which nodes the minimum, and of which the maximum, has changed.
    """
    leaves_ptr, eligible_ptr = leaves
    nodes_ptr, n_nodes, capacity = nodes
    columns: tl.constexpr = columns_of(SHIFT)
    first = (node << SHIFT)[:, None] + tl.arange(0, 1 << columns)[None, :]
    if eligible_ptr is not None and SHIFT <= 6:
        # One word has the bits of a whole node.
        word = tl.load(eligible_ptr + ((node << SHIFT) >> 6))[:, None]
    # All parts are asked for before the first is waited for: a store would hold up the loads after it.
    weights = ()  # type: tl.tuple
    for part in tl.static_range(1 << (SHIFT - columns)):
        leaf = first + (part << columns)
        if weight_ptr is not None:
            # TTIR race (sum_tree_refresh_leaves_kernel): a tag, or the weight that another program puts in its place.
            # TTIR barrier (sum_tree_refresh_leaves_kernel): or another thread.
            weights += (tl.load(leaves_ptr + leaf, mask=needed[:, None], other=0.0),)
        else:
            weights += (tl.load(leaves_ptr + leaf),)
    extremes_ptr = _extremes(nodes_ptr, n_nodes, node)
    # Of entries with one node, those that read what another has stored find no change. That one does.
    # TTIR barrier (sum_tree_update_small_kernel): so it does not matter which.
    low_before, high_before = tl.split(tl.load(extremes_ptr))
    if weight_ptr is not None:
        tagged = weights
        weights = ()
        for part in tl.static_range(1 << (SHIFT - columns)):
            bits = tagged[part].to(tl.int32, bitcast=True)
            weight = tl.load(weight_ptr + (bits & ENTRY_OF_TAG), mask=bits < 0, other=0.0)
            weights += (tl.where(bits < 0, weight, tagged[part]),)
        for part in tl.static_range(1 << (SHIFT - columns)):
            bits = tagged[part].to(tl.int32, bitcast=True)
            tl.store(leaves_ptr + first + (part << columns), weights[part], mask=bits < 0)
    for part in tl.static_range(1 << (SHIFT - columns)):
        leaf = first + (part << columns)
        weight = weights[part]
        if eligible_ptr is not None:
            if SHIFT > 6:
                # The bits of the padding, which weighs nothing, may not exist.
                word = tl.load(eligible_ptr + (leaf >> 6), mask=leaf < capacity, other=0)
            weight = counting(weight, word, leaf)
        positive = tl.where(weight > 0.0, weight, float("inf"))
        if part == 0:
            total, least, largest = weight.to(tl.float64), positive, weight
        else:
            total += weight.to(tl.float64)
            least = tl.minimum(least, positive)
            largest = tl.maximum(largest, weight)
    low, high = tl.min(least, axis=1).to(tl.float64), tl.max(largest, axis=1).to(tl.float64)
    tl.store(nodes_ptr + n_nodes * SUM + node, add_halves(total, columns), mask=needed)
    tl.store(extremes_ptr, tl.join(low, high), mask=needed[:, None])
    return needed & (low != low_before), needed & (high != high_before)


@triton.jit
def _recompute(nodes, node, needed, changed, below, count, SHIFT: tl.constexpr):
    """Recompute nodes of a level of ``count`` nodes, from the level that starts ``below``.

    ``changed`` says of which the minimum, and of which the maximum, is recomputed too; None: of all that are needed.
    Returns (sum, minimum, maximum) of each.
    """
    nodes_ptr, n_nodes, _ = nodes
    if changed is not None:
        lower, higher = changed
    columns: tl.constexpr = columns_of(SHIFT)
    first = (node << SHIFT)[:, None] + tl.arange(0, 1 << columns)[None, :]
    # Levels are padded to a multiple of the fan-out.
    first = nodes_ptr + tl.multiple_of(below, 1 << columns) + first
    children = ()  # type: tl.tuple
    for part in tl.static_range(1 << (SHIFT - columns)):
        child = first + (part << columns)
        weight = tl.load(child + n_nodes * SUM)
        if changed is not None:
            low = tl.load(child + n_nodes * MINIMUM, mask=lower[:, None], other=0.0)
            high = tl.load(child + n_nodes * MAXIMUM, mask=higher[:, None], other=0.0)
        else:
            low = tl.load(child + n_nodes * MINIMUM)
            high = tl.load(child + n_nodes * MAXIMUM)
        children += ((weight, low, high),)
    for part in tl.static_range(1 << (SHIFT - columns)):
        weight, low, high = children[part]
        if part == 0:
            total, least, largest = weight, low, high
        else:
            total += weight
            least = tl.minimum(least, low)
            largest = tl.maximum(largest, high)
    target = below + (count << SHIFT) + node
    total = add_halves(total, columns)
    tl.store(nodes_ptr + target + n_nodes * SUM, total, mask=needed)
    # Weights of leaves, in float64.
    least = tl.min(least.to(tl.float32), axis=1)
    largest = tl.max(largest.to(tl.float32), axis=1)
    extremes = tl.join(least, largest).to(tl.float64)
    chosen = needed[:, None] if changed is None else tl.join(lower, higher)
    tl.store(_extremes(nodes_ptr, n_nodes, target), extremes, mask=chosen)
    return total, least, largest


@triton.jit
def stage_refresh(nodes, rows, i, level, below, count, within, SHIFT: tl.constexpr):
    """Recompute nodes of ``level`` (2 or more), which has ``count`` of them, from the level that starts ``below``."""
    node, needed = _nodes_above(rows, i, nodes[2], level * SHIFT, count, within)
    _recompute(nodes, node, needed, None, below, count, SHIFT)


@triton.jit
def add_children(x, SHIFT: tl.constexpr):
    """Sum of ``x`` [1 << SHIFT], in the order in which a node is the sum of its children.

    By sums of two numbers and zeros, which are the same in any order. What needs its numbers in one thread, as
    ``add_halves`` does, would make the compiler compute them anew in every thread.
    """
    columns: tl.constexpr = columns_of(SHIFT)
    parts: tl.constexpr = 1 << (SHIFT - columns)
    x = tl.reshape(x, (parts, 1 << columns))
    part = tl.arange(0, parts)[:, None]
    total = tl.sum(tl.where(part < 2, x, 0.0), axis=0)
    for other in tl.static_range(2, parts):
        total += tl.sum(tl.where(part == other, x, 0.0), axis=0)
    for _ in tl.static_range(columns - 1):
        total = tl.sum(tl.reshape(total, (2, total.shape[0] // 2)), axis=0)
    return tl.sum(total, axis=0)


@triton.jit
def top_two_levels(nodes, below, count, within, SHIFT: tl.constexpr):
    """The root, and those ``within`` the ``count`` nodes under it, from the level that starts ``below``.

    All of these are computed from that level, so that the root waits for no memory.
    """
    nodes_ptr, n_nodes, _ = nodes
    child = tl.arange(0, 1 << SHIFT).to(tl.int64)
    some = child < count
    start, length = within
    needed = some & (tl.where(child < start, child - start + count, child - start) < length)
    weight, low, high = _recompute(nodes, tl.where(some, child, 0), needed, None, below, count, SHIFT)
    tl.store(nodes_ptr + root(n_nodes, SUM), add_children(tl.where(some, weight, 0.0), SHIFT))
    tl.store(nodes_ptr + root(n_nodes, MINIMUM), tl.min(tl.where(some, low, float("inf")), axis=0).to(tl.float64))
    tl.store(nodes_ptr + root(n_nodes, MAXIMUM), tl.max(tl.where(some, high, 0.0), axis=0).to(tl.float64))


@triton.jit
def levels_above(nodes, rows, run, lowest, depth, SHIFT: tl.constexpr, BLOCK_NODES: tl.constexpr):
    """All levels from ``lowest`` (2 or more) up, by one program."""
    few = tl.arange(0, few_nodes(columns_of(SHIFT), BLOCK_NODES))
    block = tl.arange(0, BLOCK_NODES)
    below = level_start(nodes[2], lowest - 1, SHIFT)
    # A wide node takes more registers than the two levels may have.
    narrow: tl.constexpr = SHIFT <= 5
    for level in range(lowest, depth - 1 if narrow and lowest < depth else depth + 1):
        # The level below is complete.
        tl.debug_barrier()
        count = level_count(nodes[2], level, SHIFT)
        within = in_level(run, level * SHIFT, count)
        due = tl.minimum(within[1], rows[1])
        if due <= few.shape[0]:
            stage_refresh(nodes, rows, few, level, below, count, within, SHIFT)
        else:
            for begin in range(0, due, BLOCK_NODES):
                stage_refresh(nodes, rows, begin + block, level, below, count, within, SHIFT)
        below += count << SHIFT
    if narrow and lowest < depth:
        tl.debug_barrier()
        count = level_count(nodes[2], depth - 1, SHIFT)
        top_two_levels(nodes, below, count, in_level(run, (depth - 1) * SHIFT, count), SHIFT)


@triton.jit
def first_level(leaves, nodes, rows, run, SHIFT: tl.constexpr, BLOCK_NODES: tl.constexpr):
    """Level 1, by one program, which has written the leaves and has read the old root."""
    few = tl.arange(0, few_nodes(columns_of(SHIFT), BLOCK_NODES))
    block = tl.arange(0, BLOCK_NODES)
    within = in_level(run, SHIFT, level_up(nodes[2], SHIFT))
    due = tl.minimum(within[1], rows[1])
    tl.debug_barrier()
    count = level_up(nodes[2], SHIFT)
    if due <= few.shape[0]:
        node, needed = _nodes_above(rows, few, nodes[2], SHIFT, count, within)
        stage_refresh_leaves(leaves, nodes, node, needed, None, SHIFT)
    else:
        for begin in range(0, due, BLOCK_NODES):
            node, needed = _nodes_above(rows, begin + block, nodes[2], SHIFT, count, within)
            stage_refresh_leaves(leaves, nodes, node, needed, None, SHIFT)


@triton.jit
def first_two_levels(leaves, nodes, pair, SHIFT: tl.constexpr):
    """Levels 1 and 2 above the first rows of ``pair``, fewer than level 2 has nodes, by one program.

    It knows of which nodes of level 1 the minimum or the maximum has changed, and reads those of the others' brothers
    not at all: two thirds of what level 2 is made of.
    """
    capacity = nodes[2]
    node, needed = _own_nodes(pair, capacity, SHIFT)
    changed = stage_refresh_leaves(leaves, nodes, node, needed, None, SHIFT)
    tl.debug_barrier()
    row = pair[0]
    needed = (row >= 0) & (row < capacity)
    node = tl.where(needed, row >> (2 * SHIFT), 0)
    count = level_up(capacity, SHIFT)
    _recompute(nodes, node, needed, changed, level_start(capacity, 1, SHIFT), level_up(count, SHIFT), SHIFT)


@triton.jit
def new_weight(nodes_ptr, scalars_ptr, n_nodes, WITHIN_BUFFER: tl.constexpr):
    """Weight of a new row, float32: of the running maximum, or the largest in the tree; if there is none, of 1.0."""
    alpha = tl.load(scalars_ptr + ALPHA)
    eps = tl.load(scalars_ptr + EPS)
    if WITHIN_BUFFER:
        largest = tl.load(nodes_ptr + root(n_nodes, MAXIMUM))
        weight = tl.where(largest > 0.0, largest, weight_of(largest * 0.0 + 1.0, alpha, eps))
    else:
        given = tl.load(scalars_ptr + MAX_PRIORITY)
        weight = weight_of(tl.where(given < 0.0, 1.0, given), alpha, eps)
    return weight.to(tl.float32)


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
    leaves_ptr, nodes_ptr, scalars_ptr, index_ptr, n, capacity, n_nodes, WITHIN_BUFFER: tl.constexpr,
    BLOCK_ENTRIES: tl.constexpr,
):  # fmt: skip
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
    count = level_up(nodes[2], SHIFT)
    node, needed = _nodes_above((index_ptr, n), i, nodes[2], SHIFT, count, (0, count))
    stage_refresh_leaves(leaves, nodes, node, needed, weight_ptr if HAS_TAGS else None, SHIFT)


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
    rows = (index_ptr, n)
    # Asked for together with all else that follows from nothing.
    pair = _load_rows(rows, tl.arange(0, BLOCK_NODES))
    lane = tl.arange(0, BLOCK_ENTRIES).to(tl.int64)
    for start in range(0, n, BLOCK_ENTRIES):
        i = start + lane
        row, claims, weight = stage_claim(leaves_ptr, scalars_ptr, ring_ptr, entries, i, nodes[2])
        # All tags of this turn are set, and then all of its weights: a later turn tags what an earlier one has written.
        tl.debug_barrier()
        stage_resolve(leaves_ptr, i, row, claims, weight)
        tl.debug_barrier()
    run = (0, nodes[2] - 1)
    level = 2
    if (n <= BLOCK_NODES) & (level_count(nodes[2], 2, SHIFT) > n):
        first_two_levels(leaves, nodes, pair, SHIFT)
        level = 3
    else:
        first_level(leaves, nodes, rows, run, SHIFT, BLOCK_NODES)
    levels_above(nodes, rows, run, level, depth, SHIFT, BLOCK_NODES)


@jit_for_any_size("index_ptr", "touched_ptr")
def sum_tree_mark_small_kernel(
    leaves_ptr,
    nodes_ptr,
    eligible_ptr,
    scalars_ptr,
    index_ptr,
    touched_ptr,  # int64 [n_touched], the rows to refresh, those of the index among them; not read without HAS_TOUCHED
    n,
    n_touched,
    capacity,
    n_nodes,
    depth,  # inner levels
    HAS_ELIGIBLE: tl.constexpr,
    WITHIN_BUFFER: tl.constexpr,
    HAS_TOUCHED: tl.constexpr,
    SHIFT: tl.constexpr,
    BLOCK_ENTRIES: tl.constexpr,
    BLOCK_NODES: tl.constexpr,
):
    """A whole mark by one program. Grid: (1,)."""
    leaves = (leaves_ptr, eligible_ptr if HAS_ELIGIBLE else None)
    nodes = (nodes_ptr, n_nodes.to(tl.int64), capacity.to(tl.int64))
    rows = (touched_ptr, n_touched) if HAS_TOUCHED else (index_ptr, n)
    ends = ends_of(rows)
    weight = new_weight(nodes_ptr, scalars_ptr, nodes[1], WITHIN_BUFFER)
    if HAS_TOUCHED:
        lane = tl.arange(0, BLOCK_ENTRIES).to(tl.int64)
        for start in range(0, n, BLOCK_ENTRIES):
            stage_mark(leaves_ptr, (index_ptr, n), weight, start + lane, nodes[2])
    run = run_of(rows, ends, nodes[2], None if HAS_TOUCHED else leaves_ptr, weight, BLOCK_ENTRIES)
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
    run = run_of(rows, ends_of(rows), nodes[2], None, None, BLOCK_ENTRIES)
    first_level(leaves, nodes, rows, run, SHIFT, BLOCK_NODES)
    levels_above(nodes, rows, run, 2, depth, SHIFT, BLOCK_NODES)
