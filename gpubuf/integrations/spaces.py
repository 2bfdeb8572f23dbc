"""Shapes and dtypes of rows, from the spaces of Gymnasium (and of its predecessor, which has the same classes)."""

from __future__ import annotations

import math
from typing import Any

import numpy as np


def _is(space: Any, name: str) -> bool:
    """Whether a space is of the class of that name. Neither library need be installed."""
    return any(kind.__name__ == name for kind in type(space).__mro__)


def is_dict(space: Any) -> bool:
    """Whether observations are dicts."""
    return _is(space, "Dict")


def is_discrete(space: Any) -> bool:
    """Whether observations are single integers, which have no dimension of their own."""
    return _is(space, "Discrete")


def observation_shape(space: Any) -> Any:
    """The shape of an observation without environments; for a dict one a key.

    Raises:
        NotImplementedError: for tuples, and dicts in dicts.
    """
    if is_dict(space):
        found = {key: observation_shape(part) for key, part in space.spaces.items()}
        if any(isinstance(shape, dict) for shape in found.values()):
            raise NotImplementedError(f"observations that are dicts of dicts can't be stored: {space}")
        return found
    if _is(space, "Box") or _is(space, "MultiBinary"):
        return tuple(space.shape)
    if is_discrete(space):
        return (1,)
    if _is(space, "MultiDiscrete"):
        return (len(space.nvec),)
    raise NotImplementedError(f"observations of {space} can't be stored: expected Box, Dict, or a discrete space")


def action_length(space: Any) -> int:
    """The number of elements of an action.

    Raises:
        NotImplementedError: it is of another space than Box, Discrete, MultiDiscrete and MultiBinary.
    """
    if _is(space, "Discrete"):
        return 1
    if _is(space, "MultiDiscrete"):
        return len(space.nvec)
    if _is(space, "Box") or _is(space, "MultiBinary"):
        return math.prod(space.shape)
    raise NotImplementedError(f"actions of {space} can't be stored: expected Box or a discrete space")


def action_dtype(space: Any) -> np.dtype:
    """The dtype in which actions are stored: that of the space, or float32 in place of float64."""
    dtype = np.dtype(space.dtype)
    return np.dtype(np.float32) if dtype == np.float64 else dtype
