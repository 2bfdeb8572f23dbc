"""Present and next rows as one batch, for networks whose batch norms are to see both."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from tensordict import TensorDict, TensorDictBase
from tensordict.utils import NestedKey
from torch import Tensor

from gpubuf.modules.plain import entry


def joined(present: TensorDictBase, following: TensorDictBase, keys: Iterable[NestedKey]) -> TensorDictBase:
    """The entries at ``keys`` of both, the rows of ``following`` after those of ``present``: ``[2 B, *rest]``."""
    out = TensorDict({}, batch_size=[2 * rows for rows in present.batch_size[:1]])
    for key in keys:
        out.set(key, torch.cat([entry(present, key), entry(following, key)]))
    return out


def halves(rows: Tensor, dim: int = 0) -> tuple[Tensor, Tensor]:
    """What belongs to the present rows, and to the next ones, of what a network says of :func:`joined` rows."""
    present, following = rows.chunk(2, dim)
    return present, following
