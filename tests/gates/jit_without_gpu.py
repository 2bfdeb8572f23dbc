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

from gpubuf.kernels import _registry, config
from gpubuf.kernels.config import SPACES
from gpubuf.tuning._triton import empty_kernel
from gpubuf.tuning.operations import Job, Shapes, candidates, jobs
from gpubuf.tuning.timing import launched
from gpubuf.tuning.workloads import Bench
from tests.support.tuning_setup import first_of_each

SHAPES = Shapes((100_000,), (256, 4096))
SMALL = Shapes((100_000,), (256,))
CPU = torch.device("cpu")

#: What Triton asks before it compiles.
DRIVER = SimpleNamespace(
    get_current_target=lambda: GPUTarget("cuda", 90, 32),
    get_current_device=lambda: 0,
    get_current_stream=lambda device=None: 0,
    get_active_torch_device=lambda: CPU,
)


def bench(shapes: Shapes) -> Bench:
    return Bench(shapes, CPU, rotations=2, memory=2**20)


def corners(job: Job) -> list[Any]:
    """The candidate with the largest tile and the fewest warps for it, and the opposite."""

    def size(made: Any) -> tuple[int, int]:
        return SPACES[job.operation].tile(job.sizes, made), -made.num_warps

    tried = candidates(job)
    return [max(tried, key=size), min(tried, key=size)]


def main() -> None:
    run = triton.JITFunction.run

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        return run(self, *args, grid=grid, warmup=True, **options)

    driver.set_active(DRIVER)
    triton.JITFunction.run = compile_only
    # Not triton_on_cpu(): that is for the interpreter, which computes something.
    _registry._triton_on_cpu = True
    launches = {}
    for job in jobs(SHAPES):
        for workload in bench(SHAPES).workloads(job):
            with launched() as kernels:
                workload.calls[0]()
            launches[f"{job.operation}: {workload.name}"] = len(kernels)
    for job in first_of_each(SMALL):
        for made in corners(job):
            with config.using(**{job.operation: made}):
                for workload in bench(SMALL).workloads(job):
                    workload.calls[0]()
    empty_kernel[(1,)](torch.zeros(1))
    print(json.dumps(launches))


if __name__ == "__main__":
    main()
