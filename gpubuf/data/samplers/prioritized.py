"""Proportional prioritized sampling (Schaul et al., "Prioritized Experience Replay", ICLR 2016)."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor

from gpubuf.data.arguments import check_count
from gpubuf.data.operation import operation
from gpubuf.data.recording import at_replays, current
from gpubuf.data.samplers.base import Sampler
from gpubuf.data.samplers.priorities import check_beta, exponent, refuse_negative, refuse_unusable, rows_at, vector
from gpubuf.data.samplers.shards import Shards
from gpubuf.data.samplers.sum_tree import SumTree
from gpubuf.data.samplers.trajectory_index import TrajectoryBounds
from gpubuf.data.storage.end_bits import EndBits
from gpubuf.data.storage.indexing import as_positions
from gpubuf.data.storage.placement import IndexBytes
from gpubuf.data.storage.plan import RowPlan
from gpubuf.data.storage.rows import NO_ROWS
from gpubuf.data.storage.storage import TensorStorage
from gpubuf.kernels.sum_tree import ALPHA, EPS, REFUSED, eligible_words
from gpubuf.kernels.trajectories import Demand
from gpubuf.serialization import need

REDUCTIONS = ("max", "min", "mean", "median")
DTYPES = (torch.float32, torch.float64)


class PrioritizedSampler(Sampler):
    """Draws row i with probability ``q_i / sum(q)``, where ``q_i = (priority_i + eps) ** alpha``.

    The importance weight of a draw is ``(q_i / q_min) ** -beta``, with q_min the smallest positive weight in the
    buffer: the largest importance weight is 1. A new row gets priority 1.0 until the first priority is given, and
    from then on the running maximum of those given. A row of weight zero is legal, and never drawn.

    Priorities that are NaN, infinite or negative are refused: on CPU by a ValueError before anything changes; on
    a GPU, where an exception would need a host sync, the old priority stays and :meth:`raise_if_refused`, called by
    everything that synchronises anyway (``state_dict``, setting ``alpha``), raises.

    With windows (docs/windows.md) a row is drawn only if no window of its reaches steps that were overwritten, or where
    it must be whole: a bitmap, which every write keeps up to date, tells the tree which rows these are, in one launch
    more per write and none per draw. Importance weights are normalised by the smallest of these.

    Weights are kept within the range of normal float32 numbers, so that a positive one stays positive. If this
    changes one, a warning says so, once: on CPU at once, on a GPU when refused priorities raise.

    Args:
        max_capacity: the capacity of a buffer that is given no storage, at least 1. The tree takes the storage's size.
        alpha: exponent of the priorities, finite, at least 0. Setting the attribute re-transforms every row,
            O(capacity).
        beta: exponent of the importance weights, finite, at least 0. The attribute may be set to a float or a 0-dim
            tensor, also between replays of a captured graph. The value of a tensor on a GPU is not checked.
        eps: added to every priority, finite, at least 0.
        dtype: float32 or float64, accepted for compatibility. Weights are float32 at the leaves and float64 in all
            sums.
        reduction: how a priority with more dimensions than its batch becomes one number per row: ``"max"``,
            ``"min"``, ``"mean"`` or ``"median"``.
        max_priority_within_buffer: new rows get the largest priority now in the buffer, in O(1), instead of the
            largest ever given.
        device: accepted for compatibility: the tree lives where the storage lives.
        stratified: cut the total weight into as many equal parts as a batch has rows, and draw one row from each, as
            the paper does. A row is drawn as often as without, on average; batches differ less from each other. Rows of
            a batch are in the order of the storage then.
        replacement: accepted as True: rows are drawn with replacement.
        process_group: ranks that hold a shard each, with priorities of its own rows. The weights are then those of one
            buffer of all rows, q_min the smallest weight on any rank, times the sum of the weights in this shard over
            the mean of the ranks' sums: with that factor, which may lift weights above 1, the mean gradient of the
            ranks has the expectation of one buffer's (docs/scale.md). The running maximum, which new rows get, is that
            of the shard. One all-gather of 24 bytes per rank and draw, no host sync with NCCL. One rank is exactly a
            sampler without a group.

    Raises:
        ValueError: an argument is out of range.
        NotImplementedError: ``dtype`` is something else.
        TypeError: ``replacement`` is False, or ``process_group`` none of which this process is a rank.
    """

    has_priorities = True
    parts: ClassVar[tuple[str, ...]] = ("_tree", "_eligible")
    drawn_state: ClassVar[tuple[str, ...] | None] = ()
    settings: ClassVar[tuple[str, ...]] = ("stratified", "_tree.eligible")
    # What rows must have to be drawn, and the bitmap of those that do; None: all rows may be drawn, or it is not known.
    _demand: Demand | None = None
    _eligible: Tensor | None = None
    # Has the storage know where trajectories end.
    _bounds: TrajectoryBounds | None = None

    def __init__(
        self,
        max_capacity: int,
        alpha: float,
        beta: float,
        eps: float = 1e-8,
        dtype: torch.dtype = torch.float,
        reduction: str = "max",
        max_priority_within_buffer: bool = False,
        device: torch.device | str | None = None,
        *,
        stratified: bool = False,
        replacement: bool = True,
        process_group: dist.ProcessGroup | None = None,
    ) -> None:
        super().__init__()
        given: Any = max_capacity
        check_count(int(given) if isinstance(given, float) and given.is_integer() else given, "max_capacity")
        refuse_negative(alpha, beta)
        check_beta(beta)
        if dtype not in DTYPES:
            raise NotImplementedError(f"dtype {dtype} not supported by {type(self).__name__}: give torch.float32")
        self.require_replacement(replacement)
        if reduction not in REDUCTIONS:
            raise ValueError(f"reduction must be one of {REDUCTIONS}, got {reduction!r}")
        self.max_capacity, self.dtype = int(max_capacity), dtype
        self._device = torch.device(device or "cpu")
        self.reduction = reduction
        self.max_priority_within_buffer = max_priority_within_buffer
        self.stratified = stratified
        self._alpha, self._eps = exponent("alpha", alpha), exponent("eps", eps)
        self._beta: float | Tensor = beta
        self._tree: SumTree | None = None
        self.shards = Shards.of(process_group)

    # Hyperparameters

    @property
    def alpha(self) -> float:
        """Exponent of the priorities."""
        return self._alpha

    @alpha.setter
    @operation
    def alpha(self, value: float) -> None:
        refuse_negative(alpha=value)
        value = exponent("alpha", value)
        at_replays().refuse("alpha is set, which transforms every priority: set it between calls of the step")
        if self._tree:
            self.raise_if_refused()
            # An interrupted change is finished by the next operation of the buffer, as that of priorities is.
            self.storage.changing(self._set_alpha, self._tree, value)
        self._alpha = value

    def _set_alpha(self, tree: SumTree, value: float) -> None:
        tree.set_alpha(value)
        self._alpha = value

    @property
    def beta(self) -> float | Tensor:
        """Exponent of the importance weights, as it was set."""
        return self._beta

    @beta.setter
    @operation
    def beta(self, value: float | Tensor) -> None:
        check_beta(value)
        if not isinstance(value, Tensor):
            at_replays().refuse(
                "beta is set to a number, which would stay: set it to a tensor on the device, or between calls"
            )
        at_replays().undo(functools.partial(setattr, self, "_beta", self._beta))
        if self._tree:
            self._tree.set_beta(value)
        self._beta = value

    @property
    def eps(self) -> float:
        """Added to every priority."""
        return self._eps

    @property
    def device(self) -> torch.device:
        """Where the tree is. Before the first write: where the storage will be, as far as that is known."""
        return self.storage.device if self._has_rows else self._device

    @property
    def default_priority(self) -> Tensor | float:
        """Priority of the next new row, before the transformation: a 0-dim device tensor. No host sync."""
        tree = self._tree
        if not tree:
            return 1.0
        if not self.max_priority_within_buffer:
            return tree.max_priority
        # With alpha 0 all weights are 1, whatever the priorities.
        priority = tree.maximum ** (1 / tree.scalars[ALPHA]) - tree.scalars[EPS]
        return torch.where(tree.maximum > 0, torch.where(tree.scalars[ALPHA] > 0, priority, tree.max_priority), 1.0)

    @property
    def tree(self) -> SumTree:
        """The sum tree.

        Raises:
            RuntimeError: nothing has been written yet.
        """
        if not self._has_rows:
            raise RuntimeError("the sampler has no tree before the first write")
        return self._tree_made()

    def _tree_made(self, n_new: int = 0) -> SumTree:
        """The tree over the storage, made at the first use.

        Rows that are there already count as new, except for ``n_new`` that the caller is about to treat.
        """
        if not self._tree:
            at_replays().refuse("the first write or sample makes the tree: do it before")
            storage = self.storage
            tree = SumTree(storage.max_size, alpha=self._alpha, eps=self._eps, device=storage.device)
            tree.set_beta(self._beta)
            self._restrict_to(tree, self._demanded)
            if len(storage) > n_new:
                tree.mark(torch.arange(len(storage), device=storage.device))
            self._tree = tree
        return self._tree

    # Which rows may be drawn

    def read_from(self, reader: RowPlan) -> None:
        super().read_from(reader)
        if demanded := self._demanded:
            self._bounds = TrajectoryBounds(reader.recipe)
            self.storage.readers.serve(self._bounds)
        self._require(demanded)

    def forget_storage(self) -> None:
        # First: an interrupt may leave no rows that it is true of.
        self._demand = None
        super().forget_storage()

    def unbind(self) -> None:
        super().unbind()
        self._bounds = None

    @property
    def _demanded(self) -> Demand | None:
        """What rows must have to be drawn from now on."""
        before, after = self.reader.recipe.whole or (0, 0)
        demand = Demand(after + 1, before=before, past=self.reader.recipe.past)
        return None if demand == Demand() else demand

    @property
    def _ends(self) -> EndBits:
        """Where trajectories end."""
        assert self.storage.readers.end_bits
        return self.storage.readers.end_bits

    def _require(self, demand: Demand | None) -> None:
        """Draw rows that have what is demanded, from now on. O(capacity) if that is new."""
        if demand != self._demand and self._tree:
            at_replays().after(functools.partial(setattr, self, "_demand", demand))
            at_replays().undo(functools.partial(setattr, self, "_demand", self._demand))
            self.storage.changing(self._restrict_to, self._tree, demand)

    def _restrict_to(self, tree: SumTree, demand: Demand | None) -> None:
        eligible = None
        if demand:
            eligible, storage = self._eligible, self.storage
            if eligible is None:
                at_replays().refuse("the first write or sample finds the rows that may be drawn: do it before")
                eligible = torch.zeros(eligible_words(storage.max_size), dtype=torch.int64, device=storage.device)
            self._ends.update_eligible(eligible, self._ends.steps, demand)
        if eligible is not None or self._demand:
            tree.restrict(eligible)
        # In this order: who is interrupted between them does it again.
        self._eligible, self._demand = eligible, demand

    def _nothing_eligible(self, index: EndBits) -> str:
        """The message for a user if no row can be drawn. Synchronises."""
        assert self._demand
        rows = torch.arange(len(self.storage), device=index.ends.device)
        before, longest = max(self._demand.before, self._demand.past), int(index.bounds(rows)[2].max())
        return (
            f"no row can be drawn: windows need {before} steps before it that were not overwritten, and it with those "
            f"after it {self._demand.need} steps of its trajectory. The longest trajectory has {longest}, and no such "
            "row has a positive priority"
        )

    # Sampling

    def choose(self, n: int) -> tuple[Tensor, dict[Any, Tensor]]:
        """Positions by priority, and ``"priority_weight"``, float32 ``[n]``. One launch, no host sync."""
        tree, random = self._tree or self._tree_made(), self._random
        # Past a call where there is nothing to do: every sample comes here.
        if not random or current.recording:
            random = self.random_state(tree.leaves.device)
        factor = None
        if self.shards:
            # Before the draw, which may raise on this rank alone.
            factor = self.shards.correction(tree.total, tree.minimum, tree.beta, tree.largest_given)
        try:
            positions, weight = tree.draw(n, random, self.stratified)
        except RuntimeError as error:
            if not self._demand:
                raise
            raise RuntimeError(self._nothing_eligible(self._ends)) from error
        return positions, {"priority_weight": weight if factor is None else weight.mul_(factor)}

    def choose_batches(self, n: int, batches: int) -> tuple[Tensor, dict[Any, Tensor]]:
        """As :meth:`choose`. Stratified batches are drawn one by one: each has a row from every part of the weight."""
        if not self.stratified:
            return self.choose(n * batches)
        drawn = [self.choose(n) for _ in range(batches)]
        weight = torch.cat([info["priority_weight"] for _, info in drawn])
        return torch.cat([positions for positions, _ in drawn]), {"priority_weight": weight}

    def can_sample(self, storage: TensorStorage, batch_size: int) -> bool:
        """Whether there are rows to draw. Synchronises with windows."""
        return super().can_sample(storage, batch_size) and (not self._demanded or float(self._tree_made().total) > 0)

    # Priorities

    def on_write(self, positions: Tensor, priority: Tensor | None) -> None:
        """Give the rows of one write their priority, in one tree update."""
        tree, touched = self._tree_made(positions.numel()), None
        if self._demand:
            assert self._eligible is not None
            ends = self._ends
            touched = ends.update_eligible(self._eligible, positions.numel() // ends.envs, self._demand)
        if priority is None:
            tree.mark(positions, within_buffer=self.max_priority_within_buffer, touched=touched)
            return
        if positions.device.type != "cpu":
            # These rows are new: a refused priority must not leave them with that of the row before.
            bad = ~(priority >= 0) | torch.isinf(priority)
            tree.refused.add_(bad.sum())
            priority = torch.where(bad, tree.max_priority.float(), priority)
        tree.update(positions, priority, ring=self.storage.ring.counters)
        if touched is not None:
            tree.refresh(touched)

    def update_priority(
        self, index: Any, priority: Any, *, storage: TensorStorage | None = None, generation: Tensor | None = None
    ) -> None:
        """Set the priorities of rows; of duplicates the last one wins. No host sync.

        Args:
            index: as sampled: ``[n]``, ``[n, ndim]`` or a tuple of one tensor per dimension. A position of -1 is
                ignored; negative coordinates count from the end of their dimension (in the first one, on a CPU, from
                the last step stored).
            priority: ``[n]``, any shape with n elements, or a number for all rows; any real dtype.
            storage: the storage that the index refers to, if the sampler serves none yet; as TorchRL passes it.
            generation: ``"index_generation"`` of the sample. Rows overwritten since are left alone.

        Raises:
            RuntimeError: the priorities are not as many as the indices, or the storage has no rows yet.
            ValueError: a priority is NaN, infinite or negative (CPU).
            IndexError: an index, or a coordinate in its dimension, is out of range (CPU; a GPU refuses it as it does a
                priority).
        """
        if storage is not None:
            self._serve(storage)
        own = self.storage
        if own.rows is NO_ROWS:
            raise RuntimeError("cannot update priorities in a storage to which nothing has been written")
        if not isinstance(index, Tensor) or index.dim() != 1 or index.dtype is not torch.int64:
            # Those of a one-dimensional storage are positions already.
            index = as_positions(index, own.shape, own.device, lambda: own.steps_stored)
        if generation is not None and own.ring.rewritten is not None:
            index = index.to(own.device)
            generation = own.ring.without_rewrites(index, vector(generation, torch.int64, index))
        tree = self._tree or self._tree_made()
        tree.update(index, priority, ring=own.ring.counters, generation=generation)

    def mark_update(self, index: Any, *, storage: TensorStorage | None = None) -> None:
        """Rows were written elsewhere: give them the priority of new rows. IndexError if they are not stored (CPU)."""
        if storage is not None:
            self._serve(storage)
        self._tree_made().mark(rows_at(index, self.storage), within_buffer=self.max_priority_within_buffer)
        self.rows_changed()

    def rows_changed(self) -> None:
        super().rows_changed()
        if self._tree and (self._demand or self._demanded):
            self._restrict_to(self._tree, self._demanded)

    def reduce(self, priority: Tensor, n: int, masks: Sequence[Tensor] = ()) -> Tensor:
        """A priority of more dimensions than the batch, as one number for each of ``n`` rows.

        Elements that a mask marks false do not enter it, if the mask has one for each of them.
        """
        if priority.numel() == n:
            return priority if priority.dim() == 1 else priority.reshape(n)
        rows = priority.reshape(n, -1)
        counts = [mask.reshape(rows.shape).to(rows.device) for mask in masks if mask.numel() == priority.numel()]
        if counts:
            return self._reduce_some(rows, functools.reduce(torch.logical_and, counts))
        if self.reduction == "mean":
            return rows.mean(-1)
        if self.reduction == "median":
            return rows.median(-1).values
        return rows.amax(-1) if self.reduction == "max" else rows.amin(-1)

    def _reduce_some(self, rows: Tensor, counts: Tensor) -> Tensor:
        """One number for each row that has elements that count; any number for the others."""
        if self.reduction == "mean":
            return torch.where(counts, rows, 0).sum(-1) / counts.sum(-1)
        if self.reduction == "max":
            return torch.where(counts, rows, -math.inf).amax(-1)
        ordered = torch.where(counts, rows, math.inf).sort(-1).values
        middle = (counts.sum(-1, keepdim=True) - 1).clamp(min=0) // 2
        return ordered.gather(-1, middle if self.reduction == "median" else torch.zeros_like(middle)).squeeze(-1)

    def check_priority(self, priority: Tensor) -> None:
        """Raise for priorities that come with a write, before anything is written.

        Raises:
            ValueError: a priority on the CPU is NaN, infinite or negative. A GPU refuses it later, without a sync.
        """
        if priority.device.type == "cpu":
            refuse_unusable(priority)

    def raise_if_refused(self) -> None:
        """Report priorities that a GPU has refused since the last call, or could only clamp. Synchronises.

        Raises:
            ValueError: there were any. The count starts again from zero.
        """
        if not self._tree:
            return
        self._tree.warn_of_clamped()
        refused = int(self._tree.refused)
        if refused:
            self._tree.refused.zero_()
            raise ValueError(
                f"{refused} priorities were NaN, infinite or negative, and were refused; the rows kept their old ones"
            )

    def mend(self) -> None:
        if self._tree:
            self._tree.mend()
            self._alpha = self._tree.alpha
        super().mend()

    # State

    def empty(self) -> None:
        super().empty()
        if self._tree:
            self._tree.clear(reset=True)
        if self._eligible is not None:
            self._eligible.zero_()

    def move(self) -> None:
        super().move()
        if self._tree and self._eligible is not None:
            # A tree that was copied knows nothing of it.
            self._tree.restrict(self._eligible)

    def index_bytes(self, shape: tuple[int, ...], device_type: str) -> IndexBytes:
        n = math.prod(shape)
        tree, eligible = SumTree.bytes_for(n, device_type), 8 * eligible_words(n) if self._demanded else 0
        return IndexBytes(tree=tree, index=eligible) + super().index_bytes(shape, device_type)

    def memory(self) -> IndexBytes:
        tree = self._tree.nbytes if self._tree else 0
        return IndexBytes(tree, -tree) + super().memory()

    def state_dict(self) -> dict[str, Any]:
        self.raise_if_refused()
        return {
            **super().state_dict(),
            "alpha": self._alpha,
            "beta": float(self._beta),
            "eps": self._eps,
            # Rows that it hasn't drawn from yet are new to it: the tree is made, and says so.
            "tree": self._tree_made().state_dict() if self._has_rows else None,
        }

    def load_state_dict(self, state: dict[str, Any], order: Tensor | None = None) -> None:
        storage = self.storage
        tree = state["tree"]
        if not tree:
            self.empty()
        else:
            if order is not None:
                leaves = torch.zeros(storage.max_size, dtype=torch.float32, device="cpu")
                leaves[: order.numel()] = tree["leaves"].cpu()[order]
                tree = {**tree, "leaves": leaves, "capacity": storage.max_size}
            self._tree_made().load_state_dict(tree)
            PrioritizedSampler.rows_changed(self)
        super().load_state_dict(state, order)
        self._alpha, self._beta, self._eps = state["alpha"], state["beta"], state["eps"]

    def check_state(self, state: dict[str, Any], capacity: int, size: int) -> None:
        super().check_state(state, capacity, size)
        for name in ("alpha", "beta", "eps"):
            number = state[name]
            need(
                type(number) in (int, float) and math.isfinite(number) and number >= 0,
                f"the checkpoint's {name} is {number!r}",
            )
        tree = state["tree"]
        if tree is None:
            return
        try:
            SumTree.check_state(tree, capacity)
        except (TypeError, LookupError, AttributeError) as error:
            raise ValueError("the checkpoint's tree is damaged") from error
        # One that has refused priorities is never saved.
        need(float(tree["hyper"][REFUSED]) == 0, "the checkpoint's tree has refused priorities")

    def __repr__(self) -> str:
        tree = f", tree={self._tree}" if self._tree else ""
        return f"{type(self).__name__}(alpha={self._alpha}, beta={float(self._beta)}, eps={self._eps}{tree})"
