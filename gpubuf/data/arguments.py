"""Checks of what callers give: numbers, parts of a buffer, and arguments of another library."""

from __future__ import annotations

import operator
import sys
import warnings
from typing import Any, SupportsIndex

import torch
from torch import Tensor

_LIBRARIES = {"torchrl": "TorchRL"}
_warned: set[str] = set()


def warn(
    text: str, inside: tuple[str, ...] = ("gpubuf.data", "gpubuf.integrations", "torch._compile", "torch._dynamo")
) -> None:
    """A warning that points to the line that called gpubuf, however deep ``inside`` of it the reason was found."""
    level, frame = 1, sys._getframe()
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith(inside):
        level, frame = level + 1, frame.f_back
    warnings.warn(text, stacklevel=level)


class Missing:
    """In the place of a part that is not there yet. Every attribute raises a RuntimeError, which says why."""

    def __init__(self, why: str) -> None:
        self._why = why

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(name) if name.startswith("__") else RuntimeError(self._why)


def check_count(value: Any, name: str, least: int = 1) -> None:
    """Raise ValueError, or TypeError for what is no number, unless ``value`` is a whole number of at least so much."""
    number = not isinstance(value, bool) and isinstance(value, (int, float, SupportsIndex))
    if not number or not isinstance(value, SupportsIndex) or value < least:  # type: ignore[operator]
        kind = ValueError if number else TypeError
        raise kind(f"{name} must be a whole number of at least {least}, got {value!r}")


def as_tensor(value: Any) -> Tensor:
    """A tensor as it is; numbers and arrays as one on the CPU, whatever the default device."""
    return value if isinstance(value, Tensor) else torch.as_tensor(value, device="cpu")


def describe_type(given: object) -> str:
    """The type of what was given, and of a part of TorchRL's what to do instead; the end of a message."""
    kind = type(given)
    library = _LIBRARIES.get(kind.__module__.partition(".")[0])
    if library is None:
        return kind.__name__
    return f"{library}'s {kind.__name__}: take gpubuf.integrations.torchrl's class of that name"


def component(given: Any, kind: type) -> Any:
    """A storage, sampler or writer given as an instance or a factory."""
    if not isinstance(given, kind) and callable(given):
        given = given()
    if not isinstance(given, kind):
        raise TypeError(f"expected a {kind.__name__} or a function that returns one, got {describe_type(given)}")
    return given


def check_sizes(prefetch: int | None, batch_size: int | None) -> None:
    """Raise for numbers that no buffer can work with.

    Raises:
        ValueError: the batch size is below 1, ``prefetch`` is negative or lacks a batch size.
    """
    if prefetch and batch_size is None:
        raise ValueError("prefetch needs the batch_size given to the constructor")
    if prefetch is not None:
        check_batch_size(prefetch, "prefetch", 0)
    if batch_size is not None:
        check_batch_size(batch_size)


def check_batch_size(batch_size: Any, name: str = "batch_size", least: int = 1) -> None:
    """Raise ValueError, or TypeError for what is no number, unless a batch can have so many transitions."""
    # Every sample asks, and what follows looks into the code of a protocol, which caches have lost by then.
    if type(batch_size) is int and least <= batch_size < 2**31:
        return
    check_count(batch_size, name, least)
    if operator.index(batch_size) >= 2**31:
        raise ValueError(f"{name} must be below 2**31, got {batch_size}")


def warn_of_no_effect(**options: bool) -> None:
    """Warn once a process of each option that is set: TorchRL's has no counterpart, and programs go on without it."""
    for name, value in options.items():
        if value and name not in _warned:
            _warned.add(name)
            warn(f"{name}=True has no effect in gpubuf: a storage belongs to one process")
