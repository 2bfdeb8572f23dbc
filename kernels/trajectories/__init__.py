"""The trajectory index: the ends of trajectories, and slices and bounds from them, in O(log N).

Rows form a ring of ``steps`` steps (T) of ``envs`` environments (E). Row ``t * E + e`` is step ``t`` of environment
``e``. A step's *age* counts from the oldest step in the ring, which has age 0. A trajectory is a run of steps of one
environment that ends with a set end flag. The ring limits it too: nothing is older than the oldest step (the cursor of
a full ring, else step 0), and the newest step (just before the cursor) is the *virtual end* of every trajectory still
in progress. Both follow from the ring's counters and are never stored.

Here is a ring of eight steps of one environment. Ten steps were written, so the next one goes to step 2, the oldest:

.. code-block:: text

    step          0   1   2   3   4   5   6   7
    age           6   7   0   1   2   3   4   5
    end flag      1   .   .   .   1   .   .   .
    trajectory    B   C   A   A   A   B   B   B         B goes round the end of the ring, C is in progress

    >>> import torch
    >>> from gpubuf.kernels import rows, trajectories
    >>> flags = torch.tensor([1, 0, 0, 0, 1, 0, 0, 0], dtype=torch.bool)
    >>> signals = torch.tensor([rows.table_entry(flags.data_ptr(), row_bytes=1)])
    >>> ring = torch.tensor([10, 8, 0, 0])  # written, stored
    >>> rule = trajectories.Rule(slice_len=3, min_len=3)
    >>> ends, sums = trajectories.new_index(steps=8, envs=1, fan_out=16, device="cpu")
    >>> trajectories.update(ends, sums, ring, signals, False, 8, 8, 1, 16, *rule)
    >>> bin(ends.item())
    '0b10001'
    >>> sums[-1].item()  # trajectories of three steps or more: A and B
    2
    >>> first, last, length = trajectories.bounds(ends, ring, torch.tensor([7, 1]), 8, 1)  # of B and of C
    >>> first.tolist(), last.tolist(), length.tolist()
    ([5, 1], [0, 1], [4, 1])
    >>> trajectories.slices(ends, ring, torch.tensor([6, 3]), 3, 8, 1)[0].tolist()  # the second one is cut at its end
    [6, 7, 0, 3, 4, 4]

``tests/kernels/reference/trajectories.py`` has the definitions. Then read one backend. On the CPU ``_numba_update.py``
has updates, ``_numba_search.py`` the way to the next and previous end and down the sums, ``_numba_read.py`` what only
reads; ``_cpu.py`` checks arguments and calls them. On a GPU ``_triton.py`` has searches, draws and bounds,
``_triton_update.py`` updates, and ``_launch.py`` decides between one launch and several.

The tensors:

* ``ends``: int64 ``[sum(bit_levels(T, E))]``, a bitmap of the end flags with summaries. On level 0 a word has the flags
  of 64 steps of one environment: bit ``t % 64`` of word ``(t // 64) * E + e`` is that of row ``t * E + e``. The words
  of a step lie side by side, so that a write touches contiguous memory. On level k + 1, bit ``j % 64`` of word ``(j //
  64) * E + e`` says whether word ``j * E + e`` of level k has any bit set. The last level has one word for each
  environment. The search for the next or previous end goes up and down these levels, in O(log64 T).
* ``sums``: int64 ``[sum(level_sizes(...))]``, a sum tree like that of :mod:`gpubuf.kernels.sum_tree`, of integers, so
  that sums are exact. Its leaves are the *weights* of the words on level 0 of ``ends``. A word weighs as much as the
  trajectories that end in it, at a flag or at the virtual end. The root is last.
* ``signals``: int64 ``[K, 5]``, entries of the table of :mod:`gpubuf.kernels.rows`, of the keys that tell where
  trajectories end. With ``by_id`` False they are flags: a step ends a trajectory if any byte of any of them is not
  zero. With ``by_id`` True (K = 1) they are identifiers: a step ends a trajectory if the next step of its environment
  has other bytes. The newest step has no next one and never ends one. Device rows and host rows must meet at a multiple
  of 64 steps.
* ``ring``: int64 ``[4]``, as in :mod:`gpubuf.kernels.rows`. It counts rows, E of them a step. It also stands for the
  storage, which is read by address: operations that read signals are annotated as mutating it.

Memory: an eighth of a byte per row for the bits, as much for the weights, and a little for the levels above.

A :class:`Rule` says which slices may be drawn. Sums hold for one rule: if it changes, call :data:`resum`. If rows were
changed elsewhere, call :data:`update` over all steps.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from gpubuf.kernels._registry import define
from gpubuf.kernels.sum_tree import NO_ROW as NO_ROW
from gpubuf.kernels.sum_tree import eligible_words as eligible_words


class Rule(NamedTuple):
    """The slices that may be drawn, and their probabilities. Operations take it as six arguments.

    A trajectory of length ``n >= min_len`` gives slices of ``m = min(slice_len, n)`` steps from the virtual offsets
    ``-min(before, m - 1) .. n - m + min(after, m - 1)``. Steps outside the trajectory are cut off.

    Attributes:
        slice_len: steps of a slice, at least 1.
        min_len: length of the shortest eligible trajectory: ``slice_len`` (strict) or 1.
        before: steps by which a slice may begin before its trajectory.
        after: steps by which it may go on after it.
        by_transition: a trajectory weighs as much as it has offsets, so that all offsets are equally likely. Otherwise
            every eligible trajectory weighs 1.
        past: where the ring has lost rows (:func:`gpubuf.kernels.rows.has_lost`), the oldest ``past`` steps do not
            count: trajectories have so many steps less.
    """

    slice_len: int
    min_len: int = 1
    before: int = 0
    after: int = 0
    by_transition: bool = False
    past: int = 0

    def offsets(self, length: int) -> int:
        """Number of offsets of a trajectory; 0 where it is not eligible."""
        if length < self.min_len:
            return 0
        m = min(self.slice_len, length)
        return length - m + 1 + min(self.before, m - 1) + min(self.after, m - 1)


def bit_levels(steps: int, envs: int) -> list[int]:
    """Words of every level of ``ends``: the flags first, one word for each environment last."""
    per_env = -(-steps // 64)
    sizes = [per_env * envs]
    while per_env > 1:
        per_env = -(-per_env // 64)
        sizes.append(per_env * envs)
    return sizes


def level_sizes(steps: int, envs: int, fan_out: int) -> list[int]:
    """Length of every level of ``sums``, padded to a multiple of the fan-out: the words first, the root (1) last."""
    count = -(-steps // 64) * envs
    sizes = [-(-count // fan_out) * fan_out]
    while (count := -(-count // fan_out)) > 1:
        sizes.append(-(-count // fan_out) * fan_out)
    return [*sizes, 1]


def new_index(steps: int, envs: int, fan_out: int, device: torch.device | str) -> tuple[Tensor, Tensor]:
    """``(ends, sums)`` of an empty ring."""
    ends = torch.zeros(sum(bit_levels(steps, envs)), dtype=torch.int64, device=device)
    return ends, torch.zeros(sum(level_sizes(steps, envs, fan_out)), dtype=torch.int64, device=device)


update = define(
    "trajectories_update(Tensor(a!) ends, Tensor(b!)? sums, Tensor(c!) ring, Tensor signals, bool by_id, int n,"
    " int steps, int envs, int fan_out, int slice_len, int min_len, int before, int after, bool by_transition,"
    " int past) -> ()",
    __name__,
)
"""``update(ends, sums, ring, signals, by_id, n, steps, envs, fan_out, *rule)``: the newest ``n`` steps were written.

Call it when the rows are in the storage and the ring has moved on. It reads the signals of those steps and recomputes
their words, those of the oldest ``past`` steps, the word of the previous virtual end, and that of the first end after
these, whose trajectory may have lost its head. With ``n >= steps`` it rebuilds the index from all steps in the ring,
whatever it held before; bits of other steps become zero. Without ``sums``, for who reads ``ends`` alone, there are no
weights. O(n log N), no host sync.
"""


resum = define(
    "trajectories_resum(Tensor ends, Tensor(a!) sums, Tensor ring, int steps, int envs, int fan_out, int slice_len,"
    " int min_len, int before, int after, bool by_transition, int past) -> ()",
    __name__,
)
"""``resum(ends, sums, ring, steps, envs, fan_out, *rule)``: recompute all sums, for another rule.

O(N / 64 + trajectories). No host sync.
"""


Slices = tuple[Tensor, Tensor, Tensor]


def new_slices(like: Tensor, n: int, slice_len: int) -> Slices:
    """Uninitialised ``(index, length, last)`` of ``n`` slices, on the device of an int64 tensor."""
    rows = n * slice_len
    return like.new_empty(rows), like.new_empty(n), like.new_empty(rows, dtype=torch.bool)


draw = define(
    "trajectories_draw(Tensor ends, Tensor sums, Tensor ring, Tensor(a!) rng, Tensor? rank, int n, int steps, int envs,"
    " int fan_out, int slice_len, int min_len, int before, int after, bool by_transition, int past)"
    " -> (Tensor, Tensor, Tensor)",
    __name__,
    fake=lambda ends, sums, ring, rng, rank, n, steps, envs, fan_out, slice_len, *_: new_slices(ends, n, slice_len),
)
"""``draw(ends, sums, ring, rng, rank, n, steps, envs, fan_out, *rule) -> (index, length, last)``: ``n`` slices.

Slice i uses the uniforms ``u`` and ``v`` at random offsets ``2 i`` and ``2 i + 1``; the offset moves on by ``2 n``.
A unit of the total weight selects the trajectory: unit ``rank[i]`` (int64 ``[n]``), or ``min(floor(u * total), total -
1)`` if ``rank`` is None. Units are counted word by word, and by rising step within a word. The virtual offset, counted
from the first possible one, is the unit's number within its trajectory (``by_transition``), or
``min(floor(v * offsets), offsets - 1)``.

Returns:
    ``index`` int64 ``[n * slice_len]``, flat rows in order of time, wrapped around the ring. A shorter slice repeats
    its last row. ``length`` int64 ``[n]``, steps of each slice. ``last`` bool ``[n * slice_len]``, set at the last step
    of each slice (position ``length - 1``) and nowhere else.

Raises:
    RuntimeError: no trajectory is eligible (CPU); the text states the longest length and ``min_len``.
    IndexError: a rank is not in ``[0, total)`` (CPU). On a GPU such a slice has ``NO_ROW`` in every row, length 0 and
        no last step. No host sync.
"""


slices = define(
    "trajectories_slices(Tensor ends, Tensor ring, Tensor start, int slice_len, int steps, int envs)"
    " -> (Tensor, Tensor, Tensor)",
    __name__,
    fake=lambda ends, ring, start, slice_len, steps, envs: new_slices(start, start.shape[0], slice_len),
)
"""``slices(ends, ring, start, slice_len, steps, envs) -> (index, length, last)``: slices from given rows.

``start`` int64 ``[n]``, flat rows. A slice goes on to the end of its trajectory, for ``slice_len`` steps at most.
Returns as :data:`draw`.

Raises:
    IndexError: a row is not stored (CPU). On a GPU the slice has ``NO_ROW`` in every row, and length 0. No host sync.
"""


bounds = define(
    "trajectories_bounds(Tensor ends, Tensor ring, Tensor row, int steps, int envs) -> Tensor",
    __name__,
    fake=lambda ends, ring, row, steps, envs: row.new_empty(3, row.shape[0]),
)
"""``bounds(ends, ring, row, steps, envs)``: first row, last row and length of each row's trajectory, int64 ``[3, n]``.

``row`` int64 ``[n]``, flat. It searches the previous and the next end from each row, in O(log64 T).

Raises:
    IndexError: a row is not stored (CPU). On a GPU the result is (NO_ROW, NO_ROW, 0). No host sync.
"""


class Demand(NamedTuple):
    """What :data:`update_eligible` asks of rows: see there."""

    need: int = 1
    starts_too: bool = False
    before: int = 0
    past: int = 0


def oldest_touched(before: int, past: int, steps: int) -> int:
    """Number of the oldest steps that :data:`update_eligible` looks at."""
    return min(max(before, past) + 1, steps)


def touched_rows(n: int, need: int, steps: int, envs: int, before: int = 0, past: int = 0) -> int:
    """Number of rows that :data:`update_eligible` returns."""
    return min(n + need - 1 + oldest_touched(before, past, steps), steps) * envs


update_eligible = define(
    "trajectories_update_eligible(Tensor(a!) eligible, Tensor ends, Tensor ring, int n, int need, bool starts_too,"
    " int steps, int envs, int before=0, int past=0) -> Tensor",
    __name__,
    fake=lambda eligible, ends, ring, n, need, starts_too, *shape: eligible.new_empty(touched_rows(n, need, *shape)),
)
"""``update_eligible(eligible, ends, ring, n, need, starts_too, steps, envs, before, past) -> rows``: what may be drawn.

Call it after :data:`update` for the newest ``n`` steps. A trajectory counts from its step ``before`` on, counted from
0, and where the ring has lost rows, the oldest ``past`` steps do not count. A stored row is eligible if it counts, and
if ``need`` or more steps remain in its trajectory, itself included, or, with ``starts_too``, if it is the first that
counts. Bit ``r % 64`` of ``eligible[r // 64]`` (int64 ``[eligible_words(T * E)]``) says so for row r. A write can
change the ``n`` steps that it wrote, the ``need - 1`` before them, whose trajectory has grown, and the oldest
``max(before, past) + 1`` steps, which come after them: their trajectory may have lost its head. Only the bits of these
steps are recomputed.

Returns:
    int64 ``[touched_rows(n, need, T, E, before, past)]``: the rows of these steps, contiguous in the ring, for the
    refresh of a tree. With ``n >= steps`` all rows are recomputed. No host sync.
"""


class ReturnRule(NamedTuple):
    """How returns add up. ``torch.tensor(rule, dtype=torch.float64)`` is the argument of :data:`update_returns`.

    Attributes:
        gamma: the discount.
        scale, offset: a reward is ``stored * scale + offset``.
    """

    gamma: float
    scale: float = 1.0
    offset: float = 0.0


update_returns = define(
    "trajectories_update_returns(Tensor(a!) returns, Tensor ends, Tensor(b!) ring, Tensor rewards, Tensor rule,"
    " int dtype, int n, int steps, int envs) -> ()",
    __name__,
)
"""``update_returns(returns, ends, ring, rewards, rule, dtype, n, steps, envs)``: the newest ``n`` steps may have ended.

Call it after :data:`update`. The return to go of a row is the discounted sum of the rewards from it to the end of its
trajectory: ``G_t = r_t + gamma * G_(t+1)``, and ``r_t`` at a set end flag. ``returns``, float32 ``[T * E, elements]``,
gets that of all rows of each trajectory that ends in those steps, and NaN in those rows of them whose trajectory is in
progress. Other rows stay as they are: what comes before the oldest step changes no return. With ``n >= steps`` all rows
are computed anew.

``rewards`` is int64 ``[1, 5]``, an entry of the table of :mod:`gpubuf.kernels.rows`, and ``dtype`` the code of what it
stores. ``rule`` is float64 ``[3]``, see :class:`ReturnRule`. Sums are float64, rounded once to float32. On a GPU blocks
of steps are scanned, so that the order of the additions differs. One program has a trajectory: nobody else writes its
rows. One launch, O(n + steps of the trajectories that have ended), no host sync. On a CPU rewards that are not stored
as float32 take the plain definition, which looks at the flags of all steps.

Raises:
    TypeError, ValueError: a tensor has another shape, dtype or device, or ``dtype`` is no code of :data:`rows.DTYPES`.

Formula: the return, Sutton and Barto, "Reinforcement Learning", 2nd edition, section 3.3.
"""
