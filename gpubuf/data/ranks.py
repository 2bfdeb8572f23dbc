"""Which rows of a batch are better than the worst ones that are kept, and whose places they take.

Both classes here keep the best ``capacity`` rows of all that they were shown, exactly as a heap does that sees one row
after the other: a row enters if there is room, or if its rank is above that of the worst row, whose place it takes.
Of rows of equal rank the one that came first leaves first. :class:`HeapRanks` is such a heap, for the host.
:class:`DeviceRanks` finds the same rows and places with a tree of minima, without a host sync.
"""

from __future__ import annotations

import heapq
from typing import NamedTuple

import torch
from torch import Tensor

from gpubuf.data.rank_tree import NEVER, RankTree

#: Ages of places that hold no row: below those of all rows, and rising with the place.
_EMPTY = -(2**61)


class RankState(NamedTuple):
    """What is kept about the rows, in an order that does not depend on the device.

    Attributes:
        ranks: float64 ``[capacity]``; -inf where there is no row.
        ages: int64 ``[capacity]``: a row has a larger one than those that came before it.
        counts: int64 ``[2]``: the age of the next row, and how many rows have entered and outlasted their batch.
    """

    ranks: Tensor
    ages: Tensor
    counts: Tensor

    @classmethod
    def of(cls, ranks: Tensor, capacity: int, ages: Tensor | None = None, counts: Tensor | None = None) -> RankState:
        """The state of rows that lie at the first places."""
        n, device = ranks.numel(), ranks.device
        all_ranks = torch.full((capacity,), -torch.inf, dtype=torch.float64, device=device)
        all_ranks[:n].copy_(ranks)
        all_ages = torch.arange(capacity, device=device) + _EMPTY
        all_ages[:n].copy_(torch.arange(n, device=device) if ages is None else ages)
        return cls(all_ranks, all_ages, torch.tensor([n, n]) if counts is None else counts)


def comparable(ranks: Tensor) -> Tensor:
    """Ranks as float64 numbers that have an order, above that of an empty place: NaN counts as the lowest."""
    lowest = torch.finfo(torch.float64).min
    return ranks.to(torch.float64).nan_to_num(nan=lowest, posinf=torch.inf, neginf=lowest)


class HeapRanks:
    """Ranks on the host, in a heap.

    Args:
        state: of the rows that are there.
    """

    def __init__(self, state: RankState) -> None:
        self._capacity = state.ranks.numel()
        ranks, ages = state.ranks.tolist(), state.ages.tolist()
        self._heap = [(ranks[place], ages[place]) for place in range(self._capacity) if ages[place] >= 0]
        self._places = {age: place for place, age in enumerate(ages) if age >= 0}
        self._empty = [place for place in reversed(range(self._capacity)) if ages[place] < 0]
        self._next_age: int = int(state.counts[0])
        self.entered = int(state.counts[1])
        heapq.heapify(self._heap)

    @property
    def device(self) -> torch.device:
        """The host."""
        return torch.device("cpu")

    def admit(self, ranks: Tensor) -> Tensor:
        """Show some rows. See :meth:`DeviceRanks.admit`."""
        heap, places, first = self._heap, self._places, self._next_age
        freed: list[int] = []
        kept = set[int]()
        for age, rank in enumerate(ranks.tolist(), first):
            if self._empty:
                freed.append(self._empty.pop())
                heapq.heappush(heap, (rank, age))
            elif rank > heap[0][0]:
                _, left = heapq.heapreplace(heap, (rank, age))
                if left >= first:
                    kept.remove(left)
                else:
                    freed.append(places.pop(left))
            else:
                continue
            kept.add(age)
        self._next_age += ranks.numel()
        self.entered += len(kept)
        index = torch.full((ranks.numel(),), -1, dtype=torch.int64)
        for age, place in zip(sorted(kept), freed, strict=True):
            places[age] = place
            index[age - first] = place
        return index

    def still_there(self, index: Tensor, first_age: int | Tensor) -> Tensor:
        """See :meth:`DeviceRanks.still_there`."""
        there = [self._places.get(int(first_age) + i) == place for i, place in enumerate(index.tolist())]
        return torch.where(torch.tensor(there), index, -1)

    @property
    def next_age(self) -> int:
        """The age of the next row."""
        return self._next_age

    def state(self) -> RankState:
        """The state of now."""
        empty = RankState.of(torch.empty(0, dtype=torch.float64), self._capacity)
        for rank, age in self._heap:
            place = self._places[age]
            empty.ranks[place], empty.ages[place] = rank, age
        return empty._replace(counts=torch.tensor([self._next_age, self.entered]))


class DeviceRanks:
    """Ranks on a GPU, in tensors that are changed in place.

    Args:
        state: of the rows that are there.
        device: where the tensors live.
    """

    def __init__(self, state: RankState, device: torch.device) -> None:
        self._capacity = state.ranks.numel()
        self._tree = RankTree(state.ranks, state.ages, device)
        self._counts = state.counts.to(device, copy=True, non_blocking=True)

    @property
    def device(self) -> torch.device:
        """The device of the tensors."""
        return self._tree.ranks.device

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
        places = self._tree.least(n)
        old = self._tree.ranks.gather(0, places)
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
        # Behind the rows is a place that is none, for those that don't enter.
        target = torch.where(stays, place, self._capacity)
        ages = torch.where(stays, self._counts[0] + torch.arange(n, device=ranks.device), NEVER)
        self._tree.put(target, torch.where(stays, ranks, torch.inf), ages)
        self._counts[0].add_(n)
        self._counts[1].add_(stays.sum())
        return torch.where(stays, place, -1)

    def still_there(self, index: Tensor, first_age: int | Tensor) -> Tensor:
        """The places of rows, with -1 for those that have left since. No host sync.

        Args:
            index: int64 ``[n]``, as :meth:`admit` gave it.
            first_age: :attr:`next_age` before the first of them was shown.
        """
        ages = first_age + torch.arange(index.numel(), device=index.device)
        return torch.where(self._tree.ages.gather(0, index.clamp(min=0)) == ages, index, -1)

    def state(self) -> RankState:
        """The state of now: copies. Synchronises."""
        ranks, ages = self._tree.ranks[: self._capacity], self._tree.ages[: self._capacity]
        return RankState(ranks.clone(), ages.clone(), self._counts.cpu())
