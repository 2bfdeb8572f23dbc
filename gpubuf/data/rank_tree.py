"""A tree of minima over the ranks of rows: the worst rows of many, without a look at all of them.

The *least* of some places is the one of the lowest rank, and of these the oldest. A node holds rank and age of the
least place below it. The n least places lie below n nodes of any level: the n least ones. So a search goes down level
by level, each time from n nodes to their children, of which it keeps n. This takes O(n log capacity), in operations on
whole vectors, without a host sync. Nodes are recomputed from their children, never adjusted.
"""

from __future__ import annotations

import torch
from torch import Tensor

NEVER = 2**62
"""The age of places that are none: above those of all rows."""

FAN_OUT = 64
"""Children of a node."""

DIRECT = 4096
"""So many nodes are searched at once: a level with no more has none above it."""


class RankTree:
    """Ranks and ages of places, in tensors that are changed in place.

    Args:
        ranks: float64 ``[capacity]``, without NaN.
        ages: int64 ``[capacity]``, all different, of -2**61 .. 2**62.
        device: where the tensors live.
        fan_out: children of a node.
        direct: nodes that are searched at once.

    Attributes:
        ranks, ages: as given, with places behind them that are none: at least one, at ``capacity``.
    """

    def __init__(
        self, ranks: Tensor, ages: Tensor, device: torch.device, fan_out: int = FAN_OUT, direct: int = DIRECT
    ) -> None:
        self._fan_out, self._direct = fan_out, direct
        places, span = ranks.numel() + 1, 1
        while -(-places // span) > direct:
            span *= fan_out
        # Every node of the top level is full, so that each node has its children.
        length = -(-places // span) * span
        self.ranks = torch.full((length,), torch.inf, dtype=torch.float64, device=device)
        self.ages = torch.full((length,), NEVER, dtype=torch.int64, device=device)
        self.ranks[: ranks.numel()].copy_(ranks)
        self.ages[: ages.numel()].copy_(ages)
        self._levels = [(self.ranks, self.ages)]
        while span > 1:
            below = self._levels[-1]
            self._levels.append(_minima(below[0].view(-1, fan_out), below[1].view(-1, fan_out)))
            span //= fan_out

    def put(self, places: Tensor, ranks: Tensor, ages: Tensor) -> None:
        """Write ranks and ages of ``places``, int64 ``[n]``. Those that are given twice have the same rank and age."""
        self.ranks.scatter_(0, places, ranks)
        self.ages.scatter_(0, places, ages)
        for (ranks_below, ages_below), (ranks_above, ages_above) in zip(self._levels, self._levels[1:], strict=False):
            places = places // self._fan_out
            found = _minima(self._children(ranks_below, places), self._children(ages_below, places))
            ranks_above.scatter_(0, places, found[0])
            ages_above.scatter_(0, places, found[1])

    def least(self, n: int) -> Tensor:
        """The ``n`` least places, int64 ``[n]``, the least of them first. ``n`` is at most the capacity."""
        enough = max(n * self._fan_out, self._direct)
        height = next(h for h, (ranks, _) in enumerate(self._levels) if ranks.numel() <= enough)
        places = _least_of(*self._levels[height], n)
        offsets = torch.arange(self._fan_out, device=places.device)
        for ranks, ages in reversed(self._levels[:height]):
            found = _least_of(self._children(ranks, places).reshape(-1), self._children(ages, places).reshape(-1), n)
            places = (places.unsqueeze(1) * self._fan_out + offsets).reshape(-1).gather(0, found)
        places = places.gather(0, self.ages.gather(0, places).argsort())
        return places.gather(0, self.ranks.gather(0, places).argsort(stable=True))

    def _children(self, below: Tensor, nodes: Tensor) -> Tensor:
        return below.view(-1, self._fan_out).index_select(0, nodes)


def _minima(ranks: Tensor, ages: Tensor) -> tuple[Tensor, Tensor]:
    """Rank and age of the least place of each row."""
    least = ranks.amin(1)
    return least, torch.where(ranks == least.unsqueeze(1), ages, NEVER).amin(1)


def _least_of(ranks: Tensor, ages: Tensor, n: int) -> Tensor:
    """The positions of the ``n`` least places, in no order."""
    bound = ranks.kthvalue(n).values
    order = torch.where(ranks < bound, ages - NEVER, torch.where(ranks == bound, ages, NEVER))
    return order.topk(n, largest=False, sorted=False).indices
