"""Checks of the arguments of losses."""

from __future__ import annotations

import sys
import warnings
from typing import Any


def one_of(choices: tuple[Any, ...], value: Any, argument: str) -> Any:
    """``value``; ValueError if it is none of ``choices``."""
    # By type too: 1 is equal to True.
    if not any(type(value) is type(choice) and value == choice for choice in choices):
        raise ValueError(f"{argument} must be one of {list(choices)}, got {value!r}")
    return value


def refuse_deprecated(**kwargs: Any) -> None:
    """Raise RuntimeError for an argument that became a key."""
    for name, value in kwargs.items():
        if value is not None:
            raise RuntimeError(
                f"Setting {name!r} via the constructor is deprecated, use .set_keys(<key>='some_key') instead."
            )


def warn(text: str) -> None:
    """A warning that points to the caller of a loss, or of its constructor, however many classes that has."""
    level, frame = 1, sys._getframe()
    inside = ("gpubuf.objectives", "torch.nn.modules.module", "tensordict.nn.")
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith(inside):
        level, frame = level + 1, frame.f_back
    warnings.warn(text, category=UserWarning, stacklevel=level)
