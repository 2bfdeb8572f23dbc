"""Several buffers with common storages go on as a list of rows says, whatever happens to their parts."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.part_histories import History


@pytest.mark.parametrize("interrupts", [0.0, 0.4])
@pytest.mark.parametrize("first", [0, *(pytest.param(n, marks=pytest.mark.nightly) for n in range(25, 1000, 25))])
def test_buffers_and_their_parts(first: int, interrupts: float, tmp_path: Path) -> None:
    """Cases 54, 55, 73, 78: parts are replaced, buffers copied, saved and loaded, and any of it is interrupted."""
    for seed in range(first, first + 25):
        history = History(seed, interrupts, tmp_path / str(seed))
        for _ in range(30):
            if not history.step():
                break
