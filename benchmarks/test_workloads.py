"""The benchmarks: one group per workload of the registry, one parameter per library."""

from __future__ import annotations

import traceback
from collections.abc import Callable

import pytest

from benchmarks.peers.libraries import UnavailableError
from benchmarks.workloads.registry import REGISTRY, LastFilled, environment


@pytest.fixture(scope="session")
def last_filled() -> LastFilled:
    return LastFilled()


def test_workload(
    measure: Callable[..., None], workload: str, library: str, device: str, last_filled: LastFilled
) -> None:
    """One call, after its result has been checked."""
    entry = REGISTRY[workload]
    try:
        filled = last_filled.get(entry, library, device)
        call = entry.prepare(filled, library, device)
    except UnavailableError as reason:
        pytest.skip(str(reason))
    except AssertionError as error:
        if environment(library) == "gpubuf":
            raise
        # A peer that is wrong has no time; that it is wrong is said.
        said = " ".join(str(error).split()) or traceback.extract_tb(error.__traceback__)[-1].line
        pytest.skip(f"wrong results: {said[:200]}")
    measure(entry, library, filled, call)
