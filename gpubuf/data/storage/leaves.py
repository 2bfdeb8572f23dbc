"""The keys of a row: their names, and the shape and dtype of what lies under each."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

Key = tuple[str, ...]


def as_key(key: Any) -> Key:
    """A key as its user writes it (``"reward"``, ``("next", "reward")``, nested further) as a flat tuple of names."""
    return (key,) if isinstance(key, str) else tuple(name for part in key for name in as_key(part))


def as_written(key: Key) -> str | Key:
    """The shortest way to write a key: the name alone where there is only one."""
    return key[0] if len(key) == 1 else key


def priority_mask_key(key: Any) -> Any:
    """Where a batch says which rows have a priority at ``key``: ``"td_error_mask"``. A row of which it says no keeps
    its old one."""
    return f"{key}_mask" if isinstance(key, str) else (*key[:-1], priority_mask_key(key[-1]))


@dataclass(frozen=True)
class Leaf:
    """One key of a row. ``shape`` is that of a single row, contiguous."""

    key: Key
    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...] = field(init=False)
    n_elements: int = field(init=False)
    row_bytes: int = field(init=False)

    def __post_init__(self) -> None:
        strides, n_elements = [], 1
        for length in reversed(self.shape):
            strides.append(n_elements)
            n_elements *= length
        object.__setattr__(self, "strides", tuple(reversed(strides)))
        object.__setattr__(self, "n_elements", n_elements)
        object.__setattr__(self, "row_bytes", n_elements * self.dtype.itemsize)

    @property
    def name(self) -> str:
        """The key as its user writes it: ``'reward'`` or ``('next', 'reward')``."""
        return repr(as_written(self.key))


@dataclass(frozen=True)
class Node:
    """One level of a nested row: children by name, each a position in ``RowLayout.leaves`` or another node."""

    children: dict[str, int | Node]
    batch_suffix: tuple[int, ...]  # batch dimensions beyond the storage's, as in ("agents",) of shape [B, n_agents]
    tensorclass: type | None
