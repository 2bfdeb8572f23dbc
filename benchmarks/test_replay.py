"""Replay: one group per workload, one parameter per library."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from tensordict import TensorDict

from benchmarks.libraries import LIBRARIES, UnavailableError
from benchmarks.workloads import CAPACITY, WORKLOADS, transitions

#: On a GPU a call only queues work: what is timed is many of them, and the wait for the last.
CALLS_ON_GPU = 100


@pytest.fixture(scope="session")
def source() -> TensorDict:
    return transitions(CAPACITY)


def repeated(call: Callable[[], object], times: int) -> Callable[[], None]:
    def run() -> None:
        for _ in range(times):
            call()
        torch.cuda.synchronize()

    return run


@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize("workload", WORKLOADS)
def test_replay(benchmark, workload: str, library: str, source: TensorDict, device: str):
    """Median time of one call, after its result has been checked."""
    benchmark.group = workload
    chosen = WORKLOADS[workload]
    try:
        filled = LIBRARIES[library](source, chosen.prioritized, device)
    except UnavailableError as reason:
        pytest.skip(str(reason))
    call = chosen.operation(filled, source, chosen.batch)
    calls = CALLS_ON_GPU if device == "cuda" else 1
    benchmark.extra_info.update(workload=workload, library=library, device=device, calls=calls, rows=len(source))
    benchmark(repeated(call, calls) if device == "cuda" else call)
