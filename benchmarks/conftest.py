"""What every benchmark run shares: the device, one thread, and the versions beside the numbers."""

from __future__ import annotations

import importlib.metadata
import os
import platform
from typing import Any

import pytest
import torch

PACKAGES = ("gpubuf", "torch", "triton", "tensordict", "numba", "numpy", "torchrl", "cpprb")


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


def version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def device_name(device: str) -> str:
    """The GPU's name, or the processor's."""
    if device == "cuda":
        return torch.cuda.get_device_name()
    try:
        with open("/proc/cpuinfo") as lines:
            return next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.machine()


def pytest_benchmark_update_machine_info(config: pytest.Config, machine_info: dict[str, Any]) -> None:
    device = config.getoption("--device")
    machine_info["device"] = {"kind": device, "name": device_name(device)}
    machine_info["versions"] = {name: found for name in PACKAGES if (found := version(name)) is not None}
    machine_info["threads"] = torch.get_num_threads()
    machine_info["cores"] = os.cpu_count()
    machine_info["load_before"] = os.getloadavg()[0]
    machine_info.pop("node", None)
    # cpuinfo lists every flag of the processor
    machine_info["cpu"] = {"brand_raw": device_name("cpu")}


def pytest_benchmark_update_json(config: pytest.Config, benchmarks: list[Any], output_json: dict[str, Any]) -> None:
    """Keep the statistics, leave out the single timings: megabytes that nobody reads."""
    for entry in output_json["benchmarks"]:
        entry["stats"].pop("data", None)
