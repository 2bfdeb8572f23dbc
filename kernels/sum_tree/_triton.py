"""The sum tree on the GPU: its geometry and arithmetic, and the draw.

Arguments that all kernels share:

* ``leaves_ptr``: float32 [n_leaves], the capacity rounded up to a multiple of the fan-out F = 1 << SHIFT;
* ``nodes_ptr``: float64 [3, n_nodes], planes sum, minimum, maximum; level 1 first, the root last;
* ``scalars_ptr``: float64 [5] = (alpha, beta, eps, max_priority, refused);
* ``eligible_ptr``: int64 [cdiv(capacity, 64)], row r is bit r % 64 of word r // 64; not read without HAS_ELIGIBLE.
"""

import triton
import triton.language as tl

from gpubuf.kernels import sum_tree
from gpubuf.kernels._launching import jit_for_any_size
from gpubuf.kernels.philox._triton import OFFSET, SEED, TICKET, advance_state, philox_uniform_f64, take_ticket

# Planes of ``nodes_ptr``.
SUM, MINIMUM, MAXIMUM = map(tl.constexpr, range(sum_tree.MAXIMUM + 1))

# Places in ``scalars_ptr``.
ALPHA, BETA, EPS, MAX_PRIORITY, REFUSED = map(tl.constexpr, range(sum_tree.REFUSED + 1))

# The weight of a row, if it is positive.
SMALLEST = tl.constexpr(sum_tree.SMALLEST)
LARGEST = tl.constexpr(sum_tree.LARGEST)

NO_ROW = tl.constexpr(sum_tree.NO_ROW)


@triton.jit
def level_up(count, SHIFT: tl.constexpr):
    """Number of parents of ``count`` nodes, the last of which may have fewer children."""
    return (count + ((1 << SHIFT) - 1)) >> SHIFT


@triton.jit
def level_start(capacity, level, SHIFT: tl.constexpr):
    """Position of inner level ``level`` (1: the parents of the leaves) in a plane. ``capacity`` is int64.

    The levels below are padded to a multiple of the fan-out, which makes them as long as all their parents'
    children.
    """
    start = capacity * 0
    count = level_up(capacity, SHIFT)
    for _ in range(1, level):
        count = level_up(count, SHIFT)
        start += count << SHIFT
    return start


@triton.jit
def level_count(capacity, level, SHIFT: tl.constexpr):
    """Number of nodes of ``level``, without the padding; the leaves are level 0. ``capacity`` is int64."""
    return (capacity + ((tl.full((), 1, tl.int64) << (level * SHIFT)) - 1)) >> (level * SHIFT)


@triton.jit
def root(n_nodes, PLANE: tl.constexpr):
    """Position of the root's number in a plane of the nodes. ``n_nodes`` is int64."""
    return n_nodes * (PLANE + 1) - 1


@triton.jit
def counting(weight, word, row):
    """``weight`` of rows whose bit in their ``word`` of the bitmap is set, zero elsewhere."""
    return tl.where(((word >> (row & 63)) & 1) != 0, weight, 0.0)


@triton.jit
def weight_of(priority, alpha, eps):
    """(priority + eps) ** alpha in float64, to be rounded once; 0 or a normal float32."""
    base = priority.to(tl.float64) + eps
    positive = base > 0.0
    # The power saturates long before float64 does, and far beyond float32.
    power = tl.exp2(tl.minimum(tl.log2(tl.where(positive, base, 1.0)) * alpha, 1000.0))
    weight = tl.where(positive, power, 0.0)
    weight = tl.where(alpha == 0.0, 1.0, tl.where(alpha == 1.0, base, weight))
    weight = tl.where(positive, tl.maximum(weight, SMALLEST), weight)
    # abs: a priority of -0.0 must not leave its sign bit in a leaf, where it would read as a tag.
    return tl.abs(tl.minimum(weight, LARGEST))


@triton.jit
def add_halves(x, SHIFT: tl.constexpr):
    """Sum of each row of ``x`` [R, 1 << SHIFT]: [R]. The upper half is added to the lower until one number is left.

    The order of the additions is written out because ``tl.sum`` takes it from the layout, which differs between
    launches. A node must have the same bits whichever kernel computes it.
    """
    rows: tl.constexpr = x.shape[0]
    for _ in tl.static_range(SHIFT):
        lower, upper = tl.split(tl.permute(tl.reshape(x, (rows, 2, x.shape[1] // 2)), (0, 2, 1)))
        x = lower + upper
    return tl.reshape(x, (rows,))


@triton.jit
def choose_child(weight, mass, lane, FAN_OUT: tl.constexpr):
    """Per row of ``weight`` [R, F]: the first child of positive weight whose inclusive prefix sum exceeds ``mass``.

    Returns (child, mass left in it, clamped at 0). If rounding has carried the mass past the last prefix sum, the child
    is the last one of positive weight; if all are zero, it is child 0.
    """
    prefix = tl.cumsum(weight, axis=1)
    # A parallel scan rounds every prefix in its own order, and none of them as the node's sum. The weight itself tells
    # whether a child is empty, and a mass that no prefix exceeds is the last child's.
    positive = weight > 0.0
    first = tl.min(tl.where(positive & (prefix > mass[:, None]), lane[None, :], FAN_OUT), axis=1)
    last = tl.max(tl.where(positive, lane[None, :], 0), axis=1)
    child = tl.where(first < FAN_OUT, first, last)
    before = tl.sum(tl.where(lane[None, :] == child[:, None] - 1, prefix, 0.0), axis=1)
    return child, tl.maximum(mass - before, 0.0)


@jit_for_any_size()
def sum_tree_draw_kernel(
    leaves_ptr,
    nodes_ptr,
    scalars_ptr,
    eligible_ptr,
    rng_ptr,  # int64 [3] = (seed, offset, ticket); advanced by n
    index_ptr,  # int64 [n]
    weight_ptr,  # float32 [n]
    n,
    capacity,
    n_nodes,
    depth,  # inner levels
    HAS_ELIGIBLE: tl.constexpr,
    STRATIFIED: tl.constexpr,
    SHIFT: tl.constexpr,
    BLOCK_DRAWS: tl.constexpr,
):
    """Draw eligible rows in proportion to their weights, with weight (q / q_min) ** -beta; NO_ROW and 0 if all are 0.

    Grid: (cdiv(n, BLOCK_DRAWS),).
    """
    fan_out: tl.constexpr = 1 << SHIFT
    capacity = capacity.to(tl.int64)
    n_nodes = n_nodes.to(tl.int64)
    i = tl.program_id(0).to(tl.int64) * BLOCK_DRAWS + tl.arange(0, BLOCK_DRAWS)
    seed = tl.load(rng_ptr + SEED)
    offset = tl.load(rng_ptr + OFFSET)
    total = tl.load(nodes_ptr + root(n_nodes, SUM))
    least = tl.load(nodes_ptr + root(n_nodes, MINIMUM))
    beta = tl.load(scalars_ptr + BETA)
    # After the loads that need no other, as it waits for them and holds up those after it.
    ticket = take_ticket(rng_ptr + TICKET)
    uniform = philox_uniform_f64(seed, offset + i)
    mass = ((i.to(tl.float64) + uniform) / n.to(tl.float64) if STRATIFIED else uniform) * total

    lane = tl.arange(0, fan_out)
    node = i * 0
    for down in range(1, depth):
        start = level_start(capacity, depth - down, SHIFT)
        children = nodes_ptr + start + (node << SHIFT)[:, None] + lane[None, :]
        child, mass = choose_child(tl.load(children), mass, lane, fan_out)
        node = (node << SHIFT) + child
    leaf = (node << SHIFT)[:, None] + lane[None, :]
    weight = tl.load(leaves_ptr + leaf).to(tl.float64)
    if HAS_ELIGIBLE:
        weight = counting(weight, tl.load(eligible_ptr + (leaf >> 6), mask=leaf < capacity, other=0), leaf)
    child, mass = choose_child(weight, mass, lane, fan_out)
    row = (node << SHIFT) + child
    drawn = tl.sum(tl.where(lane[None, :] == child[:, None], weight, 0.0), axis=1)

    some = total > 0.0
    ratio = tl.where(some, drawn / least, 1.0)
    # Both special cases come out exactly: log2(1) is 0, and so is any finite number times 0.
    importance = tl.exp2(tl.log2(ratio) * -beta)
    tl.store(index_ptr + i, tl.where(some, row, NO_ROW), mask=i < n)
    tl.store(weight_ptr + i, tl.where(some, importance, 0.0).to(tl.float32), mask=i < n)
    advance_state(rng_ptr, ticket, offset + n)
