"""How many rows of a batch come from each of several buffers."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Sequence

import torch
from torch import Tensor

# Keeps a boundary that is a half, but for rounding, on the same side on the host and on the device.
_TIE = 1e-9


def check_shares(shares: Sequence[float] | Tensor, n_buffers: int) -> None:
    """Raise for shares that no batch can have.

    Raises:
        ValueError: they are not one for each buffer; or, of numbers, one is negative or not finite, or all are zero.
    """
    if isinstance(shares, Tensor):
        if tuple(shares.shape) != (n_buffers,):
            raise ValueError(f"there are {n_buffers} buffers, and shares of shape {list(shares.shape)}")
        return
    if len(shares) != n_buffers:
        raise ValueError(f"there are {n_buffers} buffers, and {len(shares)} shares")
    if not all(math.isfinite(share) and share >= 0 for share in shares) or not any(shares):
        raise ValueError(f"shares must be finite and not negative, and one must be positive, got {list(shares)}")


def _by_share(shares: Sequence[float], n: int) -> list[int]:
    """``n`` cut in proportion: the boundaries are rounded, so that no part is off by one or more."""
    total, before, ends = sum(shares), 0.0, [0]
    for share in shares:
        before += share
        ends.append(max(math.ceil(n * before / total - 0.5 - _TIE), 0))
    ends[-1] = n
    return [end - start for start, end in itertools.pairwise(ends)]


def counts(shares: tuple[float, ...], n: int, stored: tuple[int, ...]) -> tuple[int, ...]:
    """How many of ``n`` rows come from each buffer.

    A buffer gives as many rows as it has, if its share is more: others give the rest, in proportion to their shares
    (equally, if those are zero). If all of them together have fewer than ``n`` rows, only empty buffers give less than
    their share.

    Args:
        shares: of the buffers.
        n: number of rows.
        stored: how many rows there are in each.
    """
    limits = list(stored) if sum(stored) >= n else [n if rows else 0 for rows in stored]
    given = [0] * len(shares)
    open_ = [k for k, limit in enumerate(limits) if limit]
    while open_ and (left := n - sum(given)):
        some = [shares[k] for k in open_]
        found = dict(zip(open_, _by_share(some if any(some) else [1.0] * len(some), left), strict=True))
        short = [k for k in open_ if found[k] >= limits[k]] if any(found[k] > limits[k] for k in open_) else []
        for k in short or open_:
            given[k] = min(found[k], limits[k])
        open_ = [k for k in open_ if k not in short] if short else []
    return tuple(given)


remembered_counts = functools.lru_cache(maxsize=256)(counts)
"""The same, for calls that are made over and over. Compiled code can't look there."""


def owners(shares: Tensor, n: int, sizes: Tensor) -> Tensor:
    """From which buffer each of ``n`` rows comes, decided on the device: int64 ``[n]``, rising. No host sync.

    An empty buffer's share goes to the others, in proportion to theirs.

    Args:
        shares: of the buffers, ``[K]``; negative ones count as zero.
        n: number of rows.
        sizes: rows in each buffer, int64 ``[K]``.
    """
    some = (sizes > 0).to(torch.float64)
    weights = shares.detach().to(torch.float64).clamp(min=0) * some
    weights = torch.where(weights.sum() > 0, weights, some)
    ends = n * weights.cumsum(0) / weights.sum()
    row = torch.arange(n, dtype=torch.float64, device=shares.device) + (0.5 + _TIE)
    return (row.unsqueeze(1) >= ends[:-1]).sum(1)
