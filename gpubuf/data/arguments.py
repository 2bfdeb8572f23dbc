"""What callers give: numbers that are none, and parts of another library where gpubuf's belong."""

from __future__ import annotations

import warnings
from typing import Any, SupportsIndex

_LIBRARIES = {"torchrl": "TorchRL"}
_warned: set[str] = set()


def check_count(value: Any, name: str, least: int = 1) -> None:
    """Raise ValueError, or TypeError for what is no number, unless ``value`` is a whole number of at least so much."""
    number = not isinstance(value, bool) and isinstance(value, (int, float, SupportsIndex))
    if not number or not isinstance(value, SupportsIndex) or value < least:  # type: ignore[operator]
        kind = ValueError if number else TypeError
        raise kind(f"{name} must be a whole number of at least {least}, got {value!r}")


def describe_type(given: object) -> str:
    """The type of what was given, and of a part of TorchRL's what to do instead; the end of a message."""
    kind = type(given)
    library = _LIBRARIES.get(kind.__module__.partition(".")[0])
    if library is None:
        return kind.__name__
    return (
        f"{library}'s {kind.__name__}: take gpubuf.data's class of that name here, and "
        f"gpubuf.integrations.torchrl's in a buffer of {library}'s"
    )


def warn_of_no_effect(**options: bool) -> None:
    """Warn once a process of each option that is set: TorchRL's has no counterpart, and programs go on without it."""
    for name, value in options.items():
        if value and name not in _warned:
            _warned.add(name)
            warnings.warn(f"{name}=True has no effect in gpubuf: a storage belongs to one process", stacklevel=4)
