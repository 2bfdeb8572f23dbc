"""The facts that stand beside every number: device, versions, threads, load."""

from __future__ import annotations

import datetime
import importlib.metadata
import os
import platform
import re
from pathlib import Path
from typing import Any

import torch

from gpubuf.info import tuned_files

PACKAGES = (
    *("torch", "triton", "tensordict", "numba", "numpy", "gymnasium"),
    *("torchrl", "cpprb", "flashbax", "rlox", "jax", "jaxlib", "stable-baselines3"),
)
RESULTS = Path(__file__).parents[1] / "results"


def version(package: str) -> str | None:
    """The installed version, or None."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def versions() -> dict[str, str]:
    """The installed ones of :data:`PACKAGES`."""
    return {name: found for name in PACKAGES if (found := version(name)) is not None}


def add_versions(machine: dict[str, Any], environment: str, found: dict[str, str]) -> None:
    """Enter what an environment has that is measured in it, beside the machine that others have described."""
    environments = machine.setdefault("environments", {})
    if environment not in environments:
        environments[environment] = found
        known = {**environments[environment], **machine["versions"]}
        machine["versions"] = {name: known[name] for name in PACKAGES if name in known}


def device_name(kind: str) -> str:
    """The name of the GPU (``cuda``) or of the processor (``cpu``)."""
    if kind == "cuda":
        return torch.cuda.get_device_name()
    try:
        with open("/proc/cpuinfo") as lines:
            return next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.machine()


def describe(kind: str) -> dict[str, Any]:
    """The machine as it is now, for a file of results."""
    # Processors of one name differ in it, and by it in their products of matrices.
    found: dict[str, Any] = {"instructions": torch.backends.cpu.get_cpu_capability()}
    if kind != "cpu":
        found = {"tuned": any(file.state == "yes" for file in tuned_files({device_name(kind)}))}
    return {
        "device": {"kind": kind, "name": device_name(kind)},
        **found,
        "versions": versions(),
        "python_version": platform.python_version(),
        "threads": torch.get_num_threads(),
        "cores": os.cpu_count(),
        "load_before": round(os.getloadavg()[0], 2),
    }


def result_path(kind: str, subject: str = "", folder: Path = RESULTS) -> Path:
    """``benchmarks/results/nvidia-h200-2026-11-21.json``, ``.../training-cpu-epyc-2026-11-21.json`` and the like."""
    named = f"{subject} {'' if kind == 'cuda' else kind} {device_name(kind)}"
    slug = re.sub(r"[^a-z0-9]+", "-", named.lower()).strip("-")
    return folder / f"{slug}-{datetime.date.today().isoformat()}.json"
