"""Present and next rows as one batch, for networks whose batch norms are to see both."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from tensordict import TensorDict, TensorDictBase
from tensordict.utils import NestedKey
from torch import Tensor

from gpubuf.modules.plain import entry
from gpubuf.objectives.masks import COUNTS, maybe


def joined(present: TensorDictBase, following: TensorDictBase, keys: Iterable[NestedKey]) -> TensorDictBase:
    """The entries at ``keys`` of both, the rows of ``following`` after those of ``present``: ``[2 B, *rest]``.

    Where ``present`` says which rows count, both rows of a transition do, or neither.
    """
    out = TensorDict({}, batch_size=[2 * rows for rows in present.batch_size[:1]])
    for key in keys:
        out.set(key, torch.cat([entry(present, key), entry(following, key)]))
    counts = maybe(present, COUNTS)
    return out if counts is None else out.set(COUNTS, torch.cat([counts, counts]))


def halves(rows: Tensor, dim: int = 0) -> tuple[Tensor, Tensor]:
    """What belongs to the present rows, and to the next ones, of what a network says of :func:`joined` rows."""
    present, following = rows.chunk(2, dim)
    return present, following
