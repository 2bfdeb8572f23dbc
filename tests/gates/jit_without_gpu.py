"""Compiles, for sm_90, the kernels that `gpubuf tune` would launch, through the launchers and Triton's own JIT.

Triton is told that there is such a GPU, and every launch stops after compiling. Run as ``python -m
tests.gates.jit_without_gpu``, in a process without the interpreter: it prints the number of launches of a call of
every workload, by rule, as one line of JSON. The candidates at the corners are compiled as well.
"""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from gpubuf.commands.tune import ROW_OF_MUJOCO
from gpubuf.kernels import _registry, config
from gpubuf.kernels.config import SPACES
from gpubuf.planning import parse_entry
from gpubuf.tuning.workloads import Job, Workload, candidates, jobs, workloads

ROW = [parse_entry(text) for text in ROW_OF_MUJOCO]
CPU = torch.device("cpu")

#: What Triton asks before it compiles.
DRIVER = SimpleNamespace(
    get_current_target=lambda: GPUTarget("cuda", 90, 32),
    get_current_device=lambda: 0,
    get_current_stream=lambda device=None: 0,
    get_active_torch_device=lambda: CPU,
)


def calls(job: Job) -> list[Workload]:
    return workloads(job, ROW, CPU, memory=2**20, rotations=2)


def corners(job: Job) -> list[Any]:
    """The candidate with the largest tile and the fewest warps for it, and the opposite."""

    def size(made: Any) -> tuple[int, int]:
        return SPACES[job.operation].tile(job.sizes, made), -made.num_warps

    tried = candidates(job)
    return [max(tried, key=size), min(tried, key=size)]


def main() -> None:
    run = triton.JITFunction.run

    launched = 0

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        nonlocal launched
        launched += 1
        return run(self, *args, grid=grid, warmup=True, **options)

    driver.set_active(DRIVER)
    triton.JITFunction.run = compile_only
    # Not triton_on_cpu(): that is for the interpreter, which computes something.
    _registry._triton_on_cpu = True
    launches = {}
    for job in jobs([100_000], [256, 4096], ROW):
        for workload in calls(job):
            before = launched
            workload.calls[0]()
            launches[f"{job.operation}: {workload.name}"] = launched - before
    for job in jobs([100_000], [256], ROW):
        for made in corners(job):
            with config.using(**{job.operation: made}):
                for workload in calls(job):
                    workload.calls[0]()
    print(json.dumps(launches))


if __name__ == "__main__":
    main()
