"""Counts launches in Triton's interpreter."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator
from typing import Any
from unittest import mock


@contextlib.contextmanager
def counted_launches() -> Iterator[Counter[str]]:
    """The kernels that Triton's interpreter runs, by name."""
    from triton.runtime.interpreter import GridExecutor

    found: Counter[str] = Counter()
    launch = GridExecutor.__call__

    def counting(self: GridExecutor, *args: Any, **kwargs: Any) -> Any:
        found[self.fn.__name__] += 1
        return launch(self, *args, **kwargs)

    with mock.patch.object(GridExecutor, "__call__", counting):
        yield found
