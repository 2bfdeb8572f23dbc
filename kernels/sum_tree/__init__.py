r"""The sum tree: rows drawn in proportion to their weights, weights changed in O(log capacity).

Here is a tree of six rows with fan-out F = 4. Every row has a *leaf*, its weight. Every *inner node* holds three
numbers about the leaves below it: their sum, their smallest positive weight, their largest weight.

.. code-block:: text

    level 2                      12 | 1 | 5                                 the root
                            /         |         \        \
    level 1         8 | 1 | 5     4 | 1 | 3     0 | inf | 0     0 | inf | 0
                   /  |  |  \    /  |  |  \     \________ padding ________/
    leaves        2   0  1   5  3   1  0   0
    row           0   1  2   3  4   5  \_ padding

**A draw** multiplies a uniform number by the root's sum: 0.7 gives the *mass* 8.4. It then goes down. Among the root's
children it adds the sums from the left, 8 and 8 + 4 = 12. The first that exceeds 8.4 is the second child; 8.4 - 8 = 0.4
of the mass is left. Among that node's leaves, 3 already exceeds 0.4: the draw lands on row 4. So rows 0, 2, 3, 4 and 5
have 2, 1, 5, 3 and 1 of 12 chances, and row 1, which weighs nothing, has none. The draw comes with the importance
weight ``(3 / 1) ** -beta``: the row's weight over the smallest one, both of which are at hand.

**An update** of row 3 to the weight 1 writes the leaf. It then computes the node above it from its four children anew,
2 + 0 + 1 + 1 = 4, and the root from its four children, 4 + 4 = 8. It never adds a difference to a sum: rounding would
pile up, and a root that says too much sends draws past the last leaf.

    >>> import torch
    >>> from gpubuf.kernels import sum_tree
    >>> tree = sum_tree.new_tree(capacity=6, fan_out=4, device="cpu")
    >>> tree.leaves[:6] = torch.tensor([2.0, 0, 1, 5, 3, 1])
    >>> sum_tree.build(*tree)
    >>> tree.nodes.tolist()  # level 1, then the root
    [[8.0, 4.0, 0.0, 0.0, 12.0], [1.0, 1.0, inf, inf, 1.0], [5.0, 3.0, 0.0, 0.0, 5.0]]
    >>> ring = torch.tensor([6, 6, 0, 0])  # six rows have been written, and are there
    >>> sum_tree.update(*tree, ring, torch.tensor([3]), torch.tensor([1.0]), None)
    >>> tree.nodes[sum_tree.SUM].tolist()
    [4.0, 4.0, 0.0, 0.0, 8.0]

Read :class:`Tree` next, which every operation takes first, then ``tests/kernels/reference/sum_tree.py``: it says all of
this in a page, with a list in place of the tree. Then read one backend. ``_cpu.py`` is the definition in plain PyTorch.
Of the CPU's own fan-out ``_numba.py`` checks arguments and passes addresses, ``_numba_kernels.py`` has the operations,
``_numba_node.py`` the arithmetic of one node, ``_numba_levels.py`` the way up from changed rows. On a GPU
``_triton.py`` has the draw, ``_triton_update.py`` the kernels that change weights and the stages that these consist of,
and ``_launch.py`` decides between one launch and several.

Invariants
----------

* A node is the sum, the smallest positive and the largest weight of its eligible children, and the root's sum is that
  of all eligible leaves to 1e-12, whatever came before: ``assert_consistent`` in tests/support/sum_tree_checks.py.
* A weight is 0 or a normal float32, from ``SMALLEST`` to ``LARGEST``, and its sign bit is clear:
  ``test_weights_of_positive_priorities_are_positive_and_finite``, ``assert_consistent``.
* Padding is never written to: leaves 0, nodes 0, +inf and 0. ``assert_consistent``.
* A node has the same bits whichever operation and launch computed it:
  ``test_build_update_mark_and_refresh_agree_to_the_bit``.
* A row of weight zero, and an ineligible row, is never drawn, also where rounding carries the mass too far:
  ``test_weight_zero_is_never_drawn``, ``test_rounding_never_carries_a_draw_into_an_ineligible_leaf``.
* If an update names a row twice the last entry wins: ``test_the_last_duplicate_wins_every_time``.
* The CPU changes nothing when it raises: ``test_bad_priorities_are_refused``, ``test_indices_out_of_range``.

The operations
--------------

On a CPU every operation is one compiled call. On a GPU a *small* batch (up to 1024 entries by the rule of
:func:`gpubuf.kernels.config.tree_update`, and up to 256 of an update in a graph that :func:`gpubuf.capture` captures)
is one launch of one program, with a barrier between the levels. For a larger one every wide level has a launch of its
own; the narrow levels at the top share one. The one program of a mark or a refresh looks whether the rows lie in one
run of the ring, as those of a write do. Then it recomputes the nodes above that run and no others. That of an update of
fewer rows than level 2 has nodes reads minima and maxima of level 1 only where one of them has changed. Up to a fan-out
of 32 one program computes the root from the nodes below it before these are in memory.

=======  =============================  =========================================  ===================================
name     launches on a GPU              reads                                      writes
=======  =============================  =========================================  ===================================
build    one for each wide level, one   leaves, eligible                           all nodes
         for the rest
refresh  small: 1. Else as build        index; the children of all nodes above it  the nodes above the rows
update   small: 1. Else claim, then     index, priority, generation, ring,         leaves of the rows, nodes above,
         as refresh                     scalars; as refresh                        MAX_PRIORITY, REFUSED
mark     small: 1. Else mark, then      index, touched, scalars, the root; as      leaves of the rows, nodes above
         as refresh                     refresh
draw     1                              rng, BETA, the root; F children a level    index, weight, OFFSET of rng
=======  =============================  =========================================  ===================================

On a GPU the entries of an update run in any order, and still the last one wins. Each valid entry *claims* its leaf: it
puts its own number there, with the sign bit set as a tag, by an atomic maximum. Only the last entry's number stays.
Then that entry's weight takes the place of the tag. A small update does this in a stage of its own, ``stage_resolve``,
after a barrier. A large one does it in the launch that recomputes level 1, ``stage_refresh_leaves``: a program that
reads a tag there looks up the weight and writes it into the leaf.

Reference for proportional prioritization and its weights: Schaul, Quan, Antonoglou, Silver, "Prioritized
Experience Replay", ICLR 2016.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from gpubuf.kernels._registry import define

ROWS_PER_WORD = 64
SUM, MINIMUM, MAXIMUM = range(3)
ALPHA, BETA, EPS, MAX_PRIORITY, REFUSED = range(5)

SMALLEST, LARGEST = 2.0**-126, (2 - 2.0**-23) * 2.0**127
"""The range of normal float32 numbers, within which positive weights stay."""

NO_ROW = -(2**62)
"""The row that a GPU draws from an empty tree: out of range, so that reading it yields zeros and counts as a fault."""


class Tree(NamedTuple):
    """A sum tree. Operations take it as their first six arguments: ``sum_tree.mark(*tree, index, False)``.

    Attributes:
        leaves: float32 ``[round_up(capacity, F)]``. Rows that were never written weigh 0.
        nodes: float64 ``[3, n_nodes]``, planes ``SUM``, ``MINIMUM`` and ``MAXIMUM``. The parents of the leaves come
            first, the root last. Node ``j`` of a level has the children ``j * F .. j * F + F - 1`` of the level below:
            no pointers. Every level but the root is padded to a multiple of F, so that a node's children can be read
            without a mask. The inner nodes are 1/F of the leaves, so that float64 costs little.
        scalars: float64 ``[5]``. ALPHA, BETA and EPS are exponents and the addend of priorities, in a tensor so that a
            captured graph sees them change. MAX_PRIORITY is the largest priority given so far, negative before the
            first. REFUSED counts what a GPU has refused, where an exception would have to wait for the GPU.
        eligible: int64 ``[eligible_words(capacity)]``, a bitmap of the rows that may be drawn, or None: all may. Row r
            is bit ``r % 64`` of word ``r // 64``. It is read here, and
            :data:`gpubuf.kernels.trajectories.update_eligible` writes it. Leaves keep their weights when they become
            ineligible; sums, minima, maxima and draws skip them. If you change a bit, call :data:`refresh` for that
            row, or :data:`build`, before the next draw.
        capacity: number of rows.
        fan_out: F, the children of a node: a power of two.
    """

    leaves: Tensor
    nodes: Tensor
    scalars: Tensor
    eligible: Tensor | None
    capacity: int
    fan_out: int


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


def new_tree(capacity: int, fan_out: int, device: torch.device | str) -> Tree:
    """An empty tree: every weight 0, sum 0, minimum +inf, maximum 0; alpha and beta 1, no priority so far."""
    leaves = torch.zeros(-(-capacity // fan_out) * fan_out, dtype=torch.float32, device=device)
    nodes = torch.zeros(3, sum(level_sizes(capacity, fan_out)), dtype=torch.float64, device=device)
    nodes[MINIMUM] = float("inf")
    scalars = torch.zeros(5, dtype=torch.float64, device=device)
    scalars[: BETA + 1].fill_(1.0)
    scalars[MAX_PRIORITY].fill_(-1.0)
    return Tree(leaves, nodes, scalars, None, capacity, fan_out)


build = define(
    "sum_tree_build(Tensor leaves, Tensor(a!) nodes, Tensor scalars, Tensor? eligible, int capacity, int fan_out)"
    " -> ()",
    __name__,
)
"""``build(*tree)``: recompute every inner node from the leaves. No host sync."""


refresh = define(
    "sum_tree_refresh(Tensor leaves, Tensor(a!) nodes, Tensor scalars, Tensor? eligible, int capacity, int fan_out,"
    " Tensor index) -> ()",
    __name__,
)
"""``refresh(*tree, index)``: recompute the nodes above rows, after leaves or bits of ``eligible`` were changed there.

``index`` int64 ``[n]``. -1 is ignored, duplicates are harmless. Any other index outside ``[0, capacity)`` raises
IndexError on CPU, before anything changes, and is ignored on a GPU. The nodes are then equal to the bit to what
:data:`build` makes. No host sync.
"""


update = define(
    "sum_tree_update(Tensor(a!) leaves, Tensor(b!) nodes, Tensor(c!) scalars, Tensor? eligible, int capacity,"
    " int fan_out, Tensor ring, Tensor index, Tensor priority, Tensor? generation) -> ()",
    __name__,
)
"""``update(*tree, ring, index, priority, generation)``: new priorities, and the nodes above their rows.

The weight of row ``index[i]`` becomes ``(priority[i] + eps) ** alpha``. ``index`` int64 ``[B]``, ``priority`` float32
``[B]``, ``generation`` int64 ``[B]`` or None, all contiguous; ``ring`` as in :mod:`gpubuf.kernels.rows`. In this order:

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
    "sum_tree_mark(Tensor(a!) leaves, Tensor(b!) nodes, Tensor scalars, Tensor? eligible, int capacity, int fan_out,"
    " Tensor index, bool within_buffer, Tensor? touched=None) -> ()",
    __name__,
)
"""``mark(*tree, index, within_buffer, touched=None)``: give rows ``index`` (int64 ``[B]``) the weight of a new row.

That is ``(p + eps) ** alpha`` with p the running maximum, or 1.0 while no priority has been given; with
``within_buffer`` it is the largest weight of an eligible row, as it is (it was transformed when it came), or that of
p = 1.0 where no eligible row has a weight. -1 is ignored, duplicates are harmless. Neither the running maximum nor any
other row changes. With ``touched`` (int64 ``[M]``), rows whose bits of ``eligible`` have changed and all rows of
``index`` among them, it also does what :data:`refresh` does for them, in the same launches. No host sync.
"""


draw = define(
    "sum_tree_draw(Tensor leaves, Tensor nodes, Tensor scalars, Tensor? eligible, int capacity, int fan_out,"
    " Tensor(a!) rng, int n, bool stratified) -> (Tensor, Tensor)",
    __name__,
    fake=lambda *given: (given[6].new_empty(given[7]), given[0].new_empty(given[7])),
)
"""``draw(*tree, rng, n, stratified) -> (index, weight)``: ``n`` eligible rows in proportion to their weights.

``index`` int64 ``[n]``; ``weight`` float32 ``[n]`` = ``(q_i / q_min) ** -beta``, q_min the smallest positive weight of
an eligible row. Draw ``i`` looks for the mass ``u_i * total`` or, stratified, ``(i + u_i) / n * total``, all in
float64, and descends by prefix sums of the F children to the first child whose inclusive prefix sum exceeds it; a child
of weight zero is never entered, at either edge, also where rounding carries the mass past the last prefix; an
ineligible leaf counts as one of weight zero.

Raises:
    RuntimeError: the total is zero: no eligible row has a weight (CPU). On a GPU every index is then ``NO_ROW`` and
        every weight 0. No host sync.
"""
