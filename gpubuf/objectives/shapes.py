"""Entries of a batch as losses read them: their keys in the next step, and their shapes per row."""

from __future__ import annotations

import torch
from tensordict.utils import NestedKey, unravel_key
from torch import Tensor


def next_key(key: NestedKey) -> NestedKey:
    """The key that holds the value of ``key`` after the step."""
    following: NestedKey = unravel_key(("next", key))
    return following


def per_row(tensor: Tensor, shape: torch.Size, name: str) -> Tensor:
    """``tensor`` with one element for every row of a loss of ``shape``.

    Trailing dimensions of size 1 beyond those of the loss are dropped; missing ones are added on the right; dimensions
    of size 1 are broadcast. So a loss ``[B, n_agents]`` accepts ``[B]``, ``[B, 1]``, ``[B, n_agents]``,
    ``[B, n_agents, 1]`` and ``[B, 1, 1]``. A tensor that already has one element per row is returned as it is, whatever
    its trailing dimensions of size 1: the operations read rows, not shapes.

    Raises:
        ValueError: no such reading exists.
    """
    own = list(tensor.shape)
    while len(own) > len(shape) and own[-1] == 1:
        own.pop()
    if own == list(shape):
        return tensor
    own += [1] * (len(shape) - len(own))
    if len(own) != len(shape) or any(a not in (1, b) for a, b in zip(own, shape, strict=True)):
        raise ValueError(
            f"{name!r} of shape {list(tensor.shape)} does not fit a loss of shape {list(shape)}: it may lack "
            "dimensions on the right, have dimensions of size 1, and have trailing dimensions of size 1"
        )
    return tensor.reshape(own).expand(shape)


def is_values_of(own: torch.Size, shape: torch.Size) -> bool:
    """Whether ``own`` is ``shape``, or ``[*shape, 1]``."""
    # Element by element: compiled code with sizes that vary takes tuples for different whose elements are equal.
    own = own[:-1] if len(own) == len(shape) + 1 and own[-1] == 1 else own
    return len(own) == len(shape) and all(a == b for a, b in zip(own, shape, strict=True))


def trimmed(flag: Tensor) -> Tensor:
    """``flag`` without trailing dimensions of size 1, one dimension at least."""
    while flag.ndim > 1 and flag.shape[-1] == 1:
        flag = flag.squeeze(-1)
    return flag


def rows_of(flag: Tensor, like: Tensor) -> Tensor:
    """A flag per row, shaped to broadcast against an observation ``like``, ``[*batch, *features]``.

    Trailing dimensions of size 1 of the flag are dropped. A flag with more batch dimensions than the observation (one
    per agent, for a state that agents share) holds for a row where it holds for all of them.
    """
    flag = trimmed(flag)
    while flag.ndim > max(like.ndim - 1, 1):
        flag = flag.all(-1)
    return flag.reshape(flag.shape + (1,) * (like.ndim - flag.ndim))
