"""What every benchmark run shares: the device, one thread, and the versions beside the numbers."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from benchmarks.machine import describe


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--device", default="cpu", choices=("cpu", "cuda"), help="where the buffers live")


def pytest_configure(config: pytest.Config) -> None:
    # One thread: what is compared is the work, not how many cores a library takes for it.
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def device(request: pytest.FixtureRequest) -> str:
    chosen = request.config.getoption("--device")
    if chosen == "cuda" and not torch.cuda.is_available():
        pytest.fail("--device cuda, and torch sees no CUDA device")
    return chosen


def pytest_benchmark_generate_machine_info(config: pytest.Config) -> dict[str, Any]:
    """In place of the plugin's own, which lists every flag of the processor and no versions."""
    return describe(config.getoption("--device"))


def pytest_benchmark_update_json(config: pytest.Config, benchmarks: list[Any], output_json: dict[str, Any]) -> None:
    """Keep the statistics, leave out the single timings: megabytes that nobody reads."""
    for entry in output_json["benchmarks"]:
        entry["stats"].pop("data", None)
