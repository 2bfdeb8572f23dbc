"""Specialisations of the tanh-normal kernels, as their launchers choose them."""

import triton.language as tl

from gpubuf.kernels import config
from gpubuf.kernels.aot.compiler import AotSpec
from gpubuf.kernels.tanh_normal._launch import plan_sample

MODULE = "gpubuf.kernels.tanh_normal._triton:"
SIZES = {"width": "i32", "last": "i32"}
BOUNDS = {"low_ptr", "high_ptr"}


def sample(n: int, width: int, given: str, real: tl.dtype, bounds: bool) -> AotSpec:
    """The forward kernel for ``given`` loc and scale."""
    plan = plan_sample(n, width)
    pointers = dict.fromkeys(("loc_ptr", "scale_ptr", "low_ptr", "high_ptr", "action_ptr"), f"*{given}")
    computed = f"*{real.name}"
    return AotSpec(
        MODULE + "tanh_normal_sample_kernel",
        {**pointers, "noise_ptr": computed, "log_prob_ptr": computed, "n": "i32", **SIZES},
        {
            "REAL": real,
            "HAS_BOUNDS": bounds,
            "LOW": -1.0,
            "HIGH": 1.0,
            "BLOCK_ROWS": plan.block_rows,
            "BLOCK_WIDTH": plan.block_width,
        },
        plan.num_warps,
    )


def backward(given: str, real: tl.dtype, bounds: bool, action: bool, log_prob: bool) -> AotSpec:
    """The backward kernel."""
    names = ("grad_action_ptr", "loc_ptr", "scale_ptr", "low_ptr", "high_ptr", "grad_loc_ptr", "grad_scale_ptr")
    computed, chosen = f"*{real.name}", config.tanh_normal_backward(256 * 6)
    return AotSpec(
        MODULE + "tanh_normal_sample_backward_kernel",
        {
            **dict.fromkeys(names, f"*{given}"),
            "grad_log_prob_ptr": computed,
            "noise_ptr": computed,
            "total": "i32",
            **SIZES,
        },
        {
            "REAL": real,
            "HAS_GRAD_ACTION": action,
            "HAS_GRAD_LOG_PROB": log_prob,
            "HAS_BOUNDS": bounds,
            "LOW": -1.0,
            "HIGH": 1.0,
            "BLOCK": chosen.block,
        },
        chosen.num_warps,
    )


SPECS = [
    sample(256, 6, "fp32", tl.float32, False),
    sample(256, 6, "fp32", tl.float32, True),
    sample(256, 6, "bf16", tl.float32, False),
    sample(256, 6, "fp64", tl.float64, True),
    sample(3, 1, "fp32", tl.float32, False),
    sample(4096, 1000, "fp32", tl.float32, True),
    backward("fp32", tl.float32, False, True, True),
    backward("fp32", tl.float32, True, True, True),
    backward("fp32", tl.float32, False, True, False),
    backward("fp32", tl.float32, False, False, True),
    backward("bf16", tl.float32, False, True, True),
    backward("fp64", tl.float64, True, True, True),
]
