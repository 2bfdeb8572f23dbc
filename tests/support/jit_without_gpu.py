"""Compiles, for sm_90, what `gpubuf tune` would launch on a GPU, through the launchers and Triton's own JIT.

Triton is told that there is such a GPU, and every launch stops after compiling. Run as ``python -m
tests.support.jit_without_gpu``, in a process without the interpreter: it prints the number of launches of a call of
every workload, and the kernels among which spills are looked for, as one line of JSON.
"""

from __future__ import annotations

import json
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from gpubuf.kernels import _registry
from gpubuf.tuning.shapes import Shapes, jobs
from gpubuf.tuning.timing import spills_of
from gpubuf.tuning.workloads import Bench

SHAPES = Shapes((100_000,), (256, 4096), envs=64)


class Driver:
    """What Triton asks before it compiles."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int | None = None) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")


def main() -> None:
    run, launched = triton.JITFunction.run, []

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        launched.append(self)
        return run(self, *args, grid=grid, warmup=True, **options)

    driver.set_active(Driver())
    triton.JITFunction.run = compile_only
    # Not triton_on_cpu(): that is for the interpreter, which computes something.
    _registry._triton_on_cpu = True
    launches = {}
    bench = Bench(SHAPES, torch.device("cpu"), rotations=2, memory=2**20)
    for job in jobs(SHAPES):
        for workload in bench.workloads(job, 32):
            before = len(launched)
            workload.calls[0]()
            launches[f"{job.operation}: {workload.name}"] = len(launched) - before
    # Kernels that were never loaded have no handle.
    print(json.dumps({"launches": launches, "kernels": sorted(spills_of({None}))}))


if __name__ == "__main__":
    main()
