"""The parts of a buffer as users give them: an instance, a function that returns one, or nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from gpubuf.data.storages.tensor_storage import LazyTensorStorage

DEFAULT_CAPACITY = 1_000


def component(given: Any, kind: type, default: Callable[[], Any]) -> Any:
    """A storage, sampler or writer given as an instance, a factory or None."""
    if given is None:
        return default()
    if not isinstance(given, kind) and callable(given):
        given = given()
    if not isinstance(given, kind):
        raise TypeError(f"expected a {kind.__name__} or a function that returns one, got {type(given).__name__}")
    return given


def default_storage() -> LazyTensorStorage:
    """The storage of a buffer that was given none."""
    return LazyTensorStorage(DEFAULT_CAPACITY)
