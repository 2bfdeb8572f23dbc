"""A writer that keeps the rows of the highest rank."""

from __future__ import annotations

from typing import Any

import torch
from tensordict import TensorDictBase, is_tensorclass
from torch import Tensor

from gpubuf.data.hindsight import Hindsight
from gpubuf.data.recording import Unfinished, at_replays, each_run
from gpubuf.data.samplers.base import Sampler
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

LOWEST = -(2.0**1023)
"""The lowest rank of a row, and that of one that is NaN. Places without a row are below it."""

REDUCTIONS = ("max", "min", "mean", "median", "sum")


def comparable(ranks: Tensor) -> Tensor:
    """Ranks as float64 numbers that have an order, above that of an empty place: NaN counts as the lowest."""
    return ranks.to(torch.float64).nan_to_num(nan=LOWEST, posinf=torch.inf).clamp(min=LOWEST)


def ranks_by_place(capacity: int, ranks: Tensor, device: torch.device) -> Tensor:
    """The ranks of ``n`` rows, which the first places have, float64 ``[capacity + 1]``: the last one is of no place."""
    # Places without a row are below all ranks, and rise with the place: double-precision numbers one bit apart.
    found = torch.arange(capacity + 1, dtype=torch.float64, device=device) * 2.0**971 + torch.finfo(torch.float64).min
    found[: ranks.numel()].copy_(ranks)
    return found


def admit(kept: Tensor, ranks: Tensor) -> Tensor:
    """Show rows to those that are kept: the best of both stay. No host sync.

    The i-th best of the new rows takes the place of the i-th worst stored one as long as it ranks above it.

    Args:
        kept: as :func:`ranks_by_place` gives it; changed in place.
        ranks: float64 ``[n]``, of :func:`comparable` numbers.

    Returns:
        The place of each row that stays, int64 ``[n]``, the lowest place for the first of them, and -1 for the others.
    """
    nowhere = kept.numel() - 1
    n = min(ranks.numel(), nowhere)
    worst, places = kept[:nowhere].topk(n, largest=False)
    best, rows = ranks.topk(n)
    enters = best > worst
    stays = torch.zeros_like(ranks, dtype=torch.bool).scatter_(0, rows, enters)
    free = torch.where(enters, places, nowhere).sort().values
    place = free.gather(0, (stays.cumsum(0) - 1).clamp(min=0))
    kept.scatter_(0, torch.where(stays, place, nowhere), ranks)
    return torch.where(stays, place, -1)


class UnrankedRowsError(TypeError, RuntimeError):
    """Rows have no keys, so no rank. A RuntimeError too, as TorchRL raises it."""


class TensorDictMaxValueWriter(Writer):
    """Keeps the rows of the highest rank, as many as the storage has room for.

    A row enters if there is room, or if its rank is above that of the worst row, whose place it takes. So the ranks
    that are kept do not depend on how rows were cut into batches; which of several rows of equal rank is kept may. A
    rank that is NaN counts as the lowest.

    A write looks at the ranks of all rows, without a host sync. A row takes a float64 beside its data.

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
        # The ranks of the rows, on their device; None: they are to be found from what the rows hold.
        self._ranks: Tensor | None = None
        # How many rows entered and outlasted their batch, of which ring.
        self._entered: Tensor | int = 0
        self._of: Ring | None = None
        # What the ring counted after the last write here: others may write, too.
        self._left: tuple[int, int, int] | None = None

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
        if self._storage.allocation.options.share_next:
            raise ValueError("TensorDictMaxValueWriter has no row after another: it can't be used with share_next")
        self._storage.allocation.ignored_keys = DRAWN_KEYS
        self._ranks = self._of = None

    def attach(self, sampler: Sampler, recipe: Recipe, relabel: Hindsight | None) -> None:
        """Raise for parts that need rows which follow each other.

        Raises:
            ValueError: there is one.
        """
        found = f"a {type(sampler).__name__}" if isinstance(sampler, SliceSampler) else None
        found = found if recipe.takes_single_rows else str(recipe)
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
        # No row has the generation -1: the kernels leave out what isn't kept.
        positions = index.clamp(min=0)
        laps = torch.where(index >= 0, storage.ring.laps(positions), -1)
        storage.update(positions, list(range(len(sources))), sources, laps)
        return self._count(index)

    def _extend_objects(self, storage: ListStorage, items: list[Any]) -> Tensor:
        if not items:
            return torch.empty(0, dtype=torch.int64, device="cpu")
        index = self._admit(self._ranks_of_all(items))
        storage.place(index.tolist(), items)
        return self._count(index)

    def _admit(self, ranks: Tensor) -> Tensor:
        """The places of new rows of these ranks, and -1 for those that are not kept."""
        storage, kept = self._storage, self._kept()
        storage.unfinished = Unfinished(storage.written)
        index = admit(kept, ranks.to(storage.device, non_blocking=True))
        self._entered += (index >= 0).sum()
        return index

    def _count(self, index: Tensor) -> Tensor:
        """The index of a batch, which is written: its rows count, and followers hear of them."""
        ring, positions = self._storage.ring, index.clamp(min=0)
        ring.rewrite(positions, (index >= 0) & (ring.generations(positions) >= 0))
        ring.fill(index.numel())
        each_run(ring.counters, self._look)
        self._storage.followers.on_write(index)
        self._storage.unfinished = None
        return index

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

    def _kept(self) -> Tensor:
        """The ranks of the rows that are stored, as :func:`ranks_by_place`."""
        storage, kept = self._storage, self._ranks
        if kept is None or not self._knows_rows or kept.device != storage.device:
            at_replays().refuse("the ranks of the rows are made at the first write: write before")
            stored = storage[:] if len(storage) else []
            ranks = self._ranks_of_all(stored) if isinstance(stored, list) else self.ranks_of(stored)
            kept = self._adopt(ranks, self.write_count)
        return kept

    def _adopt(self, ranks: Tensor, entered: int) -> Tensor:
        storage = self._storage
        self._ranks = ranks_by_place(storage.max_size, ranks, storage.device)
        self._entered, self._of = torch.tensor(entered, device=storage.device), storage.ring
        self._left = None
        return self._ranks

    def _look(self) -> None:
        ring = self._storage.ring
        self._left = ring.written, ring.size, ring.replaced

    @property
    def _knows_rows(self) -> bool:
        """Whether nobody has changed, forgotten or replaced rows since."""
        ring = self._storage.ring
        return self._of is ring and self._left in (None, (ring.written, ring.size, ring.replaced))

    @property
    def _cursor(self) -> int:
        """The place of the next row while there is room, as programs for TorchRL read it."""
        return len(self._storage) % self._storage.max_size

    @property
    def write_count(self) -> int:
        """Number of rows that were kept by the write that they came with. Synchronises with a GPU."""
        return int(self._entered) if self._knows_rows else super().write_count

    # The life of the rows

    def empty(self, recount: bool = False) -> None:
        if self._of is self._storage.ring:
            self._adopt(torch.empty(0, device="cpu"), 0 if recount else int(self._entered))

    def mend(self) -> None:
        """Rank the rows by what they hold, before the next write."""
        self._ranks = self._left = None

    def state_dict(self) -> dict[str, Any]:
        """How many rows have entered: the ranks are in the rows. Synchronises."""
        return {"write_count": self.write_count} if self._storage.initialized else {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore :meth:`state_dict`. The rows are ranked by what they hold."""
        self._ranks = self._of = self._left = None
        if "write_count" in state:
            self._entered, self._of = state["write_count"], self._storage.ring

    def check_state(self, state: dict[str, Any], capacity: int, size: int) -> None:
        count = state.get("write_count", size)
        need(type(count) is int and count >= size, f"the checkpoint's count of rows that entered is {count!r}")

    def __repr__(self) -> str:
        return f"{type(self).__name__}(rank_key={as_written(self.rank_key)!r}, reduction={self.reduction!r})"
