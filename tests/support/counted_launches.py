"""Counts launches, which run nothing: it is their number that is asked for."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator
from typing import Any
from unittest import mock


@contextlib.contextmanager
def counted_launches() -> Iterator[Counter[str]]:
    """The kernels that Triton's interpreter would run, by name."""
    from triton.runtime.interpreter import GridExecutor

    found: Counter[str] = Counter()

    def counting(self: GridExecutor, *args: Any, **kwargs: Any) -> None:
        found[self.fn.__name__] += 1

    with mock.patch.object(GridExecutor, "__call__", counting):
        yield found
