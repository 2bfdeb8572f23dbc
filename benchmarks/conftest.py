"""What every benchmark run shares: the device, one thread, and the versions beside the numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from benchmarks.machine import describe

#: On a GPU a call only queues work: what is timed is many of them, and the wait for the last.
CALLS_ON_GPU = 100


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--device", default="cpu", choices=("cpu", "cuda"), help="where the buffers live")
    parser.addoption("--huge", action="store_true", help="also the buffers that take gigabytes and minutes")


def pytest_configure(config: pytest.Config) -> None:
    # One thread: what is compared is the work, not how many cores a library takes for it.
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def device(request: pytest.FixtureRequest) -> str:
    chosen = request.config.getoption("--device")
    if chosen == "cuda" and not torch.cuda.is_available():
        pytest.fail("--device cuda, and torch sees no CUDA device")
    return chosen


@pytest.fixture
def measure(benchmark, device: str) -> Callable[[str, str, Callable[[], object]], None]:
    """``measure(workload, library, call)`` times the call, in the group of its workload."""

    def run(workload: str, library: str, call: Callable[[], object]) -> None:
        def many() -> None:
            for _ in range(CALLS_ON_GPU):
                call()
            torch.cuda.synchronize()

        calls = CALLS_ON_GPU if device == "cuda" else 1
        benchmark.group = workload
        benchmark.extra_info.update(workload=workload, library=library, device=device, calls=calls)
        benchmark(many if device == "cuda" else call)

    return run


def pytest_benchmark_generate_machine_info(config: pytest.Config) -> dict[str, Any]:
    """In place of the plugin's own, which lists every flag of the processor and no versions."""
    return describe(config.getoption("--device"))


def pytest_benchmark_update_json(config: pytest.Config, benchmarks: list[Any], output_json: dict[str, Any]) -> None:
    """Keep the statistics, leave out the single timings: megabytes that nobody reads."""
    for entry in output_json["benchmarks"]:
        entry["stats"].pop("data", None)
