"""Replay: one group per workload, one parameter per library."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from tensordict import TensorDict

from benchmarks.libraries import LIBRARIES, UnavailableError
from benchmarks.workloads import CAPACITY, WORKLOADS, transitions


@pytest.fixture(scope="session")
def source() -> TensorDict:
    return transitions(CAPACITY)


@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize("workload", WORKLOADS)
def test_replay(measure: Callable[..., None], workload: str, library: str, source: TensorDict, device: str):
    """One call on a full buffer, after its result has been checked."""
    chosen = WORKLOADS[workload]
    try:
        filled = LIBRARIES[library](source, chosen.prioritized, device)
    except UnavailableError as reason:
        pytest.skip(str(reason))
    measure(workload, library, chosen.operation(filled, source, chosen.batch))
