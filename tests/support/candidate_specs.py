"""Specialisations that `gpubuf tune` would compile: ``SPECS`` are those at the corners, which the tests compile.

``python -c "from tests.support.candidate_specs import report; report()"`` compiles all of the quick ones for sm_90,
which takes minutes, and prints what fails or spills.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import triton.language as tl

from gpubuf.kernels import config
from gpubuf.kernels._spaces import SPACES, FanOut
from gpubuf.kernels.aot.compiler import AotSpec, compile_specs
from gpubuf.kernels.aot.specs import rows, sac, sum_tree, tanh_normal, td, trajectories
from gpubuf.kernels.td import L2, MEAN
from gpubuf.tuning.candidates import candidates
from gpubuf.tuning.shapes import Job, Shapes, jobs

ONE_PROGRAM = ("sum_tree_update_small_kernel", "sum_tree_mark_small_kernel")
ONE_EACH = (
    "sum_tree_claim_kernel",
    "sum_tree_top_kernel",
    "sum_tree_mark_kernel",
    "sum_tree_refresh_kernel",
    "sum_tree_refresh_leaves_kernel",
)


def named(specs: Iterable[AotSpec], *names: str) -> list[AotSpec]:
    return [spec for spec in specs if spec.kernel.partition(":")[2] in names]


def specs_of(job: Job, sizes: dict[str, int], steps: int, made: Any) -> list[AotSpec]:
    """What a candidate compiles."""
    fan_out = getattr(made, "fan_out", sizes.get("fan_out", 0))
    launch = {} if isinstance(made, FanOut) else {job.operation: made}
    flags = (False,)
    with config.using(**launch):
        match job.operation:
            case "rows_copy":
                specs = rows.specs_of(sizes["n_bytes"], 6, "i32")
                return named(specs, "rows_gather_kernel", "rows_sample_kernel", "rows_extend_kernel")
            case "sum_tree":
                specs = sum_tree.specs_of(fan_out, sum_tree.SIZES, ((False, False),))
                return named(specs, "sum_tree_draw_kernel", *ONE_PROGRAM[:1], *ONE_EACH)
            case "sum_tree_update":
                specs = sum_tree.specs_of(fan_out, sum_tree.SIZES, ((False, False),))
                return named(specs, *(ONE_PROGRAM if made.single_program else ONE_EACH))
            case "sum_tree_draw":
                specs = sum_tree.specs_of(fan_out, sum_tree.SIZES, ((False, False),))
                return named(specs, "sum_tree_draw_kernel")
            case "trajectories":
                readers = named(trajectories.readers(fan_out, 64, 4, False, flags), "trajectories_draw_kernel")
                return readers + trajectories.writers(fan_out, 1, steps, 1, False, flags)
            case "trajectories_update":
                return trajectories.writers(fan_out, sizes["n"], steps, sizes["envs"], False, flags)
            case "trajectories_draw":
                specs = trajectories.readers(fan_out, sizes["n"], sizes["slice_len"], False, flags)
                return named(specs, "trajectories_draw_kernel")
            case "tanh_normal_sample":
                return [tanh_normal.sample(sizes["n"], sizes["width"], "fp32", tl.float32, False)]
            case "tanh_normal_backward":
                return [tanh_normal.backward("fp32", tl.float32, False, True, True)]
            case "loss_rows":
                shared = (sizes["n"], "fp32", tl.float32)
                return [*td.family(*shared, L2, MEAN, True, False), *sac.family(*shared, MEAN, True, False)]
    raise ValueError(job.operation)


def with_fan_out(job: Job, fan_out: int = 32) -> dict[str, int]:
    """The sizes that the configuration of a job depends on."""
    sizes = dict(job.sizes) | ({"fan_out": fan_out} if job.tree else {})
    return {name: sizes[name] for name in SPACES[job.operation].sizes}


def corners(job: Job, sizes: dict[str, int], steps: int) -> list[Any]:
    """Of the quick candidates the one with the largest tile and the fewest warps for it, and the opposite."""
    tried = candidates(job.operation, sizes, steps)

    def tile(made: Any) -> int:
        return SPACES[job.operation].tile(sizes, made)

    most = max(tried, key=lambda made: (tile(made), -getattr(made, "num_warps", 0)))
    least = min(tried, key=lambda made: (tile(made), -getattr(made, "num_warps", 0)))
    return [most, least]


def unique(specs: Iterable[AotSpec]) -> list[AotSpec]:
    return list({repr(spec): spec for spec in specs}.values())


def first_of_each(shapes: Shapes) -> list[Job]:
    """One job of every operation."""
    return list({job.operation: job for job in reversed(jobs(shapes))}.values())


def every_quick_candidate(shapes: Shapes) -> list[AotSpec]:
    found = []
    for job in jobs(shapes):
        sizes, steps = with_fan_out(job), shapes.steps(job.capacity)
        for made in candidates(job.operation, sizes, steps):
            found += specs_of(job, sizes, steps, made)
    return unique(found)


def report() -> None:
    for spec in every_quick_candidate(Shapes()):
        (result,) = compile_specs([spec], "sm_90")
        if result.error or result.spill_bytes:
            print(f"{spec}: {result.spill_bytes} bytes spilled {result.error}", flush=True)


SHAPES = Shapes(batch_sizes=(256,))

#: What no configuration changes, or what takes long to compile and is like another.
LEFT_OUT = ("update_eligible", "finish", "temperature", "actor_loss", "top", "sum_tree_mark", "claim", "resolve")

SPECS = [
    # The one kernel that is not a candidate: it tells what a launch costs.
    AotSpec("gpubuf.tuning._triton:empty_kernel", {"x_ptr": "*fp32"}),
    *(
        spec
        for spec in unique(
            spec
            for job in first_of_each(SHAPES)
            for made in corners(job, with_fan_out(job), SHAPES.steps(job.capacity))
            for spec in specs_of(job, with_fan_out(job), SHAPES.steps(job.capacity), made)
        )
        if not any(name in spec.kernel for name in LEFT_OUT)
    ),
]
