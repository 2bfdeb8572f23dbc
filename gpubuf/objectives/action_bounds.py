"""The bounds of continuous actions, from the specs and spaces of other libraries."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from tensordict.utils import NestedKey


def action_bounds(spec: Any, key: NestedKey) -> tuple[Any, Any]:
    """(low, high) of one action, without the dimensions of the containers that hold it.

    Args:
        spec: a Gymnasium ``Box``, a bounded spec of TorchRL, or a composite one that holds the action at ``key``.
        key: of the action.

    Raises:
        ValueError: the spec has no bounds.
    """
    container = 0
    for name in key if isinstance(key, tuple) else (key,):
        if not hasattr(spec, "keys"):
            break
        container = len(getattr(spec, "shape", None) or ())
        spec = spec[name]
    space = getattr(spec, "space", spec)
    low, high = getattr(space, "low", None), getattr(space, "high", None)
    if low is None or high is None:
        raise ValueError(f"action_spec must have bounds, as a Box of Gymnasium has, got {type(spec).__name__}")
    first = (0,) * container
    return low[first], high[first]


def check_order(low: Any, high: Any) -> None:
    """Raise ValueError unless ``low <= high`` everywhere. Bounds on a GPU are copied to the host."""
    lower, upper = (np.asarray(b.cpu() if isinstance(b, torch.Tensor) else b, dtype=np.float64) for b in (low, high))
    # A comparison that NaN fails.
    if not (lower <= upper).all():
        raise ValueError(f"the lower bounds of the actions must not be above the upper ones, got {low} and {high}")
