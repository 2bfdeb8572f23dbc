"""The sum tree: a flat, implicit F-ary tree over float32 leaf weights.

* ``leaves``: float32 ``[round_up(capacity, F)]``, weight ``q >= 0`` of every row; never-written rows weigh 0.
* ``nodes``: float64 ``[3, n_nodes]``: planes ``SUM``, ``MINIMUM`` and ``MAXIMUM`` of the inner nodes. Level 1
  (the parents of the leaves) comes first, the root is the last node. Node ``j`` of a level covers children
  ``j * F .. j * F + F - 1`` of the level below. Every level but the root is padded to a multiple of F with
  the identity, so that a node's children can always be read without a mask. The minimum is over positive
  weights only (+inf where there is none), so that rows of weight zero and rows never written don't count.
* ``scalars``: float64 ``[5]`` = (alpha, beta, eps, max_priority, refused): the exponents as tensors, so that a
  captured graph sees them change; the running maximum of the raw priorities given, negative before
  the first; the number of priorities refused on a GPU, where an exception would need a host sync.
* ``eligible``: int64 ``[eligible_words(capacity)]`` or None, a bitmap of the rows that may be drawn: row r is bit ``r %
64``
  of word ``r // 64``. It is only read here (:data:`gpubuf.kernels.trajectories.update_eligible` maintains it). Leaves
  hold their true weights whether eligible or not; every inner node, hence total, q_min and largest weight, counts
  eligible leaves only, and a draw takes no other. None: all rows are eligible. The nodes above a row hold for the
  bitmap they were computed with: whoever changes a bit calls :data:`refresh` for that row, or :data:`build`, before the
  next draw.

Precision: a parent is always recomputed from its children, never corrected by a difference, and inner nodes are
float64: the root equals the sum of the leaves to 1e-12 whatever the history. Inner nodes are 1/F of the leaves,
so this costs nothing.

Reference for proportional prioritization and its weights: Schaul, Quan, Antonoglou, Silver, "Prioritized
Experience Replay", ICLR 2016.
"""

from __future__ import annotations

import torch
from torch import Tensor

from gpubuf.kernels._registry import define

ROWS_PER_WORD = 64
SUM, MINIMUM, MAXIMUM = range(3)
ALPHA, BETA, EPS, MAX_PRIORITY, REFUSED = range(5)

SMALLEST, LARGEST = 2.0**-126, (2 - 2.0**-23) * 2.0**127
"""The range of normal float32 numbers, within which positive weights stay."""

NO_ROW = -(2**62)
"""What a GPU draws from an empty tree: out of range, so that reading it yields zeros and counts as a fault."""


def level_sizes(capacity: int, fan_out: int) -> list[int]:
    """Padded length of every inner level, parents of the leaves first, the root (1) last."""
    sizes = []
    count = -(-capacity // fan_out)
    while count > 1:
        sizes.append(-(-count // fan_out) * fan_out)
        count = -(-count // fan_out)
    return [*sizes, 1]


def eligible_words(capacity: int) -> int:
    """Length of the bitmap ``eligible`` of ``capacity`` rows."""
    return -(-capacity // ROWS_PER_WORD)


def new_tree(capacity: int, fan_out: int, device: torch.device | str) -> tuple[Tensor, Tensor]:
    """``(leaves, nodes)`` of an empty tree: every weight 0, sum 0, minimum +inf, maximum 0."""
    leaves = torch.zeros(-(-capacity // fan_out) * fan_out, dtype=torch.float32, device=device)
    nodes = torch.zeros(3, sum(level_sizes(capacity, fan_out)), dtype=torch.float64, device=device)
    nodes[MINIMUM] = float("inf")
    return leaves, nodes


build = define(
    "sum_tree_build(Tensor leaves, Tensor(a!) nodes, int fan_out, Tensor? eligible=None) -> ()",
    cpu="gpubuf.kernels.sum_tree._cpu:build",
    cuda="gpubuf.kernels.sum_tree._launch:build",
    fake=lambda *_: None,
)
"""``build(leaves, nodes, fan_out, eligible=None)``: recompute every inner node from the leaves. No host sync."""


refresh = define(
    "sum_tree_refresh(Tensor leaves, Tensor(a!) nodes, Tensor index, int capacity, int fan_out, Tensor? eligible=None)"
    " -> ()",
    cpu="gpubuf.kernels.sum_tree._cpu:refresh",
    cuda="gpubuf.kernels.sum_tree._launch:refresh",
    fake=lambda *_: None,
)
"""Recompute the nodes above rows ``index`` (int64 ``[n]``), after leaves or bits of ``eligible`` were changed there.

-1 is ignored, duplicates are harmless. Any other index outside ``[0, capacity)`` raises IndexError on CPU, before
anything changes, and is ignored on a GPU. The nodes are then equal to the bit to what :data:`build` makes. No host
sync.
"""


update = define(
    "sum_tree_update(Tensor(a!) leaves, Tensor(b!) nodes, Tensor(c!) scalars, Tensor ring, Tensor index,"
    " Tensor priority, Tensor? generation, int capacity, int fan_out, Tensor? eligible=None) -> ()",
    cpu="gpubuf.kernels.sum_tree._cpu:update",
    cuda="gpubuf.kernels.sum_tree._launch:update",
    fake=lambda *_: None,
)
"""Set the weight of rows ``index`` to ``(priority + eps) ** alpha`` and recompute the nodes above them.

``index`` int64 ``[B]``, ``priority`` float32 ``[B]``, ``generation`` int64 ``[B]`` or None, all contiguous; ``ring``
as in :mod:`gpubuf.kernels.rows`. In this order:

* an entry is *dropped*, silently, where ``index`` is -1, where it is not below the ring's size (emptied since),
  and, given ``generation``, where the row's generation is another by now (overwritten since it was sampled);
* a priority that is NaN, infinite or negative is *refused*: the CPU raises ValueError before anything
  changes; a GPU leaves the old weight in place and counts it in ``scalars[REFUSED]``;
* where an index remains more than once, the last entry wins, on both backends;
* ``scalars[MAX_PRIORITY]`` becomes the maximum of itself and of every priority neither dropped nor refused.

The weight of an ineligible row is set like any other; it counts once the row is eligible.

The power is evaluated in float64 and rounded once. Of a positive base it is kept within the normal range of float32,
``SMALLEST`` to ``LARGEST``, so that it stays positive and finite. Any other index outside ``[0, capacity)`` raises
IndexError on CPU and is refused on a GPU. No host sync.
"""


mark = define(
    "sum_tree_mark(Tensor(a!) leaves, Tensor(b!) nodes, Tensor scalars, Tensor index, int capacity, int fan_out,"
    " bool within_buffer, Tensor? eligible=None) -> ()",
    cpu="gpubuf.kernels.sum_tree._cpu:mark",
    cuda="gpubuf.kernels.sum_tree._launch:mark",
    fake=lambda *_: None,
)
"""Give rows ``index`` (int64 ``[B]``) the weight of a new row.

That is ``(p + eps) ** alpha`` with p the running maximum, or 1.0 while no priority has been given; with
``within_buffer`` it is the largest weight of an eligible row, as it is (it was transformed when it came), or that of
p = 1.0 where no eligible row has a weight. -1 is ignored, duplicates are harmless. Neither the running maximum nor any
other row changes. No host sync.
"""


def _draw_fake(
    leaves: Tensor,
    nodes: Tensor,
    scalars: Tensor,
    rng: Tensor,
    n: int,
    capacity: int,
    fan_out: int,
    stratified: bool,
    eligible: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    return rng.new_empty(n), leaves.new_empty(n)


draw = define(
    "sum_tree_draw(Tensor leaves, Tensor nodes, Tensor scalars, Tensor(a!) rng, int n, int capacity, int fan_out,"
    " bool stratified, Tensor? eligible=None) -> (Tensor, Tensor)",
    cpu="gpubuf.kernels.sum_tree._cpu:draw",
    cuda="gpubuf.kernels.sum_tree._launch:draw",
    fake=_draw_fake,
)
"""``draw(...) -> (index, weight)``: ``n`` eligible rows in proportion to their weights, with their importance weights.

``index`` int64 ``[n]``; ``weight`` float32 ``[n]`` = ``(q_i / q_min) ** -beta``, q_min the smallest positive weight of
an eligible row. Draw ``i`` looks for the mass ``u_i * total`` or, stratified, ``(i + u_i) / n * total``, all in
float64, and descends by prefix sums of the F children to the first child whose inclusive prefix sum exceeds it; a child
of weight zero is never entered, at either edge, also where rounding carries the mass past the last prefix; an
ineligible leaf counts as one of weight zero.

Raises:
    RuntimeError: the total is zero: no eligible row has a weight (CPU). On a GPU every index is then ``NO_ROW`` and
    every
        weight 0. No host sync.
"""
