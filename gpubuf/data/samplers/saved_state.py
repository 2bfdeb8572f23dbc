"""Checks of a sampler's state that was read from files."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def demand(condition: bool, text: str) -> None:
    """Raise a ValueError unless ``condition`` holds."""
    if not condition:
        raise ValueError(text)


def is_count(value: Any, at_least: int = 0) -> bool:
    """Whether ``value`` is an int of at least so much, which fits into int64."""
    return type(value) is int and at_least <= value < 2**63


def is_tensor(value: Any, dtype: torch.dtype, shape: tuple[int, ...]) -> bool:
    """Whether ``value`` is a tensor of this dtype and shape."""
    return isinstance(value, Tensor) and value.dtype is dtype and tuple(value.shape) == shape


def positions_below(value: Any, bound: int) -> bool:
    """Whether ``value`` is an int64 vector of positions below ``bound``."""
    if not isinstance(value, Tensor) or value.dtype is not torch.int64 or value.dim() != 1:
        return False
    return bool(((value >= 0) & (value < bound)).all())
