"""A writer that keeps the rows of the highest rank.

:class:`Ranks` keeps the best ``capacity`` rows of all that it was shown, exactly as a heap does that sees one row after
the other: a row enters if there is room, or if its rank is above that of the worst row, whose place it takes. Of rows
of equal rank the one that came first leaves first.
"""

from __future__ import annotations

from typing import Any

import torch
from tensordict import TensorDictBase, is_tensorclass
from torch import Tensor

from gpubuf.data.hindsight import Hindsight
from gpubuf.data.recording import Unfinished, at_replays
from gpubuf.data.samplers.base import Sampler, is_tensor
from gpubuf.data.samplers.slices import SliceSampler
from gpubuf.data.storage.containers import Data, batch_shape
from gpubuf.data.storage.layout import as_key, as_written
from gpubuf.data.storage.plan import Recipe
from gpubuf.data.storage.ring import Ring
from gpubuf.data.storage.storage import TensorStorage
from gpubuf.data.storage.tree_layout import layout_of
from gpubuf.data.writers import DRAWN_KEYS, Writer
from gpubuf.integrations.torchrl.list_storage import UNLIMITED, ListStorage
from gpubuf.serialization import need

NEVER = 2**62
"""The age of places that are none: above those of all rows."""

#: Ages of places that hold no row: below those of all rows, and rising with the place.
_EMPTY = -(2**61)


def comparable(ranks: Tensor) -> Tensor:
    """Ranks as float64 numbers that have an order, above that of an empty place: NaN counts as the lowest."""
    lowest = torch.finfo(torch.float64).min
    return ranks.to(torch.float64).nan_to_num(nan=lowest, posinf=torch.inf, neginf=lowest)


class Ranks:
    """The ranks of the rows that are kept.

    The *least* of some places is the one of the lowest rank, and of these the oldest. A search looks at all places, in
    operations on whole vectors, without a host sync.

    Args:
        capacity: number of places.
        device: where the tensors live. They are changed in place.
        ranks: float64 ``[n]``, of the rows that lie at the first places; -inf where there is no row.
        ages: int64 ``[n]``: a row has a larger one than those that came before it. Default: they came in this order.
        counts: int64 ``[2]``: the age of the next row, and how many rows have entered and outlasted their batch.
    """

    def __init__(
        self,
        capacity: int,
        device: torch.device,
        ranks: Tensor,
        ages: Tensor | None = None,
        counts: Tensor | None = None,
    ) -> None:
        n, self._capacity = ranks.numel(), capacity
        counts = torch.tensor([n, n], device="cpu") if counts is None else counts
        self._counts = counts.to(device, copy=True, non_blocking=True)
        # After the places is one that is none.
        self._ranks = torch.full((capacity + 1,), -torch.inf, dtype=torch.float64, device=device)
        self._ages = torch.arange(capacity + 1, device=device) + _EMPTY
        self._ranks[capacity:], self._ages[capacity:] = torch.inf, NEVER
        self._ranks[:n].copy_(ranks)
        self._ages[:n].copy_(torch.arange(n, device=device) if ages is None else ages)

    @property
    def device(self) -> torch.device:
        """The device of the tensors."""
        return self._ranks.device

    @property
    def entered(self) -> int:
        """How many rows have entered. Synchronises."""
        return int(self._counts[1])

    @property
    def next_age(self) -> Tensor:
        """The age of the next row, 0-dim."""
        return self._counts[0].clone()

    def admit(self, ranks: Tensor) -> Tensor:
        """Show some rows, in the order in which they come. No host sync.

        With t the rank of the worst row that stays, a batch row above t enters, and one equal to t does if it comes
        while there is still a row below t. The rows that leave are those below t, then the oldest ones equal to t.

        Args:
            ranks: float64 ``[n]``, n at most the capacity, of :func:`comparable` numbers.

        Returns:
            The place of each row that stays, int64 ``[n]``, and -1 for the others. Rows that stay take the places of
            those that leave in the order in which these would leave.
        """
        n = ranks.numel()
        places = self._least(n)
        old = self._ranks.gather(0, places)
        threshold = torch.cat((old, ranks)).kthvalue(n + 1).values
        below, equal = (old < threshold).sum(), (old == threshold).sum()
        # The first so many that are not worse than the threshold replace the rows below it.
        reaching = ranks >= threshold
        early = reaching & (reaching.cumsum(0) <= below)
        late = (ranks > threshold) & ~early
        # A late one replaces a row equal to the threshold: those that were there, then those of this batch.
        own = early & (ranks == threshold)
        stays = (early | late) & ~(own & (own.cumsum(0) <= late.sum() - equal))
        place = places.gather(0, (stays.cumsum(0) - 1).clamp(min=0))
        # After the rows is a place that is none, for those that don't enter.
        target = torch.where(stays, place, self._capacity)
        ages = torch.where(stays, self._counts[0] + torch.arange(n, device=ranks.device), NEVER)
        self._ranks.scatter_(0, target, torch.where(stays, ranks, torch.inf))
        self._ages.scatter_(0, target, ages)
        self._counts.add_(torch.stack((torch.full_like(below, n), stays.sum())))
        return torch.where(stays, place, -1)

    def still_there(self, index: Tensor, first_age: Tensor) -> Tensor:
        """The places of rows, with -1 for those that have left since. No host sync.

        Args:
            index: int64 ``[n]``, as :meth:`admit` gave it.
            first_age: :attr:`next_age` before the first of them was shown.
        """
        ages = first_age + torch.arange(index.numel(), device=index.device)
        return torch.where(self._ages.gather(0, index.clamp(min=0)) == ages, index, -1)

    def state(self) -> tuple[Tensor, Tensor, Tensor]:
        """Ranks and ages of all places, and the counts, of now: copies. Synchronises."""
        ranks, ages = self._ranks[: self._capacity], self._ages[: self._capacity]
        return ranks.clone(), ages.clone(), self._counts.cpu().clone()

    def _least(self, n: int) -> Tensor:
        """The ``n`` least places, int64 ``[n]``, the least of them first. ``n`` is at most the capacity."""
        ranks, ages = self._ranks[: self._capacity], self._ages[: self._capacity]
        bound = ranks.topk(n, largest=False).values[-1]
        order = torch.where(ranks < bound, ages - NEVER, torch.where(ranks == bound, ages, NEVER))
        places = order.topk(n, largest=False, sorted=False).indices
        places = places.gather(0, ages.gather(0, places).argsort())
        return places.gather(0, ranks.gather(0, places).argsort(stable=True))


REDUCTIONS = ("max", "min", "mean", "median", "sum")


class UnrankedRowsError(TypeError, RuntimeError):
    """Rows have no keys, so no rank. A RuntimeError too, as TorchRL raises it."""


class TensorDictMaxValueWriter(Writer):
    """Keeps the rows of the highest rank, as many as the storage has room for.

    Rows enter in the order in which they come: if there is room, or if the rank is above that of the worst row, whose
    place they take. Of rows of equal rank the one that came first leaves first. So the rows that are kept do not depend
    on how they were cut into batches. A rank that is NaN counts as the lowest.

    A write looks at the ranks of all rows, without a host sync. A row takes a float64 and an int64 beside its data.

    ``extend`` returns the place of every row, and -1 for rows that were not kept, which samplers with priorities
    ignore. ``add`` returns an int, or None; on a GPU an int64 tensor ``[1]``.

    The rows of a :class:`ListStorage` are TensorDicts of any shapes; it needs a ``max_size``.

    Rows do not follow each other in time: the writer refuses samplers of slices, ``n_steps``, ``relabel`` and
    ``share_next``. To keep the best trajectories, make each of them a row: ``[n, T]`` data in one-dimensional storage.

    Args:
        rank_key: the key of the rank. Default: ``("next", "reward")``.
        reduction: how the elements of a row's rank become one: ``"sum"``, ``"mean"``, ``"median"``, ``"max"`` or
            ``"min"``.
        compilable: accepted for compatibility.

    Raises:
        ValueError: the reduction is unknown, or the storage has several dimensions.
    """

    in_order = False

    def __init__(self, rank_key: Any = None, reduction: str = "sum", compilable: bool = False) -> None:
        if reduction not in REDUCTIONS:
            raise ValueError(f"reduction must be one of {REDUCTIONS}, got {reduction!r}")
        self.rank_key = as_key(("next", "reward") if rank_key is None else rank_key)
        self.reduction = reduction
        self._ranks: Ranks | None = None
        # The ring whose rows these are the ranks of.
        self._of: Ring | None = None
        self._in_doubt = False

    def register_storage(self, storage: TensorStorage) -> None:
        """Write to ``storage``. Rows that it holds are ranked by what they hold.

        Raises:
            ValueError: it has several dimensions, no capacity, or stores observations once.
        """
        if storage.max_size == UNLIMITED:
            raise ValueError("TensorDictMaxValueWriter keeps so many rows: give the ListStorage a max_size")
        if storage.ndim > 1:
            raise ValueError(
                "TensorDictMaxValueWriter is not compatible with storages with more than one dimension, here "
                f"{storage.ndim} dimensions: it ranks rows. For trajectories as rows use data of shape [n, T]"
            )
        super().register_storage(storage)
        if self._storage.options.share_next:
            raise ValueError("TensorDictMaxValueWriter has no row after another: it can't be used with share_next")
        self._storage.ignored_keys = DRAWN_KEYS
        self._ranks = None

    def attach(self, sampler: Sampler, recipe: Recipe, relabel: Hindsight | None) -> None:
        """Raise for parts that need rows which follow each other.

        Raises:
            ValueError: there is one.
        """
        found = f"a {type(sampler).__name__}" if isinstance(sampler, SliceSampler) else None
        found = f"n_steps={recipe.n_steps}" if recipe.n_steps > 1 else found
        found = "relabel" if relabel is not None else found
        if found is not None:
            raise ValueError(
                "TensorDictMaxValueWriter keeps rows that don't follow each other in time: it can't be used with "
                f"{found}"
            )

    # Writing

    def extend(self, data: Data) -> Tensor:
        """Write the rows of a batch that are kept. No host sync.

        Raises:
            KeyError: the batch has no rank.
            UnrankedRowsError: it is not a TensorDict.
            ValueError: a key, shape or dtype differs from the storage's, or something is no tensor.
        """
        storage = self._storage
        if isinstance(storage, ListStorage):
            return self._extend_objects(storage, storage.as_items(data))
        (n,) = batch_shape(data, 1)
        if n == 0:
            return torch.empty(0, dtype=torch.int64, device=storage.device if storage.initialized else None)
        ranks = self.ranks_of(data)
        if not storage.initialized:
            if layout_of(data, 1).host:
                raise ValueError("TensorDictMaxValueWriter takes rows of tensors only: text beside them has no rank")
            storage.initialize(data)
        if storage.host is not None:
            raise ValueError("TensorDictMaxValueWriter keeps rows of tensors: leave out what is none")
        sources = storage.written_layout.collect(data, 1)
        index = self._admit(ranks)
        self._write(index, list(range(len(sources))), sources)
        self._in_doubt, storage.unfinished = False, None
        return index

    def _extend_objects(self, storage: ListStorage, items: list[Any]) -> Tensor:
        if not items:
            return torch.empty(0, dtype=torch.int64, device="cpu")
        index = self._admit(self._ranks_of_all(items))
        storage.place(index.tolist(), items)
        self._count(index)
        self._in_doubt, storage.unfinished = False, None
        return index

    def _admit(self, ranks: Tensor) -> Tensor:
        """The places of new rows of these ranks, and -1 for those that are not kept."""
        storage = self._storage
        kept, ranks = self._kept(), ranks.to(storage.device, non_blocking=True)
        storage.unfinished, self._in_doubt = Unfinished(storage.written), True
        first_age = kept.next_age
        parts = [kept.admit(some) for some in ranks.split(storage.max_size)]
        # Rows of an earlier part may have left for those of a later one.
        return parts[0] if len(parts) == 1 else kept.still_there(torch.cat(parts), first_age)

    def _write(self, index: Tensor, keys: list[int], sources: list[Tensor]) -> None:
        ring = self._storage.ring
        stays, positions = index >= 0, index.clamp(min=0)
        # No row has the generation -1: the kernels leave out what isn't kept.
        laps = ring.laps(positions)
        self._storage.update(positions, keys, sources, torch.where(stays, laps, -1))
        self._count(index)

    def _count(self, index: Tensor) -> None:
        ring = self._storage.ring
        positions = index.clamp(min=0)
        ring.rewrite(positions, (index >= 0) & (ring.generations(positions) >= 0))
        ring.fill(index.numel())
        self._storage.followers.on_write(index)

    def _ranks_of_all(self, rows: list[Any]) -> Tensor:
        found = [torch.empty(0, dtype=torch.float64, device="cpu")]
        for row in rows:
            ranked = isinstance(row, TensorDictBase) or is_tensorclass(row)
            found.append(self.ranks_of(row.unsqueeze(0) if ranked else row))
        return torch.cat(found)

    def ranks_of(self, data: Data) -> Tensor:
        """The ranks of ``[n]`` rows: float64 ``[n]``.

        Raises:
            KeyError: they have none.
            UnrankedRowsError: the rows are not a TensorDict.
        """
        if not isinstance(data, TensorDictBase) and not is_tensorclass(data):
            raise UnrankedRowsError(
                "TensorDictMaxValueWriter ranks the rows of TensorDicts: it expects data to be a tensor collection, "
                f"got a {type(data).__name__}"
            )
        value = data.get(as_written(self.rank_key), None)
        if value is None:
            raise KeyError(f"the batch has no rank_key {as_written(self.rank_key)!r}")
        value = value.detach().reshape(value.shape[0], -1)
        if value.shape[1] == 1:
            return comparable(value[:, 0])
        if not value.is_floating_point():
            value = value.to(torch.float64)
        if self.reduction == "median":
            return comparable(value.median(1).values)
        reduce = {"sum": value.sum, "mean": value.mean, "max": value.amax, "min": value.amin}[self.reduction]
        return comparable(reduce(1))

    def _kept(self) -> Ranks:
        """The ranks of the rows that are stored."""
        storage, kept = self._storage, self._ranks
        ring = storage.ring
        if kept is not None and self._of is ring and kept.device == ring.counters.device:
            return kept
        at_replays().refuse("the ranks of the rows are made at the first write: write before")
        if kept is not None and self._of is ring:
            return self._adopt(*kept.state())
        size = len(storage)
        stored = storage[:] if size else []
        ranks = self.ranks_of(stored) if not isinstance(stored, list) else self._ranks_of_all(stored)
        return self._adopt(ranks, counts=torch.tensor([size, storage.rows_written], device="cpu"))

    def _adopt(self, ranks: Tensor, ages: Tensor | None = None, counts: Tensor | None = None) -> Ranks:
        found = Ranks(self._storage.max_size, self._storage.device, ranks, ages, counts)
        self._ranks, self._of = found, self._storage.ring
        return found

    @property
    def _cursor(self) -> int:
        """The place of the next row while there is room, as programs for TorchRL read it."""
        return len(self._storage) % self._storage.max_size

    @property
    def write_count(self) -> int:
        """Number of rows that were kept by the write that they came with. Synchronises with a GPU."""
        current = self._ranks is not None and self._of is self._storage.ring
        return self._ranks.entered if current and self._ranks is not None else super().write_count

    # The life of the rows

    def empty(self, recount: bool = False) -> None:
        if self._ranks is not None and self._storage.initialized:
            counts = torch.tensor([0, 0 if recount else self.write_count], device="cpu")
            self._adopt(torch.empty(0, dtype=torch.float64, device="cpu"), counts=counts)

    def mend(self) -> None:
        """Rank the rows by what they hold, if a write was interrupted."""
        if self._in_doubt:
            self._ranks, self._in_doubt = None, False

    def state_dict(self) -> dict[str, Any]:
        """The ranks of the rows, in which order they came, and how many there were. Synchronises."""
        if not self._storage.initialized:
            return {}
        size, (ranks, ages, counts) = len(self._storage), self._kept().state()
        return {"ranks": ranks[:size], "ages": ages[:size], "counts": counts}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore :meth:`state_dict`. Rows of another writer are ranked by what they hold."""
        self._ranks = None
        if state.get("ranks") is not None:
            self._adopt(state["ranks"], state["ages"], state["counts"])

    def check_state(self, state: dict[str, Any], capacity: int, size: int) -> None:
        if state.get("ranks") is None:
            return
        ages, counts = state["ages"], state["counts"]
        need(is_tensor(state["ranks"], torch.float64, (size,)), f"the checkpoint has no ranks of {size} rows")
        need(is_tensor(ages, torch.int64, (size,)), f"the checkpoint has no order of {size} rows")
        need(is_tensor(counts, torch.int64, (2,)), "the checkpoint has no counts of ranked rows")
        usable = bool((ages >= 0).all() and (ages < counts[0]).all() and ages.unique().numel() == size)
        need(usable, "the checkpoint's order of ranked rows is impossible")
        need(not bool(state["ranks"].isnan().any() or state["ranks"].isneginf().any()), "a rank is no number")

    def __repr__(self) -> str:
        return f"{type(self).__name__}(rank_key={as_written(self.rank_key)!r}, reduction={self.reduction!r})"
